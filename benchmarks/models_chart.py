"""The chart of a result of models.py, from its JSON alone.

python benchmarks/models_chart.py benchmarks/results/models_h200.json      writes models_h200.png beside it
"""

import json
import sys
from pathlib import Path

import chart
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OURS = "jax_flash_cuda"


def draw(path: Path) -> Path:
    """Draws `path`'s chart beside it and returns where.

    A line for each entry, with a dot for each contender's rate and, on the right, the ratio of our CUDA
    kernels' to the best peer's. A pass that nobody ran is left out.
    """
    result = json.loads(path.read_text())
    rates = {
        (row["case"], row["peer"], key): row[key]
        for row in result["rows"]
        for key in chart.PASSES
        if key in row
    }
    if not rates:
        raise ValueError(f"{path} has no figures")
    entries = [entry for entry in result["entries"] if any(case == entry["name"] for case, _, _ in rates)]
    peers = [name for name in chart.STYLES if any(peer == name for _, peer, _ in rates)]
    passes = [key for key in chart.PASSES if any(k == key for _, _, k in rates)]
    figure, panels = plt.subplots(
        ncols=len(passes),
        squeeze=False,
        sharey=True,
        figsize=(3.4 + 3.8 * len(passes), 1.5 + 0.24 * len(entries)),
        layout="constrained",
    )
    for panel, key in zip(panels[0], passes, strict=True):
        ratios = {ratio["case"]: ratio for ratio in result["ratios"][key]}
        _draw_pass(panel, key, entries, peers, rates, ratios)
    labels = [f"{entry['model']}   {entry['shape']}" for entry in entries]
    panels[0, 0].set_yticks(range(len(entries)), labels, fontsize=7.5)
    panels[0, 0].set_ylim(len(entries) - 0.4, -0.6)  # the first one on top
    handles = [plt.Line2D([], [], **_marker(name), linestyle="", label=chart.label(name)) for name in peers]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.suptitle(f"Attention in open models on {result['device']}, bfloat16", fontsize=11)
    out = path.with_suffix(".png")
    figure.savefig(out, dpi=150)
    plt.close(figure)
    return out


def _draw_pass(panel, key, entries, peers, rates, ratios) -> None:
    for place, entry in enumerate(entries):
        if place % 2:
            panel.axhspan(place - 0.5, place + 0.5, color="#F4F4F4", linewidth=0)
        if ratio := ratios.get(entry["name"]):
            panel.text(
                1.01,
                place,
                f"{ratio['to_best']:.2f}",
                transform=panel.get_yaxis_transform(),
                va="center",
                fontsize=7.5,
                fontweight="normal" if ratio["to_best"] >= 1 else "bold",
            )
    for name in reversed(peers):  # ours on top
        places = [place for place, entry in enumerate(entries) if (entry["name"], name, key) in rates]
        values = [rates[entries[place]["name"], name, key] for place in places]
        panel.plot(values, places, linestyle="", zorder=3, **_marker(name))
    panel.set_xlim(left=0)
    panel.set_title(f"{key}, TFLOP/s; right: CUDA over the best peer", fontsize=9)
    panel.grid(axis="x", color="#DDDDDD", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(axis="y", length=0)


def _marker(name: str) -> dict:
    """Ours are diamonds, peers dots."""
    ours = name.startswith("jax_flash")
    colour = chart.STYLES[name][1]
    return {"marker": "D" if ours else "o", "markersize": 5.5 if name == OURS else 4.5, "color": colour}


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(draw(Path(argument)))
