// The decode kernel's compile-time facts, in one struct, and its shared-memory map.
//
// Defines, all set by jax_flash/cuda/sm90/decode_plan.py:
//   ELEMENT        of queries and the output: bfloat16 or float16
//   CACHE_ELEMENT  of the cache: ELEMENT, or float8_e4m3fn
//   HEAD_DIM       head dim of queries and keys, rounded up to a multiple of 16
//   VALUE_DIM      head dim of values and of the output, likewise
//   KEYS           keys in a block
//   STAGES         blocks of keys and values in flight
//   QUERY_ROWS     rows that tiles have at most: 8, 16, 32 or 64
//   CTAS_OF_SM     CTAs that share a multiprocessor
//   PAGED          1: the cache consists of pages
//   QUERY_TMA      1: each key head of a sequence has one tile, and Q comes by TMA; 0: threads copy it
//   PLAIN          1: tiles of a sequence are alike, and there are no packed queries, left padding or batch index
//   BOX            keys that one TMA copy loads: KEYS, or a page if that is smaller; 0: threads gather the rows
//   SPLIT          1: CTAs may share a tile
//   PAIRS          1: CTAs form pairs, whose parts of a tile become one (pair.cuh)
//   CLUSTER        CTAs of a cluster, which share one tile (cluster_parts.cuh); 1: there are no such clusters
//   PARTIALS_APART 1: what its CTAs store in each other has memory of its own; 0: it lies where blocks were
//   SOFT_CAP, ALIBI, SCORE_MOD   1: the call has it
//   APPENDS        1: the producer appends what the call appends (appended_keys.cuh); 0: append.cu does
//   ROTARY         0: none; 1: rotated pairs are half of the columns apart; 2: they are neighbours
//   SHARED_BYTES   dynamic shared memory of the launch
#pragma once
#include "parameters.cuh"
#include "ptx/descriptor.cuh"
#include "ptx/types.cuh"
#include "common/pipeline.cuh"
#include "sm90/decode/tile.cuh"

// The first number from `least` on that divides `whole` or is a multiple of it.
__device__ constexpr int whole_units(int least, int whole) {
    while (whole % least != 0 && least % whole != 0) ++least;
    return least;
}

struct Traits {
    using Element = ELEMENT;
    using CacheElement = CACHE_ELEMENT;
    static constexpr bool is_float8 = !is_same<Element, CacheElement>;  // the cache is
    static constexpr int head_dim = HEAD_DIM;
    static constexpr int value_dim = VALUE_DIM;
    static constexpr int rows = 64;  // of a tile: those of a warpgroup's wgmma …
    static constexpr int query_rows = QUERY_ROWS;  // … of which so many are in use, at most
    static constexpr int keys = KEYS;
    static constexpr int stages = STAGES;
    static constexpr int ctas_of_sm = CTAS_OF_SM;
    static constexpr bool paged = PAGED;
    static constexpr bool plain = PLAIN;
    static constexpr bool query_by_tma = QUERY_TMA;
    using Query = Either<query_by_tma, TensorMap, const Element*>::type;
    static constexpr bool gathers = BOX == 0;
    static constexpr int boxes = gathers ? 0 : KEYS / (BOX ? BOX : KEYS);  // of a block
    static constexpr bool split = SPLIT, pairs = PAIRS;
    static constexpr int cluster = CLUSTER;
    static constexpr bool partials_apart = PARTIALS_APART;
    static constexpr bool soft_cap = SOFT_CAP, alibi = ALIBI;
    // Whether logits are natural; otherwise they are in base 2.
    static constexpr bool natural = soft_cap || alibi || SCORE_MOD;
    static constexpr bool appends = APPENDS;
    static constexpr bool rotary = ROTARY != 0;

    static constexpr int key_steps = head_dim / 16;  // wgmmas of QK^T
    static constexpr int value_steps = keys / 16;    // … of PV

    static constexpr int consumer_threads = 128;
    static constexpr int producer_threads = gathers ? keys : 32;
    static constexpr int threads = consumer_threads + producer_threads;
    // From the producer, at a stage's barriers and at a tile's.
    static constexpr int value_arrivals = gathers ? producer_threads : boxes;
    static constexpr int key_arrivals = value_arrivals + gathers;  // one tells which keys are missing
    static constexpr int tile_arrivals = query_by_tma ? 1 : producer_threads + 1;

