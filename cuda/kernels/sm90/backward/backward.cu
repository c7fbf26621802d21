// Attention backward for Hopper: keys outside, queries inside, in the manner of FlashAttention-3 (Shah et
// al., arXiv:2407.08608) on plain PTX.
//
// A CTA owns a tile of keys of one key head, with its gradients in registers, and streams the query blocks that see it,
// one query head of the group after the other, so that it sums dK and dV over the group in place. One thread of
// warpgroup 0 loads; two warpgroups, the consumers, compute dK and dV. dQ is added to a float32 sum in global memory.
// Scores are computed transposed, keys down and queries across, because the accumulators of Pᵀ and dSᵀ are then the
// register operands of dV += PᵀdO and dK += dSᵀQ. How two consumers share the work on a block:
//
//   keys      (split_keys.cuh)      each owns 64 of the tile's 128 keys, and hands their dS to a third warpgroup,
//             which computes dQ, so that none waits for another one's dS: head dims up to 128, with no score
//             modification, or a light one (ScoreTraits::is_light);
//   products  (split_products.cuh)  one owns S, P and dV, the other dP, dS and dK, of the same 64 keys, and both
//             share dQ: larger head dims, or others of them, where a warpgroup's registers hold one gradient.
//             Above head dim 128 two CTAs share a tile of 128 keys, and each computes half of dQ's columns.
#include "parameters.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "sm90/backward/call.cuh"
#include "sm90/backward/d_query.cuh"
#include "sm90/backward/split_keys.cuh"
#include "sm90/backward/key_consumer.cuh"
#include "sm90/backward/value_consumer.cuh"
#include "sm90/backward/dq_accum_in_order.cuh"
#include "sm90/backward/isolation.cuh"
#include "sm90/backward/load.cuh"

// Waits for all threads of all CTAs that share a tile.
__device__ __forceinline__ void sync_ctas() {
    if constexpr (Traits::cluster > 1) {
        __syncwarp();
        cluster::sync();
    } else {
        __syncthreads();
    }
}

// Takes the one tile of CTAs that share it from the counter, and tells all of them. By blockIdx a tile could wait for
// one whose CTAs are not resident yet.
__device__ __forceinline__ void take_tile(const Call& call) {
    const bool first_cta = Traits::cluster == 1 || cluster::rank() == 0;
    if (threadIdx.x == 0 && first_cta) {
        const int index = atomicAdd(call.next_tile, 1);
        call.shared.told_tile(0) = index;
        if constexpr (Traits::cluster > 1) {
            cluster::store(in_peer(call.shared.base + SharedMemory::work), index);
            cluster::fence();
        }
    }
    sync_ctas();
}

// Initialises the barriers of shared memory, in one thread.
__device__ __forceinline__ void init_barriers(const SharedMemory& shared) {
    for (int stage = 0; stage < Traits::key_stages; ++stage) {
        mbarrier::init(shared.key_full(stage), Traits::cluster);  // K, and what is needed of the other CTA's
        // A lane of each warp that reads K or the tile's index.
        mbarrier::init(shared.key_empty(stage),
                       (4 * Traits::consumers + 4 * Traits::d_query_warpgroup + Traits::adding_warps) * warp_arrivals);
    }
    for (int stage = 0; stage < Traits::dq_stages; ++stage) {
        mbarrier::init(shared.dq_full(stage), 4);
        mbarrier::init(shared.dq_empty(stage), 1);
    }
    for (int stage = 0; stage < Traits::writers * Traits::writer_stages; ++stage) {
        mbarrier::init(shared.writer_full(0, stage), 1);
    }
    for (int stage = 0; stage < Traits::semaphore_stages; ++stage) {
        mbarrier::init(shared.semaphore_acquired(stage), 1);
        mbarrier::init(shared.dq_added(stage), Traits::dq_adders);
        mbarrier::init(shared.semaphore_released(stage), 1);
    }
    for (int part = 0; part < Traits::value_parts; ++part) mbarrier::init(shared.value_full(part), 1);
    mbarrier::init(shared.value_empty(), 4 * Traits::consumers * warp_arrivals);
    for (int buffer = 0; buffer < Traits::d_scores_buffers; ++buffer) {
        mbarrier::init(shared.d_scores_full(buffer), Traits::split_products ? 4 : 4 * Traits::consumers);
        // With split products consumers say so, and the other CTA once it has dS.
        mbarrier::init(shared.d_scores_empty(buffer),
                       Traits::split_products ? 4 * Traits::consumers * warp_arrivals + Traits::cluster - 1
                                              : 4 * warp_arrivals);
    }
    mbarrier::init(shared.peer_d_scores_empty(), 4 * Traits::consumers);
    mbarrier::init(shared.probabilities_read(), 4 * warp_arrivals);
    for (int stage = 0; stage < Traits::stages; ++stage) {
        mbarrier::init(shared.query_full(stage), 1);
        mbarrier::init(shared.d_out_full(stage), 1);
        mbarrier::init(shared.query_empty(stage), 4 * Traits::consumers * Traits::cluster * warp_arrivals);
        mbarrier::init(shared.d_out_empty(stage), 4 * Traits::consumers * Traits::cluster * warp_arrivals);
    }
    if constexpr (Traits::isolates) {
        for (int stage = 0; stage < Traits::stages; ++stage) {
            mbarrier::init(shared.query_landed(stage), 1);
            mbarrier::init(shared.d_out_landed(stage), 1);
        }
    }
    mbarrier::fence_init();
}

