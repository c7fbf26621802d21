// Attention on a key-value cache for Hopper: few queries of each sequence, and many keys.
//
// The kernel reads the cache once, and that is what it costs. Persistent CTAs, two on a multiprocessor if there is
// room, have equal shares of all key blocks (schedule.cuh), or, where tiles are few, a part of one tile. Their warps
// have two roles:
//
//   consumers  consumer.cuh  a warpgroup computes tiles of up to 64 rows: queries times the query heads of one key head
//   producer   load.cuh      keeps a ring of stages full of K and V, by TMA in a warp, or by more threads; a warp also
//                            appends new keys and values, if they are few (appended_keys.cuh)
//
// CTAs that may share tiles form pairs, each of which makes one part of a tile of its two (pair.cuh). The last of the
// tile's sharers combines what they leave (shared_tile.cuh). Where tiles are few, each has a cluster of CTAs instead,
// which combine their parts through shared memory (cluster_parts.cuh).
//
// If a kernel of its own appends (append.cu), it has waited for all kernels ahead of it before this one starts. So this
// one waits for it only where it reads what that one writes, and at its end, so that kernels behind it needn't know.
#include "parameters.cuh"
#include "ptx/dependent_launch.cuh"
#include "sm90/decode/consumer.cuh"
#include "sm90/decode/load.cuh"
#include "sm90/decode/unused_rows.cuh"

// The call's shape. What the kernel's defines fix is a constant, so the producer doesn't look for it ahead of the first
// keys.
__device__ __forceinline__ Shape known_shape(Shape shape) {
    if (!Traits::paged) shape.page_table = nullptr;
    if (Traits::plain) {
        shape.query_offsets = shape.left_padding = shape.batch_index = nullptr;
        shape.tiles_alike = 1;
    }
    return shape;
}

extern "C" __global__ void __launch_bounds__(Traits::threads, Traits::ctas_of_sm)
    decode(const __grid_constant__ Parameters parameters) {
    unsigned char* shared_memory = dynamic_shared_memory();
    const SharedMemory shared{shared_memory, shared_address(shared_memory)};

    if (threadIdx.x == 0) {
        if (shared.base % descriptor::atom_bytes != 0) __trap();  // the swizzle counts from 1024-byte boundaries
        prepare_loads(parameters.cache);
#if QUERY_TMA
        tma::prefetch_descriptor(parameters.query);
#endif
        init_barriers(shared);
    }
    const Shape shape = known_shape(parameters.shape);
    const bool follows_append = shape.appended > 0 && !Traits::appends;
    if (!follows_append) wait_for_previous_kernel();

    const TilePartials partials{parameters.partial_out, parameters.partial_statistics, parameters.arrivals};
    if (warp_index() >= Traits::consumer_threads / 32) {
        produce({parameters.cache,
                 shared,
                 shape,
                 parameters.query,
                 partials,
                 {parameters.append, shape, parameters.rotary, parameters.descales}},
                parameters.division);
    } else {
        start_consumer();
        consume({shared,
                 shape,
                 parameters.query,
                 parameters.rotary,
                 {parameters.out, parameters.lse},
                 parameters.sinks,
                 partials,
                 parameters.descales,
                 parameters.scale,
                 parameters.soft_cap,
                 parameters.slopes,
                 parameters.slopes_stride,
                 parameters.division,
#if SCORE_MOD
                 parameters.user
#endif
        });
    }
    if (shape.query_offsets) write_unused_rows({parameters.out, parameters.lse}, shape);
    wait_for_previous_kernel();
}
