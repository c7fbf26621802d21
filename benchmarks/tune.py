"""Searches the forward kernel's tiles on the GPU at hand: makes the table of cuda/sm90/forward_tiles.py anew.

    python benchmarks/tune.py --out benchmarks/results/tune_forward_h200.json
    python benchmarks/tune.py --head-dim 128 --mask windowed --budget-seconds 60

From the first choice that the table has for a head dim and mask, one field is varied at a time, and the
fastest is kept where it gains more than 0.5% over all cases, until no field's choices do. For a choice that
does not fit in shared memory or registers, ping-pong is given up, then query tiles, blocks in flight, keys.
Tiles whose kernel spills, or that the compiler warns of, or whose output is another one, are refused. All
choices of the table are timed in every comparison, beside the best one. Prints what was timed, fastest
first, and the table's row to paste: as it was where the best tile is in it, else with that tile alone.

A row may have further choices, for lengths that their tiles divide better. Their `cost` is read off what is
printed: the first choice's rate over theirs at length 16384, where padding is about 1% at most.
"""

import argparse
import contextlib
import dataclasses
import itertools
import logging
import os
import re
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import jax
import record
import timing
from calls import Case
from rounds import check_agreement

from jax_flash import cuda
from jax_flash._device import Device, current
from jax_flash._mask import Window
from jax_flash._spec import Operands
from jax_flash.cuda.compile import CompileError, compile_kernel
from jax_flash.cuda.launch_plan import Launch
from jax_flash.cuda.sm90 import forward_plan, forward_tiles, tensor_maps
from jax_flash.cuda.sm90.forward_tiles import ForwardTile, TileOption, TileRequirements

MASKS = {"full": Window(None, None), "windowed": Window(None, 0)}
HEAD_DIMS = tuple(forward_tiles.TILES)
GAIN = 0.005  # under which two times count as equal

# Values of the fields of ForwardTile that are not bool; those of bool fields go without saying.
CHOICES: dict[str, tuple[int, ...]] = {
    "consumers": (1, 2, 3),
    "keys": tuple(range(48, 257, 16)),
    "stages": (2, 3, 4),
    "query_stages": (1, 2),
    "early_pv_steps": tuple(range(1, 17)),  # those that a tile's keys allow: see `possible`
    "sum_blocks": (0,),  # for 8 bits alone
}
# What is given up for another field's choice that can't run beside it, the last one first.
GIVEN_UP = ("keys", "stages", "query_stages", "pingpong")

REGISTERS = 65536  # of a multiprocessor
PRODUCER_REGISTERS = 24  # a thread's, at least

Space = Mapping[str, tuple]
Times = dict[ForwardTile, list[float]]  # milliseconds of each case


class RefusedError(Exception):
    """A tile that can't be timed. The message says why."""


# ------------------------------------------------------------------------------------------ the search


def space(tile_class: type = ForwardTile) -> Space:
    """The choices for each field. Raises TypeError where a field has none."""
    choices: dict[str, tuple] = {}
    for field in dataclasses.fields(tile_class):
        if field.type in (bool, "bool"):
            choices[field.name] = (False, True)
        elif field.name in CHOICES:
            choices[field.name] = CHOICES[field.name]
        else:
            raise TypeError(f"CHOICES has no values for {tile_class.__name__}.{field.name}")
    return choices


def possible(tile: ForwardTile) -> bool:
    """Whether PV has as many steps as `tile` issues before the row maxima."""
    return tile.early_pv_steps <= tile.keys // 16


