"""JSON files of figures, with all that says what they are figures of."""

import datetime
import importlib.metadata
import json
import pathlib
import sys
from typing import Any

import jax

sys.path.append(str(pathlib.Path(__file__).parents[1] / "benchmarks"))

from measured_commit import measured_commit  # pyright: ignore[reportMissingImports]


def write(path: str, rows: list[dict[str, Any]], **facts: Any) -> None:
    """Writes `rows`, each of a case and its figures, and beside them `facts` and those of this run."""
    result = {
        "commit": measured_commit(),
        "device": jax.devices()[0].device_kind,
        "platform": jax.default_backend(),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **facts,
        "rows": rows,
    }
    file = pathlib.Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")
