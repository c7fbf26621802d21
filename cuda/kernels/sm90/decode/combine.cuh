// Combines the parts of a tile that several CTAs share (schedule.cuh). Each leaves its partial in scratch memory and counts
// the blocks that it has visited. The CTA that completes the tile's count combines all partials. None waits.
#pragma once
#include "ptx/warpgroup.cuh"
#include "sm90/decode/schedule.cuh"
#include "sm90/decode/store.cuh"

constexpr int consumer_barrier = 1;  // a named barrier of the consumer's threads
__device__ __forceinline__ void sync_consumers() {
    named_barrier_sync(consumer_barrier, Traits::consumer_threads);
}

// A CTA has two partials at most: of a tile that begins before its share, and of one that ends behind it.
struct Partials {
    float* out;           // (2 · CTAs, row, column): unnormalised
    float2* statistics;   // (2 · CTAs, row): maximum and sum
    int* visited;         // (CTAs): blocks, of the shared tile that begins in the CTA's share

    __device__ static __forceinline__ int64_t index(int cta, int part_begin) { return 2 * cta + (part_begin == 0); }
    __device__ __forceinline__ float* row(int64_t partial, int row) const {
        return out + (partial * Traits::rows + row) * Traits::value_dim;
    }
    __device__ __forceinline__ float2* row_statistics(int64_t partial, int row) const {
        return statistics + partial * Traits::rows + row;
    }
};

__device__ __forceinline__ void write_partial(const float (&out)[Traits::value_dim / 2], const OnlineSoftmax& softmax,
                                              const Partials& partials, const Tile& tile) {
    const int lane = threadIdx.x % 32;
    const int64_t partial = Partials::index(blockIdx.x, tile.part_begin);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float sum = quad_sum(softmax.row_sum[r]);
        const int row = threadIdx.x / 32 * 16 + lane / 4 + 8 * r;
        if (row >= tile.rows) continue;
        if (lane % 4 == 0) *partials.row_statistics(partial, row) = {softmax.row_max[r], sum};
        float* const values = partials.row(partial, row) + 2 * (lane % 4);
#pragma unroll
        for (int i = 0; i < Traits::value_dim / 2; i += 2) {
            if (row_of(i) == r) *reinterpret_cast<float2*>(values + column_of(i)) = {out[i], out[i + 1]};
        }
    }
}

// Counts this CTA's part of the tile, and returns whether that completes it.
__device__ __forceinline__ bool completes(const Partials& partials, const SharedMemory& shared, const Tile& tile) {
    __threadfence();
    sync_consumers();
    if (threadIdx.x == 0) {
        const int own = tile.part_end - tile.part_begin;
        shared.is_last() = atomicAdd(partials.visited + tile.first_cta, own) + own == tile.units;
        __threadfence();
    }
    sync_consumers();
    return shared.is_last();
}

// Calls `visit` with each of a tile's partials, in the order of its keys.
template <class Visit>
__device__ __forceinline__ void for_each_partial(const Tile& tile, int max_parts, Visit visit) {
    int begin = 0;
#pragma unroll 1
    for (int cta = 0; begin < tile.units; ++cta) {  // from the tile's first
        const int end = part_boundary((cta + 1) * tile.share - tile.start, tile.units, max_parts);
        if (begin < end) visit(Partials::index(tile.first_cta + cta, begin));
        begin = end;
    }
}

// Combines the partials of a tile and writes its rows. Four columns of a row are a thread's.
__device__ __forceinline__ void combine(const Partials& partials, const Results& results, const Shape& shape,
                                        const Tile& tile, int max_parts) {
    constexpr int row_chunks = Traits::value_dim / 4;
#pragma unroll 1
    for (int i = threadIdx.x; i < tile.rows * row_chunks; i += Traits::consumer_threads) {
        const int index = i / row_chunks, column = i % row_chunks * 4;
        float row_max = initial_max, row_sum = 0;
        for_each_partial(tile, max_parts, [&](int64_t partial) {
            row_max = fmaxf(row_max, global::shared_among_ctas(partials.row_statistics(partial, index)).x);
        });
        float4 out = {0, 0, 0, 0};
        for_each_partial(tile, max_parts, [&](int64_t partial) {
            const float2 statistics = global::shared_among_ctas(partials.row_statistics(partial, index));
            const float4 values =
                global::shared_among_ctas(reinterpret_cast<const float4*>(partials.row(partial, index) + column));
            const float rescale = exponential(statistics.x - row_max);
            row_sum += statistics.y * rescale;
            out.x += values.x * rescale, out.y += values.y * rescale;
            out.z += values.z * rescale, out.w += values.w * rescale;
        });
        const Row row(shape, tile, index);
        const RowResult result(row_max, row_sum, row.sink(results));
        if (column == 0) row.lse(results, shape) = result.lse;
        if (column < shape.value_dim) {
            const uint32_t low = convert<Traits::Element>(out.x * result.factor, out.y * result.factor);
            const uint32_t high = convert<Traits::Element>(out.z * result.factor, out.w * result.factor);
            *reinterpret_cast<uint64_t*>(row.out(results, shape) + column) = static_cast<uint64_t>(high) << 32 | low;
        }
    }
}
