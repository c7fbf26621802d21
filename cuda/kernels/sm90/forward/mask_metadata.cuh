// Which keys rows see where that is data, found by mask_metadata_forward.cu before the kernel starts: batch rows shorter than
// the arrays, packed sequences, segments. The window is part of it.
#pragma once
#include "ptx/global.cuh"
#include "sm90/forward/traits.cuh"

// What a thread's two rows see.
struct RowBounds {
    int begin[2], end[2], segment[2];
    const int* key_segments;  // of the batch row

    // From what came with Q; `row` is the upper of the two.
    __device__ __forceinline__ void load(const SharedMemory& shared, int stage, const Tile& tile, int row,
                                         const Shape& shape) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int in_tile = row - tile.first_row + 8 * r;
            const int2 keys = shared.row_keys(stage)[in_tile];
            begin[r] = keys.x, end[r] = keys.y;
            if constexpr (Traits::segments) segment[r] = shared.row_segments(stage)[in_tile];
        }
        key_segments = shape.bounds.key_segments + static_cast<int64_t>(tile.batch) * shape.keys;
    }

    // Drops the scores of keys of other segments. `column` is the thread's first key.
    template <int count>
    __device__ __forceinline__ void mask_segments(float (&scores)[count], int column, const Shape& shape) const {
#pragma unroll
        for (int i = 0; i < count; i += 4) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int of_key = global::read_only(key_segments + min(column + 2 * i + c, shape.keys - 1));
                if (of_key != segment[0]) scores[i + c] = -infinity;
                if (of_key != segment[1]) scores[i + 2 + c] = -infinity;
            }
        }
    }
};
