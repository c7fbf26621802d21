// Rounds queries, keys and values to e4m3, as jax_flash/_float8.py defines it: incoherent processing, a scale for each
// block of 128 rows of a key head, conversion. Values are written transposed, their keys permuted, as the forward
// kernel takes them (jax_flash/cuda/sm90/float8.py).
//
// A CTA takes block after block: first of queries, of all heads of a group; then of keys and their values. There may be
// queries alone: any rows are rounded so. A thread holds all that it has of a head's block, rotated, until the block's
// scale is known. Meanwhile the next block arrives in the registers of what has been rotated. Of several heads it reads
// the rows twice, the second time from L2.
//
// Defines:
//   ELEMENT    of the input
//   HEAD_DIM   of rows of queries and keys, padded with zeros; VALUE_DIM of values
//   HADAMARD   size of the Hadamard matrix, 1 without incoherent processing
//   GROUPED    whether a key head has several query heads, 1 or 0
//   KEYS       whether there are keys and values, 1 or 0; with 1, VALUE_KEYS keys are in a panel's column of V: 128 or
//              64
//   WARPS      of a CTA
//   CTAS       of a multiprocessor. While one converts, another's rows arrive
#include "parameters.cuh"
#include "ptx/global.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"
#include "sm90/quantize/lanes.cuh"
#include "sm90/quantize/transposed_values.cuh"

using Element = ELEMENT;
constexpr int warps = WARPS;
constexpr int lane_columns = 8;  // that a lane has of a row, 16 bytes

__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7fffffffu); }

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// A lane's piece of a row, as it is; zeros where there is none.
__device__ __forceinline__ uint4 load_piece(const Element* piece, bool is_there) {
    if (!is_there) return {0, 0, 0, 0};
    return *reinterpret_cast<const uint4*>(piece);
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

// What a lane has of a row of queries or keys.
using QueryRow = FewLanes<HEAD_DIM, lane_columns, warps>;
using QueryColumns = float[QueryRow::pieces][lane_columns];

// The Hadamard matrix, but for its scale: sums and differences of elements that are 1, 2, 4 … columns apart.
__device__ __forceinline__ void rotate(QueryColumns& x) {
    constexpr int in_lanes = lane_columns * QueryRow::width;
#pragma unroll
    for (int half = 1; half < HADAMARD; half *= 2) {
#pragma unroll
        for (int piece = 0; piece < QueryRow::pieces; ++piece) {
#pragma unroll
            for (int i = 0; i < lane_columns; ++i) {
                if (half >= lane_columns && half < in_lanes) {
                    const int distance = half / lane_columns;
                    const float other = __shfl_xor_sync(all_lanes, x[piece][i], distance);
                    const float sign = threadIdx.x & distance ? -1 : 1;
                    x[piece][i] = __fmaf_rn(x[piece][i], sign, other);  // exactly ±x[piece][i] + other
                    continue;
                }
                const int pieces = half / in_lanes, columns = half < lane_columns ? half : 0;
                if (piece & pieces || i & columns) continue;
                float &low = x[piece][i], &high = x[piece | pieces][i | columns];
                const float sum = low + high;
                high = low - high;
                low = sum;
            }
        }
    }
}

// The sign bits that incoherent processing changes in a row of 16-bit elements. In shared memory, as registers are few.
struct Flips {
    uint4 pieces[HEAD_DIM / lane_columns];

    // By all threads of the CTA.
    __device__ __forceinline__ void load(const Parameters& of, int batch) {
        if constexpr (HADAMARD == 1) return;
        __syncthreads();  // the block before is rotated
        const float* const signs = of.signs + batch * of.signs_stride;
        auto* const elements = reinterpret_cast<uint16_t*>(pieces);
        static_assert(32 * warps >= HEAD_DIM, "a thread has a column");
        const int column = threadIdx.x;
        if (column < HEAD_DIM) {
            const uint32_t sign = column < of.columns ? __float_as_uint(global::read_only(signs + column)) : 0;
            elements[column] = sign >> 16 & 0x8000u;
        }
        __syncthreads();
    }

    __device__ __forceinline__ uint4 apply(const uint4& bits, int piece) const {
        if (HADAMARD == 1 || !QueryRow::has(piece)) return bits;
        const uint4 flips = pieces[QueryRow::column(piece) / lane_columns];
        return {bits.x ^ flips.x, bits.y ^ flips.y, bits.z ^ flips.z, bits.w ^ flips.w};
    }
};

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

// The largest of `largest` and of magnitudes, NaN if one of them is.
__device__ __forceinline__ float largest_with_nan(float largest, const float (&x)[lane_columns]) {
#pragma unroll
    for (int i = 0; i < lane_columns; ++i) largest = max_with_nan(largest, fabsf(x[i]));
    return largest;
}

// NaN doesn't count.
__device__ __forceinline__ float largest_of(const float (&x)[lane_columns]) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < lane_columns; ++i) largest = fmaxf(largest, fabsf(x[i]));
    return largest;
}

