// The producer: the thread that takes tiles and loads their operands.
#pragma once
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "sm90/backward/blocks_ahead.cuh"
#include "sm90/backward/call.cuh"
#include "sm90/backward/dq_accum.cuh"
#include "sm90/backward/isolation.cuh"
#include "sm90/backward/split_products.cuh"

// Loads Q or dO of a block. CTAs that share a tile visit the same blocks: each loads a part of the rows for all of
// them.
__device__ __forceinline__ void load_block(uint32_t destination, const TensorMap& map, uint32_t barrier, int panels,
                                           int head, int first_row, int batch) {
    if constexpr (Traits::cluster == 1) {
        load_panels(destination, map, barrier, panels, Traits::queries, head, first_row, batch);
    } else {
        constexpr uint16_t all = (1 << Traits::cluster) - 1;
        const int skipped = cluster::rank() * (Traits::queries / Traits::cluster);
        const uint32_t rows = destination + skipped * descriptor::row_bytes;
#pragma unroll 1
        for (int panel = 0; panel < panels; ++panel) {
            tma::load_multicast(rows + panel * descriptor::panel_bytes(Traits::queries), map, barrier, all,
                                panel * descriptor::panel_columns, head, first_row + skipped, batch);
        }
    }
}

// Loads K or V of a CTA's keys.
__device__ __forceinline__ void load_keys(const Call& call, uint32_t destination, const TensorMap& map,
                                          uint32_t barrier, int panels, const KeyTile& tile) {
    mbarrier::arrive_expect(barrier, panels * descriptor::panel_bytes(Traits::cta_keys));
    load_panels(destination, map, barrier, panels, Traits::cta_keys, call.shape.key_head(tile.head),
                cta_first_key(tile), tile.batch);
}

// Loads V of a tile once the one before it is read. Or only to L2, where consumers load V themselves as soon as their
// gradients have left its place.
__device__ __forceinline__ void load_value(const Call& call, const KeyTile& tile, uint32_t parity) {
    const SharedMemory& shared = call.shared;
    if constexpr (Traits::gradients_in_value_place) {
#pragma unroll 1
        for (int i = 0; i < Traits::value_panels * Traits::value_parts; ++i) {
            tma::prefetch(call.maps.value, i / Traits::value_parts * descriptor::panel_columns,
                          call.shape.key_head(tile.head), tile.first_key + i % Traits::value_parts * 64, tile.batch);
        }
    } else {
        mbarrier::wait(shared.value_empty(), parity ^ 1);
        load_keys(call, shared.value_tile(), call.maps.value, shared.value_full(), Traits::value_panels, tile);
    }
}

// Loads Q of a block, and lse and the dropout hashes of its queries, and cleans Q of a spoiled block. Tells consumers
// which block it is.
__device__ __forceinline__ void load_query(const Call& call, const KeyTile& tile, int head, VisitedBlock visited,
                                           const BlockSlot& slot, bool spoiled) {
    const SharedMemory& shared = call.shared;
    const int stage = slot.stage, block = visited.index();
    mbarrier::wait(shared.query_empty(stage), slot.parity ^ 1);
    if constexpr (Traits::tells_blocks) shared.told_block(stage) = {visited.word, head};
    const uint32_t landed = spoiled ? shared.query_landed(stage) : shared.query_full(stage);
    mbarrier::arrive_expect(landed, Traits::query_bytes + Traits::per_query_bytes + Traits::dropout_hash_bytes);
    load_block(shared.query_block(stage), call.maps.query, landed, Traits::key_panels, head, block * Traits::queries,
               tile.batch);
    bulk::load(shared.base + SharedMemory::lse_offset(stage), call.lse_delta_block(tile, head, block),
               Traits::per_query_bytes + Traits::dropout_hash_bytes, landed);
    if (spoiled) {
        clean_block(shared, stage, SharedMemory::query + stage * Traits::query_bytes, Traits::key_panels, landed,
                    shared.query_full(stage));
    }
}

