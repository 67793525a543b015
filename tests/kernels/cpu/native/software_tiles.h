// Owns a matrix unit (AMX) in software, by Intel's manual: included before the kernels (-include), it takes the place of the
// intrinsics, so that what is written for the unit runs, and is tested, on processors without one. It is no measure of time.
// Never forgives: shapes that do not fit each other, or no shapes at all, end the process, as the unit's own fault would.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1

// Linux is asked for the unit by this call, and would refuse it: another one that always succeeds.
#undef SYS_arch_prctl
#define SYS_arch_prctl SYS_sched_yield

namespace software {

constexpr int TILES = 8, LINES = 16, LINE = 64;

struct Unit {
    bool shaped = false;
    uint16_t bytes[TILES];  // of a line
    uint8_t lines[TILES];
    alignas(64) uint8_t data[TILES][LINES][LINE];
};

inline thread_local Unit unit;

inline void require(bool holds) {
    if (!holds) __builtin_trap();
}

inline void configure(const void* from) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t lines[16];
    } shapes;
    static_assert(sizeof shapes == LINE);
    std::memcpy(&shapes, from, sizeof shapes);
    require(shapes.palette == 1 && shapes.start == 0);
    for (uint8_t byte : shapes.reserved) require(byte == 0);
    for (int i = 0; i < 16; i++) {
        const int bytes = shapes.bytes[i], lines = shapes.lines[i];
        require(bytes <= LINE && lines <= LINES && (bytes == 0) == (lines == 0) && (i < TILES || bytes == 0));
        if (i >= TILES) continue;
        unit.bytes[i] = uint16_t(bytes);
        unit.lines[i] = uint8_t(lines);
    }
    std::memset(unit.data, 0, sizeof unit.data);
    unit.shaped = true;
}

inline void release() { unit.shaped = false; }

inline void require_tile(int tile) { require(unit.shaped && unit.lines[tile] > 0); }

inline void zero(int tile) {
    require_tile(tile);
    std::memset(unit.data[tile], 0, sizeof unit.data[tile]);
}

inline void load(int tile, const void* from, int64_t stride) {
    zero(tile);
    for (int i = 0; i < unit.lines[tile]; i++)
        std::memcpy(unit.data[tile][i], static_cast<const char*>(from) + i * stride, unit.bytes[tile]);
}

inline void store(int tile, void* to, int64_t stride) {
    require_tile(tile);
    for (int i = 0; i < unit.lines[tile]; i++)
        std::memcpy(static_cast<char*>(to) + i * stride, unit.data[tile][i], unit.bytes[tile]);
}

// Calls add(row, column, word of a, word of b) for all words of 4 bytes that are multiplied, in the unit's order.
template <class Add>
inline void each_word(int to, int a, int b, const Add& add) {
    for (int tile : {to, a, b}) require_tile(tile);
    require(to != a && to != b && a != b);
    require(unit.lines[to] == unit.lines[a] && unit.bytes[to] == unit.bytes[b] && unit.bytes[a] == 4 * unit.lines[b]);
    require(unit.bytes[to] % 4 == 0);
    for (int row = 0; row < unit.lines[a]; row++)
        for (int line = 0; line < unit.lines[b]; line++)
            for (int column = 0; column < unit.bytes[b] / 4; column++)
                add(row, column, &unit.data[a][row][4 * line], &unit.data[b][line][4 * column]);
}

inline float flushed(float value) { return std::fabs(value) < FLT_MIN ? std::copysign(0.0f, value) : value; }

inline float widened(const uint8_t* from) {
    uint16_t bits;
    std::memcpy(&bits, from, sizeof bits);
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return flushed(value);
}

// The even products of a row and those between are summed apart, and both are added to what was there.
inline void add_bf16(int to, int a, int b) {
    float sums[LINES][LINE / 4][2] = {};
    each_word(to, a, b, [&](int row, int column, const uint8_t* x, const uint8_t* w) {
        for (int i = 0; i < 2; i++) {
            float& sum = sums[row][column][i];
            sum = flushed(std::fma(widened(x + 2 * i), widened(w + 2 * i), sum));
        }
    });
    for (int row = 0; row < unit.lines[to]; row++)
        for (int column = 0; column < unit.bytes[to] / 4; column++) {
            float value;
            std::memcpy(&value, &unit.data[to][row][4 * column], sizeof value);
            value = flushed(flushed(value) + flushed(sums[row][column][0] + sums[row][column][1]));
            std::memcpy(&unit.data[to][row][4 * column], &value, sizeof value);
        }
}

// Bytes with a sign by bytes without one.
inline void add_bytes(int to, int a, int b) {
    each_word(to, a, b, [&](int row, int column, const uint8_t* x, const uint8_t* w) {
        int32_t sum;
        std::memcpy(&sum, &unit.data[to][row][4 * column], sizeof sum);
        for (int i = 0; i < 4; i++) sum += int32_t(int8_t(x[i])) * int32_t(w[i]);
        std::memcpy(&unit.data[to][row][4 * column], &sum, sizeof sum);
    });
}

}  // namespace software

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig(from) software::configure(from)
#define _tile_release() software::release()
#define _tile_zero(tile) software::zero(tile)
#define _tile_loadd(tile, from, stride) software::load(tile, from, stride)
#define _tile_stored(tile, to, stride) software::store(tile, to, stride)
#define _tile_dpbf16ps(to, a, b) software::add_bf16(to, a, b)
#define _tile_dpbsud(to, a, b) software::add_bytes(to, a, b)
