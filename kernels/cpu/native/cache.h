// Owns the layout of the paged KV cache: groups of sixteen keys side by side, so that a vector holds one of each.
// Never knows which request owns a block.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "e4m3.h"
#include "vector.h"

constexpr int MAX_HEAD_DIM = 256;

// Keys:   [num_blocks, kv_heads, block_size / 16, head_dim / PAIR, 16, PAIR]
// Values: [num_blocks, kv_heads, block_size / PAIR, head_dim, PAIR]
// Both read like the panels of `Linear`: scores = q K^T sums over head_dim, the output = p V over keys.
//
// C is T, or int8_t or e4m3: then a group of sixteen has its sixteen scales (float32) behind it, and the elements of a lane lie as
// `lanes` reads bytes: [.., PAIR, 16] instead of [.., 16, PAIR].
template <class T, class C = T>
struct Cache {
    static constexpr int PAIR = Element<T>::PAIR;
    static constexpr bool NARROW = !std::is_same_v<T, C>;
    C *keys, *values;
    int64_t block_size, kv_heads, head_dim;

    // The sixteen keys (or values) from `offset` on, a multiple of sixteen: 16 * head_dim elements.
    C* key_group(int64_t block, int64_t head, int64_t offset) const { return group(keys, block, head, offset); }
    C* value_group(int64_t block, int64_t head, int64_t offset) const { return group(values, block, head, offset); }

    const float* scales(const C* group) const { return reinterpret_cast<const float*>(group + LANES * head_dim); }

    void write_key(int64_t block, int64_t head, int64_t offset, const T* key) const {
        C* to = key_group(block, head, offset - offset % LANES);
        if constexpr (NARROW) {
            const float unit = set_scale(to, offset % LANES, key);
            for (int64_t d = 0; d < head_dim; d++) to[d * LANES + offset % LANES] = round(key[d], unit);
        } else {
            to += offset % LANES * PAIR;
            for (int64_t d = 0; d < head_dim; d += PAIR)
                for (int i = 0; i < PAIR; i++) to[d * LANES + i] = key[d + i];
        }
    }

    void write_value(int64_t block, int64_t head, int64_t offset, const T* value) const {
        C* to = value_group(block, head, offset - offset % LANES);
        if constexpr (NARROW) {
            const float unit = set_scale(to, offset % LANES, value);
            for (int64_t d = 0; d < head_dim; d++) to[value_place(offset % LANES, d)] = round(value[d], unit);
        } else {
            for (int64_t d = 0; d < head_dim; d++) to[value_place(offset % LANES, d)] = value[d];
        }
    }

    void clear_value(int64_t block, int64_t head, int64_t offset) const {
        C* to = value_group(block, head, offset - offset % LANES);
        for (int64_t d = 0; d < head_dim; d++) to[value_place(offset % LANES, d)] = C{};
        if constexpr (NARROW) const_cast<float*>(scales(to))[offset % LANES] = 0.0f;
    }

   private:
    C* group(C* from, int64_t block, int64_t head, int64_t offset) const {
        return from + ((block * kv_heads + head) * block_size + offset) * (head_dim + (NARROW ? int64_t(sizeof(float)) : 0));
    }

    // Where number `d` of a group's value `i` is.
    int64_t value_place(int64_t i, int64_t d) const {
        const int64_t pair = i / PAIR * head_dim * PAIR;
        if constexpr (NARROW) return pair + d / LANES * LANES * PAIR + i % PAIR * LANES + d % LANES;
        return pair + d * PAIR + i % PAIR;
    }

    // The unit of a group's token `i`: its largest magnitude over that of C, as in kernels/cpu/narrow_cache.py.
    float set_scale(C* group, int64_t i, const T* from) const {
        float largest = 0.0f;
        for (int64_t d = 0; d < head_dim; d++) {
            const float size = std::abs(widen(from[d]));
            largest = size > largest || size != size ? size : largest;  // what is no number is not hidden
        }
        return const_cast<float*>(scales(group))[i] = largest / (std::is_same_v<C, e4m3> ? 448.0f : 127.0f);
    }

    static C round(T value, float unit) {
        const float units = widen(value) / std::max(unit, std::numeric_limits<float>::min());
        if constexpr (std::is_same_v<C, e4m3>)
            return round_e4m3(units);
        else
            return units == units ? int8_t(std::nearbyint(units)) : int8_t(0);
    }
};
