// The forward kernel's compile-time facts, in one struct, and its shared-memory map.
//
// Defines, all set by jax_flash/cuda/sm90/forward_plan.py:
//   ELEMENT        bfloat16, float16 or float8_e4m3fn
//   RESULT         of the output: ELEMENT, or float; of e4m3 any floats
//   HEAD_DIM       head dim of queries and keys, rounded up to a multiple of 32 bytes
//   VALUE_DIM      head dim of values and of the output, rounded up to a multiple of 16
//   CONSUMERS      consumer warpgroups; each computes 64 rows of the tile
//   KEYS           keys in a block
//   STAGES         blocks of keys, and of values, in flight
//   QUERY_STAGES   query tiles in shared memory: with 2 the next tile is loaded while this one is computed
//   PINGPONG       1: consumer warpgroups alternate on the tensor cores
//   EARLY_PV_STEPS how many of the steps of PV, of 32 bytes of keys each, are issued before the row maxima are computed
//   SUM_BLOCKS     see Traits::sum_blocks
//   PACK_GQA       query heads of one key head whose rows share a tile
//   SPLIT_KV       1: the keys of the last tiles are split among CTAs
//   ISOLATES       1: what isn't finite is kept from rows that don't see it (repeat.cuh)
//   HAS_LEFT, HAS_RIGHT   1: the window hides keys on that side
//   SCORE_SIGN     factor of the scores: 1, or -1 or 0 if the scale is negative or zero
//   SINKS          1: attention sinks
//   MASK_METADATA  1: which keys rows see is known only at run time, and includes the window (mask_metadata.cuh)
//   SEGMENTS       1: besides, rows see only keys of their own segment
//   CACHE          1: K and V are a key-value cache, and KeyPlace says where a batch row's keys are
//   HIDDEN_VALUES  1: CACHE, and values of keys before a tile's first visible one may be NaN (hidden_values.cuh)
//   PAGE           CACHE, in pages of so many keys (pages.cuh); 0: it has no pages
//   BOX            with pages, keys that one TMA copy loads
//   PACKED         1: CACHE, and queries of several sequences follow each other (packed_queries.cuh)
//   SHARED_BYTES   dynamic shared memory of the launch
// and those of common/score_mod.cuh, common/block_mask.cuh and common/dropout.cuh.
#pragma once
#include "parameters.cuh"
#include "ptx/descriptor.cuh"
#include "ptx/types.cuh"
#include "common/block_mask.cuh"
#include "common/block_range.cuh"
#include "common/dropout.cuh"
#include "common/pipeline.cuh"
#include "common/score_traits.cuh"

struct Traits {
    using Element = ELEMENT;
    using Result = RESULT;
    static constexpr bool wide_results = is_same<Result, float>;
    static constexpr int element_bytes = sizeof(Element);
    // e4m3: blocks of rows have scales (descales.cuh), and V is stored transposed, its keys permuted
    // (jax_flash/cuda/sm90/float8.py).
    static constexpr bool is_float8 = is_same<Element, float8_e4m3fn>;
    // What results of 16 bits are converted to.
    using OutElement = Either<is_float8, Either<wide_results, bfloat16, Result>::type, Element>::type;
    static constexpr int head_dim = HEAD_DIM;
    static constexpr int value_dim = VALUE_DIM;
    static constexpr int consumers = CONSUMERS;
    static constexpr int rows = 64 * consumers;  // of a tile
    static constexpr int pack_gqa = PACK_GQA;
    static constexpr int keys = KEYS;
    static constexpr int stages = STAGES;
    static constexpr int query_stages = QUERY_STAGES;
    static constexpr bool pingpong = PINGPONG;
    static constexpr bool split_kv = SPLIT_KV;
    static constexpr bool mask_metadata = MASK_METADATA;
    static constexpr bool segments = SEGMENTS;
    static constexpr bool block_mask = BLOCK_MASK > 0;
    static constexpr bool cache = CACHE;
    static constexpr bool hidden_values = HIDDEN_VALUES;
    static constexpr bool paged = PAGE > 0;
    static constexpr bool packed = PACKED;
    static constexpr bool has_left = HAS_LEFT || mask_metadata;  // sides that may hide keys
    static constexpr bool has_right = HAS_RIGHT || mask_metadata;
    static constexpr int score_sign = SCORE_SIGN;
    static constexpr bool sinks = SINKS;
    static constexpr bool dropout = has_dropout;
    // Whether a visited block may have hidden pairs. Values that aren't finite are then kept from rows that don't see
    // them (repeat.cuh). Elsewhere every row sees all of the tile's keys.
    static constexpr bool isolates = ISOLATES;

