"""The arrays of decode.py's calls, and the programs that its contenders make of them.

A call that appends changes its cache in place only if it is given the cache, and so it can't be repeated on
the same arrays. Such calls, and what they are compared with, are made in chains, each on the output of the
one before: the time of one is the difference between a long and a short chain. What is appended is written
to the same place each time.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import contenders
import jax
import jax.numpy as jnp
import numpy as np
from decode_cases import Call, Case

import jax_flash
from jax_flash import KVCache, PagedKVCache

COPY = "copy"
PEERS = ("cudnn",)
ALL = (*contenders.OURS, *PEERS, COPY)
PEER_GROUPS = ("contiguous", "lengths", "paged", "8 bits")  # whose first variant all contenders may run
SHORT_CHAIN, LONG_CHAIN = 1, 9
DISTINCT = 8  # sequences whose keys are drawn; the others repeat them


class RaggedPages(NamedTuple):
    """What `ragged_paged_attention` takes beside queries."""

    kv_pages: Any
    kv_lens: Any
    page_indices: Any
    cu_q_lens: Any
    num_seqs: Any

    @classmethod
    def of(cls, cache: PagedKVCache, queries: int) -> "RaggedPages":
        """The cache for sequences with so many queries each."""
        *pages, K, H = cache.key_pages.shape
        both = jnp.stack([cache.key_pages, cache.value_pages], axis=3).reshape(*pages, 2 * K, H)
        sequences = len(cache.lengths)
        offsets = queries * jnp.arange(sequences + 1, dtype=jnp.int32)
        return cls(both, cache.lengths, cache.page_table, offsets, jnp.array([sequences], jnp.int32))


Inputs = tuple[Any, ...]
"""Query, cache, new key and value or None, rotary tables or None. Of a copy, an array and a scalar."""


def is_chained(case: Case) -> bool:
    return any(call.appended for call in case.calls.values())


def shapes(call: Call) -> Inputs:
    """What a program is compiled for."""
    B, S, K, H = call.batch, call.capacity, call.kv_heads, call.head_dim

    def array(*shape: int, dtype: str = call.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    query, lengths = array(B, call.queries, call.heads, H), array(B, dtype="int32")
    if call.page is None:
        rows = array(B, S, K, H, dtype=call.cache_dtype)
        cache = KVCache(rows, rows, lengths)
    else:
        pages = S // call.page
        rows = array(B * pages, call.page, K, H, dtype=call.cache_dtype)
        cache = PagedKVCache(rows, rows, array(B, pages, dtype="int32"), lengths)
    if call.packed:
        cache = jax.eval_shape(lambda cache: RaggedPages.of(cache, call.queries), cache)
    new = (array(B, call.appended, K, H),) * 2 if call.appended else None
    rotary = (array(S + 1, H // 2, dtype="float32"),) * 2 if call.rotary else None
    return query, cache, new, rotary


def copy_shapes(call: Call) -> Inputs:
    """Half of the bytes that the call reads: they are read and written."""
    return jax.ShapeDtypeStruct((call.bytes_read // 8,), jnp.uint32), jax.ShapeDtypeStruct((), jnp.uint32)


class Arrays:
    """Random arrays of a case: all its variants have the same keys and values."""

    def __init__(self, base: Call):
        shape = (min(base.batch, DISTINCT), base.capacity, base.kv_heads, base.head_dim)
        repeated = jnp.arange(base.batch) % DISTINCT
        drawn = (_normal(seed, shape, base.dtype).astype(base.cache_dtype) for seed in (0, 1))
        self.key, self.value = (x[repeated] for x in drawn)

    def inputs(self, call: Call) -> Inputs:
        """The arrays of `shapes(call)`. The pages of a sequence are anywhere in the pool."""
        query, cache, new, rotary = shapes(call)
        lengths = jnp.asarray(call.key_lengths - call.appended)
        if call.page is None:
            filled = KVCache(self.key, self.value, lengths)
        else:
            table = cache.page_indices if call.packed else cache.page_table
            places = np.random.default_rng(0).permutation(table.size).astype(np.int32)
            owner = jnp.asarray(np.argsort(places))
            key, value = (x.reshape(-1, call.page, *x.shape[2:])[owner] for x in (self.key, self.value))
            filled = PagedKVCache(key, value, jnp.asarray(places.reshape(table.shape)), lengths)
            if call.packed:
                filled = RaggedPages.of(filled, call.queries)
        drawn = jax.tree.map(lambda x: _normal(2, x.shape, x.dtype), (query, new))
        if rotary is not None:
            angles = jnp.arange(rotary[0].size, dtype=jnp.float32).reshape(rotary[0].shape)
            rotary = jnp.cos(angles), jnp.sin(angles)
        return drawn[0], filled, drawn[1], rotary


def _normal(seed: int, shape: Sequence[int], dtype: Any) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def attend(call: Call, name: str) -> Callable[..., jax.Array]:
    """The output of a call by contender `name`, as a function of its inputs.

    Raises NotImplementedError for a call that the contender has no function for.
    """
    if name == "cudnn":
        if call.page is not None or call.appended or call.queries > 1 or call.cache_dtype != call.dtype:
            raise NotImplementedError(
                "JAX has cuDNN's attention to one query and contiguous caches of its dtype alone"
            )
        return _cudnn
    implementation = name.removeprefix("jax_flash_")

    def with_cache(query, cache, new, rotary):
        return _attend_and_append(implementation, query, cache, new, rotary)[0]

    def without_cache(query, cache, new, rotary):
        del new, rotary
        keys = {"is_causal": True, "key_value_seq_lengths": cache.lengths}
        return jax_flash.flash_attention(query, cache.key, cache.value, **keys, implementation=implementation)

    def of_packed(query, cache, new, rotary):
        del new, rotary
        *rows, N, H = query.shape
        out = jax_flash.ragged_paged_attention(
            query.reshape(-1, N, H), *cache, sm_scale=H**-0.5, implementation=implementation
        )
        return out.reshape(*rows, N, H)

    if call.packed:
        return of_packed
    return without_cache if call.by_flash_attention else with_cache


def _cudnn(query, cache, new, rotary):
    del new, rotary
    return jax.nn.dot_product_attention(
        query, cache.key, cache.value, key_value_seq_lengths=cache.lengths, implementation="cudnn"
    )


def _attend_and_append(implementation: str, query, cache, new, rotary):
    cos, sin = rotary or (None, None)
    return jax_flash.flash_attention_with_cache(
        query, cache, *(new or ()), rotary_cos=cos, rotary_sin=sin, implementation=implementation
    )


def chain(name: str, calls: int) -> Callable[..., jax.Array]:
    """So many calls by one of our implementations, each with the output of the one before as its query."""
    implementation = name.removeprefix("jax_flash_")

    def run(query, cache, new, rotary):
        lengths = cache.lengths
        for _ in range(calls):
            query, cache = _attend_and_append(implementation, query, cache, new, rotary)
            cache = dataclasses.replace(cache, lengths=lengths)
        return query

    return run


def copy(x: jax.Array, y: jax.Array) -> jax.Array:
    """A kernel that reads and writes `x`: XLA doesn't know that `y` is 0."""
    return x ^ y


