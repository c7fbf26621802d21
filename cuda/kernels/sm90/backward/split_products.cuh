// The consumers that split the products of a block of 64 keys: one computes Sᵀ and P, and owns dV; the
// other computes dPᵀ and dS, and owns dK.
//
// The float32 sums of dQ are what limits these head dims, as a CTA has room for 64 keys. So two CTAs, a cluster, may
// hold the 128 keys of a tile and walk the same blocks of queries. They exchange dS, and each computes half of dQ's
// columns, over both CTAs' keys: a block's sums are added to once for 128 keys. Blocks are loaded once for both, too.
//
// So that the tensor cores have work while a consumer waits or computes, the order within a block is
//
//   consumer 0: hand P over | dV, next S, dQ over own keys, over the other CTA's | next P beside these | add dQ
//   consumer 1: dS, tell and send it | dK, dQ over own keys, half of next dP, dQ over the other CTA's keys, other half
//               of next dP | add dQ beside this
//
// With a soft cap consumer 1 may need its derivative beside P: in memory of its own or, where there is none, in the place
// of P once that is read, beside dV and the next S.
//
// P lies where its dS will. There the next P goes as soon as both products over own keys are done and dS has arrived in
// the other CTA; that one's place for it only has to be free when the next dS is sent.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "sm90/backward/call.cuh"
#include "sm90/backward/d_query.cuh"
#include "sm90/backward/products.cuh"
#include "sm90/backward/scores.cuh"

// First of the CTA's keys.
__device__ __forceinline__ int cta_first_key(const KeyTile& tile) {
    return Traits::cluster == 1 ? tile.first_key : tile.first_key + cluster::rank() * Traits::cta_keys;
}

// The address in the cluster's other CTA of what lies at `address` here.
__device__ __forceinline__ uint32_t in_peer(uint32_t address) {
    return cluster::address_in(cluster::rank() ^ 1, address);
}

// The columns of a block's dQ that this consumer computes. Consumer 0 has the first two panels, of smaller head dims the
// first or a half or quarter of it, consumer 1 the rest; of each, two CTAs have a panel each, or halves of the last one.
template <int consumer>
struct DqPart {
    static constexpr int panel_columns = descriptor::panel_columns;
    static constexpr int head_dim = Traits::head_dim;
    static constexpr int first_part = head_dim > 128 ? 128 : head_dim > 64 ? 64 : head_dim > 32 ? 32 : 16;
    static constexpr int rest = head_dim - first_part;
    static constexpr int of_cluster = consumer == 0 || rest == 0 ? first_part : rest;  // the least one has no rest
    static constexpr int columns = Traits::cluster == 1          ? of_cluster
                                   : of_cluster > panel_columns ? panel_columns
                                                                : of_cluster / 2;
    static constexpr bool staged = Traits::d_query_bytes > 0;
    static constexpr int staging_offset = consumer * 64 * (first_part / Traits::cluster) * 4;

    const int first_column = first_part * consumer + (Traits::cluster == 1 ? 0 : cluster::rank() * columns);
    bool added = false;  // to a block before

    __device__ __forceinline__ int panel() const { return first_column / panel_columns; }
    __device__ __forceinline__ int column_bytes() const { return first_column % panel_columns * 2; }

