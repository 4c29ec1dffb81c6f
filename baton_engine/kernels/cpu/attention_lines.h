// Where a round of attention finds its keys and values: lines of the pages, or copies of them in whole vectors.
#pragma once

#include <algorithm>

#include "team.h"

namespace baton {

constexpr int64_t KEYS = 64;  // keys per round of the online softmax

// Keys and values of one round and KV head; beyond those that there are, the last one is repeated.
template <typename E>
struct Lines {
    const E *keys[KEYS], *values[KEYS];

    // In the pages of one row, from key `key` on.
    template <typename T>
    void look_up(const Attention<T, E>& call, int64_t row, int64_t head, int64_t key, int64_t count) {
        const int32_t* table = call.block_tables + row * call.table_width;
        const int64_t half = call.block_tokens * call.head_dim;
        int shift = __builtin_ctzll(call.block_tokens);  // a power of two: dividing would cost more than attending
        for (int64_t j = 0; j < count;) {
            int64_t block = table[(key + j) >> shift], offset = (key + j) & (call.block_tokens - 1);
            const E* line = call.pages + (block * call.num_kv_heads + head) * 2 * half + offset * call.head_dim;
            for (int64_t end = std::min(count, j + call.block_tokens - offset); j < end; j++) {
                keys[j] = line;
                values[j] = line + half;
                line += call.head_dim;
            }
        }
        repeat_last(count);
    }

    // Lines of `size` elements, copied and filled up with zeros to `width`.
    template <typename K>
    void copy(const Lines<K>& lines, int64_t count, int64_t size, int64_t width, E* to_keys, E* to_values) {
        for (int64_t j = 0; j < count; j++) {
            keys[j] = copy_line(lines.keys[j], size, width, to_keys + j * width);
            values[j] = copy_line(lines.values[j], size, width, to_values + j * width);
        }
        repeat_last(count);
    }

   private:
    template <typename K>
    static const E* copy_line(const K* line, int64_t size, int64_t width, E* to) {
#pragma omp simd
        for (int64_t d = 0; d < size; d++) narrow(widen(line[d]), to[d]);
        std::fill(to + size, to + width, E{});
        return to;
    }

    void repeat_last(int64_t count) {
        std::fill(keys + count, keys + KEYS, keys[count - 1]);
        std::fill(values + count, values + KEYS, values[count - 1]);
    }
};

}  // namespace baton
