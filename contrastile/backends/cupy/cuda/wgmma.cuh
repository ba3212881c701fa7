// Products of a warpgroup with D in registers: D (64 x 192 or 64 x 128) += A (64 x 16) B^T with both operands in shared
// memory, and D (64 x 256 or 64 x 128) += A (64 x 16) B (16 x 256 or 16 x 128) with A in registers.
#pragma once

#include "elements.cuh"

namespace contrastile {

constexpr int PRODUCT_COLUMNS = 192;
constexpr int PRODUCT_VALUES = PRODUCT_COLUMNS / 2;  // of a thread, in the layout of a strip (pairs.cuh)

// A K-major operand in shared memory with the 128-byte swizzle: rows of 64 elements, atoms of 8 rows 1024 bytes apart.
// 16 elements further along a row are 2 further in the low word, 8 rows further 64.
__device__ __forceinline__ unsigned operand(unsigned address) { return (address >> 4) | 1u << 16; }

__device__ __forceinline__ unsigned long long descriptor(unsigned low) {
    return static_cast<unsigned long long>(low) | 64ull << 32 | 1ull << 62;
}

// Between this and products_wait the registers of D belong to the tensor cores.
__device__ __forceinline__ void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// d (+)= left operand times right operand. LIST names the registers of d; `flag` is the number of the operand after them.
#define CONTRASTILE_LIST64                                                              \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "            \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "  \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "  \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define CONTRASTILE_LIST96                                                              \
    CONTRASTILE_LIST64                                                                  \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define CONTRASTILE_LIST128                                                             \
    CONTRASTILE_LIST96                                                                  \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define CONTRASTILE_D8(i)                                                                                       \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define CONTRASTILE_D32(i) CONTRASTILE_D8(i), CONTRASTILE_D8(i + 8), CONTRASTILE_D8(i + 16), CONTRASTILE_D8(i + 24)
#define CONTRASTILE_D64 CONTRASTILE_D32(0), CONTRASTILE_D32(32)
#define CONTRASTILE_D96 CONTRASTILE_D64, CONTRASTILE_D32(64)
#define CONTRASTILE_D128 CONTRASTILE_D96, CONTRASTILE_D32(96)
#define CONTRASTILE_PRODUCT_OF(kind, columns, size, operands, flag, turned, ...)                                  \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" flag ", 0;\nwgmma.mma_async.sync.aligned.m64n" columns       \
                 "k16.f32." kind "." kind " {" CONTRASTILE_LIST##size "}, " operands ", p, 1, 1, " turned ";\n}"   \
                 : CONTRASTILE_D##size                                                                            \
                 : __VA_ARGS__, "l"(b), "r"(static_cast<int>(add)))
#define CONTRASTILE_PRODUCT(...)                         \
    if constexpr (IS_BFLOAT16<T>)                        \
        CONTRASTILE_PRODUCT_OF("bf16", __VA_ARGS__);     \
    else                                                 \
        CONTRASTILE_PRODUCT_OF("f16", __VA_ARGS__)
#define CONTRASTILE_ACROSS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

// d = a b^T, added to d where `add`.
template <class T>
__device__ __forceinline__ void product(float (&d)[PRODUCT_VALUES], unsigned long long a, unsigned long long b,
                                        bool add) {
    CONTRASTILE_PRODUCT("192", 96, "%96, %97", "98", "0, 0", "l"(a));
}

constexpr int WIDE_COLUMNS = 256, WIDE_VALUES = WIDE_COLUMNS / 2;
constexpr int BOX_BYTES = 64 * 64 * 2;  // 64 lines of 64 elements, 128 bytes each, in the 128-byte swizzle

// An operand stored across the contraction: a box holds 64 of its lines, the next box, BOX bytes on, the next 64. 8 steps
// of the contraction are 1024 bytes apart; 16 steps are 128 in the low word.
// Hazard: in a cluster's second block the address has a bit above the 18 of the field, which would be added to the
// distance of the boxes. Operands along the contraction have no such distance.
template <int BOX = BOX_BYTES>
__device__ __forceinline__ unsigned operand_across(unsigned address) {
    return (address & 0x3ffff) >> 4 | static_cast<unsigned>(BOX >> 4) << 16;
}

// d = a b, added to d if `add`; bfloat16. a: a lane holds rows lane / 4 and lane / 4 + 8, and of each the pairs of steps
// from 2 (lane % 4) and 2 (lane % 4) + 8: {row, row + 8} of the first eight steps, then of the others. b: operand_across.
// Hazard: until products_wait the registers of a belong to the tensor cores, like those of d.
__device__ __forceinline__ void product_wide(float (&d)[WIDE_VALUES], const unsigned (&a)[4], unsigned long long b,
                                             bool add) {
    CONTRASTILE_PRODUCT_OF("bf16", "256", 128, "{%128, %129, %130, %131}, %132", "133", "1", CONTRASTILE_ACROSS);
}

constexpr int NARROW_COLUMNS = 128, NARROW_VALUES = NARROW_COLUMNS / 2;

// As product, of 128 columns.
template <class T>
__device__ __forceinline__ void product_narrow(float (&d)[NARROW_VALUES], unsigned long long a, unsigned long long b,
                                               bool add) {
    CONTRASTILE_PRODUCT("128", 64, "%64, %65", "66", "0, 0", "l"(a));
}

// As product_wide, of 128 columns.
template <class T>
__device__ __forceinline__ void product_narrow_across(float (&d)[NARROW_VALUES], const unsigned (&a)[4],
                                                      unsigned long long b, bool add) {
    CONTRASTILE_PRODUCT("128", 64, "{%64, %65, %66, %67}, %68", "69", "1", CONTRASTILE_ACROSS);
}

}  // namespace contrastile
