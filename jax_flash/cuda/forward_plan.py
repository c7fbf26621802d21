"""Launch plans of the forward pass."""

import dataclasses
import math

import jax

from jax_flash._device import Device
from jax_flash._spec import AttentionSpec, Operands, Sizes, sizes
from jax_flash.cuda.launch_plan import Buffer, Kernel, Launch, LaunchPlan, Pointer, Scalar, TensorMap, Zero
from jax_flash.cuda.window import Window, binding_window

PANEL = 64  # columns of a 16-bit tile under the 128-byte swizzle


@dataclasses.dataclass(frozen=True)
class ForwardTile:
    """Tile shape and schedule of one kernel variant."""

    consumers: int  # warpgroups, 64 rows each
    keys: int  # keys in a block
    stages: int  # blocks in flight
    pingpong: bool  # warpgroups take turns at the tensor cores
    query_stages: int  # query tiles in shared memory
    split: int  # 16-key steps of PV that are issued before the row maxima are taken; at most keys / 16

    @property
    def rows(self) -> int:
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    def shared_bytes(self, head_dim: int) -> int:
        """Dynamic shared memory: Q, the rings of K and V, a warp's rows of the output, barriers and tiles."""
        row = math.ceil(head_dim / PANEL) * PANEL * 2
        rows = self.query_stages * self.rows + 2 * self.stages * self.keys
        staging = 4 * self.consumers * 16 * PANEL * 2
        return rows * row + staging + 8 * (2 * self.query_stages + 4 * self.stages) + 24 * self.query_stages


@dataclasses.dataclass(frozen=True)
class Choice:
    """A tile, and what a key costs with it, relative to the first choice of the same row."""

    tile: ForwardTile
    key_cost: float = 1.0


# Head dim, rounded up to a multiple of 16, at most → choices for full attention, and for windowed (causal
# is one). Found on an H200 by varying the fields (benchmarks/results/schedule_forward_h200.json), as
# `benchmarks/tune.py` does anew; docs/tuning.md says what each gave. 160 was timed with the row of 192, and
# 80 with that of 96. Larger blocks of keys cost less a key where they divide the keys well.
_TILES: dict[int, tuple[tuple[Choice, ...], tuple[Choice, ...]]] = {
    64: (
        (Choice(ForwardTile(3, 128, 2, True, 2, 6)),),
        (Choice(ForwardTile(3, 128, 2, True, 2, 8)),),
    ),
    96: (
        (Choice(ForwardTile(3, 96, 2, True, 2, 5)),),
        (Choice(ForwardTile(3, 96, 2, True, 2, 6)),),
    ),
    128: (
        (
            Choice(ForwardTile(2, 128, 2, True, 2, 6)),
            Choice(ForwardTile(2, 144, 2, True, 2, 7), 0.985),
            Choice(ForwardTile(2, 176, 2, True, 1, 8), 0.97),
        ),
        (Choice(ForwardTile(2, 128, 2, True, 2, 6)),),
    ),
    192: (
        (Choice(ForwardTile(2, 96, 2, True, 1, 5)),),
        (Choice(ForwardTile(2, 96, 2, True, 1, 6)),),
    ),
    256: (
        (Choice(ForwardTile(2, 64, 2, True, 1, 3)),),
        (Choice(ForwardTile(2, 64, 2, True, 1, 3)),),
    ),
}

# Keys and values of the heads that a section of the tile walk works on at once should stay in L2, beside
# what else passes through it.
_SECTION_BYTES = 32 << 20

# Pieces that a tile is cut into, at most: its last CTA reads them all.
_PIECES = 8
# Beyond it the kernel has no registers left to put pieces together without spilling.
_CUT_HEAD_DIM = 192


def padded_head_dim(head_dim: int) -> int:
    """What the kernels are compiled for; TMA fills the columns beyond `head_dim` with zeros."""
    return math.ceil(head_dim / 16) * 16


def tile(head_dim: int, window: Window, keys: int) -> ForwardTile:
    """The tile for a padded head dim: of the choices the one that passes over `keys` at the least cost."""

    def cost(choice: Choice) -> float:
        block = choice.tile.keys
        # A block more: the first one's softmax and the last one's product with V have nothing to run beside.
        return (math.ceil(keys / block) + 1) * block * choice.key_cost

    return min(_choices(head_dim, window), key=cost).tile


