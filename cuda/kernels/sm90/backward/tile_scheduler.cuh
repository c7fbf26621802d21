// Which tile of keys a CTA works on, which blocks of queries see it, and which scores are masked.
#pragma once
#include "sm90/backward/shape.cuh"

struct KeyTile {
    int first_key;
    int head, batch;  // the head share, among those of its batch row (Units)
};

// The query blocks [first, last) in which some query sees some key of a tile. Where block masks have lists, these are
// places in the tile's list.
struct QueryBlocks {
    int first, last;

    __device__ int count() const { return max(last - first, 0); }
};

#if BLOCK_MASK
__device__ __forceinline__ BlockList block_list(const KeyTile& tile, const Shape& shape) {
    return block_list(shape.block_mask, tile.batch, shape.key_head(tile.head), tile.first_key / Traits::keys);
}
#endif

// A block that a tile visits.
struct VisitedBlock {
    // Its index. Or what the tile's list says: twice the index, plus 1 if the block mask may hide pairs of it.
    int word;

    __device__ int index() const { return Traits::block_lists ? word >> 1 : word; }
    // Whether a block mask may hide pairs of it.
    __device__ bool may_hide() const { return Traits::block_lists ? word & 1 : Traits::block_mask; }
};

// The block at a place of a tile's QueryBlocks.
__device__ __forceinline__ VisitedBlock visited_block(int place, const KeyTile& tile, const Shape& shape) {
#if BLOCK_MASK
    if constexpr (Traits::block_lists) return {global::read_only(block_list(tile, shape).blocks + place)};
#endif
    return {place};
}
__device__ __forceinline__ int block_at(int place, const KeyTile& tile, const Shape& shape) {
    return visited_block(place, tile, shape).index();
}

// One of `parts` equal parts of a tile's blocks. They are whole spans, as a tile counts each span that it visits once.
// Where block masks have lists there is one part.
__device__ __forceinline__ QueryBlocks part_of(const QueryBlocks& blocks, int part, int parts) {
    const int first_span = blocks.first / DqBlock::span;
    const int spans = ceil_div(blocks.last, DqBlock::span) - first_span;
    const int begin = first_span + spans * part / parts, end = first_span + spans * (part + 1) / parts;
    return {max(blocks.first, begin * DqBlock::span), min(blocks.last, end * DqBlock::span)};
}

// All units of an L2 head group of `heads` head shares.
__device__ __forceinline__ int units_of_heads(int heads, const Shape& shape) {
    return heads * shape.key_tiles() * shape.units.parts();
}

// Number of head shares in an L2 head group: the last group may be smaller.
__device__ __forceinline__ int head_group_width(int head_group, const Shape& shape, int l2_head_group) {
    return min(l2_head_group, shape.head_shares * shape.batch - head_group * l2_head_group);
}

// With `deterministic`: whether the key tiles of unit `index`'s head group are handed out from the last to the first.
// So they are but for the last of several groups, see dq_order.cuh.
__device__ __forceinline__ bool hands_out_last_first(int index, const Shape& shape, int l2_head_group) {
    const int head_group = index / units_of_heads(l2_head_group, shape);
    return head_group == 0 || (head_group + 1) * l2_head_group < shape.head_shares * shape.batch;
}

struct Unit {
    KeyTile tile;
    int part;  // of the tile's blocks
};

// Unit `index` in the order in which units are handed out. Head shares come in groups of `l2_head_group`, chosen so
// that what a group reads and adds to stays in L2. In each round of a group every head share has one tile, part by
// part. Key tiles go from the first, which most queries see where attention is causal, to the last; or from the last to
// the first.
__device__ __forceinline__ Unit unit_at(int index, const Shape& shape, int l2_head_group, bool last_first) {
    const int parts = shape.units.parts();
    const int head_group = index / units_of_heads(l2_head_group, shape);
    const int in_group = index - head_group * units_of_heads(l2_head_group, shape);
    const int round_units = head_group_width(head_group, shape, l2_head_group) * parts;
    const int round = in_group / round_units;
    const int in_round = in_group - round * round_units;
    const int head = head_group * l2_head_group + in_round / parts;
    const int tile = last_first ? shape.key_tiles() - 1 - round : round;
    return {{tile * Traits::keys, head % shape.head_shares, head / shape.head_shares}, in_round % parts};
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

// Pieces in the order in which they tend to be complete: by L2 head groups, as units (unit_at); within one, the query
// heads that come first in their head share; of these the first blocks of all.
__device__ __forceinline__ DqJob d_query_job(int job, const Shape& shape, int l2_head_group) {
    const int pieces = shape.query_blocks() * DqBlock::row_tiles;  // of a head
    const int head_group = job / (l2_head_group * shape.group * pieces);
    int rest = job - head_group * l2_head_group * shape.group * pieces;
    const int width = head_group_width(head_group, shape, l2_head_group);
    const int member = rest / (width * pieces);
    rest -= member * width * pieces;
    const int piece = rest / width, head_share = head_group * l2_head_group + rest - piece * width;
    return {head_share * shape.group + member, piece / DqBlock::row_tiles, piece % DqBlock::row_tiles};
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
        // Of rows that are not there P is zero, unless what is added to their scores is NaN.
        if constexpr (Traits::isolates && (ScoreTraits::bias || ScoreTraits::user)) {
            last_query[r] = min(last_query[r], shape.queries - 1 - first_column);
        }
    }
#pragma unroll
    for (int i = 0; i < count; ++i) {
        const int r = i / 2 % 2, column = i / 4 * 8 + i % 2;
        if (column < first_query[r] || column > last_query[r]) probabilities[i] = 0;
    }
}
