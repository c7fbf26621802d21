// The warpgroup that computes dQ = dS K of each block from what the consumers hand over, adds it to the float32 sum, and
// writes blocks to whose sums nobody has anything to add any more.
#pragma once
#include "../ptx/global.cuh"
#include "../ptx/mbarrier.cuh"
#include "backward_call.cuh"
#include "backward_products.cuh"

// Adds a tile of dQ, as accumulators, to the sum; `of_thread` is where this thread's first four go.
template <int count, int i = 0>
__device__ __forceinline__ void add_from_registers(const float (&d_query)[count], float* of_thread) {
    if constexpr (i < count) {
        bulk::reduce_add<i * 512>(of_thread, d_query[i], d_query[i + 1], d_query[i + 2], d_query[i + 3]);
        add_from_registers<count, i + 4>(d_query, of_thread);
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

// A block that this CTA has added to.
struct AddedBlock {
    int head, block;  // head: of queries; negative for none
};

// Writes dQ = scale · the sum of a block and zeroes the sum. All threads of the warpgroup for dQ.
__device__ __forceinline__ void write_d_query(const Call& call, const AddedBlock& added) {
    const int thread = threadIdx.x % 128;
    const QueryGradient& d_query = call.d_query;
    float4* sums = reinterpret_cast<float4*>(call.d_query_block(added.head, added.block)) + thread;
    const int column = thread % 4 * 2;
    const int64_t stride = static_cast<int64_t>(call.shape.query_heads()) * d_query.columns;  // from query to query
    __threadfence();
#pragma unroll 1
    for (int row_tile = 0; row_tile < DqBlock::row_tiles; ++row_tile) {
        const int query = added.block * Traits::queries + 64 * row_tile + thread / 32 * 16 + thread % 32 / 4;
        const int64_t row = static_cast<int64_t>(call.work.tile.batch) * call.shape.queries + query;
        Traits::Element* destination = d_query.result + row * stride + added.head * d_query.columns + column;
#pragma unroll 4
        for (int chunk = 0; chunk < DqBlock::chunks; ++chunk, sums += 128) {
            const float4 sum = global::load(sums);
            *sums = {0, 0, 0, 0};
            if (chunk * 8 >= d_query.columns) continue;
            auto write = [&](int rows, float x, float y) {
                if (query + rows < call.shape.queries) {
                    *reinterpret_cast<uint32_t*>(destination + rows * stride + chunk * 8) =
                        pack<Traits::Element>(x * call.scale, y * call.scale);
                }
            };
            write(0, sum.x, sum.y);
            write(8, sum.z, sum.w);
        }
    }
    named_barrier_sync(own + Traits::consumers, 128);
    if (thread == 0) {
        __threadfence();
        atomicAdd(d_query.written + call.head_index(added.head), 1);
    }
}

// Says that this CTA has added to a block, and finds out, a block later as that takes a while, whether it was the last.
struct Bookkeeper {
    AddedBlock added{-1, 0}, counted{-1, 0};
    int before = 0;  // how many key tiles had added to the counted block

    // `pending`: groups of this thread's additions since those to `added`.
    template <int pending>
    __device__ __forceinline__ void next(const Call& call, const AddedBlock& now) {
        const QueryGradient& d_query = call.d_query;
        bool complete = false;
        if (threadIdx.x % 128 == 0) {
            if (counted.head >= 0) complete = before == key_tile_count(counted.block, call.shape) - 1;
            if (added.head >= 0) {
                tma::wait_group<pending>();
                __threadfence();
                before = atomicAdd(
                    d_query.arrived + call.head_index(added.head) * call.shape.query_blocks() + added.block, 1);
            }
        }
        if (named_barrier_any(own + Traits::consumers, 128, complete)) write_d_query(call, counted);
        counted = added;
        added = now;
    }
};

__device__ __forceinline__ void compute_d_query(const Call& call) {
    constexpr int tiles = DqBlock::row_tiles * DqBlock::column_tiles;
    const SharedMemory& shared = call.shared;
    DScoresSlot slot;
    Bookkeeper bookkeeper;
    if (call.work.blocks.count() > 0) mbarrier::wait(shared.key_full(), 0);
    call.work.for_each_block(call.shape, [&](int head, int block, int) {
        if (block == call.work.blocks.first && threadIdx.x % 128 == 0) {
            const int before = call.head_index(head) - call.d_query.places;  // who had the place
            if (before >= 0) global::wait_until(call.d_query.written + before, seeing_block_count(call.shape));
        }
        float* sum = call.d_query_block(head, block);
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
            const int first_chunk = column_tile * DqBlock::tile_columns / 8;
            add_from_shared(call, d_query, sum + 64 * 8 * (row_tile * DqBlock::chunks + first_chunk),
                            min(DqBlock::tile_bytes, (DqBlock::chunks - first_chunk) * DqBlock::chunk_bytes), 0,
                            own + Traits::consumers);
        }
        if (threadIdx.x % 32 == 0) mbarrier::arrive(shared.d_scores_empty(slot.stage));
        slot.advance();
        bookkeeper.next<tiles>(call, {head, block});
    });
    bookkeeper.next<0>(call, {-1, 0});
    bookkeeper.next<0>(call, {-1, 0});
}
