// Attention on a key-value cache for Hopper: few queries of each sequence, and many keys.
//
// The kernel reads the cache once, and that is what it costs. A persistent CTA has an equal share of all key blocks
// (schedule.cuh), and its warps have two roles:
//
//   consumers  consumer.cuh  one or two warpgroups compute tiles of 64 rows: queries times the query heads of one key head
//   producer   load.cuh      keeps a ring of stages full of K and V, by TMA in a warp, or by the threads of a warpgroup
//
// CTAs that share a tile leave partial results, and the last of them combines these (combine.cuh).
#include "parameters.cuh"
#include "sm90/decode/consumer.cuh"
#include "sm90/decode/load.cuh"

extern "C" __global__ void __launch_bounds__(Traits::threads, 1)
    decode(const __grid_constant__ Parameters parameters) {
    unsigned char* shared_memory = dynamic_shared_memory();
    const SharedMemory shared{shared_memory, shared_address(shared_memory)};

    if (threadIdx.x == 0) {
        if (shared.base % descriptor::atom_bytes != 0) __trap();  // the swizzle counts from 1024-byte boundaries
        prepare_loads(parameters.cache);
        for (int stage = 0; stage < Traits::stages; ++stage) {
            mbarrier::init(shared.key_full(stage), Traits::full_arrivals);
            mbarrier::init(shared.value_full(stage), Traits::full_arrivals);
            mbarrier::init(shared.empty(stage), 4 * warp_arrivals);  // a lane of each warp of its consumer
        }
        for (int stage = 0; stage < Traits::tile_stages; ++stage) {
            mbarrier::init(shared.tile_full(stage), 1);
            mbarrier::init(shared.tile_empty(stage), 4 * Traits::consumers * warp_arrivals);
        }
        mbarrier::fence_init();
    }
    __syncthreads();
    allow_next_kernel();
    wait_for_previous_kernel();

    if (warp_index() >= Traits::consumer_threads / 32) {
        produce({parameters.cache, shared, parameters.shape}, parameters.max_parts, parameters.least_share);
    } else {
        consume({shared,
                 parameters.shape,
                 parameters.rotary,
                 parameters.query,
                 {parameters.out, parameters.lse, parameters.sinks},
                 {parameters.partial_out, parameters.partial_statistics, parameters.visited},
                 parameters.scale,
                 parameters.soft_cap,
                 parameters.slopes,
                 parameters.slopes_stride,
                 parameters.max_parts});
    }
}
