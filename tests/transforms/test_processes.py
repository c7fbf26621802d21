"""Sharded sequences over the devices of two processes, as of two hosts, by `jax.distributed`."""

import socket
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "support" / "of_two_processes.py"
SECONDS = 240


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return listening.getsockname()[1]


def test_two_processes_share_a_sequence():
    command = [sys.executable, str(PROGRAM)]
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [*command, str(i), "2", port], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for i in range(2)
    ]
    try:
        said = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, text in zip(processes, said, strict=True):
        assert process.returncode == 0, text
        assert [line.split()[0] for line in text.splitlines()[-4:]] == [
            "jit",
            "ring",
            "all_gather",
            "ulysses",
        ]
