"""A diagonal as an operand, as calls on parts of sequences have, by Triton: in the interpreter against the
definition, and lowering."""

import agreement
import attention_case
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_case import Case, check_results, draw, expected
from exhaustive import one_in, thorough
from pallas_lowering import only_lowering
from sharded_calls import ShardedCalls

from jax_flash import _device, _reference, pallas
from jax_flash.pallas import compat, lowering

# JAX 0.11 and newer say at every lowering that the Triton lowering will go.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

CASES = [
    Case(64, 70, 150, right=0, diagonal=(-40,)),  # rows that see nothing
    Case(64, 150, 70, right=0, diagonal=(500,), return_residual=True),  # all keys
    Case(32, 100, 90, left=20, right=5, B=2, diagonal=(30, -90), dtype="float16"),
    Case(64, 90, 100, left=0, right=40, diagonal=(-300,)),  # nothing
    Case(32, 100, 120, right=0, B=2, diagonal=(25, -10), lengths="qk", alibi="BN", N=2, K=1),
    Case(64, 80, 80, left=30, right=0, diagonal=(17,), bias="1NTS", sinks="1N", N=2, K=2, wide=True),
    Case(64, 80, 80, B=2, left=30, right=0, diagonal=(17, -17), bias="11TS", soft_cap=5.0),
    Case(32, 90, 80, right=0, diagonal=(-5,), bias="1N1S", mask="B1TS", segments="sorted", dropout=0.3),
    Case(64, 80, 160, right=0, diagonal=((-80, 20),), bias="1NTS", alibi="1N", return_residual=True),  # parts
    Case(32, 96, 96, right=0, diagonal=(20,), score_mod="relative_position", block_mask="layout"),
]


@pytest.fixture(autouse=True, scope="module")
def by_triton():
    with only_lowering(lowering.TRITON):
        yield


@pytest.mark.parametrize("case", one_in(2, CASES), ids=str)
def test_equals_the_definition(case):
    spec, operands, d_out, d_lse, _ = draw(case)
    with compat.interpret():
        out, lse = pallas.forward(spec, operands)
        given = None if d_lse is None else jnp.asarray(d_lse)
        gradients = pallas.backward(spec, operands, out, lse, jnp.asarray(d_out), given)
    exact_out, exact_lse, exact_gradients = _reference.reference_with_gradients(spec, operands, d_out, d_lse)
    references = {"out": exact_out, "lse": exact_lse, **agreement.by_name(exact_gradients)}
    references, deviations = expected(case, spec, operands, d_out, d_lse, references, np.asarray(out))
    got = {"out": out, "lse": lse, **agreement.by_name(gradients)}
    check_results(case, got, references, deviations)


@pytest.mark.every_turn
@pytest.mark.parametrize("case", CASES, ids=str)
def test_lowers(case):
    spec, operands, d_out, *_ = draw(case)

    def both(operands, d_out):
        out, lse = pallas.forward(spec, operands)
        return pallas.backward(spec, operands, out, lse, d_out, None)

    with compat.lowering_for(_device.H100.kind):
        text = jax.jit(both).trace(operands, jnp.asarray(d_out)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") >= 3


def test_a_far_window_is_refused():
    spec, operands, *_ = draw(Case(64, 80, 80, left=2**29, right=0, diagonal=(0,)))
    assert "a window's sides are limited" in str(pallas.supports(spec, operands, _device.H100))


LAYOUTS = [
    (("ring", "zigzag"), dict(is_causal=True)),
    (("all_gather", None), dict(local_window_size=(6, 3), features=("sinks",))),
    *thorough(
        (("ring", None), dict(local_window_size=(9, 0), features=("alibi_slopes", "bias"))),
        (("ring", "striped"), dict(is_causal=True, features=("seq_lengths",))),
        (("all_gather", "zigzag"), dict(is_causal=True, features=("dropout", "segment_ids"))),
    ),
]


@pytest.mark.parametrize("sharded", LAYOUTS, ids=str)
def test_sharded_sequences(sharded):
    layout, options = sharded
    case = attention_case.Case("sharded", "bfloat16", T=32, S=32, N=2, K=1, H=16, **options)
    # The interpreter doesn't tell what differs between devices from what doesn't.
    options = {"implementation": "pallas", "check_vma": False}
    with compat.interpret():
        ShardedCalls(2, *layout, options=options).check(case)
