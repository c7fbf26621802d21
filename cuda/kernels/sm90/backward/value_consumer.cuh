// Consumer 0 of split products (split_products.cuh): Sᵀ, P and dV of the CTA's keys, and its columns of dQ.
#pragma once
#include "sm90/backward/isolation.cuh"
#include "sm90/backward/key_sums.cuh"
#include "sm90/backward/scores.cuh"
#include "sm90/backward/split_products.cuh"
#include "sm90/backward/store_keys.cuh"

struct ValueConsumer {
    static constexpr int consumer = 0;
    using Part = DqPart<consumer>;

    const int warp = warp_index() % 4;
    const Work work;
    Part part;
    BlockSlot slot;  // of the block whose scores come next
    DScoresSlot d_scores_slot;
    BlockVisit now;
    KeyMask key_mask;
    uint32_t key_hashes[2];
    float d_value[d_value_count] = {};
    float scores[score_count];
    uint32_t probabilities[query_steps][4];  // of the block at hand
    uint32_t score_grad[query_steps][4];   // the derivative of logits by scores there

    __device__ __forceinline__ explicit ValueConsumer(const Call& call)
        : work(call.work(call.own_tile_uniform())),
          now(work.first_visit()) {
        const int batch = work.tile.batch;
        if constexpr (Traits::dropout) load_key_hashes(key_hashes, call.dropout, call.shape, batch, key());
        if constexpr (Traits::mask_metadata) {
            key_mask.load(full_blocks(batch, first_key(), call.shape), batch, key(), call.shape);
        }
    }

    // Functions, not fields: held in registers, either has others spilled.
    __device__ static __forceinline__ int lane() { return threadIdx.x % 32; }
    __device__ __forceinline__ int first_key() const { return cta_first_key(work.tile); }  // of the CTA
    // The thread's first key; its other one is 8 below.
    __device__ __forceinline__ int key() const { return first_key() + warp * 16 + lane() / 4; }

    __device__ __forceinline__ int block(const Call& call) const { return block_at(now.place, work.tile, call.shape); }

    // Issues Sᵀ of block `now`, once its Q is there.
    __device__ __forceinline__ void issue_block_scores(const Call& call) {
        const SharedMemory& shared = call.shared;
        mbarrier::wait(shared.query_full(slot.stage), slot.parity);
        issue_scores<0, key_steps>(scores, reload_uniform(shared.key_tile()), shared.query_block(slot.stage));
    }

    // Makes P of its Sᵀ, which is there.
    __device__ __forceinline__ void compute_probabilities(const Call& call) {
        const SharedMemory& shared = call.shared;
        wgmma::pin(scores);
        if constexpr (ScoreTraits::has_score_mod) {
            exponentiate_logits(scores, score_grad, call, work.tile.batch, now.head(work.tile, call.shape), block(call),
                                key(), shared.lse(slot.stage));
        } else {
            exponentiate(scores, shared.lse(slot.stage), call.scale * log2_e);
        }
        if constexpr (!Traits::dropout) release_query(call);
        if constexpr (Traits::mask_metadata) {
            key_mask.mask(scores, block(call), call.shape);
        } else if (is_partial(first_key(), block(call), call.shape)) {
            mask(scores, key(), block(call), call.shape);
        }
        if constexpr (Traits::block_mask) {
            if (visited_block(now.place, work.tile, call.shape).may_hide()) {
                mask_by_function(scores, call, work.tile.batch, now.head(work.tile, call.shape), block(call), key());
            }
        }
        convert_operand(probabilities, scores);
        if constexpr (Traits::dropout) {
            mark_dropped(probabilities, key_hashes, shared.dropout_hashes(slot.stage), call.dropout.threshold);
            release_query(call);
        }
    }
    __device__ __forceinline__ void release_query(const Call& call) {
        const SharedMemory& shared = call.shared;
        __syncwarp();
        if (arrives(lane())) release(shared.query_empty(slot.stage));
    }

    // Gives P to consumer 1: times the derivative by scores, or beside it.
    __device__ __forceinline__ void hand_over_probabilities(const Call& call) {
        const SharedMemory& shared = call.shared;
        mbarrier::wait(shared.d_scores_empty(0), d_scores_slot.parity ^ 1);
#pragma unroll
        for (int i = 0; i < query_steps; ++i) {
            const uint32_t(&p)[4] = probabilities[i], (&factor)[4] = score_grad[i];
            uint4& there = shared.probability_rows(warp)[i * 32 + lane()];
            if constexpr (ScoreTraits::score_grad && !Traits::hands_score_grad) {
                there = {times_score_grad(p[0], factor[0]), times_score_grad(p[1], factor[1]),
                         times_score_grad(p[2], factor[2]), times_score_grad(p[3], factor[3])};
            } else {
                there = {p[0], p[1], p[2], p[3]};
            }
            if constexpr (Traits::hands_score_grad && !Traits::hands_score_grad_later) write_score_grad(call, i);
        }
        tell(probabilities_full, 256);
        if constexpr (Traits::dropout) take_kept(probabilities, probabilities);
    }
    __device__ __forceinline__ void hand_over_score_grad(const Call& call) {
        mbarrier::wait(call.shared.probabilities_read(), d_scores_slot.parity);
#pragma unroll
        for (int i = 0; i < query_steps; ++i) write_score_grad(call, i);
        tell(score_grad_full, 256);
    }
    __device__ __forceinline__ void write_score_grad(const Call& call, int i) {
        const SharedMemory& shared = call.shared;
        const uint32_t(&factor)[4] = score_grad[i];
        shared.score_grad_rows(warp)[i * 32 + lane()] = {factor[0], factor[1], factor[2], factor[3]};
    }

