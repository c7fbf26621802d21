// The producer role of the decode kernel: tells the consumers of tiles, and loads their blocks of keys and values through
// a ring of stages. TMA copies them (load_tma.cuh), or, from pages whose size doesn't suit it, threads do (load_gather.cuh).
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/decode/schedule.cuh"

struct LoadCall {
    const Cache& cache;
    const SharedMemory& shared;
    const Shape& shape;
};

using Ring = PipelineState<Traits::stages>;
using TileRing = PipelineState<Traits::tile_stages>;

#if BOX
#include "sm90/decode/load_tma.cuh"
#else
#include "sm90/decode/load_gather.cuh"
#endif

__device__ __forceinline__ void hand_out(const SharedMemory& shared, TileRing& ring, const Tile& tile) {
    if (threadIdx.x == Traits::consumer_threads) {
        mbarrier::wait(shared.tile_empty(ring.stage), ring.parity ^ 1);
        shared.tile(ring.stage) = tile;
        mbarrier::arrive(shared.tile_full(ring.stage));
    }
    ring.advance();
}

__device__ __forceinline__ void produce(const LoadCall& call, int max_parts, int least_share) {
    Schedule schedule(call.shape, max_parts, least_share);
    Ring ring;
    TileRing tile_ring;
    Tile tile;
#pragma unroll 1
    while (schedule.next(tile)) {
        hand_out(call.shared, tile_ring, tile);
        load_blocks(call, ring, tile);
    }
    tile.batch = Tile::no_more;
    hand_out(call.shared, tile_ring, tile);
}
