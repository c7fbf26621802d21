// Attention forward for Hopper, in the manner of FlashAttention-3 (Shah et al., arXiv:2407.08608), on plain PTX.
//
// A persistent CTA computes one tile of queries after another. Its warpgroups have two roles:
//
//   producer   load.cuh      one thread of warpgroup 0 takes tiles from the scheduler and loads Q once a tile, and K
//                            and V block by block, through rings of shared-memory stages. Another warp of warpgroup 0
//                            loads tiles again whose values aren't finite (repeat.cuh)
//   consumers  consumer.cuh  each of the other warpgroups computes 64 rows of the tile: S = QK^T, online softmax,
//                            O += PV with P straight from registers
#include "parameters.cuh"
#include "ptx/dependent_launch.cuh"
#include "sm90/forward/consumer.cuh"
#include "sm90/forward/load.cuh"
#include "sm90/forward/load_repeat.cuh"

extern "C" __global__ void __launch_bounds__(Traits::threads, 1)
    forward(const __grid_constant__ Parameters parameters) {
    unsigned char* shared_memory = dynamic_shared_memory();
    const SharedMemory shared{shared_memory, shared_address(shared_memory)};
    const Shape shape{parameters.queries, parameters.keys,    parameters.query_heads, parameters.group,
                      parameters.batch,   parameters.columns, parameters.left,        parameters.right,
                      parameters.mask_metadata,
#if BLOCK_MASK
                      parameters.block_mask,
#endif
#if PAGE
                      parameters.page_table,
#endif
#if PACKED
                      parameters.packed,
#endif
    };
    const SplitKV split_kv{parameters.whole_tiles, parameters.split_ctas, parameters.split_tiles,
                           parameters.tile_blocks};
    const ScoreOperands score_operands = parameters.score;
    const Dropout dropout = parameters.dropout;

    if (threadIdx.x == 0) {
        if (shared.base % descriptor::atom_bytes != 0) __trap();  // the swizzle counts from 1024-byte boundaries
        tma::prefetch_descriptor(parameters.maps.query);
        tma::prefetch_descriptor(parameters.maps.key);
        tma::prefetch_descriptor(parameters.maps.value);
        for (int stage = 0; stage < Traits::query_stages; ++stage) {
            mbarrier::init(shared.query_full(stage), 1);
            mbarrier::init(shared.query_empty(stage), 4 * Traits::consumers * warp_arrivals);  // a lane of each warp
        }
        for (int stage = 0; stage < Traits::stages; ++stage) {
            mbarrier::init(shared.key_full(stage), 1);
            mbarrier::init(shared.value_full(stage), 1);
            mbarrier::init(shared.key_empty(stage), 4 * Traits::consumers * warp_arrivals);
            mbarrier::init(shared.value_empty(stage), 4 * Traits::consumers * warp_arrivals);
        }
        if constexpr (Traits::isolates) {
            mbarrier::init(shared.all_computed(), 4 * Traits::consumers * warp_arrivals);
            mbarrier::init(shared.block_landed(), 2);  // K and V
            shared.repeats() = {Repeats::none, 0, 0, 0};
        }
        mbarrier::fence_init();
        shared.least_score() = -infinity;
    }
    __syncthreads();
    allow_next_kernel();

    if (warp_index() < 4) {
        if constexpr (Traits::consumers > 1) release_registers<Traits::producer_registers>();
        const LoadCall call{parameters.maps,          shared,  shape,                split_kv,
                            parameters.l2_head_group, dropout, parameters.key_places};
        const int warp = warp_index();
        if (warp == 0) {  // the thread that loads is alone here, which ptxas needs to know for uniform registers
            if (elect_one()) produce(call, parameters.next_tile);
        } else if (Traits::isolates && warp == 1) {
            repeat_tiles(call, parameters.next_repeat, parameters.arrived);
        }
    } else {
        if constexpr (Traits::consumers > 1) take_registers<Traits::consumer_registers>();
        // With score modifications the scale is applied there (scores.cuh).
        const float softmax_scale = ScoreTraits::natural_logits ? 1.0f : parameters.scale_log2;
        consume({shared,
                 {parameters.out, parameters.lse},
                 {parameters.partials, parameters.arrived},
                 parameters.next_repeat,
                 shape,
                 split_kv,
                 score_operands,
                 {parameters.sinks, parameters.sinks_stride},
                 dropout,
                 softmax_scale,
                 parameters.descales});
    }
}
