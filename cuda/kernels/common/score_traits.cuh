// Which score modifications a call has.
//
// Defines, all set by jax_flash/cuda/score_mod.py:
//   SOFT_CAP, ALIBI, MASK   1: the call has it
//   BIAS                    the bias's element type; void: there is none
// and MASK_METADATA: the queries' diagonals are known only at run time.
#pragma once
#include "ptx/types.cuh"

struct ScoreTraits {
    using Bias = BIAS;
    static constexpr bool soft_cap = SOFT_CAP, alibi = ALIBI, mask = MASK;
    static constexpr bool bias = !is_same<Bias, void>;
    // Without any, the softmax applies the scale.
    static constexpr bool has_score_mod = soft_cap || bias || alibi || mask;
    static constexpr bool diagonals = alibi && MASK_METADATA;
};
