"""Queries, keys and values that a trained example model attends with, on text that it was not trained on."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_flash

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import data
import gpt
import loading


def captured(checkpoint_dir: Path) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Of each layer, float64: query `(1, T, N, H)`, key and value `(1, T, K, H)`, T as long as in training.

    Queries and keys are rotated. Activations are float32.
    """
    settings = loading.ModelSettings(checkpoint_dir=str(checkpoint_dir), dtype="float32")
    model = loading.load(settings)
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def attend(
        layer: int, cache: None, query: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, None]:
        positions = jnp.arange(query.shape[1])
        arrays = gpt.rotate(query, positions), gpt.rotate(key, positions), value
        query, key, value = (np.asarray(x, np.float64) for x in arrays)
        found.append((query, key, value))
        return jax_flash.flash_attention(*arrays, is_causal=True), cache

    text = data.load(None).validation[: model.trained_length]
    nnx.merge(model.graph, model.parameters).with_cache(jnp.asarray(text, jnp.int32)[None], None, attend)
    return found