    // Over the CTA's own keys.
    __device__ __forceinline__ void issue(float (&d_query)[columns / 2], const SharedMemory& shared) const {
        issue_d_query<columns>(d_query, shared.d_scores_buffer(0),
                               shared.key_tile() + panel() * descriptor::panel_bytes(Traits::cta_keys) +
                                   column_bytes());
    }
    // Over those of the other CTA, whose dS is waited for, and may be overwritten there.
    __device__ __forceinline__ void issue_peer(float (&d_query)[columns / 2], const SharedMemory& shared,
                                               uint32_t parity) const {
        mbarrier::wait(shared.d_scores_full(0), parity);
        if (consumer == 0 && threadIdx.x % 128 == 0) mbarrier::arrive_in_cluster(in_peer(shared.d_scores_empty(0)));
        issue_d_query<columns>(d_query, shared.peer_d_scores_buffer(),
                               shared.peer_key_panel(consumer) + column_bytes(), true);
    }
    // Where additions go in turns, `turn` is what all that have to do with the block call it by. The turn has to have begun
    // before something is added (dq_accum_in_order.cuh), and ends when all consumers' additions are there: those from
    // registers for whoever is told of them; those from shared memory when the thread that asked for them has waited,
    // which it does beside products of the next block.
    __device__ __forceinline__ void end_turn(const Call& call, const BlockSlot& turn) const {
        if constexpr (Traits::deterministic) {
            __syncwarp();
            if (threadIdx.x % (staged ? 128 : 32) != 0) return;
            if constexpr (staged) tma::wait_group<0>();
            mbarrier::wait(call.shared.turn_told(turn.stage), turn.parity ^ 1);
            mbarrier::arrive(call.shared.turn_ended(turn.stage));
        }
    }
    __device__ __forceinline__ void add(const Call& call, const float (&d_query)[columns / 2], float* sum,
                                        const BlockSlot& turn) const {
        float* const destination = sum + 64 * first_column;
        if constexpr (Traits::deterministic) mbarrier::wait(call.shared.turn_begun(turn.stage), turn.parity);
        if constexpr (staged) {
            add_from_shared(call, d_query, destination, staging_offset, own + consumer);
        } else {
            const int there = Traits::head_dim % (2 * panel_columns) == 0 ? columns : Traits::head_dim - first_column;
            add_from_registers(d_query, destination + threadIdx.x % 128 * 4, there);
            end_turn(call, turn);
        }
    }
    // Beside products of the next block, `next`.
    __device__ __forceinline__ void end_turn_before(const Call& call, const BlockSlot& next) {
        if constexpr (staged) {
            if (added) end_turn(call, next.before());
            added = true;
        }
    }
};

// The panels of the other CTA's K that this one's parts of dQ need.
__device__ __forceinline__ void load_peer_keys(const Call& call, const KeyTile& tile) {
    const int panels[] = {DqPart<0>().panel(), DqPart<1>().panel()};
    const int first_key = tile.first_key + (cluster::rank() ^ 1) * Traits::cta_keys;
    mbarrier::arrive_expect(call.shared.key_full(), Traits::peer_key_bytes);
#pragma unroll
    for (int consumer = 0; consumer < Traits::consumers; ++consumer) {
        tma::load(call.shared.peer_key_panel(consumer), call.maps.key, call.shared.key_full(),
                  panels[consumer] * descriptor::panel_columns, tile.head, first_key, tile.batch);
    }
}

// Sends the warp's rows of dS to the other CTA, as soon as there is room, and expects those of the same warp there. A
// bulk copy, as that is one instruction and asynchronous; each warp its own, as it need not wait for the others.
__device__ __forceinline__ void exchange_d_scores(const SharedMemory& shared, int warp, uint32_t parity) {
    constexpr int bytes = Traits::d_scores_bytes / 4;
    const int rows = warp * bytes;
    mbarrier::arrive_expect(shared.d_scores_full(0), bytes);
    mbarrier::wait(shared.peer_d_scores_empty(), parity ^ 1);
    bulk::copy(in_peer(shared.peer_d_scores_buffer() + rows), shared.d_scores_buffer(0) + rows, bytes,
               in_peer(shared.d_scores_full(0)));
}

// Tells all CTAs that load it that a lane's warp has read Q or dO, which `empty` is about.
__device__ __forceinline__ void release(uint32_t empty) {
    mbarrier::arrive(empty);
    if constexpr (Traits::cluster > 1) mbarrier::arrive_in_cluster(in_peer(empty));
}

