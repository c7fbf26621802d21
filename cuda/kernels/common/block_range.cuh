// Ranges of positions and of blocks, of which mask metadata consists. All are half-open.
#pragma once
#include "ptx/global.cuh"

// The positions, or blocks, [begin, end).
struct alignas(8) Interval {
    int begin, end;
};

// An empty interval begins beyond every position and ends at 0, so that it drops out of minima and maxima.
constexpr int empty_begin = 1 << 30;
constexpr Interval empty_interval{empty_begin, 0};

// The blocks that a tile, or a group of its rows, visits: [first, last). It skips all others. Of the blocks that it
// visits, [full_begin, full_end) are full: each pair of query and key in them is visible. The others are partial, and
// need the mask.
struct alignas(16) BlockRange {
    int first, last;
    int full_begin, full_end;
};

// Reads that the compiler may do early, see global::read_only.
__device__ __forceinline__ Interval read_only(const Interval* address) {
    const int2 range = global::read_only(reinterpret_cast<const int2*>(address));
    return {range.x, range.y};
}
__device__ __forceinline__ BlockRange read_only(const BlockRange* address) {
    const int4 range = global::read_only(reinterpret_cast<const int4*>(address));
    return {range.x, range.y, range.z, range.w};
}
