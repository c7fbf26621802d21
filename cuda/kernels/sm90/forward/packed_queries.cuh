// Where a tile's queries are, and the keys that they attend to.
//
// Packed queries are those of several sequences, one sequence after the other. The lengths of sequences are data. So
// each row tile is a slot: a sequence has as many slots as it needs, and a slot has queries of one sequence. Rows are
// numbered through all slots, so that mask metadata is that of one batch row, whose queries fill the slots
// (jax_flash/cuda/sm90/prefill_plan.py, sm90/prefill/slots.cuh).
#pragma once
#include "ptx/global.cuh"
#include "common/query_slot.cuh"
#include "sm90/forward/tile_scheduler.cuh"

#if PACKED
__device__ __forceinline__ QuerySlot slot_of(const Tile& tile, const Shape& shape) {
    const int4* const slots = reinterpret_cast<const int4*>(shape.packed.slots);
    const int4 slot = global::read_only(slots + tile.first_row / Traits::rows);
    return {slot.x, slot.y, slot.z, slot.w};
}
#endif

// The batch row, or the packed sequence, whose keys a tile's rows attend to.
__device__ __forceinline__ int key_batch(const Tile& tile, const Shape& shape) {
#if PACKED
    return slot_of(tile, shape).sequence;
#else
    return tile.batch;
#endif
}

// The first of a tile's queries in its batch row of the array.
__device__ __forceinline__ int first_query(const Tile& tile, const Shape& shape) {
#if PACKED
    return slot_of(tile, shape).first_token;
#else
    return query_of(tile.first_row);
#endif
}

// Where a row of a tile is in the results: its query is number `query` of the `queries` in its batch row. Rows behind a
// tile's last query don't exist.
struct RowPlace {
    int query, queries;
    bool exists;
};
__device__ __forceinline__ RowPlace place_of(int row, const Tile& tile, const Shape& shape) {
#if PACKED
    const QuerySlot slot = slot_of(tile, shape);
    const int query = query_of(row - tile.first_row);
    return {slot.first_token + query, shape.packed.tokens, query < slot.tokens};
#else
    const int query = query_of(row);
    return {query, shape.queries, query < shape.queries};
#endif
}
