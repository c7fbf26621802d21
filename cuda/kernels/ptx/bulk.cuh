// Bulk copies of plain contiguous memory (PTX ISA, "cp.async.bulk" and "cp.reduce.async.bulk"), and the
// vector reduction to global memory. Addresses and sizes are multiples of 16 bytes.
#pragma once
#include "types.cuh"

namespace bulk {

// global → shared; `barrier` counts its bytes.
__device__ __forceinline__ void load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     destination),
                 "l"(source), "r"(bytes), "r"(barrier)
                 : "memory");
}

// shared → shared memory of a CTA of the cluster (cluster.cuh), in which `destination` and `barrier` are.
__device__ __forceinline__ void copy(uint32_t destination, uint32_t source, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     destination),
                 "r"(source), "r"(bytes), "r"(barrier)
                 : "memory");
}

// shared → global; joins the thread's bulk group (tma.cuh).
__device__ __forceinline__ void store(float* destination, uint32_t source, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination), "r"(source),
                 "r"(bytes)
                 : "memory");
}

// shared → global, adding float32 elements to what is there; joins the thread's bulk group (tma.cuh).
__device__ __forceinline__ void reduce_add(float* destination, uint32_t source, uint32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(destination),
                 "r"(source), "r"(bytes)
                 : "memory");
}

// registers → global, adding four float32 elements to what is there, `offset` bytes from `destination`.
template <int offset = 0>
__device__ __forceinline__ void reduce_add(float* destination, float a, float b, float c, float d) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0+%5], {%1, %2, %3, %4};" ::"l"(destination), "f"(a), "f"(b),
                 "f"(c), "f"(d), "n"(offset)
                 : "memory");
}

}  // namespace bulk
