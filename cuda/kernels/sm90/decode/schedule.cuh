// The schedule of the decode kernel, which lengths on the device decide (stream-K, Osama et al., arXiv:2301.03598).
//
// The key blocks of all tiles form one sequence: by batch row, group of key heads, tile of rows, and block. Each team
// of CTAs has an equal share of it, so that lengths may differ as they like. If all tiles are alike, the share is
// rounded up to whole, half or quarter tiles (aligned_share). Where a boundary between shares falls inside of a tile,
// CTAs share the tile (partials.cuh). If the plan limits into how many parts a tile is split, boundaries move to the
// next place where that many equal parts meet. A tile counts as many blocks as it visits, at least one, so that some
// CTA writes its rows. All tiles together count fewer than 2^30 blocks (decode_division.py).
//
// A team has as many CTAs as a group has key heads: neighbours, or, where CTAs form pairs, every second one of twice as
// many (own_team). They go through the team's share together, each with one head of the group. A cache has the heads of
// a key side by side, and memory serves neighbours faster than pieces that lie far apart (docs/tuning/decode.md).
//
// tests/support/decode_schedule.py has the same arithmetic in Python.
#pragma once
#include "sm90/decode/partials.cuh"
#include "sm90/decode/sequences.cuh"
#include "sm90/decode/traits.cuh"

__device__ __forceinline__ int row_count(const Shape& shape, const Sequence& sequence) {
    return sequence.queries * shape.group;
}
__device__ __forceinline__ int tile_count(const Shape& shape, const Sequence& sequence) {
    return ceil_div(row_count(shape, sequence), Traits::rows);
}

// The keys that all rows of a sequence see, if its tiles are alike.
__device__ __forceinline__ Interval alike_keys(const Sequence& sequence) {
    const bool sees_some = sequence.is_there && sequence.first_key < sequence.length;
    return sees_some ? Interval{sequence.first_key, sequence.length} : Interval{0, 0};
}

// The keys that some row of a tile sees.
__device__ __forceinline__ Interval tile_keys(const Shape& shape, const Sequence& sequence, int tile) {
    const Interval none{0, 0};
    if (shape.tiles_alike) return alike_keys(sequence);
    const int first_row = tile * Traits::rows;
    const int last_row = min(first_row + Traits::rows, row_count(shape, sequence)) - 1;
    const int begin = keys_of(shape, sequence, first_row / shape.group).begin;
    const int end = keys_of(shape, sequence, last_row / shape.group).end;
    return sequence.is_there && begin < end ? Interval{begin, end} : none;
}

// The blocks that a tile counts whose rows see `keys`.
__device__ __forceinline__ int count_blocks(Interval keys) {
    return max(ceil_div(keys.end, Traits::keys) - keys.begin / Traits::keys, 1);
}

// Quotients of numbers that aren't negative. Unsigned divisions take fewer instructions.
__device__ __forceinline__ int divide(int a, int b) {
    return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
}
__device__ __forceinline__ int divide_up(int a, int b) { return divide(a + b - 1, b); }

// The blocks that the tiles of one key head of a sequence count, if these are alike.
__device__ __forceinline__ int count_alike_blocks(const Shape& shape, const Sequence& sequence) {
    return tile_count(shape, sequence) * count_blocks(alike_keys(sequence));
}

// The same of any tiles.
__device__ __forceinline__ int count_head_blocks(const Shape& shape, const Sequence& sequence) {
    const int tiles = tile_count(shape, sequence);
    if (shape.tiles_alike) return count_alike_blocks(shape, sequence);
    int blocks = 0;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) blocks += count_blocks(tile_keys(shape, sequence, tile));
    return blocks;
}

