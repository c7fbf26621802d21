// Loads for repeats (repeat.cuh): a warp loads tiles again, block by block, and replaces what isn't finite in V.
// Consumers don't know: K and V of a block are full for them when they are clean.
#pragma once
#include "ptx/warpgroup.cuh"
#include "common/finite.cuh"
#include "sm90/forward/load.cuh"
#include "sm90/forward/repeat.cuh"

// Replaces what isn't finite in a stage of V by 0, and marks the keys that had any by NaN in that stage of K. A key is
// one lane's, in both.
__device__ __forceinline__ void clean_block(const SharedMemory& shared, int stage) {
    unsigned char* const key = shared.data + SharedMemory::key + stage * Traits::key_bytes;
    unsigned char* const value = shared.data + SharedMemory::value + stage * Traits::value_bytes;
    constexpr int row_chunks = descriptor::row_bytes / sizeof(uint4);
#pragma unroll 1
    for (int row = threadIdx.x % 32; row < Traits::keys; row += 32) {
        uint32_t finite = all_finite;
#pragma unroll 1  // the producer has few registers
        for (int i = 0; i < row_chunks * Traits::value_panels; ++i) {
            const int panel = i / row_chunks * descriptor::panel_bytes(Traits::keys);
            uint4* const chunk =
                reinterpret_cast<uint4*>(value + panel + descriptor::swizzled_offset(row, i % row_chunks));
            uint4 words = *chunk;
            auto clean = [&](uint32_t& word) {
                const uint32_t halves = finite_halves<Traits::Element>(word);
                word &= halves;
                finite &= halves;
            };
            clean(words.x), clean(words.y), clean(words.z), clean(words.w);
            *chunk = words;
        }
        if (finite != all_finite) {
            *reinterpret_cast<uint16_t*>(key + descriptor::swizzled_offset(row, 0)) = nan_bits;  // of the first column
        }
    }
}

// Loads the tile whose Q is in that stage, block by block. K and V of a block come together, in stages of the same
// number: both rings are where they were at the same block.
__device__ __forceinline__ void repeat_blocks(const LoadCall& call, int query_stage) {
    const SharedMemory& shared = call.shared;
    Rings& rings = shared.rings_of_repeats();
    const Tile& tile = shared.tile(query_stage);
#pragma unroll 1
    for (int place = tile.last - 1; place >= tile.first; --place) {
        if (elect_one()) {
            const int key_head = tile.head / call.shape.group, block = block_at(place, tile, call.shape);
            load_key(call, rings, key_batch(tile, call.shape), key_head, block, shared.block_landed());
            load_value(call, rings, key_batch(tile, call.shape), key_head, block, shared.block_landed());
        }
        __syncwarp();
        mbarrier::wait(shared.block_landed(), shared.repeats().landed_parity);
        clean_block(shared, rings.key.stage);
        fence_shared_for_async();
        __syncwarp();
        if (elect_one()) {
            mbarrier::arrive(shared.key_full(rings.key.stage));
            mbarrier::arrive(shared.value_full(rings.value.stage));
            rings.key.advance();
            rings.value.advance();
            rings.hash.advance();
            shared.repeats().landed_parity ^= 1;
        }
        __syncwarp();
    }
}

// Loads the tile again that `tile` returns, which one lane calls. This is no lambda, as it would have to be a generic
// one, which NVRTC 13.0 refuses.
template <class TileOf>
__device__ __forceinline__ void repeat_tile(const LoadCall& call, Rings& rings, const TileOf& tile) {
    const int query_stage = rings.query.stage;
    __syncwarp();
    if (elect_one()) load_query(call, rings, tile());
    __syncwarp();
    repeat_blocks(call, query_stage);
}

// Waits until all tiles have been computed, and loads those again that the consumers noted. A warp of its own does
// this, so that the producer's code is the same as without repeats. `arrived` is that of Partials. The warp keeps its
// progress in shared memory, as it has few registers.
__device__ __forceinline__ void repeat_tiles(const LoadCall& call, const int* next_repeat, const int* arrived) {
    const SharedMemory& shared = call.shared;
    Rings& rings = shared.rings_of_repeats();
    mbarrier::wait(shared.all_computed(), 0);
    if (!shared.repeats().any()) return;
    if (elect_one()) shared.repeats().under_way = 1;
    __syncwarp();

#pragma unroll 1
    for (int number = shared.repeats().first_tile; number != Repeats::none; number = next_repeat[number]) {
        repeat_tile(call, rings, [&]() { return numbered_tile(number, call.shape); });
    }
    if (Traits::split_kv && shared.repeats().split_tiles) {
        constexpr int warps = 4 * Traits::consumers;
        const SplitKV& split_kv = call.split_kv;
        const int last_block = split_kv.begin(blockIdx.x + 1) - 1;
        int index = split_kv.begin(blockIdx.x) / split_kv.tile_blocks;
#pragma unroll 1
        for (; index <= last_block / split_kv.tile_blocks; ++index) {
            const int lane = threadIdx.x % 32;
            const bool is_marked = lane < warps && arrived[index * warps + lane] == Partials::repeat_mark();
            if (!__any_sync(all_lanes, is_marked)) continue;
            const int end = (index + 1) * split_kv.tile_blocks;
#pragma unroll 1
            for (int block = index * split_kv.tile_blocks; block < end;) {
                const int part_end = split_kv.begin(split_kv.owner(block) + 1);
                repeat_tile(call, rings, [&]() {
                    return split_tile_at(block, part_end, split_kv, call.shape, call.l2_head_group);
                });
                block = min(part_end, end);
            }
        }
    }
    __syncwarp();  // all lanes have read the last tile
    if (elect_one()) load_query(call, rings, no_more_tiles);
}
