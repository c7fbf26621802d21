"""The example that generates: checkpoints, sampling, and greedy output against full recomputation."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import generate  # noqa: E402
import inference  # noqa: E402
import loading  # noqa: E402
import train_gpt  # noqa: E402
from checkpoints import Checkpoints  # noqa: E402
from inference import GREEDY, Sampling  # noqa: E402

QUICK = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
"""Environment of the program: compilation takes most of its time."""

SMALL = generate.Settings(
    random=True,
    layers=2,
    heads=4,
    key_heads=2,
    width=32,
    prompt="def f(x):",
    tokens=21,
    temperature=0.0,
    tokens_per_report=8,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder of checkpoints."""
    folder = tmp_path_factory.mktemp("gpt")
    (folder / "text.txt").write_text("".join(f"def f{i}(x):\n    return x + {i}\n\n\n" for i in range(300)))
    settings = train_gpt.Settings(
        text=str(folder / "text.txt"),
        output_dir=str(folder),
        checkpoint_dir=str(folder / "checkpoints"),
        layers=2,
        heads=2,
        key_heads=1,
        width=32,
        sequence_length=32,
        steps=40,
        learning_rate=1e-2,
        sample_length=8,
    )
    history = train_gpt.train(settings)
    return settings, history


def recomputed(model: loading.Model, prompt: np.ndarray, count: int) -> list[int]:
    """Greedy continuation of `prompt`, each token by a pass of the whole model over all tokens before it."""
    tokens = np.zeros((1, len(prompt) + count), np.int32)
    tokens[0, : len(prompt)] = prompt
    for i in range(len(prompt), tokens.shape[1]):
        logits = inference.recompute(model.graph, model.parameters, tokens)
        tokens[0, i] = int(jnp.argmax(logits[0, i - 1]))
    return tokens[0, len(prompt) :].tolist()


def test_greedy_output_of_a_trained_model_is_that_of_full_recomputation(trained, capsys):
    settings = dataclasses.replace(
        SMALL, random=False, checkpoint_dir=trained[0].checkpoint_dir, check=True, tokens=23
    )
    generated = generate.generate(settings)
    model = loading.load(settings)
    assert generated.tokens[0].tolist() == recomputed(model, generated.prompt, 23)
    printed = capsys.readouterr().out
    assert "def f(x):" in printed and "decoding" in printed
    assert "all 23 tokens are those of full recomputation" in printed
    assert "note:" not in printed


def test_greedy_output_of_random_weights_is_that_of_full_recomputation():
    generated = generate.generate(dataclasses.replace(SMALL, batch=2))
    expected = recomputed(loading.load(SMALL), generated.prompt, SMALL.tokens)
    assert generated.tokens.tolist() == [expected] * 2
    assert len(set(expected)) > 5


def test_a_cache_in_8_bits(trained):
    """What is generated with keys and values in e4m3 is the likeliest there is, or nearly."""
    settings = dataclasses.replace(
        SMALL, random=False, checkpoint_dir=trained[0].checkpoint_dir, cache_dtype="float8_e4m3fn"
    )
    model = loading.load(settings)
    assert inference.empty_cache(model.config, 1, 8, settings.cache_dtype).key.dtype == jnp.float8_e4m3fn
    generated = generate.generate(settings)
    tokens = np.concatenate([generated.prompt[None], generated.tokens], axis=1)
    logits = inference.recompute(model.graph, model.parameters, tokens[:, :-1])[:, -SMALL.tokens :]
    chosen = np.take_along_axis(np.asarray(logits), generated.tokens[..., None], axis=-1)[..., 0]
    assert np.max(logits.max(-1) - chosen) < 0.3
    with pytest.raises(ValueError, match="--check needs a cache of the model's dtype, got float8_e4m3fn"):
        generate.generate(dataclasses.replace(settings, check=True))


def test_checkpoints_hold_the_trained_parameters(trained):
    settings, history = trained
    model = loading.load(dataclasses.replace(SMALL, random=False, checkpoint_dir=settings.checkpoint_dir))
    assert (model.config.layers, model.config.key_heads, model.trained_length) == (2, 1, 32)
    with Checkpoints(pathlib.Path(settings.checkpoint_dir)) as checkpoints:
        assert checkpoints.settings()["steps"] == 40
        again = checkpoints.restore_parameters(model.parameters)
    jax.tree.map(np.testing.assert_array_equal, again, model.parameters)

    text = np.frombuffer(pathlib.Path(settings.text).read_bytes()[:330], np.uint8).reshape(10, 33)
    logits = inference.recompute(model.graph, model.parameters, text[:, :-1].astype(np.int32))
    loss = -np.take_along_axis(jax.nn.log_softmax(logits), text[:, 1:, None].astype(np.int32), -1).mean()
    assert abs(loss - history.training[-1]) < 0.5 < history.training[0] - loss


