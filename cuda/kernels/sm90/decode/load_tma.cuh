// Loads blocks of keys and values by TMA. A block is one box, or one of each of its pages, and each box is a lane's.
#pragma once
#include "ptx/tma.cuh"

// Prefetches the tensor maps. They are kernel parameters, so this waits for no earlier kernel.
__device__ __forceinline__ void prepare_loads(const Cache& cache) {
    tma::prefetch_descriptor(cache.key);
    tma::prefetch_descriptor(cache.value);
}

// Copies a box, `columns` wide, to its place in a block, panel by panel. `full` expects its bytes.
template <int columns>
__device__ __forceinline__ void load_box(uint32_t block, const TensorMap& map, uint32_t full, int box, int head,
                                         int row, int page, int layer) {
    constexpr int panels = ceil_div(columns, Traits::panel_columns);
    mbarrier::arrive_expect(full, panels * descriptor::panel_bytes(BOX));
#pragma unroll
    for (int panel = 0; panel < panels; ++panel) {
        tma::load(block + panel * descriptor::panel_bytes(Traits::keys) + descriptor::panel_bytes(box * BOX), map, full,
                  panel * Traits::panel_columns, head, row, page, layer);
    }
}

// Notes which keys of a block aren't there: those of the lanes' boxes that `misses` says.
__device__ __forceinline__ void note_missing(const SharedMemory& shared, int stage, bool misses) {
    const int lane = threadIdx.x % 32;
    const bool some = __any_sync(all_lanes, misses);
    if (lane == 0) shared.has_missing(stage) = {some, 0, 0, 0};
    if (some && lane < Traits::boxes) {
#pragma unroll 1
        for (int key = lane * BOX; key < (lane + 1) * BOX; ++key) shared.is_missing(stage)[key] = misses;
    }
}

__device__ __forceinline__ void load_blocks(const LoadCall& call, Ring& ring, const Tile& tile,
                                            AppendedKeys& appended) {
    const SharedMemory& shared = call.shared;
    const Shape& shape = call.shape;
    const int box = threadIdx.x % 32, layer = layer_of(shape);
    const bool has_box = box < Traits::boxes;
    auto first_key = [&](int block) { return block * Traits::keys + box * BOX; };
    // Pages of which no row sees a key count as not there.
    auto page_at = [&](int block) {
        if constexpr (!Traits::paged) return tile.cache_row;
        const int key = first_key(block);
        const bool is_seen = key < tile.keys.end && key + BOX > tile.keys.begin;
        return has_box && block < tile.last && is_seen ? page_of(shape, tile.batch, key) : -1;
    };

    appended.begin(tile);
    int page = page_at(tile.first);
#pragma unroll 1
    for (int block = tile.first; block < tile.last; ++block) {
        const int next_page = page_at(block + 1);  // looked up while this block is waited for
        const int stage = ring.stage;
        appended.before(tile, block);
        mbarrier::wait(shared.empty(stage), ring.parity ^ 1);
        const bool is_there = static_cast<uint32_t>(page) < static_cast<uint32_t>(shape.cache_rows);
        if constexpr (Traits::paged) note_missing(shared, stage, has_box && !is_there);
        if (has_box) {
            const uint32_t key_full = shared.key_full(stage), value_full = shared.value_full(stage);
            if (is_there) {
                const int row = Traits::paged ? first_key(block) % shape.page : first_key(block);
                load_box<Traits::head_dim>(shared.base + shared.key_block(stage), call.cache.key, key_full, box,
                                           key_head_of(shape, tile.key_head), row, page, layer);
                load_box<Traits::value_dim>(shared.base + shared.value_block(stage), call.cache.value, value_full, box,
                                            value_head_of(shape, tile.key_head), row, page, layer);
            } else {
                mbarrier::arrive(key_full);
                mbarrier::arrive(value_full);
            }
        }
        page = next_page;
        ring.advance();
    }
    appended.end(tile);
}