// The warps of the loading warpgroup: one loads, the others see to the sum of dQ.
__device__ __forceinline__ void run_loading_warp(const Call& call, int warp) {
    if (warp == 0) {
        if (elect_one()) produce(call);
    } else if constexpr (Traits::deterministic) {
        if (warp == 1) {
            acquire_semaphores(call);
        } else if (warp == 2) {
            release_semaphores(call);
        } else if constexpr (Traits::d_query_warpgroup) {
            add_d_query_in_order(call);
        }
    } else if constexpr (Traits::d_query_warpgroup) {
        if (warp == 1) {
            add_d_query(call);
        } else if constexpr (Traits::writers > 0) {
            write_d_query(call, warp - 2);
        }
    }
}

__device__ __forceinline__ void consume(const Call& call, int consumer) {
    if constexpr (!Traits::split_products) {
        consume_split_keys(call, consumer);
    } else if (consumer == 0) {
        ValueConsumer(call).run(call);
    } else {
        KeyConsumer(call).run(call);
    }
}

extern "C" __global__ void __launch_bounds__(Traits::threads, 1)
    backward(const __grid_constant__ Parameters parameters) {
    unsigned char* shared_memory = dynamic_shared_memory();
    const Shape shape{parameters.queries,      parameters.keys, parameters.head_shares, parameters.group,
                      parameters.batch,        parameters.left, parameters.right,
                      {parameters.shares_of_head, parameters.parts_of_blocks},
                      parameters.mask_metadata,
#if BLOCK_MASK
                      parameters.block_mask,
#endif
    };
    const Call call{{shared_memory, shared_address(shared_memory)},
                    parameters.maps,
                    shape,
                    parameters.lse_delta,
                    parameters.spoiled,
                    {parameters.dq_accum, parameters.arrived, parameters.written, parameters.next_job,
                     parameters.d_query, parameters.dq_accum_slots, parameters.columns},
                    parameters.next_tile,
                    parameters.dq_semaphore,
                    parameters.key_sums,
                    parameters.l2_head_group,
                    parameters.scale,
                    parameters.score,
                    parameters.d_bias,
                    parameters.d_slopes,
                    parameters.bias_factor,
                    parameters.dropout,
#if WIDE_KEY_GRADIENTS
                    parameters.wide_key_gradients,
#endif
#if SCORE_MOD_GRADIENTS
                    parameters.user_gradients,
#endif
    };
    if (threadIdx.x == 0) {
        if (call.shared.base % descriptor::atom_bytes != 0) __trap();  // the swizzle counts from 1024-byte boundaries
        tma::prefetch_descriptor(call.maps.query);
        tma::prefetch_descriptor(call.maps.key);
        tma::prefetch_descriptor(call.maps.value);
        tma::prefetch_descriptor(call.maps.d_out);
        tma::prefetch_descriptor(call.maps.d_key);
        tma::prefetch_descriptor(call.maps.d_value);
        init_barriers(call.shared);
    }
    sync_ctas();
    if constexpr (!Traits::persistent && Traits::deterministic) take_tile(call);

    const int warp = warp_index();
    if (warp < 4) {
        release_registers<Traits::producer_registers>();
        run_loading_warp(call, warp);
    } else if (Traits::d_query_warpgroup && warp >= 4 * (1 + Traits::consumers)) {
        if constexpr (Traits::d_query_warpgroup) {
            release_registers<Traits::d_query_registers>();
            compute_d_query(call);
        }
    } else {
        take_registers<Traits::consumer_registers>();
        consume(call, warp / 4 - 1);
    }
}
