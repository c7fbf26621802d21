"""The README's tables of speed, and that of docs/models.md, from the committed results.

python benchmarks/speed_table.py      writes them into these documents
"""

import json
from pathlib import Path

import chart
import models_table
import train

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
OPEN_MODELS = ROOT / "docs" / "models.md"
ATTENTION = ROOT / "benchmarks" / "results" / "attention_h200.json"
TRAINING = ROOT / "benchmarks" / "results" / "train_h200.json"
MODELS = ROOT / "benchmarks" / "results" / "models_4xh100.json"

COLUMNS = {
    "jax_flash_cuda": "`cuda`",
    "jax_flash_pallas": "`pallas`",
    **{name: chart.label(name) for name in ("cudnn", "fa3_cu13", "fa3_cu12", "tokamax")},
}


def table(result: dict) -> str:
    """Rates of a result of attention.py, a row for each case."""
    rows = {(row["case"], row["peer"]): row for row in result["rows"]}
    cases = list(dict.fromkeys(row["case"] for row in result["rows"]))

    def cell(case: str, peer: str) -> str:
        row = rows.get((case, peer), {})
        return " / ".join(f"{row[key]:.0f}" if key in row else "–" for key in chart.PASSES)

    lines = [
        f"![Rates of attention on an {result['device']}](benchmarks/results/{ATTENTION.stem}.png)",
        "",
        f"TFLOP/s forward / backward on one {result['device']}, {result['dtype']}, kernel time, "
        f"JAX {result['versions']['jax']},",
        f"{result['date'][:10]}; case: batch, length, query / key heads, head dim. Measured in one run by",
        "`python benchmarks/attention.py`, each after 0.1 s of warm-up, so that clocks settle",
        f"([{ATTENTION.name}](benchmarks/results/{ATTENTION.name})).",
        "",
        f"| case | {' | '.join(COLUMNS.values())} |",
        "| --- " * (1 + len(COLUMNS)) + "|",
        *(f"| {case} | {' | '.join(cell(case, peer) for peer in COLUMNS)} |" for case in cases),
    ]
    return "\n".join(lines) + "\n"


def training_table(result: dict) -> str:
    """Times and memory of the training steps of a result of train.py."""
    model, versions = result["model"], result["versions"]
    size = f"{model['parameters'] / 1e6:.0f} M parameters"
    lines = [
        f"![Training steps on an {result['device']}](benchmarks/results/{TRAINING.stem}.png)",
        "",
        "A training step of the [example](examples/train_gpt.py): time, and the memory that XLA plans.",
        f"The model has {size} ({model['layers']} layers, {model['heads']} heads, width {model['width']}), a",
        f"step {result['tokens']} tokens; {model['dtype']}, one {result['device']}, JAX {versions['jax']},",
        f"{result['date'][:10]}. `remat` recomputes each layer. Measured by `python benchmarks/train.py`",
        f"([{TRAINING.name}](benchmarks/results/{TRAINING.name})).",
        "",
        train.table(result),
    ]
    return "\n".join(lines) + "\n"


def with_tables(text: str) -> str:
    """README.md's text with all tables written anew."""
    text = _replace(text, "benchmarks", table(json.loads(ATTENTION.read_text())))
    section = models_table.section(json.loads(MODELS.read_text()), MODELS.stem)
    text = _replace(text, "models", section)
    return _replace(text, "training", training_table(json.loads(TRAINING.read_text())))


def with_models(text: str) -> str:
    """The text of docs/models.md with its table written anew."""
    return _replace(text, "models", models_table.table(json.loads(MODELS.read_text()), MODELS.stem))


def _replace(text: str, name: str, lines: str) -> str:
    """`text` with `lines` between the comments `name` and `/name`."""
    before, start, rest = text.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- /{name} -->")
    if not (start and end):
        raise ValueError(f"the document has no place for the table of {name}")
    return before + start + lines + end + after


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text()))
    OPEN_MODELS.write_text(with_models(OPEN_MODELS.read_text()))
