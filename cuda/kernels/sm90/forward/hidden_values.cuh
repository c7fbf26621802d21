// What keeps values of hidden keys from a tile, where K and V are a key-value cache.
//
// The probability of a hidden key is 0, and 0 times NaN is NaN in PV. A cache may hold anything in keys that no query
// sees: beyond a sequence's end, in left padding, and to the left of all windows. The values of such keys are set to 0
// in shared memory. Keys ahead of those that a tile sees are in the tile's first block, which consumers visit last.
// Keys beyond the sequence's end are in the sequence's last block, which consumers visit first. Only caches in pages
// have any there: in others, the last block ends where the sequence does (KeyPlace).
#pragma once
#include "ptx/warpgroup.cuh"
#include "sm90/forward/traits.cuh"

// Sets the values [begin, end) of a stage to 0; `end` may lie beyond the stage, or ahead of `begin`. All consumers call
// this together, and their later products see it.
__device__ __forceinline__ void clean_hidden_values(const SharedMemory& shared, int stage, int begin, int end) {
    constexpr int threads = 128 * Traits::consumers;
    constexpr int row_chunks = descriptor::row_bytes / sizeof(uint4);  // of a panel
    constexpr int barrier = 1 + Traits::consumers;                     // after those of ping-pong
    const int chunks = (min(end, Traits::keys) - begin) * row_chunks * Traits::value_panels;
    if (chunks <= 0) return;
#pragma unroll 1
    for (int i = reload_thread_index() - 128; i < chunks; i += threads) {
        const int chunk = i % (row_chunks * Traits::value_panels);
        const int row = begin + i / (row_chunks * Traits::value_panels);
        const int panel = chunk / row_chunks * descriptor::panel_bytes(Traits::keys);
        unsigned char* const block = shared.data + SharedMemory::value + stage * Traits::value_bytes;
        *reinterpret_cast<uint4*>(block + panel + descriptor::swizzled_offset(row, chunk % row_chunks)) = {0, 0, 0, 0};
    }
    fence_shared_for_async();
    named_barrier_sync(barrier, threads);
}