// Of no infinities, which would become the largest number; NaN stays NaN.
__device__ __forceinline__ uint2 converted(float (&x)[lane_columns], float factor) {
#pragma unroll
    for (int i = 0; i < lane_columns; ++i) x[i] *= factor;
    return {convert_to_e4m3(x[0], x[1], x[2], x[3]), convert_to_e4m3(x[4], x[5], x[6], x[7])};
}

// What a thread has of a head's block of queries or keys.
struct HeadRows {
    static constexpr int own = QueryRow::own, pieces = QueryRow::pieces;

    uint4 bits[own][pieces];

    // Loads row `i` of the thread's. `first` of `count` rows.
    __device__ __forceinline__ void load(int i, const Element* first, int count, int64_t row_stride) {
        const int row = QueryRow::row(i);
#pragma unroll
        for (int piece = 0; piece < pieces; ++piece) {
            const bool is_there = row < min(count, block_rows) && QueryRow::has(piece);
            bits[i][piece] = load_piece(first + row * row_stride + QueryRow::column(piece), is_there);
        }
    }
};

// Row `i` of the thread's, rotated but for the rotation's scale. What isn't finite becomes NaN. Returns the largest
// magnitude.
__device__ __forceinline__ float take_row(QueryColumns& x, const HeadRows& rows, int i, const Flips& flips) {
#pragma unroll
    for (int piece = 0; piece < HeadRows::pieces; ++piece) unpack(x[piece], flips.apply(rows.bits[i][piece], piece));
    rotate(x);
    float largest = 0;
#pragma unroll
    for (int piece = 0; piece < HeadRows::pieces; ++piece) largest = largest_with_nan(largest, x[piece]);
    if (is_finite(largest)) return largest;
    largest = 0;
#pragma unroll
    for (int piece = 0; piece < HeadRows::pieces; ++piece) {
        make_nan(x[piece]);
        largest = fmaxf(largest, largest_of(x[piece]));
    }
    return largest;
}

// A block of queries or keys: `count` rows of `group` heads each, neighbours in memory. Rows from `valid` on are
// padding, and count for no scale.
struct RowBlock {
    int64_t first;  // element
    int batch, head, count, valid, descale;

    // Block `index` of all key heads, where `length` is of all batch rows unless there are `lengths`.
    __device__ RowBlock(const Parameters& of, int index, int length, const int* lengths, int group) {
        const int blocks = ceil_div(length, block_rows), row = index % blocks * block_rows;
        head = index / blocks % of.key_heads;
        batch = index / blocks / of.key_heads;
        count = length - row;
        valid = (lengths ? lengths[batch] : length) - row;
        descale = (batch * of.key_heads + head) * blocks + index % blocks;
        first = ((static_cast<int64_t>(batch) * length + row) * of.key_heads + head) * group * HEAD_DIM;
    }
};

