// Combines the parts of a tile that is in several shares (schedule.cuh). CTAs leave the partial of each in scratch memory
// and count the blocks that they have visited. Whichever CTA completes a count combines the partials. None waits.
//
// One CTA would take long to read many partials. So those of a tile in many shares are combined in groups of neighbours
// first, by whichever CTA completes a group, into the partial of the group's first share. CTAs end their shares at about
// the same time, so that groups are combined side by side.
#pragma once
#include "ptx/warpgroup.cuh"
#include "sm90/decode/schedule.cuh"
#include "sm90/decode/store.cuh"

// A barrier of the consumers.
__device__ __forceinline__ void sync_consumers() { named_barrier_sync(1, Traits::consumer_threads); }

// A share has two partials at most: of a tile that begins before it, and of one that ends behind it.
struct Partials {
    float* out;          // (2 · shares, row, column): unnormalised
    float2* statistics;  // (2 · shares, row): maximum and sum
    int* visited;        // (2, 2 · shares): blocks of a group, and of a tile; each by the partial of the first share
    int count;           // 2 · shares

    __device__ __forceinline__ float* row(int partial, int row) const {
        return out + (static_cast<int64_t>(partial) * Traits::query_rows + row) * Traits::value_dim;
    }
    __device__ __forceinline__ float2* row_statistics(int partial, int row) const {
        return statistics + static_cast<int64_t>(partial) * Traits::query_rows + row;
    }
    __device__ __forceinline__ int* group_visited(int partial) const { return visited + partial; }
    __device__ __forceinline__ int* tile_visited(int partial) const { return visited + count + partial; }
};

// The shares that have a tile, numbered from its first. Some may have no part, if the call limits how many there are.
struct Sharers {
    const Tile& tile;
    const int max_parts;
    int first, count;
    int group;  // how many are combined in a first step: all, or the root of how many they are

    static constexpr int most_at_once = 8;

    __device__ __forceinline__ Sharers(const Tile& tile, int max_parts) : tile(tile), max_parts(max_parts) {
        first = tile.shares.of(tile.start);
        count = tile.shares.of(tile.start + tile.units - 1) - first + 1;
        group = count;
        if (count > most_at_once) {
            for (group = 3; group * group < count; ++group) continue;
        }
    }

    // Where in the tile the part of a sharer begins; the last one's ends at that of the next.
    __device__ __forceinline__ int begin(int sharer) const {
        return part_boundary(tile.shares.begin(first + sharer) - tile.start, tile.units, max_parts);
    }
    __device__ __forceinline__ bool has_part(int first, int end) const { return begin(first) < begin(end); }
    __device__ __forceinline__ int partial(int sharer) const { return 2 * (first + sharer) + (sharer == 0); }
};

__device__ __forceinline__ void write_partial(const float (&out)[Traits::value_dim / 2], const OnlineSoftmax& softmax,
                                              const Partials& partials, int partial, const Tile& tile) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float sum = quad_sum(softmax.row_sum[r]);
        const int row = upper_row() + 8 * r;
        if (row >= tile.rows) continue;
        if (lane % 4 == 0) *partials.row_statistics(partial, row) = {softmax.row_max[r], sum};
        float* const values = partials.row(partial, row) + 2 * (lane % 4);
#pragma unroll
        for (int i = 0; i < Traits::value_dim / 2; i += 2) {
            if (row_of(i) == r) *reinterpret_cast<float2*>(values + column_of(i)) = {out[i], out[i + 1]};
        }
    }
}

// Adds `own` blocks to a count, and returns whether that makes it `all`. Partials that others counted are visible then.
__device__ __forceinline__ bool completes(int* visited, int own, int all, const SharedMemory& shared) {
    __threadfence();
    sync_consumers();
    if (threadIdx.x == 0) {
        shared.is_last() = atomicAdd(visited, own) + own == all;
        __threadfence();
    }
    sync_consumers();
    return shared.is_last();
}

// Several partials that become one: those of `count` sharers, each `step` behind the one before. What a partial's row is
// multiplied by is in `factors`, (partial, row), in shared memory.
struct Combination {
    const Partials& partials;
    const Sharers& sharers;
    float* const factors;
    const int first, count, step;

    static constexpr int lanes = 8;  // that share a row of `weigh`

    __device__ __forceinline__ int sharer(int i) const { return first + i * step; }
    __device__ __forceinline__ bool has(int i) const {
        return sharers.has_part(sharer(i), min(sharer(i) + step, sharers.count));
    }
    __device__ __forceinline__ float2 statistics(int i, int row) const {
        return global::shared_among_ctas(partials.row_statistics(sharers.partial(sharer(i)), row));
    }

    // The maximum and the sum of a row, of all partials. A lane reads those of every eighth.
    __device__ __forceinline__ float2 statistics_of_all(int row) const {
        float row_max = initial_max, row_sum = 0;
        auto add = [&](float2 more) {
            const float greater = fmaxf(row_max, more.x);
            row_sum = row_sum * exponential(row_max - greater) + more.y * exponential(more.x - greater);
            row_max = greater;
        };
#pragma unroll 1
        for (int i = threadIdx.x % lanes; i < count; i += lanes) {
            if (has(i)) add(statistics(i, row));
        }
#pragma unroll
        for (int distance = 1; distance < lanes; distance *= 2) {
            add({__shfl_xor_sync(all_lanes, row_max, distance), __shfl_xor_sync(all_lanes, row_sum, distance)});
        }
        return {row_max, row_sum};
    }

