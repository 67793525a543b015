// Owns matrix products with packed weights: y = x W^T + b, each output summed in one order, whatever rows are beside it.
// Never changes that order with the number of rows: a row's bits do not depend on its neighbours.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "vector.h"

// Weights [N, K] are stored as panels of 32 outputs, [N / 32][K / PAIR][32][PAIR]: a step of the sum reads 128 bytes in a
// row, and a panel of a small model stays in the first cache while all rows pass by it.
constexpr int PANEL = 2 * LANES;

template <class T>
struct Linear {
    const void* panels;   // of T, or of bytes where there are scales
    const float* scales;  // [padded N], what an output is multiplied by, or null
    const float* bias;    // [padded N], or null
    int64_t inputs, outputs;

    int64_t num_panels() const { return (outputs + PANEL - 1) / PANEL; }

    template <class W>
    const W* panel(int64_t i) const {
        return static_cast<const W*>(panels) + i * inputs * PANEL;
    }
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

// As bytes, each output's weights in units of its largest over 127. A lane's elements lie as `lanes` reads them.
template <class T>
void quantize(const T* weight, int64_t outputs, int64_t inputs, int8_t* panels, float* scales) {
    constexpr int PAIR = Element<T>::PAIR;
    std::fill(panels, panels + (outputs + PANEL - 1) / PANEL * PANEL * inputs, int8_t(0));
    for (int64_t n = 0; n < outputs; n++) {
        const T* row = weight + n * inputs;
        float largest = 0.0f;
        for (int64_t k = 0; k < inputs; k++) largest = std::max(largest, std::abs(widen(row[k])));
        const double unit = largest / 127.0;
        scales[n] = float(unit);
        if (unit == 0.0) continue;
        int8_t* to = panels + n / PANEL * PANEL * inputs + n % PANEL / LANES * LANES * PAIR + n % LANES;
        for (int64_t k = 0; k < inputs; k++)
            to[k / PAIR * PANEL * PAIR + k % PAIR * LANES] = int8_t(std::nearbyint(widen(row[k]) / unit));
    }
}

// Fetch ahead of the sums: those of many rows keep the processor too busy to look far enough ahead by itself. 8 rows of
// the default model took 27 ms without and 19 with, on two cores that read 20 GB/s. NONE: `ahead` is not read.
enum Fetch : int { NONE = 0, HALF = 1, ALL = 2 };  // lines of 64 bytes at each step: as many as it reads, or half

constexpr int64_t AHEAD = 8192;  // bytes: what is read in the time that memory takes to answer, several times over

// ROWS rows times PANELS panels, whose weights are of type W. Two panels where there are few rows, for enough independent
// sums to hide latency.
template <class T, class W, int ROWS, int PANELS, int FETCH>
inline void product(const T* x, int64_t inputs, const W* weights, const char* ahead, f32x16 (&sums)[ROWS][2 * PANELS]) {
    constexpr int PAIR = Element<T>::PAIR;
    const int64_t steps = inputs / PAIR, panel_size = inputs * PANEL;
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < 2 * PANELS; c++) sums[r][c] = splat(0.0f);
    for (int64_t k = 0; k < steps; k++) {
        for (int line = 0; line < FETCH; line++) __builtin_prefetch(ahead + (k * FETCH + line) * 64);
        i32x16 w[2 * PANELS];
#pragma GCC unroll 8
        for (int c = 0; c < 2 * PANELS; c++)
            w[c] = lanes<T>(weights + c / 2 * panel_size + (k * PANEL + c % 2 * LANES) * PAIR);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const i32x16 a = broadcast(x + r * inputs + k * PAIR);
#pragma GCC unroll 8
            for (int c = 0; c < 2 * PANELS; c++) sums[r][c] = dot<T>(sums[r][c], a, w[c]);
        }
    }
}

