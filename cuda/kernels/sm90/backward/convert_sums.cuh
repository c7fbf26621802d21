// Conversion of a float32 sum of gradients, in the order of accumulators (DqBlock), to rows of Traits::Result.
#pragma once
#include "ptx/math.cuh"
#include "sm90/backward/traits.cuh"

// Rows in global memory.
struct Rows {
    Traits::Result* first;
    int64_t stride;  // elements from row to row
    int count, columns;  // rows that there are, and columns of each, a multiple of eight

    // Where eight columns start.
    __device__ __forceinline__ Traits::Result* at(int row, int vector) const {
        return first + row * stride + vector * 8;
    }
};

// Accumulators of a thread: two columns of a row and of the one eight below it.
__device__ __forceinline__ float4 added(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// Writes factor · sum for `rows` rows of `columns` columns. Where there are `sums` sums, `next_sum` vectors apart, they
// are added up, from the first to the last. All `threads` threads of a CTA call it, once.
template <int rows, int columns, int sums, int threads>
__device__ __forceinline__ void convert_sums(const float4* sum, int64_t next_sum, float factor,
                                             const Rows& destination) {
    constexpr bool wide = is_same<Traits::Result, float>;
    constexpr int chunks = columns / 8;
    // Elements from row to row of what is staged. Eight more than it has, so that the eight rows that a warp writes at
    // once lie in different banks.
    constexpr int staged_stride = columns + 8;
    __shared__ __align__(16) uint16_t staged[wide ? 1 : rows * staged_stride];
    const int thread = threadIdx.x % 128;  // that had the accumulators
#pragma unroll 4
    for (int i = threadIdx.x; i < rows * columns / 4; i += threads) {
        const int row_tile = i / 128 / chunks, chunk = i / 128 % chunks;
        const int row = 64 * row_tile + thread / 32 * 16 + thread % 32 / 4;
        float4 total = sum[i];
#pragma unroll
        for (int other = 1; other < sums; ++other) total = added(total, sum[other * next_sum + i]);
        if constexpr (wide) {
            if (chunk * 8 >= destination.columns) continue;
            Traits::Result* const place = destination.at(row, chunk) + thread % 4 * 2;
            const float2 upper = {total.x * factor, total.y * factor}, lower = {total.z * factor, total.w * factor};
            if (row < destination.count) *reinterpret_cast<float2*>(place) = upper;
            if (row + 8 < destination.count) *reinterpret_cast<float2*>(place + 8 * destination.stride) = lower;
        } else {
            uint16_t* place = staged + row * staged_stride + chunk * 8 + thread % 4 * 2;
            *reinterpret_cast<uint32_t*>(place) = convert<Traits::Element>(total.x * factor, total.y * factor);
            *reinterpret_cast<uint32_t*>(place + 8 * staged_stride) =
                convert<Traits::Element>(total.z * factor, total.w * factor);
        }
    }
    if constexpr (!wide) {
        __syncthreads();
        const int vectors = destination.columns / 8;
        for (int i = threadIdx.x; i < destination.count * vectors; i += threads) {
            const int row = i / vectors, vector = i - row * vectors;
            *reinterpret_cast<uint4*>(destination.at(row, vector)) =
                *reinterpret_cast<const uint4*>(staged + row * staged_stride + vector * 8);
        }
    }
}
