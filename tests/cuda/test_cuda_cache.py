"""The disk cache, as one process and as many."""

import os
import pathlib
import subprocess
import sys
import threading
import time
import warnings

import pytest

from jax_flash.cuda import cache


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", False)
    monkeypatch.setattr(cache, "_swept", set())
    return tmp_path / "cache"


def only_entry(folder: pathlib.Path) -> pathlib.Path:
    (entry,) = folder.glob("*.kernel")
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


def test_an_entry_under_another_key_reads_as_absent(folder):
    cache.write("key", b"content")
    only_entry(folder).rename(folder / "other.kernel")
    assert cache.read("other") is None


def test_an_entry_that_everybody_may_write_reads_as_absent(folder):
    cache.write("key", b"content")
    only_entry(folder).chmod(0o666)
    assert cache.read("key") is None


def test_whose_entries_are_trusted():
    def entry(owner: int, folder_owner: int, mode: int = 0o644) -> bool:
        found = (os.stat_result((mode, 0, 0, 1, uid, 0, 0, 0, 0, 0)) for uid in (owner, folder_owner))
        return cache._is_trusted(*found)

    me, other, third = os.geteuid(), 12345, 12346
    assert entry(me, other) and entry(0, other) and entry(other, other) and entry(other, other, 0o664)
    assert not entry(third, other) and not entry(third, me) and not entry(me, me, 0o646)


def test_what_processes_left_unfinished_goes(folder):
    folder.mkdir()
    for name, age in ((".writing-old", 7200), (".writing-new", 10), ("notes.txt", 7200)):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (time.time() - age,) * 2)
    cache.write("key", b"content")
    names = {path.name for path in folder.iterdir()}
    assert names == {".writing-new", "notes.txt", "key.kernel"}


def test_the_oldest_entries_go_where_there_are_too_many(folder, monkeypatch):
    for i in range(4):
        cache.write(f"key{i}", bytes(1000))
        os.utime(folder / f"key{i}.kernel", (1000 + i,) * 2)
    monkeypatch.setattr(cache, "MAX_BYTES", 2500)
    monkeypatch.setattr(cache, "_swept", set())
    cache.write("key4", bytes(1000))
    assert [cache.read(f"key{i}") is not None for i in range(5)] == [False, False, True, True, True]


def test_a_lock_is_waited_for_and_not_for_ever(folder):
    with cache.exclusive("key"):
        began = []
        waiting = threading.Thread(target=lambda: began.append(enter("key", 60)))
        waiting.start()
        assert not began
        enter("key", 0.05)  # another holds it, and this one goes on
    waiting.join(60)
    assert began == [None]


def enter(key: str, seconds: float) -> None:
    with cache.exclusive(key, seconds):
        pass


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
