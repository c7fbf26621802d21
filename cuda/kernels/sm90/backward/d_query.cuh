// The warpgroup that computes dQ = dS K of each block from what the consumers hand over, and stages it for the warp
// that adds it to the float32 sum (dq_accum.cuh); and how consumers add dQ that they compute themselves.
#pragma once
#include "ptx/mbarrier.cuh"
#include "sm90/backward/call.cuh"
#include "sm90/backward/products.cuh"

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

// Writes this thread's part of a tile of dQ to shared memory, in the order of DqBlock.
template <int count>
__device__ __forceinline__ void stage_d_query(const float (&d_query)[count], unsigned char* destination) {
    float4* vectors = reinterpret_cast<float4*>(destination) + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < count; i += 4) {
        vectors[i / 4 * 128] = {d_query[i], d_query[i + 1], d_query[i + 2], d_query[i + 3]};
    }
    fence_shared_for_async();
}

// Adds a tile of dQ to the sum by TMA, from `staged` bytes into the shared memory for dQ. All threads of a warpgroup,
// for which `barrier` is.
template <int count>
__device__ __forceinline__ void add_from_shared(const Call& call, const float (&d_query)[count], float* sum, int staged,
                                                int barrier) {
    const bool first = threadIdx.x % 128 == 0;
    if (first) tma::wait_group_read<0>();
    named_barrier_sync(barrier, 128);
    stage_d_query(d_query, call.shared.data + SharedMemory::d_query + staged);
    named_barrier_sync(barrier, 128);
    if (first) {
        bulk::reduce_add(sum, call.shared.base + SharedMemory::d_query + staged, 128 * count * 4);
        tma::commit_group();
    }
}

// Waits until what this warpgroup added by TMA has arrived.
__device__ __forceinline__ void wait_for_additions() {
    if (threadIdx.x % 128 == 0) tma::wait_group<0>();
}

__device__ __forceinline__ void compute_d_query(const Call& call) {
    const SharedMemory& shared = call.shared;
    const int lane = threadIdx.x % 32;
    DScoresSlot slot;
    DqSlot dq_slot;
    call.for_each_tile([&](const Work& work, const KeySlot& key_slot) {
        const int iterations = work.iterations(call.shape);
#pragma unroll 1
        for (int iteration = 0; iteration < iterations; ++iteration) {
            mbarrier::wait(shared.d_scores_full(slot.stage), slot.parity);
#pragma unroll 1  // or else ptxas carries a tile on, past the next one's products
            for (int tile = 0; tile < DqBlock::tiles; ++tile) {
                const int row_tile = tile / DqBlock::column_tiles, column_tile = tile % DqBlock::column_tiles;
                float d_query[DqBlock::tile_columns / 2];
                issue_d_query<DqBlock::tile_columns>(
                    d_query, shared.d_scores_buffer(slot.stage) + row_tile * descriptor::panel_bytes(Traits::keys),
                    shared.key_tile(key_slot.stage) + column_tile * descriptor::panel_bytes(Traits::keys));
                wgmma::wait<0>();
                wgmma::pin(d_query);
                if (tile == DqBlock::tiles - 1 && arrives(lane)) {
                    mbarrier::arrive(shared.d_scores_empty(slot.stage));
                    if (iteration == iterations - 1) mbarrier::arrive(shared.key_empty(key_slot.stage));
                }
                mbarrier::wait(shared.dq_empty(dq_slot.stage), dq_slot.parity ^ 1);
                stage_d_query(d_query, shared.data + SharedMemory::d_query + dq_slot.stage * Traits::d_query_bytes);
                __syncwarp();
                if (lane == 0) mbarrier::arrive(shared.dq_full(dq_slot.stage));
                dq_slot.advance();
            }
            slot.advance();
        }
        if (iterations == 0 && arrives(lane)) mbarrier::arrive(shared.key_empty(key_slot.stage));
    });
}