// Consumer 0: Sᵀ, P, dV.
__device__ __forceinline__ void consume_values(const Call& call) {
    constexpr int consumer = 0;
    using Part = DqPart<consumer>;
    Part part;
    const SharedMemory& shared = call.shared;
    const int warp = warp_index() % 4, lane = threadIdx.x % 32;
    const float scale_log2 = call.scale * log2_e;
    BlockSlot slot;
    DScoresSlot d_scores_slot;

    const Work work = call.work(call.own_tile_of_warp());
    const KeyTile& tile = work.tile;
    const int first_key = cta_first_key(tile), iterations = work.iterations(call.shape);
    float d_value[d_value_count] = {};
    float scores[score_count];
    uint32_t probabilities[query_steps][4];  // of the block at hand
    uint32_t factors[query_steps][4];        // the soft cap's derivative
    uint32_t key_words[2];
    if constexpr (Traits::dropout) {
        load_key_words(key_words, call.dropout, call.shape, tile.batch, first_key + warp * 16 + lane / 4);
    }
    BlockVisit now = work.first_visit();
    KeyBounds bounds;
    if constexpr (Traits::bounds) {
        bounds.load(whole_blocks(tile.batch, first_key, call.shape), tile.batch, first_key + warp * 16 + lane / 4,
                    call.shape);
    }

    auto start_scores = [&]() __attribute__((always_inline)) {
        mbarrier::wait(shared.query_full(slot.stage), slot.parity);
        issue_scores<0, key_steps>(scores, reload_uniform(shared.key_tile()), shared.query_block(slot.stage));
    };
    auto finish_scores = [&]() __attribute__((always_inline)) {
        wgmma::pin(scores);
        if constexpr (ScoreTraits::has_score_mod) {
            exponentiate_logits(scores, factors, call, tile.batch, now.head(tile, call.shape), now.block,
                                first_key + warp * 16 + lane / 4, shared.lse(slot.stage));
        } else {
            exponentiate(scores, shared.lse(slot.stage), scale_log2);
        }
        if constexpr (!Traits::dropout) {
            __syncwarp();
            if (lane == 0) release(shared.query_empty(slot.stage));
        }
        if constexpr (Traits::bounds) {
            bounds.mask(scores, now.block, call.shape);
        } else if (crosses(first_key, now.block, call.shape)) {
            mask(scores, first_key + warp * 16 + lane / 4, now.block, call.shape);
        }
        pack_operand(probabilities, scores);
        if constexpr (Traits::dropout) {
            mark_dropped(probabilities, key_words, shared.words(slot.stage), call.dropout.threshold);
            __syncwarp();
            if (lane == 0) release(shared.query_empty(slot.stage));
        }
    };
    auto hand_over_probabilities = [&]() __attribute__((always_inline)) {
        mbarrier::wait(shared.d_scores_empty(0), d_scores_slot.parity ^ 1);
#pragma unroll
        for (int i = 0; i < query_steps; ++i) {
            const uint32_t(&packed)[4] = probabilities[i], (&factor)[4] = factors[i];
            uint4& there = shared.exchange_rows(warp)[i * 32 + lane];
            if constexpr (ScoreTraits::soft_cap && !Traits::hands_factors) {
                auto capped = [&](int j) {
                    const float2 p = to_floats<Traits::Element>(packed[j]), by = to_floats<Traits::Element>(factor[j]);
                    return convert<Traits::Element>(p.x * by.x, p.y * by.y);
                };
                there = {capped(0), capped(1), capped(2), capped(3)};
            } else {
                there = {packed[0], packed[1], packed[2], packed[3]};
            }
            if constexpr (Traits::hands_factors && !Traits::hands_factors_later) {
                shared.factor_rows(warp)[i * 32 + lane] = {factor[0], factor[1], factor[2], factor[3]};
            }
        }
        named_barrier_arrive(exchange_full, 256);
        if constexpr (Traits::dropout) take_kept(probabilities, probabilities);
    };
    auto hand_over_factors = [&]() __attribute__((always_inline)) {
        named_barrier_sync(exchange_read, 256);
#pragma unroll
        for (int i = 0; i < query_steps; ++i) {
            const uint32_t(&factor)[4] = factors[i];
            shared.factor_rows(warp)[i * 32 + lane] = {factor[0], factor[1], factor[2], factor[3]};
        }
        named_barrier_arrive(factors_full, 256);
    };

    // From P of a block, handed over, to that of the next one. Between two steps no product is under way.
    auto step = [&](const bool last) __attribute__((always_inline)) {
        const int stage = slot.stage;
        const BlockSlot turn = slot;
        const BlockVisit visit = now;
        float* const sum = call.d_query_block(tile, visit.head(tile, call.shape), visit.block);
        float d_query[Part::columns / 2];

        // dV and S of the next block run while consumer 1 computes dS.
        mbarrier::wait(shared.d_out_full(stage), slot.parity);
        issue_gradient(d_value, probabilities, shared.d_out_block(stage));
        slot.advance();
        now.advance(work.blocks, work.order);
        if (!last) start_scores();
        if constexpr (Traits::hands_factors_later) hand_over_factors();
        if (last) {
            wgmma::wait<0>();
        } else {
            wgmma::wait<1>();
        }
        wgmma::pin(d_value);
        if (lane == 0) release(shared.d_out_empty(stage));

        part.end_turn_before(call, turn);
        named_barrier_sync(d_scores_written, 256);
        part.issue(d_query, shared);
        if constexpr (Traits::cluster > 1) part.issue_peer(d_query, shared, d_scores_slot.parity);
        wgmma::wait<1>();
        if (Traits::cluster > 1 && lane == 0) mbarrier::arrive(shared.d_scores_empty(0));
        auto finish_d_query = [&]() __attribute__((always_inline)) {
            wgmma::wait<0>();
            wgmma::pin(d_query);
            if (lane == 0) {
                if constexpr (Traits::cluster > 1) {
                    mbarrier::arrive_in_cluster(in_peer(shared.peer_d_scores_empty()));
                } else {
                    mbarrier::arrive(shared.d_scores_empty(0));
                }
            }
        };
        if constexpr (Traits::hands_factors_later) {  // registers hold the factors, but not dQ as well
            finish_d_query();
            part.add(call, d_query, sum, turn);
        }
        if (!last) finish_scores();
        if constexpr (!Traits::hands_factors_later) finish_d_query();
        d_scores_slot.advance();
        if (!last) hand_over_probabilities();
        if constexpr (!Traits::hands_factors_later) part.add(call, d_query, sum, turn);
    };

    mbarrier::wait(shared.key_full(), 0);
    if (iterations > 0) {
        start_scores();
        wgmma::wait<0>();
        finish_scores();
        hand_over_probabilities();
#pragma unroll 1
        for (int iteration = 1; iteration < iterations; ++iteration) step(false);
        step(true);
    }
    part.end_turn_before(call, slot);
    // Over V, which consumer 1 no longer reads: its last dPᵀ came before the last dS.
    mbarrier::wait(shared.value_full(), 0);
    store_gradient(d_value, with_dropout(1, call.dropout.factor), call.maps.d_value, shared.value_tile(),
                   own + consumer, tile.head, first_key, tile.batch);
    wait_for_stores(own + consumer);
    wait_for_sums();
}

