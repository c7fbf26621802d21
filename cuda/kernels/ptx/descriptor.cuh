// Shared-memory matrix descriptors of wgmma, for tiles that TMA wrote with the 128-byte swizzle.
//
// A tile lies in shared memory as panels. A panel has 128 bytes of each row, 64 columns of 16-bit elements, and starts
// at a 1024-byte boundary. The 16-byte chunk c of row r is stored as chunk c ^ (r % 8).
#pragma once
#include "types.cuh"

namespace descriptor {

constexpr int panel_columns = 64;
constexpr int row_bytes = 128;
constexpr int atom_bytes = 1024;  // 8 rows: the swizzle's period

// Bytes of a panel with this many rows.
__device__ constexpr int panel_bytes(int rows) { return rows * row_bytes; }

__device__ __forceinline__ uint64_t encode(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes) {
    constexpr uint64_t swizzle_128 = 1ull << 62;
    return swizzle_128 | static_cast<uint64_t>(stride_bytes >> 4) << 32 |
           static_cast<uint64_t>(leading_bytes >> 4) << 16 | ((address & 0x3ffff) >> 4);
}

// K-major: the contraction runs along the columns. Step s of 32 bytes (k16 of 16-bit elements), of a tile with `rows`
// rows, starts at `k_major_offset`. The leading offset is unused with a swizzled layout.
__device__ __forceinline__ uint64_t k_major(uint32_t address) { return encode(address, 16, atom_bytes); }
__device__ constexpr int k_major_offset(int step, int rows) {
    return step / 4 * panel_bytes(rows) + step % 4 * 32;
}

// MN-major: the contraction runs along the rows, so the operand is transposed. Its other extent spans panels, which are
// `rows` rows apart in memory. Step s of 16 rows starts at `mn_major_offset`.
__device__ __forceinline__ uint64_t mn_major(uint32_t address, int rows) {
    return encode(address, panel_bytes(rows), atom_bytes);
}
__device__ constexpr int mn_major_offset(int step) { return step * 16 * row_bytes; }

// Descriptors by their lower word, which holds the address: 64-bit arithmetic takes more uniform registers than there
// are. `at` gives the descriptor that starts a number of bytes (a multiple of 16) from there.
constexpr uint32_t high_word = 1u << 30 | atom_bytes >> 4;
__device__ __forceinline__ uint32_t k_major_low(uint32_t address) { return (address & 0x3ffff) >> 4 | 1u << 16; }
__device__ __forceinline__ uint32_t mn_major_low(uint32_t address, int rows) {
    return (address & 0x3ffff) >> 4 | static_cast<uint32_t>(panel_bytes(rows) >> 4) << 16;
}
__device__ __forceinline__ uint64_t at(uint32_t low, int bytes) {
    return static_cast<uint64_t>(high_word) << 32 | (low + (bytes >> 4));
}

// `descriptor` moved by a number of bytes (a multiple of 16).
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, int bytes) { return descriptor + (bytes >> 4); }

// Byte offset of a 16-byte chunk inside a panel.
__device__ __forceinline__ int swizzled_offset(int row, int chunk) {
    return row * row_bytes + ((chunk ^ (row & 7)) << 4);
}

}  // namespace descriptor
