// The forward kernel's compile-time facts, in one struct, and its shared-memory map.
//
// Defines, all set by jax_flash/cuda/sm90/forward_plan.py:
//   ELEMENT     bfloat16 or float16
//   HEAD_DIM    head dim of queries and keys, rounded up to a multiple of 16
//   VALUE_DIM   … of values, and so of the output
//   CONSUMERS   consumer warpgroups; each owns 64 rows of the query tile
//   KEYS        keys in a block
//   STAGES      blocks of keys, and of values, in flight
//   QUERY_STAGES  query tiles in shared memory: with 2 the next tile is loaded while this one is computed
//   PINGPONG    1: the warpgroups take turns at the tensor cores
//   SPLIT       how many of the KEYS / 16 steps of PV are issued before the row maxima are taken
//   PACK        query heads of one key head whose queries share a tile
//   CUT         1: the last tiles' keys are shared out among CTAs
//   HAS_LEFT, HAS_RIGHT   1: the window bounds that side
//   SCORE_SIGN  factor of the scores: 1, or -1 or 0 where the scale is negative or zero
//   SINKS       1: each head has a logit beside those of the keys
//   MASK_METADATA      1: what rows see is data, see forward_bounds.cuh; the window bounds neither side then
//   SEGMENTS    1: so it is, and rows see keys of their own segment alone
//   SHARED_BYTES  dynamic shared memory of the launch
// and those of scores.cuh and dropout.cuh.
#pragma once
#include "parameters.cuh"
#include "ptx/descriptor.cuh"
#include "ptx/types.cuh"
#include "common/dropout.cuh"
#include "common/pipeline.cuh"

struct Traits {
    using Element = ELEMENT;
    static constexpr int head_dim = HEAD_DIM;
    static constexpr int value_dim = VALUE_DIM;
    static constexpr int consumers = CONSUMERS;
    static constexpr int rows = 64 * consumers;  // of a tile; row r holds query r / pack of head r % pack
    static constexpr int pack = PACK;
    static constexpr int keys = KEYS;
    static constexpr int stages = STAGES;
    static constexpr int query_stages = QUERY_STAGES;
    static constexpr bool pingpong = PINGPONG;
    static constexpr bool cut = CUT;
    static constexpr bool bounds = MASK_METADATA;
    static constexpr bool segments = SEGMENTS;
    static constexpr bool has_left = HAS_LEFT || bounds;  // sides that hide keys
    static constexpr bool has_right = HAS_RIGHT || bounds;
    static constexpr int score_sign = SCORE_SIGN;
    static constexpr bool sinks = SINKS;
    static constexpr bool dropout = has_dropout;

    static constexpr int value_steps = keys / 16;  // wgmmas of PV
    static constexpr int split = SPLIT;

    static constexpr int threads = 128 * (1 + consumers);
    // setmaxnreg: what is given to consumers has to fit the 64K registers of a multiprocessor.
    static constexpr int producer_registers = consumers == 3 ? 32 : 40;
    static constexpr int consumer_registers = consumers == 3 ? 160 : 232;
    static_assert(consumers == 1 || producer_registers + consumers * consumer_registers <= register_pool(threads),
                  "no warpgroup waits for registers that nobody has");

    static constexpr int key_panels = ceil_div(head_dim, descriptor::panel_columns);  // of Q, too
    static constexpr int value_panels = ceil_div(value_dim, descriptor::panel_columns);
    static constexpr int query_bytes = key_panels * descriptor::panel_bytes(rows);
    static constexpr int key_bytes = key_panels * descriptor::panel_bytes(keys);  // one stage
    static constexpr int value_bytes = value_panels * descriptor::panel_bytes(keys);
    static constexpr int staging_bytes = descriptor::panel_bytes(16);  // a warp's rows of the output
    // What the rows of a tile see, where it is data, comes with Q.
    static constexpr int row_keys_bytes = bounds ? rows * 8 : 0;
    static constexpr int row_segments_bytes = segments ? rows * 4 : 0;
    static constexpr int bounds_bytes = row_keys_bytes + row_segments_bytes;
    static constexpr int whole_bytes = bounds ? consumers * 8 : 0;
    // Dropout's words of a block's keys come with K. They are read until its probabilities are packed, after K is: by
    // the time at which K of the next block is, so that one stage more than K has needs no barriers of its own.
    static constexpr int word_stages = stages + 1;
    static constexpr int word_bytes = dropout ? keys * 4 : 0;

    static_assert(head_dim % 16 == 0 && head_dim <= 256, "wgmma contracts 16 columns at a time");
    static_assert(value_dim % 16 == 0 && value_dim <= 256, "rows are stored 16 columns at a time; N is at most 256");
    static_assert(keys % 16 == 0 && keys <= 256, "a block of keys is both N of QK^T and the contraction of PV");
    static_assert(consumers >= 1 && consumers <= 3, "a CTA has at most three consumer warpgroups' registers");
    static_assert(consumers > 1 || !pingpong, "one warpgroup has nobody to take turns with");
    static_assert(stages >= 2, "K of the next block is read while V of this one still is");
    static_assert(split >= 1 && split <= value_steps, "PV is issued on either side of the maxima, or all before");
    static_assert(!cut || !(has_left || has_right), "the cut tiles are taken to be of one length");
    static_assert(rows % pack == 0, "a query's heads are in one tile");
};

