// Parts of a tile that several CTAs share (schedule.cuh). Each leaves its partial in scratch memory, and the combine
// kernel (combine.cu) adds them up.
#pragma once
#include "sm90/decode/tile.cuh"

// Where within a tile a part ends or begins, if a boundary between shares is `offset` blocks behind the tile's start.
__device__ __forceinline__ int part_boundary(int offset, int counted_blocks, int max_parts) {
    if (offset <= 0) return 0;
    if (offset >= counted_blocks) return counted_blocks;
    if (max_parts >= counted_blocks) return offset;
    const int step = ceil_div(counted_blocks, max_parts);
    return min(ceil_div(offset, step) * step, counted_blocks);
}

// This CTA's team (schedule.cuh), and which of its members it is.
__device__ __forceinline__ int own_team(const Division& division) { return blockIdx.x / division.team_size; }
__device__ __forceinline__ int own_member(const Division& division) { return blockIdx.x % division.team_size; }

// This CTA's place in scratch memory: CTAs that have the same heads, of all teams, are next to one another.
__device__ __forceinline__ int own_place(const Division& division) {
    return own_member(division) * division.teams + own_team(division);
}

// The number of a partial, by its CTA's place. A CTA has two slots. Slot 0 is for its part of a tile that began in an
// earlier share, slot 1 for its part of the tile that begins in its share and goes on in the next.
__device__ __forceinline__ int partial_at(int place, bool is_first) { return 2 * place + is_first; }

// What the combine kernel is told of a partial: the tile, and the CTAs that share it. They are neighbours in scratch
// memory. If the call limits how many parts a tile has, some of them may have no part.
struct alignas(16) SplitTile {
    int sharers;  // CTAs that share the tile
    int index;    // the partial's own among them
    int first_row, first_query;
    int rows, key_head;  // no rows: there is no such partial
    int start, share;    // the tile's start in the share of its first CTA, and the blocks that each CTA has
    int counted_blocks;

    static __device__ __forceinline__ SplitTile of(const Tile& tile, const Division& division) {
        if (tile.rows == 0) return {};
        const int first_team = tile.start / tile.share, start = tile.start - first_team * tile.share;
        return {ceil_div(start + tile.counted_blocks, tile.share),
                own_team(division) - first_team,
                tile.first_row,
                tile.first_query,
                tile.rows,
                tile.key_head,
                start,
                tile.share,
                tile.counted_blocks};
    }

    __device__ __forceinline__ bool has_part(int of, int max_parts) const {
        return begin(of, max_parts) < begin(of + 1, max_parts);
    }

private:
    __device__ __forceinline__ int begin(int of, int max_parts) const {
        return part_boundary(of * share - start, counted_blocks, max_parts);
    }
};

static_assert(sizeof(SplitTile) == 48, "the plan has as many bytes for it (decode_plan.py)");

template <int rows, int columns>
struct Partials {
    float* out;          // (2 · CTAs, row, column): unnormalised
    float2* statistics;  // (2 · CTAs, row): maximum and sum
    SplitTile* tiles;    // (2 · CTAs)

    __device__ __forceinline__ float* row(int partial, int row) const {
        return out + (static_cast<int64_t>(partial) * rows + row) * columns;
    }
    __device__ __forceinline__ float2* row_statistics(int partial, int row) const {
        return statistics + static_cast<int64_t>(partial) * rows + row;
    }
};
