"""Attention as open models make it: ours beside every peer, forward and backward, in kernel time.

    python benchmarks/models.py --out benchmarks/results/models_h200.json
    python benchmarks/models.py --out benchmarks/results/models_h200.json --add
    python benchmarks/models.py --entries llama3-8b-8k,gemma2-9b --passes forward --peers jax_flash_cuda,cudnn
    python benchmarks/models.py --out benchmarks/results/models_4xh100.json --every-gpu

The calls are in model_entries.py, which says where each shape is published; --list prints them. Operations
count visible pairs of query and key alone: neither what a mask hides nor padding. A backward time is that of
both passes less that of the forward pass. Outputs and gradients of all contenders must agree; a contender
that differs, refuses an entry or lacks one of its options shows why. FlashAttention-3 has padded rows and
documents packed, by its varlen functions.

Each entry is measured in shuffled rounds, each after a warm-up so that clocks settle; the median counts.
A run ends after --minutes; --add goes on with the entries that the file lacks. All rows of an entry come from
one run, and figures of different runs don't compare. A chart of the file goes beside it as PNG.

With --every-gpu each GPU of the machine measures some of the entries, all at the same time.
"""

import argparse
import json
import logging
import signal
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import comparison
import contenders
import every_gpu
import jax
import jax.numpy as jnp
import model_contenders
import models_chart
import record
import rounds
import timing
from model_entries import ENTRIES
from model_entry import Entry
from model_programs import GRADIENTS, PASSES, EntryPrograms, Reference, compile_all

Run = tuple[Callable, list[jax.Array]]  # a program and its arguments

MINUTES = 8.0
MINUTES_OF_AN_ENTRY = 2.0  # at most
COMPILED_AHEAD = 4  # entries whose programs are compiled together, on all cores, and then measured


def measure(
    entry: Entry, names: Sequence[str], programs: EntryPrograms, count: int = rounds.ROUNDS
) -> list[dict]:
    """A row for each contender: milliseconds and TFLOP/s of each pass, or the error that it raised."""
    arrays = programs.arrays()
    reference = Reference(entry)
    refused: dict[str, str] = {}  # contenders whose forward pass counts nevertheless

    def prepare(name: str) -> tuple[dict[str, Run], tuple[()]]:
        forward, both = (programs.passes.get((name, one_pass)) for one_pass in PASSES)
        if isinstance(forward, Exception):
            raise forward
        call = model_contenders.call(name, entry)
        *inputs, d_out = [entry.pack(x) for x in arrays] if call.packed else arrays
        inputs += [jnp.asarray(x) for x in call.data]
        check = (lambda *_: None) if name in contenders.UNSCALED else reference.check
        check({"out": forward(*inputs)}, call.packed)
        runs: dict[str, Run] = {"forward": (forward, inputs)}
        try:
            if isinstance(both, Exception):
                raise both
            if both is not None:
                gradients = jax.block_until_ready(both(*inputs, d_out))
                check(dict(zip(GRADIENTS, gradients, strict=True)), call.packed)
                runs["backward"] = (both, [*inputs, d_out])
        except Exception as error:  # its answer, too
            refused[name] = record.error(error)
        return runs, ()

    def figures(runs: Mapping[str, Run]) -> dict[str, float]:
        times = {key: timing.milliseconds(function, *inputs) for key, (function, inputs) in runs.items()}
        if "backward" in times:
            times["backward"] -= times["forward"]
        return times

    rows = []
    for name, found in rounds.measure(names, prepare, figures, count).items():
        row: dict = {"group": entry.group, "case": entry.name, "peer": name}
        if error := found.pop("error", refused.get(name)):
            row["error"] = error
        rows.append(row | rates(entry, found))
    return rows


def rates(entry: Entry, times: Mapping[str, float]) -> dict:
    """A row's milliseconds and TFLOP/s, by pass."""
    figures: dict = {}
    for key, milliseconds in times.items():
        if milliseconds > 0:
            figures[f"{key}_milliseconds"] = milliseconds
            figures[key] = entry.flops[key] / milliseconds / 1e9
        else:
            figures["error"] = "both passes took less time than the forward one alone: noise"
    return figures


