// What happens to dQ of a block once it is computed, in warps that have nothing else to do: one adds it to the float32
// sum and counts; others write dQ of the blocks that all key tiles have added to (DqAccum in call.cuh), unless
// backward_postprocess does.
#pragma once
#include "ptx/bulk.cuh"
#include "ptx/global.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/backward/call.cuh"

// Counts what the adding thread has added to, span after span.
struct Ledger {
    int pending = -1;  // a span, among those of all heads, that this tile is through with; negative for none

    // Counts the pending span once this thread's additions to it are complete. Its newest `newer` groups of additions
    // are to later blocks, and may still be under way.
    template <int newer>
    __device__ __forceinline__ void settle(const Call& call) {
        if (Traits::writers == 0 || pending < 0) return;
        tma::wait_group<newer>();
        global::count(call.dq_accum.arrived + pending);
        pending = -1;
    }
};

// Adds the staged dQ of a block to its sum, or stores it there if it is the first, in `DqBlock::tiles` bulk groups.
// One thread.
__device__ __forceinline__ void add_staged_block(const Call& call, DqSlot& slot, float* sum, bool is_first = false) {
    const SharedMemory& shared = call.shared;
#pragma unroll 1
    for (int tile = 0; tile < DqBlock::tiles; ++tile) {
        const int row_tile = tile / DqBlock::column_tiles, column_tile = tile % DqBlock::column_tiles;
        const int first_chunk = column_tile * DqBlock::tile_columns / 8;
        mbarrier::wait(shared.dq_full(slot.stage), slot.parity);
        fence_global_for_async();  // what other CTAs wrote: zeros (wait_for_dq_accum_slot)
        float* const destination = sum + 64 * 8 * (row_tile * DqBlock::chunks + first_chunk);
        const int bytes = min(DqBlock::tile_bytes, (DqBlock::chunks - first_chunk) * DqBlock::chunk_bytes);
        if (is_first) {
            bulk::store(destination, shared.d_query_stage(slot.stage), bytes);
        } else {
            bulk::reduce_add(destination, shared.d_query_stage(slot.stage), bytes);
        }
        tma::commit_group();
        tma::wait_group_read<0>();
        mbarrier::arrive(shared.dq_empty(slot.stage));
        slot.advance();
    }
}

// Adds block after block. All lanes of one warp.
__device__ __forceinline__ void add_d_query(const Call& call) {
    DqSlot slot;
    Ledger ledger;
    call.for_each_tile([&](const Work& work, const KeySlot& key_slot) {
        const int lane = threadIdx.x % 32;
        if (arrives(lane)) mbarrier::arrive(call.shared.key_empty(key_slot.stage));  // the tile's index is read
        if (lane != 0) return;
        // Read a block ahead where a list says.
        int next_block = Traits::block_lists && work.blocks.count() > 0 ? block_at(0, work.tile, call.shape) : 0;
        work.for_each_block(call.shape, [&](int head, int place, int) {
            const bool is_last = place == work.blocks.last - 1;
            const int block = Traits::block_lists ? next_block : place;
            if constexpr (Traits::block_lists) next_block = block_at(is_last ? 0 : place + 1, work.tile, call.shape);
            const int head_index = call.head_index(work.tile, head);
            // A head's only tile stores, as its sum may not be set to zero (_first_tile_stores in backward_plan.py).
            const bool is_only = call.shape.key_tiles() == 1;
            add_staged_block(call, slot, call.dq_accum_block(head_index, block), is_only);
            ledger.settle<DqBlock::tiles>(call);
            const bool ends_span = is_last || (Traits::block_lists ? block / DqBlock::span != next_block / DqBlock::span
                                                                   : block % DqBlock::span == DqBlock::span - 1);
            if (ends_span) {
                ledger.pending = head_index * call.shape.spans() + block / DqBlock::span;
            }
        });
        ledger.settle<0>(call);  // the loading thread may wait for it
    });
}

// Waits until a head has a slot for its sum: until dQ of the earlier head that had the slot is written.
__device__ __forceinline__ void wait_for_dq_accum_slot(const Call& call, int head_index) {
    if (head_index < call.dq_accum.slots) return;
    const int* written = call.dq_accum.written + head_index - call.dq_accum.slots;
    while (!global::has_reached(written, call.shape.query_blocks() * DqBlock::row_tiles)) {
    }
}

// How many key tiles add to the job's span of blocks. None where no key sees the span, in any head: the sums stay zero,
// whichever head has the slot.
__device__ __forceinline__ int adding_tiles(const DqJob& job, const Shape& shape) {
    const int span = job.block / DqBlock::span;
    if constexpr (Traits::block_lists) {
#if BLOCK_MASK
        const BlockMask& mask = shape.block_mask;
        const int batch = job.head_index / shape.query_heads();
        const int head_share = (job.head_index - batch * shape.query_heads()) / shape.group;
        return mask.visitors[batch * mask.visitors_batch_stride +
                             shape.key_head(head_share) * mask.visitors_head_stride + span];
#endif
    } else if constexpr (Traits::mask_metadata) {
        return shape.mask_metadata.span_tiles[job.head_index / shape.query_heads() * shape.spans() + span];
    } else {
        return key_tile_count(span * DqBlock::span, DqBlock::span, shape);
    }
}

