// Which queries see keys where that is data, found by jax_flash/cuda/bounds.py before the kernel starts: batch rows
// shorter than the arrays, packed sequences, segments. The window is part of it.
#pragma once
#include "backward_tile.cuh"

// The blocks that a tile visits.
__device__ __forceinline__ QueryBlocks query_blocks_by_data(const KeyTile& tile, const Shape& shape) {
    const int2 blocks = shape.bounds.tile_blocks[tile.batch * shape.key_tiles() + tile.first_key / Traits::keys];
    return {blocks.x, blocks.y};
}
__device__ __forceinline__ int2 whole_blocks(int batch, int first_key, const Shape& shape) {
    return shape.bounds.group_blocks[batch * shape.key_tiles() * (Traits::keys / 64) + first_key / 64];
}

// Zeroes the masked elements of Pᵀ, as `mask` in backward_tile.cuh.
template <int count>
__device__ __forceinline__ void mask_by_data(float (&probabilities)[count], int batch, int key, int block,
                                             const Shape& shape) {
    const int first_column = block * Traits::queries + threadIdx.x % 4 * 2;
    int2 seen_by[2];  // counted from the thread's first column
    int segment[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int64_t there = static_cast<int64_t>(batch) * shape.keys + min(key + 8 * r, shape.keys - 1);
        const int2 queries = shape.bounds.key_queries[there];
        const bool is_key = key + 8 * r < shape.keys;
        seen_by[r] = {queries.x - first_column, is_key ? queries.y - first_column : -1};
        if constexpr (Traits::segments) segment[r] = shape.bounds.key_segments[there];
    }
    const int* of_queries = shape.bounds.query_segments + static_cast<int64_t>(batch) * shape.queries;
#pragma unroll
    for (int i = 0; i < count; i += 4) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int column = i / 4 * 8 + c;
            int of_query;
            if constexpr (Traits::segments) of_query = of_queries[min(first_column + column, shape.queries - 1)];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                bool seen = column >= seen_by[r].x && column < seen_by[r].y;
                if constexpr (Traits::segments) seen &= of_query == segment[r];
                if (!seen) probabilities[i + 2 * r + c] = 0;
            }
        }
    }
}
