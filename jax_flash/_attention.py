"""`flash_attention`, the function that the others come down to."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import jax
from jax.typing import ArrayLike, DTypeLike

from jax_flash import _arguments, _validate
from jax_flash._alignment import BOTTOM_RIGHT, Alignment
from jax_flash._block_mask import BlockMask
from jax_flash._call import Arguments, attend, prepare
from jax_flash._float8_arguments import Float8
from jax_flash.context_parallel.strategy import AUTO, Strategy

ScoreMod = Callable[[Any, Any, Any, Any, Any], Any]


@overload
def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ...,
    *,
    scale: float | jax.Array | None = ...,
    is_causal: bool = ...,
    local_window_size: int | tuple[int | None, int | None] | None = ...,
    query_seq_lengths: ArrayLike | Sequence[int] | None = ...,
    key_value_seq_lengths: ArrayLike | Sequence[int] | None = ...,
    query_segment_ids: ArrayLike | None = ...,
    key_value_segment_ids: ArrayLike | None = ...,
    logits_soft_cap: float | None = ...,
    alibi_slopes: ArrayLike | None = ...,
    sinks: ArrayLike | None = ...,
    dropout_rate: float = ...,
    dropout_key: ArrayLike | None = ...,
    deterministic: bool = ...,
    return_residual: Literal[False] = ...,
    score_mod: ScoreMod | None = ...,
    block_mask: BlockMask | None = ...,
    quantization: Literal["fp8"] | None = ...,
    quantization_key: ArrayLike | None = ...,
    query_descale: ArrayLike | None = ...,
    key_descale: ArrayLike | None = ...,
    value_descale: ArrayLike | None = ...,
    out_dtype: DTypeLike | None = ...,
    implementation: str | Sequence[str] | None = ...,
    alignment: Alignment = ...,
    context_parallel: Literal["auto"] | Strategy = ...,
) -> jax.Array: ...


@overload
def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ...,
    *,
    scale: float | jax.Array | None = ...,
    is_causal: bool = ...,
    local_window_size: int | tuple[int | None, int | None] | None = ...,
    query_seq_lengths: ArrayLike | Sequence[int] | None = ...,
    key_value_seq_lengths: ArrayLike | Sequence[int] | None = ...,
    query_segment_ids: ArrayLike | None = ...,
    key_value_segment_ids: ArrayLike | None = ...,
    logits_soft_cap: float | None = ...,
    alibi_slopes: ArrayLike | None = ...,
    sinks: ArrayLike | None = ...,
    dropout_rate: float = ...,
    dropout_key: ArrayLike | None = ...,
    deterministic: bool = ...,
    return_residual: Literal[True],
    score_mod: ScoreMod | None = ...,
    block_mask: BlockMask | None = ...,
    quantization: Literal["fp8"] | None = ...,
    quantization_key: ArrayLike | None = ...,
    query_descale: ArrayLike | None = ...,
    key_descale: ArrayLike | None = ...,
    value_descale: ArrayLike | None = ...,
    out_dtype: DTypeLike | None = ...,
    implementation: str | Sequence[str] | None = ...,
    alignment: Alignment = ...,
    context_parallel: Literal["auto"] | Strategy = ...,
) -> tuple[jax.Array, jax.Array]: ...


def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | jax.Array | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    query_seq_lengths: ArrayLike | Sequence[int] | None = None,
    key_value_seq_lengths: ArrayLike | Sequence[int] | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_key: ArrayLike | None = None,
    deterministic: bool = False,
    return_residual: bool = False,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    quantization: Literal["fp8"] | None = None,
    quantization_key: ArrayLike | None = None,
    query_descale: ArrayLike | None = None,
    key_descale: ArrayLike | None = None,
    value_descale: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    implementation: str | Sequence[str] | None = None,
    alignment: Alignment = BOTTOM_RIGHT,
    context_parallel: Literal["auto"] | Strategy = AUTO,
    broadcast_dropout: None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Exact scaled dot-product attention that never stores the matrix of logits.

    For query row :math:`i` and key column :math:`j` of one head, in float32 whatever the
    inputs' dtype (but for 8 bits, which `docs/fp8.md` tells of):

    .. math::

        x_{ij} &= \mathrm{mod}_{ij}(\mathrm{cap}(\mathrm{scale} \cdot q_i \cdot k_j))
                  + \mathrm{bias}_{ij} - \mathrm{slope} \, |i + S - T - j| \\
        \mathrm{lse}_i &= \log\Big(\sum_{j \in A_i} e^{x_{ij}} + e^{\mathrm{sink}}\Big) \\
        p_{ij} &= e^{x_{ij} - \mathrm{lse}_i} \cdot \mathrm{keep}_{ij} / (1 - \mathrm{rate}) \\
        \mathrm{out}_i &= \sum_{j \in A_i} p_{ij} v_j

    :math:`\mathrm{cap}(x) = c \tanh(x / c)` with a soft cap :math:`c`. :math:`\mathrm{mod}` is score_mod, or
    leaves a score as it is. :math:`A_i` holds the keys that
    row :math:`i` may attend to: those that the mask, the block mask, causality, the window, the lengths and
    the segment ids all allow. A row with none gives out 0, lse :math:`-\infty` and gradients 0.

    Differentiable in query, key, value, bias, alibi_slopes, sinks and the floating arrays that score_mod
    captures, through both results. Memory is
    linear in T and S, forward and backward.

    Letters: `*B` any leading batch axes (none too), `T` queries, `S` keys, `N` query heads, `K` key heads
    (`N % K == 0`; query head n uses key head `n // (N // K)`), `H` head dim of queries and keys, `V` head
    dim of values.

    Args:
      query: `(*B, T, N, H)`, floating, or float8_e4m3fn.
      key: `(*B, S, K, H)`, query's dtype.
      value: `(*B, S, K, V)`, query's dtype.
      bias: broadcastable to `(*B, N, T, S)`, floating. Added to the logits.
      mask: broadcastable to `(*B, N, T, S)`, bool. True attends.
      scale: of the logits; `1 / sqrt(H)` by default. One that is traced, such as a learned one, multiplies
        query, which is rounded once more, and has a gradient.
      is_causal: row i sees the keys `j <= i + S - T`: aligned to the bottom right, so that the last query
        sees every key.
      local_window_size: `(left, right)`: row i sees `i + S - T - left <= j <= i + S - T + right`. None or
        -1 on a side is unbounded; an int w means `(w, w)`.
      query_seq_lengths: `(*B,)`, integer, in tokens. Rows from there on are padding: they attend to
        nothing. Takes the place of T in every alignment above. Clipped to [0, T].
      key_value_seq_lengths: `(*B,)`, integer, in tokens. Keys from there on are padding. Takes the place
        of S in every alignment above. Clipped to [0, S].
      query_segment_ids: `(*B, T)`, integer. A row sees the keys of its own segment alone; goes with
        key_value_segment_ids.
      key_value_segment_ids: `(*B, S)`, integer.
      logits_soft_cap: c above, greater than 0; None for no cap.
      alibi_slopes: `(N,)` or `(*B, N)`, floating: slope above, for each query head.
      sinks: `(N,)`, floating: for each query head, a logit that takes part in the sum and has no value.
      dropout_rate: the share of probabilities to drop, in [0, 1), rounded to a multiple of 2**-15 below 1.
        What is kept is divided by one minus the rounded rate. A rate of at most 2**-16 drops nothing.
      dropout_key: one key, as from `jax.random.key`; needed when `dropout_rate > 0`. What is kept is a pure
        function of (key, batch, head, i, j): `jax_flash.dropout_mask` returns it.
      deterministic: make gradients bitwise equal from run to run.
      return_residual: return lse beside the output.
      score_mod: `(score, batch, head, query_index, key_index) -> score` of scalars, traced once as JAX: the
        score is float32, after scale and soft cap and before bias and ALiBi; the others are int32. Indices
        count from 0 in each sequence, batch rows from 0 over all of `*B`; head is the query head. It may
        read arrays that it captures, and gradients flow to these. A score of -inf hides a key.
      block_mask: which queries see which keys, by blocks, as `jax_flash.create_block_mask` makes it. Blocks
        in which nothing is seen are skipped. A query sees a key only if all other masks let it, too.
      quantization: "fp8" computes the forward pass with query, key and value in e4m3, as `jax_flash.quantize`
        makes them. They must be in 16 bits. The backward pass is that of the arrays as they are; it takes the
        output and lse of the forward pass.
      quantization_key: a key for the random signs of the quantization; by default they are the same for all
        calls.
      query_descale: `(*B, K)`, or `(*B, K, ceil(T / 128))` with one for each block of 128 rows, floating:
        what query of dtype float8_e4m3fn is multiplied by; 1 by default. The query heads of a key head share
        it. Arrays of 8 bits have no gradients.
      key_descale: likewise, of key; its blocks are of S.
      value_descale: likewise.
      out_dtype: of the output for arrays of dtype float8_e4m3fn; bfloat16 by default.
      implementation: "cuda", "pallas" or "xla", or a sequence of them tried in order; None for the
        fastest that supports the call on this device (`jax_flash.explain` tells which, and why).
      alignment: "bottom_right" as above, or "top_left": query i is at key i, also where T ≠ S or lengths are
        given, as in `jax.nn`. Causality and window then hold with S - T left out. ALiBi needs T = S.
      context_parallel: how devices see each other's keys under a `jit` of arrays that are sharded along the
        sequence.
        "all_gather" gathers keys and values; grouped heads make it cheap.
        "ring" passes them on from device to device, each transfer beside the computation of a step.
        "ulysses" exchanges tokens for heads by an all-to-all, so that each device has whole sequences; the
        devices must divide the query heads.
        "auto" picks, of those that can run the call, the one by which devices lose least time: in which they
        only send, wait for each other, or add up a ring's results; if none can, it gathers sequences.
        It changes nothing where sequences are whole, as on one device and inside of a `shard_map` over the
        mesh axes of the sequence.
      broadcast_dropout: must be None. Flax's linen layers pass it to an attention_fn that accepts it. Give
        them `jax_flash.flax.dot_product_attention`: their `deterministic` means no dropout, and they pass no
        dropout_key.

    Returns:
      `(*B, T, N, V)` in query's dtype or out_dtype; with `return_residual`, also lse, `(*B, T, N)`
      in float32, or in float64 for float64 arrays.

    Raises:
      TypeError: an argument is of the wrong dtype or kind.
      ValueError: an argument has a shape or value that doesn't fit.
      NotImplementedError: no implementation that was named can run the call; with the reason of each. The
        strategy that context_parallel names can't run the call. Arrays of 8 bits are differentiated.

    All three are raised when the call is traced. On Auto mesh axes the compiler alone knows how arrays are
    sharded, so a strategy that can't run the call is refused when the program is compiled, by a
    `jax.errors.JaxRuntimeError` that holds the error.

    References:
      FlashAttention (https://arxiv.org/abs/2205.14135), FlashAttention-2 (https://arxiv.org/abs/2307.08691)
      and FlashAttention-3 (https://arxiv.org/abs/2407.08608); the online softmax
      (https://arxiv.org/abs/1805.02867); ALiBi (https://arxiv.org/abs/2108.12409); grouped queries
      (https://arxiv.org/abs/2305.13245); the soft cap of Gemma 2 (https://arxiv.org/abs/2408.00118);
      attention sinks (https://arxiv.org/abs/2309.17453); score and mask functions
      (https://arxiv.org/abs/2412.05496).
    """
    if broadcast_dropout is not None:
        raise TypeError(
            "broadcast_dropout must be None: it is an argument of Flax's layers, which mean other things by "
            "some names; their attention_fn is jax_flash.flax.dot_product_attention; "
            f"got {_validate.short(broadcast_dropout)}"
        )
    arguments = Arguments(
        query,
        key,
        value,
        bias,
        mask,
        window=_arguments.window(is_causal, local_window_size),
        scale=scale,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        logits_soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        deterministic=deterministic,
        return_residual=return_residual,
        score_mod=score_mod,
        block_mask=block_mask,
        quantization=quantization,
        quantization_key=quantization_key,
        float8=Float8(query_descale, key_descale, value_descale, out_dtype),
        alignment=alignment,
        context_parallel=context_parallel,
    )
    return attend(prepare(arguments), implementation)
