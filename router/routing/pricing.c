/* What router/routing/costs.py computes, for many workers at once and to the last bit: there stands what it means. The records
 * are those of router/routing/numbers.py. */
#include <stdbool.h>
#include <stdint.h>

#define NEVER_S 1e6

typedef struct {
    double prompt_s, token_s, attention_s, step_s, sequence_s, context_s, ready_s, behind_s;
} Forecast;

typedef struct {
    const Forecast *forecast;
    double progress_s, heard_s;
    int64_t slot, legs, decode_sequences, decode_tokens, foreign_prefill_tokens, foreign_sequences;
    int64_t used_tokens, reported_context_tokens, capacity_tokens, max_sequences;
    bool draining, can_prefill;
} Worker;

typedef struct {
    const int64_t *held; /* by slot */
    int64_t tokens, samples, output_tokens;
    double now_s;
} Demand;

/* Whole milliseconds, legs, chance: by these entries are ordered. */
typedef struct {
    int64_t milliseconds, legs;
    double chance, cost_s;
    int64_t at;
} Entry;

typedef struct {
    Entry *best;
    int64_t count, most;
    uint64_t seed;
} Shortlist;

static double chance(uint64_t *seed) { /* splitmix64 */
    uint64_t z = *seed += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

static bool before(const Entry *a, const Entry *b) {
    if (a->milliseconds != b->milliseconds) return a->milliseconds < b->milliseconds;
    if (a->legs != b->legs) return a->legs < b->legs;
    return a->chance < b->chance;
}

static void enter(Shortlist *list, int64_t at, int64_t legs, double cost_s) {
    Entry entry = {(int64_t)(1000.0 * cost_s), legs, chance(&list->seed), cost_s, at};
    if (list->count == list->most) {
        if (!before(&entry, &list->best[list->most - 1])) return;
        list->count--;
    }
    int64_t place = list->count++;
    for (; place > 0 && before(&entry, &list->best[place - 1]); place--) list->best[place] = list->best[place - 1];
    list->best[place] = entry;
}

static int64_t cached(const Worker *w, const Demand *d) {
    int64_t held = d->held[w->slot], last = d->tokens - 1;
    return held < last ? held : last;
}

static double larger(double a, double b) { return b > a ? b : a; }

static int64_t sequences(const Worker *w) { return w->decode_sequences + w->foreign_sequences; }

static double queue_s(const Worker *w, const Demand *d) {
    const Forecast *f = w->forecast;
    return larger(f->ready_s - d->now_s, f->behind_s) + f->token_s * (double)w->foreign_prefill_tokens;
}

static double computing_s(const Worker *w, const Demand *d) {
    const Forecast *f = w->forecast;
    double held = (double)cached(w, d), fresh = (double)(d->tokens - cached(w, d));
    double pairs = fresh * (held + 0.5 * fresh);
    return f->prompt_s + f->token_s * fresh + f->attention_s * pairs;
}

static double prefill_s(const Worker *w, const Demand *d) {
    double computing = computing_s(w, d);
    return queue_s(w, d) + computing + computing * (double)sequences(w);
}

static double decode_s(const Worker *w, const Demand *d) {
    const Forecast *f = w->forecast;
    int64_t context = w->decode_tokens > w->reported_context_tokens ? w->decode_tokens : w->reported_context_tokens;
    int64_t used = w->decode_tokens > w->used_tokens ? w->decode_tokens : w->used_tokens;
    int64_t joined = sequences(w) + d->samples;
    double tbt = f->step_s + f->sequence_s * (double)joined + f->context_s * (double)(context + d->tokens);
    double lasting = (double)d->output_tokens * tbt;
    int64_t lacking = used + d->tokens - cached(w, d) - w->capacity_tokens, crowd = joined - w->max_sequences;
    if (lacking <= 0 && crowd <= 0) return lasting;
    if (!sequences(w) || !used) return lasting + NEVER_S;
    return lasting + lasting * larger((double)lacking / (double)used, (double)crowd / (double)sequences(w));
}

/* Whether a worker may compute the prompt itself: router/routing/local.py. */
static bool may_do_both(const Worker *w, const Demand *d, int64_t max_tokens, double max_stall_s) {
    if (w->can_prefill) return true;
    if (d->tokens - cached(w, d) > max_tokens) return false;
    return sequences(w) == 0 || queue_s(w, d) + computing_s(w, d) <= max_stall_s;
}

int64_t baton_price_prefill(const Worker *const *workers, int64_t count, const Demand *d, uint64_t seed, Entry *best,
                            int64_t most) {
    Shortlist list = {best, 0, most, seed};
    for (int64_t at = 0; at < count; at++) enter(&list, at, workers[at]->legs, prefill_s(workers[at], d));
    return list.count;
}

int64_t baton_price_decode(const Worker *const *workers, int64_t count, const Demand *d, uint64_t seed, Entry *best,
                           int64_t most) {
    Shortlist list = {best, 0, most, seed};
    for (int64_t at = 0; at < count; at++) enter(&list, at, workers[at]->legs, decode_s(workers[at], d));
    return list.count;
}

int64_t baton_price_both(const Worker *const *workers, int64_t count, const Demand *d, uint64_t seed, Entry *best,
                         int64_t most, int64_t max_tokens, double max_stall_s) {
    Shortlist list = {best, 0, most, seed};
    for (int64_t at = 0; at < count; at++)
        if (may_do_both(workers[at], d, max_tokens, max_stall_s))
            enter(&list, at, workers[at]->legs, prefill_s(workers[at], d) + decode_s(workers[at], d));
    return list.count;
}

/* Whether all may be given work, as far as their numbers tell: `ClusterView.usable`. */
bool baton_all_ready(const Worker *const *workers, int64_t count, double heard_s, double moved_s) {
    for (int64_t at = 0; at < count; at++) {
        const Worker *w = workers[at];
        if (w->draining || !(w->heard_s >= heard_s) || !(w->legs == 0 || w->progress_s >= moved_s)) return false;
    }
    return true;
}
