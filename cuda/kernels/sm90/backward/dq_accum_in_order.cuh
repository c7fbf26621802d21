// Adding dQ to its sum where tiles do so in turns (dq_order.cuh). A turn's beginning and its end are words in L2,
// and take longer than the adding. So several share a block: a warp waits for its turn, some blocks ahead; a warp adds, or
// consumers do, and know when that is done; a warp says so. All see to the blocks in the same order.
#pragma once
#include "sm90/backward/dq_accum.cuh"
#include "sm90/backward/dq_semaphore.cuh"

using TurnSlot = PipelineState<Traits::turn_stages>;

// What the warps have in common: visit(work, head, block, slot) for each block, in one thread.
template <class Visit>
__device__ __forceinline__ void for_each_turn(const Call& call, Visit visit) {
    const bool first_lane = threadIdx.x % 32 == 0;
    TurnSlot slot;
    auto visit_blocks = [&](const Work& work) {
        work.for_each_block(call.shape, [&](int head, int block, int) {
            visit(work, head, block, slot);
            slot.advance();
        });
    };
    if constexpr (Traits::persistent) {
        call.for_each_tile([&](const Work& work, const KeySlot& key_slot) {
            if (!first_lane) return;
            mbarrier::arrive(call.shared.key_empty(key_slot.stage));  // the tile's index is read
            visit_blocks(work);
        });
    } else if (first_lane) {
        visit_blocks(call.work(call.own_tile()));
    }
}

__device__ __forceinline__ void wait_for_turns(const Call& call) {
    for_each_turn(call, [&](const Work& work, int head, int block, const TurnSlot& slot) {
        mbarrier::wait(call.shared.turn_ended(slot.stage), slot.parity ^ 1);
        wait_for_turn(call, work, turn_of(call, work, head, block), block);
        mbarrier::arrive(call.shared.turn_begun(slot.stage));
    });
}

__device__ __forceinline__ void add_in_turns(const Call& call) {
    SumSlot sum_slot;
    for_each_turn(call, [&](const Work& work, int head, int block, const TurnSlot& slot) {
        mbarrier::wait(call.shared.turn_begun(slot.stage), slot.parity);
        // Nobody zeroed the sum.
        const bool is_first = call.rank(work, block) == 0;
        add_staged_block(call, sum_slot, call.d_query_block(work.tile, head, block), is_first);
        mbarrier::wait(call.shared.turn_told(slot.stage), slot.parity ^ 1);
        tma::wait_group<0>();
        mbarrier::arrive(call.shared.turn_ended(slot.stage));
    });
}

__device__ __forceinline__ void end_turns(const Call& call) {
    for_each_turn(call, [&](const Work& work, int head, int block, const TurnSlot& slot) {
        mbarrier::wait(call.shared.turn_ended(slot.stage), slot.parity);
        end_turn(turn_of(call, work, head, block));
        mbarrier::arrive(call.shared.turn_told(slot.stage));
    });
}
