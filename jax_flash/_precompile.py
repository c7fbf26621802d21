"""CUDA kernels compiled ahead into the disk cache, with no GPU.

`precompile` compiles what a function needs. The command `python -m jax_flash.precompile --arch sm_90a`
compiles what calls of the kinds that its options name need, at any length. A job's first step, or an image
that has no compiler time to spend, then finds every kernel in `JAX_FLASH_CACHE_DIR`. NVRTC must be the
version that the job will use.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash import _arguments, _device, _validate, cuda
from jax_flash._device import Device
from jax_flash._spec import AttentionSpec, Operands
from jax_flash.cuda import cache
from jax_flash.cuda.call import collecting
from jax_flash.cuda.compile import CompileError, NvrtcNotFoundError, describe, is_stored, store
from jax_flash.cuda.launch_plan import Kernel, LaunchPlan

HEAD_DIMS = (64, 80, 96, 128, 160, 192, 256)


@dataclasses.dataclass(frozen=True)
class PrecompiledKernel:
    """What became of one kernel."""

    name: str  # its entry point, source, architecture and defines
    seconds: float
    was_stored: bool  # in the disk cache before
    is_stored: bool  # in the disk cache now; if not, every process compiles it again

    def __str__(self) -> str:
        how = "from the cache" if self.was_stored else "compiled"
        found = how if self.is_stored else f"{how}, not kept"
        return f"{self.seconds:5.1f} s  {found}: {self.name}"


@dataclasses.dataclass(frozen=True)
class Precompiled:
    """What `precompile` did; print it, or read its fields."""

    arch: str
    kernels: tuple[PrecompiledKernel, ...]
    seconds: float  # in all, tracing included
    folder: Path  # of the disk cache

    @property
    def compiled(self) -> tuple[PrecompiledKernel, ...]:
        """The kernels that were not in the disk cache before."""
        return tuple(kernel for kernel in self.kernels if not kernel.was_stored)

    def __str__(self) -> str:
        total = f"{len(self.kernels)} kernels for {self.arch} in {self.seconds:.1f} s"
        total += f", {len(self.compiled)} of them compiled; the cache is {self.folder}"
        return "\n".join([total, *map(str, self.kernels)])


def precompile(
    function: Callable[..., Any],
    *shapes: Any,
    device: str | jax.Device | None = None,
    backward: bool = True,
    jobs: int | None = None,
) -> Precompiled:
    """Compiles every CUDA kernel that a function needs, forward and backward, into the caches.

    The function is traced, and nothing in it runs. It may hold any number of attention calls, with any
    options, under any of JAX's transforms. In a function over arrays that a mesh partitions, kernels are
    those for whole arrays; within `jax.shard_map` they are those for each device's part.

    Args:
      function: a model, a loss, a training step, …
      *shapes: its arguments: arrays, `jax.ShapeDtypeStruct`s, or trees of them. Bind static ones by
        `functools.partial`.
      device: what to compile for: an architecture, as "sm_90a", or a CUDA device of JAX. None is the current
        device, which must be a CUDA GPU then.
      backward: compile kernels of the function's gradient too, for its floating arguments. It makes no
        difference where the function takes a gradient itself, as a training step does.
      jobs: kernels to compile at once; by default one for each CPU.

    Returns:
      the kernels, for each whether it was in the disk cache or compiled, and the seconds it took.

    Raises:
      ValueError: device is no CUDA GPU or is missing, jobs is below 1, or the function has no gradient.
      TypeError: an argument is of the wrong kind.
      CompileError, NvrtcNotFoundError: of `jax_flash.cuda.compile`.
      NotImplementedError: as `flash_attention` does.
    """
    if not callable(function):
        raise TypeError(f"function must be callable; got {function!r}")
    planned_for = cuda_device(device)
    backward = _validate.flag("backward", backward)
    jobs = (os.cpu_count() or 1) if jobs is None else _validate.integer("jobs", jobs)
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1; got {jobs}")
    start = time.perf_counter()
    plans = _Plans()
    with _device.assume(planned_for), collecting(plans):
        jax.eval_shape(function, *shapes)
        if backward and plans.kernels and "jax_flash_backward" not in plans.targets:
            _trace_gradient(function, shapes)
    kernels = tuple(_compiled(plans.kernels, jobs))
    return Precompiled(planned_for.arch, kernels, time.perf_counter() - start, cache.folder())


class _Plans:
    """What `jax_flash.cuda.call` collects."""

    def __init__(self) -> None:
        self.targets: set[str] = set()
        self.kernels: dict[Kernel, None] = {}  # a set in the order of their first launch

    def add(self, target: str, plan: LaunchPlan) -> None:
        self.targets.add(target)
        self.kernels.update(dict.fromkeys(launch.kernel for launch in plan.launches))


def _trace_gradient(function: Callable[..., Any], shapes: tuple[Any, ...]) -> None:
    """Traces the backward pass of `function`, from all its floating results to all its floating arguments."""
    leaves, tree = jax.tree.flatten(jax.eval_shape(lambda *args: args, *shapes))
    places = [i for i, leaf in enumerate(leaves) if _is_floating(leaf)]

    def gradient(leaves: list[Any]) -> Any:
        def floating_results(floats: list[Any]) -> list[Any]:
            given = leaves.copy()
            for place, x in zip(places, floats, strict=True):
                given[place] = x
            return [x for x in jax.tree.leaves(function(*tree.unflatten(given))) if _is_floating(x)]

        results, vjp = jax.vjp(floating_results, [leaves[place] for place in places])
        return vjp(results)

    try:
        jax.eval_shape(gradient, leaves)
    except Exception as error:
        raise ValueError(
            "function has no gradient, so that kernels of its backward pass can't be compiled; pass "
            f"backward=False for those of the forward pass alone. {type(error).__name__}: {error}"
        ) from error


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def cuda_device(device: str | jax.Device | None) -> Device:
    if isinstance(device, str):
        return device_of(device)
    if device is not None and not isinstance(device, jax.Device):
        raise TypeError(f'device must be None, an architecture as "sm_90a", or a jax.Device; got {device!r}')
    found = _device.current() if device is None else _device.describe(device)
    if found.platform != "cuda":
        what = "JAX's default device, which device=None means," if device is None else "device"
        raise ValueError(
            f"{what} is {found.kind} ({found.platform}), and no CUDA GPU: pass the architecture to compile "
            'for, as device="sm_90a"'
        )
    return found


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
    for plan in (family.plan_forward_metadata, family.plan_backward_metadata):
        planned = plan(spec, shapes, device)
        found += [launch.kernel for launch in planned.launches] if planned else []
    return list(dict.fromkeys(found))


def _compiled(wanted: Iterable[Kernel], jobs: int) -> Iterator[PrecompiledKernel]:
    """Compiles kernels, so many at once, and yields them in their order."""
    with concurrent.futures.ThreadPoolExecutor(jobs) as threads:
        yield from threads.map(_compile, wanted)


def _compile(kernel: Kernel) -> PrecompiledKernel:
    start = time.perf_counter()
    was_stored = is_stored(kernel)
    stored = store(kernel)
    return PrecompiledKernel(describe(kernel), time.perf_counter() - start, was_stored, stored)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command. Exits with 1 where no call can run, a kernel doesn't compile or is not kept."""
    options = _parse(arguments)
    try:
        wanted = _wanted(options)
        _check_folder()
        start = time.perf_counter()
        done = []
        for kernel in _compiled(wanted, options.jobs):
            done.append(kernel)
            print(f"[{len(done)}/{len(wanted)}] {kernel}", flush=True)
    except (CompileError, NvrtcNotFoundError) as error:
        sys.exit(str(error))
    not_kept = sum(not kernel.is_stored for kernel in done)
    if not_kept:
        sys.exit(f"{not_kept} of {len(done)} kernels are not kept in {cache.folder()}: is its disk full?")
    entries, size = cache.usage()
    print(f"{time.perf_counter() - start:.1f} s; {cache.folder()} has {entries} kernels, {size} bytes")


