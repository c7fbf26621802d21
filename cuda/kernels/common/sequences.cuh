// The sequences of a call, and which of their keys and queries see each other under the window.
#pragma once
#include "parameters.cuh"
#include "common/mask_metadata.cuh"

// A sequence of a batch row. Tokens of padding belong to an empty one.
struct Sequence {
    int first_query, queries, first_key, keys;
    int shift;  // by how many keys every diagonal lies further to the right

    // Alignment is to the bottom right: the key on a query's diagonal, and the query on whose diagonal a key is.
    __device__ int diagonal(int query) const { return query - first_query + first_key + keys - queries + shift; }
    __device__ int aligned_query(int key) const { return key - first_key + first_query + queries - keys - shift; }
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
        const int aligned = sequence.aligned_query(key);
        return interval(key - sequence.first_key < sequence.keys, max(sequence.first_query, aligned - right),
                        min(sequence.first_query + sequence.queries, aligned + left + 1));
    }

private:
    __device__ static Interval interval(bool in_sequence, int begin, int end) {
        return in_sequence && begin < end ? Interval{begin, end} : empty_interval;
    }

    // The sequence of a token. `offsets` are those of queries or those of keys.
    __device__ Sequence of_token(const int* offsets, int batch, int token) const {
        const int shift = shifts ? shifts[batch] : 0;
        if (offsets == nullptr) {
            return {0, query_lengths ? query_lengths[batch] : queries, 0, key_lengths ? key_lengths[batch] : keys,
                    shift};
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
        if (next == 0 || next > count) return {0, 0, 0, 0, shift};
        const int *query = query_offsets + row + next - 1, *key = key_offsets + row + next - 1;
        return {query[0], min(max(query[1] - query[0], 0), longest_query), key[0],
                min(max(key[1] - key[0], 0), longest_key), shift};
    }
};
