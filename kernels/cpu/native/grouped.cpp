// Owns products with weights of 4 to 8 bits in groups, w = scale * q + minimum: q, an integer or a number of FP8, is multiplied,
// and each group's sum is scaled.
// Never rounds a weight: q is exact in bfloat16, and scales and minima are float32.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "forms.h"
#include "grouped.h"
#include "vector.h"

constexpr int STEPS = BLOCK / 2;  // a step has two inputs, in the halves of a lane's 32 bits

// q - ZERO of step S of four whose low 4 bits are in `low`; what is above them is in `high`, at AT. As pairs of bfloat16.
template <class F>
class Unpacker {
   public:
#if defined(__AVX512BW__)
    // By a table of all numbers: a permutation of 16-bit words takes the lowest 5 bits of its index, one of two tables 6.
    Unpacker() {
        alignas(64) uint16_t numbers[64];
        for (int i = 0; i < 64; i++) numbers[i] = narrow<bf16>(float(i % (1 << F::BITS) - F::ZERO)).bits;
        first_ = _mm512_load_si512(numbers);
        second_ = _mm512_load_si512(numbers + 32);
    }

    template <int S, int AT>
    i32x16 pairs(i32x16 low, i32x16 high) const {
        __m512i index = _mm512_srli_epi16(std::bit_cast<__m512i>(low), 4 * S);
        if constexpr (F::BITS > 4) {
            __m512i above = std::bit_cast<__m512i>(high);
            above = AT < 4 ? _mm512_slli_epi16(above, 4 - AT) : _mm512_srli_epi16(above, AT - 4);
            index = _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), index, above, 0xca);  // mask ? index : above
        }
        if constexpr (F::BITS == 6) return std::bit_cast<i32x16>(_mm512_permutex2var_epi16(first_, index, second_));
        return std::bit_cast<i32x16>(_mm512_permutexvar_epi16(index, first_));
    }

   private:
    __m512i first_, second_;
#else
    template <int S, int AT>
    i32x16 pairs(i32x16 low, i32x16 high) const {
        const u32x16 l = std::bit_cast<u32x16>(low), h = std::bit_cast<u32x16>(high);
        constexpr uint32_t MASK = (1 << (F::BITS - 4)) - 1;
        u32x16 even = (l >> (4 * S)) & 15, odd = (l >> (16 + 4 * S)) & 15;
        if constexpr (F::BITS > 4) {
            even |= ((h >> AT) & MASK) << 4;
            odd |= ((h >> (16 + AT)) & MASK) << 4;
        }
        return std::bit_cast<i32x16>((number(even) >> 16) | number(odd));
    }

   private:
    // The bits of float32, whose lower halves are zero: adding 2^23 by bits and taking it away by value converts an integer.
    static u32x16 number(u32x16 q) {
        return std::bit_cast<u32x16>(std::bit_cast<f32x16>(q | 0x4b000000u) - splat(float(8388608 + F::ZERO)));
    }
#endif
};

// Calls work(step, half of the panel, pairs of bfloat16) for 32 inputs of 32 outputs.
template <class F, class Work>
[[gnu::always_inline]] inline void visit(const uint8_t* planes, const Unpacker<F>& unpacker, const Work& work) {
    if constexpr (F::BITS == 8) {
#pragma GCC unroll 32
        for (int i = 0; i < 2 * STEPS; i++) {
            const auto* numbers = reinterpret_cast<const typename F::Number*>(planes) + i * 2 * LANES;
            if constexpr (std::is_same_v<typename F::Number, e4m3>)
                work(i / 2, i % 2, lanes_of_pairs(numbers));
            else
                work(i / 2, i % 2, lanes<bf16>(numbers));
        }
    } else {
        // A vector of low bits has four steps. One of high bits has 16 steps at one bit, or 8 at two.
        constexpr int UPPER = F::BITS == 6 ? 2 : 1;
        const uint8_t* high = planes + 4 * BLOCK * PANEL / 8;
        const auto four = [&]<int J>() __attribute__((always_inline)) {
            constexpr int AT = J * 4 * UPPER % 16;
#pragma GCC unroll 2
            for (int c = 0; c < 2; c++) {
                const i32x16 low = load_lanes(planes + (J * 2 + c) * 64);
                const i32x16 above = F::BITS == 4 ? low : load_lanes(high + (J * 4 * UPPER / 16 * 2 + c) * 64);
                work(4 * J, c, unpacker.template pairs<0, AT>(low, above));
                work(4 * J + 1, c, unpacker.template pairs<1, AT + UPPER>(low, above));
                work(4 * J + 2, c, unpacker.template pairs<2, AT + 2 * UPPER>(low, above));
                work(4 * J + 3, c, unpacker.template pairs<3, AT + 3 * UPPER>(low, above));
            }
        };
        four.template operator()<0>();
        four.template operator()<1>();
        four.template operator()<2>();
        four.template operator()<3>();
    }
}

