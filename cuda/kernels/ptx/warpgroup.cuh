// Instructions of a whole warp or warpgroup (four warps, 128 threads): register reallocation, named barriers, proxy
// fences, shared-memory matrix stores. And loads that the compiler must not move or keep.
#pragma once
#include "types.cuh"

// One lane of the warp, the same every time.
__device__ __forceinline__ bool elect_one() {
    uint32_t elected;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(elected));
    return elected != 0;
}

// The warp's index in its CTA, in a uniform register.
__device__ __forceinline__ int warp_index() { return __shfl_sync(all_lanes, threadIdx.x / 32, 0); }

// Reads threadIdx.x again, so that the compiler doesn't keep it, or values computed from it, in registers until here.
__device__ __forceinline__ int reload_thread_index() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}

// Makes the compiler compute a value here again that all lanes of a warp share, in a uniform register.
__device__ __forceinline__ uint32_t reload_uniform(uint32_t value) {
    asm volatile("" : "+r"(value));
    return __shfl_sync(all_lanes, value, 0);
}

// Loads a float of shared memory after all earlier volatile instructions, such as arrivals at barriers. What depends on
// it comes after them too.
__device__ __forceinline__ float volatile_load(const float& x) {
    float value;
    asm volatile("ld.volatile.shared.f32 %0, [%1];" : "=f"(value) : "r"(shared_address(&x)) : "memory");
    return value;
}

// Gives registers back to the CTA's pool, or takes them from it, so that each thread has `count` from here on.
template <int count>
__device__ __forceinline__ void release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// Named barriers, ids 1 to 15 (0 is __syncthreads). `threads` counts those that sync and those that arrive.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// The same as `named_barrier_sync`; returns whether `value` is true for any of the threads.
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool value) {
    int any;
    asm volatile(
        "{\n"
        ".reg .pred mine, all;\n"
        "setp.ne.s32 mine, %1, 0;\n"
        "bar.red.or.pred all, %2, %3, mine;\n"
        "selp.s32 %0, 1, 0, all;\n"
        "}\n"
        : "=r"(any)
        : "r"(static_cast<int>(value)), "r"(id), "r"(threads)
        : "memory");
    return any != 0;
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Orders this thread's ordinary accesses to shared memory before its later accesses by wgmma and TMA.
__device__ __forceinline__ void fence_shared_for_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Orders this thread's ordinary accesses to global memory before its later accesses by TMA.
__device__ __forceinline__ void fence_global_for_async() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Four 8×8 matrices of 16-bit elements; lane `8·i + r` gives the address of row r of matrix i.
__device__ __forceinline__ void store_matrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}
