// Clusters of CTAs, which reach each other's shared memory (PTX ISA, "shared::cluster" and "barrier.cluster").
//
// An address of the CTA's own shared memory also is one of the cluster's, and means the same there. Before the first
// access to another CTA its barriers have to be initialised (`sync`), and it must not end before the last one.
#pragma once
#include "types.cuh"

namespace cluster {

// This CTA's rank in its cluster.
__device__ __forceinline__ int rank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The address, in the shared memory of CTA `rank`, that corresponds to `address` in this CTA's.
__device__ __forceinline__ uint32_t address_in(int rank, uint32_t address) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// Waits for all threads of all CTAs. All lanes of a warp call it together. What a thread wrote before is visible to the
// others only after a fence: mbarrier::fence_init for barriers, `fence` for the rest.
__device__ __forceinline__ void sync() {
    asm volatile(
        "barrier.cluster.arrive.relaxed.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;\n" ::
            : "memory");
}

// Writes a word to the shared memory of any CTA of the cluster.
__device__ __forceinline__ void store(uint32_t address, int value) {
    asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// Writes 16 bytes, aligned, to the shared memory of any CTA of the cluster, without waiting. `barrier`, in the same
// CTA, counts them.
__device__ __forceinline__ void store_async(uint32_t address, float4 x, uint32_t barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::
            "r"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
        : "memory");
}

// Orders this thread's writes before a `sync`, for all CTAs of the cluster.
__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.cluster;" ::: "memory"); }

}  // namespace cluster
