// The schedule of the decode kernel, which lengths on the device decide (stream-K, Osama et al., arXiv:2301.03598).
//
// The key blocks of all tiles form one sequence: by batch row, key head, tile of rows, and block. It is cut into shares, so
// that lengths may differ as they like. Each CTA has a large share first. What is left are small ones, which go to
// whichever CTA comes for the next: some multiprocessors are farther from memory than others. Where a boundary between
// shares falls inside of a tile, they share the tile (combine.cuh). If a call limits into how many parts a tile is split,
// boundaries move to the next place where that many equal parts meet. A tile without blocks counts as one, so that
// somebody writes its rows.
//
// tests/support/decode_schedule.py has the same arithmetic in Python.
#pragma once
#include "sm90/decode/sequences.cuh"
#include "sm90/decode/traits.cuh"

constexpr uint32_t all_lanes = 0xffffffff;

__device__ __forceinline__ int row_count(const Shape& shape, const Sequence& sequence) {
    return sequence.queries * shape.group;
}
__device__ __forceinline__ int tile_count(const Shape& shape, const Sequence& sequence) {
    return ceil_div(row_count(shape, sequence), Traits::rows);
}

// The keys that some row of a tile sees.
__device__ __forceinline__ Interval tile_keys(const Shape& shape, const Sequence& sequence, int tile) {
    const int first_row = tile * Traits::rows;
    const int last_row = min(first_row + Traits::rows, row_count(shape, sequence)) - 1;
    const int begin = keys_of(shape, sequence, first_row / shape.group).begin;
    const int end = keys_of(shape, sequence, last_row / shape.group).end;
    return sequence.is_there && begin < end ? Interval{begin, end} : Interval{0, 0};
}
__device__ __forceinline__ int units_of(Interval keys) {
    return max(ceil_div(keys.end, Traits::keys) - keys.begin / Traits::keys, 1);
}

// The units of one key head of a sequence.
__device__ __forceinline__ int64_t head_units(const Shape& shape, const Sequence& sequence) {
    const int tiles = tile_count(shape, sequence);
    if (tiles == 0) return 0;
    if (shape.tiles_alike) return static_cast<int64_t>(tiles) * units_of(tile_keys(shape, sequence, 0));
    int64_t units = 0;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) units += units_of(tile_keys(shape, sequence, tile));
    return units;
}

// What a launch allows of shares.
struct ShareLimits {
    int count;        // at most
    int least;        // blocks of a share, at least, unless there are fewer
    int least_small;  // … and of a small one
};

__device__ __forceinline__ int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// All work is in large shares, one for each CTA, where it isn't worth while to hold some back.
__device__ __forceinline__ Shares shares_of(int64_t units, const ShareLimits& limits) {
    constexpr int held_back = 4;  // the inverse of how much of the work goes into small shares
    const int ctas = gridDim.x;
    const int64_t even = max(divided_up(units, ctas), static_cast<int64_t>(limits.least));
    if (limits.count <= ctas || even < held_back * limits.least_small) return {even, even, limits.count};
    const int64_t large = even - even / held_back;
    const int64_t small = divided_up(units - ctas * large, limits.count - ctas);
    return {large, max(small, static_cast<int64_t>(limits.least_small)), ctas};
}

// Where within a tile a part ends or begins, if a boundary between shares is `offset` units behind the tile's start.
__device__ __forceinline__ int part_boundary(int64_t offset, int units, int max_parts) {
    if (offset <= 0) return 0;
    if (offset >= units) return units;
    if (max_parts >= units) return static_cast<int>(offset);
    const int step = ceil_div(units, max_parts);
    return min(ceil_div(static_cast<int>(offset), step) * step, units);
}

// A way along one share after another. All lanes of a warp have one, and make it together.
struct Schedule {
    const Shape& shape;
    const int max_parts;  // of a tile
    int64_t total;        // units of all tiles
    int64_t last_units;   // of the last sequence that the lane looked at
    Shares shares;
    int share;            // the one that it is in
    int64_t begin, end;   // the share's units
    int64_t start;        // the next tile's first unit
    int batch, head, tile;
    Sequence sequence;

