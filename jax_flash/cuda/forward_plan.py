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
    """Tile shape of one kernel variant."""

    consumers: int  # warpgroups, 64 queries each
    keys: int  # keys in a block
    stages: int  # blocks in flight
    pingpong: bool  # warpgroups take turns at the tensor cores
    query_stages: int  # query tiles in shared memory

    @property
    def rows(self) -> int:
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    def shared_bytes(self, head_dim: int) -> int:
        """Dynamic shared memory: Q, the rings of K and V, and the barriers."""
        row = math.ceil(head_dim / PANEL) * PANEL * 2
        rows = self.query_stages * self.rows + 2 * self.stages * self.keys
        return rows * row + 8 * (2 * self.query_stages + 4 * self.stages) + 4 * self.query_stages


# Head dim, rounded up to a multiple of 16, at most → tile of full and of windowed attention. 64, 128 and
# 256 are the fastest over all cases of benchmarks/results/*_forward_h200.json, one tile for all lengths. 96
# and 192 were not measured: they are the largest that fit, but that 96 is as 128 under a window.
_TILES = {
    64: (ForwardTile(3, 128, 2, True, 2), ForwardTile(3, 128, 2, True, 2)),
    96: (ForwardTile(2, 160, 2, False, 2), ForwardTile(2, 128, 2, False, 2)),
    128: (ForwardTile(2, 128, 2, False, 2), ForwardTile(2, 128, 2, False, 2)),
    192: (ForwardTile(2, 112, 2, False, 1), ForwardTile(2, 112, 2, False, 1)),
    256: (ForwardTile(2, 80, 2, False, 1), ForwardTile(2, 80, 2, False, 1)),
}

# Keys and values of the heads that a section of the tile walk works on at once should stay in L2, beside
# what else passes through it.
_SECTION_BYTES = 32 << 20


def padded_head_dim(head_dim: int) -> int:
    """What the kernels are compiled for; TMA fills the columns beyond `head_dim` with zeros."""
    return math.ceil(head_dim / 16) * 16


def tile(head_dim: int, window: Window) -> ForwardTile:
    full, windowed = next(tiles for limit, tiles in _TILES.items() if head_dim <= limit)
    return full if window.unbounded else windowed


def rows_map(buffer: Buffer, rows: int) -> TensorMap:
    """A map over `(B, rows, heads, head dim)` that copies `rows` rows of one head, one panel of columns."""
    B, T, N, H = buffer.shape
    element = buffer.bytes // math.prod(buffer.shape)
    strides = (H * element, N * H * element, T * N * H * element)
    return TensorMap(buffer.name, buffer.dtype, (H, N, T, B), strides, (PANEL, 1, rows, 1))


def plan_forward(spec: AttentionSpec, shapes: Operands[jax.ShapeDtypeStruct], device: Device) -> LaunchPlan:
    """How `device` computes `out (B, T, N, H)` and `lse (B, N, T)`; for calls that `supports` accepts."""
    n = sizes(shapes)
    dtype = shapes.query.dtype.name
    window = binding_window(spec, n)
    head_dim = padded_head_dim(n.H)
    shape = tile(head_dim, window)
    kernel = Kernel(
        source="sm90/forward.cu",
        entry="forward",
        arch=device.arch,
        defines=(
            ("ELEMENT", dtype),
            ("HEAD_DIM", head_dim),
            ("CONSUMERS", shape.consumers),
            ("KEYS", shape.keys),
            ("STAGES", shape.stages),
            ("QUERY_STAGES", shape.query_stages),
            ("PINGPONG", int(shape.pingpong)),
            ("HAS_LEFT", int(window.left is not None)),
            ("HAS_RIGHT", int(window.right is not None)),
            ("SCORE_SIGN", (spec.scale > 0) - (spec.scale < 0)),
            ("SHARED_BYTES", shape.shared_bytes(head_dim)),
        ),
    )
    query = Buffer("query", shapes.query.shape, dtype)
    key = Buffer("key", shapes.key.shape, dtype)
    value = Buffer("value", shapes.value.shape, dtype)
    out = Buffer("out", shapes.query.shape, dtype)
    lse = Buffer("lse", (n.B, n.N, n.T), "float32")
    tiles = math.ceil(n.T / shape.rows) * n.N * n.B
    # Under a window tiles take unequally long: CTAs take the next from a counter. Its zeroing costs 2 µs.
    counted = not window.unbounded and tiles > device.sm_count
    next_tile = Buffer("next_tile", (1,), "int32")
    launch = Launch(
        kernel=kernel,
        grid=(min(tiles, device.sm_count), 1, 1),
        block=shape.threads,
        shared_bytes=shape.shared_bytes(head_dim),
        parameters=(
            rows_map(query, shape.rows),
            rows_map(key, shape.keys),
            rows_map(value, shape.keys),
            rows_map(out, 64),
            Pointer("lse"),
            *(Scalar("int32", x) for x in (n.T, n.S, n.N, n.group, n.B)),
            *(Scalar("int32", x or 0) for x in (window.left, window.right)),
            Scalar("int32", _section_heads(n, window)),
            Pointer("next_tile") if counted else Scalar("int64", 0),
            # Where the scale is zero the scores are too, and any factor does.
            Scalar("float32", abs(spec.scale) * math.log2(math.e) or 1.0),
        ),
    )
    operands = (query, key, value)
    if counted:
        return LaunchPlan(operands, (out, lse, next_tile), (Zero("next_tile"), launch))
    return LaunchPlan(operands, (out, lse), (launch,))


def _section_heads(n: Sizes, window: Window) -> int:
    """Query heads whose tiles are walked together (`tile_at` in cuda/kernels/sm90/tile.cuh).

    Without a window all tiles take equally long: one head at a time keeps its keys and values in L2.
    With one, the longest tiles of many heads go first, so that CTAs end together.
    """
    if window.unbounded:
        return 1
    heads = n.B * n.N
    bytes_per_query_head = 2 * n.S * n.H * 2 / n.group
    sections = math.ceil(heads * bytes_per_query_head / _SECTION_BYTES)
    return math.ceil(heads / sections)  # all sections alike: a small last one would end in a ragged wave
