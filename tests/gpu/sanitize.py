"""Calls small enough to run under compute-sanitizer, that together have every option of the CUDA kernels.

    compute-sanitizer --tool racecheck python tests/gpu/sanitize.py dropout deterministic     some groups
    python tests/gpu/sanitize.py --implementation xla                         all, to try the calls themselves

Each runs forward and backward; those on key-value caches have no backward pass. `test_sanitizer.py` starts a
process for each tool and group, several at once, and reads the verdicts.

`--for-racecheck` compiles kernels whose order that tool can follow (cuda/kernels/common/warp_arrival.cuh).
"""

import argparse
import contextlib
import dataclasses
import faulthandler
import functools
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

if __name__ == "__main__":
    faulthandler.enable()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = (
        "false"  # before JAX starts: processes share the GPU's memory
    )
    sys.path.append(str(Path(__file__).parents[1] / "support"))

import emulated_case
import jax
import numpy as np
from attention_case import Case, draw
from cache_case import CacheCase, Draw, as_jax
from implementation_suite import Implementation

from jax_flash import _device
from jax_flash.cuda import compile
from jax_flash.cuda.sm90 import decode_division
from jax_flash.transforms import autodiff, decoding
from jax_flash.transforms.lowering import PlannedCall

HEAD_DIMS = (64, 128, 192, 256)
SCORES = ("bias", "mask", "logits_soft_cap", "alibi_slopes", "sinks")


def case(H: int = 128, *features: str, **fields) -> Case:
    """Of lengths that end inside a tile; on both sides there are more tiles than one."""
    dtype = "float16" if H in (64, 192) else "bfloat16"
    sizes = {"B": 1, "T": 200, "S": 300, "N": 2, "K": 2}
    return Case("sanitizer", dtype, **{"H": H, "features": features, **sizes, **fields})


NOT_FINITE = "not finite"
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
    "score functions": (
        *(case(H, "score_mod", is_causal=H != 192, K=1) for H in HEAD_DIMS),
        case(128, "score_mod", *SCORES, "dropout", B=2),
        case(64, "score_mod", "seq_lengths", B=2),
        case(256, "score_mod", "segment_ids", local_window_size=(70, 0)),
        case(192, "score_mod", "deterministic"),
        case(128, "score_mod", "packed", T=300, is_causal=True),
    ),
    "block masks": (
        *(case(H, "block_mask", K=1) for H in HEAD_DIMS),
        case(128, "block_mask", "seq_lengths", "logits_soft_cap", B=2, is_causal=True),
        case(192, "block_mask", "deterministic"),
        case(64, "block_mask", "score_mod", "dropout", local_window_size=(90, 0)),
    ),
    "data": (
        *(case(H, "seq_lengths", B=3, is_causal=H != 64) for H in HEAD_DIMS),
        *(case(H, "segment_ids", B=2, is_causal=H != 128) for H in HEAD_DIMS),
        case(64, "seq_lengths:key_value", T=10, N=8, B=2),
    ),
    "packed": (
        *(case(H, "packed", T=300, is_causal=H != 256) for H in HEAD_DIMS),
        case(128, "packed", "alibi_slopes", "logits_soft_cap", T=300, local_window_size=(60, 0)),
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
    # A query, a key and its value are NaN, so that tiles are repeated and blocks cleaned.
    NOT_FINITE: (
        *(case(H, is_causal=H != 192, local_window_size=None if H != 192 else (50, 0)) for H in HEAD_DIMS),
        case(192, V=128, is_causal=True, K=1),
        case(64, "mask", "bias", "logits_soft_cap", is_causal=True),
        case(128, "packed", "dropout", T=300, is_causal=True),
        case(256, "seq_lengths", B=2),
        case(128, "segment_ids", "deterministic", B=2),
        case(128, is_causal=True, S=3000),
    ),
}

FP8_GROUPS = {
    "8 bits": (
        *(case(H, is_causal=H != 192, K=1) for H in HEAD_DIMS),
        case(192, V=128, T=300, local_window_size=(70, 20)),
        case(96, T=10, N=8, is_causal=True),  # heads share a tile
        case(128, *SCORES, is_causal=True),
        case(64, "score_mod", "block_mask"),
        case(128, "seq_lengths", B=2, is_causal=True),
        case(64, "segment_ids", B=2),
        case(128, "packed", T=300, is_causal=True),
        case(128, S=3000),
        case(128, "dropout", is_causal=True),
    ),
}
"""Calls with `quantization="fp8"`."""

