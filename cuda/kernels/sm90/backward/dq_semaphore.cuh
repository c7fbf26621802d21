// Adding to the sum of dQ in turns, where it has to be in a fixed order (dq_order.cuh).
#pragma once
#include "ptx/global.cuh"
#include "sm90/backward/call.cuh"

__device__ __forceinline__ int* turn_of(const Call& call, const Work& work, int head, int block) {
    return call.turns + call.block_index(call.head_index(work.tile, head), block);
}

// One thread waits until all additions to the block that rank before this tile's are there, of all of its CTAs.
__device__ __forceinline__ void wait_for_turn(const Call& call, const Work& work, const int* turn, int block) {
    const int before = call.rank(work, block) * Traits::cluster;
    while (!global::has_reached(turn, before)) {
    }
    global::fence_proxy_async();
}

// One thread says that a CTA's additions are there. They are to be complete, as this thread sees it, or those who told it.
__device__ __forceinline__ void end_turn(int* turn) { global::count(turn); }