    // dV += Pᵀ dO, and S of the next block, while consumer 1 computes dS. The latter is still under way after it.
    template <bool last>
    __device__ __forceinline__ void add_to_d_value(const Call& call) {
        const SharedMemory& shared = call.shared;
        const int stage = slot.stage;
        mbarrier::wait(shared.d_out_full(stage), slot.parity);
        issue_gradient(d_value, probabilities, shared.d_out_block(stage));
        slot.advance();
        now.advance(work.blocks, work.order);
        if (!last) issue_block_scores(call);
        if constexpr (Traits::hands_score_grad_later) hand_over_score_grad(call);
        if (last) {
            wgmma::wait<0>();
        } else {
            wgmma::wait<1>();
        }
        wgmma::pin(d_value);
        if (arrives(lane())) release(shared.d_out_empty(stage));
    }

    __device__ __forceinline__ void issue_d_query(const Call& call, float (&d_query)[Part::columns / 2]) {
        const SharedMemory& shared = call.shared;
        wait_until_told(d_scores_written, 256);
        part.issue(d_query, shared);
        if constexpr (Traits::cluster > 1) part.issue_peer(d_query, shared, d_scores_slot.parity);
        wgmma::wait<1>();  // the next S
        if (Traits::cluster > 1 && arrives(lane())) mbarrier::arrive(shared.d_scores_empty(0));
    }
    __device__ __forceinline__ void wait_for_d_query(const Call& call, float (&d_query)[Part::columns / 2]) {
        const SharedMemory& shared = call.shared;
        wgmma::wait<0>();
        wgmma::pin(d_query);
        if constexpr (Traits::cluster > 1) {
            if (lane() == 0) mbarrier::arrive_in_cluster(in_peer(shared.peer_d_scores_empty()));
        } else {
            if (arrives(lane())) mbarrier::arrive(shared.d_scores_empty(0));
        }
    }

    // From P of a block, handed over, to that of the next one. Between two steps no product is under way.
    template <bool last>
    __device__ __forceinline__ void step(const Call& call) {
        const BlockSlot block = slot;
        float* const sum = call.dq_accum_block(work.tile, now.head(work.tile, call.shape), this->block(call));
        float d_query[Part::columns / 2];
        add_to_d_value<last>(call);
        part.tell_added_before(call, block);
        issue_d_query(call, d_query);
        if constexpr (Traits::hands_score_grad_later) {  // registers hold the derivative by scores, but not dQ as well
            wait_for_d_query(call, d_query);
            part.add(call, d_query, sum, block);
            if (!last) compute_probabilities(call);
            d_scores_slot.advance();
            if (!last) hand_over_probabilities(call);
        } else {
            if (!last) compute_probabilities(call);
            wait_for_d_query(call, d_query);
            d_scores_slot.advance();
            if (!last) hand_over_probabilities(call);
            part.add(call, d_query, sum, block);
        }
    }

    __device__ __forceinline__ void run(const Call& call) {
        const SharedMemory& shared = call.shared;
        const int iterations = work.iterations(call.shape);
        mbarrier::wait(shared.key_full(), 0);
        if (iterations > 0) {
            issue_block_scores(call);
            wgmma::wait<0>();
            if constexpr (Traits::isolates) {
                wgmma::pin(scores);
                isolate_keys(scores, shared.data + SharedMemory::key + warp * 16 * descriptor::row_bytes);
                named_barrier_sync(own + consumer, 128);
            }
            compute_probabilities(call);
            hand_over_probabilities(call);
#pragma unroll 1
            for (int iteration = 1; iteration < iterations; ++iteration) step<false>(call);
            step<true>(call);
        }
        part.tell_added_before(call, slot);
        if constexpr (Traits::key_sums) {
            if (iterations > 0 || Traits::deterministic) {
                add_d_value(call, d_value, work.tile, first_key(), own + consumer);
            }
        } else {
            // Over V, which consumer 1 no longer reads: its last dPᵀ came before the last dS.
            mbarrier::wait(shared.value_full(), 0);
            store_d_value(call, d_value, shared.value_tile(), own + consumer, work.tile, first_key());
            wait_for_stores(own + consumer);
        }
        wait_for_additions();
    }
};
