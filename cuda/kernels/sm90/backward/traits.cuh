// The backward kernels' compile-time facts, in one struct, and the main kernel's shared-memory map.
//
// Defines, all set by jax_flash/cuda/sm90/backward_plan.py for each kernel of a call:
//   ELEMENT         bfloat16 or float16
//   HEAD_DIM        head dim of queries and keys, and of their gradients, rounded up to a multiple of 16
//   VALUE_DIM       … of values and the output, and of theirs
//   QUERIES, KEYS   rows of a block of queries, and of a tile of keys, that of all CTAs that share it
//   CLUSTER         CTAs that share a tile: 1, or 2 where they split products
//   SPLIT_PRODUCTS  how two consumer warpgroups share a block, see backward.cu
//   STAGES          blocks of Q, and of dO, in flight
//   DQ_STAGES       tiles of dQ on their way to the sum, where a warpgroup of its own computes dQ
//   WRITER_STAGES   pieces of complete sums of dQ on their way to each warp that writes them
//   SEMAPHORE_STAGES  blocks whose semaphores are acquired ahead, where tiles add to dQ in a fixed order
//   SPAN            blocks of queries that key tiles count together
//   MASK_METADATA   1: which queries see keys is known only at run time, see mask_metadata.cuh
//   SEGMENTS        1: MASK_METADATA, and queries see only keys of their own segment
//   ISOLATES        1: queries may not see all keys, so NaN is kept apart, see isolation.cuh
//   DETERMINISTIC   whether the main kernel adds to dQ in a fixed order, see dq_order.cuh
//   KEY_SUMS        1: units of work add to float32 sums of dK and dV (key_sums.cuh), as several share a key tile
//   WIDE_KEY_GRADIENTS  1: the main kernel writes float32 rows of dK and dV (store_keys.cuh)
//   DQ_SUMS         float32 sums of a block's dQ, a power of two; more than one only where they have a fixed order
//   BIAS_SUM        what the bias's gradient is added up in: float, or uint64_t, see jax_flash/cuda/fixed_point.py
//   RESULT          of the gradients that postprocess kernels write: ELEMENT, or float
//   SHARED_BYTES    dynamic shared memory that the plan asks for
// Only the main kernel has MASK_METADATA, SEGMENTS, ISOLATES and those of scores.cuh and common/block_mask.cuh set; all
// have that of dropout.cuh.
#pragma once
#include "ptx/descriptor.cuh"
#include "ptx/types.cuh"
#include "common/block_mask.cuh"
#include "common/block_range.cuh"
#include "common/constants.cuh"
#include "common/dropout.cuh"
#include "common/pipeline.cuh"
#include "common/score_traits.cuh"

struct Traits {
    using Element = ELEMENT;
    static constexpr int head_dim = HEAD_DIM;
    static constexpr int value_dim = VALUE_DIM;
    static constexpr int larger_dim = head_dim > value_dim ? head_dim : value_dim;  // decides on the tile
    static constexpr int queries = QUERIES;
    static constexpr int keys = KEYS;
    static constexpr bool split_products = SPLIT_PRODUCTS;
    static constexpr int stages = STAGES;
    static constexpr int dq_stages = DQ_STAGES;
    static constexpr bool deterministic = DETERMINISTIC;
    static constexpr int dq_sums = DQ_SUMS;
    static constexpr bool key_sums = KEY_SUMS;
    static constexpr bool mask_metadata = MASK_METADATA;
    static constexpr bool segments = SEGMENTS;
    static constexpr bool block_mask = BLOCK_MASK > 0;
    // Whether tiles visit the blocks of a list. In a fixed order they visit an interval, in which all may be hidden.
    static constexpr bool block_lists = block_mask && !DETERMINISTIC;
    static constexpr bool isolates = ISOLATES;
    using BiasSum = BIAS_SUM;
    using Result = RESULT;
    static constexpr bool dropout = has_dropout;

