"""One summary of the GPU tests from those of several runs, where they don't fit into one.

    python tests/gpu/join_summaries.py one.json other.json --out benchmarks/results/gpu_suite_h100.json

The runs must be of the same commit, on the same kind of device with the same versions. The number of devices
is that of the run with most.
"""

import argparse
import collections
import json
from collections.abc import Sequence
from pathlib import Path

SAME = ("commit", "device", "driver", "nvrtc", "jax", "jaxlib", "python")


def join(summaries: Sequence[dict]) -> dict:
    """Raises ValueError for runs that don't belong together."""
    first = summaries[0]
    for key in SAME:
        found = [summary[key] for summary in summaries]
        if found != [first[key]] * len(found):
            raise ValueError(f"{key} differs: {', '.join(map(str, found))}")
    refused: dict[str, collections.Counter] = {}
    worst: dict[str, dict[str, float]] = {}
    for summary in summaries:
        for implementation, reasons in summary["refused"].items():
            refused.setdefault(implementation, collections.Counter()).update(reasons)
        for where, ratios in summary["worst_error_over_plain"].items():
            known = worst.setdefault(where, {})
            known |= {result: max(ratio, known.get(result, 0.0)) for result, ratio in ratios.items()}
    by_test = sum((collections.Counter(x["seconds_by_test"]) for x in summaries), collections.Counter())
    sanitizers = [x["sanitizer"] for x in summaries if isinstance(x["sanitizer"], dict)]
    return {
        **{key: first[key] for key in SAME},
        "devices": max(summary["devices"] for summary in summaries),
        "date": max(summary["date"] for summary in summaries),
        "runs": len(summaries),
        "counts": {key: sum(summary["counts"][key] for summary in summaries) for key in first["counts"]},
        "failed": [name for summary in summaries for name in summary["failed"]],
        "uncollected": sorted({name for summary in summaries for name in summary.get("uncollected", ())}),
        "skipped": sorted({reason for summary in summaries for reason in summary["skipped"]}),
        "refused": refused,
        "worst_error_over_plain": worst,
        "sanitizer": {call: verdict for x in sanitizers for call, verdict in x.items()} or "not run",
        "seconds_by_test": dict(by_test.most_common()),
        "seconds": sum(summary["seconds"] for summary in summaries),
        "complete": all(summary["complete"] for summary in summaries),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("summaries", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    joined = join([json.loads(path.read_text()) for path in options.summaries])
    options.out.write_text(json.dumps(joined, indent=1) + "\n")


if __name__ == "__main__":
    main()
