// Owns what one step is to the kernels: which tokens, where each one's K and V go, and which queries are computed together.
// Never allocates per token once it has grown to the largest step.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

struct LowRank;

// Tokens of one row that belong to an input besides text: they have embeddings and places of their own. Mirrored in spans.py.
struct Span {
    int64_t begin, end;      // tokens of the step
    int64_t first;           // `begin` is this token of the input
    int64_t rows, columns;   // of the input's grid
    int64_t position;        // added to the frame, row and column of each token
    int64_t shift_after;     // the position of the row's tokens after the input, minus their index in the request
    const void* embeddings;  // [end - begin, hidden] in the type of activations
};

// The rows of a step, one after another in its tokens. Filled by the caller; mirrored in program.py.
struct StepRows {
    int64_t num_tokens, num_rows, num_sampled;
    const int64_t* token_ids;     // [num_tokens]
    const int64_t* contexts;      // [num_rows] tokens of the row's request in the cache before this step
    const int64_t* counts;        // [num_rows] tokens of the row
    const int64_t* first_blocks;  // [num_rows] where the row's blocks begin in `blocks`
    const int64_t* blocks;        // block ids of all rows
    const int64_t* sampled;       // [num_sampled] tokens of the step after which one is sampled
    const int64_t* state_slots;   // [num_rows] where the row's recurrent state lies; null for a model without
    const LowRank* const* adapters;  // [num_rows] the factors of each row's adapter by matrix, or null. Null: no row has one
    int64_t first_drafted, num_drafted;  // rows with drafts: their states stay as they are before the step
    const int64_t* shifts;  // [num_rows] position minus index of the row's tokens before its first span; null for models of text
    const Span* spans;      // in the order of their tokens
    int64_t num_spans;
};

struct Step : StepRows {
    int64_t block_size = 0;
    std::vector<int64_t> begins;     // [num_rows + 1] the row's first token
    std::vector<int64_t> rows;       // [num_tokens] which row
    std::vector<int64_t> positions;  // [num_tokens] in its request
    std::vector<int64_t> slots;      // [num_tokens] block * block_size + offset
    std::vector<int64_t> places;     // [num_tokens, 3] the frame, row and column by which a token is rotated; see `place`

    struct Tile {
        int64_t row, first_token, num_tokens;  // of the row
        int64_t begin;                         // the row's first token in the step
    };
    std::vector<Tile> tiles;  // queries of one row that attention computes together

    struct AdapterTile {
        const LowRank* adapter;
        int64_t first, count;  // of its tokens in `adapted`
    };
    std::vector<AdapterTile> adapter_tiles;       // tokens of one adapter that are computed together
    std::vector<int64_t> adapted_rows;            // rows with an adapter, those of one adapter side by side
    std::vector<int64_t> adapted;                 // tokens of rows with an adapter, those of one adapter side by side
    std::vector<const LowRank*> token_adapters;   // [num_tokens], or empty if no row has an adapter

    static constexpr int64_t TILE_TOKENS = 16;

    // False if the rows name a token, a block, a state or a row with drafts that is not there: the kernels do not look again.
    bool take(const StepRows& given, int64_t num_token_ids, int64_t num_blocks, int64_t num_states) {
        static_cast<StepRows&>(*this) = given;
        const auto within = [](const int64_t* numbers, int64_t count, int64_t end) {
            return std::all_of(numbers, numbers + count, [end](int64_t number) { return number >= 0 && number < end; });
        };
        if (!within(token_ids, num_tokens, num_token_ids) || !within(blocks, first_blocks[num_rows], num_blocks)) return false;
        if (num_states >= 0 && num_rows && !(state_slots && within(state_slots, num_rows, num_states))) return false;
        if (first_drafted < 0 || first_drafted > num_rows || num_drafted < 0 || num_drafted > num_rows - first_drafted)
            return false;
        begins.assign(1, 0);
        rows.clear();
        positions.clear();
        slots.clear();
        tiles.clear();
        int64_t begin = 0;
        for (int64_t row = 0; row < num_rows; row++) {
            for (int64_t i = 0; i < counts[row]; i++) {
                const int64_t position = contexts[row] + i;
                rows.push_back(row);
                positions.push_back(position);
                slots.push_back(block(row, position) * block_size + position % block_size);
            }
            for (int64_t i = 0; i < counts[row]; i += TILE_TOKENS)
                tiles.push_back({row, i, std::min(TILE_TOKENS, counts[row] - i), begin});
            begin += counts[row];
            begins.push_back(begin);
        }
        sort_adapted();
        return true;
    }

    // Gives each token its place: text has one position along all three axes. For programs that rotate by places, after
    // `take`. False if there are no shifts, a span is not within one row, or spans are not in order.
    bool place() {
        if (!shifts) return false;
        places.resize(3 * num_tokens);
        for (int64_t row = 0; row < num_rows; row++) place_text(begins[row], begins[row + 1], shifts[row]);
        int64_t last = 0;
        for (const Span* span = spans; span != spans + num_spans; span++) {
            if (span->begin < last || span->begin >= span->end || span->end > num_tokens) return false;
            last = span->end;
            const int64_t end = begins[rows[span->begin] + 1];
            if (span->end > end || span->first < 0 || span->rows < 1 || span->columns < 1) return false;
            for (int64_t token = span->begin; token < span->end; token++) {
                const int64_t i = span->first + token - span->begin, line = i / span->columns;
                places[3 * token] = span->position + line / span->rows;
                places[3 * token + 1] = span->position + line % span->rows;
                places[3 * token + 2] = span->position + i % span->columns;
            }
            place_text(span->end, end, span->shift_after);
        }
        return true;
    }

    void place_text(int64_t begin, int64_t end, int64_t shift) {
        for (int64_t token = begin; token < end; token++)
            for (int64_t axis = 0; axis < 3; axis++) places[3 * token + axis] = positions[token] + shift;
    }

    // Nothing is done where no row has an adapter.
    void sort_adapted() {
        adapter_tiles.clear();
        adapted.clear();
        token_adapters.clear();
        if (!adapters) return;
        for (const int64_t row : rows) token_adapters.push_back(adapters[row]);
        adapted_rows.clear();  // which are few beside tokens
        for (int64_t row = 0; row < num_rows; row++)
            if (adapters[row]) adapted_rows.push_back(row);
        std::sort(adapted_rows.begin(), adapted_rows.end(), [this](int64_t a, int64_t b) {
            return adapters[a] == adapters[b] ? a < b : std::less<>{}(adapters[a], adapters[b]);
        });
        for (const int64_t row : adapted_rows)
            for (int64_t token = begins[row]; token < begins[row + 1]; token++) adapted.push_back(token);
        for (int64_t i = 0; i < int64_t(adapted.size()); i++) {
            const LowRank* adapter = token_adapters[adapted[i]];
            if (adapter_tiles.empty() || adapter_tiles.back().adapter != adapter || adapter_tiles.back().count == TILE_TOKENS)
                adapter_tiles.push_back({adapter, i, 0});
            adapter_tiles.back().count++;
        }
    }
    bool advances(int64_t row) const { return row < first_drafted || row >= first_drafted + num_drafted; }
    int64_t begin_drafted() const { return begins[first_drafted]; }
    int64_t end_drafted() const { return begins[first_drafted + num_drafted]; }

    int64_t block(int64_t row, int64_t position) const { return blocks[first_blocks[row] + position / block_size]; }
};
