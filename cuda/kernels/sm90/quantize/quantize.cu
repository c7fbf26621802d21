// Rounds queries, keys and values to e4m3, as jax_flash/_float8.py defines it: incoherent processing, a scale for each block
// of 128 rows of a key head, conversion. Values are written transposed, their keys permuted, as the forward kernel takes
// them (jax_flash/cuda/sm90/float8.py).
//
// A CTA has a block of queries, of all heads of a group; or a block of keys and their values. It reads its rows twice: to
// find the largest element, and to convert them. The second time they are in L2.
//
// Defines:
//   ELEMENT    of the input
//   HEAD_DIM   of rows of queries and keys, padded with zeros; VALUE_DIM of values
//   HADAMARD   size of the Hadamard matrix, 1 without incoherent processing
//   VALUE_KEYS keys of a panel's column of V, 128 or 64
#include "parameters.cuh"
#include "ptx/global.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"

using Element = ELEMENT;
constexpr int block_rows = 128, warps = 8;
constexpr int lane_columns = 8;  // that a lane has of a row, 16 bytes
constexpr uint32_t all_lanes = 0xffffffff;

__device__ constexpr int power_of_two_above(int x) { return x <= 1 ? 1 : 2 * power_of_two_above((x + 1) / 2); }

// How a warp holds rows of `dim` elements.
template <int dim>
struct Lanes {
    static constexpr int width = power_of_two_above(dim / lane_columns);  // of a row
    static constexpr int rows = 32 / width;                               // of a warp
    static_assert(dim % 16 == 0 && dim <= 256, "a warp holds whole rows");

    __device__ static int row() { return threadIdx.x % 32 / width; }
    __device__ static int column() { return threadIdx.x % width * lane_columns; }
};

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// Loads a lane's columns; zeros where there is no row.
template <int dim>
__device__ __forceinline__ void load_columns(float (&x)[lane_columns], const Element* row, bool is_row) {
    uint4 bits = {0, 0, 0, 0};
    if (is_row && Lanes<dim>::column() < dim) bits = *reinterpret_cast<const uint4*>(row + Lanes<dim>::column());
    const uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = to_floats<Element>(pairs[i]);
        x[2 * i] = pair.x;
        x[2 * i + 1] = pair.y;
    }
}

// Random signs, then the Hadamard matrix: sums and differences of elements that are 1, 2, 4 … columns apart.
__device__ __forceinline__ void rotate(float (&x)[lane_columns], const float (&signs)[lane_columns], float scale) {
    if constexpr (HADAMARD > 1) {
#pragma unroll
        for (int i = 0; i < lane_columns; ++i) x[i] *= signs[i];
#pragma unroll
        for (int half = 1; half < HADAMARD; half *= 2) {
            if (half < lane_columns) {
#pragma unroll
                for (int i = 0; i < lane_columns; ++i) {
                    if (i & half) continue;
                    const float low = x[i], high = x[i | half];
                    x[i] = low + high;
                    x[i | half] = low - high;
                }
            } else {
                const int distance = half / lane_columns;
                const bool is_high = threadIdx.x & distance;
#pragma unroll
                for (int i = 0; i < lane_columns; ++i) {
                    const float other = __shfl_xor_sync(all_lanes, x[i], distance);
                    x[i] = is_high ? other - x[i] : x[i] + other;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < lane_columns; ++i) x[i] *= scale;
    }
}

__device__ __forceinline__ void load_signs(float (&signs)[lane_columns], const Parameters& of, int batch) {
    const int column = Lanes<HEAD_DIM>::column();
#pragma unroll
    for (int i = 0; i < lane_columns; ++i) {
        const bool is_there = HADAMARD > 1 && column + i < of.columns;
        signs[i] = is_there ? global::read_only(of.signs + batch * of.signs_stride + column + i) : 0;
    }
}

// The scale of a block whose largest magnitude is the maximum of `largest` over the CTA's threads: the smallest power of
// two that brings it to 448 at most.
__device__ __forceinline__ float block_scale(float largest) {
    __shared__ float of_warps[warps];
    largest = warp_max(largest);
    __syncthreads();  // the block before has been read
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < warps; ++i) largest = fmaxf(largest, of_warps[i]);
    if (largest == 0) return 1;
    const uint32_t bits = __float_as_uint(largest);
    // 448 is 1.75 * 2^8; the lowest exponents are those of numbers that have no leading 1.
    const int exponent = static_cast<int>(bits >> 23) - 127 - 8 + ((bits & 0x7fffff) > 0x600000);
    return __uint_as_float(static_cast<uint32_t>(127 + min(max(exponent, -126), 126)) << 23);
}

__device__ __forceinline__ float largest_of(const float (&x)[lane_columns]) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < lane_columns; ++i) largest = fmaxf(largest, is_finite(x[i]) ? fabsf(x[i]) : 0);
    return largest;
}

