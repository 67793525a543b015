// Owns attention over the paged cache: softmax(q k^T * scale) v with an online softmax, causal, for rows of any kind.
// Never reads further than a row's blocks reach, and never sums in an order that depends on the step's other rows.
#pragma once

#include <algorithm>
#include <limits>

#include "attention_tiles.h"
#include "cache.h"
#include "step.h"
#include "vector.h"

// Keys that are summed by themselves, and then added to what those before them gave: the same numbers in the same order,
// whether one thread passes over all of a query's keys or several do.
constexpr int64_t SPLIT = 8 * KEYS;

// What a tile's queries have found so far.
struct AttentionSums {
    int64_t num_queries, head_dim;
    float* values;  // [num_queries, head_dim] weighted; the other two are behind it, a whole number of vectors each

    static int64_t padded(int64_t num_queries) { return (num_queries + LANES - 1) / LANES * LANES; }
    static int64_t size(int64_t num_queries, int64_t head_dim) { return num_queries * head_dim + 2 * padded(num_queries); }
    float* best() const { return values + num_queries * head_dim; }  // the largest score
    float* total() const { return best() + padded(num_queries); }     // of all weights

    void clear() const {
        std::fill(values, best(), 0.0f);
        std::fill(best(), total(), -std::numeric_limits<float>::infinity());
        std::fill(total(), total() + padded(num_queries), 0.0f);
    }

    // Adds what was found in the keys behind these. A query that sees none of some keys takes nothing from there. Compiled
    // once, so that it rounds alike for whoever calls it.
    [[gnu::noinline]] void add(const AttentionSums& behind) const {
        constexpr float NONE = -std::numeric_limits<float>::infinity();
        for (int64_t first = 0; first < num_queries; first += LANES) {
            const f32x16 mine = load(best() + first), theirs = load(behind.best() + first), now = maximum(theirs, mine);
            const f32x16 keep = exponential(mine - now), take = exponential(theirs - now);
            const i32x16 sees = theirs != splat(NONE);
            store(best() + first, sees ? now : mine);
            const f32x16 sum = multiply_add(load(total() + first), keep, load(behind.total() + first) * take);
            store(total() + first, sees ? sum : load(total() + first));
            for (int64_t query = first; query < std::min(first + LANES, num_queries); query++) {
                if (!sees[query - first]) continue;
                float* to = values + query * head_dim;
                const float* from = behind.values + query * head_dim;
                const f32x16 kept = splat(keep[query - first]), taken = splat(take[query - first]);
                for (int64_t d = 0; d < head_dim; d += LANES)
                    store(to + d, multiply_add(load(to + d), kept, load(from + d) * taken));
            }
        }
    }
};

// How a step's attention is shared out.
struct AttentionTasks {
    static constexpr int64_t NOWHERE = -1;

    struct Task {
        int64_t tile, kv_head, begin, end;  // keys of `begin` to `end`
        int64_t sums;                       // where in `memory` they go; NOWHERE: these are all keys that the tile sees
    };
    struct Divided {
        int64_t tile, kv_head, sums, splits;
    };
    std::vector<Task> tasks;
    std::vector<Divided> divided;  // what of it must be added up afterwards
    std::vector<float> memory;
};

template <class T, class C = T>
class Attention {
   public:
    const T* q;  // [num_tokens, heads, head_dim]
    Cache<T, C> cache;
    int64_t heads;
    float scale;
    int64_t window;  // how many tokens a query sees, its own included
    T* out;  // [num_tokens, heads, head_dim]

    // A task for each tile and KV head; for each of its splits, if it is so much of the step's work that threads would wait
    // for it. That is so with few rows, and with one that is far longer than the others.
    void share_out(const Step& step, int64_t threads, AttentionTasks& to) const {
        to.tasks.clear();
        to.divided.clear();
        int64_t work = 0, room = 0;
        for (const Step::Tile& tile : step.tiles) work += work_of(step, tile);
        const int64_t fair = threads > 1 ? work * cache.kv_heads / (TASKS_PER_THREAD * threads) : work;
        for (int64_t i = 0; i < int64_t(step.tiles.size()); i++) {
            const Step::Tile& tile = step.tiles[i];
            const int64_t begin = begin_of(step, tile), end = end_of(step, tile);
            const int64_t splits = (end - 1) / SPLIT - begin / SPLIT + 1;
            const int64_t size = AttentionSums::size(queries_of(tile), cache.head_dim);
            const bool divide = splits > 1 && work_of(step, tile) > fair && room + cache.kv_heads * splits * size <= MOST_SUMS;
            for (int64_t kv_head = 0; kv_head < cache.kv_heads; kv_head++) {
                if (!divide) {
                    to.tasks.push_back({i, kv_head, begin, end, AttentionTasks::NOWHERE});
                    continue;
                }
                to.divided.push_back({i, kv_head, room, splits});
                for (int64_t first = begin; first < end; first = end_of_split(first, end), room += size)
                    to.tasks.push_back({i, kv_head, first, end_of_split(first, end), room});
            }
        }
        if (int64_t(to.memory.size()) < room) to.memory.resize(room);
    }

