// The consumers that split a tile of 128 keys: each computes Sᵀ, dPᵀ, dV and dK of its 64 keys.
//
// What of the next tile comes beside the tile before depends on the head dim (Traits::gradients_in_value_place):
//
//   up to 96   K, to a place of its own. V of 64 keys is read by one consumer alone, which stages its gradients there
//              when it is through with it, dV beside the last product of dK, and then loads the next tile's V itself,
//              beside that one's first scores;
//   128        V, as soon as both consumers have read the one before, and K once the warpgroup for dQ has. dV, dK and
//              the next V would take longer to go through one place than those scores, so that gradients have another.
#pragma once
#include "ptx/mbarrier.cuh"
#include "sm90/backward/call.cuh"
#include "sm90/backward/isolation.cuh"
#include "sm90/backward/key_sums.cuh"
#include "sm90/backward/products.cuh"
#include "sm90/backward/scores.cuh"
#include "sm90/backward/store_keys.cuh"

// Ping-pong: the consumers alternate on the tensor cores. Left alone they fall into step, and neither has products to
// run while both compute exponentials.
__device__ __forceinline__ void pingpong_wait(int consumer) { named_barrier_sync(pingpong + consumer, 256); }
__device__ __forceinline__ void pingpong_signal(int consumer) { named_barrier_arrive(pingpong + (consumer ^ 1), 256); }

struct BlockAndHead {
    VisitedBlock block;
    int head;
};
__device__ __forceinline__ BlockAndHead block_and_head(const Call& call, const Work& work, const BlockVisit& now,
                                                       int stage) {
    if constexpr (Traits::tells_blocks) {
        const int2 told = call.shared.told_block(stage);
        return {{told.x}, told.y};
    }
    return {{now.place}, now.head(work.tile, call.shape)};
}

// Masks a block's scores by positions or metadata, and by the user's function of masks. `first_key` is the warpgroup's,
// `key` the thread's first one.
__device__ __forceinline__ void mask_block(float (&scores)[score_count], const Call& call, const Work& work,
                                           const BlockVisit& now, int stage, const KeyMask& key_mask, int first_key,
                                           int key) {
    const auto [visited, head] = block_and_head(call, work, now, stage);
    const int block = visited.index();
    if constexpr (Traits::mask_metadata) {
        key_mask.mask(scores, block, call.shape);
    } else if (is_partial(first_key, block, call.shape)) {
        mask(scores, key, block, call.shape);
    }
    if constexpr (Traits::block_mask) {
        if (visited.may_hide()) mask_by_function(scores, call, work.tile.batch, head, block, key);
    }
}

// Loads V of a consumer's keys to `value_rows`, where it staged gradients. One thread.
__device__ __forceinline__ void load_own_value(const Call& call, const KeyTile& tile, uint32_t value_rows, int consumer,
                                               int first_key) {
    const uint32_t full = call.shared.value_full(consumer);
    tma::wait_group_read<0>();  // dK of the tile before is on its way
    mbarrier::arrive_expect(full, Traits::value_part_bytes);
    load_panels(value_rows, call.maps.value, full, Traits::value_panels, Traits::cta_keys,
                call.shape.key_head(tile.head), first_key, tile.batch);
}

// Makes K of a warp's keys finite where `scores`, the first of theirs, tell that it isn't (isolation.cuh).
__device__ __forceinline__ void isolate_own_keys(float (&scores)[score_count], const SharedMemory& shared,
                                                 int key_stage, int consumer) {
    const int first_row = 64 * consumer + threadIdx.x / 32 % 4 * 16;
    isolate_keys(scores,
                 shared.data + SharedMemory::key + key_stage * Traits::key_bytes + first_row * descriptor::row_bytes);
}