PARTS = {
    "parts of sequences": (
        *(
            emulated_case.Case(
                H=H,
                T=200,
                S=300,
                N=4,
                K=2,
                B=2,
                right=0,
                diagonal=(-250, 60),
                wide="all" if H != 256 else None,
            )
            for H in HEAD_DIMS
        ),
        emulated_case.Case(H=128, T=300, S=200, B=2, left=150, right=0, diagonal=(250, 40), alibi="1N"),
        emulated_case.Case(
            H=64, T=200, S=200, B=3, right=0, lengths="qk", diagonal=(-60, 30, 90), wide="all"
        ),
        emulated_case.Case(H=128, T=130, S=200, segments="mixed", left=40, diagonal=(30,), dropout=0.1),
        emulated_case.Case(H=128, T=260, S=520, N=4, K=2, right=0, diagonal=((-130, 130),), wide="shared"),
    ),
}
"""Calls as the steps of a ring make them, whose diagonal is an operand, and whose results are float32."""

CLUSTERS = "decoding clusters"
FUNCTIONS, FUNCTIONS_OF_PROMPTS = "score functions on caches", "score functions on chunks of prompts"
CACHE_GROUPS = {
    "decoding": (
        CacheCase(U=1, rotary=64),
        CacheCase(T=5, U=2, right=0, left=40, soft_cap=2.0, rotary=32, rotary_interleaved=True, S=300),
        CacheCase(S=900, B=2, N=8, K=1, H=128, U=1, full=True),  # several CTAs share tiles
        CacheCase(S=2000, B=2, N=10, K=1, T=3, full=True),  # in pairs, 30 rows
        CacheCase(S=900, B=2, N=2, K=1, H=256, num_splits=2, sinks=True),
        CacheCase(S=900, B=2, N=2, K=1, V=256, num_splits=1, dtype="float16"),
        CacheCase(T=4, U=2, H=40, V=24, layers=2, alibi="BN", left_padding=True, batch_index=True),
    ),
    "decoding pages": (
        CacheCase(page=16, U=1, rotary=64, S=640, H=128),
        CacheCase(page=3, U=2, T=3, right=0, S=300),
        CacheCase(page=256, U=1, S=1024, H=128, alibi="1N"),
        CacheCase(page=24, S=480, H=192, layers=2, left=50, dtype="float16"),
        CacheCase(page=16, T=40, packed=True, interleaved=True, right=0, B=4, S=320, soft_cap=3.0),
        CacheCase(page=5, T=20, packed=True, interleaved=True, right=0, B=4, S=130, N=2, K=1),
    ),
    "decoding 8 bits": (
        CacheCase(U=1, rotary=64, float8=True, descales=True),
        CacheCase(S=900, B=2, N=8, K=1, H=128, U=1, full=True, float8=True, descales=True),
        CacheCase(T=4, U=2, H=80, V=32, layers=2, soft_cap=3.0, left_padding=True, float8=True),
        CacheCase(page=16, U=1, S=640, H=256, float8=True, descales=True, dtype="float16"),
        CacheCase(page=3, U=2, T=3, right=0, S=300, alibi="BN", float8=True, descales=True),
        CacheCase(page=16, T=40, packed=True, interleaved=True, right=0, B=4, S=320, float8=True),
    ),
    CLUSTERS: (
        CacheCase(S=1000, B=2, full=True, H=128, sinks=True),
        CacheCase(S=2100, B=2, full=True, H=128, U=1, rotary=128),  # of 16 CTAs
        CacheCase(S=900, N=8, K=1, H=256, T=9, U=2, rotary=32, left=200, right=0, soft_cap=2.0),
        CacheCase(S=600, page=3, T=5, right=0, B=2, V=32, float8=True, descales=True),
    ),
    "chunks of prompts": (
        CacheCase(B=17, S=200, N=8, K=1, H=128, T=70, U=70, right=0, rotary=128),
        CacheCase(B=20, S=200, N=4, K=2, H=64, T=128, U=20, right=0, left=60, left_padding=True, alibi="BN"),
        CacheCase(B=20, S=200, N=4, K=2, H=256, T=128, U=128, right=0, left=60, layers=2, sinks=True),
        CacheCase(B=17, S=208, N=8, K=1, H=128, T=70, U=70, right=0, page=16),
        CacheCase(B=20, S=256, N=4, K=2, H=64, T=128, right=0, left=60, left_padding=True, page=64),
        CacheCase(B=6, S=256, N=16, K=2, H=64, T=1200, right=0, page=16, packed=True, interleaved=True),
    ),
    FUNCTIONS: (
        CacheCase(score_mod=True, U=1, rotary=64),
        CacheCase(score_mod=True, T=9, S=300, H=192, left=40, left_padding=True, dtype="float16", page=24),
        CacheCase(score_mod=True, T=40, S=320, B=4, page=16, packed=True, interleaved=True, right=0),
        CacheCase(score_mod=True, U=1, S=640, H=128, float8=True, descales=True, page=16),
    ),
    FUNCTIONS_OF_PROMPTS: (
        CacheCase(score_mod=True, B=20, N=8, T=70, U=70, S=300, H=128, right=0, layers=2, soft_cap=3.0),
        CacheCase(score_mod=True, B=17, T=130, U=20, S=200, N=8, K=1, H=256, right=0, sinks=True),
    ),
}
"""Calls on key-value caches: every way to load keys, every way to append, one split and several; and those of
many queries, which the forward kernel runs. Kernels for 8 bits, and clusters, run though they may be off."""

