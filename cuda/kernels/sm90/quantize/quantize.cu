// Rounds queries, keys and values to e4m3, as jax_flash/_float8.py defines it: incoherent processing, a descale for
// each block of 128 rows of a key head, conversion. Values are written transposed, their keys permuted, as the forward
// kernel takes them (jax_flash/cuda/sm90/float8.py).
//
// A CTA takes block after block: first of queries, of all heads of a group; then of keys, each with its values. There
// may be queries alone: any rows are rounded so. A thread holds all that it has of a head's block, rotated, until the
// block's descale is known. Meanwhile the next block's rows arrive in the registers of what has been rotated. Where a
// key head has several query heads, it reads their rows twice, the second time from L2.
//
// Registers are what limits this kernel: at most 128, of which up to 96 hold rows. So little else may live across a
// loop. What is cheap to compute again is computed from an index that the compiler must read again (reload_…).
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
#include "ptx/warpgroup.cuh"
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

    // Called by all threads of the CTA.
    __device__ __forceinline__ void load(const Parameters& of, int batch) {
        if constexpr (HADAMARD == 1) return;
        __syncthreads();  // the block before is rotated
        const float* const signs = of.signs + batch * of.signs_stride;
        auto* const elements = reinterpret_cast<uint16_t*>(pieces);
        static_assert(32 * warps >= HEAD_DIM, "a thread has a column");
        const int column = reload_thread_index();
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

// The descale of a block whose largest magnitude is the maximum of `largest` over the CTA's threads: the smallest power
// of two that brings it to 448 at most.
__device__ __forceinline__ float block_descale(float largest) {
    __shared__ float of_warps[warps];
    largest = warp_max(largest);
    __syncthreads();  // the block before has been read
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
    __syncthreads();
    largest = warp_max(of_warps[threadIdx.x % warps]);
    if (largest == 0) return 1;
    const uint32_t bits = __float_as_uint(largest);
    // 448 is 1.75 * 2^8; the lowest exponents are those of numbers that have no leading 1.
    const int exponent = static_cast<int>(bits >> 23) - 127 - 8 + ((bits & 0x7fffff) > 0x600000);
    return __uint_as_float(static_cast<uint32_t>(127 + min(max(exponent, -126), 126)) << 23);
}

// 1 / `descale`, of a block: its exponent with the other sign.
__device__ __forceinline__ float inverse(float descale) {
    return __uint_as_float((2 * 127u << 23) - __float_as_uint(descale));
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
    __device__ __forceinline__ void load(int i, const Element* first, int count, int row_stride) {
        const int row = QueryRow::row(i);
        const Element* const in = first + static_cast<int64_t>(row) * row_stride;
#pragma unroll
        for (int piece = 0; piece < pieces; ++piece) {
            const bool is_there = row < count && QueryRow::has(piece);
            bits[i][piece] = load_piece(in + QueryRow::column(piece), is_there);
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

// Queries or keys of a call: `length` rows of `group` heads for each key head.
struct Rows {
    const Element* in;
    unsigned char* out;
    float* descale;
    const int* lengths;  // of batch rows, or null
    int length, group;

    __device__ int blocks() const { return ceil_div(length, rows_per_descale); }
};

// A block of them, of `count` rows. Rows from `valid` on are padding, and count for no descale.
struct Block {
    int64_t first;  // element of its first head
    int batch, count, valid;

    // Block `index` of all key heads.
    __device__ Block(const Parameters& of, const Rows& rows, int index) {
        const int blocks = rows.blocks(), row = index % blocks * rows_per_descale, head = index / blocks % of.key_heads;
        batch = index / blocks / of.key_heads;
        count = min(rows.length - row, rows_per_descale);
        valid = (rows.lengths ? rows.lengths[batch] : rows.length) - row;
        first = ((static_cast<int64_t>(batch) * rows.length + row) * of.key_heads + head) * rows.group * HEAD_DIM;
    }
};

// Rounds block `index`, whose rows, of the first head, are `held`. Calls `load_next(i)` once the thread has taken its
// row `i` for the last time: what is loaded then arrives while this block is converted.
template <bool one_head, class LoadNext>
__device__ __forceinline__ void quantize_rows(const Parameters& of, HeadRows& held, const Rows& rows,
                                              const Block& block, int index, const Flips& flips, LoadNext load_next) {
    const int row_stride = of.key_heads * rows.group * HEAD_DIM;
    QueryColumns rotated[one_head ? HeadRows::own : 1];  // rows of several heads are read twice
    // Against spills, the thread's last row is loaded only once it has been converted. And rows are rotated and
    // converted one after another, as the compiler moves no loads across __syncwarp.
    constexpr int rows_ahead = HeadRows::own - 1;
    float largest = 0;
    const Element* const in = rows.in + block.first;
#pragma unroll 1
    for (int head = 0; head < rows.group; ++head) {
        const int next_head = head + 1 < rows.group ? head + 1 : 0;
#pragma unroll
        for (int i = 0; i < HeadRows::own; ++i) {
            __syncwarp();
            const float of_row = take_row(rotated[one_head ? i : 0], held, i, flips);
            if (QueryRow::row(i) < block.valid) largest = fmaxf(largest, of_row);
            if constexpr (one_head) {
                if (i < rows_ahead) load_next(i);
            } else {
                held.load(i, in + next_head * HEAD_DIM, block.count, row_stride);
            }
        }
    }
    // The rotation's scale and 1 / descale are one product, which rounds each element once, as the first alone does:
    // the other one is a power of 2.
    const float descale = block_descale(largest * of.rotation_scale);
    const float factor = of.rotation_scale * inverse(descale);
    if (threadIdx.x == 0) rows.descale[index] = descale;
#pragma unroll 1
    for (int head = 0; head < rows.group; ++head) {
#pragma unroll
        for (int i = 0; i < HeadRows::own; ++i) {
            const int row = QueryRow::row(i);
            QueryColumns& x = rotated[one_head ? i : 0];
            if constexpr (!one_head) {
                take_row(x, held, i, flips);
                if (head + 1 < rows.group) {
                    held.load(i, in + (head + 1) * HEAD_DIM, block.count, row_stride);
                } else {
                    load_next(i);
                }
            }
            if (row < block.count) {
                unsigned char* const to =
                    rows.out + block.first + head * HEAD_DIM + static_cast<int64_t>(row) * row_stride;
#pragma unroll
                for (int piece = 0; piece < HeadRows::pieces; ++piece) {
                    if (!QueryRow::has(piece)) continue;
                    *reinterpret_cast<uint2*>(to + QueryRow::column(piece)) = converted(x[piece], factor);
                }
            }
            __syncwarp();
            if (one_head && i >= rows_ahead) load_next(i);
        }
    }
}

// Rounds blocks `index`, `index + step`, … of `rows`, and calls `then(index)` after each. Returns the first index that
// is not one of these.
template <bool one_head, class Then>
__device__ __forceinline__ int quantize_blocks(const Parameters& of, const Rows& rows, int index, int step, Then then) {
    const int end = of.batch * of.key_heads * rows.blocks();
    const int stride = of.key_heads * rows.group * HEAD_DIM;
    if (index >= end) return index;
    HeadRows held;
    Block block(of, rows, index);
    __shared__ Flips flips;
    flips.load(of, block.batch);
#pragma unroll
    for (int i = 0; i < HeadRows::own; ++i) held.load(i, rows.in + block.first, block.count, stride);
#pragma unroll 1
    for (; index < end; index += step) {
        const bool is_last = index + step >= end;
        Block next(of, rows, is_last ? index : index + step);
        if (is_last) next.count = 0;
        quantize_rows<one_head>(of, held, rows, block, index, flips, [&](int i) {
            held.load(i, rows.in + next.first, next.count, stride);
        });
        then(index);
        if (of.signs_stride > 0) flips.load(of, next.batch);
        block = next;
    }
    return index;
}

#if KEYS
// Overwrites the CTA's keys of which a bit in `spoiled` is set.
template <class KeyOf>
__device__ __forceinline__ void make_keys_nan(unsigned char* keys, int64_t stride, uint32_t spoiled, KeyOf key_of) {
    const uint4 nans{0x7f7f7f7f, 0x7f7f7f7f, 0x7f7f7f7f, 0x7f7f7f7f};  // 16 of e4m3
#pragma unroll 1
    for (int j = 0; spoiled; ++j, spoiled >>= 1) {
        if (!(spoiled & 1)) continue;
        auto* const to = reinterpret_cast<uint4*>(keys + key_of(j) * stride);
#pragma unroll 1
        for (int i = 0; i < HEAD_DIM / 16; ++i) to[i] = nans;
    }
}

// Values of block `index` of keys, as the forward kernel takes them. The CTA has rounded the keys; those whose value
// isn't finite become NaN.
__device__ __forceinline__ void quantize_values(const Parameters& of, const Rows& keys, int index) {
    using Row = Lanes<VALUE_DIM, lane_columns, warps>;
    using Transposed = TransposedValues<VALUE_DIM, VALUE_KEYS, lane_columns>;
    constexpr int fours = Transposed::fours, own = fours > Row::at_once ? fours / Row::at_once : 1;
    __shared__ Transposed transposed;
    index = reload_uniform(index);
    const Block block(of, keys, index);
    const int64_t first = block.first / HEAD_DIM, stride = of.key_heads;
    uint4 bits[own][4];
    float x[lane_columns], largest = 0;
    const uint32_t thread = reload_thread_index();
    const int column = Row::column(thread);
    const auto key_of = [&](int j) { return Transposed::key_of_four(Row::row(j / 4, thread), j % 4); };
#pragma unroll
    for (int j = 0; j < 4 * own; ++j) {
        const int four = Row::row(j / 4, thread), key = key_of(j);
        const bool is_there = four < fours && column < VALUE_DIM && key < block.count;
        bits[j / 4][j % 4] = load_piece(of.value + (first + key * stride) * VALUE_DIM + column, is_there);
    }
    uint32_t spoiled = 0;  // a bit for each of the thread's keys
#pragma unroll
    for (int j = 0; j < 4 * own; ++j) {
        const int four = Row::row(j / 4, thread), key = key_of(j);
        unpack(x, bits[j / 4][j % 4]);
        if (!all_finite(x)) {
            make_zero(bits[j / 4][j % 4], x);
            unpack(x, bits[j / 4][j % 4]);
            spoiled |= 1u << j;
        }
        if (four < fours && key < block.valid) largest = fmaxf(largest, largest_of(x));
    }
    const float descale = block_descale(largest);  // its barriers come after the stores of the CTA's keys
    make_keys_nan(of.key_out + block.first, stride * HEAD_DIM, spoiled, key_of);
#pragma unroll
    for (int j = 0; j < own; ++j) {
        const int four = Row::row(j, thread);
        uint32_t words[2][4];  // of the first and the last four columns, a key each
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            unpack(x, bits[j][k]);
            const uint2 of_key = converted(x, inverse(descale));
            words[0][k] = of_key.x;
            words[1][k] = of_key.y;
        }
        if (column >= VALUE_DIM || four >= fours) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) transposed.store(four, column + 4 * half, words[half]);
    }
    const Panels panels = panels_of<VALUE_DIM, VALUE_KEYS>(index / keys.blocks(), index % keys.blocks(), of.keys);
    transposed.write(of.value_out + panels.first_byte, panels.bytes, 32 * warps);
    if (threadIdx.x == 0) of.value_descale[index] = descale;
}
#endif

extern "C" __global__ void __launch_bounds__(32 * warps, CTAS) quantize(const __grid_constant__ Parameters of) {
    const int step = gridDim.x, group = GROUPED ? of.query_heads / of.key_heads : 1;
    const Rows queries{of.query, of.query_out, of.query_descale, of.query_lengths, of.queries, group};
    [[maybe_unused]] const int index = quantize_blocks<!GROUPED>(of, queries, blockIdx.x, step, [](int) {});
#if KEYS
    const Rows keys{of.key, of.key_out, of.key_descale, of.key_lengths, of.keys, 1};
    quantize_blocks<true>(of, keys, index - of.batch * of.key_heads * queries.blocks(), step,
                          [&](int index) { quantize_values(of, keys, index); });
#endif
}
