"""The drawings of masks.md, each below the code of its mask. The last line of the code says what T and S are.

    python docs/mask_drawings.py

draws them again. `tests/tools/test_docs_masks.py` fails where a drawing is out of date.
"""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash import masks

PAGE = pathlib.Path(__file__).with_name("masks.md")
DRAWING = re.compile(
    r"^```python\n(?P<code>(?:(?!```).*\n)*?)"
    r"(?P<mask>.+?) +# T = (?P<T>\d+), S = (?P<S>\d+)\n```\n\n```text\n(?P<drawing>(?:(?!```).*\n)*)```$",
    re.MULTILINE,
)
SEEN, HIDDEN = "■", "·"


def mask_of(match: re.Match[str]) -> masks.Mask:
    names = {"np": np, "jnp": jnp, **{name: getattr(masks, name) for name in masks.__all__}}
    exec(match["code"], names)
    return eval(match["mask"], names)


def drawn(mask: masks.Mask, T: int, S: int) -> str:
    """A row for each query and a column for each key, of batch row 0 and head 0."""
    mask.check_sizes(1, 1, T, S)
    of_keys = jax.vmap(lambda q, k: mask(0, 0, q, k), (None, 0))
    of_pairs = jax.vmap(of_keys, (0, None))
    sees = np.asarray(of_pairs(jnp.arange(T, dtype=jnp.int32), jnp.arange(S, dtype=jnp.int32)))
    return "".join(" ".join(SEEN if x else HIDDEN for x in row) + "\n" for row in sees)


def with_drawings(text: str) -> str:
    """The page's text, with every drawing as its mask is."""

    def replaced(match: re.Match[str]) -> str:
        drawing = drawn(mask_of(match), int(match["T"]), int(match["S"]))
        return match[0].removesuffix(f"{match['drawing']}```") + drawing + "```"

    return DRAWING.sub(replaced, text)


if __name__ == "__main__":
    PAGE.write_text(with_drawings(PAGE.read_text()))
