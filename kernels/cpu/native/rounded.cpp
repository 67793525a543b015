// Owns products of weights of 4 to 8 bits with activations of 8 bits: 64 products of bytes an instruction (VNNI), where there is one.
// Never rounds a sum of bytes: those of 32 inputs are exact, and are scaled and added in float32, in one order everywhere.
#include "rounded.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "forms.h"
#include "vector.h"

constexpr float LEAST = 1e-30f;  // of a block's largest magnitude: a smaller one is zero, for its scale would be denormal
constexpr int WORDS = BLOCK / 4, HALF = 2;  // a word has four inputs of an output; a block has two halves of 16 inputs

using Bytes = Form<8, 0, 32, false, BY_OUTPUT>;

// Two vectors of 32 bytes, as AVX2 has them.
template <class Vector, class Work>
inline Vector by_halves(const Work& work) {
    const auto low = work(0), high = work(1);
    Vector found;
    std::memcpy(&found, &low, sizeof low);
    std::memcpy(reinterpret_cast<char*>(&found) + sizeof low, &high, sizeof high);
    return found;
}

template <class Half, class Vector>
inline Half half(const Vector& value, int which) {
    Half found;
    std::memcpy(&found, reinterpret_cast<const char*>(&value) + which * sizeof found, sizeof found);
    return found;
}

// a * b + c, rounded once. Said outright: what a compiler would fuse by itself differs between instruction sets.
inline f32x16 fused(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return std::bit_cast<f32x16>(_mm512_fmadd_ps(std::bit_cast<__m512>(a), std::bit_cast<__m512>(b), std::bit_cast<__m512>(c)));
#else
    return by_halves<f32x16>(
        [&](int i) { return _mm256_fmadd_ps(half<__m256>(a, i), half<__m256>(b, i), half<__m256>(c, i)); });
#endif
}

// Sums of four products each of bytes without a sign and with one, exact.
inline i32x16 add_bytes(i32x16 sum, u32x16 w, i32x16 x) {
#if defined(__AVX512VNNI__)
    return std::bit_cast<i32x16>(
        _mm512_dpbusd_epi32(std::bit_cast<__m512i>(sum), std::bit_cast<__m512i>(w), std::bit_cast<__m512i>(x)));
#else
    return by_halves<i32x16>([&](int i) {
        const __m256i own = half<__m256i>(sum, i), bytes = half<__m256i>(w, i), signs = half<__m256i>(x, i);
#if defined(__AVXVNNI__)
        return _mm256_dpbusd_avx_epi32(own, bytes, signs);
#else
        // Not by products of bytes, which saturate: the even ones as numbers of 16 bits, and the odd ones.
        const __m256i low = _mm256_set1_epi16(255);
        const __m256i even = _mm256_madd_epi16(_mm256_and_si256(bytes, low), _mm256_srai_epi16(_mm256_slli_epi16(signs, 8), 8));
        const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(bytes, 8), _mm256_srai_epi16(signs, 8));
        return _mm256_add_epi32(own, _mm256_add_epi32(even, odd));
#endif
    });
#endif
}

int byte_level() {
#if defined(__AVX512VNNI__)
    return 2;
#elif defined(__AVXVNNI__)
    return 1;
#else
    return 0;
#endif
}

// --- activations ---------------------------------------------------------------------------------------------------------------

// The nearest integers of x * factor, which are below 2^22, the even ones of two: what is added leaves no bits behind the point.
inline i32x16 nearest(f32x16 x, f32x16 factor) {
    const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23
    return std::bit_cast<i32x16>(fused(x, factor, magic)) - std::bit_cast<i32x16>(magic);
}

// 32 integers as bytes, in RoundedBlock's order.
inline __m256i as_bytes(const i32x16& a, const i32x16& b) {
    const __m256i first = _mm256_packs_epi32(half<__m256i>(a, 0), half<__m256i>(a, 1));
    const __m256i last = _mm256_packs_epi32(half<__m256i>(b, 0), half<__m256i>(b, 1));
    const __m256i mixed = _mm256_packs_epi16(first, last);  // by fours: 0, 2, 4, 6, 1, 3, 5, 7
    const __m256i in_order = _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    const __m128i eights = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    return _mm256_shuffle_epi8(in_order, _mm256_broadcastsi128_si256(eights));
}

