"""Lines that no formatter checks: those of CUDA, C++ and prose have at most so many columns."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CUDA_COLUMNS = 120  # as .clang-format has it
PROSE_COLUMNS = 130


def files(*patterns):
    """Those that git knows, or, in a copy without its history, all that are there."""
    found = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True)
    if found.returncode == 0:
        return [ROOT / name for name in found.stdout.split()]
    folders = [ROOT / name for name in ("cuda", "tests", "docs")]
    return [path for folder in folders for pattern in patterns for path in folder.rglob(pattern)]


def too_long(path, columns, is_exempt=lambda line: False):
    lines = enumerate(path.read_text().splitlines(), 1)
    return [f"{path}:{number}" for number, line in lines if len(line) > columns and not is_exempt(line)]


def test_cuda():
    found = files("*.cu", "*.cuh", "*.h", "*.cc")
    assert len(found) > 100
    assert [place for path in found for place in too_long(path, CUDA_COLUMNS)] == []


def test_prose():
    """A table's row and a heading can't be wrapped."""
    found = files("*.md")
    assert len(found) > 10
    exempt = ("|", "#")
    places = [
        place for path in found for place in too_long(path, PROSE_COLUMNS, lambda x: x.startswith(exempt))
    ]
    assert places == []


@pytest.mark.parametrize("line", ("x" * 121, "// " + "ä" * 118))
def test_a_long_line_is_found(tmp_path, line):
    path = tmp_path / "kernel.cu"
    path.write_text(f"{'x' * 120}\n{line}\n")
    assert too_long(path, CUDA_COLUMNS) == [f"{path}:2"]
