// Which rows a tile has, and which keys those see: the place to change for another tile range.
#pragma once
#include "sm90/forward/mask_metadata.cuh"
#include "sm90/forward/traits.cuh"

__device__ __forceinline__ int row_count(const Shape& shape) { return shape.queries * Traits::pack; }
__device__ __forceinline__ int row_tiles(const Shape& shape) { return ceil_div(row_count(shape), Traits::rows); }

// The first row tiles, whose rows are all before the first that sees a key: there the window's right bound hides all.
// None are set apart where it is data what rows see.
__device__ __forceinline__ int blind_row_tiles(const Shape& shape) {
    if constexpr (!Traits::has_right || Traits::bounds) return 0;
    const int first_query = min(max(shape.queries - shape.keys - shape.right, 0), shape.queries);
    return first_query * Traits::pack / Traits::rows;
}

// First key that `row` does not see on the right, and first key that it sees on the left. Alignment is to
// the bottom right: the last query's diagonal is the last key.
__device__ __forceinline__ int right_end(int row, const Shape& shape) {
    if constexpr (!Traits::has_right) return shape.keys;
    return min(shape.keys, row / Traits::pack + shape.keys - shape.queries + shape.right + 1);
}
__device__ __forceinline__ int left_begin(int row, const Shape& shape) {
    if constexpr (!Traits::has_left) return 0;
    return max(0, row / Traits::pack + shape.keys - shape.queries - shape.left);
}

// Of a group of 64 rows, where it is data: the blocks of keys [x, y) that some row sees, and [z, w) that all see whole.
__device__ __forceinline__ int4 group_blocks(int batch, int group, const Shape& shape) {
    const int64_t first = static_cast<int64_t>(batch) * row_tiles(shape) * Traits::consumers;
    return global::read_only(shape.bounds.group_blocks + first + group);
}

// The key blocks [first, last) that rows [first_row, first_row + rows) see.
struct KeyBlocks {
    int first, last;
};

__device__ __forceinline__ KeyBlocks key_blocks(int first_row, const Shape& shape) {
    const int last_row = min(first_row + Traits::rows, row_count(shape)) - 1;
    const int begin = left_begin(first_row, shape);
    const int end = right_end(last_row, shape);
    if (end <= begin) return {0, 0};
    return {begin / Traits::keys, ceil_div(end, Traits::keys)};
}

// The same of a tile; where it is data, what any of its warpgroups' rows see.
__device__ __forceinline__ KeyBlocks key_blocks(int first_row, int batch, const Shape& shape) {
    if constexpr (!Traits::bounds) return key_blocks(first_row, shape);
    KeyBlocks blocks{1 << 30, 0};
#pragma unroll
    for (int consumer = 0; consumer < Traits::consumers; ++consumer) {
        const int4 group = group_blocks(batch, first_row / 64 + consumer, shape);
        if (group.x < group.y) blocks = {min(blocks.first, group.x), max(blocks.last, group.y)};
    }
    return blocks.last == 0 ? KeyBlocks{0, 0} : blocks;
}

// Tile `index` of the walk over all that see keys. Packs of heads go by in sections of `section_heads`, chosen so that
// the keys and values of a section stay in L2; within a section the tiles go from the last, which is the longest
// where attention is causal, to the first, and all packs of the section share each turn.
__device__ __forceinline__ Tile tile_at(int index, const Shape& shape, int section_heads) {
    const int turns = row_tiles(shape) - blind_row_tiles(shape);
    const int packs = shape.query_heads / Traits::pack;
    const int section = index / (section_heads * turns);
    const int in_section = index - section * section_heads * turns;
    const int width = min(section_heads, packs * shape.batch - section * section_heads);
    const int turn = in_section / width;
    const int pack = section * section_heads + in_section - turn * width;
    const int first_row = (row_tiles(shape) - 1 - turn) * Traits::rows;
    const KeyBlocks blocks = key_blocks(first_row, pack / packs, shape);
    return {first_row, pack % packs * Traits::pack, pack / packs, blocks.first, blocks.last, -1};
}

__device__ __forceinline__ int blind_tile_count(const Shape& shape) {
    return blind_row_tiles(shape) * (shape.query_heads / Traits::pack) * shape.batch;
}
__device__ __forceinline__ Tile blind_tile_at(int index, const Shape& shape) {
    const int packs = shape.query_heads / Traits::pack;
    const int pack = index / blind_row_tiles(shape);
    const int first_row = (index - pack * blind_row_tiles(shape)) * Traits::rows;
    return {first_row, pack % packs * Traits::pack, pack / packs, 0, 0, -1};
}

// The piece of a cut tile that starts at `block` of the row of blocks, for a CTA whose share ends at `end`.
__device__ __forceinline__ Tile piece_at(int block, int end, const Cut& cut, const Shape& shape,
                                         int section_heads) {
    const int index = block / cut.tile_blocks, first_block = index * cut.tile_blocks;
    Tile tile = tile_at(cut.whole_tiles + index, shape, section_heads);
    tile.first = block - first_block;
    tile.last = min(end - first_block, cut.tile_blocks);
    tile.cut = index;
    return tile;
}
