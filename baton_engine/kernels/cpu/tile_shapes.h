// The shapes of AMX's eight tiles, as the processor reads them.
#pragma once

#include <cstdint>

namespace baton {

struct alignas(64) TileShapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];  // of eight tiles; the others are zero
    uint8_t rows[16];
};
static_assert(sizeof(TileShapes) == 64);

}  // namespace baton
