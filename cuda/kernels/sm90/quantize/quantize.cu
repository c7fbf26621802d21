// Rounds queries, keys and values to e4m3, as jax_flash/_float8.py defines it: incoherent processing, a scale for each
// block of 128 rows of a key head, conversion. Values are written transposed, their keys permuted, as the forward
// kernel takes them (jax_flash/cuda/sm90/float8.py).
//
// A CTA has a block of queries, of all heads of a group; or a block of keys and their values. There may be queries
// alone: any rows are rounded so. A thread loads all that it has of a
// head's block at once, finds the largest element, and converts what it still holds. Of several heads it reads the rows
// twice, the second time from L2.
//
// Defines:
//   ELEMENT    of the input
//   HEAD_DIM   of rows of queries and keys, padded with zeros; VALUE_DIM of values
//   HADAMARD   size of the Hadamard matrix, 1 without incoherent processing
//   GROUPED    whether a key head has several query heads, 1 or 0
//   KEYS       whether there are keys and values, 1 or 0; with 1, VALUE_KEYS keys are in a panel's column of V: 128 or
//              64
//   WARPS      of a CTA
#include "parameters.cuh"
#include "ptx/global.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"
#include "sm90/quantize/lanes.cuh"
#include "sm90/quantize/transposed_values.cuh"

using Element = ELEMENT;
constexpr int warps = WARPS;
constexpr int lane_columns = 8;  // that a lane has of a row, 16 bytes
template <int dim>
using Row = Lanes<dim, lane_columns, warps>;

__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7fffffffu); }

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// A lane's columns of a row, as they are; zeros where there is no row.
template <int dim>
__device__ __forceinline__ uint4 load_columns(const Element* row, bool is_row) {
    if (!is_row || Row<dim>::column() >= dim) return {0, 0, 0, 0};
    return *reinterpret_cast<const uint4*>(row + Row<dim>::column());
}

__device__ __forceinline__ void unpack(float (&x)[lane_columns], const uint4& bits) {
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
                const float sign = threadIdx.x & distance ? -1 : 1;
#pragma unroll
                for (int i = 0; i < lane_columns; ++i) {
                    const float other = __shfl_xor_sync(all_lanes, x[i], distance);
                    x[i] = __fmaf_rn(x[i], sign, other);  // exactly ±x[i] + other
                }
            }
        }
#pragma unroll
        for (int i = 0; i < lane_columns; ++i) x[i] *= scale;
    }
}

__device__ __forceinline__ void load_signs(float (&signs)[lane_columns], const Parameters& of, int batch) {
    const int column = Row<HEAD_DIM>::column();
#pragma unroll
    for (int i = 0; i < lane_columns; ++i) {
        const bool is_there = HADAMARD > 1 && column + i < of.columns;
        signs[i] = is_there ? global::read_only(of.signs + batch * of.signs_stride + column + i) : 0;
    }
}

// The scale of a block whose largest magnitude is the maximum of `largest` over the CTA's threads: the smallest power
// of two that brings it to 448 at most.
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

// By one instruction an element: 0 times what isn't finite is NaN.
__device__ __forceinline__ bool all_finite(const float (&x)[lane_columns]) {
    float zero = 0;
#pragma unroll
    for (int i = 0; i < lane_columns; ++i) zero = __fmaf_rn(x[i], 0, zero);
    return zero == 0;
}

// What isn't finite becomes NaN.
__device__ __forceinline__ void make_nan(float (&x)[lane_columns]) {
#pragma unroll
    for (int i = 0; i < lane_columns; ++i) x[i] = is_finite(x[i]) ? x[i] : not_a_number();
}

// What isn't finite of `x`, unpacked of `bits`, becomes 0 in them.
__device__ __forceinline__ void make_zero(uint4& bits, const float (&x)[lane_columns]) {
    const auto kept = [&](int i) { return (is_finite(x[i]) ? 0xffffu : 0) | (is_finite(x[i + 1]) ? 0xffff0000u : 0); };
    bits = {bits.x & kept(0), bits.y & kept(2), bits.z & kept(4), bits.w & kept(6)};
}

// Of no infinities; NaN doesn't count.
__device__ __forceinline__ float largest_of(const float (&x)[lane_columns]) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < lane_columns; ++i) largest = fmaxf(largest, fabsf(x[i]));
    return largest;
}

struct Bytes {
    uint32_t low, high;
};

