"""The example program, with a model and a text of a few bytes."""

import csv
import dataclasses
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import data  # noqa: E402
import gpt  # noqa: E402
import train_gpt  # noqa: E402
from parallel import ShardedJit  # noqa: E402
from steps import State, make_optimizer, make_steps  # noqa: E402


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"def f{i}(x):\n    return x + {i}\n\n\n" for i in range(300)))
    return path


@pytest.fixture
def settings(text, tmp_path):
    return train_gpt.Settings(
        text=str(text),
        output_dir=str(tmp_path),
        layers=1,
        heads=2,
        key_heads=1,
        width=32,
        sequence_length=16,
        batch_size=8,
        steps=6,
        learning_rate=1e-2,
        steps_per_report=2,
        steps_per_validation=3,
        steps_per_checkpoint=3,
        sample_length=8,
    )


def test_the_loss_falls_and_every_file_is_written(settings, capsys):
    history = train_gpt.train(dataclasses.replace(settings, layers=2, steps=30, steps_per_validation=10))
    assert abs(history.training[0] - np.log(256)) < 0.1
    assert history.training[-1] < 3.6
    assert history.validation[30] < history.validation[10]

    folder = pathlib.Path(settings.output_dir)
    with (folder / "losses.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["training_loss"]) for row in rows] == history.training
    assert {
        int(r["step"]): float(r["validation_loss"]) for r in rows if r["validation_loss"]
    } == history.validation
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "sample.txt").read_text().startswith("def ")
    printed = capsys.readouterr().out
    assert "implementation=None picks xla" in printed
    assert "cuda    does not run" in printed


def test_resumed_runs_give_the_same_losses_bit_for_bit_and_pmap_those_of_jit(settings, tmp_path):
    runs = []
    for pmap in False, True:
        folder = tmp_path / f"checkpoints-{pmap}"
        run = dataclasses.replace(settings, checkpoint_dir=str(folder), pmap=pmap)
        whole = train_gpt.train(run)
        assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["3", "6"]
        assert len(set(whole.training)) == 6
        shutil.rmtree(folder / "6")
        assert train_gpt.train(dataclasses.replace(run, resume=True)) == whole
        runs.append(whole)
    np.testing.assert_allclose(runs[1].training, runs[0].training, rtol=1e-5)


@pytest.mark.parametrize("shards", (2, 8))
def test_sharded_sequences_give_the_losses_of_whole_ones(settings, shards, tmp_path):
    whole = train_gpt.train(settings)
    folder = tmp_path / "checkpoints"
    sharded = dataclasses.replace(
        settings, sequence_shards=shards, remat=shards == 8, checkpoint_dir=str(folder)
    )
    history = train_gpt.train(sharded)
    np.testing.assert_allclose(history.training, whole.training, rtol=1e-5)
    # A checkpoint goes on with another number of shards.
    shutil.rmtree(folder / "6")
    again = train_gpt.train(dataclasses.replace(sharded, sequence_shards=4, resume=True))
    np.testing.assert_allclose(again.training, whole.training, rtol=1e-5)


def test_a_step_on_sharded_sequences_gathers_keys_alone(settings):
    """With one key head "auto" gathers keys and values here. Nothing else of a token is gathered."""
    devices = jax.devices()
    parallel = ShardedJit(devices, 4)
    config = train_gpt.model_config(settings, devices[0])
    graph, parameters = nnx.split(gpt.GPT(config, nnx.Rngs(0)))
    optimizer = make_optimizer(1e-3, 0.1, 10)
    state = parallel.copy_to_all(State(parameters, optimizer.init(parameters)))
    step, _ = make_steps(graph, optimizer, parallel)
    text = step.lower(state, parallel.split(np.zeros((8, 17), np.uint8))).compile().as_text()
    gathered = re.findall(r"= [a-z0-9]+\[([0-9,]*)\]\S* all-gather\(", text)
    of_tokens = {shape for shape in gathered if "16" in shape.split(",") and len(shape.split(",")) > 2}
    assert of_tokens == {"4,16,1,16"}
    assert "all-to-all" not in text


