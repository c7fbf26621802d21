"""Decoding with a key-value cache: ours beside cuDNN's attention and a copy kernel, on one GPU.

    python benchmarks/decode.py --out benchmarks/results/decode_h200.json
    python benchmarks/decode.py --groups contiguous,paged --rounds 2 --contenders jax_flash_cuda,cudnn,copy
    python benchmarks/decode.py --list

Every row has the kernel time of a call (`kernel_us`) and the time of a whole jitted step, launches and gaps
included, many of them in flight (`step_us`). Kernel time is the sum over kernels: of two that overlap, it
counts both in full. Where the host launches more slowly than kernels run, a step takes as long as launching.
So calls that append also have what a step takes on the device, from its start to the next one's
(`device_us`). GB/s counts the keys and values that sequences have. The copy kernel reads half as many bytes
and writes them: its time is that of the call at the bandwidth of a copy.

  contiguous   full caches, 4 MB to 2 GB
  lengths      lengths drawn from 1 to the capacity; one sequence of 131072 keys among 63 short ones
  paged        pages of several sizes, anywhere in their pool, beside the same keys without pages
  speculative  four and eight queries of each sequence beside one
  8 bits       full caches in e4m3, beside queries in bfloat16
  append       a new key of each sequence, and rotary embeddings, beside attention alone; in a run of its own
  prefill      chunks of prompts, 256 to 2048 queries, without and with pages, beside `flash_attention` to the
               same keys, in TFLOP/s
               JAX has no cuDNN for them: its causal attention is aligned to the first key

Ratios are of rates by kernel time: `to_best_peer`, `to_cudnn`, `to_copy`, and `to_base`, the case's first
variant; `step_to_best_peer` is of steps. `beyond_base_us`, `step_beyond_base_us` and `device_beyond_base_us`
are how much longer than that variant a call takes. All outputs must agree with ours in plain JAX; a contender
that differs, or refuses a call, shows why. Contenders are measured in shuffled rounds, whose median counts;
figures of different runs don't compare.

`--merge FILE` adds what another program measured on the same GPU, such as FlashAttention-3's
`flash_attn_with_kvcache`, which JAX can't call: JSON with "device" and "rows", whose rows have "case" (a
label as --list prints it), "peer" and "us". Those microseconds are taken for kernel time.
"""

import argparse
import logging
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import contenders
import decode_programs
import jax
import jax.numpy as jnp
import record
import rounds
import timing
from decode_cases import GROUPS, MEGABYTE, TARGETS, Case
from decode_programs import ALL, COPY, LONG_CHAIN, SHORT_CHAIN

OURS = "jax_flash_cuda"  # which the targets are for
REFERENCE = "jax_flash_xla"
ALONE = "append"
MINUTES = 8.0
MICROSECONDS_IN_FLIGHT = 50_000.0  # of calls at once, where `step_us` is measured
MERGED_GROUPS = ("contiguous", "speculative", "8 bits")


def measure(
    case: Case, names: Sequence[str], programs: decode_programs.Programs, count: int = rounds.ROUNDS
) -> list[dict]:
    """A row for each variant and contender: its times, or the error that it raised."""
    arrays = decode_programs.Arrays(case.calls[case.base])
    inputs = {variant: arrays.inputs(call) for variant, call in case.calls.items()}
    expected = _expected(case, arrays)

    def prepare(pair: tuple[str, str]) -> tuple[tuple, tuple[()]]:
        variant, name = pair
        compiled = programs[decode_programs.key_of(case), variant, name]
        if isinstance(compiled, Exception):
            raise compiled
        if name == COPY:
            (size,) = decode_programs.copy_shapes(case.calls[variant])[0].shape
            return (compiled, (jnp.arange(size, dtype=jnp.uint32), jnp.uint32(0))), ()
        rounds.check_agreement(compiled[0](*inputs[variant]), expected[variant])
        return (compiled, inputs[variant]), ()

    pairs = decode_programs.contenders_of(case, names)
    found = rounds.measure(pairs, prepare, lambda run: figures(*run), count)
    rows = []
    for (variant, name), result in found.items():
        call = case.calls[variant]
        row = {"group": case.group, "case": case.label, "variant": variant, "contender": name}
        row |= {"bytes": call.bytes_read, **result}
        if row.get("kernel_us", 0) > 0:
            row["GB/s"] = call.bytes_read / row["kernel_us"] / 1e3
            if case.group == "prefill":
                row["TFLOP/s"] = call.flops / row["kernel_us"] / 1e6
        rows.append(row)
    return rows


