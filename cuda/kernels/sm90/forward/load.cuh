// The producer role of the forward kernel: one thread of warpgroup 0 takes tiles from the scheduler and loads Q, K and V.
#pragma once
#include "parameters.cuh"
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
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

// Tiles come by stride. Where they take unequally long they come from the counter `next_tile`, which all CTAs share.
// After those come the skipped tiles, by stride, or this CTA's share of the split tiles.
//
// Blocks go from the last to the first. K is loaded one block ahead of V, as consumers use it. With two stages for Q,
// the next tile is taken, and its Q loaded, before the end of this one.
__device__ __forceinline__ void produce(const TensorMaps& maps, const SharedMemory& shared, const Shape& shape,
                                        const SplitKV& split_kv, int l2_head_group, int* next_tile,
                                        const Dropout& dropout) {
    constexpr bool loads_query_early = Traits::query_stages > 1;
    PipelineState<Traits::stages> key_slot, value_slot;
    PipelineState<Traits::query_stages> query_slot;
    PipelineState<Traits::hash_stages> hash_slot;
    const int grid = gridDim.x;
    int index = blockIdx.x, skipped = blockIdx.x;
    int split_block = Traits::split_kv ? split_kv.begin(blockIdx.x) : 0;
    const int split_end = Traits::split_kv ? split_kv.begin(blockIdx.x + 1) : 0;

    auto take_tile = [&]() {
        Tile tile{Tile::no_more, 0, 0, 0, 0, Tile::not_split};
        if (index < split_kv.whole_tiles) {
            tile = tile_at(index, shape, l2_head_group);
        } else if (Traits::has_right && skipped < skipped_tile_count(shape)) {
            tile = skipped_tile_at(skipped, shape);
            skipped += grid;
        } else if (Traits::split_kv && split_block < split_end) {
            tile = split_tile_at(split_block, split_end, split_kv, shape, l2_head_group);
            split_block += tile.count();
        }
        return tile;
    };
    // Tells the consumers of a tile, and loads its Q unless the tile is skipped.
    auto load_query = [&](const Tile& tile) {
        mbarrier::wait(shared.query_empty(query_slot.stage), query_slot.parity ^ 1);
        shared.tile(query_slot.stage) = tile;
        if (tile.count() == 0) {
            mbarrier::arrive(shared.query_full(query_slot.stage));
        } else {
            if constexpr (Traits::mask_metadata) {
#pragma unroll
                for (int consumer = 0; consumer < Traits::consumers; ++consumer) {
                    const BlockRange blocks = group_blocks(tile.batch, tile.first_row / 64 + consumer, shape);
                    shared.full_blocks(query_slot.stage)[consumer] = {blocks.full_begin, blocks.full_end};
                }
            }
            load_panels(shared.query_tile(query_slot.stage), maps.query, shared.query_full(query_slot.stage),
                        Traits::key_panels, Traits::rows, tile.head, query_of(tile.first_row), tile.batch,
                        Traits::row_mask_bytes);
            if constexpr (Traits::mask_metadata) load_row_mask(shared, query_slot.stage, tile, shape);
        }
        query_slot.advance();
    };

    wait_for_previous_kernel();
    Tile tile = take_tile();
    if (loads_query_early) load_query(tile);
#pragma unroll 1
    while (tile.exists()) {
        const int key_head = tile.head / shape.group;

        auto load_key = [&](int block) {
            mbarrier::wait(shared.key_empty(key_slot.stage), key_slot.parity ^ 1);
            load_panels(shared.key_block(key_slot.stage), maps.key, shared.key_full(key_slot.stage),
                        Traits::key_panels, Traits::keys, key_head, block * Traits::keys, tile.batch,
                        Traits::hash_bytes);
            if constexpr (Traits::dropout) {
                const int blocks = ceil_div(shape.keys, Traits::keys);
                const int64_t hashes = (static_cast<int64_t>(tile.batch) * blocks + block) * Traits::keys;
                bulk::load(shared.base + SharedMemory::key_hashes_offset(hash_slot.stage), dropout.columns + hashes,
                           Traits::hash_bytes, shared.key_full(key_slot.stage));
                hash_slot.advance();
            }
            key_slot.advance();
        };
        auto load_value = [&](int block) {
            mbarrier::wait(shared.value_empty(value_slot.stage), value_slot.parity ^ 1);
            load_panels(shared.value_block(value_slot.stage), maps.value, shared.value_full(value_slot.stage),
                        Traits::value_panels, Traits::keys, key_head, block * Traits::keys, tile.batch);
            value_slot.advance();
        };

        if (tile.count() > 0) load_key(tile.last - 1);
        if (!loads_query_early) load_query(tile);
#pragma unroll 1  // the producer has few registers
        for (int block = tile.last - 2; block >= tile.first; --block) {
            load_key(block);
            load_value(block + 1);
        }
        // The counter's latency passes beside the last loads. Any earlier, and a CTA in a long tile would already
        // hold its next one while others run out (docs/tuning/cuda.md).
        if (index < split_kv.whole_tiles) index = next_tile ? grid + atomicAdd(next_tile, 1) : index + grid;
        const Tile next = take_tile();
        if (loads_query_early) load_query(next);
        if (tile.count() > 0) load_value(tile.first);
        tile = next;
    }
    if (!loads_query_early) load_query(tile);
}
