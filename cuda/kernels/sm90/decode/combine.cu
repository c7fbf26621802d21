// Runs after the decode kernel: adds up the partials of tiles that CTAs share.
//
// A CTA of the decode kernel leaves up to two partials. `ctas_each` CTAs of this kernel stand for it, half of their
// warps for each partial. The warps that stand for the partials of a tile divide its rows among them, in pieces. So the
// more CTAs have shared a tile, the more combine it. If the call limits into how many parts a tile is split, the warps
// of the first partial have all of its rows.
//
// The kernel takes a few microseconds: for two trips to L2, for the tile and for its partials, and for fetching its
// instructions, of which most run once. So few instructions are better than fast ones (docs/tuning/decode.md).
//
// Defines: ELEMENT, VALUE_DIM and QUERY_ROWS, as in traits.cuh; NATURAL, whether logits are natural; LIMITED, whether
// parts are; CTAS_EACH, as above; THREADS, of a CTA; LOADS, that a lane has in flight.
#include "parameters.cuh"
#include "ptx/async_copy.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/decode/partials.cuh"
#include "sm90/decode/row_result.cuh"

using Element = ELEMENT;
using RowPartials = Partials<QUERY_ROWS, VALUE_DIM>;
constexpr bool natural = NATURAL, limited = LIMITED;
constexpr int threads = THREADS, partial_warps = threads / 32 / 2, ctas_each = CTAS_EACH, loads = LOADS;

// A piece: columns of a row that a warp adds up at a time. The fewer rows there are, the smaller pieces are.
constexpr int piece_columns = QUERY_ROWS >= 32 ? 128 : 4 * QUERY_ROWS;
constexpr int row_pieces = ceil_div(VALUE_DIM, piece_columns);
constexpr int piece_lanes = piece_columns / 4;  // a lane has four columns
constexpr int lane_groups = 32 / piece_lanes;   // each adds up other partials

// A row, of some partials: the maximum of its logits; relative to it, the sum of exponentials and the output.
struct Total {
    float max = initial_max, sum = 0;
    float4 out{};

    // Makes the sum and the output relative to a greater maximum.
    __device__ __forceinline__ void raise(float greater) {
        const float rescale = exponential<natural>(max - greater);
        max = greater, sum *= rescale;
        out.x *= rescale, out.y *= rescale, out.z *= rescale, out.w *= rescale;
    }
    __device__ __forceinline__ void add(float2 statistics, float4 values) {
        const float factor = exponential<natural>(statistics.x - max);
        sum += statistics.y * factor;
        out.x += values.x * factor, out.y += values.y * factor;
        out.z += values.z * factor, out.w += values.w * factor;
    }
};

// The total of a lane's partials: every `lane_groups`-th, from its group's on. Asynchronous copies bring their values,
// to shared memory that the lane has for itself. With loads to registers, ptxas makes some wait for others.
__device__ __forceinline__ Total add_partials(const RowPartials& partials, const SplitTile& tile, int first_place,
                                              int max_parts, int row, int column) {
    constexpr int step = 2 * lane_groups;  // between a lane's partials: each CTA has two
    constexpr int values_step = step * QUERY_ROWS * VALUE_DIM, statistics_step = step * QUERY_ROWS;
    float4* const values = reinterpret_cast<float4*>(dynamic_shared_memory()) + threadIdx.x;
    Total total;
    int index = threadIdx.x % 32 / piece_lanes;
    int slot_rows = index == 0 ? QUERY_ROWS : 0;  // to slot 1, where the first CTA has its partial
#pragma unroll 1
    for (int first = 0; first < tile.sharers; first += loads * lane_groups) {
        const int partial = partial_at(first_place + index, false);
        const float* const from = partials.row(partial, row) + column;
        const float2* const statistics_from = partials.row_statistics(partial, row);
        bool has_part[loads];
        float2 statistics[loads];
#pragma unroll
        for (int i = 0; i < loads; ++i) {
            const int sharer = index + i * lane_groups;
            has_part[i] = sharer < tile.sharers && (!limited || tile.has_part(sharer, max_parts));
            async_copy::load(shared_address(values + i * threads),
                             from + i * values_step + (i == 0 ? slot_rows * VALUE_DIM : 0),
                             has_part[i] && column < VALUE_DIM);
        }
        float max = total.max;
#pragma unroll
        for (int i = 0; i < loads; ++i) {
            statistics[i] = {initial_max, 0};
            if (has_part[i]) statistics[i] = statistics_from[i * statistics_step + (i == 0 ? slot_rows : 0)];
            max = fmaxf(max, statistics[i].x);
        }
        total.raise(max);
        async_copy::wait_for_own();
#pragma unroll
        for (int i = 0; i < loads; ++i) total.add(statistics[i], values[i * threads]);
        index += loads * lane_groups, slot_rows = 0;
    }
    return total;
}

