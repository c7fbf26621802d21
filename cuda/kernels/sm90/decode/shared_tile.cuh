// Tiles that CTAs share through global memory: each leaves a partial (partials.cuh), and the last one adds them up. One
// CTA of a pair does so for both.
//
// Nodes of several partials do so, where many CTAs share a tile: who is last at a node, of the CTAs that have its
// partials, adds them up and arrives at the node above, until a node has all. Results don't depend on who is last, as a
// node adds its partials in their order. Of two partials of many rows, the last CTA adds the other one to what it has
// in registers, which makes the same sum on both sides.
//
// Nodes count arrivals in scratch memory, which holds anything at first. So a count has a tag of 48 bits, which the
// first CTA to arrive sets. The last one removes it, so that the next call finds none. Data of another kind would be
// taken for a count if they had exactly these bits at its place. As floats of 32 and of 16 bits they are a NaN that no
// arithmetic makes; of random words one in 2^48 has them.
//
// A CTA does this twice at most, and mostly at its end. So what takes time are trips to L2, and instructions that have
// to be fetched.
#pragma once
#include "ptx/global.cuh"
#include "sm90/decode/consumer_call.cuh"
#include "sm90/decode/sum_parts.cuh"

// A count of arrivals: none.
constexpr uint64_t no_arrivals = 0xffb5a7c3e19d0000, tag_bits = ~uint64_t{0xffff};

// A node. Its partials are what the sharers first, first + 2^step_log2, … have left at a level.
struct Node {
    int sharers;  // of the tile
    int level, step_log2, first;

    // The node that has what sharer `sharer` leaves, on the lowest level.
    __device__ __forceinline__ Node(int sharers, int sharer)
        : sharers(sharers), level(0), step_log2(0), first(sharer & -node_partials) {}

    __device__ __forceinline__ int partials() const {
        return min(((sharers - 1 - first) >> step_log2) + 1, node_partials);
    }
    __device__ __forceinline__ bool has_all() const { return node_partials << step_log2 >= sharers; }

    // Becomes the node above, which has this one's sum.
    __device__ __forceinline__ void climb() {
        ++level, step_log2 += node_partials_log2;
        first &= -(node_partials << step_log2);
    }
};

struct SharedTile {
    const ConsumerCall& call;
    const Tile& tile;
    const int first_place;  // of the tile's first sharer
    Node node;              // where this CTA arrives next

    __device__ __forceinline__ SharedTile(const ConsumerCall& call, const Tile& tile)
        : call(call), tile(tile), first_place(own_place(call.division) - tile.index), node(tile.sharers, tile.index) {}

    // Leaves what this CTA, or its pair, made of its part. Returns whether the accumulators then are the whole tile's,
    // so that their rows are to be written; if not, another CTA writes them, or this one has.
    __device__ __forceinline__ bool combine(float (&out)[Traits::value_dim / 2], OnlineSoftmax& softmax) {
        if (tile.sharers == 1) return true;
        write_partial(out, softmax, call.partials, partial_of(tile.index), tile);
        if constexpr (Traits::query_rows >= 32) {
            if (tile.sharers == 2) {
                const bool is_last = arrives_last();
                if (is_last) add_other(out, softmax);
                return is_last;
            }
        }
#pragma unroll 1
        while (arrives_last()) {
            if (node.has_all()) {
                add_up<true>();
                break;
            }
            add_up<false>();
            node.climb();
        }
        return false;
    }

private:
    __device__ __forceinline__ int partial_of(int sharer) const { return shared_partial(first_place, sharer); }

    // All consumers arrive at the node together, when they have written its partial. Returns whether all others have.
    __device__ __forceinline__ bool arrives_last() const {
        const int others = node.partials() - 1;
        sync_consumers();
        if (others == 0) return true;
        bool is_last = false;
        if (threadIdx.x == 0) {
            uint64_t* const count = call.partials.arrivals_at(partial_of(node.first), node.level);
            // If all others are there, nobody has to see this CTA's partial.
            const uint64_t found = global::compare_and_swap(count, no_arrivals + others, 0);
            is_last = found == no_arrivals + others;
            if (!is_last) {
                if ((found & tag_bits) != no_arrivals) global::replace(count, found, no_arrivals);
                is_last = global::fetch_and_count(count) == no_arrivals + others;
                if (is_last) *count = 0;
            }
        }
        return any_consumer(is_last);
    }