    static constexpr int cluster = CLUSTER;  // CTAs that share a tile
    static constexpr int cta_keys = keys / cluster;
    static constexpr int consumers = 2;
    static constexpr bool d_query_warpgroup = !split_products;  // else the consumers share dQ as well
    static constexpr int threads = 128 * (1 + consumers + d_query_warpgroup);
    // setmaxnreg; a multiprocessor has 512 for one thread of each warpgroup, less what `register_pool` rounds off.
    static constexpr int producer_registers = split_products ? 24 : queries == 64 && larger_dim <= 96 ? 40 : 32;
    static constexpr int consumer_registers = split_products ? 240 : queries == 64 && larger_dim <= 96 ? 192 : 208;
    static constexpr int d_query_registers = 512 - producer_registers - consumers * consumer_registers;
    static_assert(producer_registers + consumers * consumer_registers + d_query_warpgroup * d_query_registers <=
                      register_pool(threads),
                  "no warpgroup waits for registers that nobody has");

    static constexpr int key_panels = ceil_div(head_dim, descriptor::panel_columns);     // and those of Q
    static constexpr int value_panels = ceil_div(value_dim, descriptor::panel_columns);  // … of dO
    static constexpr int key_bytes = key_panels * descriptor::panel_bytes(cta_keys);
    static constexpr int value_bytes = value_panels * descriptor::panel_bytes(cta_keys);
    // A CTA with split products has one tile, whose gradients leave by way of K's and V's place. Others take one after
    // the other. Theirs leave by way of V's, beside which K of the next tile has one, too; or by way of a place of
    // their own: then the next V comes earlier, and the next K later (split_keys.cuh).
    static constexpr bool persistent = !split_products;
    static constexpr bool gradients_in_value_place = persistent && larger_dim <= 96;
    static constexpr int key_stages = gradients_in_value_place ? 2 : 1;
    static constexpr int value_parts = gradients_in_value_place ? consumers : 1;  // that come by themselves
    static constexpr int value_part_bytes = value_bytes / value_parts;
    // dK or dV of a warpgroup's 64 keys on its way out, in panels of so many rows.
    static constexpr int gradient_panel_rows = gradients_in_value_place ? cta_keys : 64;
    static constexpr int gradient_bytes = ceil_div(larger_dim, descriptor::panel_columns) * descriptor::panel_bytes(64);
    static constexpr int value_place_bytes = gradients_in_value_place ? consumers * gradient_bytes : value_bytes;
    static constexpr int gradients_bytes = persistent && !gradients_in_value_place ? consumers * gradient_bytes : 0;
    // Key tiles that no query sees are not handed to the consumers: preprocess has stored their gradients.
    static constexpr bool skips_empty_tiles = persistent && mask_metadata && !block_lists && !deterministic;
    // What the loading thread tells of a tile: its work (Call::told_work) and, where that is data, which blocks see
    // keys whole. Or its index alone: without metadata work is soon computed, and with few registers left, as at head
    // dim 128, work that is told costs instructions in each step.
    static constexpr bool tells_work = gradients_in_value_place || (persistent && mask_metadata);
    static constexpr int work_bytes = tells_work ? 24 : 8;
    static constexpr int full_blocks_bytes = tells_work && mask_metadata ? 8 * consumers : 0;
    // It also tells which block comes where a list says, so that consumers needn't wait for the list.
    static constexpr bool tells_blocks = block_lists && !split_products;
    static constexpr int query_bytes = key_panels * descriptor::panel_bytes(queries);  // one stage
    static constexpr int d_out_bytes = value_panels * descriptor::panel_bytes(queries);
    static constexpr int per_query_bytes = queries * 4;  // one stage of lse, or of delta
    static constexpr int dropout_hash_bytes = dropout ? per_query_bytes : 0;  // … and of dropout's hashes
    static constexpr int per_query_values = dropout ? 3 : 2;
    // dS lies as [keys][queries], in panels of 64 queries. Two of them, so that the next block's is written while
    // another warpgroup computes dQ of this one.
    static constexpr int d_scores_bytes = queries / 64 * descriptor::panel_bytes(cta_keys);
    static constexpr int d_scores_buffers = d_query_warpgroup ? 2 : 1;
    // Of the cluster's other CTA: dS, and the panels of K whose columns of dQ are computed here, one a consumer.
    static constexpr int peer_d_scores_bytes = cluster > 1 ? d_scores_bytes : 0;
    static constexpr int peer_key_bytes = cluster > 1 ? consumers * descriptor::panel_bytes(cta_keys) : 0;

