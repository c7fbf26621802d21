// Makes the key tiles that visit a query block consecutive, and counts them. It runs after mask_metadata_backward.
//
// The backward kernel ranks the tiles that visit a block by their numbers, so these tiles must be consecutive. They are
// if neither the first nor the last visited block falls from one tile to the next. Where one falls, tiles are made to
// visit some more blocks, in which they see nothing.
#include "parameters.cuh"
#include "ptx/dependent_launch.cuh"
#include "common/mask_metadata.cuh"

constexpr int threads = 256;
constexpr int warps = threads / 32;

// Inclusive scan over the CTA's threads, in order. It continues from `carry`, which then holds the total.
template <class Combine>
__device__ __forceinline__ int scan(int x, int& carry, Combine combine) {
    __shared__ int warp_totals[warps];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int before = __shfl_up_sync(all_lanes, x, distance);
        if (lane >= distance) x = combine(before, x);
    }
    if (lane == 31) warp_totals[warp] = x;
    __syncthreads();
#pragma unroll
    for (int other = 0; other < warps; ++other) {
        if (other == warp) x = combine(carry, x);
        carry = combine(carry, warp_totals[other]);
    }
    __syncthreads();
    return x;
}

// Binary search: length of the prefix of tiles that satisfy the predicate.
template <class Predicate>
__device__ __forceinline__ int prefix_length(const Interval* tile_blocks, int tiles, Predicate satisfies) {
    int length = 0;
    while (length < tiles) {
        const int middle = (length + tiles) / 2;
        if (satisfies(tile_blocks[middle])) {
            length = middle + 1;
        } else {
            tiles = middle;
        }
    }
    return length;
}

// A CTA orders the tiles of a batch row.
extern "C" __global__ void __launch_bounds__(threads)
    mask_metadata_order(const __grid_constant__ Parameters parameters) {
    wait_for_previous_kernel();
    allow_next_kernel();
    const int tiles = parameters.tiles, blocks = parameters.blocks, span = parameters.span;
    const int spans = ceil_div(blocks, span);
    Interval* const tile_blocks = parameters.tile_blocks + static_cast<int64_t>(blockIdx.x) * tiles;
    int* const visitors = parameters.visitors + static_cast<int64_t>(blockIdx.x) * tiles;
    Interval* const block_tiles = parameters.block_tiles + static_cast<int64_t>(blockIdx.x) * blocks;
    int* const span_tiles = parameters.span_tiles + static_cast<int64_t>(blockIdx.x) * spans;

    auto least = [](int a, int b) { return min(a, b); };
    auto greatest = [](int a, int b) { return max(a, b); };
    auto sum = [](int a, int b) { return a + b; };

    // A tile begins no later than any tile after it.
    int first_after = blocks;
    for (int begin = 0; begin < tiles; begin += threads) {
        const int tile = tiles - 1 - begin - static_cast<int>(threadIdx.x);
        const Interval own = tile >= 0 ? tile_blocks[tile] : Interval{0, 0};
        const int first = scan(own.begin < own.end ? own.begin : blocks, first_after, least);
        if (tile >= 0) tile_blocks[tile].begin = first;
    }
    __syncthreads();
    // A tile ends no earlier than any tile before it. Counts the tiles up to each that visit anything.
    int last_before = 0, visitors_before = 0;
    for (int begin = 0; begin < tiles; begin += threads) {
        const int tile = begin + threadIdx.x;
        const Interval own = tile < tiles ? tile_blocks[tile] : Interval{0, 0};
        const int last = scan(own.end, last_before, greatest);
        const int count = scan(tile < tiles && own.begin < last, visitors_before, sum);
        if (tile < tiles) tile_blocks[tile].end = last, visitors[tile] = count;
    }
    __syncthreads();

    // The tiles that visit each block.
    for (int block = threadIdx.x; block < blocks; block += threads) {
        block_tiles[block] = {
            prefix_length(tile_blocks, tiles, [&](Interval visited) { return visited.end <= block; }),
            prefix_length(tile_blocks, tiles, [&](Interval visited) { return visited.begin <= block; })};
    }
    // How many tiles visit each span of blocks: those of [begin, end) that visit anything.
    for (int i = threadIdx.x; i < spans; i += threads) {
        const int begin = prefix_length(tile_blocks, tiles, [&](Interval visited) { return visited.end <= i * span; });
        const int end =
            prefix_length(tile_blocks, tiles, [&](Interval visited) { return visited.begin < (i + 1) * span; });
        const int before = begin > 0 ? visitors[begin - 1] : 0;
        span_tiles[i] = begin < end ? visitors[end - 1] - before : 0;
    }
}
