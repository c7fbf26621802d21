"""The disk cache: bytes by key, one file each, shared by any number of processes.

The folder is `JAX_FLASH_CACHE_DIR`, else `jax_flash` in the user's cache folder. An entry that was
damaged or cut short reads as absent. A folder that can't be written costs a warning, once: what
would have been kept is then made again in every process.
"""

import contextlib
import hashlib
import os
import uuid
import warnings
from pathlib import Path

SUFFIX = ".kernel"
_MAGIC = b"jax_flash 1\n"
_HEADER_BYTES = len(_MAGIC) + hashlib.sha256().digest_size

_warned = False


def folder() -> Path:
    """Where entries are kept; it need not exist. RuntimeError where the user has no home folder."""
    chosen = os.environ.get("JAX_FLASH_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "jax_flash"


def read(key: str) -> bytes | None:
    """What was written under `key`, or None."""
    try:
        entry = (folder() / (key + SUFFIX)).read_bytes()
    except (OSError, RuntimeError):
        return None
    header, content = entry[:_HEADER_BYTES], entry[_HEADER_BYTES:]
    return content if header == _header(content) else None


def write(key: str, content: bytes) -> None:
    """Keeps `content` under `key`. A reader sees all of it or nothing, whoever else writes."""
    try:
        path = folder() / (key + SUFFIX)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not by `tempfile`, whose files only their owner may read: one user may fill the cache for others.
        temporary = path.parent / f".writing-{uuid.uuid4().hex}"
        try:
            with open(temporary, "xb") as file:
                file.write(_header(content))
                file.write(content)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except (OSError, RuntimeError) as error:
        _warn_once(error)


def usage() -> tuple[int, int]:
    """How many entries there are, and their bytes in all."""
    sizes = []
    with contextlib.suppress(OSError, RuntimeError):
        for path in folder().glob(f"*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # another process may clear the folder
                sizes.append(path.stat().st_size)
    return len(sizes), sum(sizes)


def _header(content: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(content).digest()


def _warn_once(error: Exception) -> None:
    global _warned
    if _warned:
        return
    _warned = True
    warnings.warn(
        f"jax_flash can't keep compiled kernels on disk ({error}), so every process compiles its own; "
        "JAX_FLASH_CACHE_DIR names another folder.",
        RuntimeWarning,
        stacklevel=3,
    )
