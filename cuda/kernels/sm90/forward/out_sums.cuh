// Sums of the output over many blocks, where products are in 8 bits.
//
// wgmma keeps about 14 bits of a sum of e4m3 products and of the accumulators that it adds them to (DeepSeek-V3,
// arXiv:2412.19437, section 3.3.2). When a sum has grown large, that cuts much off each new term. So after each
// `sum_blocks` blocks a thread adds its accumulators, in float32, to sums of its own in shared memory, and sets the
// accumulators to 0.
#pragma once
#include "sm90/forward/softmax.cuh"

struct OutSums {
    int blocks = 0;      // since the sums were last added to
    bool exist = false;  // whether there are sums of this tile
    float factor[2] = {1, 1};  // of the rows' sums: how O was rescaled since then

    __device__ __forceinline__ void rescale(const float (&by)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) factor[r] *= by[r];
    }

    // Vector `index` of the sums, rescaled, plus the four accumulators at `out`.
    __device__ __forceinline__ float4 with(const SharedMemory& shared, int index, const float* out) const {
        float4 sum = {0, 0, 0, 0};
        if (exist) sum = shared.sum(index);
        return {sum.x * factor[0] + out[0], sum.y * factor[0] + out[1], sum.z * factor[1] + out[2],
                sum.w * factor[1] + out[3]};
    }

    // Counts another block in O, and after `sum_blocks` of them adds O to the sums.
    template <int count>
    __device__ __forceinline__ void add_block(const SharedMemory& shared, float (&out)[count]) {
        if (++blocks < Traits::sum_blocks) return;
#pragma unroll
        for (int i = 0; i < count / 4; ++i) {
            shared.sum(i) = with(shared, i, out + 4 * i);
            out[4 * i] = out[4 * i + 1] = out[4 * i + 2] = out[4 * i + 3] = 0;
        }
        blocks = 0, exist = true;
        factor[0] = factor[1] = 1;
    }

    // Adds the sums to O.
    template <int count>
    __device__ __forceinline__ void add_to(const SharedMemory& shared, float (&out)[count]) const {
        if (!exist) return;
#pragma unroll
        for (int i = 0; i < count / 4; ++i) {
            const float4 sum = with(shared, i, out + 4 * i);
            out[4 * i] = sum.x, out[4 * i + 1] = sum.y, out[4 * i + 2] = sum.z, out[4 * i + 3] = sum.w;
        }
    }
};
