// Owns the program that a model is to the CPU: operations recorded once, and run in every step, one after the other.
// Long: it has most operations, and the C interface of all.
// Never allocates once it has run its largest step, and never looks at what an operation is for.
#include <limits>
#include <memory>
#include <system_error>
#include <utility>

#include "attention.h"
#include "elementwise.h"
#include "experts.h"
#include "linear.h"
#include "linear_attention.h"
#include "low_rank.h"
#include "ranks.h"
#include "sample.h"
#include "step.h"
#include "team.h"

struct Program {
    Program(Team& threads, int64_t block_size) : team(threads) { step.block_size = block_size; }

    Team& team;
    Step step;
    std::vector<std::function<void()>> operations;  // run by one thread, which shares out what they do
    AdaptedMatrix adapted;                          // of the product that is recorded next
    AttentionTasks attention;                       // of the layer that is running

    void add(std::function<void()> operation) { operations.push_back(std::move(operation)); }

    // What a step may name: tokens of the embedding, blocks of the cache, slots of states (-1: there are no states). None
    // were recorded yet.
    int64_t num_token_ids = std::numeric_limits<int64_t>::max();
    int64_t num_blocks = std::numeric_limits<int64_t>::max();
    int64_t num_states = -1;

    bool has_places = false;  // an operation reads a token's place, or what fills it

    // The layer with the fewest slots decides which a step may name.
    void have_states(int64_t slots) { num_states = num_states < 0 ? slots : std::min(num_states, slots); }

    bool lost = false;       // a rank was, in an operation, and none is run after it
    Ranks* ranks = nullptr;  // whose segment stays in place during a run; null: operations need none

    enum Outcome : int { NOT_THERE = 0, DONE = 1, RANK_LOST = 2 };

    // NOT_THERE, with nothing done, if the step names what is not there: see Step::take and Step::place.
    Outcome run(const StepRows& rows) {
        if (!step.take(rows, num_token_ids, num_blocks, num_states)) return NOT_THERE;
        if (has_places && !step.place()) return NOT_THERE;
        if (!ranks) return run_all();
        Ranks::Use use(*ranks);
        return use ? run_all() : RANK_LOST;
    }

    Outcome run_all() {
        lost = false;
        team.run([this] {
            for (const auto& operation : operations) {
                operation();
                if (lost) return;
            }
        });
        return lost ? RANK_LOST : DONE;
    }

    // An operation on each of `count(step)` items by itself.
    template <class Count, class Work>
    void add_each(Count count, Work work) {
        add([this, count, work] {
            team.share(count(step), [&](int64_t first, int64_t last) {
                for (int64_t i = first; i < last; i++) work(step, i);
            });
        });
    }

    template <class Work>
    void add_each_token(Work work) {
        add_each([](const Step& step) { return step.num_tokens; }, work);
    }
};

// How many rows a matrix product has: all tokens, or those after which one is sampled.
enum Rows : int { TOKENS = 0, SAMPLED = 1 };

static int64_t count_rows(const Step& step, int rows) { return rows == SAMPLED ? step.num_sampled : step.num_tokens; }

template <class T, class Out>
static void store_panel(Out* out, const Linear<T>& linear, int64_t row, int64_t panel, f32x16 a, f32x16 b) {
    const int64_t n = linear.begin(panel), end = linear.end(panel);
    if (linear.scales) a *= load(linear.scales + n), b *= load(linear.scales + n + LANES);
    if (linear.bias) a += load(linear.bias + n), b += load(linear.bias + n + LANES);
    add_low_rank<T>(linear.adapted, row, panel, a, b);
    Out* to = out + row * linear.outputs + n;
    if (n + PANEL <= end) {
        store(to, a);
        store(to + LANES, b);
        return;
    }
    Out found[PANEL];
    store(found, a);
    store(found + LANES, b);
    std::copy(found, found + (end - n), to);
}

// SiLU, x / (1 + exp(-x)); or GELU by tanh (arXiv 1606.08415), which is x / (1 + exp(-2 sqrt(2 / pi) (x + 0.044715 x^3))).
template <bool GELU>
static f32x16 activate(f32x16 x) {
    f32x16 inner = x;
    if constexpr (GELU) inner = x * (splat(1.5957691216f) + splat(0.0713548163f) * x * x);
    return x / (splat(1.0f) + exponential(minimum(-inner, splat(88.0f))));
}