// The sums of 16 bytes each.
inline void sum_bytes(__m256i bytes, int32_t* sums) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
    __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    fours = _mm256_add_epi32(fours, _mm256_shuffle_epi32(fours, 0x4e));
    fours = _mm256_add_epi32(fours, _mm256_shuffle_epi32(fours, 0xb1));
    sums[0] = _mm256_extract_epi32(fours, 0);
    sums[1] = _mm256_extract_epi32(fours, 4);
}

template <class T>
void round_block(const T* x, RoundedBlock& to) {
    const f32x16 a = load(x), b = load(x + LANES);
    // Magnitudes by their bits: infinity is above all numbers, and NaN above infinity.
    const i32x16 sign_off = i32x16{} + 0x7fffffff;
    const i32x16 bits_a = std::bit_cast<i32x16>(a) & sign_off, bits_b = std::bit_cast<i32x16>(b) & sign_off;
    const int32_t bits = reduce(bits_a > bits_b ? bits_a : bits_b, [](i32x16 p, i32x16 q) { return p > q ? p : q; });
    const float largest = std::bit_cast<float>(bits);
    to = RoundedBlock{};
    if (bits >= 0x7f800000) to.scale = to.sum = std::numeric_limits<float>::quiet_NaN();
    if (bits >= 0x7f800000 || largest < LEAST) return;
    const f32x16 factor = splat(127.0f / largest);
    const __m256i bytes = as_bytes(nearest(a, factor), nearest(b, factor));
    std::memcpy(to.q, &bytes, sizeof bytes);
    sum_bytes(bytes, to.sums);
    to.scale = largest / 127.0f;
    to.sum = to.scale * float(to.sums[0] + to.sums[1]);
}

template void round_block(const bf16*, RoundedBlock&);
template void round_block(const float*, RoundedBlock&);

// --- weights -------------------------------------------------------------------------------------------------------------------

// Words of bytes without a sign, q or for 8 bits q + 128, of 32 inputs and 16 outputs each.
struct Words {
    u32x16 of[WORDS][2];
};

inline u32x16 widen_unsigned(const uint8_t* from) {
    __m128i bytes;
    std::memcpy(&bytes, from, sizeof bytes);
#if defined(__AVX512F__)
    return std::bit_cast<u32x16>(_mm512_cvtepu8_epi32(bytes));
#else
    return by_halves<u32x16>([&](int i) { return _mm256_cvtepu8_epi32(i ? _mm_srli_si128(bytes, 8) : bytes); });
#endif
}

// A word of each output from bytes: steps of two inputs lie apart, and the first of each before the second of all 16 outputs.
inline u32x16 gather_word(const uint8_t* step, const uint8_t* third) {
#if defined(__AVX512BW__)
    const auto load_step = [](const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); };
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(load_step(step)), load_step(third), 1);
    const __m512i by_four = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), both);
    const __m128i order = _mm_setr_epi8(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15);
    return std::bit_cast<u32x16>(_mm512_shuffle_epi8(by_four, _mm512_broadcast_i32x4(order)));
#else
    return widen_unsigned(step) | widen_unsigned(third) << 8 | widen_unsigned(step + LANES) << 16 |
           widen_unsigned(third + LANES) << 24;
#endif
}

template <int BY>
inline u32x16 shifted(u32x16 value) {
    if constexpr (BY < 0)
        return value >> -BY;
    else
        return value << BY;
}

// The words of a block. Four bits of steps 0 and 2 of four lie in the lower halves of bytes, those of 1 and 3 in the upper.
template <class F>
[[gnu::always_inline]] inline void unpack_words(const uint8_t* planes, Words& to) {
    const auto eight = [&]<int J>() __attribute__((always_inline)) {
#pragma GCC unroll 2
        for (int c = 0; c < 2; c++) {
            if constexpr (F::BITS == 8) {
                const auto step = [&](int number) { return planes + ((4 * J + number) * 2 + c) * 2 * LANES; };
                to.of[2 * J][c] = gather_word(step(0), step(2)) ^ 0x80808080u;
                to.of[2 * J + 1][c] = gather_word(step(1), step(3)) ^ 0x80808080u;
                continue;
            }
            const u32x16 low = std::bit_cast<u32x16>(load_lanes(planes + (2 * J + c) * 64));
            u32x16 even = low & 0x0f0f0f0fu, odd = (low >> 4) & 0x0f0f0f0fu;
            if constexpr (F::BITS > 4 && F::BITS < 8) {
                // The bits above them, of 16 steps of two inputs in a word's halves, or of 8 at two bits each.
                constexpr int UPPER = F::BITS == 6 ? 2 : 1, AT = J * 4 * UPPER % 16;
                constexpr uint32_t FIRST = UPPER == 2 ? 0x00300030u : 0x00100010u, THIRD = FIRST << 8;
                const uint8_t* plane = planes + 4 * BLOCK * PANEL / 8 + (J * 4 * UPPER / 16 * 2 + c) * 64;
                const u32x16 high = std::bit_cast<u32x16>(load_lanes(plane));
                even |= (shifted<4 - AT>(high) & FIRST) | (shifted<12 - AT - 2 * UPPER>(high) & THIRD);
                odd |= (shifted<4 - AT - UPPER>(high) & FIRST) | (shifted<12 - AT - 3 * UPPER>(high) & THIRD);
            }
            to.of[2 * J][c] = even;
            to.of[2 * J + 1][c] = odd;
        }
    };
    eight.template operator()<0>();
    eight.template operator()<1>();
    eight.template operator()<2>();
    eight.template operator()<3>();
}

