// The consumer role of the forward kernel: a warpgroup computes 64 rows of each tile, block of keys by block of keys,
// from the last block to the first:
//
//     S = QK^T;  P = softmax(S) relative to the row's maximum so far;  O = O · rescale + PV
//
// Two overlaps keep the tensor cores busy. Within a warpgroup, QK^T of a block is issued before PV of the block before
// it, and the softmax of the former runs beside the latter. Between warpgroups, ping-pong (PINGPONG): they alternate on
// the tensor cores, and what is left of one's softmax runs beside the other's products.
//
// A warp that issues a wgmma waits while the tensor cores are behind, so nothing of its own runs beside products that
// it has yet to issue. PV is therefore issued in two parts. The row maxima are computed between them, and the
// exponentials after the second. docs/tuning/forward.md has what each of these gave.
#pragma once
#include "ptx/global.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"
#include "common/warp_arrival.cuh"
#include "sm90/forward/descales.cuh"
#include "sm90/forward/hidden_values.cuh"
#include "sm90/forward/repeat.cuh"
#include "sm90/forward/out_sums.cuh"
#include "sm90/forward/packed_queries.cuh"
#include "sm90/forward/pages.cuh"
#include "sm90/forward/scores.cuh"
#include "sm90/forward/split_kv.cuh"
#include "sm90/forward/store.cuh"

using wgmma::Major;
using wgmma::Wgmma;

constexpr int score_count = Traits::keys / 2;     // accumulators of S that a thread holds
constexpr int out_count = Traits::value_dim / 2;  // … of O

// Scores that are exponentiated before PV of the previous block is awaited. The others are exponentiated after it.
constexpr int early_score_count = score_count / 4 / 8 * 8;

// P as A operands of wgmma: 16-bit pairs, four for each step.
using Probabilities = uint32_t[Traits::value_steps][4];

// ---------------------------------------------------------------------------------------- products

// Issues S = QK^T and commits it as one group. Operands are lower words of descriptors.
__device__ __forceinline__ void issue_qk(float (&scores)[score_count], uint32_t query, uint32_t key) {
    wgmma::pin(scores);
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < Traits::key_steps; ++step) {
        Wgmma<Traits::keys>::issue<Traits::Element, Major::K, Major::K>(
            scores, descriptor::at(query, descriptor::k_major_offset(step, Traits::rows)),
            descriptor::at(key, descriptor::k_major_offset(step, Traits::keys)), step > 0);
    }
    wgmma::commit();
    wgmma::pin(scores);
}

// Issues the steps [begin, end) of O += PV, and commits them as one group.
template <int begin, int end>
__device__ __forceinline__ void issue_pv(float (&out)[out_count], const Probabilities& probabilities, uint32_t value) {
    if constexpr (begin == end) return;
    wgmma::pin(out);
    if constexpr (begin == 0) wgmma::fence();
#pragma unroll
    for (int step = begin; step < end; ++step) {
        if constexpr (Traits::is_float8) {
            constexpr int columns = Traits::value_rows;
#pragma unroll
            for (int part = 0; part < Traits::value_parts; ++part) {
                float (&of_part)[columns / 2] = *reinterpret_cast<float (*)[columns / 2]>(out + part * columns / 2);
                const int offset = descriptor::k_major_offset(part * Traits::value_steps + step, columns);
                Wgmma<columns>::issue<Traits::Element, Major::K>(of_part, probabilities[step],
                                                                 descriptor::at(value, offset), 1);
            }
        } else {
            Wgmma<Traits::value_dim>::issue<Traits::Element, Major::MN>(
                out, probabilities[step], descriptor::at(value, descriptor::mn_major_offset(step)), 1);
        }
    }
    wgmma::commit();
    wgmma::pin(out);
}

