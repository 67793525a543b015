// Owns the sixteen-lane vector that every kernel is written in, and the element types of weights, activations and cache.
// Never touches memory layout: that is each kernel's own.
#pragma once

#include <immintrin.h>

#include <bit>
#include <cstdint>
#include <cstring>

using f32x16 = float __attribute__((vector_size(64)));
using i32x16 = int32_t __attribute__((vector_size(64)));
using u32x16 = uint32_t __attribute__((vector_size(64)));
using u16x16 = uint16_t __attribute__((vector_size(32)));

constexpr int64_t CACHE_LINE = 64;

// Asks memory for a line, to the second cache: the first one waits for few lines at a time, and sums would wait with it.
inline void fetch(const void* line) { __builtin_prefetch(line, 0, 2); }

// Asks for what is read after this line of weights. CLOSER: asks the first cache for what is read soon, too, where that was
// measured to pay: in 4 to 6 bits, and for bytes without groups.
template <bool CLOSER>
inline void fetch_ahead(const char* line) {
    constexpr int64_t FAR = 6144, NEAR = 512;  // bytes
    fetch(line + FAR);
    if constexpr (CLOSER) __builtin_prefetch(line + NEAR);
}

constexpr int LANES = 16;
constexpr int PANEL = 2 * LANES;  // outputs whose weights lie together

struct bf16 {
    uint16_t bits;
};

// How many rows of a matrix product are computed at a time: as many as the accumulators of one weight panel leave room
// for in the registers (32 of 64 bytes with AVX-512, 16 of 32 bytes with AVX2).
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 8;
#else
constexpr int MAX_ROWS = 2;
#endif

inline f32x16 splat(float value) { return f32x16{} + value; }

// Element types. A weight of `PAIR` consecutive inputs is one 32-bit lane, which is what the dot product reads.
template <class T>
struct Element;

template <>
struct Element<float> {
    static constexpr int PAIR = 1;
};

template <>
struct Element<bf16> {
    static constexpr int PAIR = 2;
};

inline float widen(float value) { return value; }
inline float widen(bf16 value) { return std::bit_cast<float>(uint32_t(value.bits) << 16); }

