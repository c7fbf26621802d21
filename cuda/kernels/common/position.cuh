// An index of a query or a key, as users' functions take it (jax_flash/cuda/functions/positions.py).
#pragma once

// Element after element of a thread, `offset` is a constant once loops are unrolled, and `base` is the same for many.
// Sums of positions are computed from these. An index beyond `last`, the last there is, has its look-ups: nothing is
// attended there.
struct Position {
    static constexpr int no_last = 0x7fffffff;  // as last, where no index is beyond what is there

    int base, offset, last;

    __device__ constexpr Position(int index) : base(index), offset(0), last(index) {}
    __device__ constexpr Position(int base, int offset, int last) : base(base), offset(offset), last(last) {}

    __device__ constexpr int unbounded() const { return base + offset; }
    __device__ constexpr int index() const { return unbounded() < last ? unbounded() : last; }
};