__device__ __forceinline__ void consume_split_keys(const Call& call, int consumer) {
    const SharedMemory& shared = call.shared;
    const int lane = threadIdx.x % 32;
    const uint32_t value_rows = shared.value_tile() + 64 * consumer * descriptor::row_bytes;
    const float scale_log2 = call.scale * log2_e;
    BlockSlot slot;
    DScoresSlot d_scores_slot;
    PipelineState<1> value_slot;
    constexpr bool in_value_place = Traits::gradients_in_value_place;
    if (consumer == 1) pingpong_signal(consumer);  // consumer 0 goes first

    call.for_each_tile([&](const Work& work, const KeySlot& key_slot) __attribute__((always_inline)) {
        // K lies elsewhere in each tile. In uniform registers from here on, as descriptors are else found in each step.
        auto operand = [](uint32_t rows) { return in_value_place ? reload_uniform(rows) : rows; };
        const uint32_t value_operand = operand(value_rows);
        const uint32_t key_rows = operand(shared.key_tile(key_slot.stage)) + 64 * consumer * descriptor::row_bytes;
        const int first_key = work.tile.first_key + 64 * consumer;         // of this warpgroup
        const int key = first_key + threadIdx.x / 32 % 4 * 16 + lane / 4;  // the thread's first one
        const int iterations = work.iterations(call.shape);
        float d_key[d_key_count] = {};
        float d_value[d_value_count] = {};
        float scores[score_count];
        uint32_t probabilities[query_steps][4];  // of the block at hand
        uint32_t modified[query_steps][4];       // … times the derivative of logits by scores
        uint32_t key_hashes[2];
        if constexpr (Traits::dropout) load_key_hashes(key_hashes, call.dropout, call.shape, work.tile.batch, key);
        BlockVisit now = work.first_visit();
        KeyMask key_mask;
        if constexpr (Traits::mask_metadata) {
            key_mask.load(shared.full_blocks(key_slot.stage, consumer), work.tile.batch, key, call.shape);
        }

        auto issue_block_scores = [&]() __attribute__((always_inline)) {
            mbarrier::wait(shared.query_full(slot.stage), slot.parity);
            issue_scores<0, key_steps>(scores, key_rows, shared.query_block(slot.stage));
        };
        auto compute_probabilities = [&]() __attribute__((always_inline)) {
            wgmma::wait<0>();
            wgmma::pin(scores);
            if constexpr (ScoreTraits::has_score_mod) {
                const auto [block, head] = block_and_head(call, work, now, slot.stage);
                exponentiate_logits(scores, modified, call, work.tile.batch, head, block.index(), key,
                                    shared.lse(slot.stage));
            } else {
                exponentiate(scores, shared.lse(slot.stage), scale_log2);
            }
            mask_block(scores, call, work, now, slot.stage, key_mask, first_key, key);
            convert_operand(probabilities, scores);
            if constexpr (Traits::dropout) {
                mark_dropped(probabilities, key_hashes, shared.dropout_hashes(slot.stage), call.dropout.threshold);
            }
            if constexpr (ScoreTraits::score_grad) multiply_by_score_grad(modified, probabilities);
        };

        auto store_value_gradient = [&]() __attribute__((always_inline)) {
            store_d_value(call, d_value, shared.gradient_tile(consumer), own + consumer, work.tile, first_key);
        };
        auto add_gradients = [&]() __attribute__((always_inline)) {
            add_d_value(call, d_value, work.tile, first_key, own + consumer);
            add_d_key(call, d_key, work.tile, first_key, own + consumer);
        };

        // From P of a block to P of the next one. Between two steps no product is under way.
        auto step = [&](const bool last) __attribute__((always_inline)) {
            const int stage = slot.stage;
            uint32_t d_scores_operand[query_steps][4];

            pingpong_wait(consumer);
            mbarrier::wait(shared.d_out_full(stage), slot.parity);
            issue_scores<0, value_steps>(scores, value_operand, shared.d_out_block(stage));
            if constexpr (Traits::dropout) {
                uint32_t kept[query_steps][4];
                take_kept(kept, probabilities);
                issue_gradient(d_value, kept, shared.d_out_block(stage));
            } else {
                issue_gradient(d_value, probabilities, shared.d_out_block(stage));
            }
            pingpong_signal(consumer);
            wgmma::wait<0>();
            wgmma::pin(scores);
            wgmma::pin(d_value);
            if (last && !in_value_place && arrives(lane)) mbarrier::arrive(shared.value_empty());
            const auto& factors = ScoreTraits::score_grad ? modified : probabilities;
            if constexpr (Traits::isolates) zero_where_hidden(scores, factors);
            differentiate(scores, shared.delta(stage), [&](int i) { return operand_floats(factors, i); });
            if constexpr (ScoreTraits::alibi) {
                const auto [block, head] = block_and_head(call, work, now, stage);
                add_slope_gradient(scores, call, work.tile, first_key, head, block.index(), key);
            }
            convert_operand(d_scores_operand, scores);
            hand_over_d_scores(shared, d_scores_slot, d_scores_operand, 64 * consumer);
            if (arrives(lane)) mbarrier::arrive(shared.d_out_empty(stage));  // delta is read, too

            pingpong_wait(consumer);
            issue_gradient(d_key, d_scores_operand, shared.query_block(stage));
            slot.advance();
            now.advance(work.blocks, work.order);
            if (!last) issue_block_scores();
            pingpong_signal(consumer);
            if (last) {
                if constexpr (in_value_place && !Traits::key_sums) store_value_gradient();
                wgmma::wait<0>();
            } else {
                compute_probabilities();
            }
            wgmma::pin(d_key);
            if (arrives(lane)) mbarrier::arrive(shared.query_empty(stage));
        };

        if (iterations > 0) {
            issue_block_scores();
            if constexpr (in_value_place) {
                if (threadIdx.x % 128 == 0) load_own_value(call, work.tile, value_rows, consumer, first_key);
            } else {
                mbarrier::wait(shared.value_full(), key_slot.parity);
            }
            if constexpr (Traits::isolates) {  // before the next product with K the consumers wait for each other
                wgmma::wait<0>();
                wgmma::pin(scores);
                isolate_own_keys(scores, shared, key_slot.stage, consumer);
            }
            compute_probabilities();
            if constexpr (in_value_place) {
                mbarrier::wait(shared.value_full(consumer), value_slot.parity);
                value_slot.advance();
            }
#pragma unroll 1
            for (int iteration = 1; iteration < iterations; ++iteration) step(false);
            step(true);
        } else if constexpr (in_value_place && !Traits::key_sums) {
            wait_for_stores(own + consumer);  // of the tile before
            store_value_gradient();
        } else if constexpr (!in_value_place) {
            mbarrier::wait(shared.value_full(), key_slot.parity);  // the barrier's next round may not start before
            if (arrives(lane)) mbarrier::arrive(shared.value_empty());
        }

        if constexpr (Traits::key_sums) {
            __syncwarp();  // all lanes have read the tile's full blocks, also if it has no blocks
            if (arrives(lane)) mbarrier::arrive(shared.key_empty(key_slot.stage));
            if (iterations > 0 || Traits::deterministic) add_gradients();
            return;
        }
        if constexpr (!in_value_place) wait_for_stores(own + consumer);  // of the tile before
        if (arrives(lane)) mbarrier::arrive(shared.key_empty(key_slot.stage));
        if constexpr (!in_value_place) store_value_gradient();
        wait_for_stores(own + consumer);
        store_d_key(call, d_key, shared.gradient_tile(consumer), own + consumer, work.tile, first_key);
    });
    wait_for_stores(own + consumer);
}