    // Columns of a tile of dQ that the warpgroup for it computes: its registers hold no more.
    static constexpr int d_query_columns = larger_dim <= 96 ? head_dim : descriptor::panel_columns;
    // dQ on its way to the sum: one stage of the warpgroup for it, or a block of the consumers that compute it. Without
    // room for that, it goes there straight from registers.
    static constexpr int d_query_bytes =
        64 * 4 * (d_query_warpgroup ? d_query_columns : larger_dim <= 192 ? head_dim / cluster : 0);

    // Idle warps of the loading warpgroup that see to the adding.
    static constexpr int adding_warps = !d_query_warpgroup ? 0 : deterministic ? 3 : 1;

    // Pieces of complete sums of dQ on their way to each of the warps that write them.
    static constexpr int writers = WRITER_STAGES > 0 ? 2 : 0;
    static constexpr int writer_stages = writers > 0 ? WRITER_STAGES : 1;  // a ring has one at least, unused or not
    static constexpr int writer_bytes = 64 * 16 * 4;
    static constexpr int semaphore_stages = SEMAPHORE_STAGES;
    // Who tells that a CTA's additions to a block are done: the warp that adds, or the threads that add by TMA, or all
    // warps that add.
    static constexpr int dq_adders = d_query_warpgroup ? 1 : d_query_bytes > 0 ? consumers : 4 * consumers;

    // The derivative of logits by scores on its way to the consumer of dP, where it needs P by itself too.
    static constexpr bool hands_score_grad = ScoreTraits::score_grad && ScoreTraits::has_gradients;
    // Without room for it beside P, it goes where P lay, once that is read.
    static constexpr bool hands_score_grad_later = hands_score_grad && larger_dim > 192;
    static constexpr int score_grad_bytes = hands_score_grad && !hands_score_grad_later ? d_scores_bytes : 0;

    static_assert(dq_sums >= 1 && (dq_sums & (dq_sums - 1)) == 0, "tiles find their sum with few instructions");
    static_assert(head_dim % 16 == 0 && value_dim % 16 == 0, "wgmma contracts 16 columns at a time");
    static_assert(larger_dim <= 256, "N of wgmma is at most 256");
    static_assert(queries == 64 || queries == 128, "dQ is computed in tiles of 64 rows");
    static_assert(cta_keys == (split_products ? 64 : 128), "a warpgroup holds one or both gradients of 64 keys");
    static_assert(cluster == 1 || (split_products && cluster == 2), "two CTAs share dQ where they split products");
    static_assert(larger_dim <= 192 || cluster == 2, "next to 64 x larger_dim accumulators only half of dQ fits");
    static_assert(!ScoreTraits::has_score_mod || ScoreTraits::is_light || split_products,
                  "what becomes of scores takes registers");
    static_assert(!split_products || head_dim >= 32, "both consumers have columns of dQ");
    static_assert(cluster == 1 || value_dim >= 32, "dP is computed in two parts");
    static_assert(!split_products || queries == 64, "the registers hold no more next to 64 x larger_dim accumulators");
};

// How the float32 sum of dQ keeps a block: 64 rows after 64 rows, in those 8 columns after 8 columns, and each
// 64 × 8 as the 128 threads of a warpgroup hold them in accumulators, 16 bytes a thread. The warpgroup for dQ
// computes tiles of 64 rows and so many columns as leave registers to the consumers; a tile is a contiguous piece.
struct DqBlock {
    static constexpr int elements = Traits::queries * Traits::head_dim;
    static constexpr int row_tiles = Traits::queries / 64, chunks = Traits::head_dim / 8;
    static constexpr int chunk_bytes = 64 * 8 * 4;
    static constexpr int tile_columns = Traits::d_query_columns;
    static constexpr int column_tiles = ceil_div(Traits::head_dim, tile_columns);
    static constexpr int tiles = row_tiles * column_tiles;
    static constexpr int tile_bytes = tile_columns / 8 * chunk_bytes;
    // Key tiles count so many blocks at a time as done, as each count waits for what was added before it.
    static constexpr int span = SPAN;
};

// Where lse, delta and the dropout hash of a row lie in its block: in each 16 rows, those that a thread meets as
// columns of Sᵀ, 2t, 2t + 1, 2t + 8 and 2t + 9, follow each other, so that it reads them as one vector.
__device__ constexpr int lse_delta_slot(int row) {
    return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2;
}

// Byte offsets from the start of dynamic shared memory, and addresses of what lies there.
struct SharedMemory {
    unsigned char* data;
    uint32_t base;  // the address of `data`

