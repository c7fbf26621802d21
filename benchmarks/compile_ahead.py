"""What XLA makes of a sharded call for GPUs that this machine lacks: its kernels and transfers in order.

    pip install jax[cuda13]     no GPU and no driver is needed
    XLA_FLAGS=--xla_dump_to=DIR python benchmarks/compile_ahead.py --devices 4 --way "ring, zigzag"

Prints how much memory a device needs, and then what it runs, in order, from XLA's dump: `kAsyncStart` to
`kAsyncDone` is what runs beside the rest, and each `kCopy` and each fusion is a pass over memory. `--way` is
one of scale_out.py's.
"""

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path

import jax
import scale_out
from calls import Case
from jax.experimental import topologies
from jax.sharding import NamedSharding

import jax_flash

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 19 patch: 0 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
"""As XLA describes the device, in protobuf's text format."""


def devices(count: int) -> Sequence[jax.Device]:
    """So many H100s of one host, to compile for."""
    shape = f"1x1x{count}"
    return topologies.get_topology_desc(shape, "cuda", target_config=H100, topology=shape).devices


def compiled(way: str, case: Case, backward: bool, count: int) -> jax.stages.Compiled:
    mesh = scale_out.mesh_of(way, devices(count))
    call, spec = scale_out.sharded(way, case, mesh, "cuda")
    *inputs, d_out = (
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x in (*case.shapes(), case.shapes()[0])
    )

    def both(d_out, *inputs):
        out, vjp = jax.vjp(call, *inputs)
        return out, *vjp(d_out)

    with jax_flash.planned_for("sm_90a"):
        lowered = jax.jit(both).lower(d_out, *inputs) if backward else jax.jit(call).lower(*inputs)
        return lowered.compile()


def main(arguments: Sequence[str] | None = None) -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), metavar=("QUERY", "KEY"))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--window", type=int, help="keys that a query sees at most, its own included")
    parser.add_argument("--way", default="ring, zigzag", choices=list(scale_out.WAYS))
    parser.add_argument("--backward", action="store_true", help="forward and backward")
    options = parser.parse_args(arguments)
    dump = re.search(r"--xla_dump_to=(\S+)", os.environ.get("XLA_FLAGS", ""))
    batch = options.devices if options.way == scale_out.BATCH else 1
    lengths = (options.tokens, options.tokens)
    case = Case(batch, *lengths, *options.heads, options.head_dim, causal=True, window=options.window)
    memory = compiled(options.way, case, options.backward, options.devices).memory_analysis()
    print(f"{case}, {options.way}: {memory.temp_size_in_bytes / 2**30:.2f} GiB beside arguments and results")
    if dump is not None:
        written = sorted(Path(dump[1]).glob("*.thunk_sequence.txt"), key=lambda path: path.stat().st_mtime)
        print(re.sub(r" +\[(source|prev)[^]]*\]", "", written[-1].read_text()))


if __name__ == "__main__":
    main()