def _choices(head_dim: int, window: Window) -> tuple[Choice, ...]:
    full, windowed = next(choices for limit, choices in _TILES.items() if head_dim <= limit)
    return full if window.unbounded else windowed


def pack(n: Sizes, rows: int) -> int:
    """How many query heads of a key head share a tile of `rows`: as few as give few tiles."""

    def tiles(heads: int) -> int:
        return math.ceil(n.T * heads / rows) * (n.N // heads)

    best = 1
    for heads in _packs(n.group, rows):
        if tiles(heads) <= 0.95 * tiles(best):
            best = heads
    return best


def _packs(group: int, rows: int) -> list[int]:
    """How many heads of a group can share a tile, each with equally many of its rows."""
    return [heads for heads in range(1, min(group, rows) + 1) if group % heads == 0 and rows % heads == 0]


def rows_map(buffer: Buffer, rows: int, pack: int = 1) -> TensorMap:
    """A map over `(B, rows, heads, head dim)` that copies `rows / pack` rows of `pack` heads, one panel of
    columns; the heads of a row stand together."""
    B, T, N, H = buffer.shape
    element = buffer.bytes // math.prod(buffer.shape)
    strides = (H * element, N * H * element, T * N * H * element)
    return TensorMap(buffer.name, buffer.dtype, (H, N, T, B), strides, (PANEL, pack, rows // pack, 1))


def kernels(spec: AttentionSpec, shapes: Operands[jax.ShapeDtypeStruct], device: Device) -> list[Kernel]:
    """Every kernel that calls of this kind may run, whatever their lengths and number of heads."""
    n = sizes(shapes)
    window = binding_window(spec, n)
    head_dim = padded_head_dim(n.H)
    cuts = (False, True) if window.unbounded and head_dim <= _CUT_HEAD_DIM else (False,)
    return [
        _kernel(spec, shapes.query.dtype.name, head_dim, window, device.arch, choice.tile, heads, cut)
        for choice in _choices(head_dim, window)
        for heads in _packs(n.group, choice.tile.rows)
        for cut in cuts
    ]


def _kernel(
    spec: AttentionSpec,
    dtype: str,
    head_dim: int,
    window: Window,
    arch: str,
    tile: ForwardTile,
    pack: int,
    cut: bool,
) -> Kernel:
    return Kernel(
        source="sm90/forward.cu",
        entry="forward",
        arch=arch,
        defines=(
            ("ELEMENT", dtype),
            ("HEAD_DIM", head_dim),
            ("CONSUMERS", tile.consumers),
            ("KEYS", tile.keys),
            ("STAGES", tile.stages),
            ("QUERY_STAGES", tile.query_stages),
            ("PINGPONG", int(tile.pingpong)),
            ("SPLIT", tile.split),
            ("PACK", pack),
            ("CUT", int(cut)),
            ("HAS_LEFT", int(window.left is not None)),
            ("HAS_RIGHT", int(window.right is not None)),
            ("SCORE_SIGN", (spec.scale > 0) - (spec.scale < 0)),
            ("SHARED_BYTES", tile.shared_bytes(head_dim)),
        ),
    )


def plan_forward(spec: AttentionSpec, shapes: Operands[jax.ShapeDtypeStruct], device: Device) -> LaunchPlan:
    """How `device` computes `out (B, T, N, H)` and `lse (B, N, T)`; for calls that `supports` accepts."""
    n = sizes(shapes)
    dtype = shapes.query.dtype.name
    window = binding_window(spec, n)
    head_dim = padded_head_dim(n.H)
    shape = tile(head_dim, window, n.S)
    heads = pack(n, shape.rows)
    query = Buffer("query", shapes.query.shape, dtype)
    key = Buffer("key", shapes.key.shape, dtype)
    value = Buffer("value", shapes.value.shape, dtype)
    out = Buffer("out", shapes.query.shape, dtype)
    lse = Buffer("lse", (n.B, n.N, n.T), "float32")
    tiles = math.ceil(n.T * heads / shape.rows) * (n.N // heads) * n.B
    # Under a window tiles take unequally long: CTAs take the next from a counter. Its zeroing costs 2 µs.
    counted = not window.unbounded and tiles > device.sm_count
    next_tile = Buffer("next_tile", (1,), "int32")
    whole_tiles, cut_ctas = tiles, 0
    if window.unbounded and head_dim <= _CUT_HEAD_DIM:
        whole_tiles, cut_ctas = cut_last_wave(tiles, device.sm_count, math.ceil(n.S / shape.keys))
    cut_tiles = tiles - whole_tiles
    warps = 4 * shape.consumers
    words = 32 * (head_dim // 2 + 4)
    pieces = Buffer("pieces", (cut_ctas + cut_tiles, warps, words), "float32")
    arrived = Buffer("arrived", (cut_tiles, warps), "int32")
    kernel = _kernel(spec, dtype, head_dim, window, device.arch, shape, heads, cut_tiles > 0)
    launch = Launch(
        kernel=kernel,
        grid=(device.sm_count if cut_tiles else min(tiles, device.sm_count), 1, 1),
        block=shape.threads,
        shared_bytes=shape.shared_bytes(head_dim),
        overlap_previous=not (counted or cut_tiles),  # with zeroing ahead there is no kernel to overlap,
        parameters=(
            rows_map(query, shape.rows, heads),
            rows_map(key, shape.keys),
            rows_map(value, shape.keys),
            Pointer("out"),
            Pointer("lse"),
            *(Scalar("int32", x) for x in (n.T, n.S, n.N, n.group, n.B, n.H)),
            *(Scalar("int32", x or 0) for x in (window.left, window.right)),
            Scalar("int32", _section_heads(n, window, heads)),
            Pointer("next_tile") if counted else Scalar("int64", 0),
            Scalar("int32", whole_tiles),
            Scalar("int32", cut_ctas),
            Scalar("int32", cut_tiles),
            Scalar("int32", math.ceil(n.S / shape.keys)),
            *((Pointer("pieces"), Pointer("arrived")) if cut_tiles else 2 * (Scalar("int64", 0),)),
            # Where the scale is zero the scores are too, and any factor does.
            Scalar("float32", abs(spec.scale) * math.log2(math.e) or 1.0),
        ),
    )
    operands = (query, key, value)
    if counted:
        return LaunchPlan(operands, (out, lse, next_tile), (Zero("next_tile"), launch))
    if cut_tiles:
        return LaunchPlan(operands, (out, lse, pieces, arrived), (Zero("arrived"), launch))
    return LaunchPlan(operands, (out, lse), (launch,))


def cut_last_wave(tiles: int, ctas: int, blocks: int) -> tuple[int, int]:
    """How many of `tiles`, of `blocks` each, are handed out whole, and how many CTAs share the others.

    Tiles that don't fill a wave leave CTAs idle. Sharing them costs: a second tile's beginning and end, the
    zeroing of a counter, and reading the pieces of a tile. Times are counted in blocks.
    """
    rest = tiles % ctas
    if rest == 0:
        return tiles, 0
    sharers = min(ctas, rest * _PIECES, rest * blocks)  # each has a block at least, as the kernel counts on
    if rest * blocks * sharers >= 2**31:  # the kernel divides this product, in 32 bits
        return tiles, 0
    whole = math.ceil(tiles / ctas) * (blocks + 1)
    shared = tiles // ctas * (blocks + 1) + rest * blocks / sharers + 5 + sharers / rest / 2 + 0.5
    return (tiles - rest, sharers) if shared < 0.985 * whole else (tiles, 0)


def _section_heads(n: Sizes, window: Window, pack: int) -> int:
    """Packs of query heads whose tiles are walked together (`tile_at` in cuda/kernels/sm90/tile.cuh).

    Without a window all tiles take equally long: one pack at a time keeps its keys and values in L2.
    With one, the longest tiles of many packs go first, so that CTAs end together.
    """
    if window.unbounded:
        return 1
    packs = n.B * n.N // pack
    bytes_per_pack = 2 * n.S * n.H * 2 / (n.group / pack)
    sections = math.ceil(packs * bytes_per_pack / _SECTION_BYTES)
    return math.ceil(packs / sections)  # all sections alike: a small last one would end in a ragged wave