    static constexpr int key = 0;
    static constexpr int value = key + Traits::key_stages * Traits::key_bytes;
    static constexpr int query = value + Traits::value_place_bytes;
    static constexpr int d_out = query + Traits::stages * Traits::query_bytes;
    static constexpr int d_scores = d_out + Traits::stages * Traits::d_out_bytes;
    static constexpr int peer_d_scores = d_scores + Traits::d_scores_buffers * Traits::d_scores_bytes;
    static constexpr int peer_key = peer_d_scores + Traits::peer_d_scores_bytes;
    static constexpr int d_query = peer_key + Traits::peer_key_bytes;
    static constexpr int writer = d_query + Traits::dq_stages * Traits::d_query_bytes;
    static constexpr int gradients = writer + Traits::writers * Traits::writer_stages * Traits::writer_bytes;
    static constexpr int score_grad = gradients + Traits::gradients_bytes;
    static constexpr int lse_delta = score_grad + Traits::score_grad_bytes;
    static constexpr int lse_delta_stage_bytes = 2 * Traits::per_query_bytes + Traits::dropout_hash_bytes;
    static constexpr int barriers = lse_delta + Traits::stages * lse_delta_stage_bytes;
    static constexpr int d_scores_barriers = 2 * Traits::key_stages + Traits::value_parts + 3;
    static constexpr int barrier_count = d_scores_barriers + 2 * Traits::d_scores_buffers + 4 * Traits::stages +
                                         2 * Traits::dq_stages + Traits::writers * Traits::writer_stages +
                                         3 * Traits::semaphore_stages + 2 * Traits::stages * Traits::isolates;
    static constexpr int work = barriers + 8 * barrier_count;
    static constexpr int full = work + Traits::key_stages * Traits::work_bytes;
    static constexpr int blocks = full + Traits::key_stages * Traits::full_blocks_bytes;
    static constexpr int bytes = blocks + Traits::tells_blocks * Traits::stages * 8;
    static_assert(bytes == SHARED_BYTES, "the plan asks for the memory that this map needs");
    static_assert(bytes <= 227 * 1024, "a CTA has 227 KB of shared memory");

    __device__ uint32_t key_tile(int stage = 0) const { return base + key + stage * Traits::key_bytes; }
    // Rows of 64 keys, in panels of the tile's.
    __device__ uint32_t value_tile(int part = 0) const { return base + value + part * 64 * descriptor::row_bytes; }
    __device__ uint32_t gradient_tile(int consumer) const {
        return Traits::gradients_in_value_place ? value_tile(consumer)
                                                : base + gradients + consumer * Traits::gradient_bytes;
    }
    __device__ uint32_t query_block(int stage) const { return base + query + stage * Traits::query_bytes; }
    __device__ uint32_t d_out_block(int stage) const { return base + d_out + stage * Traits::d_out_bytes; }
    __device__ static constexpr int writer_offset(int warp, int stage) {
        return writer + (warp * Traits::writer_stages + stage) * Traits::writer_bytes;
    }
    __device__ uint32_t d_query_stage(int stage) const { return base + d_query + stage * Traits::d_query_bytes; }
    __device__ uint32_t d_scores_buffer(int index) const { return base + d_scores + index * Traits::d_scores_bytes; }
    __device__ uint32_t peer_d_scores_buffer() const { return base + peer_d_scores; }
    __device__ uint32_t peer_key_panel(int consumer) const {
        return base + peer_key + consumer * descriptor::panel_bytes(Traits::cta_keys);
    }

    // Of a block's rows: lse in base 2, with dropout their hashes, and delta. As offsets for TMA, and as arrays in the
    // order of `lse_delta_slot`.
    __device__ static constexpr int lse_offset(int stage) { return lse_delta + stage * lse_delta_stage_bytes; }
    __device__ static constexpr int dropout_hash_offset(int stage) {
        return lse_offset(stage) + Traits::per_query_bytes;
    }
    __device__ static constexpr int delta_offset(int stage) {
        return dropout_hash_offset(stage) + Traits::dropout_hash_bytes;
    }
    __device__ const float4* lse(int stage) const { return reinterpret_cast<const float4*>(data + lse_offset(stage)); }
    __device__ const uint4* dropout_hashes(int stage) const {
        return reinterpret_cast<const uint4*>(data + dropout_hash_offset(stage));
    }
    __device__ const float4* delta(int stage) const {
        return reinterpret_cast<const float4*>(data + delta_offset(stage));
    }
    // P of a warp's 16 keys on its way to the consumer that overwrites it with their dS.
    __device__ uint4* probability_rows(int warp) const {
        return reinterpret_cast<uint4*>(data + d_scores + warp * 16 * descriptor::row_bytes);
    }