// Up to 256 inputs of a panel, ready for any number of rows: 16 KiB, which stay in the first cache.
struct Unpacked {
    alignas(64) i32x16 pairs[NEST / 2 * 2];
    f32x16 scales[NEST / 16 * 2], minima[NEST / BLOCK * 2];
};

// `blocks` blocks from a run's beginning on, at most 8.
template <class F>
inline void unpack_blocks(const uint8_t* run, int blocks, const Unpacker<F>& unpacker, Unpacked& to) {
    for (int i = 0; i < blocks; i++) {
        const int within = i % F::BLOCKS;
        const uint8_t* own = run + i / F::BLOCKS * F::SIZE;
        unpack_scales<F>(own, within, to.scales + i * F::GROUPS * 2, to.minima + i * 2);
        const uint8_t* planes = own + F::UNITS + F::BYTES + within * F::PLANES;
        fetch_after<F>(own, within);
        visit<F>(planes, unpacker,
                 [&](int k, int c, i32x16 pairs) { to.pairs[(i * STEPS + k) * 2 + c] = pairs; });
    }
}

// sum + x * q, where x points to the two inputs of a step.
inline f32x16 add_pair(f32x16 sum, const bf16* x, i32x16 q) { return dot<bf16>(sum, broadcast(x), q); }
inline f32x16 add_pair(f32x16 sum, const float* x, i32x16 q) {
    sum = dot<float>(sum, broadcast(x), q << 16);
    return dot<float>(sum, broadcast(x + 1), q & (i32x16{} + int32_t(0xffff0000)));
}

// The scaled sum of a group, and its minimum times the sum of its inputs.
template <bool MINIMUM>
inline f32x16 add_group(f32x16 sum, f32x16 own, f32x16 scale, f32x16 minimum, float x_sum) {
    sum = multiply_add(own, scale, sum);
    return MINIMUM ? multiply_add(splat(x_sum), minimum, sum) : sum;
}

// Adds `groups` groups to the sums of ROWS rows [ROWS][2]: each group by itself, and then its scaled sum.
template <class T, int GROUP, bool MINIMUM, int ROWS>
inline void add_groups(const T* x, int64_t stride, const float* x_sums, int64_t x_groups, const Unpacked& w, int groups,
                       f32x16* sums) {
    constexpr int GROUP_STEPS = GROUP / 2;
    for (int g = 0; g < groups; g++) {
        f32x16 own[ROWS][2];
        for (int r = 0; r < ROWS; r++) own[r][0] = own[r][1] = splat(0.0f);
        const i32x16* pairs = w.pairs + g * GROUP_STEPS * 2;
        for (int k = 0; k < GROUP_STEPS; k++)
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const T* at = x + r * stride + g * GROUP + 2 * k;
                own[r][0] = add_pair(own[r][0], at, pairs[2 * k]);
                own[r][1] = add_pair(own[r][1], at, pairs[2 * k + 1]);
            }
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < 2; c++)
                sums[r * 2 + c] = add_group<MINIMUM>(sums[r * 2 + c], own[r][c], w.scales[g * 2 + c],
                                                     MINIMUM ? w.minima[g * 2 + c] : splat(0.0f),  // not every form has any
                                                     MINIMUM ? x_sums[r * x_groups + g] : 0.0f);
    }
}

