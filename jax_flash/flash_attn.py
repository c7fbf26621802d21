"""The official `flash_attn` package's functions, for code ported from it.

Names, argument names, order and shapes are those of flash_attn 2.8. What differs in JAX:

- `dropout_p > 0` needs the added argument `dropout_key`, a key as from `jax.random.key`;
- `return_attn_probs=True` returns `(out, softmax_lse, None)`: the third stands for that
  package's testing aid S_dmask (`jax_flash.dropout_mask` tells what dropout keeps). A row with nothing to
  attend to has softmax_lse −inf, and gradients flow through softmax_lse;
- sequence lengths that are shapes (`max_seqlen`, `size`) are Python ints.

Errors are those of `jax_flash.flash_attention`, with the arguments named as here.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_flash import _arguments, _flash_attn_pages, _sequence_arguments, _validate
from jax_flash._arguments import Names
from jax_flash._call import Arguments, attend, prepare
from jax_flash._flash_attn_cache import flash_attn_with_kvcache
from jax_flash._flash_attn_padding import pad_input, unpad_input
from jax_flash._rotary import apply_rotary_rows, apply_rotary_varlen
from jax_flash._varlen import VarlenSequences, attend_varlen

__all__ = [
    "apply_rotary_emb",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "pad_input",
    "unpad_input",
]

_NAMES = Names(
    query="q",
    key="k",
    value="v",
    scale="softmax_scale",
    logits_soft_cap="softcap",
    dropout_rate="dropout_p",
    return_residual="return_attn_probs",
    cu_seqlens_kv="cu_seqlens_k",
    max_seqlen_kv="max_seqlen_k",
)
_KV_NAMES = _NAMES.replace(key="kv", value="kv")
_QKV_NAMES = _NAMES.replace(
    query="qkv",
    key="qkv",
    value="qkv",
    cu_seqlens_q="cu_seqlens",
    cu_seqlens_kv="cu_seqlens",
    max_seqlen_q="max_seqlen",
    max_seqlen_kv="max_seqlen",
)

Results = jax.Array | tuple[jax.Array, jax.Array, None]


def flash_attn_func(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    dropout_p: float = 0.0,
    softmax_scale: float | jax.Array | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    dropout_key: ArrayLike | None = None,
) -> Results:
    """Attention of queries to keys; multi-head, grouped-query or multi-query.

    Args:
      q: `(batch_size, seqlen_q, nheads, headdim)`, floating.
      k: `(batch_size, seqlen_k, nheads_k, headdim)`, q's dtype; nheads is a multiple of nheads_k.
      v: `(batch_size, seqlen_k, nheads_k, headdim_v)`, q's dtype.
      dropout_p: the share of probabilities to drop, in [0, 1).
      softmax_scale: of the logits; `1 / sqrt(headdim)` by default.
      causal: row i sees the keys `j <= i + seqlen_k - seqlen_q`: aligned to the bottom right.
      window_size: `(left, right)`: row i sees the keys from `i + seqlen_k - seqlen_q - left` to
        `i + seqlen_k - seqlen_q + right`, both included. A side is unbounded if it is negative or at least
        seqlen_k.
      softcap: logits x become `softcap * tanh(x / softcap)`; 0 for no cap.
      alibi_slopes: `(nheads,)` or `(batch_size, nheads)`: `-slope * |i + seqlen_k - seqlen_q - j|` is
        added to the logits.
      deterministic: make gradients bitwise equal from run to run.
      return_attn_probs: return softmax_lse too.
      dropout_key: one key, as from `jax.random.key`; needed when `dropout_p > 0`.

    Returns:
      `(batch_size, seqlen_q, nheads, headdim_v)` in q's dtype; with `return_attn_probs` the tuple
      `(out, softmax_lse, None)`, softmax_lse float32 `(batch_size, nheads, seqlen_q)`.

    Raises:
      TypeError, ValueError: as `jax_flash.flash_attention`, when traced.
    """
    options = _Options(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        dropout_key,
    )
    return _attend(options.arguments(q, k, v))


def flash_attn_kvpacked_func(
    q: ArrayLike,
    kv: ArrayLike,
    dropout_p: float = 0.0,
    softmax_scale: float | jax.Array | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    dropout_key: ArrayLike | None = None,
) -> Results:
    """`flash_attn_func` with keys and values in one array.

    Args:
      q: `(batch_size, seqlen_q, nheads, headdim)`, floating.
      kv: `(batch_size, seqlen_k, 2, nheads_k, headdim)`, q's dtype.

    All else as `flash_attn_func`.
    """
    k, v = _unstack_kv(q, kv, "(batch_size, seqlen_k, 2, nheads_k, headdim)")
    options = _Options(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        dropout_key,
    )
    return _attend(options.arguments(q, k, v, _KV_NAMES))


def flash_attn_qkvpacked_func(
    qkv: ArrayLike,
    dropout_p: float = 0.0,
    softmax_scale: float | jax.Array | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    dropout_key: ArrayLike | None = None,
) -> Results:
    """`flash_attn_func` with queries, keys and values in one array.

    Args:
      qkv: `(batch_size, seqlen, 3, nheads, headdim)`, floating.

    All else as `flash_attn_func`.
    """
    q, k, v = _unstack("qkv", qkv, "(batch_size, seqlen, 3, nheads, headdim)")
    options = _Options(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        dropout_key,
    )
    return _attend(options.arguments(q, k, v, _QKV_NAMES))


def flash_attn_varlen_func(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | jax.Array | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: ArrayLike | None = None,
    *,
    dropout_key: ArrayLike | None = None,
) -> Results:
    """Attention over varlen sequences, each to itself alone, with its own lengths in every alignment.

    Args:
      q: `(total_q, nheads, headdim)`, floating.
      k: `(total_k, nheads_k, headdim)`, q's dtype.
      v: `(total_k, nheads_k, headdim_v)`, q's dtype.
      cu_seqlens_q: `(batch_size + 1,)`, integer, ascending from 0 to at most total_q: where each sequence
        starts in q, and where the last one ends.
      cu_seqlens_k: the same for k and v.
      max_seqlen_q: at least the queries of the longest sequence, a Python int.
      max_seqlen_k: the same for keys.
      block_table: `(batch_size, max_num_blocks_per_seq)`, integer. Then k and v are pages, `(num_blocks,
        page_block_size, nheads_k, headdim)`, of any size: key j of sequence i is row `j % page_block_size`
        of page `block_table[i, j // page_block_size]`, and `cu_seqlens_k` says how many keys each sequence
        has. Keys of a page outside of k are hidden. Such a call has no dropout and no derivative.

    All else as `flash_attn_func`; a side of window_size is unbounded from max_seqlen_k on.

    Returns:
      `(total_q, nheads, headdim_v)`; with `return_attn_probs` the tuple `(out, softmax_lse, None)`,
      softmax_lse float32 `(nheads, total_q)`.

    Raises:
      NotImplementedError: dropout_p isn't 0 with a block_table.
    """
    options = _Options(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        dropout_key,
    )
    sequences = VarlenSequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    arguments = options.arguments(q, k, v, sequences=sequences)
    if block_table is not None:
        return _flash_attn_pages.attend(arguments, sequences, block_table)
    return _attend_varlen(arguments, sequences)


def flash_attn_varlen_kvpacked_func(
    q: ArrayLike,
    kv: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | jax.Array | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    dropout_key: ArrayLike | None = None,
) -> Results:
    """`flash_attn_varlen_func` with keys and values in one array.

    Args:
      q: `(total_q, nheads, headdim)`, floating.
      kv: `(total_k, 2, nheads_k, headdim)`, q's dtype.

    All else as `flash_attn_varlen_func`.
    """
    k, v = _unstack_kv(q, kv, "(total_k, 2, nheads_k, headdim)")
    options = _Options(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        dropout_key,
    )
    sequences = VarlenSequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _attend_varlen(options.arguments(q, k, v, _KV_NAMES, sequences), sequences)


def flash_attn_varlen_qkvpacked_func(
    qkv: ArrayLike,
    cu_seqlens: ArrayLike,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | jax.Array | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    dropout_key: ArrayLike | None = None,
) -> Results:
    """`flash_attn_varlen_func` with queries, keys and values in one array.

    Args:
      qkv: `(total, 3, nheads, headdim)`, floating.
      cu_seqlens: `(batch_size + 1,)`, integer, ascending from 0 to at most total: where each sequence starts,
        and where the last one ends.
      max_seqlen: at least the length of the longest sequence, a Python int.

    All else as `flash_attn_varlen_func`.
    """
    q, k, v = _unstack("qkv", qkv, "(total, 3, nheads, headdim)")
    options = _Options(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        dropout_key,
    )
    sequences = VarlenSequences(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return _attend_varlen(options.arguments(q, k, v, _QKV_NAMES, sequences), sequences)


def apply_rotary_emb(
    x: ArrayLike,
    cos: ArrayLike,
    sin: ArrayLike,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | ArrayLike = 0,
    cu_seqlens: ArrayLike | None = None,
    max_seqlen: int | None = None,
) -> jax.Array:
    """Rotary position embeddings: `jax_flash.apply_rotary`.

    Args:
      x: `(batch_size, seqlen, nheads, headdim)`, floating; of varlen sequences, which `cu_seqlens` says,
        `(total, nheads, headdim)`.
      cos, sin: `(seqlen_rotary, rotary_dim / 2)`, floating; rotary_dim is at most headdim.
      interleaved: whether pairs are neighbours, as in GPT-J, or halves, as in GPT-NeoX.
      inplace: has to be False, as arrays of JAX are immutable.
      seqlen_offsets: the position of the first token: an int, or integers `(batch_size,)`.
      cu_seqlens: integers `(batch_size + 1,)`: where each varlen sequence starts, and the last one ends.
      max_seqlen: of varlen sequences; not needed.

    Returns:
      An array like x.

    Raises:
      TypeError, ValueError: as `jax_flash.apply_rotary` raises them.
      NotImplementedError: `inplace` is True.
    """
    if _validate.flag("inplace", inplace):
        raise NotImplementedError("inplace must be False, as arrays of JAX are immutable; got True")
    if max_seqlen is not None:
        _validate.size("max_seqlen", max_seqlen)
    x = _validate.array("x", x, "floating")
    letters = "(batch_size, seqlen, nheads, headdim)" if cu_seqlens is None else "(total, nheads, headdim)"
    if x.ndim != letters.count(",") + 1:
        raise ValueError(f"x must have shape {letters}; got {_validate.described(x)}")
    if cu_seqlens is None:
        return apply_rotary_rows(x, cos, sin, interleaved, seqlen_offsets, "seqlen_offsets")
    offsets = _sequence_arguments.offsets("cu_seqlens", cu_seqlens, x.shape[0], x.shape[0], "max_seqlen")
    return apply_rotary_varlen(x, cos, sin, interleaved, seqlen_offsets, "seqlen_offsets", offsets)


@dataclasses.dataclass
class _Options:
    """The options that all functions here share, as the caller passed them."""

    dropout_p: Any
    softmax_scale: Any
    causal: Any
    window_size: Any
    softcap: Any
    alibi_slopes: Any
    deterministic: Any
    return_attn_probs: Any
    dropout_key: Any

    def arguments(
        self, q: Any, k: Any, v: Any, names: Names = _NAMES, sequences: VarlenSequences | None = None
    ) -> Arguments:
        if sequences is None:
            k = _validate.array(names["key"], k, "floating")
            keys = k.shape[1] if k.ndim == 4 else 0
        else:
            keys = sequences.max_seqlen_kv
        softcap = _validate.number("softcap", self.softcap)
        return Arguments(
            q,
            k,
            v,
            window=_arguments.official_window(self.window_size, self.causal, keys),
            scale=self.softmax_scale,
            logits_soft_cap=softcap if softcap > 0 else None,
            alibi_slopes=self.alibi_slopes,
            dropout_rate=self.dropout_p,
            dropout_key=self.dropout_key,
            deterministic=self.deterministic,
            return_residual=self.return_attn_probs,
            names=names,
        )


def _attend(arguments: Arguments) -> Results:
    return _results(attend(prepare(arguments), implementation=None))


def _attend_varlen(arguments: Arguments, sequences: VarlenSequences) -> Results:
    return _results(attend_varlen(arguments, sequences, implementation=None))


def _results(results: Any) -> Results:
    if isinstance(results, tuple):
        out, lse = results
        return out, jnp.swapaxes(lse, -1, -2), None
    return results


def _unstack_kv(q: Any, kv: Any, letters: str) -> tuple[jax.Array, ...]:
    """`_unstack` of keys and values that fit the queries."""
    k, v = _unstack("kv", kv, letters)
    q = _validate.array("q", q, "floating")
    if q.ndim == k.ndim and (q.shape[:-3], q.shape[-1]) != (k.shape[:-3], k.shape[-1]):
        as_in_q = "headdim" if k.ndim == 3 else "batch_size and headdim"
        raise ValueError(
            f"kv must have shape {letters} with {as_in_q} as in q {q.shape}; got {_validate.described(kv)}"
        )
    return k, v


def _unstack(name: str, packed: Any, letters: str) -> tuple[jax.Array, ...]:
    """The parts of an array that are stacked along its third axis from the end."""
    packed = _validate.array(name, packed, "floating")
    axes = letters.strip("()").split(", ")
    if packed.ndim != len(axes) or packed.shape[-3] != int(axes[-3]):
        raise ValueError(f"{name} must have shape {letters}; got {_validate.described(packed)}")
    if min(packed.shape[-2:]) < 1:
        raise ValueError(
            f"{name} must have at least one head and a head dim of at least 1; "
            f"got {_validate.described(packed)}"
        )
    return _parts(packed)


@jax.jit
def _parts(packed: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(packed[..., part, :, :] for part in range(packed.shape[-3]))
