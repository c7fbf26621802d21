// The consumers that split the products of a block of 64 keys: one computes Sᵀ and P, and owns dV; the other computes
// dPᵀ and dS, and owns dK. P goes from the first to the second in float32, from each thread to the one that holds the
// same elements of dPᵀ.
#pragma once
#include "../ptx/mbarrier.cuh"
#include "backward_call.cuh"
#include "backward_products.cuh"

// Consumer 0: Sᵀ, P, dV.
__device__ __forceinline__ void consume_values(const Call& call) {
    constexpr int consumer = 0;
    const SharedMemory& shared = call.shared;
    const KeyTile& tile = call.work.tile;
    const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    const int key = tile.first_key + thread / 32 * 16 + lane / 4;  // the thread's first one
    const float scale_log2 = call.scale * log2_e;
    const int iterations = call.work.iterations(call.shape);

    float d_value[gradient_count] = {};
    float scores[score_count];
    BlockSlot slot;
    Work::Cursor now = call.work.begin(call.shape);

    auto start_scores = [&]() __attribute__((always_inline)) {
        mbarrier::wait(shared.query_full(slot.stage), slot.parity);
        issue_scores(scores, shared.key_tile(), shared.query_block(slot.stage));
    };
    // From S of a block to S of the next one. Between two steps no product is under way.
    auto step = [&](const int iteration, const bool last) __attribute__((always_inline)) {
        const int stage = slot.stage;
        uint32_t probabilities_operand[query_steps][4];

        exponentiate(scores, shared.lse(stage), scale_log2);
        __syncwarp();
        if (lane == 0) mbarrier::arrive(shared.query_empty(stage));
        if (crosses(tile.first_key, now.block, call.shape)) mask(scores, key, now.block, call.shape);

        if (iteration > 0) named_barrier_sync(exchange_empty, 256);
#pragma unroll
        for (int i = 0; i < score_count; i += 4) {
            shared.exchange_tile()[i / 4 * 128 + thread] = {scores[i], scores[i + 1], scores[i + 2], scores[i + 3]};
        }
        named_barrier_arrive(exchange_full, 256);

        pack_operand(probabilities_operand, scores);
        mbarrier::wait(shared.d_out_full(stage), slot.parity);
        issue_gradient(d_value, probabilities_operand, shared.d_out_block(stage));
        slot.advance();
        now.advance(call.work.blocks);
        if (!last) start_scores();
        wgmma::wait<0>();
        if (!last) wgmma::pin(scores);
        wgmma::pin(d_value);
        if (lane == 0) mbarrier::arrive(shared.d_out_empty(stage));
    };
    if (iterations > 0) {
        mbarrier::wait(shared.key_full(), 0);
        start_scores();
        wgmma::wait<0>();
        wgmma::pin(scores);
        int iteration = 0;
#pragma unroll 1
        for (; iteration < iterations - 1; ++iteration) step(iteration, false);
        step(iteration, true);
    }

    // Consumer 1 no longer reads V once all of dQ is there: its last dPᵀ came before the last dS.
    wait_for_d_query(shared, iterations);
    store_gradient(d_value, 1, call.maps.d_value, shared.value_tile(), 0, own + consumer, tile.head, tile.first_key,
                   tile.batch);
}

// Consumer 1: dPᵀ, dS, dK.
__device__ __forceinline__ void consume_keys(const Call& call) {
    constexpr int consumer = 1;
    const SharedMemory& shared = call.shared;
    const KeyTile& tile = call.work.tile;
    const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    const int iterations = call.work.iterations(call.shape);

    float d_key[gradient_count] = {};
    float d_scores[score_count];
    BlockSlot slot;
    DScoresSlot d_scores_slot;

    auto start_d_scores = [&]() __attribute__((always_inline)) {
        mbarrier::wait(shared.d_out_full(slot.stage), slot.parity);
        issue_scores(d_scores, shared.value_tile(), shared.d_out_block(slot.stage));
    };
    // From dP of a block to dP of the next one. Between two steps no product is under way.
    auto step = [&](const bool last) __attribute__((always_inline)) {
        const int stage = slot.stage;
        uint32_t d_scores_operand[query_steps][4];

        named_barrier_sync(exchange_full, 256);
        differentiate(d_scores, shared.delta(stage),
                      [&](int i) { return shared.exchange_tile()[i / 4 * 128 + thread]; });
        if (!last) named_barrier_arrive(exchange_empty, 256);
        __syncwarp();
        if (lane == 0) mbarrier::arrive(shared.d_out_empty(stage));
        pack_operand(d_scores_operand, d_scores);
        hand_over_d_scores(shared, d_scores_slot, d_scores_operand, 0);

        mbarrier::wait(shared.query_full(stage), slot.parity);
        issue_gradient(d_key, d_scores_operand, shared.query_block(stage));
        slot.advance();
        if (!last) start_d_scores();
        wgmma::wait<0>();
        if (!last) wgmma::pin(d_scores);
        wgmma::pin(d_key);
        if (lane == 0) mbarrier::arrive(shared.query_empty(stage));
    };
    if (iterations > 0) {
        mbarrier::wait(shared.value_full(), 0);
        start_d_scores();
        wgmma::wait<0>();
        wgmma::pin(d_scores);
#pragma unroll 1
        for (int iteration = 1; iteration < iterations; ++iteration) step(false);
        step(true);
    }

    wait_for_d_query(shared, iterations);
    store_gradient(d_key, call.scale, call.maps.d_key, shared.key_tile(), 0, own + consumer, tile.head,
                   tile.first_key, tile.batch);
}
