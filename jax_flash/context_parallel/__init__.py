"""Attention to sequences that are sharded over devices: context parallelism.

    attention      the public function
    arguments      its checks
    strategy       which strategy runs a call: `ring.py`, `gather.py` or `ulysses.py`
    ring           keys and values go round from device to device
    partial        how results of a ring's steps are combined
    gather         keys and values of all devices on each
    ulysses        shards of heads in place of shards of the sequence
    sharded        how parts of a call on shards become ordinary calls
    load_balance   the order of tokens on devices

It stands above the implementations: each step is an ordinary call, through the same transforms as any other.
"""

from jax_flash.context_parallel.attention import context_parallel_attention
from jax_flash.context_parallel.load_balance import reorder_for_load_balance, restore_order

__all__ = ["context_parallel_attention", "reorder_for_load_balance", "restore_order"]
