// Where a tile's queries are, if queries are packed (sm90/forward/packed_queries.cuh).
#pragma once

struct alignas(16) QuerySlot {
    int sequence;     // whose they are; an index of lengths and of the page table
    int first_token;  // the first of them among those of all sequences
    int tokens;       // how many the tile has; 0: the slot is empty
    int first_query;  // the first one's number in its sequence
};