template <class T, int GROUP, bool MINIMUM, int ROWS>
inline void add_some(const T* x, int64_t rows, int64_t stride, const float* x_sums, int64_t x_groups, const Unpacked& w,
                     int groups, f32x16* sums) {
    if constexpr (ROWS > 0) {
        if (rows >= ROWS) return add_groups<T, GROUP, MINIMUM, ROWS>(x, stride, x_sums, x_groups, w, groups, sums);
        add_some<T, GROUP, MINIMUM, ROWS - 1>(x, rows, stride, x_sums, x_groups, w, groups, sums);
    }
}

// All rows, a few at a time.
template <class T, int GROUP, bool MINIMUM>
[[gnu::noinline]] void add_rows(const T* x, int64_t rows, int64_t stride, const float* x_sums, int64_t x_groups,
                                const Unpacked& w, int groups, f32x16* sums) {
    for (int64_t r = 0; r < rows; r += MAX_ROWS)
        add_some<T, GROUP, MINIMUM, MAX_ROWS>(x + r * stride, rows - r, stride, x_sums + r * x_groups, x_groups, w, groups,
                                              sums + 2 * r);
}

// How many rows are multiplied at a time straight from registers, for which memory is read while the sums are made: as many
// as these hold the sums of, of groups and of all inputs. One in float32, which is seldom asked for: code takes time to compile.
// Up to FEW_ROWS rows that is faster than by way of `Unpacked`, though weights are unpacked anew for each few of them.
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
template <class T, class F>
constexpr int AT_ONCE = sizeof(T) == 4 ? 1 : F::BITS == 8 ? 8 : 4;
template <class F>
constexpr bool SOON_UNPACKED = F::BITS == 4 || (F::BITS == 8 && std::is_same_v<typename F::Number, int8_t>);
template <class T, class F>
constexpr int64_t FEW_ROWS = sizeof(T) == 4 ? 1 : SOON_UNPACKED<F> ? ROWS_AT_ONCE : 12;
#else
#if defined(__AVX512F__)
template <class T, class F>
constexpr int AT_ONCE = sizeof(T) == 4 ? 1 : 4;
#else
template <class T, class F>
constexpr int AT_ONCE = 1;
#endif
template <class T, class F>
constexpr int64_t FEW_ROWS = AT_ONCE<T, F>;
#endif

template <class T, class F, int ROWS>
void sum_few(const T* x, int64_t inputs, const float* x_sums, const uint8_t* run, f32x16* sums) {
    static const Unpacker<F> unpacker;
    const int64_t x_groups = inputs / BLOCK;
    f32x16 found[ROWS][2], scales[F::GROUPS * 2], minima[2];
    for (auto& row : found) row[0] = row[1] = splat(0.0f);
    for (int64_t k = 0; k < inputs; run += F::SIZE)
        for (int block = 0; block < F::BLOCKS; block++, k += BLOCK) {
            unpack_scales<F>(run, block, scales, minima);
            const uint8_t* planes = run + F::UNITS + F::BYTES + block * F::PLANES;
            fetch_after<F>(run, block);
            f32x16 own[F::GROUPS][ROWS][2];
            for (auto& group : own)
                for (auto& row : group) row[0] = row[1] = splat(0.0f);
            visit<F>(planes, unpacker, [&](int step, int c, i32x16 pairs) __attribute__((always_inline)) {
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) {
                    f32x16& sum = own[step * 2 / F::GROUP][r][c];
                    sum = add_pair(sum, x + r * inputs + k + 2 * step, pairs);
                }
            });
            for (int g = 0; g < F::GROUPS; g++)
                for (int r = 0; r < ROWS; r++)
                    for (int c = 0; c < 2; c++)
                        found[r][c] = add_group<F::MINIMUM>(found[r][c], own[g][r][c], scales[g * 2 + c], minima[c],
                                                   F::MINIMUM ? x_sums[r * x_groups + k / BLOCK] : 0.0f);
        }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < 2; c++) sums[r * 2 + c] = found[r][c];
}