def test_bfloat16_and_remat(settings):
    settings = dataclasses.replace(settings, steps=3)
    plain = train_gpt.train(settings)
    remat = train_gpt.train(dataclasses.replace(settings, remat=True))
    np.testing.assert_allclose(remat.training, plain.training, rtol=1e-5)
    bfloat16 = train_gpt.train(dataclasses.replace(settings, dtype="bfloat16"))
    np.testing.assert_allclose(bfloat16.training, plain.training, rtol=2e-2)
    in_8_bits = train_gpt.train(dataclasses.replace(settings, dtype="bfloat16", quantization="fp8"))
    np.testing.assert_allclose(in_8_bits.training, plain.training, rtol=2e-2)
    assert np.any(in_8_bits.training != bfloat16.training)


def test_a_folder_of_text(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_bytes(b"a" * 100)
    (tmp_path / "sub" / "b.txt").write_bytes(b"b" * 100)
    (tmp_path / "image.bin").write_bytes(b"\0" * 100)
    corpus = data.load(str(tmp_path))
    whole = bytes(np.concatenate([corpus.train, corpus.validation]))
    assert whole in (b"a" * 100 + b"\n" + b"b" * 100, b"b" * 100 + b"\n" + b"a" * 100)
    assert len(corpus.validation) == 10


def test_the_default_text_is_the_standard_library():
    corpus = data.load(None)
    assert len(corpus.train) > 5_000_000
    assert b"import " in bytes(corpus.validation)


def test_batches_depend_on_seed_and_step_alone():
    text = np.arange(200, dtype=np.uint8)
    first = data.batch(text, seed=0, step=1, batch_size=4, sequence_length=10)
    assert first.shape == (4, 11)
    np.testing.assert_array_equal(np.diff(first.astype(int), axis=1), 1)
    np.testing.assert_array_equal(first, data.batch(text, 0, 1, 4, 10))
    assert (first != data.batch(text, 0, 2, 4, 10)).any()
    assert (first != data.batch(text, 1, 1, 4, 10)).any()


def test_errors_name_the_flag(settings, text, tmp_path):
    with pytest.raises(
        ValueError, match="--batch-size must be a multiple of the number of devices, got 7 for 8"
    ):
        train_gpt.train(dataclasses.replace(settings, batch_size=7))
    for wrong, said in (
        ({"sequence_shards": 3}, "--sequence-shards must divide the number of devices, got 3 for 8"),
        ({"sequence_shards": 4, "sequence_length": 18}, "multiple of --sequence-shards, got 18 and 4"),
        ({"sequence_shards": 2, "pmap": True}, "--pmap is data-parallel alone"),
        ({"sequence_shards": 2, "batch_size": 6}, "devices over --sequence-shards, got 6 for 4"),
    ):
        with pytest.raises(ValueError, match=said):
            train_gpt.train(dataclasses.replace(settings, **wrong))
    with pytest.raises(ValueError, match="--resume needs --checkpoint-dir"):
        train_gpt.train(dataclasses.replace(settings, resume=True))
    with pytest.raises(ValueError, match="--text must be a file or a folder, got '/nowhere'"):
        train_gpt.train(dataclasses.replace(settings, text="/nowhere"))
    with pytest.raises(ValueError, match="too short for --sequence-length=100000"):
        train_gpt.train(dataclasses.replace(settings, sequence_length=100_000))

    kept = dataclasses.replace(settings, steps=1, checkpoint_dir=str(tmp_path / "checkpoints"))
    with pytest.raises(ValueError, match="holds none"):
        train_gpt.train(dataclasses.replace(kept, resume=True))
    train_gpt.train(kept)
    with pytest.raises(ValueError, match="add --resume"):
        train_gpt.train(kept)
    with pytest.raises(ValueError, match="made with seed=0, this run has seed=1"):
        train_gpt.train(dataclasses.replace(kept, resume=True, seed=1))


def test_the_program_refuses_what_cannot_run(text, tmp_path):
    command = [sys.executable, str(EXAMPLES / "train_gpt.py"), f"--text={text}", f"--output-dir={tmp_path}"]
    command += ["--implementation=cuda", "--steps=1"]
    done = subprocess.run(command, capture_output=True, text=True, env={"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "cuda" in done.stderr
