"""What differs between JAX releases, and the one place that calls a Pallas kernel.

The Triton lowering takes the same kernels in JAX 0.10 to 0.12. What moved: from 0.11 on it warns that it is
deprecated in favour of Mosaic GPU and will be removed, and wants to be told the GPU when it lowers on a
machine that has none.
"""

import contextlib
import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jax_flash import _device
from jax_flash.transforms.varying import vary_over

# Not a context variable: XLA asks for the body of a partitioned computation from a thread of its own.
_interpreting = False

# XLA runs kernels at once that don't depend on each other, and Mosaic GPU's interpreter keeps one's state.
_one_kernel = threading.Lock()


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


_KINDS = {
    (8, 0): "NVIDIA A100",
    (8, 6): "NVIDIA A10",
    (8, 9): "NVIDIA L4",
    (9, 0): "NVIDIA H100",
    (10, 0): "NVIDIA B200",
    (12, 0): "NVIDIA RTX PRO 6000",
}
"""A GPU of each compute capability, as JAX knows it by name."""


def lowering_for_planned() -> contextlib.AbstractContextManager[None]:
    """Lower what is traced in this context for the GPU that it is planned for, if this machine has none.

    The Triton lowering of JAX 0.11 and later asks which GPU that is. Where a mesh is set, that mesh says it.
    """
    device = _device.current()
    mesh = jax.sharding.get_abstract_mesh()
    kind = _KINDS.get(device.compute_capability or (0, 0))
    if kind is None or not mesh.empty or mesh.abstract_device is not None or jax.default_backend() == "gpu":
        return contextlib.nullcontext()
    return lowering_for(kind)


@contextlib.contextmanager
def lowering_for(device_kind: str) -> Iterator[None]:
    """Lower kernels for a GPU such as "NVIDIA H100" on a machine that has none."""
    device = jax.sharding.AbstractDevice(device_kind, num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        yield


def require_triton() -> None:
    """Raises ImportError where the installed JAX has no Triton lowering of Pallas."""
    _require("jax.experimental.pallas.triton", "Triton")


def require_mosaic() -> None:
    """Raises ImportError where the installed JAX has no Mosaic GPU lowering of Pallas."""
    _require("jax.experimental.pallas.mosaic_gpu", "Mosaic GPU")


def _require(module: str, lowering: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"JAX {jax.__version__} has no {lowering} lowering of Pallas ({type(error).__name__}: {error}); "
            "a JAX release that has it is needed, with the jaxlib that belongs to it"
        ) from error


def result(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.ShapeDtypeStruct:
    """What a kernel makes from `like`: under `jax.shard_map`, it varies over the same mesh axes."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)


def tiled_shared_memory(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the layout that wgmma reads."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.SMEM(shape, dtype, transforms=tiles_of(shape[-1], dtype))


def tiles_of(columns: int, dtype: Any) -> tuple[Any, ...]:
    """The layout that wgmma reads: rows of the widest swizzle that divides them, eight by eight."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    row_bytes = columns * jnp.dtype(dtype).itemsize
    swizzle = next(width for width in (128, 64, 32) if row_bytes % width == 0)
    tile = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))  # pyright: ignore[reportAbstractUsage]
    return tile, plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]


def in_tiles(x: jax.Array) -> jax.Array:
    """(B, rows, heads, width) with rows in whole tiles of 8, which Mosaic's TMA copies want."""
    missing = -x.shape[1] % 8
    return jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) if missing else x


def load(ref: Any, layout: Any, optimized: bool = True) -> jax.Array:
    """An array from shared memory, in the layout of a product, or a vector in that of its rows or columns.
    One from global memory, which isn't tiled, needs `optimized=False`."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    index = inspect.signature(plgpu.load).parameters.get("idx")
    if index is not None and index.default is inspect.Parameter.empty:  # in 0.10
        return plgpu.load(ref, (), layout=layout, optimized=optimized)
    return plgpu.load(ref, layout=layout, optimized=optimized)


def accumulate(body: Callable[[Any], Any], acc: jax.Array, like: Any) -> tuple[jax.Array, Any]:
    """`body(accumulator)` issues products into an accumulator that starts from `acc`.

    Returns:
      the accumulator's value when all products have ended, and what `body` returned, a tree of the types and
      layouts of `like`.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if interpreting():
        summed = _Sum(acc)
        result = body(summed)
        return summed.value, result

    def in_registers(refs):
        accumulator, results = refs
        jax.tree.map(lambda ref, x: ref.__setitem__(..., x), results, body(accumulator))

    state: Any = plgpu.WGMMAAccumulatorRef.init(acc), like
    return pl.run_state(in_registers)(state)


class _Sum:
    """An accumulator in the interpreter, which has neither `run_state` nor products of registers."""

    def __init__(self, value: jax.Array):
        self.value = value


def wgmma(accumulator: Any, a: Any, b: Any) -> None:
    """Issues `accumulator += a @ b`, with `a` in registers or shared memory and `b` in shared memory."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if isinstance(accumulator, _Sum):
        a = a if isinstance(a, jax.Array) else a[...]
        accumulator.value += jnp.dot(a, b[...], preferred_element_type=jnp.float32)
    else:
        plgpu.wgmma(accumulator, a, b)


def _traced(kernel: Callable[..., None]) -> Callable[..., None]:
    """`kernel`, traced as ever where a user disables jit: in JAX 0.12 its branches and loops would run in
    Python, on numbers for indices, and blocks that hang over an array's end be refused."""

    def traced(*refs: Any) -> None:
        with jax.disable_jit(False):
            kernel(*refs)

    return traced


