// How new keys, rotated, and new values get into the cache. Which kernel appends them is the plan's choice
// (`appends_itself` in jax_flash/cuda/sm90/decode_plan.py).
//
// Defines: ELEMENT, CACHE_ELEMENT, ROTARY, as in traits.cuh.
#pragma once
#include "parameters.cuh"
#include "ptx/math.cuh"
#include "common/constants.cuh"
#include "sm90/decode/descales.cuh"
#include "sm90/decode/rotary.cuh"
#include "sm90/decode/sequences.cuh"

// Columns of a chunk. A token's chunks, of one head, are those of its key and then those of its value.
constexpr int append_columns = 16 / sizeof(ELEMENT);

struct AppendCall {
    const Append& append;
    const Shape& shape;
    const Rotary& rotary;
    const Descales& descales;

    // Of one token and head.
    __device__ __forceinline__ int chunks() const { return (shape.head_dim + shape.value_dim) / append_columns; }
};

// Writes a chunk to chunk `index` of a row of the cache; to one in 8 bits divided by the descale of its head, which is
// among `descales`, and rounded. e4m3 has no infinity: what isn't finite becomes NaN.
__device__ __forceinline__ void write_chunk(const AppendCall& call, CACHE_ELEMENT* row, int index, uint4 chunk,
                                            const float* descales, int head) {
    if constexpr (is_same<ELEMENT, CACHE_ELEMENT>) {
        reinterpret_cast<uint4*>(row)[index] = chunk;
    } else {
        const float descale = descale_of(call.shape, call.descales, descales, head);
        const uint32_t pairs[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
        float x[append_columns];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = to_floats<ELEMENT>(pairs[i]);
            x[2 * i] = pair.x / descale;
            x[2 * i + 1] = pair.y / descale;
        }
#pragma unroll
        for (int i = 0; i < append_columns; ++i) {
            if (!(fabsf(x[i]) < infinity)) x[i] = float_nan;
        }
        reinterpret_cast<uint2*>(row)[index] = {convert_to_e4m3(x[0], x[1], x[2], x[3]),
                                                convert_to_e4m3(x[4], x[5], x[6], x[7])};
    }
}

// Copies a chunk of a new token to its place in the cache. A token without a place is dropped.
__device__ __forceinline__ void append_chunk(const AppendCall& call, int batch, int token, int head, int chunk) {
    const Shape& shape = call.shape;
    const Append& append = call.append;
    const int key_chunks = shape.head_dim / append_columns;
    const bool is_key = chunk < key_chunks;
    const int index = is_key ? chunk : chunk - key_chunks, columns = is_key ? shape.head_dim : shape.value_dim;
    const int64_t new_row = (static_cast<int64_t>(batch) * shape.appended + token) * shape.key_heads + head;
    const ELEMENT* const source = (is_key ? append.new_key : append.new_value) + new_row * columns;
    // Loaded ahead of the branches, so that lanes with keys and lanes with values load at once.
    uint4 copied = reinterpret_cast<const uint4*>(source)[index];
    const int position = length_before_append(shape, batch) + token;
    const int64_t row = row_of_key(shape, batch, sequence_at(shape, batch), position);
    if (row == no_row) return;
    if constexpr (ROTARY != no_rotary) {
        if (is_key) copied = rotated_chunk<ELEMENT, ROTARY>(source, index, call.rotary, position);
    }
    const int64_t heads = shape.key_heads * shape.head_step;  // of a row of the cache
    const int own_head = is_key ? key_head_of(shape, head) : value_head_of(shape, head);
    CACHE_ELEMENT* const to = (is_key ? append.key : append.value) + (row * heads + own_head) * columns;
    write_chunk(call, to, index, copied, is_key ? call.descales.key : call.descales.value, head);
}
