// Owns blocks of a KV cache in 8 bits, as lower tiers keep them: each token's vector of one head by a scale of its own.
// Never changes the order of a block: a number has the place that it has in the cache (cache.h), and scales follow all of them.
#include <cstdint>
#include <cstring>
#include <limits>

#include "cache.h"
#include "e4m3.h"
#include "vector.h"

namespace {

// A vector whose scale would be smaller is zeros: no product of a scale and a number is denormal, in bfloat16 either.
constexpr float SMALLEST = 0x1p-110f;
constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, the even one of two

// What the largest magnitude of a vector becomes, and the largest scale by which that is finite.
template <class C>
constexpr float TOP = 0;
template <>
constexpr float TOP<int8_t> = 127.0f;
template <>
constexpr float TOP<e4m3> = 448.0f;
template <class C>
constexpr float MOST = 0;
template <>
constexpr float MOST<int8_t> = 0x1.020406p+121f;
template <>
constexpr float MOST<e4m3> = 0x1.249248p+119f;

// Sixteen lanes of one or two elements each, in the order of the cache.
template <class T>
struct Lane;

template <>
struct Lane<float> {
    f32x16 parts[1];
    explicit Lane(const float* from) : parts{load(from)} {}
};

template <>
struct Lane<bf16> {
    f32x16 parts[2];
    explicit Lane(const bf16* from) {
        const i32x16 bits = load_lanes(from);
        parts[0] = std::bit_cast<f32x16>(bits << 16);
        parts[1] = std::bit_cast<f32x16>(bits & int32_t(0xffff0000));
    }
};

inline i32x16 larger(i32x16 a, i32x16 b) { return a > b ? a : b; }

// The scales of vectors whose largest magnitudes have these bits, under which NaN and infinity are above all numbers: those of a cache
// (cache.h), but for what has none. See scales_of in kernels/cpu/narrow_blocks.py.
template <class C>
inline f32x16 scale_of(i32x16 size) {
    const f32x16 scale = minimum(std::bit_cast<f32x16>(size) / splat(TOP<C>), splat(MOST<C>));
    const f32x16 found = scale >= splat(SMALLEST) ? scale : f32x16{};
    return size >= 0x7f800000 ? splat(std::numeric_limits<float>::quiet_NaN()) : found;
}

// The lowest 16 or 8 bits of each lane. By intrinsics: GCC 12 converts them one by one.
inline void store_words(uint8_t* to, i32x16 lanes) {
#if defined(__AVX512F__)
    const __m256i words = _mm512_cvtepi32_epi16(std::bit_cast<__m512i>(lanes));
#else
    __m256i halves[2];
    std::memcpy(halves, &lanes, sizeof lanes);
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(halves[0], halves[1]), 0xd8);
#endif
    std::memcpy(to, &words, sizeof words);
}

inline void store_bytes(uint8_t* to, i32x16 lanes) {
    uint8_t words[2 * LANES];
    store_words(words, lanes);
    __m128i halves[2];
    std::memcpy(halves, words, sizeof words);
    const __m128i bytes = _mm_packus_epi16(halves[0], halves[1]);
    std::memcpy(to, &bytes, sizeof bytes);
}

inline i32x16 load_words(const uint8_t* from) {
    u16x16 words;
    std::memcpy(&words, from, sizeof words);
    return __builtin_convertvector(words, i32x16);
}

inline i32x16 load_bytes(const uint8_t* from) {
    __m128i bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    const __m256i words = _mm256_cvtepu8_epi16(bytes);
    uint8_t stored[2 * LANES];
    std::memcpy(stored, &words, sizeof words);
    return load_words(stored);
}

// Numbers from units, and back, in the lowest byte of each lane.
template <class C>
inline i32x16 round(f32x16 units) {
    if constexpr (std::is_same_v<C, int8_t>) {
        return (std::bit_cast<i32x16>(units + splat(MAGIC)) - std::bit_cast<i32x16>(splat(MAGIC))) & 0xff;
    } else {  // round_e4m3 of e4m3.h; no unit is too large
        const i32x16 bits = std::bit_cast<i32x16>(units), size = bits & 0x7fffffff;
        const f32x16 last = splat(16384.0f);
        const i32x16 small = std::bit_cast<i32x16>(std::bit_cast<f32x16>(size) + last) - std::bit_cast<i32x16>(last);
        const i32x16 normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
        return (size < 0x3c800000 ? small : normal) | (bits >> 24 & 0x80);
    }
}

