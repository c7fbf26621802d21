"""The README's figures are those of the committed benchmark.

python tests/test_speed_table.py      writes them anew
"""

import json
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
RESULT = Path(__file__).parents[1] / "benchmarks" / "results" / "attention_h200.json"
MARKED = re.compile(r"(<!-- benchmarks -->\n).*?(<!-- /benchmarks -->)", re.DOTALL)

COLUMNS = {
    "jax_flash_cuda": "`cuda`",
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
        "measures every peer that is installed in one run.",
        "",
        f"| case | {' | '.join(COLUMNS.values())} |",
        "| --- " * (1 + len(COLUMNS)) + "|",
        *(f"| {case} | {' | '.join(cell(case, peer) for peer in COLUMNS)} |" for case in cases),
    ]
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    return MARKED.sub(lambda m: m[1] + table(json.loads(RESULT.read_text())) + m[2], text)


def test_the_readme_has_the_figures_of_the_benchmark():
    text = README.read_text()
    assert MARKED.search(text)
    assert with_table(text) == text, "stale: run python tests/test_speed_table.py"


def test_the_benchmark_is_whole():
    """Every default case by us, and beside us the peers of the bar."""
    rows = {(row["case"], row["peer"]): row for row in json.loads(RESULT.read_text())["rows"]}
    cases = {case for case, _ in rows}
    assert len(cases) == 12
    for case in cases:
        for peer in ("jax_flash_cuda", "cudnn", "fa3_cu13", "tokamax"):
            assert {"forward", "backward"} <= rows[case, peer].keys()


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
