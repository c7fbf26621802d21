// Which keys rows see where that is data, found by jax_flash/cuda/bounds.py before the kernel starts: batch rows shorter
// than the arrays, packed sequences, segments. The window is part of it.
#pragma once
#include "forward_traits.cuh"

// What a thread's two rows see.
struct RowBounds {
    int begin[2], end[2], segment[2];
    const int* key_segments;  // of the batch row

    __device__ __forceinline__ void load(int batch, int row, const Shape& shape) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int query = min((row + 8 * r) / Traits::pack, shape.queries - 1);
            const int64_t index = static_cast<int64_t>(batch) * shape.queries + query;
            const int2 keys = shape.bounds.query_keys[index];
            begin[r] = keys.x, end[r] = keys.y;
            if constexpr (Traits::segments) segment[r] = shape.bounds.query_segments[index];
        }
        key_segments = shape.bounds.key_segments + static_cast<int64_t>(batch) * shape.keys;
    }

    // Drops the scores of keys of other segments. `column` is the thread's first key.
    template <int count>
    __device__ __forceinline__ void mask_segments(float (&scores)[count], int column, const Shape& shape) const {
#pragma unroll
        for (int i = 0; i < count; i += 4) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int of_key = key_segments[min(column + 2 * i + c, shape.keys - 1)];
                if (of_key != segment[0]) scores[i + c] = -infinity;
                if (of_key != segment[1]) scores[i + 2 + c] = -infinity;
            }
        }
    }
};
