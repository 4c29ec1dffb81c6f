/* The hot part of the prefix index: see router/routing/table.py, and the same in Python in plain_table.py. The records are those
 * of table.py. */
#include <stdint.h>

#define WIDTH 8
#define ROW 24 /* numbers from one bucket's to the next one's in the same array */
#define CROWDED 5
#define AHEAD 12
#define STRIDE 16
#define DRAWN 61 /* bits of a fingerprint from here on name no bucket */

typedef struct {
    uint64_t *fingerprints; /* [buckets, WIDTH], every ROW numbers */
    uint64_t *const *sets;  /* [words] of the same: the first 64 columns of all sets, the next 64, and so on */
    uint64_t buckets;       /* those before the splitting that is under way, a power of two, and as many as were split */
    uint64_t narrow;        /* that power less 1 */
    int64_t words;
    int64_t used;           /* places that hold a fingerprint */
    int64_t limit;          /* so many may be used before the caller has to grow the table */
    int64_t most;           /* so many may be used at all */
    int64_t displaced;      /* fingerprints that made room for others, or found none */
} Table;

/* The number of a place: where a fingerprint stands, and each word of its set. */
typedef int64_t Place;
#define NOWHERE (-1)

static inline uint64_t bucket(const Table *t, uint64_t name) {
    uint64_t number = name & (2 * t->narrow + 1);
    return number < t->buckets ? number : number & t->narrow;
}

static inline Place place_in(const Table *t, uint64_t bucket, uint64_t fingerprint) {
    const uint64_t *row = t->fingerprints + bucket * ROW;
    for (int at = 0; at < WIDTH; at++)
        if (row[at] == fingerprint) return (Place)(bucket * ROW) + at;
    return NOWHERE;
}

static inline Place place_of(const Table *t, uint64_t fingerprint) {
    Place place = place_in(t, bucket(t, fingerprint), fingerprint);
    return place != NOWHERE ? place : place_in(t, bucket(t, fingerprint >> 32), fingerprint);
}

/* Those of `columns`, a word of them, that are in a place's set. Does not look where there are none. */
static inline uint64_t held_by(const Table *t, Place place, int64_t word, uint64_t columns) {
    return place == NOWHERE || !columns ? 0 : columns & t->sets[word][place];
}

static inline int filled(const Table *t, uint64_t bucket) {
    int count = 0;
    for (int at = 0; at < WIDTH; at++) count += t->fingerprints[bucket * ROW + (uint64_t)at] != 0;
    return count;
}

static Place empty_place(const Table *t, uint64_t fingerprint) {
    uint64_t chosen = bucket(t, fingerprint), other = bucket(t, fingerprint >> 32);
    int count = filled(t, chosen);
    if (count >= CROWDED && filled(t, other) < count) chosen = other;
    return place_in(t, chosen, 0);
}

/* The place in a fingerprint's first bucket whose block has the fewest holders, emptied for it; of several with as few, one as good
 * as drawn. Nowhere if that bucket is empty. */
static Place displaced_place(Table *t, uint64_t fingerprint) {
    uint64_t first = bucket(t, fingerprint) * ROW;
    int holders[WIDTH] = {0}, fewest = 0;
    for (int64_t word = 0; word < t->words; word++)
        for (int at = 0; at < WIDTH; at++) holders[at] += __builtin_popcountll(t->sets[word][first + (uint64_t)at]);
    Place place = NOWHERE;
    for (uint64_t turn = 0; turn < WIDTH; turn++) {
        uint64_t at = ((fingerprint >> DRAWN) + turn) % WIDTH;
        if (!holders[at] || (place != NOWHERE && holders[at] >= fewest)) continue;
        fewest = holders[at];
        place = (Place)(first + at);
    }
    if (place == NOWHERE) return NOWHERE;
    for (int64_t word = 0; word < t->words; word++) t->sets[word][place] = 0;
    t->fingerprints[place] = 0;
    t->used--;
    return place;
}

static inline void note(uint64_t columns, int64_t word, int64_t depth, int32_t *depths) {
    for (; columns; columns &= columns - 1) {
        int32_t *known = depths + word * 64 + __builtin_ctzll(columns);
        if (*known < depth) *known = (int32_t)depth;
    }
}

/* A chain, or those of its fingerprints that stand at `places` if that is given: so many in all. */
typedef struct {
    const uint64_t *fingerprints;
    const int64_t *places;
    int64_t count;
} Chain;

static inline uint64_t fingerprint_at(Chain chain, int64_t at) {
    return chain.fingerprints[chain.places ? chain.places[at] : at];
}

