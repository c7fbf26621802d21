// Attention forward for Hopper: FlashAttention-3's schedule (Shah et al., arXiv:2407.08608) on plain PTX.
//
// A persistent CTA takes query tiles in turn. One thread of warpgroup 0 picks them and loads: Q once a tile, K
// and V in blocks of keys through rings of stages. Each consumer warpgroup owns 64 query rows: S = QK^T, online
// softmax, O += PV with P straight from registers. Two overlaps hide the softmax: a warpgroup issues the next
// block's QK^T beside this block's PV, and computes the next block's exponentials while PV still runs; and one
// warpgroup computes products while another computes exponentials. At small head dims the warpgroups take turns
// at the tensor cores for the second (PINGPONG); at larger ones they run freely, and the first is enforced
// (wgmma::hold_wait_behind). docs/tuning.md has what each gave.
#include "../ptx/mbarrier.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/warpgroup.cuh"
#include "../ptx/wgmma.cuh"
#include "forward_traits.cuh"
#include "softmax.cuh"
#include "tile.cuh"

using wgmma::Major;
using wgmma::Wgmma;

constexpr int score_count = Traits::keys / 2;    // accumulators a thread holds of S
constexpr int out_count = Traits::head_dim / 2;  // … and of O

// Named barriers: one a consumer warpgroup for its turn, one for the threads of the warpgroup itself.
__device__ __forceinline__ int turn_barrier(int consumer) { return 1 + consumer; }
__device__ __forceinline__ int own_barrier(int consumer) { return 1 + Traits::consumers + consumer; }

struct TensorMaps {
    const TensorMap &query, &key, &value, &out;
};

// ---------------------------------------------------------------------------------------- producer

// One copy for each panel of 64 columns; `barrier` expects the bytes of all of them.
__device__ __forceinline__ void load_panels(uint32_t destination, const TensorMap& map, uint32_t barrier, int rows,
                                            int head, int first_row, int batch) {
    mbarrier::arrive_expect(barrier, Traits::panels * descriptor::panel_bytes(rows));
#pragma unroll
    for (int panel = 0; panel < Traits::panels; ++panel) {
        tma::load(destination + panel * descriptor::panel_bytes(rows), map, barrier,
                  panel * descriptor::panel_columns, head, first_row, batch);
    }
}

constexpr int no_more_tiles = -1;

// Runs in one thread. Tiles come by stride, or, where they take unequally long, from the counter `next_tile`
// that all CTAs share. Blocks go from the last to the first; K runs one block ahead of V, as they are used.
__device__ __forceinline__ void produce(const TensorMaps& maps, const SharedMemory& shared, const Shape& shape,
                                        int section_heads, int* next_tile) {
    PipelineState<Traits::stages> key_slot, value_slot;
    PipelineState<Traits::query_stages> query_slot;
    const int tiles = tile_count(shape), grid = gridDim.x;
    int next;
#pragma unroll 1
    for (int index = blockIdx.x; index < tiles; index = next) {
        next = next_tile ? grid + atomicAdd(next_tile, 1) : index + grid;  // its latency passes while we load
        const Tile tile = tile_at(index, shape, section_heads);
        const KeyBlocks blocks = key_blocks(tile.first_row, shape);
        const int key_head = tile.head / shape.group;

        auto load_key = [&](int block) {
            mbarrier::wait(shared.key_empty(key_slot.stage), key_slot.parity ^ 1);
            load_panels(shared.key_block(key_slot.stage), maps.key, shared.key_full(key_slot.stage), Traits::keys,
                        key_head, block * Traits::keys, tile.batch);
            key_slot.advance();
        };
        auto load_value = [&](int block) {
            mbarrier::wait(shared.value_empty(value_slot.stage), value_slot.parity ^ 1);
            load_panels(shared.value_block(value_slot.stage), maps.value, shared.value_full(value_slot.stage),
                        Traits::keys, key_head, block * Traits::keys, tile.batch);
            value_slot.advance();
        };

        if (blocks.count() > 0) load_key(blocks.last - 1);  // before Q, whose slot is freed late
        mbarrier::wait(shared.query_empty(query_slot.stage), query_slot.parity ^ 1);
        shared.tile_index(query_slot.stage) = index;
        load_panels(shared.query_tile(query_slot.stage), maps.query, shared.query_full(query_slot.stage), Traits::rows,
                    tile.head, tile.first_row, tile.batch);
        query_slot.advance();
#pragma unroll 1  // the producer has few registers
        for (int block = blocks.last - 2; block >= blocks.first; --block) {
            load_key(block);
            load_value(block + 1);
        }
        if (blocks.count() > 0) load_value(blocks.first);
    }
    mbarrier::wait(shared.query_empty(query_slot.stage), query_slot.parity ^ 1);
    shared.tile_index(query_slot.stage) = no_more_tiles;
    mbarrier::arrive(shared.query_full(query_slot.stage));
}

