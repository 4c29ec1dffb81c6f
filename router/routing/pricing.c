/* The costs and the choice of router/routing/predictive.py, to the last bit: what they mean stands there. The records are those
 * of router/routing/view.py (WorkerRecord), forecast.py (ForecastRecord, LinkRecord) and pricing.py. */
#include <stdbool.h>
#include <stdint.h>

#define NEVER_S 1e6
#define RESOLUTION_S 0.001
#define SHORTLIST 8

typedef struct {
    double bytes_per_s, latency_s;
} Link;

typedef struct {
    double prompt_s, token_s, attention_s; /* per prompt; per token computed; per pair of one and one that it attends to */
} PrefillCosts;

typedef struct {
    double step_s, sequence_s, context_s; /* per step; per sequence; per token of context */
} StepCosts;

typedef struct {
    double fetch_s, token_s; /* per prompt of which something is fetched; per token fetched */
} FetchCosts;

typedef struct {
    const Link *const *links; /* by slot; null where none has been used */
    const Link *fleet_link;   /* what is known of all */
    const PrefillCosts *prefill; /* these three are all workers' until the worker has been measured itself */
    const StepCosts *step;
    const FetchCosts *fetch;
    int64_t num_links;
    double ready_s, behind_s;
} Forecast;

typedef struct {
    const Forecast *forecast;
    double progress_s, heard_s, kv_token_bytes;
    int64_t slot, pool_slot, legs, decode_sequences, decode_tokens, foreign_prefill_tokens, foreign_sequences;
    int64_t used_tokens, reported_context_tokens, capacity_tokens, max_sequences, kv_order;
    bool can_prefill;
} Worker;

typedef struct {
    const int64_t *held; /* by slot */
    int64_t slots, tokens, samples, output_tokens;
    double now_s;
} Demand;

/* Whole milliseconds, legs, chance: by these entries are ordered. */
typedef struct {
    int64_t milliseconds, legs;
    double chance, cost_s;
    int64_t at;
} Priced;

typedef struct {
    Priced *best;
    int64_t count, most;
    uint64_t seed;
} Shortlist;

