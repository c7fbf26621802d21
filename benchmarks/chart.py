"""The bar chart of a result of attention.py, from its JSON alone.

python benchmarks/chart.py benchmarks/results/attention_h200.json      writes attention_h200.png beside it
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PASSES = ("forward", "backward")

# What each contender is called, and its colour. Readers with any colour vision can tell the palette of Okabe
# and Ito apart; ours have the strongest colours of it.
STYLES = {
    "jax_flash_cuda": ("jax_flash, CUDA", "#D55E00"),
    "jax_flash_pallas": ("jax_flash, Pallas", "#E69F00"),
    "jax_flash_xla": ("jax_flash, plain JAX", "#F0E442"),
    "cudnn": ("cuDNN (jax.nn)", "#0072B2"),
    "fa3_cu12": ("FlashAttention-3 (flash-attn3-jax, CUDA 12)", "#56B4E9"),
    "fa3_cu13": ("FlashAttention-3 (dew-flash-attn)", "#009E73"),
    "tokamax": ("tokamax", "#CC79A7"),
    "jax_mgpu": ("JAX attention_mgpu", "#888888"),
}


def label(name: str) -> str:
    """What a chart or a table calls a contender."""
    return STYLES[name][0]


def draw(path: Path) -> Path:
    """Draws `path`'s chart beside it and returns where.

    Contenders without a figure are left out, and so is a pass that nobody ran.
    """
    result = json.loads(path.read_text())
    rates = {
        (row["peer"], row["case"], key): row[key] for row in result["rows"] for key in PASSES if key in row
    }
    if not rates:
        raise ValueError(f"{path} has no figures")
    cases = list(dict.fromkeys(case for _, case, _ in rates))
    peers = [name for name in STYLES if any(peer == name for peer, _, _ in rates)]
    passes = [key for key in PASSES if any(k == key for _, _, k in rates)]

    figure, panels = plt.subplots(
        len(passes),
        squeeze=False,
        sharex=True,
        figsize=(max(6.0, 0.6 + 0.11 * len(cases) * (len(peers) + 1.5)), 0.9 + 3.1 * len(passes)),
        layout="constrained",
    )
    width = 0.86 / len(peers)
    for panel, key in zip(panels[:, 0], passes, strict=True):
        for i, name in enumerate(peers):
            label, colour = STYLES[name]
            places = [x for x, case in enumerate(cases) if (name, case, key) in rates]
            heights = [rates[name, cases[x], key] for x in places]
            offset = (i - (len(peers) - 1) / 2) * width
            panel.bar([x + offset for x in places], heights, width, label=label, color=colour, linewidth=0)
        panel.set_ylabel(f"{key}, TFLOP/s")
        panel.grid(axis="y", color="#DDDDDD", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(axis="x", length=0)
        panel.margins(x=0.01)
    panels[-1, 0].set_xticks(range(len(cases)), [_two_lines(case) for case in cases], fontsize=8)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(len(labels), 4 if len(cases) > 3 else 2),
        frameon=False,
    )
    figure.suptitle(f"Attention on {result['device']}, {result['dtype']} (higher is better)", fontsize=11)
    out = path.with_suffix(".png")
    figure.savefig(out, dpi=150)
    plt.close(figure)
    return out


def _two_lines(case: str) -> str:
    """ "b4 s4096 h16/16 d128 causal" with a break in the middle."""
    batch, length, *rest = case.split()
    shape, causal = rest[:2], rest[2:]
    return "\n".join((f"{batch} {length}", " ".join(shape), *causal))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(draw(Path(argument)))
