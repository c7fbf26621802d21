// Emulation of cuda/kernels/ptx/global.cuh. CTAs run one after another.
#pragma once
#include "types.cuh"

namespace global {

inline float4 load(const float4* address) { return *address; }
inline void wait_until(const int* address, int value) {
    if (*address < value) emulator::fail("a CTA waits for one that comes after it");
}

}  // namespace global
