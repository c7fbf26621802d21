// Caches in e4m3 and tiles of at most 16 rows: each warp attends to 16 keys of a block by itself, with a softmax of its
// own. Between the preparation of Q and the tile's end no warp waits for another. There one adds up what each made.
//
// The products are mma's, of float16. Operands of keys and values come to registers as they are, in 8 bits, and are
// widened there, which is exact. Of a query in bfloat16 each row is multiplied by a power of two, so that its largest
// element is near 2^12. What float16 then loses of other elements is less than 2^-37 of that one.
//
// No byte has to change its thread. Which columns a step of QK^T contracts doesn't matter if Q's and K's are the same:
// a thread takes 16 neighbours of each 64, four for each step. Of V, matrices of pairs of columns are loaded
// transposed. A product computes the even columns of 16, another the odd ones, and a thread gets four neighbours of the
// output.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "common/warp_arrival.cuh"
#include "sm90/decode/load.cuh"
#include "sm90/decode/logits.cuh"

struct WarpTile {
    static constexpr int steps = Traits::head_dim / 16;        // products of QK^T for eight keys
    static constexpr int wide_steps = steps / 4 * 4;           // those of whole 64 columns
    static constexpr int row_groups = Traits::query_rows / 8;  // a thread has a row of each eight
    static constexpr int query_exponent = 12;

    const ConsumerCall& call;
    const SharedMemory& shared;
    const Tile& tile;
    float (&out)[Traits::value_dim / 2];
    OnlineSoftmax& softmax;
    const int lane = threadIdx.x % 32, own = threadIdx.x / 32 * 16;  // the warp's first key of a block
    ThreadRows rows;
    unsigned char* const query;  // where Q lies in shared memory

    __device__ __forceinline__ WarpTile(const ConsumerCall& call, const Tile& tile, int tile_stage,
                                        float (&out)[Traits::value_dim / 2], OnlineSoftmax& softmax)
        : call(call), shared(call.shared), tile(tile), out(out), softmax(softmax),
          rows(call, tile, threadIdx.x % 32 / 4),
          query(shared.data + SharedMemory::query + (Traits::rotary ? 0 : tile_stage * Traits::query_bytes)) {
        prepare_query();
    }

    // Where 16-byte chunk `chunk` of row `row` lies in panels of `panel_rows` rows.
    __device__ static __forceinline__ int place_of(int row, int chunk, int panel_rows) {
        return chunk / 8 * descriptor::panel_bytes(panel_rows) + descriptor::swizzled_offset(row, chunk % 8);
    }

    // Four neighbours of row lane/4 + 8·r of Q: what the thread takes of it for a step.
    __device__ __forceinline__ uint2& query_of(int step, int r) const {
        const int j = lane % 4;
        const int column = step < wide_steps ? step / 4 * 64 + 16 * j + step % 4 * 4 : 16 * step + 4 * j;
        return *reinterpret_cast<uint2*>(query + place_of(lane / 4 + 8 * r, column / 8, Traits::query_rows) +
                                         column % 8 * 2);
    }

    // Makes Q float16, in its place, and sets rows to 0 that the tile doesn't have.
    __device__ __forceinline__ void prepare_query() {
        float factor[row_groups];
#pragma unroll
        for (int r = 0; r < row_groups; ++r) factor[r] = normalise_query(r);
        sync_consumers();
#pragma unroll
        for (int r = 0; r < row_groups; ++r) {
            const bool is_there = lane / 4 + 8 * r < tile.rows;
#pragma unroll 1
            for (int step = threadIdx.x / 32; step < steps; step += 4) {
                uint2& four = query_of(step, r);
                four = is_there ? uint2{in_float16(four.x, factor[r]), in_float16(four.y, factor[r])} : uint2{0, 0};
            }
        }
        if constexpr (Traits::query_by_tma) fence_shared_for_async();  // TMA copies the next tile's Q to the same place
        sync_consumers();
    }
    __device__ static __forceinline__ uint32_t in_float16(uint32_t pair, float factor) {
        if constexpr (is_same<Traits::Element, float16>) return pair;
        const float2 numbers = to_floats<Traits::Element>(pair);
        return convert<float16>(numbers.x * factor, numbers.y * factor);
    }

