"""How each contender computes an entry of models.py: which function, which form of the arrays, which data.

FlashAttention-3 takes batches with padding as its users give them to it, packed: its arrays have no padding.
A contender that lacks an option of the entry is not measured, and `call` says which option.
"""

import dataclasses
import functools
from collections.abc import Callable

import contenders
import jax
import numpy as np
from model_entry import Entry

import jax_flash

PEERS = ("cudnn", "fa3_cu13", "fa3_cu12", "tokamax", "jax_mgpu")
DEFAULT = ("jax_flash_cuda", "jax_flash_pallas", *PEERS)
ALL = (*contenders.OURS, *contenders.PEERS)
FA3 = ("fa3_cu13", "fa3_cu12")

_SOFT_CAP, _VALUE_HEAD_DIM = "it has no soft cap", "its values have the head dim of its keys"
_LENGTHS, _DOCUMENTS = "it has no sequence lengths", "it takes packed documents by a T × S mask alone"
# Options that a peer's function in JAX has no argument for, or refuses by its shapes.
LACKS = {
    "cudnn": (_SOFT_CAP, _VALUE_HEAD_DIM, _DOCUMENTS),
    "fa3_cu12": (_SOFT_CAP, _VALUE_HEAD_DIM),
    "fa3_cu13": (_SOFT_CAP, _VALUE_HEAD_DIM),
    "tokamax": (_DOCUMENTS,),
    "jax_mgpu": (_SOFT_CAP, _VALUE_HEAD_DIM, _LENGTHS, _DOCUMENTS),
    "jax_triton": (_SOFT_CAP, _VALUE_HEAD_DIM, _LENGTHS, _DOCUMENTS),
}


@dataclasses.dataclass(frozen=True)
class Call:
    """Attention of one entry by one contender."""

    attend: Callable[..., jax.Array]  # of query, key, value and the arrays in `data`
    data: tuple[np.ndarray, ...] = ()
    packed: bool = False  # arrays are (tokens, heads, head dim), without padding


def call(name: str, entry: Entry) -> Call:
    """How contender `name` computes `entry`.

    Raises NotImplementedError where it lacks one of the entry's options. It may refuse the call for other
    reasons when that is traced.
    """
    if name in contenders.OURS:
        return _ours(name.removeprefix("jax_flash_"), entry)
    options = {
        _SOFT_CAP: entry.soft_cap is not None,
        _VALUE_HEAD_DIM: entry.value_head_dim != entry.head_dim,
        _LENGTHS: bool(entry.lengths),
        _DOCUMENTS: bool(entry.documents),
    }
    for option in LACKS[name]:
        if options[option]:
            raise NotImplementedError(option)
    if name in FA3 and (entry.lengths or entry.documents):
        return _fa3_varlen(name, entry)
    lengths = (np.asarray(entry.lengths, np.int32),) if entry.lengths else ()
    if lengths and name == "cudnn":
        return Call(functools.partial(_cudnn_padded, entry), lengths)
    if name == "tokamax" and (lengths or entry.soft_cap is not None):
        return Call(functools.partial(_tokamax, entry), lengths)
    return Call(functools.partial(contenders.PEERS[name], causal=entry.causal, window=entry.window))


def _ours(implementation: str, entry: Entry) -> Call:
    options = _mask(entry) | {"logits_soft_cap": entry.soft_cap, "implementation": implementation}
    attention = functools.partial(jax_flash.flash_attention, **options)
    if entry.varlen:
        varlen = functools.partial(
            jax_flash.flash_attention_varlen,
            max_seqlen_q=entry.longest,
            max_seqlen_kv=entry.longest,
            **options,
        )
        return Call(_with_both(varlen, "cu_seqlens_q", "cu_seqlens_kv"), (entry.offsets,), packed=True)
    if entry.documents:
        both = _with_both(attention, "query_segment_ids", "key_value_segment_ids")
        return Call(both, (entry.segment_ids,))
    if entry.lengths:
        both = _with_both(attention, "query_seq_lengths", "key_value_seq_lengths")
        return Call(both, (np.asarray(entry.lengths, np.int32),))
    return Call(attention)


def _mask(entry: Entry) -> dict:
    window = None if entry.window is None else (entry.window - 1, 0)
    return {"is_causal": entry.causal, "local_window_size": window}


def _with_both(attention: Callable, of_queries: str, of_keys: str) -> Callable:
    """Attention that takes one array, behind key and value, for two of its arguments."""

    def attend(query, key, value, data):
        return attention(query, key, value, **{of_queries: data, of_keys: data})

    return attend


def _cudnn_padded(entry: Entry, query, key, value, lengths):
    options = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths, "implementation": "cudnn"}
    return jax.nn.dot_product_attention(query, key, value, **_mask(entry), **options)


def _tokamax(entry: Entry, query, key, value, lengths=None):
    """Without lengths of queries, which it turns into a T × S mask: it computes rows of padding, too."""
    import tokamax

    return tokamax.dot_product_attention(
        query,
        key,
        value,
        key_value_seq_lengths=lengths,
        logits_soft_cap=entry.soft_cap,
        implementation="mosaic",
        **_mask(entry),
    )


def _fa3_varlen(name: str, entry: Entry) -> Call:
    mask = contenders._fa3_mask(entry.causal, entry.window)

    def fa3_cu13(query, key, value, offsets):
        import dew_flash_attn

        return dew_flash_attn.flash_mha_varlen(query, key, value, offsets, entry.longest, **mask)

    def fa3_cu12(query, key, value, offsets):
        import flash_attn3_jax

        if entry.head_dim != 128:
            raise NotImplementedError(f"built for head dim 128, not {entry.head_dim}")
        longest = {"max_seqlen_q": entry.longest, "max_seqlen_k": entry.longest}
        return flash_attn3_jax.flash_mha_varlen(query, key, value, offsets, **longest, **mask)

    return Call({f.__name__: f for f in (fa3_cu13, fa3_cu12)}[name], (entry.offsets,), packed=True)