// All rows, ROWS at a time, a power of two: of what is left, three are two and one.
template <class T, class F, int ROWS>
inline void sum_rows(const T* x, int64_t rows, int64_t inputs, const float* x_sums, const uint8_t* data, f32x16* sums) {
    while (rows >= ROWS) {
        sum_few<T, F, ROWS>(x, inputs, x_sums, data, sums);
        rows -= ROWS, x += ROWS * inputs, x_sums += ROWS * (inputs / BLOCK), sums += ROWS * 2;
    }
    if constexpr (ROWS > 1)
        if (rows) sum_rows<T, F, ROWS / 2>(x, rows, inputs, x_sums, data, sums);
}

// As sum_grouped.
template <class T, class F>
[[gnu::noinline]] void sum_panel(const T* x, int64_t rows, int64_t inputs, const float* x_sums, const uint8_t* data, f32x16* sums) {
    if constexpr (FEW_ROWS<T, F> == ROWS_AT_ONCE) {
        sum_rows<T, F, AT_ONCE<T, F>>(x, rows, inputs, x_sums, data, sums);
    } else {
        if (rows <= FEW_ROWS<T, F>) return sum_rows<T, F, AT_ONCE<T, F>>(x, rows, inputs, x_sums, data, sums);
        static thread_local Unpacked w;
        static const Unpacker<F> unpacker;
        const int64_t x_groups = inputs / BLOCK;
        std::fill(sums, sums + 2 * rows, splat(0.0f));
        for (int64_t k = 0; k < inputs; k += NEST) {
            const int blocks = int(std::min<int64_t>(NEST, inputs - k) / BLOCK);
            unpack_blocks<F>(data + k / F::RUN * F::SIZE, blocks, unpacker, w);
            add_rows<T, F::GROUP, F::MINIMUM>(x + k, rows, inputs, x_sums + k / BLOCK, x_groups, w, blocks * F::GROUPS, sums);
        }
    }
}

// One output of a panel: its weights, times `factor`. # [inputs]
template <class T>
void unpack_row(const GroupedPanel& panel, int64_t lane, int64_t inputs, float factor, T* out) {
    static thread_local Unpacked w;
    with_form(panel.form, [&]<class F>(F) {
        static const Unpacker<F> unpacker;
        for (int64_t k = 0; k < inputs; k += NEST) {
            const int blocks = int(std::min<int64_t>(NEST, inputs - k) / BLOCK);
            unpack_blocks<F>(panel.data + k / F::RUN * F::SIZE, blocks, unpacker, w);
            const auto* q = reinterpret_cast<const bf16*>(w.pairs);  // [step][output][2]
            const auto *scales = reinterpret_cast<const float*>(w.scales), *minima = reinterpret_cast<const float*>(w.minima);
            for (int i = 0; i < blocks * BLOCK; i++) {
                float weight = widen(q[(i / 2 * PANEL + lane) * 2 + i % 2]) * scales[i / F::GROUP * PANEL + lane];
                if (F::MINIMUM) weight += minima[i / BLOCK * PANEL + lane];
                out[k + i] = narrow<T>(weight * factor);
            }
        }
    });
}

template <class T>
void sum_grouped(const T* x, int64_t rows, int64_t inputs, const float* x_sums, const GroupedPanel& panel, f32x16* sums) {
    with_form(panel.form, [&]<class F>(F) { sum_panel<T, F>(x, rows, inputs, x_sums, panel.data, sums); });
}

template void sum_grouped(const bf16*, int64_t, int64_t, const float*, const GroupedPanel&, f32x16*);
template void sum_grouped(const float*, int64_t, int64_t, const float*, const GroupedPanel&, f32x16*);
template void unpack_row(const GroupedPanel&, int64_t, int64_t, float, bf16*);
template void unpack_row(const GroupedPanel&, int64_t, int64_t, float, float*);
