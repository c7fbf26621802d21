"""Calls on key-value caches, drawn at random, and their results against the definition."""

import dataclasses
import functools
import hashlib
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import rounding
from bits import bits
from seeds import seed_of

from jax_flash import _function_arguments, _reference, _reference_cache
from jax_flash._cache_spec import CacheOperands, CacheSpec
from jax_flash._spec import AttentionSpec
from jax_flash.functions.static import StaticFunction

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32, "float64": np.float64}
FEW = 256  # roundings, so few that plain attention may be lucky


@dataclasses.dataclass(frozen=True)
class CacheCase:
    T: int = 1
    S: int = 200  # capacity, in keys
    U: int = 0  # new keys
    B: int = 3
    N: int = 4
    K: int = 2
    H: int = 64
    V: int | None = None
    dtype: str = "bfloat16"
    float8: bool = False  # a cache in e4m3
    descales: bool = False  # and its descales
    page: int | None = None
    shares_pages: bool = False  # between sequences; for a call that appends nothing
    interleaved: bool = False  # pages hold keys and values
    layers: int | None = None
    batch_index: bool = False
    left_padding: bool = False
    rotary: int | None = None  # columns that are rotated
    rotary_interleaved: bool = False
    query_positions: str = "own"
    left: int | None = None
    right: int | None = None
    soft_cap: float | None = None
    alibi: str | None = None  # "1N" or "BN"
    sinks: bool = False
    packed: bool = False  # queries of several sequences, T in all
    num_splits: int | None = None
    score_mod: bool = False
    mask_mod: bool = False
    full: bool = False  # lengths are such that the append fills the cache

    def __str__(self):
        changed = (f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
        return "-".join(f"{f.name}={getattr(self, f.name)}" for f in changed) or "usual"

    @property
    def spec(self) -> CacheSpec:
        attention = AttentionSpec(
            scale=0.3 if self.soft_cap else self.H**-0.5,
            left=self.left,
            right=self.right,
            logits_soft_cap=self.soft_cap,
            return_residual=True,
            score_mod=self.function[0],
        )
        return CacheSpec(attention, self.rotary_interleaved, self.query_positions, self.num_splits)

    @property
    def function(self) -> tuple[StaticFunction | None, dict[str, np.ndarray]]:
        """The score_mod and the mask_mod, which take all indices, as one function, and its operands."""
        return _function(self) if self.score_mod or self.mask_mod else (None, {})


@functools.lru_cache
def _function(case: CacheCase) -> tuple[StaticFunction | None, dict[str, np.ndarray]]:
    random = np.random.default_rng(seed_of(case))
    table = jnp.asarray(random.normal(size=(case.N, 33)), jnp.float32)
    scales = jnp.asarray(random.uniform(0.5, 2, case.B), jnp.float32)

    def score_mod(score, batch, head, query, key):
        near = score * scales[batch] + table[head, jnp.clip(query - key, -4, 28) + 4]
        return jnp.where((query - key > 9) & (key % 5 == 3), -jnp.inf, near)

    reach = jnp.asarray(random.integers(1, case.S + 1, (case.B, case.N)), jnp.int32)

    def mask_mod(batch, head, query, key):  # hides every third query or so from all keys
        return (query - key < reach[batch, head]) & (key % 4 != 1) & ((query + head + batch) % 3 != 0)

    function, _, operands = _function_arguments.operands(
        score_mod if case.score_mod else None,
        None,
        (case.B,),
        (case.T, case.S, case.N),
        mask_mod if case.mask_mod else None,
    )
    return function, {name: np.asarray(x) for name, x in operands.items()}


@dataclasses.dataclass
class Draw:
    """Random operands of a case, in NumPy. Rows of the cache that no sequence has are NaN."""

    case: CacheCase

    def __post_init__(self):
        self.random = np.random.default_rng(seed_of(self.case))

    def normal(self, *shape: int) -> np.ndarray:
        return self.random.normal(size=shape).astype(DTYPES[self.case.dtype])

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        c = self.case
        if c.full:
            return np.full(c.B, max(c.S - c.U, 0), np.int32)
        lengths = self.random.integers(0, c.S + 1, c.B)
        if c.B > 2:  # the extremes: nothing yet; and an append that doesn't fit
            lengths[self.random.permutation(c.B)[:2]] = 0, c.S - c.U // 2
        return lengths.astype(np.int32)

    @property
    def given_lengths(self) -> np.ndarray:
        """The lengths as a call has them: below 0 they count as 0, and beyond the capacity as that."""
        page = self.case.page or 1
        capacity, kind = -(-self.case.S // page) * page, np.arange(self.case.B) % 3
        given = np.where(self.lengths == 0, np.choose(kind, [-1, 0, -(2**31)]), self.lengths)
        beyond = np.choose(kind, [capacity, capacity + 1, 2**31 - 1])
        return np.where(self.lengths == capacity, beyond, given).astype(np.int32)

    @functools.cached_property
    def page_table(self) -> np.ndarray:
        """Permuted pages of a pool that has more; some entries beyond the lengths are invalid."""
        c = self.case
        pages = -(-c.S // c.page)
        table = self.random.permutation(c.B * pages + 5)[: c.B * pages].reshape(c.B, pages)
        if c.shares_pages and c.B > 1:
            table[1:, 0] = table[0, 0]
        used = -(-np.minimum(self.lengths + c.U, c.S) // c.page)
        beyond = np.arange(pages) >= used[:, None]
        invalid = self.random.choice([-1, -(2**31), c.B * pages + 5, 2**31 - 1], table.shape)
        table = np.where(beyond & (self.random.random(table.shape) < 0.5), invalid, table)
        if pages > 2 and c.B > 1:  # and one in the midst of a sequence
            table[-1, 1] = -1
        return table.astype(np.int32)

    @functools.cached_property
    def operands(self) -> CacheOperands:
        c, random = self.case, self.random
        V = c.V or c.H
        lengths = self.given_lengths
        arrays = {"lengths": lengths}
        if c.page is not None:
            arrays["page_table"] = self.page_table
            shape = (self.page_table.size + 5, c.page)
        else:
            shape = (c.B + 2 * c.batch_index, c.S)
            if c.batch_index:
                index = random.permutation(c.B + 2)[: c.B].astype(np.int32)
                index[0] = random.choice([-1, c.B + 2])
                arrays["batch_index"] = index
        if c.layers is not None:
            shape = (c.layers, *shape)
            arrays["layer"] = np.int32(random.integers(c.layers))
            if c.B % 2:  # each layer has lengths of its own
                arrays["lengths"] = random.integers(-3, c.S + 3, (c.layers, c.B)).astype(np.int32)
                arrays["lengths"][arrays["layer"]] = lengths
        if c.left_padding:
            arrays["left_padding"] = random.integers(0, np.maximum(self.lengths // 2, 1)).astype(np.int32)
        if c.U:
            arrays |= {"new_key": self.normal(c.B, c.U, c.K, c.H), "new_value": self.normal(c.B, c.U, c.K, V)}
        if c.rotary:
            angles = random.uniform(0, 6, (c.S + max(c.U, c.T) + 1, c.rotary // 2)).astype(np.float32)
            arrays |= {"rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles)}
        if c.alibi:
            batch = c.B if c.alibi == "BN" else 1
            arrays["alibi_slopes"] = random.uniform(0.01, 0.5, (batch, c.N)).astype(np.float32)
        if c.sinks:
            arrays["sinks"] = random.normal(size=(1, c.N)).astype(np.float32)
        query = self.normal(c.B, c.T, c.N, c.H)
        if c.packed:
            query = query[:1]
            arrays["query_offsets"] = self.query_offsets
        if c.interleaved:
            key, value = self.normal(*shape, 2 * c.K, c.H), None
        else:
            key, value = self.normal(*shape, c.K, c.H), self.normal(*shape, c.K, V)
        if c.float8:
            key, value = (None if x is None else x.astype(ml_dtypes.float8_e4m3fn) for x in (key, value))
        if c.descales:
            # Each layer has its own, where it has lengths of its own.
            layers = (c.layers,) if arrays["lengths"].ndim == 2 else ()
            for name in ("key_descale", "value_descale"):
                arrays[name] = random.uniform(0.5, 2, (*layers, c.K)).astype(np.float32)
        operands = CacheOperands.of(arrays | dict(query=query, key=key, value=value) | c.function[1])
        for x in (key, value):
            if x is not None:
                x[~self.used(operands)] = np.nan
        return operands

    @functools.cached_property
    def query_offsets(self) -> np.ndarray:
        """Sequences of which some have no query, and tokens before the first one and after the last."""
        c = self.case
        cuts = np.sort(self.random.integers(0, c.T - c.T // 8 + 1, c.B))
        return np.concatenate([cuts[:1] // 2, cuts]).astype(np.int32)

    def used(self, operands: CacheOperands) -> np.ndarray:
        """Which rows of the cache some sequence has after the append, bool `([L,] C or P, S or page)`."""
        is_used = np.zeros(operands.key.shape[:-2], bool)
        cache = _reference_cache.Cache(operands)
        for b, length in enumerate(self.lengths):
            for position in range(min(length + self.case.U, self.case.S)):
                if (place := cache.place(b, position)) is not None:
                    is_used[place] = True
        return is_used


class Definition(NamedTuple):
    """What runs of a call are compared with."""

    reference: _reference_cache.Results
    plain: _reference_cache.Results  # of plain attention
    lost: np.ndarray  # by lse where tensor cores cut sums off


# Attention by its definition, compiled as a whole: operation by operation it takes several times as long,
# nearly all of it to compile each for each shape.
_compiled = {
    name: jax.jit(
        getattr(_reference, name),
        static_argnums=(0, 2) if name == "reference" else 0,
        compiler_options={"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False},
    )
    for name in ("reference", "plain_attention")
}
_definitions: dict[tuple[CacheCase, bytes], Definition] = {}
MOST_KEPT = 64  # definitions


def definition(case: CacheCase, operands: CacheOperands) -> Definition:
    """Of a case on these operands. The last ones are kept, as tests run a case in several ways."""
    digest = hashlib.sha256()
    for x in jax.tree.leaves(operands):
        digest.update(np.ascontiguousarray(x).tobytes())
    key = case, digest.digest()
    if key not in _definitions:
        while len(_definitions) >= MOST_KEPT:
            del _definitions[next(iter(_definitions))]
        with mock.patch.multiple(_reference, **_compiled):
            reference = _reference_cache.reference(case.spec, operands)
            plain = _reference_cache.plain(case.spec, operands)
            is_cut_off = operands.query.dtype.itemsize == 2
            lost = _cut_off(case.spec, operands, reference) if is_cut_off else np.zeros(())
        _definitions[key] = Definition(reference, plain, lost)
    return _definitions[key]


def check(case: CacheCase, operands: CacheOperands, got) -> None:
    """Compares `(out, lse, key, value)` of a run with the definition."""
    reference, plain, lost_of_lse = definition(case, operands)
    out, lse, key, value = (None if x is None else np.asarray(x) for x in got)
    assert out.shape == reference.out.shape and out.dtype == operands.query.dtype
    assert lse.shape == reference.lse.shape
    for name, ours, theirs, right in (
        ("out", out, plain.out, reference.out),
        ("lse", lse, plain.lse, reference.lse),
    ):
        nowhere = np.isneginf(right)
        assert np.array_equal(nowhere, np.isneginf(ours)), name
        ours, theirs, right = (np.where(nowhere, 0, x.astype(np.float64)) for x in (ours, theirs, right))
        # Rotated keys and queries are rounded; scores of others are sums in float32.
        is_rounded = name == "out" or operands.rotary_cos is not None
        dtype = operands.query.dtype if is_rounded else jnp.promote_types(out.dtype, jnp.float32)
        unit = jnp.finfo(dtype).eps
        # Plain attention in float64 is the definition itself.
        units = 8 if case.dtype == "float64" else 1 if right.size < FEW else 0.25
        floor = units * float(unit) * np.linalg.norm(right)
        lost = lost_of_lse if name == "lse" else np.zeros(())
        # A row that has one key may lose a whole unit each time, twice the mean, and few rows have no mean.
        floor += (2 if right.size < FEW else 1) * np.linalg.norm(lost)
        error, bound = np.linalg.norm(ours - right), 2 * np.linalg.norm(theirs - right) + floor
        assert error <= bound, (
            f"{name}: error {error:.3g} over {bound:.3g} (of norm {np.linalg.norm(right):.3g})"
        )
        rows = (lambda x: np.linalg.norm(x, axis=-1)) if name == "out" else np.abs
        errors = rows(ours - right)
        bounds = 8 * float(unit) * (rows(right) + np.sqrt(np.mean(right**2)) + 1e-3)
        bounds = np.maximum(bounds + 2 * lost, 2 * rows(theirs - right))
        assert (errors <= bounds).all(), f"{name}: a row is off by {np.max(errors / bounds):.3g} bounds"
    _check_cache(operands, plain, key, value)


def _cut_off(spec: CacheSpec, operands: CacheOperands, reference: _reference_cache.Results) -> np.ndarray:
    """What tensor cores, which cut sums off, may take from log-sum-exp: the mean of what scores lose."""
    attention = _reference_cache.without_cache(spec, operands)
    of_attention = _reference_cache.attention_spec(spec)
    out, lse = _reference_cache.of_sequences(operands, reference)
    references = {"out": out, "lse": lse.swapaxes(1, 2)}
    terms = rounding.terms_of(operands.query.dtype.name, of_attention, attention, references, out, None)
    lost = np.sum(terms.p * rounding.cut_off(terms), -1)
    _, packed = _reference_cache.packed_like(operands, out, lost)
    return np.where(np.isneginf(reference.lse), 0, packed)


def _check_cache(operands: CacheOperands, plain, key: np.ndarray, value: np.ndarray | None) -> None:
    """All rows keep their bits but the appended ones; rotated keys may be off by a rounding."""
    if value is not None:
        np.testing.assert_array_equal(bits(value), bits(plain.value))
    is_new = bits(plain.key) != bits(operands.key)
    np.testing.assert_array_equal(bits(key)[~is_new], bits(operands.key)[~is_new])
    new, right = (x[is_new].astype(np.float64) for x in (key, plain.key))
    if operands.rotary_cos is None:
        np.testing.assert_array_equal(new, right)
    else:
        unit = float(jnp.finfo(operands.key.dtype).eps)
        np.testing.assert_allclose(new, right, rtol=2 * unit, atol=2 * unit)


def as_jax(operands: CacheOperands) -> CacheOperands:
    return jax.tree.map(jnp.asarray, operands)
