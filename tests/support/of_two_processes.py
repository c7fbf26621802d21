"""One of several processes that attend together to a sequence which is sharded over all of their devices.

    python of_two_processes.py PROCESS PROCESSES PORT

Prints the largest difference from a call on one device, of the output and of each gradient.
"""

import os
import sys

process, processes, port = map(int, sys.argv[1:])
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import functools  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jax_flash  # noqa: E402

SECONDS = 60
jax.distributed.initialize(
    f"localhost:{port}", processes, process, initialization_timeout=SECONDS, heartbeat_timeout_seconds=SECONDS
)
assert jax.process_count() == processes and len(jax.local_devices()) == 2
n = len(jax.devices())
mesh = jax.make_mesh((n,), ("sequence",), axis_types=(jax.sharding.AxisType.Auto,))
shards = P(None, "sequence")
draw = np.random.default_rng(0)
arrays = [draw.normal(size=(2, 32, heads, 8)).astype(np.float32) for heads in (4, 2, 2)]
sharded = [jax.make_array_from_callback(x.shape, NamedSharding(mesh, shards), x.__getitem__) for x in arrays]


def with_gradients(attend):
    def run(*arrays):
        out, vjp = jax.vjp(attend, *arrays)
        return out, *vjp(jnp.sin(out))

    return jax.jit(run)


attend = functools.partial(jax_flash.flash_attention, is_causal=True)
expected = jax.tree.map(np.asarray, with_gradients(attend)(*arrays))
by_hand = functools.partial(jax_flash.context_parallel_attention, axis_name="sequence", is_causal=True)
calls = {"jit": attend}
for strategy in ("ring", "all_gather", "ulysses"):
    calls[f"jit_{strategy}"] = functools.partial(attend, context_parallel=strategy)
    calls[strategy] = jax.shard_map(
        functools.partial(by_hand, strategy=strategy), mesh=mesh, in_specs=shards, out_specs=shards
    )
for name, call in calls.items():
    results = with_gradients(call)(*sharded)
    worst = 0.0
    for got, whole in zip(results, expected, strict=True):
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, shards), 4), (name, got.sharding)
        for shard in got.addressable_shards:
            worst = max(worst, float(np.abs(np.asarray(shard.data) - whole[shard.index]).max()))
    print(f"{name} {worst:.3g}", flush=True)
    assert worst < 1e-5
