"""How exact the gradients of attention with a forward pass in 8 bits are, by how sharp attention is.

    python benchmarks/fp8_gradients.py --out benchmarks/results/fp8_gradients_cpu.json

Keys, values and cotangents are normal(0, 1), and queries that times a factor: the standard deviation of
scores. Each row has the factor, a peer of fp8_training.py, and for the output and each gradient the error
relative to attention in bfloat16: the root of the mean square over that of the exact one, and the factor that
the exact one has in it, which is 1 if errors point nowhere.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import record
from fp8_training import ATTENTIONS

SHAPE = 4, 512, 4, 64
NAMES = "out", "d_query", "d_key", "d_value"


def gradients(attention: Callable[..., jax.Array], sharpness: float) -> dict[str, jax.Array]:
    """The output and the gradients, in float32."""
    *arrays, d_out = jax.random.normal(jax.random.key(0), (4, *SHAPE), jnp.bfloat16)
    arrays[0] = arrays[0] * jnp.bfloat16(sharpness)
    out, vjp = jax.vjp(lambda *x: attention(*x, is_causal=True), *arrays)
    return {name: x.astype(jnp.float32) for name, x in zip(NAMES, (out, *vjp(d_out)), strict=True)}


def errors(found: jax.Array, exact: jax.Array) -> dict[str, float]:
    return {
        "error": float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact)),
        "factor": float(jnp.vdot(found, exact) / jnp.vdot(exact, exact)),
    }


def rows(sharpness: float) -> list[dict]:
    exact = gradients(ATTENTIONS["bfloat16"], sharpness)
    found = []
    for peer, attention in ATTENTIONS.items():
        if peer != "bfloat16":
            of_peer = gradients(attention, sharpness)
            figures = {name: errors(x, exact[name]) for name, x in of_peer.items()}
            found.append({"case": f"scores of {sharpness:g}", "peer": peer, **figures})
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--sharpness", type=float, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    result = record.environment() | {"rows": [row for x in options.sharpness for row in rows(x)]}
    del result["timing"]
    for row in result["rows"]:
        print(row["case"], row["peer"], *(f"{name} {row[name]['error']:.3f}" for name in NAMES), sep="  ")
    record.write(result, options.out)


if __name__ == "__main__":
    main()