// Converts 64 rows × 16 columns of sums, at `stage`, to dQ, which is staged over them: 16 rows over half of their sums.
// `matrix` is where in it the lane's part of a matrix goes.
__device__ __forceinline__ void stage_d_query(const Call& call, const unsigned char* stage, uint32_t address,
                                              int matrix) {
    const float4* sum = reinterpret_cast<const float4*>(stage) + threadIdx.x % 32;
    auto convert_pair = [&](float low, float high) {
        const float factor = with_dropout(call.scale, call.dropout.factor);
        return convert<Traits::Element>(low * factor, high * factor);
    };
#pragma unroll
    for (int part = 0; part < 4; ++part) {
        const float4 x = sum[part * 32], y = sum[part * 32 + 128];
        store_matrix_x4(address + part * 512 + matrix, convert_pair(x.x, x.y), convert_pair(x.z, x.w),
                        convert_pair(y.x, y.y), convert_pair(y.z, y.w));
    }
}

// Writes dQ = scale · sum of what is complete, and zeroes the sums. All lanes of one of the warps for it.
__device__ __forceinline__ void write_d_query(const Call& call, int writer) {
    constexpr int units = DqBlock::chunks / 2;  // 64 rows × 16 columns
    static_assert(Traits::writer_bytes == 2 * DqBlock::chunk_bytes, "");
    const SharedMemory& shared = call.shared;
    const DqAccum& accum = call.dq_accum;
    const Shape& shape = call.shape;
    const int lane = threadIdx.x % 32;
    const int heads = shape.batch * shape.query_heads();
    WriterSlot slot;

    // 16 rows × 16 columns are staged as rows of 32 bytes, with their halves exchanged in every other four rows,
    // so that those that are written at once lie in different banks.
    auto staged = [](int row, int half) { return row * 32 + (half ^ row / 4 % 2) * 16; };
    auto half_of = [](int thread) { return thread % 2 ^ thread / 8 % 2; };  // that a lane writes, of row lane / 2
    const int staged_matrix = staged(lane % 16, lane / 16);

    int zeroed = -1;     // the head of a piece that is written and zeroed, but not counted yet; negative for none
    auto settle = [&] {  // one thread
        if (zeroed >= 0) global::count(accum.written + zeroed);
        zeroed = -1;
    };
#pragma unroll 1
    while (true) {
        int index = 0;
        if (lane == 0) index = atomicAdd(accum.next_job, 1);
        index = __shfl_sync(all_lanes, index, 0);
        if (index >= heads * shape.query_blocks() * DqBlock::row_tiles) break;
        const DqJob job = d_query_job(index, shape, call.l2_head_group);
        float* sums = call.dq_accum_block(job.head_index, job.block) + job.row_tile * (64 * Traits::head_dim);
        auto load = [&](int unit, int stage) {  // one thread
            const uint32_t barrier = shared.writer_full(writer, stage);
            mbarrier::arrive_expect(barrier, Traits::writer_bytes);
            bulk::load(shared.base + SharedMemory::writer_offset(writer, stage),
                       sums + unit * (Traits::writer_bytes / 4), Traits::writer_bytes, barrier);
        };
        if (lane == 0) {
            const int span = job.block / DqBlock::span;
            const int tiles = adding_tiles(job, shape);
            while (!global::has_reached(accum.arrived + job.head_index * shape.spans() + span, tiles)) {
                settle();  // somebody may wait for it
                __nanosleep(200);
            }
            fence_global_for_async();
            for (int unit = 0; unit < min(units, Traits::writer_stages); ++unit) {
                load(unit, (slot.stage + unit) % Traits::writer_stages);
            }
            settle();
            if (job.head_index + accum.slots < heads) zeroed = job.head_index;
        }
        const int batch = job.head_index / shape.query_heads(), head = job.head_index - batch * shape.query_heads();
        const int stride = shape.query_heads() * accum.columns;  // from query to query
        const int query = job.block * Traits::queries + job.row_tile * 64 + lane / 2;
        Traits::Element* destination = accum.d_query +
                                       (static_cast<int64_t>(batch) * shape.queries + query) * stride +
                                       head * accum.columns + half_of(lane) * 8;
#pragma unroll 1
        for (int unit = 0; unit < units; ++unit) {
            mbarrier::wait(shared.writer_full(writer, slot.stage), slot.parity);
            unsigned char* stage = shared.data + SharedMemory::writer_offset(writer, slot.stage);
            stage_d_query(call, stage, shared.base + SharedMemory::writer_offset(writer, slot.stage), staged_matrix);
            __syncwarp();
            const bool column_there = unit * 16 + half_of(reload_thread_index()) * 8 < accum.columns;
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                if (query + part * 16 < shape.queries && column_there) {
                    *reinterpret_cast<uint4*>(destination + part * 16 * static_cast<int64_t>(stride)) =
                        reinterpret_cast<const uint4*>(stage)[part * 32 + lane];
                }
            }
            if (job.head_index + accum.slots < heads) {  // a later head gets the slot
                float4* zeros = reinterpret_cast<float4*>(sums) + unit * 256 + lane;
#pragma unroll
                for (int i = 0; i < 8; ++i) zeros[i * 32] = {0, 0, 0, 0};
            }
            destination += 16;
            fence_shared_for_async();
            __syncwarp();
            if (lane == 0 && unit + Traits::writer_stages < units) load(unit + Traits::writer_stages, slot.stage);
            slot.advance();
        }
    }
    if (lane == 0) settle();
}
