// Emulation of cuda/kernels/ptx/tma.cuh, for a swizzle of 128 bytes, and for none.
#pragma once
#include "types.cuh"

namespace tma {

void load(uint32_t destination, const TensorMap& map, uint32_t barrier, int c0, int c1, int c2, int c3);
void load(uint32_t destination, const TensorMap& map, uint32_t barrier, int c0, int c1, int c2, int c3, int c4);
void load_multicast(uint32_t destination, const TensorMap& map, uint32_t barrier, uint16_t ctas, int c0, int c1, int c2,
                    int c3);
void store(const TensorMap& map, uint32_t source, int c0, int c1, int c2, int c3);
void commit_group();
void wait_for_reads(int pending);
void wait_for_groups(int pending);
inline void prefetch_descriptor(const TensorMap&) {}
inline void prefetch(const TensorMap&, int, int, int, int) {}

template <int pending>
void wait_group_read() {
    wait_for_reads(pending);
}
template <int pending>
void wait_group() {
    wait_for_groups(pending);
}

}  // namespace tma