    static constexpr int key_panels = ceil_div(head_dim, descriptor::panel_columns);  // of Q, too
    static constexpr int value_panels = ceil_div(value_dim, descriptor::panel_columns);
    static constexpr int query_bytes = key_panels * descriptor::panel_bytes(query_rows);
    // What wgmma reads of a block. It is what the producer loaded, or what consumers made of that, if it is in 8 bits.
    static constexpr int key_operand_bytes = key_panels * descriptor::panel_bytes(keys);
    static constexpr int value_operand_bytes = value_panels * descriptor::panel_bytes(keys);
    // A stage: panels as the producer loads them, which are 128 bytes wide. Blocks in 8 bits need half as many.
    static constexpr int panel_columns = descriptor::row_bytes / static_cast<int>(sizeof(CacheElement));
    static constexpr int key_bytes = ceil_div(head_dim, panel_columns) * descriptor::panel_bytes(keys);
    static constexpr int value_bytes = ceil_div(value_dim, panel_columns) * descriptor::panel_bytes(keys);
    // Caches in 8 bits and tiles of few rows: each warp attends to keys of its own (warp_tile.cuh).
    static constexpr bool by_warps = is_float8 && query_rows <= 16;
    static constexpr bool widens = is_float8 && !by_warps;  // blocks, in shared memory (widen.cuh)
    static constexpr int warp_row_floats = value_dim + 8;   // of what a warp makes of a row, so that banks differ
    static constexpr int warp_parts_bytes = by_warps ? 4 * query_rows * (8 + 4 * warp_row_floats) : 0;
    // What CTAs store in each other consists of chunks, of which each lane has 16 bytes.
    static constexpr int chunk_bytes = 32 * 16;
    // What a CTA of a pair gives to the other (pair.cuh): so many chunks of each eight rows.
    static constexpr int pair_chunks = value_dim / 16 + 1;
    static constexpr int pair_bytes = pairs ? query_rows / 8 * pair_chunks * chunk_bytes : 0;
    // What the CTAs of a cluster store in one of them (cluster_parts.cuh).
    static constexpr int row_units = value_dim / 16, units = query_rows / 8 * row_units;
    static constexpr int own_units = whole_units(ceil_div(units, cluster), row_units);
    static constexpr int own_groups = ceil_div(own_units, row_units);
    static constexpr int cluster_bytes = cluster > 1 ? cluster * (own_units + own_groups) * chunk_bytes : 0;
    static constexpr int partials_bytes = pair_bytes + (partials_apart ? cluster_bytes : 0);
    static constexpr int tile_stages = 2;
    // Q is copied to where wgmma reads it. Q that is to be rotated comes to plain rows first, and consumers
    // rotate it on its way to its one place.
    static constexpr int query_tiles = rotary ? 1 : tile_stages;
    static constexpr int plain_query_bytes = rotary ? query_rows * head_dim * 2 : 0;

    static_assert(head_dim % 16 == 0 && head_dim <= 256, "wgmma contracts 16 columns at a time");
    static_assert(value_dim % 16 == 0 && value_dim <= 256, "N of PV is at most 256");
    static_assert(keys == 64 || keys == 128, "a thread of the warpgroup looks after each key of a block");
    static_assert(!by_warps || keys == 64, "each of four warps attends to 16 keys of a block");
    static_assert(query_rows % 8 == 0 && query_rows <= rows, "panels of Q consist of the swizzle's atoms");
    static_assert(gathers || KEYS % (BOX ? BOX : 1) == 0, "boxes fill a block");
    static_assert(boxes <= 32, "each lane of the producer warp copies one box");
    static_assert(!appends || !gathers, "one warp appends and loads");
    static_assert(!split || cluster == 1, "CTAs that share tiles through global memory don't share them in clusters");
    static_assert(!pairs || split, "CTAs that share no tiles form no pairs");
    static_assert(partials_apart || cluster_bytes <= stages * (key_bytes + value_bytes),
                  "partials fit where the blocks were");
    static_assert(!partials_apart || cluster > 1, "CTAs without clusters store nothing in each other");
};

// Byte offsets from the start of dynamic shared memory, and addresses of what lies there.
struct SharedMemory {
    unsigned char* data;
    uint32_t base;  // the address of `data`

