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

#if defined(__AVX512BW__)

// 32 numbers as bfloat16, in words. The exponent's bias is added by bits. Numbers below 2^-6 have no leading one, and they and NaN
// are looked up: the lowest 5 bits of each are all that a permutation of words takes as its index.
inline __m512i widen_words(const e4m3* from) {
    alignas(64) static constexpr uint16_t LOOKED_UP[32] = {
        0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60,  // multiples of 2^-9
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x7fc0};
    __m256i bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    const __m512i numbers = _mm512_cvtepi8_epi16(bytes), sizes = _mm512_and_si512(numbers, _mm512_set1_epi16(0x7f));
    const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(sizes, 4), _mm512_set1_epi16(0x3c00));
    const __mmask32 small = _mm512_cmplt_epu16_mask(sizes, _mm512_set1_epi16(8));
    const __mmask32 nan = _mm512_cmpeq_epi16_mask(sizes, _mm512_set1_epi16(0x7f));
    const __m512i found = _mm512_mask_permutexvar_epi16(normal, small | nan, sizes, _mm512_load_si512(LOOKED_UP));
    return _mm512_ternarylogic_epi32(found, numbers, _mm512_set1_epi16(int16_t(0x8000)), 0xf8);  // found | (numbers & sign)
}

#endif

// Sixteen numbers as the bits of float32.
inline i32x16 widen_bytes(const e4m3* from) {
    // By way of float16, whose numbers are 2^8 times as small for the same bits: it has e4m3's small ones, too.
    constexpr float UNIT = 256.0f;
    __m128i bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    const __m256i numbers = _mm256_cvtepi8_epi16(bytes);
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

// A lane's numbers, which lie as bytes do for `lanes` of vector.h: a lane's second one comes after the first ones of all lanes.
template <class T>
inline i32x16 lanes(const e4m3* from) {
    if constexpr (Element<T>::PAIR == 1) return widen_bytes(from);
#if defined(__AVX512BW__)
    alignas(64) static constexpr uint16_t BESIDE[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return std::bit_cast<i32x16>(_mm512_permutexvar_epi16(_mm512_load_si512(BESIDE), widen_words(from)));
#else
    const u32x16 first = std::bit_cast<u32x16>(widen_bytes(from));  // of bfloat16's numbers, only the upper halves are set
    return widen_bytes(from + LANES) | std::bit_cast<i32x16>(first >> 16);
#endif
}
