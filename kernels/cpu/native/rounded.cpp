// Owns products of weights of 4 to 8 bits with activations of 8 bits: 64 products of bytes an instruction (VNNI), or by tiles (AMX).
// Never rounds a sum of bytes: those of 32 inputs are exact, and are scaled and added in float32, in one order everywhere.
#include "rounded.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <vector>

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
    return std::bit_cast<i32x16>(multiply_add(x, factor, magic)) - std::bit_cast<i32x16>(magic);
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

// What a group's sum of integers begins with, for the zero point of its weights. One group: the whole block.
template <class F>
inline int32_t without_zero(const RoundedBlock& x, int group) {
    constexpr int ZERO = F::BITS == 8 ? 128 : F::ZERO;
    return -ZERO * (F::GROUPS == 2 ? x.sums[group] : x.sums[0] + x.sums[1]);
}

// What a block of weights is multiplied by, and added to it.
template <class F>
struct Units {
    f32x16 scales[F::GROUPS * 2], minima[2];
};

// Adds a block's sums of integers, of its one or two groups, to one row's sums.
template <class F>
[[gnu::always_inline]] inline void add_scaled(const RoundedBlock& x, const i32x16 (&of)[F::GROUPS][2], const Units<F>& units,
                                              f32x16* sums) {
    const auto everywhere = [](const float& value) { return std::bit_cast<f32x16>(broadcast(&value)); };
    const auto floats = [](i32x16 value) { return __builtin_convertvector(value, f32x16); };
    const f32x16 scale = everywhere(x.scale);
    for (int c = 0; c < 2; c++) {
        if constexpr (F::GROUPS == 2)
            sums[c] = multiply_add(
                multiply_add(floats(of[1][c]), units.scales[2 + c], floats(of[0][c]) * units.scales[c]), scale, sums[c]);
        else if constexpr (F::SCALES == BY_OUTPUT)
            sums[c] = multiply_add(floats(of[0][c]), scale, sums[c]);
        else
            sums[c] = multiply_add(floats(of[0][c]), units.scales[c] * scale, sums[c]);
        if (F::MINIMUM) sums[c] = multiply_add(everywhere(x.sum), units.minima[c], sums[c]);
    }
}

// Adds one row's block to its sums.
template <class F>
[[gnu::always_inline]] inline void add_row(const RoundedBlock& x, const Words& words, const Units<F>& units, f32x16* sums) {
    i32x16 own[HALF][2];  // each half by itself: sixteen inputs have a scale of their own in Q6_K, and shorter chains elsewhere
    for (int h = 0; h < HALF; h++) own[h][0] = own[h][1] = i32x16{} + (h < F::GROUPS ? without_zero<F>(x, h) : 0);
#pragma GCC unroll 8
    for (int k = 0; k < WORDS; k++) {
        const i32x16 four = broadcast(x.q + 4 * k);
        for (int c = 0; c < 2; c++) own[k * HALF / WORDS][c] = add_bytes(own[k * HALF / WORDS][c], words.of[k][c], four);
    }
    if constexpr (F::GROUPS == 2) {
        add_scaled<F>(x, own, units, sums);
    } else {
        const i32x16 whole[1][2] = {{own[0][0] + own[1][0], own[0][1] + own[1][1]}};
        add_scaled<F>(x, whole, units, sums);
    }
}

// As sum_rounded. A block's weights are unpacked to registers, and all rows pass by them. Not cloned for the numbers of the
// caller that times it: what is timed is what is used.
template <class F>
[[gnu::noinline, gnu::noclone]] void sum_panel(const RoundedBlock* x, int64_t stride, int64_t rows, int64_t inputs,
                                               const uint8_t* run, f32x16* sums) {
    std::fill(sums, sums + 2 * rows, splat(0.0f));
    for (int64_t k = 0; k < inputs; run += F::SIZE)
        for (int block = 0; block < F::BLOCKS; block++, k += BLOCK, x += stride) {
            Units<F> units;
            if constexpr (F::SCALES != BY_OUTPUT) unpack_scales<F>(run, block, units.scales, units.minima);
            fetch_after<F>(run, block);
            Words words;
            unpack_words<F>(run + F::UNITS + F::BYTES + block * F::PLANES, words);
            for (int64_t r = 0; r < rows; r++) add_row<F>(x[r], words, units, sums + 2 * r);
        }
}

