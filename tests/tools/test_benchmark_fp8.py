"""Benchmarks of 8 bits, as far as they run without a GPU."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples"))


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


def test_accuracy(tmp_path):
    import fp8_accuracy

    path = tmp_path / "accuracy.json"
    fp8_accuracy.main(["--lengths", "512", "--implementations", "xla", "cuda", "--out", str(path)])
    rows = json.loads(path.read_text())["rows"]
    by_xla = {row["method"]: row["rmse"] for row in rows if row["implementation"] == "xla"}
    assert by_xla.keys() == {"float16", *fp8_accuracy.METHODS}
    assert by_xla["float16"] < 2e-4
    of_8_bits = [by_xla[method] for method in fp8_accuracy.METHODS]
    assert 1e-3 < of_8_bits[3] < 0.8 * min(of_8_bits[:3])
    assert all("NotImplementedError" in row["error"] for row in rows if row["implementation"] == "cuda")


def test_what_a_peer_refuses_is_recorded_beside_our_times(monkeypatch):
    import fp8
    import jax.numpy as jnp

    def refuses(case):
        raise NotImplementedError("no cuDNN")

    names = (fp8.KERNEL, fp8.OF_16_BITS, 'quantization="fp8"')
    runs = {name: fp8._compiled(lambda x: x + 1, jnp.zeros(3)) for name in names}
    monkeypatch.setattr(fp8, "programs", lambda case: runs)
    monkeypatch.setattr(fp8, "cudnn", refuses)
    case = fp8.Case(1, 16, 16, 2, 2, 16)
    row = fp8.row(case, 1, fa3=1e9)
    assert "no cuDNN" in row["cudnn_fp8 error"] and "to_best_peer" in row
    assert set(row["milliseconds"]) == {*names, fp8.FA3}

    monkeypatch.setattr(fp8, "programs", refuses)
    assert "no cuDNN" in fp8.row(case, 1)["error"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder of checkpoints of a small model."""
    import train_gpt

    folder = tmp_path_factory.mktemp("gpt")
    settings = train_gpt.Settings(
        output_dir=str(folder),
        checkpoint_dir=str(folder / "checkpoints"),
        layers=2,
        heads=2,
        key_heads=1,
        width=64,
        sequence_length=48,
        steps=3,
        sample_length=2,
    )
    train_gpt.train(settings)
    return folder / "checkpoints"


@pytest.mark.exhaustive
def test_accuracy_on_a_trained_model(trained, tmp_path):
    import fp8_accuracy

    path = tmp_path / "accuracy.json"
    fp8_accuracy.main(["--checkpoint-dir", str(trained), "--out", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert {(row["layer"], row["keys"]) for row in rows} == {(0, 48), (1, 48)}
    for row in rows:
        least, most = (1e-5, 1e-3) if row["method"] == "float16" else (1e-3, 0.1)
        assert least < row["relative"] < most, row
        assert row["rmse"] > 0


def test_a_causal_definition_of_grouped_heads():
    import fp8_accuracy

    random = np.random.default_rng(0)
    query, key, value = (random.normal(size=(1, 7, heads, 4)) for heads in (4, 2, 2))
    out = fp8_accuracy.exact((query, key, value), is_causal=True)
    for head, row in np.ndindex(4, 7):
        keys = (x[:, : row + 1, head // 2, None] for x in (key, value))
        of_head = (query[:, row : row + 1, head : head + 1], *keys)
        np.testing.assert_allclose(out[row, head], fp8_accuracy.exact(of_head)[0, 0])


def test_the_definition():
    import fp8_accuracy

    query, key, value = fp8_accuracy.inputs(3, queries=2)
    out = fp8_accuracy.exact((query, key, value))
    for head, row in np.ndindex(fp8_accuracy.HEADS, 2):
        exponentials = [np.exp(query[0, row, head] @ key[0, j, head] / 128**0.5) for j in range(3)]
        expected = sum(e * value[0, j, head] for j, e in enumerate(exponentials)) / sum(exponentials)
        np.testing.assert_allclose(out[row, head], expected)


def test_rates_without_a_gpu(tmp_path):
    """Each call says why it wasn't measured."""
    import fp8

    path = tmp_path / "rates.json"
    fp8.main(["--match", "s4096 h16/16 d64 causal", "--out", str(path)])
    (row,) = json.loads(path.read_text())["rows"]
    assert "NotImplementedError" in row["error"] or "AssertionError" in row["error"]


def test_training_curves_are_compared_over_seeds():
    import fp8_training

    def row(peer, seed, losses):
        return {"peer": peer, "seed": seed, "losses": losses}

    rows = [
        *(row("bfloat16", seed, [3.0, 1.0 + 0.1 * seed]) for seed in range(3)),
        *(row("float8_e4m3fn", seed, [3.0, 1.05 + 0.1 * seed]) for seed in range(3)),
    ]
    told = fp8_training.differences(rows)
    assert told == ("float8_e4m3fn less bfloat16 +0.0500, at most 0.0500; standard deviation of seeds 0.1000")
    assert "nan" in fp8_training.differences([rows[0], rows[3]])


@pytest.mark.exhaustive
def test_training_in_8_bits_with_other_gradients():
    """Those of 16 bits, to what the caller gave or to what the kernel computes from: close to each other."""
    import fp8_training
    import jax
    import jax.numpy as jnp

    arrays = jax.random.normal(jax.random.key(0), (4, 2, 160, 2, 64), jnp.bfloat16)
    *arrays, d_out = arrays
    found = {}
    for peer, attention in fp8_training.ATTENTIONS.items():
        out, vjp = jax.vjp(lambda *x, of=attention: of(*x, is_causal=True), *arrays)
        found[peer] = out, *vjp(d_out)

    def apart(peer, other):
        pairs = zip(found[peer], found[other], strict=True)
        floats = [(x.astype(jnp.float32), y.astype(jnp.float32)) for x, y in pairs]
        return [float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y)) for x, y in floats]

    exact = apart("float8_e4m3fn, exact backward", "bfloat16")
    assert exact[0] > 0.02 and exact[1:] == [0, 0, 0]
    rounded = apart("float8_e4m3fn, rounded backward", "bfloat16")
    assert rounded[0] == exact[0] and all(0.02 < x < 0.1 for x in rounded[1:])


def test_tiles_are_changed_where_that_is_possible():
    import fp8
    import jax.numpy as jnp
    import tune_fp8

    from jax_flash._device import H100

    case = fp8.CASES[0]
    inputs = [jnp.zeros((1, 256, 2, case.head_dim), jnp.bfloat16)] * 3
    for dtype in ("float8_e4m3fn", "bfloat16"):
        plans = tune_fp8.plans(tune_fp8.call_of(case, inputs, dtype), H100, "")
        assert {tune_fp8.AS_IT_IS, "pingpong 0", "stages 3"} <= plans.keys()
        assert len(set(map(str, plans.values()))) == len(plans)
        few = tune_fp8.plans(tune_fp8.call_of(case, inputs, dtype), H100, "pingpong")
        assert list(few) == [tune_fp8.AS_IT_IS, "pingpong 0"]
