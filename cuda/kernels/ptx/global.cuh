// Global memory: loads of read-only data, and counters by which CTAs synchronise (PTX ISA, "Memory Consistency Model").
#pragma once
#include "types.cuh"

namespace global {

// Loads data that nothing writes while the kernel runs, but for the kernel ahead of it, which it has waited for
// (load_no_earlier). The compiler may then load it once and early. It cannot tell by itself: pointers are fields of a
// struct, where __restrict__ has no effect.
template <class T>
__device__ __forceinline__ T read_only(const T* address) {
    return __ldg(address);
}

// Keeps loads by `read_only` whose address depends on `value` behind what came before in the program, as a wait.
__device__ __forceinline__ void load_no_earlier(int& value) { asm volatile("" : "+r"(value)::"memory"); }

// Adds one, with release semantics: a thread that acquires the new value sees all earlier writes of this thread.
__device__ __forceinline__ void count(int* address) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(address) : "memory");
}

// Whether `*address` is at least `value`, with acquire semantics: writes before the matching `count` are then visible.
__device__ __forceinline__ bool has_reached(const int* address, int value) {
    int x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
    return x >= value;
}

// Orders this thread's ordinary accesses to global memory before its later accesses by TMA.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace global
