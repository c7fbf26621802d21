"""The kernels that make mask metadata, emulated on a CPU, against array operations."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import mask_metadata_reference
import numpy as np
import pytest
from seeds import seed_of

from jax_flash import _device, cuda
from jax_flash._device import H100
from jax_flash._spec import AttentionSpec, Operands, shapes_of
from jax_flash.cuda import mask_metadata_plan
from jax_flash.cuda.sm90 import backward_plan, forward_plan


@dataclasses.dataclass(frozen=True)
class Case:
    spec: AttentionSpec
    operands: Operands
    # Sizes of tiles and blocks are drawn from what the kernels allow, whatever a plan would choose.
    rows: int  # of a forward tile
    keys: int
    pack_gqa: int
    queries: int  # of a backward block
    tile_keys: int
    span: int


def lengths(random, B, longest):
    return random.integers(0, longest, size=B, endpoint=True).astype(np.int32)


def offsets(random, B, count, longest):
    """Ascending. Tokens before the first offset or behind the last are padding. Sequences may be empty."""
    found = np.sort(random.integers(longest, size=(B, count + 1), endpoint=True))
    form = random.integers(4)
    if form == 0:
        found[:, 0], found[:, -1] = 0, longest
    elif form == 1:
        found[:, random.integers(count + 1) :] = longest
    elif form == 2:
        found[...] = random.choice(found[0])
    return np.sort(found).astype(np.int32)


def draw(random, form, B=None, T=None, S=None, count=None) -> Case:
    B = B or int(random.integers(1, 4))
    T, S = T or int(random.integers(1, 500)), S or int(random.integers(1, 500))
    others = {}
    if "diagonal" in form:
        parts = int(random.integers(1, 4))
        T = parts * -(-T // parts)
        shifts = random.integers(-S, T, size=(B, parts), endpoint=True)
        shifts = np.where(random.integers(8, size=(1, parts)), shifts, random.choice((-(2**29), 2**29)))
        others["diagonal"] = np.sort(shifts, axis=1).astype(np.int32)
    longest = (None, None)
    if "packed" in form:
        count = count or int(random.integers(1, 40))
        others = dict(
            query_offsets=offsets(random, B, count, T), key_value_offsets=offsets(random, B, count, S)
        )
        longest = tuple(int(random.integers(1, x, endpoint=True)) for x in (T, S))
    if "query_lengths" in form:
        others["query_seq_lengths"] = lengths(random, B, T)
    if "key_lengths" in form:
        others["key_value_seq_lengths"] = lengths(random, B, S)
    if "segments" in form:
        most = int(random.choice((1, 5, 40)))
        for name, size in (("query", T), ("key_value", S)):
            ids = random.integers(-most, most, size=(B, size), endpoint=True).astype(np.int32)
            others[f"{name}_segment_ids"] = np.sort(ids) if random.integers(4) else ids
    if random.integers(2):
        others["alibi_slopes"] = np.ones((1, 2), np.float32)
    # A diagonal's call has the window as it is.
    sides = (0, 1, -3, 50, 200, -70, *((2**29 - 1, 1 - 2**29) if "diagonal" in form else (2**40, -(2**40))))
    left, right = (None if random.integers(2) else int(random.choice(sides)) for _ in range(2))
    spec = AttentionSpec(1.0, left, right, max_query_length=longest[0], max_key_value_length=longest[1])
    query, key = np.zeros((B, T, 2, 8), np.float16), np.zeros((B, S, 1, 8), np.float16)
    operands = Operands(query, key, key, **others)
    return Case(
        spec,
        operands,
        rows=int(random.choice((64, 128, 192))),
        keys=int(random.choice((32, 64, 96, 128, 176))),
        pack_gqa=int(random.choice((1, 2, 8, 64))),
        queries=int(random.choice((64, 128))),
        tile_keys=int(random.choice((64, 128))),
        span=int(random.choice((1, 4))),
    )


FORMS = (
    "query_lengths",
    "key_lengths",
    "query_lengths key_lengths",
    "packed",
    "segments",
    "segments query_lengths key_lengths",
    "diagonal",
    "diagonal packed",
    "diagonal segments key_lengths query_lengths",
)
ROUNDS = 20


def check(case, emulator, seed):
    spec, operands = case.spec, case.operands
    shapes = shapes_of(operands)
    arrays = operands.present()
    diagonals, there = mask_metadata_reference.diagonals(spec, operands)

    def compare(plan, expected):
        results = emulator.run(plan, arrays, seed)
        for name, want in expected.items():
            assert results[name].dtype == np.int32
            np.testing.assert_array_equal(results[name], want, err_msg=f"{name} {case}")
        if operands.alibi_slopes is not None:  # it may be anything for padding
            np.testing.assert_array_equal(results["diagonals"][there], diagonals[there])

    ahead = case.rows, case.keys, case.pack_gqa
    compare(
        mask_metadata_plan.plan_forward(spec, shapes, H100.arch, *ahead),
        mask_metadata_reference.forward_operands(spec, operands, *ahead),
    )
    back = case.queries, case.tile_keys, case.span
    compare(
        mask_metadata_plan.plan_backward(spec, shapes, H100.arch, *back),
        mask_metadata_reference.backward_operands(spec, operands, *back),
    )


@pytest.mark.parametrize("form", FORMS)
def test_random_calls(form, emulator):
    random = np.random.default_rng(seed_of(form))
    for _ in range(ROUNDS):
        check(draw(random, form), emulator, int(random.integers(1, 2**31)))


@pytest.mark.parametrize(
    "form,sizes",
    [
        ("packed", dict(B=1, T=9000, S=20000, count=3000)),  # more tiles than an ordering CTA has threads
        ("segments", dict(B=1, T=20000, S=20000)),
        ("key_lengths query_lengths", dict(B=2, T=1, S=18000)),
        ("key_lengths", dict(B=70, T=3, S=5)),
    ],
)
def test_large_calls(form, sizes, emulator):
    random = np.random.default_rng(seed_of(f"{form} {sizes}"))
    case = dataclasses.replace(draw(random, form, **sizes), tile_keys=64)
    check(case, emulator, 1)


def test_calls_with_a_static_mask_have_no_plan():
    array = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    for plan in (forward_plan.plan_forward_metadata, backward_plan.plan_backward_metadata):
        assert plan(AttentionSpec(0.1, right=0), Operands(array, array, array), H100) is None


def test_is_a_custom_call_of_its_own_without_side_effects():
    """So that XLA runs it once for layers that have the same lengths."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install 'jax_flash[test]'")
    array = jax.ShapeDtypeStruct((2, 128, 2, 64), jnp.bfloat16)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)

    def layers(x, lengths):
        for _ in range(2):
            operands = Operands(x, x, x, key_value_seq_lengths=lengths)
            x, _ = cuda.forward(AttentionSpec(0.1), operands)
        return x

    with _device.assume(H100):
        text = jax.jit(layers).trace(array, lengths).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"custom_call @jax_flash_bounds\((%\w+)\)(.*)", text)
    assert len(calls) == 2 and len({operand for operand, _ in calls}) == 1
    assert not any("has_side_effect = true" in attributes for _, attributes in calls)