template <class C>
inline f32x16 units_of(i32x16 byte) {
    if constexpr (std::is_same_v<C, int8_t>) {
        return __builtin_convertvector(byte << 24 >> 24, f32x16);
    } else {
        const i32x16 size = byte & 0x7f;
        const i32x16 small = std::bit_cast<i32x16>(__builtin_convertvector(size, f32x16) * splat(0x1p-9f));
        const i32x16 normal = (size << 20) + (120 << 23);
        return std::bit_cast<f32x16>((size < 8 ? small : normal) | (byte & 0x80) << 24);
    }
}

// A run of lanes in 8 bits and back, the elements of all lanes by the scales of their places in a lane.
template <class T, class C>
struct Run {
    static constexpr int PAIR = Element<T>::PAIR, STEP = LANES * PAIR;

    // The bits of the largest magnitude in each lane, by place.
    static void largest(const T* from, int64_t count, i32x16* sizes) {
        for (int part = 0; part < PAIR; part++) sizes[part] = i32x16{};
        for (int64_t i = 0; i < count; i += STEP) {
            const Lane<T> lane(from + i);
            for (int part = 0; part < PAIR; part++)
                sizes[part] = larger(sizes[part], std::bit_cast<i32x16>(lane.parts[part]) & 0x7fffffff);
        }
    }

    static void narrow(const T* from, int64_t count, const f32x16* scales, uint8_t* to) {
        for (int64_t i = 0; i < count; i += STEP) {
            const Lane<T> lane(from + i);
            i32x16 bytes[PAIR];
            for (int part = 0; part < PAIR; part++)  // a scale that is zero or NaN leaves zeros
                bytes[part] = round<C>(lane.parts[part] / scales[part]) & (scales[part] > f32x16{});
            if constexpr (PAIR == 1)
                store_bytes(to + i, bytes[0]);
            else
                store_words(to + i, bytes[0] | bytes[1] << 8);
        }
    }

    static void widen(const uint8_t* from, int64_t count, const f32x16* scales, T* to) {
        for (int64_t i = 0; i < count; i += STEP) {
            if constexpr (PAIR == 1) {
                store(to + i, units_of<C>(load_bytes(from + i)) * scales[0]);
            } else {
                const i32x16 words = load_words(from + i);
                i32x16 bits[2];
                for (int part = 0; part < 2; part++) {
                    const i32x16 byte = part ? words >> 8 : words & 0xff;
                    bits[part] = std::bit_cast<i32x16>(units_of<C>(byte) * scales[part]);
                    bits[part] += 0x7fff + (bits[part] >> 16 & 1);  // to the nearest, the even one of two; NaN stays NaN
                }
                const i32x16 lanes = (bits[0] >> 16 & 0xffff) | (bits[1] & int32_t(0xffff0000));
                std::memcpy(to + i, &lanes, sizeof lanes);
            }
        }
    }
};

// Keys: a lane is a token, and all places in it are of that token.
template <class T, class C>
struct Keys {
    using Of = Run<T, C>;

    static void narrow(const T* group, int64_t head_dim, uint8_t* to, float* scales) {
        i32x16 sizes[2] = {};
        Of::largest(group, LANES * head_dim, sizes);
        const f32x16 scale = scale_of<C>(Of::PAIR == 1 ? sizes[0] : larger(sizes[0], sizes[1]));
        const f32x16 by_place[2] = {scale, scale};
        Of::narrow(group, LANES * head_dim, by_place, to);
        store(scales, scale);
    }

    static void widen(const uint8_t* from, const float* scales, int64_t head_dim, T* group) {
        const f32x16 by_place[2] = {load(scales), load(scales)};
        Of::widen(from, LANES * head_dim, by_place, group);
    }
};

// Values: a place in all lanes is a token, and PAIR tokens have their numbers beside each other.
template <class T, class C>
struct Values {
    using Of = Run<T, C>;

