// The tile scheduler: which tile comes when, which rows it has, and which key blocks they see.
#pragma once
#include "common/block_mask.cuh"
#include "common/block_range.cuh"
#include "common/position.cuh"
#include "sm90/forward/traits.cuh"

// With PackGQA, rows of a tile are those of `pack_gqa` query heads: row r of all is query r / pack_gqa of the tile's
// head r % pack_gqa.
__device__ __forceinline__ int query_of(int row) { return row / Traits::pack_gqa; }
__device__ __forceinline__ Position position_of(int row, const Shape& shape) {
    return {query_of(row), 0, shape.queries - 1};
}
__device__ __forceinline__ int head_of(int row, const Tile& tile) { return tile.head + row % Traits::pack_gqa; }
__device__ __forceinline__ int row_count(const Shape& shape) { return shape.queries * Traits::pack_gqa; }
__device__ __forceinline__ int row_tiles(const Shape& shape) { return ceil_div(row_count(shape), Traits::rows); }
// The row tiles that have queries. If queries are packed, the kernel ahead counts these: call this after it has ended.
__device__ __forceinline__ int used_row_tiles(const Shape& shape) {
#if PACKED
    return *shape.packed.used_slots;
#else
    return row_tiles(shape);
#endif
}
// Heads whose rows share tiles form a head pack. This many of them are in a batch row.
__device__ __forceinline__ int head_packs(const Shape& shape) { return shape.query_heads / Traits::pack_gqa; }

// ---------------------------------------------------------------------------------------- the static mask

// The first key to the right of those that `row` sees, and the first key that it sees. Alignment is to the bottom
// right: the last query's diagonal is the last key.
__device__ __forceinline__ int right_end(int row, const Shape& shape) {
    if constexpr (!Traits::has_right) return shape.keys;
    return min(shape.keys, query_of(row) + shape.keys - shape.queries + shape.right + 1);
}
__device__ __forceinline__ int left_begin(int row, const Shape& shape) {
    if constexpr (!Traits::has_left) return 0;
    return max(0, query_of(row) + shape.keys - shape.queries - shape.left);
}

// How many of the first row tiles are skipped, as the window's right side hides all keys from them. With mask metadata
// or a block mask none is: which rows see keys is not known here.
__device__ __forceinline__ int skipped_row_tiles(const Shape& shape) {
    if constexpr (!Traits::has_right || Traits::mask_metadata || Traits::block_mask) return 0;
    const int first_query = min(max(shape.queries - shape.keys - shape.right, 0), shape.queries);
    return first_query * Traits::pack_gqa / Traits::rows;
}

// The key blocks that some of the tile's rows, from `first_row` on, see.
__device__ __forceinline__ Interval visited_blocks(int first_row, const Shape& shape) {
    const int last_row = min(first_row + Traits::rows, row_count(shape)) - 1;
    const int begin = left_begin(first_row, shape);
    const int end = right_end(last_row, shape);
    if (end <= begin) return {0, 0};
    return {begin / Traits::keys, ceil_div(end, Traits::keys)};
}

// The key blocks that a warpgroup's 64 rows, from `first_row` on, see all of.
__device__ __forceinline__ Interval full_blocks(int first_row, const Shape& shape) {
    const int end = max(right_end(first_row, shape), 0) / Traits::keys;
    const int begin = ceil_div(left_begin(first_row + 63, shape), Traits::keys);
    return {begin, end};
}

// ---------------------------------------------------------------------------------------- mask metadata

// The key blocks of a group of 64 rows.
__device__ __forceinline__ BlockRange group_blocks(int batch, int group, const Shape& shape) {
    const int64_t first = static_cast<int64_t>(batch) * row_tiles(shape) * Traits::consumers;
    return read_only(shape.mask_metadata.group_blocks + first + group);
}

// The key blocks that a tile visits: those that any of its groups of rows sees. With a block mask it has a list of
// them, and this is an interval of places in the list. `pack` is the tile's head pack, among those of all batch rows.
__device__ __forceinline__ Interval visited_blocks(int first_row, int pack, const Shape& shape) {
    const int packs = head_packs(shape), batch = pack / packs;
#if BLOCK_MASK
    const int head = pack % packs * Traits::pack_gqa;
    return {0, block_list(shape.block_mask, batch, head, first_row / Traits::rows).count};
#endif
    if constexpr (!Traits::mask_metadata) return visited_blocks(first_row, shape);
    Interval visited = empty_interval;
#pragma unroll
    for (int consumer = 0; consumer < Traits::consumers; ++consumer) {
        const BlockRange group = group_blocks(batch, first_row / 64 + consumer, shape);
        if (group.first < group.last) visited = {min(visited.begin, group.first), max(visited.end, group.last)};
    }
    return visited.end == 0 ? Interval{0, 0} : visited;
}

