// The backward kernels' compile-time facts, in one struct, and the main kernel's shared-memory map.
//
// Defines, all set by jax_flash/cuda/backward_plan.py, the same for the three kernels of a call:
//   ELEMENT         bfloat16 or float16
//   HEAD_DIM        head dim of queries, keys and values, rounded up to a multiple of 16
//   QUERIES, KEYS   rows of a block of queries, and of the CTA's tile of keys
//   SPLIT_PRODUCTS  how two consumer warpgroups share a block, see backward.cu
//   STAGES          blocks of Q, and of dO, in flight
//   DQ_BY_TMA       1: dQ is added to global memory from shared memory, 0: straight from registers
//   SHARED_BYTES    dynamic shared memory that the plan asks for
#pragma once
#include "../ptx/descriptor.cuh"
#include "../ptx/types.cuh"
#include "pipeline.cuh"

constexpr float log2_e = 1.4426950408889634f;

struct Traits {
    using Element = ELEMENT;
    static constexpr int head_dim = HEAD_DIM;
    static constexpr int queries = QUERIES;
    static constexpr int keys = KEYS;
    static constexpr bool split_products = SPLIT_PRODUCTS;
    static constexpr int stages = STAGES;
    static constexpr bool dq_by_tma = DQ_BY_TMA;

    static constexpr int consumers = 2;
    static constexpr int threads = 128 * (1 + consumers);
    static constexpr int producer_registers = 24;  // setmaxnreg
    static constexpr int consumer_registers = 240;

    static constexpr int panels = ceil_div(head_dim, descriptor::panel_columns);
    static constexpr int key_bytes = panels * descriptor::panel_bytes(keys);       // K, or V
    static constexpr int query_bytes = panels * descriptor::panel_bytes(queries);  // one stage of Q, or of dO
    static constexpr int statistics_bytes = queries * 4;                           // one stage of lse, or of D
    // dS lies as [keys][queries], in panels of 64 queries. Two of them let a warpgroup write the next
    // block's while the other one still reads this block's.
    static constexpr int d_scores_bytes = queries / 64 * descriptor::panel_bytes(keys);
    static constexpr int d_scores_buffers = split_products ? 1 : 2;
    static constexpr int exchange_bytes = split_products ? queries * keys * 4 : 0;

    static_assert(head_dim % 16 == 0 && head_dim <= 256, "wgmma contracts 16 columns at a time; N is at most 256");
    static_assert(queries == 64 || queries == 128, "dQ is computed in tiles of 64 rows");
    static_assert(keys == (split_products ? 64 : 128), "a warpgroup holds the gradients of 64 keys");
    static_assert(!split_products || queries == 64, "the registers hold no more next to 64 x head_dim accumulators");
    static_assert(queries == 128 || panels > 1, "64 rows of dQ are shared out by panels of columns");
};

// The part of a block's dQ that one consumer warpgroup computes: 64 rows of 128, or the panels of one half
// of the columns. The float32 sum of dQ keeps each part in the order of wgmma's accumulators, so that it is
// added to and read back 16 bytes a thread: four accumulators i … i+3 of thread t lie at (i/4·128 + t)·16
// bytes.
struct DqPart {
    static constexpr bool by_rows = Traits::queries == 128;
    static constexpr int first_columns =
        by_rows ? Traits::head_dim : Traits::panels / 2 * descriptor::panel_columns;
    static constexpr int second_columns = by_rows ? Traits::head_dim : Traits::head_dim - first_columns;
    static constexpr int block_elements = Traits::queries * Traits::head_dim;
    static_assert(64 * (first_columns + second_columns) == block_elements, "the parts make up the block");

    __device__ static constexpr int columns(int consumer) { return consumer == 0 ? first_columns : second_columns; }
    __device__ static constexpr int first_row(int consumer) { return by_rows ? 64 * consumer : 0; }
    __device__ static constexpr int first_column(int consumer) { return by_rows ? 0 : consumer * first_columns; }
    // Bytes of the float32 part, and where it starts in the block's sum.
    __device__ static constexpr int bytes(int consumer) { return 64 * columns(consumer) * 4; }
    __device__ static constexpr int offset(int consumer) { return consumer * bytes(0); }
};

