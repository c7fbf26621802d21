"""Backward attention over many kinds of calls: our CUDA kernels beside their best peers, in one run.

    python benchmarks/backward.py --out benchmarks/results/backward_h200.json
    python benchmarks/backward.py --groups deterministic,residual

Time is the kernel time of both passes less that of the forward pass. Each visible pair of query and key
counts 10·H operations. The gradients of all contenders must agree; a contender whose gradients differ, or
that refuses a case, shows why. Windows, and full attention beside them, also have a rate per visited block:
it counts all that our kernel's tensor cores compute, masked or not, for every contender.

Two groups compare our kernel with a variant of itself: `deterministic`, and `residual`, whose calls return
the log-sum-exp and receive a gradient of zero for it. Figures of different runs don't compare.
"""

import functools
from collections.abc import Callable, Sequence

import calls
import contenders
import jax
import jax.numpy as jnp
import numpy as np
import rounds
import timing
from calls import Case, square
from comparison import FA3, OURS, Comparison

from jax_flash._device import Device, current
from jax_flash._spec import Operands
from jax_flash.cuda.sm90 import backward_plan

GROUPS = calls.GROUPS | {
    "gqa": [
        *square(4, 4096, 32, 4, 64),
        *square(4, 4096, 32, 4, 128),
        *square(4, 4096, 32, 1, 128),
        *square(4, 4096, 16, 2, 256),
    ],
    # What a device holds of current models: grouped and multi-query heads, tensor parallelism, batch 1.
    "few_key_heads": [
        Case(2, 8192, 8192, 8, 1, 128, causal=True),
        Case(1, 4096, 4096, 28, 4, 128, causal=True),
        Case(4, 2048, 2048, 14, 2, 64, causal=True),
        *square(2, 4096, 16, 1, 128),
        Case(1, 5000, 5000, 48, 3, 128, causal=True),
        *square(1, 1024, 16, 16, 128),
        Case(1, 8192, 8192, 32, 8, 128, causal=True),
        Case(2, 4096, 4096, 12, 12, 192, causal=True),
        Case(1, 4096, 4096, 8, 8, 128, causal=True),
        Case(1, 8192, 8192, 8, 1, 256, causal=True),
    ],
    "deterministic": calls.GROUPS["default"],
    "residual": [*square(4, 4096, 32, 32, 64), *square(16, 1024, 16, 16, 128), *square(4, 4096, 8, 8, 256)],
}
VARIANTS = {"deterministic": "deterministic", "residual": "with_residual"}


def backward_flops(case: Case) -> float:
    """The backward pass has five products, the forward pass two."""
    return 2.5 * case.flops


def visited_flops(case: Case, device: Device) -> int:
    """Of the blocks that our kernel visits on `device`, masked parts of them and padding included.

    A tile of keys visits the blocks of queries from the first to the last that see any of its keys.
    """
    plan = backward_plan.plan_backward(case.spec(), Operands(*case.shapes()), device)
    (main,) = (launch.kernel for launch in plan.launches if launch.kernel.entry == "backward")
    defines = dict(main.defines)
    queries, keys, head_dim = (int(defines[name]) for name in ("QUERIES", "KEYS", "HEAD_DIM"))
    rows = np.arange(case.queries)
    begin, end = case.seen(rows)
    blocks = 0
    for first in range(0, case.keys, keys):
        seeing = rows[(begin < min(first + keys, case.keys)) & (end > first) & (end > begin)]
        if len(seeing):
            blocks += int(seeing[-1]) // queries - int(seeing[0]) // queries + 1
    return 10 * case.batch * case.heads * head_dim * queries * keys * blocks


def measure(group: str, case: Case, names: Sequence[str]) -> list[dict]:
    """A row for each contender: TFLOP/s and milliseconds, or the error that it raised."""
    query, key, value = case.inputs()
    d_out = jax.random.normal(jax.random.key(3), query.shape, query.dtype)
    d_lse = jnp.zeros((case.batch, case.queries, case.heads), jnp.float32)

    def prepare(name: str) -> tuple[tuple[Callable, Callable, tuple], tuple[jax.Array, ...]]:
        contender = {**contenders.CONTENDERS, **contenders.VARIANTS}[name]
        attend = functools.partial(contender, causal=case.causal, window=case.window)
        cotangents = (d_out, d_lse) if name == "with_residual" else (d_out,)

        def both(query, key, value, *cotangents):
            _, vjp = jax.vjp(attend, query, key, value)
            return vjp(cotangents if len(cotangents) > 1 else cotangents[0])

        return (attend, both, cotangents), jax.jit(both)(query, key, value, *cotangents)

    def figures(run: tuple[Callable, Callable, tuple]) -> dict[str, float]:
        attend, both, cotangents = run
        forward = timing.milliseconds(attend, query, key, value)
        together = timing.milliseconds(both, query, key, value, *cotangents)
        return {"milliseconds": together - forward, "forward_milliseconds": forward}

    found = rounds.measure(names, prepare, figures)
    visited = None
    if group == "windows" and "milliseconds" in found.get(OURS, {}):
        visited = visited_flops(case, current())
    rows = [{"case": str(case), "group": group, "peer": name} | found[name] for name in names]
    for row in rows:
        if "milliseconds" in row:
            row |= rates(case, row["milliseconds"], visited)
    return rows


def rates(case: Case, milliseconds: float, visited: int | None) -> dict:
    if milliseconds <= 0:
        return {"error": "both passes took less time than the forward one alone: noise"}
    rate = {"backward": backward_flops(case) / milliseconds / 1e9}
    return rate if visited is None else rate | {"visited": visited / milliseconds / 1e9}


def main(arguments: Sequence[str] | None = None) -> None:
    Comparison(
        key="backward",
        description=__doc__,
        groups=GROUPS,
        measure=measure,
        peers=(OURS, "cudnn", FA3),
        variants=VARIANTS,
    ).run(arguments)


if __name__ == "__main__":
    main()
