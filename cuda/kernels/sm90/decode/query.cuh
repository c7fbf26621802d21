// How a tile's rows of Q get into shared memory.
//
// Consumers copy those of a CTA's first tile, while the producer asks for its keys. If the producer copied them, it
// would do so before it asks for keys, behind which Q waits for long, and the keys would come later. The producer
// copies the rows of other tiles, ahead of time.
#pragma once
#include "ptx/async_copy.cuh"
#include "sm90/decode/tile.cuh"
#include "sm90/decode/traits.cuh"

// Begins to copy a tile's rows, by so many threads, of which the caller is one. Columns beyond the head dim become 0;
// shared memory behind the tile's last row keeps what it held.
template <int threads>
__device__ __forceinline__ void copy_query(const SharedMemory& shared, const Shape& shape,
                                           const Traits::Element* query, const Tile& tile, int tile_stage, int thread) {
    constexpr int row_chunks = Traits::head_dim / 8, most = ceil_div(Traits::query_rows * row_chunks, threads);
#pragma unroll most >= 4 && Traits::query_rows > 8 ? 4 : 1
    for (int i = thread; i < tile.rows * row_chunks; i += threads) {
        const int index = i / row_chunks, chunk = i % row_chunks;
        const Row row(shape, tile, index);
        const int64_t first = static_cast<int64_t>(row.token) * shape.query_heads + row.head;
        const bool is_there = 8 * chunk < shape.head_dim;
        async_copy::load(shared.query_chunk(tile_stage, index, chunk),
                         query + first * shape.head_dim + (is_there ? 8 * chunk : 0), is_there);
    }
}
