"""Bytes to train on: a file, a folder, or the Python standard library's own source."""

import dataclasses
import hashlib
import pathlib
import sysconfig

import numpy as np

HELD_OUT = 0.05
"""The share of the text, at its end, that is used for validation only."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """`train` and `validation`: uint8 arrays of one dimension."""

    train: np.ndarray
    validation: np.ndarray
    source: str


def load(text: str | None) -> Corpus:
    """Read `text`: a file, a folder, or None for the standard library.

    From a folder and its subfolders, every file without a NUL byte is read. The order of the files depends
    only on their names and mixes the subfolders, so that the end of the text, which is held out, resembles
    the rest.
    """
    if text is None:
        root = pathlib.Path(sysconfig.get_paths()["stdlib"])
        paths = [
            path for path in root.rglob("*.py") if not {"site-packages", "dist-packages"} & set(path.parts)
        ]
        source = f"the source of Python's standard library ({root})"
    else:
        root = pathlib.Path(text)
        if not root.exists():
            raise ValueError(f"--text must be a file or a folder, got {text!r}, which is neither")
        paths = list(root.rglob("*")) if root.is_dir() else [root]
        source = str(root)

    def mixed_order(path: pathlib.Path) -> bytes:
        return hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()

    contents = [path.read_bytes() for path in sorted(paths, key=mixed_order) if path.is_file()]
    joined = b"\n".join(content for content in contents if b"\0" not in content)
    data = np.frombuffer(joined, np.uint8)
    held_out = int(len(data) * HELD_OUT)
    return Corpus(data[: len(data) - held_out], data[len(data) - held_out :], source)


def batch(data: np.ndarray, seed: int, step: int, batch_size: int, sequence_length: int) -> np.ndarray:
    """Random windows of `data`: uint8 `(batch_size, sequence_length + 1)`, inputs and targets.

    A pure function of its arguments, so that a resumed run sees the same batches as one without a break.
    """
    if len(data) <= sequence_length:
        raise ValueError(
            f"the text is too short for --sequence-length={sequence_length}: training and held-out part "
            f"each need more than {sequence_length} bytes, this one has {len(data)}"
        )
    starts = np.random.default_rng([seed, step]).integers(len(data) - sequence_length, size=batch_size)
    return data[starts[:, None] + np.arange(sequence_length + 1)]
