"""The model that an inference program runs: one that `train_gpt.py` trained, or one of random weights."""

import dataclasses
import pathlib
from typing import NamedTuple

import gpt
import jax
from checkpoints import Checkpoints
from command_line import flag
from flax import nnx

RANDOM_STDDEV = 2.0
"""Standard deviation of the random matrices of layers, times the square root of the width.

As initialised for training, layers hardly change the residual stream, and the most likely token is the last
one again. With larger matrices greedy output varies.
"""


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """Which model; each field is a flag of the program."""

    checkpoint_dir: str | None = flag(None, "Folder of checkpoints of train_gpt.py; the newest is loaded.")
    random: bool = flag(False, "Random weights in place of a checkpoint, to measure speed.")
    layers: int = flag(4, "Layers, with --random.")
    heads: int = flag(2, "Query heads, with --random.")
    key_heads: int | None = flag(None, "Key and value heads, with --random. Default: as many as heads.")
    width: int = flag(128, "Features of a token, with --random.")
    dtype: str | None = flag(
        None, "Dtype of activations. Default: float32 on a CPU, else bfloat16.", ["float32", "bfloat16"]
    )
    implementation: str | None = flag(
        None, "Implementation of attention. Default: the fastest that supports it.", ["cuda", "pallas", "xla"]
    )
    seed: int = flag(0, "Seed of everything random.")


class Model(NamedTuple):
    """A model in the form that compiled functions take: `graph` is static, `parameters` are arrays."""

    graph: nnx.GraphDef
    parameters: nnx.State
    config: gpt.GPTConfig
    trained_length: int | None  # of the sequences that it was trained on

    @property
    def name(self) -> str:
        size = sum(x.size for x in jax.tree.leaves(self.parameters))
        kind = "random" if self.trained_length is None else "trained"
        return f"{size:,} {kind} parameters, {self.config.dtype}"


def load(settings: ModelSettings) -> Model:
    """The model that `settings` describe, its matrices in the dtype of activations.

    Raises:
      ValueError: `settings` name no model, or more than one.
    """
    if (settings.checkpoint_dir is None) != settings.random:
        raise ValueError("give either --checkpoint-dir, a folder of train_gpt.py, or --random")
    if settings.checkpoint_dir is None:
        config = _config(settings, dataclasses.asdict(settings))
        graph, parameters = nnx.split(gpt.GPT(config, nnx.Rngs(settings.seed)))
        factor = RANDOM_STDDEV / (gpt.INITIAL_STDDEV * config.width**0.5)
        parameters["blocks"] = jax.tree.map(lambda x: x * factor if x.ndim > 1 else x, parameters["blocks"])
        return Model(graph, _in_dtype(parameters, config.dtype), config, None)
    folder = pathlib.Path(settings.checkpoint_dir)
    if not folder.is_dir():
        raise ValueError(f"--checkpoint-dir={folder} is no folder")
    with Checkpoints(folder) as checkpoints:
        trained = checkpoints.settings()
        config = _config(settings, trained)
        graph, like = nnx.split(nnx.eval_shape(lambda: gpt.GPT(config, nnx.Rngs(0))))
        parameters = checkpoints.restore_parameters(like)
    return Model(graph, _in_dtype(parameters, config.dtype), config, trained["sequence_length"])


def _config(settings: ModelSettings, size: dict) -> gpt.GPTConfig:
    on_cpu = jax.local_devices()[0].platform == "cpu"
    return gpt.GPTConfig(
        layers=size["layers"],
        heads=size["heads"],
        key_heads=size["key_heads"] or size["heads"],
        width=size["width"],
        dtype=settings.dtype or ("float32" if on_cpu else "bfloat16"),
        implementation=settings.implementation,
    )


def _in_dtype(parameters: nnx.State, dtype: str) -> nnx.State:
    """Matrices are rounded once here; the layers would round them at each step, to the same values."""
    return jax.tree.map(lambda x: x.astype(dtype) if x.ndim > 1 else x, parameters)
