// Asynchronous copies of 16 bytes a thread, global → shared (PTX ISA, "cp.async"). They are ordinary accesses: what
// wgmma reads of them needs a proxy fence behind the wait for them (fence_shared_for_async in warpgroup.cuh).
#pragma once
#include "types.cuh"

namespace async_copy {

// Copies 16 bytes; writes zeros, and doesn't read, if `is_there` is false.
__device__ __forceinline__ void load(uint32_t destination, const void* source, bool is_there) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
                 "r"(is_there ? 16 : 0)
                 : "memory");
}

// Arrives at a barrier, which counts this thread, when all copies that the thread has begun are there. It tells of
// these copies alone: for what the thread itself wrote PTX promises nothing.
__device__ __forceinline__ void arrive_when_done(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits for all copies that the thread has begun. It sees what they wrote; other threads don't yet.
__device__ __forceinline__ void wait_for_own() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace async_copy
