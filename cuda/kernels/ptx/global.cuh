// Global memory: data that no kernel writes while it is read, and words by which CTAs tell each other how far they are (PTX
// ISA, "Memory Consistency Model").
#pragma once
#include "types.cuh"

namespace global {

// Reads what nobody writes while the kernel runs. The compiler may read it once and early, whatever the kernel writes
// (it can't tell by itself, as pointers are fields of a struct, where __restrict__ says nothing).
template <class T>
__device__ __forceinline__ T read_only(const T* address) {
    return __ldg(address);
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
