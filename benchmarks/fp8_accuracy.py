"""How exact attention in 8 bits is: the test of FlashAttention-3's paper (section 4.3), by length.

    python benchmarks/fp8_accuracy.py --out benchmarks/results/fp8_accuracy.json
    python benchmarks/fp8_accuracy.py --checkpoint-dir runs/checkpoints --out benchmarks/results/model.json

Queries, keys and values are normal(0, 1), and one element in a thousand has a normal(0, 10) added. Each row
has a number of keys, what was computed, by which implementation, and the root of the mean square error
against float64, as it is and relative to that of the output. `jax_flash.quantize` makes arrays of 8 bits.

With --checkpoint-dir they are those of a model that examples/train_gpt.py trained, causal, and a row is of a
layer, counted from 0.
"""

import argparse
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import record

import jax_flash

QUERIES, HEADS, HEAD_DIM = 256, 8, 128
LENGTHS = (1024, 4096, 16384, 65536, 131072)
METHODS: dict[str, dict] = {
    "fp8, one scale": {"scales": "tensor", "incoherent": False},
    "fp8, a scale for each head": {"scales": "head", "incoherent": False},
    "fp8, a scale for each block": {"scales": "block", "incoherent": False},
    "fp8, a scale for each block, incoherent": {"scales": "block", "incoherent": True},
}

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def inputs(keys: int, queries: int = QUERIES) -> Arrays:
    """Queries, keys and values, float64."""
    random = np.random.default_rng(keys)

    def draw(rows: int) -> np.ndarray:
        shape = (1, rows, HEADS, HEAD_DIM)
        return random.normal(size=shape) + 10 * random.normal(size=shape) * (random.random(shape) < 0.001)

    return draw(queries), draw(keys), draw(keys)


def exact(arrays: Arrays, is_causal: bool = False) -> np.ndarray:
    """By the definition, in float64, head by head."""

    def of_head(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
        scores = query @ key.T / np.sqrt(query.shape[-1])
        if is_causal:
            scores[np.triu_indices_from(scores, 1)] = -np.inf
        exponentials = np.exp(scores - scores.max(1, keepdims=True))
        return exponentials @ value / exponentials.sum(1, keepdims=True)

    query, key, value = arrays
    group = query.shape[2] // key.shape[2]
    heads = [(query[0, :, n], *(x[0, :, n // group] for x in (key, value))) for n in range(query.shape[2])]
    return np.stack([of_head(*head) for head in heads], 1)


def methods(arrays: Arrays, implementation: str, is_causal: bool) -> dict[str, Callable[[], jax.Array]]:
    """What computes the output, by name."""
    attend = functools.partial(jax_flash.flash_attention, is_causal=is_causal, implementation=implementation)
    halves = [jnp.asarray(x, jnp.float16) for x in arrays]
    singles = [jnp.asarray(x, jnp.float32) for x in arrays]

    def of_8_bits(options: dict) -> jax.Array:
        quantized = jax_flash.quantize(*singles, **options, implementation="xla")
        return attend(**quantized._asdict(), out_dtype=jnp.float32)

    found = {"float16": functools.partial(attend, *halves)}
    return found | {name: functools.partial(of_8_bits, options) for name, options in METHODS.items()}


def rows(cases: Iterable[tuple[dict, Arrays]], implementations: Sequence[str], is_causal: bool) -> list[dict]:
    """A row for each case, method and implementation. A case has what its rows say of it, and arrays."""
    measured = []
    for case, arrays in cases:
        expected = exact(arrays, is_causal)
        for implementation in implementations:
            for method, compute in methods(arrays, implementation, is_causal).items():
                row = {**case, "method": method, "implementation": implementation}
                try:
                    error = np.asarray(compute(), np.float64)[0] - expected
                    row["rmse"] = float(np.sqrt(np.mean(np.square(error))))
                    row["relative"] = row["rmse"] / float(np.sqrt(np.mean(np.square(expected))))
                except NotImplementedError as exception:
                    row["error"] = record.error(exception)
                measured.append(row)
                print(*(f"{name} {x}" for name, x in row.items()), flush=True)
    return measured


def of_model(checkpoint_dir: Path) -> Iterator[tuple[dict, Arrays]]:
    import model_arrays  # which needs the packages of the examples

    for layer, arrays in enumerate(model_arrays.captured(checkpoint_dir)):
        yield {"layer": layer, "keys": arrays[1].shape[1]}, arrays


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="numbers of keys")
    parser.add_argument("--checkpoint-dir", type=Path, help="of a trained model, in place of random arrays")
    parser.add_argument("--implementations", nargs="+", default=["xla"], choices=("xla", "cuda"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    result = record.environment()
    del result["timing"]
    if options.checkpoint_dir is None:
        cases = (({"keys": keys}, inputs(keys)) for keys in options.lengths)
    else:
        cases = of_model(options.checkpoint_dir)
    is_causal = options.checkpoint_dir is not None
    record.write(result | {"rows": rows(cases, options.implementations, is_causal)}, options.out)


if __name__ == "__main__":
    main()