// Calls store(row, panel, first 16 outputs, last 16) for ROWS rows from `row` on, and PANELS panels from `panel` on.
template <class T, class W, int ROWS, int PANELS, int FETCH, class Store>
inline void block(const T* x, int64_t row, int64_t inputs, const W* weights, const char* ahead, int64_t panel, const Store& s) {
    f32x16 sums[ROWS][2 * PANELS];
    product<T, W, ROWS, PANELS, FETCH>(x + row * inputs, inputs, weights, ahead, sums);
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) s(row + r, panel + p, sums[r][2 * p], sums[r][2 * p + 1]);
}

// As many as `rows` rows from `row` on, at most ROWS.
template <class T, class W, int ROWS, int FETCH, class Store>
inline void some_rows(const T* x, int64_t row, int64_t rows, int64_t inputs, const W* weights, const char* ahead, int64_t panel,
                      const Store& s) {
    if constexpr (ROWS > 0) {
        if (rows >= ROWS) return block<T, W, ROWS, 1, FETCH>(x, row, inputs, weights, ahead, panel, s);
        some_rows<T, W, ROWS - 1, FETCH>(x, row, rows, inputs, weights, ahead, panel, s);
    }
}

// All rows and one panel. Of several blocks of rows, the first two fetch the panel that comes next, a half each.
template <class T, class W, class Store>
inline void all_rows(const T* x, int64_t rows, int64_t inputs, const W* weights, const char* next, int64_t panel, const Store& s) {
    if (rows <= MAX_ROWS) {
        const char* ahead = reinterpret_cast<const char*>(weights) + AHEAD;
        return some_rows<T, W, MAX_ROWS, ALL>(x, 0, rows, inputs, weights, ahead, panel, s);
    }
    const int64_t half = inputs / Element<T>::PAIR * 64;
    for (int64_t row = 0; row < rows; row += MAX_ROWS)
        if (row < 2 * MAX_ROWS)
            some_rows<T, W, MAX_ROWS, HALF>(x, row, rows - row, inputs, weights, next + row / MAX_ROWS * half, panel, s);
        else
            some_rows<T, W, MAX_ROWS, NONE>(x, row, rows - row, inputs, weights, nullptr, panel, s);
}

// All of `rows` rows, and the panels [first, last).
template <class T, class W, class Store>
void multiply_by(const T* x, int64_t rows, const Linear<T>& linear, int64_t first, int64_t last, const Store& s) {
    const int64_t inputs = linear.inputs;
    const auto weights = [&](int64_t panel) { return linear.template panel<W>(panel); };
    int64_t panel = first;
    if (rows == 1)
        for (; panel + 2 <= last; panel += 2) block<T, W, 1, 2, NONE>(x, 0, inputs, weights(panel), nullptr, panel, s);
    if (rows == 2)
        for (; panel + 2 <= last; panel += 2) block<T, W, 2, 2, NONE>(x, 0, inputs, weights(panel), nullptr, panel, s);
    for (; panel < last; panel++)
        all_rows(x, rows, inputs, weights(panel), reinterpret_cast<const char*>(weights(panel + 1)), panel, s);
}

template <class T, class Store>
void multiply(const T* x, int64_t rows, const Linear<T>& linear, int64_t first, int64_t last, const Store& s) {
    if (!linear.scales) return multiply_by<T, T>(x, rows, linear, first, last, s);
    if (rows <= MAX_ROWS) return multiply_by<T, int8_t>(x, rows, linear, first, last, s);
    // Many rows: a panel is widened once for all of them, to the same numbers.
    thread_local std::vector<T> wide;
    const int64_t size = linear.inputs * PANEL;
    wide.resize(size);
    for (int64_t panel = first; panel < last; panel++) {
        const int8_t* bytes = linear.template panel<int8_t>(panel);
        for (int64_t i = 0; i < size; i += LANES * Element<T>::PAIR) {
            const i32x16 found = lanes<T>(bytes + i);
            std::memcpy(wide.data() + i, &found, sizeof found);
        }
        all_rows(x, rows, linear.inputs, wide.data(), reinterpret_cast<const char*>(bytes + size), panel, s);
    }
}
