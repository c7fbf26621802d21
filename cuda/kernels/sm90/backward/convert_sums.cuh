// Conversion of a float32 sum of gradients, in the order of accumulators (DqBlock), to rows of 16-bit elements.
#pragma once
#include "ptx/math.cuh"
#include "sm90/backward/traits.cuh"

// Rows of 16-bit elements in global memory, as vectors of eight.
struct Rows {
    uint4* first;
    int64_t stride;  // vectors from row to row
    int count, vectors;  // rows that there are, and vectors of each
};

// Writes factor · sum for `rows` rows of `columns` columns. Where there are `sums` sums, `next_sum` vectors apart, they are
// added up, from the first to the last. All `threads` threads of a CTA call it, once.
template <int rows, int columns, int sums, int threads>
__device__ __forceinline__ void convert_sums(const float4* sum, int64_t next_sum, float factor, const Rows& destination) {
    constexpr int chunks = columns / 8;
    // Elements from row to row of what is staged. Eight more than it has, so that the eight rows that a warp writes at
    // once lie in different banks.
    constexpr int staged_stride = columns + 8;
    __shared__ __align__(16) uint16_t staged[rows * staged_stride];
    const int thread = threadIdx.x % 128;  // that had the accumulators
#pragma unroll 4
    for (int i = threadIdx.x; i < rows * columns / 4; i += threads) {
        const int row_tile = i / 128 / chunks, chunk = i / 128 % chunks;
        const int row = 64 * row_tile + thread / 32 * 16 + thread % 32 / 4;
        float4 total = sum[i];
#pragma unroll
        for (int other = 1; other < sums; ++other) {
            const float4 x = sum[other * next_sum + i];
            total = {total.x + x.x, total.y + x.y, total.z + x.z, total.w + x.w};
        }
        uint16_t* place = staged + row * staged_stride + chunk * 8 + thread % 4 * 2;
        *reinterpret_cast<uint32_t*>(place) = convert<Traits::Element>(total.x * factor, total.y * factor);
        *reinterpret_cast<uint32_t*>(place + 8 * staged_stride) =
            convert<Traits::Element>(total.z * factor, total.w * factor);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < destination.count * destination.vectors; i += threads) {
        const int row = i / destination.vectors, vector = i - row * destination.vectors;
        destination.first[row * destination.stride + vector] =
            *reinterpret_cast<const uint4*>(staged + row * staged_stride + vector * 8);
    }
}
