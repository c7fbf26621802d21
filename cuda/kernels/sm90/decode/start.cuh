// How a CTA of the decode kernel starts: its barriers.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warpgroup.cuh"
#include "common/warp_arrival.cuh"
#include "sm90/decode/store.cuh"
#include "sm90/decode/traits.cuh"

// One thread does this.
__device__ __forceinline__ void init_barriers(const SharedMemory& shared) {
    for (int stage = 0; stage < Traits::stages; ++stage) {
        mbarrier::init(shared.key_full(stage), Traits::key_arrivals);
        mbarrier::init(shared.value_full(stage), Traits::value_arrivals);
        mbarrier::init(shared.empty(stage), 4 * warp_arrivals);  // a lane of each consumer warp
    }
    for (int stage = 0; stage < Traits::tile_stages; ++stage) {
        mbarrier::init(shared.tile_full(stage), Traits::tile_arrivals);
        mbarrier::init(shared.tile_empty(stage), 4 * warp_arrivals);
    }
    if (SharedMemory::receives) mbarrier::init(shared.partials_full(), 1);
    mbarrier::fence_init();
}

// Each role waits until a consumer has initialised the barriers: in a pair or a cluster, those of all its CTAs. In
// other CTAs consumers wait for each other, and the producer for them. So no named barrier is waited for in two places,
// which compute-sanitizer takes for an error.
__device__ __forceinline__ void start_consumer() {
    __syncwarp();  // one lane has initialised the barriers
    if constexpr (SharedMemory::receives) {
        cluster::sync();
    } else {
        sync_consumers();
        named_barrier_arrive(3, Traits::threads);
    }
}
__device__ __forceinline__ void start_producer() {
    __syncwarp();  // lanes may have gone different ways through the schedule
    if constexpr (SharedMemory::receives) {
        cluster::sync();
    } else {
        named_barrier_sync(3, Traits::threads);
    }
}