    // A tile's queries of all heads that share one KV head. They pass over the keys together, KEYS at a time, so that
    // these are read from memory once. Keys begin at a multiple of KEYS for every query, and what is before its window adds
    // nothing: a query's sums are the same whichever chunk it came in.
    void run(const Step& step, const AttentionTasks::Task& task, float* memory) const {
        const Step::Tile& tile = step.tiles[task.tile];
        const int64_t num_queries = queries_of(tile), group = heads / cache.kv_heads;
        const int64_t size = AttentionSums::size(num_queries, cache.head_dim);
        TilePass<T> by_tiles(num_queries, cache.head_dim);
        for (int64_t query = 0; by_tiles && query < num_queries; query++)
            std::copy_n(q + place(tile, task.kv_head, group, query), cache.head_dim, by_tiles.query(query));
        if (task.sums != AttentionTasks::NOWHERE)
            return pass(step, task, task.begin, task.end, by_tiles, {num_queries, cache.head_dim, memory + task.sums});
        thread_local std::vector<float> own;
        own.resize(std::max<size_t>(own.size(), 2 * size));
        const AttentionSums all{num_queries, cache.head_dim, own.data()}, behind{num_queries, cache.head_dim, own.data() + size};
        for (int64_t first = task.begin; first < task.end; first = end_of_split(first, task.end)) {
            const AttentionSums& found = first == task.begin ? all : behind;
            pass(step, task, first, end_of_split(first, task.end), by_tiles, found);
            if (first != task.begin) all.add(behind);
        }
        finish(tile, task.kv_head, all);
    }

    // Adds up what was found in the splits of a tile.
    void join(const Step& step, const AttentionTasks::Divided& divided, float* memory) const {
        const Step::Tile& tile = step.tiles[divided.tile];
        const int64_t num_queries = queries_of(tile), size = AttentionSums::size(num_queries, cache.head_dim);
        const AttentionSums all{num_queries, cache.head_dim, memory + divided.sums};
        for (int64_t i = 1; i < divided.splits; i++) all.add({num_queries, cache.head_dim, memory + divided.sums + i * size});
        finish(tile, divided.kv_head, all);
    }

   private:
    static constexpr int64_t TASKS_PER_THREAD = 4;  // at least, where work can be divided
    static constexpr int64_t MOST_SUMS = 16 << 20;  // numbers, 64 MiB: what is beyond is not divided
    static constexpr int PAIR = Element<T>::PAIR;
    static constexpr bool NARROW = Cache<T, C>::NARROW;

    int64_t queries_of(const Step::Tile& tile) const { return tile.num_tokens * (heads / cache.kv_heads); }
    static int64_t end_of(const Step& step, const Step::Tile& tile) {
        return step.contexts[tile.row] + tile.first_token + tile.num_tokens;
    }
    int64_t begin_of(const Step& step, const Step::Tile& tile) const {
        return std::max<int64_t>(end_of(step, tile) - tile.num_tokens + 1 - window, 0) / KEYS * KEYS;
    }
    int64_t work_of(const Step& step, const Step::Tile& tile) const {
        return tile.num_tokens * (end_of(step, tile) - begin_of(step, tile));
    }
    static int64_t end_of_split(int64_t first, int64_t end) { return std::min(first / SPLIT * SPLIT + SPLIT, end); }

    // AttentionSums over the keys of `begin` to `end`, which are of one split.
    void pass(const Step& step, const AttentionTasks::Task& task, int64_t begin, int64_t end, TilePass<T>& by_tiles,
              const AttentionSums& sums) const {
        const Step::Tile& tile = step.tiles[task.tile];
        const int64_t context = step.contexts[tile.row] + tile.first_token;  // before the tile's first token
        sums.clear();
        Groups here = find(step, tile.row, task.kv_head, begin, task.end);
        for (int64_t first = begin; first < end; first += KEYS) {
            const Groups next = find(step, tile.row, task.kv_head, first + KEYS, task.end);
            if (by_tiles) widen(here, by_tiles);
            for (int64_t query = 0; query < sums.num_queries;) {  // flattened (token, head of the group)
                Part part{this, &tile, task.kv_head, heads / cache.kv_heads, query, context, first, &here, &next,
                          sums.values + query * cache.head_dim, sums.best() + query, sums.total() + query};
                const int64_t left = sums.num_queries - query;
                query += by_tiles ? part.run_by_tiles(by_tiles, left) : part.template run<MAX_ROWS>(left);
            }
            here = next;
        }
    }

    void finish(const Step::Tile& tile, int64_t kv_head, const AttentionSums& sums) const {
        for (int64_t query = 0; query < sums.num_queries; query++) {
            T* to = out + place(tile, kv_head, heads / cache.kv_heads, query);
            const float* from = sums.values + query * cache.head_dim;
            const f32x16 inverse = splat(1.0f / sums.total()[query]);
            for (int64_t d = 0; d < cache.head_dim; d += LANES) store(to + d, load(from + d) * inverse);
        }
    }

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

        // q k^T of keys up to `position`, within its window, to weights; what the sums so far are to be multiplied with. If
        // there are none, the weights are 0.
        float soften(const float* scores, int64_t position, int r, T* weights) const {
            constexpr float NONE = -std::numeric_limits<float>::infinity();
            const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
            f32x16 seen[KEYS / LANES];
            f32x16 largest = splat(NONE);
            const int64_t before = position - of->window - first;  // the last key that is before the window
            if (before >= KEYS - 1 || position < first) {
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