// In e4m3 the keys of V^T are in an order in which accumulators become A operands with no shuffle.
__device__ __forceinline__ void convert_probabilities(Probabilities& converted, const float (&scores)[score_count]) {
    if constexpr (Traits::is_float8) {
#pragma unroll
        for (int i = 0; i < score_count / 4; ++i) {
            const int first = i / 2 * 8 + i % 2 * 2;
            converted[i / 4][i % 4] =
                convert_to_e4m3(scores[first], scores[first + 1], scores[first + 4], scores[first + 5]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < score_count / 2; ++i) {
            converted[i / 4][i % 4] = convert<Traits::OutElement>(scores[2 * i], scores[2 * i + 1]);
        }
    }
}

// Dropout hashes of the thread's two rows, of which `row` is the upper.
__device__ __forceinline__ void load_row_hashes(uint32_t (&hashes)[2], const Dropout& dropout, const Shape& shape,
                                                const Tile& tile, int row) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int query = min(query_of(row + 8 * r), shape.queries - 1);
        const int head = head_of(row + 8 * r, tile);
        const int64_t first = (static_cast<int64_t>(tile.batch) * shape.query_heads + head) * shape.queries;
        hashes[r] = global::read_only(dropout.rows + first + query);
    }
}

// ---------------------------------------------------------------------------------------- ping-pong

// Each consumer warpgroup has a named barrier (barrier 0 is __syncthreads). On it the warpgroup waits until it may
// issue its products, and the warpgroup before it signals that.
__device__ __forceinline__ void pingpong_wait(int warpgroup) {
    if constexpr (Traits::pingpong) named_barrier_sync(1 + warpgroup, 256);
}
__device__ __forceinline__ void pingpong_signal(int warpgroup) {
    if constexpr (Traits::pingpong) named_barrier_arrive(1 + (warpgroup + 1) % Traits::consumers, 256);
}

// ---------------------------------------------------------------------------------------- a tile

struct ConsumerCall {
    const SharedMemory& shared;
    const Results results;
    const Partials partials;
    int* const next_repeat;  // of each tile: the next of its list (repeat.cuh)
    const Shape& shape;
    const SplitKV& split_kv;
    const ScoreOperands& score_operands;
    const Sinks sinks;
    const Dropout& dropout;
    const float scale_log2;    // factor of scores in the exponent of 2; 1 where they are logits
    const Descales& descales;  // of e4m3 operands
};

// What a consumer warpgroup keeps from tile to tile.
struct ConsumerRings : Rings {
    const uint32_t first_key, first_value;  // lower words of the descriptors of stage 0
};

// A consumer warpgroup's work on one tile that sees keys. A function is a step of the algorithm.
struct TileConsumer {
    const ConsumerCall& call;
    ConsumerRings& rings;
    const Tile& tile;
    const int warpgroup, lane, row;  // `row` is the upper of the thread's two rows
    float (&out)[out_count];
    OnlineSoftmax& softmax;

    uint32_t query;          // the descriptor's lower word
    BlockRange blocks;       // visited by the tile, and full for this warpgroup's 64 rows
    RowMask row_mask;        // with mask metadata
    uint32_t row_hashes[2];  // with dropout
    int block;               // the block whose scores are computed; with a block mask, its place in the tile's list
    float scores[score_count];
    Probabilities probabilities;
    bool rescales = false;  // whether a maximum of this thread's rows was raised, so that O has to be rescaled
    TileDescales descales;  // this and the next two: with e4m3 operands
    BlockFactors factors;   // of `block`
    float out_unit = 1;     // what O is to be multiplied by
    OutSums sums;           // with `Traits::sum_blocks`

    __device__ __forceinline__ TileConsumer(const ConsumerCall& call, ConsumerRings& rings, const Tile& tile,
                                            int warpgroup, int lane, int row, float (&out)[out_count],
                                            OnlineSoftmax& softmax)
        : call(call), rings(rings), tile(tile), warpgroup(warpgroup), lane(lane), row(row), out(out),
          softmax(softmax) {
        if constexpr (Traits::is_float8) {
            descales.load(call.descales, call.shape, tile, tile.first_row + 64 * warpgroup);
        }
        const int stage = rings.query.stage;
        query = descriptor::k_major_low(call.shared.query_tile(stage) + warpgroup * descriptor::panel_bytes(64));
        if constexpr (Traits::dropout) load_row_hashes(row_hashes, call.dropout, call.shape, tile, row);
        Interval full;
        if constexpr (Traits::mask_metadata) {
            full = call.shared.full_blocks(stage)[warpgroup];
            row_mask.load(call.shared, stage, tile, row, call.shape);
        } else {
            full = full_blocks(tile.first_row + 64 * warpgroup, call.shape);
        }
#if BLOCK_MASK
        full = {0, block_list(tile, call.shape).full};
#endif
        blocks = {tile.first, tile.last, full.begin, full.end};
        block = blocks.last - 1;
    }

