"""A call of the backward pass: what its launches have in common (backward_plan.py)."""

import dataclasses
import functools
import math

import jax

from jax_flash import _isolation
from jax_flash._device import Device
from jax_flash._mask import PositionMask, Window, position_mask, window_of
from jax_flash._spec import AttentionSpec, Operands, Sizes, sizes
from jax_flash.cuda import (
    block_mask,
    dropout,
    fixed_point,
    mask_metadata,
    score_mod,
    user_function,
    user_score_mod,
)
from jax_flash.cuda.launch_plan import ELEMENT_BYTES, Argument, Buffer, Pointer
from jax_flash.cuda.sm90 import backward_scheduler, backward_tiles, backward_units, l2
from jax_flash.cuda.sm90.backward_tiles import SPAN, BackwardTile
from jax_flash.cuda.sm90.backward_units import Costs, Tiles, Units
from jax_flash.cuda.sm90.tensor_maps import padded_head_dims


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What a plan decides by estimates of time. Fields are those of BackwardCall."""

    units: Units
    main_writes_dq: bool  # in calls whose main kernel can
    dq_sums: int | None = None  # in deterministic calls; None for as many as they need
    l2_head_group: int | None = None  # None for what the units suggest


def tile_of(spec: AttentionSpec, shapes: Operands[jax.ShapeDtypeStruct]) -> BackwardTile:
    n = sizes(shapes)
    return backward_tiles.tile(max(n.H, n.V), score_mod.modification(spec, shapes))


@dataclasses.dataclass(frozen=True)
class BackwardCall:
    """A call, and what its launches have in common."""

    spec: AttentionSpec
    shapes: Operands[jax.ShapeDtypeStruct]
    device: Device
    chosen: Schedule | None = None  # in place of the one with which the pass is estimated to end first

    @functools.cached_property
    def n(self) -> Sizes:
        return sizes(self.shapes)

    @property
    def dtype(self) -> str:
        return self.shapes.query.dtype.name

    @functools.cached_property
    def tile(self) -> BackwardTile:
        """What preprocess and postprocess are compiled for, in deterministic calls and others alike."""
        return dataclasses.replace(tile_of(self.spec, self.shapes), dropout=self.spec.dropout_rate > 0)

    @functools.cached_property
    def main_tile(self) -> BackwardTile:
        score_grad = score_mod.needs_score_grad(self.spec, self.shapes)
        score_grad &= max(self.head_dims) <= backward_tiles.MAX_SCORE_GRAD_HEAD_DIM
        tile = self.tile
        if self.spec.deterministic:
            tile = tile.deterministic()
        elif not self.main_writes_dq:
            tile = tile.without_writers()
        return dataclasses.replace(
            tile,
            mask_metadata=self.has_metadata,
            block_lists=self.spec.block_mask is not None and not self.spec.deterministic,
            score_grad=score_grad,
            isolates=self.isolates,
        )

    @functools.cached_property
    def head_dims(self) -> tuple[int, int]:
        """That of queries and keys, and that of values, as the kernels are compiled for."""
        head_dim, value_dim = (max(x, self.tile.least_head_dim) for x in padded_head_dims(self.n))
        return head_dim, value_dim

    @property
    def has_metadata(self) -> bool:
        return mask_metadata.is_needed(self.shapes)

    @property
    def skips_empty_tiles(self) -> bool:
        """Whether the main kernel skips key tiles that no query sees: the rule of `Traits::skips_empty_tiles`
        in cuda/kernels/sm90/backward/traits.cuh."""
        persistent = not self.tile.split_products
        has_lists = self.spec.block_mask is not None
        return self.has_metadata and persistent and not has_lists and not self.spec.deterministic

    @property
    def isolates(self) -> bool:
        """Whether a query may not see a key, which is then kept apart from it if it isn't finite."""
        bounded = (self.spec.left, self.spec.right) != (None, None)  # at other lengths, if not at these
        hides_pairs = bounded or self.has_metadata or self.shapes.mask is not None
        hides_pairs |= self.spec.block_mask is not None
        return _isolation.KERNELS and hides_pairs

    @functools.cached_property
    def window(self) -> Window:
        return window_of(self.spec, self.n)

    @functools.cached_property
    def mask(self) -> PositionMask:
        return position_mask(self.window, self.n.T, self.n.S)

    @property
    def query_blocks(self) -> int:
        return math.ceil(self.n.T / self.tile.queries)

    @property
    def key_tiles(self) -> int:
        return math.ceil(self.n.S / self.tile.keys)

    @property
    def key_groups(self) -> int:
        """Groups of 64 keys in the key tiles of a head."""
        return self.key_tiles * (self.tile.keys // 64)

    @property
    def workers(self) -> int:
        """CTAs, or clusters, at work at a time on this device. Plans use it to be fast, never to be right."""
        return self.device.sm_count // self.tile.cluster

    @property
    def has_fixed_point_bias(self) -> bool:
        return fixed_point.adds_bias_up(self.spec, self.shapes)

    @functools.cached_property
    def main_writes_dq(self) -> bool:
        """Whether warps of the main kernel write dQ. Otherwise every head keeps its sum for postprocess."""
        if self.tile.split_products or self.spec.deterministic or self.spec.is_wide("query"):
            return False
        if self.chosen is not None:
            return self.chosen.main_writes_dq
        # The heads that would be at work with undivided tiles decide (benchmarks/tune_schedule.py).
        at_work = self._heads_at_work_of(self.key_heads, self._l2_head_group_of(self.key_heads, 1))
        heads, larger_dim = self.n.B * self.n.N, max(self.head_dims)
        return backward_scheduler.main_writes_dq(at_work, heads, larger_dim, self.key_tiles)

    @property
    def counts_tiles(self) -> bool:
        """Whether CTAs take tiles from a counter: if any warp waits for other CTAs' tiles (dq_order.cuh)."""
        return self.spec.deterministic or not self.tile.split_products

    @functools.cached_property
    def _blocks_of_tiles(self) -> tuple[int, ...]:
        return self.mask.transposed().block_counts(self.tile.keys, self.tile.queries)

    @functools.cached_property
    def key_heads(self) -> Tiles:
        """The key tiles, as schedulers see them."""
        n, blocks = self.n, self._blocks_of_tiles
        if self.has_metadata:  # tiles see the queries of one sequence
            sequences = mask_metadata.assumed_sequences(self.shapes)
            blocks = tuple(math.ceil(x / sequences) for x in blocks)
        workers = self.workers
        if self.spec.deterministic:
            workers = backward_scheduler.ASSUMED_CTAS // self.tile.cluster
        visited = self._head_bytes * max(blocks, default=0) / max(self.query_blocks, 1)
        heads_in_l2 = l2.backward_bytes(self.device) / max(visited, 1)
        return Tiles(blocks, n.B * n.K, n.group, workers, heads_in_l2)

    @functools.cached_property
    def _head_bytes(self) -> int:
        """Q, dO and the float32 sum of dQ of a query head."""
        (head_dim, value_dim), element_bytes = self.head_dims, ELEMENT_BYTES[self.dtype]
        return self.n.T * (head_dim * (element_bytes + 4) + value_dim * element_bytes)

    @property
    def sharing_costs(self) -> Costs:
        n, tile = self.n, self.tile
        return backward_units.costs(tile.queries, tile.cta_keys, n.H + n.V, n.B * n.K * n.S * (n.H + n.V))

    @functools.cached_property
    def units(self) -> Units:
        if self.chosen is not None:
            return self.chosen.units
        # In a fixed order parts of a tile could wait for parts that are handed out later. A list of blocks is
        # one part.
        is_one = self.spec.deterministic or self.spec.block_mask is not None
        most_parts = 1 if is_one else backward_units.MAX_PARTS
        return backward_units.choose(
            self.key_heads, self.most_heads_in_l2, self.sharing_costs, SPAN, most_parts
        )

    @property
    def has_key_sums(self) -> bool:
        """Whether dK and dV are float32 sums, for postprocess, as units share them."""
        return self.units.count > 1

    @property
    def has_wide_key_gradients(self) -> bool:
        """Whether the main kernel writes float32 rows of dK and dV."""
        return self.spec.is_wide("key") and not self.has_key_sums

    @property
    def most_heads_in_l2(self) -> int:
        heads, l2_bytes = self.n.B * self.n.N, l2.backward_bytes(self.device)
        return backward_scheduler.most_heads_in_l2(heads, self._head_bytes, l2_bytes)

    @functools.cached_property
    def head_shares(self) -> Tiles:
        return self.key_heads.share(self.units)

    @functools.cached_property
    def l2_head_group(self) -> int:
        if self.chosen is not None and self.chosen.l2_head_group is not None:
            return self.chosen.l2_head_group
        return self._l2_head_group_of(self.head_shares, self.units.parts)

    def _l2_head_group_of(self, tiles: Tiles, parts: int) -> int:
        """The L2 head group of `tiles`, which have a head for each head share."""
        head_bytes, l2_bytes = self._head_bytes, l2.backward_bytes(self.device)
        if self.spec.deterministic:
            tiles_alike = self.window.unbounded and not self.has_metadata
            share_bytes = tiles.group * head_bytes
            return backward_scheduler.l2_head_group_in_order(tiles.heads, share_bytes, tiles_alike, l2_bytes)
        if self.shapes.diagonal is not None:
            return self._most_heads_together(tiles)
        if mask_metadata.assumed_sequences(self.shapes) > 1:
            return backward_scheduler.l2_head_group_of_sequences(self._of_sequences(tiles), parts, SPAN)
        if self.spec.block_mask is not None:
            tiles = dataclasses.replace(tiles, blocks=self._assumed_lists)
        # Lengths of batch rows leave a head's tiles as alike as they are, or empty.
        return backward_scheduler.l2_head_group(tiles, head_bytes, l2_bytes, parts, SPAN)

    @property
    def _assumed_lists(self) -> tuple[int, ...]:
        """How many blocks each tile is assumed to visit by a block mask, whose lists are known only at run
        time: as under a causal mask. Where all lists are alike, that order of tiles loses nothing."""
        mask = position_mask(Window(None, 0), self.n.T, self.n.S).transposed()
        return tuple(mask.block_counts(self.tile.keys, self.tile.queries))

    def _of_sequences(self, tiles: Tiles) -> Tiles:
        """`tiles` as those of sequences of assumed lengths, one after another."""
        blocks: list[int] = []
        for count in backward_scheduler.tiles_of_assumed_sequences(self.key_tiles):
            keys = count * self.tile.keys
            queries = math.ceil(self.n.T * count / self.key_tiles)
            window = window_of(self.spec, dataclasses.replace(self.n, T=queries, S=keys))
            mask = position_mask(window, queries, keys).transposed()
            blocks += mask.block_counts(self.tile.keys, self.tile.queries)
        visited = self._head_bytes * max(blocks) / self.query_blocks
        heads_in_l2 = l2.backward_bytes(self.device) / max(visited, 1)
        return dataclasses.replace(tiles, blocks=tuple(blocks), heads_in_l2=heads_in_l2)

    @functools.cached_property
    def dq_accum_slots(self) -> int:
        return self._heads_at_work if self.main_writes_dq else self.n.B * self.n.N

    @property
    def _heads_at_work(self) -> int:
        return self._heads_at_work_of(self.head_shares, self.l2_head_group)

    def _heads_at_work_of(self, tiles: Tiles, l2_head_group: int) -> int:
        """How many query heads of `tiles` have their dQ summed at a time."""
        # Where much of each head is skipped, more heads are at work.
        may_skip = self.has_metadata or self.spec.block_mask is not None
        workers = self.workers * (4 if may_skip else 1)
        if self.has_metadata:  # lengths may be short
            l2_head_group = max(l2_head_group, self._most_heads_together(tiles))
        tiles = dataclasses.replace(tiles, blocks=self._blocks_of_tiles, workers=workers)
        return backward_scheduler.dq_accum_slots(tiles, l2_head_group)

    def _most_heads_together(self, tiles: Tiles) -> int:
        """The L2 head group of tiles of which nothing is known."""
        return backward_scheduler.l2_head_group_of_unknown_lengths(
            tiles.heads,
            self._head_bytes,
            mask_metadata.assumed_sequences(self.shapes),
            l2.backward_bytes(self.device),
        )

    @functools.cached_property
    def dq_sums(self) -> int:
        """Sums of each block of dQ (`backward_scheduler.dq_sums`)."""
        if not self.spec.deterministic:
            return 1
        if self.chosen is not None and self.chosen.dq_sums is not None:
            return self.chosen.dq_sums
        n, high = self.n, self.mask.high
        # Without a bound on their right, queries of the first block see all tiles.
        aligned = self.key_tiles if high is None else min(self.key_tiles, max(high, 0) // self.tile.keys + 1)
        if self.has_metadata:
            aligned = math.ceil(aligned / mask_metadata.assumed_sequences(self.shapes))
        dq_bytes = n.B * n.N * self.query_blocks * self.tile.queries * self.head_dims[0] * 4
        gradients_bytes = 4 * sum(math.prod(x.shape) for x in self.gradients)
        if self.has_key_sums:  # whose sums take some of it
            gradients_bytes = dq_bytes
        most = backward_scheduler.dq_sums_that_fit(dq_bytes, gradients_bytes)
        return backward_scheduler.dq_sums(self.head_shares, aligned, self.l2_head_group, most)

    @functools.cached_property
    def metadata(self) -> tuple[Buffer, ...]:
        return mask_metadata.backward_buffers(self.shapes, self.tile.queries, self.tile.keys, SPAN)

    @property
    def block_grid(self) -> block_mask.Grid:
        """Tiles of keys and blocks of queries, as a block mask's lists have them."""
        return block_mask.Grid(self.tile.queries, self.tile.keys, True, self.spec.deterministic)

    @functools.cached_property
    def operands(self) -> tuple[Buffer, ...]:
        n, shapes = self.n, self.shapes
        out_shape, lse_shape = (n.B, n.T, n.N, n.V), (n.B, n.N, n.T)
        return (
            Buffer("query", shapes.query.shape, self.dtype),
            Buffer("key", shapes.key.shape, self.dtype),
            Buffer("value", shapes.value.shape, self.dtype),
            *score_mod.buffers(shapes),
            *user_function.index_buffers(self.spec, shapes),
            *user_score_mod.buffers(self.spec, shapes),
            *block_mask.buffers(self.spec, shapes),
            *block_mask.list_buffers(self.spec, shapes, self.block_grid, SPAN),
            *dropout.buffers(self.spec, lse_shape, (n.B, n.S)),
            *self.metadata,
            Buffer("out", out_shape, self.dtype),
            Buffer("lse", lse_shape, "float32"),
            Buffer("d_out", out_shape, self.dtype),
            *((Buffer("d_lse", lse_shape, "float32"),) if self.spec.return_residual else ()),
            *((Buffer("bias_factor", (1,), "float32"),) if self.has_fixed_point_bias else ()),
        )

    @functools.cached_property
    def gradients(self) -> tuple[Buffer, ...]:
        operands = {"query": self.shapes.query, "key": self.shapes.key, "value": self.shapes.value}
        return tuple(
            Buffer(f"d_{name}", x.shape, self.spec.result_dtype(name, self.dtype).name)
            for name, x in operands.items()
        )

    @functools.cached_property
    def score_gradients(self) -> tuple[Buffer, ...]:
        """Gradients of bias, slopes and captured arrays that the call has. The kernel adds to them."""
        n, bias, found = self.n, self.shapes.bias, []
        if bias is not None and self.has_fixed_point_bias:
            found.append(Buffer("d_bias", (*bias.shape, 2), "uint32"))
        elif bias is not None:
            found.append(Buffer("d_bias", bias.shape, "float32"))
        if self.shapes.alibi_slopes is not None:
            # A share for each warp, four of which have 64 keys: the sum doesn't depend on who comes first.
            shares = self.key_tiles * (self.tile.keys // 64)
            found.append(Buffer("d_slopes", (n.B, n.N, shares, 4), "float32"))
        return (*found, *user_score_mod.gradient_buffers(self.spec, self.shapes))

    @functools.cached_property
    def scratch(self) -> tuple[Buffer, ...]:
        n, tile, blocks = self.n, self.tile, self.query_blocks
        block_elements = tile.queries * self.head_dims[0]
        found = [
            Buffer("lse_delta", (n.B, n.N, blocks, tile.per_query_values, tile.queries), "float32"),
            Buffer("dq_accum", (self.dq_sums * self.dq_accum_slots, blocks, block_elements), "float32"),
        ]
        if self.isolates:
            found.append(Buffer("spoiled", (n.B, n.N, blocks), "int32"))
        if self.main_writes_dq:
            found += [
                Buffer("arrived", (n.B, n.N, math.ceil(blocks / SPAN)), "int32"),
                Buffer("written", (n.B, n.N), "int32"),
                Buffer("next_job", (1,), "int32"),
            ]
        if self.counts_tiles:
            found.append(Buffer("next_tile", (1,), "int32"))
        if self.has_key_sums:
            groups = (n.B, n.K, self.key_groups)
            dims = dict(zip(("d_key", "d_value"), self.head_dims, strict=True))
            found += [Buffer(f"{name}_sums", (*groups, 64 * dim), "float32") for name, dim in dims.items()]
            if self.spec.deterministic:
                found += [Buffer(f"{name}_semaphores", groups, "int32") for name in dims]
        if self.spec.deterministic:
            found.append(Buffer("dq_semaphore", (self.dq_sums * n.B, n.N, blocks), "int32"))
        return tuple(found)

    def pointer(self, name: str) -> Pointer | None:
        """To the buffer of this name, or null if the call has none."""
        buffers = (*self.operands, *self.gradients, *self.score_gradients, *self.scratch)
        return Pointer(name) if any(buffer.name == name for buffer in buffers) else None

    def pointers(self, *names: str) -> dict[str, Argument]:
        return {name: self.pointer(name) for name in names}

    def key_sums(self) -> dict[str, Argument]:
        return {
            **{name: self.pointer(f"{name}_sums") for name in ("d_key", "d_value")},
            **self.pointers("d_key_semaphores", "d_value_semaphores"),
        }
