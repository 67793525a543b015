// Owns the interface of products whose activations are rounded to 8 bits in blocks of 32: rounded.cpp, compiled beside
// program.cpp, has them. Never changes a row's bits with the rows beside it: integers are exact, and blocks are added in order.
#pragma once

#include <algorithm>
#include <cstdint>

#include "grouped.h"
#include "tiles.h"
#include "vector.h"

// 32 activations, x = scale * q, q from -127 to 127: the largest magnitude is 127. A block with NaN or infinity has the scale NaN.
// Its size is mirrored in program.py.
struct RoundedBlock {
    int8_t q[BLOCK];    // of eight inputs each: 0, 4, 1, 5, 2, 6, 3, 7, as the bits of 4-bit weights lie beside each other
    float scale;
    int32_t sums[2];    // of q, of the first 16 and of the last
    float sum;          // of all x, by which minima are multiplied
};

// What bytes are multiplied by: 0: shifts and products of 16 bits; 1: AVX-VNNI; 2: AVX-512 VNNI. The bits are the same.
int byte_level();

// Whether the matrix unit multiplies bytes for 16 rows and more. The bits are the same, so it may be asked for at any time.
bool multiplies_byte_tiles();

// Asks for that, or not; or for whichever is timed to be the faster one here. It is not done where there is no such unit.
enum class ByteTiles : int { NEVER, ALWAYS, IF_FASTER };
void use_byte_tiles(ByteTiles wanted);

template <class T>
void round_block(const T* x, RoundedBlock& to);
extern template void round_block(const bf16*, RoundedBlock&);
extern template void round_block(const float*, RoundedBlock&);

// A panel of bytes whose scales are not in it: each output has one for all inputs.
constexpr int64_t BYTES_BY_OUTPUT = -1;

// The sums of at most ROWS_AT_ONCE rows [rows][2] with one panel. x: [inputs / 32][stride], the rows beside each other.
// tiles: shaped by this function alone.
void sum_rounded(const RoundedBlock* x, int64_t stride, int64_t rows, int64_t inputs, const GroupedPanel& panel, Tiles& tiles,
                 f32x16* sums);

// Calls store(row, panel, first 16 outputs, last 16) for `rows` rows and the panels [first, last). stride: as sum_rounded.
template <class PanelAt, class Store>
void multiply_rounded(const RoundedBlock* x, int64_t stride, int64_t rows, int64_t inputs, const PanelAt& panel_at, int64_t first,
                      int64_t last, const Store& store) {
    alignas(64) f32x16 sums[2 * ROWS_AT_ONCE];
    Tiles tiles;
    for (int64_t panel = first; panel < last; panel++)
        for (int64_t row = 0; row < rows; row += ROWS_AT_ONCE) {
            const int64_t count = std::min(ROWS_AT_ONCE, rows - row);
            sum_rounded(x + row, stride, count, inputs, panel_at(panel), tiles, sums);
            for (int64_t r = 0; r < count; r++) store(row + r, panel, sums[2 * r], sums[2 * r + 1]);
        }
}
