// Runs before the decode kernel: appends new keys, rotated, and new values to the cache. Of varlen sequences it also
// writes the rows of queries that belong to none.
//
// Defines: ELEMENT, CACHE_ELEMENT, ROTARY, as in traits.cuh.
#include "parameters.cuh"
#include "ptx/global.cuh"
#include "ptx/math.cuh"
#include "ptx/warpgroup.cuh"
#include "common/constants.cuh"
#include "sm90/decode/descales.cuh"
#include "sm90/decode/rotary.cuh"
#include "sm90/decode/sequences.cuh"

using Element = ELEMENT;
using CacheElement = CACHE_ELEMENT;
constexpr int threads = 128;
constexpr int chunk_elements = 16 / sizeof(Element);

// Writes a chunk to chunk `index` of a row of the cache; to one in 8 bits divided by the descale of its head, which is
// among `descales`, and rounded. e4m3 has no infinity: what isn't finite becomes NaN.
__device__ __forceinline__ void write_chunk(const Parameters& parameters, CacheElement* row, int index, uint4 chunk,
                                            const float* descales, int head) {
    if constexpr (is_same<Element, CacheElement>) {
        reinterpret_cast<uint4*>(row)[index] = chunk;
    } else {
        const float descale = descale_of(parameters.shape, parameters.descales, descales, head);
        const uint32_t pairs[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
        float x[chunk_elements];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = to_floats<Element>(pairs[i]);
            x[2 * i] = pair.x / descale;
            x[2 * i + 1] = pair.y / descale;
        }
#pragma unroll
        for (int i = 0; i < chunk_elements; ++i) {
            if (!(fabsf(x[i]) < infinity)) x[i] = float_nan;
        }
        reinterpret_cast<uint2*>(row)[index] = {convert_to_e4m3(x[0], x[1], x[2], x[3]),
                                                convert_to_e4m3(x[4], x[5], x[6], x[7])};
    }
}

// Copies chunk `index` of all new keys and values to its place: a row has a chunk for each 8 columns of its key, and
// then of its value. A row without a place is dropped.
__device__ __forceinline__ void append(const Parameters& parameters, int64_t index) {
    const Shape& shape = parameters.shape;
    const int key_chunks = shape.head_dim / chunk_elements, value_chunks = shape.value_dim / chunk_elements;
    const int chunk = static_cast<int>(index % (key_chunks + value_chunks));
    const int64_t row = index / (key_chunks + value_chunks);  // of (B, U, K)
    const int head = static_cast<int>(row % shape.key_heads);
    const int64_t token = row / shape.key_heads;
    const int batch = static_cast<int>(token / shape.appended);
    const int position = length_before_append(shape, batch) + static_cast<int>(token % shape.appended);
    const int64_t place = row_of_key(shape, batch, sequence_at(shape, batch), position);
    if (place == no_row) return;

    const int64_t heads = shape.key_heads * shape.head_step;  // of a row of the cache
    if (chunk < key_chunks) {
        const Element* source = parameters.new_key + row * shape.head_dim;
        CacheElement* to = parameters.key + (place * heads + key_head_of(shape, head)) * shape.head_dim;
        write_chunk(parameters, to, chunk,
                    rotated_chunk<Element, ROTARY>(source, chunk, parameters.rotary, position),
                    parameters.descales.key, head);
    } else {
        const Element* source = parameters.new_value + row * shape.value_dim;
        CacheElement* to = parameters.value + (place * heads + value_head_of(shape, head)) * shape.value_dim;
        write_chunk(parameters, to, chunk - key_chunks,
                    reinterpret_cast<const uint4*>(source)[chunk - key_chunks], parameters.descales.value, head);
    }
}

// Writes 0 to element `index` of out (T, N, V), and -inf to its lse, if its query belongs to no sequence.
__device__ __forceinline__ void write_unused(const Parameters& parameters, int64_t index) {
    const Shape& shape = parameters.shape;
    const int column = static_cast<int>(index % shape.value_dim);
    const int64_t row = index / shape.value_dim;
    const int head = static_cast<int>(row % shape.query_heads), query = static_cast<int>(row / shape.query_heads);
    if (query >= shape.query_offsets[0] && query < shape.query_offsets[shape.batch]) return;
    parameters.out[index].bits = 0;
    if (column == 0) parameters.lse[static_cast<int64_t>(head) * shape.queries + query] = -infinity;
}

extern "C" __global__ void __launch_bounds__(threads)
    decode_preprocess(const __grid_constant__ Parameters parameters) {
    const Shape& shape = parameters.shape;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x, stride = gridDim.x * threads;
    wait_for_previous_kernel();
    // The decode kernel relies on this order: it may read at once what kernels ahead of this one wrote.
    allow_next_kernel();
    const int64_t rows = static_cast<int64_t>(shape.batch) * shape.appended * shape.key_heads;
    const int64_t chunks = rows * ((shape.head_dim + shape.value_dim) / chunk_elements);
#pragma unroll 1
    for (int64_t i = first; i < chunks; i += stride) append(parameters, i);
    if (shape.query_offsets) {
        const int64_t elements = static_cast<int64_t>(shape.queries) * shape.query_heads * shape.value_dim;
#pragma unroll 1
        for (int64_t i = first; i < elements; i += stride) write_unused(parameters, i);
    }
    global::fence_proxy_async();  // the decode kernel reads the cache by TMA
}
