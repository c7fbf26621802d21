"""`python -m jax_flash.precompile --arch sm_90a`: fills the disk cache ahead, with no GPU.

Compiles what calls of the given kinds would need on a device of that architecture, so that a job's
first step, or an image that has no compiler time to spend, finds every kernel in
`JAX_FLASH_CACHE_DIR`. NVRTC must be the version that the job will use.
"""

import argparse
import concurrent.futures
import itertools
import os
import re
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jax_flash import _arguments, cuda
from jax_flash._device import Device
from jax_flash._spec import AttentionSpec, Operands
from jax_flash.cuda import cache
from jax_flash.cuda.compile import compile_kernel, describe
from jax_flash.cuda.launch_plan import Kernel

HEAD_DIMS = (64, 80, 96, 128, 160, 192, 256)


def device_of(arch: str) -> Device:
    """A device of the architecture `arch`, as "sm_90a". The number of multiprocessors is made up: kernels
    don't depend on it."""
    match = re.fullmatch(r"sm_(\d+)(\d)([a-z]?)", arch)
    if match is None:
        raise ValueError(f'arch must be as "sm_90a"; got {arch!r}')
    device = Device("cuda", arch, (int(match[1]), int(match[2])), sm_count=132)
    if device.arch != arch:
        raise ValueError(f"arch must be {device.arch!r} for that compute capability; got {arch!r}")
    return device


def kernels(spec: AttentionSpec, shapes: Operands[jax.ShapeDtypeStruct], device: Device) -> list[Kernel]:
    """Every kernel of such calls' forward and backward passes, at any length."""
    family = cuda.family(device)
    found = family.kernels(spec, shapes, device)
    for plan in (family.plan_forward_metadata, family.plan_backward, family.plan_backward_metadata):
        planned = plan(spec, shapes, device)
        found += [launch.kernel for launch in planned.launches] if planned else []
    return list(dict.fromkeys(found))


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    wanted: dict[Kernel, None] = {}
    for spec, shapes in _calls(options):
        reason = cuda.supports(spec, shapes, options.arch)
        if reason is None:
            wanted.update(dict.fromkeys(kernels(spec, shapes, options.arch)))
        else:
            print(f"head dim {shapes.query.shape[-1]}, {shapes.query.dtype}: {reason}", file=sys.stderr)
    if not wanted:
        sys.exit("none of these calls can run on that architecture: nothing was compiled")

    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as threads:
        for done, line in enumerate(threads.map(_compile, wanted), start=1):
            print(f"[{done}/{len(wanted)}] {line}", flush=True)
    entries, size = cache.usage()
    print(f"{time.perf_counter() - start:.1f} s; {cache.folder()} has {entries} kernels, {size} bytes")


def _compile(kernel: Kernel) -> str:
    start = time.perf_counter()
    compile_kernel(kernel)
    return f"{time.perf_counter() - start:.1f} s  {describe(kernel)}"


def _calls(options: argparse.Namespace):
    """Pairs of spec and shapes, one for each combination of the options."""
    every = (options.head_dim, options.dtype, options.causal, options.deterministic)
    for head_dim, dtype, causal, deterministic in itertools.product(*every):
        # Kernels depend on how many query heads share a key head, and not on how many there are.
        query, key, value = (
            jax.ShapeDtypeStruct((1, options.seq_len, heads, columns), jnp.dtype(dtype))
            for heads, columns in (
                (options.group, head_dim),
                (1, head_dim),
                (1, options.value_head_dim or head_dim),
            )
        )
        left, right = _arguments.window(causal, options.local_window_size)
        spec = AttentionSpec(head_dim**-0.5, left, right, deterministic=deterministic)
        yield spec, Operands(query, key, value)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jax_flash.precompile",
        description="Compiles CUDA kernels into the disk cache (JAX_FLASH_CACHE_DIR), with no GPU. "
        "Options with several values compile every combination of them.",
    )

    def add(name: str, help: str, **settings) -> None:
        default = settings.get("default")
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        suffix = "" if shown is None else f" (default: {shown})"
        parser.add_argument(name, help=help + suffix, **settings)

    add("--arch", "architecture, as sm_90a", type=_arch, required=True)
    add("--head-dim", "head dims", type=int, nargs="+", default=HEAD_DIMS)
    add("--value-head-dim", "head dim of values, where it is not that of keys", type=int)
    add("--dtype", "dtypes", nargs="+", default=("bfloat16", "float16"), choices=("bfloat16", "float16"))
    add("--causal", "causal or not", type=_bool, nargs="+", default=(True, False), metavar="{true,false}")
    add(
        "--deterministic",
        "the same bits from run to run, or not",
        type=_bool,
        nargs="+",
        default=(False,),
        metavar="{true,false}",
    )
    add("--local-window-size", "keys seen to the left and right, -1 for all", type=int, nargs=2)
    add("--group", "query heads of each key head", type=int, default=1)
    add("--seq-len", "length of queries and keys: a window wider than it is none", type=int, default=8192)
    add("--jobs", "compilations at once", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    if options.group < 1:
        parser.error(f"argument --group: must be at least 1; got {options.group}")
    try:
        _arguments.window(False, options.local_window_size)
    except ValueError as error:
        parser.error(str(error))
    return options


def _arch(text: str) -> Device:
    try:
        return device_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"true or false; got {text!r}")
    return text == "true"


if __name__ == "__main__":
    main()
