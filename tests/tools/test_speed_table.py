"""The script that writes the README's tables of speed."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)


def test_the_readme_has_the_tables_of_the_committed_results():
    import speed_table

    text = speed_table.README.read_text()
    assert speed_table.with_tables(text) == text, "run python benchmarks/speed_table.py"
    text = speed_table.OPEN_MODELS.read_text()
    assert speed_table.with_models(text) == text, "run python benchmarks/speed_table.py"


def test_a_cell_for_each_contender_and_none_left_out():
    import speed_table

    rows = [
        {"case": "a", "peer": "jax_flash_cuda", "forward": 99.6, "backward": 40.2},
        {"case": "a", "peer": "cudnn", "forward": 50.0, "error": "no backward"},
        {"case": "b", "peer": "fa3_cu13", "forward": 7.0, "backward": 8.0},
        {"case": "b", "peer": "jax_flash_xla", "forward": 1.0, "backward": 1.0},  # has no column
    ]
    result = {"device": "made up", "dtype": "float16", "date": "2026-01-02T03", "versions": {"jax": "1"}}
    *_, titles, _, first, second = speed_table.table(result | {"rows": rows}).splitlines()
    assert titles == (
        "| case | `cuda` | `pallas` | cuDNN (jax.nn) | FlashAttention-3 (dew-flash-attn) "
        "| FlashAttention-3 (flash-attn3-jax, CUDA 12) | tokamax |"
    )
    assert first == "| a | 100 / 40 | – / – | 50 / – | – / – | – / – | – / – |"
    assert second == "| b | – / – | – / – | – / – | 7 / 8 | – / – | – / – |"


def test_a_readme_without_a_place_for_a_table_is_refused():
    import speed_table

    with pytest.raises(ValueError, match="no place for the table of benchmarks"):
        speed_table.with_tables("# A title\n")
