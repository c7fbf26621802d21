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

// Fetches the line of an address to L2.
__device__ __forceinline__ void prefetch(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Makes `*address` `next` if it is `expected`, and returns what it was, with acquire semantics.
__device__ __forceinline__ uint64_t compare_and_swap(uint64_t* address, uint64_t expected, uint64_t next) {
    uint64_t was;
    asm volatile("atom.acquire.gpu.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(was)
                 : "l"(address), "l"(expected), "l"(next)
                 : "memory");
    return was;
}
// The same, if nobody has to know what it was. Orders nothing.
__device__ __forceinline__ void replace(uint64_t* address, uint64_t expected, uint64_t next) {
    asm volatile("atom.relaxed.gpu.global.cas.b64 _, [%0], %1, %2;" ::"l"(address), "l"(expected), "l"(next)
                 : "memory");
}

// Adds one and returns what was there before, with release and acquire semantics.
__device__ __forceinline__ uint64_t fetch_and_count(uint64_t* address) {
    uint64_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], 1;" : "=l"(before) : "l"(address) : "memory");
    return before;
}

}  // namespace global
