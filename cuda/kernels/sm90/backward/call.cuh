// What every role of the main backward kernel sees: the call, the CTA's work and the named barriers.
#pragma once
#include "parameters.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "common/warp_arrival.cuh"
#include "sm90/backward/mask_metadata.cuh"
#include "sm90/backward/dq_order.cuh"
#include "sm90/backward/tile_scheduler.cuh"
#include "sm90/backward/traits.cuh"

// Named barriers of two warpgroups (256 threads), and of one (128).
enum Barrier {
    d_scores_written = 1,
    probabilities_full,
    pingpong,            // and the next: one a consumer
    own = pingpong + 2,  // and the next two: one a consumer, one for dQ
    score_grad_full = own + 3,
};

// Loads panels of 64 columns that lie `rows` rows apart. One thread.
__device__ __forceinline__ void load_panels(uint32_t destination, const TensorMap& map, uint32_t barrier, int panels,
                                            int rows, int head, int first_row, int batch) {
#pragma unroll 1  // the loading thread has few registers
    for (int panel = 0; panel < panels; ++panel) {
        tma::load(destination + panel * descriptor::panel_bytes(rows), map, barrier, panel * descriptor::panel_columns,
                  head, first_row, batch);
    }
}

// A unit of work of a CTA, the same for all of its roles.
struct Work {
    KeyTile tile;
    QueryBlocks blocks;
    BlockOrder order;

    __device__ int iterations(const Shape& shape) const { return blocks.count() * shape.group; }

    __device__ BlockVisit first_visit() const {
        return {0, Traits::deterministic && order == BlockOrder::backward ? blocks.last - 1 : blocks.first};
    }

    // Calls visit(query_head, place, iteration), with a block's place, in the order that all roles share.
    template <class Visit>
    __device__ __forceinline__ void for_each_block(const Shape& shape, Visit visit) const {
        int iteration = 0;
        if constexpr (Traits::deterministic) {
            BlockVisit now = first_visit();
#pragma unroll 1
            for (const int end = iterations(shape); iteration < end; ++iteration) {
                visit(now.head(tile, shape), now.place, iteration);
                now.advance(blocks, order);
            }
        } else {
#pragma unroll 1
            for (int member = 0; member < shape.group; ++member) {
#pragma unroll 1
                for (int place = blocks.first; place < blocks.last; ++place) {
                    visit(tile.head * shape.group + member, place, iteration++);
                }
            }
        }
    }
};

// The float32 sums of dQ, and dQ itself. A head's sum has a slot only while key tiles add to it. When all of them have,
// dQ is written from it, the slot is set to zero, and a later head gets it. So the sums stay in L2.
struct DqAccum {
    float* sums;              // (dq_sums · slots, query blocks, queries · head_dim), see DqBlock; zeros at first
    int* arrived;             // (B, N, spans of query blocks): how many key tiles have added to the span; null if each
                              // head has a slot of its own and backward_postprocess writes dQ
    int* written;             // (B, N): pieces of dQ that are written
    int* next_job;            // pieces of dQ, of all heads, that warps have taken in order to write them
    Traits::Element* d_query;  // (B, T, N, columns)
    int slots, columns;
};

// Parameters that every role sees.
struct Call {
    const SharedMemory shared;
    const TensorMaps& maps;
    const Shape shape;
    const float* lse_delta;   // (B, N, query blocks, 2 or 3, queries): lse in base 2, with dropout hashes, and delta
    const int* spoiled;       // (B, N, query blocks): see isolation.cuh; null unless Traits::isolates
    const DqAccum dq_accum;
    int* next_tile;           // counts the units handed out; null where each tile has its CTA and none waits
    int* dq_semaphore;        // (dq_sums, B, N, query blocks): additions to each so far; null unless deterministic
    const KeySums key_sums;
    int l2_head_group;        // see unit_at
    float scale;
    const ScoreOperands scores;
    Traits::BiasSum* d_bias;   // as the bias
    float* d_slopes;           // (B, N, shares of 64 keys, 4 warps)
    const float* bias_factor;  // of terms that are added up as integers
    const Dropout dropout;
#if WIDE_KEY_GRADIENTS
    const WideKeyGradients wide_key_gradients;  // float32 rows of dK and dV
#endif
#if SCORE_MOD_GRADIENTS
    const UserScoreModGradients user_gradients;  // of arrays that the user's function captures
#endif

