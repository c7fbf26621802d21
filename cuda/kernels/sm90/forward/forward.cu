// Attention forward for Hopper, in the manner of FlashAttention-3 (Shah et al., arXiv:2407.08608), on plain PTX.
//
// A persistent CTA computes one tile of queries after another. Its warpgroups have two roles:
//
<<<<<<< HEAD
//   producer   load.cuh      one thread of warpgroup 0 takes tiles from the scheduler and loads Q once a tile, and K and
//                            V block by block, through rings of shared-memory stages
//   consumers  consumer.cuh  each of the other warpgroups computes 64 rows of the tile: S = QK^T, online softmax,
//                            O += PV with P straight from registers
=======
// What the schedule is about: a warp that issues a wgmma waits while the tensor cores are behind, so that nothing
// of its own can run beside products that are not yet issued. PV is therefore issued in two parts, and the row
// maxima are taken in between; the exponentials follow beside its rest. Warpgroups take turns at the tensor cores
// (PINGPONG), and what is left of one's softmax runs beside the other's products. docs/tuning/cuda.md has what each gave.
>>>>>>> cbd07e9 (Tuning logs in docs/tuning, beside the data that only they cite; two results that nothing cites go)
#include "parameters.cuh"
#include "sm90/forward/consumer.cuh"
#include "sm90/forward/load.cuh"
<<<<<<< HEAD
=======
#include "sm90/forward/store.cuh"

using wgmma::Major;
using wgmma::Wgmma;

constexpr int score_count = Traits::keys / 2;    // accumulators a thread holds of S
constexpr int out_count = Traits::value_dim / 2;  // … and of O
constexpr int packed_count = Traits::value_steps;

// Scores that are exponentiated before PV of the block before is awaited; the others' packing runs beside them.
constexpr int early_count = score_count / 4 / 8 * 8;

// S = Q K^T, issued and committed as one group. Operands are given as lower words of descriptors.
__device__ __forceinline__ void issue_scores(float (&scores)[score_count], uint32_t query, uint32_t key) {
    wgmma::pin(scores);
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < Traits::head_dim / 16; ++step) {
        Wgmma<Traits::keys>::issue<Traits::Element, Major::K, Major::K>(
            scores, descriptor::at(query, descriptor::k_major_offset(step, Traits::rows)),
            descriptor::at(key, descriptor::k_major_offset(step, Traits::keys)), step > 0);
    }
    wgmma::commit();
    wgmma::pin(scores);
}

// O += P V for the keys of the steps [begin, end), issued and committed as one group.
template <int begin, int end>
__device__ __forceinline__ void issue_out(float (&out)[out_count], const uint32_t (&probabilities)[packed_count][4],
                                          uint32_t value) {
    if constexpr (begin == end) return;
    wgmma::pin(out);
    if constexpr (begin == 0) wgmma::fence();
#pragma unroll
    for (int step = begin; step < end; ++step) {
        Wgmma<Traits::value_dim>::issue<Traits::Element, Major::MN>(
            out, probabilities[step], descriptor::at(value, descriptor::mn_major_offset(step)), 1);
    }
    wgmma::commit();
    wgmma::pin(out);
}

__device__ __forceinline__ void pack_probabilities(uint32_t (&packed)[packed_count][4],
                                                   const float (&probabilities)[score_count]) {
#pragma unroll
    for (int i = 0; i < score_count / 2; ++i) {
        packed[i / 4][i % 4] = convert<Traits::Element>(probabilities[2 * i], probabilities[2 * i + 1]);
    }
}

// Dropout's words of the thread's two rows, of which `row` is the upper.
__device__ __forceinline__ void load_row_words(uint32_t (&words)[2], const Dropout& dropout, const Shape& shape,
                                               const Tile& tile, int row) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int query = min((row + 8 * r) / Traits::pack, shape.queries - 1);
        const int head = tile.head + (row + 8 * r) % Traits::pack;
        const int64_t first = (static_cast<int64_t>(tile.batch) * shape.query_heads + head) * shape.queries;
        words[r] = global::read_only(dropout.rows + first + query);
    }
}

// Waiting for the turn at the tensor cores, and passing it on to the next warpgroup. Named barrier 0 is __syncthreads.
__device__ __forceinline__ void take_turn(int consumer) {
    if constexpr (Traits::pingpong) named_barrier_sync(1 + consumer, 256);
}
__device__ __forceinline__ void pass_turn(int consumer) {
    if constexpr (Traits::pingpong) named_barrier_arrive(1 + (consumer + 1) % Traits::consumers, 256);
}