static double chance(uint64_t *seed) { /* splitmix64 */
    uint64_t z = *seed += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

static bool before(const Priced *a, const Priced *b) {
    if (a->milliseconds != b->milliseconds) return a->milliseconds < b->milliseconds;
    if (a->legs != b->legs) return a->legs < b->legs;
    return a->chance < b->chance;
}

static void enter(Shortlist *list, int64_t at, int64_t legs, double cost_s) {
    Priced entry = {(int64_t)(1000.0 * cost_s), legs, chance(&list->seed), cost_s, at};
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
    return larger(f->ready_s - d->now_s, f->behind_s) + f->prefill->token_s * (double)w->foreign_prefill_tokens;
}

static double computing_s(const Worker *w, const Demand *d, int64_t known) {
    const PrefillCosts *costs = w->forecast->prefill;
    double held = (double)known, fresh = (double)(d->tokens - known);
    double pairs = fresh * (held + 0.5 * fresh);
    return costs->prompt_s + costs->token_s * fresh + costs->attention_s * pairs;
}

/* How a worker comes by the KV of a prompt. */
typedef struct {
    double fetch_s, compute_s;
    int64_t tokens; /* computed */
} PrefillWork;

static PrefillWork prefill_work(const Worker *w, const Demand *d) {
    const FetchCosts *fetch = w->forecast->fetch;
    int64_t held = cached(w, d);
    PrefillWork all = {0.0, computing_s(w, d, held), d->tokens - held};
    if (w->pool_slot < 0 || w->pool_slot >= d->slots) return all;
    int64_t pooled = d->held[w->pool_slot], last = d->tokens - 1;
    if (pooled > last) pooled = last;
    if (pooled <= held) return all;
    PrefillWork rest = {fetch->fetch_s + fetch->token_s * (double)(pooled - held), computing_s(w, d, pooled), d->tokens - pooled};
    return rest.fetch_s + rest.compute_s < all.compute_s ? rest : all;
}

static double prefill_s(const Worker *w, const Demand *d) {
    PrefillWork work = prefill_work(w, d);
    double busy = work.fetch_s + work.compute_s;
    return queue_s(w, d) + busy + busy * (double)sequences(w);
}

static double tbt_s(const Worker *w, const Demand *d) {
    const StepCosts *costs = w->forecast->step;
    int64_t context = w->decode_tokens > w->reported_context_tokens ? w->decode_tokens : w->reported_context_tokens;
    int64_t joined = sequences(w) + d->samples;
    return costs->step_s + costs->sequence_s * (double)joined + costs->context_s * (double)(context + d->tokens);
}

static double room_s(const Worker *w, const Demand *d) {
    int64_t used = w->decode_tokens > w->used_tokens ? w->decode_tokens : w->used_tokens;
    int64_t lacking = used + d->tokens - cached(w, d) - w->capacity_tokens;
    int64_t crowd = sequences(w) + d->samples - w->max_sequences;
    if (lacking <= 0 && crowd <= 0) return 0.0;
    if (!sequences(w) || !used) return NEVER_S;
    double share = larger((double)lacking / (double)used, (double)crowd / (double)sequences(w));
    return (double)d->output_tokens * tbt_s(w, d) * share;
}

static double decode_s(const Worker *w, const Demand *d) {
    return (double)d->output_tokens * tbt_s(w, d) + room_s(w, d);
}

static double unhidden_s(const Worker *p, const Worker *decode, const Demand *d) {
    if (p == decode) return 0.0;
    const Forecast *f = p->forecast;
    const Link *link = decode->slot < f->num_links ? f->links[decode->slot] : 0;
    if (!link) link = f->fleet_link;
    double size_bytes = (double)(d->tokens - cached(decode, d)) * decode->kv_token_bytes;
    PrefillWork work = prefill_work(p, d);
    return link->latency_s + larger(0.0, size_bytes / link->bytes_per_s - (work.fetch_s + work.compute_s));
}

/* Whether a worker may compute the prompt itself: `LocalPrefill`. */
static bool may_do_both(const Worker *w, const Demand *d, int64_t max_tokens, double max_stall_s) {
    if (w->can_prefill) return true;
    PrefillWork work = prefill_work(w, d);
    if (work.tokens > max_tokens) return false;
    return sequences(w) == 0 || queue_s(w, d) + (work.fetch_s + work.compute_s) <= max_stall_s;
}

typedef struct {
    const Worker *const *workers;
    int64_t count;
} Side;

/* The workers of one layout by what they can do, and the bounds for doing both. */
typedef struct {
    Side prefillers, receivers, decoders;
    int64_t max_tokens;
    double max_stall_s;
} Candidates;

/* One way to run a request: its rank, its workers (-1: there is no such way), and all parts of its cost as in `Predicted`. */
typedef struct {
    int64_t milliseconds, legs;
    double chance;
    int64_t prefill, decode;
    double queue_s, fetch_s, prefill_s, unhidden_s, room_s, tbt_s, harm_s;
} Option;

typedef struct {
    Priced prefillers[SHORTLIST], receivers[SHORTLIST], singles[SHORTLIST];
    int64_t num_prefillers, num_receivers, num_singles;
    Option pair, single;
} Cheapest;

static void predict(Option *option, const Worker *p, const Worker *decode, const Demand *d) {
    PrefillWork work = prefill_work(p, d);
    option->queue_s = queue_s(p, d);
    option->fetch_s = work.fetch_s;
    option->prefill_s = work.compute_s;
    option->unhidden_s = unhidden_s(p, decode, d);
    option->room_s = room_s(decode, d);
    option->tbt_s = tbt_s(decode, d);
    option->harm_s = (work.fetch_s + work.compute_s) * (double)sequences(p);
}

static bool outranks(const Option *a, const Option *b) {
    if (a->milliseconds != b->milliseconds) return a->milliseconds < b->milliseconds;
    if (a->legs != b->legs) return a->legs < b->legs;
    return a->chance < b->chance;
}

static bool may_hand_off(const Worker *p, const Worker *decode) {
    return p->kv_order <= decode->kv_order || !decode->kv_order;
}

/* The best pair of those on the shortlists, links included. */
static void best_pair(const Candidates *c, const Demand *d, Cheapest *w) {
    double bound_s = 1.0 / 0.0;
    w->pair.prefill = -1;
    for (int64_t i = 0; i < w->num_prefillers; i++) {
        const Priced *ours = &w->prefillers[i];
        const Worker *p = c->prefillers.workers[ours->at];
        for (int64_t j = 0; j < w->num_receivers; j++) {
            const Priced *theirs = &w->receivers[j];
            const Worker *decode = c->receivers.workers[theirs->at];
            if (ours->cost_s + theirs->cost_s > bound_s) break;
            if (p == decode || !may_hand_off(p, decode)) continue;
            double cost_s = ours->cost_s + theirs->cost_s + unhidden_s(p, decode, d);
            Option option = {(int64_t)(cost_s / RESOLUTION_S), ours->legs + theirs->legs, theirs->chance,
                             ours->at, theirs->at, 0, 0, 0, 0, 0, 0, 0};
            if (w->pair.prefill >= 0 && !outranks(&option, &w->pair)) continue;
            w->pair = option;
            bound_s = cost_s + RESOLUTION_S;
        }
    }
    if (w->pair.prefill >= 0)
        predict(&w->pair, c->prefillers.workers[w->pair.prefill], c->receivers.workers[w->pair.decode], d);
}

/* All of a decision among the workers of one layout. What is asked stands between the workers and the seed, number by number:
 * for so few that is quicker than a record of them. */
void baton_cheapest(const Candidates *c, const int64_t *held, int64_t slots, int64_t tokens, int64_t samples,
                    int64_t output_tokens, double now_s, uint64_t seed, Cheapest *w) {
    const Demand demand = {held, slots, tokens, samples, output_tokens, now_s}, *d = &demand;
    Shortlist list = {w->prefillers, 0, SHORTLIST, seed};
    for (int64_t at = 0; at < c->prefillers.count; at++) {
        const Worker *p = c->prefillers.workers[at];
        enter(&list, at, p->legs, prefill_s(p, d));
    }
    w->num_prefillers = list.count;
    list = (Shortlist){w->receivers, 0, SHORTLIST, list.seed};
    for (int64_t at = 0; at < c->receivers.count; at++) {
        const Worker *receiver = c->receivers.workers[at];
        enter(&list, at, receiver->legs, decode_s(receiver, d));
    }
    w->num_receivers = list.count;
    list = (Shortlist){w->singles, 0, SHORTLIST, list.seed};
    for (int64_t at = 0; at < c->decoders.count; at++) {
        const Worker *both = c->decoders.workers[at];
        if (may_do_both(both, d, c->max_tokens, c->max_stall_s))
            enter(&list, at, both->legs, prefill_s(both, d) + decode_s(both, d));
    }
    w->num_singles = list.count;
    best_pair(c, d, w);
    w->single.prefill = -1;
    if (!w->num_singles) return;
    const Priced *best = &w->singles[0];
    const Worker *single = c->decoders.workers[best->at];
    w->single = (Option){(int64_t)(best->cost_s / RESOLUTION_S), best->legs, best->chance, best->at, best->at,
                         0, 0, 0, 0, 0, 0, 0};
    predict(&w->single, single, single, d);
}
