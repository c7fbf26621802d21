// Where a tile's queries are, if those of several sequences follow each other (sm90/forward/packed_queries.cuh).
#pragma once

struct alignas(16) QuerySlot {
    int sequence;     // the batch row of the cache, and of its page table
    int first_token;  // of the tile's queries, among all
    int tokens;       // that the tile has; 0: the slot is empty
    int unused;
};
