// Global memory that several multiprocessors work on during a kernel: read and counted in L2, past the caches that are
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

// Adds one. Whoever sees that sees what this thread had seen done before.
__device__ __forceinline__ void count(int* address) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(address) : "memory");
}

// Whether `*address` is at least `value`; what had been written before it got there can then be read.
__device__ __forceinline__ bool has_reached(const int* address, int value) {
    int x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
    return x >= value;
}

// Orders this thread's ordinary accesses to global memory before later ones of TMA.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace global