// Loads dO of a block, and delta of its queries, and cleans dO of a spoiled block.
__device__ __forceinline__ void load_d_out(const Call& call, const KeyTile& tile, int head, int block,
                                           const BlockSlot& slot, bool spoiled) {
    const SharedMemory& shared = call.shared;
    const int stage = slot.stage;
    mbarrier::wait(shared.d_out_empty(stage), slot.parity ^ 1);
    const uint32_t landed = spoiled ? shared.d_out_landed(stage) : shared.d_out_full(stage);
    mbarrier::arrive_expect(landed, Traits::d_out_bytes + Traits::per_query_bytes);
    load_block(shared.d_out_block(stage), call.maps.d_out, landed, Traits::value_panels, head, block * Traits::queries,
               tile.batch);
    const float* lse_delta = call.lse_delta_block(tile, head, block);
    bulk::load(shared.base + SharedMemory::delta_offset(stage),
               lse_delta + (Traits::per_query_values - 1) * Traits::queries, Traits::per_query_bytes, landed);
    if (spoiled) {  // lse has come with Q
        clean_block(shared, stage, SharedMemory::d_out + stage * Traits::d_out_bytes, Traits::value_panels, landed,
                    shared.d_out_full(stage));
    }
}

// Waits until all CTAs that share the tile have read the blocks that this one loaded for them. A CTA may not end
// before.
__device__ __forceinline__ void wait_for_readers(const SharedMemory& shared, BlockSlot slot) {
#pragma unroll 1
    for (int i = 0; i < Traits::stages; ++i, slot.advance()) {
        mbarrier::wait(shared.query_empty(slot.stage), slot.parity ^ 1);
        mbarrier::wait(shared.d_out_empty(slot.stage), slot.parity ^ 1);
    }
}

// Takes tiles and loads them, in one thread. Persistent CTAs take tiles from a counter. Tiles take unequally long under
// a window, and a tile may wait for tiles handed out before it (wait_for_dq_accum_slot, dq_order.cuh), so those must
// have resident CTAs. In which order CTAs start, and how many are resident, is not known: no tile is found from
// blockIdx.
__device__ __forceinline__ void produce(const Call& call) {
    const SharedMemory& shared = call.shared;
    const int units = call.unit_count();
    int index = Traits::persistent ? atomicAdd(call.next_tile, 1) : call.own_tile();
    BlockSlot slot;
    KeySlot key_slot;
#pragma unroll 1
    for (;; index = atomicAdd(call.next_tile, 1)) {
        const int key_stage = key_slot.stage;
        // Read while the tile before is at work.
        const Work work = call.work(min(index, units - 1));
        if (Traits::skips_empty_tiles && index < units && work.blocks.count() == 0) continue;
        const KeyTile& tile = work.tile;
        BlocksAhead blocks_ahead(call, work);
        Interval full[Traits::consumers];
        if constexpr (Traits::tells_work && Traits::mask_metadata) {
#pragma unroll
            for (int i = 0; i < Traits::consumers; ++i) {
                full[i] = full_blocks(tile.batch, tile.first_key + 64 * i, call.shape);
            }
        }
        mbarrier::wait(shared.key_empty(key_stage), key_slot.parity ^ 1);
        if (index >= units) {
            shared.told_tile(key_stage) = SharedMemory::no_more_tiles;
            mbarrier::arrive(shared.key_full(key_stage));
            return;
        }
        if constexpr (Traits::tells_work) {
            call.told_work(key_stage) = work;
        } else if constexpr (Traits::persistent) {
            shared.told_tile(key_stage) = index;
        }
        if constexpr (Traits::tells_work && Traits::mask_metadata) {
#pragma unroll
            for (int i = 0; i < Traits::consumers; ++i) shared.full_blocks(key_stage, i) = full[i];
        }
        if constexpr (Traits::cluster > 1) load_peer_keys(call, tile);
        load_keys(call, shared.key_tile(key_stage), call.maps.key, shared.key_full(key_stage), Traits::key_panels,
                  tile);
        if (!Traits::gradients_in_value_place && work.blocks.count() == 0) load_value(call, tile, key_slot.parity);
        work.for_each_block(call.shape, [&](int head, int place, int iteration) {
            if (place == work.blocks.first) wait_for_dq_accum_slot(call, call.head_index(tile, head));
            const auto [visited, spoiled] = blocks_ahead.take(call, work, place, iteration);
            const int block = visited.index();
            load_query(call, tile, head, visited, slot, spoiled);
            if (iteration == 0) load_value(call, tile, key_slot.parity);  // after what S needs
            load_d_out(call, tile, head, block, slot, spoiled);
            slot.advance();
        });
        if constexpr (Traits::cluster > 1) wait_for_readers(shared, slot);
        if (!Traits::persistent) return;
        key_slot.advance();
    }
}
