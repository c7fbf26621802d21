// Repeats: tiles that a CTA computes again, because of values that aren't finite.
//
// The probability of a hidden key is 0, and 0 times NaN or infinity is NaN in PV. So such a value makes its column of
// the output NaN in every row of every tile that visits its block, in rows that don't see it too. To look at each block
// before its product would cost every call. Instead each warp looks at the rows that it writes, and a CTA computes
// tiles that aren't finite once more when it has computed all others.
//
// In a repeat the producer replaces what isn't finite in V by 0, and marks its keys by NaN in K (load_repeat.cuh). The
// sum of a row that sees such a key is then NaN, and the row keeps what was written the first time. A row that sees
// none gets the bits that it would have if all were finite.
//
// Since a value reaches all rows of a tile, consumer warp 0 decides for all. The warps of a split tile may be combined
// by several CTAs, so each decides for its own rows.
#pragma once
#include "sm90/forward/split_kv.cuh"
#include "sm90/forward/tile_scheduler.cuh"

__device__ __forceinline__ bool is_repeat(const SharedMemory& shared) {
    return Traits::isolates && __any_sync(all_lanes, shared.repeats().under_way != 0);
}

// Notes that a tile has to be computed again. Whole tiles form a list in global memory, in which `next_repeat` has the
// next of each. Split tiles are marked where their partials were counted.
__device__ __forceinline__ void note_repeat(const SharedMemory& shared, int* next_repeat, const Partials& partials,
                                            const Shape& shape, const Tile& tile, int warp) {
    Repeats& repeats = shared.repeats();
    const int number = tile_number(tile, shape);
    if (reload_thread_index() % 32 != 0) {
        // One lane notes. Were it to leave the others here, ptxas would take the rings of stages out of uniform
        // registers.
    } else if (Traits::split_kv && tile.is_split()) {
        partials.arrived[tile.split_tile * 4 * Traits::consumers + warp] = Partials::repeat_mark();
        atomicOr(&repeats.split_tiles, 1);  // other warps may set it at the same time
    } else if (warp == 0) {
        next_repeat[number] = repeats.first_tile;
        repeats.first_tile = number;
    }
    __syncwarp();
}
