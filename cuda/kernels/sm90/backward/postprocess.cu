// After the backward kernel: dQ = scale · the float32 sum, from the order of the accumulators (DqBlock) to
// (B, T, N, H) in the operands' type. Where a block has several sums they are added up, from the first to the last.
#include "parameters.cuh"
#include "ptx/math.cuh"
#include "sm90/backward/traits.cuh"

constexpr int threads = 256;
// Elements from row to row of the staged block. Eight more than it has, so that the eight rows that a warp
// writes at once lie in different banks.
constexpr int staged_stride = Traits::head_dim + 8;

// One CTA a block of queries, head and batch row.
extern "C" __global__ void __launch_bounds__(threads)
    backward_postprocess(const __grid_constant__ Parameters parameters) {
    const int queries = parameters.queries, query_heads = parameters.query_heads;
    const float scale = parameters.scale;
    __shared__ __align__(16) uint16_t staged[Traits::queries * staged_stride];
    const int query_blocks = ceil_div(queries, Traits::queries);
    const int64_t block_index = blockIdx.x;
    const int head_index = blockIdx.x / query_blocks, block = blockIdx.x % query_blocks;
    const int head = head_index % query_heads, batch = head_index / query_heads;

    const float4* sums = reinterpret_cast<const float4*>(parameters.dq_accum + block_index * DqBlock::elements);
    const int64_t next_sum = static_cast<int64_t>(gridDim.x) * (DqBlock::elements / 4);  // of the same block
    const int thread = threadIdx.x % 128;  // that had the accumulators
#pragma unroll 4
    for (int i = threadIdx.x; i < DqBlock::elements / 4; i += threads) {
        const int row_tile = i / 128 / DqBlock::chunks, chunk = i / 128 % DqBlock::chunks;
        const int row = 64 * row_tile + thread / 32 * 16 + thread % 32 / 4;
        float4 sum = sums[i];
#pragma unroll
        for (int other = 1; other < Traits::dq_sums; ++other) {
            const float4 x = sums[other * next_sum + i];
            sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
        }
        uint16_t* destination = staged + row * staged_stride + chunk * 8 + thread % 4 * 2;
        *reinterpret_cast<uint32_t*>(destination) = convert<Traits::Element>(sum.x * scale, sum.y * scale);
        *reinterpret_cast<uint32_t*>(destination + 8 * staged_stride) =
            convert<Traits::Element>(sum.z * scale, sum.w * scale);
    }
    __syncthreads();

    const int row_vectors = parameters.head_dim / 8;
    const int rows = min(Traits::queries, queries - block * Traits::queries);
    for (int i = threadIdx.x; i < rows * row_vectors; i += threads) {
        const int row = i / row_vectors, vector = i - row * row_vectors;
        const int64_t query = static_cast<int64_t>(batch) * queries + block * Traits::queries + row;
        parameters.d_query[(query * query_heads + head) * row_vectors + vector] =
            *reinterpret_cast<const uint4*>(staged + row * staged_stride + vector * 8);
    }
}
