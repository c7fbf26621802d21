"""The search for the Mosaic GPU kernels' configurations, without a GPU."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jax_flash import _device
from jax_flash._spec import Gradients, Operands
from jax_flash.pallas import compat
from jax_flash.pallas.mosaic import tiles as mosaic_tiles
from jax_flash.pallas.mosaic.tiles import KEYS_TO_SUM_TOGETHER

HEAD_DIMS = (64, 128, 256)


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")


def test_cases_are_those_that_attention_is_compared_on():
    import tune_mosaic

    for head_dim in HEAD_DIMS:
        for mask in tune_mosaic.MASKS:
            cases = tune_mosaic.cases(head_dim, mask)
            assert cases and all(case.head_dim == head_dim for case in cases)
            assert all(case.causal == (mask == "causal") for case in cases)
            assert tune_mosaic.cases(head_dim, mask, 1) == cases[:1]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_forward_candidates_are_the_tables_and_others_that_fit(head_dim):
    import mosaic_candidates as candidates
    import tune_mosaic

    size = tune_mosaic.call_sizes(tune_mosaic.cases(head_dim, "full")[0])
    found = list(candidates.forward(size))
    assert found[0] == mosaic_tiles.forward(size)
    assert len(set(found)) == len(found) >= 4
    assert all(mosaic_tiles.forward_fits(size, config) for config in found)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_backward_candidates_are_the_tables_and_others_that_fit(head_dim):
    import mosaic_candidates as candidates
    import tune_mosaic

    size = tune_mosaic.call_sizes(tune_mosaic.cases(head_dim, "full")[0])
    kernels = candidates.backward_kernels(size)
    assert set(kernels) <= set(tune_mosaic.PRODUCTS)
    for kernel, table in kernels.items():
        found = list(candidates.backward(size, kernel))
        assert found[0] == table
        assert len(set(found)) == len(found) > 1
        assert all(mosaic_tiles.backward_kernel_fits(size, kernel, config) for config in found)


def test_lengths_lie_on_both_sides_of_where_one_kernel_is_taken():
    import tune_mosaic

    cases = tune_mosaic.cases_of_lengths(128, "full")
    assert [case.keys for case in cases] == list(tune_mosaic.LENGTHS)
    assert min(tune_mosaic.LENGTHS) < KEYS_TO_SUM_TOGETHER < max(tune_mosaic.LENGTHS)
    assert all(abs(case.batch * case.keys - tune_mosaic.TOKENS) < 1024 for case in cases)
    assert tune_mosaic.cases_of_lengths(128, "full", 2) == cases[:2]


@pytest.mark.skipif(not compat.adds_to_arrays(), reason="kernels of this JAX add to no array")
def test_ways_of_summing_are_compared_where_there_are_two(monkeypatch, capsys):
    import tune_mosaic

    (case,) = [case for case in tune_mosaic.cases_of_lengths(128, "causal") if case.keys == 1024]
    query, key, value = case.shapes()
    lse = jax.ShapeDtypeStruct((case.batch, case.heads, case.queries), jnp.float32)
    saved = Operands(query, key, value), query, lse, query

    def made_up(labels, timed, inputs, flops, patience):
        for function in timed.values():
            assert jax.eval_shape(function, *inputs) == Gradients(query, key, value)
        return [labels | {"name": name, "rate": rate} for name, rate in zip(timed, (400, 500), strict=True)]

    monkeypatch.setattr(tune_mosaic, "measure", made_up)
    monkeypatch.setattr(tune_mosaic, "saved_and_cotangent", lambda case: saved)
    with _device.assume(_device.H100), compat.lowering_for(_device.H100.kind):
        rows = tune_mosaic.measure_together(case, patience=1)
        (narrow,) = tune_mosaic.cases_of_lengths(64, "full", 1)
        assert tune_mosaic.measure_together(narrow, patience=1) == []
    assert [row["keys_of_a_query"] for row in rows] == [512.5, 512.5]
    assert "and of queries" in rows[0]["name"] and "values and queries" in rows[1]["name"]
    apart, one = rows
    del one["rate"]
    tune_mosaic.print_together("title", [apart, apart | {"rate": 500.0}, apart, one | {"error": "why"}])
    printed = capsys.readouterr().out
    assert "512  400  500  1.250" in printed and f"{one['name']}: why" in printed


def test_says_why_it_cannot_run_here():
    import tune_mosaic

    with pytest.raises(SystemExit, match="can't run here"):
        tune_mosaic.main(["--head-dim", "64"])
