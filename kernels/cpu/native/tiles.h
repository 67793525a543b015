// Owns the processor's matrix unit (AMX): products of tiles of 16 rows and 16 outputs, of bfloat16 or of bytes.
// Never leaves the unit in use behind an operation: its 8 KiB would be saved at every switch of threads.
#pragma once

#include <atomic>
#include <cstdint>

#include "vector.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define MATRIX_UNIT 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define MATRIX_UNIT 0
#endif

#if MATRIX_UNIT && defined(__AMX_INT8__)
#define BYTE_TILES 1
#else
#define BYTE_TILES 0
#endif

constexpr int64_t TILE_ROWS = 16, TILE_INPUTS = 32, TILE_LINE = 64;  // a tile's line has 64 bytes, whatever lies in it

// Whether Linux lets this process use the unit (arch/x86/include/uapi/asm/prctl.h, since 5.16). Asked once, for all threads.
inline bool has_matrix_unit() {
#if MATRIX_UNIT
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return granted;
#else
    return false;
#endif
}

// What the compiler has stored before is in memory, where a tile is loaded from, and nothing that comes after is yet: GCC 12's
// loads do not say that they read it.
inline void settle() { std::atomic_signal_fence(std::memory_order_seq_cst); }

// The shapes of the eight tiles, while it lives. To set them again takes as long as ten products, so it is done on a change.
class Tiles {
   public:
    struct alignas(64) Shapes {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {};  // of a line
        uint8_t lines[16] = {};

        void set(int tile, int64_t count, int64_t line = TILE_LINE) {
            lines[tile] = uint8_t(count);
            bytes[tile] = uint16_t(line);
        }
    };

    Tiles() = default;
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

#if MATRIX_UNIT
    ~Tiles() {
        if (which_) _tile_release();
    }

    // `describe` says what the shapes of this number are, which is not 0: the same one in all of an object's life.
    template <class Describe>
    void shape(int64_t which, const Describe& describe) {
        if (which == which_) return;
        which_ = which;
        Shapes shapes;
        describe(shapes, which);
        asm volatile("" : : "m"(shapes));  // GCC 12's _tile_loadconfig says that it reads 8 of these bytes
        _tile_loadconfig(&shapes);
    }

   private:
    int64_t which_ = 0;
#endif
};
