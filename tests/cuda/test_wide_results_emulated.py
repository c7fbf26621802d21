"""Float32 results of 16-bit calls, which sharded sequences add up: by the kernels in the emulator."""

import dataclasses

import numpy as np
import pytest
from emulated_case import DEVICE, DTYPES, Case, arrays_of, check_backward, check_forward, draw, tile
from exhaustive import thinned

from jax_flash._spec import shapes_of
from jax_flash.cuda import dropout
from jax_flash.cuda.sm90 import backward_plan, backward_scheduler, forward_plan

CASES = (
    Case(H=64, T=130, S=200, N=4, K=2, B=2, right=0, return_residual=True),
    Case(H=128, T=200, S=300, N=2),
    Case(H=96, T=65, S=130, N=2, dtype="float16", dropout=0.2),
    Case(H=192, T=130, S=200, N=2, right=0, dtype="float16"),
    Case(H=256, T=100, S=200, N=2, B=2, bias="1N1S", soft_cap=2.0, return_residual=True),
    Case(H=40, V=24, T=70, S=130, N=2, lengths="qk", B=3),
    Case(H=128, T=9, S=200, N=8, K=2, right=0),  # whose heads share a tile
    Case(H=64, T=130, S=300, N=4, K=2, deterministic=True, right=0),
    Case(H=128, T=130, S=200, segments="mixed", left=40, diagonal=(30,)),
    Case(H=128, T=262, S=391, N=4, K=2, right=0, diagonal=((-100, 40),)),  # an early and a late part
    Case(H=64, T=70, S=130, N=2, B=2, score_mod="learned"),
    Case(H=128, T=200, S=400, N=2, K=1, lengths="qk", B=3),  # tiles that no query sees
)
EACH = pytest.mark.parametrize("case", thinned(CASES, tile), ids=str)


@EACH
def test_forward(case, emulator):
    """Rounded, they are the bits of the usual results."""
    check_forward(dataclasses.replace(case, wide="all"), DEVICE, emulator)
    outs = []
    for wide in (None, "all"):
        spec, operands, _, _, seed = draw(case)
        spec = dataclasses.replace(spec, wide_results=wide)
        shapes = shapes_of(operands)
        plan = forward_plan.plan_forward(spec, shapes, DEVICE)
        metadata = forward_plan.plan_forward_metadata(spec, shapes, DEVICE)
        arrays = arrays_of(operands, metadata, emulator, seed)
        arrays |= forward_plan.forward_block_lists(spec, operands, arrays)
        outs.append(emulator.run(plan, dropout.arranged(plan, arrays), seed)["out"])
    usual, wide = outs
    assert wide.dtype == np.float32
    np.testing.assert_array_equal(wide.astype(DTYPES[case.dtype]), usual)


@EACH
def test_backward(case, emulator):
    for results in check_backward(dataclasses.replace(case, wide="all"), emulator, multiprocessors=3, runs=2):
        assert {results[name].dtype for name in ("d_query", "d_key", "d_value")} == {np.dtype(np.float32)}


@EACH
def test_backward_of_shared_keys(case, emulator, monkeypatch):
    """The query's gradient is in 16 bits, so where its order is free the main kernel can write it."""
    monkeypatch.setattr(backward_scheduler, "main_writes_dq", lambda *_: True)
    case = dataclasses.replace(case, wide="shared")
    (results,) = check_backward(case, emulator, multiprocessors=3)
    assert results["d_query"].dtype == DTYPES[case.dtype]
    assert results["d_key"].dtype == results["d_value"].dtype == np.float32


@pytest.mark.parametrize("is_shared", (False, True))
def test_gradients_of_keys_are_sums_where_units_share_tiles(is_shared):
    heads = dict(N=32, K=1) if is_shared else dict(N=2)
    spec, operands, *_ = draw(Case(H=128, T=200, S=300, wide="all", **heads))
    plan = backward_plan.plan_backward(spec, shapes_of(operands), DEVICE)
    kernels = {launch.kernel.entry: dict(launch.kernel.defines) for launch in plan.launches}
    last = ["backward_postprocess", *(["backward_postprocess_keys"] if is_shared else [])]
    assert list(kernels)[2:] == last
    assert all(kernels[entry]["RESULT"] == "float" for entry in last)
    assert (
        kernels["backward"]["KEY_SUMS"] == is_shared
        and kernels["backward"]["WIDE_KEY_GRADIENTS"] != is_shared
    )
