// Loads blocks of keys and values row by row, from pages of any size. As many threads as a block has keys copy them in
// chunks of 16 bytes, which arrive asynchronously, so that all stages are in flight.
#pragma once

// No tensor maps to prefetch.
__device__ __forceinline__ void prepare_loads(const Cache&) {}

// Begins to copy the columns of a head, `columns` of `padded` wide, from the rows of the cache to a block in shared
// memory. Rows that aren't there, and columns beyond the head, become 0. The thread arrives at `full` when its copies
// are there.
template <int padded>
__device__ __forceinline__ void gather(uint32_t block, const Traits::CacheElement* cache, const int64_t* rows,
                                       int64_t row_elements, int columns, uint32_t full) {
    constexpr int chunk_columns = 16 / sizeof(Traits::CacheElement);
    constexpr int row_chunks = padded / chunk_columns;
    constexpr int per_thread = Traits::keys * row_chunks / Traits::producer_threads;
    const int thread = threadIdx.x - Traits::consumer_threads;
#pragma unroll 8
    for (int i = 0; i < per_thread; ++i) {
        const int index = i * Traits::producer_threads + thread;
        const int key = index / row_chunks, chunk = index % row_chunks;
        const int64_t row = rows[key];
        const bool is_there = row != no_row && chunk_columns * chunk < columns;
        const int panel = chunk / 8 * descriptor::panel_bytes(Traits::keys);
        const uint32_t place = block + panel + descriptor::swizzled_offset(key, chunk % 8);
        async_copy::load(place, cache + (is_there ? row * row_elements + chunk_columns * chunk : 0), is_there);
    }
    async_copy::arrive_when_done(full);
}

__device__ __forceinline__ void load_blocks(const LoadCall& call, Ring& ring, const Tile& tile,
                                            AppendedKeys& appended) {
    const SharedMemory& shared = call.shared;
    const Shape& shape = call.shape;
    const int thread = threadIdx.x - Traits::consumer_threads;
    auto is_seen = [&](int key) { return key >= tile.keys.begin && key < tile.keys.end; };
    auto page_at = [&](int block) {
        const int key = block * Traits::keys + thread;
        return block < tile.last && is_seen(key) ? page_of(shape, tile.batch, key) : -1;
    };
    const auto* keys = call.cache.key + key_head_of(shape, tile.key_head) * shape.head_dim;
    const auto* values = call.cache.value + value_head_of(shape, tile.key_head) * shape.value_dim;
    const int64_t heads = shape.key_heads * shape.head_step;  // of a row

    appended.begin(tile);
    int page = page_at(tile.first);
#pragma unroll 1
    for (int block = tile.first; block < tile.last; ++block) {
        const int next_page = page_at(block + 1);  // looked up while this block is waited for
        const int stage = ring.stage, key = block * Traits::keys + thread;
        appended.before(tile, block);
        mbarrier::wait(shared.empty(stage), ring.parity ^ 1);
        const int64_t row = row_on_page(shape, page, key);
        const bool some_missing = __any_sync(all_lanes, row == no_row);
        shared.cache_rows(stage)[thread] = row;
        shared.is_missing(stage)[thread] = row == no_row;
        if (thread % 32 == 0) {
            constexpr int warps = Traits::producer_threads / 32;
            for (int i = thread / 32; i < 4; i += warps) {
                reinterpret_cast<uint32_t*>(&shared.has_missing(stage))[i] = some_missing;
            }
        }
        sync_producer();
        // Arrivals of copies tell of the copies alone: this one tells consumers which keys are missing.
        if (thread == 0) mbarrier::arrive(shared.key_full(stage));
        gather<Traits::head_dim>(shared.base + shared.key_block(stage), keys, shared.cache_rows(stage),
                                 heads * shape.head_dim, shape.head_dim, shared.key_full(stage));
        gather<Traits::value_dim>(shared.base + shared.value_block(stage), values, shared.cache_rows(stage),
                                  heads * shape.value_dim, shape.value_dim, shared.value_full(stage));
        page = next_page;
        ring.advance();
    }
    appended.end(tile);
}
