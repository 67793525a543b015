// Owns matrix products with packed weights: y = x W^T + b, each output summed in one order, whatever rows are beside it.
// Never changes that order with the number of rows: a row's bits do not depend on its neighbours.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "grouped.h"
#include "low_rank.h"
#include "rounded.h"
#include "tiles.h"
#include "vector.h"

// Weights [N, K] are stored as panels of 32 outputs, [N / 32][K / PAIR][32][PAIR]: a step of the sum reads 128 bytes in a
// row, and a panel of a small model stays in the first cache while all rows pass by it. In bfloat16 it is two tiles of the
// matrix unit beside each other, too: 32 inputs of 16 outputs each.
template <class T>
struct Linear {
    const void* panels;   // of T, or of bytes where there are scales
    const float* scales;  // [padded N], what an output is multiplied by, or null
    const float* bias;    // [padded N], or null
    int64_t inputs, outputs;
    const GroupedPanel* grouped = nullptr;  // [num_grouped], instead of `panels` and `scales`
    int64_t num_grouped = 0;
    float* input_sums = nullptr;  // [rows, inputs / 32], or null where no panel has minima
    RoundedBlock* rounded = nullptr;  // [inputs / 32, rows], or null: activations keep their type, and are not rounded
    int64_t rounded_rows = 0;         // how many rows `rounded` has; 0: those that are multiplied, and no others
    AdaptedMatrix adapted = {};       // what its store adds for tokens with an adapter

    int64_t num_panels() const { return grouped ? num_grouped : (outputs + PANEL - 1) / PANEL; }

