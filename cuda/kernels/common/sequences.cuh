// The sequences that the tokens of a batch row belong to, and which keys and queries see each other in one.
#pragma once
#include "parameters.cuh"
#include "common/mask_metadata.cuh"

// A sequence of a batch row. One that nothing is of has no tokens.
struct Sequence {
    int first_query, queries, first_key, keys;

    // The key that a query is aligned with, and the other way about: to the bottom right.
    __device__ int diagonal(int query) const { return query - first_query + first_key + keys - queries; }
    __device__ int aligned_query(int key) const { return key - first_key + first_query + queries - keys; }
};

// The sequences of a call. Its fields are described in jax_flash/cuda/mask_metadata_plan.py.
struct Sequences : SequenceOperands {
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
