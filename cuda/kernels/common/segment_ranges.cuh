// Segment ids of several positions, summarised by the least and the greatest. Ids may come in any order.
#pragma once
#include "common/mask_metadata.cuh"

struct alignas(8) SegmentRange {
    int least = 0x7fffffff, greatest = -0x7fffffff - 1;  // of no positions

    __device__ void add(int id) { least = min(least, id), greatest = max(greatest, id); }
    __device__ void add(const SegmentRange& other) {
        least = min(least, other.least), greatest = max(greatest, other.greatest);
    }
    // Combines the ranges of a warp's lanes.
    __device__ void reduce() {
        least = __reduce_min_sync(all_lanes, least);
        greatest = __reduce_max_sync(all_lanes, greatest);
    }
    __device__ bool overlaps(const SegmentRange& other) const {
        return least <= other.greatest && other.least <= greatest;
    }
    __device__ bool is_one_segment_with(const SegmentRange& other) const {
        return least == greatest && other.least == other.greatest && least == other.least;
    }
};

// Narrows `blocks` to those from the first to the last that may share a segment with `range`. A whole warp calls it.
__device__ __forceinline__ Interval blocks_sharing_segments(const SegmentRange& range,
                                                            const SegmentRange* block_segments, Interval blocks) {
    int begin = empty_begin, end = 0;
    for (int block = blocks.begin + threadIdx.x % 32; block < blocks.end; block += 32) {
        if (!range.overlaps(block_segments[block])) continue;
        begin = min(begin, block), end = max(end, block + 1);
    }
    begin = __reduce_min_sync(all_lanes, begin), end = __reduce_max_sync(all_lanes, end);
    return {end > 0 ? begin : 0, end};
}

// Narrows `blocks` to the first run of blocks that have one segment, which is also the only one of `range`. A whole
// warp calls it.
__device__ __forceinline__ Interval blocks_of_one_segment(const SegmentRange& range,
                                                          const SegmentRange* block_segments, Interval blocks) {
    int begin = empty_begin, end = blocks.end;
    for (int block = blocks.begin + threadIdx.x % 32; block < blocks.end; block += 32) {
        if (range.is_one_segment_with(block_segments[block])) begin = min(begin, block);
    }
    begin = __reduce_min_sync(all_lanes, begin);
    if (begin == empty_begin) return empty_interval;
    for (int block = begin + threadIdx.x % 32; block < blocks.end; block += 32) {
        if (!range.is_one_segment_with(block_segments[block])) end = min(end, block);
    }
    return {begin, __reduce_min_sync(all_lanes, end)};
}