    // Makes the factors: what scales a partial to the maximum of all, times `factor_of` the row. Both it and `write`, which
    // one lane calls, get the row and its maximum and sum. Partials that aren't there have a factor of 0.
    template <class FactorOf, class Write>
    __device__ __forceinline__ void weigh(int rows, FactorOf factor_of, Write write) const {
#pragma unroll 1
        for (int first_row = 0; first_row < rows; first_row += 128 / lanes) {
            const int row = first_row + threadIdx.x / lanes;
            const bool is_row = row < rows;
            const float2 all = statistics_of_all(is_row ? row : rows - 1);  // in which all lanes take part
            if (is_row) {
                const float factor = factor_of(row, all);
#pragma unroll 1
                for (int i = threadIdx.x % lanes; i < count; i += lanes) {
                    factors[i * Traits::query_rows + row] = has(i) ? exponential(statistics(i, row).x - all.x) * factor : 0;
                }
            }
            __syncwarp();  // `write` may replace what has been read
            if (is_row && threadIdx.x % lanes == 0) write(row, all);
        }
        sync_consumers();
    }

    // Adds up the rows of the partials, each times its factor, and calls `write` with the sums of four columns of a row.
    template <class Write>
    __device__ __forceinline__ void add(int rows, Write write) const {
        constexpr int row_chunks = Traits::value_dim / 4;
        constexpr int items = 4, at_once = 4;  // loads in flight: for each item, of so many partials
        const int end = rows * row_chunks;
#pragma unroll 1
        for (int first_item = threadIdx.x; first_item < end; first_item += items * 128) {
            float4 sums[items] = {};
#pragma unroll 1
            for (int begin = 0; begin < count; begin += at_once) {
                float4 values[at_once][items];
                for_each<at_once, items>([&](int i, int k) {
                    const int item = min(first_item + k * 128, end - 1);
                    const float* row = partials.row(sharers.partial(sharer(min(begin + i, count - 1))), item / row_chunks);
                    values[i][k] =
                        global::shared_among_ctas(reinterpret_cast<const float4*>(row) + item % row_chunks);
                });
                for_each<at_once, items>([&](int i, int k) {
                    const int item = min(first_item + k * 128, end - 1);
                    const float factor = begin + i < count ? factors[(begin + i) * Traits::query_rows + item / row_chunks] : 0;
                    if (factor == 0) return;  // of no partial: its memory may hold NaN
                    sums[k].x += values[i][k].x * factor, sums[k].y += values[i][k].y * factor;
                    sums[k].z += values[i][k].z * factor, sums[k].w += values[i][k].w * factor;
                });
            }
#pragma unroll
            for (int k = 0; k < items; ++k) {
                const int item = first_item + k * 128;
                if (item < end) write(item / row_chunks, item % row_chunks * 4, sums[k]);
            }
        }
    }

    template <int outer, int inner, class Act>
    __device__ static __forceinline__ void for_each(Act act) {
#pragma unroll
        for (int i = 0; i < outer; ++i) {
#pragma unroll
            for (int k = 0; k < inner; ++k) act(i, k);
        }
    }
};

// Where a tile's rows go, when they are complete.
struct TileResults {
    const Results& results;
    const Shape& shape;
    const Tile& tile;

    __device__ __forceinline__ RowResult result_of(int index, float2 statistics) const {
        return {statistics.x, statistics.y, Row(shape, tile, index).sink(results)};
    }
    __device__ __forceinline__ void write_lse(int index, float2 statistics) const {
        Row(shape, tile, index).lse(results, shape) = result_of(index, statistics).lse;
    }
    __device__ __forceinline__ void write(int index, int column, float4 values) const {
        if (column >= shape.value_dim) return;
        const uint32_t low = convert<Traits::Element>(values.x, values.y);
        const uint32_t high = convert<Traits::Element>(values.z, values.w);
        Traits::Element* const row = Row(shape, tile, index).out(results, shape);
        *reinterpret_cast<uint64_t*>(row + column) = static_cast<uint64_t>(high) << 32 | low;
    }
};

// Leaves the partial of this CTA's part of a tile. If that completes the tile, writes the tile's rows.
__device__ __forceinline__ void share_tile(const float (&out)[Traits::value_dim / 2], const OnlineSoftmax& softmax,
                                           const Partials& partials, const TileResults& to, const SharedMemory& shared,
                                           int max_parts) {
    const Tile& tile = to.tile;
    const Sharers sharers(tile, max_parts);
    const int own = tile.share - sharers.first;
    write_partial(out, softmax, partials, sharers.partial(own), tile);

    wait_for_previous_kernel();  // which zeroes the counts
    int visited = tile.part_end - tile.part_begin;
    const bool has_groups = sharers.group < sharers.count;
    if (has_groups) {
        const int first = own / sharers.group * sharers.group, end = min(first + sharers.group, sharers.count);
        const int partial = sharers.partial(first), of_group = sharers.begin(end) - sharers.begin(first);
        if (!completes(partials.group_visited(partial), visited, of_group, shared)) return;
        const Combination group{partials, sharers, shared.factors(), first, end - first, 1};
        group.weigh(
            tile.rows, [](int, float2) { return 1.0f; },
            [&](int row, float2 all) { *partials.row_statistics(partial, row) = all; });
        group.add(tile.rows, [&](int row, int column, float4 sums) {
            *reinterpret_cast<float4*>(partials.row(partial, row) + column) = sums;
        });
        visited = of_group;
    }
    if (!completes(partials.tile_visited(sharers.partial(0)), visited, tile.units, shared)) return;
    const int step = has_groups ? sharers.group : 1;
    const Combination whole{partials, sharers, shared.factors(), 0, ceil_div(sharers.count, step), step};
    whole.weigh(
        tile.rows, [&](int row, float2 all) { return to.result_of(row, all).factor; },
        [&](int row, float2 all) { to.write_lse(row, all); });
    whole.add(tile.rows, [&](int row, int column, float4 sums) { to.write(row, column, sums); });
}
