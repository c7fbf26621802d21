// After the backward kernel, where dK and dV are float32 sums (key_sums.cuh): from these to (B, S, K, H) and
// (B, S, K, V) as RESULT.
#include "parameters.cuh"
#include "sm90/backward/convert_sums.cuh"

constexpr int threads = 256;
constexpr int group_keys = 64;

// dK or dV of a group of keys.
template <int columns>
__device__ __forceinline__ void convert_key_sums(const Parameters& parameters, const float* sums,
                                                 Traits::Result* gradient, int row_columns, float factor, int index) {
    const int keys = parameters.keys, key_heads = parameters.key_heads;
    const int groups = ceil_div(keys, Traits::keys) * (Traits::keys / group_keys);
    const int head_index = index / groups, first_key = index % groups * group_keys;
    const int head = head_index % key_heads, batch = head_index / key_heads;
    const int64_t first_row = (static_cast<int64_t>(batch) * keys + first_key) * key_heads + head;
    convert_sums<group_keys, columns, 1, threads>(
        reinterpret_cast<const float4*>(sums) + static_cast<int64_t>(index) * (group_keys * columns / 4), 0, factor,
        {gradient + first_row * row_columns, static_cast<int64_t>(key_heads) * row_columns,
         min(group_keys, keys - first_key), row_columns});
}

// One CTA a group of keys, head and batch row, and dK or dV: the first half of all have dK.
extern "C" __global__ void __launch_bounds__(threads)
    backward_postprocess_keys(const __grid_constant__ Parameters parameters) {
    const int half = gridDim.x / 2, index = blockIdx.x;
    if (index < half) {
        convert_key_sums<Traits::head_dim>(parameters, parameters.key_sums.d_key, parameters.d_key, parameters.head_dim,
                                           parameters.scale, index);
    } else {
        convert_key_sums<Traits::value_dim>(parameters, parameters.key_sums.d_value, parameters.d_value,
                                            parameters.value_dim, parameters.value_scale, index - half);
    }
}
