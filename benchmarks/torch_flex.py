"""PyTorch's flex_attention on the variants of mods.py, on one GPU, forward and backward.

    python benchmarks/torch_flex.py --jobs 12 --out flex.json
    python benchmarks/mods.py --merge flex.json --out benchmarks/results/mods_h100.json

It needs PyTorch alone, as mods.py needs JAX: run one after the other on the same GPU. Arrays are laid out as
flex_attention wants them, and block masks made, before the time counts. Gradients are of the same arrays as
in mods.py, what a function captures among them. `--jobs` processes compile first.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cases
import torch
import torch_timing
from cases import FURTHEST
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

PEER = "flex_attention"
AHEAD_SECONDS = 120.0


@dataclasses.dataclass(frozen=True)
class Case:
    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = False

    def __str__(self):
        return cases.label(*dataclasses.astuple(self))


CASES = [Case(*shape) for shape in cases.FUNCTION_SHAPES]

Function = Callable[..., torch.Tensor]


def _causal(b, h, q, k):
    return q >= k


def score_mods(case: Case, learned: torch.Tensor) -> dict[str, Function]:
    slopes, caps = learned[:, 0], 30 + learned[:, 0]

    def relative(score, b, h, q, k):
        return score + learned[h, torch.clamp(q - k, -FURTHEST, FURTHEST) + FURTHEST]

    return {
        "plain": lambda score, b, h, q, k: score,
        "soft cap": lambda score, b, h, q, k: 30 * torch.tanh(score / 30),
        "ALiBi": lambda score, b, h, q, k: score - slopes[h] * torch.abs(q - k),
        "relative bias": relative,
        "learned cap": lambda score, b, h, q, k: caps[h] * torch.tanh(score / caps[h]),
    }


def mask_mods(case: Case, device: str) -> dict[str, Function]:
    S = case.length
    side = S // 8 - 1
    starts = torch.tensor([0, 3, 4, 9, 10, 11, 13, 15], device=device) * S // 16
    ids = torch.sum(torch.arange(S, device=device)[:, None] >= starts, dim=1)
    columns, around = math.isqrt(S), 6

    def dilated(b, h, q, k):
        return (torch.abs(q - k) <= S // 8) & ((q - k) % 4 == 0)

    def near(x, y, size):
        first = torch.clamp(x - around, 0, size - 2 * around - 1)
        return (first <= y) & (y <= first + 2 * around)

    def neighborhood(b, h, q, k):
        rows = near(q // columns, k // columns, S // columns)
        return rows & near(q % columns, k % columns, columns)

    return {
        "causal mask": _causal,
        "window mask": lambda b, h, q, k: (q >= k) & (q - k <= side),
        "prefix mask": lambda b, h, q, k: (q >= k) | (k < S // 4),
        "document mask": lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]),
        "dilated mask": dilated,
        "neighborhood mask": neighborhood,
    }


def variants(case: Case) -> list[str]:
    """As mods.py: masks are for cases that aren't causal."""
    scores = ["plain", "soft cap", "ALiBi", "relative bias", "learned cap"]
    masks = [
        "causal mask",
        "window mask",
        "prefix mask",
        "document mask",
        "dilated mask",
        "neighborhood mask",
    ]
    return scores if case.causal else scores + masks


def passes(variant: str, case: Case, device: str = "cuda") -> dict[str, Callable[[], Any]]:
    """By pass, what runs it."""
    torch.manual_seed(0)
    sizes = ((case.heads, 4), (case.kv_heads, 2), (case.kv_heads, 2))
    query, key, value = (
        torch.randn(case.batch, heads, case.length, case.head_dim, device=device, dtype=torch.bfloat16)
        for heads, _ in sizes
    )
    learned = 0.1 * torch.randn(case.heads, 2 * FURTHEST + 1, device=device)
    inputs = [x.requires_grad_() for x in (query, key, value, learned)]
    score_mod = score_mods(case, learned).get(variant)
    mask_mod = _causal if case.causal else mask_mods(case, device).get(variant)
    block_mask = None
    if mask_mod is not None:
        make = torch.compile(create_block_mask) if device == "cuda" else create_block_mask
        block_mask = make(mask_mod, None, None, case.length, case.length, device=device)
    torch._dynamo.reset()  # or it compiles for any length, from the second call on
    attend = torch.compile(flex_attention, dynamic=False)

    def forward():
        return attend(
            query,
            key,
            value,
            score_mod=score_mod,
            block_mask=block_mask,
            enable_gqa=case.heads != case.kv_heads,
        )

    out = forward()
    d_out = torch.randn_like(out)
    needed = [x for x in inputs if x is not learned or variant in ("ALiBi", "relative bias", "learned cap")]

    def backward():
        return torch.autograd.grad(out, needed, d_out, retain_graph=True)

    backward()
    return {"forward": forward, "backward": backward}


def measure(variant: str, case: Case) -> list[dict]:
    row = {"case": str(case), "variant": variant, "peer": PEER}
    try:
        runs = passes(variant, case)
        return [
            row | {"pass": name, "milliseconds": torch_timing.milliseconds(run)} for name, run in runs.items()
        ]
    except Exception as error:  # the other variants are measured nevertheless
        return [row | {"error": f"{type(error).__name__}: {error}"[:300]}]
    finally:
        torch.cuda.empty_cache()


def compile_ahead(jobs: int, match: str, names: Sequence[str]) -> None:
    """Fills the cache of compiled code on disk: several variants at once, for AHEAD_SECONDS each at most."""
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # else each starts one for each core

    def run(variant: str) -> None:
        command = [sys.executable, __file__, "--compile", variant, "--match", match]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, check=False, timeout=AHEAD_SECONDS, capture_output=True, env=environment)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, names))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--match", default="", help="cases that have one of these texts, by commas")
    parser.add_argument("--variants", default="", help="variants that have one of these texts, by commas")
    parser.add_argument("--jobs", type=int, default=4, help="processes that compile; 0 for none")
    parser.add_argument("--compile", help="compile this variant alone, and measure nothing")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    chosen = {case: variants(case) for case in CASES if cases.has_one(str(case), options.match)}
    if options.compile:
        for case, names in chosen.items():
            if options.compile in names:
                passes(options.compile, case)
        return
    chosen = {
        case: [name for name in names if cases.has_one(name, options.variants)]
        for case, names in chosen.items()
    }
    if options.jobs:
        compile_ahead(options.jobs, options.match, list(dict.fromkeys(itertools.chain(*chosen.values()))))
    result = torch_timing.environment() | {"rows": []}
    for case, names in chosen.items():
        for variant in names:
            for row in measure(variant, case):
                result["rows"].append(row)
                told = row.get("milliseconds") or row["error"][:160]
                print(f"{row['case']:36} {variant:18} {row.get('pass', ''):9} {told}", flush=True)
            if options.out:  # each time, so that a run cut short leaves what it had
                options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