    // Adds the other CTA's partial. Both sides round alike: no product is fused with a sum.
    __device__ __forceinline__ void add_other(float (&out)[Traits::value_dim / 2], OnlineSoftmax& softmax) const {
        const int other = partial_of(1 - tile.index), lane = threadIdx.x % 32;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = upper_row() + 8 * r;
            const float own_sum = quad_sum(softmax.row_sum[r]);
            if (row >= tile.rows) continue;
            const float2 statistics = *call.partials.row_statistics(other, row);
            const float* const values = call.partials.row(other, row) + 2 * (lane % 4);
            const float max = fmaxf(softmax.row_max[r], statistics.x);
            const float own_factor = exponential<Traits::natural>(softmax.row_max[r] - max);
            const float factor = exponential<Traits::natural>(statistics.x - max);
            const float sum = sum_of_products(own_sum, own_factor, statistics.y, factor);
            softmax.row_max[r] = max, softmax.row_sum[r] = lane % 4 == 0 ? sum : 0;
#pragma unroll
            for (int i = 0; i < Traits::value_dim / 2; i += 2) {
                if (row_of(i) != r) continue;
                const float2 pair = *reinterpret_cast<const float2*>(values + column_of(i));
                out[i] = sum_of_products(out[i], own_factor, pair.x, factor);
                out[i + 1] = sum_of_products(out[i + 1], own_factor, pair.y, factor);
            }
        }
    }
    __device__ static __forceinline__ float sum_of_products(float a, float b, float c, float d) {
        return __fadd_rn(__fmul_rn(a, b), __fmul_rn(c, d));
    }

    // How many partials are loaded at once: as many as possible, as each trip to L2 takes long. But with few partials,
    // fewer instructions take less time, and with blocks of 128 keys ptxas lacks registers for more.
    static constexpr int few_loads = 4, most_loads = Traits::keys == 128 ? few_loads : node_partials;

    // Adds up the partials of the node, four columns of a row at a time. The sum is the tile's result, or takes the
    // first partial's place.
    template <bool is_result>
    __device__ __forceinline__ void add_up() const {
        constexpr int row_chunks = Traits::value_dim / 4;
        const int first = partial_of(node.first);
        const bool are_many = most_loads > few_loads && node.partials() > few_loads;
#pragma unroll 1
        for (int i = threadIdx.x; i < tile.rows * row_chunks; i += Traits::consumer_threads) {
            const int row = i / row_chunks, chunk = i % row_chunks;
            const ResultChunk result(call.results, call.sinks, call.shape, tile, row, chunk);
            const RowSum sum = are_many ? sum_of<most_loads>(row, chunk) : sum_of<few_loads>(row, chunk);
            if constexpr (is_result) {
                if (4 * chunk < call.shape.value_dim) result.write(sum);
            } else {
                if (chunk == 0) *call.partials.row_statistics(first, row, node.level + 1) = {sum.max, sum.sum};
                *(reinterpret_cast<float4*>(call.partials.row(first, row)) + chunk) = sum.out;
            }
        }
    }

    // The sum of the node's partials, of four columns of a row.
    template <int loads>
    __device__ __forceinline__ RowSum sum_of(int row, int chunk) const {
        const int first = partial_of(node.first);
        // From a partial to the next. Sharers have theirs in slot 0, but the first one (partial_at).
        const int step = 2 << node.step_log2;
        int to_next = node.first == 0 ? step - 1 : step;
        const float2* statistics_at = call.partials.row_statistics(first, row, node.level);
        const float4* values_at = reinterpret_cast<const float4*>(call.partials.row(first, row)) + chunk;
        RowSum sum;
#pragma unroll 1
        for (int left = node.partials(); left > 0; left -= loads) {
            float2 statistics[loads];
            float4 values[loads];
#pragma unroll
            for (int i = 0; i < loads; ++i) {
                statistics[i] = {initial_max, 0};
                values[i] = {};
                if (i < left) statistics[i] = *statistics_at, values[i] = *values_at;
                statistics_at += to_next * TilePartials::statistics_step;
                values_at += to_next * TilePartials::values_step;
                to_next = step;
            }
            sum.add(statistics, values);
        }
        return sum;
    }
};

// A tile of a call whose CTAs share none through global memory.
struct OwnTile {
    __device__ __forceinline__ OwnTile(const ConsumerCall&, const Tile&) {}
    __device__ __forceinline__ bool combine(float (&)[Traits::value_dim / 2], OnlineSoftmax&) const { return true; }
};

using Sharing = Either<Traits::split, SharedTile, OwnTile>::type;
