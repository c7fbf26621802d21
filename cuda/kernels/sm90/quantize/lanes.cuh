// How the threads of a CTA hold rows of a block of 128: several lanes a row, which is in one warp.
#pragma once
#include "ptx/types.cuh"

constexpr int block_rows = 128;

__device__ constexpr int power_of_two_above(int x) { return x <= 1 ? 1 : 2 * power_of_two_above((x + 1) / 2); }

// Rows of `dim` elements in `warps` warps. A lane has `columns` neighbours of a row, 16 bytes.
template <int dim, int columns, int warps>
struct Lanes {
    static constexpr int width = power_of_two_above(dim / columns);  // of a row
    static constexpr int rows = 32 / width;                          // of a warp
    static constexpr int at_once = warps * rows;                     // of the CTA
    static constexpr int own = block_rows > at_once ? block_rows / at_once : 1;  // of a block, that a thread has
    static_assert(dim % 16 == 0 && dim % columns == 0 && dim <= 32 * columns, "a warp holds whole rows");

    // The thread's place among rows that the CTA holds at once.
    __device__ static int row() { return threadIdx.x / 32 * rows + threadIdx.x % 32 / width; }
    __device__ static int column() { return threadIdx.x % width * columns; }
    // Row `i` of the thread's `own`.
    __device__ static int row(int i) { return i * at_once + row(); }
};
