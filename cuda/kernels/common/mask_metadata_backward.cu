// What the backward kernel has to know where what queries see is data: Bounds in backward_traits.cuh. What depends on
// several tiles is left to mask_metadata_order.
#include "parameters.cuh"
#include "common/segment_ranges.cuh"
#include "common/sequences.cuh"

constexpr int threads = 128;

// One warp a tile, of `groups` groups of 64 keys.
extern "C" __global__ void __launch_bounds__(threads)
    mask_metadata_backward(const __grid_constant__ Parameters parameters) {
    wait_for_previous_kernel();
    allow_next_kernel();
    const Sequences all{parameters.sequences};
    const int batch = parameters.batch, tiles = parameters.tiles, groups = parameters.groups;
    const int queries = all.queries, keys = all.keys, block_queries = parameters.block_queries;
    const int* key_segments = parameters.key_segments;
    const int lane = threadIdx.x % 32, index = blockIdx.x * (threads / 32) + threadIdx.x / 32;
    if (parameters.diagonals != nullptr) {
        const int64_t tokens = static_cast<int64_t>(batch) * queries;
        for (int64_t token = static_cast<int64_t>(index) * 32 + lane; token < tokens; token += gridDim.x * threads) {
            const int batch_row = token / queries, query = token % queries;
            parameters.diagonals[token] = all.of_query(batch_row, query).diagonal(query);
        }
    }
    const int batch_row = index / tiles, tile = index % tiles;
    if (batch_row >= batch) return;

    const int blocks = ceil_div(queries, block_queries);
    const int2* of_blocks = parameters.block_segments + static_cast<int64_t>(batch_row) * blocks;
    const int64_t first_token = static_cast<int64_t>(batch_row) * keys;
    Extent of_tile;
    SegmentIds ids_of_tile;
    for (int group = 0; group < groups; ++group) {
        Extent of_group;
        SegmentIds ids;
        const int first_key = (tile * groups + group) * 64 + lane;
#pragma unroll
        for (int key = first_key; key < first_key + 64; key += 32) {
            int2 seen_by{nowhere, 0};  // also where there is no key: nobody sees such a group whole
            if (key < keys) {
                seen_by = all.queries_of(all.of_key(batch_row, key), key);
                if (key_segments != nullptr) ids.add(key_segments[first_token + key]);
            }
            parameters.key_queries[static_cast<int64_t>(batch_row) * tiles * groups * 64 + key] = seen_by;
            of_tile.add(seen_by);
            // A last block of queries that are not there is whole without them.
            if (seen_by.y >= queries) seen_by.y = blocks * block_queries;
            of_group.add(seen_by);
        }
        of_group.gather();
        int2 whole = of_group.whole_blocks(block_queries);
        if (key_segments != nullptr) {
            ids.gather();
            ids_of_tile.add(ids);
            whole = blocks_of_one_segment(ids, of_blocks, {whole.x, min(whole.y, blocks)});
        }
        if (lane == 0) parameters.group_blocks[static_cast<int64_t>(index) * groups + group] = whole;
    }
    of_tile.gather();
    int2 some = of_tile.seen_blocks(block_queries);
    if (key_segments != nullptr) some = blocks_that_meet(ids_of_tile, of_blocks, some);
    if (lane == 0) parameters.tile_blocks[index] = some;
}