    static constexpr int step_elements = 32 / element_bytes;  // that one wgmma contracts
    static constexpr int key_steps = head_dim / step_elements;  // wgmmas of QK^T
    static constexpr int value_steps = keys / step_elements;    // … of PV
    static constexpr int early_pv_steps = EARLY_PV_STEPS;
    static constexpr int sum_blocks = SUM_BLOCKS;  // blocks whose PV wgmma sums by itself (out_sums.cuh); 0: all

    static constexpr int threads = 128 * (1 + consumers);
    // setmaxnreg: all warpgroups together have the 64K registers of a multiprocessor.
    static constexpr int producer_registers = consumers == 3 ? 32 : 40;
    static constexpr int consumer_registers = consumers == 3 ? 160 : 232;
    static_assert(consumers == 1 || producer_registers + consumers * consumer_registers <= register_pool(threads),
                  "no warpgroup waits for registers that nobody has");

    static constexpr int panel_columns = descriptor::row_bytes / element_bytes;
    static constexpr int key_panels = ceil_div(head_dim, panel_columns);  // of Q, too
    static constexpr int query_bytes = key_panels * descriptor::panel_bytes(rows);
    static constexpr int key_bytes = key_panels * descriptor::panel_bytes(keys);  // one stage
    // A panel of V^T has 128 keys of each column of V; or 64 of each of two columns, which are half of V apart.
    static constexpr int value_parts = is_float8 ? panel_columns / keys : 1;
    static constexpr int value_rows = is_float8 ? value_dim / value_parts : keys;
    static constexpr int value_panels = is_float8 ? 1 : ceil_div(value_dim, panel_columns);
    static constexpr int value_bytes = value_panels * descriptor::panel_bytes(value_rows);
    static constexpr int out_panel_columns = descriptor::row_bytes / 2;
    static constexpr int out_panels = ceil_div(value_dim, out_panel_columns);
    static constexpr int staging_bytes = descriptor::panel_bytes(16);  // a warp's rows of the output
    static constexpr int sum_bytes = sum_blocks > 0 ? 4 * rows * value_dim : 0;  // of the output, in float32
    // Mask metadata of a tile's rows, which is loaded with Q.
    static constexpr int row_keys_bytes = mask_metadata ? rows * sizeof(Interval) : 0;
    static constexpr int row_segments_bytes = segments ? rows * sizeof(int) : 0;
    static constexpr int row_mask_bytes = row_keys_bytes + row_segments_bytes;
    static constexpr int full_blocks_bytes = mask_metadata ? consumers * sizeof(Interval) : 0;
    // Dropout hashes of a block's keys, which are loaded with K. Consumers read them until the block's probabilities
    // are converted. By then they have released K, but not yet K of the next block. So the hashes need one stage more
    // than K, and no barriers of their own.
    static constexpr int hash_stages = stages + 1;
    static constexpr int hash_bytes = dropout ? keys * sizeof(uint32_t) : 0;

