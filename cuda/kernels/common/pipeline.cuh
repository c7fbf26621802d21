// Where a thread is in a ring of shared-memory slots.
#pragma once
#include "ptx/types.cuh"

// A place in a ring of `stages` slots, and the parity of its current round (see mbarrier::wait).
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
