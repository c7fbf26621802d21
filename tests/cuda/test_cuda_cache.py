"""The disk cache, as one process and as many."""

import os
import pathlib
import subprocess
import sys
import warnings

import pytest

from jax_flash.cuda import cache


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", False)
    return tmp_path / "cache"


def only_entry(folder: pathlib.Path) -> pathlib.Path:
    (entry,) = folder.iterdir()
    return entry


def test_round_trip(folder):
    assert cache.read("key") is None
    cache.write("key", b"content")
    cache.write("other", b"")
    assert cache.read("key") == b"content"
    assert cache.read("other") == b""


def test_other_users_may_read_what_the_umask_lets_them(folder):
    """As where an image is built by one user and run by another."""
    before = os.umask(0o022)
    try:
        cache.write("key", b"content")
    finally:
        os.umask(before)
    assert only_entry(folder).stat().st_mode & 0o777 == 0o644


def test_usage(folder):
    assert cache.usage() == (0, 0)
    cache.write("key", b"content")
    assert cache.usage() == (1, only_entry(folder).stat().st_size)


def test_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", "~/kernels")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "kernels"
    monkeypatch.delenv("JAX_FLASH_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.folder() == pathlib.Path("/somewhere/jax_flash")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.folder() == tmp_path / ".cache" / "jax_flash"


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: b"",
        lambda entry: entry[:20],
        lambda entry: entry[:-1],
        lambda entry: entry[:-1] + b"?",
        lambda entry: entry + b"?",
        lambda entry: b"?" + entry[1:],
    ],
    ids=["empty", "header cut", "content cut", "content changed", "longer", "another format"],
)
def test_damaged_entries_read_as_absent_and_are_replaced(folder, damage):
    cache.write("key", b"content")
    path = only_entry(folder)
    path.write_bytes(damage(path.read_bytes()))
    assert cache.read("key") is None
    cache.write("key", b"content")
    assert cache.read("key") == b"content"


def test_a_folder_that_cannot_be_written_warns_once(folder):
    folder.write_text("a file where the folder should be")  # refused for root too, unlike permissions
    with pytest.warns(RuntimeWarning, match="JAX_FLASH_CACHE_DIR names another folder"):
        cache.write("key", b"content")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.write("key", b"content")
    assert cache.read("key") is None
    assert cache.usage() == (0, 0)


def test_a_full_disk_warns_and_leaves_nothing_behind(folder, monkeypatch):
    def no_space(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "replace", no_space)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        cache.write("key", b"content")
    assert list(folder.iterdir()) == []


def test_processes_that_write_the_same_key_at_once(folder):
    program = """if True:
        import sys
        from jax_flash.cuda import cache
        content = bytes(100_000)
        for _ in range(100):
            cache.write("key", content)
            assert cache.read("key") == content
    """
    writers = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(2)]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert cache.read("key") == bytes(100_000)
    assert cache.usage()[0] == 1