    // Returns the power of two by which row r of Q is multiplied, and divides the row's scale by it.
    __device__ __forceinline__ float normalise_query(int r) {
        if constexpr (is_same<Traits::Element, float16>) return 1;
        float largest = 0;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            const uint2 four = query_of(step, r);
            const float2 first = to_floats<Traits::Element>(four.x), last = to_floats<Traits::Element>(four.y);
            largest = fmaxf(largest, fmaxf(fabsf(first.x), fabsf(first.y)));
            largest = fmaxf(largest, fmaxf(fabsf(last.x), fabsf(last.y)));
        }
        // A power of two is a float whose fraction is 0. Neither this one nor its inverse leaves their range.
        const int exponent = static_cast<int>(__float_as_uint(quad_max(largest)) >> 23);
        const int up = exponent == 255 ? 0 : min(127 + query_exponent - exponent, 120);
        rows.scale[r] *= __uint_as_float(static_cast<uint32_t>(127 - up) << 23);
        return __uint_as_float(static_cast<uint32_t>(127 + up) << 23);
    }

    __device__ __forceinline__ void attend(Ring& ring) {
        const Interval seen_by_all = keys_of_all_rows(call.shape, tile);
#pragma unroll 1
        for (int block = tile.first; block < tile.last; ++block, ring.advance()) {
            const int stage = ring.stage, first = block * Traits::keys, end = first + Traits::keys;
            bool has_missing = false;
            mbarrier::wait(shared.key_full(stage), ring.parity);
            if constexpr (Traits::paged) {
                const uint4 missing = shared.has_missing(stage);
                has_missing = (missing.x | missing.y | missing.z | missing.w) != 0;
            }
            const bool all_seen = !has_missing && first >= seen_by_all.begin && end <= seen_by_all.end;
            float scores[8];
            multiply_keys(scores, stage);
            make_logits(scores, call, rows, first + own);
            if (!all_seen) {
                mask_logits(scores, rows, first + own);
                if (has_missing) mask_missing(scores, shared.is_missing(stage) + own);
            }
            const float2 rescale = softmax.update(scores);
            if (__any_sync(all_lanes, rescale.x != 1 || rescale.y != 1)) {
#pragma unroll
                for (int i = 0; i < Traits::value_dim / 2; ++i) out[i] *= i / 2 % 2 == 0 ? rescale.x : rescale.y;
            }
            mbarrier::wait(shared.value_full(stage), ring.parity);
            uint32_t seen[2] = {~0u, ~0u};
            if (!all_seen) find_seen(seen, stage, first, has_missing);
            multiply_values(scores, stage, seen);
            __syncwarp();
            if (arrives(lane)) mbarrier::arrive(shared.empty(stage));
        }
        const float descale = descale_of(call.shape, call.descales, call.descales.value, tile.key_head);
#pragma unroll
        for (int i = 0; i < Traits::value_dim / 2; ++i) out[i] *= descale;
    }

    // S of the warp's 16 keys. Elements 0 to 3 are those of the first eight.
    __device__ __forceinline__ void multiply_keys(float (&scores)[8], int stage) {
        const unsigned char* const block = shared.data + shared.key_block(stage);
        const int j = lane % 4;
#pragma unroll
        for (int i = 0; i < 8; ++i) scores[i] = 0;
#pragma unroll
        for (int step = 0; step < wide_steps; step += 4) {
            uint4 bytes[2];
#pragma unroll
            for (int eight = 0; eight < 2; ++eight) {
                const int place = place_of(own + 8 * eight + lane / 4, step + j, Traits::keys);
                bytes[eight] = *reinterpret_cast<const uint4*>(block + place);
            }
            multiply_step(scores, step, bytes[0].x, bytes[1].x);
            multiply_step(scores, step + 1, bytes[0].y, bytes[1].y);
            multiply_step(scores, step + 2, bytes[0].z, bytes[1].z);
            multiply_step(scores, step + 3, bytes[0].w, bytes[1].w);
        }
#pragma unroll
        for (int step = wide_steps; step < steps; ++step) {
            uint32_t bytes[2];
#pragma unroll
            for (int eight = 0; eight < 2; ++eight) {
                const int place = place_of(own + 8 * eight + lane / 4, step, Traits::keys) + 4 * j;
                bytes[eight] = *reinterpret_cast<const uint32_t*>(block + place);
            }
            multiply_step(scores, step, bytes[0], bytes[1]);
        }
    }
    __device__ __forceinline__ void multiply_step(float (&scores)[8], int step, uint32_t first, uint32_t last) {
        float (&of_first)[4] = *reinterpret_cast<float (*)[4]>(scores);
        float (&of_last)[4] = *reinterpret_cast<float (*)[4]>(scores + 4);
        const uint2 upper = query_of(step, 0), lower = row_groups == 2 ? query_of(step, row_groups - 1) : uint2{0, 0};
        const uint32_t of_query[4] = {upper.x, lower.x, upper.y, lower.y};
        mma_float16(of_first, of_query, widen_e4m3<float16>(first), widen_e4m3<float16>(first >> 16));
        mma_float16(of_last, of_query, widen_e4m3<float16>(last), widen_e4m3<float16>(last >> 16));
    }

    // Masks of the bytes that the thread gets of V, for the first and the last eight of 16 keys: those of keys that no
    // row of the tile sees become 0, as memory that nobody wrote may hold NaN.
    __device__ __forceinline__ void find_seen(uint32_t (&masks)[2], int stage, int first, bool has_missing) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int place = own + i / 2 * 8 + 2 * (lane % 4) + i % 2, key = first + place;
            const bool is_missing = has_missing && shared.is_missing(stage)[place];
            if (is_missing || key < tile.keys.begin || key >= tile.keys.end) {
                masks[i / 2] &= i % 2 ? 0x0000ffffu : 0xffff0000u;
            }
        }
    }

    // O += PV of those keys. Elements of O are in the order of products: of 16 columns the even ones, then the odd
    // ones.
    __device__ __forceinline__ void multiply_values(const float (&probabilities)[8], int stage,
                                                    const uint32_t (&seen)[2]) {
        uint32_t converted[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) converted[i] = convert<float16>(probabilities[2 * i], probabilities[2 * i + 1]);
        const uint32_t block = shared.base + shared.value_block(stage);
#pragma unroll
        for (int group = 0; group < Traits::value_dim / 16; ++group) {
            const uint2 words = load_matrix_x2_transposed(block + place_of(own + lane % 16, group, Traits::keys));
            const uint32_t upper = pairs_of_columns(words.x & seen[0]), lower = pairs_of_columns(words.y & seen[1]);
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                float (&product)[4] = *reinterpret_cast<float (*)[4]>(out + 8 * group + 4 * odd);
                mma_float16(product, converted, widen_e4m3<float16>(upper >> 16 * odd),
                            widen_e4m3<float16>(lower >> 16 * odd));
            }
        }
    }
};

