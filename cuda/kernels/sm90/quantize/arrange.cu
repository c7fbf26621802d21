// Arrays that come in e4m3, as the forward kernel takes them (jax_flash/cuda/sm90/float8.py): values transposed, their
// keys permuted; descales positive, one for each block of 128 rows; of a value that isn't finite 0, and its key NaN.
//
// A CTA has a block of keys and their values; or a block of queries, of all heads of a group, which only signs of
// descales change.
//
// Defines:
//   HEAD_DIM   of rows of queries and keys, VALUE_DIM of values: multiples of 16
//   VALUE_KEYS keys of a panel's column of V, 128 or 64
//   WARPS      of a CTA
#include "parameters.cuh"
#include "ptx/global.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"
#include "sm90/quantize/lanes.cuh"
#include "sm90/quantize/transposed_values.cuh"

constexpr int warps = WARPS;
constexpr int lane_columns = 16;  // that a lane has of a row, 16 bytes
constexpr uint32_t magnitudes = 0x7f7f7f7f, signs = 0x80808080;  // of four elements; a magnitude of 0x7f is NaN

template <int dim>
using Row = Lanes<dim, lane_columns, warps>;

// A lane's columns of a row: four words. Zeros where there is no row.
struct Columns {
    uint32_t words[4];

    template <int dim>
    __device__ __forceinline__ void load(const unsigned char* row, bool is_row) {
        uint4 bits{0, 0, 0, 0};
        if (is_row && Row<dim>::column() < dim) {
            bits = *reinterpret_cast<const uint4*>(row + Row<dim>::column());
        }
        words[0] = bits.x;
        words[1] = bits.y;
        words[2] = bits.z;
        words[3] = bits.w;
    }

    template <int dim>
    __device__ __forceinline__ void store(unsigned char* row, bool is_row) const {
        if (is_row && Row<dim>::column() < dim) {
            *reinterpret_cast<uint4*>(row + Row<dim>::column()) = {words[0], words[1], words[2], words[3]};
        }
    }
};

// The sign bits of those of four elements that are NaN.
__device__ __forceinline__ uint32_t nan_bits(uint32_t word) { return ((word & magnitudes) + 0x01010101) & signs; }

// … and all bits of theirs.
__device__ __forceinline__ uint32_t nan_bytes(uint32_t word) { return (nan_bits(word) >> 7) * 0xff; }

// The descale of a block, split into one that is positive and what its elements take on.
struct Descale {
    float positive = 1;
    uint32_t flipped = 0, nan = 0;
    bool is_zero = false;

    // Of the block of a head: each has a descale, or all have one. Without descales it is 1.
    __device__ Descale(const float* given, int of_head, int head, int block) {
        if (given == nullptr) return;
        const float descale = global::read_only(given + head * of_head + (of_head > 1 ? block : 0));
        if ((__float_as_uint(descale) & 0x7f800000u) == 0x7f800000u) {
            nan = magnitudes;
        } else if (descale == 0) {
            is_zero = true;
        } else {
            positive = fabsf(descale);
            flipped = descale < 0 ? signs : 0;
        }
    }

    __device__ __forceinline__ uint32_t of(uint32_t word) const {
        if (is_zero) word &= nan_bytes(word);
        return (word ^ flipped) | nan;
    }
};

__device__ __forceinline__ void arrange_queries(const Parameters& of, int index) {
    using QueryRow = Row<HEAD_DIM>;
    const int blocks = ceil_div(of.queries, rows_per_descale), group = of.query_heads / of.key_heads;
    const int block = index % blocks, head = index / blocks;  // of all batch rows
    const Descale descale(of.given_query_descale, of.query_descales_of_head, head, block);
    if (threadIdx.x == 0) of.query_descale[index] = descale.positive;
    if (of.query_out == nullptr) return;  // no descale, no change
    const int row = block * rows_per_descale, batch = head / of.key_heads, key_head = head % of.key_heads;
    const int64_t stride = static_cast<int64_t>(of.query_heads) * HEAD_DIM;
    const int64_t first = (static_cast<int64_t>(batch) * of.queries + row) * stride + key_head * group * HEAD_DIM;
    const int count = min(of.queries - row, rows_per_descale);
#pragma unroll 1
    for (int head = 0; head < group; ++head) {
        Columns columns[QueryRow::own];
#pragma unroll
        for (int i = 0; i < QueryRow::own; ++i) {
            const int row = QueryRow::row(i);
            columns[i].load<HEAD_DIM>(of.query + first + row * stride + head * HEAD_DIM, row < count);
        }
#pragma unroll
        for (int i = 0; i < QueryRow::own; ++i) {
            const int row = QueryRow::row(i);
#pragma unroll
            for (uint32_t& word : columns[i].words) word = descale.of(word);
            columns[i].store<HEAD_DIM>(of.query_out + first + row * stride + head * HEAD_DIM, row < count);
        }
    }
}

