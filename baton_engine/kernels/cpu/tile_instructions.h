// The operations on AMX's tiles that matmul_bfloat16_tiles.cpp is written in, as instructions. Tests compile it with
// the same operations in plain C++ (tests/baton_engine/emulated_tiles.h). Tiles are numbers from 0 to 7, written out.
//
// GCC's intrinsics are assembler that does not name the memory a tile is loaded from: without a barrier before it, what
// was written there may be written later, or never.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "tile_shapes.h"

namespace baton {

// Asks Linux for this process's use of tiles, once; 0, or the error with which it refused.
inline int request_tiles() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const int error = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) ? errno : 0;
    return error;
}

// The thread's tiles have these shapes, and are zero, until it releases them.
__attribute__((target("amx-tile"))) inline void configure_tiles(const TileShapes& shapes) {
    asm volatile("" ::: "memory");
    _tile_loadconfig(&shapes);
}

__attribute__((target("amx-tile"))) inline void release_tiles() { _tile_release(); }

}  // namespace baton

#define TILE_ZERO(tile) _tile_zero(tile)
// `stride` is in bytes, from one of the tile's rows to the next.
#define TILE_LOAD(tile, from, stride)          \
    do {                                       \
        asm volatile("" ::: "memory");         \
        _tile_loadd(tile, from, stride);       \
    } while (0)
#define TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
// sums += rows * weights, of pairs of bfloat16.
#define TILE_DOT(sums, rows, weights) _tile_dpbf16ps(sums, rows, weights)
