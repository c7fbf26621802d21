// Descales of a cache in e4m3, one for each key head.
#pragma once
#include "ptx/global.cuh"
#include "sm90/decode/sequences.cuh"

// What numbers of a key head are multiplied by. `of` is `descales.key` or `descales.value`; it is null if all are 1.
__device__ __forceinline__ float descale_of(const Shape& shape, const Descales& descales, const float* of,
                                            int key_head) {
    return of ? global::read_only(of + nearest_layer(shape) * descales.stride + key_head) : 1;
}