// A tile of rows and the key blocks [first, last) that they see.
struct Tile {
    int first_row;    // negative where there are no more tiles
    int head, batch;  // the first of its query heads
    int first, last;
    int cut;  // which of the cut tiles this is a piece of; negative for a whole one

    __device__ int count() const { return last - first; }
};

// How the last tiles are cut along their keys, so that all CTAs end together (stream-K, Osama et al.,
// arXiv:2301.03598). The blocks of all tiles from `whole_tiles` on lie in a row, of which each of the first `ctas`
// CTAs takes an equal share: parts of one tile or of several.
struct Cut {
    int whole_tiles, ctas;
    int tiles, tile_blocks;  // that are cut, and the blocks of each

    __device__ int begin(int cta) const { return min(cta, ctas) * (tiles * tile_blocks) / ctas; }
    __device__ int owner(int block) const { return ((block + 1) * ctas - 1) / (tiles * tile_blocks); }
};

// Byte offsets from the start of dynamic shared memory, and addresses of what lies there.
struct SharedMemory {
    unsigned char* data;
    uint32_t base;  // the address of `data`

    static constexpr int query = 0;
    static constexpr int key = query + Traits::query_stages * Traits::query_bytes;
    static constexpr int value = key + Traits::stages * Traits::key_bytes;
    static constexpr int staging = value + Traits::stages * Traits::value_bytes;
    static constexpr int first_word = staging + 4 * Traits::consumers * Traits::staging_bytes;
    static constexpr int bounds = first_word + Traits::word_stages * Traits::word_bytes;
    static constexpr int whole = bounds + Traits::query_stages * Traits::bounds_bytes;
    static constexpr int barriers = whole + Traits::query_stages * Traits::whole_bytes;
    static constexpr int tiles = barriers + 8 * (2 * Traits::query_stages + 4 * Traits::stages);
    static constexpr int least = tiles + static_cast<int>(sizeof(Tile)) * Traits::query_stages;
    static constexpr int bytes = least + 8;
    static_assert(bytes == SHARED_BYTES, "the plan and the kernel lay out the same shared memory");

    __device__ uint32_t query_tile(int stage) const { return base + query + stage * Traits::query_bytes; }
    // Which tile the Q in that stage belongs to; written before `query_full` completes.
    __device__ Tile& tile(int stage) const { return reinterpret_cast<Tile*>(data + tiles)[stage]; }
    __device__ uint32_t key_block(int stage) const { return base + key + stage * Traits::key_bytes; }
    __device__ uint32_t value_block(int stage) const { return base + value + stage * Traits::value_bytes; }
    // A consumer warp's own place to turn rows of accumulators into rows of memory.
    __device__ int staging_offset(int consumer_warp) const { return staging + consumer_warp * Traits::staging_bytes; }

    // Dropout's words of a block's keys: as an address for TMA, and in vectors, see `for_each_dropped`.
    __device__ static constexpr int words_offset(int stage) { return first_word + stage * Traits::word_bytes; }
    __device__ const uint4* words(int stage) const {
        return reinterpret_cast<const uint4*>(data + words_offset(stage));
    }

    // Of the Q in that stage, where it is data, as Bounds has them: the keys and the segment of each row, and, for each
    // warpgroup, the blocks that all of its rows see whole. Those are written as the tile is.
    __device__ static constexpr int row_keys_offset(int stage) { return bounds + stage * Traits::bounds_bytes; }
    __device__ static constexpr int row_segments_offset(int stage) {
        return row_keys_offset(stage) + Traits::row_keys_bytes;
    }
    __device__ const int2* row_keys(int stage) const {
        return reinterpret_cast<const int2*>(data + row_keys_offset(stage));
    }
    __device__ const int* row_segments(int stage) const {
        return reinterpret_cast<const int*>(data + row_segments_offset(stage));
    }
    __device__ int2* whole_blocks(int stage) const {
        return reinterpret_cast<int2*>(data + whole + stage * Traits::whole_bytes);
    }

    // Holds -inf, what maxima start from.
    __device__ float& least_score() const { return *reinterpret_cast<float*>(data + least); }

    __device__ uint32_t query_full(int stage) const { return base + barriers + 8 * stage; }
    __device__ uint32_t query_empty(int stage) const { return query_full(stage) + 8 * Traits::query_stages; }
    __device__ uint32_t key_full(int stage) const { return query_full(stage) + 16 * Traits::query_stages; }
    __device__ uint32_t key_empty(int stage) const { return key_full(stage) + 8 * Traits::stages; }
    __device__ uint32_t value_full(int stage) const { return key_full(stage) + 16 * Traits::stages; }
    __device__ uint32_t value_empty(int stage) const { return key_full(stage) + 24 * Traits::stages; }
};

// Scalars of the call.
struct Shape {
    int queries, keys;       // T, S
    int query_heads, group;  // N, N / K
    int batch, columns;      // B, V
    int left, right;         // the window, read only where Traits has that side
    MaskMetadata bounds;
};