__device__ __forceinline__ void consume(const SharedMemory& shared, const Results& results, const Partials& partials,
                                        const Shape& shape, const Cut& cut, const ScoreOperands& operands,
                                        const Sinks& sinks, const Dropout& dropout, float scale_log2) {
    const int warp = warp_index() - 4, consumer = warp / 4;
    const int lane = threadIdx.x % 32;
    PipelineState<Traits::stages> key_slot, value_slot;
    PipelineState<Traits::query_stages> query_slot;
    PipelineState<Traits::word_stages> word_slot;
    const uint32_t first_key = descriptor::k_major_low(shared.key_block(0));
    const uint32_t first_value = descriptor::mn_major_low(shared.value_block(0), Traits::keys);
    if (Traits::pingpong && consumer == Traits::consumers - 1) pass_turn(consumer);  // warpgroup 0 goes first

    while (true) {
        mbarrier::wait(shared.query_full(query_slot.stage), query_slot.parity);
        const Tile tile = shared.tile(query_slot.stage);
        if (tile.first_row < 0) break;
        const int row = tile.first_row + 16 * warp + lane / 4;  // the upper of the thread's two
        float out[out_count] = {};
        float normalise[2], row_lse[2];
        OnlineSoftmax softmax;

        auto release_query = [&]() __attribute__((always_inline)) {
            __syncwarp();  // all lanes have read the tile
            if (lane == 0) mbarrier::arrive(shared.query_empty(query_slot.stage));
            query_slot.advance();
        };
        auto finish = [&]() __attribute__((always_inline)) {
            softmax.finish(normalise, row_lse, [&](int r) { return sinks.of_row(tile, row + 8 * r); });
            write_lse(row_lse, results, shape, tile, row);
            for (float& factor : normalise) factor = with_dropout(factor, dropout.factor);
        };

        if (tile.count() > 0) {
            const uint32_t query =
                descriptor::k_major_low(shared.query_tile(query_slot.stage) + consumer * descriptor::panel_bytes(64));
            float scores[score_count];
            uint32_t probabilities[packed_count][4];
            bool rescales = false;
            uint32_t row_words[2];
            if constexpr (Traits::dropout) load_row_words(row_words, dropout, shape, tile, row);

            // This warpgroup's rows see every key of the blocks [whole_begin, whole_end).
            const int first_row = tile.first_row + 64 * consumer;
            int whole_begin, whole_end;
            RowBounds seen_by;
            if constexpr (Traits::bounds) {
                const int2 whole = shared.whole_blocks(query_slot.stage)[consumer];
                whole_begin = whole.x, whole_end = whole.y;
                seen_by.load(shared, query_slot.stage, tile, row, shape);
            } else {
                whole_end = max(right_end(first_row, shape), 0) / Traits::keys;
                whole_begin = ceil_div(left_begin(first_row + 63, shape), Traits::keys);
            }
            int block = tile.last - 1;

            auto start_scores = [&]() __attribute__((always_inline)) {
                mbarrier::wait(shared.key_full(key_slot.stage), key_slot.parity);
                take_turn(consumer);
                issue_scores(scores, query, first_key + key_slot.stage * (Traits::key_bytes >> 4));
            };
            auto release_key = [&]() __attribute__((always_inline)) {
                if (lane == 0) mbarrier::arrive(shared.key_empty(key_slot.stage));
                key_slot.advance();
            };
            auto rescale_out = [&]() __attribute__((always_inline)) {
                if (__any_sync(0xffffffff, rescales)) {
#pragma unroll
                    for (int i = 0; i < out_count; ++i) out[i] *= softmax.rescale[row_of(i)];
                }
            };
            auto start_out = [&]() __attribute__((always_inline)) {
                mbarrier::wait(shared.value_full(value_slot.stage), value_slot.parity);
                issue_out<0, Traits::split>(out, probabilities,
                                            first_value + value_slot.stage * (Traits::value_bytes >> 4));
            };
            auto start_rest_of_out = [&]() __attribute__((always_inline)) {
                issue_out<Traits::split, Traits::value_steps>(
                    out, probabilities, first_value + value_slot.stage * (Traits::value_bytes >> 4));
            };
            auto finish_out = [&]() __attribute__((always_inline)) {
                wgmma::wait<0>();
                wgmma::pin(out);
                if (lane == 0) mbarrier::arrive(shared.value_empty(value_slot.stage));
                value_slot.advance();
            };
            auto finish_scores = [&](const bool masked) __attribute__((always_inline)) {
                wgmma::pin(scores);
                release_key();
                transform_scores(scores, operands, tile, row, block * Traits::keys, shape);
                if (masked) {
                    const bool right = Traits::segments || block >= whole_end;
                    const bool left = Traits::segments || block < whole_begin;
                    mask_scores(scores, row, block * Traits::keys, right, left, shape, seen_by);
                }
            };

            auto finish_probabilities = [&]() __attribute__((always_inline)) {
                pack_probabilities(probabilities, scores);
                if constexpr (Traits::dropout) {
                    drop(probabilities, row_words, shared.words(word_slot.stage), dropout.threshold);
                    word_slot.advance();
                }
            };

            start_scores();
            pass_turn(consumer);
            wgmma::wait<0>();
            finish_scores(true);
            softmax.take_maximum<0>(scores, scale_log2, -infinity);
            softmax.take_maximum<1>(scores, scale_log2, -infinity);
            softmax.exponentiate<0, score_count>(scores, scale_log2);
            finish_probabilities();

            // QK^T of `block`, then PV of the block before it beside the softmax of `block`.
            auto step = [&](const bool masked) __attribute__((always_inline)) {
                start_scores();
                rescale_out();  // beside QK^T
                start_out();
                if constexpr (Traits::split == Traits::value_steps) pass_turn(consumer);
                wgmma::wait<1>();
                finish_scores(masked);
                rescales = softmax.take_maximum<0>(scores, scale_log2, -infinity);
                if (masked) wgmma::fence();  // the mask's branches would have ptxas put in one of its own
                start_rest_of_out();
                if constexpr (Traits::split < Traits::value_steps) pass_turn(consumer);
                // Left alone, ptxas takes both rows' maxima in step, above the end of the turn.
                rescales |= softmax.take_maximum<1>(scores, scale_log2, load_after(shared.least_score()));
                softmax.exponentiate<0, early_count>(scores, scale_log2);
                // With turns, ptxas's own place for the wait is faster (docs/tuning/cuda.md).
                if constexpr (!Traits::pingpong) {
                    wgmma::hold_wait_behind(softmax.row_sum[0] + softmax.row_sum[1], shared.query_tile(0));
                }
                finish_out();
                softmax.exponentiate<early_count, score_count>(scores, scale_log2);
                finish_probabilities();
            };
            --block;
            if constexpr (Traits::has_right) {
#pragma unroll 1
                for (; block >= max(tile.first, whole_end); --block) step(true);
            }
#pragma unroll 1
            for (; block >= max(tile.first, whole_begin); --block) step(false);
            if constexpr (Traits::has_left) {
#pragma unroll 1
                for (; block >= tile.first; --block) step(true);
            }

            rescale_out();
            release_query();
            start_out();
            start_rest_of_out();
            if constexpr (Traits::cut) {
                finish_out();
                if (tile.cut >= 0 && !combine_pieces(out, softmax, partials, cut, tile)) continue;
                finish();
            } else {
                finish();  // beside the last PV
                finish_out();
            }
        } else {
            release_query();
            finish();
        }
        write_out(out, normalise, results, shared, shared.staging_offset(warp), shape, tile,
                  tile.first_row + 16 * warp);
    }
}
>>>>>>> cbd07e9 (Tuning logs in docs/tuning, beside the data that only they cite; two results that nothing cites go)

