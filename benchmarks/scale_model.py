"""A model of the time that attention to a sharded sequence takes, from what one device and two show.

    python benchmarks/scale_model.py benchmarks/results/scale_out_2xh100.json \
        --check benchmarks/results/scale_out_4xh100.json --out benchmarks/results/scale_model.json

It takes from the first file how fast one device computes, and from `links` of the same file what
collectives take: a latency, and bytes a second. Neither is fitted to sharded calls. What the model leaves
out: that devices wait for each other, that transfers take processors from the kernels, and that many devices
share switches.

- `check`: the efficiency of the measured rows, predicted and measured.
- `curves`: the efficiency on 2 to 1024 devices, one link for all, of the kind measured or of 400 Gb/s for
  each device. The tokens of a device stay as many.
"""

import argparse
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt

MEMORY = 2.9e12
"""Bytes a second of a kernel that copies (benchmarks/results/decode_8_bits_h100.json)."""
ETHERNET = 0.9 * 400e9 / 8
"""Bytes a second of a device's link of 400 Gb/s, with what protocols take off."""
ETHERNET_LATENCY = 30e-6
TOKENS, DEVICES = (16384, 32768), tuple(2**i for i in range(1, 11))
WAYS = ("all-gather, zigzag", "ring, zigzag", "Ulysses", "ring × Ulysses, zigzag")


@dataclasses.dataclass(frozen=True)
class Link:
    """What a collective takes: seconds until it begins, and bytes a second that a device sends."""

    latency: float
    rate: float

    def seconds(self, sent: float) -> float:
        return self.latency + sent / self.rate if sent else 0.0


Links = Mapping[str, Link]
"""By collective."""


@dataclasses.dataclass(frozen=True)
class Call:
    """Causal attention: tokens of the whole sequence, heads of queries and of keys, head dim."""

    tokens: int
    heads: int
    key_heads: int
    head_dim: int

    @staticmethod
    def of(case: str) -> "Call":
        """That of a row's case, or each of its calls."""
        found = re.fullmatch(r"b1 s(\d+) h(\d+)/(\d+) d(\d+) causal(?: ×\d+)?", case)
        if found is None:
            raise ValueError(f"no call of this model: {case}")
        return Call(*map(int, found.groups()))


def links_of(rows: Sequence[dict]) -> dict[str, Link]:
    """From the smallest transfers the latency, from the largest the rate."""
    found = {}
    for name in {row["collective"] for row in rows}:
        times = sorted((row["bytes"], row["milliseconds"] / 1e3) for row in rows if row["collective"] == name)
        latency = min(seconds for _, seconds in times)
        sent, seconds = times[-1]
        found[name] = Link(latency, sent / (seconds - latency))
    return found


