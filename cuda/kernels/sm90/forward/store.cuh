// What a consumer warp of the forward kernel writes: its 16 rows of the output, and their log-sum-exp.
#pragma once
#include "ptx/math.cuh"
#include "ptx/warpgroup.cuh"
#include "common/finite.cuh"
#include "sm90/forward/softmax.cuh"
#include "sm90/forward/packed_queries.cuh"
#include "sm90/forward/tile_scheduler.cuh"

struct Results {
    Traits::Result* __restrict__ out;  // (B, T, N, V)
    float* __restrict__ lse;           // (B, N, T)
};

// `row` is the upper of the thread's two rows.
__device__ __forceinline__ void write_lse(const float (&row_lse)[2], const Results& results, const Shape& shape,
                                          const Tile& tile, int row) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const RowPlace place = place_of(row + 8 * r, tile, shape);
        const int head = head_of(row + 8 * r, tile);
        if (threadIdx.x % 4 == 0 && place.exists) {
            const int64_t first = (static_cast<int64_t>(tile.batch) * shape.query_heads + head) * place.queries;
            results.lse[first + place.query] = row_lse[r];
        }
    }
    __syncwarp();
}

struct alignas(16) Chunk {
    uint64_t low, high;
};

// Adds the pairs of a chunk to a pair. The sum is not finite if any of them isn't.
__device__ __forceinline__ uint32_t add_chunk(uint32_t sum, const Chunk& chunk) {
    sum = add_pairs<Traits::OutElement>(sum, static_cast<uint32_t>(chunk.low));
    sum = add_pairs<Traits::OutElement>(sum, static_cast<uint32_t>(chunk.low >> 32));
    sum = add_pairs<Traits::OutElement>(sum, static_cast<uint32_t>(chunk.high));
    return add_pairs<Traits::OutElement>(sum, static_cast<uint32_t>(chunk.high >> 32));
}

// Normalises and writes the warp's 16 rows from `first_row` on. A thread's accumulators hold pairs of columns. So one
// panel of columns at a time goes through `staging`, which is the warp's own, and from there rows are written as whole
// 16-byte chunks.
//
// Returns whether any of the rows isn't finite; false where Traits::isolates doesn't ask for it. In a repeat, rows
// whose sum is NaN keep what they have: they see what isn't finite.
__device__ __forceinline__ bool write_out(const float (&out)[Traits::value_dim / 2], const float (&normalise)[2],
                                          const Results& results, const SharedMemory& shared, int staging,
                                          const Shape& shape, const Tile& tile, int first_row, bool is_repeat) {
    constexpr int chunk_columns = sizeof(Chunk) / sizeof(Traits::OutElement);
    constexpr int panel_count = Traits::out_panel_columns / 2;  // accumulators of a thread in a panel
    constexpr int rows_of_lane = 4;  // 8 lanes copy a row of a panel
    // With dropout registers are short: the lane is not kept from the tile's start.
    const int lane = (Traits::isolates && Traits::dropout ? reload_thread_index() : threadIdx.x) % 32;
    Traits::Result* rows[rows_of_lane];
    bool inside[rows_of_lane];
#pragma unroll
    for (int k = 0; k < rows_of_lane; ++k) {
        const int row = first_row + 4 * k + lane / 8;
        const RowPlace place = place_of(row, tile, shape);
        const int head = head_of(row, tile);
        inside[k] = place.exists;
        const int64_t token = static_cast<int64_t>(tile.batch) * place.queries + place.query;
        rows[k] = results.out + (token * shape.query_heads + head) * shape.columns;
    }
    if (is_repeat) {
#pragma unroll
        for (int k = 0; k < rows_of_lane; ++k) {
            const float factor = __shfl_sync(all_lanes, normalise[k / 2], (4 * k + lane / 8) % 8 * 4);
            inside[k] = inside[k] && factor == factor;
        }
    }
    uint32_t sums = 0;  // of the lane's columns in the first of its rows; all lanes together have all columns
#pragma unroll
    for (int panel = 0; panel < Traits::out_panels; ++panel) {
#pragma unroll
        for (int i = panel_count * panel; i < min(panel_count * (panel + 1), Traits::value_dim / 2); i += 8) {
            const int chunk = i % panel_count / 4 + lane / 16;
            store_matrix_x4(shared.base + staging + descriptor::swizzled_offset(lane % 16, chunk),
                            convert<Traits::OutElement>(out[i] * normalise[0], out[i + 1] * normalise[0]),
                            convert<Traits::OutElement>(out[i + 2] * normalise[1], out[i + 3] * normalise[1]),
                            convert<Traits::OutElement>(out[i + 4] * normalise[0], out[i + 5] * normalise[0]),
                            convert<Traits::OutElement>(out[i + 6] * normalise[1], out[i + 7] * normalise[1]));
        }
        __syncwarp();
        const int column = Traits::out_panel_columns * panel + chunk_columns * (lane % 8);
#pragma unroll
        for (int k = 0; k < rows_of_lane; ++k) {
            const int offset = staging + descriptor::swizzled_offset(4 * k + lane / 8, lane % 8);
            const Chunk chunk = *reinterpret_cast<const Chunk*>(shared.data + offset);
            if (inside[k] && column < shape.columns) *reinterpret_cast<Chunk*>(rows[k] + column) = chunk;
            if (Traits::isolates && k == 0 && column < Traits::value_dim) sums = add_chunk(sums, chunk);
        }
        __syncwarp();
    }
    return Traits::isolates && __any_sync(all_lanes, finite_halves<Traits::OutElement>(sums) != all_finite);
}

// The same in float32, where Result is: each thread writes the pairs of columns that it has, of two rows.
__device__ __forceinline__ bool write_wide_out(const float (&out)[Traits::value_dim / 2], const float (&normalise)[2],
                                               const Results& results, const Shape& shape, const Tile& tile,
                                               int first_row, bool is_repeat) {
    const int lane = threadIdx.x % 32;
    float sum = 0;  // NaN if any number isn't finite
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = first_row + lane / 4 + 8 * r;
        const RowPlace place = place_of(row, tile, shape);
        const int head = head_of(row, tile);
        const int64_t token = static_cast<int64_t>(tile.batch) * place.queries + place.query;
        Traits::Result* const of_row = results.out + (token * shape.query_heads + head) * shape.columns;
        const bool inside = place.exists && !(is_repeat && normalise[r] != normalise[r]);
#pragma unroll
        for (int i = 0; i < Traits::value_dim / 2; i += 4) {
            const float2 pair = {out[i + 2 * r] * normalise[r], out[i + 2 * r + 1] * normalise[r]};
            const int column = 2 * i + lane % 4 * 2;
            if (inside && column < shape.columns) *reinterpret_cast<float2*>(of_row + column) = pair;
            sum += 0 * (pair.x + pair.y);
        }
    }
    return Traits::isolates && __any_sync(all_lanes, sum != sum);
}