// A panel of a gated product holds sixteen gates, and the sixteen values that they are for.
template <bool GELU, class T>
static void store_gated(T* out, const Linear<T>& linear, int64_t row, int64_t panel, f32x16 gate, f32x16 up) {
    const int64_t n = panel * LANES, size = linear.outputs / 2;
    const float *scales = linear.scales + panel * PANEL, *bias = linear.bias + panel * PANEL;
    if (linear.scales) gate *= load(scales), up *= load(scales + LANES);
    if (linear.bias) gate += load(bias), up += load(bias + LANES);
    add_low_rank<T>(linear.adapted, row, panel, gate, up);
    const f32x16 value = activate<GELU>(gate) * up;
    T* to = out + row * size + n;
    if (n + LANES <= size) return store(to, value);
    T found[LANES];
    store(found, value);
    std::copy(found, found + (size - n), to);
}

constexpr int64_t ROUNDED_AT_ONCE = 64;  // blocks, a microsecond: less is not worth another thread's while

// What a product needs of its rows beside them, or in their place.
template <class T>
static void prepare_rows(Team& team, const T* x, int64_t rows, const Linear<T>& linear) {
    const int64_t inputs = linear.inputs, blocks = inputs / BLOCK;
    if (linear.adapted.in_step()) shrink(team, x, inputs, linear.adapted);
    if (linear.rounded)
        team.share((rows * blocks + ROUNDED_AT_ONCE - 1) / ROUNDED_AT_ONCE, [&](int64_t first, int64_t last) {
            for (int64_t i = first * ROUNDED_AT_ONCE; i < std::min(last * ROUNDED_AT_ONCE, rows * blocks); i++)
                round_block(x + i % rows * inputs + i / rows * BLOCK, linear.rounded[i]);
        });
    else if (linear.input_sums)
        team.share(rows, [&](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; row++) sum_inputs(x + row * inputs, inputs, linear.input_sums + row * blocks);
        });
}

template <class T, class Store>
static void add_product(Program* program, const T* x, Linear<T> linear, int rows, Store store_sums) {
    linear.adapted = std::exchange(program->adapted, {});
    program->add([=] {
        const int64_t num_rows = count_rows(program->step, rows);
        if (num_rows == 0) return;
        prepare_rows(program->team, x, num_rows, linear);
        program->team.share(linear.num_panels(), [&](int64_t first, int64_t last) {
            multiply<T>(x, num_rows, linear, first, last, [&](int64_t row, int64_t panel, f32x16 a, f32x16 b) {
                store_sums(linear, row, panel, a, b);
            });
        });
    });
}

template <class T>
static void add_linear(Program* program, const T* x, Linear<T> linear, void* out, int wide, int rows) {
    if (wide)
        add_product(program, x, linear, rows, [out](const Linear<T>& l, int64_t row, int64_t panel, f32x16 a, f32x16 b) {
            store_panel(static_cast<float*>(out), l, row, panel, a, b);
        });
    else
        add_product(program, x, linear, rows, [out](const Linear<T>& l, int64_t row, int64_t panel, f32x16 a, f32x16 b) {
            store_panel(static_cast<T*>(out), l, row, panel, a, b);
        });
}

template <class T>
static void add_gated(Program* program, const T* x, Linear<T> linear, int gelu, T* out) {
    if (gelu)
        add_product(program, x, linear, TOKENS, [out](const Linear<T>& l, int64_t row, int64_t panel, f32x16 a, f32x16 b) {
            store_gated<true>(out, l, row, panel, a, b);
        });
    else
        add_product(program, x, linear, TOKENS, [out](const Linear<T>& l, int64_t row, int64_t panel, f32x16 a, f32x16 b) {
            store_gated<false>(out, l, row, panel, a, b);
        });
}

template <class T>
static void add_embed(Program* program, const T* table, int64_t count, int64_t size, float scale, T* out) {
    program->num_token_ids = std::min(program->num_token_ids, count);
    if (scale != 1.0f)
        return program->add_each_token([=](const Step& step, int64_t token) {
            const T* from = table + step.token_ids[token] * size;
            for (int64_t i = 0; i < size; i++) out[token * size + i] = narrow<T>(widen(from[i]) * scale);
        });
    program->add_each_token([=](const Step& step, int64_t token) {
        const T* from = table + step.token_ids[token] * size;
        std::copy(from, from + size, out + token * size);
    });
}

