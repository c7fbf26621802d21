// The tensor memory accelerator: bulk tensor copies between global and shared memory (PTX ISA,
// "cp.async.bulk.tensor"). Coordinates are innermost first, as in the tensor map.
#pragma once
#include "types.cuh"

namespace tma {

__device__ __forceinline__ void prefetch_descriptor(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// global → shared. `barrier` counts its bytes, those included that are filled with zeros outside of the tensor.
__device__ __forceinline__ void load(uint32_t destination, const TensorMap& map, uint32_t barrier, int c0, int c1,
                                     int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%3, %4, %5, %6}], [%2];" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

// The same of a tensor of rank 5.
__device__ __forceinline__ void load(uint32_t destination, const TensorMap& map, uint32_t barrier, int c0, int c1,
                                     int c2, int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

// global → L2, ahead of a load of the same box.
__device__ __forceinline__ void prefetch(const TensorMap& map, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(c0),
                 "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}

// global → shared of every CTA of the cluster whose bit is set in `ctas`. `destination` and `barrier` are addresses in
// this CTA's shared memory, and stand for the same addresses in each.
__device__ __forceinline__ void load_multicast(uint32_t destination, const TensorMap& map, uint32_t barrier,
                                               uint16_t ctas, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(ctas)
        : "memory");
}

// shared → global; elements outside of the tensor are not written.
__device__ __forceinline__ void store(const TensorMap& map, uint32_t source, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
                 "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}

// Closes the group of this thread's stores and reductions so far.
__device__ __forceinline__ void commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most `pending` of this thread's groups still read their shared-memory source.
template <int pending>
__device__ __forceinline__ void wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// Waits until at most `pending` of this thread's groups are incomplete, their writes included.
template <int pending>
__device__ __forceinline__ void wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}

}  // namespace tma
