"""Programs that decode on the GPU: caches that stay where they are, CUDA graphs, exports, `vmap`.

What they should give is checked on the CPU, in tests/transforms; here, that kernels give it.
"""

import dataclasses
import functools
import re

import cache_programs
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from bits import assert_same_bits
from cache_programs import copied, step

import jax_flash
from jax_flash import KVCache, PagedKVCache

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

implementations = pytest.mark.parametrize("implementation", ("cuda", "pallas"))
# Larger than what splits need of scratch memory.
B, S, N, K, H, PAGE = 8, 8192, 8, 2, 64, 64
LENGTHS = (0, 5, 127, 128, 1000, 4096, 7000, S - 4)
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}  # XLA launches every kernel itself


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def lengths(layers):
    lead = () if layers is None else (layers,)
    return jnp.broadcast_to(jnp.asarray(LENGTHS, jnp.int32), (*lead, B))


def contiguous(layers=None):
    lead = () if layers is None else (layers,)
    return KVCache(normal(3, *lead, B, S, K, H), normal(4, *lead, B, S, K, H), lengths(layers))


def paged(layers=None):
    lead = () if layers is None else (layers,)
    pages = B * S // PAGE
    rows = normal(3, *lead, pages, PAGE, K, H), normal(4, *lead, pages, PAGE, K, H)
    table = jax.random.permutation(jax.random.key(5), pages).reshape(B, -1).astype(jnp.int32)
    return PagedKVCache(*rows, table, lengths(layers))


caches = pytest.mark.parametrize("make", (contiguous, paged))


def arguments():
    """Query, and key and value that are appended."""
    return normal(0, B, 1, N, H), normal(1, B, 1, K, H), normal(2, B, 1, K, H)


def rows_of(cache):
    """Keys and values."""
    return cache.arrays().key, cache.arrays().value


def assert_same(got, want):
    """Caches are the same bits, outputs equal but for rounding."""
    (cache, out), (right_cache, right_out) = got, want
    assert_same_bits(cache, right_cache)
    out, right_out = (np.asarray(x, np.float64) for x in (out, right_out))
    assert np.linalg.norm(out - right_out) <= 0.01 * np.linalg.norm(right_out)


@implementations
@caches
@pytest.mark.parametrize("form", cache_programs.FORMS)
def test_a_donated_cache_is_changed_in_place(form, make, implementation):
    """XLA's program has no copy of it and no scratch memory for one, and the results are its buffers."""
    function, layers = cache_programs.FORMS[form]
    want = jax.jit(functools.partial(function, implementation="xla"))(make(layers), *arguments())
    function = functools.partial(function, implementation=implementation)
    cache = make(layers)
    compiled = jax.jit(function, donate_argnums=0).lower(cache, *arguments()).compile()
    assert copied(compiled, cache) == []
    assert len(re.findall(r"(?:may|must)-alias", compiled.as_text())) >= 2  # keys and values
    assert compiled.memory_analysis().temp_size_in_bytes < rows_of(cache)[0].nbytes
    before = [x.unsafe_buffer_pointer() for x in rows_of(cache)]
    got = compiled(cache, *arguments())
    assert [x.unsafe_buffer_pointer() for x in rows_of(got[0])] == before
    assert_same(got, want)


@implementations
def test_a_cache_that_is_not_donated_stays_as_it_was(implementation):
    cache, untouched = contiguous(), contiguous()
    got = jax.jit(functools.partial(step, implementation=implementation))(cache, *arguments())
    assert_same_bits(cache, untouched)
    assert_same(got, jax.jit(functools.partial(step, implementation="xla"))(untouched, *arguments()))


@implementations
@caches
def test_cuda_graphs(make, implementation):
    """A program that runs with other lengths, in other memory, gives the bits of single launches."""

    def steps(cache, query, key, value):
        for _ in range(8):
            cache, query = step(cache, query, key, value, implementation=implementation)
        return cache, query

    lowered = jax.jit(steps, donate_argnums=0).lower(make(), *arguments())
    in_graphs, one_by_one = lowered.compile(), lowered.compile(compiler_options=NO_GRAPHS)
    kept = []  # so that the memory of one run isn't that of the next
    for shift in (0, 3, 1, 0):
        got, right = (
            run(dataclasses.replace(make(), lengths=jnp.roll(lengths(None), shift)), *arguments())
            for run in (in_graphs, one_by_one)
        )
        assert_same_bits(got, right)
        kept.append(got)


def test_a_program_exported_where_there_is_no_gpu():
    checks = [jax.export.DisabledSafetyCheck.custom_call("jax_flash_decode")]
    function = jax.jit(functools.partial(step, implementation="cuda"))
    with jax_flash.planned_for("sm_90a"):
        exported = jax.export.export(function, platforms=["cuda"], disabled_checks=checks)(
            contiguous(), *arguments()
        )
    got = jax.export.deserialize(exported.serialize()).call(contiguous(), *arguments())
    assert_same(got, function(contiguous(), *arguments()))


@implementations
@caches
def test_vmap(make, implementation):
    both = jax.tree.map(lambda x: jnp.stack([x, x]), make())
    queries, keys, values = (jnp.stack([x, 2 * x]) for x in arguments())
    by_name = [
        jax.jit(jax.vmap(functools.partial(step, implementation=name)))(both, queries, keys, values)
        for name in (implementation, "xla")
    ]
    assert_same(*by_name)
