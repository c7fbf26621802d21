"""The commit that figures are of."""

import os
import subprocess
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]


def measured_commit(checkout: Path = CHECKOUT) -> str:
    """The hash of the commit that is checked out, with "-dirty" behind it where files differ from it.

    Where the files are a copy without a repository, what JAX_FLASH_COMMIT says, or "unknown".
    """
    if (checkout / ".git").exists():
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        try:
            run = subprocess.run(
                command, cwd=checkout, capture_output=True, text=True, timeout=30, check=True
            )
            return run.stdout.strip()
        except (OSError, subprocess.SubprocessError):
            pass
    return os.environ.get("JAX_FLASH_COMMIT", "unknown")