    // Where a panel's outputs begin, and where those end that it may have.
    int64_t begin(int64_t panel) const { return grouped ? grouped[panel].first : panel * PANEL; }
    int64_t end(int64_t panel) const { return grouped ? grouped[panel].first + grouped[panel].count : outputs; }

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

// As bytes, each output's weights in units of its largest over 127; NaN, if they are not all finite. They lie as `lanes` reads those of a lane of PAIR elements.
template <class T, int PAIR>
void quantize(const T* weight, int64_t outputs, int64_t inputs, int8_t* panels, float* scales) {
    std::fill(panels, panels + (outputs + PANEL - 1) / PANEL * PANEL * inputs, int8_t(0));
    for (int64_t n = 0; n < outputs; n++) {
        const T* row = weight + n * inputs;
        float largest = 0.0f;
        for (int64_t k = 0; k < inputs; k++) {
            const float size = std::abs(widen(row[k]));
            largest = size > largest || size != size ? size : largest;
        }
        const double unit = largest / 127.0;
        scales[n] = std::isfinite(largest) ? float(unit) : std::numeric_limits<float>::quiet_NaN();
        if (unit == 0.0 || !std::isfinite(largest)) continue;
        int8_t* to = panels + n / PANEL * PANEL * inputs + n % PANEL / LANES * LANES * PAIR + n % LANES;
        for (int64_t k = 0; k < inputs; k++)
            to[k / PAIR * PANEL * PAIR + k % PAIR * LANES] = int8_t(std::nearbyint(widen(row[k]) / unit));
    }
}

// What is fetched while sums are made, which keep the processor too busy to look far enough ahead by itself: nothing, what
// is read after it, or a line of `next` at each step.
enum Fetch : int { NONE, OWN, NEXT };

// ROWS rows times PANELS panels, whose weights are of type W. Two panels where there are few rows, for enough independent
// sums to hide latency.
template <class T, class W, int ROWS, int PANELS, int FETCH>
inline void product(const T* x, int64_t inputs, const W* weights, const char* next, f32x16 (&sums)[ROWS][2 * PANELS]) {
    constexpr int PAIR = Element<T>::PAIR;
    constexpr int64_t READ = PANEL * PAIR * sizeof(W);  // bytes of a panel at each step
    const int64_t steps = inputs / PAIR, panel_size = inputs * PANEL;
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < 2 * PANELS; c++) sums[r][c] = splat(0.0f);
    for (int64_t k = 0; k < steps; k++) {
        if constexpr (FETCH == OWN)
            for (int p = 0; p < PANELS; p++)
                for (int64_t at = 0; at < READ; at += CACHE_LINE)
                    fetch_ahead<sizeof(W) == 1>(reinterpret_cast<const char*>(weights + p * panel_size) + k * READ + at);
        if constexpr (FETCH == NEXT) fetch(next + k * CACHE_LINE);
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
inline void block(const T* x, int64_t row, int64_t inputs, const W* weights, const char* next, int64_t panel, const Store& s) {
    f32x16 sums[ROWS][2 * PANELS];
    product<T, W, ROWS, PANELS, FETCH>(x + row * inputs, inputs, weights, next, sums);
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) s(row + r, panel + p, sums[r][2 * p], sums[r][2 * p + 1]);
}

// As many as `rows` rows from `row` on, at most ROWS.
template <class T, class W, int ROWS, int FETCH, class Store>
inline void some_rows(const T* x, int64_t row, int64_t rows, int64_t inputs, const W* weights, const char* next, int64_t panel,
                      const Store& s) {
    if constexpr (ROWS > 0) {
        if (rows >= ROWS) return block<T, W, ROWS, 1, FETCH>(x, row, inputs, weights, next, panel, s);
        some_rows<T, W, ROWS - 1, FETCH>(x, row, rows, inputs, weights, next, panel, s);
    }
}

// All rows and one panel. Of several blocks of rows, the first two fetch what comes next, a line at each step: half a panel
// each, or of bytes a panel.
template <class T, class W, class Store>
inline void all_rows(const T* x, int64_t rows, int64_t inputs, const W* weights, const char* next, int64_t panel, const Store& s) {
    if (rows <= MAX_ROWS) return some_rows<T, W, MAX_ROWS, OWN>(x, 0, rows, inputs, weights, nullptr, panel, s);
    const int64_t fetched = inputs / Element<T>::PAIR * CACHE_LINE;
    for (int64_t row = 0; row < rows; row += MAX_ROWS)
        if (row < 2 * MAX_ROWS)
            some_rows<T, W, MAX_ROWS, NEXT>(x, row, rows - row, inputs, weights, next + row / MAX_ROWS * fetched, panel, s);
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
        for (; panel + 2 <= last; panel += 2) block<T, W, 1, 2, OWN>(x, 0, inputs, weights(panel), nullptr, panel, s);
    if (rows == 2)
        for (; panel + 2 <= last; panel += 2) block<T, W, 2, 2, OWN>(x, 0, inputs, weights(panel), nullptr, panel, s);
    for (; panel < last; panel++)
        all_rows(x, rows, inputs, weights(panel), reinterpret_cast<const char*>(weights(panel + 1)), panel, s);
}

// Whether bytes are widened anew for each MAX_ROWS rows: sooner than from a copy where a product takes one instruction.
#if defined(__AVX512BF16__)
template <class T>
constexpr bool WIDEN_ANEW = std::is_same_v<T, bf16>;
#else
template <class T>
constexpr bool WIDEN_ANEW = false;
#endif

// Panels [first, last) widened once for many rows, to the same numbers.
template <class T>
inline const T* widen_panels(const Linear<T>& linear, int64_t first, int64_t last) {
    thread_local std::vector<T> wide;
    const int64_t size = (last - first) * linear.inputs * PANEL;
    wide.resize(std::max<int64_t>(wide.size(), size));
    widen_lanes(linear.template panel<int8_t>(first), size, wide.data());
    return wide.data();
}

#if MATRIX_UNIT

// Tiles 0 and 1: sums of up to 16 rows, 2 and 3: of the next 16. 4 and 5: the activations of those rows. 6 and 7: weights.
constexpr int64_t BLOCK_ROWS = 2 * TILE_ROWS;

// For many rows: the panels by which a block of them passes while it is in the first cache (147 KiB of weights at 576 inputs).
constexpr int64_t PANELS_AT_ONCE = 4;

inline void shape_product(Tiles::Shapes& shapes, int64_t rows) {
    const int64_t upper = std::min(rows, TILE_ROWS), lower = std::max<int64_t>(rows - TILE_ROWS, 1);
    for (int tile : {0, 1, 4}) shapes.set(tile, upper);
    for (int tile : {2, 3, 5}) shapes.set(tile, lower);
    for (int tile : {6, 7}) shapes.set(tile, TILE_INPUTS / 2);
}

// The sums of a block, which are stored while the unit multiplies the next one: an activation takes as long as the products.
template <class Store>
class Sums {
   public:
    using Block = float[BLOCK_ROWS][PANEL];

