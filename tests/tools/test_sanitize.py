"""The calls that run under compute-sanitizer on a GPU: what they have to have, and that they are run."""

import dataclasses
import itertools
import sys
from pathlib import Path

import emulated_case
import pytest
from cache_case import Draw
from implementation_suite import FEATURES

from jax_flash import _device, _dispatch, cuda
from jax_flash._cache_spec import CacheOperands
from jax_flash._device import H100
from jax_flash._spec import is_captured, shapes_of
from jax_flash.cuda import decoding
from jax_flash.cuda.sm90 import prefill_plan
from jax_flash.cuda.sm90.decode_plan import plan_decode
from jax_flash.cuda.sm90.decode_tiles import choose_tile
from jax_flash.cuda.sm90.forward_plan import plan_forward

sys.path.append(str(Path(__file__).parents[1] / "gpu"))

import sanitize
import sanitize_several

PROMPTS = [
    case
    for group in ("chunks of prompts", sanitize.FUNCTIONS_OF_PROMPTS)
    for case in sanitize.CACHE_GROUPS[group]
]
CASES = [case for cases in sanitize.GROUPS.values() for case in cases]


def features_of(case):
    names = {feature.partition(":")[0] for feature in case.features}
    return names | ({"value_head_dim"} if case.V else set())


def test_have_every_option_at_every_head_dim():
    everything = set(FEATURES) - {"bias_broadcast", "value_head_dim"}
    for head_dim in sanitize.HEAD_DIMS:
        of_head_dim = [case for case in CASES if case.H == head_dim]
        assert everything <= set().union(*map(features_of, of_head_dim))
        assert any(case.is_causal for case in of_head_dim)
    assert any("bias:1N1S" in case.features for case in CASES)
    assert any(case.V for case in CASES) and any(case.N > case.K for case in CASES)
    assert sum(case.local_window_size is not None for case in CASES) >= 3
    assert len(set(CASES)) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_are_calls_that_the_cuda_kernels_take(case):
    assert cuda.supports(case.spec(), case.operands(), H100) is None


@pytest.mark.parametrize("case", sanitize.GROUPS["split-KV"], ids=str)
def test_some_are_split_along_keys(case):
    plan = plan_forward(case.spec(), shapes_of(case.operands()), H100)
    (launch,) = (launch for launch in plan.launches if launch.kernel.entry == "forward")
    assert dict(launch.kernel.defines)["SPLIT_KV"] == 1


def test_run_forward_and_backward(capsys, monkeypatch):
    some = {"scores": sanitize.GROUPS["scores"][:1], "data": sanitize.GROUPS["data"][-1:]}
    monkeypatch.setattr(sanitize, "GROUPS", some)
    for name in ("CACHE_GROUPS", "FP8_GROUPS", "PARTS"):
        groups = getattr(sanitize, name)
        monkeypatch.setattr(sanitize, name, {group: cases[:1] for group, cases in groups.items()})
    sanitize.main(["--implementation", "xla"])
    said = capsys.readouterr().out
    assert all(
        f"{group} done" in said for group in ("scores", "8 bits", "parts of sequences", "decoding pages")
    )


@pytest.mark.parametrize("case", sanitize.FP8_GROUPS["8 bits"], ids=str)
def test_calls_in_8_bits_are_taken(case):
    spec, shapes = dataclasses.replace(case.spec(), quantization="fp8"), shapes_of(case.operands())
    assert _dispatch.reason("cuda", spec, shapes, H100) is None


@pytest.mark.parametrize("case", sanitize.PARTS["parts of sequences"], ids=str)
def test_parts_of_sequences_are_taken(case):
    spec, operands, *_ = emulated_case.draw(case)
    assert operands.diagonal is not None
    assert _dispatch.reason("cuda", spec, shapes_of(operands), H100) is None
    _, operands, d_out, d_lse, _ = emulated_case.draw(dataclasses.replace(case, return_residual=True))
    with _device.assume(H100):
        traced = sanitize.both_passes_of_part(case, "cuda").trace(operands, d_out, d_lse)
        lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    for target in ("forward", "backward", "bounds"):
        assert f"custom_call @jax_flash_{target}(" in lowered


def test_calls_on_caches_load_keys_in_every_way():
    groups = ("decoding", "decoding pages", "decoding 8 bits", sanitize.FUNCTIONS)
    cases = [(group, case) for group in groups for case in sanitize.CACHE_GROUPS[group]]
    tiles, splits, options = set(), set(), set()
    for group, case in cases:
        operands = shapes_of(Draw(case).operands)
        assert decoding.supports(case.spec, operands, H100) is None
        tile = choose_tile(operands)
        box = "rows" if tile.box == 0 else "block" if tile.box == tile.keys else "pages"
        tiles.add((box, tile.float8))
        assert not prefill_plan.suits(case.spec, operands, H100)
        with sanitize.sharing_tiles(group):
            kernels = [launch.kernel for launch in plan_decode(case.spec, operands, H100).launches]
        splits |= {dict(kernel.defines)["SPLIT"] for kernel in kernels if kernel.entry == "decode"}
        options |= set(operands.present())
    assert tiles == set(itertools.product(("rows", "block", "pages"), (False, True))) and splits == {0, 1}
    captured = {name for name in options if is_captured(name)}
    assert captured
    assert options - captured | {"captured"} == {field.name for field in dataclasses.fields(CacheOperands)}


@pytest.mark.parametrize("case", sanitize.CACHE_GROUPS[sanitize.CLUSTERS], ids=str)
def test_clusters_share_tiles(case):
    assert (
        max(
            launch.cluster for launch in plan_decode(case.spec, shapes_of(Draw(case).operands), H100).launches
        )
        > 1
    )


@pytest.mark.parametrize("case", PROMPTS, ids=str)
def test_chunks_of_prompts_run_in_the_forward_kernel(case):
    operands = shapes_of(Draw(case).operands)
    assert decoding.supports(case.spec, operands, H100) is None
    assert prefill_plan.suits(case.spec, operands, H100)


def test_calls_on_several_gpus_are_right(capsys):
    sanitize_several.run("Ulysses", "xla")
    assert capsys.readouterr().out.endswith("Ulysses done\n")
