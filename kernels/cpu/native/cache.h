// Owns the layout of the paged KV cache: groups of sixteen keys side by side, so that a vector holds one of each.
// Never knows which request owns a block.
#pragma once

#include "vector.h"

constexpr int MAX_HEAD_DIM = 256;

// Keys:   [num_blocks, kv_heads, block_size / 16, head_dim / PAIR, 16, PAIR]
// Values: [num_blocks, kv_heads, block_size / PAIR, head_dim, PAIR]
// Both read like the panels of `Linear`: scores = q K^T sums over head_dim, the output = p V over keys.
template <class T>
struct Cache {
    static constexpr int PAIR = Element<T>::PAIR;
    T *keys, *values;
    int64_t block_size, kv_heads, head_dim;

    // The sixteen keys (or values) from `offset` on, a multiple of sixteen: 16 * head_dim elements.
    T* key_group(int64_t block, int64_t head, int64_t offset) const { return group(keys, block, head, offset); }
    T* value_group(int64_t block, int64_t head, int64_t offset) const { return group(values, block, head, offset); }

    void write_key(int64_t block, int64_t head, int64_t offset, const T* key) const {
        T* to = key_group(block, head, offset - offset % LANES) + offset % LANES * PAIR;
        for (int64_t d = 0; d < head_dim; d += PAIR)
            for (int i = 0; i < PAIR; i++) to[d * LANES + i] = key[d + i];
    }

    void write_value(int64_t block, int64_t head, int64_t offset, const T* value) const {
        T* to = value_at(block, head, offset);
        for (int64_t d = 0; d < head_dim; d++) to[d * PAIR] = value[d];
    }

    void clear_value(int64_t block, int64_t head, int64_t offset) const {
        T* to = value_at(block, head, offset);
        for (int64_t d = 0; d < head_dim; d++) to[d * PAIR] = T{};
    }

   private:
    T* group(T* from, int64_t block, int64_t head, int64_t offset) const {
        return from + ((block * kv_heads + head) * block_size + offset) * head_dim;
    }

    T* value_at(int64_t block, int64_t head, int64_t offset) const {
        return value_group(block, head, offset - offset % LANES) + offset % LANES / PAIR * head_dim * PAIR + offset % PAIR;
    }
};