// Rounds up the share, where all tiles count as many blocks: to whole tiles, or to half a tile or a quarter. CTAs then
// have parts of fewer tiles, and leave fewer partials, or none. If the share would grow by more than a 32nd, or by more
// than two blocks, it stays: more would cost more than it saves (docs/tuning/decode-combining.md).
__device__ __forceinline__ int aligned_share(int share, int tile_blocks) {
    int unit = tile_blocks;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (unit % 2 == 0 && 2 * share <= unit) unit /= 2;
    }
    const int aligned = divide_up(share, unit) * unit;
    return aligned - share <= min(share / 32, 2) ? aligned : share;
}

// Which tile, of a batch row's and key head's.
struct TilePlace {
    int batch, head, tile;
};

// The part [begin, end) of the blocks that a tile counts, from the tile's first.
struct Part {
    int counted_blocks, begin, end;
};

// Describes a part of a tile some row of which sees `keys`.
__device__ __forceinline__ void describe(Tile& found, const Shape& shape, const Sequence& sequence, TilePlace place,
                                         Interval keys, Part part) {
    const bool sees_none = keys.begin == keys.end;
    found.batch = place.batch, found.key_head = place.head;
    found.first_row = place.tile * Traits::rows;
    found.rows = min(row_count(shape, sequence) - found.first_row, Traits::rows);
    found.first_query = sequence.first_query, found.queries = sequence.queries;
    found.length = sequence.length, found.first_key = sequence.first_key;
    found.cache_row = sequence.cache_row;
    found.first = sees_none ? 0 : keys.begin / Traits::keys + part.begin;
    found.last = sees_none ? 0 : keys.begin / Traits::keys + part.end;
    found.keys = keys;
    found.counted_blocks = part.counted_blocks, found.part_begin = part.begin, found.part_end = part.end;
}

// A CTA's way along its share. All lanes of a warp have one, and make it together.
struct Schedule {
    const Shape& shape;
    const Division& division;
    const int head_groups, team, member;
    int share;           // the blocks that each team has
    int batch, head_group, tile;  // the tile that `next` has found, or will find first …
    int start_in_share;           // … its start, in blocks from the start of this team's share …
    int counted_blocks = 0;       // … and the blocks that it counts; 0: it is not found yet
    Sequence sequence;

    __device__ __forceinline__ Schedule(const Shape& shape, const Division& division)
        : shape(shape), division(division), head_groups(division.head_groups), team(own_team(division).team),
          member(own_team(division).member) {
        // Each lane counts the blocks of as many sequences, and of all those before them.
        const int lane_sequences = ceil_div(shape.batch, 32), lane = threadIdx.x % 32;
        int own = 0, most = 0, least = no_limit;
        auto count = [&](int i, int blocks) {
            const bool is_there = i < lane_sequences && lane * lane_sequences + i < shape.batch;
            own += is_there ? blocks : 0;
            most = max(most, is_there ? blocks : 0), least = min(least, is_there ? blocks : no_limit);
        };
        // Behind the last sequence, the last one is read again: without branches, lengths are loaded at once.
        auto at = [&](int i) { return sequence_at(shape, min(lane * lane_sequences + i, shape.batch - 1)); };
        if (shape.tiles_alike) {
#pragma unroll 1
            for (int i = 0; i < lane_sequences; i += 4) {
#pragma unroll
                for (int j = 0; j < 4; ++j) count(i + j, count_alike_blocks(shape, at(i + j)) * head_groups);
            }
        } else {
#pragma unroll 1
            for (int i = 0; i < lane_sequences; ++i) count(i, count_head_blocks(shape, at(i)) * head_groups);
        }
        int end = own;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int before = __shfl_up_sync(all_lanes, end, distance);
            if (lane >= distance) end += before;
        }
        const int total = __shfl_sync(all_lanes, end, 31);
        share = max(divide_up(total, division.teams), division.least_share);
        if (!shape.query_offsets) {
            most = __reduce_max_sync(all_lanes, most), least = __reduce_min_sync(all_lanes, least);
            const int head_tiles = ceil_div(shape.queries * shape.group, Traits::rows);
            const bool all_alike = most == least && (shape.tiles_alike || head_tiles == 1);
            const int tiles = head_groups * head_tiles;  // of a sequence, that a team attends to
            if (all_alike) share = aligned_share(share, tiles == 1 ? most : divide(most, tiles));
        }
        int position = static_cast<int>(min(static_cast<int64_t>(team) * share, static_cast<int64_t>(total)));
        start_in_share = 0;
        batch = shape.batch, head_group = 0, tile = 0;
        if (position == total) return;