    explicit Sums(const Store& store) : store_(store) {}

    Block& next() { return blocks_[1 - at_]; }

    // Stores `rows` rows of the last block.
    void advance(int64_t rows) {
        for (const int64_t end = std::min(stored_ + rows, rows_); stored_ < end; stored_++) {
            const float* from = blocks_[at_][stored_];
            store_(row_ + stored_, panel_, load(from), load(from + LANES));
        }
    }

    // What was summed to `next()` is of these rows and this panel.
    void put(int64_t row, int64_t rows, int64_t panel) {
        advance(BLOCK_ROWS);
        at_ = 1 - at_;
        row_ = row;
        rows_ = rows;
        panel_ = panel;
        stored_ = 0;
    }

   private:
    const Store& store_;
    alignas(64) Block blocks_[2];
    int at_ = 0;
    int64_t row_ = 0, rows_ = 0, panel_ = 0, stored_ = 0;
};

template <bool LOWER>
inline void add_tiles(const bf16* x, int64_t stride, const bf16* weights) {
    constexpr int64_t line = PANEL * sizeof(bf16) * 2;
    const int64_t row = stride * sizeof(bf16);
    _tile_loadd(6, weights, line);
    _tile_loadd(4, x, row);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weights + PANEL, line);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (LOWER) {
        _tile_loadd(5, x + TILE_ROWS * stride, row);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

// `rows` rows, at most BLOCK_ROWS, and more than 16 if LOWER. What is behind the last whole tile of inputs is filled up with zeros.
template <bool LOWER, class W, class Store>
inline void sum_tiles(const bf16* x, int64_t rows, int64_t inputs, const W* weights, Sums<Store>& sums) {
    constexpr bool BYTES = sizeof(W) == 1;
    const int64_t steps = inputs / TILE_INPUTS, each = steps ? (BLOCK_ROWS + steps - 1) / steps : 0;
    constexpr int64_t SIZE = TILE_INPUTS * PANEL;
    alignas(64) bf16 wide[2][SIZE];  // by turns: what was stored just now cannot be loaded as a tile at once
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (LOWER) {
        _tile_zero(2);
        _tile_zero(3);
    }
    if constexpr (BYTES)
        if (steps) widen_lanes(weights, SIZE, wide[0]);
    for (int64_t step = 0; step < steps; step++) {
        const int64_t k = step * TILE_INPUTS;
        if constexpr (BYTES) {
            if (step + 1 < steps) widen_lanes(weights + (step + 1) * SIZE, SIZE, wide[(step + 1) % 2]);
            settle();
            add_tiles<LOWER>(x + k, inputs, wide[step % 2]);
            settle();
        } else {
            add_tiles<LOWER>(x + k, inputs, weights + step * SIZE);
        }
        sums.advance(each);
    }
    if (const int64_t k = steps * TILE_INPUTS; k < inputs) {
        alignas(64) bf16 rest[BLOCK_ROWS][TILE_INPUTS] = {};
        for (int64_t r = 0; r < rows; r++) std::copy(x + r * inputs + k, x + (r + 1) * inputs, rest[r]);
        std::fill(wide[0], wide[0] + SIZE, bf16{});
        if constexpr (BYTES)
            widen_lanes(weights + k * PANEL, (inputs - k) * PANEL, wide[0]);
        else
            std::copy(weights + k * PANEL, weights + inputs * PANEL, wide[0]);
        settle();
        add_tiles<LOWER>(rest[0], TILE_INPUTS, wide[0]);
    }
    auto& to = sums.next();
    constexpr int64_t line = sizeof to[0];
    _tile_stored(0, to[0], line);
    _tile_stored(1, to[0] + LANES, line);
    if constexpr (LOWER) {
        _tile_stored(2, to[TILE_ROWS], line);
        _tile_stored(3, to[TILE_ROWS] + LANES, line);
    }
}

// All rows and the panels [first, last), a few of them at a time: a block of rows stays in the first cache while they pass.
template <class W, class Store>
void multiply_tiles(const bf16* x, int64_t rows, int64_t inputs, const W* weights, int64_t first, int64_t last, const Store& s) {
    Tiles tiles;
    Sums<Store> sums(s);
    settle();
    for (int64_t row = 0; row < rows; row += BLOCK_ROWS) {
        const int64_t count = std::min(BLOCK_ROWS, rows - row);
        tiles.shape(count, shape_product);
        for (int64_t panel = first; panel < last; panel++) {
            const W* from = weights + (panel - first) * inputs * PANEL;
            if (count > TILE_ROWS)
                sum_tiles<true>(x + row * inputs, count, inputs, from, sums);
            else
                sum_tiles<false>(x + row * inputs, count, inputs, from, sums);
            sums.put(row, count, panel);
        }
    }
    sums.advance(BLOCK_ROWS);
}

template <class Store>
void multiply_by_tiles(const bf16* x, int64_t rows, const Linear<bf16>& linear, int64_t first, int64_t last, const Store& s) {
    const int64_t inputs = linear.inputs;
    if (rows <= BLOCK_ROWS && linear.scales)
        return multiply_tiles(x, rows, inputs, linear.panel<int8_t>(first), first, last, s);
    if (rows <= BLOCK_ROWS) return multiply_tiles(x, rows, inputs, linear.panel<bf16>(first), first, last, s);
    for (int64_t end; first < last; first = end) {
        end = std::min(last, first + PANELS_AT_ONCE);
        const bf16* weights = linear.scales ? widen_panels(linear, first, end) : linear.panel<bf16>(first);
        multiply_tiles(x, rows, inputs, weights, first, end, s);
    }
}

#endif

// The panels of `linear` as products with rounded activations take them.
template <class T>
inline GroupedPanel bytes_of(const Linear<T>& linear, int64_t panel) {
    if (linear.grouped) return linear.grouped[panel];
    return {linear.template panel<uint8_t>(panel), BYTES_BY_OUTPUT, linear.begin(panel), PANEL};
}

template <class T, class Store>
void multiply(const T* x, int64_t rows, const Linear<T>& linear, int64_t first, int64_t last, const Store& s) {
    if (linear.rounded)
        return multiply_rounded(
            linear.rounded, linear.rounded_rows ? linear.rounded_rows : rows, rows, linear.inputs,
            [&](int64_t panel) { return bytes_of(linear, panel); }, first, last, s);
    if (linear.grouped) return multiply_grouped(x, rows, linear.inputs, linear.input_sums, linear.grouped, first, last, s);
#if MATRIX_UNIT
    if constexpr (std::is_same_v<T, bf16>)
        if (has_matrix_unit()) return multiply_by_tiles(x, rows, linear, first, last, s);
#endif
    if (!linear.scales) return multiply_by<T, T>(x, rows, linear, first, last, s);
    if (WIDEN_ANEW<T> || rows <= MAX_ROWS) return multiply_by<T, int8_t>(x, rows, linear, first, last, s);
    for (int64_t panel = first; panel < last; panel++) {
        const char* next = reinterpret_cast<const char*>(linear.template panel<int8_t>(panel + 1));
        all_rows(x, rows, linear.inputs, widen_panels(linear, panel, panel + 1), next, panel, s);
    }
}
