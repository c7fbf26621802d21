// Global memory that several multiprocessors work on during a kernel: read and written in L2, past the caches that are
// not coherent.
#pragma once
#include "types.cuh"

namespace global {

__device__ __forceinline__ float4 load(const float4* address) {
    float4 x;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(address)
                 : "memory");
    return x;
}

// Waits until `*address` is at least `value`; what was written before it got there can be read, and added to by TMA.
__device__ __forceinline__ void wait_until(const int* address, int value) {
    int x;
    do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
    } while (x < value);
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace global