    __device__ __forceinline__ void attend() {
        first_block();
#if PAGE
        // Beyond the sequence's end its last page may hold anything.
        mbarrier::wait(call.shared.value_full(rings.value.stage), rings.value.parity);
        const int end = call.shape.page_table.ends[key_batch(tile, call.shape)] - block * Traits::keys;
        clean_hidden_values(call.shared, rings.value.stage, end, Traits::keys);
#endif
        --block;
        if constexpr (Traits::has_right || Traits::block_mask) {
#pragma unroll 1
            for (; block >= max(blocks.first, blocks.full_end); --block) next_block<true>();
        }
#pragma unroll 1
        for (; block >= max(blocks.first, blocks.full_begin); --block) next_block<false>();
        if constexpr (Traits::has_left && !Traits::block_mask) {
#pragma unroll 1
            for (; block >= blocks.first; --block) next_block<true>();
        }
        rescale_out();
        if constexpr (Traits::hidden_values) {
            mbarrier::wait(call.shared.value_full(rings.value.stage), rings.value.parity);
            // The tile's first row is the first to see any key.
            const int begin = call.shared.row_keys(rings.query.stage)[0].begin;
            clean_hidden_values(call.shared, rings.value.stage, 0, begin - blocks.first * Traits::keys);
        }
        release_query(call, rings, lane);
        issue_early_pv();
        issue_late_pv();
    }

    __device__ __forceinline__ void first_block() {
        issue_scores();
        pingpong_signal(warpgroup);
        wgmma::wait<0>();
        receive_scores<true>();
        softmax.update_max<0>(scores, scale(), -infinity);
        softmax.update_max<1>(scores, scale(), -infinity);
        softmax.exponentiate<0, score_count>(scores, scale());
        make_probabilities();
        if constexpr (Traits::is_float8) out_unit = factors.value;
    }

    // QK^T of `block`, then PV of the previous block beside the softmax of `block`.
    template <bool partial>
    __device__ __forceinline__ void next_block() {
        issue_scores();
        rescale_out();  // beside QK^T
        if constexpr (Traits::sum_blocks > 0) sums.add_block(call.shared, out);
        issue_early_pv();
        if constexpr (Traits::early_pv_steps == Traits::value_steps) pingpong_signal(warpgroup);
        wgmma::wait<1>();
        receive_scores<partial>();
        rescales = softmax.update_max<0>(scores, scale(), -infinity);
        if (partial) wgmma::fence();  // the mask's branches would have ptxas insert one of its own
        issue_late_pv();
        if constexpr (Traits::early_pv_steps < Traits::value_steps) pingpong_signal(warpgroup);
        // -inf is loaded here because ptxas would otherwise compute both rows' maxima together, before the signal.
        rescales |= softmax.update_max<1>(scores, scale(), volatile_load(call.shared.least_score()));
        if constexpr (Traits::is_float8) change_out_unit();
        softmax.exponentiate<0, early_score_count>(scores, scale());
        // With ping-pong, ptxas's own place for the wait is faster (docs/tuning/forward.md).
        if constexpr (!Traits::pingpong) {
            wgmma::hold_wait_behind(softmax.row_sum[0] + softmax.row_sum[1], call.shared.query_tile(0));
        }
        wait_pv();
        softmax.exponentiate<early_score_count, score_count>(scores, scale());
        make_probabilities();
    }

    // Factor of the block's scores in the exponent. Never 0, as descales may make it: -inf of a masked score times 0 is
    // NaN.
    __device__ __forceinline__ float scale() const {
        if constexpr (!Traits::is_float8 || ScoreTraits::has_score_mod) return call.scale_log2;
        return fmaxf(call.scale_log2 * factors.score, least_normal);
    }