    __device__ int unit_count() const { return units_of_heads(shape.head_shares * shape.batch, shape); }
    __device__ Work work(int unit_index) const {
        BlockOrder order = BlockOrder::forward;
        if constexpr (Traits::deterministic) order = block_order(unit_index, shape, l2_head_group);
        const bool last_first = Traits::deterministic && order == BlockOrder::forward;
        const auto [tile, part] = unit_at(unit_index, shape, l2_head_group, last_first);
        QueryBlocks blocks;
        if constexpr (Traits::block_lists) {
#if BLOCK_MASK
            blocks = {0, block_list(tile, shape).count};
#endif
        } else if constexpr (Traits::mask_metadata) {
            blocks = query_blocks_from_metadata(tile, shape);
        } else {
            blocks = query_blocks(tile, shape);
        }
        if constexpr (Traits::key_sums && !Traits::deterministic) blocks = part_of(blocks, part, shape.units.parts());
        return {tile, blocks, order};
    }
    // How many tiles add to the same sum of the block's dQ before this one does.
    __device__ int rank(const Work& work, int block) const {
        return rank_of(work.tile, work.order, block, shape);
    }
    // Index of the tile of a CTA that has one only. Where tiles wait for others it comes from the counter (take_tile).
    __device__ int own_tile() const {
        if constexpr (Traits::deterministic) return shared.told_tile(0);
        return blockIdx.x / Traits::cluster;
    }
    // The same for all lanes of a warp, in a uniform register.
    __device__ int own_tile_uniform() const {
        if constexpr (Traits::deterministic) return __shfl_sync(all_lanes, own_tile(), 0);
        return own_tile();
    }
    // What the loading thread tells the others of the tile whose K comes, if any, see `told_tile`.
    __device__ Work& told_work(int stage) const {
        static_assert(!Traits::tells_work || sizeof(Work) <= Traits::work_bytes, "there is room for it");
        return reinterpret_cast<Work&>(shared.told_tile(stage));
    }
    // Calls visit(work, slot) for each of the CTA's tiles, as soon as its K is there, in `slot`, which visit releases.
    template <class Visit>
    __device__ __forceinline__ void for_each_tile(Visit visit) const {
#pragma unroll 1
        for (KeySlot slot;; slot.advance()) {
            mbarrier::wait(shared.key_full(slot.stage), slot.parity);
            // By one lane, which may let go of the tile before others are here. In uniform registers.
            auto same = [](int of_lane) { return __shfl_sync(all_lanes, of_lane, 0); };
            const int told_tile = same(shared.told_tile(slot.stage));
            if (told_tile == SharedMemory::no_more_tiles) break;
            if constexpr (Traits::tells_work) {
                const Work& told = told_work(slot.stage);
                const KeyTile tile{told_tile, same(told.tile.head), same(told.tile.batch)};
                const QueryBlocks blocks{same(told.blocks.first), same(told.blocks.last)};
                BlockOrder order = BlockOrder::forward;
                if constexpr (Traits::deterministic) {
                    order = static_cast<BlockOrder>(same(static_cast<int>(told.order)));
                }
                visit(Work{tile, blocks, order}, slot);
            } else {
                visit(work(told_tile), slot);
            }
        }
    }

    // A query head among those of all batch rows.
    __device__ int head_index(const KeyTile& tile, int query_head) const {
        return tile.batch * shape.query_heads() + query_head;
    }
    // Where a block's share of a (B, N, query blocks, …) array lies.
    __device__ int64_t block_index(int head_index, int block) const {
        return static_cast<int64_t>(head_index) * shape.query_blocks() + block;
    }
    __device__ const float* lse_delta_block(const KeyTile& tile, int query_head, int block) const {
        const int64_t index = block_index(head_index(tile, query_head), block);
        return lse_delta + index * (Traits::per_query_values * Traits::queries);
    }
    // The sum of a head's dQ to which a tile adds, among those of all heads: first come the first sums of all of them.
    __device__ int dq_sum_index(const KeyTile& tile, int query_head) const {
        return dq_sum_of(tile) * (shape.batch * shape.query_heads()) + head_index(tile, query_head);
    }
    __device__ float* dq_accum_block(int dq_sum_index, int block) const {
        // Heads with several sums have a slot for each.
        const int slot = Traits::dq_sums > 1 ? dq_sum_index : dq_sum_index % dq_accum.slots;
        return dq_accum.sums + block_index(slot, block) * DqBlock::elements;
    }
    __device__ float* dq_accum_block(const KeyTile& tile, int query_head, int block) const {
        return dq_accum_block(dq_sum_index(tile, query_head), block);
    }
};
