// How a consumer of the decode kernel makes logits of scores, and which keys its rows see.
#pragma once
#include "ptx/global.cuh"
#include "common/tanh.cuh"
#include "sm90/decode/consumer_call.cuh"

// What a thread knows of its two rows: which keys they see, and what their logits depend on.
struct ThreadRows {
    int begin[2], end[2];
    float scale[2];
    float slope[2];
    int diagonal[2];
    const UserRow user[2];

    __device__ __forceinline__ ThreadRows(const ConsumerCall& call, const Tile& tile, int upper_row)
        : user{user_row(call, tile, upper_row), user_row(call, tile, upper_row + 8)} {
        const Sequence sequence = sequence_of(tile);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            scale[r] = call.scale;
            if constexpr (Traits::is_float8) {
                scale[r] *= descale_of(call.shape, call.descales, call.descales.key, tile.key_head);
            }
            const Row row = row_at(call, tile, upper_row + 8 * r);
            const Interval keys = keys_of(call.shape, sequence, row.query);
            begin[r] = keys.begin, end[r] = keys.end;
            if constexpr (Traits::alibi) {
                slope[r] = global::read_only(call.slopes + tile.batch * call.slopes_stride + row.head);
                diagonal[r] = diagonal_of(sequence, row.query);
            }
        }
    }

    __device__ static __forceinline__ Sequence sequence_of(const Tile& tile) {
        return {tile.first_query, tile.queries, tile.length, tile.first_key, tile.cache_row, true};
    }

private:
    // Rows beyond the tile's last are computed as that one.
    __device__ static __forceinline__ Row row_at(const ConsumerCall& call, const Tile& tile, int row) {
        return Row(call.shape, tile, min(row, tile.rows - 1));
    }
    // The function takes positions in the sequence. A query's is that of the key on its diagonal.
    __device__ static __forceinline__ UserRow user_row(const ConsumerCall& call, const Tile& tile, int index) {
#if SCORE_MOD
        const Row row = row_at(call, tile, index);
        return UserRow(call.user, tile.batch, row.head, diagonal_of(sequence_of(tile), row.query));
#else
        return UserRow(0, 0, 0, 0);
#endif
    }
};

// The keys that all rows of the tile see.
__device__ __forceinline__ Interval keys_of_all_rows(const Shape& shape, const Tile& tile) {
    const Sequence sequence = ThreadRows::sequence_of(tile);
    return {keys_of(shape, sequence, (tile.first_row + tile.rows - 1) / shape.group).begin,
            keys_of(shape, sequence, tile.first_row / shape.group).end};
}

template <int count>
__device__ __forceinline__ void make_logits(float (&scores)[count], const ConsumerCall& call,
                                            const ThreadRows& rows, int first_key) {
    const int lane_column = 2 * (threadIdx.x % 4);
    // From the rows' diagonals to the thread's first column. Positions are subtracted as integers: floats round those
    // beyond 2^24. The thread's own part is added afterwards, which takes fewer registers.
    float relative[2];
    if constexpr (Traits::alibi) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            relative[r] = static_cast<float>(first_key - rows.diagonal[r]) + static_cast<float>(lane_column);
        }
    }
#pragma unroll
    for (int i = 0; i < count; ++i) {
        float logit = scores[i] * rows.scale[row_of(i)];
        if constexpr (Traits::soft_cap) logit = call.soft_cap * tanh_of(logit);
#if SCORE_MOD
        const Position key{first_key + lane_column, column_of(i), Position::no_last};
        logit = rows.user[row_of(i)].element({logit, 1}, key).value;
#endif
        if constexpr (Traits::alibi) {
            logit -= rows.slope[row_of(i)] * fabsf(relative[row_of(i)] + static_cast<float>(column_of(i)));
        }
        scores[i] = logit;
    }
}

// Sets the logits of keys that a row doesn't see to -inf.
template <int count>
__device__ __forceinline__ void mask_logits(float (&logits)[count], const ThreadRows& rows, int first_key) {
    const int first_column = first_key + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < count; ++i) {
        const int key = first_column + column_of(i);
        if (key < rows.begin[row_of(i)] || key >= rows.end[row_of(i)]) logits[i] = -infinity;
    }
}

// … and those of keys that aren't in the cache.
template <int count>
__device__ __forceinline__ void mask_missing(float (&logits)[count], const unsigned char* is_missing) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
        if (is_missing[2 * (threadIdx.x % 4) + column_of(i)]) logits[i] = -infinity;
    }
}
