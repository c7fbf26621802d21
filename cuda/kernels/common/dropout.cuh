// Dropout: which probabilities are dropped, from the hashes of their rows and columns (jax_flash/_dropout.py).
//
// Define, set by jax_flash/cuda/dropout.py:
//   DROPOUT   1: the call has it
#pragma once
#include "ptx/math.cuh"

constexpr bool has_dropout = DROPOUT;

// `factor` with dropout's factor, by which kept probabilities are multiplied. Sums of products with probabilities are
// taken without it. `factor` multiplies such a sum at its end anyway (it normalises the output, or scales a gradient),
// so dropout's factor is folded into it.
__device__ __forceinline__ float with_dropout(float factor, float dropout_factor) {
    return has_dropout ? factor * dropout_factor : factor;
}

// Decides about a pair of 16-bit probabilities, and sets all bits of the halves that are dropped. The two share one
// hash, and each has one of its own: `low` and `high`.
__device__ __forceinline__ uint32_t dropped_pair(uint32_t shared, uint32_t low, uint32_t high, uint32_t threshold) {
    return halves_below(upper_halves(shared * low, shared * high), threshold);
}

// Calls apply(pair, dropped bits) for each pair of a thread's probabilities, which are A operands of wgmma.
//
// `row_hashes` are those of the accumulator's two rows. `column_hashes` are those of its columns: in each 16 of them,
// the four that a thread holds, 2t, 2t + 1, 2t + 8 and 2t + 9, are neighbours, so that it reads them as one vector.
template <int steps, class Apply>
__device__ __forceinline__ void for_each_dropped(uint32_t (&probabilities)[steps][4], const uint32_t (&row_hashes)[2],
                                                 const uint4* column_hashes, uint32_t threshold, Apply apply) {
#pragma unroll
    for (int step = 0; step < steps; ++step) {
        const uint4 columns = column_hashes[4 * step + threadIdx.x % 4];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            apply(probabilities[step][row], dropped_pair(row_hashes[row], columns.x, columns.y, threshold));
            apply(probabilities[step][2 + row], dropped_pair(row_hashes[row], columns.z, columns.w, threshold));
        }
    }
}

// Sets dropped probabilities to zero.
template <int steps>
__device__ __forceinline__ void drop(uint32_t (&probabilities)[steps][4], const uint32_t (&row_hashes)[2],
                                     const uint4* column_hashes, uint32_t threshold) {
    for_each_dropped(probabilities, row_hashes, column_hashes, threshold,
                     [](uint32_t& pair, uint32_t dropped) { pair &= ~dropped; });
}

// The same for e4m3 probabilities. A word has four of one row, which lie in 16 columns. The words of a step are those
// of its first 16 columns, for both rows, and then those of its last 16.
template <int steps>
__device__ __forceinline__ void drop_e4m3(uint32_t (&probabilities)[steps][4], const uint32_t (&row_hashes)[2],
                                          const uint4* column_hashes, uint32_t threshold) {
#pragma unroll
    for (int half_step = 0; half_step < 2 * steps; ++half_step) {
        const uint4 columns = column_hashes[4 * half_step + threadIdx.x % 4];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const uint32_t low = dropped_pair(row_hashes[row], columns.x, columns.y, threshold);
            const uint32_t high = dropped_pair(row_hashes[row], columns.z, columns.w, threshold);
            probabilities[half_step / 2][half_step % 2 * 2 + row] &= ~bytes_of_halves(low, high);
        }
    }
}

// Marks dropped probabilities by the sign bit, which probabilities don't use. Their values are kept.
template <int steps>
__device__ __forceinline__ void mark_dropped(uint32_t (&probabilities)[steps][4], const uint32_t (&row_hashes)[2],
                                             const uint4* column_hashes, uint32_t threshold) {
    for_each_dropped(probabilities, row_hashes, column_hashes, threshold,
                     [](uint32_t& pair, uint32_t dropped) { pair |= dropped & 0x80008000u; });
}
