// Which slots sequences have, if queries are packed (sm90/forward/packed_queries.cuh). A sequence that the forward
// kernel takes has as many as it has row tiles. Slots go by sequence, then by tile; those behind the last are empty.
//
// Defines: PACKED, TILE_GROUPS and PACK_GQA, as in preprocess.cu.
#pragma once
#include "ptx/warpgroup.cuh"
#include "common/query_slot.cuh"
#include "sm90/decode/sequences.cuh"

constexpr int group_rows = 64;  // of mask metadata

#if PACKED
constexpr int tile_queries = TILE_GROUPS * group_rows / PACK_GQA;

// How many slots sequences have, counted by a warp.
__device__ __forceinline__ int count_slots(const Shape& shape) {
    int slots = 0;
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < shape.batch; i += 32) slots += ceil_div(packed_queries(shape, i), tile_queries);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) slots += __shfl_xor_sync(all_lanes, slots, lanes);
    return slots;
}

// Slot `index`, found by a warp.
__device__ __forceinline__ QuerySlot find_slot(const Shape& shape, int index) {
    const int lane = threadIdx.x % 32;
    int before = 0;  // slots of the sequences before those of this round
#pragma unroll 1
    for (int first = 0; first < shape.batch; first += 32) {
        const int own = first + lane;
        const int queries = own < shape.batch ? packed_queries(shape, own) : 0;
        const int slots = ceil_div(queries, tile_queries);
        int end = before + slots;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int others = __shfl_up_sync(all_lanes, end - before, distance);
            if (lane >= distance) end += others;
        }
        const int owner = __reduce_min_sync(all_lanes, end - slots <= index && index < end ? lane : 32);
        if (owner < 32) {
            const int first_query = (index - __shfl_sync(all_lanes, end - slots, owner)) * tile_queries;
            const int left = __shfl_sync(all_lanes, queries, owner) - first_query;
            const int first_token = shape.query_offsets[first + owner] + first_query;
            return {first + owner, first_token, min(left, tile_queries), first_query};
        }
        before = __shfl_sync(all_lanes, end, 31);
    }
    return {0, 0, 0, 0};
}
#endif
