// How a consumer warp writes the rows of a tile, or of a part of it.
#pragma once
#include "ptx/global.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/decode/partials.cuh"
#include "sm90/decode/softmax.cuh"

struct Results {
    Traits::Element* out;  // (B, T, N, V)
    float* lse;            // (B, N, T)
};

// The natural logit of a head's sink, -inf if heads have none.
__device__ __forceinline__ float sink_of(const float* sinks, int head) {
    return sinks ? global::read_only(sinks + head) : -infinity;
}

using TilePartials = Partials<Traits::query_rows, Traits::value_dim>;

// A barrier of the consumers.
__device__ __forceinline__ void sync_consumers() { named_barrier_sync(1, Traits::consumer_threads); }

// The same; returns whether `value` is true for any of them.
__device__ __forceinline__ bool any_consumer(bool value) {
    return named_barrier_any(1, Traits::consumer_threads, value);
}

// The upper of the two rows that a thread holds of the warpgroup's accumulators.
__device__ __forceinline__ int upper_row() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }

// The rows of a tile that a thread has, at most.
constexpr int thread_rows = Traits::query_rows > 8 ? 2 : 1;

// Normalises and writes row `r` of the thread's two from the accumulators of the output. A row is four lanes'.
template <int r>
__device__ __forceinline__ void write_row(const float (&out)[Traits::value_dim / 2], const OnlineSoftmax& softmax,
                                          const Results& results, const float* sinks, const Shape& shape,
                                          const Tile& tile) {
    const int lane = threadIdx.x % 32, index = upper_row() + 8 * r;
    const float sum = quad_sum(softmax.row_sum[r]);
    if (index >= tile.rows) return;
    const Row row(shape, tile, index);
    const RowResult<Traits::natural> result(softmax.row_max[r], sum, sink_of(sinks, row.head));
    if (lane % 4 == 0) results.lse[row.in_lse(shape)] = result.lse;
    Traits::Element* const elements = results.out + row.in_out(shape);
#pragma unroll
    for (int i = 0; i < Traits::value_dim / 2; i += 2) {
        const int column = column_of(i) + 2 * (lane % 4);
        if (row_of(i) == r && column < shape.value_dim) {
            *reinterpret_cast<uint32_t*>(elements + column) =
                convert<Traits::Element>(out[i] * result.factor, out[i + 1] * result.factor);
        }
    }
}

// Writes what a CTA made of its part of a tile, for whoever adds up the parts.
template <class AnyPartials>
__device__ __forceinline__ void write_partial(const float (&out)[Traits::value_dim / 2], const OnlineSoftmax& softmax,
                                              const AnyPartials& partials, int partial, const Tile& tile) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < thread_rows; ++r) {
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