#if BYTE_TILES

// --- tiles ---------------------------------------------------------------------------------------------------------------------

// A block's inputs are half of a tile, or of two groups a quarter, since each group's sums have a scale of their own.
// Tiles 0 and 1: sums of 16 rows, 4: their activations. 2, 3 and 5: those of the last rows, fewer than 16. 6 and 7: weights.
inline void shape_bytes(Tiles::Shapes& shapes, int64_t which) {
    const int64_t groups = which / TILE_ROWS, rest = std::max<int64_t>(which % TILE_ROWS, 1);
    for (int tile : {0, 1}) shapes.set(tile, TILE_ROWS);
    for (int tile : {2, 3}) shapes.set(tile, rest);
    shapes.set(4, TILE_ROWS, BLOCK / groups);
    shapes.set(5, rest, BLOCK / groups);
    for (int tile : {6, 7}) shapes.set(tile, WORDS / groups);
}

using Products = int32_t[TILE_ROWS][PANEL];  // of one group

// The sums of integers of up to 16 rows, of both groups where there are two. fresh: the weights are not in tiles 6 and 7 yet.
// A tile's number is part of the instruction, so that whole tiles and others are written out.
template <int GROUPS>
inline void multiply_block(const RoundedBlock* x, bool whole, bool fresh, const Words& words, Products* to) {
    constexpr int64_t LINE = 2 * TILE_LINE, ROW = sizeof(RoundedBlock);
    for (int group = 0; group < GROUPS; group++) {
        const int8_t* q = x->q + group * (BLOCK / GROUPS);
        if (fresh || GROUPS == 2) {
            const u32x16* weights = words.of[group * (WORDS / GROUPS)];
            _tile_loadd(6, weights, LINE);
            _tile_loadd(7, weights + 1, LINE);
        }
        int32_t* sums = to[group][0];
        if (whole) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_loadd(4, q, ROW);
            _tile_dpbsud(0, 4, 6);
            _tile_dpbsud(1, 4, 7);
            _tile_stored(0, sums, LINE);
            _tile_stored(1, sums + LANES, LINE);
        } else {
            _tile_zero(2);
            _tile_zero(3);
            _tile_loadd(5, q, ROW);
            _tile_dpbsud(2, 5, 6);
            _tile_dpbsud(3, 5, 7);
            _tile_stored(2, sums, LINE);
            _tile_stored(3, sums + LANES, LINE);
        }
    }
}

// As sum_panel, to the same bits. While the unit multiplies 16 rows, the sums of those before are scaled and added.
template <class F>
[[gnu::noinline, gnu::noclone]] void sum_panel_by_tiles(const RoundedBlock* x, int64_t stride, int64_t rows, int64_t inputs,
                                                        const uint8_t* run, Tiles& tiles, f32x16* sums) {
    constexpr int BLOCKS_AT_ONCE = 3;  // one that is unpacked, for what was stored just now cannot be loaded as a tile at once
    struct Block {
        alignas(64) Words words;
        Units<F> units;
    } blocks[BLOCKS_AT_ONCE];
    alignas(64) Products products[2][F::GROUPS];
    struct {
        const RoundedBlock* x = nullptr;
        int64_t row = 0, rows = 0;
        const Block* block = nullptr;
    } last;
    int turn = 0;
    const auto add_last = [&](const Products* of) {
        for (int64_t r = 0; r < last.rows; r++) {
            i32x16 own[F::GROUPS][2];
            for (int group = 0; group < F::GROUPS; group++)
                for (int c = 0; c < 2; c++)
                    own[group][c] = load_lanes(of[group][r] + c * LANES) + without_zero<F>(last.x[r], group);
            add_scaled<F>(last.x[r], own, last.block->units, sums + 2 * (last.row + r));
        }
    };

    tiles.shape(F::GROUPS * TILE_ROWS + rows % TILE_ROWS, shape_bytes);
    std::fill(sums, sums + 2 * rows, splat(0.0f));
    const int64_t count = inputs / BLOCK;
    for (int64_t i = 0; i <= count; i++) {
        if (i < count) {
            Block& next = blocks[i % BLOCKS_AT_ONCE];
            const uint8_t* own = run + i / F::BLOCKS * F::SIZE;
            const int at = int(i % F::BLOCKS);
            if constexpr (F::SCALES != BY_OUTPUT) unpack_scales<F>(own, at, next.units.scales, next.units.minima);
            fetch_after<F>(own, at);
            unpack_words<F>(own + F::UNITS + F::BYTES + at * F::PLANES, next.words);
        }
        if (i == 0) continue;
        const Block& block = blocks[(i - 1) % BLOCKS_AT_ONCE];
        const RoundedBlock* of_block = x + (i - 1) * stride;
        for (int64_t row = 0; row < rows; row += TILE_ROWS, turn = 1 - turn) {
            const int64_t own = std::min(TILE_ROWS, rows - row);
            settle();
            multiply_block<F::GROUPS>(of_block + row, own == TILE_ROWS, row == 0, block.words, products[turn]);
            settle();
            add_last(products[1 - turn]);
            last = {of_block + row, row, own, &block};
        }
    }
    add_last(products[1 - turn]);
}

