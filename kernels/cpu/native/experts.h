// Owns mixtures of experts: which experts a token has, and the rows of each expert side by side.
// Never lets a token's sums depend on which tokens share its experts.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "linear.h"
#include "step.h"

// Where the rows of a step go. A row is a token for one of its experts; rows of an expert lie one after another.
struct Routes {
    int64_t experts, per_token;
    float* shares;    // [num_tokens, per_token]
    int64_t* chosen;  // [num_tokens, per_token] experts, the largest share first
    int64_t* rows;    // [num_tokens, per_token]
    int64_t* firsts;  // [experts + 1] where each expert's rows begin, and where the last ends
};

// Shares of one token's experts: the softmax over all of them (arXiv 2101.03961), in float32.
template <class T>
struct Route {
    const T* x;           // [num_tokens, hidden]
    const float* router;  // [experts, hidden]
    int64_t hidden;
    bool renormalize;
    Routes to;

    void operator()(const Step&, int64_t token) const {
        thread_local std::vector<float> logits;
        logits.resize(to.experts);
        for (int64_t expert = 0; expert < to.experts; expert++) logits[expert] = logit(x + token * hidden, expert);
        const float largest = *std::max_element(logits.begin(), logits.end());
        float total = 0.0f;
        for (float& value : logits) total += value = std::exp(value - largest);
        float* shares = to.shares + token * to.per_token;
        int64_t* chosen = to.chosen + token * to.per_token;
        float kept = 0.0f;
        for (int64_t i = 0; i < to.per_token; i++) {
            int64_t best = -1;  // of those not taken: the lowest of equals, and one of them even where none is finite
            for (int64_t expert = 0; expert < to.experts; expert++) {
                const bool taken = std::find(chosen, chosen + i, expert) != chosen + i;
                if (!taken && (best < 0 || logits[expert] > logits[best])) best = expert;
            }
            chosen[i] = best;
            kept += shares[i] = logits[best] / total;
        }
        for (int64_t i = 0; renormalize && i < to.per_token; i++) shares[i] /= kept;
    }

    float logit(const T* values, int64_t expert) const {
        const float* weights = router + expert * hidden;
        f32x16 sums = splat(0.0f);
        int64_t i = 0;
        for (; i + LANES <= hidden; i += LANES) sums += load(values + i) * load(weights + i);
        float rest = 0.0f;
        for (; i < hidden; i++) rest += widen(values[i]) * weights[i];
        return reduce_add(sums) + rest;
    }
};

// Which row each token has with each of its experts. By one thread: it takes less than to share it.
inline void sort_by_expert(const Routes& routes, int64_t num_tokens) {
    const int64_t count = num_tokens * routes.per_token;
    std::fill(routes.firsts, routes.firsts + routes.experts + 1, 0);
    for (int64_t i = 0; i < count; i++) routes.firsts[routes.chosen[i] + 1]++;
    for (int64_t expert = 0; expert < routes.experts; expert++) routes.firsts[expert + 1] += routes.firsts[expert];
    thread_local std::vector<int64_t> next;
    next.assign(routes.firsts, routes.firsts + routes.experts);
    for (int64_t i = 0; i < count; i++) routes.rows[i] = next[routes.chosen[i]]++;
}

// The matrices of all experts, one after another, and what their products need beside the rows of all. Filled by the
// caller; mirrored in program.py.
struct ExpertMatrices {
    const void* panels;           // as in Linear, those of all experts
    const float* scales;          // likewise
    const GroupedPanel* grouped;  // [experts, num_grouped], instead of both; outputs are counted from the expert's first
    int64_t num_grouped;
    float* input_sums;            // [rows, inputs / 32], or null
    RoundedBlock* rounded;        // [inputs / 32, rows], or null
};

// The same, of which each expert's products take theirs.
template <class T>
struct Stack {
    Linear<T> first;
    int64_t experts;

    Stack(const ExpertMatrices& all, int64_t inputs, int64_t outputs, int64_t count)
        : first{all.panels, all.scales, nullptr, inputs, outputs, all.grouped, all.num_grouped, all.input_sums, all.rounded},
          experts(count) {}

    // An expert's matrix, for its rows, which begin at `begin` of `rows`.
    Linear<T> of(int64_t expert, int64_t begin, int64_t rows) const {
        const int64_t size = first.num_panels() * PANEL;
        Linear<T> found = first;
        if (first.grouped) {
            found.grouped += expert * first.num_grouped;
        } else {
            const int64_t bytes = size * first.inputs * (first.scales ? sizeof(int8_t) : sizeof(T));
            found.panels = static_cast<const char*>(first.panels) + expert * bytes;
        }
        if (first.scales) found.scales += expert * size;
        if (first.input_sums) found.input_sums += begin * (first.inputs / BLOCK);
        if (first.rounded) {
            found.rounded += begin;
            found.rounded_rows = rows;
        }
        return found;
    }
};

// Exchange rows with other ranks: see Ranks::offer. out: for `room` rows. Not 0 once a rank is lost, or if there are more.
using ExchangeRows = int (*)(void* context, const char* rows, int64_t row_bytes, const int64_t* counts, int64_t* received,
                             char* out, int64_t room);

// The experts that this rank holds of all; each rank holds as many, or one more.
struct HeldExperts {
    int64_t experts, rank, ranks;

    int64_t first_of(int64_t other) const { return experts * other / ranks; }
    int64_t first() const { return first_of(rank); }
    int64_t count() const { return first_of(rank + 1) - first(); }
};

// Rows on their way to the experts' ranks, each with its expert's number behind it, and rows that have come from all ranks.
struct Passage {
    HeldExperts held;
    int64_t row_bytes;   // of a row with its number: a multiple of 8
    int64_t room;        // for rows from all ranks
    char* sent;          // [num_tokens * per_token, row_bytes] sorted by expert
    char* arrived;       // [room, row_bytes] by rank
    int64_t* rows;       // [room] which row of `arrived` each row is, sorted by expert
    int64_t* firsts;     // [held + 1] where each held expert's rows begin, and where the last ends
    std::vector<int64_t> counts, received;  // [ranks] rows for each, and from each

    int64_t& number_of(char* rows, int64_t row) const {
        return *reinterpret_cast<int64_t*>(rows + (row + 1) * row_bytes - sizeof(int64_t));
    }

    int64_t num_arrived() const { return firsts[held.count()]; }

    void count(const Routes& routes) {
        for (int64_t rank = 0; rank < held.ranks; rank++)
            counts[rank] = routes.firsts[held.first_of(rank + 1)] - routes.firsts[held.first_of(rank)];
    }

    // Which rows each held expert has. In the order in which they came, so that it depends on nothing else.
    void sort() {
        int64_t total = 0;
        for (const int64_t count : received) total += count;
        std::fill(firsts, firsts + held.count() + 1, 0);
        for (int64_t row = 0; row < total; row++) firsts[number_of(arrived, row) - held.first() + 1]++;
        for (int64_t expert = 0; expert < held.count(); expert++) firsts[expert + 1] += firsts[expert];
        std::vector<int64_t> next(firsts, firsts + held.count());
        for (int64_t row = 0; row < total; row++) rows[next[number_of(arrived, row) - held.first()]++] = row;
    }
};
