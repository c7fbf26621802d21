// What the main backward kernel is told of a call besides its operands.
#pragma once
#include "parameters.cuh"
#include "sm90/backward/traits.cuh"

// Sizes of the call. A side of the window that is not bounded is so large that it never bounds.
struct Shape {
    int queries, keys;      // T, S
    int key_heads, group;   // K, N / K
    int batch;              // B
    int left, right;        // the window
    MaskMetadata mask_metadata;  // of a call with MASK_METADATA

    __device__ int query_heads() const { return key_heads * group; }
    __device__ int key_tiles() const { return ceil_div(keys, Traits::keys); }
    __device__ int query_blocks() const { return ceil_div(queries, Traits::queries); }
    __device__ int spans() const { return ceil_div(query_blocks(), DqBlock::span); }  // of a head
    __device__ int diagonal() const { return keys - queries; }  // query i is aligned with key i + diagonal
};