def described(rows: Sequence[dict]) -> dict:
    """What follows from rows: the entries that they are of, and our ratios to the best peer by pass."""
    measured = {row["case"] for row in rows}
    return {
        "entries": [
            {"name": entry.name, "model": entry.model, "shape": entry.shape, "source": entry.source}
            for entry in ENTRIES
            if entry.name in measured
        ],
        "ratios": {key: comparison.compare(rows, key) for key in PASSES},
    }


def run(options: argparse.Namespace) -> dict:
    """Measure until the minutes are over, and write what there is after every entry."""
    start = time.monotonic()
    end = start + 60 * options.minutes
    result = record.environment()
    earlier = record.earlier_rows(options.out, result) if options.add else []
    left = options.entries or [e for e in ENTRIES if e.name not in {row["case"] for row in earlier}]
    if options.part:
        number, count = options.part
        left = left[number::count]
    result |= {"ceiling": record.product_ceiling("bfloat16"), "rows": _in_order(earlier)}
    result |= described(result["rows"])
    print(record.heading(result))
    print(f"TFLOP/s {'/'.join(options.passes)}, {rounds.method(result['timing'], options.rounds)}")
    print(f"{'entry':24}" + "".join(f"{name:>18}" for name in options.peers), flush=True)
    programs: dict[str, EntryPrograms] = {}
    compiling = measuring = 0.0  # seconds, at most so far
    while left:
        entry = left[0]
        is_compiled = entry.name in programs
        began = time.monotonic()
        if began + measuring + (0.0 if is_compiled else compiling) > end:
            break
        if not is_compiled:
            programs = compile_all(left[:COMPILED_AHEAD], options.peers, options.passes)
            compiling = max(compiling, time.monotonic() - began)
            print(f"    compiled {len(programs)} entries in {time.monotonic() - began:.0f} s", flush=True)
            began = time.monotonic()
        rows = measure(entry, options.peers, programs[entry.name], options.rounds)
        measuring = max(measuring, time.monotonic() - began)
        print_entry(entry, rows, time.monotonic() - began)
        left = left[1:]
        # Earlier rows of the entry are of another run: they go.
        others = [row for row in result["rows"] if row["case"] != entry.name]
        result["rows"] = _in_order(others + rows)
        result |= described(result["rows"])
        if options.out:
            record.write(result, options.out)
    print_summary(result, [entry.name for entry in left], time.monotonic() - start)
    return result


def run_on_every_gpu(options: argparse.Namespace) -> dict:
    """Measure a part of the entries on each GPU, and write what all parts have."""
    names = every_gpu.gpus()
    files = [options.out.with_suffix(f".part{number}.json") for number in range(len(names))]
    for path in files:  # of a run that was ended
        path.unlink(missing_ok=True)

    def part(number: int, count: int) -> list[str]:
        return every_gpu.own_command("--part", f"{number}/{count}", "--out", str(files[number]))

    # The minutes are those in which a part begins to measure an entry.
    statuses = every_gpu.run(part, 60 * (options.minutes + MINUTES_OF_AN_ENTRY), names)
    written = [path for path in files if path.exists()]
    if not written:
        raise SystemExit("no part has measured an entry")
    result = json.loads(written[0].read_text()) | {"gpus": len(names)}
    rows = [row for path in written for row in json.loads(path.read_text())["rows"]]
    result["rows"] = _in_order(rows)
    result |= described(result["rows"])
    record.write(result, options.out)
    for path in written:
        path.unlink()
    measured, wanted = {row["case"] for row in rows}, options.entries or ENTRIES
    if missing := [entry.name for entry in wanted if entry.name not in measured]:
        print(f"not measured: {','.join(missing)}")
    if failed := [status for status in statuses if status not in (0, -signal.SIGTERM)]:
        raise SystemExit(f"{len(failed)} of {len(names)} parts failed; {options.out} has what is measured")
    return result


