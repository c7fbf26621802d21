// Emulation of cuda/kernels/ptx/async_copy.cuh.
#pragma once
#include "types.cuh"

namespace async_copy {

void load(uint32_t destination, const void* source, bool is_there);
void arrive_when_done(uint32_t barrier);
void wait_for_own();

}  // namespace async_copy
