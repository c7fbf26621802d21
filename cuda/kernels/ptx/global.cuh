// Words in global memory by which CTAs tell each other how far they are (PTX ISA, "Memory Consistency Model").
#pragma once
#include "types.cuh"

namespace global {

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