// The same, with a table [count, size] in groups.
template <class T>
static void add_grouped_embed(Program* program, const GroupedPanel* panels, int64_t count, int64_t size, float scale, T* out) {
    program->num_token_ids = std::min(program->num_token_ids, count);
    program->add_each_token([=](const Step& step, int64_t token) {
        const int64_t id = step.token_ids[token];
        unpack_row(panels[id / PANEL], id % PANEL, size, scale, out + token * size);
    });
}

// Overwrites the embeddings of tokens that belong to an input besides text.
template <class T>
static void add_fill(Program* program, int64_t size, T* out) {
    program->has_places = true;
    program->add_each([](const Step& step) { return step.num_spans; }, [=](const Step& step, int64_t i) {
        const Span& span = step.spans[i];
        const T* from = static_cast<const T*>(span.embeddings);
        std::copy(from, from + (span.end - span.begin) * size, out + span.begin * size);
    });
}

template <class T>
static void add_gather(Program* program, const T* x, int64_t size, T* out) {
    program->add_each([](const Step& step) { return step.num_sampled; }, [=](const Step& step, int64_t i) {
        const T* from = x + step.sampled[i] * size;
        std::copy(from, from + size, out + i * size);
    });
}

template <class T>
static void add_norm(Program* program, const T* x, float* residual, int fresh, const float* weight, float eps, int64_t size,
                     T* out) {
    program->add_each_token([=](const Step&, int64_t token) {
        add_rms_norm(x + token * size, residual + token * size, fresh != 0, weight, eps, size, out + token * size);
    });
}

// Sums `count` numbers in the order of ranks; not 0 once a rank is lost.
using Reduce = int (*)(void* context, int wide, void* data, int64_t count);
extern "C" int ranks_all_reduce(Ranks* ranks, int wide, void* data, int64_t count);

constexpr int64_t SHARED_BYTES = 1 << 16;   // what all threads sum sooner than one, though it is shared out twice
constexpr int64_t SHARED_NUMBERS = 1 << 12;  // a thread's least part of it

template <class T>
static void all_reduce_together(Program* program, T* x, int64_t count) {
    Ranks& ranks = *program->ranks;
    Team& team = program->team;
    for (int64_t begin = 0; begin < count; begin += ranks.piece<T>()) {
        const int64_t size = std::min(ranks.piece<T>(), count - begin), parts = (size + SHARED_NUMBERS - 1) / SHARED_NUMBERS;
        const auto share = [&](auto work) {
            team.share(parts, [&](int64_t first, int64_t last) {
                work(x + begin, first * SHARED_NUMBERS, std::min(size, last * SHARED_NUMBERS));
            });
        };
        share([&](T* from, int64_t first, int64_t last) { ranks.put(from, first, last); });
        program->lost = !ranks.meet_to_sum<T>(count);
        if (program->lost) return;
        share([&](T* to, int64_t first, int64_t last) { ranks.add_up(to, first, last); });
    }
}

// In place, by a function that need not be of this library.
template <class T>
static void add_all_reduce(Program* program, T* x, int64_t width, Reduce reduce, void* context) {
    const bool own = reduce == reinterpret_cast<Reduce>(&ranks_all_reduce);
    if (own) program->ranks = static_cast<Ranks*>(context);
    program->add([=] {
        const int64_t count = program->step.num_tokens * width;
        if (count == 0) return;
        if (own && program->team.size() > 1 && count * int64_t(sizeof(T)) >= SHARED_BYTES)
            return all_reduce_together(program, x, count);
        program->lost = reduce(context, sizeof(T) == sizeof(float), x, count);
    });
}

// An operation that says how many tasks it has in a step.
template <class Operation>
static void add_tasks(Program* program, Operation operation) {
    program->add_each([operation](const Step& step) { return operation.num_tasks(step); }, operation);
}

template <class T, class C>
static void add_attention(Program* program, Attention<T, C> attention) {
    program->add([=] {
        AttentionTasks& shared = program->attention;
        attention.share_out(program->step, program->team.size(), shared);
        program->team.share(shared.tasks.size(), [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; i++) attention.run(program->step, shared.tasks[i], shared.memory.data());
        });
        program->team.share(shared.divided.size(), [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; i++) attention.join(program->step, shared.divided[i], shared.memory.data());
        });
    });
}

