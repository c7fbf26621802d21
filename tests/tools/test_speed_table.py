"""The README's figures are those of the committed benchmark.

python tests/tools/test_speed_table.py      writes them anew
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULT = BENCHMARKS / "results" / "attention_h200.json"
TRAINING = BENCHMARKS / "results" / "train_h200.json"

COLUMNS = {
    "jax_flash_cuda": "`cuda`",
    "jax_flash_pallas": "`pallas`",
    "cudnn": "cuDNN",
    "fa3_cu13": "FlashAttention-3",
    "fa3_cu12": "the same, CUDA 12",
    "tokamax": "tokamax",
}


def table(result: dict) -> str:
    rows = {(row["case"], row["peer"]): row for row in result["rows"]}
    cases = list(dict.fromkeys(row["case"] for row in result["rows"]))

    def cell(case: str, peer: str) -> str:
        row = rows.get((case, peer), {})
        return " / ".join(f"{row[key]:.0f}" if key in row else "–" for key in ("forward", "backward"))

    lines = [
        f"![Rates of attention on an {result['device']}](benchmarks/results/{RESULT.stem}.png)",
        "",
        f"TFLOP/s forward / backward on one {result['device']}, {result['dtype']}, kernel time, "
        f"JAX {result['versions']['jax']},",
        f"{result['date'][:10]}; case: batch, length, query / key heads, head dim. From",
        f"[{RESULT.name}](benchmarks/results/{RESULT.name}) by `python benchmarks/attention.py`, which",
        "measures every peer that is installed in one run, each after 0.1 s of its own calls: the clock is",
        "what its power allows.",
        "",
        f"| case | {' | '.join(COLUMNS.values())} |",
        "| --- " * (1 + len(COLUMNS)) + "|",
        *(f"| {case} | {' | '.join(cell(case, peer) for peer in COLUMNS)} |" for case in cases),
    ]
    return "\n".join(lines) + "\n"


def training_table(result: dict) -> str:
    sys.path.append(str(BENCHMARKS))
    import train

    model, versions = result["model"], result["versions"]
    size = f"{model['parameters'] / 1e6:.0f} M parameters"
    lines = [
        f"![Training steps on an {result['device']}](benchmarks/results/{TRAINING.stem}.png)",
        "",
        f"A training step of the [example](examples/train_gpt.py) with {size} ({model['layers']} layers,",
        f"{model['heads']} heads, width {model['width']}) and {result['tokens']} tokens, in milliseconds,",
        f"and the memory that XLA plans; {model['dtype']}, one {result['device']}, JAX {versions['jax']},",
        f"{result['date'][:10]}; `remat` recomputes each layer. From",
        f"[{TRAINING.name}](benchmarks/results/{TRAINING.name}) by `python benchmarks/train.py`.",
        "",
        train.table(result),
    ]
    return "\n".join(lines) + "\n"


def _replace(text: str, name: str, path: Path, table_of: Callable[[dict], str]) -> str:
    before, start, rest = text.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- /{name} -->")
    assert start and end, f"no place for the figures of {path.name}"
    return before + start + table_of(json.loads(path.read_text())) + end + after


def with_tables(text: str) -> str:
    text = _replace(text, "benchmarks", RESULT, table)
    return _replace(text, "training", TRAINING, training_table)


def test_the_readme_has_the_figures_of_the_benchmarks():
    text = README.read_text()
    assert with_tables(text) == text, "stale: run python tests/tools/test_speed_table.py"


def test_no_step_takes_longer_than_with_cudnn():
    """At every length, whole."""
    found = {ratio["sequence"]: ratio["over"] for ratio in json.loads(TRAINING.read_text())["speed_ups"]}
    assert set(found) == {1024, 4096, 16384}
    assert all(over["cudnn"] >= 1 and over["plain"] > 2 for over in found.values())


def test_the_benchmark_is_whole():
    """Every default case by us, and beside us the peers of the bar."""
    rows = {(row["case"], row["peer"]): row for row in json.loads(RESULT.read_text())["rows"]}
    cases = {case for case, _ in rows}
    assert len(cases) == 12
    for case in cases:
        for peer in ("jax_flash_cuda", "jax_flash_pallas", "cudnn", "fa3_cu13", "tokamax"):
            assert {"forward", "backward"} <= rows[case, peer].keys()


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text()))
