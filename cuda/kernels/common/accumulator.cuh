// Where the elements of an accumulator are: of wgmma, or of several mma beside each other.
#pragma once

// The row of a thread's element i: the upper (0) or the lower (1) of its two rows, which are 8 apart.
__device__ constexpr int row_of(int i) { return i / 2 % 2; }
// Its column, less 2·(lane % 4).
__device__ constexpr int column_of(int i) { return i / 4 * 8 + i % 2; }
