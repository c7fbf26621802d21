// Putting together what CTAs found over their pieces of a cut tile (see Cut in forward_traits.cuh). Each consumer warp
// does so for its own 16 rows, and nobody waits: whichever comes last has all there is.
#pragma once
#include "ptx/warpgroup.cuh"
#include "sm90/forward/softmax.cuh"

struct Partials {
    float* __restrict__ pieces;  // (piece, warp, word, lane): O before normalisation, then row maxima and sums
    int* __restrict__ arrived;   // (cut tile, warp)
};

// Whether this warp is the tile's last; `out` and `softmax` are of all its keys then.
template <int out_count>
__device__ __forceinline__ bool combine_pieces(float (&out)[out_count], OnlineSoftmax& softmax,
                                               const Partials& partials, const Cut& cut, const Tile& tile) {
    constexpr int warps = 4 * Traits::consumers, words = out_count + 4;
    const int thread = thread_index_anew() - 128, lane = thread % 32, warp = thread / 32;
    const int first = cut.owner(tile.cut * cut.tile_blocks), last = cut.owner((tile.cut + 1) * cut.tile_blocks - 1);
    if (first == last) return true;
    // Pieces follow one another as their CTA or their tile does, so that the sum of both is a piece's own.
    auto piece_of = [&](int cta) {
        return partials.pieces + (static_cast<int64_t>(cta + tile.cut) * warps + warp) * words * 32 + lane;
    };

    float* mine = piece_of(blockIdx.x);
#pragma unroll
    for (int i = 0; i < out_count; ++i) mine[32 * i] = out[i];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        mine[32 * (out_count + r)] = softmax.row_max[r];
        mine[32 * (out_count + 2 + r)] = softmax.row_sum[r];
    }
    __threadfence();
    __syncwarp();
    int before = 0;
    if (lane == 0) before = atomicAdd(partials.arrived + tile.cut * warps + warp, 1);
    if (__shfl_sync(0xffffffff, before, 0) < last - first) return false;
    __syncwarp();
    __threadfence();

    // In the order of the keys, its own piece too: the result does not depend on who came last.
    softmax = {};
#pragma unroll
    for (int i = 0; i < out_count; ++i) out[i] = 0;
#pragma unroll 1
    for (int cta = first; cta <= last; ++cta) {
        const volatile float* piece = piece_of(cta);
        float before[2], added[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float piece_max = piece[32 * (out_count + r)];
            const float row_max = fmaxf(softmax.row_max[r], piece_max);
            before[r] = exp2_approx(softmax.row_max[r] - row_max);
            added[r] = exp2_approx(piece_max - row_max);
            softmax.row_max[r] = row_max;
            softmax.row_sum[r] = softmax.row_sum[r] * before[r] + piece[32 * (out_count + 2 + r)] * added[r];
        }
#pragma unroll
        for (int i = 0; i < out_count; ++i) {
            if (i % 32 == 0) __syncwarp();  // no more loads at a time than there are registers for
            out[i] = out[i] * before[row_of(i)] + piece[32 * i] * added[row_of(i)];
        }
    }
    return true;
}