// Adds up the totals of the lanes that have the same columns.
__device__ __forceinline__ void add_lanes(Total& total) {
    float max = total.max;
#pragma unroll
    for (int distance = piece_lanes; distance < 32; distance *= 2) {
        max = fmaxf(max, __shfl_xor_sync(all_lanes, max, distance));
    }
    total.raise(max);
#pragma unroll
    for (int distance = piece_lanes; distance < 32; distance *= 2) {
        total.sum += __shfl_xor_sync(all_lanes, total.sum, distance);
        total.out.x += __shfl_xor_sync(all_lanes, total.out.x, distance);
        total.out.y += __shfl_xor_sync(all_lanes, total.out.y, distance);
        total.out.z += __shfl_xor_sync(all_lanes, total.out.z, distance);
        total.out.w += __shfl_xor_sync(all_lanes, total.out.w, distance);
    }
}

extern "C" __global__ void __launch_bounds__(threads) decode_combine(const __grid_constant__ Parameters parameters) {
    const Shape& shape = parameters.shape;
    const int warp = threadIdx.x / 32, place = blockIdx.x / ctas_each;
    const RowPartials partials{parameters.partial_out, parameters.partial_statistics,
                               reinterpret_cast<SplitTile*>(parameters.split_tiles)};
    wait_for_previous_kernel();
    const SplitTile tile = partials.tiles[partial_at(place, warp < partial_warps)];
    // If parts are limited, sharers but the first may have none, and are then told of no tile.
    const int helpers = limited ? 1 : tile.sharers;
    if (tile.rows == 0 || tile.index >= helpers) return;

    const int first_column = 4 * (threadIdx.x % piece_lanes);
    const int first_piece = (blockIdx.x % ctas_each * partial_warps + warp % partial_warps) * helpers + tile.index;
#pragma unroll 1
    for (int piece = first_piece; piece < tile.rows * row_pieces; piece += ctas_each * partial_warps * helpers) {
        const int row = piece / row_pieces, column = piece % row_pieces * piece_columns + first_column;
        Total total = add_partials(partials, tile, place - tile.index, parameters.division.max_parts, row, column);
        add_lanes(total);
        const Row output_row(shape, tile, row);
        const RowResult<natural> result(total.max, total.sum, sink_of(parameters.sinks, output_row.head));
        if (column == 0 && threadIdx.x % 32 == 0) parameters.lse[output_row.in_lse(shape)] = result.lse;
        if (threadIdx.x % 32 >= piece_lanes || column >= shape.value_dim) continue;
        const uint32_t low = convert<Element>(total.out.x * result.factor, total.out.y * result.factor);
        const uint32_t high = convert<Element>(total.out.z * result.factor, total.out.w * result.factor);
        *reinterpret_cast<uint64_t*>(parameters.out + output_row.in_out(shape) + column) =
            static_cast<uint64_t>(high) << 32 | low;
    }
}
