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

// Number of heads in the L2 head group of tile `index`: the last group may be smaller.
__device__ __forceinline__ int head_group_width(int index, const Shape& shape, int l2_head_group) {
    const int head_group = index / (l2_head_group * ceil_div(shape.keys, Traits::keys));
    return min(l2_head_group, shape.key_heads * shape.batch - head_group * l2_head_group);
}

// With `deterministic`: whether the key tiles of `index`'s head group are handed out from the last to the first. So they
// are but for the last of several groups, see dq_order.cuh.
__device__ __forceinline__ bool hands_out_last_first(int index, const Shape& shape, int l2_head_group) {
    const int head_group = index / (l2_head_group * ceil_div(shape.keys, Traits::keys));
    return head_group == 0 || (head_group + 1) * l2_head_group < shape.key_heads * shape.batch;
}

// Tile `index` in the order in which tiles are handed out. Heads come in groups of `l2_head_group`, chosen so that what
// a group reads and adds to stays in L2. In each round of a group every head has one tile. Key tiles go from the first,
// which most queries see where attention is causal, to the last; or from the last to the first.
__device__ __forceinline__ KeyTile key_tile_at(int index, const Shape& shape, int l2_head_group, bool last_first) {
    const int key_tiles = ceil_div(shape.keys, Traits::keys);
    const int head_group = index / (l2_head_group * key_tiles);
    const int in_group = index - head_group * l2_head_group * key_tiles;
    const int width = head_group_width(index, shape, l2_head_group);
    const int round = in_group / width;
    const int head = head_group * l2_head_group + in_group - round * width;
    return {(last_first ? key_tiles - 1 - round : round) * Traits::keys, head % shape.key_heads, head / shape.key_heads};
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

// Pieces in the order in which they tend to be complete: by L2 head groups, as key tiles (key_tile_at); within one, the
// query heads that come first in the group of their key head; of these the first blocks of all.
__device__ __forceinline__ DqJob d_query_job(int job, const Shape& shape, int l2_head_group) {
    const int key_heads = shape.key_heads * shape.batch;
    const int pieces = shape.query_blocks() * DqBlock::row_tiles;  // of a head
    const int head_group = job / (l2_head_group * shape.group * pieces);
    int rest = job - head_group * l2_head_group * shape.group * pieces;
    const int width = min(l2_head_group, key_heads - head_group * l2_head_group);
    const int member = rest / (width * pieces);
    rest -= member * width * pieces;
    const int piece = rest / width, key_head = head_group * l2_head_group + rest - piece * width;
    return {key_head * shape.group + member, piece / DqBlock::row_tiles, piece % DqBlock::row_tiles};
}

// Whether a score of keys [first_key, first_key + 64) and the block's queries may be masked. Rows of
// queries that are not there need no mask: their lse makes P zero.
__device__ __forceinline__ bool is_partial(int first_key, int block, const Shape& shape) {
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
