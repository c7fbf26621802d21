"""score_mod and block_mask of a call on chunks: functions see indices of the whole sequences.

An ordinary call on a chunk of queries and one of keys counts both from 0. Its functions capture where the
chunks start (`functions/chunks.py`). Its block mask has blocks of the same size, counted from the chunks'
starts, and each takes its kind from the blocks of the whole sequences that it overlaps.

    chunks of whole blocks        a block each, of the same kind
    other chunks, and stripes     all full: full; all hidden: hidden; else partial, so mask_mod decides

`BlockMask.from_blocks` has no mask_mod, so it goes with the first alone.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._axes import batch_shape
from jax_flash._block_kinds import Kind
from jax_flash._spec import AttentionSpec, Operands, captured_name
from jax_flash.context_parallel.load_balance import Chunk
from jax_flash.functions.chunks import STARTS, on_chunks
from jax_flash.functions.static import StaticFunction


def local_spec(spec: AttentionSpec, stride: int) -> AttentionSpec:
    """That of a call on chunks, whose tokens are `stride` apart."""
    if spec.score_mod is not None:
        spec = dataclasses.replace(spec, score_mod=on_chunks(spec.score_mod, stride))
    if spec.block_mask is not None and spec.block_mask.mask_mod is not None:
        mask_mod = on_chunks(spec.block_mask.mask_mod, stride)
        spec = dataclasses.replace(spec, block_mask=dataclasses.replace(spec.block_mask, mask_mod=mask_mod))
    return spec


def placed(spec: AttentionSpec, operands: Operands, queries: Chunk, keys: Chunk) -> Operands:
    """The operands of a call on chunks: with their starts, and the kinds of their own blocks.

    Args:
      spec: of the whole sequences.
      operands: with the block mask of the whole sequences.
    """
    firsts = {"query": queries.first, "key": keys.first}
    for name, function in _by_name(spec).items():
        starts = jnp.stack([jnp.asarray(firsts[x], jnp.int32) for x in STARTS])
        starts = starts.reshape((1,) * len(batch_shape(operands)) + starts.shape)
        operands = operands.replace(**{captured_name(name, len(function.shapes)): starts})
    if spec.block_mask is not None:
        assert operands.block_kinds is not None
        kinds = _kinds(operands.block_kinds, spec.block_mask.block_size, (queries, keys))
        operands = operands.replace(block_kinds=kinds)
    return operands


def refusal(spec: AttentionSpec, queries: Chunk, keys: Chunk) -> str | None:
    """Why calls on such chunks can't have the block mask, or None."""
    if spec.block_mask is None or spec.block_mask.mask_mod is not None:
        return None
    chunks = ("queries", queries), ("keys", keys)
    for (what, chunk), size in zip(chunks, spec.block_mask.block_size, strict=True):
        if _most_overlapped(chunk, size) > 1:
            share = f"{chunk.length} {what}" if chunk.stride == 1 else f"every {chunk.stride}th of the {what}"
            return (
                f"block_mask has no mask function, and a chunk of {share} is not of whole blocks of {size}; "
                'jax_flash.create_block_mask makes one that has, and "ulysses" takes both'
            )
    return None


def _by_name(spec: AttentionSpec) -> dict[str, StaticFunction]:
    mask_mod = None if spec.block_mask is None else spec.block_mask.mask_mod
    found = {"score_mod": spec.score_mod, "mask_mod": mask_mod}
    return {name: function for name, function in found.items() if function is not None}


def _kinds(kinds: jax.Array, block_size: tuple[int, int], chunks: tuple[Chunk, Chunk]) -> jax.Array:
    """Those of the chunks' blocks, from those of the sequences' `(*B|1, N|1, blocks of T, blocks of S)`."""
    low = high = kinds
    for axis, size, chunk in zip((-2, -1), block_size, chunks, strict=True):
        starts = np.arange(0, chunk.length, size, dtype=np.int32)
        ends = np.minimum(starts + size, chunk.length).astype(np.int32)
        first, last = ((chunk.first + chunk.stride * x) // size for x in (starts, ends - 1))
        overlapped = [jnp.minimum(first + i, last) for i in range(_most_overlapped(chunk, size))]
        low, high = (
            functools.reduce(pick, (jnp.take(x, blocks, axis=axis, mode="clip") for blocks in overlapped))
            for pick, x in ((jnp.minimum, low), (jnp.maximum, high))
        )
    found = jnp.where(low == Kind.FULL, Kind.FULL, jnp.where(high == Kind.HIDDEN, Kind.HIDDEN, Kind.PARTIAL))
    return found.astype(kinds.dtype)


def _most_overlapped(chunk: Chunk, size: int) -> int:
    """How many blocks of the sequence a block of the chunk overlaps, at most."""
    starts_with_a_block = isinstance(chunk.first, int) and chunk.first % size == 0
    # A chunk of consecutive tokens starts at a multiple of its length.
    divides = chunk.length % size == 0 or size % chunk.length == 0
    if chunk.stride == 1 and (starts_with_a_block or divides):
        return 1
    last = chunk.stride * (min(size, chunk.length) - 1)  # counted from the first token of the chunk's block
    return (last + size - 1) // size + 1
