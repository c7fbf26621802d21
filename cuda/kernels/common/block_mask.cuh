// A block mask: which blocks a tile visits, as a list, and which pairs of partial blocks see each other. XLA makes the
// lists. jax_flash/cuda/block_mask.py says what they hold, and describes BlockMask, a part of the kernel's parameters.
//
// BLOCK_MASK, a define: 0 without one; 1 where the user's mask_mod says which pairs see each other; 2 where the kinds
// of their blocks do.
#pragma once
#include "parameters.cuh"
#include "common/position.cuh"
#include "ptx/global.cuh"

#if BLOCK_MASK
#include "user_mask_mod.cuh"

// The blocks that a tile visits.
struct BlockList {
    const int* blocks;
    int full;   // forward: so many at the front need no mask
    int count;  // how many there are
};

// The list of a head's tile `tile`.
__device__ __forceinline__ BlockList block_list(const BlockMask& mask, int batch, int head, int tile) {
    const int64_t number = batch * mask.batch_stride + head * mask.head_stride + tile;
    const int2 counts = global::read_only(reinterpret_cast<const int2*>(mask.counts) + number);
    return {mask.blocks + number * mask.columns, counts.x, counts.y};
}

// The mask for one query of a head.
struct MaskRow {
    const UserMaskMod operands;  // of the batch row
    const int batch, head;  // indices in the whole call; with kinds, the own head
    const Position query;
    const user_mask_mod::Tile tile;
    const user_mask_mod::Row row;

    __device__ __forceinline__ MaskRow(const BlockMask& mask, int own_batch, int own_head, Position query)
        : operands(user_mask_mod::of_batch_row(mask.mask, own_batch)),
          batch(global::read_only(mask.mask.batch_indices + own_batch)),
          head(BLOCK_MASK == 2
                   ? own_head
                   : global::read_only(mask.mask.head_indices + own_batch * mask.mask.head_stride + own_head)),
          query(query),
          tile(user_mask_mod::make_tile(operands, batch)),
          row(user_mask_mod::make_row(operands, tile, batch, head, query)) {}

    __device__ __forceinline__ bool sees(Position key) const {
        const user_mask_mod::Column column = user_mask_mod::make_column(operands, tile, batch, key);
        return user_mask_mod::make_element(operands, tile, row, column, batch, head, query, key).value;
    }
};
#endif
