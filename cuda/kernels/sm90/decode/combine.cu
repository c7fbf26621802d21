// Runs after the decode kernel: adds up the partials of tiles that CTAs share. Each of those has a share in which one such
// tile begins, at most, and here are its CTAs. A warp has a row of the tile.
//
// Defines: ELEMENT, VALUE_DIM and QUERY_ROWS, as in traits.cuh; NATURAL, whether logits are natural; ROWS, of a CTA.
#include "parameters.cuh"
#include "ptx/global.cuh"
#include "ptx/types.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/decode/partials.cuh"
#include "sm90/decode/row_result.cuh"

using Element = ELEMENT;
using RowPartials = Partials<QUERY_ROWS, VALUE_DIM>;
constexpr bool natural = NATURAL;
constexpr uint32_t all_lanes = 0xffffffff;
constexpr int at_once = 8;                                // partials whose loads are in flight
constexpr int chunk_count = ceil_div(VALUE_DIM, 4 * 32);  // of four columns, that a lane has

__device__ __forceinline__ float2 merged(float2 a, float2 b) {
    const float max = fmaxf(a.x, b.x);
    return {max, a.y * exponential<natural>(a.x - max) + b.y * exponential<natural>(b.x - max)};
}

// The maximum and the sum of a row, of all partials.
__device__ __forceinline__ float2 statistics_of(const RowPartials& partials, const Sharers& sharers, int row) {
    float2 all = {initial_max, 0};
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < sharers.count; i += 32) {
        if (!sharers.has_part(i)) continue;
        all = merged(all, global::shared_among_ctas(partials.row_statistics(sharers.partial(i), row)));
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const float max = __shfl_xor_sync(all_lanes, all.x, distance);
        const float sum = __shfl_xor_sync(all_lanes, all.y, distance);
        all = merged(all, {max, sum});
    }
    return all;
}

extern "C" __global__ void __launch_bounds__(32 * ROWS) decode_combine(const __grid_constant__ Parameters parameters) {
    constexpr int row_groups = ceil_div(QUERY_ROWS, ROWS);
    const int lane = threadIdx.x % 32, row = blockIdx.x % row_groups * ROWS + threadIdx.x / 32;
    const RowPartials partials{parameters.partial_out, parameters.partial_statistics,
                               reinterpret_cast<Tile*>(parameters.split_tiles)};
    wait_for_previous_kernel();
    const Tile tile = partials.tiles[blockIdx.x / row_groups];
    if (!tile.exists() || row >= tile.rows) return;

    const Shape& shape = parameters.shape;
    const Sharers sharers(tile, parameters.max_parts);
    const Row place(shape, tile, row);
    const float2 all = statistics_of(partials, sharers, row);
    const RowResult<natural> result(all.x, all.y, sink_of(parameters.sinks, place.head));
    if (lane == 0) parameters.lse[place.in_lse(shape)] = result.lse;

    float4 sums[chunk_count] = {};
#pragma unroll 1
    for (int first = 0; first < sharers.count; first += 32) {  // each lane knows of one partial
        const int own = first + lane;
        const bool has_part = own < sharers.count && sharers.has_part(own);
        const uint32_t parts = __ballot_sync(all_lanes, has_part);
        float factor = 0;
        if (has_part) {
            const float2 statistics = global::shared_among_ctas(partials.row_statistics(sharers.partial(own), row));
            factor = exponential<natural>(statistics.x - all.x) * result.factor;
        }
#pragma unroll 1
        for (int begin = 0; begin < min(32, sharers.count - first); begin += at_once) {
            float4 values[at_once][chunk_count];
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                if (!(parts >> (begin + i) & 1)) continue;
                const float* from = partials.row(sharers.partial(first + begin + i), row);
#pragma unroll
                for (int k = 0; k < chunk_count; ++k) {
                    const int chunk = k * 32 + lane;
                    if (4 * chunk >= VALUE_DIM) continue;
                    values[i][k] = global::shared_among_ctas(reinterpret_cast<const float4*>(from) + chunk);
                }
            }
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                const float of_part = __shfl_sync(all_lanes, factor, begin + i);
                if (!(parts >> (begin + i) & 1)) continue;  // memory that nobody wrote
#pragma unroll
                for (int k = 0; k < chunk_count; ++k) {
                    sums[k].x += values[i][k].x * of_part, sums[k].y += values[i][k].y * of_part;
                    sums[k].z += values[i][k].z * of_part, sums[k].w += values[i][k].w * of_part;
                }
            }
        }
    }

    Element* const out = parameters.out + place.in_out(shape);
#pragma unroll
    for (int k = 0; k < chunk_count; ++k) {
        const int column = 4 * (k * 32 + lane);
        if (column >= shape.value_dim) continue;
        const uint32_t low = convert<Element>(sums[k].x, sums[k].y), high = convert<Element>(sums[k].z, sums[k].w);
        *reinterpret_cast<uint64_t*>(out + column) = static_cast<uint64_t>(high) << 32 | low;
    }
}
