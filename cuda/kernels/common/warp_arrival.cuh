// How warps tell others that they have read or written shared memory. Either one lane arrives at an mbarrier, behind
// __syncwarp or an instruction that all lanes of the warp execute together; or the warp arrives at a named barrier at
// which others wait.
//
//   FOR_RACECHECK   1: in a form that compute-sanitizer's racecheck can follow (tests/gpu/sanitize.py). Racecheck sees
//                   no order in either, and reports what was read before as a race. So each lane arrives, and who
//                   tells at a named barrier waits there, too. Racecheck also loses track of a named barrier at which
//                   eight warps meet again and again, unless they meet at another one after each time.
#pragma once
#include "ptx/warpgroup.cuh"

#ifndef FOR_RACECHECK
#define FOR_RACECHECK 0
#endif

// What a barrier that waits for a warp has to count.
constexpr int warp_arrivals = FOR_RACECHECK ? 32 : 1;

// Whether a lane arrives.
__device__ __forceinline__ bool arrives(int lane) { return FOR_RACECHECK || lane == 0; }

// A named barrier of no other use.
constexpr int second_meeting = 15;

// Two sides meet at a named barrier: one tells, the other waits for it. `threads` counts both.
__device__ __forceinline__ void meet(int barrier, int threads) {
    named_barrier_sync(barrier, threads);
    if (FOR_RACECHECK) named_barrier_sync(second_meeting, threads);
}
__device__ __forceinline__ void tell(int barrier, int threads) {
    if (FOR_RACECHECK) {
        meet(barrier, threads);
    } else {
        named_barrier_arrive(barrier, threads);
    }
}
__device__ __forceinline__ void wait_until_told(int barrier, int threads) { meet(barrier, threads); }
