// Which queries see keys where that is data, found by mask_metadata_backward.cu before the kernel starts: batch rows shorter
// than the arrays, packed sequences, segments. The window is part of it.
#pragma once
#include "ptx/global.cuh"
#include "sm90/backward/tile_scheduler.cuh"

// The blocks that a tile visits.
__device__ __forceinline__ QueryBlocks query_blocks_by_data(const KeyTile& tile, const Shape& shape) {
    const int tile_index = tile.batch * shape.key_tiles() + tile.first_key / Traits::keys;
    const int2 blocks = global::read_only(shape.bounds.tile_blocks + tile_index);
    return {blocks.x, blocks.y};
}
__device__ __forceinline__ int2 whole_blocks(int batch, int first_key, const Shape& shape) {
    const int first = batch * shape.key_tiles() * (Traits::keys / 64);
    return global::read_only(shape.bounds.group_blocks + first + first_key / 64);
}

// What there is to know of a thread's two keys and its warpgroup's 64, once a tile. Nothing is computed from what is
// loaded here before the first mask, so that it has the time of the first scores to arrive.
struct KeyBounds {
    int2 queries[2];  // that see each
    int segment[2];
    int2 whole;             // blocks that see all 64
    const int* of_queries;  // segments

    // `key` is the thread's first. `whole_` goes to uniform registers, for which a warp would wait.
    __device__ __forceinline__ void load(int2 whole_, int batch, int key, const Shape& shape) {
        whole = whole_;
        const int64_t first = static_cast<int64_t>(batch) * shape.key_tiles() * Traits::keys;  // key of the batch row
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            queries[r] = global::read_only(shape.bounds.key_queries + first + key + 8 * r);
            if constexpr (Traits::segments) {
                const int there = min(key + 8 * r, shape.keys - 1);
                const int* segments = shape.bounds.key_segments + static_cast<int64_t>(batch) * shape.keys;
                segment[r] = global::read_only(segments + there);
            }
        }
        of_queries = shape.bounds.query_segments + static_cast<int64_t>(batch) * shape.queries;
    }

    // Zeroes the masked elements of Pᵀ, as `mask` in backward_tile.cuh does.
    template <int count>
    __device__ __forceinline__ void mask(float (&probabilities)[count], int block, const Shape& shape) const {
        if (block >= whole.x && block < whole.y) return;
        const int first_column = block * Traits::queries + threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < count; i += 4) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int query = first_column + i / 4 * 8 + c;
                int of_query;
                if constexpr (Traits::segments) {
                    of_query = global::read_only(of_queries + min(query, shape.queries - 1));
                }
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    bool seen = query >= queries[r].x && query < queries[r].y;
                    if constexpr (Traits::segments) seen &= of_query == segment[r];
                    if (!seen) probabilities[i + 2 * r + c] = 0;
                }
            }
        }
    }
};