def _expected(case: Case, arrays: decode_programs.Arrays) -> dict[str, jax.Array]:
    """The output of each variant in plain JAX. That of pages is that of the same keys without pages."""
    outputs = {}
    for variant, call in case.calls.items():
        if case.group == "paged" and outputs:
            outputs[variant] = outputs[case.base]
        else:
            attend = jax.jit(decode_programs.attend(call, REFERENCE))
            outputs[variant] = attend(*arrays.inputs(call))
    return outputs


def figures(compiled: Sequence[jax.stages.Compiled], inputs: tuple) -> dict[str, float]:
    """Kernel time and step of one call, in microseconds; `compiled` is its program, or two chains of it."""
    more, found = LONG_CHAIN - SHORT_CHAIN, {}
    if _on_gpu() and len(compiled) == 2:
        short, long = (timing.profile(program, *inputs) for program in compiled)
        of_step, period = timing.sum_and_period(short, long, more, LONG_CHAIN)
        found = {"kernel_us": 1e3 * of_step, "device_us": 1e3 * period}
        kernel = [1e3 * sum(end - start for start, end in calls[0]) for calls in (short, long)]
    else:
        kernel = [1e3 * timing.milliseconds(program, *inputs) for program in compiled]
    step = []
    for program, us in zip(compiled, kernel, strict=True):
        calls = int(min(max(MICROSECONDS_IN_FLIGHT / us, 3), timing.CALLS_IN_FLIGHT))
        step.append(1e3 * timing.span_milliseconds(program, *inputs, calls=calls))
    if len(compiled) == 1:
        return {"kernel_us": kernel[0], "step_us": step[0]}
    return {"kernel_us": (kernel[1] - kernel[0]) / more, "step_us": (step[1] - step[0]) / more} | found


def with_ratios(rows: Sequence[dict], case: Case) -> list[dict]:
    """The rows of a case, each with what follows from the others."""
    kernels, steps, device = (
        {(row["variant"], row["contender"]): row[key] for row in rows if key in row}
        for key in ("kernel_us", "step_us", "device_us")
    )
    result = []
    for row in rows:
        variant, name = key = row["variant"], row["contender"]
        figures = {}
        if name in contenders.OURS and key in kernels:
            others = {
                "to_best_peer": _best_peer(kernels, variant),
                "to_cudnn": kernels.get((variant, "cudnn")),
                "to_copy": kernels.get((variant, COPY)),
                "to_base": kernels.get((case.base, name)) if variant != case.base else None,
            }
            figures = {figure: us / kernels[key] for figure, us in others.items() if us is not None}
            if (peer := _best_peer(steps, variant)) is not None:
                figures["step_to_best_peer"] = peer / steps[key]
            if "to_base" in figures:
                for figure, times in {"": kernels, "step_": steps, "device_": device}.items():
                    if key in times:
                        figures[f"{figure}beyond_base_us"] = times[key] - times[case.base, name]
        result.append(row | figures)
    return result


def _best_peer(times: dict[tuple[str, str], float], variant: str) -> float | None:
    """The least time of those that are neither ours nor the copy kernel's."""
    own = (*contenders.OURS, COPY)
    return min((us for (v, name), us in times.items() if v == variant and name not in own), default=None)


def merged(case: Case, path: Path | None, device: str) -> list[dict]:
    """Rows of the file that are of this case's calls.

    Raises ValueError if another device was measured.
    """
    if path is None or case.group not in MERGED_GROUPS:
        return []
    theirs = record.other_rows(path, device)
    rows = []
    for variant, call in case.calls.items():
        for row in theirs:
            if row["case"] == call.label and "us" in row:
                described = {"group": case.group, "case": case.label, "variant": variant}
                speed = {"kernel_us": row["us"], "GB/s": call.bytes_read / row["us"] / 1e3}
                merged_row = {"contender": row["peer"], "bytes": call.bytes_read, **speed}
                rows.append(described | merged_row | {"merged": path.name})
    return rows


