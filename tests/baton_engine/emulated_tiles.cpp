// What a test sees of the emulated tiles, and their operations one by one.

#include "emulated_tiles.h"

extern "C" {

// The first thing that a processor would have refused, or null; forgotten with that.
const char* emulated_fault() { return baton::emulation.fault.exchange(nullptr); }

// How often a thread's tiles were given shapes, were released, and were multiplied.
void emulated_counts(int64_t counts[3]) {
    counts[0] = baton::emulation.configured;
    counts[1] = baton::emulation.released;
    counts[2] = baton::emulation.dots;
}

void emulated_configure(const baton::TileShapes* shapes) { baton::configure_tiles(*shapes); }
void emulated_release() { baton::release_tiles(); }
void emulated_zero(int tile) { TILE_ZERO(tile); }
void emulated_load(int tile, const void* from, int64_t stride) { TILE_LOAD(tile, from, stride); }
void emulated_store(int tile, void* to, int64_t stride) { TILE_STORE(tile, to, stride); }
void emulated_dot(int sums, int left, int right) { TILE_DOT(sums, left, right); }

}
