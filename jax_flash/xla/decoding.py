"""Attention on a key-value cache in plain JAX: any device, any dtype, every option, no copy of the cache.

Queries are cut into tiles, each of one sequence. Each step of a loop gathers one block of keys for each tile,
whole pages or a part of one, and keeps the online softmax of FlashAttention. A cache without pages has one
page a sequence. A tile visits the blocks of its own sequence that it sees; the loop ends with the longest.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jax_flash import _cache_rows, _float8, _rotary
from jax_flash._cache_spec import CacheOperands, CacheSizes, CacheSpec, cache_sizes
from jax_flash._device import Device
from jax_flash._validate import NO_INDEX
from jax_flash.transforms.varying import vary_alike
from jax_flash.xla import functions, logits, loops

KEYS_PER_BLOCK = 256
QUERIES_PER_TILE = 64
PACKED_QUERIES_PER_TILE = 16  # at most; a sequence of one query has a tile of its own
LOGITS_AT_ONCE = 2**24


def supports(spec: CacheSpec, shapes: CacheOperands, device: Device) -> str | None:
    """None: it runs every call on every device."""
    return None


def describe(spec: CacheSpec, shapes: CacheOperands, device: Device) -> str:
    """The loops a call becomes, for `explain`."""
    cut = _cut(shapes)
    of_pages = f" ({cut.pages} pages)" if cut.pages > 1 else ""
    return (
        f"plain JAX, tiles of {cut.queries} queries by blocks of {cut.keys} keys{of_pages}, "
        f"{cut.tiles_at_once} tiles at a time"
    )


def forward(
    spec: CacheSpec, operands: CacheOperands
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Append, then attention.

    Returns:
      out in query's dtype, as the query with V columns; lse `(B, N, T)` in float32 (float64 for float64
      operands), `(1, N, T)` of packed queries; and the cache's key and value after the append.
    """
    operands = _cache_rows.of_layer(vary_alike(operands))
    key, value = _cache_rows.append(spec, operands)
    operands = operands.replace(key=key, value=value)
    # In blocks that a tile sees in part, zeros of hidden pairs meet values, and 0 times NaN is NaN.
    options = spec.attention
    hides = options.left is not None or options.right is not None or options.score_mod is not None
    out, lse = _attend(spec, operands, isolates=False)
    if hides:
        out, lse = loops.again_unless_finite(
            lambda operands: _attend(spec, operands, isolates=True), operands, (out, lse), judged=(out,)
        )
    return out, lse, key, value


@dataclasses.dataclass(frozen=True)
class _Cut:
    """How queries and keys are cut."""

    queries: int  # of a tile
    tiles: int
    tiles_at_once: int
    keys: int  # of a block
    pages: int  # that a block has, if it has whole ones
    blocks_per_page: int  # more than 1 only if pages is 1

    def block_of(self, position: jax.Array, page: int) -> jax.Array:
        """Of a sequence's blocks the one that has the key at `position`."""
        if self.blocks_per_page == 1:
            return position // self.keys
        return position // page * self.blocks_per_page + position % page // self.keys


