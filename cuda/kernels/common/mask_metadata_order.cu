// After mask_metadata_backward: the tiles that visit a block are to follow one another, so that their numbers rank them. Where
// the first and the last blocks of tiles rise from tile to tile they do; elsewhere tiles visit some blocks more.
#include "parameters.cuh"
#include "common/mask_metadata.cuh"

constexpr int threads = 256;
constexpr int warps = threads / 32;

// Combines what each thread of the CTA has with that of those before it, and, before all, with `carry`, which is then
// that of all.
template <class Combine>
__device__ __forceinline__ int scan(int x, int& carry, Combine combine) {
    __shared__ int of_warps[warps];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int before = __shfl_up_sync(all_lanes, x, distance);
        if (lane >= distance) x = combine(before, x);
    }
    if (lane == 31) of_warps[warp] = x;
    __syncthreads();
#pragma unroll
    for (int other = 0; other < warps; ++other) {
        if (other == warp) x = combine(carry, x);
        carry = combine(carry, of_warps[other]);
    }
    __syncthreads();
    return x;
}

// How many of the tiles, of which the first are such, are such.
template <class Such>
__device__ __forceinline__ int count_first(const int2* tile_blocks, int tiles, Such such) {
    int count = 0;
    while (count < tiles) {
        const int middle = (count + tiles) / 2;
        if (such(tile_blocks[middle])) {
            count = middle + 1;
        } else {
            tiles = middle;
        }
    }
    return count;
}

// One CTA a batch row.
extern "C" __global__ void __launch_bounds__(threads)
    mask_metadata_order(const __grid_constant__ Parameters parameters) {
    wait_for_previous_kernel();
    allow_next_kernel();
    const int tiles = parameters.tiles, blocks = parameters.blocks, span = parameters.span;
    const int spans = ceil_div(blocks, span);
    // Of this CTA's batch row.
    int2* const tile_blocks = parameters.tile_blocks + static_cast<int64_t>(blockIdx.x) * tiles;
    int* const visitors = parameters.visitors + static_cast<int64_t>(blockIdx.x) * tiles;
    int2* const block_tiles = parameters.block_tiles + static_cast<int64_t>(blockIdx.x) * blocks;
    int* const span_tiles = parameters.span_tiles + static_cast<int64_t>(blockIdx.x) * spans;

    auto least = [](int a, int b) { return min(a, b); };
    auto greatest = [](int a, int b) { return max(a, b); };
    auto sum = [](int a, int b) { return a + b; };
    int first_behind = blocks;  // of the tiles behind those at hand
    for (int begin = 0; begin < tiles; begin += threads) {
        const int tile = tiles - 1 - begin - static_cast<int>(threadIdx.x);
        const int2 own = tile >= 0 ? tile_blocks[tile] : int2{0, 0};
        const int first = scan(own.x < own.y ? own.x : blocks, first_behind, least);
        if (tile >= 0) tile_blocks[tile].x = first;
    }
    __syncthreads();
    int last_before = 0, visitors_before = 0;
    for (int begin = 0; begin < tiles; begin += threads) {
        const int tile = begin + threadIdx.x;
        const int2 own = tile < tiles ? tile_blocks[tile] : int2{0, 0};
        const int last = scan(own.y, last_before, greatest);
        const int count = scan(tile < tiles && own.x < last, visitors_before, sum);
        if (tile < tiles) tile_blocks[tile].y = last, visitors[tile] = count;
    }
    __syncthreads();

    for (int block = threadIdx.x; block < blocks; block += threads) {
        block_tiles[block] = {count_first(tile_blocks, tiles, [&](int2 of_tile) { return of_tile.y <= block; }),
                              count_first(tile_blocks, tiles, [&](int2 of_tile) { return of_tile.x <= block; })};
    }
    for (int i = threadIdx.x; i < spans; i += threads) {
        // The tiles [begin, end), but for those that visit nothing.
        const int begin = count_first(tile_blocks, tiles, [&](int2 of_tile) { return of_tile.y <= i * span; });
        const int end = count_first(tile_blocks, tiles, [&](int2 of_tile) { return of_tile.x < (i + 1) * span; });
        const int before = begin > 0 ? visitors[begin - 1] : 0;
        span_tiles[i] = begin < end ? visitors[end - 1] - before : 0;
    }
}
