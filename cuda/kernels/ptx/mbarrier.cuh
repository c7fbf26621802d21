// mbarrier: PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier". One
// instruction a function; `barrier` is a shared-memory address of 8 bytes.
#pragma once
#include "types.cuh"

namespace mbarrier {

__device__ __forceinline__ void init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the async proxy and to the cluster, before they are first used by TMA or by
// other CTAs.
__device__ __forceinline__ void fence_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at a barrier of any CTA of the cluster (cluster.cuh). It tells the other CTA that wgmma or TMA have read, or
// what they wrote: ordinary writes it doesn't make visible there, as that takes a fence which waits for all of the
// thread's writes to global memory.
__device__ __forceinline__ void arrive_in_cluster(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and makes the phase wait for `bytes` more, of TMA or of asynchronous stores.
__device__ __forceinline__ void arrive_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase of this parity has completed. A fresh barrier counts as having completed
// parity 1, so that a producer's first wait for an empty slot passes at once.
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "retry:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra complete;\n"
        "bra retry;\n"
        "complete:\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

}  // namespace mbarrier
