// The consumer role of the decode kernel: a warpgroup computes the rows of each tile, block of keys by block of keys:
//
//     S = QK^T;  P = softmax(S) relative to the row's maximum so far;  O = O · rescale + PV
//
// The kernel is bound by the loads of K and V, which run ahead of it. So its steps follow each other, and nothing of
// its own overlaps: another CTA of the multiprocessor computes meanwhile. Tiles of few rows on a cache in e4m3 are
// computed otherwise (warp_tile.cuh).
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"
#include "common/warp_arrival.cuh"
#include "sm90/decode/load.cuh"
#include "sm90/decode/logits.cuh"
#include "sm90/decode/pair.cuh"
#include "sm90/decode/query.cuh"
#include "sm90/decode/shared_tile.cuh"
#include "sm90/decode/warp_tile.cuh"
#include "sm90/decode/widen.cuh"

using wgmma::Major;
using wgmma::Wgmma;

constexpr int score_count = Traits::keys / 2;     // accumulators of S that a thread holds
constexpr int out_count = Traits::value_dim / 2;  // … of O
// From what wgmma reads of one stage to that of the next, in units of descriptors.
constexpr int key_step = Traits::widens ? 0 : Traits::key_bytes >> 4;
constexpr int value_step = Traits::widens ? 0 : Traits::value_bytes >> 4;

// ---------------------------------------------------------------------------------------- Q

// Rotates a tile's rows of Q, on their way to where wgmma reads them. The first barrier waits until all consumers have
// read the previous tile's Q. Rows behind the tile's last stay as they are: wgmma reads them, and their results aren't
// used.
__device__ __forceinline__ void rotate_query(const ConsumerCall& call, const Tile& tile, int tile_stage) {
    constexpr int row_chunks = Traits::head_dim / 8;
    sync_consumers();
#pragma unroll 1
    for (int i = threadIdx.x; i < tile.rows * row_chunks; i += Traits::consumer_threads) {
        const int index = i / row_chunks, chunk = i % row_chunks;
        const int query = Row(call.shape, tile, index).query;
        const int position = query_position(call.shape, tile.batch, tile.length, tile.queries, query);
        const int panel = chunk / 8 * descriptor::panel_bytes(Traits::query_rows);
        const int offset = SharedMemory::query + panel + descriptor::swizzled_offset(index, chunk % 8);
        *reinterpret_cast<uint4*>(call.shared.data + offset) = rotated_chunk<Traits::Element, ROTARY>(
            call.shared.plain_row(tile_stage, index), chunk, call.rotary, position);
    }
    fence_shared_for_async();
    sync_consumers();
}

// ---------------------------------------------------------------------------------------- a tile

// Sets the values to 0, in shared memory, of keys that no row of the tile sees: memory that nobody wrote may hold NaN,
// and 0 times NaN is NaN in PV. The consumers come together when that is done.
__device__ __forceinline__ void clean_values(const SharedMemory& shared, int stage, const Tile& tile, int first_key,
                                             bool has_missing) {
    const int row = threadIdx.x, key = first_key + row;
    if (row < Traits::keys) {
        const bool is_missing = has_missing && shared.is_missing(stage)[row];
        if (is_missing || key < tile.keys.begin || key >= tile.keys.end) {
#pragma unroll 1
            for (int chunk = 0; chunk < 8 * Traits::value_panels; ++chunk) {
                const int panel = chunk / 8 * descriptor::panel_bytes(Traits::keys);
                const int offset = panel + descriptor::swizzled_offset(row, chunk % 8);
                unsigned char* const block = shared.data + shared.value_operand(stage);
                *reinterpret_cast<uint4*>(block + offset) = {0, 0, 0, 0};
            }
        }
    }
    fence_shared_for_async();
    sync_consumers();
}

// S = QK^T.
__device__ __forceinline__ void multiply_keys(float (&scores)[score_count], uint32_t query, uint32_t key) {
    wgmma::pin(scores);
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < Traits::key_steps; ++step) {
        Wgmma<Traits::keys>::issue<Traits::Element, Major::K, Major::K>(
            scores, descriptor::at(query, descriptor::k_major_offset(step, Traits::query_rows)),
            descriptor::at(key, descriptor::k_major_offset(step, Traits::keys)), step > 0);
    }
    wgmma::commit();
    wgmma::pin(scores);
    wgmma::wait<0>();
    wgmma::pin(scores);
}

// O += PV.
__device__ __forceinline__ void multiply_values(float (&out)[out_count], const float (&probabilities)[score_count],
                                                uint32_t value) {
    uint32_t converted[Traits::value_steps][4];  // A operands of wgmma
#pragma unroll
    for (int i = 0; i < score_count / 2; ++i) {
        converted[i / 4][i % 4] = convert<Traits::Element>(probabilities[2 * i], probabilities[2 * i + 1]);
    }
    wgmma::pin(out);
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < Traits::value_steps; ++step) {
        Wgmma<Traits::value_dim>::issue<Traits::Element, Major::MN>(
            out, converted[step], descriptor::at(value, descriptor::mn_major_offset(step)), 1);
    }
    wgmma::commit();
    wgmma::pin(out);
    wgmma::wait<0>();
    wgmma::pin(out);
}

