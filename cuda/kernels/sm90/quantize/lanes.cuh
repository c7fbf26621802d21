// How the threads of a CTA hold rows of a block that has one descale: several lanes a row, which is in one warp.
#pragma once
#include "common/float8.cuh"
#include "ptx/types.cuh"

__device__ constexpr int power_of_two_above(int x) { return x <= 1 ? 1 : 2 * power_of_two_above((x + 1) / 2); }

// Rows of `dim` elements in `warps` warps. A lane has `columns` neighbours of a row, 16 bytes.
template <int dim, int columns, int warps>
struct Lanes {
    static constexpr int width = power_of_two_above(dim / columns);  // of a row
    static constexpr int rows = 32 / width;                          // of a warp
    static constexpr int at_once = warps * rows;                     // of the CTA
    // Rows of a block that a thread has.
    static constexpr int own = rows_per_descale > at_once ? rows_per_descale / at_once : 1;
    static_assert(dim % 16 == 0 && dim % columns == 0 && dim <= 32 * columns, "a warp holds whole rows");

    // Row `i` of a thread's `own`, and its columns of them.
    __device__ static int row(int i, uint32_t thread = threadIdx.x) {
        return i * at_once + thread / 32 * rows + thread % 32 / width;
    }
    __device__ static int column(uint32_t thread = threadIdx.x) { return thread % width * columns; }
};

// The same rows in few lanes, each of which has several pieces of a row, `width` pieces apart. Fewer lanes need fewer
// shuffles, each of which takes as long as four additions.
template <int dim, int columns, int warps>
struct FewLanes {
    static constexpr int width = dim > 128 ? 8 : 4;
    static constexpr int pieces = (dim / columns + width - 1) / width;  // of a lane
    static constexpr int at_once = warps * (32 / width);  // rows of the CTA
    static constexpr int own = rows_per_descale > at_once ? rows_per_descale / at_once : 1;
    static_assert(dim % columns == 0, "a row has whole pieces");

    // The first column of a lane's piece, which may lie beyond the row, and the thread's rows.
    __device__ static int column(int piece) { return (piece * width + threadIdx.x % width) * columns; }
    __device__ static bool has(int piece) { return (piece + 1) * width * columns <= dim || column(piece) < dim; }
    __device__ static int row(int i) { return i * at_once + threadIdx.x / width; }
};
