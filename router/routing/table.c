/* The hot part of the prefix index: see router/routing/table.py, and the same in Python in plain_table.py. The records are those
 * of memory.py and sources.py. */
#include <stdint.h>

#define WIDTH 8
#define CROWDED 5
#define AHEAD 12
#define LINE 8 /* numbers in a cache line */
#define STRIDE 16

typedef struct {
    uint64_t *cells;     /* [buckets + 1, WIDTH * (1 + words)]: a bucket's fingerprints, then its sets */
    uint64_t buckets;    /* those before the splitting that is under way, a power of two, and as many as were split */
    uint64_t narrow;     /* that power less 1 */
    int64_t words;
    int64_t used;        /* places that hold a fingerprint */
    int64_t limit;       /* so many may be used before the caller has to grow the table */
} Table;

/* Where a fingerprint stands, and the set that belongs to it. */
typedef struct {
    uint64_t *fingerprint;
    uint64_t *set;
} Place;

static inline uint64_t *bucket(const Table *t, uint64_t name) {
    uint64_t number = name & (2 * t->narrow + 1);
    if (number >= t->buckets) number &= t->narrow;
    return t->cells + number * WIDTH * (uint64_t)(1 + t->words);
}

static inline Place place_in(const Table *t, uint64_t *bucket, uint64_t fingerprint) {
    for (int at = 0; at < WIDTH; at++)
        if (bucket[at] == fingerprint) return (Place){bucket + at, bucket + WIDTH + at * t->words};
    return (Place){0, 0};
}

static inline Place place_of(const Table *t, uint64_t fingerprint) {
    Place place = place_in(t, bucket(t, fingerprint), fingerprint);
    return place.fingerprint ? place : place_in(t, bucket(t, fingerprint >> 32), fingerprint);
}

static inline int filled(const uint64_t *bucket) {
    int count = 0;
    for (int at = 0; at < WIDTH; at++) count += bucket[at] != 0;
    return count;
}

static Place empty_place(const Table *t, uint64_t fingerprint) {
    uint64_t *chosen = bucket(t, fingerprint), *other = bucket(t, fingerprint >> 32);
    int count = filled(chosen);
    if (count >= CROWDED && filled(other) < count) chosen = other;
    return place_in(t, chosen, 0);
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

static inline void prefetch(const Table *t, Chain chain, int64_t at) {
    if (at >= chain.count) return;
    const uint64_t *first = bucket(t, fingerprint_at(chain, at));
    for (int64_t line = 0; line <= t->words; line++) __builtin_prefetch(first + line * LINE);
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
    for (int64_t word = 0; word < t->words; word++) here[word] = place.set ? at_low[word] & place.set[word] : 0;
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
            uint64_t here = place.set ? ends[word] & place.set[word] : 0;
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
    for (int64_t at = 0; at < AHEAD; at++) prefetch(t, chain, (at + 1) * STRIDE - 1);
    uint64_t left = 1;
    for (int64_t low = -1; left; low += STRIDE) {
        int64_t high = low + STRIDE < chain.count ? low + STRIDE : chain.count;
        Place place = high < chain.count ? place_of(t, chain.fingerprints[high]) : (Place){0, 0};
        prefetch(t, chain, high + AHEAD * STRIDE);
        uint64_t some = left = 0;
        for (int64_t word = 0; word < t->words; word++) {
            uint64_t here = place.set ? at_low[word] & place.set[word] : 0;
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
 * numbered `begin` on. Returns `count`, or the first one for which there is no place. */
int64_t baton_table_add(Table *t, const uint64_t *fingerprints, const int64_t *noted, int64_t begin, int64_t count,
                        int64_t column) {
    Chain chain = {fingerprints, noted, count};
    for (int64_t at = begin; at < count; at++) {
        prefetch(t, chain, at + AHEAD);
        uint64_t fingerprint = fingerprint_at(chain, at);
        Place place = place_of(t, fingerprint);
        if (!place.fingerprint) {
            if (t->used >= t->limit) return at;
            place = empty_place(t, fingerprint);
            if (!place.fingerprint) return at;
            *place.fingerprint = fingerprint;
            t->used++;
        }
        place.set[column / 64] |= 1ull << column % 64;
    }
    return count;
}

/* Takes a column out of the sets of all fingerprints; empty sets are forgotten. */
void baton_table_discard(Table *t, const uint64_t *fingerprints, int64_t count, int64_t column) {
    Chain chain = {fingerprints, 0, count};
    for (int64_t at = 0; at < count; at++) {
        prefetch(t, chain, at + AHEAD);
        Place place = place_of(t, fingerprints[at]);
        if (!place.fingerprint) continue;
        place.set[column / 64] &= ~(1ull << column % 64);
        uint64_t left = 0;
        for (int64_t word = 0; word < t->words; word++) left |= place.set[word];
        if (left) continue;
        *place.fingerprint = 0;
        t->used--;
    }
}

/* Buckets `first` to `last` share their entries with those `before` places further on, by one more bit of what named each there. */
void baton_table_split(Table *t, uint64_t before, uint64_t first, uint64_t last) {
    uint64_t size = WIDTH * (uint64_t)(1 + t->words);
    for (uint64_t number = first; number < last; number++) {
        uint64_t *here = t->cells + number * size, *there = here + before * size;
        for (int at = 0; at < WIDTH; at++) {
            uint64_t fingerprint = here[at], name = (fingerprint & (before - 1)) == number ? fingerprint : fingerprint >> 32;
            if (!(name & before)) continue;
            there[at] = fingerprint;
            here[at] = 0;
            for (int64_t word = 0; word < t->words; word++) {
                int64_t place = WIDTH + at * t->words + word;
                there[place] = here[place];
                here[place] = 0;
            }
        }
    }
}