extern "C" __global__ void __launch_bounds__(Traits::threads, 1)
    forward(const __grid_constant__ Parameters parameters) {
    unsigned char* shared_memory = dynamic_shared_memory();
    const SharedMemory shared{shared_memory, shared_address(shared_memory)};
    const Shape shape{parameters.queries, parameters.keys,    parameters.query_heads, parameters.group,
                      parameters.batch,   parameters.columns, parameters.left,        parameters.right,
                      parameters.mask_metadata};
    const SplitKV split_kv{parameters.whole_tiles, parameters.split_ctas, parameters.split_tiles,
                           parameters.tile_blocks};
    const ScoreOperands score_operands = parameters.score;
    const Dropout dropout = parameters.dropout;

    if (threadIdx.x == 0) {
        if (shared.base % descriptor::atom_bytes != 0) __trap();  // the swizzle counts from 1024-byte boundaries
        tma::prefetch_descriptor(parameters.maps.query);
        tma::prefetch_descriptor(parameters.maps.key);
        tma::prefetch_descriptor(parameters.maps.value);
        for (int stage = 0; stage < Traits::query_stages; ++stage) {
            mbarrier::init(shared.query_full(stage), 1);
            mbarrier::init(shared.query_empty(stage), 4 * Traits::consumers);  // a lane of each warp
        }
        for (int stage = 0; stage < Traits::stages; ++stage) {
            mbarrier::init(shared.key_full(stage), 1);
            mbarrier::init(shared.value_full(stage), 1);
            mbarrier::init(shared.key_empty(stage), 4 * Traits::consumers);
            mbarrier::init(shared.value_empty(stage), 4 * Traits::consumers);
        }
        mbarrier::fence_init();
        shared.least_score() = -infinity;
    }
    __syncthreads();
    allow_next_kernel();

    if (warp_index() < 4) {
        if constexpr (Traits::consumers > 1) release_registers<Traits::producer_registers>();
        if (warp_index() == 0 && elect_one()) {
            produce(parameters.maps, shared, shape, split_kv, parameters.l2_head_group, parameters.next_tile,
                    dropout);
        }
    } else {
        if constexpr (Traits::consumers > 1) take_registers<Traits::consumer_registers>();
        // With score modifications the scale is applied there (ScoreRow::logit).
        const float softmax_scale = ScoreTraits::has_score_mod ? 1.0f : parameters.scale_log2;
        consume({shared,
                 {parameters.out, parameters.lse},
                 {parameters.partials, parameters.arrived},
                 shape,
                 split_kv,
                 score_operands,
                 {parameters.sinks, parameters.sinks_stride},
                 dropout,
                 softmax_scale});
    }
}
