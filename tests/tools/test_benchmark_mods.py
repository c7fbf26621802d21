"""benchmarks/mods.py: that both forms of a variant compute the same, and its command line on the CPU."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest


@pytest.fixture
def mods(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import mods

    return mods


VARIANTS = ("plain", "soft cap", "ALiBi", "relative bias", "learned cap", "relative bias in order")
VARIANTS += ("causal mask", "window mask", "prefix mask", "document mask")
VARIANTS += ("dilated mask", "neighborhood mask")


def test_all_variants_are_checked(mods):
    assert set(VARIANTS) == set(mods.VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_both_forms_compute_the_same(mods, variant):
    case = mods.Case(2, 64, 64, 4, 2, 16, causal=variant not in mods.MASKS, dtype="float32")
    learned = jax.random.normal(jax.random.key(0), (4, 2 * mods.FURTHEST + 1))

    def results(form):
        mask, run = mods.block_mask(variant, form, case), mods.attend(variant, form, case, "xla")
        out, vjp = jax.vjp(lambda *inputs: run(mask, *inputs), learned, *case.inputs())
        of_learned, *gradients = vjp(out)
        # Of the cap, one form has no gradient.
        return out, gradients, None if variant == "learned cap" else of_learned

    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4),
        results(mods.OPTION),
        results(mods.FUNCTION),
    )


def test_both_programs_name_the_cases_alike(mods):
    """torch_flex.py, which needs PyTorch, takes its cases and their names from cases.py."""
    import cases

    assert [str(case) for case in mods.CASES] == [cases.label(*shape) for shape in cases.FUNCTION_SHAPES]


def test_command_line(mods, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(mods, "CASES", [mods.Case(1, 16, 16, 2, 2, 16)])
    monkeypatch.setattr(mods, "VARIANTS", {name: mods.VARIANTS[name] for name in ("soft cap", "ALiBi")})
    out = tmp_path / "mods.json"
    mods.main(["--implementation", "xla", "--rounds", "1", "--out", str(out)])
    found = json.loads(out.read_text())
    assert [(row["variant"], row["pass"]) for row in found["rows"]] == [
        (variant, way) for variant in ("soft cap", "ALiBi") for way in ("forward", "backward")
    ]
    assert all(row["ratio"] > 0 for row in found["rows"])
    assert "soft cap" in capsys.readouterr().out


def test_what_cant_run_is_recorded(mods):
    case = mods.Case(1, 16, 16, 2, 2, 16)
    (row,) = mods.rows("plain", case, 1, "cuda")
    assert "NVIDIA" in row["error"] or "CUDA GPU" in row["error"]
