// Consumer 1 of split products (split_products.cuh): dPᵀ, dS and dK of the CTA's keys, and its columns of dQ.
#pragma once
#include "sm90/backward/isolation.cuh"
#include "sm90/backward/key_sums.cuh"
#include "sm90/backward/scores.cuh"
#include "sm90/backward/split_products.cuh"
#include "sm90/backward/store_keys.cuh"

struct KeyConsumer {
    static constexpr int consumer = 1;
    using Part = DqPart<consumer>;
    // With two CTAs dP is computed in halves: beside the exchange of dS, and beside the adding.
    static constexpr int first_steps = Traits::cluster == 1 ? value_steps : value_steps / 2;

    const int warp = warp_index() % 4, lane = threadIdx.x % 32;
    const Work work;
    Part part;
    BlockSlot slot;  // of the block whose dP comes next
    DScoresSlot d_scores_slot;
    BlockVisit now;
    float d_key[d_key_count] = {};
    float d_scores[score_count];  // dP, then dS
#if SCORE_MOD_GRADIENTS
    HeadSums head_sums;
#endif

    __device__ __forceinline__ explicit KeyConsumer(const Call& call)
        : work(call.work(call.own_tile_uniform())), now(work.first_visit()) {}

    // Issues dPᵀ = V dOᵀ, or its first half, once dO is there.
    __device__ __forceinline__ void issue_d_probabilities(const Call& call) {
        const SharedMemory& shared = call.shared;
        mbarrier::wait(shared.d_out_full(slot.stage), slot.parity);
        issue_scores<0, first_steps>(d_scores, reload_uniform(shared.value_tile()), shared.d_out_block(slot.stage));
    }
    __device__ __forceinline__ void issue_rest_of_d_probabilities(const Call& call) {
        const SharedMemory& shared = call.shared;
        if constexpr (first_steps == value_steps) return;
        issue_scores<first_steps, value_steps>(d_scores, reload_uniform(shared.value_tile()),
                                               shared.d_out_block(slot.stage));
    }

    __device__ __forceinline__ void read_probabilities(const Call& call, uint32_t (&operand)[query_steps][4]) const {
        const SharedMemory& shared = call.shared;
        wait_until_told(probabilities_full, 256);
#pragma unroll
        for (int i = 0; i < query_steps; ++i) {
            const uint4 four = shared.probability_rows(warp)[i * 32 + lane];
            operand[i][0] = four.x, operand[i][1] = four.y, operand[i][2] = four.z, operand[i][3] = four.w;
        }
        if constexpr (Traits::hands_score_grad_later) {
            __syncwarp();
            if (arrives(lane)) mbarrier::arrive(shared.probabilities_read());
        }
    }

    // Sᵀ once more. Consumer 0 has it too, but nothing to keep it in until dS is there.
    __device__ __forceinline__ void compute_scores(const Call& call, float (&scores)[score_count]) const {
        const SharedMemory& shared = call.shared;
        mbarrier::wait(shared.query_full(slot.stage), slot.parity);
        issue_scores<0, key_steps>(scores, reload_uniform(shared.key_tile()), shared.query_block(slot.stage));
        wgmma::wait<0>();
        wgmma::pin(scores);
    }

    // Adds dS, which is yet without the derivative by scores, to the gradients of bias, slopes and captured arrays.
    __device__ __forceinline__ void add_score_gradients(const Call& call) {
        const int first_key = cta_first_key(work.tile), key = first_key + warp * 16 + lane / 4;
        const int head = now.head(work.tile, call.shape), block = block_at(now.place, work.tile, call.shape);
        if constexpr (ScoreTraits::bias) add_bias_gradient(d_scores, call, work.tile.batch, head, block, key);
        if constexpr (ScoreTraits::alibi) {
            add_slope_gradient(d_scores, call, work.tile, first_key, head, block, key);
        }
#if SCORE_MOD_GRADIENTS
        float scores[score_count];
        if constexpr (ScoreTraits::user_gradients_need_scores) compute_scores(call, scores);
        add_user_gradients(d_scores, scores, head_sums, call, work.tile.batch, head, block, key);
#endif
    }
    __device__ __forceinline__ void multiply_by_score_grad(const Call& call) {
        const SharedMemory& shared = call.shared;
        if constexpr (Traits::hands_score_grad_later) wait_until_told(score_grad_full, 256);
#pragma unroll
        for (int i = 0; i < query_steps; ++i) {
            const uint4 four = shared.score_grad_rows(warp)[i * 32 + lane];
            const uint32_t pairs[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 factor = to_floats<Traits::Element>(pairs[j]);
                float& first = d_scores[8 * i + 2 * j];
                float& second = d_scores[8 * i + 2 * j + 1];
                first = times_score_grad(first, factor.x);
                second = times_score_grad(second, factor.y);
            }
        }
    }

