// The sequences of a call: their lengths and queries, and where their keys are in the cache. Shape, a part of the
// kernels' parameters, is described in jax_flash/cuda/sm90/decode_plan.py.
#pragma once
#include "parameters.cuh"
#include "common/block_range.cuh"

struct Sequence {
    int first_query, queries;  // its queries, among those of all sequences
    int length, first_key;     // its keys are [first_key, length), those included that the call appends
    int cache_row;             // which sequence of the cache it is; unused with pages
    bool is_there;             // in the cache
};

// The layer that the call uses, and whether the cache has it.
__device__ __forceinline__ int layer_of(const Shape& shape) { return shape.layer ? *shape.layer : 0; }
__device__ __forceinline__ bool has_layer(const Shape& shape) {
    return static_cast<uint32_t>(layer_of(shape)) < static_cast<uint32_t>(shape.layers);
}

// The layer that the call uses; the first or the last one if the cache lacks it.
__device__ __forceinline__ int nearest_layer(const Shape& shape) {
    return min(max(layer_of(shape), 0), shape.layers - 1);
}

// The keys that a sequence has before the call appends. Lengths may be any numbers.
__device__ __forceinline__ int length_before_append(const Shape& shape, int batch) {
    const int* const lengths = shape.lengths + static_cast<int64_t>(nearest_layer(shape)) * shape.lengths_stride;
    return min(max(lengths[batch], 0), shape.capacity);
}

// How many queries a sequence has, if queries are packed; 0 if another kernel takes them.
__device__ __forceinline__ int packed_queries(const Shape& shape, int batch) {
    const int queries = shape.query_offsets[batch + 1] - shape.query_offsets[batch];
    return shape.least_queries <= queries && queries <= shape.most_queries ? queries : 0;
}

__device__ __forceinline__ Sequence sequence_at(const Shape& shape, int batch) {
    Sequence sequence;
    sequence.first_query = shape.query_offsets ? shape.query_offsets[batch] : batch * shape.queries;
    sequence.queries = shape.query_offsets ? packed_queries(shape, batch) : shape.queries;
    sequence.length = min(length_before_append(shape, batch) + shape.appended, shape.capacity);
    sequence.first_key = shape.left_padding ? max(shape.left_padding[batch], 0) : 0;
    sequence.cache_row = shape.batch_index ? shape.batch_index[batch] : batch;
    const bool has_row = static_cast<uint32_t>(sequence.cache_row) < static_cast<uint32_t>(shape.cache_rows);
    sequence.is_there = has_layer(shape) && (shape.page_table || has_row);
    return sequence;
}

// The page that a key is on, which may be none of the cache's.
__device__ __forceinline__ int page_of(const Shape& shape, int batch, int key) {
    return shape.page_table[static_cast<int64_t>(batch) * shape.table_pages + key / shape.page];
}

constexpr int64_t no_row = -1;

// The row of the cache, of all layers, that key `key` on page `page` is; `no_row` if the cache lacks the page.
__device__ __forceinline__ int64_t row_on_page(const Shape& shape, int page, int key) {
    if (static_cast<uint32_t>(page) >= static_cast<uint32_t>(shape.cache_rows)) return no_row;
    const int64_t first = static_cast<int64_t>(layer_of(shape)) * shape.cache_rows + page;
    return first * shape.page + key % shape.page;
}

// The row of the cache, of all layers, that holds a key of a sequence; `no_row` where it has no place.
__device__ __forceinline__ int64_t row_of_key(const Shape& shape, int batch, const Sequence& sequence, int key) {
    if (!sequence.is_there || static_cast<uint32_t>(key) >= static_cast<uint32_t>(shape.capacity)) return no_row;
    if (shape.page_table) return row_on_page(shape, page_of(shape, batch, key), key);
    const int64_t first = static_cast<int64_t>(layer_of(shape)) * shape.cache_rows + sequence.cache_row;
    return first * shape.capacity + key;
}

// Indices, among the heads of a row of the cache, of a key head's keys and of its values. Pages that hold both
// alternate them.
__device__ __forceinline__ int key_head_of(const Shape& shape, int head) { return head * shape.head_step; }
__device__ __forceinline__ int value_head_of(const Shape& shape, int head) {
    return head * shape.head_step + shape.head_step - 1;
}

// The key on a query's diagonal: the last query is aligned with the last key.
__device__ __forceinline__ int diagonal_of(const Sequence& sequence, int query) {
    return query + sequence.length - sequence.queries;
}

// From where the positions count at which queries are rotated (`QueryPositions` in jax_flash/_cache_spec.py).
enum QueryBase { own_position = 0, length_before = 1 };

// The position at which query `query` of a sequence is rotated. The sequence has `length` keys and `queries` queries.
__device__ __forceinline__ int query_position(const Shape& shape, int batch, int length, int queries, int query) {
    const int before = shape.query_base == own_position ? length - queries : length_before_append(shape, batch);
    return before + query * shape.query_step;
}

// The keys that a query sees. Where there are none, `begin` may be beyond `end`.
__device__ __forceinline__ Interval keys_of(const Shape& shape, const Sequence& sequence, int query) {
    const int diagonal = diagonal_of(sequence, query);
    return {max(sequence.first_key, diagonal - shape.left), min(sequence.length, diagonal + shape.right + 1)};
}
