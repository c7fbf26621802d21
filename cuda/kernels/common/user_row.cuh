// The user's score_mod for one query of a head. The header is written for the call (jax_flash/cuda/user_score_mod.py).
// SCORE_MOD is 0 without a function.
#pragma once
#include "parameters.cuh"
#include "common/position.cuh"
#include "ptx/global.cuh"

#if SCORE_MOD
#include "user_score_mod.cuh"

struct UserRow {
    const UserScoreMod operands;  // of the batch row
    const int batch, head;  // indices in the whole call
    const Position query;
    const user_score_mod::Tile tile;
    const user_score_mod::Row row;

    __device__ __forceinline__ UserRow(const UserScoreMod& all, int own_batch, int own_head, Position query)
        : operands(user_score_mod::of_batch_row(all, own_batch)),
          batch(global::read_only(all.batch_indices + own_batch)),
          head(global::read_only(all.head_indices + own_batch * all.head_stride + own_head)),
          query(query),
          tile(user_score_mod::make_tile(operands, batch)),
          row(user_score_mod::make_row(operands, tile, batch, head, query)) {}

    static constexpr bool has_tanh = user_score_mod::has_tanh;

    // `range` is that of `largest_in_tanh` over all scores of a warp (tanh_range in common/tanh.cuh).
    template <TanhRange range = TanhRange::unasked>
    __device__ __forceinline__ user_score_mod::Element element(ScaledScore score, Position key) const {
        return user_score_mod::make_element<range>(operands, tile, row, column(key), score, batch, head, query,
                                                   key);
    }
    __device__ __forceinline__ float largest_in_tanh(ScaledScore score, Position key) const {
        return user_score_mod::largest_in_tanh(operands, tile, row, column(key), score, batch, head, query, key);
    }

   private:
    __device__ __forceinline__ user_score_mod::Column column(Position key) const {
        return user_score_mod::make_column(operands, tile, batch, key);
    }
};
#else
struct UserRow {
    static constexpr bool has_tanh = false;

    __device__ __forceinline__ UserRow(int, int, int, int) {}
};
#endif
