"""The seeds of what tests draw: the same in every run, unless JAX_FLASH_TEST_SEED says otherwise.

Fresh ones belong to tests/fuzz.py, which draws them and prints them.
"""

import os
import zlib

BASE = int(os.environ.get("JAX_FLASH_TEST_SEED", 0))


def seed_of(name: object) -> int:
    """A seed of its own for each case or test that has another name."""
    print(f"JAX_FLASH_TEST_SEED={BASE} {name}")  # pytest shows it where the test fails
    return zlib.crc32(f"{BASE} {name}".encode())