/* The first bucket of the fingerprint at a position, with some words of its sets. */
static inline void prefetch(const Table *t, Chain chain, int64_t at, int64_t first_word, int64_t end_word) {
    if (at >= chain.count) return;
    uint64_t first = bucket(t, fingerprint_at(chain, at)) * ROW;
    __builtin_prefetch(t->fingerprints + first);
    for (int64_t word = first_word; word < end_word; word++) __builtin_prefetch(t->sets[word] + first);
}

/* Between positions `low` and `high`, whose sets are known, some columns end: finds where, by halves. */
static void split(const Table *t, Chain chain, int64_t low, int64_t high, const uint64_t *at_low,
                  const uint64_t *at_high, int32_t *depths) {
    uint64_t ends = 0;
    for (int64_t word = 0; word < t->words; word++) ends |= at_low[word] & ~at_high[word];
    if (!ends) return;
    if (high - low == 1) {
        int64_t depth = chain.places && high ? chain.places[high - 1] + 1 : high;
        for (int64_t word = 0; word < t->words; word++) note(at_low[word] & ~at_high[word], word, depth, depths);
        return;
    }
    int64_t middle = low + (high - low) / 2;
    Place place = place_of(t, fingerprint_at(chain, middle));
    uint64_t here[t->words];
    for (int64_t word = 0; word < t->words; word++) here[word] = held_by(t, place, word, at_low[word]);
    split(t, chain, low, middle, at_low, here, depths);
    split(t, chain, middle, high, here, at_high, depths);
}

/* Raises `depths` to how many leading fingerprints each column of `live` holds, where holding one means to hold those before it.
 * Looks at a number of fingerprints that grows with the logarithm of theirs, for each depth that there is. */
static void whole(const Table *t, Chain chain, const uint64_t *live, int32_t *depths) {
    uint64_t none[t->words];
    for (int64_t word = 0; word < t->words; word++) none[word] = 0;
    split(t, chain, -1, chain.count, live, none, depths);
}

/* The columns `ends` hold the fingerprint before position `at` and not the one at `high`: finds where, one fingerprint after the other. */
static void follow(const Table *t, Chain chain, int64_t at, int64_t high, uint64_t *ends, int32_t *depths) {
    for (uint64_t left = 1; left && at < high; at++) {
        Place place = place_of(t, chain.fingerprints[at]);
        left = 0;
        for (int64_t word = 0; word < t->words; word++) {
            uint64_t here = held_by(t, place, word, ends[word]);
            note(ends[word] & ~here, word, at, depths);
            left |= ends[word] = here;
        }
    }
    for (int64_t word = 0; word < t->words; word++) note(ends[word], word, high, depths);
}

/* The same where that does not follow: looks at every 16th fingerprint until nobody holds more, and at each where columns end. A hole
 * between two that are looked at may be passed over. */
static void ragged(const Table *t, Chain chain, const uint64_t *live, int32_t *depths) {
    uint64_t at_low[t->words], ends[t->words];
    for (int64_t word = 0; word < t->words; word++) at_low[word] = live[word];
    for (int64_t at = 0; at < AHEAD; at++) prefetch(t, chain, (at + 1) * STRIDE - 1, 0, t->words);
    uint64_t left = 1;
    for (int64_t low = -1; left; low += STRIDE) {
        int64_t high = low + STRIDE < chain.count ? low + STRIDE : chain.count;
        Place place = high < chain.count ? place_of(t, chain.fingerprints[high]) : NOWHERE;
        prefetch(t, chain, high + AHEAD * STRIDE, 0, t->words);
        uint64_t some = left = 0;
        for (int64_t word = 0; word < t->words; word++) {
            uint64_t here = held_by(t, place, word, at_low[word]);
            some |= ends[word] = at_low[word] & ~here;
            left |= at_low[word] = here;
        }
        if (some) follow(t, chain, low + 1, high, ends, depths);
    }
}

/* Where a lookup finds who holds what. */
typedef struct {
    const Table *reports, *notes[2];
    const uint64_t *live, *whole, *ragged; /* sets of columns; `ragged` may be null */
    const int64_t *slots;                  /* by column */
} Sources;

/* Writes to `held`, by slot, how much of a chain each holder has reported, or is expected to have by the notes that stand
 * at the places `noted`, if that is given; a block counts for `unit`. Who has none is left out. */
