// Which score modifications a call has.
//
// Defines, all set by jax_flash/cuda/score_mod.py:
//   SOFT_CAP, ALIBI, MASK   1: the call has it
//   SCORE_MOD               a user's function: 0 for none; 1 for one; 2 in the backward pass, where its derivative by
//                           the score is a factor of dS
//   SCORE_MOD_GRADIENTS     1: arrays that it captures have gradients; 2: they depend on the score
//   LOGIT_UNIT              1 in a forward pass whose only modification has a unit (score_mod.py, logit_unit)
//   BIAS                    the bias's element type; void: there is none
// MASK_METADATA: the queries' diagonals are known only at run time. ISOLATES: score_mod.cuh keeps what isn't finite
// apart.
#pragma once
#include "ptx/types.cuh"

struct ScoreTraits {
    using Bias = BIAS;
    static constexpr bool soft_cap = SOFT_CAP, alibi = ALIBI, mask = MASK, user = SCORE_MOD > 0;
    static constexpr bool bias = !is_same<Bias, void>;
    // Without any, the softmax applies the scale.
    static constexpr bool has_score_mod = soft_cap || user || bias || alibi || mask;
    static constexpr bool all_operands = soft_cap && bias && alibi && mask;
    static constexpr bool soft_cap_alone = soft_cap && !(user || bias || alibi || mask);
    // Forward, logits may stay in units, which the softmax multiplies by: of a soft cap, or of what the user's function
    // ends with. Others are natural.
    static constexpr bool natural_logits = has_score_mod && !LOGIT_UNIT;
    // Whether the derivative of logits by scores is a factor of dS.
    static constexpr bool score_grad = soft_cap || SCORE_MOD == 2;
    static constexpr bool user_gradients = SCORE_MOD_GRADIENTS > 0;
    static constexpr bool user_gradients_need_scores = SCORE_MOD_GRADIENTS == 2;
    // Whether gradients are made of dS without that factor.
    static constexpr bool has_gradients = bias || alibi || user_gradients;
    // Whether few registers are enough (score_mod.py, Modification.LIGHT): for a soft cap, ALiBi or a function alone.
    static constexpr bool is_light = soft_cap + alibi + user == 1 && !(bias || mask || user_gradients);
    static constexpr bool diagonals = alibi && MASK_METADATA;
};
