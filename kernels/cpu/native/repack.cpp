// Owns the way of a matrix from the blocks of a GGUF file into panels, in the order that forms.h has.
// Never computes with a number: only places change.
#include <cstdint>
#include <cstring>

#include "forms.h"

namespace {

// A run of one output, taken apart.
struct Run {
    uint8_t q[NEST];
    uint8_t halves[2][2];  // scale and minimum, or the units of nested ones
    uint8_t scales[NEST / 16], minima[NEST / BLOCK];
};

// A block of 32 inputs: a scale, a minimum where there is one, bits above the fourth where there are any, the numbers.
template <class F>
const uint8_t* take_plain(const uint8_t* from, Run& run) {
    for (int i = 0; i < (F::MINIMUM ? 2 : 1); i++, from += 2) std::memcpy(run.halves[i], from, 2);
    if constexpr (F::BITS == 8) {
        std::memcpy(run.q, from, BLOCK);
        return from + BLOCK;
    }
    uint32_t fifth = 0;
    if constexpr (F::BITS == 5) {
        std::memcpy(&fifth, from, 4);
        from += 4;
    }
    for (int i = 0; i < BLOCK; i++) run.q[i] = (from[i % 16] >> (i / 16 * 4) & 15) | (fifth >> i & 1) << 4;
    return from + 16;
}

// Q4_K and Q5_K: two units, 8 scales and 8 minima of 6 bits, the fifth bits where there are any, and the others.
template <class F>
const uint8_t* take_minima(const uint8_t* from, Run& run) {
    std::memcpy(run.halves, from, 4);
    const uint8_t *first = from + 4, *second = from + 8, *last = from + 12;
    for (int i = 0; i < 4; i++) {
        run.scales[i] = first[i] & 63;
        run.scales[i + 4] = (last[i] & 15) | (first[i] >> 2 & 48);
        run.minima[i] = second[i] & 63;
        run.minima[i + 4] = last[i] >> 4 | (second[i] >> 2 & 48);
    }
    const uint8_t *fifths = from + 16, *low = F::BITS == 5 ? from + 48 : from + 16;
    for (int i = 0; i < NEST; i++) {
        run.q[i] = low[i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
        if constexpr (F::BITS == 5) run.q[i] |= (fifths[i % 32] >> i / 32 & 1) << 4;
    }
    return low + NEST / 2;
}

// Q6_K: the lower 4 bits, the upper 2, 16 scales, and their unit.
const uint8_t* take_six_bits(const uint8_t* from, Run& run) {
    const uint8_t* high = from + 128;
    for (int i = 0; i < NEST; i++) {
        const int half = i / 128, low = from[half * 64 + i % 64] >> (i / 64 % 2 * 4) & 15;
        run.q[i] = low | (high[half * 32 + i % 32] >> (i / 32 % 4 * 2) & 3) << 4;
    }
    std::memcpy(run.scales, from + 192, 16);
    std::memcpy(run.halves, from + 208, 2);
    return from + 210;
}

template <class F>
const uint8_t* take(const uint8_t* from, Run& run) {
    if constexpr (F::SCALES != NESTED)
        return take_plain<F>(from, run);
    else if constexpr (F::MINIMUM)
        return take_minima<F>(from, run);
    else
        return take_six_bits(from, run);
}

// BITS bits of a block's numbers, from `shift` on, for output `lane` of a panel: a word in each vector.
template <int BITS>
void place_plane(const uint8_t* q, int shift, int lane, uint8_t* to) {
    constexpr int PER_BYTE = 8 / BITS, PER_WORD = 4 * PER_BYTE, MASK = (1 << BITS) - 1;
    for (int vector = 0; vector < BLOCK / PER_WORD; vector++, q += PER_WORD) {
        uint32_t word = 0;
        for (int i = 0; i < PER_WORD; i++) {
            const int half = i % 2, place = i / 2 % PER_BYTE, byte = i / 2 / PER_BYTE;
            word |= uint32_t(q[i] >> shift & MASK) << (half * 16 + byte * 8 + place * BITS);
        }
        std::memcpy(to + (vector * PANEL + lane) * 4, &word, 4);
    }
}

template <class F>
void place(const Run& run, int lane, uint8_t* to) {
    for (int i = 0; i < F::UNITS / (2 * PANEL); i++) std::memcpy(to + (i * PANEL + lane) * 2, run.halves[i], 2);
    to += F::UNITS;
    if constexpr (F::SCALES == NESTED) {
        for (int i = 0; i < F::BLOCKS * F::GROUPS; i++) to[i * PANEL + lane] = run.scales[i];
        for (int i = 0; F::MINIMUM && i < F::BLOCKS; i++) to[(F::BLOCKS * F::GROUPS + i) * PANEL + lane] = run.minima[i];
    }
    to += F::BYTES;
    for (int block = 0; block < F::BLOCKS; block++, to += F::PLANES) {
        const uint8_t* q = run.q + block * BLOCK;
        if constexpr (F::BITS == 8) {
            for (int i = 0; i < BLOCK; i++)
                to[(i / 2 * 4 + lane / LANES * 2 + i % 2) * LANES + lane % LANES] = q[i];
        } else {
            place_plane<4>(q, 0, lane, to);
            if constexpr (F::BITS > 4) place_plane<F::BITS - 4>(q, 4, lane, to + 4 * BLOCK * PANEL / 8);
        }
    }
}

}  // namespace

// Pack `count` outputs, whose blocks begin at `rows`. panels: [ceil(count / 32)][runs][SIZE]
extern "C" void pack_blocks(int form, const uint8_t* const* rows, int64_t runs, int64_t count, uint8_t* panels) {
    with_form(form, [&](auto known) {
        using F = decltype(known);
        if constexpr (F::SCALES == HALVES || F::SCALES == NESTED) {
            const int64_t size = runs * F::SIZE;
            std::memset(panels, 0, (count + PANEL - 1) / PANEL * size);
            Run run;
            for (int64_t i = 0; i < count; i++) {
                const uint8_t* from = rows[i];
                uint8_t* to = panels + i / PANEL * size;
                for (int64_t j = 0; j < runs; j++, to += F::SIZE) {
                    from = take<F>(from, run);
                    place<F>(run, i % PANEL, to);
                }
            }
        }
    });
}