// The most likely token of each sampled row, and its logit: token 0 and NaN if any is NaN. The lowest of equals.
static void add_argmax(Program* program, const float* logits, int64_t vocab, int64_t* tokens, float* best) {
    program->add_each([](const Step& step) { return step.num_sampled; }, [=](const Step&, int64_t row) {
        constexpr int CHAINS = 4;  // to hide latency
        constexpr int64_t AT_ONCE = CHAINS * LANES;
        const float* from = logits + row * vocab;
        f32x16 lanes[CHAINS];
        i32x16 strange = {};
        for (f32x16& lane : lanes) lane = splat(-std::numeric_limits<float>::infinity());
        int64_t i = 0;
        for (; i + AT_ONCE <= vocab; i += AT_ONCE)
            for (int c = 0; c < CHAINS; c++) {
                const f32x16 value = load(from + i + c * LANES);
                lanes[c] = maximum(value, lanes[c]);
                strange |= value != value;
            }
        float largest = reduce_max(maximum(maximum(lanes[0], lanes[1]), maximum(lanes[2], lanes[3])));
        bool sound = reduce(strange, [](i32x16 a, i32x16 b) { return a | b; }) == 0;
        for (; i < vocab; i++) {
            largest = from[i] > largest ? from[i] : largest;
            sound &= from[i] == from[i];
        }
        best[row] = sound ? largest : std::numeric_limits<float>::quiet_NaN();
        tokens[row] = sound ? std::find(from, from + vocab, largest) - from : 0;
    });
}

// Products of rows sorted by expert, each with its expert's matrix. firsts: see Routes. Calls store(matrix, row, panel,
// first 16, last 16).
template <class T, class Store>
static void add_products(Program* program, const T* x, Stack<T> stack, const int64_t* firsts, Store store_sums) {
    program->add([=] {
        const int64_t panels = stack.first.num_panels(), all_rows = firsts[stack.experts];
        if (all_rows == 0) return;
        prepare_rows(program->team, x, all_rows, stack.first);
        program->team.share(stack.experts * panels, [&](int64_t first, int64_t last) {
            while (first < last) {
                const int64_t expert = first / panels, panel = first % panels, end = std::min(panels, panel + last - first);
                const int64_t begin = firsts[expert], rows = firsts[expert + 1] - begin;
                const Linear<T> linear = stack.of(expert, begin, all_rows);
                if (rows)
                    multiply<T>(x + begin * linear.inputs, rows, linear, panel, end,
                                [&](int64_t row, int64_t panel, f32x16 a, f32x16 b) {
                                    store_sums(linear, begin + row, panel, a, b);
                                });
                first += end - panel;
            }
        });
    });
}

// Add up what a token's experts give, weighted, the largest share first: `found` has a row for each of `routes`.
template <class T>
static void add_weighted_sums(Program* program, Routes routes, int64_t hidden, const float* found, T* out) {
    program->add_each_token([=](const Step&, int64_t token) {
        const int64_t first = token * routes.per_token;
        for (int64_t d = 0; d < hidden; d++) {
            float sum = 0.0f;
            for (int64_t i = 0; i < routes.per_token; i++) sum += routes.shares[first + i] * found[routes.rows[first + i] * hidden + d];
            out[token * hidden + d] = narrow<T>(sum);
        }
    });
}

// What an expert's matrices give goes through memory of the caller: `sorted` [rows, hidden], `inner` [rows, size],
// `found` [rows, hidden] float32.
template <class T>
static void add_experts(Program* program, Route<T> route, Stack<T> gate_up, Stack<T> down, T* sorted, T* inner, float* found,
                        T* out) {
    const Routes routes = route.to;
    const int64_t hidden = route.hidden;
    program->add_each_token(route);
    program->add_each([](const Step&) { return 1; },
                      [routes](const Step& step, int64_t) { sort_by_expert(routes, step.num_tokens); });
    program->add_each_token([=, x = route.x](const Step&, int64_t token) {
        for (int64_t i = 0; i < routes.per_token; i++)
            std::copy(x + token * hidden, x + (token + 1) * hidden, sorted + routes.rows[token * routes.per_token + i] * hidden);
    });
    add_products(program, sorted, gate_up, routes.firsts, [inner](const Linear<T>& l, int64_t row, int64_t panel, f32x16 a, f32x16 b) {
        store_gated<false>(inner, l, row, panel, a, b);
    });
    add_products(program, inner, down, routes.firsts, [found](const Linear<T>& l, int64_t row, int64_t panel, f32x16 a, f32x16 b) {
        store_panel(found, l, row, panel, a, b);
    });
    add_weighted_sums(program, routes, hidden, found, out);
}