    static void narrow(const T* group, int64_t head_dim, uint8_t* to, float* scales) {
        constexpr int PAIR = Of::PAIR;
        alignas(64) int32_t sizes[LANES];
        for (int token = 0; token < LANES; token += PAIR) {
            i32x16 by_place[PAIR];
            Of::largest(group + token * head_dim, PAIR * head_dim, by_place);
            for (int part = 0; part < PAIR; part++) sizes[token + part] = reduce(by_place[part], larger);
        }
        store(scales, scale_of<C>(load_lanes(sizes)));
        for (int token = 0; token < LANES; token += PAIR) {
            f32x16 by_place[PAIR];
            for (int part = 0; part < PAIR; part++) by_place[part] = splat(scales[token + part]);
            Of::narrow(group + token * head_dim, PAIR * head_dim, by_place, to + token * head_dim);
        }
    }

    static void widen(const uint8_t* from, const float* scales, int64_t head_dim, T* group) {
        constexpr int PAIR = Of::PAIR;
        for (int token = 0; token < LANES; token += PAIR) {
            f32x16 by_place[PAIR];
            for (int part = 0; part < PAIR; part++) by_place[part] = splat(scales[token + part]);
            Of::widen(from + token * head_dim, PAIR * head_dim, by_place, group + token * head_dim);
        }
    }
};

// Call `work` for each group of sixteen tokens of a head: in the block, in the row's numbers, in its scales.
template <class T, class Byte, class Work>
void each_group(T* block, Byte* row, int64_t groups, int64_t head_dim, const Work& work) {
    Byte* scales = row + groups * LANES * head_dim;
    for (int64_t i = 0; i < groups; i++)
        work(block + i * LANES * head_dim, row + i * LANES * head_dim, scales + i * LANES * sizeof(float));
}

template <class T, class C>
void narrow_tensor(bool keys, const T* block, int64_t groups, int64_t head_dim, uint8_t* row) {
    each_group(block, row, groups, head_dim, [&](const T* group, uint8_t* to, uint8_t* scales) {
        float found[LANES];
        (keys ? Keys<T, C>::narrow : Values<T, C>::narrow)(group, head_dim, to, found);
        std::memcpy(scales, found, sizeof found);
    });
}

template <class T, class C>
void widen_tensor(bool keys, const uint8_t* row, int64_t groups, int64_t head_dim, T* block) {
    each_group(block, row, groups, head_dim, [&](T* group, const uint8_t* from, const uint8_t* scales) {
        float found[LANES];
        std::memcpy(found, scales, sizeof found);
        (keys ? Keys<T, C>::widen : Values<T, C>::widen)(from, found, head_dim, group);
    });
}

template <class Work>
void with_types(int wide, int fp8, const Work& work) {
    if (wide)
        fp8 ? work(float{}, e4m3{}) : work(float{}, int8_t{});
    else
        fp8 ? work(bf16{}, e4m3{}) : work(bf16{}, int8_t{});
}

}  // namespace

// The block's part of each tensor, keys and values in turn, `apart` bytes from the next one's, to a row of 8 bits:
// [tensors][groups * 16 * head_dim numbers, groups * 16 scales]. wide: float32, or else bfloat16; fp8: or else int8.
extern "C" void narrow_block(int wide, int fp8, const uint8_t* block, int64_t apart, int64_t tensors, int64_t groups,
                             int64_t head_dim, uint8_t* row) {
    with_types(wide, fp8, [&](auto element, auto number) {
        using T = decltype(element);
        const int64_t size = groups * LANES * (head_dim + int64_t(sizeof(float)));
        for (int64_t i = 0; i < tensors; i++)
            narrow_tensor<T, decltype(number)>(
                i % 2 == 0, reinterpret_cast<const T*>(block + i * apart), groups, head_dim, row + i * size);
    });
}

extern "C" void widen_block(int wide, int fp8, const uint8_t* row, int64_t tensors, int64_t groups, int64_t head_dim,
                            int64_t apart, uint8_t* block) {
    with_types(wide, fp8, [&](auto element, auto number) {
        using T = decltype(element);
        const int64_t size = groups * LANES * (head_dim + int64_t(sizeof(float)));
        for (int64_t i = 0; i < tensors; i++)
            widen_tensor<T, decltype(number)>(
                i % 2 == 0, row + i * size, groups, head_dim, reinterpret_cast<T*>(block + i * apart));
    });
}
