// Which keys queries see, and which queries see keys, where that is data: what the kernels that find it out before
// attention share (jax_flash/cuda/mask_metadata.py). The window, lengths and packed sequences give each query an interval of
// keys, and each key one of queries.
#pragma once
#include "ptx/types.cuh"
#include "ptx/warpgroup.cuh"

// Where an interval of nothing begins; it ends at 0.
constexpr int nowhere = 1 << 30;
constexpr uint32_t all_lanes = 0xffffffff;

// A sequence of a batch row. One that nothing is of has no tokens.
struct Sequence {
    int first_query, queries, first_key, keys;

    // The key that a query is aligned with, and the other way about: to the bottom right.
    __device__ int diagonal(int query) const { return query - first_query + first_key + keys - queries; }
    __device__ int aligned_query(int key) const { return key - first_key + first_query + queries - keys; }
};

// The sequences of a call: those that offsets tell apart, or else each batch row, with its lengths.
struct Sequences {
    const int *query_offsets, *key_offsets;  // (B, count + 1), ascending; or null
    const int *query_lengths, *key_lengths;  // (B); null: all of T or S
    int count;                               // in a batch row
    int longest_query, longest_key;          // what a packed sequence has beyond is padding
    int queries, keys;                       // T, S
    int left, right;                         // the window; T and S where it bounds nothing

    __device__ Sequence of_query(int batch, int query) const { return of_token(query_offsets, batch, query); }
    __device__ Sequence of_key(int batch, int key) const { return of_token(key_offsets, batch, key); }

    // The keys [x, y) of which a query of a sequence sees some.
    __device__ int2 keys_of(const Sequence& of, int query) const {
        const int diagonal = of.diagonal(query);
        return interval(query - of.first_query < of.queries, max(of.first_key, diagonal - left),
                        min(of.first_key + of.keys, diagonal + right + 1));
    }
    // The queries [x, y) of which some see a key of a sequence.
    __device__ int2 queries_of(const Sequence& of, int key) const {
        const int aligned = of.aligned_query(key);
        return interval(key - of.first_key < of.keys, max(of.first_query, aligned - right),
                        min(of.first_query + of.queries, aligned + left + 1));
    }

private:
    __device__ static int2 interval(bool there, int begin, int end) {
        return there && begin < end ? int2{begin, end} : int2{nowhere, 0};
    }

    // `own` are the offsets of the token's side.
    __device__ Sequence of_token(const int* own, int batch, int token) const {
        if (own == nullptr) {
            return {0, query_lengths ? query_lengths[batch] : queries, 0, key_lengths ? key_lengths[batch] : keys};
        }
        const int64_t row = static_cast<int64_t>(batch) * (count + 1);
        int behind = 0;  // the first offset behind the token, so that the sequence before is no empty one
        for (int end = count + 1; behind < end;) {
            const int middle = (behind + end) / 2;
            if (own[row + middle] <= token) {
                behind = middle + 1;
            } else {
                end = middle;
            }
        }
        if (behind == 0 || behind > count) return {0, 0, 0, 0};
        const int *of_query = query_offsets + row + behind - 1, *of_key = key_offsets + row + behind - 1;
        return {of_query[0], min(max(of_query[1] - of_query[0], 0), longest_query), of_key[0],
                min(max(of_key[1] - of_key[0], 0), longest_key)};
    }
};

// As parameters of a kernel, and what it makes of them.
#define SEQUENCES_PARAMETERS                                                                           \
    const int *__restrict__ query_offsets, const int *__restrict__ key_offsets,                        \
        const int *__restrict__ query_lengths, const int *__restrict__ key_lengths, int sequences,     \
        int longest_query, int longest_key, int queries, int keys, int left, int right
#define SEQUENCES                                                                                        \
    {                                                                                                    \
        query_offsets, key_offsets, query_lengths, key_lengths, sequences, longest_query, longest_key, queries, \
            keys, left, right                                                                            \
    }

// What the intervals of several positions have in common, and what all together.
struct Extent {
    int least_begin = nowhere, greatest_begin = 0, least_end = nowhere, greatest_end = 0;

    __device__ void add(int2 interval) {
        least_begin = min(least_begin, interval.x), greatest_begin = max(greatest_begin, interval.x);
        least_end = min(least_end, interval.y), greatest_end = max(greatest_end, interval.y);
    }
    // All lanes' in each.
    __device__ void gather() {
        least_begin = __reduce_min_sync(all_lanes, least_begin);
        greatest_begin = __reduce_max_sync(all_lanes, greatest_begin);
        least_end = __reduce_min_sync(all_lanes, least_end);
        greatest_end = __reduce_max_sync(all_lanes, greatest_end);
    }
    // The blocks [x, y) of `size` from the first to the last of which any sees some, and those that all see whole.
    __device__ int2 seen_blocks(int size) const {
        const int last = ceil_div(greatest_end, size);
        return {last > 0 ? least_begin / size : 0, last};
    }
    __device__ int2 whole_blocks(int size) const { return {ceil_div(greatest_begin, size), least_end / size}; }
};
