// The operations of baton_engine/kernels/cpu/tile_instructions.h in plain C++, after Intel's pseudocode of LDTILECFG,
// TILELOADD, TILESTORED, TILEZERO and TDPBF16PS, so that the kernel runs where there is no AMX. Where a processor would
// raise an exception, the first reason is kept in `Emulation::fault`, and the operation does nothing.
//
// Not emulated: time, and results below the smallest normal float that rounding lifts to it.
#pragma once

#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../../baton_engine/kernels/cpu/tile_shapes.h"

namespace baton {

struct Emulation {
    std::atomic<const char*> fault{nullptr};
    std::atomic<int64_t> configured{0}, released{0}, dots{0};

    void refuse(const char* reason) {
        const char* none = nullptr;
        fault.compare_exchange_strong(none, reason);
    }
};
inline Emulation emulation;

struct ThreadTiles {
    bool configured = false;
    TileShapes shapes = {};
    uint8_t rows[8][16][64] = {};

    bool has(int tile) const { return configured && tile >= 0 && tile < 8 && shapes.rows[tile] > 0; }
    void clear() { std::memset(rows, 0, sizeof rows); }
};
inline thread_local ThreadTiles thread_tiles;

inline int request_tiles() { return 0; }

inline bool is_valid(const TileShapes& shapes) {
    bool valid = shapes.palette == 1 && shapes.start_row == 0;
    for (uint8_t byte : shapes.reserved) valid = valid && byte == 0;
    for (int tile = 0; tile < 16; tile++) {
        const int rows = shapes.rows[tile], bytes = shapes.row_bytes[tile];
        const bool fits = rows <= 16 && bytes <= 64 && (rows == 0) == (bytes == 0);
        valid = valid && (tile < 8 ? fits : rows == 0 && bytes == 0);
    }
    return valid;
}

inline void configure_tiles(const TileShapes& shapes) {
    if (!is_valid(shapes)) return emulation.refuse("shapes that no tiles have");
    if (!thread_tiles.configured) emulation.configured++;
    thread_tiles.configured = true;
    thread_tiles.shapes = shapes;
    thread_tiles.clear();
}

inline void release_tiles() {
    if (thread_tiles.configured) emulation.released++;
    thread_tiles.configured = false;
    thread_tiles.clear();
}

inline void tile_zero(int tile) {
    if (!thread_tiles.has(tile)) return emulation.refuse("zeroes a tile that has no shape");
    std::memset(thread_tiles.rows[tile], 0, sizeof thread_tiles.rows[tile]);
}

inline void tile_load(int tile, const void* from, int64_t stride) {
    if (!thread_tiles.has(tile)) return emulation.refuse("loads a tile that has no shape");
    tile_zero(tile);
    for (int row = 0; row < thread_tiles.shapes.rows[tile]; row++)
        std::memcpy(thread_tiles.rows[tile][row], static_cast<const char*>(from) + row * stride,
                    thread_tiles.shapes.row_bytes[tile]);
}

inline void tile_store(int tile, void* to, int64_t stride) {
    if (!thread_tiles.has(tile)) return emulation.refuse("stores a tile that has no shape");
    for (int row = 0; row < thread_tiles.shapes.rows[tile]; row++)
        std::memcpy(static_cast<char*>(to) + row * stride, thread_tiles.rows[tile][row],
                    thread_tiles.shapes.row_bytes[tile]);
}

// Denormals are zero, in and out.
inline float flushed(float value) { return std::fabs(value) < FLT_MIN ? std::copysign(0.0f, value) : value; }

inline float tile_float(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return flushed(value);
}

inline void tile_dot(int sums, int left, int right) {
    const TileShapes& shapes = thread_tiles.shapes;
    if (!thread_tiles.has(sums) || !thread_tiles.has(left) || !thread_tiles.has(right))
        return emulation.refuse("multiplies a tile that has no shape");
    if (sums == left || sums == right || left == right) return emulation.refuse("multiplies a tile with itself");
    if (shapes.row_bytes[sums] % 4 || shapes.row_bytes[left] % 4 || shapes.row_bytes[right] % 4)
        return emulation.refuse("multiplies rows that are no pairs");
    if (shapes.rows[sums] != shapes.rows[left] || shapes.row_bytes[sums] != shapes.row_bytes[right] ||
        shapes.row_bytes[left] / 4 != shapes.rows[right])
        return emulation.refuse("multiplies tiles whose shapes do not fit");
    emulation.dots++;
    const int columns = shapes.row_bytes[sums] / 4;
    for (int m = 0; m < shapes.rows[sums]; m++) {
        float even[16] = {}, odd[16] = {}, total[16];
        for (int k = 0; k < shapes.row_bytes[left] / 4; k++) {
            uint16_t a[2], b[32];
            std::memcpy(a, thread_tiles.rows[left][m] + 4 * k, sizeof a);
            std::memcpy(b, thread_tiles.rows[right][k], sizeof b);
            for (int n = 0; n < columns; n++) {
                even[n] = flushed(std::fma(tile_float(a[0]), tile_float(b[2 * n]), even[n]));
                odd[n] = flushed(std::fma(tile_float(a[1]), tile_float(b[2 * n + 1]), odd[n]));
            }
        }
        std::memcpy(total, thread_tiles.rows[sums][m], sizeof total);
        for (int n = 0; n < columns; n++) total[n] = flushed(flushed(total[n]) + flushed(even[n] + odd[n]));
        std::memcpy(thread_tiles.rows[sums][m], total, 4 * columns);
    }
}

}  // namespace baton

#define TILE_ZERO(tile) baton::tile_zero(tile)
#define TILE_LOAD(tile, from, stride) baton::tile_load(tile, from, stride)
#define TILE_STORE(tile, to, stride) baton::tile_store(tile, to, stride)
#define TILE_DOT(sums, left, right) baton::tile_dot(sums, left, right)
