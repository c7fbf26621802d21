"""benchmarks/sharded_training.py: meshes of simulated devices have the same losses."""

import json
from pathlib import Path


def test_meshes_have_the_same_losses(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import sharded_training

    text, out = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text("".join(f"def f{i}(x):\n    return x + {i}\n\n\n" for i in range(300)))
    sharded_training.main(
        f"--shards 1 2 8 --text {text} --steps 3 --layers 1 --heads 2 --width 32 --sequence-length 16 "
        f"--batch-size 8 --dtype float32 --out {out}".split()
    )
    result = json.loads(out.read_text())
    assert [row["mesh"] for row in result["rows"]] == [[8, 1], [4, 2], [1, 8]]
    assert 0 <= result["difference"] < 1e-5
    assert all(len(row["losses"]) == 3 and row["step_seconds"] > 0 for row in result["rows"])
