"""The drawings of docs/masks.md are what its code lets be seen, and every mask has one."""

import pathlib
import sys

from jax_flash import masks

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "docs"))
import mask_drawings


def test_drawings_are_up_to_date():
    """`python docs/mask_drawings.py` draws them."""
    text = mask_drawings.PAGE.read_text()
    assert mask_drawings.with_drawings(text) == text
    assert len(mask_drawings.DRAWING.findall(text)) == text.count("```text")


def test_every_mask_is_drawn():
    codes = [match[0] for match in mask_drawings.DRAWING.finditer(mask_drawings.PAGE.read_text())]
    for name in {*masks.__all__} - {"Mask", "and_masks"}:
        assert any(f"{name}(" in code for code in codes), name


def test_a_stale_drawing_is_found():
    page = "```python\nn = 2\nCausalMask(n - 2)  # T = 2, S = 3\n```\n\n```text\n■ ■ ■\n```"
    assert mask_drawings.with_drawings(page).endswith("S = 3\n```\n\n```text\n■ · ·\n■ ■ ·\n```")