def _wanted(options: argparse.Namespace) -> list[Kernel]:
    """The kernels of all calls; those that can't run are named on stderr."""
    wanted: dict[Kernel, None] = {}
    for spec, shapes in _calls(options):
        reason = cuda.supports(spec, shapes, options.arch)
        if reason is None:
            wanted.update(dict.fromkeys(kernels(spec, shapes, options.arch)))
        else:
            print(f"head dim {shapes.query.shape[-1]}, {shapes.query.dtype}: {reason}", file=sys.stderr)
    if not wanted:
        sys.exit("none of these calls can run on that architecture: nothing was compiled")
    return list(wanted)


def _check_folder() -> None:
    """Exits where the cache's folder can't be written, before any time is spent on compiling."""
    try:
        folder = cache.folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:
        sys.exit(f"kernels can't be kept: {error}. JAX_FLASH_CACHE_DIR names another folder.")


def _calls(options: argparse.Namespace) -> Iterator[tuple[AttentionSpec, Operands[jax.ShapeDtypeStruct]]]:
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
        "Options with several values compile every combination of them. For calls with bias, mask, dropout, "
        "lengths and so on, see jax_flash.precompile(function, *shapes).",
    )

    def add(name: str, help: str, **settings) -> None:
        default = settings.get("default")
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        suffix = "" if shown is None else f" (default: {shown})"
        parser.add_argument(name, help=help + suffix, **settings)

    add("--arch", "architecture, as sm_90a", type=_arch, required=True)
    add("--head-dim", "head dims", type=_at_least_one, nargs="+", default=HEAD_DIMS)
    add("--value-head-dim", "head dim of values, where it is not that of keys", type=_at_least_one)
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
    add("--group", "query heads of each key head", type=_at_least_one, default=1)
    add(
        "--seq-len",
        "length of queries and keys: a window wider than it is none",
        type=_at_least_one,
        default=8192,
    )
    add("--jobs", "compilations at once", type=_at_least_one, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
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


def _at_least_one(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer; got {text!r}") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {number}")
    return number


def _bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"true or false; got {text!r}")
    return text == "true"
