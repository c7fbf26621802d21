// Dropout: which probabilities are dropped, from the words of their rows and columns (jax_flash/_dropout.py).
//
// Define, set by jax_flash/cuda/dropout.py:
//   DROPOUT   1: the call has it
#pragma once
#include "ptx/math.cuh"

constexpr bool has_dropout = DROPOUT;

// What a result is multiplied by at the end, where it was summed up without dropout's factor.
__device__ __forceinline__ float with_dropout(float factor, float of_dropout) {
    return has_dropout ? factor * of_dropout : factor;
}

// All bits of those of two packed probabilities that are dropped: they share one word, each has one more.
__device__ __forceinline__ uint32_t dropped_pair(uint32_t shared, uint32_t low, uint32_t high, uint32_t threshold) {
    return halves_below(upper_halves(shared * low, shared * high), threshold);
}

// Goes over the packed probabilities of a thread, as operands of wgmma: apply(pair, bits of it that are dropped). `own`
// are the words of the accumulators' two rows, `across` those of its columns: in each 16 of these, the ones that a
// thread meets, 2t, 2t + 1, 2t + 8 and 2t + 9, follow each other, so that it reads them as one vector.
template <int steps, class Apply>
__device__ __forceinline__ void for_each_dropped(uint32_t (&packed)[steps][4], const uint32_t (&own)[2],
                                                 const uint4* across, uint32_t threshold, Apply apply) {
#pragma unroll
    for (int step = 0; step < steps; ++step) {
        const uint4 words = across[4 * step + threadIdx.x % 4];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            apply(packed[step][row], dropped_pair(own[row], words.x, words.y, threshold));
            apply(packed[step][2 + row], dropped_pair(own[row], words.z, words.w, threshold));
        }
    }
}

// Zeroes what is dropped.
template <int steps>
__device__ __forceinline__ void drop(uint32_t (&packed)[steps][4], const uint32_t (&own)[2], const uint4* across,
                                     uint32_t threshold) {
    for_each_dropped(packed, own, across, threshold, [](uint32_t& pair, uint32_t bits) { pair &= ~bits; });
}

// Sets the sign of what is dropped, as probabilities have none.
template <int steps>
__device__ __forceinline__ void mark_dropped(uint32_t (&packed)[steps][4], const uint32_t (&own)[2],
                                             const uint4* across, uint32_t threshold) {
    for_each_dropped(packed, own, across, threshold,
                     [](uint32_t& pair, uint32_t bits) { pair |= bits & 0x80008000u; });
}
