// What keeps values of hidden keys from a tile, where K and V are a key-value cache.
//
// The probability of a hidden key is 0, and 0 times NaN is NaN in PV. A cache may hold anything in keys that no query
// sees: beyond a sequence's end, in left padding, and to the left of all windows. Blocks end where the sequence does
// (KeyPlace), so nothing beyond is loaded. What lies ahead of the keys that a tile sees is set to 0 in shared memory.
// It is in the tile's first block, which consumers visit last.
#pragma once
#include "ptx/warpgroup.cuh"
#include "sm90/forward/traits.cuh"

// Sets the first `hidden` values of a stage to 0, and orders that before the consumers' products. They all come
// together.
__device__ __forceinline__ void clean_hidden_values(const SharedMemory& shared, int stage, int hidden) {
    constexpr int threads = 128 * Traits::consumers;
    constexpr int row_chunks = descriptor::row_bytes / sizeof(uint4);  // of a panel
    constexpr int barrier = 1 + Traits::consumers;                     // after those of ping-pong
    const int chunks = min(hidden, Traits::keys) * row_chunks * Traits::value_panels;
    if (chunks <= 0) return;
#pragma unroll 1
    for (int i = reload_thread_index() - 128; i < chunks; i += threads) {
        const int chunk = i % (row_chunks * Traits::value_panels), row = i / (row_chunks * Traits::value_panels);
        const int panel = chunk / row_chunks * descriptor::panel_bytes(Traits::keys);
        unsigned char* const block = shared.data + SharedMemory::value + stage * Traits::value_bytes;
        *reinterpret_cast<uint4*>(block + panel + descriptor::swizzled_offset(row, chunk % row_chunks)) = {0, 0, 0, 0};
    }
    fence_proxy_async();
    named_barrier_sync(barrier, threads);
}
