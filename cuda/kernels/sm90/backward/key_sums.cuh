// dK and dV as sums in float32, to which each unit of work adds its own, where several units share a key tile (Units in
// shape.cuh). They lie in the order of accumulators as DqBlock has it, for 64 keys after 64 keys.
// backward_postprocess_keys converts them.
#pragma once
#include "ptx/global.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/backward/call.cuh"
#include "sm90/backward/d_query.cuh"

// Adds a warpgroup's gradient of the 64 keys from `first_key` on to its sum. Straight from registers, as the additions
// of a unit are few beside its products. All of the warpgroup's threads call it, and `barrier` is for them.
//
// With `deterministic` head shares add in their order: a unit waits until those before it have added. They were handed
// out before it (unit_at), so that it waits for nothing that hasn't started.
template <int count>
__device__ __forceinline__ void add_to_key_sum(const Call& call, const float (&gradient)[count], float* sums,
                                               int* semaphores, const KeyTile& tile, int first_key, int barrier) {
    const Shape& shape = call.shape;
    const int key_head = shape.key_head(tile.head), groups = shape.key_tiles() * (Traits::keys / 64);
    const int group = (tile.batch * shape.key_heads() + key_head) * groups + first_key / 64;
    const int thread = threadIdx.x % 128;
    if constexpr (Traits::deterministic) {
        const int shares_before = tile.head - key_head * shape.units.head_shares();
        if (thread == 0) {
            while (!global::has_reached(semaphores + group, shares_before)) {
            }
        }
        named_barrier_sync(barrier, 128);
    }
    add_from_registers(gradient, sums + static_cast<int64_t>(group) * (128 * count) + thread * 4, 2 * count);
    if constexpr (Traits::deterministic) {
        __threadfence();
        named_barrier_sync(barrier, 128);
        if (thread == 0) global::count(semaphores + group);
    }
}

__device__ __forceinline__ void add_d_key(const Call& call, const float (&d_key)[d_key_count], const KeyTile& tile,
                                          int first_key, int barrier) {
    const KeySums& sums = call.key_sums;
    add_to_key_sum(call, d_key, sums.d_key, sums.d_key_semaphores, tile, first_key, barrier);
}
__device__ __forceinline__ void add_d_value(const Call& call, const float (&d_value)[d_value_count],
                                            const KeyTile& tile, int first_key, int barrier) {
    const KeySums& sums = call.key_sums;
    add_to_key_sum(call, d_value, sums.d_value, sums.d_value_semaphores, tile, first_key, barrier);
}
