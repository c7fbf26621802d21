// Split-KV: combines the partial results of CTAs that each saw some of a tile's keys (see SplitKV in traits.cuh). Each
// consumer warp combines its own 16 rows. None waits: the last warp to arrive reads all partials.
//
// In a repeat (repeat.cuh), the CTA whose warp was last computes all parts of the tile in order. Those partials are
// then that warp's alone: nobody else arrives or reads any more.
#pragma once
#include "ptx/warpgroup.cuh"
#include "sm90/forward/softmax.cuh"

struct Partials {
    float* __restrict__ partials;  // (partial, warp, float of a lane, lane): unnormalised O, then row maxima and sums
    int* __restrict__ arrived;     // (split tile, warp): warps whose partial is written; or a mark

    // What replaces the count if this CTA's warp was last, and repeats the tile.
    __device__ static __forceinline__ int repeat_mark() { return -1 - static_cast<int>(blockIdx.x); }
};

// Writes this warp's partial. If it is the tile's last, combines all into `out` and `softmax` and returns true. In a
// repeat, does so only where this warp was last before.
template <int out_count>
__device__ __forceinline__ bool combine_partials(float (&out)[out_count], OnlineSoftmax& softmax,
                                                 const Partials& partials, const SplitKV& split_kv,
                                                 const Tile& tile, bool is_repeat) {
    constexpr int warps = 4 * Traits::consumers, floats = out_count + 4;
    const int thread = reload_thread_index() - 128, lane = thread % 32, warp = thread / 32;
    const int first_cta = split_kv.owner(tile.split_tile * split_kv.tile_blocks);
    const int last_cta = split_kv.owner((tile.split_tile + 1) * split_kv.tile_blocks - 1);
    if (first_cta == last_cta) return true;
    // From one partial to the next, the CTA or the split tile rises, and neither falls: their sum numbers the partials.
    auto partial_of = [&](int cta) {
        return partials.partials + (static_cast<int64_t>(cta + tile.split_tile) * warps + warp) * floats * 32 + lane;
    };

    int* arrived = partials.arrived + tile.split_tile * warps + warp;
    int own_cta = blockIdx.x;
    if (is_repeat) {
        const int mark = *static_cast<volatile int*>(arrived);
        if (__any_sync(all_lanes, mark != Partials::repeat_mark())) return false;
        own_cta = split_kv.owner(tile.split_tile * split_kv.tile_blocks + tile.first);
    }
    float* own = partial_of(own_cta);
#pragma unroll
    for (int i = 0; i < out_count; ++i) own[32 * i] = out[i];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        own[32 * (out_count + r)] = softmax.row_max[r];
        own[32 * (out_count + 2 + r)] = softmax.row_sum[r];
    }
    __threadfence();
    __syncwarp();
    if (is_repeat) {
        if (own_cta < last_cta) return false;
    } else {
        int arrived_before = 0;
        if (lane == 0) arrived_before = atomicAdd(arrived, 1);
        if (__shfl_sync(all_lanes, arrived_before, 0) < last_cta - first_cta) return false;
    }
    __syncwarp();
    __threadfence();

    // In the order of the keys, this warp's own partial included: the result does not depend on who came last.
    softmax = {};
#pragma unroll
    for (int i = 0; i < out_count; ++i) out[i] = 0;
#pragma unroll 1
    for (int cta = first_cta; cta <= last_cta; ++cta) {
        const volatile float* partial = partial_of(cta);
        float rescale[2], partial_rescale[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float partial_max = partial[32 * (out_count + r)];
            const float row_max = fmaxf(softmax.row_max[r], partial_max);
            rescale[r] = OnlineSoftmax::change_of_max(softmax.row_max[r], row_max);
            partial_rescale[r] = OnlineSoftmax::change_of_max(partial_max, row_max);
            softmax.row_max[r] = row_max;
            const float partial_sum = partial[32 * (out_count + 2 + r)];
            softmax.row_sum[r] = softmax.row_sum[r] * rescale[r] + partial_sum * partial_rescale[r];
        }
#pragma unroll
        for (int i = 0; i < out_count; ++i) {
            if (i % 32 == 0) __syncwarp();  // limits the loads in flight to the registers there are
            out[i] = out[i] * rescale[row_of(i)] + partial[32 * i] * partial_rescale[row_of(i)];
        }
    }
    return true;
}
