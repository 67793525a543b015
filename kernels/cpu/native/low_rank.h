// Owns what LoRA adapters add to matrix products: y += (x A^T) B^T for tokens that have one (arXiv 2106.09685). Sums are
// float32, and x A^T is rounded to the activations' type, as with other kernels.
// Never lets a token's sums depend on other tokens, and does nothing in a step in which no row has an adapter.
#pragma once

#include <algorithm>

#include "step.h"
#include "team.h"
#include "vector.h"

constexpr int MAX_PARTS = 3;  // of a stacked matrix: queries, keys and values

// An adapter's factors for one matrix. Filled by the caller; mirrored in low_rank.py.
struct LowRank {
    const void* a;              // [num_ranks, inputs]: the ranks of each part, one part after another. Null: nothing is added
    const void* b;              // [panels, rank / PAIR, 32, PAIR]: the outputs of the matrix's panels, with the adapter's scale
    int64_t rank, num_ranks;    // of one part, a multiple of PAIR, and of all parts that it adapts
    int64_t firsts[MAX_PARTS];  // where the ranks of each part begin, or -1
};

// What a product needs to add its adapters. Without a step: it takes none.
struct AdaptedMatrix {
    const Step* step = nullptr;
    int64_t number = 0;              // of the matrix, in each adapter's factors
    const uint8_t* parts = nullptr;  // [panels, 2] the part that sixteen outputs belong to
    void* shrunk = nullptr;          // [num_tokens, width] of T: x A^T
    int64_t width = 0;

    bool in_step() const { return step && !step->adapter_tiles.empty(); }
};

// How many tokens and ranks are summed at a time: both operands and all sums stay in registers.
#if defined(__AVX512F__)
constexpr int TOKENS_AT_ONCE = 4, RANKS_AT_ONCE = 4;
#else
constexpr int TOKENS_AT_ONCE = 2, RANKS_AT_ONCE = 2;
#endif

template <class T>
inline i32x16 load_rest(const T* from, int64_t count) {
    i32x16 value{};
    std::memcpy(&value, from, count * sizeof(T));
    return value;
}

// x A^T of TOKENS tokens and RANKS ranks, with inputs in the lanes: one order of a sum for any number of tokens.
template <class T, int TOKENS, int RANKS>
inline void shrink_block(const T* x, const int64_t* tokens, const T* a, int64_t inputs, T* shrunk, int64_t width) {
    constexpr int64_t STEP = LANES * Element<T>::PAIR;
    f32x16 sums[TOKENS][RANKS];
    for (int t = 0; t < TOKENS; t++)
        for (int r = 0; r < RANKS; r++) sums[t][r] = splat(0.0f);
    const auto add = [&](const auto& read) {
        i32x16 factors[RANKS];
#pragma GCC unroll 8
        for (int r = 0; r < RANKS; r++) factors[r] = read(a + r * inputs);
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; t++) {
            const i32x16 values = read(x + tokens[t] * inputs);
#pragma GCC unroll 8
            for (int r = 0; r < RANKS; r++) sums[t][r] = dot<T>(sums[t][r], values, factors[r]);
        }
    };
    int64_t k = 0;
    for (; k + STEP <= inputs; k += STEP) add([k](const T* row) { return load_lanes(row + k); });
    if (k < inputs) add([k, inputs](const T* row) { return load_rest(row + k, inputs - k); });
    for (int t = 0; t < TOKENS; t++)
        for (int r = 0; r < RANKS; r++) shrunk[tokens[t] * width + r] = narrow<T>(reduce_add(sums[t][r]));
}

template <class T, int RANKS>
inline void shrink_tokens(const T* x, const int64_t* tokens, int64_t count, const T* a, int64_t inputs, T* shrunk,
                          int64_t width) {
    int64_t i = 0;
    for (; i + TOKENS_AT_ONCE <= count; i += TOKENS_AT_ONCE)
        shrink_block<T, TOKENS_AT_ONCE, RANKS>(x, tokens + i, a, inputs, shrunk, width);
    for (; i < count; i++) shrink_block<T, 1, RANKS>(x, tokens + i, a, inputs, shrunk, width);
}