        const int owner = __reduce_min_sync(all_lanes, position < end ? lane : 31);
        position -= __shfl_sync(all_lanes, end - own, owner);
        find(owner * lane_sequences, position);
    }

    // The next part of a tile in this team's share, of this CTA's head; false where there is none.
    __device__ __forceinline__ bool next(Tile& found) {
        while (true) {
            if (counted_blocks > 0) advance();
            if (batch >= shape.batch || start_in_share >= share) return false;
            const Interval keys = tile_keys(shape, sequence, tile);
            counted_blocks = count_blocks(keys);
            const int begin = part_boundary(-start_in_share, counted_blocks, division.max_parts);
            const int end = part_boundary(share - start_in_share, counted_blocks, division.max_parts);
            // If parts are limited, some sharers have none. They arrive all the same (shared_tile.cuh).
            if (!Traits::split && begin >= end) continue;
            const int head = head_group * division.team_size + member;
            const int ahead = -start_in_share, behind = start_in_share + counted_blocks - share;
            describe(found, shape, sequence, {batch, head, tile}, keys, {counted_blocks, begin, end});
            note_sharers(found, ahead > 0 ? divide_up(ahead, share) : 0, behind > 0 ? divide_up(behind, share) : 0);
            return true;
        }
    }

private:
    static constexpr int no_limit = 0x7fffffff;

    // Notes who shares a tile of which `ahead` teams before this one have parts, and `behind` teams after it.
    __device__ __forceinline__ void note_sharers(Tile& found, int ahead, int behind) const {
        const int first = (team - ahead) / sharer_ctas, last = (team + behind) / sharer_ctas;
        found.index = team / sharer_ctas - first, found.sharers = last - first + 1;
        const bool is_second = team % 2 == 1;
        if (Traits::pairs && is_second && ahead > 0) {
            found.in_pair = InPair::gives;
        } else if (Traits::pairs && !is_second && behind > 0) {
            found.in_pair = InPair::takes;
        } else {
            found.in_pair = InPair::alone;
        }
    }

    // Finds the tile that has block `position`, counted from the first one of sequence `index`.
    __device__ __forceinline__ void find(int index, int position) {
        int head_blocks;
#pragma unroll 1
        for (;; ++index) {
            enter(index);
            head_blocks = count_head_blocks(shape, sequence);
            if (position < head_blocks * head_groups) break;
            position -= head_blocks * head_groups;
        }
        head_group = head_groups == 1 ? 0 : divide(position, head_blocks);
        position -= head_group * head_blocks;
#pragma unroll 1
        for (;; ++tile) {
            const int of_tile = count_blocks(tile_keys(shape, sequence, tile));
            if (position < of_tile) break;
            position -= of_tile;
        }
        start_in_share = -position;
    }

    __device__ __forceinline__ void enter(int index) {
        batch = index, head_group = 0, tile = 0;
        if (batch < shape.batch) sequence = sequence_at(shape, batch);
    }

    // Goes on to the next tile. That takes loads, for which the first tile need not wait.
    __device__ __forceinline__ void advance() {
        start_in_share += counted_blocks;
        if (++tile < tile_count(shape, sequence)) return;
        tile = 0;
        if (++head_group < head_groups) return;
        do {
            enter(batch + 1);
        } while (batch < shape.batch && sequence.queries == 0);
    }
};
