// Mask metadata as the forward kernel reads it: which keys each row sees, where that is known only at run time
// (lengths, varlen sequences, segments). common/mask_metadata_forward.cu computes it before the kernel starts. It
// includes the window.
#pragma once
#include "ptx/global.cuh"
#include "common/constants.cuh"
#include "sm90/forward/traits.cuh"

// Which keys a thread's two rows see. The intervals are read from shared memory, where they were loaded with Q, when a
// block needs them: in registers they would have others spilled.
struct RowMask {
    const Interval* keys;     // of the upper of the two rows
    int segment[2];
    const int* key_segments;  // of the batch row

    // `row` is the upper of the thread's two rows.
    __device__ __forceinline__ void load(const SharedMemory& shared, int stage, const Tile& tile, int row,
                                         const Shape& shape) {
        const int row_in_tile = row - tile.first_row;
        keys = &shared.row_keys(stage)[row_in_tile];
        if constexpr (Traits::segments) {
#pragma unroll
            for (int r = 0; r < 2; ++r) segment[r] = shared.row_segments(stage)[row_in_tile + 8 * r];
        }
        key_segments = shape.mask_metadata.key_segments + static_cast<int64_t>(tile.batch) * shape.keys;
    }
    __device__ __forceinline__ int begin(int r) const { return keys[8 * r].begin; }
    __device__ __forceinline__ int end(int r) const { return keys[8 * r].end; }

    // Sets the scores of keys of other segments to -inf. `column` is the thread's first key.
    template <int count>
    __device__ __forceinline__ void mask_segments(float (&scores)[count], int column, const Shape& shape) const {
#pragma unroll
        for (int i = 0; i < count; i += 4) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int key_segment = global::read_only(key_segments + min(column + 2 * i + c, shape.keys - 1));
                if (key_segment != segment[0]) scores[i + c] = -infinity;
                if (key_segment != segment[1]) scores[i + 2 + c] = -infinity;
            }
        }
    }
};