def test_prompts_of_different_lengths_share_a_batch():
    model = loading.load(SMALL)
    random = np.random.default_rng(0)
    lengths = np.array([3, 11, 7], np.int32)
    prompts = random.integers(256, size=(3, 11), dtype=np.int32)  # padding is arbitrary
    cache = inference.empty_cache(model.config, 3, 20)
    weights, key = (model.graph, model.parameters), jax.random.key(0)
    cache, first = inference.prefill(*weights, cache, prompts, lengths, GREEDY, key)
    cache, last, new = inference.decode(*weights, cache, first, GREEDY, key, steps=8)
    np.testing.assert_array_equal(last, new[:, -1])
    np.testing.assert_array_equal(cache.lengths, np.broadcast_to(lengths + 8, (2, 3)))
    for row, length in enumerate(lengths):
        expected = recomputed(model, prompts[row, :length], 9)
        assert [int(first[row]), *new[row].tolist()] == expected


def test_a_wrong_token_fails_the_check():
    generated = generate.generate(SMALL)
    generated.tokens[0, 13] ^= 1
    with pytest.raises(ValueError, match=r"token 13 of sequence 0 is .*full recomputation gives"):
        generate.check(loading.load(SMALL), generated)


def test_samples_depend_on_the_seed_alone():
    def tokens(seed, **changes):
        settings = dataclasses.replace(SMALL, batch=2, temperature=2.0, top_p=0.9, seed=seed, **changes)
        return generate.generate(settings).tokens

    first = tokens(0)
    assert first.shape == (2, 21)
    np.testing.assert_array_equal(first, tokens(0))
    assert (first != tokens(1)).any()
    assert (first[0] != first[1]).any()


@hypothesis.settings(deadline=None, derandomize=True)
@hypothesis.given(st.lists(st.floats(0.01, 1), min_size=1, max_size=12), st.floats(0.01, 0.99))
def test_top_p_keeps_the_smallest_set_that_reaches_p(weights, p):
    probabilities = np.sort(np.float32(weights) / np.float32(sum(weights)))[::-1]
    kept = np.asarray(inference.top_p_mask(jnp.asarray(probabilities), p))
    count = int(kept.sum())
    assert kept.tolist() == [True] * count + [False] * (len(weights) - count) and count
    assert probabilities[:count].sum() >= p - 1e-5
    assert probabilities[: count - 1].sum() < p + 1e-5


def test_samples_are_of_the_kept_tokens_only():
    logits = jnp.log(jnp.asarray([0.05, 0.4, 0.25, 0.3]))

    def drawn(sampling, count=400):
        keys = jax.random.split(jax.random.key(0), count)
        return np.asarray(jax.vmap(lambda key: inference.sample(logits[None], sampling, key)[0])(keys))

    assert set(drawn(Sampling(1.0, 0.69)).tolist()) == {1, 3}
    assert set(drawn(Sampling(1.0, 0.71)).tolist()) == {1, 2, 3}
    assert set(drawn(Sampling(1.0, 1e-9)).tolist()) == {1}
    assert set(drawn(Sampling(0.0, 0.5)).tolist()) == {1}
    assert set(drawn(Sampling(0.01)).tolist()) == {1}
    frequencies = np.bincount(drawn(Sampling(1.0), 4000), minlength=4) / 4000
    np.testing.assert_allclose(frequencies, np.exp(logits), atol=0.03)


def test_errors_name_the_flag(tmp_path):
    def fails(match, **changes):
        with pytest.raises(ValueError, match=match):
            generate.generate(dataclasses.replace(SMALL, **changes))

    fails("give either --checkpoint-dir", random=False)
    fails("give either --checkpoint-dir", checkpoint_dir=str(tmp_path))
    fails("holds no checkpoint of train_gpt.py", random=False, checkpoint_dir=str(tmp_path))
    fails("is no folder", random=False, checkpoint_dir=str(tmp_path / "none"))
    fails("--check needs --temperature=0, got 0.5", check=True, temperature=0.5)
    fails("temperature must be at least 0, got -1", temperature=-1.0)
    fails("temperature must be at least 0, got nan", temperature=float("nan"))
    for dtype in ("int7", "bfloat16"):
        words = f"--cache-dtype must be float8_e4m3fn or the model's dtype, float32, got {dtype}"
        fails(words, dtype="float32", cache_dtype=dtype)
    fails(r"top_p must be in \(0, 1\], got 0", top_p=0.0)
    fails("--tokens must be at least 1, got 0", tokens=0)
    fails("the prompt must have at least 1 byte", prompt="")


def test_the_command_line_writes_rates(tmp_path):
    out = tmp_path / "rates.json"
    flags = "--random --layers=1 --width=32 --tokens=9 --prompt-length=6 --temperature=0 --check".split()
    command = [sys.executable, str(EXAMPLES / "generate.py"), *flags, f"--out={out}"]
    done = subprocess.run(command, capture_output=True, text=True, env=QUICK)
    assert done.returncode == 0, done.stderr
    assert "all 9 tokens are those of full recomputation" in done.stdout
    result = json.loads(out.read_text())
    assert {"commit", "device", "platform", "versions", "date", "model", "rows"} == set(result)
    (row,) = result["rows"]
    assert (row["batch"], row["prompt"], row["tokens"]) == (1, 6, 9)
    assert row["prefill_tokens_per_second"] > 0 and row["decode_tokens_per_second"] > 0