// Of no infinities, which would become the largest number; NaN stays NaN.
__device__ __forceinline__ Bytes converted(float (&x)[lane_columns], float inverse) {
#pragma unroll
    for (int i = 0; i < lane_columns; ++i) x[i] *= inverse;
    return {convert_to_e4m3(x[0], x[1], x[2], x[3]), convert_to_e4m3(x[4], x[5], x[6], x[7])};
}

// What a thread has of a head's block of queries or keys: columns of `own` rows.
struct HeadRows {
    static constexpr int own = Row<HEAD_DIM>::own;

    uint4 bits[own];

    __device__ static int row(int i) { return Row<HEAD_DIM>::row(i); }

    __device__ __forceinline__ void load(const Element* first, int count, int64_t row_stride) {
#pragma unroll
        for (int i = 0; i < own; ++i) {
            bits[i] = load_columns<HEAD_DIM>(first + row(i) * row_stride, row(i) < min(count, block_rows));
        }
    }
};

// A block of queries or keys: `count` rows of `group` heads each, neighbours in memory, from `first` on. Rows from
// `valid` on are padding, and count for no scale. Those that `is_usable` denies become NaN. With `one_head`, `group` is
// 1.
template <bool one_head, class IsUsable>
__device__ __forceinline__ float quantize_rows(const Parameters& of, const Element* first, unsigned char* out,
                                               int batch, int count, int valid, int group, int64_t row_stride,
                                               IsUsable is_usable) {
    constexpr bool keeps_rotated = one_head && HeadRows::own <= 8;  // of more rows there are too few registers
    HeadRows rows;
    float signs[lane_columns], rotated[keeps_rotated ? HeadRows::own : 1][lane_columns], largest = 0;
    load_signs(signs, of, batch);
    const auto take = [&](float (&x)[lane_columns], const uint4& bits) {
        unpack(x, bits);
        rotate(x, signs, of.rotation_scale);
        if (!all_finite(x)) make_nan(x);
    };
#pragma unroll 1
    for (int head = 0; head < group; ++head) {
        rows.load(first + head * HEAD_DIM, count, row_stride);
#pragma unroll
        for (int i = 0; i < HeadRows::own; ++i) {
            float (&x)[lane_columns] = rotated[keeps_rotated ? i : 0];
            take(x, rows.bits[i]);
            if (rows.row(i) < valid) largest = fmaxf(largest, largest_of(x));
        }
    }
    const float scale = block_scale(largest);
#pragma unroll 1
    for (int head = 0; head < group; ++head) {
        if constexpr (!one_head) rows.load(first + head * HEAD_DIM, count, row_stride);
#pragma unroll
        for (int i = 0; i < HeadRows::own; ++i) {
            const int row = rows.row(i), column = Row<HEAD_DIM>::column();
            float (&x)[lane_columns] = rotated[keeps_rotated ? i : 0];
            if constexpr (!keeps_rotated) {
                take(x, rows.bits[i]);
            }
            const bool is_there = row < min(column < HEAD_DIM ? count : 0, block_rows);
            if (is_there && !is_usable(row)) {
#pragma unroll
                for (int j = 0; j < lane_columns; ++j) x[j] = not_a_number();
            }
            const Bytes bytes = converted(x, 1 / scale);
            unsigned char* const to = out + row * row_stride + head * HEAD_DIM + column;
            if (is_there) *reinterpret_cast<Bytes*>(to) = bytes;
        }
    }
    return scale;
}

struct AlwaysUsable {
    __device__ bool operator()(int) const { return true; }
};

__device__ __forceinline__ void quantize_queries(const Parameters& of, int index) {
    const int blocks = ceil_div(of.queries, block_rows), group = of.query_heads / of.key_heads;
    const int block = index % blocks, key_head = index / blocks % of.key_heads, batch = index / blocks / of.key_heads;
    const int row = block * block_rows, length = of.query_lengths ? of.query_lengths[batch] : of.queries;
    const int64_t stride = static_cast<int64_t>(of.query_heads) * HEAD_DIM;
    const int64_t first = (static_cast<int64_t>(batch) * of.queries + row) * stride + key_head * group * HEAD_DIM;
    const int count = of.queries - row, valid = length - row;
    const float scale = quantize_rows<!GROUPED>(of, of.query + first, of.query_out + first, batch, count, valid, group,
                                                stride, AlwaysUsable{});
    if (threadIdx.x == 0) of.query_descale[(batch * of.key_heads + key_head) * blocks + block] = scale;
}

#if KEYS
struct WithFiniteValue {
    const unsigned char* finite;
    __device__ bool operator()(int row) const { return finite[row] != 0; }
};

