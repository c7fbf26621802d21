// Attention backward for Hopper: keys outside, queries inside, in the manner of FlashAttention-3 (Shah et
// al., arXiv:2407.08608) on plain PTX.
//
// A CTA owns a tile of keys of one key head, with its gradients in registers, and streams the query blocks that see it,
// one query head of the group after the other, so that it sums dK and dV over the group in place. One thread of
// warpgroup 0 loads; two warpgroups, the consumers, compute dK and dV. dQ is added to a float32 sum in global memory.
// Scores are computed transposed, keys down and queries across, because the accumulators of Pᵀ and dSᵀ are then the
// register operands of dV += PᵀdO and dK += dSᵀQ. How the work on a block and 128 keys is shared:
//
//   keys      (split_keys.cuh)      each consumer owns 64 of the keys, and hands their dS to a third
//             warpgroup, which computes dQ, so that none waits for another one's dS: head dims up to 128;
//   products  (split_products.cuh)  one owns S, P and dV, the other dP, dS and dK, of the same 64
//             keys, and both dQ: larger head dims, where the registers of a warpgroup hold one gradient. Two CTAs
//             may share a tile, and each then computes half of dQ's columns.
#include "parameters.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "sm90/backward/call.cuh"
#include "sm90/backward/d_query.cuh"
#include "sm90/backward/split_keys.cuh"
#include "sm90/backward/key_consumer.cuh"
#include "sm90/backward/value_consumer.cuh"
#include "sm90/backward/dq_accum_in_order.cuh"

// ---------------------------------------------------------------------------------------- producer

// Loads Q or dO of a block. CTAs that share a tile visit the same blocks: each loads a part of the rows for all of them.
__device__ __forceinline__ void load_block(uint32_t destination, const TensorMap& map, uint32_t barrier, int panels,
                                           int head, int first_row, int batch) {
    if constexpr (Traits::cluster == 1) {
        load_panels(destination, map, barrier, panels, Traits::queries, head, first_row, batch);
    } else {
        constexpr uint16_t all = (1 << Traits::cluster) - 1;
        const int skipped = cluster::rank() * (Traits::queries / Traits::cluster);
        const uint32_t rows = destination + skipped * descriptor::row_bytes;
#pragma unroll 1
        for (int panel = 0; panel < panels; ++panel) {
            tma::load_multicast(rows + panel * descriptor::panel_bytes(Traits::queries), map, barrier, all,
                                panel * descriptor::panel_columns, head, first_row + skipped, batch);
        }
    }
}

