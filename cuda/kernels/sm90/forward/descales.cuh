// Descales of e4m3 operands, each greater than 0: one for each block of rows of a key head. Those of queries and
// keys multiply scores. That of values is the unit in which the output is summed.
#pragma once
#include "common/float8.cuh"
#include "ptx/global.cuh"
#include "sm90/forward/tile_scheduler.cuh"

struct BlockFactors {
    float score, value;
};

// What blocks of one tile of a warpgroup are multiplied by.
struct TileDescales {
    const float* key;  // of the tile's key head
    const float* value;
    float query;

    __device__ __forceinline__ void load(const Descales& descales, const Shape& shape, const Tile& tile,
                                         int first_row) {
        const int64_t head =
            static_cast<int64_t>(tile.batch) * (shape.query_heads / shape.group) + tile.head / shape.group;
        const int64_t first_key = head * ceil_div(shape.keys, rows_per_descale);
        key = descales.key + first_key;
        value = descales.value + first_key;
        const int block = min(query_of(first_row), shape.queries - 1) / rows_per_descale;
        query = global::read_only(descales.query + head * ceil_div(shape.queries, rows_per_descale) + block);
    }

    __device__ __forceinline__ BlockFactors of_keys(int first_key) const {
        const int block = first_key / rows_per_descale;
        return {query * global::read_only(key + block), global::read_only(value + block)};
    }
};
