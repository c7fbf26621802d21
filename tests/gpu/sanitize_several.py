"""Sharded sequences small enough to run under compute-sanitizer, on two GPUs, by the CUDA kernels.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize_several.py
    python tests/gpu/sanitize_several.py --implementation xla      to try the calls themselves

Each strategy and order of tokens runs forward and backward, with options of each kind. `test_several_gpus.py`
reads the verdicts. `--for-racecheck` is as in `sanitize.py`.
"""

import faulthandler
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    faulthandler.enable()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # before JAX starts: processes share the GPUs
    sys.path.append(str(Path(__file__).parents[1] / "support"))

import sanitize
from attention_case import Case
from sharded_calls import ShardedCalls

LAYOUTS = {
    "ring": (("ring", None), ("ring", "zigzag"), ("ring", "striped")),
    "all-gather": (("all_gather", None), ("all_gather", "zigzag")),
    "Ulysses": (("ulysses", "zigzag"),),
}
OPTIONS = (
    dict(is_causal=True),
    dict(is_causal=True, features=("seq_lengths",)),
    dict(is_causal=True, local_window_size=(30, 0)),
    dict(features=("segment_ids", "sinks")),
    dict(features=("dropout", "bias:N1S")),
)


def run(name: str, implementation: str) -> None:
    """Runs a group of layouts, and compares each call with the definition."""
    for layout in LAYOUTS[name]:
        for options in OPTIONS:
            if layout == ("ring", "striped") and "local_window_size" in options:
                continue  # a ring of stripes has no window
            case = Case("sharded", "bfloat16", B=1, T=256, S=256, N=4, K=2, H=128, **options)
            print(layout, case, flush=True)
            ShardedCalls(2, *layout, options={"implementation": implementation}).check(case)
    print(name, "done", flush=True)


def main(arguments: list[str]) -> None:
    options = sanitize.parse(arguments, __doc__, LAYOUTS)
    for group in options.groups:
        run(group, options.implementation)


if __name__ == "__main__":
    main(sys.argv[1:])
