// Programmatic dependent launch: a kernel starts before the kernels ahead in its stream have completed, and waits for
// them where it needs their results.
#pragma once
#include "types.cuh"

// Waits until the kernels ahead in the stream have completed.
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Lets the next kernel start before this one ends.
__device__ __forceinline__ void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
