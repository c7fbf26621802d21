// Runs before the forward kernel if that attends to a key-value cache. Computes the mask metadata from the lengths,
// finds where each sequence's keys are, rotates the queries, and sets to 0 what the forward kernel counts in.
//
// Positions of keys are counted from the sequence's `KeyPlace`, so that the last block ends with the last key. With
// pages, blocks begin where pages do.
//
// If queries are packed, it also finds whose the slots are (slots.cuh).
//
// Defines: ELEMENT; ROTARY, as in sm90/decode/traits.cuh; TILE_GROUPS, groups of 64 rows in a tile of the forward
// kernel; BLOCK_KEYS, its KEYS; PACK_GQA, PAGE and PACKED, as there.
#include "parameters.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/global.cuh"
#include "ptx/warpgroup.cuh"
#include "common/mask_metadata.cuh"
#include "sm90/decode/rotary.cuh"
#include "sm90/decode/sequences.cuh"
#include "sm90/prefill/slots.cuh"

using Element = ELEMENT;
constexpr int threads = 128;
constexpr int chunk_elements = 16 / sizeof(Element);

// The key that block 0 starts at.
__device__ __forceinline__ int first_key_of(const Sequence& sequence) {
    if (PAGE) return 0;
    return sequence.length - ceil_div(sequence.length, BLOCK_KEYS) * BLOCK_KEYS;
}

#if PAGE
// Whether the cache lacks some page of the blocks `visited`, asked by a warp.
__device__ __forceinline__ bool misses_page(const Shape& shape, int batch, Interval visited) {
    const int* const pages = shape.page_table + static_cast<int64_t>(batch) * shape.table_pages;
    const int end = min(ceil_div(visited.end * BLOCK_KEYS, PAGE), shape.table_pages);
    bool misses = false;
#pragma unroll 4
    for (int i = visited.begin * BLOCK_KEYS / PAGE + threadIdx.x % 32; i < end; i += 32) {
        misses |= static_cast<uint32_t>(pages[i]) >= static_cast<uint32_t>(shape.cache_rows);
    }
    return __any_sync(all_lanes, misses);
}
#endif

// Where a group of rows is. Its queries come before `end_query`. Query q has diagonal number `first_diagonal` + q.
struct RowGroup {
    int batch, first_row, end_query;
    int64_t first_diagonal;
};
__device__ __forceinline__ RowGroup group_at(const Parameters& parameters, int64_t index) {
#if PACKED
    const int slot_index = static_cast<int>(index / TILE_GROUPS), group_of_tile = static_cast<int>(index % TILE_GROUPS);
    const QuerySlot slot = find_slot(parameters.shape, slot_index);
    if (group_of_tile == 0 && threadIdx.x % 32 == 0) parameters.slots[slot_index] = slot;
    const int first_row = slot.first_query * PACK_GQA + group_of_tile * group_rows;
    // Diagonals are numbered through all slots, as rows are.
    const int64_t first_diagonal = index * group_rows / PACK_GQA - first_row / PACK_GQA;
    return {slot.sequence, first_row, slot.first_query + slot.tokens, first_diagonal};
#else
    const int batch = static_cast<int>(index / parameters.groups), queries = parameters.shape.queries;
    const int first_row = static_cast<int>(index % parameters.groups) * group_rows;
    return {batch, first_row, queries, static_cast<int64_t>(batch) * queries};
#endif
}

