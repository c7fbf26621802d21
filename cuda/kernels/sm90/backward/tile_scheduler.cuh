// Which tile of keys a CTA works on, which blocks of queries see it, and which scores are masked.
#pragma once
#include "sm90/backward/shape.cuh"

struct KeyTile {
    int first_key;
    int head, batch;  // of keys
};

// The query blocks [first, last) in which some query sees some key of a tile.
struct QueryBlocks {
    int first, last;

    __device__ int count() const { return max(last - first, 0); }
};

// Heads that share the turns of tile `index`'s section.
__device__ __forceinline__ int section_width(int index, const Shape& shape, int section_heads) {
    const int section = index / (section_heads * ceil_div(shape.keys, Traits::keys));
    return min(section_heads, shape.key_heads * shape.batch - section * section_heads);
}

// Whether the key tiles of `index`'s section go from the last to the first, where they add to dQ in turns and see
// different blocks: but for the last of several sections, see backward_order.cuh.
__device__ __forceinline__ bool goes_last_first(int index, const Shape& shape, int section_heads) {
    const int section = index / (section_heads * ceil_div(shape.keys, Traits::keys));
    return section == 0 || (section + 1) * section_heads < shape.key_heads * shape.batch;
}

// Tile `index` of the grid. Heads go by in sections of `section_heads`, chosen so that what a section
// reads and adds to stays in L2; within a section the key tiles go from the first, which most queries see
// where attention is causal, to the last, and all heads of the section share each turn; or from the last.
__device__ __forceinline__ KeyTile key_tile_at(int index, const Shape& shape, int section_heads, bool last_first) {
    const int key_tiles = ceil_div(shape.keys, Traits::keys);
    const int section = index / (section_heads * key_tiles);
    const int in_section = index - section * section_heads * key_tiles;
    const int width = section_width(index, shape, section_heads);
    const int turn = in_section / width;
    const int head = section * section_heads + in_section - turn * width;
    return {(last_first ? key_tiles - 1 - turn : turn) * Traits::keys, head % shape.key_heads, head / shape.key_heads};
}

__device__ __forceinline__ QueryBlocks query_blocks(const KeyTile& tile, const Shape& shape) {
    const int last_key = min(tile.first_key + Traits::keys, shape.keys) - 1;
    const int begin = max(0, tile.first_key - shape.diagonal() - shape.right);
    const int end = min(shape.queries, last_key - shape.diagonal() + shape.left + 1);
    if (end <= begin) return {0, 0};
    return {begin / Traits::queries, ceil_div(end, Traits::queries)};
}

// The other way about: how many key tiles see some query of `count` blocks.
__device__ __forceinline__ int key_tile_count(int block, int count, const Shape& shape) {
    const int first = block * Traits::queries + shape.diagonal();
    const int last = min((block + count) * Traits::queries, shape.queries) - 1 + shape.diagonal();
    const int begin = max(0, first - shape.left), end = min(shape.keys, last + shape.right + 1);
    return end <= begin ? 0 : ceil_div(end, Traits::keys) - begin / Traits::keys;
}

// A piece of dQ to write: 64 rows of a block of a head, of those of all batch rows.
struct DqJob {
    int head_index, block, row_tile;
};

// Pieces in the order in which they tend to be complete: heads by sections, as key tiles (key_tile_at); within a
// section the query heads that come first in their groups; of these the first blocks of all.
__device__ __forceinline__ DqJob d_query_job(int job, const Shape& shape, int section_heads) {
    const int key_heads = shape.key_heads * shape.batch;
    const int pieces = shape.query_blocks() * DqBlock::row_tiles;  // of a head
    const int section = job / (section_heads * shape.group * pieces);
    int rest = job - section * section_heads * shape.group * pieces;
    const int width = min(section_heads, key_heads - section * section_heads);
    const int member = rest / (width * pieces);
    rest -= member * width * pieces;
    const int piece = rest / width, key_head = section * section_heads + rest - piece * width;
    return {key_head * shape.group + member, piece / DqBlock::row_tiles, piece % DqBlock::row_tiles};
}

// Whether a score of keys [first_key, first_key + 64) and the block's queries may be masked. Rows of
// queries that are not there need no mask: their lse makes P zero.
__device__ __forceinline__ bool crosses(int first_key, int block, const Shape& shape) {
    const int last_key = first_key + 63;
    const int first_aligned = block * Traits::queries + shape.diagonal();
    const int last_aligned = first_aligned + Traits::queries - 1;
    return last_key >= shape.keys || last_key > first_aligned + shape.right || first_key < last_aligned - shape.left;
}

// Zeroes the masked elements of Pᵀ, an accumulator of 64 keys × a block of queries. `key` is the thread's
// first row, its other one is 8 below.
template <int count>
__device__ __forceinline__ void mask(float (&probabilities)[count], int key, int block, const Shape& shape) {
    const int first_column = block * Traits::queries + threadIdx.x % 4 * 2;
    constexpr int never = 1 << 30;
    int first_query[2], last_query[2];  // that see the row, counted from the thread's first column
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int aligned = key + 8 * r - shape.diagonal() - first_column;
        first_query[r] = key + 8 * r < shape.keys ? aligned - shape.right : never;
        last_query[r] = aligned + shape.left;
    }
#pragma unroll
    for (int i = 0; i < count; ++i) {
        const int r = i / 2 % 2, column = i / 4 * 8 + i % 2;
        if (column < first_query[r] || column > last_query[r]) probabilities[i] = 0;
    }
}