def replace(tile: ForwardTile, **changes) -> ForwardTile:
    """`tile` with `changes`. Without `early_pv_steps` among these, as many steps of PV follow the maxima.

    Their number, not the one before the maxima, is what the exponentials have beside them; one step goes
    before the maxima whatever the keys.
    """
    if "early_pv_steps" not in changes:
        behind = tile.keys // 16 - tile.early_pv_steps
        changes["early_pv_steps"] = max(1, changes.get("keys", tile.keys) // 16 - behind)
    return dataclasses.replace(tile, **changes)


def moves(tile: ForwardTile, field: str, choices: Space) -> Iterator[list[ForwardTile]]:
    """For each other choice of `field`: the tile with it, then tiles that give up ever more for it."""
    given_up = [name for name in GIVEN_UP if name != field]
    smaller = [
        [value for value in sorted(choices[name], reverse=True) if value <= getattr(tile, name)]
        for name in given_up
    ]
    for choice in choices[field]:
        if choice != getattr(tile, field):
            changed = (
                replace(tile, **{field: choice}, **dict(zip(given_up, values, strict=True)))
                for values in itertools.product(*smaller)
            )
            yield list(filter(possible, changed))


def every(choices: Space) -> list[ForwardTile]:
    tiles = (ForwardTile(*values) for values in itertools.product(*choices.values()))
    return list(filter(possible, tiles))


def search(
    start: Sequence[ForwardTile],
    choices: Space,
    admit: Callable[[Sequence[Sequence[ForwardTile]]], list[ForwardTile]],
    measure: Callable[[ForwardTile], list[float]],
    deadline: float,
) -> tuple[ForwardTile, Times, bool]:
    """Coordinate descent from `start[0]`: the best tile, what was timed, and whether it came to its end.

    All of `start` is in every comparison, so that its times and the best tile's compare. `admit` takes from
    each list of tiles the first that can run, if any. `measure` gives a tile's milliseconds or raises
    RefusedError. What is compared is timed anew, together: clocks drift.
    """
    best, times, unchanged = start[0], {}, 0
    for field in itertools.cycle(choices):
        if unchanged == len(choices):
            return best, times, True
        unchanged += 1
        tiles = admit(list(moves(best, field, choices)))
        compared, finished = measure_all([best, *start, *tiles], measure, deadline)
        times |= compared
        winner = fastest(best, compared)
        if winner != best:
            by = f"{gain(best, winner, compared):.1%} " if best in compared else ""
            print(f"  {field}: {by}faster with {source(winner)}", flush=True)
            best, unchanged = winner, 0
        if not finished:
            return best, times, False
    raise AssertionError("a tile has fields")


def measure_all(
    tiles: Sequence[ForwardTile], measure: Callable[[ForwardTile], list[float]], deadline: float
) -> tuple[Times, bool]:
    """Times of the tiles that ran, and whether all were tried before `deadline` (`time.monotonic`)."""
    times: Times = {}
    for tile in dict.fromkeys(tiles):
        if time.monotonic() > deadline:
            return times, False
        with contextlib.suppress(RefusedError):
            times[tile] = measure(tile)
    return times, True


def fastest(best: ForwardTile, times: Times) -> ForwardTile:
    """The fastest tile where it gains more than GAIN over `best`, or that did not run; else `best`."""
    winner = min(times, key=lambda tile: statistics.geometric_mean(times[tile]), default=best)
    return winner if best not in times or gain(best, winner, times) > GAIN else best


def gain(before: ForwardTile, after: ForwardTile, times: Times) -> float:
    return statistics.geometric_mean(times[before]) / statistics.geometric_mean(times[after]) - 1


# --------------------------------------------------------------------------------- tiles on a device


_planning = threading.Lock()


@contextlib.contextmanager
def planned(tile: ForwardTile) -> Iterator[None]:
    """Calls planned inside have `tile`, whatever the table says. One thread at a time."""
    with _planning, mock.patch.object(forward_plan, "choose_tile", lambda *_, **__: tile):
        yield


def launches(tile: ForwardTile, cases: Sequence[Case], device: Device) -> list[Launch]:
    with planned(tile):
        plans = [forward_plan.plan_forward(case.spec(), Operands(*case.shapes()), device) for case in cases]
    return [launch for plan in plans for launch in plan.launches]


def refusal(
    tile: ForwardTile, cases: Sequence[Case], device: Device, shared_limit: int, compile=compile_kernel
) -> str | None:
    """Why `tile` can't run `cases` well on `device`, or None. Compiles its kernels if it must."""
    if tile.pingpong and tile.consumers == 1:
        return "one warpgroup has none to alternate with"
    head_dim = tensor_maps.padded_head_dim(cases[0].head_dim)
    # A consumer thread holds scores and outputs in float32, and probabilities in 16 bits.
    needed = tile.keys // 2 + head_dim // 2 + tile.keys // 4
    available = min(255, (REGISTERS // 128 - PRODUCER_REGISTERS) // tile.consumers // 8 * 8)
    if needed > available:
        return f"needs {needed} registers a thread of {available}"
    found = launches(tile, cases, device)
    if (shared := max(launch.shared_bytes for launch in found)) > shared_limit:
        return f"needs {shared} bytes of shared memory of {shared_limit}"
    for kernel in dict.fromkeys(launch.kernel for launch in found):
        try:
            complaint = compiler_complaint(compile(kernel).log)
        except CompileError as error:
            complaint = f"does not compile: {error}"[:300]
        if complaint:
            return complaint
    return None


def compiler_complaint(log: str) -> str | None:
    """What NVRTC and ptxas found wrong with a kernel that runs nevertheless, as with serialised wgmma."""
    if spilled := sum(map(int, re.findall(r"(\d+) bytes spill", log))):
        return f"spills: {spilled} bytes"
    warning = re.search(r".*(?:warning|C75\d\d|serializ).*", log, re.IGNORECASE)
    return warning[0].strip() if warning else None


class Tiles:
    """Tiles for `cases` on the default device: which can run, and how long they take."""

    def __init__(self, cases: Sequence[Case]):
        self.cases = cases
        self.refused: dict[ForwardTile, str] = {}
        self._admitted: set[ForwardTile] = set()
        self._inputs = [case.inputs() for case in cases]
        self._expected: list[jax.Array | None] = [None] * len(cases)
        # What JAX's own kernels assume where the device doesn't tell: Hopper's.
        self._shared_limit = getattr(jax.devices()[0], "shared_memory_per_block_optin", 227 * 1024)

    def admit(self, lists: Sequence[Sequence[ForwardTile]]) -> list[ForwardTile]:
        """The first tile of each list that can run. Kernels are compiled in threads, one a core."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            firsts = pool.map(lambda tiles: next(filter(self._can_run, tiles), None), lists)
            return [tile for tile in dict.fromkeys(firsts) if tile is not None]

    def _can_run(self, tile: ForwardTile) -> bool:
        if tile not in self._admitted and tile not in self.refused:
            reason = refusal(tile, self.cases, current(), self._shared_limit)
            if reason is None:
                self._admitted.add(tile)
            else:
                self.refused[tile] = reason
        return tile in self._admitted

    def measure(self, tile: ForwardTile) -> list[float]:
        """Milliseconds of each case. Raises RefusedError."""
        if tile in self.refused:
            raise RefusedError(self.refused[tile])
        milliseconds = []
        for i, case in enumerate(self.cases):
            spec = case.spec()

            # Below everything that remembers traces; the function is new each time, as jit remembers too.
            def forward(query, key, value, spec=spec):
                return cuda.forward(spec, Operands(query, key, value))[0]

            try:
                with planned(tile):
                    out = jax.jit(forward)(*self._inputs[i])
                    if self._expected[i] is None:
                        self._expected[i] = out
                    check_agreement(out, self._expected[i])
                    milliseconds.append(timing.milliseconds(forward, *self._inputs[i]))
            except Exception as error:  # a tile that fails is no reason to end the search
                self.refused[tile] = f"{case}: {record.error(error)}"
                raise RefusedError(self.refused[tile]) from error
        return milliseconds


def cases(head_dim: int, mask: str, dtype: str) -> list[Case]:
    """What a tile is timed on: long and short sequences; of windowed attention causal ones and a window."""
    heads = max(1, round(2048 / head_dim))
    causal = mask == "windowed"
    found = [
        Case(batch, length, length, heads, heads, head_dim, causal=causal, dtype=dtype)
        for batch, length in ((4, 4096), (1, 16384), (16, 1024))
    ]
    if causal:
        found.append(Case(1, 16384, 16384, heads, heads, head_dim, causal=True, window=1024, dtype=dtype))
    return found


# ------------------------------------------------------------------------------------------- results


def source(tile: ForwardTile) -> str:
    """`tile` as the table has it."""
    return f"ForwardTile({', '.join(map(repr, dataclasses.astuple(tile)))})"


def option_source(option: TileOption) -> str:
    """`option` as the table has it."""
    cost = "" if option.cost == 1 else f", {option.cost}"
    return f"TileOption({source(option.tile)}{cost})"


def table_choices(head_dim: int, mask: str) -> tuple[TileOption, ...]:
    """What the table has for `head_dim`."""
    padded = tensor_maps.padded_head_dim(head_dim)
    return forward_tiles.tile_options(TileRequirements(padded, padded, MASKS[mask]))


def table_row(head_dim: int, best: Mapping[str, ForwardTile]) -> str:
    """The table's row of `head_dim`; masks whose best tile it has, or that were not searched, keep theirs."""
    lines = [f"    {head_dim}: ("]
    for mask in MASKS:
        row = table_choices(head_dim, mask)
        if mask in best and best[mask] not in [choice.tile for choice in row]:
            row = (TileOption(best[mask]),)
        lines.append(f"        ({', '.join(map(option_source, row))},),")
    return "\n".join([*lines, "    ),"])


def rows(head_dim: int, mask: str, tiles: Tiles, times: Times) -> list[dict]:
    """Of every tile, fastest first: TFLOP/s of each case; and of those that were refused, why."""

    def row(tile, **figures):
        return {"head_dim": head_dim, "mask": mask, "tile": dataclasses.asdict(tile), **figures}

    timed = []
    for tile, milliseconds in times.items():
        rates = {str(case): case.flops / ms / 1e9 for case, ms in zip(tiles.cases, milliseconds, strict=True)}
        timed.append(row(tile, mean=statistics.geometric_mean(rates.values()), forward=rates))
    timed.sort(key=lambda row: row["mean"], reverse=True)
    return timed + [row(tile, refused=reason) for tile, reason in tiles.refused.items()]


def print_rows(found: Sequence[dict]) -> None:
    for row in found:
        if "mean" in row:
            rates = "".join(f"{record.rate(rate):>6}" for rate in row["forward"].values())
            print(f"  {source(ForwardTile(**row['tile'])):48}{record.rate(row['mean']):>6}  of{rates}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--head-dim", type=int, nargs="+", default=HEAD_DIMS, help="by default the table's: %(default)s"
    )
    parser.add_argument(
        "--mask", choices=tuple(MASKS), nargs="+", default=tuple(MASKS), help="both by default"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument(
        "--exhaustive", action="store_true", help="time every tile that can run in place of the search"
    )
    parser.add_argument(
        "--budget-seconds",
        type=float,
        default=120,
        help="after which a search of one head dim and mask ends with what it has (default %(default)s)",
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    for head_dim in options.head_dim:
        if not 8 <= head_dim <= cuda.sm90.MAX_HEAD_DIM or head_dim % 8:
            parser.error(f"--head-dim {head_dim}: may be a multiple of 8 up to {cuda.sm90.MAX_HEAD_DIM}")
    return options


def tune(head_dim: int, mask: str, options: argparse.Namespace) -> tuple[ForwardTile, list[dict]]:
    """The best tile, and a row for each that was tried."""
    deadline = time.monotonic() + options.budget_seconds
    tiles = Tiles(cases(head_dim, mask, options.dtype))
    start = [choice.tile for choice in table_choices(head_dim, mask)]
    print(
        f"head dim {head_dim}, {mask}, from {source(start[0])}: {', '.join(map(str, tiles.cases))}",
        flush=True,
    )
    choices = space()
    if options.exhaustive:
        admitted = tiles.admit([[tile] for tile in every(choices)])
        times, finished = measure_all([*start, *admitted], tiles.measure, deadline)
        best = fastest(start[0], times)
    else:
        best, times, finished = search(start, choices, tiles.admit, tiles.measure, deadline)
    found = rows(head_dim, mask, tiles, times)
    print_rows(found)
    for tile in start:
        if tile in tiles.refused:
            print(f"  the table's {source(tile)} was refused: {tiles.refused[tile]}")
    if not finished:
        print(f"  ended by its budget of {options.budget_seconds:.0f} s")
    return best, found


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    case = cases(options.head_dim[0], options.mask[0], options.dtype)[0]
    if reason := cuda.supports(case.spec(), Operands(*case.shapes()), current()):
        sys.exit(f"tune.py: the CUDA kernels can't run here: {reason}")

    ceiling = record.product_ceiling(options.dtype)
    result = record.environment() | {"dtype": options.dtype, "ceiling": ceiling, "rows": [], "table": {}}
    print(record.heading(result))
    print(f"TFLOP/s forward, {options.dtype}, {result['timing']}: geometric mean over the cases, then each")
    for head_dim in options.head_dim:
        best = {}
        for mask in options.mask:
            best[mask], found = tune(head_dim, mask, options)
            result["rows"] += found
            result["table"][head_dim] = {name: dataclasses.asdict(tile) for name, tile in best.items()}
            if options.out:  # each time, so that a run cut short leaves what it had
                record.write(result, options.out)
        print(table_row(head_dim, best), flush=True)


if __name__ == "__main__":
    main()