    __device__ __forceinline__ Schedule(const Shape& shape, int max_parts, const ShareLimits& limits)
        : shape(shape), max_parts(max_parts) {
        total = last_units = 0;
#pragma unroll 1
        for (int index = threadIdx.x % 32; index < shape.batch; index += 32) {
            total += last_units = units_of_sequence(index);
        }
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) total += __shfl_xor_sync(all_lanes, total, distance);
        shares = shares_of(total, limits);
    }

    // Goes to a share's first tile; false if there is no such share.
    __device__ __forceinline__ bool enter(int index) {
        share = index;
        begin = shares.begin(index), end = min(shares.begin(index + 1), total);
        if (begin >= total) return false;
        find(begin);
        return true;
    }

    // The next part of a tile in the share; false where there is none.
    __device__ __forceinline__ bool next(Tile& found) {
        while (start < end) {
            const Interval keys = tile_keys(shape, sequence, tile);
            const int units = units_of(keys);
            const int first = part_boundary(begin - start, units, max_parts);
            const int last = part_boundary(end - start, units, max_parts);
            if (first < last) describe(found, keys, units, first, last);
            start += units;
            advance();
            if (first < last) return true;
        }
        return false;
    }

private:
    __device__ __forceinline__ int64_t units_of_sequence(int index) const {
        if (index >= shape.batch) return 0;
        return head_units(shape, sequence_at(shape, index)) * shape.key_heads;
    }

    // Finds the tile that has unit `position` of all. If there are few sequences, each lane knows its own's units.
    __device__ __forceinline__ void find(int64_t position) {
        const int lane = threadIdx.x % 32;
        start = position;
#pragma unroll 1
        for (int first = 0; first < shape.batch; first += 32) {
            const int64_t own = shape.batch <= 32 ? last_units : units_of_sequence(first + lane);
            int64_t end_of_own = own;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                const int64_t before = __shfl_up_sync(all_lanes, end_of_own, distance);
                if (lane >= distance) end_of_own += before;
            }
            const int64_t end_of_all = __shfl_sync(all_lanes, end_of_own, 31);
            if (position < end_of_all) {
                const int owner = __reduce_min_sync(all_lanes, position < end_of_own ? lane : 31);
                position -= __shfl_sync(all_lanes, end_of_own - own, owner);
                go_to(first + owner);
                break;
            }
            position -= end_of_all;
        }
        const int64_t units = head_units(shape, sequence);
        head = static_cast<int>(position / units);
        position -= head * units;
#pragma unroll 1
        for (;; ++tile) {
            const int of_tile = units_of(tile_keys(shape, sequence, tile));
            if (position < of_tile) break;
            position -= of_tile;
        }
        start -= position;
    }

    __device__ __forceinline__ void go_to(int index) {
        batch = index, head = 0, tile = 0;
        if (batch < shape.batch) sequence = sequence_at(shape, batch);
    }

    __device__ __forceinline__ void advance() {
        if (++tile < tile_count(shape, sequence)) return;
        tile = 0;
        if (++head < shape.key_heads) return;
        do {
            go_to(batch + 1);
        } while (batch < shape.batch && sequence.queries == 0);
    }

    __device__ __forceinline__ void describe(Tile& found, Interval keys, int units, int first, int last) const {
        const bool sees_none = keys.begin == keys.end;
        found.batch = batch, found.key_head = head;
        found.first_row = tile * Traits::rows;
        found.rows = min(row_count(shape, sequence) - found.first_row, Traits::rows);
        found.first_query = sequence.first_query, found.queries = sequence.queries;
        found.length = sequence.length, found.first_key = sequence.first_key;
        found.cache_row = sequence.cache_row;
        found.first = sees_none ? 0 : keys.begin / Traits::keys + first;
        found.last = sees_none ? 0 : keys.begin / Traits::keys + last;
        found.keys = keys;
        found.units = units, found.part_begin = first, found.part_end = last;
        found.start = start, found.share = share, found.shares = shares;
    }
};
