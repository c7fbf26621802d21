// The semaphore of each sum of a block of dQ, which makes tiles add to it in a fixed order (dq_order.cuh).
#pragma once
#include "ptx/global.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/backward/call.cuh"

__device__ __forceinline__ int* semaphore_of(const Call& call, const Work& work, int head, int block) {
    return call.dq_semaphore + call.block_index(call.dq_sum_index(work.tile, head), block);
}

// One thread waits until all additions to the sum that rank before this tile's are there, of all of its CTAs.
__device__ __forceinline__ void acquire_semaphore(const Call& call, const Work& work, const int* semaphore, int block) {
    const int before = call.rank(work, block) * Traits::cluster;
    while (!global::has_reached(semaphore, before)) {
    }
    fence_global_for_async();
}

// One thread says that a CTA's additions are there. The thread must have seen them completed, or those that told it.
__device__ __forceinline__ void release_semaphore(int* semaphore) { global::count(semaphore); }
