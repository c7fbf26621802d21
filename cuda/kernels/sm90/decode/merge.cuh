// Adds up the results of two consumer warpgroups that took the blocks of a tile in turn. They exchange accumulators through
// the shared memory of the tile's Q, some at a time: thread i of one holds the same elements as thread i of the other.
#pragma once
#include "sm90/decode/combine.cuh"

// Both warpgroups call it. The one that is `finisher` then has the sums.
__device__ __forceinline__ void merge(float (&out)[Traits::value_dim / 2], OnlineSoftmax& softmax,
                                      const SharedMemory& shared, bool is_finisher) {
    constexpr int out_count = Traits::value_dim / 2;
    constexpr int at_once = Traits::query_bytes / (128 * sizeof(float));
    float* const statistics = shared.exchanged_statistics() + warpgroup_thread();
    float* const values = shared.exchanged_values() + warpgroup_thread();
    if (!is_finisher) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            statistics[128 * r] = softmax.row_max[r];
            statistics[128 * (2 + r)] = softmax.row_sum[r];
        }
    }
    sync_consumers();  // nobody reads Q any more
    float rescale[2], rescale_other[2];
    if (is_finisher) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float other_max = statistics[128 * r];
            const float greater = fmaxf(softmax.row_max[r], other_max);
            rescale[r] = exponential(softmax.row_max[r] - greater);
            rescale_other[r] = exponential(other_max - greater);
            softmax.row_sum[r] = softmax.row_sum[r] * rescale[r] + statistics[128 * (2 + r)] * rescale_other[r];
            softmax.row_max[r] = greater;
        }
    }
#pragma unroll
    for (int first = 0; first < out_count; first += at_once) {
        if (first > 0) sync_consumers();  // those before have been read
        if (!is_finisher) {
#pragma unroll
            for (int i = first; i < min(first + at_once, out_count); ++i) values[128 * (i - first)] = out[i];
        }
        sync_consumers();
        if (is_finisher) {
#pragma unroll
            for (int i = first; i < min(first + at_once, out_count); ++i) {
                out[i] = out[i] * rescale[row_of(i)] + values[128 * (i - first)] * rescale_other[row_of(i)];
            }
        }
    }
}
