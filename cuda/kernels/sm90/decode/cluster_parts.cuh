// Tiles that the CTAs of a cluster share, if a call has so few that each tile may have a cluster of its own. Each CTA
// attends to an equal part of the tile's blocks and leaves its partial in its own shared memory. Then each adds up a
// share of the output, which it reads from all of them.
#pragma once
#include "ptx/cluster.cuh"
#include "sm90/decode/schedule.cuh"
#include "sm90/decode/sum_parts.cuh"

// A CTA's part of the one tile of its cluster. It may be empty: of sequences with few keys, or if a call limits the
// parts.
struct ClusterSchedule {
    const Shape& shape;
    const Division& division;
    bool is_done = false;

    __device__ __forceinline__ ClusterSchedule(const Shape& shape, const Division& division)
        : shape(shape), division(division) {}

    __device__ __forceinline__ bool next(Tile& found) {
        if (is_done) return false;
        is_done = true;
        const int index = blockIdx.x / Traits::cluster, tiles = ceil_div(shape.queries * shape.group, Traits::rows);
        const int tile = index % tiles, head = index / tiles % shape.key_heads, batch = index / tiles / shape.key_heads;
        const Sequence sequence = sequence_at(shape, batch);
        const Interval keys = tile_keys(shape, sequence, tile);
        const int counted_blocks = count_blocks(keys);
        const int step = ceil_div(counted_blocks, min(Traits::cluster, division.max_parts));
        const int begin = min(cluster::rank() * step, counted_blocks), end = min(begin + step, counted_blocks);
        describe(found, shape, sequence, {batch, head, tile}, keys, {counted_blocks, begin, end});
        return true;
    }
};

using TileSchedule = Either<(Traits::cluster > 1), ClusterSchedule, Schedule>::type;

// A CTA's partial in its shared memory, where its blocks of keys and values were.
struct ClusterPartials {
    static constexpr int row_floats = Traits::value_dim + 8;  // so that a warp writes its rows to different banks
    static constexpr int statistics_place = SharedMemory::key;
    static constexpr int rows_place = statistics_place + Traits::query_rows * 8;
    static constexpr int end = rows_place + Traits::query_rows * row_floats * 4;
    static_assert(Traits::cluster == 1 || end <= SharedMemory::gathered_rows, "a partial fits where the blocks were");

    const SharedMemory& shared;

    // `write_partial` takes an index of a partial. A CTA has one here, 0.
    __device__ __forceinline__ float* row(int /* partial */, int row) const {
        return reinterpret_cast<float*>(shared.data + rows_place) + row * row_floats;
    }
    __device__ __forceinline__ float2* row_statistics(int /* partial */, int row) const {
        return reinterpret_cast<float2*>(shared.data + statistics_place) + row;
    }
    // The same of CTA `rank`, as addresses in the cluster.
    __device__ __forceinline__ float4 chunk_of(int rank, int row, int chunk) const {
        const uint32_t own = shared.base + rows_place + row * row_floats * 4 + chunk * 16;
        return cluster::load4(cluster::address_in(rank, own));
    }
    __device__ __forceinline__ float2 statistics_of(int rank, int row) const {
        return cluster::load2(cluster::address_in(rank, shared.base + statistics_place + row * 8));
    }
};

// Adds up four columns of a row.
__device__ __forceinline__ void combine_chunk(const ClusterPartials& partials, const Results& results,
                                              const float* sinks, const Shape& shape, const Tile& tile, int index,
                                              int chunk) {
    float2 statistics[Traits::cluster];
    float4 values[Traits::cluster];
#pragma unroll
    for (int rank = 0; rank < Traits::cluster; ++rank) {
        statistics[rank] = partials.statistics_of(rank, index);
        values[rank] = partials.chunk_of(rank, index, chunk);
    }
    RowSum sum;
    sum.add(statistics, values);
    ResultChunk(results, sinks, shape, tile, index, chunk).write(sum);
}

// All threads of the cluster come together twice: when all partials are there, and when they have been read. Threads
// that neither write nor read partials call this.
__device__ __forceinline__ void meet_twice() {
    cluster::sync();
    cluster::sync();
}

// Writes a CTA's partial and its share of the cluster's results.
__device__ __forceinline__ void combine_in_cluster(const float (&out)[Traits::value_dim / 2],
                                                   const OnlineSoftmax& softmax, const SharedMemory& shared,
                                                   const Results& results, const float* sinks, const Shape& shape,
                                                   const Tile& tile) {
    const ClusterPartials partials{shared};
    sync_consumers();  // all have read the blocks
    write_partial(out, softmax, partials, 0, tile);
    cluster::fence();
    cluster::sync();
    const int row_chunks = shape.value_dim / 4, chunks = tile.rows * row_chunks;
    const int share = ceil_div(chunks, Traits::cluster), first = cluster::rank() * share;
#pragma unroll 1
    for (int i = first + threadIdx.x; i < min(first + share, chunks); i += Traits::consumer_threads) {
        combine_chunk(partials, results, sinks, shape, tile, i / row_chunks, i % row_chunks);
    }
    cluster::sync();
}
