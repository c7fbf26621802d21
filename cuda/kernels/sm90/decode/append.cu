// Appends new keys, rotated, and new values to the cache, ahead of the decode kernel, where that can't do it by itself.
//
// Defines: ELEMENT, CACHE_ELEMENT, ROTARY, as in traits.cuh.
#include "parameters.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/global.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/decode/append.cuh"

constexpr int threads = 128;

extern "C" __global__ void __launch_bounds__(threads) decode_append(const __grid_constant__ Parameters parameters) {
    const Shape& shape = parameters.shape;
    const AppendCall call{parameters.append, shape, parameters.rotary, parameters.descales};
    const int64_t chunks = static_cast<int64_t>(shape.batch) * shape.appended * shape.key_heads * call.chunks();
    wait_for_previous_kernel();
    // The decode kernel relies on this order: it may read at once what kernels ahead of this one wrote.
    allow_next_kernel();
    const int64_t first = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x, stride = gridDim.x * threads;
#pragma unroll 1
    for (int64_t i = first; i < chunks; i += stride) {
        const int64_t row = i / call.chunks(), token = row / shape.key_heads;
        append_chunk(call, static_cast<int>(token / shape.appended), static_cast<int>(token % shape.appended),
                     static_cast<int>(row % shape.key_heads), static_cast<int>(i % call.chunks()));
    }
    fence_global_for_async();  // the decode kernel reads the cache by TMA
}
