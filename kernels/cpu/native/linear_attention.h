// Owns linear attention: the short convolution, the gated delta rule over states in slots, and the gates of such models.
// Never sums in an order that depends on the step's other rows, or on where a text is cut into chunks.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "elementwise.h"
#include "step.h"
#include "vector.h"

// Where each token's numbers lie: those of one part of a projection are `stride` elements apart.
template <class T>
struct Columns {
    const T* first;
    int64_t stride;

    const T* of(int64_t token) const { return first + token * stride; }
};

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// NaN stays NaN.
inline f32x16 sigmoid(f32x16 x) { return splat(1.0f) / (splat(1.0f) + exponential(minimum(splat(88.0f), -x))); }

// Calls work(i, count) for each vector of `size` elements; the last one may have fewer than LANES.
template <class Work>
inline void by_vectors(int64_t size, const Work& work) {
    for (int64_t i = 0; i < size; i += LANES) work(i, std::min<int64_t>(LANES, size - i));
}

template <class T>
inline f32x16 load_some(const T* from, int64_t count) {
    if (count == LANES) return load(from);
    f32x16 value = splat(0.0f);
    for (int64_t i = 0; i < count; i++) value[i] = widen(from[i]);
    return value;
}

template <class T>
inline void store_some(T* to, f32x16 value, int64_t count) {
    if (count == LANES) return store(to, value);
    for (int64_t i = 0; i < count; i++) to[i] = narrow<T>(value[i]);
}

// silu(sum over j of weight[j] * the input kernel - 1 - j tokens ago), for the channels of a task in a row.
template <class T>
struct CausalConv {
    static constexpr int64_t BLOCK_CHANNELS = 128;

    Columns<T> x;
    const float* weight;  // [kernel, channels]
    int64_t kernel, channels;
    T* states;  // [slots, kernel - 1, channels]: the last inputs, oldest first
    T* out;     // [num_tokens, channels]

    int64_t num_blocks() const { return (channels + BLOCK_CHANNELS - 1) / BLOCK_CHANNELS; }
    int64_t num_tasks(const Step& step) const { return step.num_rows * num_blocks(); }

    void operator()(const Step& step, int64_t task) const {
        const int64_t row = task / num_blocks(), first = task % num_blocks() * BLOCK_CHANNELS;
        const int64_t size = std::min(BLOCK_CHANNELS, channels - first), past = kernel - 1;
        const int64_t begin = step.begins[row], count = step.counts[row];
        T* state = states + step.state_slots[row] * past * channels + first;
        // A row's input by its place in this step, before it where negative; null before the request's first token.
        const auto input = [&](int64_t token) -> const T* {
            if (token >= 0) return x.of(begin + token) + first;
            return step.contexts[row] ? state + (past + token) * channels : nullptr;
        };
        for (int64_t token = 0; token < count; token++)
            by_vectors(size, [&](int64_t i, int64_t lanes) {
                f32x16 total = splat(0.0f);
                for (int64_t j = 0; j < kernel; j++) {
                    const float* weights = weight + j * channels + first;
                    if (const T* from = input(token - past + j))
                        total = multiply_add(load_some(from + i, lanes), load_some(weights + i, lanes), total);
                }
                store_some(out + (begin + token) * channels + first + i, total * sigmoid(total), lanes);
            });
        if (!step.advances(row)) return;
        for (int64_t i = 0; i < past; i++) {  // in order: what is overwritten is not read again
            T* to = state + i * channels;
            if (const T* from = input(count - past + i))
                std::copy_n(from, size, to);
            else
                std::fill_n(to, size, T{});
        }
    }
};

// The heads of linear attention: value head h uses queries and keys of head h / group().
struct DeltaHeads {
    int64_t key_heads, value_heads, key_dim, value_dim;

    int64_t group() const { return value_heads / key_heads; }
    int64_t key_size() const { return key_heads * key_dim; }
    int64_t value_size() const { return value_heads * value_dim; }
    // [q | k | q k | decay | strength] of one token.
    int64_t prepared_size() const { return 2 * key_size() + key_heads + 2 * value_heads; }
};

// What the rule needs of a token besides its values, in float32.
struct Prepared {
    DeltaHeads heads;
    float* of_token;

    float* q(int64_t key_head) const { return of_token + key_head * heads.key_dim; }
    float* k(int64_t key_head) const { return q(key_head) + heads.key_size(); }
    float& product(int64_t key_head) const { return of_token[2 * heads.key_size() + key_head]; }  // q k
    float& decay(int64_t head) const { return of_token[2 * heads.key_size() + heads.key_heads + head]; }
    float& strength(int64_t head) const { return of_token[2 * heads.key_size() + heads.key_heads + heads.value_heads + head]; }
};