// Consumer 1: dPᵀ, dS, dK.
__device__ __forceinline__ void consume_keys(const Call& call) {
    constexpr int consumer = 1;
    using Part = DqPart<consumer>;
    Part part;
    const SharedMemory& shared = call.shared;
    const int warp = warp_index() % 4, lane = threadIdx.x % 32;
    BlockSlot slot;
    DScoresSlot d_scores_slot;

    const Work work = call.work(call.own_tile_of_warp());
    const KeyTile& tile = work.tile;
    const int iterations = work.iterations(call.shape);
    float d_key[d_key_count] = {};
    float d_scores[score_count];
    BlockVisit now = work.first_visit();

    constexpr int first_steps = Traits::cluster == 1 ? value_steps : value_steps / 2;
    auto start_d_scores = [&]() __attribute__((always_inline)) {
        mbarrier::wait(shared.d_out_full(slot.stage), slot.parity);
        issue_scores<0, first_steps>(d_scores, reload_uniform(shared.value_tile()), shared.d_out_block(slot.stage));
    };
    auto finish_d_scores = [&]() __attribute__((always_inline)) {
        if constexpr (first_steps == value_steps) return;
        issue_scores<first_steps, value_steps>(d_scores, reload_uniform(shared.value_tile()),
                                               shared.d_out_block(slot.stage));
    };

    // From dP of a block to that of the next one. Between two steps no product is under way.
    auto step = [&](const bool last) __attribute__((always_inline)) {
        const int stage = slot.stage;
        const BlockSlot turn = slot;
        uint32_t packed[query_steps][4];  // P, then dS
        float d_query[Part::columns / 2];

        named_barrier_sync(exchange_full, 256);
#pragma unroll
        for (int i = 0; i < query_steps; ++i) {
            const uint4 four = shared.exchange_rows(warp)[i * 32 + lane];
            packed[i][0] = four.x, packed[i][1] = four.y, packed[i][2] = four.z, packed[i][3] = four.w;
        }
        if constexpr (Traits::hands_factors_later) named_barrier_arrive(exchange_read, 256);
        differentiate(d_scores, shared.delta(stage), [&](int i) { return unpack_operand(packed, i); });
        if constexpr (ScoreTraits::bias || ScoreTraits::alibi) {
            const int first_key = cta_first_key(tile), key = first_key + warp * 16 + lane / 4;
            const int head = now.head(tile, call.shape);
            if constexpr (ScoreTraits::bias) add_bias_gradient(d_scores, call, tile.batch, head, now.block, key);
            if constexpr (ScoreTraits::alibi) {
                add_slope_gradient(d_scores, call, tile, first_key, head, now.block, key);
            }
        }
        if constexpr (Traits::hands_factors) {
            if constexpr (Traits::hands_factors_later) named_barrier_sync(factors_full, 256);
#pragma unroll
            for (int i = 0; i < query_steps; ++i) {
                const uint4 four = shared.factor_rows(warp)[i * 32 + lane];
                const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float2 factor = to_floats<Traits::Element>(words[j]);
                    d_scores[8 * i + 2 * j] *= factor.x;
                    d_scores[8 * i + 2 * j + 1] *= factor.y;
                }
            }
        }
        __syncwarp();  // its P, which dS overwrites, is read as well
        if (lane == 0) release(shared.d_out_empty(stage));
        pack_operand(packed, d_scores);
        store_d_scores(packed, shared.d_scores_buffer(0), 0);

        // Told and sent before dK is issued, which blocks until the tensor cores have room.
        fence_proxy_async();
        named_barrier_arrive(d_scores_written, 256);
        __syncwarp();
        if (Traits::cluster > 1 && lane == 0) exchange_d_scores(shared, warp, d_scores_slot.parity);

        // Half of dP of the next block runs while the other CTA's dS is on its way, the other half while dQ is added.
        mbarrier::wait(shared.query_full(stage), slot.parity);
        issue_gradient(d_key, packed, shared.query_block(stage));
        part.end_turn_before(call, turn);
        named_barrier_sync(own + consumer, 128);
        part.issue(d_query, shared);
        slot.advance();
        if (last) {
            wgmma::wait<0>();
        } else {
            start_d_scores();
            wgmma::wait<1>();
        }
        wgmma::pin(d_key);
        wgmma::pin(d_query);
        if (lane == 0) {
            release(shared.query_empty(stage));
            mbarrier::arrive(shared.d_scores_empty(0));
        }
        if constexpr (Traits::cluster > 1) {
            part.issue_peer(d_query, shared, d_scores_slot.parity);
            if (last) {
                wgmma::wait<0>();
            } else {
                finish_d_scores();
                wgmma::wait<1>();
            }
            wgmma::pin(d_query);
            if (lane == 0) mbarrier::arrive_in_cluster(in_peer(shared.peer_d_scores_empty()));
        }
        part.add(call, d_query, call.d_query_block(tile, now.head(tile, call.shape), now.block), turn);
        if (!last) {
            wgmma::wait<0>();
            wgmma::pin(d_scores);
        }
        now.advance(work.blocks, work.order);
        d_scores_slot.advance();
    };

    mbarrier::wait(shared.value_full(), 0);
    mbarrier::wait(shared.key_full(), 0);
    if (iterations > 0) {
        start_d_scores();
        finish_d_scores();
        wgmma::wait<0>();
        wgmma::pin(d_scores);
#pragma unroll 1
        for (int iteration = 1; iteration < iterations; ++iteration) step(false);
        step(true);
    }
    part.end_turn_before(call, slot);
    // Consumer 0 no longer reads K, and the other CTA is done with this one's shared memory, which may go.
    mbarrier::wait(shared.d_scores_empty(0), d_scores_slot.parity ^ 1);
    if constexpr (Traits::cluster > 1) mbarrier::wait(shared.peer_d_scores_empty(), d_scores_slot.parity ^ 1);
    store_gradient(d_key, with_dropout(call.scale, call.dropout.factor), call.maps.d_key, shared.key_tile(),
                   own + consumer, tile.head, cta_first_key(tile), tile.batch);
    wait_for_stores(own + consumer);
    wait_for_sums();
}
