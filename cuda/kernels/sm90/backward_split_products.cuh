// The consumers that split the products of a block of 64 keys: one computes Sᵀ and P, and owns dV; the
// other computes dPᵀ and dS, and owns dK; each computes a part of the columns of dQ. P goes from the first to
// the second in float32, from each thread to the one that holds the same elements of dPᵀ.
#pragma once
#include "../ptx/mbarrier.cuh"
#include "backward_call.cuh"
#include "backward_d_query.cuh"
#include "backward_products.cuh"

// This consumer's part of a block's dQ: the panels of one half of the columns.
template <int consumer>
struct DqPart {
    static constexpr int half =  // a single panel is split too, where nobody asks for it but the compiler
        Traits::panels > 1 ? Traits::panels / 2 * descriptor::panel_columns : Traits::head_dim / 2;
    static constexpr int first_column = consumer == 0 ? 0 : half;
    static constexpr int columns = consumer == 0 ? half : Traits::head_dim - half;

    static __device__ __forceinline__ void issue(float (&d_query)[columns / 2], const SharedMemory& shared) {
        issue_d_query<columns>(d_query, shared.d_scores_buffer(0),
                               shared.key_tile() + first_column / descriptor::panel_columns *
                                                       descriptor::panel_bytes(Traits::keys));
    }
    static __device__ __forceinline__ void add(const Call& call, const float (&d_query)[columns / 2], float* sum) {
        constexpr int first_element = 64 * first_column;
        if constexpr (Traits::d_query_bytes > 0) {
            add_from_shared(call, d_query, sum + first_element, first_element * 4, own + consumer);
        } else {
            add_from_registers(d_query, sum + first_element + threadIdx.x % 128 * 4);
        }
    }
};

// Consumer 0: Sᵀ, P, dV.
__device__ __forceinline__ void consume_values(const Call& call) {
    constexpr int consumer = 0;
    using Part = DqPart<consumer>;
    const SharedMemory& shared = call.shared;
    const float scale_log2 = call.scale * log2_e;
    BlockSlot slot;

    const Work work = call.work(blockIdx.x);
    const KeyTile& tile = work.tile;
    float d_value[gradient_count] = {};

    named_barrier_arrive(d_scores_read, 256);
    mbarrier::wait(shared.key_full(), 0);
    work.for_each_block(call.shape, [&](int head, int block, int) {
        const int stage = slot.stage;
        const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
        float scores[score_count];
        uint32_t probabilities_operand[query_steps][4];
        float d_query[Part::columns / 2];

        mbarrier::wait(shared.query_full(stage), slot.parity);
        issue_scores(scores, shared.key_tile(), shared.query_block(stage));
        wgmma::wait<0>();
        wgmma::pin(scores);
        exponentiate(scores, shared.lse(stage), scale_log2);
        __syncwarp();
        if (lane == 0) mbarrier::arrive(shared.query_empty(stage));
        if (crosses(tile.first_key, block, call.shape)) {
            mask(scores, tile.first_key + thread / 32 * 16 + lane / 4, block, call.shape);
        }

        named_barrier_sync(exchange_empty, 256);
#pragma unroll
        for (int i = 0; i < score_count; i += 4) {
            shared.exchange_tile()[i / 4 * 128 + thread] = {scores[i], scores[i + 1], scores[i + 2], scores[i + 3]};
        }
        named_barrier_arrive(exchange_full, 256);

        pack_operand(probabilities_operand, scores);
        mbarrier::wait(shared.d_out_full(stage), slot.parity);
        issue_gradient(d_value, probabilities_operand, shared.d_out_block(stage));
        named_barrier_sync(d_scores_written, 256);
        Part::issue(d_query, shared);
        wgmma::wait<1>();
        wgmma::pin(d_value);
        if (lane == 0) mbarrier::arrive(shared.d_out_empty(stage));
        wgmma::wait<0>();
        wgmma::pin(d_query);
        named_barrier_arrive(d_scores_read, 256);
        Part::add(call, d_query, call.d_query_block(tile, head, block));
        slot.advance();
    });
    // Over V, which consumer 1 no longer reads: its last dPᵀ came before the last dS.
    mbarrier::wait(shared.value_full(), 0);
    store_gradient(d_value, 1, call.maps.d_value, shared.value_tile(), own + consumer, tile.head, tile.first_key,
                   tile.batch);
    wait_for_stores(own + consumer);
    wait_for_sums();
}

// Consumer 1: dPᵀ, dS, dK.
__device__ __forceinline__ void consume_keys(const Call& call) {
    constexpr int consumer = 1;
    using Part = DqPart<consumer>;
    const SharedMemory& shared = call.shared;
    BlockSlot slot;

    const Work work = call.work(blockIdx.x);
    const KeyTile& tile = work.tile;
    float d_key[gradient_count] = {};

    named_barrier_arrive(exchange_empty, 256);
    mbarrier::wait(shared.value_full(), 0);
    mbarrier::wait(shared.key_full(), 0);
    work.for_each_block(call.shape, [&](int head, int block, int) {
        const int stage = slot.stage;
        const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
        float d_scores[score_count];
        uint32_t d_scores_operand[query_steps][4];
        float d_query[Part::columns / 2];

        mbarrier::wait(shared.d_out_full(stage), slot.parity);
        issue_scores(d_scores, shared.value_tile(), shared.d_out_block(stage));
        wgmma::wait<0>();
        wgmma::pin(d_scores);

        named_barrier_sync(exchange_full, 256);
        differentiate(d_scores, shared.delta(stage),
                      [&](int i) { return shared.exchange_tile()[i / 4 * 128 + thread]; });
        named_barrier_arrive(exchange_empty, 256);
        __syncwarp();
        if (lane == 0) mbarrier::arrive(shared.d_out_empty(stage));
        pack_operand(d_scores_operand, d_scores);
        named_barrier_sync(d_scores_read, 256);
        store_d_scores(d_scores_operand, shared.d_scores_buffer(0), 0);

        // Told before dK is issued, which blocks until the tensor cores have room.
        fence_proxy_async();
        named_barrier_arrive(d_scores_written, 256);
        named_barrier_sync(own + consumer, 128);

        mbarrier::wait(shared.query_full(stage), slot.parity);
        issue_gradient(d_key, d_scores_operand, shared.query_block(stage));
        Part::issue(d_query, shared);
        wgmma::wait<1>();
        wgmma::pin(d_key);
        if (lane == 0) mbarrier::arrive(shared.query_empty(stage));
        wgmma::wait<0>();
        wgmma::pin(d_query);
        Part::add(call, d_query, call.d_query_block(tile, head, block));
        slot.advance();
    });
    named_barrier_sync(d_scores_read, 256);  // consumer 0 no longer reads K
    store_gradient(d_key, call.scale, call.maps.d_key, shared.key_tile(), own + consumer, tile.head,
                   tile.first_key, tile.batch);
    wait_for_stores(own + consumer);
    wait_for_sums();
}