// Queries and keys of length one, the queries times key_dim^-1/2; decays and write strengths. A task: a token's key head,
// with the value heads that use it.
template <class T>
struct PrepareDelta {
    DeltaHeads heads;
    Columns<T> qkv, strength, step_size;
    const float *rates, *biases;  // [value_heads]
    float* out;                   // [num_tokens, prepared_size]

    int64_t num_tasks(const Step& step) const { return step.num_tokens * heads.key_heads; }

    void operator()(const Step&, int64_t task) const {
        const int64_t token = task / heads.key_heads, key_head = task % heads.key_heads, size = heads.key_dim;
        const Prepared to{heads, out + token * heads.prepared_size()};
        const T* x = qkv.of(token) + key_head * size;
        normalise(x, 1.0f / std::sqrt(float(size)), to.q(key_head));
        normalise(x + heads.key_size(), 1.0f, to.k(key_head));
        f32x16 products = splat(0.0f);
        by_vectors(size, [&](int64_t i, int64_t lanes) {
            products = multiply_add(load_some(to.q(key_head) + i, lanes), load_some(to.k(key_head) + i, lanes), products);
        });
        to.product(key_head) = reduce_add(products);
        for (int64_t head = key_head * heads.group(); head < (key_head + 1) * heads.group(); head++) {
            const float s = widen(step_size.of(token)[head]) + biases[head];
            const float softplus = s > 20.0f ? s : std::log1p(std::exp(s));
            to.decay(head) = std::exp(rates[head] * softplus);
            to.strength(head) = sigmoid(widen(strength.of(token)[head]));
        }
    }

   private:
    void normalise(const T* x, float factor, float* to) const {
        f32x16 squares = splat(0.0f);
        by_vectors(heads.key_dim, [&](int64_t i, int64_t lanes) {
            const f32x16 value = load_some(x + i, lanes);
            squares = multiply_add(value, value, squares);
        });
        const f32x16 scale = splat(factor / std::sqrt(reduce_add(squares) + 1e-6f));
        by_vectors(heads.key_dim, [&](int64_t i, int64_t lanes) {
            store_some(to + i, load_some(x + i, lanes) * scale, lanes);
        });
    }
};

// S <- decay S;  S <- S + k (strength (v - S^T k))^T;  read S^T q      (arXiv 2412.06464), token after token.
//
// A task is a block of one row's and head's columns, which are independent of each other, so that a block stays in the first
// cache for all tokens of a chunk. Token by token, any cut of a text has the same bits; products of many tokens would not.
template <class T>
struct DeltaRule {
#if defined(__AVX512F__)
    static constexpr int VECTORS = 4;
#else
    static constexpr int VECTORS = 2;  // what sixteen registers of half the size hold
#endif
    static constexpr int64_t WIDTH = VECTORS * LANES;

    DeltaHeads heads;
    Columns<T> qkv;
    float* prepared;  // [num_tokens, prepared_size]
    float* states;    // [slots, value_heads, key_dim, value_dim]
    T* out;           // [num_tokens, value_size]

    int64_t num_blocks() const { return (heads.value_dim + WIDTH - 1) / WIDTH; }
    int64_t num_tasks(const Step& step) const { return step.num_rows * heads.value_heads * num_blocks(); }

    void operator()(const Step& step, int64_t task) const {
        const int64_t first = task % num_blocks() * WIDTH, head = task / num_blocks() % heads.value_heads;
        const int64_t row = task / num_blocks() / heads.value_heads, size = std::min(WIDTH, heads.value_dim - first);
        const int64_t begin = step.begins[row], end = begin + step.counts[row], key_dim = heads.key_dim;
        float* state = states + (step.state_slots[row] * heads.value_heads + head) * key_dim * heads.value_dim + first;
        if (end - begin == 1 && size == WIDTH && step.contexts[row] && step.advances(row))
            return advance(begin, head, first, size, state, heads.value_dim);
        thread_local std::vector<float> copy;  // [key_dim, WIDTH], without the stride that maps all rows to a few lines
        copy.assign(key_dim * WIDTH, 0.0f);
        if (step.contexts[row])
            for (int64_t d = 0; d < key_dim; d++) std::copy_n(state + d * heads.value_dim, size, copy.data() + d * WIDTH);
        for (int64_t token = begin; token < end; token++) advance(token, head, first, size, copy.data(), WIDTH);
        if (step.advances(row))
            for (int64_t d = 0; d < key_dim; d++) std::copy_n(copy.data() + d * WIDTH, size, state + d * heads.value_dim);
    }

