// Owns how grouped weights lie in memory: the form of a panel, and the scales and minima of its groups.
// Never unpacks a weight: the products do, each as its instruction wants them.
#pragma once

#include <cstdint>

#include "e4m3.h"
#include "grouped.h"
#include "vector.h"

constexpr int NEST = 256;  // inputs that share the units of nested scales

// How a panel of 32 outputs lies in memory. Mirrored in grouped.py, where the order of its parts is drawn.
// float16; bytes in units of a float16 for 256 inputs; float32; one for all inputs of an output, which is not in the panel.
enum Scales { HALVES, NESTED, FLOATS, BY_OUTPUT };

template <int B, int Z, int G, bool M, Scales S = HALVES, int R = BLOCK, class N = int8_t>
struct Form {
    using Number = N;  // in 8 bits: what a byte is
    static constexpr int BITS = B, ZERO = Z, GROUP = G;  // w = scale * (q - ZERO) + minimum, for GROUP inputs
    static constexpr bool MINIMUM = M;
    static constexpr Scales SCALES = S;
    static constexpr int RUN = R, BLOCKS = RUN / BLOCK, GROUPS = BLOCK / G;  // inputs that are stored together
    static constexpr int64_t PLANES = BITS * BLOCK * PANEL / 8;
    static constexpr int64_t UNITS = S == BY_OUTPUT ? 0 : PANEL * (S == FLOATS ? 4 : 2) * (M ? 2 : 1);  // or scales and minima themselves
    static constexpr int64_t BYTES = S == NESTED ? PANEL * BLOCKS * (GROUPS + (M ? 1 : 0)) : 0;
    static constexpr int64_t SIZE = UNITS + BYTES + BLOCKS * PLANES;  // of a run
};

using Q4_0 = Form<4, 8, 32, false>;
using Q4_1 = Form<4, 0, 32, true>;
using Q5_0 = Form<5, 16, 32, false>;
using Q5_1 = Form<5, 0, 32, true>;
using Q8_0 = Form<8, 0, 32, false>;
using Q4_K = Form<4, 0, 32, true, NESTED, NEST>;
using Q5_K = Form<5, 0, 32, true, NESTED, NEST>;
using Q6_K = Form<6, 32, 16, false, NESTED, NEST>;
using Int4By32 = Form<4, 8, 32, true, FLOATS, 32>;
using Int4By128 = Form<4, 8, 32, true, FLOATS, 128>;
using Int8By32 = Form<8, 0, 32, true, FLOATS, 32>;
using Int8By128 = Form<8, 0, 32, true, FLOATS, 128>;
using Fp8By32 = Form<8, 0, 32, false, FLOATS, 32, e4m3>;
using Fp8By128 = Form<8, 0, 32, false, FLOATS, 128, e4m3>;

// Calls work(form) with the one of this number, which is not of FP8.
template <class Work>
inline void with_integers(int64_t number, const Work& work) {
    switch (number) {
        case 0: return work(Q4_0{});
        case 1: return work(Q4_1{});
        case 2: return work(Q5_0{});
        case 3: return work(Q5_1{});
        case 4: return work(Q8_0{});
        case 5: return work(Q4_K{});
        case 6: return work(Q5_K{});
        case 7: return work(Q6_K{});
        case 8: return work(Int4By32{});
        case 9: return work(Int4By128{});
        case 10: return work(Int8By32{});
        case 11: return work(Int8By128{});
    }
}

template <class Work>
inline void with_form(int64_t number, const Work& work) {
    switch (number) {
        case 12: return work(Fp8By32{});
        case 13: return work(Fp8By128{});
    }
    with_integers(number, work);
}

inline f32x16 load_half(const uint8_t* from) {
#if defined(__AVX512F__)
    return std::bit_cast<f32x16>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#else
    const auto* halves = reinterpret_cast<const __m128i*>(from);
    const __m256 wide[2] = {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
    f32x16 value;
    std::memcpy(&value, wide, sizeof value);
    return value;
#endif
}

inline f32x16 load_bytes(const uint8_t* from) {
    return std::bit_cast<f32x16>(widen_bytes(reinterpret_cast<const int8_t*>(from)));
}

// Asks for what is read after a block. A run's scales and minima, which come first in it, are shared out to its blocks.
template <class F>
inline void fetch_after(const uint8_t* run, int block) {
    constexpr int64_t SHARE = F::SIZE / F::BLOCKS;
    const auto* own = reinterpret_cast<const char*>(run) + block * SHARE;
    for (int64_t at = 0; at < SHARE; at += CACHE_LINE) fetch_ahead<F::BITS < 8>(own + at);
}

// The scales of a run's block. `run` points to where the run begins.
template <class F>
inline void unpack_scales(const uint8_t* run, int block, f32x16* scales, f32x16* minima) {
    for (int c = 0; c < 2; c++) {
        if constexpr (F::SCALES == FLOATS) {
            const auto* floats = reinterpret_cast<const float*>(run) + c * LANES;
            scales[c] = load(floats);
            if constexpr (F::MINIMUM) minima[c] = load(floats + PANEL);
            continue;
        }
        const f32x16 unit = load_half(run + c * 2 * LANES);
        const f32x16 other = F::MINIMUM ? load_half(run + (2 + c) * 2 * LANES) : unit;
        if constexpr (F::SCALES == NESTED) {
            const uint8_t* bytes = run + F::UNITS + c * LANES;
            for (int g = 0; g < F::GROUPS; g++)
                scales[g * 2 + c] = unit * load_bytes(bytes + (block * F::GROUPS + g) * PANEL);
            if (F::MINIMUM) minima[c] = -(other * load_bytes(bytes + (F::BLOCKS * F::GROUPS + block) * PANEL));
        } else {
            scales[c] = unit;
            if (F::MINIMUM) minima[c] = other;
        }
    }
}

