// Tiles that the CTAs of a cluster share, if a call has so few that each tile may have a cluster of its own. Each CTA
// attends to an equal part of the tile's blocks, and then adds up some units of the output. All of them store their
// partials of these units in its shared memory, by asynchronous stores, which a barrier there counts. So a CTA waits
// for data alone.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
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

// If partials lie where blocks were, all threads of the cluster come together when all blocks have been read. Those
// that store nothing call this, too.
__device__ __forceinline__ void meet_before_partials() {
    if constexpr (Traits::cluster > 1 && !Traits::partials_apart) {
        cluster::fence();
        cluster::sync();
    }
}

// The partials that CTAs store in each other's shared memory. The output consists of units: 16 columns of a group of
// eight rows. A unit's partial is a chunk: of each lane 16 bytes, four of its accumulators (row_of). Each CTA adds up
// `own_units`, the last ones fewer or none. For each group of rows that these are in, there is one more chunk: of each
// lane its row's maximum and its own sum.
struct ClusterPartials {
    static constexpr int row_units = Traits::row_units, own_units = Traits::own_units;
    static constexpr int warps = ceil_div(Traits::query_rows, 16);  // that have rows of a tile

    const SharedMemory& shared;
    const int rank = cluster::rank(), lane = threadIdx.x % 32;

    // Stores this CTA's partial.
    __device__ __forceinline__ void send(const float (&out)[Traits::value_dim / 2],
                                         const OnlineSoftmax& softmax) const {
        const int warp = warps > 1 ? threadIdx.x / 32 : 0;
        if (threadIdx.x >= 32 * warps) return;
#pragma unroll
        for (int r = 0; r < thread_rows; ++r) {
            const float4 of_row = {softmax.row_max[r], softmax.row_sum[r], 0, 0};
#pragma unroll
            for (int i = 0; i < row_units; ++i) {
                const int unit = (2 * warp + r) * row_units + i, owner = unit / own_units;
                const int index = unit % own_units;
                const uint32_t there = cluster::address_in(owner, shared.base);
                const uint32_t full = cluster::address_in(owner, shared.partials_full());
                const float* const values = out + 8 * i + 2 * r;
                if (i % own_units == 0) cluster::store_async(there + statistics_place(rank, index), of_row, full);
                cluster::store_async(there + place(rank, index), {values[0], values[1], values[4], values[5]}, full);
            }
        }
    }

    // Adds up this CTA's units of all CTAs, and writes the results.
    __device__ __forceinline__ void add_up(const Results& results, const float* sinks, const Shape& shape,
                                           const Tile& tile) const {
        const int own = min(Traits::units - rank * own_units, own_units);
        if (own <= 0) return;
        const int chunks = own + ceil_div(own, row_units);
        const int bytes = Traits::cluster * chunks * Traits::chunk_bytes;
        if (threadIdx.x == 0) mbarrier::arrive_expect(shared.partials_full(), bytes);
        mbarrier::wait(shared.partials_full(), 0);
#pragma unroll 1
        for (int index = threadIdx.x / 32; index < own; index += Traits::consumer_threads / 32) {
            RowSum sum = sum_of(index);
            sum.sum = quad_sum(sum.sum);
            const int unit = rank * own_units + index, row = unit / row_units * 8 + lane / 4;
            if (row < tile.rows) write(sum, results, sinks, shape, Row(shape, tile, row), unit % row_units);
        }
    }

private:
    // Where CTA `rank` stores this lane's bytes of a unit …
    __device__ __forceinline__ int place(int rank, int index) const {
        const int chunk = rank * (own_units + Traits::own_groups) + index;
        return SharedMemory::partials + chunk * Traits::chunk_bytes + 16 * lane;
    }
    // … and of the unit's group of rows.
    __device__ __forceinline__ int statistics_place(int rank, int index) const {
        return place(rank, own_units + index / row_units);
    }

    // The sum is the lane's, of its columns of the keys.
    __device__ __forceinline__ RowSum sum_of(int index) const {
        float2 of_row[Traits::cluster];
        float4 values[Traits::cluster];
#pragma unroll
        for (int rank = 0; rank < Traits::cluster; ++rank) {
            of_row[rank] = *reinterpret_cast<const float2*>(shared.data + statistics_place(rank, index));
            values[rank] = *reinterpret_cast<const float4*>(shared.data + place(rank, index));
        }
        RowSum sum;
        sum.add(of_row, values);
        return sum;
    }

    __device__ __forceinline__ void write(const RowSum& sum, const Results& results, const float* sinks,
                                          const Shape& shape, const Row& row, int row_unit) const {
        const RowResult<Traits::natural> result(sum.max, sum.sum, sink_of(sinks, row.head));
        if (row_unit == 0 && lane % 4 == 0) results.lse[row.in_lse(shape)] = result.lse;
        const int column = 16 * row_unit + 2 * (lane % 4);
        Traits::Element* const to = results.out + row.in_out(shape) + column;
        const uint32_t left = convert<Traits::Element>(sum.out.x * result.factor, sum.out.y * result.factor);
        const uint32_t right = convert<Traits::Element>(sum.out.z * result.factor, sum.out.w * result.factor);
        if (column < shape.value_dim) *reinterpret_cast<uint32_t*>(to) = left;
        if (column + 8 < shape.value_dim) *reinterpret_cast<uint32_t*>(to + 8) = right;
    }
};

// Combines the partials of the cluster's tile.
__device__ __forceinline__ void combine_in_cluster(const float (&out)[Traits::value_dim / 2],
                                                   const OnlineSoftmax& softmax, const SharedMemory& shared,
                                                   const Results& results, const float* sinks, const Shape& shape,
                                                   const Tile& tile) {
    const ClusterPartials partials{shared};
    meet_before_partials();
    partials.send(out, softmax);
    partials.add_up(results, sinks, shape, tile);
}
