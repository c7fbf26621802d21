"""What ptxas makes of the Pallas kernels by Mosaic GPU, on a machine without a GPU.

    pip install jax[cuda13]     no GPU and no driver is needed
    python benchmarks/mosaic_registers.py --out docs/tuning/data/mosaic_registers.json

A row is a kernel of a call on an H100: bytes that it spills, and whether its products are serialised, which
happens where ptxas doesn't let warpgroups change their number of registers (docs/limits.md, "Pallas").
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HEAD_DIMS = (64, 96, 128, 192, 256)
PASSES = {
    "forward": {},
    "both": {},
    "forward with a soft cap": {"logits_soft_cap": 50.0},
    "both with a soft cap": {"logits_soft_cap": 50.0},
    "both with lengths": {},
    "both with segments": {},
    "both with offsets": {},
    "forward with sinks": {},
    "forward in 8 bits": {"quantization": "fp8"},
    "forward in 8 bits with a soft cap": {"quantization": "fp8", "logits_soft_cap": 50.0},
}
BATCH, LENGTH, HEADS = 2, 2048, 8
OPERANDS = {  # arguments, their shape and dtype
    "lengths": (("query_seq_lengths", "key_value_seq_lengths"), (BATCH,), "int32"),
    "segments": (("query_segment_ids", "key_value_segment_ids"), (BATCH, LENGTH), "int32"),
    "offsets": (("cu_seqlens_q", "cu_seqlens_kv"), (BATCH + 1,), "int32"),  # of varlen sequences
    "sinks": (("sinks",), (HEADS,), "float32"),
}
SPILLED = re.compile(
    r"Function properties for (\w+)_mosaic_gpu_kernel\n.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
)
SERIALISED = re.compile(r"instructions are serialized .* function '(\w+)_mosaic_gpu_kernel'")


def compile_call(which: str, head_dim: int) -> None:
    """Compiles a causal call for an H100. Mosaic prints what ptxas says."""
    import compile_ahead
    import jax
    import jax.numpy as jnp

    import jax_flash

    sharding = jax.sharding.SingleDeviceSharding(compile_ahead.devices(1)[0])
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, HEADS, head_dim), jnp.bfloat16, sharding=sharding)

    operand = next((name for name in OPERANDS if which.endswith(name)), "lengths")
    names, shape, dtype = OPERANDS[operand]
    own = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def attend(query, key, value, own):
        options = dict(is_causal=True, implementation="pallas", **PASSES[which])
        if which.endswith(operand):
            options |= dict.fromkeys(names, own)
        if operand == "offsets":
            return varlen(query, key, value, **options)
        return jax_flash.flash_attention(query, key, value, **options)

    def varlen(*arrays, **options):
        packed = (x.reshape(-1, *x.shape[2:]) for x in arrays)
        longest = dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), LENGTH)
        return jax_flash.flash_attention_varlen(*packed, **longest, **options).reshape(arrays[0].shape)

    def both(*arrays):
        *arrays, own = arrays
        return jax.vjp(lambda *arrays: attend(*arrays, own), *arrays)[1](arrays[0])

    with jax_flash.planned_for("sm_90a"):
        jax.jit(both if which.startswith("both") else attend).lower(x, x, x, own).compile()


def rows_of(which: str, head_dim: int) -> list[dict]:
    """The kernels of a call, by another process."""
    environment = os.environ | {
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "JAX_FLASH_PALLAS": "mosaic",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # which loads libraries that need a driver
    }
    command = [sys.executable, __file__, "--call", which, "--head-dim", str(head_dim)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
    if run.returncode:
        return [{"case": f"{which} d{head_dim}", "refused": run.stderr.strip().splitlines()[-1][:200]}]
    return [{"case": f"{which} d{head_dim}", **row} for row in kernels(run.stdout + run.stderr)]


def kernels(text: str) -> list[dict]:
    """The kernels of which ptxas speaks."""
    serialised = SERIALISED.findall(text)
    return [
        {"kernel": name, "spilled_bytes": max(int(stores), int(loads)), "serialised": name in serialised}
        for name, stores, loads in SPILLED.findall(text)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--call", choices=PASSES, help="compile this call alone, and print what ptxas says")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    if options.call:
        compile_call(options.call, options.head_dim)
        return
    from measured_commit import measured_commit

    rows = [row for which in PASSES for head_dim in HEAD_DIMS for row in rows_of(which, head_dim)]
    for row in rows:
        print(*row.values(), sep="  ")
    record = {
        "commit": measured_commit(),
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("jax", "jaxlib", "nvidia-cuda-nvcc", "nvidia-nvjitlink")
        },
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "results": rows,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
