// What every role of the main backward kernel sees: the call, the CTA's work and the named barriers.
#pragma once
#include "backward_tile.cuh"
#include "backward_traits.cuh"

// Named barriers of two warpgroups (256 threads), and of one (128).
enum Barrier {
    d_scores_written = 1,
    d_scores_read,
    exchange_full,
    exchange_empty,
    turn,            // and the next: one a consumer
    own = turn + 2,  // and the next two: one a consumer, one for dQ
};

struct TensorMaps {
    const TensorMap &query, &key, &value, &d_out, &d_key, &d_value;
};

// What a CTA does, the same for all of its roles.
struct Work {
    KeyTile tile;
    QueryBlocks blocks;

    __device__ int iterations(const Shape& shape) const { return blocks.count() * shape.group; }

    // The blocks in the order that all roles share.
    struct Cursor {
        int head, block;
        __device__ __forceinline__ void advance(const QueryBlocks& blocks) {
            if (++block == blocks.last) block = blocks.first, ++head;
        }
    };
    __device__ Cursor begin(const Shape& shape) const { return {tile.head * shape.group, blocks.first}; }

    // Calls visit(query_head, block, iteration) in the order that all roles share.
    template <class Visit>
    __device__ __forceinline__ void for_each_block(const Shape& shape, Visit visit) const {
        int iteration = 0;
#pragma unroll 1
        for (int member = 0; member < shape.group; ++member) {
#pragma unroll 1
            for (int block = blocks.first; block < blocks.last; ++block) {
                visit(tile.head * shape.group + member, block, iteration++);
            }
        }
    }
};

// Parameters that every role sees.
struct Call {
    const SharedMemory shared;
    const TensorMaps maps;
    const Shape shape;
    const Work work;
    const float* statistics;  // (B, N, query blocks, 2, queries): lse in base 2, and D
    float* d_query_sum;       // (B, N, query blocks, queries · head_dim), see DqBlock
    float scale;

    // Where a block's share of a (B, N, query blocks, …) array lies.
    __device__ int64_t block_index(int query_head, int block) const {
        return (work.tile.batch * shape.query_heads() + query_head) * shape.query_blocks() + block;
    }
    __device__ const float* statistics_block(int query_head, int block) const {
        return statistics + block_index(query_head, block) * (2 * Traits::queries);
    }
    __device__ float* d_query_block(int query_head, int block) const {
        return d_query_sum + block_index(query_head, block) * DqBlock::elements;
    }
};
