"""Forward attention over many kinds of calls: our CUDA kernels beside every peer, in one run.

    python benchmarks/forward.py --out benchmarks/results/forward_h200.json
    python benchmarks/forward.py --groups short,odd --peers jax_flash_cuda,cudnn,fa3_cu13

Each visible pair of query and key counts 4·H operations. The outputs of all contenders must agree; a
contender whose output differs, or that refuses a case, shows why. Windows, and full attention beside them,
also have a rate per visited block: it counts all that our kernel's tensor cores compute, masked or not, for
every contender. The group `launch` times a chain of calls, each on the output of the one before, with the
gaps between kernels; all other groups give kernel time. Figures of different runs don't compare.
"""

import functools
from collections.abc import Callable, Sequence

import calls
import contenders
import jax
import rounds
import timing
from calls import Case
from comparison import OURS, Comparison

from jax_flash._device import Device, current
from jax_flash._mask import keys_of_queries
from jax_flash._spec import Operands, sizes
from jax_flash.cuda.sm90 import forward_plan, tensor_maps

GROUPS = calls.GROUPS | {"launch": [Case(4, 256, 256, 16, 16, 64, calls=32)]}


def chain(attend: Callable, calls: int) -> Callable:
    """`calls` of `attend` in a row, each with the output of the one before as its query."""
    if calls == 1:
        return attend
    attend = jax.jit(attend)  # traced and lowered once

    def run(query, key, value):
        for _ in range(calls):
            query = attend(query, key, value)
        return query

    return run


def visited_flops(case: Case, device: Device) -> int:
    """Of the blocks that our kernel visits on `device`, masked parts of them and padding included.

    Rows and keys of a block are those of the plan, and so is how many heads share a tile: row r of their
    rows holds query r / pack.
    """
    shapes = Operands(*case.shapes())
    mask = keys_of_queries(case.spec(), sizes(shapes))
    chosen, head_dim = forward_plan.configure(case.spec(), shapes), tensor_maps.padded_head_dim(case.head_dim)
    tile, heads = chosen.tile, chosen.pack_gqa
    blocks = sum(mask.block_counts(tile.rows // heads, tile.keys))
    return 4 * case.calls * case.batch * (case.heads // heads) * head_dim * tile.rows * tile.keys * blocks


def measure(group: str, case: Case, names: Sequence[str]) -> list[dict]:
    """A row for each contender: TFLOP/s and milliseconds, or the error that it raised."""
    inputs = case.inputs()

    def prepare(name: str) -> tuple[Callable, jax.Array]:
        attend = functools.partial(contenders.CONTENDERS[name], causal=case.causal, window=case.window)
        run = chain(attend, case.calls)
        return run, jax.jit(run)(*inputs)

    found = rounds.measure(names, prepare, lambda run: figures(case, run, inputs))
    rows = [{"case": str(case), "group": group, "peer": name} | found[name] for name in names]
    if group == "windows" and "milliseconds" in found.get(OURS, {}):
        for row in rows:
            if "milliseconds" in row:
                row["visited"] = visited_flops(case, current()) / row["milliseconds"] / 1e9
    return rows


def figures(case: Case, run: Callable, inputs: Sequence[jax.Array]) -> dict[str, float]:
    """Of all calls, but for the microseconds, which are one call's with the gap behind it."""
    kernels = timing.milliseconds(run, *inputs)
    if case.calls == 1:
        return {"forward": case.flops / kernels / 1e9, "milliseconds": kernels}
    span = timing.span_milliseconds(run, *inputs)
    return {
        "forward": case.flops / span / 1e9,
        "milliseconds": span,
        "call_microseconds": 1e3 * span / case.calls,
        "kernel_microseconds": 1e3 * kernels / case.calls,
    }


def print_microseconds(row: dict) -> None:
    if "call_microseconds" in row:
        call, kernel = row["call_microseconds"], row["kernel_microseconds"]
        print(f"    {row['peer']}: {call:.2f} µs a call, of which kernels {kernel:.2f}")


def main(arguments: Sequence[str] | None = None) -> None:
    Comparison(
        key="forward",
        description=__doc__,
        groups=GROUPS,
        measure=measure,
        peers=(OURS, *contenders.PEERS),
        print_row=print_microseconds,
    ).run(arguments)


if __name__ == "__main__":
    main()
