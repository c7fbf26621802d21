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

// A CTA's place in scratch memory: CTAs that have the same heads, of all teams, are next to one another.
__device__ __forceinline__ int cta_place(const Division& division, int member, int team) {
    return member * division.teams + team;
}

// The CTAs that share a tile: one of each of `count` teams, the member that has the tile's head. Some may have no part,
// if the call limits how many there are.
struct Sharers {
    const Tile& tile;
    const int max_parts;
    int first, count;  // teams
    int first_cta;     // the place of the first team's

    __device__ __forceinline__ Sharers(const Tile& tile, const Division& division)
        : tile(tile), max_parts(division.max_parts) {
        first = tile.start / tile.share;
        count = (tile.start + tile.counted_blocks - 1) / tile.share - first + 1;
        first_cta = cta_place(division, tile.key_head % division.team_size, first);
    }

    // Where in the tile the part of the team `first + index` begins; that of the next is its end.
    __device__ __forceinline__ int begin(int index) const {
        return part_boundary((first + index) * tile.share - tile.start, tile.counted_blocks, max_parts);
    }
    __device__ __forceinline__ bool has_part(int index) const { return begin(index) < begin(index + 1); }
    // A CTA has two slots. Slot 0: its part of a tile that began in an earlier share. Slot 1: its part of the tile that
    // begins in its share and goes on in the next.
    __device__ __forceinline__ int partial(int index) const { return 2 * (first_cta + index) + (index == 0); }
    __device__ __forceinline__ int partial_of(int team) const { return partial(team - first); }
};

template <int rows, int columns>
struct Partials {
    float* out;          // (2 · CTAs, row, column): unnormalised
    float2* statistics;  // (2 · CTAs, row): maximum and sum
    Tile* tiles;         // (CTAs): the shared tile that begins in a CTA's share; `no_more` where there is none

    __device__ __forceinline__ float* row(int partial, int row) const {
        return out + (static_cast<int64_t>(partial) * rows + row) * columns;
    }
    __device__ __forceinline__ float2* row_statistics(int partial, int row) const {
        return statistics + static_cast<int64_t>(partial) * rows + row;
    }
};