extern "C" int ranks_exchange(Ranks* ranks, const char* rows, int64_t row_bytes, const int64_t* counts, int64_t* received,
                              char* out, int64_t room);

// Always, also without tokens: the other ranks may have some.
static void add_exchange(Program* program, ExchangeRows exchange, void* context, std::function<int()> call) {
    if (exchange == reinterpret_cast<ExchangeRows>(&ranks_exchange)) program->ranks = static_cast<Ranks*>(context);
    program->add([program, call = std::move(call)] { program->lost = call(); });
}

// The same, where other ranks hold some of the experts: rows go there and their results come back, in the order in which
// the rows were sent. stacks: of the held experts. Memory of the caller: as above, but for rows of all ranks; and `back`
// [num_tokens * per_token, hidden] float32.
template <class T>
static void add_divided_experts(Program* program, Route<T> route, Stack<T> gate_up, Stack<T> down, Passage own, ExchangeRows exchange,
                                void* context, T* sorted, T* inner, float* found, float* back, T* out) {
    const Routes routes = route.to;
    const int64_t hidden = route.hidden;
    own.counts.resize(own.held.ranks);
    own.received.resize(own.held.ranks);
    const auto passage = std::make_shared<Passage>(std::move(own));
    program->add_each_token(route);
    program->add_each([](const Step&) { return 1; }, [=](const Step& step, int64_t) {
        sort_by_expert(routes, step.num_tokens);
        passage->count(routes);
    });
    program->add_each_token([=, x = route.x](const Step&, int64_t token) {
        for (int64_t i = token * routes.per_token; i < (token + 1) * routes.per_token; i++) {
            char* to = passage->sent + routes.rows[i] * passage->row_bytes;
            std::copy(x + token * hidden, x + (token + 1) * hidden, reinterpret_cast<T*>(to));
            passage->number_of(passage->sent, routes.rows[i]) = routes.chosen[i];
        }
    });
    add_exchange(program, exchange, context, [=] {
        const int lost = exchange(context, passage->sent, passage->row_bytes, passage->counts.data(), passage->received.data(),
                                  passage->arrived, passage->room);
        if (!lost) passage->sort();
        return lost;
    });
    program->add_each([passage](const Step&) { return passage->num_arrived(); }, [=](const Step&, int64_t row) {
        const T* from = reinterpret_cast<const T*>(passage->arrived + passage->rows[row] * passage->row_bytes);
        std::copy(from, from + hidden, sorted + row * hidden);
    });
    const int64_t* firsts = passage->firsts;
    add_products(program, sorted, gate_up, firsts, [inner](const Linear<T>& l, int64_t row, int64_t panel, f32x16 a, f32x16 b) {
        store_gated<false>(inner, l, row, panel, a, b);
    });
    const int64_t* arrival = passage->rows;
    add_products(program, inner, down, firsts, [found, arrival](const Linear<T>& l, int64_t row, int64_t panel, f32x16 a, f32x16 b) {
        store_panel(found, l, arrival[row], panel, a, b);
    });
    add_exchange(program, exchange, context, [=] {
        const int64_t sent = routes.firsts[routes.experts];
        return exchange(context, reinterpret_cast<char*>(found), hidden * sizeof(float), passage->received.data(),
                        passage->counts.data(), reinterpret_cast<char*>(back), sent);
    });
    add_weighted_sums(program, routes, hidden, back, out);
}

// The C interface: `wide` is 1 where the elements are float32, 0 where they are bfloat16.
#define BY_TYPE(function, ...)                   \
    do {                                         \
        if (wide) {                              \
            using T = float;                     \
            function __VA_ARGS__;                \
        } else {                                 \
            using T = bf16;                      \
            function __VA_ARGS__;                \
        }                                        \
    } while (0)