struct KeyBlock {
    int batch, head, row, count, valid, descale;
    int64_t first_row;

    __device__ KeyBlock(const Parameters& of, int index) {
        const int blocks = ceil_div(of.keys, block_rows), block = index % blocks;
        head = index / blocks % of.key_heads;
        batch = index / blocks / of.key_heads;
        row = block * block_rows;
        count = of.keys - row;
        valid = (of.key_lengths ? of.key_lengths[batch] : of.keys) - row;
        descale = (batch * of.key_heads + head) * blocks + block;
        first_row = static_cast<int64_t>(batch) * of.keys + row;
    }
};

// Values as the forward kernel takes them. Says of each key whether its value is finite.
__device__ __forceinline__ void quantize_values(const Parameters& of, const KeyBlock& block, unsigned char* finite) {
    using ValueRow = Row<VALUE_DIM>;
    using Transposed = TransposedValues<VALUE_DIM, VALUE_KEYS, lane_columns>;
    constexpr int fours = Transposed::fours, own = fours > ValueRow::at_once ? fours / ValueRow::at_once : 1;
    __shared__ Transposed transposed;
    const int64_t stride = static_cast<int64_t>(of.key_heads) * VALUE_DIM;
    const Element* const value = of.value + block.first_row * stride + block.head * VALUE_DIM;
    uint4 bits[own][4];
    float x[lane_columns], largest = 0;
    const int column = ValueRow::column();
#pragma unroll
    for (int j = 0; j < 4 * own; ++j) {
        const int four = ValueRow::row(j / 4), key = Transposed::key_of_four(four, j % 4);
        bits[j / 4][j % 4] = load_columns<VALUE_DIM>(value + key * stride, four < fours && key < block.count);
    }
#pragma unroll
    for (int j = 0; j < 4 * own; ++j) {
        const int four = ValueRow::row(j / 4), key = Transposed::key_of_four(four, j % 4);
        unpack(x, bits[j / 4][j % 4]);
        int is_whole = all_finite(x);
        if (!is_whole) {
            make_zero(bits[j / 4][j % 4], x);
            unpack(x, bits[j / 4][j % 4]);
        }
        if (four < fours && key < block.valid) largest = fmaxf(largest, largest_of(x));
#pragma unroll
        for (int distance = 1; distance < ValueRow::width; distance *= 2) {
            is_whole &= __shfl_xor_sync(all_lanes, is_whole, distance);
        }
        if (column == 0 && four < fours) finite[key] = is_whole;
    }
    const float scale = block_scale(largest);
#pragma unroll
    for (int j = 0; j < own; ++j) {
        const int four = ValueRow::row(j);
        uint32_t words[2][4];  // of the first and the last four columns, a key each
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            unpack(x, bits[j][k]);
            const Bytes of_key = converted(x, 1 / scale);
            words[0][k] = of_key.low;
            words[1][k] = of_key.high;
        }
        if (column >= VALUE_DIM || four >= fours) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) transposed.store(four, column + 4 * half, words[half]);
    }
    const Panels panels =
        panels_of<VALUE_DIM, VALUE_KEYS>(block.batch * of.key_heads + block.head, block.row / block_rows, of.keys);
    transposed.write(of.value_out + panels.first_byte, panels.bytes, 32 * warps);
    if (threadIdx.x == 0) of.value_descale[block.descale] = scale;
}

__device__ __forceinline__ void quantize_keys(const Parameters& of, int index) {
    __shared__ unsigned char finite[block_rows];
    const KeyBlock block(of, index);
    quantize_values(of, block, finite);
    const int64_t stride = static_cast<int64_t>(of.key_heads) * HEAD_DIM;
    const int64_t first = block.first_row * stride + block.head * HEAD_DIM;
    const float scale = quantize_rows<true>(of, of.key + first, of.key_out + first, block.batch, block.count,
                                            block.valid, 1, stride, WithFiniteValue{finite});
    if (threadIdx.x == 0) of.key_descale[block.descale] = scale;
}
#endif

extern "C" __global__ void __launch_bounds__(32 * warps) quantize(const __grid_constant__ Parameters of) {
    const int of_queries = of.batch * of.key_heads * ceil_div(of.queries, block_rows);
    const int index = blockIdx.x;
    if (index < of_queries) {
        quantize_queries(of, index);
    } else {
#if KEYS
        quantize_keys(of, index - of_queries);
#endif
    }
}