    static constexpr int query = 0;
    static constexpr int widened_key = query + Traits::query_tiles * Traits::query_bytes;  // of a cache in 8 bits
    static constexpr int widened_value = widened_key + (Traits::widens ? Traits::key_operand_bytes : 0);
    static constexpr int key = widened_value + (Traits::widens ? Traits::value_operand_bytes : 0);
    static constexpr int value = key + Traits::stages * Traits::key_bytes;
    static constexpr int gathered_rows = value + Traits::stages * Traits::value_bytes;
    static constexpr int plain_query = gathered_rows + (Traits::gathers ? 8 * Traits::stages * Traits::keys : 0);
    static constexpr int tiles = plain_query + Traits::tile_stages * Traits::plain_query_bytes;
    static constexpr int warp_parts = tiles + Traits::tile_stages * static_cast<int>(sizeof(Tile));
    // Partials that other CTAs of the pair or cluster store here.
    static constexpr int partials_place = warp_parts + Traits::warp_parts_bytes;
    static constexpr int partials = Traits::cluster == 1 || Traits::partials_apart ? partials_place : key;
    static constexpr int missing = partials_place + Traits::partials_bytes;
    static constexpr int missing_keys = missing + (Traits::paged ? 16 * Traits::stages : 0);
    static constexpr int barriers = missing_keys + (Traits::paged ? Traits::stages * Traits::keys : 0);
    static constexpr bool receives = Traits::pairs || Traits::cluster > 1;  // partials of other CTAs
    static constexpr int bytes = barriers + 8 * (3 * Traits::stages + 2 * Traits::tile_stages + receives);
    static_assert(bytes == SHARED_BYTES, "the plan and the kernel lay out the same shared memory");

    __device__ uint32_t query_tile(int tile_stage) const {
        return base + query + (Traits::rotary ? 0 : tile_stage * Traits::query_bytes);
    }
    // Where 16-byte chunk `chunk` of row `row` of Q is put.
    __device__ uint32_t query_chunk(int tile_stage, int row, int chunk) const {
        if constexpr (Traits::rotary) {
            return base + plain_query + tile_stage * Traits::plain_query_bytes + row * Traits::head_dim * 2 +
                   16 * chunk;
        } else {
            const int panel = chunk / 8 * descriptor::panel_bytes(Traits::query_rows);
            return query_tile(tile_stage) + panel + descriptor::swizzled_offset(row, chunk % 8);
        }
    }
    __device__ const Traits::Element* plain_row(int tile_stage, int row) const {
        const unsigned char* rows = data + plain_query + tile_stage * Traits::plain_query_bytes;
        return reinterpret_cast<const Traits::Element*>(rows) + row * Traits::head_dim;
    }
    // Where the producer puts a block …
    __device__ static int key_block(int stage) { return key + stage * Traits::key_bytes; }
    __device__ static int value_block(int stage) { return value + stage * Traits::value_bytes; }
    // … and where wgmma reads it.
    __device__ static int key_operand(int stage) { return Traits::widens ? widened_key : key_block(stage); }
    __device__ static int value_operand(int stage) { return Traits::widens ? widened_value : value_block(stage); }
    // A row, of float32, and the maximum and sum of its softmax, as a warp leaves them for another.
    __device__ float* warp_row(int warp, int row) const {
        return reinterpret_cast<float*>(data + warp_parts) +
               (warp * Traits::query_rows + row) * Traits::warp_row_floats;
    }
    __device__ float2& warp_statistics(int warp, int row) const {
        return reinterpret_cast<float2*>(warp_row(4, 0))[warp * Traits::query_rows + row];
    }
    // Of gathered blocks: which row of the cache each key is; -1: none.
    __device__ int64_t* cache_rows(int stage) const {
        return reinterpret_cast<int64_t*>(data + gathered_rows) + stage * Traits::keys;
    }
    __device__ Tile& tile(int stage) const { return reinterpret_cast<Tile*>(data + tiles)[stage]; }
    // With pages: whether keys of the block are missing, as four words, as each warp that gathers writes words of its
    // own; nonzero: some key is missing …
    __device__ uint4& has_missing(int stage) const { return reinterpret_cast<uint4*>(data + missing)[stage]; }
    // … and a byte for each key, 1 if it is missing. By TMA they are written only if some key is missing.
    __device__ unsigned char* is_missing(int stage) const { return data + missing_keys + stage * Traits::keys; }

    __device__ uint32_t key_full(int stage) const { return base + barriers + 8 * stage; }
    __device__ uint32_t value_full(int stage) const { return key_full(stage) + 8 * Traits::stages; }
    __device__ uint32_t empty(int stage) const { return key_full(stage) + 16 * Traits::stages; }
    __device__ uint32_t tile_full(int stage) const { return key_full(stage) + 24 * Traits::stages; }
    __device__ uint32_t tile_empty(int stage) const { return tile_full(stage) + 8 * Traits::tile_stages; }
    __device__ uint32_t partials_full() const { return tile_full(0) + 16 * Traits::tile_stages; }
};
