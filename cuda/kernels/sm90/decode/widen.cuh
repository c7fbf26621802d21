// Caches in e4m3: consumers widen a block to queries' type, exactly, before wgmma reads it. Descales come in where they
// cost least, as a factor of the scale and of the output.
//
// A block of 8 bits is half as large as what it becomes, and the ring of stages has such blocks alone: of keys and of
// values in 16 bits there is one each.
#pragma once
#include "ptx/math.cuh"
#include "sm90/decode/store.cuh"

// 8 elements.
__device__ __forceinline__ uint4 widened_chunk(uint32_t low, uint32_t high) {
    return {widen_e4m3<Traits::Element>(low), widen_e4m3<Traits::Element>(low >> 16), widen_e4m3<Traits::Element>(high),
            widen_e4m3<Traits::Element>(high >> 16)};
}

// Widens the block at offset `narrow` of shared memory into the panels at `wide`. No consumer reads what was there
// before: each has passed a barrier behind its last use. The consumers come together when it is done.
template <int columns>
__device__ __forceinline__ void widen_block(const SharedMemory& shared, int narrow, int wide) {
    constexpr int row_chunks = columns / 16, chunks = Traits::keys * row_chunks;
#pragma unroll 2
    for (int first = 0; first < chunks; first += Traits::consumer_threads) {
        const int index = first + threadIdx.x, row = index / row_chunks, chunk = index % row_chunks;
        if (chunks % Traits::consumer_threads != 0 && index >= chunks) break;
        const int place_of_bits =
            chunk / 8 * descriptor::panel_bytes(Traits::keys) + descriptor::swizzled_offset(row, chunk % 8);
        const uint4 bits = *reinterpret_cast<const uint4*>(shared.data + narrow + place_of_bits);
        const uint4 low = widened_chunk(bits.x, bits.y), high = widened_chunk(bits.z, bits.w);
        unsigned char* const panel = shared.data + wide + chunk / 4 * descriptor::panel_bytes(Traits::keys);
        // Threads of neighbouring panels begin with different halves, as these lie in different banks.
        const bool high_first = chunk / 4 % 2 != 0;
        const int place = 2 * chunk % 8 + high_first;
        *reinterpret_cast<uint4*>(panel + descriptor::swizzled_offset(row, place)) = high_first ? high : low;
        *reinterpret_cast<uint4*>(panel + descriptor::swizzled_offset(row, place ^ 1)) = high_first ? low : high;
    }
    fence_shared_for_async();
    sync_consumers();
}