// Runs in one thread. Persistent CTAs take tiles from a counter that all share: tiles take unequally long under a window,
// and a tile may wait for those handed out before it (wait_for_dq_accum_slot, dq_order.cuh), which a resident CTA has to have.
// The order in which CTAs start is not known, and how many are resident is not either, so nothing follows blockIdx.
__device__ __forceinline__ void produce(const Call& call) {
    const SharedMemory& shared = call.shared;
    const int tiles = call.tile_count();
    int index = Traits::persistent ? atomicAdd(call.next_tile, 1) : call.own_tile();
    BlockSlot slot;
#pragma unroll 1
    for (KeySlot key_slot;; key_slot.advance()) {
        const int key_stage = key_slot.stage;
        // Read while the tile before is at work.
        const Work work = call.work(min(index, tiles - 1));
        const KeyTile& tile = work.tile;
        int2 full[Traits::consumers];
        if constexpr (Traits::tells_work && Traits::mask_metadata) {
#pragma unroll
            for (int i = 0; i < Traits::consumers; ++i) {
                full[i] = full_blocks(tile.batch, tile.first_key + 64 * i, call.shape);
            }
        }
        mbarrier::wait(shared.key_empty(key_stage), key_slot.parity ^ 1);
        if (index >= tiles) {
            shared.told_tile(key_stage) = -1;
            mbarrier::arrive(shared.key_full(key_stage));
            return;
        }
        if constexpr (Traits::tells_work) {
            call.told_work(key_stage) = work;
        } else if constexpr (Traits::persistent) {
            shared.told_tile(key_stage) = index;
        }
        if constexpr (Traits::tells_work && Traits::mask_metadata) {
#pragma unroll
            for (int i = 0; i < Traits::consumers; ++i) shared.full_blocks(key_stage, i) = full[i];
        }
        auto load_keys = [&](uint32_t destination, const TensorMap& map, uint32_t barrier, int panels) {
            mbarrier::arrive_expect(barrier, panels * descriptor::panel_bytes(Traits::cta_keys));
            load_panels(destination, map, barrier, panels, Traits::cta_keys, tile.head, cta_first_key(tile),
                        tile.batch);
        };
        if constexpr (Traits::cluster > 1) load_peer_keys(call, tile);
        load_keys(shared.key_tile(key_stage), call.maps.key, shared.key_full(key_stage), Traits::key_panels);
        auto load_value = [&] {
            if constexpr (Traits::gradients_in_value_place) {  // consumers do, once those have left
#pragma unroll 1
                for (int i = 0; i < Traits::value_panels * Traits::value_parts; ++i) {
                    tma::prefetch(call.maps.value, i / Traits::value_parts * descriptor::panel_columns, tile.head,
                                  tile.first_key + i % Traits::value_parts * 64, tile.batch);
                }
            } else {
                mbarrier::wait(shared.value_empty(), key_slot.parity ^ 1);
                load_keys(shared.value_tile(), call.maps.value, shared.value_full(), Traits::value_panels);
            }
        };
        if (!Traits::gradients_in_value_place && work.blocks.count() == 0) load_value();
        work.for_each_block(call.shape, [&](int head, int block, int iteration) {
            const float* lse_delta = call.lse_delta_block(tile, head, block);
            const int first_row = block * Traits::queries, stage = slot.stage;
            if (block == work.blocks.first) wait_for_dq_accum_slot(call, call.head_index(tile, head));
            mbarrier::wait(shared.query_empty(stage), slot.parity ^ 1);
            mbarrier::arrive_expect(shared.query_full(stage),
                                    Traits::query_bytes + Traits::per_query_bytes + Traits::dropout_hash_bytes);
            load_block(shared.query_block(stage), call.maps.query, shared.query_full(stage), Traits::key_panels, head,
                       first_row, tile.batch);
            bulk::load(shared.base + SharedMemory::lse_offset(stage), lse_delta,
                       Traits::per_query_bytes + Traits::dropout_hash_bytes, shared.query_full(stage));
            if (iteration == 0) load_value();  // after what S needs
            mbarrier::wait(shared.d_out_empty(stage), slot.parity ^ 1);
            mbarrier::arrive_expect(shared.d_out_full(stage), Traits::d_out_bytes + Traits::per_query_bytes);
            load_block(shared.d_out_block(stage), call.maps.d_out, shared.d_out_full(stage), Traits::value_panels, head,
                       first_row, tile.batch);
            bulk::load(shared.base + SharedMemory::delta_offset(stage),
                       lse_delta + (Traits::per_query_values - 1) * Traits::queries, Traits::per_query_bytes,
                       shared.d_out_full(stage));
            slot.advance();
        });
        if constexpr (Traits::cluster > 1) {
            // The CTA may not end before what it loaded has come to the others, and before they have said so.
#pragma unroll 1
            for (int i = 0; i < Traits::stages; ++i, slot.advance()) {
                mbarrier::wait(shared.query_empty(slot.stage), slot.parity ^ 1);
                mbarrier::wait(shared.d_out_empty(slot.stage), slot.parity ^ 1);
            }
        }
        if (!Traits::persistent) return;
        index = atomicAdd(call.next_tile, 1);
    }
}

// ---------------------------------------------------------------------------------------- entry

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

