// The consumers that split the products of a block of 64 keys: one computes Sᵀ and P, and owns dV; the
// other computes dPᵀ and dS, and owns dK; each computes a part of the columns of dQ. P goes from the first to
// the second in float32, from each thread to the one that holds the same elements of dPᵀ.
#pragma once
#include "../ptx/mbarrier.cuh"
#include "backward_call.cuh"
#include "backward_products.cuh"
#include "backward_split_keys.cuh"

// Consumer 0: Sᵀ, P, dV.
__device__ __forceinline__ void consume_values(const Call& call) {
    constexpr int consumer = 0, dq_columns = DqPart::columns(consumer);
    const SharedMemory& shared = call.shared;
    const KeyTile& tile = call.work.tile;
    const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    const int key = tile.first_key + thread / 32 * 16 + lane / 4;  // the thread's first one
    const float scale_log2 = call.scale * log2_e;

    float d_value[gradient_count] = {};
    BlockSlot slot;

    call.work.for_each_block(call.shape, [&](int head, int block, int iteration) {
        const int stage = slot.stage;
        float scores[score_count];
        uint32_t probabilities_operand[query_steps][4];
        float d_query[dq_columns / 2];

        if (iteration == 0) mbarrier::wait(shared.key_full(), 0);
        mbarrier::wait(shared.query_full(stage), slot.parity);
        issue_scores(scores, shared.key_tile(), shared.query_block(stage));
        wgmma::wait<0>();
        wgmma::pin(scores);
        exponentiate(scores, shared.lse(stage), scale_log2);
        __syncwarp();
        if (lane == 0) mbarrier::arrive(shared.query_empty(stage));
        if (crosses(tile.first_key, block, call.shape)) mask(scores, key, block, call.shape);

        if (iteration > 0) named_barrier_sync(exchange_empty, 256);
#pragma unroll
        for (int i = 0; i < score_count; i += 4) {
            shared.exchange_tile()[i / 4 * 128 + thread] = {scores[i], scores[i + 1], scores[i + 2], scores[i + 3]};
        }
        named_barrier_arrive(exchange_full, 256);

        pack_operand(probabilities_operand, scores);
        mbarrier::wait(shared.d_out_full(stage), slot.parity);
        issue_gradient(d_value, probabilities_operand, shared.d_out_block(stage));
        named_barrier_sync(d_scores_full, 256);
        issue_d_query<dq_columns>(d_query, shared.d_scores_buffer(0), shared.key_tile(), consumer);
        wgmma::wait<1>();
        wgmma::pin(d_value);
        if (lane == 0) mbarrier::arrive(shared.d_out_empty(stage));
        wgmma::wait<0>();
        wgmma::pin(d_query);
        named_barrier_arrive(d_scores_empty, 256);
        hand_over_d_query<dq_columns>(call, d_query, consumer, head, block, iteration);
        slot.advance();
    });

    // Consumer 1 no longer reads V: its last dPᵀ came before the last dS.
    store_gradient(d_value, 1, call.maps.d_value, shared.value_tile(), 0, own + consumer, tile.head, tile.first_key,
                   tile.batch);
}

// Consumer 1: dPᵀ, dS, dK.
__device__ __forceinline__ void consume_keys(const Call& call) {
    constexpr int consumer = 1, dq_columns = DqPart::columns(consumer);
    const SharedMemory& shared = call.shared;
    const KeyTile& tile = call.work.tile;
    const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    const int last_iteration = call.work.iterations(call.shape) - 1;

    float d_key[gradient_count] = {};
    BlockSlot slot;

    call.work.for_each_block(call.shape, [&](int head, int block, int iteration) {
        const int stage = slot.stage;
        float d_scores[score_count];
        uint32_t d_scores_operand[query_steps][4];
        float d_query[dq_columns / 2];

        if (iteration == 0) mbarrier::wait(shared.value_full(), 0);
        mbarrier::wait(shared.d_out_full(stage), slot.parity);
        issue_scores(d_scores, shared.value_tile(), shared.d_out_block(stage));
        wgmma::wait<0>();
        wgmma::pin(d_scores);

        named_barrier_sync(exchange_full, 256);
        differentiate(d_scores, shared.delta(stage),
                      [&](int i) { return shared.exchange_tile()[i / 4 * 128 + thread]; });
        if (iteration < last_iteration) named_barrier_arrive(exchange_empty, 256);
        __syncwarp();
        if (lane == 0) mbarrier::arrive(shared.d_out_empty(stage));
        pack_operand(d_scores_operand, d_scores);
        if (iteration > 0) named_barrier_sync(d_scores_empty, 256);
        store_d_scores(d_scores_operand, shared.d_scores_buffer(0), 0);

        mbarrier::wait(shared.query_full(stage), slot.parity);
        issue_gradient(d_key, d_scores_operand, shared.query_block(stage));
        fence_proxy_async();
        named_barrier_sync(d_scores_full, 256);
        if (iteration == 0) mbarrier::wait(shared.key_full(), 0);
        issue_d_query<dq_columns>(d_query, shared.d_scores_buffer(0), shared.key_tile(), consumer);
        wgmma::wait<1>();
        wgmma::pin(d_key);
        if (lane == 0) mbarrier::arrive(shared.query_empty(stage));
        wgmma::wait<0>();
        wgmma::pin(d_query);
        hand_over_d_query<dq_columns>(call, d_query, consumer, head, block, iteration);
        slot.advance();
    });

    if (last_iteration >= 0) named_barrier_sync(d_scores_empty, 256);  // consumer 0 no longer reads K
    store_gradient(d_key, call.scale, call.maps.d_key, shared.key_tile(), 0, own + consumer, tile.head,
                   tile.first_key, tile.batch);
}