    // Makes dS of dP, as operands, and gives it to consumer 0 and the other CTA.
    __device__ __forceinline__ void hand_over_d_scores(const Call& call, uint32_t (&operand)[query_steps][4]) {
        const SharedMemory& shared = call.shared;
        read_probabilities(call, operand);
        if constexpr (Traits::isolates) zero_where_hidden(d_scores, operand);
        differentiate(d_scores, shared.delta(slot.stage), [&](int i) { return operand_floats(operand, i); });
        if constexpr (ScoreTraits::has_gradients) add_score_gradients(call);
        if constexpr (Traits::hands_score_grad) multiply_by_score_grad(call);
        __syncwarp();  // its P, which dS overwrites, is read as well
        if (arrives(lane)) release(shared.d_out_empty(slot.stage));
        convert_operand(operand, d_scores);
        store_d_scores(operand, shared.d_scores_buffer(0), 0);
        fence_shared_for_async();
        tell(d_scores_written, 256);
        __syncwarp();
        if (Traits::cluster > 1 && lane == 0) exchange_d_scores(shared, warp, d_scores_slot.parity);
    }

    // dK += dSᵀ Q and dQ over own keys, beside which dP of the next block starts.
    template <bool last>
    __device__ __forceinline__ void add_to_d_key(const Call& call, const uint32_t (&operand)[query_steps][4],
                                                 float (&d_query)[Part::columns / 2]) {
        const SharedMemory& shared = call.shared;
        const BlockSlot block = slot;
        mbarrier::wait(shared.query_full(slot.stage), slot.parity);
        issue_gradient(d_key, operand, shared.query_block(slot.stage));
        part.tell_added_before(call, block);
        named_barrier_sync(own + consumer, 128);
        part.issue(d_query, shared);
        slot.advance();
        if (last) {
            wgmma::wait<0>();
        } else {
            issue_d_probabilities(call);
            wgmma::wait<1>();
        }
        wgmma::pin(d_key);
        wgmma::pin(d_query);
        if (arrives(lane)) {
            release(shared.query_empty(block.stage));
            mbarrier::arrive(shared.d_scores_empty(0));
        }
    }
    // dQ over the other CTA's keys, beside which the rest of the next dP starts.
    template <bool last>
    __device__ __forceinline__ void add_peer_to_d_query(const Call& call, float (&d_query)[Part::columns / 2]) {
        const SharedMemory& shared = call.shared;
        part.issue_peer(d_query, shared, d_scores_slot.parity);
        if (last) {
            wgmma::wait<0>();
        } else {
            issue_rest_of_d_probabilities(call);
            wgmma::wait<1>();
        }
        wgmma::pin(d_query);
        if (lane == 0) mbarrier::arrive_in_cluster(in_peer(shared.peer_d_scores_empty()));
    }

    // After the last block of a query head of the group.
    __device__ __forceinline__ void finish_head(const Call& call, int member) {
#if SCORE_MOD_GRADIENTS
        head_sums.finish(call, work.tile.batch, work.tile.head * call.shape.group + member);
#endif
    }

    // From dP of a block to that of the next one. Between two steps no product is under way.
    template <bool last>
    __device__ __forceinline__ void step(const Call& call) {
        const BlockSlot block = slot;
        uint32_t operand[query_steps][4];  // P, then dS
        float d_query[Part::columns / 2];
        // Told and sent before dK is issued, which blocks until the tensor cores have room.
        hand_over_d_scores(call, operand);
        add_to_d_key<last>(call, operand, d_query);
        if constexpr (Traits::cluster > 1) add_peer_to_d_query<last>(call, d_query);
        const int query_block = block_at(now.place, work.tile, call.shape);
        part.add(call, d_query, call.dq_accum_block(work.tile, now.head(work.tile, call.shape), query_block), block);
        if (!last) {
            wgmma::wait<0>();
            wgmma::pin(d_scores);
        }
        const int member = now.member;
        now.advance(work.blocks, work.order);
        if (last || now.member != member) finish_head(call, member);
        d_scores_slot.advance();
    }

    __device__ __forceinline__ void run(const Call& call) {
        const SharedMemory& shared = call.shared;
        const int iterations = work.iterations(call.shape);
        mbarrier::wait(shared.value_full(), 0);
        mbarrier::wait(shared.key_full(), 0);
        if (iterations > 0) {
            issue_d_probabilities(call);
            issue_rest_of_d_probabilities(call);
            // Beside dP. The barriers by which dS is handed over come before all products that read it.
            if constexpr (Traits::isolates && Traits::cluster > 1) isolate_peer_keys(shared);
            wgmma::wait<0>();
            wgmma::pin(d_scores);
#pragma unroll 1
            for (int iteration = 1; iteration < iterations; ++iteration) step<false>(call);
            step<true>(call);
        }
        part.tell_added_before(call, slot);
        // Consumer 0 no longer reads K, and the other CTA is done with this one's shared memory, which may go.
        mbarrier::wait(shared.d_scores_empty(0), d_scores_slot.parity ^ 1);
        if constexpr (Traits::cluster > 1) mbarrier::wait(shared.peer_d_scores_empty(), d_scores_slot.parity ^ 1);
        if constexpr (Traits::key_sums) {
            if (iterations > 0 || Traits::deterministic) {
                add_d_key(call, d_key, work.tile, cta_first_key(work.tile), own + consumer);
            }
        } else {
            store_d_key(call, d_key, shared.key_tile(), own + consumer, work.tile, cta_first_key(work.tile));
            wait_for_stores(own + consumer);
        }
        wait_for_additions();
    }
};
