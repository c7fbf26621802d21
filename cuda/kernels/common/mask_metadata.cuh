// What the kernels that compute mask metadata share (jax_flash/cuda/mask_metadata.py). The window, lengths and varlen
// sequences let each query see an interval of keys, and each key be seen by an interval of queries.
#pragma once
#include "ptx/types.cuh"
#include "common/block_range.cuh"

// The range of begins, and of ends, of several positions' intervals.
struct IntervalExtent {
    int least_begin = empty_begin, greatest_begin = 0, least_end = empty_begin, greatest_end = 0;

    __device__ void add(Interval interval) {
        least_begin = min(least_begin, interval.begin), greatest_begin = max(greatest_begin, interval.begin);
        least_end = min(least_end, interval.end), greatest_end = max(greatest_end, interval.end);
    }
    // Combines the extents of a warp's lanes.
    __device__ void reduce() {
        least_begin = __reduce_min_sync(all_lanes, least_begin);
        greatest_begin = __reduce_max_sync(all_lanes, greatest_begin);
        least_end = __reduce_min_sync(all_lanes, least_end);
        greatest_end = __reduce_max_sync(all_lanes, greatest_end);
    }
    // The blocks of `size` from the first that any of the positions sees to the last.
    __device__ Interval visited_blocks(int size) const {
        const int end = ceil_div(greatest_end, size);
        return {end > 0 ? least_begin / size : 0, end};
    }
    // The blocks that every one of the positions sees whole.
    __device__ Interval full_blocks(int size) const { return {ceil_div(greatest_begin, size), least_end / size}; }
};
