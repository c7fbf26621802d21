// Rows of the results that no tile has: of packed queries, those that belong to no sequence.
#pragma once
#include "common/constants.cuh"
#include "sm90/decode/store.cuh"

// Writes them: 0, and -inf as lse. Each warp of the grid has a share.
__device__ __forceinline__ void write_unused_rows(const Results& results, const Shape& shape) {
    constexpr int warps = Traits::threads / 32, chunk_columns = 16 / sizeof(Traits::Element);
    const int first_used = shape.query_offsets[0], end_used = shape.query_offsets[shape.batch];
    const int64_t rows = static_cast<int64_t>(first_used + shape.queries - end_used) * shape.query_heads;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int64_t i = blockIdx.x * warps + threadIdx.x / 32; i < rows; i += gridDim.x * warps) {
        const int head = static_cast<int>(i % shape.query_heads), unused = static_cast<int>(i / shape.query_heads);
        const int query = unused < first_used ? unused : unused - first_used + end_used;
        const int64_t row = static_cast<int64_t>(query) * shape.query_heads + head;
        uint4* const chunks = reinterpret_cast<uint4*>(results.out + row * shape.value_dim);
        for (int chunk = lane; chunk < shape.value_dim / chunk_columns; chunk += 32) chunks[chunk] = {0, 0, 0, 0};
        if (lane == 0) results.lse[static_cast<int64_t>(head) * shape.queries + query] = -infinity;
    }
}
