"""Times the forward kernel's tiles for calls that change scores, one option at a time, on the GPU at hand.

    python benchmarks/tune_options.py --out benchmarks/results/tune_options_forward_h200.json

Options are those of features.py, causal, b4 s4096. The first tile of each head dim is the table's
(jax_flash/cuda/sm90/forward_tiles.py's for calls that are changed); results that differ from its are refused.
Tiles take turns, in rounds of another order each, whose median counts.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import features
import jax
import jax.numpy as jnp
import record
import rounds
import timing
from tune import planned, source

import jax_flash
from jax_flash._mask import Window
from jax_flash.cuda.sm90 import forward_tiles
from jax_flash.cuda.sm90.forward_tiles import ForwardTile, TileRequirements

OPTIONS = ("soft cap", "ALiBi", "mask of keys", "bias of a head")
TILES: dict[int, tuple[ForwardTile, ...]] = {
    64: (
        ForwardTile(2, 80, 2, False, 1, 5),
        ForwardTile(2, 96, 2, False, 1, 6),
        ForwardTile(2, 128, 2, False, 2, 8),
        ForwardTile(2, 128, 2, True, 2, 6),
        ForwardTile(3, 96, 2, True, 2, 5),
        ForwardTile(3, 128, 2, False, 2, 8),
    ),
    128: (
        ForwardTile(2, 80, 2, False, 1, 5),
        ForwardTile(2, 96, 2, False, 1, 6),
        ForwardTile(2, 96, 2, True, 2, 5),
        ForwardTile(2, 128, 2, False, 1, 8),
        ForwardTile(2, 128, 2, True, 2, 6),
    ),
    256: (
        ForwardTile(2, 32, 2, False, 1, 2),
        ForwardTile(2, 48, 2, False, 1, 3),
        ForwardTile(2, 64, 2, False, 1, 4),
        ForwardTile(2, 64, 2, True, 1, 4),
    ),
}


def tiles(head_dim: int, option: str) -> list[ForwardTile]:
    """The table's, then the others."""
    read = {"mask of keys": "mask", "bias of a head": "bias"}.get(option)
    needs = TileRequirements(head_dim, head_dim, Window(None, 0), score_mods=1, loaded_operand=read)
    table = [choice.tile for choice in forward_tiles.tile_options(needs)]
    return list(dict.fromkeys((*table, *TILES[head_dim])))


def measure(head_dim: int, option: str) -> list[dict]:
    heads = 2048 // head_dim
    shape = (features.BATCH, features.LENGTH, heads, head_dim)
    inputs = [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(3)]
    static, arrays = features.options(heads)[option]
    named = {source(tile): tile for tile in tiles(head_dim, option)}

    def prepare(name: str) -> tuple[Callable, jax.Array]:
        jax.clear_caches()  # which remember the plan of such a call

        def attend(query, key, value, arrays):
            return jax_flash.flash_attention(
                query, key, value, is_causal=True, implementation="cuda", **static, **arrays
            )

        with planned(named[name]):
            program = jax.jit(attend).lower(*inputs, arrays).compile()
        return functools.partial(timing.milliseconds, program, *inputs, arrays), program(*inputs, arrays)

    found = rounds.measure(list(named), prepare, lambda run: {"milliseconds": run()})
    return [{"head_dim": head_dim, "option": option, "tile": name} | row for name, row in found.items()]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head-dim", type=int, nargs="+", default=tuple(TILES), choices=TILES)
    parser.add_argument("--option", nargs="+", default=OPTIONS, choices=OPTIONS)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    chosen = parser.parse_args(arguments)
    result = record.environment() | {"rows": []}
    print(record.heading(result | {"ceiling": record.product_ceiling("bfloat16")}))
    for head_dim in chosen.head_dim:
        for option in chosen.option:
            for row in measure(head_dim, option):
                figure = f"{row['milliseconds']:.3f} ms" if "milliseconds" in row else row["error"][:120]
                print(f"d{head_dim} {option:16} {row['tile']:38} {figure}", flush=True)
                result["rows"].append(row)
            if chosen.out:  # each time, so that a run cut short leaves what it had
                record.write(result, chosen.out)


if __name__ == "__main__":
    main()
