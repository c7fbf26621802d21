// The producer role of the decode kernel: announces tiles to the consumers, and loads their blocks of keys and values
// through a ring of stages. TMA copies them (load_tma.cuh), or, from pages whose size doesn't suit it, threads do
// (load_gather.cuh).
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/decode/appended_keys.cuh"
#include "sm90/decode/cluster_parts.cuh"
#include "sm90/decode/query.cuh"
#include "sm90/decode/start.cuh"

struct LoadCall {
    const Cache& cache;
    const SharedMemory& shared;
    const Shape& shape;
    const Traits::Query& query;  // (B, T, N, H)
    const TilePartials partials;
    const AppendCall append;
};

using Ring = PipelineState<Traits::stages>;
using TileRing = PipelineState<Traits::tile_stages>;

__device__ __forceinline__ void sync_producer() {
    if constexpr (Traits::gathers) {
        named_barrier_sync(2, Traits::producer_threads);
    } else {
        __syncwarp();
    }
}

#if BOX
#include "sm90/decode/load_tma.cuh"
#else
#include "sm90/decode/load_gather.cuh"
#endif

// Announces a tile to the consumers, and asks for its rows of Q, but for those of the first tile that threads copy
// (query.cuh). Q is asked for before the tile's keys, behind which it would wait for long.
__device__ __forceinline__ void hand_out(const LoadCall& call, TileRing& ring, const Tile& tile, bool is_first) {
    const SharedMemory& shared = call.shared;
    const int stage = ring.stage, thread = threadIdx.x - Traits::consumer_threads;
    mbarrier::wait(shared.tile_empty(stage), ring.parity ^ 1);
    // One thread alone hands the tile out, and consumers give back a tile without blocks at once. A warp that is still
    // at the wait above would then miss this phase of the barrier, and wait for the next.
    if constexpr (Traits::query_by_tma) sync_producer();
    if (thread == 0) shared.tile(stage) = tile;
    ask_for_query(shared, call.shape, call.query, tile, stage, is_first);
    ring.advance();
}

// The first tile is found before the CTA's barriers are ready, as that takes longer.
__device__ __forceinline__ void produce(const LoadCall& call, const Division& division) {
    TileSchedule schedule(call.shape, division);
    Tile tile;
    bool has_tile = schedule.next(tile), is_first = true;
    start_producer();
    AppendedKeys appended(call.append);
    Ring ring;
    TileRing tile_ring;
#pragma unroll 1
    while (has_tile) {
        hand_out(call, tile_ring, tile, is_first);
        is_first = false;
        load_blocks(call, ring, tile, appended);
        // The consumers count soon. What was in L2 when the tile began wouldn't be there any more.
        const bool counts = Traits::split && tile.sharers > 1 && tile.in_pair != InPair::gives;
        if (counts) call.partials.prefetch_count(tile, division);
        has_tile = schedule.next(tile);
    }
    tile.batch = Tile::no_more;
    if constexpr (Traits::cluster == 1) hand_out(call, tile_ring, tile, is_first);
    meet_before_partials();
}
