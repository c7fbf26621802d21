// Arrivals of whole warps at the mbarriers by which they give shared memory back to whoever fills it. One lane arrives,
// when all of them have read: behind __syncwarp, or an instruction that the warp's lanes execute together.
//
//   EVERY_LANE_ARRIVES   1: each lane arrives, as compute-sanitizer's racecheck takes neither of these for an order and
//                        reports what the other lanes read as a race (tests/gpu/sanitize.py)
#pragma once

#ifndef EVERY_LANE_ARRIVES
#define EVERY_LANE_ARRIVES 0
#endif

// What a barrier that waits for a warp has to count.
constexpr int warp_arrivals = EVERY_LANE_ARRIVES ? 32 : 1;

// Whether a lane arrives.
__device__ __forceinline__ bool arrives(int lane) { return EVERY_LANE_ARRIVES || lane == 0; }
