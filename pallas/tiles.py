"""The tile shape of each kernel, as a value that can be printed.

The tables hold the largest tiles, among powers of two, that neither spill more than a few registers nor need
more shared memory than the architecture has, by Triton 3.9's compiler for sm_80 and sm_90a (causal, odd
lengths). They were chosen without a GPU: no timing has gone into them yet.
"""

import dataclasses

from jax_flash._device import Device
from jax_flash._spec import Sizes


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


# By kernel, then by the padded head dim that a tile is for: that one and smaller ones.
Table = dict[str, dict[int, Tile]]

_HOPPER: Table = {  # 227 KiB of shared memory for a block
    "forward": {64: Tile(128, 128, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 64, 8, 2)},
    "backward_keys": {64: Tile(64, 128, 8, 2), 128: Tile(64, 64, 8, 2), 256: Tile(32, 32, 8, 2)},
    "backward_queries": {64: Tile(128, 64, 8, 2), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 8, 2)},
}
_AMPERE: Table = {  # 99 KiB, which is what the smaller GPUs have
    "forward": {64: Tile(128, 64, 8, 3), 128: Tile(64, 64, 4, 2), 256: Tile(64, 32, 8, 2)},
    "backward_keys": {64: Tile(64, 64, 8, 2), 128: Tile(64, 64, 8, 2), 256: Tile(32, 32, 8, 2)},
    "backward_queries": {64: Tile(128, 64, 8, 2), 128: Tile(64, 64, 8, 2), 256: Tile(64, 32, 8, 1)},
}


def _choose(kernel: str, size: Sizes, device: Device) -> Tile:
    major, _ = device.compute_capability or (8, 0)  # Pallas' interpreter runs anywhere, with any tile
    # 10.x has Hopper's shared memory; 12.x, whose number is higher, has Ampere's.
    tiles = (_HOPPER if major in (9, 10) else _AMPERE)[kernel]
    head_dim = max(size.H, size.V)
    tile = next(tile for limit, tile in tiles.items() if head_dim <= limit)
    return dataclasses.replace(
        tile, queries=min(tile.queries, padded(size.T)), keys=min(tile.keys, padded(size.S))
    )


def forward(size: Sizes, device: Device) -> Tile:
    """The tile of `triton_forward`."""
    return _choose("forward", size, device)


def backward_keys(size: Sizes, device: Device) -> Tile:
    """The tile of the kernel for dK and dV."""
    return _choose("backward_keys", size, device)


def backward_queries(size: Sizes, device: Device) -> Tile:
    """The tile of the kernel for dQ."""
    return _choose("backward_queries", size, device)