// Mask metadata of a group of rows, by a warp. See FORWARD_PARAMETERS in jax_flash/cuda/mask_metadata.py.
__device__ __forceinline__ void write_group(const Parameters& parameters, int64_t index) {
    const Shape& shape = parameters.shape;
    const int lane = threadIdx.x % 32;
    const RowGroup group = group_at(parameters, index);
    const int batch = group.batch;
    const Sequence sequence = sequence_at(shape, batch);
    const int first_key = first_key_of(sequence);
    IntervalExtent extent;
#pragma unroll
    for (int row = lane; row < group_rows; row += 32) {
        const int query = (group.first_row + row) / PACK_GQA;
        // Rows beyond the last query count neither as seeing keys nor as not seeing them.
        Interval keys{0, 0};
        if (query < group.end_query) {
            keys = keys_of(shape, sequence, query);
            keys = {keys.begin - first_key, keys.end - first_key};
            const bool sees = sequence.is_there && keys.begin < keys.end;
            extent.add(sees ? keys : empty_interval);
            // `begin` is kept: that of a tile's first row says where the tile's keys begin (hidden_values.cuh).
            if (!sees) keys.end = 0;
            // All rows of a query write the same value.
            if (parameters.diagonals != nullptr) {
                parameters.diagonals[group.first_diagonal + query] = diagonal_of(sequence, query) - first_key;
            }
        }
        parameters.row_keys[index * group_rows + row] = keys;
    }
    extent.reduce();
    const Interval visited = extent.visited_blocks(BLOCK_KEYS);
    Interval full = extent.full_blocks(BLOCK_KEYS);
#if PAGE
    if (misses_page(shape, batch, visited)) full = {visited.begin, visited.begin};
#endif
    if (lane == 0) parameters.group_blocks[index] = {visited.begin, visited.end, full.begin, full.end};
}

// Chunk `index` of all queries (B, T, N, H), rotated.
__device__ __forceinline__ void rotate(const Parameters& parameters, int64_t index) {
    const Shape& shape = parameters.shape;
    const int chunks = shape.head_dim / chunk_elements;
    const int64_t row = index / chunks, token = row / shape.query_heads;
    const int batch = static_cast<int>(token / shape.queries), query = static_cast<int>(token % shape.queries);
    const Element* source = parameters.query + row * shape.head_dim;
    Element* to = parameters.rotated_query + row * shape.head_dim;
    const int chunk = static_cast<int>(index % chunks), length = sequence_at(shape, batch).length;
    reinterpret_cast<uint4*>(to)[chunk] =
        rotated_chunk<Element, ROTARY>(source, chunk, parameters.rotary,
                                       query_position(shape, batch, length, shape.queries, query));
}

extern "C" __global__ void __launch_bounds__(threads)
    prefill_preprocess(const __grid_constant__ Parameters parameters) {
    const Shape& shape = parameters.shape;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x;
    const int64_t stride = static_cast<int64_t>(gridDim.x) * threads;
    wait_for_previous_kernel();
    allow_next_kernel();
    if (first == 0 && parameters.next_tile != nullptr) *parameters.next_tile = 0;
#if PACKED
    if (first < 32) {
        const int slots = count_slots(shape);
        if (first == 0) *parameters.used_slots = slots;
    }
#endif
#pragma unroll 1
    for (int64_t batch = first; batch < shape.batch; batch += stride) {
        const Sequence sequence = sequence_at(shape, static_cast<int>(batch));
        const int row = PAGE ? layer_of(shape) : layer_of(shape) * shape.cache_rows + sequence.cache_row;
        parameters.key_places[batch] = {sequence.is_there ? row : 0, first_key_of(sequence)};
        if (PAGE) parameters.key_ends[batch] = sequence.length;
    }
    const int64_t groups = static_cast<int64_t>(PACKED ? 1 : shape.batch) * parameters.groups;
#pragma unroll 1
    for (int64_t group = first / 32; group < groups; group += stride / 32) write_group(parameters, group);
    if constexpr (ROTARY) {
        const int64_t rows = static_cast<int64_t>(shape.batch) * shape.queries * shape.query_heads;
        const int64_t chunks = rows * (shape.head_dim / chunk_elements);
#pragma unroll 1
        for (int64_t i = first; i < chunks; i += stride) rotate(parameters, i);
    }
    fence_global_for_async();  // the forward kernel reads queries by TMA, and metadata by bulk copies
}
