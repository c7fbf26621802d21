// Mask metadata of the forward kernel (FORWARD_PARAMETERS in jax_flash/cuda/mask_metadata.py): which keys each row
// sees, and which key blocks each group of 64 rows visits.
#include "parameters.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/warpgroup.cuh"
#include "common/segment_ranges.cuh"
#include "common/sequences.cuh"

constexpr int threads = 128;
constexpr int group_rows = 64;

// A warp computes a group of rows. With PackGQA, `pack_gqa` rows are of one query.
extern "C" __global__ void __launch_bounds__(threads)
    mask_metadata_forward(const __grid_constant__ Parameters parameters) {
    wait_for_previous_kernel();
    allow_next_kernel();
    const Sequences sequences{parameters.sequences};
    const int groups = parameters.groups, pack_gqa = parameters.pack_gqa, block_keys = parameters.block_keys;
    const int* query_segments = parameters.query_segments;
    const int lane = threadIdx.x % 32, index = blockIdx.x * (threads / 32) + threadIdx.x / 32;
    const int batch_row = index / groups, group = index % groups;
    if (batch_row >= parameters.batch) return;

    IntervalExtent extent;
    SegmentRange segments;
#pragma unroll
    for (int row_in_group = lane; row_in_group < lane + group_rows; row_in_group += 32) {
        const int64_t row = static_cast<int64_t>(index) * group_rows + row_in_group;
        const int query = (group * group_rows + row_in_group) / pack_gqa;
        // Rows beyond the last query count neither as seeing keys nor as not seeing them.
        Interval keys{0, 0};
        int segment = 0;
        if (query < sequences.queries) {
            const int64_t token = static_cast<int64_t>(batch_row) * sequences.queries + query;
            const Sequence sequence = sequences.of_query(batch_row, query);
            keys = sequences.keys_of(sequence, query);
            extent.add(keys);
            if (query_segments != nullptr) {
                segment = query_segments[token];
                segments.add(segment);
            }
            // All rows of a query write the same value.
            if (parameters.diagonals != nullptr) parameters.diagonals[token] = sequence.diagonal(query);
        }
        parameters.row_keys[row] = keys;
        if (parameters.row_segments != nullptr) parameters.row_segments[row] = segment;
    }
    extent.reduce();
    Interval visited = extent.visited_blocks(block_keys), full = extent.full_blocks(block_keys);
    if (query_segments != nullptr) {
        segments.reduce();
        const int blocks = ceil_div(sequences.keys, block_keys);
        const SegmentRange* block_segments = parameters.block_segments + static_cast<int64_t>(batch_row) * blocks;
        visited = blocks_sharing_segments(segments, block_segments, visited);
        full = blocks_of_one_segment(segments, block_segments, {full.begin, min(full.end, blocks)});
    }
    if (lane == 0) parameters.group_blocks[index] = {visited.begin, visited.end, full.begin, full.end};
    fence_global_for_async();  // the forward kernel reads row_keys and row_segments by bulk copies
}