// ---------------------------------------------------------------------------------------- consumers

// S = Q K^T, issued and committed as one group.
__device__ __forceinline__ void issue_scores(float (&scores)[score_count], uint64_t query, uint32_t key_block) {
    const uint64_t key = descriptor::k_major(key_block);
    wgmma::pin(scores);
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < Traits::head_dim / 16; ++step) {
        Wgmma<Traits::keys>::issue<Traits::Element, Major::K, Major::K>(
            scores, descriptor::advance(query, descriptor::k_major_offset(step, Traits::rows)),
            descriptor::advance(key, descriptor::k_major_offset(step, Traits::keys)), step > 0);
    }
    wgmma::commit();
    wgmma::pin(scores);
}

// O += P V, issued and committed as one group.
__device__ __forceinline__ void issue_out(float (&out)[out_count], const uint32_t (&probabilities)[score_count / 8][4],
                                          uint32_t value_block) {
    const uint64_t value = descriptor::mn_major(value_block, Traits::keys);
    wgmma::pin(out);
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < Traits::keys / 16; ++step) {
        Wgmma<Traits::head_dim>::issue<Traits::Element, Major::MN>(
            out, probabilities[step], descriptor::advance(value, descriptor::mn_major_offset(step)), 1);
    }
    wgmma::commit();
    wgmma::pin(out);
}

__device__ __forceinline__ void pack_probabilities(uint32_t (&packed)[score_count / 8][4],
                                                   const float (&probabilities)[score_count]) {
#pragma unroll
    for (int i = 0; i < score_count / 2; ++i) {
        packed[i / 4][i % 4] = pack<Traits::Element>(probabilities[2 * i], probabilities[2 * i + 1]);
    }
}

// Waiting for the turn at the tensor cores, and passing it on to the next warpgroup.
__device__ __forceinline__ void take_turn(int consumer) {
    if constexpr (Traits::pingpong) named_barrier_sync(turn_barrier(consumer), 256);
}
__device__ __forceinline__ void pass_turn(int consumer) {
    if constexpr (Traits::pingpong) named_barrier_arrive(turn_barrier((consumer + 1) % Traits::consumers), 256);
}

// Normalises O, stages it over this warpgroup's rows of Q, and stores it by TMA, which clips rows and
// columns that are not there.
__device__ __forceinline__ void store_out(float (&out)[out_count], const float (&normalise)[2], const TensorMap& map,
                                          uint32_t staging, uint32_t query_empty, const Tile& tile, int consumer) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int row = warp * 16 + lane % 16;
    named_barrier_sync(own_barrier(consumer), 128);  // every warp's QK^T has read Q
