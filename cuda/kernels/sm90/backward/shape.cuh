// What the main backward kernel is told of a call besides its operands.
#pragma once
#include "parameters.cuh"
#include "sm90/backward/traits.cuh"

// The units of work of a key tile. With one, a CTA or cluster sees to the tile's key head as a whole, for all query
// heads of its group. With few key heads there are too few such tiles, of too unequal length, to keep all
// multiprocessors at work. Then a unit has the query heads of one head share, and of the blocks that they visit one of
// `parts`; what units contribute to dK and dV is added up in float32 (key_sums.cuh).
struct Units {
    int shares_of_head;  // head shares of a key head
    int parts_of_blocks;

    __device__ int head_shares() const { return Traits::key_sums ? shares_of_head : 1; }
    __device__ int parts() const { return Traits::key_sums ? parts_of_blocks : 1; }
};

// Sizes of the call. A side of the window that is not bounded is so large that it never bounds.
struct Shape {
    int queries, keys;      // T, S
    int head_shares;        // of a batch row: K times those of a key head, see Units
    int group;              // query heads of a head share
    int batch;              // B
    int left, right;        // the window
    Units units;
    MaskMetadata mask_metadata;  // of a call with MASK_METADATA
#if BLOCK_MASK
    BlockMask block_mask;
#endif

    __device__ int query_heads() const { return head_shares * group; }
    __device__ int key_heads() const { return head_shares / units.head_shares(); }
    // Of a head share of a batch row.
    __device__ int key_head(int head_share) const { return head_share / units.head_shares(); }
    __device__ int key_tiles() const { return ceil_div(keys, Traits::keys); }
    __device__ int query_blocks() const { return ceil_div(queries, Traits::queries); }
    __device__ int spans() const { return ceil_div(query_blocks(), DqBlock::span); }  // of a head
    __device__ int diagonal() const { return keys - queries; }  // query i is aligned with key i + diagonal
};
