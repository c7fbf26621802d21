// Parts of a tile that several CTAs share (schedule.cuh). Each sharer, a CTA or a pair, leaves its partial in scratch
// memory, and the last one adds them up (shared_tile.cuh).
#pragma once
#include "ptx/global.cuh"
#include "sm90/decode/traits.cuh"

// Where within a tile a part ends or begins, if a boundary between shares is `offset` blocks behind the tile's start.
__device__ __forceinline__ int part_boundary(int offset, int counted_blocks, int max_parts) {
    if (offset <= 0) return 0;
    if (offset >= counted_blocks) return counted_blocks;
    if (max_parts >= counted_blocks) return offset;
    const int step = ceil_div(counted_blocks, max_parts);
    return min(ceil_div(offset, step) * step, counted_blocks);
}

// A team (schedule.cuh), and which of its members a CTA is.
struct TeamMember {
    int team, member;
};

// This CTA's. The CTAs of a pair (pair.cuh) are neighbours, in teams 2j and 2j + 1. If the number of teams is odd, the
// CTAs of the last one form no pairs. If the number of CTAs would be odd, too, there is one more, without a share.
__device__ __forceinline__ TeamMember own_team(const Division& division) {
    const uint32_t cta = blockIdx.x, size = division.team_size;
    const bool in_pair = Traits::pairs && cta < division.teams / 2 * 2 * size;
    const uint32_t number = in_pair ? cta / 2 : cta;  // of the pair, or of the CTA
    // number / size, of numbers that are less than 2^16.
    const uint32_t quotient = static_cast<uint64_t>(number) * division.team_size_inverse >> 31;
    const int member = number - quotient * size;
    return {static_cast<int>(in_pair ? 2 * quotient + cta % 2 : quotient), member};
}

// CTAs of a sharer.
constexpr int sharer_ctas = Traits::pairs ? 2 : 1;

// The place in scratch memory of the sharer that this CTA is, or is in. Sharers that have the same heads are next to
// one another, in the order of their teams.
__device__ __forceinline__ int own_place(const Division& division) {
    const TeamMember own = own_team(division);
    return own.member * ceil_div(division.teams, sharer_ctas) + own.team / sharer_ctas;
}

// The number of a partial, by its sharer's place. A sharer has two slots. Slot 0 is for its part of a tile that began
// in an earlier share, slot 1 for its part of the tile that begins in its share and goes on in the next. A pair's share
// is those of both CTAs.
__device__ __forceinline__ int partial_at(int place, bool is_first) { return 2 * place + is_first; }

// The same of a sharer of a tile, from the place of the first one.
__device__ __forceinline__ int shared_partial(int first_place, int sharer) {
    return partial_at(first_place + sharer, sharer == 0);
}

constexpr int node_partials_log2 = 3, node_partials = 1 << node_partials_log2;  // of a node, at most

template <int rows, int columns>
struct Partials {
    static constexpr int levels = 3;  // of nodes (shared_tile.cuh)
    // From a partial to the next: statistics of a row, and four columns of it.
    static constexpr int statistics_step = levels * rows, values_step = rows * columns / 4;

    float* out;           // (2 · sharers, row, column): unnormalised
    float2* statistics;   // (2 · sharers, level, row): maximum and sum
    uint64_t* arrivals;   // (2 · sharers, level)

    __device__ __forceinline__ float* row(int partial, int row) const {
        return out + (static_cast<int64_t>(partial) * rows + row) * columns;
    }
    __device__ __forceinline__ float2* row_statistics(int partial, int row, int level = 0) const {
        return statistics + (static_cast<int64_t>(partial) * levels + level) * rows + row;
    }
    __device__ __forceinline__ uint64_t* arrivals_at(int partial, int level) const {
        return arrivals + partial * levels + level;
    }

    // Fetches the count of a sharer's first node to L2.
    __device__ __forceinline__ void prefetch_count(const Tile& tile, const Division& division) const {
        const int first_place = own_place(division) - tile.index;
        global::prefetch(arrivals_at(shared_partial(first_place, tile.index & -node_partials), 0));
    }
};