// x A^T of one tile's tokens, for RANKS_AT_ONCE ranks from `first` on.
template <class T>
inline void shrink_tile(const T* x, int64_t inputs, const AdaptedMatrix& matrix, const Step::AdapterTile& tile, int64_t first) {
    const LowRank& own = tile.adapter[matrix.number];
    if (!own.a || first >= own.num_ranks) return;
    const int64_t* tokens = matrix.step->adapted.data() + tile.first;
    const T* a = static_cast<const T*>(own.a) + first * inputs;
    T* to = static_cast<T*>(matrix.shrunk) + first;
    if (first + RANKS_AT_ONCE <= own.num_ranks)
        return shrink_tokens<T, RANKS_AT_ONCE>(x, tokens, tile.count, a, inputs, to, matrix.width);
    for (; first < own.num_ranks; first++, a += inputs, to++)
        shrink_tokens<T, 1>(x, tokens, tile.count, a, inputs, to, matrix.width);
}

// x A^T of all tokens with adapters, before the product. x: [num_tokens, inputs]
template <class T>
inline void shrink(Team& team, const T* x, int64_t inputs, const AdaptedMatrix& matrix) {
    const auto& tiles = matrix.step->adapter_tiles;
    const auto adapts = [&](const Step::AdapterTile& tile) { return tile.adapter[matrix.number].a != nullptr; };
    if (std::none_of(tiles.begin(), tiles.end(), adapts)) return;
    const int64_t blocks = (matrix.width + RANKS_AT_ONCE - 1) / RANKS_AT_ONCE;
    team.share(int64_t(tiles.size()) * blocks, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) shrink_tile(x, inputs, matrix, tiles[i / blocks], i % blocks * RANKS_AT_ONCE);
    });
}

// What is added to sixteen outputs: two sums by turns, to hide latency, in one order for a rank.
template <class T>
inline f32x16 expand(const T* shrunk, const T* b, int64_t rank) {
    constexpr int64_t PAIR = Element<T>::PAIR;
    const auto add = [=](f32x16 sum, int64_t r) { return dot<T>(sum, broadcast(shrunk + r), load_lanes(b + r * PANEL)); };
    f32x16 even = splat(0.0f), odd = even;
    int64_t r = 0;
    for (; r + 2 * PAIR <= rank; r += 2 * PAIR) {
        even = add(even, r);
        odd = add(odd, r + PAIR);
    }
    if (r < rank) even = add(even, r);
    return even + odd;
}

// The panel after the next one, while the product's own weights are read. With many rows, all panels are in a cache soon.
template <class T>
inline void fetch_later(const T* b, int64_t size) {
    const char* next = reinterpret_cast<const char*>(b + 2 * size);
    for (int64_t line = 0; line < size * int64_t(sizeof(T)); line += 64) __builtin_prefetch(next + line);
}

// What an adapter adds to the first and last sixteen outputs of a panel.
struct Added {
    f32x16 first, last;
};

// Apart from the products' own code, which is all that steps without adapters run.
template <class T>
[[gnu::noinline]] Added expand_panel(const AdaptedMatrix& matrix, const LowRank& own, int64_t token, int64_t panel) {
    const T* shrunk = static_cast<const T*>(matrix.shrunk) + token * matrix.width;
    const T* b = static_cast<const T*>(own.b) + panel * own.rank * PANEL;
    if (matrix.step->num_tokens <= MAX_ROWS) fetch_later(b, own.rank * PANEL);
    const int64_t first = own.firsts[matrix.parts[2 * panel]], last = own.firsts[matrix.parts[2 * panel + 1]];
    Added found{splat(0.0f), splat(0.0f)};
    if (first >= 0) found.first = expand(shrunk + first, b, own.rank);
    if (last >= 0) found.last = expand(shrunk + last, b + LANES * Element<T>::PAIR, own.rank);
    return found;
}

// Called for each panel of a product before it is stored. A token without an adapter keeps its bits, signs of zeros too.
template <class T>
inline void add_low_rank(const AdaptedMatrix& matrix, int64_t token, int64_t panel, f32x16& a, f32x16& b) {
    if (!matrix.in_step()) return;
    const LowRank* adapter = matrix.step->token_adapters[token];
    if (!adapter || !adapter[matrix.number].a) return;
    const Added added = expand_panel<T>(matrix, adapter[matrix.number], token, panel);
    a += added.first;
    b += added.last;
}
