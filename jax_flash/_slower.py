"""The warning that a call runs on something slower than the device could run it on."""

import contextlib
import os
import sys
import threading
import types
import warnings
from pathlib import Path

import jax


class SlowerImplementationWarning(UserWarning):
    """A call on a GPU runs slower than it could. The message says why, and what to do about it."""


_told: set[str] = set()
_lock = threading.Lock()

# This package's frames and JAX's, one inside the other where JAX traces. In a checkout the folder of
# `jax_flash.pallas` lies beside that of `jax_flash`. JAX's decorators go through contextlib.
_FOLDERS = (Path(__file__).parent, Path(__file__).parents[1] / "pallas", Path(jax.__file__).parent)
_SKIPPED = (*(str(folder) + os.sep for folder in _FOLDERS), contextlib.__file__)


def warn(message: str) -> None:
    """Warns at the line that called into jax_flash, once a process for each message.

    Where the user's filters turn the warning into an error, every such call raises it.
    """
    with _lock:
        if message in _told:
            return
    warnings.warn(message, SlowerImplementationWarning, stacklevel=_levels_to_the_caller())
    with _lock:
        _told.add(message)


def _levels_to_the_caller() -> int:
    """The `stacklevel`, as `warn` passes it, of the innermost frame outside of this package and JAX."""
    frame: types.FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame, level = frame.f_back, level + 1
    return level
