// The warpgroup that computes dQ = dS K of each block from what the consumers hand over, and adds it to the float32
// sum; and adding to it, which consumers that compute dQ themselves do too.
#pragma once
#include "../ptx/mbarrier.cuh"
#include "backward_call.cuh"
#include "backward_products.cuh"

// Adds a tile of dQ, as accumulators, to the sum, which has `columns` of its columns; `of_thread` is where this
// thread's first four go.
template <int count, int i = 0>
__device__ __forceinline__ void add_from_registers(const float (&d_query)[count], float* of_thread, int columns) {
    if constexpr (i < count) {
        if (2 * i >= columns) return;
        bulk::reduce_add<i * 512>(of_thread, d_query[i], d_query[i + 1], d_query[i + 2], d_query[i + 3]);
        add_from_registers<count, i + 4>(d_query, of_thread, columns);
    }
}

// The same by TMA, `bytes` of the tile, from `staged` bytes into the shared memory for dQ. All threads of a warpgroup,
// for which `barrier` is.
template <int count>
__device__ __forceinline__ void add_from_shared(const Call& call, const float (&d_query)[count], float* sum, int bytes,
                                                int staged, int barrier) {
    const int thread = threadIdx.x % 128;
    float4* vectors = reinterpret_cast<float4*>(call.shared.data + SharedMemory::d_query + staged);
    if (thread == 0) tma::wait_group_read<0>();
    named_barrier_sync(barrier, 128);
#pragma unroll
    for (int i = 0; i < count; i += 4) {
        vectors[i / 4 * 128 + thread] = {d_query[i], d_query[i + 1], d_query[i + 2], d_query[i + 3]};
    }
    fence_proxy_async();
    named_barrier_sync(barrier, 128);
    if (thread == 0) {
        bulk::reduce_add(sum, call.shared.base + SharedMemory::d_query + staged, bytes);
        tma::commit_group();
    }
}

// Waits until what this warpgroup added by TMA has arrived.
__device__ __forceinline__ void wait_for_sums() {
    if (threadIdx.x % 128 == 0) tma::wait_group<0>();
}

__device__ __forceinline__ void compute_d_query(const Call& call) {
    constexpr int tiles = DqBlock::row_tiles * DqBlock::column_tiles;
    const SharedMemory& shared = call.shared;
    DScoresSlot slot;
    call.for_each_tile([&](const Work& work, uint32_t) {
        const int last_iteration = work.iterations(call.shape) - 1;
        work.for_each_block(call.shape, [&](int head, int block, int iteration) {
            float* sum = call.d_query_block(work.tile, head, block);
            mbarrier::wait(shared.d_scores_full(slot.stage), slot.parity);
#pragma unroll 1  // or else ptxas carries a tile on, past the next one's products
            for (int tile = 0; tile < tiles; ++tile) {
                const int row_tile = tile / DqBlock::column_tiles, column_tile = tile % DqBlock::column_tiles;
                float d_query[DqBlock::tile_columns / 2];
                issue_d_query<DqBlock::tile_columns>(
                    d_query, shared.d_scores_buffer(slot.stage) + row_tile * descriptor::panel_bytes(Traits::keys),
                    shared.key_tile() + column_tile * descriptor::panel_bytes(Traits::keys));
                wgmma::wait<0>();
                wgmma::pin(d_query);
                if (tile == tiles - 1 && threadIdx.x % 32 == 0) {
                    mbarrier::arrive(shared.d_scores_empty(slot.stage));
                    if (iteration == last_iteration) mbarrier::arrive(shared.key_empty());
                }
                const int first_chunk = column_tile * DqBlock::tile_columns / 8;
                add_from_shared(call, d_query, sum + 64 * 8 * (row_tile * DqBlock::chunks + first_chunk),
                                min(DqBlock::tile_bytes, (DqBlock::chunks - first_chunk) * DqBlock::chunk_bytes), 0,
                                own + Traits::consumers);
            }
            slot.advance();
        });
        if (last_iteration < 0 && threadIdx.x % 32 == 0) mbarrier::arrive(shared.key_empty());
    });
    wait_for_sums();
}
