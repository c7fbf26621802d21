// Tiles of the decode kernel: what a CTA computes at a time, and where its rows are in the results.
#pragma once
#include "parameters.cuh"
#include "common/block_range.cuh"

// What a CTA does with its part of a tile if the other one of its pair has one, too: the second gives it, the first
// takes the other's (pair.cuh). Otherwise it is alone.
enum class InPair : int { alone, gives, takes };

// A tile, and the part of it that this CTA has: key blocks [first, last) of the cache. Row r of a sequence and key head
// is head r % group of query r / group.
struct Tile {
    static constexpr int no_more = -1;  // as batch: there are no more tiles

    int batch, key_head;
    int first_row, rows;       // the first row, and how many there are
    int first_query, queries;  // of the sequence: where its queries start among all, and how many it has
    int length, first_key;     // the sequence's keys are [first_key, length)
    int cache_row;             // which sequence of the cache it is; unused with pages
    int first, last;           // the part's blocks, counted from key 0; equal if there are none
    InPair in_pair;
    Interval keys;             // those that some row of the tile sees
    // The part as the schedule counts it, from the tile's first block. A tile counts one block at least.
    int counted_blocks;        // of the whole tile
    int part_begin, part_end;
    int sharers, index;        // how many share it (partials.cuh), and which this CTA is, or is in; not of clusters

    __device__ bool exists() const { return batch != no_more; }
};

// A row of a tile: one query of a head.
struct Row {
    int head, token;  // the query, among those of all sequences
    int query;        // … of its sequence

    __device__ __forceinline__ Row(const Shape& shape, const Tile& tile, int row) {
        const int index = tile.first_row + row;
        query = index / shape.group;
        head = tile.key_head * shape.group + index % shape.group;
        token = tile.first_query + query;
    }

    // Where the row is in the output (B, T, N, V), and in the log-sum-exp (B, N, T).
    __device__ __forceinline__ int64_t in_out(const Shape& shape) const {
        return (static_cast<int64_t>(token) * shape.query_heads + head) * shape.value_dim;
    }
    __device__ __forceinline__ int64_t in_lse(const Shape& shape) const {
        const int batch = token / shape.queries;  // 0 of varlen sequences
        const int64_t first = (static_cast<int64_t>(batch) * shape.query_heads + head) * shape.queries;
        return first + token % shape.queries;
    }
};