ALL_GROUPS = (*GROUPS, *FP8_GROUPS, *PARTS, *CACHE_GROUPS)


def both_passes_of_part(case: emulated_case.Case, implementation: str):
    """A jitted function of `draw`'s arrays: `(out, lse), gradients`, as a ring's step has them."""
    spec = emulated_case.draw(case)[0]
    call = PlannedCall(spec, (implementation,), _device.current())

    @jax.jit
    def both_passes(operands, d_out, d_lse):
        out, lse = autodiff.jax_flash_forward(call, operands)
        # Backward, out and its cotangent have the dtype of the query, whatever dtype results have.
        narrow = out.astype(operands.query.dtype)
        return (out, lse), autodiff.jax_flash_backward(call, operands, narrow, lse, d_out, d_lse)

    return both_passes


def run_part(case: emulated_case.Case, implementation: str = "cuda"):
    """Raises where the call fails, or its results aren't finite."""
    case = dataclasses.replace(case, return_residual=True)
    _, operands, d_out, d_lse, _ = emulated_case.draw(case)
    (out, lse), gradients = both_passes_of_part(case, implementation)(operands, d_out, d_lse)
    lse = np.asarray(lse)
    lse = np.where(np.isneginf(lse), 0, lse)  # of rows that see nothing
    for x in (out, lse, *gradients.present().values()):
        if not np.all(np.isfinite(np.asarray(x, np.float32))):
            raise RuntimeError(f"results of {case} are not finite")


def sharing_tiles(group: str) -> contextlib.AbstractContextManager:
    """Where CTAs share tiles as the group is there for: in clusters, or through global memory."""
    sizes = decode_division.CLUSTER_SIZES if group == CLUSTERS else ()
    return mock.patch.multiple(decode_division, CLUSTER_SIZES=sizes, MOST_WHOLE_BLOCKS=1)


def run_on_cache(case: CacheCase, implementation: str = "cuda"):
    """Raises where the call fails, or its output isn't finite. Unused rows of the cache are NaN."""
    attend = functools.partial(decoding.attend, case.spec, (implementation,))
    out, *_ = jax.jit(attend)(as_jax(Draw(case).operands))
    if not np.all(np.isfinite(np.asarray(out, np.float32))):
        raise RuntimeError(f"the output of {case} is not finite")


class In8Bits(Implementation):
    def attend(self, arguments, **options):
        return super().attend(arguments, **options, quantization="fp8")


def run(case: Case, implementation: str = "cuda", spoils: bool = False, kind: type = Implementation):
    """Raises where the call fails, or its results aren't finite though its inputs are."""
    runner = kind()
    runner.implementation = implementation
    arguments, _, _, d_out, d_lse = draw(case)
    for name in ("query", "key", "value") if spoils else ():
        arguments[name] = arguments[name].copy()
        arguments[name][:, arguments[name].shape[1] // 2] = np.nan
    out, lse, gradients = runner.program(arguments, d_out, d_lse if case.residual == "used" else None)()
    lse = None if lse is None else np.where(np.isneginf(lse), 0, lse)  # of rows that see nothing
    for x in jax.tree.leaves((out, lse, gradients)):
        if not (spoils or np.all(np.isfinite(x.astype(np.float32)))):
            raise RuntimeError(f"results of {case} are not finite")


def parse(arguments: list[str], description: str | None, groups: Iterable[str]) -> argparse.Namespace:
    """Which groups run, and by which implementation. With --for-racecheck kernels are compiled for that."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("groups", nargs="*", default=list(groups), help=", ".join(groups))
    parser.add_argument("--implementation", default="cuda")
    parser.add_argument("--for-racecheck", action="store_true", help="kernels whose order it can follow")
    options = parser.parse_args(arguments)
    if options.for_racecheck:
        compile.OPTIONS = (*compile.OPTIONS, "-DFOR_RACECHECK=1")
    return options


def main(arguments: list[str]) -> None:
    options = parse(arguments, __doc__, ALL_GROUPS)
    for group in options.groups:
        for case in GROUPS.get(group, ()):
            print(case, flush=True)
            run(case, options.implementation, spoils=group == NOT_FINITE)
        for case in FP8_GROUPS.get(group, ()):
            print(case, flush=True)
            run(case, options.implementation, kind=In8Bits)
        for case in PARTS.get(group, ()):
            print(case, flush=True)
            run_part(case, options.implementation)
        for case in CACHE_GROUPS.get(group, ()):
            print(case, flush=True)
            with sharing_tiles(group):
                run_on_cache(case, options.implementation)
        print(group, "done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
