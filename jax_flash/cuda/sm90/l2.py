"""How much of the L2 cache the tile schedulers fill.

CTAs that work at the same time read the same arrays, and find them in L2 if those fit. The schedulers
therefore group heads so that the arrays of a group fit the sizes below. The rest of L2 is left to what
passes through, such as results. Both shares were timed on an H200.
"""

from jax_flash._device import Device


def forward_bytes(device: Device) -> int:
    """Keys and values of a group of heads: 32 MiB of the 50 MiB of Hopper."""
    return device.l2_bytes * 16 // 25


def backward_bytes(device: Device) -> int:
    """Q, dO and the float32 sum of dQ of a group of heads: 36 MiB of the 50 MiB of Hopper."""
    return device.l2_bytes * 18 // 25