extern "C" __global__ void __launch_bounds__(Traits::threads, 1)
    backward(const __grid_constant__ Parameters parameters) {
    unsigned char* shared_memory = dynamic_shared_memory();
    const Shape shape{parameters.queries,      parameters.keys, parameters.key_heads, parameters.group,
                      parameters.batch,        parameters.left, parameters.right,
                      parameters.mask_metadata};
    const Call call{{shared_memory, shared_address(shared_memory)},
                    parameters.maps,
                    shape,
                    parameters.lse_delta,
                    {parameters.dq_accum, parameters.arrived, parameters.written, parameters.next_job,
                     parameters.d_query, parameters.dq_accum_slots, parameters.columns},
                    parameters.next_tile,
                    parameters.dq_semaphore,
                    parameters.l2_head_group,
                    parameters.scale,
                    parameters.score,
                    parameters.d_bias,
                    parameters.d_slopes,
                    parameters.bias_factor,
                    parameters.dropout};
    const SharedMemory& shared = call.shared;

    if (threadIdx.x == 0) {
        if (shared.base % descriptor::atom_bytes != 0) __trap();  // the swizzle counts from 1024-byte boundaries
        tma::prefetch_descriptor(parameters.maps.query);
        tma::prefetch_descriptor(parameters.maps.key);
        tma::prefetch_descriptor(parameters.maps.value);
        tma::prefetch_descriptor(parameters.maps.d_out);
        tma::prefetch_descriptor(parameters.maps.d_key);
        tma::prefetch_descriptor(parameters.maps.d_value);
        for (int stage = 0; stage < Traits::key_stages; ++stage) {
            mbarrier::init(shared.key_full(stage), Traits::cluster);  // K, and what is needed of the other CTA's
            // A lane of each warp that reads K or the tile's index.
            mbarrier::init(shared.key_empty(stage),
                           4 * Traits::consumers + 4 * Traits::d_query_warpgroup + Traits::adding_warps);
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
        mbarrier::init(shared.value_empty(), 4 * Traits::consumers);
        for (int buffer = 0; buffer < Traits::d_scores_buffers; ++buffer) {
            mbarrier::init(shared.d_scores_full(buffer), Traits::split_products ? 4 : 4 * Traits::consumers);
            // With split products consumers say so, and the other CTA once it has dS.
            mbarrier::init(shared.d_scores_empty(buffer),
                           Traits::split_products ? 4 * Traits::consumers + Traits::cluster - 1 : 4);
        }
        mbarrier::init(shared.peer_d_scores_empty(), 4 * Traits::consumers);
        for (int stage = 0; stage < Traits::stages; ++stage) {
            mbarrier::init(shared.query_full(stage), 1);
            mbarrier::init(shared.d_out_full(stage), 1);
            mbarrier::init(shared.query_empty(stage), 4 * Traits::consumers * Traits::cluster);
            mbarrier::init(shared.d_out_empty(stage), 4 * Traits::consumers * Traits::cluster);
        }
        mbarrier::fence_init();
    }
    sync_ctas();
    if constexpr (!Traits::persistent && Traits::deterministic) take_tile(call);

    const int warp = warp_index();
    if (warp < 4) {
        release_registers<Traits::producer_registers>();
        if (warp == 0) {
            if (elect_one()) produce(call);
        } else if constexpr (Traits::d_query_warpgroup) {
            if constexpr (Traits::deterministic) {
                warp == 1 ? acquire_semaphores(call) : warp == 2 ? release_semaphores(call) : add_d_query_in_order(call);
            } else {
                warp == 1 ? add_d_query(call) : write_d_query(call, warp - 2);
            }
        } else if constexpr (Traits::deterministic) {
            if (warp == 1) acquire_semaphores(call);
            if (warp == 2) release_semaphores(call);
        }
    } else if (Traits::d_query_warpgroup && warp >= 4 * (1 + Traits::consumers)) {
        if constexpr (Traits::d_query_warpgroup) {
            release_registers<Traits::d_query_registers>();
            compute_d_query(call);
        }
    } else {
        take_registers<Traits::consumer_registers>();
        const int consumer = warp / 4 - 1;
        if constexpr (!Traits::split_products) {
            consume_split_keys(call, consumer);
        } else if (consumer == 0) {
            ValueConsumer(call).run(call);
        } else {
            KeyConsumer(call).run(call);
        }
    }
}
