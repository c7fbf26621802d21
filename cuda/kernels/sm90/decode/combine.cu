// Runs after the decode kernel: adds up the partials of tiles that CTAs share. At most one shared tile begins in the
// share of each decode CTA. `row_groups` CTAs of this kernel combine it, a warp a row.
//
// Defines: ELEMENT, VALUE_DIM and QUERY_ROWS, as in traits.cuh; NATURAL, whether logits are natural; ROWS, of a CTA.
#include "parameters.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/decode/partials.cuh"
#include "sm90/decode/row_result.cuh"

using Element = ELEMENT;
using RowPartials = Partials<QUERY_ROWS, VALUE_DIM>;
constexpr bool natural = NATURAL;
constexpr int chunk_count = ceil_div(VALUE_DIM, 4 * 32);  // of four columns, that a lane has
constexpr int at_once = 16 / chunk_count;                 // partials whose loads are in flight

// A row, of the partials so far: the maximum of its logits, and the sum of exponentials and the output relative to it.
struct Total {
    float max = initial_max, sum = 0;
    float4 out[chunk_count] = {};

    // Makes what there is relative to the greater of two maxima.
    __device__ __forceinline__ void raise(float other_max) {
        const float greater = fmaxf(max, other_max);
        const float rescale = exponential<natural>(max - greater);
        max = greater, sum *= rescale;
#pragma unroll
        for (int k = 0; k < chunk_count; ++k) {
            out[k].x *= rescale, out[k].y *= rescale, out[k].z *= rescale, out[k].w *= rescale;
        }
    }
    __device__ __forceinline__ void add(int k, float4 values, float factor) {
        out[k].x += values.x * factor, out[k].y += values.y * factor;
        out[k].z += values.z * factor, out[k].w += values.w * factor;
    }
};

__device__ __forceinline__ int chunk_of(int k) { return k * 32 + threadIdx.x % 32; }
__device__ __forceinline__ bool has_chunk(int k) { return 4 * chunk_of(k) < VALUE_DIM; }

// Adds up the partials of a row.
__device__ __forceinline__ void add_partials(Total& total, const RowPartials& partials, const Sharers& sharers,
                                             int row) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int first = 0; first < sharers.count; first += 32) {  // each lane knows of one partial
        const int own = first + lane;
        const bool has_part = own < sharers.count && sharers.has_part(own);
        const uint32_t parts = __ballot_sync(all_lanes, has_part);
        float2 statistics = {initial_max, 0};
        if (has_part) statistics = *partials.row_statistics(sharers.partial(own), row);
        float factor = 0;
#pragma unroll 1
        for (int begin = 0; begin < 32 && first + begin < sharers.count; begin += at_once) {
            float4 values[at_once][chunk_count];
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                if (!(parts >> (begin + i) & 1)) continue;
                const float* from = partials.row(sharers.partial(first + begin + i), row);
#pragma unroll
                for (int k = 0; k < chunk_count; ++k) {
                    if (has_chunk(k)) values[i][k] = reinterpret_cast<const float4*>(from)[chunk_of(k)];
                }
            }
            if (begin == 0) {  // meanwhile
                total.raise(warp_max(statistics.x));
                factor = has_part ? exponential<natural>(statistics.x - total.max) : 0;
                total.sum += warp_sum(statistics.y * factor);
            }
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                const float of_part = __shfl_sync(all_lanes, factor, begin + i);
                if (!(parts >> (begin + i) & 1)) continue;  // memory that nobody wrote
#pragma unroll
                for (int k = 0; k < chunk_count; ++k) {
                    if (has_chunk(k)) total.add(k, values[i][k], of_part);
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * ROWS) decode_combine(const __grid_constant__ Parameters parameters) {
    constexpr int row_groups = ceil_div(QUERY_ROWS, ROWS);
    const Shape& shape = parameters.shape;
    const RowPartials partials{parameters.partial_out, parameters.partial_statistics,
                               reinterpret_cast<Tile*>(parameters.split_tiles)};
    const int row = blockIdx.x % row_groups * ROWS + threadIdx.x / 32;
    wait_for_previous_kernel();
    const Tile tile = partials.tiles[blockIdx.x / row_groups];
    if (!tile.exists() || row >= tile.rows) return;

    Total total;
    add_partials(total, partials, {tile, parameters.division}, row);
    const Row place(shape, tile, row);
    const RowResult<natural> result(total.max, total.sum, sink_of(parameters.sinks, place.head));
    if (threadIdx.x % 32 == 0) parameters.lse[place.in_lse(shape)] = result.lse;
    Element* const out = parameters.out + place.in_out(shape);
#pragma unroll
    for (int k = 0; k < chunk_count; ++k) {
        if (4 * chunk_of(k) >= shape.value_dim) continue;
        const float4 x = total.out[k];
        const uint32_t low = convert<Element>(x.x * result.factor, x.y * result.factor);
        const uint32_t high = convert<Element>(x.z * result.factor, x.w * result.factor);
        reinterpret_cast<uint64_t*>(out)[chunk_of(k)] = static_cast<uint64_t>(high) << 32 | low;
    }
}
