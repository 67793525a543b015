// Owns the interface of products with weights of 4 to 8 bits in groups, of integers or of FP8: grouped.cpp, compiled beside program.cpp, has them.
// Never knows a format: a panel's number says which it is.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vector.h"

constexpr int BLOCK = 32;  // inputs that are packed together: one group, or two

// A panel: where it lies, how, and which outputs it has. Filled by the caller; mirrored in grouped.py.
struct GroupedPanel {
    const uint8_t* data;
    int64_t form, first, count;
};

// Rows whose sums lie in the first cache, beside the unpacked weights where there are any.
constexpr int64_t ROWS_AT_ONCE = 64;

// The sums of at most ROWS_AT_ONCE rows [rows][2] with one panel.
template <class T>
void sum_grouped(const T* x, int64_t rows, int64_t inputs, const float* x_sums, const GroupedPanel& panel, f32x16* sums);
extern template void sum_grouped(const bf16*, int64_t, int64_t, const float*, const GroupedPanel&, f32x16*);
extern template void sum_grouped(const float*, int64_t, int64_t, const float*, const GroupedPanel&, f32x16*);

// One output of a panel: its weights, times `factor`. # [inputs]
template <class T>
void unpack_row(const GroupedPanel& panel, int64_t lane, int64_t inputs, float factor, T* out);
extern template void unpack_row(const GroupedPanel&, int64_t, int64_t, float, bf16*);
extern template void unpack_row(const GroupedPanel&, int64_t, int64_t, float, float*);

// Calls store(row, panel, first 16 outputs, last 16) for all rows and the panels [first, last).
template <class T, class Store>
void multiply_grouped(const T* x, int64_t rows, int64_t inputs, const float* x_sums, const GroupedPanel* panels, int64_t first,
                      int64_t last, const Store& store) {
    alignas(64) f32x16 sums[2 * ROWS_AT_ONCE];
    for (int64_t panel = first; panel < last; panel++)
        for (int64_t row = 0; row < rows; row += ROWS_AT_ONCE) {
            const int64_t count = std::min(ROWS_AT_ONCE, rows - row);
            sum_grouped(x + row * inputs, count, inputs, x_sums + row * (inputs / BLOCK), panels[panel], sums);
            for (int64_t r = 0; r < count; r++) store(row + r, panel, sums[2 * r], sums[2 * r + 1]);
        }
}

// The sums of a row's inputs, 32 at a time, by which minima are multiplied. # [inputs / 32]
template <class T>
inline void sum_inputs(const T* x, int64_t inputs, float* sums) {
    for (int64_t i = 0; i < inputs; i += BLOCK) sums[i / BLOCK] = reduce_add(load(x + i) + load(x + i + LANES));
}