    // From here on O is summed in the unit of the block's values. In a unit below 2^-80 of the one before, O might
    // become infinite, so 2^-80 of the one before is used instead.
    __device__ __forceinline__ void change_out_unit() {
        if (factors.value == out_unit) return;
        const float change = fminf(divide_full(out_unit, factors.value), 0x1p80f);
#pragma unroll
        for (int r = 0; r < 2; ++r) softmax.rescale[r] *= change;
        rescales = true;
        out_unit = fmaxf(factors.value, out_unit * 0x1p-80f);
    }

    // S = QK^T.
    __device__ __forceinline__ void issue_scores() {
        if constexpr (Traits::is_float8) factors = descales.of_keys(block_at(block, tile, call.shape) * Traits::keys);
        mbarrier::wait(call.shared.key_full(rings.key.stage), rings.key.parity);
        pingpong_wait(warpgroup);
        issue_qk(scores, query, rings.first_key + rings.key.stage * (Traits::key_bytes >> 4));
    }

    // Releases K, then modifies and masks the scores, which have been awaited.
    template <bool partial>
    __device__ __forceinline__ void receive_scores() {
        wgmma::pin(scores);
        if (arrives(lane)) mbarrier::arrive(call.shared.key_empty(rings.key.stage));
        rings.key.advance();
        const int first_key = block_at(block, tile, call.shape) * Traits::keys;
        if constexpr (Traits::is_float8 && ScoreTraits::has_score_mod) {
#pragma unroll
            for (float& score : scores) score *= factors.score;
        }
        apply_score_mod(scores, call.score_operands, tile, row, first_key, call.shape);
        if (partial) {
            constexpr bool both = Traits::segments || Traits::block_mask || Traits::paged;
            const bool right = both || block >= blocks.full_end;
            const bool left = both || block < blocks.full_begin;
            constexpr bool by_position =
                !Traits::block_mask || Traits::has_right || Traits::has_left || Traits::mask_metadata;
            if (by_position || first_key + Traits::keys > call.shape.keys) {
                mask_scores(scores, row, first_key, right, left, call.shape, row_mask);
            }
            // The first block of a tile may be full. The function is computed for each pair, so it is skipped there.
            if (Traits::block_mask && block >= blocks.full_end) {
                mask_by_function(scores, tile, row, first_key, call.shape);
            }
#if PAGE
            mask_missing_pages(scores, call.shape.page_table, key_batch(tile, call.shape), first_key / Traits::keys);
#endif
        }
    }

    // P as wgmma takes it, some of it dropped.
    __device__ __forceinline__ void make_probabilities() {
        convert_probabilities(probabilities, scores);
        if constexpr (Traits::dropout) {
            const uint4* const columns = call.shared.key_hashes(rings.hash.stage);
            if constexpr (Traits::is_float8) {
                drop_e4m3(probabilities, row_hashes, columns, call.dropout.threshold);
            } else {
                drop(probabilities, row_hashes, columns, call.dropout.threshold);
            }
            rings.hash.advance();
        }
    }

    __device__ __forceinline__ void rescale_out() {
        if (__any_sync(all_lanes, rescales)) {
#pragma unroll
            for (int i = 0; i < out_count; ++i) out[i] *= softmax.rescale[row_of(i)];
            if constexpr (Traits::sum_blocks > 0) sums.rescale(softmax.rescale);
        }
    }

    // O += PV, in two parts.
    __device__ __forceinline__ void issue_early_pv() {
        mbarrier::wait(call.shared.value_full(rings.value.stage), rings.value.parity);
        issue_pv<0, Traits::early_pv_steps>(out, probabilities,
                                            rings.first_value + rings.value.stage * (Traits::value_bytes >> 4));
    }
    __device__ __forceinline__ void issue_late_pv() {
        issue_pv<Traits::early_pv_steps, Traits::value_steps>(
            out, probabilities, rings.first_value + rings.value.stage * (Traits::value_bytes >> 4));
    }
    __device__ __forceinline__ void wait_pv() {
        wgmma::wait<0>();
        wgmma::pin(out);
        if (arrives(lane)) mbarrier::arrive(call.shared.value_empty(rings.value.stage));
        rings.value.advance();
    }
    // Waits for the last one; then O is whole.
    __device__ __forceinline__ void wait_last_pv() {
        wait_pv();
        if constexpr (Traits::sum_blocks > 0) sums.add_to(call.shared, out);
    }

