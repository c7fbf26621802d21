"""The command `python -m jax_flash.precompile`, which `_precompile.py` implements."""

import sys

from jax_flash import _precompile

if __name__ == "__main__":
    _precompile.main()
else:
    # What is imported here becomes `jax_flash.precompile`, which is to stay the function.
    sys.modules[__name__] = _precompile.precompile  # type: ignore[assignment]