def _cut(operands: CacheOperands) -> _Cut:
    n = cache_sizes(operands)
    page = n.page or n.S
    pages = min(max(1, KEYS_PER_BLOCK // page), max(1, n.S // page))
    keys = pages * page if page <= KEYS_PER_BLOCK else KEYS_PER_BLOCK
    if operands.query_offsets is None:
        queries = min(n.T, QUERIES_PER_TILE) if isinstance(n.T, int) else QUERIES_PER_TILE
        tiles = n.B * -(-n.T // queries)
    else:
        queries = max(1, min(n.T // n.B, PACKED_QUERIES_PER_TILE))
        tiles = -(-n.T // queries) + n.B
    at_once = 1  # which divides every number of tiles
    if isinstance(tiles, int):
        at_once = min(tiles, max(1, LOGITS_AT_ONCE // (n.N * queries * keys)))
    return _Cut(queries, tiles, at_once, keys, pages, -(-page // keys))


@dataclasses.dataclass(frozen=True)
class _Sequences:
    """Facts about each sequence, `(B,)`; padded so that sequence B, which some tiles are of, has no query."""

    starts: jax.Array  # of its queries, among the tokens
    queries: jax.Array
    keys: jax.Array  # after the append
    padding: jax.Array

    def of(self, sequence: jax.Array) -> "_Sequences":
        return _Sequences(*(jnp.take(x, sequence) for x in dataclasses.astuple(self)))

    @property
    def diagonal(self) -> jax.Array:
        """The key that the first query is aligned with."""
        return self.keys - self.queries


def _attend(spec: CacheSpec, operands: CacheOperands, isolates: bool) -> tuple[jax.Array, jax.Array]:
    """`out` and `lse` for a cache that has the new keys."""
    n, cut = cache_sizes(operands), _cut(operands)
    sequences = _sequences(operands, n)
    chunks = -(-cut.tiles // cut.tiles_at_once)
    tile = jnp.arange(chunks * cut.tiles_at_once, dtype=jnp.int32)
    # Each tile's sequence, and its first query there.
    if operands.query_offsets is None:
        of_one = -(-n.T // cut.queries)
        sequence, first = jnp.minimum(tile // of_one, n.B), tile % of_one * cut.queries
    else:
        per_sequence = -(-sequences.queries // cut.queries)
        ends = jnp.cumsum(per_sequence)
        sequence = jnp.searchsorted(ends, tile, side="right").astype(jnp.int32)
        sequence = jnp.minimum(sequence, n.B)
        first_tile = ends - per_sequence
        first = (tile - jnp.take(first_tile, sequence)) * cut.queries

    def attend(tiles):
        return _attend_tiles(spec, operands, cut, sequences, *tiles, isolates)

    if chunks == 1:
        out, lse = attend((sequence, first))
    else:
        split = (x.reshape(chunks, cut.tiles_at_once) for x in (sequence, first))
        out, lse = jax.lax.map(attend, tuple(split))
    out, lse = out.reshape(-1, n.N, n.V), lse.reshape(-1, n.N)

    if operands.query_offsets is None:
        rows = of_one * cut.queries
        out, lse = (x[: n.B * rows].reshape(n.B, rows, *x.shape[1:])[:, : n.T] for x in (out, lse))
    else:
        token = jnp.arange(n.T, dtype=jnp.int32)
        sequence = jnp.searchsorted(operands.query_offsets, token, side="right").astype(jnp.int32) - 1
        row = token - jnp.take(sequences.starts, sequence) + jnp.take(first_tile, sequence) * cut.queries
        is_of_none = (sequence < 0) | (sequence >= n.B)
        out = jnp.where(is_of_none[:, None, None], 0, jnp.take(out, row, axis=0, mode="clip"))[None]
        lse = jnp.where(is_of_none[:, None], -jnp.inf, jnp.take(lse, row, axis=0, mode="clip"))[None]
    return out, lse.swapaxes(1, 2)


def _sequences(operands: CacheOperands, n: CacheSizes) -> _Sequences:
    if operands.query_offsets is None:
        starts = jnp.arange(n.B, dtype=jnp.int32) * n.T
        counts = jnp.full(n.B, n.T, jnp.int32)
    else:
        starts = operands.query_offsets[:-1]
        counts = operands.query_offsets[1:] - starts
    padding = operands.left_padding
    padding = jnp.zeros(n.B, jnp.int32) if padding is None else jnp.maximum(padding, 0)
    facts = (starts, counts, _cache_rows.lengths_after(operands), padding)
    return _Sequences(*(jnp.pad(x, (0, 1)) for x in facts))


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """Tiles that are computed at once, each of one sequence."""

    sequence: jax.Array  # (tiles,)
    own: _Sequences  # of the tile's sequence, (tiles,)
    rows: jax.Array  # queries of the sequence, (tiles, queries)
    diagonal: jax.Array  # the key that each is aligned with, (tiles, queries)
    first_block: jax.Array  # of keys that a query sees, (tiles,)
    blocks: jax.Array  # how many, (tiles,)

    @property
    def is_row(self) -> jax.Array:
        """Whether the sequence has that query."""
        return self.rows < self.own.queries[:, None]


def _tiles(
    spec: CacheSpec,
    operands: CacheOperands,
    cut: _Cut,
    sequences: _Sequences,
    sequence: jax.Array,
    first: jax.Array,
) -> _Tiles:
    """The tiles of `sequence` that begin at query `first`."""
    n, window = cache_sizes(operands), spec.attention
    own = sequences.of(sequence)
    rows = first[:, None] + jnp.arange(cut.queries, dtype=jnp.int32)
    diagonal = own.diagonal[:, None] + rows
    begin, end = own.padding, own.keys
    if window.left is not None:
        begin = jnp.maximum(begin, diagonal[:, 0] - window.left)
    if window.right is not None:
        last_row = jnp.minimum(rows[:, -1], own.queries - 1)
        end = jnp.minimum(end, own.diagonal + last_row + window.right + 1)
    is_empty = (end <= begin) | (first >= own.queries)
    page = n.page or n.S
    first_block = cut.block_of(begin, page)
    blocks = jnp.where(is_empty, 0, cut.block_of(end - 1, page) + 1 - first_block)
    return _Tiles(sequence, own, rows, diagonal, first_block, blocks)


def _attend_tiles(
    spec: CacheSpec,
    operands: CacheOperands,
    cut: _Cut,
    sequences: _Sequences,
    sequence: jax.Array,
    first: jax.Array,
    isolates: bool,
) -> tuple[jax.Array, jax.Array]:
    """`out (tiles, queries, N, V)` and `lse (tiles, queries, N)` of tiles that begin at query `first`."""
    n = cache_sizes(operands)
    dtype = jnp.promote_types(operands.query.dtype, jnp.float32)
    tiles = _tiles(spec, operands, cut, sequences, sequence, first)
    query = _queries(spec, operands, tiles)  # (tiles, K, G, queries, H)
    slopes = operands.alibi_slopes
    if slopes is not None:
        slopes = slopes if slopes.shape[0] == 1 else jnp.take(slopes, sequence, axis=0, mode="clip")
        slopes = logits.by_group(slopes.astype(dtype), n.K)[..., None, None]
    scale = spec.attention.scale
    if operands.key_descale is not None:
        scale = scale * operands.key_descale.reshape(-1, 1, 1, 1)
    of_heads = _OfHeads(scale, slopes, _indices(spec, operands, sequence, n), _captured(spec, operands))

    def step(i, state):
        top, total, accumulated = state
        key, value, positions, is_there = _block(operands, cut, sequence, tiles.first_block + i)
        is_there &= (i < tiles.blocks)[:, None]
        is_there &= (positions >= tiles.own.padding[:, None]) & (positions < tiles.own.keys[:, None])
        # What is not there may be anything, NaN too.
        value = jnp.where(is_there[:, None, :, None], value, 0)
        x = _logits(spec, tiles, query, key, positions, is_there, of_heads, dtype)
        if isolates:  # What sees such a value finds NaN among its logits.
            is_finite = jnp.isfinite(value)
            spoils = ~jnp.all(is_finite, -1)[:, :, None, None]
            x = jnp.where(spoils & (x > -jnp.inf), jnp.nan, x)
            value = jnp.where(is_finite, value, 0)
        new_top = jnp.maximum(top, x.max(-1))
        p = jnp.exp(x - new_top[..., None])
        shrink = jnp.exp(top - new_top)
        total = total * shrink + p.sum(-1)
        p_value = logits.product(logits.for_product(p, value.dtype), value, ((4,), (2,)), dtype)
        return new_top, total, accumulated * shrink[..., None] + p_value

    shape = query.shape[:4]
    state = (
        loops.full(shape, jnp.finfo(dtype).min, dtype, like=query),  # finite: see `forward.py`
        loops.full(shape, 0, dtype, like=query),
        loops.full((*shape, n.V), 0, dtype, like=query),
    )
    top, total, accumulated = jax.lax.fori_loop(0, jnp.max(tiles.blocks), step, state)

    sees_nothing = total == 0
    if operands.sinks is not None:
        sinks = logits.by_group(operands.sinks.astype(dtype), n.K)[..., None]
        new_top = jnp.maximum(top, sinks)
        shrink = jnp.exp(top - new_top)
        total = total * shrink + jnp.exp(sinks - new_top)
        accumulated *= shrink[..., None]
        top = new_top
    total = jnp.where(sees_nothing, 1, total)
    if operands.value_descale is not None:
        accumulated *= operands.value_descale.reshape(-1, 1, 1, 1)
    out = logits.by_head(accumulated / total[..., None]).astype(operands.query.dtype)
    # Rows beyond the queries stay finite, for users who have JAX look for infinities.
    sees_nothing &= tiles.is_row[:, None, None]
    lse = logits.by_head(jnp.where(sees_nothing, -jnp.inf, top + jnp.log(total)))
    return out.swapaxes(1, 2), lse.swapaxes(1, 2)


@dataclasses.dataclass(frozen=True)
class _OfHeads:
    """What logits of a head are made with."""

    scale: float | jax.Array  # or `(K, 1, 1, 1)`, with the descales of keys
    slopes: jax.Array | None  # (tiles | 1, K, G, 1, 1)
    indices: dict[str, jax.Array]  # of sequence and head, as a score_mod takes them
    captured: list[jax.Array]  # by it


def _indices(
    spec: CacheSpec, operands: CacheOperands, sequence: jax.Array, n: CacheSizes
) -> dict[str, jax.Array]:
    if spec.attention.score_mod is None:
        return {}
    assert operands.batch_indices is not None and operands.head_indices is not None
    batch = jnp.take(operands.batch_indices, sequence, mode="clip")
    heads = logits.by_group(operands.head_indices, n.K)
    return {"batch": batch.reshape(-1, 1, 1, 1, 1), "head": heads[..., None, None]}


def _captured(spec: CacheSpec, operands: CacheOperands) -> list[jax.Array]:
    function = spec.attention.score_mod
    return [] if function is None else functions.captured(function, "score_mod", operands)


def _logits(
    spec: CacheSpec,
    tiles: _Tiles,
    query: jax.Array,
    key: jax.Array,
    positions: jax.Array,
    is_there: jax.Array,
    of_heads: _OfHeads,
    dtype: jnp.dtype,
) -> jax.Array:
    """Logits of tiles on a block of keys, `(tiles, K, G, queries, keys)`; -inf where a key is hidden."""
    options = spec.attention
    distance = positions[:, None, :] - tiles.diagonal[:, :, None]  # (tiles, queries, keys)
    is_visible = is_there[:, None, :] & tiles.is_row[:, :, None]
    if options.left is not None:
        is_visible &= distance >= -options.left
    if options.right is not None:
        is_visible &= distance <= options.right
    limits = jnp.finfo(dtype)
    x = logits.product(query, key, ((4,), (3,)), dtype) * of_heads.scale
    x = jnp.clip(x, limits.min, limits.max)  # as in `logits.block`
    if options.logits_soft_cap is not None:
        x = options.logits_soft_cap * jnp.tanh(x / options.logits_soft_cap)
    if options.score_mod is not None:
        own = {"query": tiles.diagonal[:, None, None, :, None], "key": positions[:, None, None, None, :]}
        score = of_heads.indices | own | {"score": x}
        x = jnp.broadcast_to(options.score_mod(score, of_heads.captured).astype(dtype), x.shape)
    if of_heads.slopes is not None:
        x -= of_heads.slopes * jnp.abs(distance).astype(dtype)[:, None, None]
    return jnp.where(is_visible[:, None, None], x, -jnp.inf)


def _queries(spec: CacheSpec, operands: CacheOperands, tiles: _Tiles) -> jax.Array:
    """The queries of tiles, rotated, `(tiles, K, G, queries, H)`."""
    n, rows = cache_sizes(operands), tiles.rows
    tokens = operands.query.reshape(-1, n.N, n.H)
    query = jnp.take(tokens, tiles.own.starts[:, None] + rows, axis=0, mode="clip")
    if operands.rotary_cos is not None:
        before = jnp.take(operands.lengths, tiles.sequence, mode="clip")[:, None]
        positions = {
            "own": tiles.diagonal,
            "appended": before + rows,
            "first": jnp.broadcast_to(before, rows.shape),
        }[spec.query_positions]
        tables = operands.rotary_cos, operands.rotary_sin
        query = _rotary.rotated(query, *tables, positions, spec.rotary_interleaved)
    return logits.by_group(query.swapaxes(1, 2), n.K)


def _block(
    operands: CacheOperands, cut: _Cut, sequence: jax.Array, block: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Block `block` of the keys of each `sequence`.

    Returns:
      key `(tiles, K, keys, H)`, value `(tiles, K, keys, V)`; the keys' positions, and whether they are there,
      `(tiles, keys)`.
    """
    table, page = _cache_rows.page_table(operands)
    first_page = block * cut.pages if cut.blocks_per_page == 1 else block // cut.blocks_per_page
    places = first_page[:, None] + jnp.arange(cut.pages, dtype=jnp.int32)  # in the table
    found = table.at[sequence[:, None], places].get(mode="fill", fill_value=NO_INDEX)
    is_there = (found >= 0) & (found < _cache_rows.pages(operands)) & _cache_rows.layer_is_there(operands)
    found = jnp.where(is_there, found, 0)

    # The last part of a page begins early enough to be whole; what a part before it has too isn't there.
    rows = min(page, cut.keys)
    nominal = block % cut.blocks_per_page * cut.keys
    start = jnp.minimum(nominal, page - rows)
    in_page = start[:, None] + jnp.arange(rows, dtype=jnp.int32)  # (tiles, rows)
    positions = places[:, :, None] * page + in_page[:, None]
    is_there = is_there[:, :, None] & (in_page >= nominal[:, None])[:, None]

    def take(cache):
        sizes = (1, rows, *cache.shape[-2:])
        layer = () if operands.layer is None else (jnp.clip(operands.layer, 0, cache.shape[0] - 1),)
        zero = jnp.zeros((), jnp.int32)

        def slice_at(page, start):
            begin = (*layer, page, start, zero, zero)
            return jax.lax.dynamic_slice(cache, begin, (*(1 for _ in layer), *sizes)).reshape(sizes[1:])

        of_tiles = jax.vmap(jax.vmap(slice_at, (0, None)))(found, start)  # (tiles, pages, rows, heads, ·)
        return of_tiles.reshape(of_tiles.shape[0], -1, *cache.shape[-2:]).swapaxes(1, 2)

    key = take(operands.key)
    value = None if operands.value is None else take(operands.value)
    if _float8.is_float8(key.dtype):  # exact
        key = key.astype(operands.query.dtype)
        value = None if value is None else value.astype(operands.query.dtype)
    if value is None:
        key, value = key[:, 0::2], key[:, 1::2]
    tiles = block.shape[0]
    return key, value, positions.reshape(tiles, -1), is_there.reshape(tiles, -1)
