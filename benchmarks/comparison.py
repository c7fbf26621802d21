"""Many cases beside every peer: ratios, what is printed, and the command line of the two programs."""

import argparse
import dataclasses
import logging
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import contenders
import record
import rounds
from calls import Case

OURS = "jax_flash_cuda"
FA3 = "fa3_cu13"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One of the two programs, forward.py and backward.py."""

    key: str  # "forward" or "backward", of TFLOP/s
    description: str
    groups: Mapping[str, Sequence[Case]]
    measure: Callable[[str, Case, Sequence[str]], list[dict]]  # a row for each contender
    peers: Sequence[str]  # by default
    variants: Mapping[str, str] = dataclasses.field(default_factory=dict)  # group → what stands beside ours
    print_row: Callable[[dict], None] = lambda row: None  # what else there is to say of a row

    def names(self, group: str, peers: Sequence[str]) -> Sequence[str]:
        """Who is measured in `group`: of ours and a variant of it, both and nobody else."""
        return (OURS, self.variants[group]) if group in self.variants else peers

    def run(self, arguments: Sequence[str] | None) -> None:
        options = self.parse(arguments)
        # Peers warn of their own affairs.
        warnings.filterwarnings("ignore")
        logging.disable(logging.WARNING)

        result = record.environment() | {"ceiling": record.product_ceiling("bfloat16"), "rows": []}
        if options.add:
            earlier = record.earlier_rows(options.out, result)
            result["rows"] = [row for row in earlier if row["group"] not in options.groups]
        print(record.heading(result))
        print(f"TFLOP/s {self.key}, {rounds.method(result['timing'])}")
        for group in options.groups:
            names = self.names(group, options.peers)
            print(f"{group:38}" + "".join(f"{name:>{_width(name)}}" for name in names), flush=True)
            for case in self.groups[group]:
                start = time.monotonic()
                rows = self.measure(group, case, names)
                self.print_case(case, rows, time.monotonic() - start)
                result["rows"] += rows
                result |= self.ratios(result["rows"])
                if options.out:  # each time, so that a run cut short leaves what it had
                    record.write(result, options.out)
        print_summary(result)

    def ratios(self, rows: Sequence[dict]) -> dict:
        return {
            "ratios": compare(rows, self.key),
            "window_ratios": window_ratios(rows),
            "variants": compare_variants(rows, self.key, self.variants),
        }

    def print_case(self, case: Case, rows: Sequence[dict], seconds: float) -> None:
        ratio = "".join(f"{r['to_best']:>7.2f} of {r['best']}" for r in compare(rows, self.key))
        cells = "".join(f"{record.rate(row.get(self.key)):>{_width(row['peer'])}}" for row in rows)
        print(f"{case!s:38}{cells}{ratio}  ({seconds:.0f} s)", flush=True)
        for row in rows:
            if "error" in row:
                print(f"    {row['peer']}: {' '.join(row['error'].split())[:160]}")
            self.print_row(row)

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        parser = argparse.ArgumentParser(
            description=self.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.add_argument("--groups", default=",".join(self.groups), help="by default all: %(default)s")
        parser.add_argument(
            "--peers",
            default=",".join(self.peers),
            help=f"which to measure, of {','.join(contenders.CONTENDERS)} (default %(default)s)",
        )
        parser.add_argument("--out", type=Path, help="JSON file to write")
        parser.add_argument(
            "--add", action="store_true", help="keep what --out has of other groups, if it is of this machine"
        )
        options = parser.parse_args(arguments)
        if options.add and not options.out:
            parser.error("--add needs --out")
        for flag, known in (("groups", self.groups), ("peers", contenders.CONTENDERS)):
            names = getattr(options, flag).split(",")
            if unknown := set(names) - set(known):
                parser.error(f"--{flag}: {', '.join(sorted(unknown))}; may be {', '.join(known)}")
            setattr(options, flag, names)
        return options


def compare(rows: Sequence[dict], key: str) -> list[dict]:
    """For each group and case that we and a peer ran: our rate over the best peer's, and over FA3's."""
    compared = []
    for (group, case), rates in _rates(rows, key).items():
        peers = {name: rate for name, rate in rates.items() if name in contenders.PEERS}
        if OURS not in rates or not peers:
            continue
        best = max(peers, key=peers.__getitem__)
        ratio = {"group": group, "case": case, "best": best, "to_best": rates[OURS] / peers[best]}
        if FA3 in peers:
            ratio["to_fa3"] = rates[OURS] / peers[FA3]
        compared.append(ratio)
    return compared


def compare_variants(rows: Sequence[dict], key: str, variants: Mapping[str, str]) -> list[dict]:
    """For each group and case with a variant of ours: how much longer it takes, as a ratio of times."""
    return [
        {"group": group, "case": case, "longer": rates[OURS] / rates[variants[group]]}
        for (group, case), rates in _rates(rows, key).items()
        if group in variants and {OURS, variants[group]} <= set(rates)
    ]


def _rates(rows: Sequence[dict], key: str) -> dict[tuple[str, str], dict[str, float]]:
    """By group and case, each contender's rate."""
    rates: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if key in row:
            rates.setdefault((row["group"], row["case"]), {})[row["peer"]] = row[key]
    return rates


def window_ratios(rows: Sequence[dict]) -> dict[str, dict[str, float]]:
    """By contender and window: the rate per visited block over that of full attention with the same shape."""
    visited = {(row["peer"], row["case"]): row["visited"] for row in rows if "visited" in row}
    ratios: dict[str, dict[str, float]] = {}
    for (peer, case), rate in visited.items():
        full = case.partition(" window ")[0]
        if full != case and (peer, full) in visited:
            ratios.setdefault(peer, {})[case] = rate / visited[peer, full]
    return ratios


def print_summary(result: dict) -> None:
    if result["ratios"]:
        print("\nours over the best peer, and over FlashAttention-3: geometric means; cases below 1")
    for group in dict.fromkeys(ratio["group"] for ratio in result["ratios"]):
        ratios = [ratio for ratio in result["ratios"] if ratio["group"] == group]
        best, fa3 = (_mean(ratio[key] for ratio in ratios if key in ratio) for key in ("to_best", "to_fa3"))
        print(f"  {group:14}{best:>6.3f}{fa3:>7.3f}  over {len(ratios)}")
        for ratio in ratios:
            if ratio["to_best"] < 1:
                print(f"      {ratio['case']:38}{ratio['to_best']:>6.3f} of {ratio['best']}")
    for peer, ratios in result["window_ratios"].items():
        for case, ratio in ratios.items():
            print(f"  {peer}, {case}: {ratio:.3f} of full attention's rate per visited block")
    for group in dict.fromkeys(ratio["group"] for ratio in result["variants"]):
        longer = [ratio["longer"] for ratio in result["variants"] if ratio["group"] == group]
        print(f"  {group}: {_mean(longer):.3f} times as long, {max(longer):.3f} at most, over {len(longer)}")


def _width(name: str) -> int:
    return max(15, len(name) + 2)


def _mean(values) -> float:
    values = list(values)
    return statistics.geometric_mean(values) if values else math.nan