// Whether tiles are the faster ones for the fewest rows that they are for, in four bits. It is timed, since processors differ
// in what a tile costs: for a millisecond, because a core that comes from idle is slow at first.
static bool tiles_are_faster() {
    using Clock = std::chrono::steady_clock;
    constexpr int64_t ROWS = TILE_ROWS, COUNT = 16;
    constexpr auto LONG_ENOUGH = std::chrono::milliseconds(1);
    uint32_t random = 1;
    const auto next = [&] { return uint8_t((random = random * 1664525 + 1013904223) >> 24); };
    std::vector<uint8_t> panel(COUNT * Q4_0::SIZE);
    for (int64_t i = 0; i < COUNT; i++) {
        uint8_t* run = panel.data() + i * Q4_0::SIZE;
        std::generate(run, run + Q4_0::SIZE, next);
        for (int64_t at = 0; at < Q4_0::UNITS; at += 2) run[at] = 0x00, run[at + 1] = 0x3c;  // 1 in float16
    }
    std::vector<RoundedBlock> x(COUNT * ROWS);
    for (RoundedBlock& block : x) {
        block = {.scale = 1.0f};
        std::generate(block.q, block.q + BLOCK, [&] { return int8_t(next()); });
    }
    f32x16 sums[2 * ROWS];
    Tiles tiles;
    Clock::duration vectors = Clock::duration::max(), by_tiles = vectors;
    for (const auto begin = Clock::now(); Clock::now() - begin < LONG_ENOUGH;) {
        const auto start = Clock::now();
        sum_panel<Q4_0>(x.data(), ROWS, ROWS, COUNT * BLOCK, panel.data(), sums);
        const auto between = Clock::now();
        sum_panel_by_tiles<Q4_0>(x.data(), ROWS, ROWS, COUNT * BLOCK, panel.data(), tiles, sums);
        const auto end = Clock::now();
        vectors = std::min(vectors, between - start);
        by_tiles = std::min(by_tiles, end - between);
    }
    return by_tiles < vectors;
}

static std::atomic<bool> byte_tiles = false;

bool multiplies_byte_tiles() { return byte_tiles.load(std::memory_order_relaxed); }

void use_byte_tiles(ByteTiles wanted) {
    byte_tiles = wanted != ByteTiles::NEVER && has_matrix_unit() && (wanted == ByteTiles::ALWAYS || tiles_are_faster());
}

#else

bool multiplies_byte_tiles() { return false; }

void use_byte_tiles(ByteTiles) {}

#endif

// -------------------------------------------------------------------------------------------------------------------------------

void sum_rounded(const RoundedBlock* x, int64_t stride, int64_t rows, int64_t inputs, const GroupedPanel& panel,
                 [[maybe_unused]] Tiles& tiles, f32x16* sums) {
    const auto sum = [&]<class F>(F) {
#if BYTE_TILES
        if (rows >= TILE_ROWS && multiplies_byte_tiles())
            return sum_panel_by_tiles<F>(x, stride, rows, inputs, panel.data, tiles, sums);
#endif
        sum_panel<F>(x, stride, rows, inputs, panel.data, sums);
    };
    if (panel.form == BYTES_BY_OUTPUT) return sum(Bytes{});
    with_integers(panel.form, sum);
}
