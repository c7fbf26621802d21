// Mask metadata as the forward kernel reads it: which keys each row sees, where that is known only at run time (lengths,
// packed sequences, segments). common/mask_metadata_forward.cu computes it before the kernel starts. It includes the
// window.
#pragma once
#include "ptx/global.cuh"
#include "common/constants.cuh"
#include "sm90/forward/traits.cuh"

// Which keys a thread's two rows see.
struct RowMask {
    int begin[2], end[2], segment[2];
    const int* key_segments;  // of the batch row

    // Reads what was loaded with Q. `row` is the upper of the thread's two rows.
    __device__ __forceinline__ void load(const SharedMemory& shared, int stage, const Tile& tile, int row,
                                         const Shape& shape) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row_in_tile = row - tile.first_row + 8 * r;
            const Interval keys = shared.row_keys(stage)[row_in_tile];
            begin[r] = keys.begin, end[r] = keys.end;
            if constexpr (Traits::segments) segment[r] = shared.row_segments(stage)[row_in_tile];
        }
        key_segments = shape.mask_metadata.key_segments + static_cast<int64_t>(tile.batch) * shape.keys;
    }

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
