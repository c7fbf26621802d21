"""The tile shape of each kernel, as a value that can be printed.

The tables hold the largest tiles, among powers of two, that neither spill more than a few registers nor need
more shared memory than the architecture has, by Triton 3.9's compiler for sm_80 and sm_90a (causal, odd
lengths; the smaller ones with a bias alone, and with a mask, a soft cap and dropout besides). They were
chosen without a GPU: no timing has gone into them yet. Functions may look up more than that for each score,
which Triton loads ahead too: then a kernel has as many stages as fit (`_shared_bytes_of`).
"""

import dataclasses

from jax_flash._device import Device
from jax_flash._spec import AttentionSpec, Operands, Sizes, sizes

from .. import features


@dataclasses.dataclass(frozen=True)
class Tile:
    """What one program of a kernel works on at a time."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return f"{self.queries} queries x {self.keys} keys, {self.num_warps} warps, {self.num_stages} stages"


def padded(size: int) -> int:
    """The tile size that holds `size`: a power of two, and at least the 16 that a matrix unit takes."""
    return max(16, 1 << (size - 1).bit_length())


_KIB = 1024


def shared_bytes(device: Device) -> int:
    """Of a block, that kernels count on."""
    return 227 * _KIB if has_much_shared_memory(device) else 99 * _KIB


def has_much_shared_memory(device: Device) -> bool:
    """10.x has Hopper's shared memory; 12.x, whose number is higher, has Ampere's."""
    major, _ = device.compute_capability or (8, 0)  # Pallas' interpreter runs anywhere, with any tile
    return major in (9, 10)


# By kernel, then by the padded head dim that a tile is for: that one and smaller ones.
Table = dict[str, dict[int, Tile]]

_HOPPER: Table = {  # 227 KiB of shared memory for a block
    "forward": {64: Tile(128, 128, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 64, 8, 2)},
    "backward_keys": {64: Tile(64, 128, 8, 2), 128: Tile(64, 64, 8, 2), 256: Tile(32, 32, 8, 2)},
    "backward_queries": {64: Tile(128, 64, 8, 2), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 8, 2)},
}
_HOPPER_SCORES: Table = {
    "forward": {64: Tile(128, 64, 8, 3), 128: Tile(128, 32, 8, 3), 256: Tile(64, 32, 8, 2)},
    "backward_keys": {64: Tile(32, 128, 8, 2), 128: Tile(64, 32, 8, 2), 256: Tile(32, 32, 8, 2)},
    "backward_queries": {64: Tile(128, 64, 8, 2), 128: Tile(128, 32, 8, 2), 256: Tile(32, 32, 8, 2)},
    "backward_bias": {64: Tile(64, 64, 8, 2), 128: Tile(64, 64, 8, 2), 256: Tile(64, 64, 8, 1)},
}
_AMPERE: Table = {  # 99 KiB, which is what the smaller GPUs have
    "forward": {64: Tile(128, 64, 8, 3), 128: Tile(64, 64, 4, 2), 256: Tile(64, 32, 8, 2)},
    "backward_keys": {64: Tile(64, 64, 8, 2), 128: Tile(64, 64, 8, 2), 256: Tile(32, 32, 8, 2)},
    "backward_queries": {64: Tile(128, 64, 8, 2), 128: Tile(64, 64, 8, 2), 256: Tile(64, 32, 8, 1)},
}
_AMPERE_SCORES: Table = {
    "forward": {64: Tile(128, 64, 8, 2), 128: Tile(128, 32, 8, 2), 256: Tile(64, 32, 8, 2)},
    "backward_keys": {64: Tile(64, 32, 8, 2), 128: Tile(64, 32, 8, 2), 256: Tile(32, 32, 8, 2)},
    "backward_queries": {64: Tile(128, 32, 8, 2), 128: Tile(64, 64, 8, 2), 256: Tile(32, 32, 8, 1)},
    "backward_bias": {64: Tile(64, 64, 8, 2), 128: Tile(64, 32, 8, 2), 256: Tile(32, 32, 8, 1)},
}


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Those of a call by Triton, by kernel."""

    forward: Tile
    backward_keys: Tile  # dK and dV
    backward_queries: Tile  # dQ
    backward_bias: Tile  # of a bias that heads or batch rows share


def choose(spec: AttentionSpec, operands: Operands, device: Device) -> Tiles:
    """The tiles of a call.

    The smaller ones are for calls with a bias or mask of queries and keys, or a function that looks an array
    up for each score, as what is loaded for each score takes registers; in the kernel for dK and dV, which
    holds most, for any call that changes scores. No tile was chosen for functions yet.
    """
    size = sizes(operands)
    plain, smaller = (
        (_HOPPER, _HOPPER_SCORES) if has_much_shared_memory(device) else (_AMPERE, _AMPERE_SCORES)
    )
    head_dim = max(size.H, size.V)
    changes = features.has_score_mod(spec, operands)
    of_arrays, looked_up = features.loads_of_a_score(spec, operands)
    loads = of_arrays + looked_up

    def tile(kernel: str, small: bool) -> Tile:
        table = (smaller if small else plain)[kernel]
        tile = next(tile for limit, tile in table.items() if head_dim <= limit)
        tile = dataclasses.replace(
            tile, queries=min(tile.queries, padded(size.T)), keys=min(tile.keys, padded(size.S))
        )
        while looked_up and loads > 1 and tile.num_stages > 1:
            if _shared_bytes_of(kernel, tile, size, loads) <= shared_bytes(device):
                break
            tile = dataclasses.replace(tile, num_stages=tile.num_stages - 1)
        return tile

    return Tiles(
        tile("forward", loads > 0),
        tile("backward_keys", loads > 0 or changes),
        tile("backward_queries", loads > 0),
        tile("backward_bias", True),
    )


def _shared_bytes_of(kernel: str, tile: Tile, size: Sizes, loads: int) -> int:
    """What Triton keeps in shared memory, at most: blocks of all stages, the tile's own rows, and for all
    stages but one what is loaded for each score. Backward, a function and its derivative each load."""
    row = 2 * (padded(size.H) + padded(size.V))  # of operands in 16 bits
    of_stage, own = (tile.queries, tile.keys) if kernel == "backward_keys" else (tile.keys, tile.queries)
    of_scores = (1 if kernel == "forward" else 2) * loads * tile.queries * tile.keys * 4
    return tile.num_stages * of_stage * row + own * row + (tile.num_stages - 1) * of_scores