// Adds up what the warps made of a tile. The first gets it, where wgmma would have left it (`upper_row`).
__device__ __forceinline__ void combine_warps(const SharedMemory& shared, float (&out)[Traits::value_dim / 2],
                                              OnlineSoftmax& softmax) {
    constexpr int warps = 4;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    sync_consumers();  // the first has read those of the tile before
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = lane / 4 + 8 * r;
        const float sum = quad_sum(softmax.row_sum[r]);
        if (row >= Traits::query_rows) continue;
        if (lane % 4 == 0) shared.warp_statistics(warp, row) = {softmax.row_max[r], sum};
#pragma unroll
        for (int group = 0; group < Traits::value_dim / 16; ++group) {
            const float* const values = out + 8 * group + 2 * r;
            float* const to = shared.warp_row(warp, row) + 16 * group + 4 * (lane % 4);
            *reinterpret_cast<float4*>(to) = {values[0], values[4], values[1], values[5]};
        }
    }
    sync_consumers();
    if (warp > 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = lane / 4 + 8 * r;
        if (row >= Traits::query_rows) continue;
        float factor[warps];
        float max = initial_max, sum = 0;
#pragma unroll
        for (int i = 0; i < warps; ++i) max = fmaxf(max, shared.warp_statistics(i, row).x);
#pragma unroll
        for (int i = 0; i < warps; ++i) {
            const float2 statistics = shared.warp_statistics(i, row);
            factor[i] = exponential<Traits::natural>(statistics.x - max);
            sum += statistics.y * factor[i];
        }
        softmax.row_max[r] = max;
        softmax.row_sum[r] = lane % 4 == 0 ? sum : 0;
#pragma unroll
        for (int i = 0; i < Traits::value_dim / 2; i += 2) {
            if (row_of(i) != r) continue;
            out[i] = out[i + 1] = 0;
#pragma unroll
            for (int j = 0; j < warps; ++j) {
                const float* const values = shared.warp_row(j, row) + column_of(i) + 2 * (lane % 4);
                const float2 pair = *reinterpret_cast<const float2*>(values);
                out[i] += pair.x * factor[j];
                out[i + 1] += pair.y * factor[j];
            }
        }
    }
}