#pragma unroll
    for (int i = 0; i < out_count; i += 8) {  // 16 columns: the lower half-warp addresses the first 8
        const int chunk = i / 4 + lane / 16;
        const uint32_t panel = staging + chunk / 8 * descriptor::panel_bytes(Traits::rows);
        store_matrix_x4(panel + descriptor::swizzled_offset(row, chunk % 8),
                        pack<Traits::Element>(out[i] * normalise[0], out[i + 1] * normalise[0]),
                        pack<Traits::Element>(out[i + 2] * normalise[1], out[i + 3] * normalise[1]),
                        pack<Traits::Element>(out[i + 4] * normalise[0], out[i + 5] * normalise[0]),
                        pack<Traits::Element>(out[i + 6] * normalise[1], out[i + 7] * normalise[1]));
    }
    fence_proxy_async();
    named_barrier_sync(own_barrier(consumer), 128);
    if (threadIdx.x % 128 == 0) {
#pragma unroll
        for (int panel = 0; panel < Traits::panels; ++panel) {
            tma::store(map, staging + panel * descriptor::panel_bytes(Traits::rows),
                       panel * descriptor::panel_columns, tile.head, tile.first_row + 64 * consumer, tile.batch);
        }
        tma::commit_group();
        tma::wait_group_read<0>();
        mbarrier::arrive(query_empty);
    }
}

__device__ __forceinline__ void consume(const TensorMaps& maps, float* __restrict__ lse, const SharedMemory& shared,
                                        const Shape& shape, int section_heads, float scale_log2) {
    const int consumer = warp_index() / 4 - 1;
    const int lane = threadIdx.x % 32;
    const int row_in_tile = 64 * consumer + threadIdx.x / 32 % 4 * 16 + lane / 4;
    PipelineState<Traits::stages> key_slot, value_slot;
    PipelineState<Traits::query_stages> query_slot;
    if (Traits::pingpong && consumer == Traits::consumers - 1) pass_turn(consumer);  // warpgroup 0 goes first

    while (true) {
        mbarrier::wait(shared.query_full(query_slot.stage), query_slot.parity);
        const int index = shared.tile_index(query_slot.stage);
        if (index == no_more_tiles) break;
        const Tile tile = tile_at(index, shape, section_heads);
        const KeyBlocks blocks = key_blocks(tile.first_row, shape);
        const int row = tile.first_row + row_in_tile;
        OnlineSoftmax softmax;
        float out[out_count] = {};
        const uint32_t query_rows = shared.query_tile(query_slot.stage) + consumer * descriptor::panel_bytes(64);
        const uint64_t query = descriptor::k_major(query_rows);

        if (blocks.count() > 0) {
            float scores[score_count];
            uint32_t probabilities[score_count / 8][4];
            float rescale[2];

            // This warpgroup's rows see every key of the blocks [whole_begin, whole_end).
            const int first_row = tile.first_row + 64 * consumer;
            const int whole_end = max(right_end(first_row, shape), 0) / Traits::keys;
            const int whole_begin = ceil_div(left_begin(first_row + 63, shape), Traits::keys);

            int block = blocks.last - 1;
            mbarrier::wait(shared.key_full(key_slot.stage), key_slot.parity);
            take_turn(consumer);
            issue_scores(scores, query, shared.key_block(key_slot.stage));
            pass_turn(consumer);
            wgmma::wait<0>();
            wgmma::pin(scores);
            if (lane == 0) mbarrier::arrive(shared.key_empty(key_slot.stage));
            key_slot.advance();
            transform_scores(scores);
            if (block >= whole_end || block < whole_begin) mask_scores(scores, row, block * Traits::keys, shape);
            softmax.update(scores, rescale, scale_log2);
            pack_probabilities(probabilities, scores);

            // QK^T of `block` beside PV of the block before it, then the softmax of `block`.
            auto step = [&](const bool masked) __attribute__((always_inline)) {
                mbarrier::wait(shared.key_full(key_slot.stage), key_slot.parity);
                take_turn(consumer);
                issue_scores(scores, query, shared.key_block(key_slot.stage));
                mbarrier::wait(shared.value_full(value_slot.stage), value_slot.parity);
                issue_out(out, probabilities, shared.value_block(value_slot.stage));
                pass_turn(consumer);
                wgmma::wait<1>();
                wgmma::pin(scores);
                if (lane == 0) mbarrier::arrive(shared.key_empty(key_slot.stage));
                key_slot.advance();
                transform_scores(scores);
                if (masked) mask_scores(scores, row, block * Traits::keys, shape);
                softmax.update(scores, rescale, scale_log2);
                // The exponentials are to hide under PV. With turns they hide under the other warpgroups' products as
                // well, and ptxas's own order is faster (docs/tuning.md).
                if constexpr (!Traits::pingpong) {
                    wgmma::hold_wait_behind(softmax.row_sum[0] + softmax.row_sum[1], shared.query_tile(0));
                }
                wgmma::wait<0>();
                wgmma::pin(out);
                if (lane == 0) mbarrier::arrive(shared.value_empty(value_slot.stage));
                value_slot.advance();
#pragma unroll
                for (int i = 0; i < out_count; ++i) out[i] *= rescale[row_of(i)];
                pack_probabilities(probabilities, scores);
            };
            --block;
            if constexpr (Traits::has_right) {
                for (; block >= max(blocks.first, whole_end); --block) step(true);
            }
            for (; block >= max(blocks.first, whole_begin); --block) step(false);
            if constexpr (Traits::has_left) {
                for (; block >= blocks.first; --block) step(true);
            }

            mbarrier::wait(shared.value_full(value_slot.stage), value_slot.parity);
            issue_out(out, probabilities, shared.value_block(value_slot.stage));
            wgmma::wait<0>();
            wgmma::pin(out);
            if (lane == 0) mbarrier::arrive(shared.value_empty(value_slot.stage));
            value_slot.advance();
        }

        float normalise[2], row_lse[2];
        softmax.finish(normalise, row_lse, scale_log2);
        if (lane % 4 == 0) {
            float* tile_lse = lse + (static_cast<int64_t>(tile.batch) * shape.query_heads + tile.head) * shape.queries;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if (row + 8 * r < shape.queries) tile_lse[row + 8 * r] = row_lse[r];
            }
        }
        store_out(out, normalise, maps.out, query_rows, shared.query_empty(query_slot.stage), tile, consumer);
        query_slot.advance();
    }
}

