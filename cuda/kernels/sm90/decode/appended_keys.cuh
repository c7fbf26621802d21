// How the producer sees to it that new keys are in the cache before it loads them. `begin` is called at the start of a
// part of a tile, `before` ahead of each block, `end` behind the last.
#pragma once
#include "ptx/dependent_launch.cuh"
#include "ptx/global.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/decode/append.cuh"
#include "sm90/decode/traits.cuh"

// The kernel ahead appends them (append.cu), and the producer waits for it. Where sequences may share memory
// (`is_shared`), each block may have some.
struct KeysOfKernelAhead {
    const Shape& shape;
    bool waits;
    const bool is_shared;

    __device__ __forceinline__ KeysOfKernelAhead(const AppendCall& call)
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

// The producer warp appends them. Each key head of a sequence has one tile, and each sequence memory of its own, so no
// other tile reads them. Of CTAs that share the tile, each appends the keys in its own blocks. The first also appends
// those ahead of all the tile's blocks, the last those behind.
struct OwnKeys {
    const AppendCall& call;
    int token, end_token;  // new tokens that are still to be appended: [token, end_token)
    int first_block;       // the block that `token` is in

    __device__ __forceinline__ OwnKeys(const AppendCall& call) : call(call) {}

    __device__ __forceinline__ void begin(const Tile& tile) {
        const int before = length_before_append(call.shape, tile.batch), appended = call.shape.appended;
        const bool is_first = tile.part_begin == 0, is_last = tile.part_end == tile.counted_blocks;
        token = is_first ? 0 : min(max(tile.first * Traits::keys - before, 0), appended);
        end_token = is_last ? appended : min(max(tile.last * Traits::keys - before, 0), appended);
        if (tile.part_begin == tile.part_end) end_token = token;  // there are more CTAs than parts
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
        fence_global_for_async();  // TMA will read them
        __syncwarp();
    }
};

using AppendedKeys = Either<Traits::appends, OwnKeys, KeysOfKernelAhead>::type;