def mosaic_call(
    kernel: Callable[..., None],
    *,
    blocks: int,
    warpgroups: int,
    scratch: Sequence[Any],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    name: str,
    sums: Any = None,
    changes: Any = None,
) -> Callable[..., tuple[Any, Any]]:
    """A Mosaic GPU kernel over axes `block` and `warpgroup`, or in its interpreter within `interpret()`.

    Args:
      sums: what the kernel adds to, by `add_to`, a tree: zeros at first. It gets them behind its operands.
      changes: or what the last of its operands are, a tree of shapes: the kernel changes them in place.

    Returns:
      a function that gives results of `out_shape`, and the sums, or what was changed.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    named = _traced(kernel)
    named.__name__ = name
    mesh = dict(grid=(blocks,), grid_names=("block",), num_threads=warpgroups, thread_name="warpgroup")
    options: dict[str, Any] = dict(
        out_type=out_shape,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=_interpreter() if interpreting() else None,
    )
    if changes is None or adds_to_arrays():
        call = plgpu.kernel(named, scratch_types=scratch, **mesh, **options)
    else:  # what `plgpu.kernel` does around it, in 0.10 alone, takes no references

        def scoped(*refs: Any) -> None:
            pl.run_scoped(functools.partial(named, *refs), *scratch, collective_axes="warpgroup")

        call = pl.kernel(scoped, mesh=plgpu.Mesh(**mesh), name=name, **options)

    def change(operands: Sequence[Any], references: Any) -> None:
        call(*operands, references)

    def run(*operands):
        # References made in the open have an effect, which JAX takes in no function with rules of its own for
        # derivatives. The interpreter knows no others.
        if changes is not None and not interpreting():
            *operands, changed = operands
            return [], pl.run_state(functools.partial(change, operands))(changed)
        if sums is None and changes is None:
            return call(*operands), None
        if sums is not None:
            operands = (*operands, jax.tree.map(zeros, sums))
        *operands, changed = operands
        references = jax.tree.map(jax.new_ref, changed)
        results = call(*operands, references)
        return results, jax.tree.map(jax.freeze, references)

    changed = changes if sums is None else sums
    return _without_effects(run, (list(out_shape), changed)) if interpreting() else run


def zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
    return vary_over(jnp.zeros(x.shape, x.dtype), x.manual_axis_type.varying)


def adds_to_arrays() -> bool:
    """Whether kernels of the installed JAX can be given `sums`: from 0.11 on."""
    return jax.__version_info__ >= (0, 11)


def add_to(source: Any, target: Any) -> None:
    """Issues the addition of an array in shared memory to one of `sums`."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if interpreting():
        target[...] += source[...]
    else:
        plgpu.copy_smem_to_gmem(source, target, reduction_op="add")


def _interpreter() -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams()  # pyright: ignore[reportAttributeAccessIssue]: from 0.11 on


def _without_effects(call: Callable[..., Any], out_shape: Any) -> Callable[..., Any]:
    """`call` without the interpreter's ordered effects, which JAX partitions no computation with."""

    def run(*arrays):
        with _one_kernel, interpret():
            return call(*arrays)

    return lambda *arrays: jax.pure_callback(run, out_shape, *arrays)


def mosaic_interprets() -> bool:
    """Whether the installed JAX has an interpreter that these kernels run in: from 0.11 on."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return hasattr(plgpu, "InterpretGPUParams")


def atomic_add(ref: Any, index: jax.Array, values: jax.Array) -> None:
    """Adds to elements `index` of a ref (elements,), by Triton. Other programs add to them too, in any order.

    JAX's interpreter of Triton's addition drops all but one of several values for an element.
    """
    from jax.experimental.pallas import triton

    if interpreting():
        ref[...] = ref[...].at[index].add(values, mode="promise_in_bounds")
    else:
        triton.atomic_add(ref, (index,), values, mask=values != 0)


def triton_call(
    kernel: Callable[..., None],
    *,
    grid: tuple[int, ...],
    in_specs: Sequence[Any],
    out_specs: Sequence[Any],
    out_shape: Sequence[Any],
    num_warps: int,
    num_stages: int,
    name: str,
    changes_last: int = 0,
) -> Callable[..., Any]:
    """`pl.pallas_call` by the Triton lowering, or in the interpreter within `interpret()`.

    Arguments and results, and so their specs and shapes, may be trees, absent leaves None.

    Args:
      changes_last: how many arguments, the last ones, are what the first results start from, in their memory.
    """
    from jax.experimental.pallas import triton

    inputs = len(jax.tree.leaves(in_specs))
    call = pl.pallas_call(
        _traced(kernel),
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=triton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpreting(),
        input_output_aliases={inputs - changes_last + i: i for i in range(changes_last)},
        name=name,
    )

    def run(*args: Any) -> Any:
        with lowering_for_planned():
            return call(*args)

    return run
