// Mask metadata as the backward kernel reads it: which queries see each key, where that is known only at run time
// (lengths, varlen sequences, segments). common/mask_metadata_backward.cu computes it before the kernel starts. It
// includes the window.
#pragma once
#include "ptx/global.cuh"
#include "common/block_range.cuh"
#include "sm90/backward/tile_scheduler.cuh"

// The blocks that a tile visits.
__device__ __forceinline__ QueryBlocks query_blocks_from_metadata(const KeyTile& tile, const Shape& shape) {
    const int tile_index = tile.batch * shape.key_tiles() + tile.first_key / Traits::keys;
    const Interval blocks = read_only(shape.mask_metadata.tile_blocks + tile_index);
    return {blocks.begin, blocks.end};
}
__device__ __forceinline__ Interval full_blocks(int batch, int first_key, const Shape& shape) {
    const int first = batch * shape.key_tiles() * (Traits::keys / 64);
    return read_only(shape.mask_metadata.group_blocks + first + first_key / 64);
}

// Which queries see a thread's two keys, and which blocks see all 64 of its warpgroup. Loaded once a tile. Nothing is
// computed from it before the first mask, so that it arrives beside the first scores.
struct KeyMask {
    Interval queries[2];  // that see each
    int segment[2];
    Interval full;          // blocks of queries that see all 64
    const int* of_queries;  // segments

    // `key` is the thread's first. `full_` goes to uniform registers, for which a warp would wait.
    __device__ __forceinline__ void load(Interval full_, int batch, int key, const Shape& shape) {
        full = full_;
        const int64_t first = static_cast<int64_t>(batch) * shape.key_tiles() * Traits::keys;  // key of the batch row
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            queries[r] = read_only(shape.mask_metadata.key_queries + first + key + 8 * r);
            if constexpr (Traits::segments) {
                const int there = min(key + 8 * r, shape.keys - 1);
                const int* segments = shape.mask_metadata.key_segments + static_cast<int64_t>(batch) * shape.keys;
                segment[r] = global::read_only(segments + there);
            }
        }
        of_queries = shape.mask_metadata.query_segments + static_cast<int64_t>(batch) * shape.queries;
    }

    __device__ __forceinline__ bool sees_all_of(int block) const { return block >= full.begin && block < full.end; }

    // Zeroes the masked elements of Pᵀ, as `mask` in tile_scheduler.cuh does.
    template <int count>
    __device__ __forceinline__ void mask(float (&probabilities)[count], int block, const Shape& shape) const {
        if (sees_all_of(block)) return;
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
                    bool seen = query >= queries[r].begin && query < queries[r].end;
                    if constexpr (Traits::segments) seen &= of_query == segment[r];
                    if (!seen) probabilities[i + 2 * r + c] = 0;
                }
            }
        }
    }
};
