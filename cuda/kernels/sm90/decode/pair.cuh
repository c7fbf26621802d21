// Pairs of CTAs: clusters of two, whose shares of the blocks are next to each other (partials.cuh).
//
// If a tile goes across the boundary of these shares, the second CTA attends to its part of it first of all, and the
// first CTA to its own last of all. So the second stores what it made in the first one's shared memory, and goes on;
// the first adds it to its own, and seldom has to wait for long. To other CTAs the two are one sharer of the tile. If
// there is no other sharer, no partial goes through global memory.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "sm90/decode/store.cuh"

struct Pair {
    const SharedMemory& shared;
    static constexpr int warps = ceil_div(Traits::query_rows, 16);  // that have rows of a tile
    const int warp = warps > 1 ? threadIdx.x / 32 : 0, lane = threadIdx.x % 32;

    // Gives this CTA's part of the tile to the other, or adds the other's to it, or does neither. Returns false if the
    // part was given away.
    __device__ __forceinline__ bool join(float (&out)[Traits::value_dim / 2], OnlineSoftmax& softmax,
                                         const Tile& tile) const {
        const bool has_rows = threadIdx.x < 32 * warps;
        if (has_rows && tile.in_pair == InPair::gives) give(out, softmax);
        if (has_rows && tile.in_pair == InPair::takes) take(out, softmax);
        return tile.in_pair != InPair::gives;
    }

private:
    // Where chunk `chunk` of this lane's row `r` is: the row's four of eight accumulators (row_of). The last chunk is
    // the row's maximum and the lane's sum.
    __device__ __forceinline__ int place(int r, int chunk) const {
        const int index = (2 * warp + r) * Traits::pair_chunks + chunk;
        return SharedMemory::partials + index * Traits::chunk_bytes + 16 * lane;
    }
    static constexpr int statistics = Traits::pair_chunks - 1;

    __device__ __forceinline__ void give(const float (&out)[Traits::value_dim / 2],
                                         const OnlineSoftmax& softmax) const {
        const uint32_t there = cluster::address_in(0, shared.base);
        const uint32_t full = cluster::address_in(0, shared.partials_full());
#pragma unroll
        for (int r = 0; r < thread_rows; ++r) {
            cluster::store_async(there + place(r, statistics), {softmax.row_max[r], softmax.row_sum[r], 0, 0}, full);
#pragma unroll
            for (int chunk = 0; chunk < statistics; ++chunk) {
                const float* const values = out + 8 * chunk + 2 * r;
                cluster::store_async(there + place(r, chunk), {values[0], values[1], values[4], values[5]}, full);
            }
        }
    }

    __device__ __forceinline__ void take(float (&out)[Traits::value_dim / 2], OnlineSoftmax& softmax) const {
        if (lane == 0 && warp == 0) mbarrier::arrive_expect(shared.partials_full(), Traits::pair_bytes);
        mbarrier::wait(shared.partials_full(), 0);
#pragma unroll
        for (int r = 0; r < thread_rows; ++r) {
            const float4 other = *reinterpret_cast<const float4*>(shared.data + place(r, statistics));
            const float max = fmaxf(softmax.row_max[r], other.x);
            const float own_factor = exponential<Traits::natural>(softmax.row_max[r] - max);
            const float factor = exponential<Traits::natural>(other.x - max);
            softmax.row_max[r] = max;
            softmax.row_sum[r] = softmax.row_sum[r] * own_factor + other.y * factor;
#pragma unroll
            for (int chunk = 0; chunk < statistics; ++chunk) {
                const float4 four = *reinterpret_cast<const float4*>(shared.data + place(r, chunk));
                float* const values = out + 8 * chunk + 2 * r;
                values[0] = values[0] * own_factor + four.x * factor;
                values[1] = values[1] * own_factor + four.y * factor;
                values[4] = values[4] * own_factor + four.z * factor;
                values[5] = values[5] * own_factor + four.w * factor;
            }
        }
    }
};
