// Emulation of cuda/kernels/ptx/warpgroup.cuh.
#pragma once
#include "types.cuh"

void named_barrier_sync(int id, int threads);
bool named_barrier_any(int id, int threads, bool value);
void named_barrier_arrive(int id, int threads);
void store_matrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d);

inline bool elect_one() { return threadIdx.x % 32 == 0; }
inline int reload_thread_index() { return threadIdx.x; }
inline uint32_t reload_uniform(uint32_t value) { return value; }
inline float volatile_load(const float& x) { return x; }
inline int warp_index() { return threadIdx.x / 32; }
void fence_shared_for_async();
inline void fence_global_for_async() {}
template <int count>
void release_registers() {}
template <int count>
void take_registers() {}
