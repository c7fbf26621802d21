// The order in which a tile of keys visits its blocks of queries, and in which tiles add to a block's dQ.
//
// By default a tile adds as soon as it has something to add, and float32 sums differ in their last bits from run to
// run. With `deterministic` the order is fixed: each block counts the tiles that have added to it, and a tile waits
// until the count is its own `rank`.
//
// A tile waits only for tiles that were handed out before it. CTAs take tiles from a counter, so those tiles are at
// work or done, and the first unfinished tile waits for nobody: the kernel ends with any number of resident CTAs,
// started in any order. So that the waits are short, tiles come to a block in the order in which they were handed out,
// some blocks apart (unit_at):
//
//   BlockOrder::forward    tiles with later keys are handed out first, and visit their blocks from the first to the
//       last. Under a causal mask tiles that start together start a block or more apart. Where all tiles see all
//       blocks, each starts behind the one before it, about a block's time later, and keeps that distance to the end.
//   BlockOrder::backward   tiles with earlier keys, under a causal mask the longer ones, are handed out first, and
//       visit their blocks from the last to the first, so that CTAs end together. For the last of several L2 head
//       groups: by then CTAs have started far enough apart.
//
// Where few heads are at work, that distance is a large part of the run. A block then has several sums
// (Traits::dq_sums), which tiles take in turn (dq_sum_of), each with an order of its own. A tile starts behind the one
// before it of its sum alone, so the distance is divided by the number of sums. The postprocess adds them up.
#pragma once
#include "sm90/backward/tile_scheduler.cuh"

enum class BlockOrder { forward, backward };

__device__ __forceinline__ BlockOrder block_order(int unit_index, const Shape& shape, int l2_head_group) {
    return hands_out_last_first(unit_index, shape, l2_head_group) ? BlockOrder::forward : BlockOrder::backward;
}

// The key tiles that visit a block.
__device__ __forceinline__ Interval visiting_tiles(int batch, int block, const Shape& shape) {
    if constexpr (Traits::mask_metadata) return shape.mask_metadata.block_tiles[batch * shape.query_blocks() + block];
    const int first_query = block * Traits::queries;
    const int last_query = min(first_query + Traits::queries, shape.queries) - 1;
    const int first_key = max(0, first_query + shape.diagonal() - shape.left);
    const int last_key = min(last_query + shape.diagonal() + shape.right, shape.keys - 1);
    return {first_key / Traits::keys, last_key / Traits::keys + 1};
}

// Which of a block's sums a tile adds to: the same one in all blocks.
__device__ __forceinline__ int dq_sum_of(const KeyTile& tile) {
    return tile.first_key / Traits::keys % Traits::dq_sums;
}

// How many tiles add to the block's sum before `tile` does. The numbers of the tiles that visit a block have no gaps,
// so in either order every `dq_sums`-th tile before it shares its sum.
__device__ __forceinline__ int rank_of(const KeyTile& tile, BlockOrder order, int block, const Shape& shape) {
    const Interval tiles = visiting_tiles(tile.batch, block, shape);
    const int number = tile.first_key / Traits::keys;
    return (order == BlockOrder::backward ? number - tiles.begin : tiles.end - 1 - number) / Traits::dq_sums;
}

// One visit of a tile: a block, by its place in QueryBlocks, and a query head of the group.
struct BlockVisit {
    int member, place;

    __device__ int head(const KeyTile& tile, const Shape& shape) const { return tile.head * shape.group + member; }
    __device__ __forceinline__ void advance(const QueryBlocks& blocks, BlockOrder order) {
        if (Traits::deterministic && order == BlockOrder::backward) {
            if (--place < blocks.first) place = blocks.last - 1, ++member;
        } else {
            if (++place == blocks.last) place = blocks.first, ++member;
        }
    }
};
