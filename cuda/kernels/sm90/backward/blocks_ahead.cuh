// The blocks of a tile as the loading thread visits them, read ahead.
#pragma once
#include "ptx/global.cuh"
#include "sm90/backward/call.cuh"

// Which blocks a tile visits, where a list says, and which of them have rows that aren't finite (isolation.cuh). Both
// come from L2, as the acquire loads of other warps empty L1. So flags are read while the block before is loaded, and
// the list one more block ahead, as it says where the flag is. One thread.
class BlocksAhead {
public:
    __device__ __forceinline__ BlocksAhead(const Call& call, const Work& work) : next(work.first_visit()) {
        if (!Traits::isolates || work.iterations(call.shape) == 0) return;
        if constexpr (Traits::block_lists) following_block = visited_block(next.place, work.tile, call.shape);
        read(call, work);
    }

    struct Block {
        VisitedBlock visited;
        bool spoiled;
    };
    // The next block of the tile, number `iteration` at `place`.
    __device__ __forceinline__ Block take(const Call& call, const Work& work, int place, int iteration) {
        const Block block{Traits::block_lists ? next_block : VisitedBlock{place},
                          Traits::isolates && next_spoiled != 0};
        if constexpr (Traits::isolates) {
            next.advance(work.blocks, work.order);
            if (iteration + 1 < work.iterations(call.shape)) read(call, work);
        }
        return block;
    }

private:
    static_assert(Traits::isolates || !Traits::block_lists, "a block mask hides pairs");
    BlockVisit next;
    VisitedBlock next_block, following_block;  // of the list
    int next_spoiled = 0;

    __device__ __forceinline__ void read(const Call& call, const Work& work) {
        next_block = {next.place};
        if constexpr (Traits::block_lists) {
            next_block = following_block;
            // After the last the first again, for the group's next head.
            const int place = next.place + 1 == work.blocks.last ? 0 : next.place + 1;
            following_block = visited_block(place, work.tile, call.shape);
        }
        const int head_index = call.head_index(work.tile, next.head(work.tile, call.shape));
        next_spoiled = global::read_only(call.spoiled + call.block_index(head_index, next_block.index()));
    }
};
