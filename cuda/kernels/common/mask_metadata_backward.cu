// Mask metadata of the backward kernel (BACKWARD_PARAMETERS in jax_flash/cuda/mask_metadata.py): which queries see each
// key, which query blocks are full for each group of 64 keys, and which query blocks each tile of keys visits.
// mask_metadata_order computes the rest, which depends on several tiles.
#include "parameters.cuh"
#include "ptx/dependent_launch.cuh"
#include "common/segment_ranges.cuh"
#include "common/sequences.cuh"

constexpr int threads = 128;
constexpr int group_keys = 64;

// A warp computes a tile of `groups` groups of keys.
extern "C" __global__ void __launch_bounds__(threads)
    mask_metadata_backward(const __grid_constant__ Parameters parameters) {
    wait_for_previous_kernel();
    allow_next_kernel();
    const Sequences sequences{parameters.sequences};
    const int batch = parameters.batch, tiles = parameters.tiles, groups = parameters.groups;
    const int queries = sequences.queries, keys = sequences.keys, block_queries = parameters.block_queries;
    const int* key_segments = parameters.key_segments;
    const int lane = threadIdx.x % 32, index = blockIdx.x * (threads / 32) + threadIdx.x / 32;
    if (parameters.diagonals != nullptr) {
        const int64_t tokens = static_cast<int64_t>(batch) * queries;
        for (int64_t token = static_cast<int64_t>(index) * 32 + lane; token < tokens; token += gridDim.x * threads) {
            const int batch_row = token / queries, query = token % queries;
            parameters.diagonals[token] = sequences.of_query(batch_row, query).diagonal(query);
        }
    }
    const int batch_row = index / tiles, tile = index % tiles;
    if (batch_row >= batch) return;

    const int blocks = ceil_div(queries, block_queries);
    const SegmentRange* block_segments = parameters.block_segments + static_cast<int64_t>(batch_row) * blocks;
    const int64_t first_token = static_cast<int64_t>(batch_row) * keys;
    IntervalExtent tile_extent;
    SegmentRange tile_segments;
    for (int group = 0; group < groups; ++group) {
        IntervalExtent group_extent;
        SegmentRange group_segments;
        const int first_key = (tile * groups + group) * group_keys + lane;
#pragma unroll
        for (int key = first_key; key < first_key + group_keys; key += 32) {
            Interval seen_by = empty_interval;  // also of keys beyond the last: no block is full for such a group
            if (key < keys) {
                seen_by = sequences.queries_of(sequences.of_key(batch_row, key), key);
                if (key_segments != nullptr) group_segments.add(key_segments[first_token + key]);
            }
            parameters.key_queries[static_cast<int64_t>(batch_row) * tiles * groups * group_keys + key] = seen_by;
            tile_extent.add(seen_by);
            // The last block may be full although it holds fewer queries.
            if (seen_by.end >= queries) seen_by.end = blocks * block_queries;
            group_extent.add(seen_by);
        }
        group_extent.reduce();
        Interval full = group_extent.full_blocks(block_queries);
        if (key_segments != nullptr) {
            group_segments.reduce();
            tile_segments.add(group_segments);
            full = blocks_of_one_segment(group_segments, block_segments, {full.begin, min(full.end, blocks)});
        }
        if (lane == 0) parameters.group_blocks[static_cast<int64_t>(index) * groups + group] = full;
    }
    tile_extent.reduce();
    Interval visited = tile_extent.visited_blocks(block_queries);
    if (key_segments != nullptr) visited = blocks_sharing_segments(tile_segments, block_segments, visited);
    if (lane == 0) parameters.tile_blocks[index] = visited;
}
