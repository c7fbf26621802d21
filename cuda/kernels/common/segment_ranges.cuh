// Segments in any order, by the least and the greatest id that there is among several positions.
#pragma once
#include "common/mask_metadata.cuh"

struct SegmentIds {
    int least = 0x7fffffff, greatest = -0x7fffffff - 1;

    __device__ void add(int id) { least = min(least, id), greatest = max(greatest, id); }
    __device__ void add(const SegmentIds& ids) {
        least = min(least, ids.least), greatest = max(greatest, ids.greatest);
    }
    // All lanes' in each.
    __device__ void gather() {
        least = __reduce_min_sync(all_lanes, least);
        greatest = __reduce_max_sync(all_lanes, greatest);
    }
    __device__ bool may_meet(int2 others) const { return least <= others.y && others.x <= greatest; }
    __device__ bool are_one_with(int2 others) const {
        return least == greatest && others.x == others.y && least == others.x;
    }
};

// Of the blocks [x, y), whose ids are between those of `of_blocks`, the ones from the first to the last that may have a
// segment in common with `ids`. Called by a whole warp.
__device__ __forceinline__ int2 blocks_that_meet(const SegmentIds& ids, const int2* of_blocks, int2 blocks) {
    int first = nowhere, last = 0;
    for (int block = blocks.x + threadIdx.x % 32; block < blocks.y; block += 32) {
        if (!ids.may_meet(of_blocks[block])) continue;
        first = min(first, block), last = max(last, block + 1);
    }
    first = __reduce_min_sync(all_lanes, first), last = __reduce_max_sync(all_lanes, last);
    return {last > 0 ? first : 0, last};
}

// The first run, among the blocks [x, y), of those that have one segment only, and that the one that `ids` are.
__device__ __forceinline__ int2 blocks_of_one_segment(const SegmentIds& ids, const int2* of_blocks, int2 blocks) {
    int begin = nowhere, end = blocks.y;
    for (int block = blocks.x + threadIdx.x % 32; block < blocks.y; block += 32) {
        if (ids.are_one_with(of_blocks[block])) begin = min(begin, block);
    }
    begin = __reduce_min_sync(all_lanes, begin);
    if (begin == nowhere) return {nowhere, 0};
    for (int block = begin + threadIdx.x % 32; block < blocks.y; block += 32) {
        if (!ids.are_one_with(of_blocks[block])) end = min(end, block);
    }
    return {begin, __reduce_min_sync(all_lanes, end)};
}
