"""Times the backward pass under several schedules, beside what its plan expects of them.

    python benchmarks/tune_schedule.py --out benchmarks/results/tune_schedule_h200.json

A plan picks, by a model of how long things take, the units of work into which key tiles are divided
(jax_flash/cuda/sm90/backward_units.py), and whether the main kernel writes dQ. Each row has a call, a
schedule, the model's time relative to that of undivided tiles, and the measured one. Time is the kernel time
of the backward pass alone, in shuffled rounds.
"""

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import jax
import record
import rounds
import timing
from calls import Case

import jax_flash
from jax_flash._device import current
from jax_flash._spec import Operands
from jax_flash.cuda.sm90 import backward_plan, backward_units
from jax_flash.cuda.sm90.backward_call import BackwardCall, Schedule
from jax_flash.cuda.sm90.backward_tiles import SPAN
from jax_flash.cuda.sm90.backward_units import Units

# Batch, tokens, query heads, key heads, head dim; and whether causal.
CALLS = [
    ((2, 8192, 8, 1, 128), True),
    ((1, 4096, 28, 4, 128), True),
    ((4, 2048, 14, 2, 64), True),
    ((2, 4096, 16, 1, 128), True),
    ((2, 4096, 16, 1, 128), False),
    ((1, 5000, 48, 3, 128), True),
    ((1, 1024, 16, 16, 128), True),
    ((1, 1024, 16, 16, 128), False),
    ((1, 4096, 8, 8, 128), True),
    ((1, 8192, 32, 8, 128), True),
    ((1, 8192, 64, 8, 128), True),
    ((1, 32768, 32, 8, 128), True),
    ((2, 4096, 64, 8, 128), True),
    ((1, 16384, 32, 8, 128), True),
    ((1, 16384, 16, 16, 128), True),
    ((1, 16384, 16, 16, 128), False),
    ((4, 4096, 32, 8, 128), True),
    ((1, 4096, 32, 32, 64), True),
    ((2, 4096, 12, 12, 192), True),
    ((1, 4096, 8, 2, 256), True),
]


def case_of(shape: tuple[int, int, int, int, int], causal: bool) -> Case:
    batch, length, heads, kv_heads, head_dim = shape
    return Case(batch, length, length, heads, kv_heads, head_dim, causal=causal)


def call_of(case: Case, chosen: Schedule | None = None) -> BackwardCall:
    return BackwardCall(case.spec(), Operands(*case.shapes()), current(), chosen)


def picked(case: Case) -> Schedule:
    call = call_of(case)
    return Schedule(call.units, call.main_writes_dq)


def candidates(case: Case) -> list[Schedule]:
    """Undivided tiles first; then every number of head shares, two parts, and what the plan picks.

    Each with dQ written by the main kernel, if it can, and by another; undivided tiles in head groups of
    several sizes.
    """
    group, best = case.heads // case.kv_heads, picked(case)
    shares = [Units(n) for n in range(1, group + 1) if group % n == 0]
    writers = [best.main_writes_dq]
    if not call_of(case).tile.split_products:
        writers.append(not best.main_writes_dq)
    units = dict.fromkeys((*shares, Units(group, 2), best.units))
    found = [Schedule(x, main_writes_dq) for main_writes_dq in writers for x in units]
    widths = [n for n in (1, 2, 4) if n < min(case.batch * case.kv_heads, 8)] if group > 1 else []
    return found + [Schedule(Units(), best.main_writes_dq, l2_head_group=n) for n in widths]


def estimate(case: Case, schedule: Schedule) -> float:
    call = call_of(case)
    return backward_units.estimate(
        call.key_heads, call.most_heads_in_l2, schedule.units, call.sharing_costs, SPAN
    )


def measure(case: Case, of_rounds: int) -> list[dict]:
    query, key, value = case.inputs()
    d_out = jax.random.normal(jax.random.key(3), query.shape, query.dtype)
    attend = functools.partial(jax_flash.flash_attention, is_causal=case.causal, implementation="cuda")
    known = candidates(case)

    def prepare(schedule: Schedule) -> tuple[tuple, tuple[jax.Array, ...]]:
        jax.clear_caches()  # of what was traced under another schedule
        with mock.patch.object(
            backward_plan, "BackwardCall", functools.partial(BackwardCall, chosen=schedule)
        ):
            _, vjp = jax.vjp(attend, query, key, value)
            run = jax.jit(lambda vjp, d_out: vjp(d_out)).lower(vjp, d_out).compile()
        return (run, vjp, d_out), run(vjp, d_out)

    def figures(run: tuple) -> dict[str, float]:
        return {"milliseconds": timing.milliseconds(*run)}

    found = rounds.measure(known, prepare, figures, of_rounds)
    best, undivided = picked(case), known[0]
    rows = []
    for schedule in known:
        row = {"case": str(case), **dataclasses.asdict(schedule.units)}
        row |= {"main_writes_dq": schedule.main_writes_dq, "picked": schedule == best} | found[schedule]
        row["l2_head_group"] = call_of(case, schedule).l2_head_group
        row["expected"] = estimate(case, schedule) / estimate(case, undivided)
        if "milliseconds" in row:
            row["backward"] = 2.5 * case.flops / row["milliseconds"] / 1e9
            if "milliseconds" in found[undivided]:
                row["measured"] = row["milliseconds"] / found[undivided]["milliseconds"]
        rows.append(row)
    return rows


def text(row: dict, figures: str) -> str:
    """A row's schedule and figures in a line."""
    writes = "main writes dQ" if row["main_writes_dq"] else ""
    schedule = f"{row['shares']:>3} × {row['parts']} {row['l2_head_group']:>3} {writes:14}"
    picked = "picked" if row["picked"] else ""
    return f"{row['case']:28} {schedule}  {figures} {picked} {row.get('error', '')[:120]}"


def main(arguments: Sequence[str] | None = None) -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--rounds", type=int, default=rounds.ROUNDS)
    parser.add_argument("--match", default="", help="parts of the calls' names, with commas between them")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    result = record.environment() | {"rows": []}
    print(record.heading(result))
    cases = [case_of(shape, causal) for shape, causal in CALLS]
    for case in cases:
        if not any(part in str(case) for part in options.match.split(",")):
            continue
        for row in measure(case, options.rounds):
            result["rows"].append(row)
            rate = f"{record.rate(row.get('backward')):>6}  expected {row['expected']:.3f}"
            print(text(row, f"{rate}  measured {row.get('measured', float('nan')):.3f}"), flush=True)
        if options.out:
            record.write(result, options.out)


if __name__ == "__main__":
    main()