// --- sums ----------------------------------------------------------------------------------------------------------------------

// Adds one row's block to its sums.
template <class F>
[[gnu::always_inline]] inline void add_row(const RoundedBlock& x, const Words& words, const f32x16* scales, const f32x16* minima,
                                           f32x16* sums) {
    constexpr int ZERO = F::BITS == 8 ? 128 : F::ZERO;
    i32x16 own[HALF][2];  // each half by itself: sixteen inputs have a scale of their own in Q6_K, and shorter chains elsewhere
    for (int h = 0; h < HALF; h++)
        own[h][0] = own[h][1] = i32x16{} + (F::GROUPS == 2 ? -ZERO * x.sums[h] : h ? 0 : -ZERO * (x.sums[0] + x.sums[1]));
#pragma GCC unroll 8
    for (int k = 0; k < WORDS; k++) {
        const i32x16 four = broadcast(x.q + 4 * k);
        for (int c = 0; c < 2; c++) own[k * HALF / WORDS][c] = add_bytes(own[k * HALF / WORDS][c], words.of[k][c], four);
    }
    const auto everywhere = [](const float& value) { return std::bit_cast<f32x16>(broadcast(&value)); };
    const f32x16 scale = everywhere(x.scale);
    for (int c = 0; c < 2; c++) {
        const auto floats = [](i32x16 value) { return __builtin_convertvector(value, f32x16); };
        if constexpr (F::GROUPS == 2)
            sums[c] = fused(fused(floats(own[1][c]), scales[2 + c], floats(own[0][c]) * scales[c]), scale, sums[c]);
        else if constexpr (F::SCALES == BY_OUTPUT)
            sums[c] = fused(floats(own[0][c] + own[1][c]), scale, sums[c]);
        else
            sums[c] = fused(floats(own[0][c] + own[1][c]), scales[c] * scale, sums[c]);
        if (F::MINIMUM) sums[c] = fused(everywhere(x.sum), minima[c], sums[c]);
    }
}

// As sum_rounded. A block's weights are unpacked to registers, and all rows pass by them.
template <class F>
[[gnu::noinline]] void sum_panel(const RoundedBlock* x, int64_t stride, int64_t rows, int64_t inputs, const uint8_t* run,
                                 f32x16* sums) {
    std::fill(sums, sums + 2 * rows, splat(0.0f));
    for (int64_t k = 0; k < inputs; run += F::SIZE)
        for (int block = 0; block < F::BLOCKS; block++, k += BLOCK, x += stride) {
            f32x16 scales[F::GROUPS * 2], minima[2];
            if constexpr (F::SCALES != BY_OUTPUT) unpack_scales<F>(run, block, scales, minima);
            const uint8_t* planes = run + F::UNITS + F::BYTES + block * F::PLANES;
            fetch_after<F>(run, block);
            Words words;
            unpack_words<F>(planes, words);
            for (int64_t r = 0; r < rows; r++) add_row<F>(x[r], words, scales, minima, sums + 2 * r);
        }
}

void sum_rounded(const RoundedBlock* x, int64_t stride, int64_t rows, int64_t inputs, const GroupedPanel& panel, f32x16* sums) {
    const auto sum = [&]<class F>(F) { sum_panel<F>(x, stride, rows, inputs, panel.data, sums); };
    if (panel.form == BYTES_BY_OUTPUT) return sum(Bytes{});
    with_integers(panel.form, sum);
}
