// Emulation of cuda/kernels/ptx/bulk.cuh.
#pragma once
#include "types.cuh"

namespace bulk {

void load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier);
void copy(uint32_t destination, uint32_t source, uint32_t bytes, uint32_t barrier);
void store(float* destination, uint32_t source, uint32_t bytes);
void reduce_add(float* destination, uint32_t source, uint32_t bytes);
void reduce_add_now(float* destination, float a, float b, float c, float d);
template <int offset = 0>
void reduce_add(float* destination, float a, float b, float c, float d) {
    reduce_add_now(destination + offset / 4, a, b, c, d);
}

}  // namespace bulk
