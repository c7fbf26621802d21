"""Attention in open models: a section of the README, and the table of docs/models.md.

speed_table.py writes both.
"""

import statistics
import textwrap
from collections.abc import Sequence

import chart
import contenders

DTYPE = "bfloat16"  # of all entries

# What the table calls peers; the chart beside it has the full names.
SHORT = {
    "cudnn": "cuDNN",
    "fa3_cu12": "FA3 (CUDA 12)",
    "fa3_cu13": "FA3",
    "tokamax": "tokamax",
    "jax_mgpu": "JAX",
    "jax_triton": "JAX (Triton)",
}


def section(result: dict, stem: str) -> str:
    """The chart, and what it says."""
    command = "python benchmarks/models.py" + (" --every-gpu" if result.get("gpus", 1) > 1 else "")
    text = (
        f"{len(result['entries'])} calls of attention as open models make them: grouped heads, tensor "
        "parallelism, windows, padding, packed documents. Forward and backward, kernel time, "
        f"{DTYPE}, JAX {result['versions']['jax']}, {result['date'][:10]}; each call beside all peers on one "
        f"{result['device']}, by `{command}` ([{stem}.json](benchmarks/results/{stem}.json)). "
        f"{_summary(result)}[All rates](docs/models.md)."
    )
    chart_of_all = f"![Attention in open models on an {result['device']}](benchmarks/results/{stem}.png)"
    return f"{chart_of_all}\n\n{_wrapped(text)}\n"


def table(result: dict, stem: str) -> str:
    """Rates of ours and of the best peer of each pass, a row for each entry."""
    rates = {
        (row["case"], row["peer"], key): row[key]
        for row in result["rows"]
        for key in chart.PASSES
        if key in row
    }
    ratios = {
        (ratio["case"], key): ratio["to_best"] for key in chart.PASSES for ratio in result["ratios"][key]
    }

    def ours(case: str, name: str) -> str:
        return " / ".join(_rate(rates.get((case, name, key))) for key in chart.PASSES)

    def best(case: str) -> str:
        found = [_best_peer(rates, case, key) for key in chart.PASSES]
        return " / ".join(f"{_rate(rate)} {SHORT[name]}" if name else "–" for name, rate in found)

    def ratio(case: str) -> str:
        found = [ratios.get((case, key)) for key in chart.PASSES]
        return " / ".join("–" if value is None else f"{value:.2f}" for value in found)

    text = (
        f"TFLOP/s of visible pairs, forward / backward, kernel time, {DTYPE}, one {result['device']} each, "
        f"JAX {result['versions']['jax']}, {result['date'][:10]} "
        f"([{stem}.json](../benchmarks/results/{stem}.json), which has the rates of all peers and where each "
        "shape is published). Shape: batch, tokens (t: queries, s: keys), query / key heads, head dim; TP n: "
        "one device's part in n-way tensor parallelism."
    )
    lines = [
        *_wrapped(text).splitlines(),
        "",
        "| model | shape | `cuda` | `pallas` | best peer | `cuda` over it |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for entry in result["entries"]:
        case = entry["name"]
        cells = (
            entry["model"],
            entry["shape"],
            ours(case, "jax_flash_cuda"),
            ours(case, "jax_flash_pallas"),
            best(case),
            ratio(case),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _summary(result: dict) -> str:
    """Ours over the best peer, as a sentence; nothing where no peer was measured."""
    told = [
        f"{key} {_mean(ratios):.2f} of the best peer's, ahead in {ahead} of {len(ratios)}"
        for key in chart.PASSES
        if (ratios := result["ratios"][key])
        for ahead in [sum(ratio["to_best"] >= 1 for ratio in ratios)]
    ]
    return f"Rates of `cuda`, in the geometric mean: {'; '.join(told)}. " if told else ""


def _mean(ratios: Sequence[dict]) -> float:
    return statistics.geometric_mean(ratio["to_best"] for ratio in ratios)


def _best_peer(rates: dict, case: str, key: str) -> tuple[str | None, float | None]:
    found = {name: rates[case, name, key] for name in contenders.PEERS if (case, name, key) in rates}
    name = max(found, key=found.__getitem__, default=None)
    return name, found.get(name)


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"
