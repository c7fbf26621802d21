// Emulation of cuda/kernels/ptx/mbarrier.cuh.
#pragma once
#include "types.cuh"

namespace mbarrier {

void init(uint32_t barrier, int arrivals);
void arrive(uint32_t barrier);
void arrive_in_cluster(uint32_t barrier);
void arrive_expect(uint32_t barrier, uint32_t bytes);
void wait(uint32_t barrier, uint32_t parity);
inline void fence_init() {}

}  // namespace mbarrier
