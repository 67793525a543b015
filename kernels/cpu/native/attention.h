// Owns attention over the paged cache: softmax(q k^T * scale) v with an online softmax, causal, for rows of any kind.
// Never reads further than a row's blocks reach, and never sums in an order that depends on the step's other rows.
#pragma once

#include <algorithm>
#include <limits>

#include "attention_tiles.h"
#include "cache.h"
#include "step.h"
#include "vector.h"

template <class T, class C = T>
class Attention {
   public:
    const T* q;  // [num_tokens, heads, head_dim]
    Cache<T, C> cache;
    int64_t heads;
    float scale;
    int64_t window;  // how many tokens a query sees, its own included
    T* out;  // [num_tokens, heads, head_dim]

    int64_t num_tasks(const Step& step) const { return int64_t(step.tiles.size()) * cache.kv_heads; }

    // A tile's queries of all heads that share one KV head. They pass over the keys together, KEYS at a time, so that
    // these are read from memory once. Keys begin at a multiple of KEYS for every query, and what is before its window adds
    // nothing: a query's sums are the same whichever chunk it came in.
    void operator()(const Step& step, int64_t task) const {
        const Step::Tile& tile = step.tiles[task / cache.kv_heads];
        const int64_t kv_head = task % cache.kv_heads, group = heads / cache.kv_heads;
        const int64_t context = step.contexts[tile.row] + tile.first_token;  // before the tile's first token
        const int64_t num_queries = tile.num_tokens * group, length = context + tile.num_tokens;
        const int64_t head_dim = cache.head_dim;
        thread_local std::vector<float> sums;  // [num_queries, head_dim]
        thread_local std::vector<float> best, total;
        sums.assign(num_queries * head_dim, 0.0f);
        best.assign(num_queries, -std::numeric_limits<float>::infinity());
        total.assign(num_queries, 0.0f);
        const int64_t begin = std::max<int64_t>(context + 1 - window, 0) / KEYS * KEYS;
        Groups here = find(step, tile.row, kv_head, begin, length);
        TilePass<T> by_tiles(num_queries, head_dim);
        for (int64_t query = 0; by_tiles && query < num_queries; query++)
            std::copy_n(q + place(tile, kv_head, group, query), head_dim, by_tiles.query(query));
        for (int64_t first = begin; first < length; first += KEYS) {
            const Groups next = find(step, tile.row, kv_head, first + KEYS, length);
            if (by_tiles) widen(here, by_tiles);
            for (int64_t query = 0; query < num_queries;) {  // flattened (token, head of the group)
                Part part{this, &tile, kv_head, group, query, context, first, &here, &next,
                          sums.data() + query * head_dim, best.data() + query, total.data() + query};
                const int64_t left = num_queries - query;
                query += by_tiles ? part.run_by_tiles(by_tiles, left) : part.template run<MAX_ROWS>(left);
            }
            here = next;
        }
        for (int64_t query = 0; query < num_queries; query++) {
            T* to = out + place(tile, kv_head, group, query);
            const f32x16 inverse = splat(1.0f / total[query]);
            for (int64_t d = 0; d < head_dim; d += LANES) store(to + d, load(sums.data() + query * head_dim + d) * inverse);
        }
    }

   private:
    static constexpr int PAIR = Element<T>::PAIR;
    static constexpr bool NARROW = Cache<T, C>::NARROW;

    // Where keys and values of up to KEYS positions lie, sixteen in a group.
    struct Groups {
        int count = 0;
        const C* keys[KEYS / LANES] = {};
        const C* values[KEYS / LANES] = {};
    };

    Groups find(const Step& step, int64_t row, int64_t kv_head, int64_t first, int64_t length) const {
        Groups found;
        for (int64_t position = first; position < std::min<int64_t>(first + KEYS, length); position += LANES) {
            const int64_t block = step.block(row, position), offset = position % cache.block_size;
            found.keys[found.count] = cache.key_group(block, kv_head, offset);
            found.values[found.count++] = cache.value_group(block, kv_head, offset);
        }
        return found;
    }

    // Where tiles are loaded from: the groups themselves, or what their bytes are.
    void widen(const Groups& here, TilePass<T>& pass) const {
        for (int i = 0; i < here.count; i++)
            if constexpr (NARROW) {
                pass.widen(i, here.keys[i], here.values[i]);
            } else {
                pass.keys[i] = here.keys[i];
                pass.values[i] = here.values[i];
            }
    }

    int64_t place(const Step::Tile& tile, int64_t kv_head, int64_t group, int64_t query) const {
        const int64_t token = tile.begin + tile.first_token + query / group;
        return (token * heads + kv_head * group + query % group) * cache.head_dim;
    }

    // Up to MAX_ROWS queries against KEYS keys.
    struct Part {
        const Attention* of;
        const Step::Tile* tile;
        int64_t kv_head, group, query, context, first;
        const Groups *here, *next;
        float *sums, *best, *total;

        template <int ROWS>
        int64_t run(int64_t left) const {
            if constexpr (ROWS > 1)
                if (left < ROWS) return run<ROWS - 1>(left);
            const int64_t head_dim = of->cache.head_dim;
            const T* q[ROWS];
            for (int r = 0; r < ROWS; r++) q[r] = of->q + of->place(*tile, kv_head, group, query + r);
            alignas(64) float scores[ROWS][KEYS];
            for (int i = 0; i < here->count; i++) score<ROWS>(q, i, head_dim, scores);
            alignas(64) T weights[ROWS][KEYS];
            float keep[ROWS];
            for (int r = 0; r < ROWS; r++) keep[r] = soften(scores[r], context + (query + r) / group, r, weights[r]);
            for (int64_t d = 0; d < head_dim; d += 2 * LANES)
                if (d + LANES < head_dim)
                    mix<ROWS, 2>(weights, keep, d, head_dim);
                else
                    mix<ROWS, 1>(weights, keep, d, head_dim);
            return ROWS;
        }