    // The derivatives by scores that belong to them.
    __device__ uint4* score_grad_rows(int warp) const {
        constexpr int start = Traits::hands_score_grad_later ? d_scores : score_grad;
        return reinterpret_cast<uint4*>(data + start + warp * 16 * descriptor::row_bytes);
    }

    __device__ uint32_t key_full(int stage = 0) const { return base + barriers + 8 * stage; }
    __device__ uint32_t key_empty(int stage) const { return key_full(Traits::key_stages + stage); }
    // Of the tile whose K comes: its index, or its first key, with which its work begins; or `no_more_tiles`.
    static constexpr int no_more_tiles = -1;
    __device__ int& told_tile(int stage) const {
        return *reinterpret_cast<int*>(data + work + stage * Traits::work_bytes);
    }
    // The blocks that see all of a consumer's 64 keys, where that is data.
    __device__ Interval& full_blocks(int stage, int consumer) const {
        return reinterpret_cast<Interval*>(data + full + stage * Traits::full_blocks_bytes)[consumer];
    }
    // The block whose Q comes: its VisitedBlock's word, and the query head.
    __device__ int2& told_block(int stage) const { return reinterpret_cast<int2*>(data + blocks)[stage]; }
    __device__ uint32_t value_full(int part = 0) const { return key_full(2 * Traits::key_stages + part); }
    __device__ uint32_t value_empty() const { return value_full(Traits::value_parts); }
    // The other CTA's place for dS of this one.
    __device__ uint32_t peer_d_scores_empty() const { return value_empty() + 8; }
    __device__ uint32_t probabilities_read() const { return value_empty() + 16; }
    __device__ uint32_t d_scores_full(int buffer) const { return base + barriers + 8 * (d_scores_barriers + buffer); }
    __device__ uint32_t d_scores_empty(int buffer) const {
        return d_scores_full(buffer) + 8 * Traits::d_scores_buffers;
    }
    __device__ uint32_t query_full(int stage) const { return d_scores_empty(Traits::d_scores_buffers) + 8 * stage; }
    __device__ uint32_t query_empty(int stage) const { return query_full(stage) + 8 * Traits::stages; }
    __device__ uint32_t d_out_full(int stage) const { return query_full(stage) + 16 * Traits::stages; }
    __device__ uint32_t d_out_empty(int stage) const { return query_full(stage) + 24 * Traits::stages; }
    __device__ uint32_t semaphore_acquired(int stage) const {
        return writer_full(0, Traits::writers * Traits::writer_stages + stage);
    }
    __device__ uint32_t dq_added(int stage) const { return semaphore_acquired(Traits::semaphore_stages + stage); }
    __device__ uint32_t semaphore_released(int stage) const {
        return semaphore_acquired(2 * Traits::semaphore_stages + stage);
    }
    // Q or dO of a block that is cleaned before its barrier is completed (isolation.cuh).
    __device__ uint32_t query_landed(int stage) const {
        return semaphore_acquired(3 * Traits::semaphore_stages + stage);
    }
    __device__ uint32_t d_out_landed(int stage) const { return query_landed(Traits::stages + stage); }
    __device__ uint32_t writer_full(int warp, int stage) const {
        return dq_full(2 * Traits::dq_stages) + 8 * (warp * Traits::writer_stages + stage);
    }
    __device__ uint32_t dq_full(int stage) const { return query_full(4 * Traits::stages) + 8 * stage; }
    __device__ uint32_t dq_empty(int stage) const { return dq_full(Traits::dq_stages) + 8 * stage; }
};

using KeySlot = PipelineState<Traits::key_stages>;
// Q and dO go round together.
using BlockSlot = PipelineState<Traits::stages>;
using DScoresSlot = PipelineState<Traits::d_scores_buffers>;
using WriterSlot = PipelineState<Traits::writer_stages>;
using DqSlot = PipelineState<Traits::dq_stages>;
