"""`context_parallel_attention`, for sequences that are sharded over the devices of a mesh axis."""

import functools
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_flash import _arguments, _call, _device, _dispatch, _settings
from jax_flash._alignment import BOTTOM_RIGHT, Alignment
from jax_flash._attention import ScoreMod
from jax_flash._axes import batch_shape
from jax_flash._block_mask import BlockMask
from jax_flash._call import Arguments, Call
from jax_flash._spec import Operands
from jax_flash.context_parallel import arguments, gather, pairs, ring, two_axes, ulysses
from jax_flash.context_parallel.load_balance import LoadBalance
from jax_flash.context_parallel.sharded import Calls, Passes, Sharded
from jax_flash.context_parallel.strategy import AUTO, Strategy, choose
from jax_flash.transforms import autodiff, lowering
from jax_flash.transforms.varying import vary_alike


@overload
def context_parallel_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ...,
    *,
    axis_name: str | tuple[str, str],
    strategy: Literal["auto"] | Strategy = ...,
    load_balance: LoadBalance | None = ...,
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
    implementation: str | Sequence[str] | None = ...,
    alignment: Alignment = ...,
) -> jax.Array: ...


@overload
def context_parallel_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ...,
    *,
    axis_name: str | tuple[str, str],
    strategy: Literal["auto"] | Strategy = ...,
    load_balance: LoadBalance | None = ...,
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
    implementation: str | Sequence[str] | None = ...,
    alignment: Alignment = ...,
) -> tuple[jax.Array, jax.Array]: ...