def _in_order(rows: Sequence[dict]) -> list[dict]:
    """Rows in the order of the entries."""
    places = {entry.name: place for place, entry in enumerate(ENTRIES)}
    return sorted((row for row in rows if row["case"] in places), key=lambda row: places[row["case"]])


def print_entry(entry: Entry, rows: Sequence[dict], seconds: float) -> None:
    cells = "".join(f"{'/'.join(record.rate(row.get(key)) for key in PASSES):>18}" for row in rows)
    ratios = " / ".join(f"{r['to_best']:.2f}" for key in PASSES for r in comparison.compare(rows, key))
    print(f"{entry.name:24}{cells}  {ratios}  ({entry.shape}; {seconds:.0f} s)")
    for row in rows:
        if "error" in row:
            print(f"    {row['peer']}: {' '.join(row['error'].split())[:160]}")
    print(end="", flush=True)


def print_summary(result: dict, left: Sequence[str], seconds: float) -> None:
    for key, ratios in result.get("ratios", {}).items():
        if ratios:
            mean = statistics.geometric_mean(ratio["to_best"] for ratio in ratios)
            print(f"{key}: ours over the best peer {mean:.3f}, geometric mean over {len(ratios)}")
        for ratio in ratios:
            if ratio["to_best"] < 1:
                print(f"    {ratio['case']:24}{ratio['to_best']:.3f} of {ratio['best']}")
    if left:
        print(f"not measured in {seconds / 60:.1f} minutes: {','.join(left)}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--entries", help="names, with commas between them; all by default")
    parser.add_argument("--passes", default=",".join(PASSES), help="forward, or both (the default)")
    parser.add_argument(
        "--peers",
        default=",".join(model_contenders.DEFAULT),
        help=f"contenders, of {','.join(model_contenders.ALL)} (default %(default)s)",
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of the run (default %(default)g)")
    parser.add_argument("--rounds", type=int, default=rounds.ROUNDS, help="whose median counts")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument(
        "--add",
        action="store_true",
        help="keep the other entries that --out has; by default measure the rest",
    )
    parser.add_argument("--every-gpu", action="store_true", help="entries in parts, one on each GPU")
    parser.add_argument("--part", help="number/count: each count-th entry, from that number on")
    parser.add_argument("--list", action="store_true", help="print the entries, and measure nothing")
    options = parser.parse_args(arguments)
    if options.add and not options.out:
        parser.error("--add needs --out")
    if options.every_gpu and (options.add or not options.out):
        parser.error("--every-gpu needs --out, and takes no --add")
    options.part = options.part and tuple(map(int, options.part.split("/")))
    known = {entry.name: entry for entry in ENTRIES}
    for flag, values, choices in (
        ("entries", (options.entries or "").split(",") if options.entries else [], known),
        ("passes", options.passes.split(","), PASSES),
        ("peers", options.peers.split(","), model_contenders.ALL),
    ):
        if unknown := [value for value in values if value not in choices]:
            parser.error(f"--{flag}: {', '.join(unknown)}; may be {', '.join(choices)}")
    options.entries = [known[name] for name in options.entries.split(",")] if options.entries else None
    # The backward time is a difference: whoever asks for it gets both.
    options.passes = PASSES if "backward" in options.passes.split(",") else PASSES[:1]
    options.peers = options.peers.split(",")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.list:
        for entry in ENTRIES:
            print(f"{entry.name:24}{entry.shape:48}{entry.source}")
        return
    # Peers warn of their own affairs.
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    in_parts = options.every_gpu and not options.part
    result = run_on_every_gpu(options) if in_parts else run(options)
    if options.out and not options.part and any(key in row for row in result["rows"] for key in PASSES):
        print(f"{options.out}, {models_chart.draw(options.out)}")


if __name__ == "__main__":
    main()
