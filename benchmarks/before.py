"""Makes an earlier version of jax_flash importable beside this one, to measure both in one process.

    python benchmarks/before.py COMMIT FOLDER
    PYTHONPATH=FOLDER python benchmarks/attention.py --peers jax_flash_cuda,jax_flash_before --out FILE

The version of COMMIT is installed in FOLDER as the package `jax_flash_before`: it is the same code with every
`jax_flash` in it renamed, its custom calls too, so that nothing is shared. A build needs what `pip install .`
needs.
"""

import argparse
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

NAME = "jax_flash_before"
_TEXT = {".py", ".pyi", ".cc", ".h", ".cu", ".cuh", ".toml", ".txt", ".md"}


def rename(root: Path) -> None:
    """Renames the package of the checkout at `root`, in files and in folders."""
    for path in root.rglob("*"):
        if path.is_file() and path.suffix in _TEXT:
            path.write_text(re.sub(r"\bjax_flash(?=\b|_)", NAME, path.read_text()))
    (root / "jax_flash").rename(root / NAME)


def install(commit: str, folder: Path) -> None:
    """Installs the version of `commit` in `folder` as `NAME`."""
    repository = Path(__file__).parents[1]
    archive = subprocess.run(["git", "archive", commit], cwd=repository, capture_output=True, check=True)
    with tempfile.TemporaryDirectory() as checkout:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(checkout, filter="data")
        rename(Path(checkout))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        subprocess.run([*pip, "--target", str(folder), checkout], check=True)


def main(arguments: Sequence[str] | None = None) -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("commit", help="what git calls the earlier version")
    parser.add_argument("folder", type=Path, help="goes on PYTHONPATH")
    options = parser.parse_args(arguments)
    install(options.commit, options.folder)


if __name__ == "__main__":
    main()