def seconds(way: str, call: Call, devices: int, on_one: float, links: Links, backward: bool) -> float:
    """Of a call on so many devices, forward or forward and backward.

    Args:
      on_one: what the whole call takes on one device.
    """
    if way == "Ulysses":
        return on_one / devices + exchanges(call, devices, links, backward)
    if way == "all-gather, zigzag":
        return on_one / devices + gathers(call, devices, links, backward)
    if way in ("ring, zigzag", "ring, striped"):
        return ring(call, devices, on_one, links, backward)
    if way == "ring × Ulysses, zigzag":
        # Pairs of devices have half of the heads each, and the tokens of both.
        of_pair = dataclasses.replace(call, heads=call.heads // 2, key_heads=max(call.key_heads // 2, 1))
        between = exchanges(dataclasses.replace(call, tokens=2 * call.tokens // devices), 2, links, backward)
        return between + ring(of_pair, devices // 2, on_one / 2, links, backward)
    raise ValueError(way)


def exchanges(call: Call, devices: int, links: Links, backward: bool) -> float:
    """Ulysses: queries, keys, values and the output, each all but one part; backward twice more."""
    key_heads = max(call.key_heads, devices)
    rows = call.tokens / devices
    parts = [rows * heads * call.head_dim * 2 for heads in (call.heads, key_heads, key_heads, call.heads)]
    sent = sum(links["all_to_all"].seconds(x * (devices - 1) / devices) for x in parts)
    copied = sum(4 * x for x in parts) / MEMORY  # before and after: each is read and written
    return (sent + copied) * (3 if backward else 1)


def gathers(call: Call, devices: int, links: Links, backward: bool) -> float:
    """All-gather: keys and values forward and again backward, and float32 gradients by a reduce-scatter."""
    own = call.tokens / devices * call.key_heads * call.head_dim * 2
    whole = own * devices
    forward = 2 * (links["all_gather"].seconds(own * (devices - 1)) + 2 * whole / MEMORY)
    if not backward:
        return forward
    scattered = 2 * (links["psum_scatter"].seconds(2 * own * (devices - 1)) + 6 * whole / MEMORY)
    return 2 * forward + scattered


def ring(call: Call, devices: int, on_one: float, links: Links, backward: bool) -> float:
    """A ring: what a step's transfer takes longer than its computation, and sums of steps in memory."""
    if devices == 1:
        return on_one
    rows = call.tokens / devices
    keys = 2 * rows * call.key_heads * call.head_dim
    out = rows * call.heads * call.head_dim * 4
    forward_share = 1 / 3.5 if backward else 1.0
    step = on_one / devices**2
    send = links["ppermute"].seconds(2 * keys)
    # A step reads its own result and the sum, and writes both.
    sums = 4 * out / MEMORY
    total = on_one / devices + (devices - 1) * (sums + max(0.0, send - step * forward_share))
    if backward:
        carried = send + links["ppermute"].seconds(4 * keys)
        total += (devices - 1) * (sums + max(0.0, carried - step * (1 - forward_share)))
        total += links["ppermute"].seconds(4 * keys)  # gradients go home
    return total


def checked(result: dict, links: Links) -> list[dict]:
    """Rows of a result of scale_out.py with the efficiency that the model predicts."""
    found = []
    for row in result["rows"]:
        if "efficiency" not in row or row["way"] not in (*WAYS, "ring, striped"):
            continue
        try:
            call = Call.of(row["case"])
        except ValueError:
            continue
        devices, on_one = result["devices"], row["one"] / 1e3
        predicted = seconds(row["way"], call, devices, on_one, links, row["pass"] == "both")
        found.append(
            {
                "case": row["case"],
                "devices": devices,
                "way": row["way"],
                "pass": row["pass"],
                "measured": row["efficiency"],
                "predicted": on_one / devices / predicted,
            }
        )
    return found


def curves(result: dict, links: Links) -> list[dict]:
    """The efficiency, forward and backward, of calls that grow with the devices."""
    row = max((r for r in result["rows"] if r.get("pass") == "both"), key=lambda r: r.get("one", 0))
    measured = Call.of(row["case"])
    slow = {name: Link(ETHERNET_LATENCY, ETHERNET) for name in links}
    found = []
    for of_one, (kind, links_of_kind) in (
        (tokens, x) for tokens in TOKENS for x in (("measured", links), ("400 Gb/s", slow))
    ):
        for way in WAYS:
            points = []
            for devices in DEVICES:
                call = dataclasses.replace(measured, tokens=of_one * devices)
                if (way == "Ulysses" and devices > call.heads) or (way == WAYS[-1] and devices < 4):
                    continue
                on_one = row["one"] / 1e3 * (call.tokens / measured.tokens) ** 2
                of_all = seconds(way, call, devices, on_one, links_of_kind, True)
                points.append([devices, on_one / devices / of_all])
            found.append({"way": way, "link": kind, "tokens_of_a_device": of_one, "points": points})
    return found


def draw(found: Sequence[dict], rows: Sequence[dict], out: Path) -> None:
    """A panel for each link and number of tokens; dots are measured."""
    kinds = list(dict.fromkeys((curve["link"], curve["tokens_of_a_device"]) for curve in found))
    figure, panels = plt.subplots(
        1, len(kinds), figsize=(3.3 * len(kinds), 3.4), sharey=True, layout="constrained"
    )
    for panel, (link, tokens) in zip(panels, kinds, strict=True):
        for i, way in enumerate(WAYS):
            colour = f"C{i}"
            for curve in found:
                if (curve["way"], curve["link"], curve["tokens_of_a_device"]) == (way, link, tokens):
                    panel.plot(*zip(*curve["points"], strict=True), color=colour, label=way)
            if link == "measured":
                dots = [
                    (row["devices"], row["measured"])
                    for row in rows
                    if row["way"] == way
                    and row["pass"] == "both"
                    and Call.of(row["case"]).tokens == tokens * row["devices"]
                ]
                panel.plot(*(zip(*dots, strict=True) if dots else ([], [])), "o", color=colour)
        panel.set_xscale("log", base=2)
        panel.set_xticks([2, 8, 32, 128, 1024], ["2", "8", "32", "128", "1024"])
        panel.set_ylim(0, 1.05)
        panel.set_xlabel("devices")
        panel.set_title(f"{tokens} tokens a device, link {link}", fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("efficiency, forward and backward")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(out, dpi=150)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("measured", type=Path, help="result of scale_out.py, with links")
    parser.add_argument("--check", type=Path, nargs="*", default=[], help="more results to predict")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write, and a chart beside it")
    options = parser.parse_args(arguments)
    result = json.loads(options.measured.read_text())
    links = links_of(result["links"])
    rows = [
        row
        for path in (options.measured, *options.check)
        for row in checked(json.loads(path.read_text()), links)
    ]
    for row in rows:
        where = f"{row['devices']} {row['case']:32} {row['way']:24} {row['pass']:8}"
        print(f"{where} predicted {row['predicted']:.3f} measured {row['measured']:.3f}")
    found = curves(result, links)
    written = {
        "commit": result["commit"],
        "device": result["device"],
        "date": result["date"],
        "versions": result["versions"],
        "links": {name: dataclasses.asdict(link) for name, link in sorted(links.items())},
        "check": rows,
        "curves": found,
    }
    options.out.write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n")
    draw(found, rows, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
