// In which order a tile of keys visits its blocks of queries, and in which order tiles add to a block's dQ.
//
// By default a tile adds whenever it is there, and float32 sums differ in their last bits from run to run. Where they
// must not, each block has a counter, and a tile adds in its turn: when as many tiles have as its `rank` says. So as
// not to wait, tiles come to a block in that order and some blocks apart:
//
//   tiles that see different blocks (causal, windowed)   go from their first block to their last, those with the later
//       keys first: where blocks are as long as tiles or shorter, whoever started together stays a block or more apart.
//       Or the other way about, in the last section (key_tile_at): from their last block to their first, those with
//       the earlier keys, the longer ones, first, so that CTAs come to an end together; by then they have started far
//       enough apart. Tiles wait for those that were handed out earlier alone.
//   tiles that all see all blocks   start evenly spread over the blocks, those of a head that are at work together, a
//       team, and go round; rank is the order in which they pass. They wait for each other, and for teams of their
//       head before: all tiles of a wave have to be at work.
#pragma once
#include "sm90/backward/tile_scheduler.cuh"

// A tile's place among those that add to the same blocks.
struct Place {
    int start;    // its first block
    int spacing;  // blocks from a tile of the team to the next; 0: there is no team; -1: nor that, and tiles go
                  // from their last block to their first, behind those with earlier keys
    int before;   // tiles of the head that are in teams before this one
    int behind;   // and those that come first where the team's tiles have gone past the last block

    // How many tiles add to the block before this one does.
    __device__ int rank(int block, const KeyTile& tile, const QueryBlocks& blocks, const Shape& shape) const {
        if (spacing < 0) {
            const int first_key = max(0, block * Traits::queries + shape.diagonal() - shape.left);  // that it sees
            return tile.first_key / Traits::keys - first_key / Traits::keys;
        }
        if (spacing == 0) {
            const int last_query = min((block + 1) * Traits::queries, shape.queries) - 1;
            const int last_key = min(last_query + shape.diagonal() + shape.right, shape.keys - 1);  // that it sees
            return last_key / Traits::keys - tile.first_key / Traits::keys;
        }
        return block >= start ? min(behind - 1, before + (block - start) / spacing)
                              : behind + (block - blocks.first) / spacing;
    }
};

// `wave` tiles are at work at once; 0 where tiles see different blocks.
__device__ __forceinline__ Place place_of(int index, const KeyTile& tile, const QueryBlocks& blocks,
                                          const Shape& shape, int section_heads, int wave) {
    if (!Traits::deterministic) return {blocks.first};
    if (wave == 0) {
        if (goes_last_first(index, shape, section_heads)) return {blocks.first};
        return {blocks.last - 1, -1};
    }
    const int key_tiles = ceil_div(shape.keys, Traits::keys);
    const int number = tile.first_key / Traits::keys;  // of the tile, in its head
    const int distance = section_width(index, shape, section_heads);  // in index, from a tile of the head to the next
    const int in_wave = index % wave;
    const int last = number + min(key_tiles - 1 - number, (wave - 1 - in_wave) / distance);
    int first = number - min(number, in_wave / distance);
    first += (number - first) / blocks.count() * blocks.count();  // no more tiles than blocks in a team
    const int size = min(blocks.count(), last + 1 - first), position = number - first;
    const int spacing = blocks.count() / size;
    return {blocks.first + spacing * position, spacing, first, first + size - position};
}

// One visit of a tile's: a block, and a query head of the group.
struct BlockVisit {
    int member, block;

    __device__ int head(const KeyTile& tile, const Shape& shape) const { return tile.head * shape.group + member; }
    __device__ __forceinline__ void advance(const QueryBlocks& blocks, const Place& place) {
        if constexpr (Traits::deterministic) {
            block += place.spacing < 0 ? -1 : 1;
            if (block == blocks.last) block = blocks.first;
            if (block < blocks.first) block = blocks.last - 1;
            if (block == place.start) ++member;
        } else {
            if (++block == blocks.last) block = blocks.first, ++member;
        }
    }
};