// ---------------------------------------------------------------------------------------- block masks

#if BLOCK_MASK
__device__ __forceinline__ BlockList block_list(const Tile& tile, const Shape& shape) {
    return block_list(shape.block_mask, tile.batch, tile.head, tile.first_row / Traits::rows);
}
#endif

// The key block at a place of a tile's interval.
__device__ __forceinline__ int block_at(int place, const Tile& tile, const Shape& shape) {
#if BLOCK_MASK
    return global::read_only(block_list(tile, shape).blocks + place);
#endif
    return place;
}

// ---------------------------------------------------------------------------------------- the order of tiles

// Tile `index` of all that are not skipped. Head packs go by in groups of `l2_head_group`, so that the keys and values
// of a group stay in L2. Within a group row tiles go from the last, which is the longest under a causal mask, to the
// first, and each row tile goes through all head packs of the group.
__device__ __forceinline__ Tile tile_at(int index, const Shape& shape, int l2_head_group) {
    const int visited_row_tiles = used_row_tiles(shape) - skipped_row_tiles(shape);
    const int packs = head_packs(shape);
    const int group = index / (l2_head_group * visited_row_tiles);
    const int index_in_group = index - group * l2_head_group * visited_row_tiles;
    const int group_packs = min(l2_head_group, packs * shape.batch - group * l2_head_group);
    const int row_tile = index_in_group / group_packs;  // from the last
    const int pack = group * l2_head_group + index_in_group - row_tile * group_packs;
    const int first_row = (used_row_tiles(shape) - 1 - row_tile) * Traits::rows;
    const Interval blocks = visited_blocks(first_row, pack, shape);
    return {first_row, pack % packs * Traits::pack_gqa, pack / packs, blocks.begin, blocks.end, Tile::not_split};
}

// How many tiles are neither skipped nor split. If queries are packed, none is skipped or split.
__device__ __forceinline__ int whole_tiles(const SplitKV& split_kv, const Shape& shape) {
    return Traits::packed ? used_row_tiles(shape) * head_packs(shape) : split_kv.whole_tiles;
}

// The skipped tiles, whose output is zero.
__device__ __forceinline__ int skipped_tile_count(const Shape& shape) {
    return skipped_row_tiles(shape) * head_packs(shape) * shape.batch;
}
__device__ __forceinline__ Tile skipped_tile_at(int index, const Shape& shape) {
    const int packs = head_packs(shape);
    const int pack = index / skipped_row_tiles(shape);
    const int first_row = (index - pack * skipped_row_tiles(shape)) * Traits::rows;
    return {first_row, pack % packs * Traits::pack_gqa, pack / packs, 0, 0, Tile::not_split};
}

// The number of a tile among those of all rows and heads, and the tile of that number.
__device__ __forceinline__ int tile_number(const Tile& tile, const Shape& shape) {
    const int pack = tile.batch * head_packs(shape) + tile.head / Traits::pack_gqa;
    return pack * row_tiles(shape) + tile.first_row / Traits::rows;
}
__device__ __forceinline__ Tile numbered_tile(int number, const Shape& shape) {
    const int packs = head_packs(shape);
    const int pack = number / row_tiles(shape);
    const int first_row = (number - pack * row_tiles(shape)) * Traits::rows;
    const Interval blocks = visited_blocks(first_row, pack, shape);
    return {first_row, pack % packs * Traits::pack_gqa, pack / packs, blocks.begin, blocks.end, Tile::not_split};
}

// The part of a split tile that starts at `block`, counted through all split tiles, for a CTA whose share of them ends
// at `end`.
__device__ __forceinline__ Tile split_tile_at(int block, int end, const SplitKV& split_kv, const Shape& shape,
                                              int l2_head_group) {
    const int index = block / split_kv.tile_blocks, first_block = index * split_kv.tile_blocks;
    Tile tile = tile_at(split_kv.whole_tiles + index, shape, l2_head_group);
    tile.first = block - first_block;
    tile.last = min(end - first_block, split_kv.tile_blocks);
    tile.split_tile = index;
    return tile;
}