void baton_held(const Sources *s, const uint64_t *fingerprints, int64_t count, const int64_t *noted, int64_t num_noted,
                int64_t unit, int64_t *held) {
    int64_t columns = 64 * s->reports->words;
    int32_t depths[columns];
    for (int64_t column = 0; column < columns; column++) depths[column] = 0;
    whole(s->reports, (Chain){fingerprints, 0, count}, s->whole, depths);
    if (s->ragged) ragged(s->reports, (Chain){fingerprints, 0, count}, s->ragged, depths);
    for (int table = 0; noted && table < 2; table++)
        if (s->notes[table]->used) whole(s->notes[table], (Chain){fingerprints, noted, num_noted}, s->live, depths);
    for (int64_t column = 0; column < columns; column++)
        if (depths[column]) held[s->slots[column]] = depths[column] * unit;
}

/* Adds a column to the sets of a chain's fingerprints, or of those at the places `noted` (`count` counts these then), from the one
 * numbered `begin` on. Returns `count`, or the first one for which the table has to grow. One that is as large as it may be gives up
 * other fingerprints instead. */
int64_t baton_table_add(Table *t, const uint64_t *fingerprints, const int64_t *noted, int64_t begin, int64_t count,
                        int64_t column) {
    Chain chain = {fingerprints, noted, count};
    int64_t word = column / 64;
    for (int64_t at = begin; at < count; at++) {
        prefetch(t, chain, at + AHEAD, word, word + 1);
        uint64_t fingerprint = fingerprint_at(chain, at);
        Place place = place_of(t, fingerprint);
        if (place == NOWHERE) {
            if (t->used >= t->limit && t->limit < t->most) return at;
            if (t->used < t->limit) place = empty_place(t, fingerprint);
            if (place == NOWHERE) {
                t->displaced++;
                place = displaced_place(t, fingerprint);
            }
            if (place == NOWHERE) continue;
            t->fingerprints[place] = fingerprint;
            t->used++;
        }
        t->sets[word][place] |= 1ull << column % 64;
    }
    return count;
}

/* Forgets a fingerprint that no column has. */
static inline void forget_empty(Table *t, Place place) {
    uint64_t left = 0;
    for (int64_t word = 0; word < t->words; word++) left |= t->sets[word][place];
    if (left) return;
    t->fingerprints[place] = 0;
    t->used--;
}

/* Takes a column out of the sets of all fingerprints; empty sets are forgotten. */
void baton_table_discard(Table *t, const uint64_t *fingerprints, int64_t count, int64_t column) {
    Chain chain = {fingerprints, 0, count};
    for (int64_t at = 0; at < count; at++) {
        prefetch(t, chain, at + AHEAD, 0, t->words);
        Place place = place_of(t, fingerprints[at]);
        if (place == NOWHERE) continue;
        t->sets[column / 64][place] &= ~(1ull << column % 64);
        forget_empty(t, place);
    }
}

/* Takes the columns `gone` out of all sets in the buckets `first` to `last`; empty sets are forgotten. Words without any of these
 * columns are looked at only where another has become empty. */
void baton_table_clear(Table *t, const uint64_t *gone, uint64_t first, uint64_t last) {
    for (uint64_t number = first * ROW; number < last * ROW; number += ROW) {
        unsigned emptied = 0;
        for (int64_t word = 0; word < t->words; word++) {
            if (!gone[word]) continue;
            uint64_t *row = t->sets[word] + number, found = 0;
            for (int at = 0; at < WIDTH; at++) found |= row[at] & gone[word];
            if (!found) continue;
            for (int at = 0; at < WIDTH; at++) {
                if (!(row[at] & gone[word])) continue;
                row[at] &= ~gone[word];
                if (!row[at]) emptied |= 1u << at;
            }
        }
        for (; emptied; emptied &= emptied - 1) forget_empty(t, (Place)number + __builtin_ctz(emptied));
    }
}

/* Buckets `first` to `last` share their entries with those `before` places further on, by one more bit of what named each there. */
void baton_table_split(Table *t, uint64_t before, uint64_t first, uint64_t last) {
    for (uint64_t number = first; number < last; number++) {
        for (uint64_t here = number * ROW; here < number * ROW + WIDTH; here++) {
            uint64_t fingerprint = t->fingerprints[here], there = here + before * ROW;
            uint64_t name = (fingerprint & (before - 1)) == number ? fingerprint : fingerprint >> 32;
            if (!(name & before)) continue;
            t->fingerprints[there] = fingerprint;
            t->fingerprints[here] = 0;
            for (int64_t word = 0; word < t->words; word++) {
                t->sets[word][there] = t->sets[word][here];
                t->sets[word][here] = 0;
            }
        }
    }
}
