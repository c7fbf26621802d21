// What a consumer warp of the forward kernel writes: its 16 rows of the output, and their log-sum-exp.
#pragma once
#include "ptx/warpgroup.cuh"
#include "sm90/forward/softmax.cuh"

struct Results {
    Traits::Element* __restrict__ out;  // (B, T, N, V)
    float* __restrict__ lse;            // (B, N, T)
};

// `row` is the upper of the thread's two.
__device__ __forceinline__ void write_lse(const float (&row_lse)[2], const Results& results, const Shape& shape,
                                          const Tile& tile, int row) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int query = (row + 8 * r) / Traits::pack, head = tile.head + (row + 8 * r) % Traits::pack;
        if (threadIdx.x % 4 == 0 && query < shape.queries) {
            const int64_t first = (static_cast<int64_t>(tile.batch) * shape.query_heads + head) * shape.queries;
            results.lse[first + query] = row_lse[r];
        }
    }
    __syncwarp();
}

struct alignas(16) Chunk {
    uint64_t low, high;
};

// Normalises and writes the warp's rows, from `first_row` of all. Accumulators hold pairs of columns: 64 columns at a
// time go through the warp's own `staging`, whence each row is read and written as whole sectors.
__device__ __forceinline__ void write_out(const float (&out)[Traits::value_dim / 2], const float (&normalise)[2],
                                          const Results& results, const SharedMemory& shared, int staging,
                                          const Shape& shape, const Tile& tile, int first_row) {
    constexpr int readers = 4;  // chunks of a panel's rows that a lane copies
    const int lane = threadIdx.x % 32;
    Traits::Element* rows[readers];
    bool inside[readers];
#pragma unroll
    for (int k = 0; k < readers; ++k) {
        const int row = first_row + 4 * k + lane / 8;
        const int query = row / Traits::pack, head = tile.head + row % Traits::pack;
        inside[k] = query < shape.queries;
        const int64_t position = static_cast<int64_t>(tile.batch) * shape.queries + query;
        rows[k] = results.out + (position * shape.query_heads + head) * shape.columns;
    }
#pragma unroll
    for (int panel = 0; panel < Traits::value_panels; ++panel) {
#pragma unroll
        for (int i = 32 * panel; i < min(32 * panel + 32, Traits::value_dim / 2); i += 8) {
            store_matrix_x4(shared.base + staging + descriptor::swizzled_offset(lane % 16, i % 32 / 4 + lane / 16),
                            convert<Traits::Element>(out[i] * normalise[0], out[i + 1] * normalise[0]),
                            convert<Traits::Element>(out[i + 2] * normalise[1], out[i + 3] * normalise[1]),
                            convert<Traits::Element>(out[i + 4] * normalise[0], out[i + 5] * normalise[0]),
                            convert<Traits::Element>(out[i + 6] * normalise[1], out[i + 7] * normalise[1]));
        }
        __syncwarp();
        const int column = descriptor::panel_columns * panel + 8 * (lane % 8);
#pragma unroll
        for (int k = 0; k < readers; ++k) {
            const int offset = staging + descriptor::swizzled_offset(4 * k + lane / 8, lane % 8);
            const Chunk chunk = *reinterpret_cast<const Chunk*>(shared.data + offset);
            if (inside[k] && column < shape.columns) *reinterpret_cast<Chunk*>(rows[k] + column) = chunk;
        }
        __syncwarp();
    }
}
