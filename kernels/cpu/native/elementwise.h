// Owns what is done to each token by itself: embedding, norms, rotation of queries and keys, and the cache's writes.
// Never mixes tokens.
#pragma once

#include <cmath>

#include "cache.h"
#include "step.h"
#include "team.h"
#include "vector.h"

// Sum of squares of `size` values, in one order.
template <class F>
inline float sum_of_squares(int64_t size, const F& at) {
    f32x16 sums = splat(0.0f);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const f32x16 values = at(i, f32x16{});
        sums += values * values;
    }
    float rest = 0.0f;
    for (; i < size; i++) {
        const float value = at(i, 0.0f);
        rest += value * value;
    }
    return reduce_add(sums) + rest;
}

inline float rms_scale(float squares, int64_t size, float eps) { return 1.0f / std::sqrt(squares / size + eps); }

// out = rms_norm(x + residual) * weight, and residual = x + residual. `fresh`: there is no residual yet.
template <class T>
void add_rms_norm(const T* x, float* residual, bool fresh, const float* weight, float eps, int64_t size, T* out) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        store(residual + i, fresh ? load(x + i) : load(residual + i) + load(x + i));
    for (; i < size; i++) residual[i] = fresh ? widen(x[i]) : residual[i] + widen(x[i]);
    struct At {
        const float* values;
        f32x16 operator()(int64_t i, f32x16) const { return load(values + i); }
        float operator()(int64_t i, float) const { return values[i]; }
    };
    const float scale = rms_scale(sum_of_squares(size, At{residual}), size, eps);
    for (i = 0; i + LANES <= size; i += LANES) store(out + i, load(residual + i) * splat(scale) * load(weight + i));
    for (; i < size; i++) out[i] = narrow<T>(residual[i] * scale * weight[i]);
}

// [cos | sin] of a token's angles, each [half]. position(i): by which pair i is rotated.
template <class Position>
void rotation(const Position& position, const float* frequencies, const float* factors, int64_t half, float* out) {
    for (int64_t i = 0; i < half; i++) {
        const float angle = float(position(i)) * frequencies[i];
        out[i] = std::cos(angle) * factors[i];
        out[half + i] = std::sin(angle) * factors[i];
    }
}

// One head, normalised if there is a weight, with pairs (i, i + size / 2) rotated; float32 inside. `size`: a multiple of 16.
template <class T>
void rotate(const T* x, const float* norm, float eps, const float* rotation, int64_t size, T* out) {
    const int64_t half = size / 2;
    float wide[MAX_HEAD_DIM], rotated[MAX_HEAD_DIM];
    for (int64_t i = 0; i < size; i += LANES) store(wide + i, load(x + i));
    if (norm) {
        float squares = 0.0f;
        for (int64_t i = 0; i < size; i++) squares += wide[i] * wide[i];
        const float scale = rms_scale(squares, size, eps);
        for (int64_t i = 0; i < size; i++) wide[i] *= scale * norm[i];
    }
    for (int64_t i = 0; i < half; i++) {
        rotated[i] = wide[i] * rotation[i] - wide[half + i] * rotation[half + i];
        rotated[half + i] = wide[half + i] * rotation[i] + wide[i] * rotation[half + i];
    }
    for (int64_t i = 0; i < size; i += LANES) store(out + i, load(rotated + i));
}

// Queries, keys and values of one token: queries rotated into `q`, keys rotated and values as they are into the cache.
template <class T, class C = T>
struct RotateAndCache {
    const T* qkv;
    int64_t stride;  // of a token's queries, keys and values
    const float *q_norm, *k_norm, *rotations;
    float eps;
    int64_t heads;
    Cache<T, C> cache;
    T* q;

    void operator()(const Step& step, int64_t token) const {
        const int64_t size = cache.head_dim, kv_heads = cache.kv_heads;
        const T* x = qkv + token * stride;
        const float* angles = rotations + token * size;
        for (int64_t head = 0; head < heads; head++)
            rotate(x + head * size, q_norm, eps, angles, size, q + (token * heads + head) * size);
        const int64_t slot = step.slots[token], block = slot / cache.block_size, offset = slot % cache.block_size;
        T rotated[MAX_HEAD_DIM];
        for (int64_t head = 0; head < kv_heads; head++) {
            rotate(x + (heads + head) * size, k_norm, eps, angles, size, rotated);
            cache.write_key(block, head, offset, rotated);
            cache.write_value(block, head, offset, x + (heads + kv_heads + head) * size);
        }
        clear_after(step, token, block, offset);
    }

    // A group's values that nobody has written are multiplied by weights of zero: they must be finite. Those behind a
    // row's last token are cleared when the row begins the group; no other row writes there.
    void clear_after(const Step& step, int64_t token, int64_t block, int64_t offset) const {
        const int64_t row = step.rows[token], position = step.positions[token];
        if (position + 1 < step.contexts[row] + step.counts[row] || position - position % LANES < step.contexts[row]) return;
        for (int64_t head = 0; head < cache.kv_heads; head++)
            for (int64_t o = offset + 1; o < offset - offset % LANES + LANES; o++) cache.clear_value(block, head, o);
    }
};
