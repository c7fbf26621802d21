"""Block-sparse attention against dense attention, on one GPU, forward and backward.

    python benchmarks/block_sparsity.py --out benchmarks/results/block_sparsity_h200.json

Layouts of blocks of 128 × 128: random ones with a share of all blocks, the butterfly of the first
FlashAttention's block-sparse variant (https://arxiv.org/abs/2205.14135, section 3.3), in which block i sees
block j where i and j differ in one bit at most, and a causal one. A call without a mask is the peer, in the
same shuffled rounds. Each row has a layout, the share of blocks that it visits, a pass, the kernel time of
both, and the rate for each visited block relative to the peer's: 1.00 says that time falls as blocks do.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
import passes
import record
import rounds
from calls import Case

import jax_flash

CASES = [
    Case(32, 2048, 2048, 16, 16, 128),
    Case(8, 8192, 8192, 16, 16, 128),
    Case(2, 32768, 32768, 16, 16, 128),
    Case(1, 65536, 65536, 16, 16, 128),
    Case(16, 4096, 4096, 16, 16, 64),
    Case(4, 8192, 8192, 32, 8, 128),
]
BLOCK = 128
DENSE, SPARSE = "dense", "sparse"


def random_layout(share: float, blocks: int) -> np.ndarray:
    """Each row of blocks sees that share of all, at least one."""
    count = max(1, round(share * blocks))
    keys = np.random.default_rng(0).random((blocks, blocks))
    return keys.argsort(axis=1).argsort(axis=1) < count


def butterfly(blocks: int) -> np.ndarray:
    differ = np.arange(blocks)[:, None] ^ np.arange(blocks)
    return (differ & (differ - 1)) == 0


def causal(blocks: int) -> np.ndarray:
    return np.tri(blocks, dtype=bool)


LAYOUTS: dict[str, Callable[[int], np.ndarray]] = {
    **{f"random {share:.0%}": functools.partial(random_layout, share) for share in (1, 0.5, 0.25, 0.1, 0.05)},
    "butterfly": butterfly,
    "causal": causal,
}
"""From how many blocks there are on a side, which see which."""


def attend(mask, query, key, value, *, implementation):
    return jax_flash.flash_attention(query, key, value, block_mask=mask, implementation=implementation)


def rows(case: Case, of_rounds: int, implementation: str) -> list[dict]:
    """A row of each layout and pass."""
    run, inputs = functools.partial(attend, implementation=implementation), case.inputs()
    layouts = {name: layout(case.queries // BLOCK) for name, layout in LAYOUTS.items()}
    found = []
    try:
        dense = passes.compiled(run, [None], inputs)
    except Exception as error:  # the other cases are measured nevertheless
        return [{"error": record.error(error)}]
    for name, layout in layouts.items():
        mask = jax_flash.BlockMask.from_blocks(layout[None, None], block_size=BLOCK)
        try:
            sparse = passes.compiled(run, [mask], inputs)
        except Exception as error:
            found.append({"layout": name, "error": record.error(error)})
            continue
        share = float(layout.mean())
        for direction, times in passes.milliseconds({DENSE: dense, SPARSE: sparse}, of_rounds).items():
            rate = times[DENSE] * share / times[SPARSE]
            found.append({"layout": name, "share": share, "pass": direction} | times | {"rate": rate})
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--implementation", default="cuda")
    parser.add_argument("--match", default="", help="cases that have one of these texts, by commas")
    parser.add_argument("--rounds", type=int, default=rounds.ROUNDS)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    result = record.environment() | {"rows": []}
    print(record.heading(result))
    for case in CASES:
        if not any(text in str(case) for text in options.match.split(",")):
            continue
        for row in rows(case, options.rounds, options.implementation):
            row = {"case": str(case)} | row
            result["rows"].append(row)
            told = f"{row['rate']:.3f}" if "rate" in row else row["error"][:160]
            print(f"{row['case']:36} {row.get('layout', ''):12} {row.get('pass', ''):9} {told}", flush=True)
        jax.clear_caches()
        if options.out:
            record.write(result, options.out)


if __name__ == "__main__":
    main()
