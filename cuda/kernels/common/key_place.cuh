// Where the keys of a batch row are, if K and V are a key-value cache.
#pragma once

struct alignas(8) KeyPlace {
    int row;        // of the cache, all layers counted
    int first_key;  // the key that block 0 starts at, up to a block before key 0: the last block ends with the last key
};