   private:
    // One token. state: [key_dim] rows of WIDTH columns, `stride` apart. What is read after the token is what was read
    // before it, decayed, and what the token writes times q k: the state is passed over twice, not three times.
    void advance(int64_t token, int64_t head, int64_t first, int64_t size, float* state, int64_t stride) const {
        const Prepared of{heads, prepared + token * heads.prepared_size()};
        const int64_t key_head = head / heads.group(), key_dim = heads.key_dim, place = head * heads.value_dim + first;
        const float *q = of.q(key_head), *k = of.k(key_head);
        f32x16 of_keys[VECTORS], of_queries[VECTORS], written[VECTORS];
        for (int c = 0; c < VECTORS; c++) of_keys[c] = of_queries[c] = splat(0.0f);
        for (int64_t d = 0; d < key_dim; d++) {
            const float* line = state + d * stride;
            if (stride != WIDTH)
                for (int c = 0; c < VECTORS; c++) __builtin_prefetch(line + AHEAD * stride + c * LANES);
            for (int c = 0; c < VECTORS; c++) {
                const f32x16 s = load(line + c * LANES);
                of_keys[c] = multiply_add(splat(k[d]), s, of_keys[c]);
                of_queries[c] = multiply_add(splat(q[d]), s, of_queries[c]);
            }
        }
        const T* v = qkv.of(token) + 2 * heads.key_size() + place;
        const f32x16 decay = splat(of.decay(head)), strength = splat(of.strength(head)), product = splat(of.product(key_head));
        for (int c = 0; c < VECTORS; c++) {
            const int64_t lanes = std::clamp<int64_t>(size - c * LANES, 0, LANES);
            written[c] = strength * multiply_add(-decay, of_keys[c], load_some(v + c * LANES, lanes));
            const f32x16 read = multiply_add(product, written[c], decay * of_queries[c]);
            store_some(out + token * heads.value_size() + place + c * LANES, read, lanes);
        }
        for (int64_t d = 0; d < key_dim; d++)
            for (int c = 0; c < VECTORS; c++) {
                float* at = state + d * stride + c * LANES;
                store(at, multiply_add(splat(k[d]), written[c], decay * load(at)));
            }
    }

    static constexpr int64_t AHEAD = 8;  // rows of a state that are fetched before they are read
};

// rms_norm(x) * silu(gate), the norm over each head. A task: a token's head.
template <class T>
struct GatedNorm {
    const T* x;  // [num_tokens, heads, size]
    Columns<T> gate;
    const float* weight;  // [size]
    float eps;
    int64_t heads, size;
    T* out;  // as x

    int64_t num_tasks(const Step& step) const { return step.num_tokens * heads; }

    void operator()(const Step&, int64_t task) const {
        const T *from = x + task * size, *gates = gate.of(task / heads) + task % heads * size;
        f32x16 squares = splat(0.0f);
        by_vectors(size, [&](int64_t i, int64_t lanes) {
            const f32x16 value = load_some(from + i, lanes);
            squares = multiply_add(value, value, squares);
        });
        const f32x16 scale = splat(rms_scale(reduce_add(squares), size, eps));
        by_vectors(size, [&](int64_t i, int64_t lanes) {
            const f32x16 g = load_some(gates + i, lanes);
            const f32x16 normed = load_some(from + i, lanes) * scale * load_some(weight + i, lanes);
            store_some(out + task * size + i, normed * (g * sigmoid(g)), lanes);
        });
    }
};

// x * sigmoid(gate), plus `other` if there is one. A gate of one number is the token's. A task: a token.
template <class T>
struct SigmoidGate {
    const T* x;  // [num_tokens, size]
    Columns<T> gate;
    bool by_token;
    const T* other;  // as x, or null
    int64_t size;
    T* out;  // as x

    int64_t num_tasks(const Step& step) const { return step.num_tokens; }

    void operator()(const Step&, int64_t token) const {
        const T* gates = gate.of(token);
        by_vectors(size, [&](int64_t i, int64_t lanes) {
            const f32x16 g = by_token ? splat(widen(*gates)) : load_some(gates + i, lanes);
            const f32x16 sum = other ? load_some(other + token * size + i, lanes) : splat(0.0f);
            store_some(out + token * size + i, multiply_add(load_some(x + token * size + i, lanes), sigmoid(g), sum), lanes);
        });
    }
};

// An operation's input, and where it is kept. Filled by the caller; mirrored in linear_attention.py.
struct DraftedPart {
    const void* x;  // of T: `size` numbers of each token, `stride` from the next one's
    int64_t stride, size;
    void* out;  // [tokens of rows with drafts, size]
};

// Copies what the rows with drafts give to an operation, so that it can be run again for the accepted tokens alone.
template <class T>
struct KeepDrafted {
    std::vector<DraftedPart> parts;

    int64_t num_tasks(const Step& step) const { return step.end_drafted() - step.begin_drafted(); }

    void operator()(const Step& step, int64_t task) const {
        for (const auto& [x, stride, size, out] : parts)
            std::copy_n(static_cast<const T*>(x) + (step.begin_drafted() + task) * stride, size,
                        static_cast<T*>(out) + task * size);
    }
};
