// Turns of UCX's progress without going back to the interpreter after each: a message through shared memory comes in
// pieces of 8 KiB, and taking the interpreter's lock again costs a good part of what copying sixteen of them does.

#define _GNU_SOURCE
#include <sched.h>
#include <stdint.h>
#include <time.h>

typedef unsigned (*progress_fn)(void *worker);

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

// Lets UCX work until there is nothing to do, but `turns` times at most. How often there was something.
int baton_ucp_progress(progress_fn progress, void *worker, int turns) {
    int done = 0;
    while (done < turns && progress(worker)) done++;
    return done;
}

// Lets UCX look for work for at most so long; whether it found some. The processor is offered to others between two
// looks: where both ends of a message share one, nothing arrives until this end lets go of it.
int baton_ucp_spin(progress_fn progress, void *worker, int64_t spin_ns) {
    int64_t until = now_ns() + spin_ns;
    do {
        if (progress(worker)) return 1;
        sched_yield();
    } while (now_ns() < until);
    return 0;
}
