// Owns the numbers of FP8 e4m3 (arXiv 2209.05433, without infinities): how they are widened and rounded to.
// Never scales: the cache and the panels know what a number is to be multiplied by.
#pragma once

#include <bit>
#include <cstdint>

#include "vector.h"

struct e4m3 {
    uint8_t bits;  // sign, 4 bits of exponent with a bias of 7, 3 of mantissa; all bits but the sign set: NaN
};

// The nearest number, the even one of two, as torch rounds: from 448 + 16 on, only NaN is as large.
inline e4m3 round_e4m3(float value) {
    constexpr uint32_t TOO_LARGE = 0x43f00000, NORMAL = 0x3c800000;  // 480 and 2^-6
    constexpr float LAST_BIT = 16384.0f;  // 2^14: its last bit is 2^-9, of which the numbers below 2^-6 are multiples
    const uint32_t bits = std::bit_cast<uint32_t>(value), size = bits & 0x7fffffff;
    uint32_t rounded;
    if (size >= TOO_LARGE)
        rounded = 0x7f;
    else if (size < NORMAL)
        rounded = std::bit_cast<uint32_t>(std::bit_cast<float>(size) + LAST_BIT) - std::bit_cast<uint32_t>(LAST_BIT);
    else
        rounded = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);  // biases: 127 - 7
    return {uint8_t((bits >> 24 & 0x80) | rounded)};
}

// Numbers as bfloat16, in words. The exponent's bias is added by bits. Those below 2^-6, multiples of 2^-9, have no leading one, and
// processors' products of bfloat16 take such numbers for zero: they are looked up, as NaN is.
#if defined(__AVX512BW__)

inline __m512i widen_words(__m256i bytes) {
    // A permutation of words takes the lowest 5 bits of its index: NaN has the last one.
    alignas(64) static constexpr uint16_t LOOKED_UP[32] = {
        0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60,
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x7fc0};
    const __m512i numbers = _mm512_cvtepi8_epi16(bytes), sizes = _mm512_slli_epi16(numbers, 9);
    const __m512i normal = _mm512_add_epi16(_mm512_srli_epi16(sizes, 5), _mm512_set1_epi16(0x3c00));
    // NaN, plus one, is the least.
    const __mmask32 looked_up = _mm512_cmplt_epu16_mask(_mm512_add_epi16(sizes, _mm512_set1_epi16(1 << 9)), _mm512_set1_epi16(9 << 9));
    const __m512i found = _mm512_mask_permutexvar_epi16(normal, looked_up, numbers, _mm512_load_si512(LOOKED_UP));
    return _mm512_ternarylogic_epi32(found, numbers, _mm512_set1_epi16(int16_t(0x8000)), 0xf8);  // found | (numbers & sign)
}

#else

inline __m256i widen_words(__m128i bytes) {
    // The lower bytes of eight words, and then their upper ones.
    const __m256i looked_up = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0, -128, -64, 0, 32, 64, 96, 0, 59, 59, 59, 60, 60, 60, 60));
    const __m256i numbers = _mm256_cvtepi8_epi16(bytes), sizes = _mm256_and_si256(numbers, _mm256_set1_epi16(0x7f));
    const __m256i normal = _mm256_add_epi16(_mm256_slli_epi16(sizes, 4), _mm256_set1_epi16(0x3c00));
    const __m256i index = _mm256_add_epi16(_mm256_mullo_epi16(sizes, _mm256_set1_epi16(0x0101)), _mm256_set1_epi16(0x0800));
    const __m256i small = _mm256_cmpgt_epi16(_mm256_set1_epi16(8), sizes);
    const __m256i found = _mm256_blendv_epi8(normal, _mm256_shuffle_epi8(looked_up, index), small);
    const __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi16(sizes, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x7fc0));
    const __m256i sign = _mm256_and_si256(numbers, _mm256_set1_epi16(int16_t(0x8000)));
    return _mm256_or_si256(_mm256_or_si256(found, nan), sign);
}

#endif

template <class Bytes>
inline Bytes load_bits(const e4m3* from) {
    Bytes found;
    std::memcpy(&found, from, sizeof found);
    return found;
}

// Sixteen lanes of two numbers each, which lie beside each other: the order of panels.
inline i32x16 lanes_of_pairs(const e4m3* from) {
#if defined(__AVX512BW__)
    return std::bit_cast<i32x16>(widen_words(load_bits<__m256i>(from)));
#else
    const __m256i halves[2] = {widen_words(load_bits<__m128i>(from)), widen_words(load_bits<__m128i>(from + LANES))};
    return load_lanes(halves);
#endif
}

// Sixteen numbers as the bits of float32.
inline i32x16 widen_bytes(const e4m3* from) {
    // By way of float16, whose numbers are 2^8 times as small for the same bits: it has e4m3's small ones, too.
    constexpr float UNIT = 256.0f;
    const __m256i numbers = _mm256_cvtepi8_epi16(load_bits<__m128i>(from));
    const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(numbers, 7), _mm256_set1_epi16(int16_t(0xbfff)));
    // NaN has no bits of its own there.
    const __m256i sizes = _mm256_and_si256(numbers, _mm256_set1_epi16(0x7f));
    const __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi16(sizes, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x7e00));
    const __m256i found = _mm256_or_si256(halves, nan);
#if defined(__AVX512F__)
    const f32x16 wide = std::bit_cast<f32x16>(_mm512_cvtph_ps(found));
#else
    const __m256 parts[2] = {_mm256_cvtph_ps(_mm256_castsi256_si128(found)), _mm256_cvtph_ps(_mm256_extracti128_si256(found, 1))};
    f32x16 wide;
    std::memcpy(&wide, parts, sizeof wide);
#endif
    return std::bit_cast<i32x16>(wide * splat(UNIT));
}

// A lane's numbers in the order of a cache, as bytes for `lanes` of vector.h: a lane's second one after the first ones of all lanes.
template <class T>
inline i32x16 lanes(const e4m3* from) {
    if constexpr (Element<T>::PAIR == 1) return widen_bytes(from);
#if defined(__AVX512BW__)
    alignas(64) static constexpr uint16_t BESIDE[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i words = widen_words(load_bits<__m256i>(from));
    return std::bit_cast<i32x16>(_mm512_permutexvar_epi16(_mm512_load_si512(BESIDE), words));
#else
    const __m128i first = load_bits<__m128i>(from), second = load_bits<__m128i>(from + LANES);
    const __m256i halves[2] = {widen_words(_mm_unpacklo_epi8(first, second)), widen_words(_mm_unpackhi_epi8(first, second))};
    return load_lanes(halves);
#endif
}
