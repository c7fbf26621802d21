// The producer role of the forward kernel: one thread of warpgroup 0 takes tiles from the scheduler and loads Q, K and
// V.
#pragma once
#include "parameters.cuh"
#include "ptx/bulk.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "sm90/forward/packed_queries.cuh"
#include "sm90/forward/pages.cuh"
#include "sm90/forward/tile_scheduler.cuh"

// One copy for each panel. `barrier` expects the bytes of all of them, and `more_bytes` of other copies.
__device__ __forceinline__ void load_panels(uint32_t destination, const TensorMap& map, uint32_t barrier, int panels,
                                            int rows, int head, int first_row, int batch, int more_bytes = 0) {
    mbarrier::arrive_expect(barrier, panels * descriptor::panel_bytes(rows) + more_bytes);
#pragma unroll
    for (int panel = 0; panel < panels; ++panel) {
        tma::load(destination + panel * descriptor::panel_bytes(rows), map, barrier, panel * Traits::panel_columns,
                  head, first_row, batch);
    }
}

// The mask metadata of a tile's rows. It completes on `query_full`, which expects its bytes with those of Q.
__device__ __forceinline__ void load_row_mask(const SharedMemory& shared, int stage, const Tile& tile,
                                              const Shape& shape) {
    const int64_t first = static_cast<int64_t>(tile.batch) * row_tiles(shape) * Traits::rows + tile.first_row;
    bulk::load(shared.base + SharedMemory::row_keys_offset(stage), shape.mask_metadata.row_keys + first,
               Traits::row_keys_bytes, shared.query_full(stage));
    if constexpr (Traits::segments) {
        bulk::load(shared.base + SharedMemory::row_segments_offset(stage), shape.mask_metadata.row_segments + first,
                   Traits::row_segments_bytes, shared.query_full(stage));
    }
}

struct LoadCall {
    const TensorMaps& maps;
    const SharedMemory& shared;
    const Shape& shape;
    const SplitKV& split_kv;
    const int l2_head_group;
    const Dropout& dropout;
    const KeyPlace* key_places;  // of each batch row, if K and V are a cache
};

// Where the keys of a batch row are. A cache's place is read for each block: kept for a tile, it would change how ptxas
// allocates the registers of kernels without a cache.
__device__ __forceinline__ KeyPlace key_place(const LoadCall& call, int batch) {
    if constexpr (!Traits::cache) return {batch, 0};
    return call.key_places[batch];
}

// Tells the consumers of a tile, and loads its Q unless the tile is skipped.
__device__ __forceinline__ void load_query(const LoadCall& call, Rings& rings, const Tile& tile) {
    const SharedMemory& shared = call.shared;
    const Shape& shape = call.shape;
    const int stage = rings.query.stage;
    mbarrier::wait(shared.query_empty(stage), rings.query.parity ^ 1);
    shared.tile(stage) = tile;
    if (tile.count() == 0) {
        mbarrier::arrive(shared.query_full(stage));
    } else {
        if constexpr (Traits::mask_metadata) {
#pragma unroll
            for (int consumer = 0; consumer < Traits::consumers; ++consumer) {
                const BlockRange blocks = group_blocks(tile.batch, tile.first_row / 64 + consumer, shape);
                shared.full_blocks(stage)[consumer] = {blocks.full_begin, blocks.full_end};
            }
        }
        load_panels(shared.query_tile(stage), call.maps.query, shared.query_full(stage), Traits::key_panels,
                    Traits::rows, tile.head, first_query(tile, shape), tile.batch, Traits::row_mask_bytes);
        if constexpr (Traits::mask_metadata) load_row_mask(shared, stage, tile, shape);
    }
    rings.query.advance();
}

enum KeyOrValue { of_key, of_value };

// Loads K or V of a block of a batch row. `full` expects its bytes, and `more_bytes` of other copies.
template <KeyOrValue which>
__device__ __forceinline__ void load_block(const LoadCall& call, uint32_t destination, uint32_t full,
                                           const KeyPlace& place, int batch, int key_head, int block,
                                           int more_bytes = 0) {
    constexpr int panels = which == of_value ? Traits::value_panels : Traits::key_panels;
    const TensorMap& map = which == of_value ? call.maps.value : call.maps.key;
#if PAGE
    const PageTable& table = call.shape.page_table;
    // In pages that hold both, a head's values follow its keys.
    const int head = key_head * table.head_step + (which == of_value ? table.head_step - 1 : 0);
    load_pages<panels>(destination, map, full, table, place.row, batch, head, block);
#else
    load_panels(destination, map, full, panels, Traits::keys, key_head, place.first_key + block * Traits::keys,
                place.row, more_bytes);
#endif
}

