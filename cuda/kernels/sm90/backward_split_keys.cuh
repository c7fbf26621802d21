// The consumers that split a tile of 128 keys: each computes Sᵀ, dPᵀ, dV and dK of its 64 keys, and a part
// of the columns or rows of dQ, for which they exchange dS through shared memory.
#pragma once
#include "../ptx/mbarrier.cuh"
#include "backward_call.cuh"
#include "backward_products.cuh"

// Hands this consumer's part of a block's dQ over to be added to the sum. All threads of the warpgroup.
template <int columns>
__device__ __forceinline__ void hand_over_d_query(const Call& call, const float (&d_query)[columns / 2], int consumer,
                                                  int head, int block, int iteration) {
    const int thread = threadIdx.x % 128;
    if constexpr (Traits::dq_by_tma) {
        float4* staged = call.shared.d_query_part(consumer);
        if (iteration > 0) named_barrier_sync(d_query_empty + consumer, 160);
#pragma unroll
        for (int i = 0; i < columns / 2; i += 4) {
            staged[i / 4 * 128 + thread] = {d_query[i], d_query[i + 1], d_query[i + 2], d_query[i + 3]};
        }
        fence_proxy_async();
        named_barrier_arrive(d_query_full + consumer, 160);
    } else {
        float* sum = call.d_query_block(head, block) + DqPart::offset(consumer) / 4 + thread * 4;
#pragma unroll
        for (int i = 0; i < columns / 2; i += 4) {
            bulk::reduce_add(sum + i * 128, d_query[i], d_query[i + 1], d_query[i + 2], d_query[i + 3]);
        }
    }
}

template <int dq_columns>
__device__ __forceinline__ void consume_split_keys(const Call& call, int consumer) {
    const SharedMemory& shared = call.shared;
    const KeyTile& tile = call.work.tile;
    const int lane = threadIdx.x % 32;
    const int first_row = 64 * consumer;  // of this warpgroup, in the tile
    const int first_key = tile.first_key + first_row;
    const int key = first_key + threadIdx.x / 32 % 4 * 16 + lane / 4;  // the thread's first one
    const uint32_t key_rows = shared.key_tile() + first_row * descriptor::row_bytes;
    const uint32_t value_rows = shared.value_tile() + first_row * descriptor::row_bytes;
    const float scale_log2 = call.scale * log2_e;

    float d_key[gradient_count] = {};
    float d_value[gradient_count] = {};
    BlockSlot slot;

    call.work.for_each_block(call.shape, [&](int head, int block, int iteration) {
        const int stage = slot.stage;
        const uint32_t d_scores_buffer = shared.d_scores_buffer(iteration % 2);
        float scores[score_count];
        float d_scores[score_count];
        uint32_t probabilities_operand[query_steps][4];
        uint32_t d_scores_operand[query_steps][4];
        float d_query[dq_columns / 2];

        if (iteration == 0) mbarrier::wait(shared.key_full(), 0);
        mbarrier::wait(shared.query_full(stage), slot.parity);
        issue_scores(scores, key_rows, shared.query_block(stage));
        if (iteration == 0) mbarrier::wait(shared.value_full(), 0);
        mbarrier::wait(shared.d_out_full(stage), slot.parity);
        issue_scores(d_scores, value_rows, shared.d_out_block(stage));

        wgmma::wait<1>();
        wgmma::pin(scores);
        exponentiate(scores, shared.lse(stage), scale_log2);
        if (crosses(first_key, block, call.shape)) mask(scores, key, block, call.shape);
        pack_operand(probabilities_operand, scores);

        wgmma::wait<0>();
        wgmma::pin(d_scores);
        differentiate(d_scores, shared.delta(stage), [&](int i) {
            return float4{scores[i], scores[i + 1], scores[i + 2], scores[i + 3]};
        });
        pack_operand(d_scores_operand, d_scores);
        // The other warpgroup has read this buffer two blocks ago: it has since passed d_scores_full.
        store_d_scores(d_scores_operand, d_scores_buffer, first_row);

        issue_gradient(d_value, probabilities_operand, shared.d_out_block(stage));
        fence_proxy_async();
        named_barrier_sync(d_scores_full, 256);
        issue_d_query<dq_columns>(d_query, d_scores_buffer, shared.key_tile(), consumer);
        wgmma::wait<1>();
        wgmma::pin(d_value);
        if (lane == 0) mbarrier::arrive(shared.d_out_empty(stage));
        issue_gradient(d_key, d_scores_operand, shared.query_block(stage));
        wgmma::wait<1>();
        wgmma::pin(d_query);
        hand_over_d_query<dq_columns>(call, d_query, consumer, head, block, iteration);
        wgmma::wait<0>();
        wgmma::pin(d_key);
        if (lane == 0) mbarrier::arrive(shared.query_empty(stage));
        slot.advance();
    });

    named_barrier_sync(d_scores_full, 256);  // both have read K for the last time
    store_gradient(d_value, 1, call.maps.d_value, shared.value_tile(), first_row, own + consumer, tile.head,
                   first_key, tile.batch);
    store_gradient(d_key, call.scale, call.maps.d_key, shared.key_tile(), first_row, own + consumer, tile.head,
                   first_key, tile.batch);
}