// Attends to the blocks of a part of a tile.
__device__ __forceinline__ void attend(const ConsumerCall& call, Ring& ring, const Tile& tile, int tile_stage,
                                       float (&out)[out_count], OnlineSoftmax& softmax) {
    const SharedMemory& shared = call.shared;
    const ThreadRows rows(call, tile, upper_row());
    const Interval seen_by_all = keys_of_all_rows(call.shape, tile);
    const uint32_t query = descriptor::k_major_low(shared.query_tile(tile_stage));
    const uint32_t first_key = descriptor::k_major_low(shared.base + shared.key_operand(0));
    const uint32_t first_value = descriptor::mn_major_low(shared.base + shared.value_operand(0), Traits::keys);
#pragma unroll 1
    for (int block = tile.first; block < tile.last; ++block, ring.advance()) {
        const int stage = ring.stage, first = block * Traits::keys, end = first + Traits::keys;
        float scores[score_count];
        mbarrier::wait(shared.key_full(stage), ring.parity);
        if constexpr (Traits::widens) {
            widen_block<Traits::head_dim>(shared, shared.key_block(stage), shared.key_operand(stage));
        } else if constexpr (Traits::gathers) {
            fence_shared_for_async();
        }
        multiply_keys(scores, query, first_key + stage * key_step);
        make_logits(scores, call, rows, first);
        if (first < seen_by_all.begin || end > seen_by_all.end) mask_logits(scores, rows, first);
        bool has_missing = false;
        if constexpr (Traits::paged) {
            const uint4 missing = shared.has_missing(stage);
            has_missing = (missing.x | missing.y | missing.z | missing.w) != 0;
            if (has_missing) mask_missing(scores, shared.is_missing(stage));
        }
        const float2 rescale = softmax.update(scores);
#pragma unroll
        for (int i = 0; i < out_count; ++i) out[i] *= row_of(i) == 0 ? rescale.x : rescale.y;
        mbarrier::wait(shared.value_full(stage), ring.parity);
        if constexpr (Traits::widens) {
            widen_block<Traits::value_dim>(shared, shared.value_block(stage), shared.value_operand(stage));
        } else if constexpr (Traits::gathers) {
            fence_shared_for_async();
        }
        if (has_missing || first < tile.keys.begin || end > tile.keys.end) {
            clean_values(shared, stage, tile, first, has_missing);
        }
        multiply_values(out, scores, first_value + stage * value_step);
        if (arrives(threadIdx.x % 32)) mbarrier::arrive(shared.empty(stage));
    }
    if constexpr (Traits::is_float8) {
        const float descale = descale_of(call.shape, call.descales, call.descales.value, tile.key_head);
#pragma unroll
        for (int i = 0; i < out_count; ++i) out[i] *= descale;
    }
}

// ---------------------------------------------------------------------------------------- the role

__device__ __forceinline__ void consume(const ConsumerCall& call) {
    const SharedMemory& shared = call.shared;
    Ring ring;
    TileRing tile_ring;
    wgmma::use_first_rows(Traits::query_rows);
    copy_first_query(shared, call.shape, call.query);
#pragma unroll 1
    while (true) {
        const int stage = tile_ring.stage;
        mbarrier::wait(shared.tile_full(stage), tile_ring.parity);
        Tile tile = shared.tile(stage);
        if (!tile.exists()) break;

        float out[out_count] = {};
        OnlineSoftmax softmax;
        if (tile.first < tile.last) {
            if constexpr (Traits::rotary) {
                rotate_query(call, tile, stage);
            } else if constexpr (!Traits::by_warps && !Traits::query_by_tma) {
                fence_shared_for_async();  // Q has come by asynchronous copies, and wgmma reads it
            }
            if constexpr (Traits::by_warps) {
                WarpTile(call, tile, stage, out, softmax).attend(ring);
            } else {
                attend(call, ring, tile, stage, out, softmax);
            }
        }
        // Read again: so no register holds, while blocks are computed, what only the end of a shared tile needs.
        if (Traits::split || Traits::cluster > 1) tile = shared.tile(stage);
        __syncwarp();
        if (arrives(threadIdx.x % 32)) mbarrier::arrive(shared.tile_empty(stage));
        tile_ring.advance();
        if constexpr (Traits::by_warps) combine_warps(shared, out, softmax);
        if constexpr (Traits::pairs) {
            if (!Pair{shared}.join(out, softmax, tile)) continue;
        }
        if constexpr (Traits::cluster > 1) {
            combine_in_cluster(out, softmax, shared, call.results, call.sinks, call.shape, tile);
            break;  // there is one tile
        } else if (Sharing(call, tile).combine(out, softmax)) {
            write_row<0>(out, softmax, call.results, call.sinks, call.shape, tile);
            if constexpr (thread_rows == 2) write_row<1>(out, softmax, call.results, call.sinks, call.shape, tile);
        }
    }
}
