"""Mask functions that attention patterns of the literature need, ready made.

Each is an object that is called as `mask(batch, head, query_index, key_index) -> bool`, with int32 scalars,
and True where the query attends to the key. Indices count from 0 in each sequence; `head` is the query head.

    mask = (LocalMask((255, 0)) | GlobalMask(4)) & DocumentMask(document_ids)

`&`, `|` and `~` combine them with each other and with any function of that signature, and `and_masks` and
`or_masks` do so with functions alone. docs/masks.md shows what each lets be seen.

Names and meanings are those of JAX's splash attention where it has them. Masks there are given the shape
`(T, S)`; a function of indices needs none.

**Offsets.** Query i stands at position `i + offset` of the keys. The default, 0, aligns the first query with
the first key. `offset=S - T` aligns the last query with the last key, as `is_causal` of `flash_attention`
does. An offset may be an int or an int32 array, `()` or `(B,)`, one of each batch row, traced or not.
"""

from jax_flash.masks.arrays import BlockLayoutMask, DocumentMask, MultiHeadMask, NumpyMask
from jax_flash.masks.bigbird import BigBirdMask
from jax_flash.masks.global_tokens import GlobalMask, LongformerMask
from jax_flash.masks.mask import Mask, and_masks, or_masks
from jax_flash.masks.neighborhood import NeighborhoodMask
from jax_flash.masks.positions import CausalMask, ChunkedCausalMask, FullMask, LocalMask, PrefixLMMask
from jax_flash.masks.strided import DilatedMask, FixedMask, StridedMask
from jax_flash.masks.tree import TreeMask

__all__ = [
    "BigBirdMask",
    "BlockLayoutMask",
    "CausalMask",
    "ChunkedCausalMask",
    "DilatedMask",
    "DocumentMask",
    "FixedMask",
    "FullMask",
    "GlobalMask",
    "LocalMask",
    "LongformerMask",
    "Mask",
    "MultiHeadMask",
    "NeighborhoodMask",
    "NumpyMask",
    "PrefixLMMask",
    "StridedMask",
    "TreeMask",
    "and_masks",
    "or_masks",
]
