// Which keys queries see, and which queries see keys, where that is data: what the kernels that find it out before
// attention share (jax_flash/cuda/mask_metadata.py). The window, lengths and packed sequences give each query an interval of
// keys, and each key one of queries.
#pragma once
#include "ptx/types.cuh"
#include "ptx/warpgroup.cuh"

// Where an interval of nothing begins; it ends at 0.
constexpr int nowhere = 1 << 30;
constexpr uint32_t all_lanes = 0xffffffff;

// What the intervals of several positions have in common, and what all together.
struct Extent {
    int least_begin = nowhere, greatest_begin = 0, least_end = nowhere, greatest_end = 0;

    __device__ void add(int2 interval) {
        least_begin = min(least_begin, interval.x), greatest_begin = max(greatest_begin, interval.x);
        least_end = min(least_end, interval.y), greatest_end = max(greatest_end, interval.y);
    }
    // All lanes' in each.
    __device__ void gather() {
        least_begin = __reduce_min_sync(all_lanes, least_begin);
        greatest_begin = __reduce_max_sync(all_lanes, greatest_begin);
        least_end = __reduce_min_sync(all_lanes, least_end);
        greatest_end = __reduce_max_sync(all_lanes, greatest_end);
    }
    // The blocks [x, y) of `size` from the first to the last of which any sees some, and those that all see whole.
    __device__ int2 seen_blocks(int size) const {
        const int last = ceil_div(greatest_end, size);
        return {last > 0 ? least_begin / size : 0, last};
    }
    __device__ int2 whole_blocks(int size) const { return {ceil_div(greatest_begin, size), least_end / size}; }
};
