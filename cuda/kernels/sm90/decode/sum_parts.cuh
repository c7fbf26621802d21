// Adds up what CTAs made of their parts of a tile, four columns of a row at a time.
#pragma once
#include "sm90/decode/store.cuh"

// Of a row, in some parts of its tile: the maximum of its logits; relative to it, the sum of exponentials and four
// columns of the output.
struct RowSum {
    float max = initial_max, sum = 0;
    float4 out{};

    template <int count>
    __device__ __forceinline__ void add(const float2 (&statistics)[count], const float4 (&values)[count]) {
        const float before = max;
#pragma unroll
        for (int i = 0; i < count; ++i) max = fmaxf(max, statistics[i].x);
        const float rescale = exponential<Traits::natural>(before - max);
        sum *= rescale, out.x *= rescale, out.y *= rescale, out.z *= rescale, out.w *= rescale;
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const float factor = exponential<Traits::natural>(statistics[i].x - max);
            sum += statistics[i].y * factor;
            out.x += values[i].x * factor, out.y += values[i].y * factor;
            out.z += values[i].z * factor, out.w += values[i].w * factor;
        }
    }
};

// Where four columns of a row are in the results.
struct ResultChunk {
    uint64_t* out;
    float* lse;  // null but for the row's first columns
    float sink;

    __device__ __forceinline__ ResultChunk(const Results& results, const float* sinks, const Shape& shape,
                                           const Tile& tile, int index, int chunk) {
        const Row row(shape, tile, index);
        out = reinterpret_cast<uint64_t*>(results.out + row.in_out(shape)) + chunk;
        lse = chunk == 0 ? results.lse + row.in_lse(shape) : nullptr;
        sink = sink_of(sinks, row.head);
    }

    // Normalises and writes them.
    __device__ __forceinline__ void write(const RowSum& sum) const {
        const RowResult<Traits::natural> result(sum.max, sum.sum, sink);
        if (lse) *lse = result.lse;
        const uint32_t low = convert<Traits::Element>(sum.out.x * result.factor, sum.out.y * result.factor);
        const uint32_t high = convert<Traits::Element>(sum.out.z * result.factor, sum.out.w * result.factor);
        *out = static_cast<uint64_t>(high) << 32 | low;
    }
};
