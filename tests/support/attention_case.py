"""A call of `flash_attention` as a test describes it, and random inputs for it."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from seeds import seed_of

from jax_flash import _dropout, create_block_mask
from jax_flash._spec import AttentionSpec, BlockMaskSpec, Operands
from jax_flash.functions.static import StaticFunction, static_mask_mod, static_score_mod

CANONICAL_RANK = {"bias": 4, "mask": 4, "alibi_slopes": 2, "sinks": 2}  # where arguments may have less
OPERAND_OF = {  # named otherwise there
    "cu_seqlens_q": "query_offsets",
    "cu_seqlens_kv": "key_value_offsets",
    "score_table": "score_mod_0",
    "key_ids": "mask_mod_0",
}
FARTHEST = 4  # keys from a query, beyond which a score_table has one number
PACKED = 5  # sequences in each batch row of a call with packed ones


def score_mod_of(table):
    """The score_mod of cases that have one, which captures a table `(N, 2 * FARTHEST + 1)`."""

    table = jnp.asarray(table)

    def score_mod(score, batch, head, query, key):
        place = jnp.clip(query - key, -FARTHEST, FARTHEST) + FARTHEST
        return 0.75 * score + table[head, place].astype(score.dtype)

    return score_mod


MASK_BLOCKS = 48, 32  # of queries and keys


def mask_mod_of(key_ids):
    """The mask function of cases that have a block mask, which captures the ids `(S,)` of keys: each head and
    each run of queries sees two ids of three, and every fifth key."""
    key_ids = jnp.asarray(key_ids)

    def mask_mod(batch, head, query, key):
        return (key_ids[key] != (head + query // 40) % 3) | (key % 5 == 0)

    return mask_mod


def block_mask_of(key_ids, queries, heads):
    (keys,) = key_ids.shape
    return create_block_mask(mask_mod_of(key_ids), None, heads, queries, keys, block_size=MASK_BLOCKS)


@functools.cache
def static_functions(heads, keys):
    """A case's score_mod and mask_mod, as specs have them."""
    score_mod, _ = static_score_mod(score_mod_of(jnp.zeros((heads, 2 * FARTHEST + 1), jnp.float32)))
    mask_mod, _ = static_mask_mod(mask_mod_of(jnp.zeros(keys, jnp.int32)))
    return score_mod, mask_mod