def contenders_of(case: Case, names: Sequence[str]) -> list[tuple[str, str]]:
    """The variants and contenders of a case, in pairs."""
    return [
        (variant, name)
        for variant in case.calls
        for name in names
        if name in contenders.OURS or (variant == case.base and case.group in PEER_GROUPS)
    ]


Programs = dict[tuple[str, str, str], "list[jax.stages.Compiled] | Exception"]
"""By label of the case with its group, variant and contender: one program, or two chains."""


def compile_all(cases: Sequence[Case], names: Sequence[str]) -> Programs:
    """Compile all that is measured, on all cores; an exception in place of what a contender refuses."""

    def compiled(work: tuple[Case, str, str]) -> "list[jax.stages.Compiled] | Exception":
        case, variant, name = work
        call = case.calls[variant]
        try:
            if name == COPY:
                return [jax.jit(copy).lower(*copy_shapes(call)).compile()]
            lengths = (SHORT_CHAIN, LONG_CHAIN) if is_chained(case) else ()
            functions = [chain(name, calls) for calls in lengths] or [attend(call, name)]
            return [jax.jit(function).lower(*shapes(call)).compile() for function in functions]
        except Exception as error:  # whatever a contender refuses with is its answer
            return error

    work = [(case, *pair) for case in cases for pair in contenders_of(case, names)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(compiled, work)
        return {
            (key_of(case), variant, name): programs
            for (case, variant, name), programs in zip(work, found, strict=True)
        }


def key_of(case: Case) -> str:
    return f"{case.group}: {case.label}"
