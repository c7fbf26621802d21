"""Whether a launch plan that came with a program may run.

A program exported by `jax.export`, or taken from a compilation cache, carries its plans as text. Nothing says
that this package wrote them. So before its kernels are compiled a plan is checked: it compiles only this
package's sources, with defines that are names and numbers and the header of a user's function, and its tensor
maps stay within their buffers.
What kernels do with other addresses and sizes can't be checked. An exported program is code: run those that
you would run as code.
"""

import math
import re
from collections.abc import Mapping

from jax_flash.cuda import block_mask, compile, user_score_mod
from jax_flash.cuda.launch_plan import (
    ELEMENT_BYTES,
    Buffer,
    Kernel,
    Launch,
    LaunchPlan,
    Pointer,
    TensorMap,
    Zero,
)
from jax_flash.cuda.parameters import layout

MAX_PARAMETER_BYTES = 4096
MAX_THREADS = 1024
MAX_SHARED_BYTES = 227 << 10
MAX_CLUSTER = 16

_HEADERS = (user_score_mod.HEADER_NAME, block_mask.HEADER_NAME)
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SOURCE = re.compile(r"([A-Za-z0-9_]+/)*[A-Za-z0-9_]+\.cu")


def check(plan: LaunchPlan) -> None:
    """Raises ValueError where `plan` is none that this package makes, and says why."""
    buffers: dict[str, Buffer] = {}
    for buffer in (*plan.operands, *plan.results):
        _require(buffer.name not in buffers, f"two buffers are named {buffer.name!r}")
        _require(buffer.dtype in ELEMENT_BYTES, f"buffer {buffer.name} has dtype {buffer.dtype!r}")
        _require(min(buffer.shape, default=0) >= 0, f"buffer {buffer.name} has shape {buffer.shape}")
        buffers[buffer.name] = buffer
    _check_aliases(plan)
    _ = plan.compute_capability
    for step in plan.steps:
        if isinstance(step, Zero):
            _require(step.buffer in buffers, f"a step zeroes {step.buffer!r}, which is no buffer")
        else:
            _check_kernel(step.kernel)
            _check_launch(step, buffers)


def _check_aliases(plan: LaunchPlan) -> None:
    operands, results = ({b.name: b for b in buffers} for buffers in (plan.operands, plan.results))
    for alias in plan.aliases:
        operand, result = operands.pop(alias.operand, None), results.pop(alias.result, None)
        _require(
            operand is not None
            and result is not None
            and (operand.shape, operand.dtype) == (result.shape, result.dtype),
            f"result {alias.result!r} can't have the memory of operand {alias.operand!r}",
        )


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(f"the launch plan can't run: {otherwise}")


def _check_kernel(kernel: Kernel) -> None:
    _require(bool(_IDENTIFIER.fullmatch(kernel.entry)), f"{kernel.entry!r} is no name of a kernel")
    _require(
        bool(_SOURCE.fullmatch(kernel.source)) and (compile.kernels_folder() / kernel.source).is_file(),
        f"{kernel.source!r} is no source among jax_flash's kernels",
    )
    for name, _ in kernel.headers:
        _require(name in _HEADERS, f"{name!r} is no header that is written for a kernel")
    for name, value in kernel.defines:
        is_plain = _IDENTIFIER.fullmatch(value) if isinstance(value, str) else math.isfinite(value)
        _require(
            bool(_IDENTIFIER.fullmatch(name) and is_plain),
            f"{kernel.entry} has a define {name!r} = {value!r}; it may be a name or a number",
        )
    size = layout(kernel.parameters).bytes
    _require(size <= MAX_PARAMETER_BYTES, f"{kernel.entry} takes {size} bytes of parameters")


def _check_launch(launch: Launch, buffers: Mapping[str, Buffer]) -> None:
    entry = launch.kernel.entry
    limits = (2**31 - 1, 65535, 65535)
    grid_fits = all(1 <= size <= limit for size, limit in zip(launch.grid, limits, strict=True))
    _require(grid_fits, f"{entry} has a grid of {launch.grid} CTAs")
    _require(1 <= launch.block <= MAX_THREADS, f"{entry} has CTAs of {launch.block} threads")
    _require(
        0 <= launch.shared_bytes <= MAX_SHARED_BYTES, f"{entry} takes {launch.shared_bytes} bytes shared"
    )
    cluster_fits = 1 <= launch.cluster <= MAX_CLUSTER and launch.grid[0] % launch.cluster == 0
    _require(cluster_fits, f"{entry} has clusters of {launch.cluster} in a grid of {launch.grid}")
    for path, argument in launch.by_path.items():
        if isinstance(argument, Pointer | TensorMap):
            _require(argument.buffer in buffers, f"{path} of {entry} is in {argument.buffer!r}, no buffer")
        if isinstance(argument, TensorMap):
            problem = tensor_map_problem(argument, buffers[argument.buffer])
            _require(problem is None, f"{path} of {entry} is a tensor map {problem}")


def tensor_map_problem(map: TensorMap, buffer: Buffer) -> str | None:
    """What is wrong with a tensor map over `buffer`, or None.

    The driver would refuse it when it encodes the map, or the map would reach beyond the buffer.
    """
    rank = len(map.sizes)
    if not 1 <= rank <= 5 or len(map.box) != rank or len(map.strides) != rank - 1:
        return f"of {rank} sizes, {len(map.strides)} strides and a box of {len(map.box)}"
    if map.dtype != buffer.dtype:
        return f"of {map.dtype} over {buffer.dtype}"
    if not all(1 <= size <= 2**32 for size in map.sizes):
        return f"of sizes {map.sizes}"
    if not all(0 < stride < 2**40 and stride % 16 == 0 for stride in map.strides):
        return f"of strides {map.strides}"
    if not all(1 <= extent <= 256 for extent in map.box):
        return f"with a box {map.box}"
    element = ELEMENT_BYTES[map.dtype]
    box_bytes = map.box[0] * element
    if map.swizzle not in (0, 32, 64, 128) or box_bytes % 16 or box_bytes > (map.swizzle or box_bytes):
        return f"with rows of {box_bytes} bytes in its box, and a swizzle of {map.swizzle}"
    last = sum((size - 1) * stride for size, stride in zip(map.sizes, (element, *map.strides), strict=True))
    if last + element > buffer.bytes:
        return f"of {last + element} bytes over {buffer.bytes}"
    return None
