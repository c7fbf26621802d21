"""What differs between JAX releases, and the one place that calls a Pallas kernel.

The Triton lowering takes the same kernels in JAX 0.10 to 0.12. What moved: from 0.11 on it warns that it is
deprecated in favour of Mosaic GPU and will be removed, and wants to be told the GPU when it lowers on a
machine that has none.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl

# Not a context variable: XLA asks for the body of a partitioned computation from a thread of its own.
_interpreting = False


@contextlib.contextmanager
def interpret() -> Iterator[None]:
    """Trace kernels for Pallas' interpreter, which runs them on any device, slowly: for tests."""
    global _interpreting
    before, _interpreting = _interpreting, True
    try:
        yield
    finally:
        _interpreting = before


def interpreting() -> bool:
    return _interpreting


@contextlib.contextmanager
def lowering_for(device_kind: str) -> Iterator[None]:
    """Lower kernels for a GPU such as "NVIDIA H100" on a machine that has none."""
    device = jax.sharding.AbstractDevice(device_kind, num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        yield


def no_triton() -> str | None:
    """Why the installed JAX can't run these kernels, or None."""
    try:
        importlib.import_module("jax.experimental.pallas.triton")
    except ImportError as error:
        return f"JAX {jax.__version__} has no Triton lowering of Pallas ({error})"
    return None


def result(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.ShapeDtypeStruct:
    """What a kernel makes from `like`: under `jax.shard_map`, it varies over the same mesh axes."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)


def triton_call(
    kernel: Callable[..., None],
    *,
    grid: tuple[int, ...],
    in_specs: Sequence[pl.BlockSpec],
    out_specs: Sequence[pl.BlockSpec],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    num_warps: int,
    num_stages: int,
    name: str,
) -> Callable[..., Any]:
    """`pl.pallas_call` by the Triton lowering, or in the interpreter within `interpret()`."""
    from jax.experimental.pallas import triton

    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=triton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpreting(),
        name=name,
    )
