"""Times of the collectives that sharded sequences use, alone: what scale_out.py's model is made of."""

import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

AXIS = "devices"
CALLS, REPEATS = 8, 4
MIB = 1 << 20


def collectives(devices: int) -> dict[str, Callable[[jax.Array], jax.Array]]:
    """By name, of an array `(devices, bytes)`, of which each device sends all but one row or one row."""
    ring = [(i, (i + 1) % devices) for i in range(devices)]
    return {
        "ppermute": lambda x: jax.lax.ppermute(x, AXIS, ring),
        "all_gather": lambda x: jax.lax.all_gather(x[0], AXIS),
        "all_to_all": lambda x: jax.lax.all_to_all(x, AXIS, 0, 0),
        "psum_scatter": lambda x: jax.lax.psum_scatter(x, AXIS),
    }


def rows(devices: Sequence[jax.Device], most: int) -> list[dict]:
    """A row of each collective and number of bytes that a device sends: 1, 4, 16, … up to `most` MiB."""
    mesh = jax.make_mesh((len(devices),), (AXIS,), (jax.sharding.AxisType.Auto,), devices=devices)
    found = []
    sizes = [MIB << n for n in range(0, 32, 2) if 1 << n <= most]
    for name, collective in collectives(len(devices)).items():
        rows_sent = len(devices) if name == "ppermute" else len(devices) - 1
        run = jax.jit(
            functools.partial(jax.shard_map, mesh=mesh, in_specs=P(None, AXIS), out_specs=P(None, AXIS))(
                lambda x, collective=collective: collective(x).reshape(1, -1)
            )
        )
        for size in sizes:
            columns = size // rows_sent // 4
            x = jax.device_put(
                jnp.ones((len(devices), columns * len(devices)), jnp.float32),
                jax.sharding.NamedSharding(mesh, P(None, AXIS)),
            )
            sent = columns * 4 * rows_sent
            found.append({"collective": name, "bytes": sent, "milliseconds": milliseconds(run, x)})
    return found


def milliseconds(run: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    """Wall clock of a call, of several in flight; the least of several."""
    jax.block_until_ready(run(x))

    def once() -> float:
        start = time.perf_counter()
        jax.block_until_ready([run(x) for _ in range(CALLS)])
        return (time.perf_counter() - start) / CALLS * 1e3

    return min(once() for _ in range(REPEATS))