// Round to nearest even, as torch does; NaN stays NaN.
template <class T>
inline T narrow(float value);
template <>
inline float narrow<float>(float value) {
    return value;
}
template <>
inline bf16 narrow<bf16>(float value) {
    uint32_t bits = std::bit_cast<uint32_t>(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return {uint16_t(bits >> 16 | 0x40)};
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline f32x16 load(const float* from) {
    f32x16 value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline f32x16 load(const bf16* from) {
    u16x16 value;
    std::memcpy(&value, from, sizeof value);
    return std::bit_cast<f32x16>(__builtin_convertvector(value, i32x16) << 16);
}

inline void store(float* to, f32x16 value) { std::memcpy(to, &value, sizeof value); }

inline void store(bf16* to, f32x16 value) {
#if defined(__AVX512BF16__)
    __m256bh narrowed = _mm512_cvtneps_pbh(std::bit_cast<__m512>(value));
    std::memcpy(to, &narrowed, sizeof narrowed);
#else
    for (int i = 0; i < LANES; i++) to[i] = narrow<bf16>(value[i]);
#endif
}

// One 32-bit lane of activations, the same in all lanes.
inline i32x16 broadcast(const void* from) {
    int32_t bits;
    std::memcpy(&bits, from, sizeof bits);
    return i32x16{} + bits;
}

inline i32x16 load_lanes(const void* from) {
    i32x16 value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// A lane's weights from where they lie side by side, or from bytes: those of a lane's second element come after the first
// ones of all lanes. Numbers up to 127 are exact in bfloat16, so their low halves are zero.
template <class T>
inline i32x16 lanes(const T* from) {
    return load_lanes(from);
}

// Sixteen bytes as the bits of float32. By intrinsics: GCC 12 converts vectors of bytes one by one.
inline i32x16 widen_bytes(const int8_t* from) {
    __m128i bytes;
    std::memcpy(&bytes, from, sizeof bytes);
#if defined(__AVX512F__)
    return std::bit_cast<i32x16>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
#else
    const __m256i halves[2] = {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
    const __m256 wide[2] = {_mm256_cvtepi32_ps(halves[0]), _mm256_cvtepi32_ps(halves[1])};
    i32x16 bits;
    std::memcpy(&bits, wide, sizeof bits);
    return bits;
#endif
}

template <class T>
inline i32x16 lanes(const int8_t* from) {
    if constexpr (Element<T>::PAIR == 1) return widen_bytes(from);
    const u32x16 first = std::bit_cast<u32x16>(widen_bytes(from));
    return widen_bytes(from + LANES) | std::bit_cast<i32x16>(first >> 16);
}

// `count` bytes of type B, a multiple of a vector's lanes, as elements of T.
template <class T, class B>
inline void widen_lanes(const B* bytes, int64_t count, T* wide) {
    for (int64_t i = 0; i < count; i += LANES * Element<T>::PAIR) {
        const i32x16 found = lanes<T>(bytes + i);
        std::memcpy(wide + i, &found, sizeof found);
    }
}

// a * b + c, rounded once. Said outright: compilers fuse for one number of rows and not for another, and each by itself.
inline f32x16 multiply_add(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return std::bit_cast<f32x16>(_mm512_fmadd_ps(std::bit_cast<__m512>(a), std::bit_cast<__m512>(b), std::bit_cast<__m512>(c)));
#else
    struct Halves {
        __m256 part[2];
    };
    const auto x = std::bit_cast<Halves>(a), y = std::bit_cast<Halves>(b), z = std::bit_cast<Halves>(c);
    const auto low = _mm256_fmadd_ps(x.part[0], y.part[0], z.part[0]), high = _mm256_fmadd_ps(x.part[1], y.part[1], z.part[1]);
    return std::bit_cast<f32x16>(Halves{low, high});
#endif
}

// sum + x * w in each lane, over the lane's one or two elements, accumulated in float32.
template <class T>
inline f32x16 dot(f32x16 sum, i32x16 x, i32x16 w);

template <>
inline f32x16 dot<float>(f32x16 sum, i32x16 x, i32x16 w) {
    return multiply_add(std::bit_cast<f32x16>(x), std::bit_cast<f32x16>(w), sum);
}

template <>
inline f32x16 dot<bf16>(f32x16 sum, i32x16 x, i32x16 w) {
#if defined(__AVX512BF16__)
    return std::bit_cast<f32x16>(
        _mm512_dpbf16_ps(std::bit_cast<__m512>(sum), std::bit_cast<__m512bh>(x), std::bit_cast<__m512bh>(w)));
#else
    const i32x16 high = i32x16{} + int32_t(0xffff0000);
    sum = multiply_add(std::bit_cast<f32x16>(x << 16), std::bit_cast<f32x16>(w << 16), sum);
    return multiply_add(std::bit_cast<f32x16>(x & high), std::bit_cast<f32x16>(w & high), sum);
#endif
}

inline f32x16 maximum(f32x16 a, f32x16 b) { return a > b ? a : b; }

inline f32x16 minimum(f32x16 a, f32x16 b) { return a < b ? a : b; }

// All lanes by `combine`, in halves: lane i with lane i + 8, then + 4, + 2, + 1.
template <class Vector, class Combine>
inline auto reduce(Vector value, const Combine& combine) {
    const Vector by8 = combine(value, __builtin_shuffle(value, i32x16{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
    const Vector by4 = combine(by8, __builtin_shuffle(by8, i32x16{4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3}));
    const Vector by2 = combine(by4, __builtin_shuffle(by4, i32x16{2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1}));
    return combine(by2, __builtin_shuffle(by2, i32x16{1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0}))[0];
}

inline float reduce_add(f32x16 value) {
    return reduce(value, [](f32x16 a, f32x16 b) { return a + b; });
}

inline float reduce_max(f32x16 value) { return reduce(value, maximum); }

// exp(x) for x <= 88, relative error below 2e-7; 0 below -87. Cephes' polynomial over [-ln2/2, ln2/2].
inline f32x16 exponential(f32x16 x) {
    const i32x16 vanishes = x < splat(-87.0f);
    const f32x16 scaled = x * splat(1.44269504088896341f);
    const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const f32x16 rounded = scaled + magic;
    const i32x16 power = std::bit_cast<i32x16>(rounded) - std::bit_cast<i32x16>(magic);
    const f32x16 n = rounded - magic;
    const f32x16 r = x - n * splat(0.693359375f) - n * splat(-2.12194440e-4f);
    f32x16 p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    const f32x16 value = p * std::bit_cast<f32x16>((power + 127) << 23);
    return std::bit_cast<f32x16>(std::bit_cast<i32x16>(value) & ~vanishes);
}
