"""`planned_for`: programs for a GPU that this machine lacks."""

import contextlib
from collections.abc import Iterator

import jax

from jax_flash import _device
from jax_flash._precompile import cuda_device


@contextlib.contextmanager
def planned_for(device: str | jax.Device) -> Iterator[None]:
    """Plans calls for a named GPU, in place of JAX's default device.

        with jax_flash.planned_for("sm_90a"):
            lowered = jax.jit(step).trace(*arguments).lower(lowering_platforms=("cuda",))

    So may a program be exported; the README says how. A call chooses its implementation when it is traced, by
    default for the device that JAX runs on. So a program that is exported on a machine without a GPU holds
    plain JAX, unless it is traced in this context. `explain` speaks of the named GPU too. Kernels are
    compiled as ever, which needs no GPU.

    Args:
      device: an architecture, as "sm_90a", or a CUDA device of JAX.

    Raises:
      TypeError, ValueError: device is something else.
    """
    if device is None:
        raise TypeError('device must be an architecture as "sm_90a", or a jax.Device; got None')
    with _device.assume(cuda_device(device)):
        yield
