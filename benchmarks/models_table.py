"""The README's section on attention in open models, from a result of models.py; speed_table.py writes it."""

import statistics
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

    lines = [
        f"![Attention in open models on an {result['device']}](benchmarks/results/{stem}.png)",
        "",
        "Attention as open models make it. TFLOP/s of visible pairs, forward / backward, kernel time,",
        f"{DTYPE}, one {result['device']}, JAX {result['versions']['jax']}, {result['date'][:10]}.",
        *_summary(result),
        "Shape: batch, tokens (t: queries, s: keys), query / key heads, head dim; TP n: one device's part in",
        "n-way tensor parallelism. Measured by `python benchmarks/models.py`; all peers' rates, and where",
        f"each shape is published: [{stem}.json](benchmarks/results/{stem}.json).",
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


def _summary(result: dict) -> list[str]:
    """Ours over the best peer, as a sentence; nothing where no peer was measured."""
    means = [f"{_mean(ratios):.2f} {key}" for key in chart.PASSES if (ratios := result["ratios"][key])]
    if not means:
        return []
    return [f"Rates of `cuda` over those of the best peer, geometric mean: {', '.join(means)}."]


def _mean(ratios: Sequence[dict]) -> float:
    return statistics.geometric_mean(ratio["to_best"] for ratio in ratios)


def _best_peer(rates: dict, case: str, key: str) -> tuple[str | None, float | None]:
    found = {name: rates[case, name, key] for name in contenders.PEERS if (case, name, key) in rates}
    name = max(found, key=found.__getitem__, default=None)
    return name, found.get(name)


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"
