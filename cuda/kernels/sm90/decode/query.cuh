// How a tile's rows of Q get into shared memory. Columns beyond the head dim become 0; shared memory behind the tile's
// last row keeps what it held.
//
// The producer calls `ask_for_query`, when the tile's description is in shared memory. The tile's barrier tells the
// consumers when the rows are there, too. Consumers call `copy_first_query`, ahead of their first tile.
#pragma once
#include "ptx/async_copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/decode/store.cuh"

#if QUERY_TMA

// TMA copies the rows of a tile, which are all rows of a key head of a sequence: panel by panel, or whole if consumers
// rotate them.
__device__ __forceinline__ void ask_for_query(const SharedMemory& shared, const Shape& shape, const TensorMap& query,
                                              const Tile& tile, int tile_stage, bool /* is_first */) {
    constexpr int boxes = Traits::rotary ? 1 : Traits::key_panels;
    constexpr int row_bytes = Traits::rotary ? 2 * Traits::head_dim : descriptor::row_bytes;
    const uint32_t full = shared.tile_full(tile_stage);
    if (threadIdx.x != Traits::consumer_threads) return;
    if (!tile.exists() || tile.first == tile.last) {
        mbarrier::arrive(full);
        return;
    }
    mbarrier::arrive_expect(full, tile.rows * boxes * row_bytes);
#pragma unroll
    for (int box = 0; box < boxes; ++box) {
        const int column = box * descriptor::panel_columns;
        tma::load(shared.query_chunk(tile_stage, 0, column / 8), query, full, column, tile.key_head * shape.group, 0,
                  tile.batch);
    }
}

__device__ __forceinline__ void copy_first_query(const SharedMemory&, const Shape&, const TensorMap&) {}

#else

// Begins to copy a tile's rows, by so many threads, of which the caller is one.
template <int threads>
__device__ __forceinline__ void copy_query(const SharedMemory& shared, const Shape& shape,
                                           const Traits::Element* query, const Tile& tile, int tile_stage, int thread) {
    constexpr int row_chunks = Traits::head_dim / 8, most = ceil_div(Traits::query_rows * row_chunks, threads);
#pragma unroll most >= 4 && Traits::query_rows > 8 ? 4 : 1
    for (int i = thread; i < tile.rows * row_chunks; i += threads) {
        const int index = i / row_chunks, chunk = i % row_chunks;
        const Row row(shape, tile, index);
        const int64_t first = static_cast<int64_t>(row.token) * shape.query_heads + row.head;
        const bool is_there = 8 * chunk < shape.head_dim;
        async_copy::load(shared.query_chunk(tile_stage, index, chunk),
                         query + first * shape.head_dim + (is_there ? 8 * chunk : 0), is_there);
    }
}

// Threads copy the rows: consumers those of a CTA's first tile, while the producer asks for keys. If the producer
// copied them, it would do so before it asks for keys, behind which Q waits for long, and the keys would come later. It
// copies the rows of other tiles, ahead of time.
__device__ __forceinline__ void ask_for_query(const SharedMemory& shared, const Shape& shape,
                                              const Traits::Element* query, const Tile& tile, int tile_stage,
                                              bool is_first) {
    const int thread = threadIdx.x - Traits::consumer_threads;
    const uint32_t full = shared.tile_full(tile_stage);
    if (Traits::cluster == 1 && !is_first && tile.exists() && tile.first < tile.last) {
        copy_query<Traits::producer_threads>(shared, shape, query, tile, tile_stage, thread);
    }
    async_copy::arrive_when_done(full);
    if (thread == 0) mbarrier::arrive(full);
}

__device__ __forceinline__ void copy_first_query(const SharedMemory& shared, const Shape& shape,
                                                 const Traits::Element* query) {
    constexpr int tile_stage = 0, parity = 0;
    mbarrier::wait(shared.tile_full(tile_stage), parity);
    const Tile tile = shared.tile(tile_stage);
    if (!tile.exists() || tile.first == tile.last) return;
    copy_query<Traits::consumer_threads>(shared, shape, query, tile, tile_stage, threadIdx.x);
    async_copy::wait_for_own();
    fence_shared_for_async();  // wgmma reads it
    sync_consumers();
}

#endif
