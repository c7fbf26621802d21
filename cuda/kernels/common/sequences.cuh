// The sequences of a call, and which of their keys and queries see each other under the window.
#pragma once
#include "parameters.cuh"
#include "common/mask_metadata.cuh"

// A sequence of a batch row. Tokens of padding belong to an empty one.
struct Sequence {
    int first_query, queries, first_key, keys;
    const int* shifts;  // of each part of the queries: by how many keys its diagonals are moved right; null: by none
    int part_queries;

    // The key on a query's diagonal. Alignment is to the bottom right.
    __device__ int diagonal(int query) const {
        return query - first_query + first_key + keys - queries + (shifts ? shifts[query / part_queries] : 0);
    }
    // The first query, among those of all `parts`, whose diagonal is at the key or right of it. It may lie outside of
    // the sequence.
    __device__ int first_query_from(int key, int parts) const {
        const int unshifted = key - first_key + first_query + queries - keys;
        for (int part = 0; part < parts; ++part) {
            const int query = max(unshifted - (shifts ? shifts[part] : 0), part * part_queries);
            if (query < (part + 1) * part_queries) return query;
        }
        return parts * part_queries;
    }
};

// The fields are described in jax_flash/cuda/mask_metadata_plan.py.
struct Sequences : SequenceOperands {
    __device__ Sequence of_query(int batch, int query) const { return of_token(query_offsets, batch, query); }
    __device__ Sequence of_key(int batch, int key) const { return of_token(key_offsets, batch, key); }

    // The keys that a query of the sequence sees.
    __device__ Interval keys_of(const Sequence& sequence, int query) const {
        const int diagonal = sequence.diagonal(query);
        return interval(query - sequence.first_query < sequence.queries, max(sequence.first_key, diagonal - left),
                        min(sequence.first_key + sequence.keys, diagonal + right + 1));
    }
    // The queries that see a key of the sequence.
    __device__ Interval queries_of(const Sequence& sequence, int key) const {
        const int begin = sequence.first_query_from(key - right, parts);
        const int end = sequence.first_query_from(key + left + 1, parts);
        return interval(key - sequence.first_key < sequence.keys, max(sequence.first_query, begin),
                        min(sequence.first_query + sequence.queries, end));
    }

private:
    __device__ static Interval interval(bool in_sequence, int begin, int end) {
        return in_sequence && begin < end ? Interval{begin, end} : empty_interval;
    }

    // The sequence of a token. `offsets` are those of queries or those of keys.
    __device__ Sequence of_token(const int* offsets, int batch, int token) const {
        const int* row_shifts = shifts ? shifts + static_cast<int64_t>(batch) * parts : nullptr;
        const int part_queries = queries / parts;
        if (offsets == nullptr) {
            return {0, query_lengths ? query_lengths[batch] : queries, 0, key_lengths ? key_lengths[batch] : keys,
                    row_shifts, part_queries};
        }
        const int64_t row = static_cast<int64_t>(batch) * (count + 1);
        // Binary search: the first offset beyond the token. The sequence that ends there is not empty.
        int next = 0;
        for (int end = count + 1; next < end;) {
            const int middle = (next + end) / 2;
            if (offsets[row + middle] <= token) {
                next = middle + 1;
            } else {
                end = middle;
            }
        }
        if (next == 0 || next > count) return {0, 0, 0, 0, row_shifts, part_queries};
        const int *query = query_offsets + row + next - 1, *key = key_offsets + row + next - 1;
        return {query[0], min(max(query[1] - query[0], 0), longest_query), key[0],
                min(max(key[1] - key[0], 0), longest_key), row_shifts, part_queries};
    }
};
