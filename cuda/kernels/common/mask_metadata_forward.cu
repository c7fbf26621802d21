// What the forward kernel has to know where what rows see is data: Bounds in forward_traits.cuh.
#include "parameters.cuh"
#include "common/segment_ranges.cuh"
#include "common/sequences.cuh"

constexpr int threads = 128;

// One warp a group of 64 rows, `pack` of which are of one query.
extern "C" __global__ void __launch_bounds__(threads)
    mask_metadata_forward(const __grid_constant__ Parameters parameters) {
    wait_for_previous_kernel();
    allow_next_kernel();
    const Sequences all{parameters.sequences};
    const int groups = parameters.groups, pack = parameters.pack, block_keys = parameters.block_keys;
    const int* query_segments = parameters.query_segments;
    const int lane = threadIdx.x % 32, index = blockIdx.x * (threads / 32) + threadIdx.x / 32;
    const int batch_row = index / groups, group = index % groups;
    if (batch_row >= parameters.batch) return;

    Extent extent;
    SegmentIds ids;
#pragma unroll
    for (int in_group = lane; in_group < lane + 64; in_group += 32) {
        const int64_t row = static_cast<int64_t>(index) * 64 + in_group;
        const int query = (group * 64 + in_group) / pack;
        int2 seen{0, 0};  // by a row that is not there, and its segment
        int segment = 0;
        if (query < all.queries) {
            const int64_t token = static_cast<int64_t>(batch_row) * all.queries + query;
            const Sequence of = all.of_query(batch_row, query);
            seen = all.keys_of(of, query);
            extent.add(seen);
            if (query_segments != nullptr) {
                segment = query_segments[token];
                ids.add(segment);
            }
            // All rows of a query write the same.
            if (parameters.diagonals != nullptr) parameters.diagonals[token] = of.diagonal(query);
        }
        parameters.row_keys[row] = seen;
        if (parameters.row_segments != nullptr) parameters.row_segments[row] = segment;
    }
    extent.gather();
    int2 some = extent.seen_blocks(block_keys), whole = extent.whole_blocks(block_keys);
    if (query_segments != nullptr) {
        ids.gather();
        const int blocks = ceil_div(all.keys, block_keys);
        const int2* of_blocks = parameters.block_segments + static_cast<int64_t>(batch_row) * blocks;
        some = blocks_that_meet(ids, of_blocks, some);
        whole = blocks_of_one_segment(ids, of_blocks, {whole.x, min(whole.y, blocks)});
    }
    if (lane == 0) parameters.group_blocks[index] = {some.x, some.y, whole.x, whole.y};
}