    static_assert(head_dim % step_elements == 0 && head_dim <= 256, "wgmma contracts 32 bytes of columns at a time");
    static_assert(value_dim % 16 == 0 && value_dim <= 256, "rows are stored 16 columns at a time; N is at most 256");
    static_assert(!is_float8 || keys == 128 || keys == 64, "a panel of V^T has one block of keys, of one descale");
    static_assert(!is_float8 || !(isolates || cache), "values are finite, and V^T is made before the launch");
    static_assert(keys % 16 == 0 && keys <= 256, "a block of keys is both N of QK^T and the contraction of PV");
    static_assert(consumers >= 1 && consumers <= 3, "a CTA has at most three consumer warpgroups' registers");
    static_assert(consumers > 1 || !pingpong, "one warpgroup has none to alternate with");
    static_assert(stages >= 2, "K of the next block is read while V of this one still is");
    static_assert(early_pv_steps >= 1 && early_pv_steps <= value_steps,
                  "some steps of PV are issued before the maxima, and the rest after");
    static_assert(!split_kv || !(has_left || has_right), "split tiles are assumed to be of one length");
    static_assert(rows % pack_gqa == 0, "all heads of a query are in one tile");
    static_assert(!cache || (mask_metadata && !dropout), "a cache's lengths are data; hashes are of batch rows");
    static_assert(cache || !hidden_values, "only the metadata of caches says where a tile's keys begin");
    static_assert(cache || !(paged || packed), "only caches have pages, and slots of queries");
};

// A tile of rows, and the key blocks [first, last) that it visits. It is skipped if there are none.
struct Tile {
    static constexpr int no_more = -1;    // as first_row: there are no more tiles
    static constexpr int not_split = -1;  // as split_tile

    int first_row;
    int head, batch;  // the first of its query heads
    int first, last;
    int split_tile;  // the split tile that this is a part of

    __device__ bool exists() const { return first_row >= 0; }
    __device__ bool is_split() const { return split_tile >= 0; }
    __device__ int count() const { return last - first; }
};
constexpr Tile no_more_tiles{Tile::no_more, 0, 0, 0, 0, Tile::not_split};

// Split-KV: the last tiles, which don't fill a wave, are split along their keys so that all CTAs end together
// (stream-K, Osama et al., arXiv:2301.03598). The blocks of all tiles from `whole_tiles` on form one sequence, of which
// each of the first `ctas` CTAs takes an equal share: parts of one tile or of several.
struct SplitKV {
    int whole_tiles, ctas;
    int tiles, tile_blocks;  // split tiles, and blocks of each

    __device__ int begin(int cta) const { return min(cta, ctas) * (tiles * tile_blocks) / ctas; }
    __device__ int owner(int block) const { return ((block + 1) * ctas - 1) / (tiles * tile_blocks); }
};

// What a CTA has noted of the tiles that it will compute again (repeat.cuh).
struct Repeats {
    static constexpr int none = -1;  // as first_tile, and as the last tile's next

    int first_tile;   // a list of whole tiles: the number of the first
    int split_tiles;  // 1: there are split tiles, too
    int under_way;    // 1: all tiles have been computed once
    uint32_t landed_parity;  // of `block_landed`: of the phase that is next

    __device__ bool any() const { return first_tile != none || split_tiles != 0; }
};

// Where a role is in the rings of shared-memory stages. Both are at the same place when all tiles have been computed.
struct Rings {
    PipelineState<Traits::stages> key, value;
    PipelineState<Traits::query_stages> query;
    PipelineState<Traits::hash_stages> hash;
};

// Byte offsets from the start of dynamic shared memory, and addresses of what lies there.
struct SharedMemory {
    unsigned char* data;
    uint32_t base;  // the address of `data`

    static constexpr int query = 0;
    static constexpr int key = query + Traits::query_stages * Traits::query_bytes;
    static constexpr int value = key + Traits::stages * Traits::key_bytes;
    static constexpr int sums = value + Traits::stages * Traits::value_bytes;
    static constexpr int staging = sums + Traits::sum_bytes;
    static constexpr int first_key_hash = staging + 4 * Traits::consumers * Traits::staging_bytes;
    static constexpr int row_mask = first_key_hash + Traits::hash_stages * Traits::hash_bytes;
    static constexpr int full = row_mask + Traits::query_stages * Traits::row_mask_bytes;
    static constexpr int barriers = full + Traits::query_stages * Traits::full_blocks_bytes;
    static constexpr int tiles = barriers + 8 * (2 * Traits::query_stages + 4 * Traits::stages);
    static constexpr int least = tiles + static_cast<int>(sizeof(Tile)) * Traits::query_stages;
    static constexpr int repeat_barriers = least + 8;
    static constexpr int noted = repeat_barriers + 16;
    static constexpr int rings = noted + static_cast<int>(sizeof(Repeats));
    static constexpr int bytes = Traits::isolates ? rings + static_cast<int>(sizeof(Rings)) : repeat_barriers;
    static_assert(bytes == SHARED_BYTES, "the plan and the kernel lay out the same shared memory");

