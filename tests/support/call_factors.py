"""What a call may be made of: factors, their values, and what each value changes in a `Case`.

The first value of each factor makes the plainest call.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attention_case import Case
from pairwise import Setting

Factors = dict[str, dict[str, dict[str, Any]]]

BROADCAST_FORMS = ["".join(axes) for axes in itertools.product("B1", "N1", "T1", "S1")]
FEATURES: Factors = {
    "logits_soft_cap": {"no soft cap": {}, "soft cap": {"features": ("logits_soft_cap",)}},
    "sinks": {"no sinks": {}, "sinks": {"features": ("sinks",)}},
    "dropout": {"no dropout": {}, "dropout": {"features": ("dropout",)}},
    "segment_ids": {"no segments": {}, "segments": {"features": ("segment_ids",)}},
    "score_mod": {"no score_mod": {}, "score_mod": {"features": ("score_mod",)}},
    "block_mask": {"no block mask": {}, "block mask": {"features": ("block_mask",)}},
    "deterministic": {"any order": {}, "deterministic": {"features": ("deterministic",)}},
    "is_causal": {"not causal": {}, "causal": {"is_causal": True}},
    "residual": {
        "residual used": {},
        "residual unused": {"residual": "unused"},
        "no residual": {"residual": "absent"},
    },
    "transform": {name: {"transform": name} for name in ("jit", "vmap", "checkpoint", "scan")},
    "batch axes": {
        "one batch axis": {},
        "two batch axes": {"batch_axes": 2, "B": 4},
        "no batch axis": {"batch_axes": 0, "B": 1},
    },
    "bias dtype": {"bias as query": {}, **{f"bias {t}": {"bias_dtype": t} for t in ("float32", "bfloat16")}},
}
NEVER_MEET = [
    {("batch axes", "no batch axis"), ("transform", transform)} for transform in ("vmap", "scan")
]  # which go over a batch axis


# What `flash_attention_varlen` doesn't take.
WITHOUT_PACKED = ("mask", "bias", "seq_lengths", "segment_ids", "block_mask")


def factors(
    dtypes: Sequence[str],
    lengths: Iterable[tuple[int, int]],
    head_dims: Iterable[int],
    value_head_dim: int,
    heads: Iterable[tuple[int, int]] = ((4, 4), (4, 2), (4, 1)),
    windows: Iterable[Any] = (9, (20, 6), (0, 0), (None, 3), (7, -1)),
    masks: Iterable[str] = BROADCAST_FORMS,
    biases: Iterable[str] = ("BNTS", "1NTS", "B1TS", "BN1S", "BNT1"),
) -> Factors:
    """All factors of a call.

    Args:
      lengths: pairs (T, S).
      value_head_dim: V where it differs from H.
      heads: pairs (N, K).
    """
    return {
        "dtype": {dtype: {"dtype": dtype} for dtype in dtypes},
        "lengths": {f"T={T}, S={S}": {"T": T, "S": S} for T, S in lengths},
        "H": {f"H={H}": {"H": H} for H in head_dims},
        "V": {"V=H": {}, f"V={value_head_dim}": {"V": value_head_dim}},
        "heads": {f"{N}/{K} heads": {"N": N, "K": K} for N, K in heads},
        "mask": _forms("mask", masks),
        "bias": _forms("bias", biases),
        "window": {"no window": {}, **{f"window {w}": {"local_window_size": w} for w in windows}},
        "alibi_slopes": _forms("alibi_slopes", ("N", "BN")),
        "seq_lengths": {
            **_forms("seq_lengths", ("query", "key_value")),
            "seq_lengths": {"features": ("seq_lengths",)},
        },
        "packed": {
            "not packed": {},
            "packed": {"features": ("packed",)},
            "packed:cut": {"features": ("packed:cut",)},
        },
        **FEATURES,
    }


def _forms(name, forms):
    return {f"no {name}": {}, **{f"{name}:{form}": {"features": (f"{name}:{form}",)} for form in forms}}


def may_meet(one: Setting, other: Setting) -> bool:
    for (name, value), (other_name, other_value) in ((one, other), (other, one)):
        is_varlen = name == "packed" and value != "not packed"
        if is_varlen and other_name in WITHOUT_PACKED and not other_value.startswith("no "):
            return False
    return {one, other} not in NEVER_MEET


def plain_row(factors: Factors) -> dict[str, str]:
    return {name: next(iter(values)) for name, values in factors.items()}


def case_of(factors: Factors, row: Mapping[str, str], category: str, **fields: Any) -> Case:
    """The case that has a row's values."""
    features = ()
    for name, value in row.items():
        changes = dict(factors[name][value])
        features += changes.pop("features", ())
        fields |= changes
    return Case(category, features=features, **fields)