        // Up to TILE_ROWS queries. The first ones fetch what is read next, as below.
        int64_t run_by_tiles(TilePass<T>& pass, int64_t left) const {
            const int64_t rows = std::min(left, TILE_ROWS), head_dim = of->cache.head_dim;
            alignas(64) float scores[TILE_ROWS][KEYS];
            alignas(64) T weights[TILE_ROWS][KEYS];
            pass.take(rows);
            if constexpr (!NARROW)  // else they have been widened
                for (int i = 0; query == 0 && i < here->count; i++) fetch(here->values[i]);
            pass.score(query, here->count, scores[0]);
            for (int64_t r = 0; r < rows; r++) {
                const float keep = soften(scores[r], context + (query + r) / group, r, weights[r]);
                if (keep == 1.0f) continue;
                for (int64_t d = r * head_dim; d < (r + 1) * head_dim; d += LANES) store(sums + d, load(sums + d) * splat(keep));
            }
            for (int i = 0; query == 0 && i < next->count; i++) fetch(next->keys[i]);
            pass.mix(weights[0], here->count, sums);
            return rows;
        }

        void fetch(const C* group) const {
            const char* from = reinterpret_cast<const char*>(group);
            for (int64_t line = 0; line < LANES * of->cache.head_dim * int64_t(sizeof(C)); line += 64) __builtin_prefetch(from + line);
        }

        // Blocks lie anywhere in memory: what is read next is fetched meanwhile, here the group's values.
        template <int ROWS>
        void score(const T* const (&q)[ROWS], int i, int64_t head_dim, float (&scores)[ROWS][KEYS]) const {
            f32x16 found[ROWS];
            for (int r = 0; r < ROWS; r++) found[r] = splat(0.0f);
            for (int64_t d = 0; d < head_dim; d += PAIR) {
                __builtin_prefetch(here->values[i] + d * LANES);
                const i32x16 k = lanes<T>(here->keys[i] + d * LANES);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) found[r] = dot<T>(found[r], broadcast(q[r] + d), k);
            }
            for (int r = 0; r < ROWS; r++) store(scores[r] + i * LANES, found[r]);
        }

        // q k^T of keys up to `position`, within its window, to weights; what the sums so far are to be multiplied with.
        float soften(const float* scores, int64_t position, int r, T* weights) const {
            constexpr float NONE = -std::numeric_limits<float>::infinity();
            const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
            f32x16 seen[KEYS / LANES];
            f32x16 largest = splat(NONE);
            const int64_t before = position - of->window - first;  // the last key that is before the window
            if (before >= KEYS - 1) {
                for (int i = 0; i < here->count; i++) store(weights + i * LANES, splat(0.0f));
                return 1.0f;
            }
            for (int i = 0; i < here->count; i++) {
                const int32_t last = int32_t(std::min<int64_t>(position - first - i * LANES, LANES));
                f32x16 scale = splat(of->scale);
                if constexpr (NARROW) scale *= load(of->cache.scales(here->keys[i]));
                seen[i] = lane <= (i32x16{} + last) ? load(scores + i * LANES) * scale : splat(NONE);
                if (before >= i * LANES) {
                    const int32_t unseen = int32_t(std::min<int64_t>(before - i * LANES, LANES));
                    seen[i] = lane > (i32x16{} + unseen) ? seen[i] : splat(NONE);
                }
                largest = maximum(largest, seen[i]);
            }
            const float now = std::max(best[r], reduce_max(largest));
            const float kept = exponential(splat(best[r] - now))[0];
            f32x16 mass = splat(0.0f);
            for (int i = 0; i < here->count; i++) {
                f32x16 weight = exponential(seen[i] - splat(now));
                if constexpr (NARROW) {  // a value's unit is part of its weight, and not of what weights sum to
                    mass += weight;
                    weight *= load(of->cache.scales(here->values[i]));
                }
                store(weights + i * LANES, weight);
                if constexpr (!NARROW) mass += load(weights + i * LANES);  // as they are multiplied: they sum to one
            }
            best[r] = now;
            total[r] = total[r] * kept + reduce_add(mass);
            return kept;
        }

        template <int ROWS, int VECTORS>
        void mix(const T (&weights)[ROWS][KEYS], const float (&keep)[ROWS], int64_t d, int64_t head_dim) const {
            f32x16 mixed[ROWS][VECTORS];
            for (int r = 0; r < ROWS; r++)
                for (int c = 0; c < VECTORS; c++) mixed[r][c] = load(sums + r * head_dim + d + c * LANES) * splat(keep[r]);
            for (int i = 0; i < here->count; i++)
                for (int64_t key = 0; key < LANES; key += PAIR) {
                    i32x16 v[VECTORS];
                    for (int c = 0; c < VECTORS; c++) {
                        const int64_t offset = key * head_dim + (d + c * LANES) * PAIR;
                        __builtin_prefetch(next->keys[i] + offset);  // of as many elements
                        v[c] = lanes<T>(here->values[i] + offset);
                    }
#pragma GCC unroll 8
                    for (int r = 0; r < ROWS; r++) {
                        const i32x16 weight = broadcast(weights[r] + i * LANES + key);
                        for (int c = 0; c < VECTORS; c++) mixed[r][c] = dot<T>(mixed[r][c], weight, v[c]);
                    }
                }
            for (int r = 0; r < ROWS; r++)
                for (int c = 0; c < VECTORS; c++) store(sums + r * head_dim + d + c * LANES, mixed[r][c]);
        }
    };
};