// Rounds a block whose rows, of the first head, have been loaded. Those that `is_usable` denies become NaN. Calls
// `load_next(i)` once the thread has taken its row `i` for the last time: what is loaded then arrives while this block
// is converted.
template <bool one_head, class IsUsable, class LoadNext>
__device__ __forceinline__ float quantize_rows(const Parameters& of, HeadRows& rows, const Element* in,
                                               unsigned char* out, const RowBlock& block, int group, IsUsable is_usable,
                                               LoadNext load_next) {
    const int64_t row_stride = static_cast<int64_t>(of.key_heads) * group * HEAD_DIM;
    __shared__ Flips flips;
    flips.load(of, block.batch);
    QueryColumns rotated[one_head ? HeadRows::own : 1];  // rows of several heads are read twice
    float largest = 0;
#pragma unroll 1
    for (int head = 0; head < group; ++head) {
        const int next_head = head + 1 < group ? head + 1 : 0;
#pragma unroll
        for (int i = 0; i < HeadRows::own; ++i) {
            const float of_row = take_row(rotated[one_head ? i : 0], rows, i, flips);
            if (QueryRow::row(i) < block.valid) largest = fmaxf(largest, of_row);
            if constexpr (one_head) {
                load_next(i);
            } else {
                rows.load(i, in + block.first + next_head * HEAD_DIM, block.count, row_stride);
            }
        }
    }
    // Both scales are one product, which rounds each element once, as the rotation's alone does: the block's is a power
    // of 2.
    const float scale = block_scale(largest * of.rotation_scale), factor = of.rotation_scale * (1 / scale);
#pragma unroll 1
    for (int head = 0; head < group; ++head) {
#pragma unroll
        for (int i = 0; i < HeadRows::own; ++i) {
            const int row = QueryRow::row(i);
            QueryColumns& x = rotated[one_head ? i : 0];
            if constexpr (!one_head) {
                take_row(x, rows, i, flips);
                if (head + 1 < group) {
                    rows.load(i, in + block.first + (head + 1) * HEAD_DIM, block.count, row_stride);
                } else {
                    load_next(i);
                }
            }
            if (row >= min(block.count, block_rows)) continue;
            const float of_row = is_usable(row) ? factor : not_a_number();
            unsigned char* const to = out + block.first + row * row_stride + head * HEAD_DIM;
#pragma unroll
            for (int piece = 0; piece < HeadRows::pieces; ++piece) {
                if (!QueryRow::has(piece)) continue;
                *reinterpret_cast<uint2*>(to + QueryRow::column(piece)) = converted(x[piece], of_row);
            }
        }
    }
    return scale;
}

struct AlwaysUsable {
    __device__ bool operator()(int) const { return true; }
};

// Blocks `index`, `index + step`, … of queries. Returns the first index that is not one of these.
__device__ __forceinline__ int quantize_queries(const Parameters& of, int index, int step) {
    const int end = of.batch * of.key_heads * ceil_div(of.queries, block_rows);
    const int group = of.query_heads / of.key_heads;
    const int64_t stride = static_cast<int64_t>(of.query_heads) * HEAD_DIM;
    const auto block_of = [&](int index) { return RowBlock(of, index, of.queries, of.query_lengths, group); };
    if (index >= end) return index;
    HeadRows rows;
    RowBlock block = block_of(index);
#pragma unroll
    for (int i = 0; i < HeadRows::own; ++i) rows.load(i, of.query + block.first, block.count, stride);
#pragma unroll 1
    for (; index < end; index += step) {
        const bool is_last = index + step >= end;
        const RowBlock next = block_of(is_last ? index : index + step);
        const auto load_next = [&](int i) { rows.load(i, of.query + next.first, is_last ? 0 : next.count, stride); };
        const float scale = quantize_rows<!GROUPED>(of, rows, of.query, of.query_out, block, group, AlwaysUsable{},
                                                    load_next);
        if (threadIdx.x == 0) of.query_descale[block.descale] = scale;
        block = next;
    }
    return index;
}

#if KEYS
struct WithFiniteValue {
    const unsigned char* finite;
    __device__ bool operator()(int row) const { return finite[row] != 0; }
};

// What a thread has of a block of values: columns of `own` times four keys, which are neighbours in the panels.
struct Values {
    using Row = Lanes<VALUE_DIM, lane_columns, warps>;
    using Transposed = TransposedValues<VALUE_DIM, VALUE_KEYS, lane_columns>;
    static constexpr int fours = Transposed::fours, own = fours > Row::at_once ? fours / Row::at_once : 1;

    uint4 bits[own][4];

    __device__ static bool has(int j) { return Row::row(j / 4) < fours; }
    __device__ static int key(int j) { return Transposed::key_of_four(Row::row(j / 4), j % 4); }

    // `first` of `count` keys.
    __device__ __forceinline__ void load(const Element* first, int count, int64_t key_stride) {
        const int column = Row::column();
#pragma unroll
        for (int j = 0; j < 4 * own; ++j) {
            const bool is_there = has(j) && column < VALUE_DIM && key(j) < count;
            bits[j / 4][j % 4] = load_piece(first + key(j) * key_stride + column, is_there);
        }
    }
};

