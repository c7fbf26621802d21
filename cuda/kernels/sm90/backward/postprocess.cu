// After the backward kernel: dQ = scale · the float32 sum, from the order of the accumulators (DqBlock) to
// (B, T, N, H) as RESULT. Where a block has several sums they are added up.
#include "parameters.cuh"
#include "sm90/backward/convert_sums.cuh"

constexpr int threads = 256;

// One CTA a block of queries, head and batch row.
extern "C" __global__ void __launch_bounds__(threads)
    backward_postprocess(const __grid_constant__ Parameters parameters) {
    const int queries = parameters.queries, query_heads = parameters.query_heads;
    const int query_blocks = ceil_div(queries, Traits::queries);
    const int64_t block_index = blockIdx.x;
    const int head_index = blockIdx.x / query_blocks, block = blockIdx.x % query_blocks;
    const int head = head_index % query_heads, batch = head_index / query_heads;
    const int first_query = block * Traits::queries;

    const float4* sums = reinterpret_cast<const float4*>(parameters.dq_accum + block_index * DqBlock::elements);
    const int64_t next_sum = static_cast<int64_t>(gridDim.x) * (DqBlock::elements / 4);  // of the same block
    const int64_t first_row = (static_cast<int64_t>(batch) * queries + first_query) * query_heads + head;
    convert_sums<Traits::queries, Traits::head_dim, Traits::dq_sums, threads>(
        sums, next_sum, parameters.scale,
        {parameters.d_query + first_row * parameters.head_dim, static_cast<int64_t>(query_heads) * parameters.head_dim,
         min(Traits::queries, queries - first_query), parameters.head_dim});
}
