// Adds dQ to its sum in a fixed order (dq_order.cuh). Each sum has a semaphore in L2, and acquiring and releasing it
// takes longer than the adding. So different warps do the three steps: one acquires, some blocks ahead; one adds, or
// the consumers do; one releases. All of them go through the blocks in the same order.
#pragma once
#include "sm90/backward/dq_accum.cuh"
#include "sm90/backward/dq_semaphore.cuh"

using SemaphoreSlot = PipelineState<Traits::semaphore_stages>;

// What the warps have in common: visit(work, head, block, slot) for each block, in one thread.
template <class Visit>
__device__ __forceinline__ void for_each_block_in_order(const Call& call, Visit visit) {
    const int lane = threadIdx.x % 32;
    SemaphoreSlot slot;
    auto visit_blocks = [&](const Work& work) {
        work.for_each_block(call.shape, [&](int head, int block, int) {
            visit(work, head, block, slot);
            slot.advance();
        });
    };
    if constexpr (Traits::persistent) {
        call.for_each_tile([&](const Work& work, const KeySlot& key_slot) {
            if (arrives(lane)) mbarrier::arrive(call.shared.key_empty(key_slot.stage));  // the tile's index is read
            if (lane == 0) visit_blocks(work);
        });
    } else if (lane == 0) {
        visit_blocks(call.work(call.own_tile()));
    }
}

__device__ __forceinline__ void acquire_semaphores(const Call& call) {
    for_each_block_in_order(call, [&](const Work& work, int head, int block, const SemaphoreSlot& slot) {
        mbarrier::wait(call.shared.dq_added(slot.stage), slot.parity ^ 1);
        acquire_semaphore(call, work, semaphore_of(call, work, head, block), block);
        mbarrier::arrive(call.shared.semaphore_acquired(slot.stage));
    });
}

__device__ __forceinline__ void add_d_query_in_order(const Call& call) {
    DqSlot dq_slot;
    for_each_block_in_order(call, [&](const Work& work, int head, int block, const SemaphoreSlot& slot) {
        mbarrier::wait(call.shared.semaphore_acquired(slot.stage), slot.parity);
        // The first tile stores, as the sum may not be set to zero.
        const bool is_first = call.rank(work, block) == 0;
        add_staged_block(call, dq_slot, call.dq_accum_block(work.tile, head, block), is_first);
        mbarrier::wait(call.shared.semaphore_released(slot.stage), slot.parity ^ 1);
        tma::wait_group<0>();
        mbarrier::arrive(call.shared.dq_added(slot.stage));
    });
}

__device__ __forceinline__ void release_semaphores(const Call& call) {
    for_each_block_in_order(call, [&](const Work& work, int head, int block, const SemaphoreSlot& slot) {
        mbarrier::wait(call.shared.dq_added(slot.stage), slot.parity);
        release_semaphore(semaphore_of(call, work, head, block));
        mbarrier::arrive(call.shared.semaphore_released(slot.stage));
    });
}
