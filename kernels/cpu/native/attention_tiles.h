// Owns attention's two products by the matrix unit: q K^T of 16 queries with 16 keys, and p V of 16 queries over 16 keys.
// Never lets a query's sums depend on how many queries are beside it.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "tiles.h"
#include "vector.h"

// How many keys are softened together: scores of one query, one group of sixteen after the other.
constexpr int KEYS = 128;

// For types that the unit does not multiply, and processors that have none: never taken.
template <class T>
struct NoTilePass {
    const T *keys[KEYS / LANES], *values[KEYS / LANES];

    NoTilePass(int64_t, int64_t) {}
    explicit operator bool() const { return false; }
    T* query(int64_t) { return nullptr; }
    template <class C>
    void widen(int, const C*, const C*) {}
    void take(int64_t) {}
    void score(int64_t, int, float*) {}
    void mix(const T*, int, float*) {}
};

#if MATRIX_UNIT

// One pass of a step's tile of queries over their keys; one object a thread at a time. The unit's tiles 0 to 3 are sums; 4 and 5
// are q and keys of 32 numbers of a head; 6 and 7 are halves of such: the last 16 numbers of a head of 16 more, and the weights and
// values of 16 keys.
class MatrixPass {
   public:
    const bf16 *keys[KEYS / LANES], *values[KEYS / LANES];  // groups, as cache.h lays them out

    MatrixPass(int64_t num_queries, int64_t head_dim) : used_(has_matrix_unit()), head_dim_(head_dim) {
        if (used_) queries().resize(num_queries * head_dim);
    }

    explicit operator bool() const { return used_; }

    bf16* query(int64_t i) { return queries().data() + i * head_dim_; }

    // Group `i` from bytes, once for all queries.
    template <class C>
    void widen(int i, const C* key_bytes, const C* value_bytes) {
        thread_local std::vector<bf16> wide;
        const int64_t size = LANES * head_dim_;
        wide.resize(2 * KEYS / LANES * size);
        bf16 *key = wide.data() + 2 * i * size, *value = key + size;
        widen_lanes(key_bytes, size, key);
        widen_lanes(value_bytes, size, value);
        keys[i] = key;
        values[i] = value;
    }

    // What follows is for so many queries, at most TILE_ROWS.
    void take(int64_t rows) { tiles_.shape(rows, shapes); }

    // scores [rows, KEYS]: the first `count` groups of it.
    void score(int64_t query, int count, float* scores) {
        settle();
        const bf16* q = queries().data() + query * head_dim_;
        int i = 0;
        for (; i + 4 <= count; i += 4) score_groups<4>(q, i, scores);
        for (; i < count; i++) score_groups<1>(q, i, scores);
    }

    // sums [rows, head_dim] += weights [rows, KEYS] times values, over the first `count` groups.
    void mix(const bf16* weights, int count, float* sums) const {
        settle();
        int64_t d = 0;
        for (; d + 4 * LANES <= head_dim_; d += 4 * LANES) mix_vectors<4>(weights, count, d, sums);
        for (; d < head_dim_; d += LANES) mix_vectors<1>(weights, count, d, sums);
    }

   private:
    static constexpr int64_t HALF = TILE_INPUTS / 2;

    static void shapes(Tiles::Shapes& shapes, int64_t rows) {
        for (int tile : {0, 1, 2, 3, 4}) shapes.set(tile, rows);
        shapes.set(5, TILE_INPUTS / 2);
        shapes.set(6, rows, HALF * sizeof(bf16));
        shapes.set(7, HALF / 2);
    }

    static std::vector<bf16>& queries() {
        thread_local std::vector<bf16> found;
        return found;
    }

    // Four groups at a time: a product takes as long as three others until its sums can be added to.
    template <int GROUPS>
    void score_groups(const bf16* q, int i, float* scores) const {
        const int64_t row = head_dim_ * sizeof(bf16);
        zero<GROUPS>();
        int64_t d = 0;
        for (; d + TILE_INPUTS <= head_dim_; d += TILE_INPUTS) {
            _tile_loadd(4, q + d, row);
            _tile_loadd(5, keys[i] + d * LANES, TILE_LINE);
            _tile_dpbf16ps(0, 4, 5);
            if constexpr (GROUPS == 4) {
                _tile_loadd(5, keys[i + 1] + d * LANES, TILE_LINE);
                _tile_dpbf16ps(1, 4, 5);
                _tile_loadd(5, keys[i + 2] + d * LANES, TILE_LINE);
                _tile_dpbf16ps(2, 4, 5);
                _tile_loadd(5, keys[i + 3] + d * LANES, TILE_LINE);
                _tile_dpbf16ps(3, 4, 5);
            }
        }
        if (d < head_dim_) {
            _tile_loadd(6, q + d, row);
            _tile_loadd(7, keys[i] + d * LANES, TILE_LINE);
            _tile_dpbf16ps(0, 6, 7);
            if constexpr (GROUPS == 4) {
                _tile_loadd(7, keys[i + 1] + d * LANES, TILE_LINE);
                _tile_dpbf16ps(1, 6, 7);
                _tile_loadd(7, keys[i + 2] + d * LANES, TILE_LINE);
                _tile_dpbf16ps(2, 6, 7);
                _tile_loadd(7, keys[i + 3] + d * LANES, TILE_LINE);
                _tile_dpbf16ps(3, 6, 7);
            }
        }
        keep<GROUPS>(scores + i * LANES, KEYS);
    }

    template <int VECTORS>
    void mix_vectors(const bf16* weights, int count, int64_t d, float* sums) const {
        const int64_t line = head_dim_ * 2 * sizeof(bf16), to = head_dim_ * sizeof(float);
        _tile_loadd(0, sums + d, to);
        if constexpr (VECTORS == 4) {
            _tile_loadd(1, sums + d + LANES, to);
            _tile_loadd(2, sums + d + 2 * LANES, to);
            _tile_loadd(3, sums + d + 3 * LANES, to);
        }
        for (int i = 0; i < count; i++) {
            const bf16* value = values[i] + d * 2;
            _tile_loadd(6, weights + i * LANES, KEYS * sizeof(bf16));
            _tile_loadd(7, value, line);
            _tile_dpbf16ps(0, 6, 7);
            if constexpr (VECTORS == 4) {
                _tile_loadd(7, value + 2 * LANES, line);
                _tile_dpbf16ps(1, 6, 7);
                _tile_loadd(7, value + 4 * LANES, line);
                _tile_dpbf16ps(2, 6, 7);
                _tile_loadd(7, value + 6 * LANES, line);
                _tile_dpbf16ps(3, 6, 7);
            }
        }
        keep<VECTORS>(sums + d, head_dim_);
    }

    template <int COUNT>
    static void zero() {
        _tile_zero(0);
        if constexpr (COUNT == 4) {
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
    }

    // The sums beside each other, in rows of so many numbers.
    template <int COUNT>
    static void keep(float* to, int64_t width) {
        const int64_t row = width * sizeof(float);
        _tile_stored(0, to, row);
        if constexpr (COUNT == 4) {
            _tile_stored(1, to + LANES, row);
            _tile_stored(2, to + 2 * LANES, row);
            _tile_stored(3, to + 3 * LANES, row);
        }
    }

    Tiles tiles_;
    const bool used_;
    const int64_t head_dim_;
};

template <class T>
using TilePass = std::conditional_t<std::is_same_v<T, bf16>, MatrixPass, NoTilePass<T>>;

#else

template <class T>
using TilePass = NoTilePass<T>;

#endif
