"""Calls small enough to run under compute-sanitizer, that together have every option of the CUDA kernels.

    compute-sanitizer --tool racecheck python tests/gpu/sanitize.py dropout deterministic     some groups
    python tests/gpu/sanitize.py --implementation xla                         all, to try the calls themselves

Each runs forward and backward. `test_sanitizer.py` starts a process for each tool and group, several at
once, and reads the verdicts.

`--every-lane-arrives` is for racecheck. A warp gives shared memory back by the arrival of one lane, when all
have read; the tool doesn't see that order, and calls what the other lanes read a race. So kernels are
compiled in which each lane arrives (cuda/kernels/common/warp_arrival.cuh).
"""

import argparse
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = (
        "false"  # before JAX starts: processes share the GPU's memory
    )
    sys.path.append(str(Path(__file__).parents[1] / "support"))

import jax
import numpy as np
from attention_case import Case, draw
from implementation_suite import Implementation

from jax_flash.cuda import compile

HEAD_DIMS = (64, 128, 192, 256)
SCORES = ("bias", "mask", "logits_soft_cap", "alibi_slopes", "sinks")


def case(H: int = 128, *features: str, **fields) -> Case:
    """Of lengths that end inside a tile; on both sides there are more tiles than one."""
    dtype = "float16" if H in (64, 192) else "bfloat16"
    sizes = {"B": 1, "T": 200, "S": 300, "N": 2, "K": 2}
    return Case("sanitizer", dtype, **{"H": H, "features": features, **sizes, **fields})


GROUPS = {
    "plain": (
        *(case(H, is_causal=H != 192, K=1) for H in HEAD_DIMS),
        case(T=300, local_window_size=(70, 20)),
        case(64, T=300, S=200, local_window_size=(90, None)),
        case(256, local_window_size=(None, 30), scale=-0.1),
        case(192, V=128, is_causal=True),
        case(64, V=128, K=1),
        case(100, V=36),  # padded around the kernels
        case(T=10, N=8, is_causal=True),  # heads share a tile
        case(residual="absent"),
    ),
    "scores": (
        *(case(H, *SCORES, is_causal=True) for H in HEAD_DIMS),
        case(64, "bias:1N1S"),
        case(128, "bias:B1T1", B=2),
        case(192, "mask:B11S", B=2),
        case(256, "logits_soft_cap"),
        case(128, "sinks", local_window_size=(50, 0)),
        case(64, "alibi_slopes:BN", B=2),
    ),
    "data": (
        *(case(H, "seq_lengths", B=3, is_causal=H != 64) for H in HEAD_DIMS),
        *(case(H, "segment_ids", B=2, is_causal=H != 128) for H in HEAD_DIMS),
        *(case(H, "packed", T=300, is_causal=H != 256) for H in HEAD_DIMS),
        case(128, "packed", "alibi_slopes", "logits_soft_cap", T=300, local_window_size=(60, 0)),
        case(64, "seq_lengths:key_value", T=10, N=8, B=2),
    ),
    "dropout": (
        *(case(H, "dropout", is_causal=H != 192, K=1) for H in HEAD_DIMS),
        case(128, "dropout", *SCORES),
        case(64, "dropout", "seq_lengths", B=2),
        case(256, "dropout", "packed", is_causal=True),
        case(128, "dropout", "segment_ids", S=301),
    ),
    "deterministic": (
        *(case(H, "deterministic", T=300, is_causal=H != 64) for H in HEAD_DIMS),
        case(128, "deterministic", "bias:1N1S", "sinks", B=2),
        case(192, "deterministic", "bias:11TS", "logits_soft_cap", "alibi_slopes"),
        case(64, "deterministic", "segment_ids", "dropout"),
        case(256, "deterministic", "seq_lengths", B=2, is_causal=True),
        case(128, "deterministic", "packed", T=300, is_causal=True),
    ),
    "split-KV": (
        *(case(H, V=128 if H == 192 else None, S=3000) for H in (64, 128, 192)),
        case(128, "dropout", S=3000),
        case(128, T=3, S=3000, N=8),
    ),
}


def run(case: Case, implementation: str = "cuda"):
    """Raises where the call fails, or its results aren't finite."""
    runner = Implementation()
    runner.implementation = implementation
    arguments, _, _, d_out, d_lse = draw(case)
    out, lse, gradients = runner.program(arguments, d_out, d_lse if case.residual == "used" else None)()
    lse = None if lse is None else np.where(np.isneginf(lse), 0, lse)  # of rows that see nothing
    for x in jax.tree.leaves((out, lse, gradients)):
        if not np.all(np.isfinite(x.astype(np.float32))):
            raise RuntimeError(f"results of {case} are not finite")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("groups", nargs="*", default=list(GROUPS), help=", ".join(GROUPS))
    parser.add_argument("--implementation", default="cuda")
    parser.add_argument("--every-lane-arrives", action="store_true", help="of a warp, for racecheck")
    options = parser.parse_args(arguments)
    if options.every_lane_arrives:
        compile.OPTIONS = (*compile.OPTIONS, "-DEVERY_LANE_ARRIVES=1")
    for group in options.groups:
        for case in GROUPS[group]:
            print(case, flush=True)
            run(case, options.implementation)
        print(group, "done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
