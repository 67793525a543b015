// Owns matrix products with packed weights: y = x W^T + b, each output summed in one order, whatever rows are beside it.
// Never changes that order with the number of rows: a row's bits do not depend on its neighbours.
#pragma once

#include "team.h"
#include "vector.h"

// Weights [N, K] are stored as panels of 32 outputs, [N / 32][K / PAIR][32][PAIR]: a step of the sum reads 128 bytes in a
// row, and a panel of a small model stays in the first cache while all rows pass by it.
constexpr int PANEL = 2 * LANES;

template <class T>
struct Linear {
    const T* panels;
    const float* bias;  // [padded N], or null
    int64_t inputs, outputs;

    int64_t num_panels() const { return (outputs + PANEL - 1) / PANEL; }
    const T* panel(int64_t i) const { return panels + i * inputs * PANEL; }
};

// `panels` may be `weight` itself: a panel's weights lie in the same memory before and after. A lane is moved at a time.
template <class T>
void pack(const T* weight, int64_t outputs, int64_t inputs, T* panels) {
    const int64_t lanes = inputs / Element<T>::PAIR, row_bytes = inputs * sizeof(T);
    std::vector<uint32_t> rows(PANEL * lanes), panel(PANEL * lanes);
    for (int64_t first = 0; first < outputs; first += PANEL) {
        const int64_t count = std::min<int64_t>(PANEL, outputs - first);
        std::fill(rows.begin() + count * lanes, rows.end(), 0);
        std::memcpy(rows.data(), weight + first * inputs, count * row_bytes);
        for (int64_t k = 0; k < lanes; k++)
            for (int64_t n = 0; n < PANEL; n++) panel[k * PANEL + n] = rows[n * lanes + k];
        std::memcpy(panels + first * inputs, panel.data(), PANEL * row_bytes);
    }
}

// ROWS rows times PANELS panels. Few rows take several panels at once, for enough independent sums to hide latency.
template <class T, int ROWS, int PANELS>
inline void product(const T* x, int64_t inputs, const T* weights, f32x16 (&sums)[ROWS][2 * PANELS]) {
    constexpr int PAIR = Element<T>::PAIR;
    const int64_t steps = inputs / PAIR, panel_size = inputs * PANEL;
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < 2 * PANELS; c++) sums[r][c] = splat(0.0f);
    for (int64_t k = 0; k < steps; k++) {
        i32x16 w[2 * PANELS];
#pragma GCC unroll 8
        for (int c = 0; c < 2 * PANELS; c++)
            w[c] = load_lanes(weights + c / 2 * panel_size + (k * PANEL + c % 2 * LANES) * PAIR);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const i32x16 a = broadcast(x + r * inputs + k * PAIR);
#pragma GCC unroll 8
            for (int c = 0; c < 2 * PANELS; c++) sums[r][c] = dot<T>(sums[r][c], a, w[c]);
        }
    }
}

// Calls store(row, first output, 16 values) for all of `rows` rows and the panels [first, last).
template <class T, int ROWS, int PANELS, class Store>
inline void block(const T* x, int64_t row, const Linear<T>& linear, int64_t panel, const Store& store_sums) {
    f32x16 sums[ROWS][2 * PANELS];
    product<T, ROWS, PANELS>(x + row * linear.inputs, linear.inputs, linear.panel(panel), sums);
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) store_sums(row + r, panel + p, sums[r][2 * p], sums[r][2 * p + 1]);
}

template <class T, int ROWS, class Store>
inline void rest(const T* x, int64_t row, int64_t rows, const Linear<T>& linear, int64_t panel, const Store& s) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS) return block<T, ROWS, 1>(x, row, linear, panel, s);
        rest<T, ROWS - 1>(x, row, rows, linear, panel, s);
    }
}

template <class T, class Store>
void multiply(const T* x, int64_t rows, const Linear<T>& linear, int64_t first, int64_t last, const Store& s) {
    int64_t panel = first;
    if (rows == 1)
        for (; panel + 2 <= last; panel += 2) block<T, 1, 2>(x, 0, linear, panel, s);
    if (rows == 2)
        for (; panel + 2 <= last; panel += 2) block<T, 2, 2>(x, 0, linear, panel, s);
    for (; panel < last; panel++) {
        int64_t row = 0;
        for (; row + MAX_ROWS <= rows; row += MAX_ROWS) block<T, MAX_ROWS, 1>(x, row, linear, panel, s);
        rest<T, MAX_ROWS - 1>(x, row, rows - row, linear, panel, s);
    }
}