    __device__ static __forceinline__ void release_query(const ConsumerCall& call, ConsumerRings& rings, int lane) {
        __syncwarp();  // all lanes have read the tile
        if (arrives(lane)) mbarrier::arrive(call.shared.query_empty(rings.query.stage));
        rings.query.advance();
    }
};

// ---------------------------------------------------------------------------------------- the role

// Called when there are no more tiles. Returns whether the role ends; if not, tiles that are to be repeated follow.
__device__ __forceinline__ bool ends(const ConsumerCall& call, ConsumerRings& rings, int lane) {
    const SharedMemory& shared = call.shared;
    if (!Traits::isolates || is_repeat(shared)) return true;
    TileConsumer::release_query(call, rings, lane);
    if (threadIdx.x == 128) shared.rings_of_repeats() = rings;
    __syncwarp();
    if (arrives(lane)) mbarrier::arrive(shared.all_computed());
    mbarrier::wait(shared.all_computed(), 0);
    return !__any_sync(all_lanes, shared.repeats().any());
}

__device__ __forceinline__ void consume(const ConsumerCall& call) {
    const SharedMemory& shared = call.shared;
    const int warp = warp_index() - 4, warpgroup = warp / 4;
    const int lane = threadIdx.x % 32;
    // Descriptors are in uniform registers from here on. Else ptxas computes them again in each block.
    ConsumerRings rings{{}, reload_uniform(descriptor::k_major_low(shared.key_block(0))),
                        reload_uniform(Traits::is_float8 ? descriptor::k_major_low(shared.value_block(0))
                                                   : descriptor::mn_major_low(shared.value_block(0), Traits::keys))};
    // The last warpgroup signals warpgroup 0, which goes first.
    if (Traits::pingpong && warpgroup == Traits::consumers - 1) pingpong_signal(warpgroup);

    while (true) {
        mbarrier::wait(shared.query_full(rings.query.stage), rings.query.parity);
        const Tile tile = shared.tile(rings.query.stage);
        if (!tile.exists()) {
            if (ends(call, rings, lane)) break;
            continue;
        }
        const int row = tile.first_row + 16 * warp + lane / 4;
        float out[out_count] = {};
        float normalise[2], row_lse[2], out_unit = 1;
        OnlineSoftmax softmax;
        auto finalize = [&]() __attribute__((always_inline)) {
            softmax.finalize(normalise, row_lse, [&](int r) { return call.sinks.of_row(tile, row + 8 * r); });
            // A repeat doesn't write it: the first lse is right for all rows, as scores of hidden keys are set to -inf.
            if (!is_repeat(shared)) write_lse(row_lse, call.results, call.shape, tile, row);
            for (float& factor : normalise) factor = with_dropout(factor, call.dropout.factor);
            if constexpr (Traits::is_float8) {
                for (float& factor : normalise) factor *= out_unit;
            }
        };

        if (tile.count() > 0) {
            TileConsumer consumer(call, rings, tile, warpgroup, lane, row, out, softmax);
            consumer.attend();
            if constexpr (Traits::is_float8) out_unit = consumer.out_unit;
            if constexpr (Traits::split_kv) {
                consumer.wait_last_pv();
                if constexpr (Traits::is_float8) {  // partials have one unit
                    for (float& x : out) x *= out_unit;
                    out_unit = 1;
                }
                if (tile.is_split() && !combine_partials(out, softmax, call.partials, call.split_kv, tile,
                                                         is_repeat(shared))) {
                    continue;
                }
                finalize();
            } else {
                finalize();  // beside the last PV
                consumer.wait_last_pv();
            }
        } else {
            TileConsumer::release_query(call, rings, lane);
            finalize();
        }
        const bool repeats = is_repeat(shared);
        const int first_row = tile.first_row + 16 * warp;
        bool is_spoiled;
        if constexpr (Traits::wide_results) {
            is_spoiled = write_wide_out(out, normalise, call.results, call.shape, tile, first_row, repeats);
        } else {
            is_spoiled = write_out(out, normalise, call.results, shared, shared.staging_offset(warp), call.shape, tile,
                                   first_row, repeats);
        }
        if (is_spoiled && !repeats) note_repeat(shared, call.next_repeat, call.partials, call.shape, tile, warp);
    }
}
