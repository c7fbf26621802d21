"""Time of each kernel of an entry of models.py, in both passes, by contender.

    python benchmarks/kernel_times.py --entries sd2.1-cross,pythia-1.4b --out kernel_times.json

It tells what of a backward pass is its main kernel, and what prepares and ends it. A kernel's time is the
median of several calls, after the same calls for a tenth of a second.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import model_contenders
import model_programs
import record
import timing
from jax.experimental.mosaic.gpu import profiler
from model_entries import ENTRIES
from model_entry import Entry

CALLS = 7


def kernels(function: jax.stages.Compiled, inputs: list[jax.Array]) -> list[tuple[str, float]]:
    """Each kernel's name and its milliseconds, in the order in which they start."""
    end = time.perf_counter() + timing.WARM_UP_SECONDS
    while time.perf_counter() < end:
        jax.block_until_ready([function(*inputs) for _ in range(CALLS)])
    _, calls = profiler.measure(function, aggregate=False, iterations=CALLS)(*inputs)
    if calls is None:
        raise RuntimeError("it launched no kernel")
    return [
        (launches[0][0], statistics.median(x for _, x in launches)) for launches in zip(*calls, strict=True)
    ]


def measure(entry: Entry, name: str, programs: model_programs.EntryPrograms) -> list[dict]:
    """A row for each kernel of the two passes together, or one that says why there is none."""
    row = {"case": entry.name, "peer": name}
    both = programs.passes[name, "backward"]
    if isinstance(both, Exception):
        return [row | {"error": record.error(both)}]
    call = model_contenders.call(name, entry)
    arrays = programs.arrays()
    *inputs, d_out = [entry.pack(x) for x in arrays] if call.packed else arrays
    inputs += [jnp.asarray(x) for x in call.data]
    found = kernels(both, [*inputs, d_out])
    return [
        row | {"place": place, "kernel": kernel[:120], "milliseconds": milliseconds}
        for place, (kernel, milliseconds) in enumerate(found)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--entries", required=True, help="names of entries, with commas between them")
    parser.add_argument("--peers", default="jax_flash_cuda,jax_flash_pallas,fa3_cu13,cudnn")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    names, peers = options.entries.split(","), options.peers.split(",")
    known = {entry.name: entry for entry in ENTRIES}
    unknown = [name for name in names if name not in known]
    unknown += [name for name in peers if name not in model_contenders.ALL]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    chosen = [known[name] for name in names]
    result = record.environment() | {"rows": []}
    programs = model_programs.compile_all(chosen, peers, ["backward"])
    for entry in chosen:
        for name in peers:
            rows = measure(entry, name, programs[entry.name])
            result["rows"] += rows
            total = sum(row.get("milliseconds", 0) for row in rows)
            print(f"{entry.name} {name}: {total:.4f} ms")
            for row in rows:
                print(f"    {row.get('milliseconds', 0):9.4f} {row.get('kernel', row.get('error'))[:100]}")
            if options.out:
                record.write(result, options.out)


if __name__ == "__main__":
    main()