def context_parallel_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    axis_name: str | tuple[str, str],
    strategy: Literal["auto"] | Strategy = AUTO,
    load_balance: LoadBalance | None = None,
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
    implementation: str | Sequence[str] | None = None,
    alignment: Alignment = BOTTOM_RIGHT,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`flash_attention` of sequences that are sharded over the devices of a mesh axis.

    To be called inside of `jax.shard_map` or `jax.pmap`, on one device's shards. Queries and keys are sharded
    evenly over `axis_name`, in the order that `load_balance` says. The result is that of `flash_attention` on
    the whole sequences: causality, windows, ALiBi and functions go by the positions in them, and dropout
    keeps the same probabilities.

    Letters as in `flash_attention`: `T` queries and `S` keys are those of the whole sequences, and `n` is the
    size of the mesh axis.

    Args:
      query: `(*B, T / n, N, H)`, floating.
      key: `(*B, S / n, K, H)`, query's dtype.
      value: `(*B, S / n, K, V)`, query's dtype.
      bias: broadcastable to `(*B, N, T / n, S)`, the device's queries with all keys; or `(*B, N, T, S / n)`
        or `(*B, N, 1, S / n)`, all queries with the device's keys, from which devices make the first by an
        all-to-all. Its queries and keys are in the order of `load_balance`.
      mask: likewise, bool.
      axis_name: of the mesh axis. Or of two: Ulysses then goes over the second one, where links should be
        fast, and `strategy` over the first. Shards are numbered along the second axis first.
      strategy: how devices see each other's keys.
        "all_gather" gathers keys and values; grouped heads make it cheap.
        "ring" passes them on from device to device, each transfer beside the computation of a step.
        "ulysses" exchanges tokens for heads by an all-to-all, so that each device has whole sequences; n must
        divide the query heads. Over two axes it can't be named.
        "auto" picks the one by which devices lose least time: in which they only send, wait for each other,
        or add up the results of a ring's steps.
      load_balance: the order of tokens on devices, as `reorder_for_load_balance` makes it. None: in order,
        which leaves work uneven under a causal mask. "zigzag": an early and a late chunk on each device.
        "striped": every n-th token.
      query_seq_lengths: `(*B,)`, integer, of the whole sequences, the same on all devices.
      key_value_seq_lengths: likewise.
      query_segment_ids: `(*B, T / n)`, integer, of the device's tokens.
      key_value_segment_ids: `(*B, S / n)`, integer.
      dropout_key: the same on all devices.
      score_mod: takes indices in the whole sequences, in their own order; batch rows and heads count from the
        first one of the device.
      block_mask: of the whole sequences in their own order, `(T, S)`, the same on all devices.
      alignment: "top_left" takes T = S and no lengths, and is then the same as "bottom_right".

      The other arguments are those of `flash_attention`: scale, is_causal, local_window_size,
      logits_soft_cap, alibi_slopes, sinks, dropout_rate, deterministic, return_residual, implementation.

    Returns:
      `(*B, T / n, N, V)` in query's dtype; with `return_residual`, also lse, float32 `(*B, T / n, N)`.

    Raises:
      TypeError: an argument is of the wrong dtype or kind.
      ValueError: an argument has a shape or value that doesn't fit; axis_name is no axis of a surrounding
        `shard_map` or `pmap`; the devices, or zigzag's chunks, don't divide the sequence (the error says
        what to pad it to).
      NotImplementedError: the strategy can't run the call, or no strategy can; an implementation that was
        named can't. When differentiated twice, "ring" raises it too.

    References:
      Ring Attention (https://arxiv.org/abs/2310.01889); Striped Attention (https://arxiv.org/abs/2311.09431);
      DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509); the all-gather of Llama 3
      (https://arxiv.org/abs/2407.21783). Two axes: https://arxiv.org/abs/2405.07719.
    """
    given = Arguments(
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
        alignment=alignment,
    )
    return _attend(*arguments.prepare(given, axis_name, load_balance), strategy, implementation)


PASSES = Passes(autodiff.jax_flash_forward, autodiff.jax_flash_backward)
"""What runs the calls of a ring or an all-gather: below autodiff, as both have a derivative of their own."""


@_settings.as_written
def _attend(of: Sharded, call: Call, named: str, implementation: Any) -> Any:
    between, exchange = two_axes.split(of) if isinstance(of.axis_name, tuple) else (of, None)
    chosen = choose(between, call.operands, named, exchange)
    if call.is_empty:
        return _call.attend(call, implementation)
    # Sums over the mesh of shared operands' gradients are transposes of these casts.
    operands, _ = vary_alike((call.operands, of.own_shard()))
    run = functools.partial(_run, between, chosen, implementation)
    results = run(operands) if exchange is None else ulysses.attend(exchange, run, operands)
    if of.spec.return_residual:
        out, lse = results
        results = out, jnp.swapaxes(lse, -1, -2)
    return results if call.batch_shape else jax.tree.map(lambda x: x[0], results)


def _run(of: Sharded, chosen: Strategy, implementation: Any, operands: Operands) -> Any:
    """`out (*B, T, N, V)`, and with `return_residual` also `lse (*B, N, T)`; by a strategy over one axis."""
    spec = of.spec if chosen == "ulysses" else of.local_spec  # of the ordinary calls that are made
    part = {"ring": pairs.first_pair, "all_gather": gather.first_call, "ulysses": ulysses.by_heads}[chosen]
    of_part = jax.eval_shape(functools.partial(part, of), operands)
    shapes = Call(spec, of_part, batch_shape(of_part)).shapes
    names, device = _arguments.implementations(implementation), _device.current()
    # Steps of a ring are wide, and so are gradients of an all-gather.
    selected = _dispatch.select(spec if chosen == "ulysses" else spec.wide(), shapes, names, device)
    ordinary_call = lowering.PlannedCall(spec, selected, device)
    if chosen == "ring":
        return ring.attend(ring.Ring(of, ordinary_call, PASSES), operands)
    ordinary = functools.partial(autodiff.attend, spec, selected)
    if chosen == "ulysses":
        return ulysses.attend(of, ordinary, operands)
    whole = functools.partial(gather.attend_by, of, ordinary)
    return gather.attend(Calls(of, ordinary_call, PASSES), whole, operands)
