// Rings of shared-memory stages between a producer and its consumers.
#pragma once
#include "ptx/types.cuh"

// A thread's position in a ring of stages, and the parity of the current round (see mbarrier::wait).
template <int stages>
struct PipelineState {
    int stage = 0;
    uint32_t parity = 0;

    __device__ void advance() {
        if (++stage == stages) {
            stage = 0;
            parity ^= 1;
        }
    }
    __device__ PipelineState before() const {
        return stage > 0 ? PipelineState{stage - 1, parity} : PipelineState{stages - 1, parity ^ 1};
    }
};
