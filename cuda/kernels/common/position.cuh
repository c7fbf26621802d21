// An index of a query or a key, as users' functions take it (jax_flash/cuda/functions/positions.py).
#pragma once

// `offset` is a compile-time constant in unrolled loops; many elements share `base`. An index beyond `last` reads the
// element of `last`: no result depends on such pairs, so its value doesn't matter.
struct Position {
    static constexpr int no_last = 0x7fffffff;  // as last, where no index is beyond what is there

    int base, offset, last;

    __device__ constexpr Position(int index) : base(index), offset(0), last(index) {}
    __device__ constexpr Position(int base, int offset, int last) : base(base), offset(offset), last(last) {}

    __device__ constexpr int unbounded() const { return base + offset; }
    __device__ constexpr int index() const { return unbounded() < last ? unbounded() : last; }
};
