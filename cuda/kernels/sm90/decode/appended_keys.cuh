// What the producer does before it loads the first block that may have keys which the call appends. `begin` is called
// for each part of a tile, `before` for each of its blocks, `end` after the last.
#pragma once
#include "ptx/global.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/decode/append.cuh"
#include "sm90/decode/traits.cuh"

// A preprocess appends them, and the producer waits for it. Where sequences may share memory (`is_shared`), each block
// may have some.
struct KeysOfPreprocess {
    const Shape& shape;
    bool waits;
    const bool is_shared;

    __device__ __forceinline__ KeysOfPreprocess(const AppendCall& call)
        : shape(call.shape), waits(shape.appended > 0), is_shared(shape.page_table || shape.batch_index) {}

    __device__ __forceinline__ void begin(const Tile&) {}
    __device__ __forceinline__ void before(const Tile& tile, int block) {
        if (waits && (is_shared || (block + 1) * Traits::keys > length_before_append(shape, tile.batch))) {
            wait_for_previous_kernel();
            waits = false;
        }
    }
    __device__ __forceinline__ void end(const Tile&) {}
};

// The producer appends them, a warp. Each key head of a sequence has one tile then, and memory of its own, so that no
// other tile reads them. CTAs that share the tile divide them: each appends what lies in its part's blocks, and those
// that have the first and the last part what lies ahead of all blocks or behind.
struct OwnKeys {
    const AppendCall& call;
    int token, end_token;  // of the new ones, those to append
    int first_block;       // … the first of which lies in this one

    __device__ __forceinline__ OwnKeys(const AppendCall& call) : call(call) {}

    __device__ __forceinline__ void begin(const Tile& tile) {
        const int before = length_before_append(call.shape, tile.batch), appended = call.shape.appended;
        const bool is_first = tile.part_begin == 0, is_last = tile.part_end == tile.counted_blocks;
        token = is_first ? 0 : min(max(tile.first * Traits::keys - before, 0), appended);
        end_token = is_last ? appended : min(max(tile.last * Traits::keys - before, 0), appended);
        if (tile.part_begin == tile.part_end) end_token = token;  // of clusters with more CTAs than the tile has blocks
        first_block = (before + token) / Traits::keys;
    }
    __device__ __forceinline__ void before(const Tile& tile, int block) {
        if (block >= first_block) append(tile);
    }
    __device__ __forceinline__ void end(const Tile& tile) { append(tile); }

private:
    __device__ __forceinline__ void append(const Tile& tile) {
        if (token >= end_token) return;
        const int chunks = call.chunks(), count = (end_token - token) * chunks;
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < count; i += 32) {
            append_chunk(call, tile.batch, token + i / chunks, tile.key_head, i % chunks);
        }
        token = end_token;
        global::fence_proxy_async();  // TMA will read them
        __syncwarp();
    }
};

using AppendedKeys = Either<Traits::appends, OwnKeys, KeysOfPreprocess>::type;
