"""Sharded sequences over the devices of two processes, as of two hosts, by `jax.distributed`."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "support" / "of_two_processes.py"
CALLS = ("jit", "jit_ring", "ring", "jit_all_gather", "all_gather", "jit_ulysses", "ulysses")
SECONDS = 240


def free_port(host: str) -> int:
    """A port of this host on which a process can be reached. Raises OSError where none is."""
    with socket.socket() as listening:
        listening.bind((host, 0))
        listening.listen()
        port = listening.getsockname()[1]
        socket.create_connection((host, port), timeout=5).close()
        return port


def test_two_processes_share_a_sequence():
    try:  # collectives on CPUs find other processes by the host's name
        free_port(socket.gethostname())
    except OSError as error:
        pytest.skip(f"no process can be reached by this host's name: {error}")
    command = [sys.executable, str(PROGRAM)]
    port = str(free_port("localhost"))
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
        found = [line.partition(" ")[0] for line in text.splitlines()]
        assert [name for name in found if name in CALLS] == list(CALLS), text