// Calls work(C{}), by what the cache's elements are: 0: T, 1: int8, 2: e4m3.
template <class T, class Work>
static void with_cache(int narrow, const Work& work) {
    if (narrow == 1) return work(int8_t{});
    if (narrow == 2) return work(e4m3{});
    work(T{});
}

#define BY_CACHE(function, ...) BY_TYPE(with_cache<T>, (narrow, [&]<class C>(C) { function __VA_ARGS__; }))

template <class T>
static T* as(const void* pointer) {
    return static_cast<T*>(const_cast<void*>(pointer));
}

extern "C" {

// 0: compiled without one; 1: bfloat16 is multiplied by it; 2: Linux does not grant it.
int matrix_unit() { return !MATRIX_UNIT ? 0 : has_matrix_unit() ? 1 : 2; }

// What grouped weights are multiplied by: 0: AVX2; 1: AVX-512; 2: with permutations of words; 3: with bfloat16, too.
int vector_level() {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    return 3;
#elif defined(__AVX512BW__)
    return 2;
#elif defined(__AVX512F__)
    return 1;
#else
    return 0;
#endif
}

// By what bytes are multiplied where activations are rounded: see rounded.h.
int byte_products() { return byte_level(); }

// Whether the matrix unit multiplies them for 16 rows and more.
int byte_tiles() { return multiplies_byte_tiles(); }

void choose_byte_tiles(int wanted) { use_byte_tiles(ByteTiles(wanted)); }

// Null if the system does not grant so many threads.
Team* team_create(int num_threads) {
    try {
        return new Team(num_threads);
    } catch (const std::system_error&) {
        return nullptr;
    }
}

void team_destroy(Team* team) { delete team; }

int64_t team_shares(Team* team) { return team->shares(); }

// The team must outlive the program, and does one thing at a time: it runs a program, or draws. What `program_run` returns is
// Program::Outcome.
Program* program_create(Team* team, int64_t block_size) { return new Program(*team, block_size); }

void program_destroy(Program* program) { delete program; }

int program_run(Program* program, const StepRows* rows) { return program->run(*rows); }

void pack_panels(int wide, const void* weight, int64_t outputs, int64_t inputs, void* panels) {
    BY_TYPE(pack<T>, (as<T>(weight), outputs, inputs, as<T>(panels)));
}

void program_embed(Program* program, int wide, const void* table, int64_t count, int64_t size, float scale, void* out) {
    BY_TYPE(add_embed<T>, (program, as<T>(table), count, size, scale, as<T>(out)));
}

void program_embed_grouped(Program* program, int wide, const GroupedPanel* panels, int64_t count, int64_t size, float scale,
                           void* out) {
    BY_TYPE(add_grouped_embed<T>, (program, panels, count, size, scale, as<T>(out)));
}

void program_fill(Program* program, int wide, int64_t size, void* out) { BY_TYPE(add_fill<T>, (program, size, as<T>(out))); }

void program_gather(Program* program, int wide, const void* x, int64_t size, void* out) {
    BY_TYPE(add_gather<T>, (program, as<T>(x), size, as<T>(out)));
}

void program_norm(Program* program, int wide, const void* x, float* residual, int fresh, const float* weight, float eps,
                  int64_t size, void* out) {
    BY_TYPE(add_norm<T>, (program, as<T>(x), residual, fresh, weight, eps, size, as<T>(out)));
}

void program_all_reduce(Program* program, int wide, void* x, int64_t width, Reduce reduce, void* context) {
    BY_TYPE(add_all_reduce<T>, (program, as<T>(x), width, reduce, context));
}

// In the order for activations of `pair` elements a lane: 1 for float32, 2 for bfloat16 and for rounded ones.
void quantize_panels(int wide, const void* weight, int64_t outputs, int64_t inputs, int pair, int8_t* panels, float* scales) {
    if (pair == 2) {
        BY_TYPE((quantize<T, 2>), (as<T>(weight), outputs, inputs, panels, scales));
    } else {
        BY_TYPE((quantize<T, 1>), (as<T>(weight), outputs, inputs, panels, scales));
    }
}

// The product that is recorded next takes adapters; see AdaptedMatrix.
void program_adapt(Program* program, int64_t number, const uint8_t* parts, void* shrunk, int64_t width) {
    program->adapted = {&program->step, number, parts, shrunk, width};
}

void program_linear(Program* program, int wide, const void* x, const void* panels, const float* scales, const float* bias,
                    int64_t inputs, int64_t outputs, const GroupedPanel* grouped, int64_t num_grouped, float* input_sums,
                    RoundedBlock* rounded, void* out, int wide_out, int rows) {
    const auto add = [&]<class T>(const T* from) {
        const Linear<T> linear{panels, scales, bias, inputs, outputs, grouped, num_grouped, input_sums, rounded};
        add_linear<T>(program, from, linear, out, wide_out, rows);
    };
    BY_TYPE(add, (as<T>(x)));
}

void program_gated(Program* program, int wide, const void* x, const void* panels, const float* scales, const float* bias,
                   int64_t inputs, int64_t outputs, const GroupedPanel* grouped, int64_t num_grouped, float* input_sums,
                   RoundedBlock* rounded, int gelu, void* out) {
    const auto add = [&]<class T>(const T* from) {
        const Linear<T> linear{panels, scales, bias, inputs, outputs, grouped, num_grouped, input_sums, rounded};
        add_gated<T>(program, from, linear, gelu, as<T>(out));
    };
    BY_TYPE(add, (as<T>(x)));
}

void program_rotations(Program* program, const float* frequencies, const float* factors, int64_t half, float* out) {
    program->add_each_token([=](const Step& step, int64_t token) {
        const int64_t position = step.positions[token];
        rotation([=](int64_t) { return position; }, frequencies, factors, half, out + token * 2 * half);
    });
}

// The same where each pair is rotated by a token's frame, row or column (M-RoPE, arXiv 2409.12191). axes: [half], 0 to 2.
void program_rotations_by_axis(Program* program, const int64_t* axes, const float* frequencies, const float* factors, int64_t half,
                               float* out) {
    program->has_places = true;
    program->add_each_token([=](const Step& step, int64_t token) {
        const int64_t* place = &step.places[3 * token];
        rotation([=](int64_t i) { return place[axes[i]]; }, frequencies, factors, half, out + token * 2 * half);
    });
}

void program_rotate_and_cache(Program* program, int wide, const void* qkv, int64_t stride, const float* q_norm, const float* k_norm,
                              float eps, const float* rotations, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t num_blocks,
                              void* keys, void* values, int narrow, void* q) {
    const int64_t block_size = program->step.block_size;
    program->num_blocks = std::min(program->num_blocks, num_blocks);
    BY_CACHE(program->add_each_token,
             (RotateAndCache<T, C>{as<T>(qkv), stride, q_norm, k_norm, rotations, eps, heads,
                                   Cache<T, C>{as<C>(keys), as<C>(values), block_size, kv_heads, head_dim}, as<T>(q)}));
}

void program_attention(Program* program, int wide, const void* q, int64_t heads, int64_t kv_heads, int64_t head_dim,
                       void* keys, void* values, int narrow, float scale, int64_t window, void* out) {
    const int64_t block_size = program->step.block_size;
    BY_CACHE(add_attention,
             (program, Attention<T, C>{as<T>(q), Cache<T, C>{as<C>(keys), as<C>(values), block_size, kv_heads, head_dim},
                                       heads, scale, window, as<T>(out)}));
}

void program_experts(Program* program, int wide, const void* x, const float* router, int64_t experts, int64_t hidden, int64_t size,
                     int64_t per_token, int renormalize, const ExpertMatrices* gate_up, const ExpertMatrices* down, float* shares,
                     int64_t* chosen, int64_t* rows, int64_t* firsts, void* sorted, void* inner, float* found, void* out) {
    const Routes routes{experts, per_token, shares, chosen, rows, firsts};
    BY_TYPE(add_experts<T>,
            (program, Route<T>{as<T>(x), router, hidden, renormalize != 0, routes},
             Stack<T>(*gate_up, hidden, 2 * size, experts), Stack<T>(*down, size, hidden, experts), as<T>(sorted), as<T>(inner),
             found, as<T>(out)));
}

// `gate_up` and `down` are those of the experts that this rank holds of `experts`; see Passage for what lies where.
void program_divided_experts(Program* program, int wide, const void* x, const float* router, int64_t experts, int64_t hidden,
                             int64_t size, int64_t per_token, int renormalize, const ExpertMatrices* gate_up,
                             const ExpertMatrices* down, float* shares, int64_t* chosen, int64_t* rows, int64_t* firsts,
                             void* sorted, void* inner, float* found, void* out, int64_t rank, int64_t ranks,
                             ExchangeRows exchange, void* context, int64_t row_bytes, char* sent, char* arrived,
                             int64_t* arrived_rows, int64_t* held_firsts, float* back, int64_t room) {
    const Routes routes{experts, per_token, shares, chosen, rows, firsts};
    const HeldExperts held{experts, rank, ranks};
    BY_TYPE(add_divided_experts<T>,
            (program, Route<T>{as<T>(x), router, hidden, renormalize != 0, routes},
             Stack<T>(*gate_up, hidden, 2 * size, held.count()), Stack<T>(*down, size, hidden, held.count()),
             Passage{held, row_bytes, room, sent, arrived, arrived_rows, held_firsts, {}, {}}, exchange, context, as<T>(sorted),
             as<T>(inner), found, back, as<T>(out)));
}

void program_argmax(Program* program, const float* logits, int64_t vocab, int64_t* tokens, float* best) {
    add_argmax(program, logits, vocab, tokens, best);
}

// A token of each of `rows`, each drawn by one thread. logits: [.., vocab]; tokens: [num_rows].
void draw_rows(Team* team, const float* logits, int64_t vocab, const DrawnRow* rows, int64_t num_rows, int64_t* tokens) {
    const auto draw = [=](int64_t first, int64_t last) {
        thread_local Sampler sampler;
        for (int64_t i = first; i < last; i++) {
            const DrawnRow& row = rows[i];
            tokens[i] = sampler(logits + row.row * vocab, vocab, row, uniform(row.seed, row.position));
        }
    };
    if (num_rows == 1) return draw(0, 1);  // and wake nobody
    team->run([=] { team->share(num_rows, draw); });
}

// The operations of kernels.forward.LinearAttentionPass. Strides are those of the parts of a projection.
void program_sigmoid_gate(Program* program, int wide, const void* x, const void* gate, int64_t gate_stride, int by_token,
                          const void* other, int64_t size, void* out) {
    BY_TYPE(add_tasks, (program, SigmoidGate<T>{as<T>(x), {as<T>(gate), gate_stride}, by_token != 0, as<T>(other), size, as<T>(out)}));
}

void program_causal_conv(Program* program, int wide, const void* x, int64_t stride, const float* weight, int64_t kernel,
                         int64_t channels, int64_t num_states, void* states, void* out) {
    program->have_states(num_states);
    BY_TYPE(add_tasks, (program, CausalConv<T>{{as<T>(x), stride}, weight, kernel, channels, as<T>(states), as<T>(out)}));
}

void program_delta_rule(Program* program, int wide, const void* qkv, int64_t stride, const void* strength, int64_t strength_stride,
                        const void* step_size, int64_t step_stride, const float* rates, const float* biases, int64_t key_heads,
                        int64_t value_heads, int64_t key_dim, int64_t value_dim, int64_t num_states, float* states,
                        float* prepared, void* out) {
    const DeltaHeads heads{key_heads, value_heads, key_dim, value_dim};
    program->have_states(num_states);
    BY_TYPE(add_tasks, (program, PrepareDelta<T>{heads, {as<T>(qkv), stride}, {as<T>(strength), strength_stride},
                                                 {as<T>(step_size), step_stride}, rates, biases, prepared}));
    BY_TYPE(add_tasks, (program, DeltaRule<T>{heads, {as<T>(qkv), stride}, prepared, states, as<T>(out)}));
}

void program_gated_norm(Program* program, int wide, const void* x, const void* gate, int64_t gate_stride, const float* weight,
                        float eps, int64_t heads, int64_t size, void* out) {
    BY_TYPE(add_tasks, (program, GatedNorm<T>{as<T>(x), {as<T>(gate), gate_stride}, weight, eps, heads, size, as<T>(out)}));
}

void program_keep_drafted(Program* program, int wide, const DraftedPart* parts, int64_t count) {
    BY_TYPE(add_tasks, (program, KeepDrafted<T>{{parts, parts + count}}));
}

}  // extern "C"
