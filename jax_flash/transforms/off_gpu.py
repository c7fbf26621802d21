"""The warning that a program which was planned for a device without kernels is lowered for a GPU."""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_flash import _slower
from jax_flash._device import GPU_PLATFORMS


def watched(x: jax.Array) -> jax.Array:
    """`x`. Lowering it for a GPU warns with `SlowerImplementationWarning`."""
    return _watched.bind(x)


def _lower(ctx: Any, x: Any) -> Any:
    platforms = [name for name in ctx.module_context.platforms if name in GPU_PLATFORMS]
    if platforms:
        _slower.warn(
            f"A call of jax_flash is lowered for {platforms[0]}, but wasn't planned for a GPU: "
            'it runs by implementation="xla", which is slower. Trace the function within '
            'jax_flash.planned_for("sm_90a"), or pass implementation="xla" to choose it without this warning.'
        )
    return [x]


_watched = Primitive("jax_flash_watched")
_watched.def_impl(lambda x: x)
_watched.def_abstract_eval(lambda x: x)
mlir.register_lowering(_watched, _lower)
batching.primitive_batchers[_watched] = lambda args, axes: (_watched.bind(*args), axes[0])
ad.deflinear2(_watched, lambda cotangent, x: [cotangent])
