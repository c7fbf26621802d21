// Which of soft cap, bias, ALiBi and mask a call has.
//
// Defines, all set by jax_flash/cuda/score_mod.py:
//   SOFT_CAP, ALIBI, MASK   1: the call has it
//   BIAS                    the bias's element type; void: there is none
// and MASK_METADATA: which key a query is aligned with is data then.
#pragma once
#include "ptx/types.cuh"

struct ScoreTraits {
    using Bias = BIAS;
    static constexpr bool soft_cap = SOFT_CAP, alibi = ALIBI, mask = MASK;
    static constexpr bool bias = !is_same<Bias, void>;
    // Whether there is anything to do; if not, the scale is part of the softmax's own arithmetic.
    static constexpr bool has_score_mod = soft_cap || bias || alibi || mask;
    static constexpr bool diagonals = alibi && MASK_METADATA;
};
