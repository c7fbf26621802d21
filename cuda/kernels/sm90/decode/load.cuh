// The producer role of the decode kernel: announces tiles to the consumers, and loads their blocks of keys and values
// through a ring of stages. TMA copies them (load_tma.cuh), or, from pages whose size doesn't suit it, threads do
// (load_gather.cuh).
#pragma once
#include "ptx/async_copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/decode/appended_keys.cuh"
#include "sm90/decode/cluster_parts.cuh"

struct LoadCall {
    const Cache& cache;
    const SharedMemory& shared;
    const Shape& shape;
    const Traits::Element* const query;  // (B, T, N, H)
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

// Announces a tile to the consumers, and begins to copy its rows of Q. Columns beyond the head dim become 0; shared
// memory behind the tile's last row keeps what it held. Q is asked for before the tile's keys, behind which it would
// wait for long.
__device__ __forceinline__ void hand_out(const LoadCall& call, TileRing& ring, const Tile& tile) {
    constexpr int row_chunks = Traits::head_dim / 8;
    constexpr int at_once = Traits::query_rows > 8 ? 4 : 1;  // chunks of a lane; with up to eight rows it has few
    const SharedMemory& shared = call.shared;
    const int stage = ring.stage, thread = threadIdx.x - Traits::consumer_threads;
    mbarrier::wait(shared.tile_empty(stage), ring.parity ^ 1);
    if (tile.exists() && tile.first < tile.last) {
#pragma unroll at_once
        for (int i = thread; i < tile.rows * row_chunks; i += Traits::producer_threads) {
            const int index = i / row_chunks, chunk = i % row_chunks;
            const Row row(call.shape, tile, index);
            const int64_t first = static_cast<int64_t>(row.token) * call.shape.query_heads + row.head;
            const bool is_there = 8 * chunk < call.shape.head_dim;
            async_copy::load(shared.query_chunk(stage, index, chunk),
                             call.query + first * call.shape.head_dim + (is_there ? 8 * chunk : 0), is_there);
        }
    }
    async_copy::arrive_when_done(shared.tile_full(stage));
    if (thread == 0) {
        shared.tile(stage) = tile;
        mbarrier::arrive(shared.tile_full(stage));
    }
    ring.advance();
}

__device__ __forceinline__ void produce(const LoadCall& call, const Division& division) {
    TileSchedule schedule(call.shape, division);
    AppendedKeys appended(call.append);
    Ring ring;
    TileRing tile_ring;
    Tile tile;
#pragma unroll 1
    while (schedule.next(tile)) {
        hand_out(call, tile_ring, tile);
        load_blocks(call, ring, tile, appended);
        // The consumers count soon. What was in L2 when the tile began wouldn't be there any more.
        const bool counts = Traits::split && tile.sharers > 1 && tile.in_pair != InPair::gives;
        if (counts) call.partials.prefetch_count(tile, division);
    }
    tile.batch = Tile::no_more;
    hand_out(call, tile_ring, tile);
    if constexpr (Traits::cluster > 1) meet_twice();
}