// Where the statistics of a row lie in its block: in each 16 rows, those that a thread meets as columns of
// Sᵀ, 2t, 2t + 1, 2t + 8 and 2t + 9, follow each other, so that it reads them as one vector.
__device__ constexpr int statistics_slot(int row) {
    return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2;
}

// Byte offsets from the start of dynamic shared memory, and addresses of what lies there.
struct SharedMemory {
    unsigned char* data;
    uint32_t base;  // the address of `data`

    static constexpr int key = 0;  // dK and dV are staged over K and V at the end
    static constexpr int value = key + Traits::key_bytes;
    static constexpr int query = value + Traits::key_bytes;
    static constexpr int d_out = query + Traits::stages * Traits::query_bytes;
    static constexpr int d_scores = d_out + Traits::stages * Traits::query_bytes;
    static constexpr int exchange = d_scores + Traits::d_scores_buffers * Traits::d_scores_bytes;
    static constexpr int d_query = exchange + Traits::exchange_bytes;
    static constexpr int statistics = d_query + (Traits::dq_by_tma ? DqPart::block_elements * 4 : 0);
    static constexpr int barriers = statistics + 2 * Traits::stages * Traits::statistics_bytes;
    static constexpr int bytes = barriers + 8 * (2 + 4 * Traits::stages);
    static_assert(bytes == SHARED_BYTES, "the plan asks for the memory that this map needs");
    static_assert(bytes <= 227 * 1024, "a CTA has 227 KB of shared memory");

    __device__ uint32_t key_tile() const { return base + key; }
    __device__ uint32_t value_tile() const { return base + value; }
    __device__ uint32_t query_block(int stage) const { return base + query + stage * Traits::query_bytes; }
    __device__ uint32_t d_out_block(int stage) const { return base + d_out + stage * Traits::query_bytes; }
    __device__ uint32_t d_scores_buffer(int index) const { return base + d_scores + index * Traits::d_scores_bytes; }

    // Statistics of a block's rows: lse in base 2, and D. As addresses for TMA, and as arrays of
    // `statistics_slot`s.
    __device__ static constexpr int lse_offset(int stage) { return statistics + 2 * stage * Traits::statistics_bytes; }
    __device__ static constexpr int delta_offset(int stage) { return lse_offset(stage) + Traits::statistics_bytes; }
    __device__ const float4* lse(int stage) const { return reinterpret_cast<const float4*>(data + lse_offset(stage)); }
    __device__ const float4* delta(int stage) const {
        return reinterpret_cast<const float4*>(data + delta_offset(stage));
    }
    // P on its way from one warpgroup to the other, in the order of the accumulators, as in DqPart.
    __device__ float4* exchange_tile() const { return reinterpret_cast<float4*>(data + exchange); }
    __device__ float4* d_query_part(int consumer) const {
        return reinterpret_cast<float4*>(data + d_query + DqPart::offset(consumer));
    }

    __device__ uint32_t key_full() const { return base + barriers; }
    __device__ uint32_t value_full() const { return base + barriers + 8; }
    __device__ uint32_t query_full(int stage) const { return base + barriers + 8 * (2 + stage); }
    __device__ uint32_t query_empty(int stage) const { return query_full(stage) + 8 * Traits::stages; }
    __device__ uint32_t d_out_full(int stage) const { return query_full(stage) + 16 * Traits::stages; }
    __device__ uint32_t d_out_empty(int stage) const { return query_full(stage) + 24 * Traits::stages; }
};

// Q and dO go round together.
using BlockSlot = PipelineState<Traits::stages>;

// Sizes of the call. A side of the window that is not bounded is so large that it never bounds.
struct Shape {
    int queries, keys;      // T, S
    int key_heads, group;   // K, N / K
    int batch;              // B
    int left, right;        // the window

    __device__ int query_heads() const { return key_heads * group; }
    __device__ int query_blocks() const { return ceil_div(queries, Traits::queries); }
    __device__ int diagonal() const { return keys - queries; }  // query i is aligned with key i + diagonal
};
