"""The disk cache: bytes by key, one file each, shared by any number of processes.

The folder is `JAX_FLASH_CACHE_DIR`, else `jax_flash` in the user's cache folder. An entry that was
damaged, cut short or renamed reads as absent, and so does one that another user may have put there. A
folder that can't be written costs a warning, once: what would have been kept is then made again in every
process.
"""

import contextlib
import fcntl
import hashlib
import os
import stat
import time
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

SUFFIX = ".kernel"
MAX_BYTES = 2 << 30
"""Of all entries. Beyond, the oldest go."""
_MAGIC = b"jax_flash 2\n"
_HEADER_BYTES = len(_MAGIC) + hashlib.sha256().digest_size
_TEMPORARY = ".writing-"
_LOCKS = 256
_OLD_SECONDS = 3600.0  # of a temporary file that no process still writes

_warned = False
_swept: set[Path] = set()


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
        with open(folder() / (key + SUFFIX), "rb") as file:
            if not _is_trusted(os.fstat(file.fileno()), folder().stat()):
                return None
            entry = file.read()
    except (OSError, RuntimeError):
        return None
    header, content = entry[:_HEADER_BYTES], entry[_HEADER_BYTES:]
    return content if header == _header(key, content) else None


def _is_trusted(entry: os.stat_result, parent: os.stat_result) -> bool:
    """Whether an entry is this user's, root's or the folder's owner's, and not for everybody to write."""
    return entry.st_uid in (os.geteuid(), 0, parent.st_uid) and not entry.st_mode & stat.S_IWOTH


def write(key: str, content: bytes) -> None:
    """Keeps `content` under `key`. A reader sees all of it or nothing, whoever else writes."""
    try:
        path = folder() / (key + SUFFIX)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not by `tempfile`, whose files only their owner may read: one user may fill the cache for others.
        temporary = path.parent / f"{_TEMPORARY}{uuid.uuid4().hex}"
        _sweep_once(path.parent)
        try:
            with open(temporary, "xb") as file:
                file.write(_header(key, content))
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


@contextlib.contextmanager
def exclusive(key: str, seconds: float = 60.0) -> Iterator[None]:
    """Keeps other processes that want `key` out meanwhile, so that one of them makes what the others read.

    Waits no longer than `seconds`, and not at all in a folder without locks: then more than one makes it.
    """
    slot = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little") % _LOCKS
    with contextlib.ExitStack() as held:
        # A lock goes with its process, however that ends.
        with contextlib.suppress(OSError, RuntimeError):
            folder().mkdir(parents=True, exist_ok=True)
            file = held.enter_context(open(folder() / f".lock-{slot}", "ab"))
            end = time.monotonic() + seconds
            while not _locked(file.fileno()) and time.monotonic() < end:
                time.sleep(0.02)
        yield


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sweep_once(parent: Path) -> None:
    """Removes files that other processes left unfinished, and the oldest entries beyond `MAX_BYTES`."""
    if parent in _swept:
        return
    _swept.add(parent)
    now, entries = time.time(), []
    for path in parent.iterdir():
        with contextlib.suppress(OSError):  # another process may sweep too
            found = path.stat()
            if path.name.startswith(_TEMPORARY) and now - found.st_mtime > _OLD_SECONDS:
                path.unlink()
            elif path.name.endswith(SUFFIX):
                entries.append((found.st_mtime, found.st_size, path))
    excess = sum(size for _, size, _ in entries) - MAX_BYTES
    for _, size, path in sorted(entries):
        if excess <= 0:
            break
        with contextlib.suppress(OSError):
            path.unlink()
        excess -= size


def _header(key: str, content: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(key.encode() + b"\n" + content).digest()


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
