// Fixed-width names and element types. The kernels include no CUDA header: NVRTC then needs no include
// path and saves their parsing time, which is most of a small kernel's compile time.
#pragma once

using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int32_t = int;
using int64_t = long long;

// Element types of 16 and 8 bits. Kernels move them, and convert them by the functions of math.cuh.
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

// A TMA descriptor (CUtensorMap, aligned as CUDA 13 declares it); passed as a __grid_constant__ kernel parameter.
struct alignas(128) TensorMap {
    unsigned char bytes[128];
};

// How many registers setmaxnreg can distribute among the warpgroups of a CTA that is alone on its multiprocessor,
// summed over one thread of each warpgroup. Each thread starts with an equal share, a multiple of eight. A warpgroup
// that waits for more than is left waits forever.
__device__ constexpr int register_pool(int threads) { return 65536 / threads / 8 * 8 * threads / 128; }

constexpr uint32_t all_lanes = 0xffffffff;  // of a warp, for shuffles, votes and reductions

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Address in the shared window, as PTX takes it.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The CTA's dynamic shared memory. The 128-byte swizzle counts from boundaries of 1024 bytes.
__device__ __forceinline__ unsigned char* dynamic_shared_memory() {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    return shared_memory;
}