// Loads K of a block, and the dropout hashes of its keys, into the stages that are next. They complete on `full`.
__device__ __forceinline__ void load_key(const LoadCall& call, const Rings& rings, int batch, int key_head,
                                         int block, uint32_t full) {
    const SharedMemory& shared = call.shared;
    const KeyPlace place = key_place(call, batch);
    mbarrier::wait(shared.key_empty(rings.key.stage), rings.key.parity ^ 1);
    load_block<of_key>(call, shared.key_block(rings.key.stage), full, place, batch, key_head, block,
                       Traits::hash_bytes);
    if constexpr (Traits::dropout) {
        const int blocks = ceil_div(call.shape.keys, Traits::keys);
        const int64_t hashes = (static_cast<int64_t>(batch) * blocks + block) * Traits::keys;
        bulk::load(shared.base + SharedMemory::key_hashes_offset(rings.hash.stage), call.dropout.columns + hashes,
                   Traits::hash_bytes, full);
    }
}

// … and V.
__device__ __forceinline__ void load_value(const LoadCall& call, const Rings& rings, int batch, int key_head,
                                           int block, uint32_t full) {
    const SharedMemory& shared = call.shared;
    const KeyPlace place = key_place(call, batch);
    mbarrier::wait(shared.value_empty(rings.value.stage), rings.value.parity ^ 1);
    if constexpr (Traits::is_float8) {
        mbarrier::arrive_expect(full, Traits::value_bytes);
        const int head = batch * (call.shape.query_heads / call.shape.group) + key_head;
        tma::load(shared.value_block(rings.value.stage), call.maps.value, full, 0, 0, block, head);
    } else {
        load_block<of_value>(call, shared.value_block(rings.value.stage), full, place, batch, key_head, block);
    }
}

// A CTA takes tiles by stride or, if tiles take unequally long, from the counter `next_tile`, which all CTAs share.
// After those it takes skipped tiles, by stride, or its share of the split tiles.
//
// Blocks go from the last to the first. K is loaded one block ahead of V, as consumers use it. With two stages for Q,
// the next tile is taken, and its Q loaded, before the end of this one.
__device__ __forceinline__ void produce(const LoadCall& call, int* next_tile) {
    constexpr bool loads_query_early = Traits::query_stages > 1;
    const SharedMemory& shared = call.shared;
    const Shape& shape = call.shape;
    const SplitKV& split_kv = call.split_kv;
    Rings rings;
    const int grid = gridDim.x;
    int index = blockIdx.x, skipped = blockIdx.x;
    int split_block = Traits::split_kv ? split_kv.begin(blockIdx.x) : 0;
    const int split_end = Traits::split_kv ? split_kv.begin(blockIdx.x + 1) : 0;

    auto take_tile = [&]() {
        Tile tile = no_more_tiles;
        if (index < whole_tiles(split_kv, shape)) {
            tile = tile_at(index, shape, call.l2_head_group);
        } else if (Traits::has_right && skipped < skipped_tile_count(shape)) {
            tile = skipped_tile_at(skipped, shape);
            skipped += grid;
        } else if (Traits::split_kv && split_block < split_end) {
            tile = split_tile_at(split_block, split_end, split_kv, shape, call.l2_head_group);
            split_block += tile.count();
        }
        return tile;
    };

    wait_for_previous_kernel();
    // The kernel ahead writes the first tile's metadata.
    if constexpr (Traits::mask_metadata) global::load_no_earlier(index);
    Tile tile = take_tile();
    if (loads_query_early) load_query(call, rings, tile);
#pragma unroll 1
    while (tile.exists()) {
        const int key_head = tile.head / shape.group;

        auto load_next_key = [&](int place) {
            load_key(call, rings, key_batch(tile, shape), key_head, block_at(place, tile, shape),
                     shared.key_full(rings.key.stage));
            rings.key.advance();
            rings.hash.advance();
        };
        auto load_next_value = [&](int place) {
            load_value(call, rings, key_batch(tile, shape), key_head, block_at(place, tile, shape),
                       shared.value_full(rings.value.stage));
            rings.value.advance();
        };

        if (tile.count() > 0) load_next_key(tile.last - 1);
        if (!loads_query_early) load_query(call, rings, tile);
#pragma unroll 1  // the producer has few registers
        for (int place = tile.last - 2; place >= tile.first; --place) {
            load_next_key(place);
            load_next_value(place + 1);
        }
        // The counter's latency passes beside the last loads. Any earlier, and a CTA in a long tile would already
        // hold its next one while others run out (docs/tuning/forward.md).
        if (index < whole_tiles(split_kv, shape)) index = next_tile ? grid + atomicAdd(next_tile, 1) : index + grid;
        const Tile next = take_tile();
        if (loads_query_early) load_query(call, rings, next);
        if (tile.count() > 0) load_next_value(tile.first);
        tile = next;
    }
    if (!loads_query_early) load_query(call, rings, tile);
}