struct Bytes {
    uint32_t low, high;
};

__device__ __forceinline__ Bytes converted(float (&x)[lane_columns], float inverse) {
#pragma unroll
    for (int i = 0; i < lane_columns; ++i) x[i] = is_finite(x[i]) ? x[i] * inverse : __uint_as_float(0x7fffffffu);
    return {convert_to_e4m3(x[0], x[1], x[2], x[3]), convert_to_e4m3(x[4], x[5], x[6], x[7])};
}

// Rows of queries or keys: `count` rows of `group` heads each, neighbours in memory, from `first` on. Rows from `valid` on
// are padding, and count for no scale. Those that `is_usable` denies become NaN.
template <class IsUsable>
__device__ __forceinline__ float quantize_rows(const Parameters& of, const Element* first, unsigned char* out, int batch,
                                               int count, int valid, int group, int64_t row_stride, IsUsable is_usable) {
    using Row = Lanes<HEAD_DIM>;
    float signs[lane_columns], x[lane_columns], largest = 0;
    load_signs(signs, of, batch);
    const int tasks = block_rows * group, step = warps * Row::rows;
    const int first_task = threadIdx.x / 32 * Row::rows + Row::row();
    for (int task = first_task; task < tasks; task += step) {
        const int row = task / group, head = task % group;
        load_columns<HEAD_DIM>(x, first + row * row_stride + head * HEAD_DIM, row < count);
        rotate(x, signs, of.rotation_scale);
        if (row < valid) largest = fmaxf(largest, largest_of(x));
    }
    const float scale = block_scale(largest);
    for (int task = first_task; task < tasks; task += step) {
        const int row = task / group, head = task % group;
        const int64_t place = row * row_stride + head * HEAD_DIM;
        load_columns<HEAD_DIM>(x, first + place, row < count);
        rotate(x, signs, of.rotation_scale);
        if (!is_usable(row)) x[0] = x[1] = x[2] = x[3] = x[4] = x[5] = x[6] = x[7] = __uint_as_float(0x7fffffffu);
        const Bytes bytes = converted(x, 1 / scale);
        if (row < count && Row::column() < HEAD_DIM) *reinterpret_cast<Bytes*>(out + place + Row::column()) = bytes;
    }
    return scale;
}

// Where the key of a block, and a column of V, lie in the panels of V^T.
__device__ __forceinline__ int transposed_place(int key, int column) {
    constexpr int parts = block_rows / VALUE_KEYS, rows = VALUE_DIM / parts;
    const int within = key % 16, ordered = key % VALUE_KEYS / 16 * 16 + within % 8 / 2 * 4 + within / 8 * 2 + within % 2;
    return (key / VALUE_KEYS * rows + column % rows) * block_rows + column / rows * VALUE_KEYS + ordered;
}

struct AlwaysUsable {
    __device__ bool operator()(int) const { return true; }
};

struct WithFiniteValue {
    const unsigned char* finite;
    __device__ bool operator()(int row) const { return finite[row] != 0; }
};

__device__ __forceinline__ void quantize_queries(const Parameters& of, int index) {
    const int blocks = ceil_div(of.queries, block_rows), group = of.query_heads / of.key_heads;
    const int block = index % blocks, key_head = index / blocks % of.key_heads, batch = index / blocks / of.key_heads;
    const int row = block * block_rows, length = of.query_lengths ? of.query_lengths[batch] : of.queries;
    const int64_t stride = static_cast<int64_t>(of.query_heads) * HEAD_DIM;
    const int64_t first = (static_cast<int64_t>(batch) * of.queries + row) * stride + key_head * group * HEAD_DIM;
    const float scale = quantize_rows(of, of.query + first, of.query_out + first, batch, of.queries - row, length - row,
                                      group, stride, AlwaysUsable{});
    if (threadIdx.x == 0) of.query_descale[(batch * of.key_heads + key_head) * blocks + block] = scale;
}