@dataclasses.dataclass(frozen=True)
class Case:
    """One call, described by what it exercises (`category`) and how it differs from the usual."""

    category: str
    dtype: str
    T: int = 129
    S: int = 129
    B: int = 2
    N: int = 2
    K: int = 2
    H: int = 64
    V: int | None = None
    is_causal: bool = False
    local_window_size: int | tuple[int | None, int | None] | None = None
    scale: float | None = None
    magnitude: float = 1.0  # standard deviation of query, key and value
    features: tuple[str, ...] = ()  # of FEATURES; one that comes in several forms may name it: "mask:B11S"
    batch_axes: int = 1  # leading axes that the B batch rows are cut into: none (of B = 1), one or two
    bias_dtype: str | None = None  # None for query's
    transform: str = "jit"  # what is around the call, see call_forms.py
    residual: str = "used"  # in the loss; or "unused" there, or "absent": not returned
    seed: int | None = None  # of the inputs; None for that of the case (seeds.py)

    def __str__(self):
        text = f"{self.category}-{self.dtype}-b{self.B}-t{self.T}-s{self.S}-h{self.N}/{self.K}-d{self.H}"
        if self.V is not None:
            text += f"-v{self.V}"
        if self.is_causal:
            text += "-causal"
        if self.local_window_size is not None:
            text += f"-window{self.local_window_size}".replace(" ", "")
        if self.scale is not None:
            text += f"-scale{self.scale}"
        text = "-".join((text, *self.features))
        if self.bias_dtype is not None:
            text += f"-bias_{self.bias_dtype}"
        if self.batch_axes != 1:
            text += f"-batch_axes{self.batch_axes}"
        if self.transform != "jit":
            text += f"-{self.transform}"
        if self.residual != "used":
            text += f"-residual_{self.residual}"
        return text

    @property
    def is_drawn(self) -> bool:
        """Whether a program put its values together, whatever numbers they make."""
        return self.category in ("pairs", "fuzz")

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The leading axes that the call has."""
        return ((), (self.B,), (2, self.B // 2))[self.batch_axes]

    @property
    def rows_of_a_call(self) -> int:
        """Batch rows that one call sees: fewer than B where a transform goes over the first axis."""
        if self.packed is not None:
            return 1
        return math.prod(self.batch_shape[1:]) if self.transform in ("vmap", "scan") else self.B

    @property
    def packed(self) -> dict[str, int] | None:
        """The static arguments that varlen sequences come with; None where there are none."""
        form = next((f.partition(":")[2] for f in self.features if f.startswith("packed")), None)
        if form is None:
            return None
        T, S = (self.T, self.S) if form != "cut" else (-(-self.T // 3), -(-self.S // 3))
        return {"max_seqlen_q": T, "max_seqlen_kv": S}

    def arrays(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of the call as `flash_attention` takes them, but for dropout's key.

        The forms of a feature: for bias and mask their axes, "1" in the place of one to broadcast, for
        alibi_slopes "N" or "BN", for seq_lengths "query" or "key_value" alone, or "alike" where both leave
        the diagonal where it is, for varlen sequences "cut" where the longest may have tokens beyond
        max_seqlen.
        """
        sizes = {
            "1": 1,
            "O": PACKED + 1,
            "R": 2 * FARTHEST + 1,
            **{letter: getattr(self, letter) for letter in "BTSNKH"},
            "V": self.V or self.H,
        }
        arrays: dict[str, tuple[str, Any]] = {
            "query": ("BTNH", self.dtype),
            "key": ("BSKH", self.dtype),
            "value": ("BSKV", self.dtype),
        }
        for feature in self.features:
            name, _, form = feature.partition(":")
            match name:
                case "bias":
                    arrays["bias"] = form or "BNTS", self.bias_dtype or self.dtype
                case "bias_broadcast":
                    arrays["bias"] = "N1S", self.bias_dtype or self.dtype
                case "mask":
                    arrays["mask"] = form or "B1TS", bool
                case "alibi_slopes":
                    arrays["alibi_slopes"] = form or "N", np.float32
                case "sinks":
                    arrays["sinks"] = "N", np.float32
                case "seq_lengths":
                    for side in ("query", "key_value"):
                        if form in ("", "alike", side):
                            arrays[f"{side}_seq_lengths"] = "B", np.int32
                case "segment_ids":
                    arrays["query_segment_ids"] = "BT", np.int32
                    arrays["key_value_segment_ids"] = "BS", np.int32
                case "packed":
                    arrays |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), ("BO", np.int32))
                case "score_mod":
                    arrays["score_table"] = "NR", np.float32
                case "block_mask":
                    arrays["key_ids"] = "S", np.int32
        return {
            name: jax.ShapeDtypeStruct(tuple(sizes[axis] for axis in axes), jnp.dtype(dtype))
            for name, (axes, dtype) in arrays.items()
        }

    def operands(self) -> Operands[jax.ShapeDtypeStruct]:
        """The operands that the call must amount to, as shapes."""
        shapes = {
            OPERAND_OF.get(name, name): jax.ShapeDtypeStruct(_canonical(name, x.shape), x.dtype)
            for name, x in self.arrays().items()
        }
        if "dropout" in self.features:
            shapes["dropout_rows"] = jax.ShapeDtypeStruct((self.B, self.N, self.T), np.dtype("uint32"))
            shapes["dropout_columns"] = jax.ShapeDtypeStruct((self.B, self.S), np.dtype("uint32"))
        if self.has_functions:
            shapes["batch_indices"] = jax.ShapeDtypeStruct((self.B,), np.dtype("int32"))
            shapes["head_indices"] = jax.ShapeDtypeStruct((1, self.N), np.dtype("int32"))
        if "block_mask" in self.features:
            blocks = (-(-n // size) for n, size in zip((self.T, self.S), MASK_BLOCKS, strict=True))
            shapes["block_kinds"] = jax.ShapeDtypeStruct((1, self.N, *blocks), np.dtype("int8"))
        return Operands.of(shapes)

    def spec(self) -> AttentionSpec:
        """The call as a spec, worked out apart from what the package does."""
        window = self.local_window_size
        window = (window, window) if isinstance(window, int) else window or (None, None)
        left, right = (None if side == -1 else side for side in window)
        if self.is_causal:
            right = 0 if right is None else min(right, 0)
        return AttentionSpec(
            scale=self.H**-0.5 if self.scale is None else self.scale,
            left=left,
            right=right,
            logits_soft_cap=5.0 if "logits_soft_cap" in self.features else None,
            dropout_rate=0.2 if "dropout" in self.features else 0.0,
            deterministic="deterministic" in self.features,
            return_residual=self.residual != "absent",
            max_query_length=self.packed and self.packed["max_seqlen_q"],
            max_key_value_length=self.packed and self.packed["max_seqlen_kv"],
            score_mod=self._functions[0] if "score_mod" in self.features else None,
            block_mask=self._block_mask() if "block_mask" in self.features else None,
        )

    @property
    def has_functions(self) -> bool:
        return not {"score_mod", "block_mask"}.isdisjoint(self.features)

    @property
    def _functions(self) -> tuple[StaticFunction, StaticFunction]:
        return static_functions(self.N, self.S)

    def _block_mask(self) -> BlockMaskSpec:
        return BlockMaskSpec(MASK_BLOCKS, self._functions[1], False, self.N > 1)


def draw(case: Case):
    """Random inputs of a call.

    Returns:
      the arguments of `flash_attention`, or of `flash_attention_varlen` for each batch row (NumPy arrays
      and static values), but for `implementation` and `return_residual`; the spec and operands that they
      must amount to; and cotangents of the output `(B, T, N, V)` and of the residual `(B, T, N)`.
    """
    seed = seed_of(case) if case.seed is None else case.seed
    generator = np.random.default_rng(seed)
    dtype = jnp.dtype(case.dtype)

    def normal(shape, dtype=dtype, magnitude=1.0):
        return (magnitude * generator.standard_normal(shape)).astype(dtype)

    arguments: dict[str, Any] = {}
    for name, x in case.arrays().items():
        match name:
            case "query" | "key" | "value":
                arguments[name] = normal(x.shape, magnitude=case.magnitude)
            case "bias" | "sinks" | "score_table":
                arguments[name] = normal(x.shape, x.dtype)
            case "mask":
                mask = generator.random(x.shape) < 0.7
                arguments[name] = mask | ~mask.any()  # as nothing is to be seen of a call that sees nothing
            case "alibi_slopes":
                arguments[name] = generator.uniform(0.01, 0.5, x.shape).astype(x.dtype)
            case "query_seq_lengths" | "key_value_seq_lengths":
                longest = case.T if name == "query_seq_lengths" else case.S
                lengths = generator.integers(0, longest, x.shape, x.dtype, endpoint=True)
                lengths[-1] = max(lengths[-1], longest - longest // 2)  # nor where all are short
                arguments[name] = lengths
            case "key_ids":
                arguments[name] = generator.integers(0, 3, x.shape, x.dtype)
            case "query_segment_ids" | "key_value_segment_ids":
                arguments[name] = np.sort(generator.integers(0, 3, x.shape, x.dtype))
            case "cu_seqlens_q" | "cu_seqlens_kv":
                tokens = case.T if name == "cu_seqlens_q" else case.S
                arguments[name] = _offsets(generator, x, tokens)
    if "seq_lengths:alike" in case.features:
        queries = np.maximum(arguments["query_seq_lengths"], case.T - case.S)
        arguments |= {"query_seq_lengths": queries, "key_value_seq_lengths": queries + (case.S - case.T)}
    operands = {
        OPERAND_OF.get(name, name): x.reshape(_canonical(name, x.shape)) for name, x in arguments.items()
    }
    if case.has_functions:
        operands["batch_indices"] = np.arange(case.B, dtype=np.int32)
        operands["head_indices"] = np.arange(case.N, dtype=np.int32)[None]
    if "block_mask" in case.features:
        operands["block_kinds"] = np.asarray(block_mask_of(arguments["key_ids"], case.T, case.N).kinds)
    if "dropout" in case.features:
        arguments["dropout_key"] = key = jax.random.key(int(generator.integers(2**31)))
        # Batch rows of one call have hashes of their own; a call made again with the same key has the same.
        rows, columns = _dropout.hashes(key, case.rows_of_a_call, case.N, case.T, case.S)
        calls = case.B // case.rows_of_a_call
        operands["dropout_rows"] = np.tile(rows, (calls, 1, 1))
        operands["dropout_columns"] = np.tile(columns, (calls, 1))
    spec = case.spec()
    arguments |= {
        "is_causal": case.is_causal,
        "local_window_size": case.local_window_size,
        "scale": case.scale,
        "logits_soft_cap": spec.logits_soft_cap,
        "dropout_rate": spec.dropout_rate,
        "deterministic": spec.deterministic,
        **(case.packed or {}),
    }
    rows = case.B, case.T, case.N
    d_out, d_lse = normal((*rows, case.V or case.H)), normal(rows, np.float32)
    return arguments, spec, Operands.of(operands), d_out, d_lse


def _offsets(generator, x, tokens):
    """Of varlen sequences; some have no tokens, and some rows padding on either side."""
    offsets = np.sort(generator.integers(0, tokens, x.shape, x.dtype, endpoint=True))
    empty = generator.integers(1, x.shape[1] - 1, x.shape[0])
    rows = np.arange(x.shape[0])
    offsets[rows, empty] = offsets[rows, empty - 1]
    # In the last row the last sequence has half of the tokens, for something to be seen.
    offsets[-1, -1], offsets[-1, :-1] = tokens, np.minimum(offsets[-1, :-1], tokens // 2)
    return offsets


def _canonical(name, shape):
    if name in ("score_table", "key_ids"):
        return 1, math.prod(shape)
    return (1,) * (CANONICAL_RANK.get(name, 0) - len(shape)) + shape
