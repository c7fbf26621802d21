// Values of a block of keys that has one descale, as the forward kernel takes them in 8 bits, transposed and their keys
// permuted (jax_flash/cuda/sm90/float8.py): where they lie in memory, and in shared memory until the block is whole.
#pragma once
#include "common/float8.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"
#include "ptx/warpgroup.cuh"

// Bytes of four rows, of four columns each, become bytes of four columns.
__device__ __forceinline__ void transpose(uint32_t (&words)[4]) {
    const uint32_t first = byte_permute<0x5140>(words[0], words[1]), second = byte_permute<0x5140>(words[2], words[3]);
    const uint32_t third = byte_permute<0x7362>(words[0], words[1]), last = byte_permute<0x7362>(words[2], words[3]);
    words[0] = byte_permute<0x5410>(first, second);
    words[1] = byte_permute<0x7632>(first, second);
    words[2] = byte_permute<0x5410>(third, last);
    words[3] = byte_permute<0x7632>(third, last);
}

// `value_dim` columns, in panels of `panel_keys` keys; a lane has `lane_columns` columns of a key.
template <int value_dim, int panel_keys, int lane_columns>
struct TransposedValues {
    static constexpr int keys = rows_per_descale;
    static constexpr int fours = keys / 4, parts = keys / panel_keys, rows = value_dim / parts;

    uint4 chunks[keys * value_dim / 16];

    // Four keys, whose elements of a column are neighbours in the panels of V^T: of 16 keys two and the two that are 8
    // behind.
    __device__ static int key_of_four(int four, int i) { return four / 4 * 16 + four % 4 * 2 + i / 2 * 8 + i % 2; }

    // Where those of a column lie in the panels. A row has a column, or more if panels have fewer keys.
    __device__ static int place(int four, int column) {
        const int key = 4 * four;  // as they are ordered
        return (key / panel_keys * rows + column % rows) * keys + column / rows * panel_keys + key % panel_keys;
    }

    // … and in shared memory, where rows of neighbouring lanes have their chunks of 16 bytes in different orders: they
    // would begin in one bank.
    __device__ static int spread(int place) { return place ^ place / (lane_columns * keys) % 8 * 16; }

    // Stores four columns of four keys: a word for each key. The words are transposed.
    __device__ __forceinline__ void store(int four, int column, uint32_t (&words)[4]) {
        transpose(words);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            *reinterpret_cast<uint32_t*>(reinterpret_cast<unsigned char*>(chunks) + spread(place(four, column + i))) =
                words[i];
        }
    }

    // Writes the first `bytes` of the panels, by all `threads` of the CTA, which have stored all of them.
    __device__ __forceinline__ void write(unsigned char* out, int bytes, int threads) const {
        __syncthreads();
        for (int place = 16 * reload_thread_index(); place < bytes; place += 16 * threads) {
            *reinterpret_cast<uint4*>(out + place) = chunks[spread(place) / 16];
        }
    }
};

// Where the panels of a block are, and how many bytes they have: the last block may have fewer panels.
struct Panels {
    int64_t first_byte;
    int bytes;
};

template <int value_dim, int panel_keys>
__device__ __forceinline__ Panels panels_of(int head, int block, int keys) {
    constexpr int of_block = rows_per_descale / panel_keys, panel_bytes = panel_keys * value_dim;
    const int panels = (keys + panel_keys - 1) / panel_keys, first = block * of_block;
    return {(static_cast<int64_t>(head) * panels + first) * panel_bytes, min(of_block, panels - first) * panel_bytes};
}
