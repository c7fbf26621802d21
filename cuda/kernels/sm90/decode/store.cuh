// Where the rows of a tile are in the results, and how a consumer warp writes them.
#pragma once
#include "ptx/global.cuh"
#include "sm90/decode/softmax.cuh"

struct Results {
    Traits::Element* out;  // (B, T, N, V)
    float* lse;            // (B, N, T)
    const float* sinks;    // (N); null if there are none
};

// A row of a tile: one query of a head.
struct Row {
    int head, token;  // the query, among those of all sequences
    int query;        // … of its sequence

    __device__ __forceinline__ Row(const Shape& shape, const Tile& tile, int row) {
        const int index = tile.first_row + row;
        query = index / shape.group;
        head = tile.key_head * shape.group + index % shape.group;
        token = tile.first_query + query;
    }

    __device__ __forceinline__ Traits::Element* out(const Results& results, const Shape& shape) const {
        return results.out + (static_cast<int64_t>(token) * shape.query_heads + head) * shape.value_dim;
    }
    __device__ __forceinline__ float& lse(const Results& results, const Shape& shape) const {
        const int batch = token / shape.queries;  // 0 if sequences are packed
        const int64_t first = (static_cast<int64_t>(batch) * shape.query_heads + head) * shape.queries;
        return results.lse[first + token % shape.queries];
    }
    __device__ __forceinline__ float sink(const Results& results) const {
        return results.sinks ? global::read_only(results.sinks + head) : -infinity;
    }
};

// The upper of the two rows that a thread holds of the warpgroup's accumulators.
__device__ __forceinline__ int upper_row() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }

// Normalises and writes row `r` of the thread's two from the accumulators of the output. A row is four lanes'.
template <int r>
__device__ __forceinline__ void write_row(const float (&out)[Traits::value_dim / 2], const OnlineSoftmax& softmax,
                                          const Results& results, const Shape& shape, const Tile& tile) {
    const int lane = threadIdx.x % 32, index = upper_row() + 8 * r;
    const float sum = quad_sum(softmax.row_sum[r]);
    if (index >= tile.rows) return;
    const Row row(shape, tile, index);
    const RowResult result(softmax.row_max[r], sum, row.sink(results));
    if (lane % 4 == 0) row.lse(results, shape) = result.lse;
    Traits::Element* const elements = row.out(results, shape);
#pragma unroll
    for (int i = 0; i < Traits::value_dim / 2; i += 2) {
        const int column = column_of(i) + 2 * (lane % 4);
        if (row_of(i) == r && column < shape.value_dim) {
            *reinterpret_cast<uint32_t*>(elements + column) =
                convert<Traits::Element>(out[i] * result.factor, out[i + 1] * result.factor);
        }
    }
}