// Values as the forward kernel takes them. Says of each key whether its value is finite.
__device__ __forceinline__ void quantize_values(const Parameters& of, Values& values, const RowBlock& block,
                                                unsigned char* finite) {
    using Row = Values::Row;
    __shared__ Values::Transposed transposed;
    float x[lane_columns], largest = 0;
    const int column = Row::column();
#pragma unroll
    for (int j = 0; j < 4 * Values::own; ++j) {
        uint4& bits = values.bits[j / 4][j % 4];
        const int key = Values::key(j);
        unpack(x, bits);
        int is_whole = all_finite(x);
        if (!is_whole) {
            make_zero(bits, x);
            unpack(x, bits);
        }
        if (Values::has(j) && key < block.valid) largest = fmaxf(largest, largest_of(x));
#pragma unroll
        for (int distance = 1; distance < Row::width; distance *= 2) {
            is_whole &= __shfl_xor_sync(all_lanes, is_whole, distance);
        }
        if (column == 0 && Values::has(j)) finite[key] = is_whole;
    }
    const float scale = block_scale(largest);
#pragma unroll
    for (int j = 0; j < Values::own; ++j) {
        uint32_t words[2][4];  // of the first and the last four columns, a key each
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            unpack(x, values.bits[j][k]);
            const uint2 of_key = converted(x, 1 / scale);
            words[0][k] = of_key.x;
            words[1][k] = of_key.y;
        }
        if (column >= VALUE_DIM || !Values::has(4 * j)) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) transposed.store(Row::row(j), column + 4 * half, words[half]);
    }
    const int row = of.keys - block.count;
    const Panels panels =
        panels_of<VALUE_DIM, VALUE_KEYS>(block.batch * of.key_heads + block.head, row / block_rows, of.keys);
    transposed.write(of.value_out + panels.first_byte, panels.bytes, 32 * warps);
    if (threadIdx.x == 0) of.value_descale[block.descale] = scale;
}

// Blocks `index`, `index + step`, … of keys, and their values. Keys arrive while values are converted. Where a
// multiprocessor has one CTA, they are loaded a block ahead. Where it has more, there are too few registers for that.
__device__ __forceinline__ void quantize_keys(const Parameters& of, int index, int step) {
    __shared__ unsigned char finite[2][block_rows];  // in turns
    const int end = of.batch * of.key_heads * ceil_div(of.keys, block_rows);
    const int64_t key_stride = static_cast<int64_t>(of.key_heads) * HEAD_DIM;
    const int64_t value_stride = static_cast<int64_t>(of.key_heads) * VALUE_DIM;
    const auto block_of = [&](int index) { return RowBlock(of, index, of.keys, of.key_lengths, 1); };
    if (index >= end) return;
    HeadRows rows;
    const auto load_key = [&](int i, const RowBlock& block, int count) {
        rows.load(i, of.key + block.first, count, key_stride);
    };
    RowBlock block = block_of(index);
#pragma unroll
    for (int i = 0; i < HeadRows::own && CTAS == 1; ++i) load_key(i, block, block.count);
#pragma unroll 1
    for (int turn = 0; index < end; index += step, turn ^= 1) {
        Values values;
        values.load(of.value + block.first / HEAD_DIM * VALUE_DIM, block.count, value_stride);
#pragma unroll
        for (int i = 0; i < HeadRows::own && CTAS > 1; ++i) load_key(i, block, block.count);
        quantize_values(of, values, block, finite[turn]);
        const bool is_last = index + step >= end;
        const RowBlock next = block_of(is_last ? index : index + step);
        const auto load_next = [&](int i) {
            if constexpr (CTAS == 1) load_key(i, next, is_last ? 0 : next.count);
        };
        const float scale = quantize_rows<true>(of, rows, of.key, of.key_out, block, 1, WithFiniteValue{finite[turn]},
                                                load_next);
        if (threadIdx.x == 0) of.key_descale[block.descale] = scale;
        block = next;
    }
}
#endif

extern "C" __global__ void __launch_bounds__(32 * warps, CTAS) quantize(const __grid_constant__ Parameters of) {
    const int step = gridDim.x;
    [[maybe_unused]] const int index = quantize_queries(of, blockIdx.x, step);
#if KEYS
    quantize_keys(of, index - of.batch * of.key_heads * ceil_div(of.queries, block_rows), step);
#endif
}
