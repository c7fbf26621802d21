"""The chart of a result of train.py, from its JSON alone: how much faster our steps are than others'.

python benchmarks/train_chart.py benchmarks/results/train_h200.json      writes train_h200.png beside it
"""

import json
import sys
from pathlib import Path

import chart
import matplotlib.pyplot as plt

STYLES = chart.STYLES | {"plain": ("plain attention by XLA", "#888888")}


def label(name: str) -> str:
    return STYLES[name][0]


def out_of_memory(row: dict) -> bool:
    return any(words in row.get("error", "") for words in ("MemoryError", "RESOURCE_EXHAUSTED"))


def draw(path: Path) -> Path:
    """Draws `path`'s chart beside it and returns where; a peer without a figure gets its reason."""
    result = json.loads(path.read_text())
    ratios = result["speed_ups"]
    if not ratios:
        raise ValueError(f"{path} has no figures")
    peers = [name for name in STYLES if any(name in ratio["over"] for ratio in ratios)]
    errors = {(row["case"], row["peer"]): row for row in result["rows"] if "error" in row}

    figure, panel = plt.subplots(figsize=(max(5.0, 1.2 + 1.5 * len(ratios)), 3.8), layout="constrained")
    width = 0.8 / max(len(peers), 1)
    for i, name in enumerate(peers):
        text, colour = STYLES[name]
        offset = (i - (len(peers) - 1) / 2) * width
        places = [x for x, ratio in enumerate(ratios) if name in ratio["over"]]
        heights = [ratios[x]["over"][name] for x in places]
        bars = panel.bar([x + offset for x in places], heights, width, label=f"over {text}", color=colour)
        panel.bar_label(bars, fmt="%.2f×", fontsize=8, padding=2)
        for x, ratio in enumerate(ratios):
            if out_of_memory(errors.get((ratio["case"], name), {})):
                at = {"ha": "center", "va": "bottom", "rotation": 90, "fontsize": 8}
                panel.text(x + offset, 0.05, "out of memory", color="#555555", **at)
    panel.axhline(1, color="#333333", linewidth=0.8)
    panel.set_xticks(range(len(ratios)), [_two_lines(ratio) for ratio in ratios], fontsize=8)
    panel.set_ylabel("speed-up of a training step")
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(axis="x", length=0)
    panel.margins(y=0.12)
    panel.set_xlim(-0.6, len(ratios) - 0.4)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    model = result["model"]
    size = f"{model['parameters'] / 1e6:.0f} M parameters, {result['tokens']} tokens a step, {model['dtype']}"
    figure.suptitle(f"Training with jax_flash on {result['device']}\n{size}", fontsize=11)
    out = path.with_suffix(".png")
    figure.savefig(out, dpi=150)
    plt.close(figure)
    return out


def _two_lines(ratio: dict) -> str:
    return f"length {ratio['sequence']}\n" + ("layers recomputed" if ratio["remat"] else "")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(draw(Path(argument)))