__device__ __forceinline__ void arrange_keys(const Parameters& of, int index) {
    using KeyRow = Row<HEAD_DIM>;
    using ValueRow = Row<VALUE_DIM>;
    using Transposed = TransposedValues<VALUE_DIM, VALUE_KEYS, lane_columns>;
    constexpr int fours = Transposed::fours, own = fours > ValueRow::at_once ? fours / ValueRow::at_once : 1;
    __shared__ Transposed transposed;
    __shared__ unsigned char finite[rows_per_descale];
    const int blocks = ceil_div(of.keys, rows_per_descale), block = index % blocks, head = index / blocks;
    const int row = block * rows_per_descale, count = min(of.keys - row, rows_per_descale);
    const int64_t first_row = static_cast<int64_t>(head / of.key_heads) * of.keys + row;
    const int64_t key_stride = static_cast<int64_t>(of.key_heads) * HEAD_DIM;
    const int64_t value_stride = static_cast<int64_t>(of.key_heads) * VALUE_DIM;
    const int64_t first_key = first_row * key_stride + head % of.key_heads * HEAD_DIM;
    const unsigned char* const value = of.value + first_row * value_stride + head % of.key_heads * VALUE_DIM;

    Columns values[own][4], keys[KeyRow::own];
#pragma unroll
    for (int j = 0; j < 4 * own; ++j) {
        const int four = ValueRow::row(j / 4), key = Transposed::key_of_four(four, j % 4);
        values[j / 4][j % 4].load<VALUE_DIM>(value + key * value_stride, four < fours && key < count);
    }
#pragma unroll
    for (int i = 0; i < KeyRow::own; ++i) {
        const int row = KeyRow::row(i);
        keys[i].load<HEAD_DIM>(of.key + first_key + row * key_stride, row < count);
    }
    const Descale of_keys(of.given_key_descale, of.key_descales_of_head, head, block);
    const Descale of_values(of.given_value_descale, of.value_descales_of_head, head, block);
    if (threadIdx.x == 0) {
        of.key_descale[index] = of_keys.positive;
        of.value_descale[index] = of_values.positive;
    }
#pragma unroll
    for (int j = 0; j < 4 * own; ++j) {
        const int four = ValueRow::row(j / 4), key = Transposed::key_of_four(four, j % 4);
        uint32_t (&words)[4] = values[j / 4][j % 4].words;
        uint32_t found = 0;
#pragma unroll
        for (uint32_t& word : words) {
            word = of_values.of(word);
            found |= nan_bits(word);
        }
        if (found != 0) {
#pragma unroll
            for (uint32_t& word : words) word &= ~nan_bytes(word);
        }
#pragma unroll
        for (int distance = 1; distance < ValueRow::width; distance *= 2) {
            found |= __shfl_xor_sync(all_lanes, found, distance);
        }
        if (ValueRow::column() == 0 && four < fours) finite[key] = found == 0;
    }
#pragma unroll
    for (int j = 0; j < own; ++j) {
        const int four = ValueRow::row(j);
        if (ValueRow::column() >= VALUE_DIM || four >= fours) continue;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t words[4] = {values[j][0].words[i], values[j][1].words[i], values[j][2].words[i],
                                 values[j][3].words[i]};
            transposed.store(four, ValueRow::column() + 4 * i, words);
        }
    }
    const Panels panels = panels_of<VALUE_DIM, VALUE_KEYS>(head, block, of.keys);
    transposed.write(of.value_out + panels.first_byte, panels.bytes, 32 * warps);
#pragma unroll
    for (int i = 0; i < KeyRow::own; ++i) {
        const int row = KeyRow::row(i);
        const uint32_t nan = row < count && finite[row] == 0 ? magnitudes : 0;
#pragma unroll
        for (uint32_t& word : keys[i].words) word = of_keys.of(word) | nan;
        keys[i].store<HEAD_DIM>(of.key_out + first_key + row * key_stride, row < count);
    }
}

extern "C" __global__ void __launch_bounds__(32 * warps) arrange(const __grid_constant__ Parameters of) {
    const int of_keys = of.batch * of.key_heads * ceil_div(of.keys, rows_per_descale);
    const int index = blockIdx.x;
    if (index < of_keys) {
        arrange_keys(of, index);
    } else {
        arrange_queries(of, index - of_keys);
    }
}
