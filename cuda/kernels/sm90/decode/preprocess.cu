// Runs before the decode kernel: appends new keys, rotated, and new values to the cache. Of varlen sequences it also
// writes the rows of queries that belong to none.
//
// Defines: ELEMENT, CACHE_ELEMENT, ROTARY, as in traits.cuh.
#include "parameters.cuh"
#include "ptx/global.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/decode/append.cuh"

constexpr int threads = 128;

// Writes 0 to element `index` of out (T, N, V), and -inf to its lse, if its query belongs to no sequence.
__device__ __forceinline__ void write_unused(const Parameters& parameters, int64_t index) {
    const Shape& shape = parameters.shape;
    const int column = static_cast<int>(index % shape.value_dim);
    const int64_t row = index / shape.value_dim;
    const int head = static_cast<int>(row % shape.query_heads), query = static_cast<int>(row / shape.query_heads);
    if (query >= shape.query_offsets[0] && query < shape.query_offsets[shape.batch]) return;
    parameters.out[index].bits = 0;
    if (column == 0) parameters.lse[static_cast<int64_t>(head) * shape.queries + query] = -infinity;
}

extern "C" __global__ void __launch_bounds__(threads)
    decode_preprocess(const __grid_constant__ Parameters parameters) {
    const Shape& shape = parameters.shape;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x, stride = gridDim.x * threads;
    wait_for_previous_kernel();
    // The decode kernel relies on this order: it may read at once what kernels ahead of this one wrote.
    allow_next_kernel();
    const AppendCall call{parameters.append, shape, parameters.rotary, parameters.descales};
    const int64_t rows = static_cast<int64_t>(shape.batch) * shape.appended * shape.key_heads;
#pragma unroll 1
    for (int64_t i = first; i < rows * call.chunks(); i += stride) {
        const int64_t row = i / call.chunks(), token = row / shape.key_heads;
        append_chunk(call, static_cast<int>(token / shape.appended), static_cast<int>(token % shape.appended),
                     static_cast<int>(row % shape.key_heads), static_cast<int>(i % call.chunks()));
    }
    if (shape.query_offsets) {
        const int64_t elements = static_cast<int64_t>(shape.queries) * shape.query_heads * shape.value_dim;
#pragma unroll 1
        for (int64_t i = first; i < elements; i += stride) write_unused(parameters, i);
    }
    global::fence_proxy_async();  // the decode kernel reads the cache by TMA
}
