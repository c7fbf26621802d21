"""Times the CUDA decode kernel under several settings of its plan, on one GPU.

    python benchmarks/tune_decode.py --out benchmarks/results/tune_decode_h200.json
    python benchmarks/tune_decode.py --settings "as it is,no clusters" --match "b[14] s"

A setting changes constants of decode_division.py in jax_flash/cuda/sm90, the call's num_splits, or fields of
the tile (decode_tiles.py), which then has as many stages as there is room for, unless the setting names them
too. Each row has a call, a setting, and its times as decode.py takes them, in shuffled rounds; also those of
each kernel.
"""

import argparse
import contextlib
import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import decode
import decode_programs
import jax
import kernel_times
import record
import rounds
from decode_cases import LARGE, SMALL, Call

from jax_flash.cuda.sm90 import decode_division, decode_plan, decode_tiles

CALLS = (
    LARGE,
    SMALL,
    Call(1, 4096, 32, 8),
    Call(1, 8192, 32, 8),
    Call(4, 2048, 32, 8),
    Call(4, 4096, 32, 8, lengths="uniform"),
    Call(1, 131072, 32, 8),
    Call(1, 131072, 16, 2),
    Call(4, 32768, 32, 32),
    Call(64, 2048, 32, 8),
    Call(128, 512, 28, 4),
    Call(64, 8192, 32, 8, lengths="uniform"),
    Call(64, 131072, 16, 2, lengths="one long"),
    Call(8, 16384, 64, 8),
    dataclasses.replace(LARGE, queries=4),
    dataclasses.replace(LARGE, queries=8),
    dataclasses.replace(LARGE, queries=16),
    dataclasses.replace(SMALL, queries=4),
    dataclasses.replace(SMALL, queries=8),
    dataclasses.replace(LARGE, page=16),
    dataclasses.replace(LARGE, page=1),
    dataclasses.replace(LARGE, cache_dtype="float8_e4m3fn"),
)
SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "shares of 1 block": {"LEAST_SHARE": 1},
    "shares of 4 blocks": {"LEAST_SHARE": 4},
    "one CTA": {"ctas_of_sm": 1},
    "no clusters": {"CLUSTER_SIZES": ()},
    "clusters of up to 8": {"CLUSTER_SIZES": (8, 4, 2)},
    "clusters of up to 10": {"CLUSTER_SIZES": (10, 8, 4, 2)},
    "clusters of up to 12": {"CLUSTER_SIZES": (12, 8, 4, 2)},
    "clusters of up to 14": {"CLUSTER_SIZES": (14, 8, 4, 2)},
    "clusters with 32 blocks for each CTA": {"MOST_CLUSTER_BLOCKS": 32},
    "no pairs": {"MOST_PAIR_ROWS": 0},
    "no teams": {"LARGEST_TEAM": 1},
    "teams of 4": {"LARGEST_TEAM": 4},
    "teams of 32": {"LARGEST_TEAM": 32, "MOST_IDLE": 0.1},
    "tiles are whole": {"num_splits": 1},
    "short tiles are shared": {"MOST_WHOLE_BLOCKS": 1},
    "2 stages": {"stages": 2},
    "3 stages": {"stages": 3},
    "3 stages; no teams": {"stages": 3, "LARGEST_TEAM": 1},
    "boxes of 32 keys": {"box": 32},
    "boxes of 16 keys": {"box": 16},
}


@contextlib.contextmanager
def set_to(changes: dict[str, Any]) -> Iterator[None]:
    """Plans made meanwhile have these settings."""
    constants = {name: value for name, value in changes.items() if name.isupper()}
    of_call = {name: value for name, value in changes.items() if name == "num_splits"}
    with contextlib.ExitStack() as stack:
        for name, value in constants.items():
            stack.enter_context(mock.patch.object(decode_division, name, value))
        if of_call:
            stack.enter_context(mock.patch.object(decode_plan, "plan_decode", _planned_with(of_call)))
        if fields := {x: value for x, value in changes.items() if x not in constants | of_call}:
            stack.enter_context(mock.patch.object(decode_plan, "choose_tile", _with(fields)))
        yield


def _planned_with(changes: dict[str, int]):
    original = decode_plan.plan_decode

    def plan(spec, shapes, device):
        return original(dataclasses.replace(spec, **changes), shapes, device)

    return plan


def _with(fields: dict[str, int]):
    def choose(shapes):
        fitted = dataclasses.replace(decode_tiles.choose_tile(shapes), **fields).fitted()
        assert fitted is not None, f"no stage fits into shared memory with {fields}"
        return dataclasses.replace(fitted, **fields)

    return choose


def measure(call: Call, settings: Sequence[str], of_rounds: int) -> list[dict]:
    inputs = decode_programs.Arrays(call).inputs(call)
    attend = decode_programs.attend(call, "jax_flash_cuda")

    def prepare(setting: str):
        jax.clear_caches()  # of what was traced under another setting
        with set_to(SETTINGS[setting]):
            compiled = jax.jit(attend).lower(*inputs).compile()
        return compiled, compiled(*inputs)

    def figures(compiled) -> dict[str, float]:
        of_kernels = {f"{name}_us": 1e3 * time for name, time in kernel_times.kernels(compiled, inputs)}
        return decode.figures((compiled,), inputs) | of_kernels

    found = rounds.measure(list(settings), prepare, figures, of_rounds)
    return [
        {"case": name_of(call), "setting": setting, "bytes": call.bytes_read, **found[setting]}
        for setting in settings
    ]


def name_of(call: Call) -> str:
    return call.label if call.page is None else f"{call.label} pages of {call.page}"


def main(arguments: Sequence[str] | None = None) -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--rounds", type=int, default=rounds.ROUNDS)
    parser.add_argument("--settings", default=",".join(SETTINGS), help="by default all: %(default)s")
    parser.add_argument("--match", default="", help="calls whose names this regular expression finds")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    settings = options.settings.split(",")
    if unknown := set(settings) - set(SETTINGS):
        parser.error(f"--settings: {', '.join(sorted(unknown))}; may be {', '.join(SETTINGS)}")
    result = record.environment() | {"rows": []}
    print(record.heading(result))
    for call in (call for call in CALLS if re.search(options.match, name_of(call))):
        rows = measure(call, settings, options.rounds)
        result["rows"] += rows
        nan = float("nan")
        cells = [
            f"{row['setting']} {row.get('kernel_us', nan):.1f} (step {row.get('step_us', nan):.1f})"
            for row in rows
        ]
        print(f"{name_of(call)}: {'; '.join(cells)}", flush=True)
        for row in rows:
            if "error" in row:
                print(f"  {row['setting']}: {row['error'][:200]}", flush=True)
        if options.out:
            record.write(result, options.out)


if __name__ == "__main__":
    main()