// ---------------------------------------------------------------------------------------- entry

extern "C" __global__ void __launch_bounds__(Traits::threads, 1)
    forward(const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
            const __grid_constant__ TensorMap value_map, const __grid_constant__ TensorMap out_map,
            float* __restrict__ lse,  // (B, N, T)
            int queries, int keys, int query_heads, int group, int batch, int left, int right,  // see Shape
            int section_heads,                                                                  // see tile_at
            int* __restrict__ next_tile,                                                        // see produce
            float scale_log2)                                                                   // |scale|·log2(e)
{
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const SharedMemory shared{shared_memory, shared_address(shared_memory)};
    const TensorMaps maps{query_map, key_map, value_map, out_map};
    const Shape shape{queries, keys, query_heads, group, batch, left, right};

    if (threadIdx.x == 0) {
        if (shared.base % descriptor::atom_bytes != 0) __trap();  // the swizzle counts from 1024-byte boundaries
        tma::prefetch_descriptor(query_map);
        tma::prefetch_descriptor(key_map);
        tma::prefetch_descriptor(value_map);
        tma::prefetch_descriptor(out_map);
        for (int stage = 0; stage < Traits::query_stages; ++stage) {
            mbarrier::init(shared.query_full(stage), 1);
            mbarrier::init(shared.query_empty(stage), Traits::consumers);
        }
        for (int stage = 0; stage < Traits::stages; ++stage) {
            mbarrier::init(shared.key_full(stage), 1);
            mbarrier::init(shared.value_full(stage), 1);
            mbarrier::init(shared.key_empty(stage), 4 * Traits::consumers);  // a lane of each warp
            mbarrier::init(shared.value_empty(stage), 4 * Traits::consumers);
        }
        mbarrier::fence_init();
    }
    __syncthreads();

    if (warp_index() < 4) {
        if constexpr (Traits::consumers > 1) release_registers<Traits::producer_registers>();
        if (warp_index() == 0 && elect_one()) produce(maps, shared, shape, section_heads, next_tile);
    } else {
        if constexpr (Traits::consumers > 1) take_registers<Traits::consumer_registers>();
        consume(maps, lse, shared, shape, section_heads, scale_log2);
    }
}