__device__ __forceinline__ void quantize_keys(const Parameters& of, int index) {
    using Row = Lanes<VALUE_DIM>;
    __shared__ unsigned char finite[block_rows];
    __shared__ uint4 chunks[block_rows * VALUE_DIM / 16];
    unsigned char* const transposed = reinterpret_cast<unsigned char*>(chunks);
    const int blocks = ceil_div(of.keys, block_rows);
    const int block = index % blocks, head = index / blocks % of.key_heads, batch = index / blocks / of.key_heads;
    const int row = block * block_rows, count = of.keys - row;
    const int valid = (of.key_lengths ? of.key_lengths[batch] : of.keys) - row;
    const int64_t first_row = static_cast<int64_t>(batch) * of.keys + row;
    const int64_t value_stride = static_cast<int64_t>(of.key_heads) * VALUE_DIM;
    const Element* value = of.value + first_row * value_stride + head * VALUE_DIM;
    float x[lane_columns], largest = 0;
    const int step = warps * Row::rows, first_key = threadIdx.x / 32 * Row::rows + Row::row();
    for (int key = first_key; key < block_rows; key += step) {
        load_columns<VALUE_DIM>(x, value + key * value_stride, key < count);
        if (key < valid) largest = fmaxf(largest, largest_of(x));
        int all_finite = 1;
#pragma unroll
        for (int i = 0; i < lane_columns; ++i) all_finite &= is_finite(x[i]);
#pragma unroll
        for (int distance = 1; distance < Row::width; distance *= 2) {
            all_finite &= __shfl_xor_sync(all_lanes, all_finite, distance);
        }
        if (Row::column() == 0) finite[key] = all_finite;
    }
    const float scale = block_scale(largest);
    for (int key = first_key; key < block_rows; key += step) {
        load_columns<VALUE_DIM>(x, value + key * value_stride, key < count);
#pragma unroll
        for (int i = 0; i < lane_columns; ++i) x[i] = is_finite(x[i]) ? x[i] : 0;
        const Bytes bytes = converted(x, 1 / scale);
        if (Row::column() >= VALUE_DIM) continue;
#pragma unroll
        for (int i = 0; i < lane_columns; ++i) {
            const uint32_t word = i < 4 ? bytes.low : bytes.high;
            transposed[transposed_place(key, Row::column() + i)] = static_cast<unsigned char>(word >> i % 4 * 8);
        }
    }
    __syncthreads();
    const int panels = ceil_div(of.keys, VALUE_KEYS);
    constexpr int panel_bytes = VALUE_KEYS * VALUE_DIM;
    const int first_panel = row / VALUE_KEYS;
    const int bytes = min(block_rows / VALUE_KEYS, panels - first_panel) * panel_bytes;
    unsigned char* out =
        of.value_out + (static_cast<int64_t>(batch * of.key_heads + head) * panels + first_panel) * panel_bytes;
    for (int place = 16 * threadIdx.x; place < bytes; place += 16 * 32 * warps) {
        *reinterpret_cast<uint4*>(out + place) = chunks[place / 16];
    }

    const int64_t key_stride = static_cast<int64_t>(of.key_heads) * HEAD_DIM;
    const int64_t first = first_row * key_stride + head * HEAD_DIM;
    const float key_scale = quantize_rows(of, of.key + first, of.key_out + first, batch, count, valid, 1, key_stride,
                                          WithFiniteValue{finite});
    if (threadIdx.x == 0) {
        const int descale = (batch * of.key_heads + head) * blocks + block;
        of.key_descale[descale] = key_scale;
        of.value_descale[descale] = scale;
    }
}

extern "C" __global__ void __launch_bounds__(32 * warps) quantize(const __grid_constant__ Parameters of) {
    const int of_queries = of.batch * of.key_heads * ceil_div(of.queries, block_rows);
    const int index = blockIdx.x;
    if (index < of_queries) {
        quantize_queries(of, index);
    } else {
        quantize_keys(of, index - of_queries);
    }
}
