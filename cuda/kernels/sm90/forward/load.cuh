// The loading role of the forward kernel: one thread of warpgroup 0.
#pragma once
#include "parameters.cuh"
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/forward/tile_scheduler.cuh"

// One copy for each panel of 64 columns; `barrier` expects the bytes of all of them, and of `more`.
__device__ __forceinline__ void load_panels(uint32_t destination, const TensorMap& map, uint32_t barrier, int panels,
                                            int rows, int head, int first_row, int batch, int more = 0) {
    mbarrier::arrive_expect(barrier, panels * descriptor::panel_bytes(rows) + more);
#pragma unroll
    for (int panel = 0; panel < panels; ++panel) {
        tma::load(destination + panel * descriptor::panel_bytes(rows), map, barrier,
                  panel * descriptor::panel_columns, head, first_row, batch);
    }
}

// What the rows of a tile see, where it is data. `query_full` expects the bytes with those of Q.
__device__ __forceinline__ void load_bounds(const SharedMemory& shared, int stage, const Tile& tile,
                                            const Shape& shape) {
    const int64_t first = static_cast<int64_t>(tile.batch) * row_tiles(shape) * Traits::rows + tile.first_row;
    bulk::load(shared.base + SharedMemory::row_keys_offset(stage), shape.bounds.row_keys + first,
               Traits::row_keys_bytes, shared.query_full(stage));
    if constexpr (Traits::segments) {
        bulk::load(shared.base + SharedMemory::row_segments_offset(stage), shape.bounds.row_segments + first,
                   Traits::row_segments_bytes, shared.query_full(stage));
    }
}

// Tiles come by stride, or, where they take unequally long, from the counter `next_tile` that all CTAs share. After
// those come, by stride, the ones that see no key, or, where the last tiles are cut, this CTA's share of them. Blocks
// go from the last to the first; K runs one block ahead of V, as they are used. With two stages for Q, a tile is taken
// and its Q loaded before the end of the one before.
__device__ __forceinline__ void produce(const TensorMaps& maps, const SharedMemory& shared, const Shape& shape,
                                        const Cut& cut, int section_heads, int* next_tile, const Dropout& dropout) {
    constexpr bool loads_query_early = Traits::query_stages > 1;
    PipelineState<Traits::stages> key_slot, value_slot;
    PipelineState<Traits::query_stages> query_slot;
    PipelineState<Traits::word_stages> word_slot;
    const int grid = gridDim.x;
    int index = blockIdx.x, blind = blockIdx.x;
    int cut_block = Traits::cut ? cut.begin(blockIdx.x) : 0;
    const int cut_end = Traits::cut ? cut.begin(blockIdx.x + 1) : 0;

    // The tile of `index`, or what comes after those. Its first row is negative where no more come.
    auto take_tile = [&]() {
        Tile tile{-1, 0, 0, 0, 0, -1};
        if (index < cut.whole_tiles) {
            tile = tile_at(index, shape, section_heads);
        } else if (Traits::has_right && blind < blind_tile_count(shape)) {
            tile = blind_tile_at(blind, shape);
            blind += grid;
        } else if (Traits::cut && cut_block < cut_end) {
            tile = piece_at(cut_block, cut_end, cut, shape, section_heads);
            cut_block += tile.count();
        }
        return tile;
    };
    // Tells the consumers of a tile, and loads its Q if it needs one.
    auto load_query = [&](const Tile& tile) {
        mbarrier::wait(shared.query_empty(query_slot.stage), query_slot.parity ^ 1);
        shared.tile(query_slot.stage) = tile;
        if (tile.count() == 0) {
            mbarrier::arrive(shared.query_full(query_slot.stage));
        } else {
            if constexpr (Traits::bounds) {
#pragma unroll
                for (int consumer = 0; consumer < Traits::consumers; ++consumer) {
                    const int group = tile.first_row / 64 + consumer;
                    const int4 blocks = group_blocks(tile.batch, group, shape);
                    shared.whole_blocks(query_slot.stage)[consumer] = {blocks.z, blocks.w};
                }
            }
            load_panels(shared.query_tile(query_slot.stage), maps.query, shared.query_full(query_slot.stage),
                        Traits::key_panels, Traits::rows, tile.head, tile.first_row / Traits::pack, tile.batch,
                        Traits::bounds_bytes);
            if constexpr (Traits::bounds) load_bounds(shared, query_slot.stage, tile, shape);
        }
        query_slot.advance();
    };

    wait_for_previous_kernel();
    Tile tile = take_tile();
    if (loads_query_early) load_query(tile);
#pragma unroll 1
    while (tile.first_row >= 0) {
        const int key_head = tile.head / shape.group;

        auto load_key = [&](int block) {
            mbarrier::wait(shared.key_empty(key_slot.stage), key_slot.parity ^ 1);
            load_panels(shared.key_block(key_slot.stage), maps.key, shared.key_full(key_slot.stage),
                        Traits::key_panels, Traits::keys, key_head, block * Traits::keys, tile.batch,
                        Traits::word_bytes);
            if constexpr (Traits::dropout) {
                const int blocks = ceil_div(shape.keys, Traits::keys);
                const int64_t words = (static_cast<int64_t>(tile.batch) * blocks + block) * Traits::keys;
                bulk::load(shared.base + SharedMemory::words_offset(word_slot.stage), dropout.columns + words,
                           Traits::word_bytes, shared.key_full(key_slot.stage));
                word_slot.advance();
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
        // hold its next one, while others run out (docs/tuning.md).
        if (index < cut.whole_tiles) index = next_tile ? grid + atomicAdd(next_tile, 1) : index + grid;
        const Tile next = take_tile();
        if (loads_query_early) load_query(next);
        if (tile.count() > 0) load_value(tile.first);
        tile = next;
    }
    if (!loads_query_early) load_query(tile);
}