    __device__ uint32_t query_tile(int stage) const { return base + query + stage * Traits::query_bytes; }
    // The tile whose Q is in that stage; written before `query_full` completes.
    __device__ Tile& tile(int stage) const { return reinterpret_cast<Tile*>(data + tiles)[stage]; }
    __device__ uint32_t key_block(int stage) const { return base + key + stage * Traits::key_bytes; }
    __device__ uint32_t value_block(int stage) const { return base + value + stage * Traits::value_bytes; }
    // Vector `index` of a consumer thread's own sums.
    __device__ float4& sum(int index) const {
        return reinterpret_cast<float4*>(data + sums)[index * 128 * Traits::consumers + threadIdx.x - 128];
    }
    // A consumer warp's own staging buffer for rows of the output.
    __device__ int staging_offset(int consumer_warp) const { return staging + consumer_warp * Traits::staging_bytes; }

    // Dropout hashes of a block's keys: as an address for TMA, and as the vectors that `for_each_dropped` reads.
    __device__ static constexpr int key_hashes_offset(int stage) { return first_key_hash + stage * Traits::hash_bytes; }
    __device__ const uint4* key_hashes(int stage) const {
        return reinterpret_cast<const uint4*>(data + key_hashes_offset(stage));
    }

    // Mask metadata of the Q in that stage: which keys each row sees, the segment of each row, and the blocks that are
    // full for each warpgroup. The last are written as the tile is.
    __device__ static constexpr int row_keys_offset(int stage) { return row_mask + stage * Traits::row_mask_bytes; }
    __device__ static constexpr int row_segments_offset(int stage) {
        return row_keys_offset(stage) + Traits::row_keys_bytes;
    }
    __device__ const Interval* row_keys(int stage) const {
        return reinterpret_cast<const Interval*>(data + row_keys_offset(stage));
    }
    __device__ const int* row_segments(int stage) const {
        return reinterpret_cast<const int*>(data + row_segments_offset(stage));
    }
    __device__ Interval* full_blocks(int stage) const {
        return reinterpret_cast<Interval*>(data + full + stage * Traits::full_blocks_bytes);
    }

    // Holds -inf, which maxima start from (OnlineSoftmax::update_max).
    __device__ float& least_score() const { return *reinterpret_cast<float*>(data + least); }

    __device__ Repeats& repeats() const { return *reinterpret_cast<Repeats*>(data + noted); }
    // Where repeats begin in the rings, and then where they are.
    __device__ Rings& rings_of_repeats() const { return *reinterpret_cast<Rings*>(data + rings); }
    // Completes when all consumer warps have computed all tiles once …
    __device__ uint32_t all_computed() const { return base + repeat_barriers; }
    // … and when K and V of a block of a repeated tile have landed.
    __device__ uint32_t block_landed() const { return base + repeat_barriers + 8; }

    __device__ uint32_t query_full(int stage) const { return base + barriers + 8 * stage; }
    __device__ uint32_t query_empty(int stage) const { return query_full(stage) + 8 * Traits::query_stages; }
    __device__ uint32_t key_full(int stage) const { return query_full(stage) + 16 * Traits::query_stages; }
    __device__ uint32_t key_empty(int stage) const { return key_full(stage) + 8 * Traits::stages; }
    __device__ uint32_t value_full(int stage) const { return key_full(stage) + 16 * Traits::stages; }
    __device__ uint32_t value_empty(int stage) const { return key_full(stage) + 24 * Traits::stages; }
};

// Sizes of the call.
struct Shape {
    int queries, keys;       // T, S
    int query_heads, group;  // N, N / K
    int batch, columns;      // B, V
    int left, right;         // the window; read only if Traits has that side
    MaskMetadata mask_metadata;
#if BLOCK_MASK
    BlockMask block_mask;
#endif
#if PAGE
    PageTable page_table;
#endif
#if PACKED
    PackedQueries packed;
#endif
};
