"""Times the backward pass of entries of models.py under several schedules.

    python benchmarks/tune_entries.py --entries llama3-8b-segments,bert-large-padded --out tune_entries.json

tune_schedule.py does so of plain calls. Which schedule is best for a call with lengths, documents or few keys
can't be told from its shapes. Each row has a schedule of an entry and the kernel time of the backward pass
under it, in shuffled rounds.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import model_contenders
import record
import rounds
import timing
import tune_schedule
from model_entries import ENTRIES
from model_entry import Entry

from jax_flash.cuda.sm90 import backward_plan
from jax_flash.cuda.sm90.backward_call import BackwardCall, Schedule
from jax_flash.cuda.sm90.backward_units import Units

CONTENDER = "jax_flash_cuda"
MOST_PARTS = 4


class Passes:
    """The backward pass of an entry, compiled for any schedule."""

    def __init__(self, entry: Entry):
        call = model_contenders.call(CONTENDER, entry)
        *inputs, self.d_out = [entry.pack(x) for x in entry.arrays()] if call.packed else entry.arrays()
        data = [jnp.asarray(x) for x in call.data]
        self.inputs = inputs
        self.attend = lambda *inputs: call.attend(*inputs, *data)
        self.planned: list[BackwardCall] = []

    def compile(self, schedule: Schedule | None) -> tuple:
        """A compiled function and its arguments. What is planned lies in `planned` then."""
        jax.clear_caches()  # of what was traced under another schedule

        def planned(*args, **kwargs) -> BackwardCall:
            self.planned.append(BackwardCall(*args, **kwargs, chosen=schedule))
            return self.planned[-1]

        with mock.patch.object(backward_plan, "BackwardCall", planned):
            _, vjp = jax.vjp(self.attend, *self.inputs)
            run = jax.jit(lambda vjp, d_out: vjp(d_out)).lower(vjp, self.d_out).compile()
        return run, vjp, self.d_out


def candidates(call: BackwardCall) -> list[Schedule]:
    """What the plan picks first; then other L2 head groups, units, and the other way of writing dQ."""
    picked = Schedule(call.units, call.main_writes_dq, None, call.l2_head_group)
    found = [picked]
    heads = call.n.B * call.n.K
    writers = [picked.main_writes_dq] + [not picked.main_writes_dq] * (not call.tile.split_products)
    shares = [n for n in range(1, call.n.group + 1) if call.n.group % n == 0 and n <= 4]
    for main_writes_dq in writers:
        widths = [width for width in (1, 2, 4, 8, 16, 64) if width <= heads * max(shares)]
        of_writer = dataclasses.replace(picked, main_writes_dq=main_writes_dq)
        found += [dataclasses.replace(of_writer, l2_head_group=width) for width in widths]
    units = [Units(n) for n in shares]
    if call.key_tiles == 1 or call.key_tiles * heads < 2 * call.workers:
        units += [Units(picked.units.shares, parts) for parts in range(1, MOST_PARTS + 1)]
    found += [Schedule(x, picked.main_writes_dq) for x in units]
    return list(dict.fromkeys(found))


def measure(entry: Entry, of_rounds: int) -> list[dict]:
    passes = Passes(entry)
    passes.compile(None)
    picked = passes.planned[-1]

    def prepare(schedule: Schedule) -> tuple[tuple, tuple[jax.Array, ...]]:
        run, *args = passes.compile(schedule)
        return (run, *args), run(*args)

    def figures(run: tuple) -> dict[str, float]:
        return {"milliseconds": timing.milliseconds(*run)}

    known = candidates(picked)
    rows = []
    for schedule, found in rounds.measure(known, prepare, figures, of_rounds).items():
        call = BackwardCall(picked.spec, picked.shapes, picked.device, schedule)
        row = {"case": entry.name, **dataclasses.asdict(schedule.units)}
        row |= {"main_writes_dq": schedule.main_writes_dq, "l2_head_group": call.l2_head_group}
        rows.append(row | {"slots": call.dq_accum_slots, "picked": schedule == known[0]} | found)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--entries", required=True, help="names of entries, with commas between them")
    parser.add_argument("--rounds", type=int, default=rounds.ROUNDS)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    entries, names = {entry.name: entry for entry in ENTRIES}, options.entries.split(",")
    if unknown := [name for name in names if name not in entries]:
        parser.error(f"--entries: {', '.join(unknown)}; models.py --list prints those that there are")
    result = record.environment() | {"rows": []}
    print(record.heading(result))
    for name in names:
        for row in measure(entries[name], options.rounds):
            result["rows"].append(row)
            figures = f"{row.get('milliseconds', float('nan')):8.4f} ms"
            print(tune_schedule.text(row, figures), flush=True)
        if options.out:
            record.write(result, options.out)


if __name__ == "__main__":
    main()
