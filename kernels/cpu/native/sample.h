// Owns the draw of one token from a row of logits: filters by weighted selection, then the inverse CDF in vocabulary order.
// Never sorts the vocabulary, and never keeps a random state: the number that a row uses is a function of (seed, position).
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vector.h"

using f32x8 = float __attribute__((vector_size(32)));
using f64x8 = double __attribute__((vector_size(64)));
using i64x8 = int64_t __attribute__((vector_size(64)));

constexpr int WIDE_LANES = 8;

// As in engine/batch/sampler.py.
constexpr double SMALLEST_TEMPERATURE = 1e-5;

// A row of logits to draw from, with its controls applied; filled by the caller; mirrored in sampling.py.
struct DrawnRow {
    int64_t row;  // of the logits
    int64_t seed, position;
    int64_t top_k;  // no limit: 0, or as many as there are tokens
    double temperature, top_p, min_p;
};

// The random number in [0, 1): the top 53 of the first 64 bits of Philox4x32-10 (Salmon et al., SC 2011). `uniform` of
// engine/batch/sampler.py defines it.
inline double uniform(int64_t seed, int64_t position) {
    uint32_t c0 = uint32_t(position), c1 = uint32_t(uint64_t(position) >> 32), c2 = 0, c3 = 0;
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(uint64_t(seed) >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t low = c2 * uint64_t(0xCD9E8D57), high = c0 * uint64_t(0xD2511F53);
        c0 = uint32_t(low >> 32) ^ c1 ^ k0;
        c1 = uint32_t(low);
        c2 = uint32_t(high >> 32) ^ c3 ^ k1;
        c3 = uint32_t(high);
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return double((uint64_t(c0) << 32 | c1) >> 11) * 0x1p-53;
}

inline f64x8 splat(double value) { return f64x8{} + value; }

inline f64x8 load(const double* from) {
    f64x8 value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline void store(double* to, f64x8 value) { std::memcpy(to, &value, sizeof value); }

inline f64x8 load_wide(const float* from) {
    f32x8 value;
    std::memcpy(&value, from, sizeof value);
    return __builtin_convertvector(value, f64x8);
}

inline double reduce_add(f64x8 v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

// exp(x) for x <= 0 within 2 ulp, 1 at 0; 0 below -708, where its numbers would not be normal ones. Taylor's series to the
// 13th power over [-ln2/2, ln2/2], where what it leaves out is below a tenth of an ulp.
inline f64x8 exponential(f64x8 x) {
    const i64x8 vanishes = x < splat(-708.0);
    const f64x8 magic = splat(0x1.8p52);  // adding it rounds to an integer
    const f64x8 rounded = x * splat(0x1.71547652b82fep0) + magic;
    const i64x8 power = std::bit_cast<i64x8>(rounded) - std::bit_cast<i64x8>(magic);
    const f64x8 n = rounded - magic;
    const f64x8 r = x - n * splat(0x1.62e42fee00000p-1) - n * splat(0x1.a39ef35793c76p-33);
    f64x8 p = splat(1.0 / 6227020800);
    for (double factorial : {479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0, 2.0})
        p = p * r + splat(1.0 / factorial);
    p = p * r * r + r + splat(1.0);
    const f64x8 value = p * std::bit_cast<f64x8>((power + 1023) << 52);
    return std::bit_cast<f64x8>(std::bit_cast<i64x8>(value) & ~vanishes);
}

// Draws from one row after the other; one per thread, for the memory that it keeps. A row's candidates are the tokens that
// the filters so far have left, in vocabulary order.
class Sampler {
   public:
    // The token of one row's `logits` [vocab] that the random `number` stands for. The largest must be finite, and none NaN.
    int64_t operator()(const float* logits, int64_t vocab, const DrawnRow& row, double number) {
        take(logits, vocab);
        if (0 < row.top_k && row.top_k < vocab) keep_top_k(row.top_k);
        find_mass(std::max(row.temperature, SMALLEST_TEMPERATURE));
        if (row.top_p < 1.0) keep_top_p(row.top_p);
        if (row.min_p > 0.0) keep_min_p(row.min_p);
        return id(draw(number));
    }

   private:
    static constexpr int64_t BLOCK = 64;          // candidates whose mass is added up together
    static constexpr uint32_t NUM_BINS = 2048;    // one for each digit of 11 bits
    static constexpr int COPIES = 4;              // of each bin: neighbours in one bin do not wait for each other's sum
    static constexpr int SHIFTS[] = {21, 10, 0};  // where the digits begin

    // Which candidates are kept: those of smaller keys than `key`, and of those with that key, which are the first `count` of
    // `members_`, the first `ties`.
    struct Edge {
        uint32_t key;
        int64_t ties, count;
    };

    int64_t size_ = 0;               // candidates
    const float* logits_ = nullptr;  // [size]: the row itself, or `kept_`
    bool whole_ = true;              // the candidates are the vocabulary, and `ids_` is not filled
    std::vector<float> kept_;
    std::vector<uint32_t> ids_;      // [size]
    std::vector<double> mass_;       // [size, rounded up to blocks], 1 at the most likely, 0 behind the last
    std::vector<double> sums_;       // [blocks]
    std::vector<uint32_t> keys_;     // [size]
    std::vector<uint32_t> members_;  // candidates among which the edge is
    std::vector<double> bins_ = std::vector<double>(COPIES * NUM_BINS);  // [digit, copy]: the weight of its members

    void take(const float* logits, int64_t vocab) {
        size_ = vocab;
        logits_ = logits;
        whole_ = true;
        if (int64_t(ids_.size()) >= vocab) return;
        kept_.resize(vocab);
        ids_.resize(vocab);
        keys_.resize(vocab);
        members_.resize(vocab);
        mass_.resize(vocab + BLOCK);
        sums_.resize(vocab / BLOCK + 1);
    }

    int64_t id(int64_t candidate) const { return whole_ ? candidate : ids_[candidate]; }

    int64_t num_blocks() const { return (size_ + BLOCK - 1) / BLOCK; }

    // Blocks without any candidate before the edge are most of a vocabulary, and are passed over.
    void keep_top_k(int64_t top_k) {
        Edge edge = select([](int64_t) { return 1.0; }, double(top_k), 0.0);
        int64_t kept = 0;
        for (int64_t first = 0; first < size_; first += BLOCK) {
            const int64_t end = std::min(size_, first + BLOCK);
            if (*std::min_element(keys_.begin() + first, keys_.begin() + end) > edge.key) continue;
            for (int64_t i = first; i < end; i++) {
                if (keys_[i] > edge.key || (keys_[i] == edge.key && edge.ties-- <= 0)) continue;
                ids_[kept] = uint32_t(i);
                kept_[kept++] = logits_[i];
            }
        }
        size_ = kept;
        logits_ = kept_.data();
        whole_ = false;
    }

    void find_mass(double temperature) {
        const double best = largest();
        int64_t i = 0;
        for (; i + WIDE_LANES <= size_; i += WIDE_LANES)
            store(&mass_[i], exponential((load_wide(logits_ + i) - splat(best)) / splat(temperature)));
        for (; i < size_; i++) mass_[i] = exponential(splat((double(logits_[i]) - best) / temperature))[0];
        std::fill(mass_.begin() + size_, mass_.begin() + num_blocks() * BLOCK, 0.0);
    }

    float largest() const {
        f32x16 best = splat(-std::numeric_limits<float>::infinity());
        int64_t i = 0;
        for (; i + LANES <= size_; i += LANES) best = maximum(best, load(logits_ + i));
        return std::max(reduce_max(best), i < size_ ? *std::max_element(logits_ + i, logits_ + size_) : best[0]);
    }

    // The mass of all blocks, each of which is added up into `sums_`.
    double add_mass() {
        double total = 0.0;
        for (int64_t block = 0; block < num_blocks(); block++) {
            f64x8 sum = load(&mass_[block * BLOCK]);
            for (int64_t i = WIDE_LANES; i < BLOCK; i += WIDE_LANES) sum += load(&mass_[block * BLOCK + i]);
            total += sums_[block] = reduce_add(sum);
        }
        return total;
    }

    // A token of less than (1 - top_p) / size of the mass cannot be in the nucleus: all tokens from it on have less than what
    // the nucleus leaves out. Half of that, so that rounding cannot matter.
    void keep_top_p(double top_p) {
        const double total = add_mass();
        const double target = std::max(top_p * total, std::numeric_limits<double>::denorm_min());  // the first is always kept
        const double least = (1.0 - top_p) * total / double(2 * size_);
        const Edge edge = select([this](int64_t i) { return mass_[i]; }, target, least);
        for (int64_t i = 0; i < size_; i++) mass_[i] = keys_[i] <= edge.key ? mass_[i] : 0.0;
        for (int64_t j = edge.ties; j < edge.count; j++) mass_[members_[j]] = 0.0;
    }

    void keep_min_p(double min_p) {
        for (int64_t i = 0; i < size_; i++) mass_[i] = mass_[i] >= min_p ? mass_[i] : 0.0;
    }

    // The first candidate whose cumulative mass exceeds number * total; where rounding lets none, the last with any mass.
    int64_t draw(double number) {
        const double target = number * add_mass();
        double before = 0.0;
        for (int64_t block = 0; block < num_blocks(); before += sums_[block++])
            if (before + sums_[block] > target) return draw_within(block, before, target);
        return last_with_mass(size_);
    }

    int64_t draw_within(int64_t block, double cumulative, double target) const {
        const int64_t end = std::min(size_, (block + 1) * BLOCK);
        for (int64_t i = block * BLOCK; i < end; i++) {
            cumulative += mass_[i];
            if (cumulative > target) return i;
        }
        return last_with_mass(end);
    }

    int64_t last_with_mass(int64_t end) const {
        while (end > 1 && !(mass_[end - 1] > 0.0)) end--;
        return end - 1;
    }

    // Where the candidates end before which, from the most likely on, there is less weight than `target`; of equal ones the
    // lower ids come first. Candidates of less weight than `least` are known not to be among them. A radix selection: the
    // keys' digits of 11, 11 and 10 bits, each among the members that share the digits before it.
    template <class Weight>
    Edge select(Weight weight, double target, double least) {
        find_keys();
        int64_t count = 0;
        for (int64_t i = 0; i < size_; i++) {
            members_[count] = uint32_t(i);
            count += weight(i) >= least;
        }
        uint32_t key = 0;
        double before = 0.0;
        for (const int shift : SHIFTS) {
            fill_bins(weight, count, shift);
            const uint32_t digit = find_digit(target, before);
            count = keep_members(count, shift, digit);
            key |= digit << shift;
        }
        const double ties = std::ceil((target - before) / weight(members_[0]));  // equal logits have equal weights
        return {key, ties < double(count) ? std::max<int64_t>(1, int64_t(ties)) : count, count};
    }

    // Integers in the opposite order of the logits. The two zeros are one logit.
    void find_keys() {
        for (int64_t i = 0; i < size_; i++) {
            const int32_t bits = std::bit_cast<int32_t>(logits_[i] + 0.0f);
            keys_[i] = uint32_t(bits ^ (~(bits >> 31) & 0x7fffffff));
        }
    }

    // Eleven bits from `shift` on. The last digit begins with the bit that ends the one before: its members agree in it.
    static uint32_t digit_of(uint32_t key, int shift) { return key >> shift & (NUM_BINS - 1); }

    template <class Weight>
    void fill_bins(Weight weight, int64_t count, int shift) {
        std::fill(bins_.begin(), bins_.end(), 0.0);
        for (int64_t j = 0; j < count; j++) {
            const uint32_t member = members_[j];
            bins_[digit_of(keys_[member], shift) * COPIES + j % COPIES] += weight(member);
        }
    }

    // The bin in which `target` is reached; where rounding lets none reach it, the last with any weight. `before`: the weight
    // before the bin.
    uint32_t find_digit(double target, double& before) const {
        uint32_t found = 0;
        double sum = before;
        for (uint32_t digit = 0; digit < NUM_BINS && sum < target; digit++) {
            const double* copies = &bins_[digit * COPIES];
            const double weight = (copies[0] + copies[1]) + (copies[2] + copies[3]);
            if (weight == 0.0) continue;
            found = digit;
            before = sum;
            sum += weight;
        }
        return found;
    }

    int64_t keep_members(int64_t count, int shift, uint32_t digit) {
        int64_t kept = 0;
        for (int64_t j = 0; j < count; j++) {
            const uint32_t member = members_[j];
            members_[kept] = member;
            kept += digit_of(keys_[member], shift) == digit;
        }
        return kept;
    }
};
