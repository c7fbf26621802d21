// Writes dK and dV of key tiles that are one unit's: 16-bit rows by way of shared memory, or with WIDE_KEY_GRADIENTS
// float32 rows straight from registers, as four lanes have 32 bytes of a row, a sector of memory.
#pragma once
#include "sm90/backward/call.cuh"
#include "sm90/backward/products.cuh"

// Writes a warpgroup's gradient of the 64 keys from `first_key` on to float32 rows (B, S, K, columns).
template <int count>
__device__ __forceinline__ void store_wide(const Call& call, const float (&gradient)[count], float factor, float* rows,
                                           int columns, const KeyTile& tile, int first_key) {
    const int key = first_key + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, keys = call.shape.keys;
    const int64_t row_stride = static_cast<int64_t>(call.shape.key_heads()) * columns;
    float* const row = rows + (static_cast<int64_t>(tile.batch) * keys + key) * row_stride +
                       static_cast<int64_t>(tile.head) * columns + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < count; i += 4) {  // accumulators of two columns of eight, for a key and the one eight below
        const int column = 2 * i;
        if (column >= columns) continue;
        const float2 upper = {gradient[i] * factor, gradient[i + 1] * factor};
        const float2 lower = {gradient[i + 2] * factor, gradient[i + 3] * factor};
        if (key < keys) *reinterpret_cast<float2*>(row + column) = upper;
        if (key + 8 < keys) *reinterpret_cast<float2*>(row + 8 * row_stride + column) = lower;
    }
}

// Write the gradients of a warpgroup's 64 keys. `staging` is in use until `wait_for_stores`. All of the warpgroup's
// threads call them, and `barrier` is for them.
__device__ __forceinline__ void store_d_key(const Call& call, const float (&d_key)[d_key_count], uint32_t staging,
                                            int barrier, const KeyTile& tile, int first_key) {
    const float factor = with_dropout(call.scale, call.dropout.factor);
#if WIDE_KEY_GRADIENTS
    const WideKeyGradients& wide = call.wide_key_gradients;
    store_wide(call, d_key, factor, wide.d_key, wide.key_columns, tile, first_key);
#else
    store_gradient(d_key, factor, call.maps.d_key, staging, barrier, tile.head, first_key, tile.batch);
#endif
}
__device__ __forceinline__ void store_d_value(const Call& call, const float (&d_value)[d_value_count], uint32_t staging,
                                              int barrier, const KeyTile& tile, int first_key) {
    const float factor = with_dropout(1, call.dropout.factor);
#if WIDE_KEY_GRADIENTS
    const WideKeyGradients& wide = call.wide_key_gradients;
    store_wide(call, d_value, factor, wide.d_value, wide.value_columns, tile, first_key);
#else
    store_gradient(d_value, factor, call.maps.d_value, staging, barrier, tile.head, first_key, tile.batch);
#endif
}
