"""The losses of a run, and the files that show them: losses.csv and loss.png."""

import csv
import dataclasses
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np


@dataclasses.dataclass
class History:
    """Losses in nats per byte: `training[i]` is that of step i + 1; `validation` is keyed by steps done."""

    training: list[float] = dataclasses.field(default_factory=list)
    validation: dict[int, float] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict:
        # JSON has no integer keys.
        return {"training": self.training, "validation": list(self.validation.items())}

    @classmethod
    def from_json(cls, value: dict) -> "History":
        return cls(value["training"], {int(step): loss for step, loss in value["validation"]})


def write_csv(history: History, path: pathlib.Path) -> None:
    """One row a step, with the validation loss if it was measured. Floats are written without loss."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "training_loss", "validation_loss"])
        for step, loss in enumerate(history.training, start=1):
            writer.writerow(
                [step, repr(loss), repr(history.validation[step]) if step in history.validation else ""]
            )


def plot(history: History, title: str, path: pathlib.Path) -> None:
    """Losses over steps."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    steps = np.arange(1, len(history.training) + 1)
    axes.plot(steps, history.training, color="#9ecae1", linewidth=0.8, label="training, each step")
    width = max(len(steps) // 50, 1)
    if width > 1:
        smooth = np.convolve(history.training, np.ones(width) / width, mode="valid")
        axes.plot(steps[width - 1 :], smooth, color="#08519c", label=f"training, mean of {width} steps")
    axes.plot(
        *zip(*sorted(history.validation.items()), strict=True), "o-", color="#d94801", label="validation"
    )
    axes.set(title=title, xlabel="step", ylabel="loss (nats per byte)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