def targets(rows: Sequence[dict]) -> list[dict]:
    """Each target of our rows: its figure, and whether it is met."""
    return [
        {
            "target": str(target),
            "group": row["group"],
            "case": row["case"],
            "variant": row["variant"],
            "figure": row[target.figure],
            "is_met": target.is_met(row),
        }
        for row in rows
        if row["contender"] == OURS
        for target in TARGETS[row["group"]]
        if target.concerns(row)
    ]


def show(row: dict) -> None:
    names = (
        "kernel_us",
        "step_us",
        "device_us",
        "GB/s",
        "TFLOP/s",
        "to_best_peer",
        "step_to_best_peer",
        "to_cudnn",
        "to_copy",
    )
    names += ("to_base", "beyond_base_us", "step_beyond_base_us", "device_beyond_base_us")
    cells = "".join(f"  {name} {row[name]:.4g}" for name in names if name in row)
    print(f"  {row['variant']:14}{row['contender']:18}{cells}  {row.get('error', '')[:160]}", flush=True)


def show_targets(found: Sequence[dict]) -> None:
    missed = [target for target in found if not target["is_met"]]
    print(f"\n{len(found) - len(missed)} of {len(found)} targets met" + (", but for" if missed else ""))
    for target in missed:
        where = f"{target['group']}, {target['case']} {target['variant']}"
        print(f"  {where:64}{target['target']}: {target['figure']:.3f}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    groups = ",".join(group for group in GROUPS if group != ALONE)
    parser.add_argument("--groups", default=groups, help=f"by default all but {ALONE}: %(default)s")
    parser.add_argument("--contenders", default=",".join(ALL), help="by default all: %(default)s")
    parser.add_argument("--rounds", type=int, default=rounds.ROUNDS, help="whose median counts")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="after which no other case is begun")
    parser.add_argument("--merge", type=Path, help="JSON of another program's measurements")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--list", action="store_true", help="print the calls and targets; measure nothing")
    options = parser.parse_args(arguments)
    for flag, known in (("groups", GROUPS), ("contenders", ALL)):
        names = getattr(options, flag).split(",")
        if unknown := set(names) - set(known):
            parser.error(f"--{flag}: {', '.join(sorted(unknown))}; may be {', '.join(known)}")
        setattr(options, flag, names)
    if ALONE in options.groups and len(options.groups) > 1 and not options.list and _on_gpu():
        parser.error(
            f"--groups: on a GPU {ALONE} is measured by another profiler, and so in a run of its own"
        )
    return options


def _on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def list_cases(groups: Sequence[str]) -> None:
    for group in groups:
        print(f"{group}: {'; '.join(map(str, TARGETS[group]))}")
        for case in GROUPS[group]:
            for variant, call in case.calls.items():
                print(f"  {call.label:56}{variant:16}{call.bytes_read / MEGABYTE:8.1f} MB")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.list:
        return list_cases(options.groups)
    # Peers warn of their own affairs.
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    start = time.monotonic()
    result = record.environment() | {"rows": [], "targets": []}
    if options.groups == [ALONE] and _on_gpu():
        result["timing"] = f"kernel time from a profile (jax.profiler), median of {timing.ITERATIONS}"
    print(record.heading(result))
    print(rounds.method(result["timing"], options.rounds))
    cases = [case for group in options.groups for case in GROUPS[group]]
    programs = decode_programs.compile_all(cases, options.contenders)
    print(f"compiled {len(programs)} programs in {time.monotonic() - start:.0f} s")
    for number, case in enumerate(cases):
        if time.monotonic() > start + 60 * options.minutes:
            print(f"{len(cases) - number} cases are not measured: {options.minutes:g} minutes are over")
            break
        began = time.monotonic()
        try:
            rows = measure(case, options.contenders, programs, options.rounds)
        except Exception as error:  # the other cases are measured nevertheless
            print(f"{case.group}: {case.label}: {record.error(error)}")
            result["failed"] = [*result.get("failed", []), f"{case.label}: {record.error(error)}"]
            continue
        rows = with_ratios(rows + merged(case, options.merge, result["device"]), case)
        print(f"{case.group}: {case.label}  ({time.monotonic() - began:.0f} s)")
        for row in rows:
            show(row)
        result["rows"] += rows
        result["targets"] = targets(result["rows"])
        if options.out:  # each time, so that a run cut short leaves what it had
            record.write(result, options.out)
    show_targets(result["targets"])


if __name__ == "__main__":
    main()
