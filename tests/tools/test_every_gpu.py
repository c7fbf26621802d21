"""Commands that run side by side, one on each GPU of a machine."""

import signal
from pathlib import Path

import pytest


@pytest.fixture
def every_gpu(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import every_gpu

    return every_gpu


def test_commands_on_every_gpu(tmp_path, every_gpu):
    def part(number, count):
        script = f'echo "$CUDA_VISIBLE_DEVICES of {count}" > {tmp_path}/{number}; exit {number}'
        return ["sh", "-c", script if number < 2 else f"{script.partition(';')[0]}; exec sleep 600"]

    statuses = every_gpu.run(part, 2.0, ["1", "4", "6"])
    assert statuses == [0, 1, -signal.SIGTERM]
    assert [(tmp_path / str(n)).read_text() for n in range(3)] == ["1 of 3\n", "4 of 3\n", "6 of 3\n"]


def test_which_gpus_there_are(monkeypatch, every_gpu):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert every_gpu.gpus() == ["2", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0, 1")
    assert every_gpu.gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert every_gpu.gpus() == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(every_gpu, "_files", lambda: [Path("/dev/nvidia2"), Path("/dev/nvidia7")])
    assert every_gpu.gpus() == ["0", "1"]
