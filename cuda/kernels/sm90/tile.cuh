// Which query tile a CTA works on next, and which keys that tile sees.
#pragma once
#include "forward_traits.cuh"

struct Tile {
    int first_row;  // of the query tile
    int head, batch;
};

// Tile `index` of the walk. Heads go by in sections of `section_heads`, chosen so that the
// keys and values of a section stay in L2; within a section the query tiles go from the last, which is
// the longest where attention is causal, to the first, and all heads of the section share each turn.
__device__ __forceinline__ Tile tile_at(int index, const Shape& shape, int section_heads) {
    const int query_tiles = ceil_div(shape.queries, Traits::rows);
    const int heads = shape.query_heads * shape.batch;
    const int section = index / (section_heads * query_tiles);
    const int in_section = index - section * section_heads * query_tiles;
    const int width = min(section_heads, heads - section * section_heads);
    const int turn = in_section / width;
    const int head = section * section_heads + in_section - turn * width;
    return {(query_tiles - 1 - turn) * Traits::rows, head % shape.query_heads, head / shape.query_heads};
}

__device__ __forceinline__ int tile_count(const Shape& shape) {
    return ceil_div(shape.queries, Traits::rows) * shape.query_heads * shape.batch;
}

// The key blocks [first, last) that rows [first_row, first_row + rows) see.
struct KeyBlocks {
    int first, last;

    __device__ int count() const { return max(last - first, 0); }
};

// First key that `row` does not see on the right, and first key that it sees on the left. Alignment is to
// the bottom right: the last query's diagonal is the last key.
__device__ __forceinline__ int right_end(int row, const Shape& shape) {
    return Traits::has_right ? min(shape.keys, row + shape.keys - shape.queries + shape.right + 1) : shape.keys;
}
__device__ __forceinline__ int left_begin(int row, const Shape& shape) {
    return Traits::has_left ? max(0, row + shape.keys - shape.queries - shape.left) : 0;
}

__device__ __forceinline__ KeyBlocks key_blocks(int first_row, const Shape& shape) {
    const int last_row = min(first_row + Traits::rows, shape.queries) - 1;
    const int begin = left_begin(first_row, shape);
    const int end = right_end(last_row, shape);
    if (end <= begin) return {0, 0};
    return {begin / Traits::keys, ceil_div(end, Traits::keys)};
}
