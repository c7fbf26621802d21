"""The choice between the lowerings of Pallas."""

import contextlib
from collections.abc import Iterator

import jax
import pytest


@contextlib.contextmanager
def only_lowering(name: str) -> Iterator[None]:
    """A context in which Pallas calls run by this lowering only, "mosaic" or "triton".

    JAX forgets what it has traced, before and after: its caches don't depend on the environment.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(jax.clear_caches)
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("JAX_FLASH_PALLAS", name)
        jax.clear_caches()
        yield
