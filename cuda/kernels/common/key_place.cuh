// Where the keys of a batch row are, if K and V are a key-value cache.
#pragma once

struct alignas(16) KeyPlace {
    int row;        // of the cache, all layers counted; with pages, the layer
    int first_key;  // the key that block 0 starts at, up to a block before key 0: the last block ends with the last
                    // key; 0 with pages
    int end;        // where the sequence's keys end, counted from there
    int unused;
};
