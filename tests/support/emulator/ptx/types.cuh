// Emulation of cuda/kernels/ptx/types.cuh.
#pragma once
#include "../emulator.h"

struct bfloat16 {
    uint16_t bits;
};
struct float16 {
    uint16_t bits;
};
struct float8_e4m3fn {
    unsigned char bits;
};

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;

// `type` is A or B.
template <bool is_first, class A, class B>
struct Either {
    using type = A;
};
template <class A, class B>
struct Either<false, A, B> {
    using type = B;
};

// What cuTensorMapEncodeTiled is given, axes innermost first, those beyond its rank of size 1. As large as a real one.
struct alignas(128) TensorMap {
    char* base;
    int64_t sizes[5];
    int64_t strides[4];  // bytes, of axes 1…
    int64_t box[5];
    int32_t element_bytes;
    int32_t swizzle;  // bytes: 0 or 128
};
static_assert(sizeof(TensorMap) == 128, "");

constexpr uint32_t all_lanes = 0xffffffff;

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int register_pool(int threads) { return 65536 / threads / 8 * 8 * threads / 128; }

unsigned char* dynamic_shared_memory();  // of the CTA
inline uint32_t shared_address(const void* pointer) {
    return static_cast<const unsigned char*>(pointer) - dynamic_shared_memory();
}
