"""Sequences sharded over two mesh axes: Ulysses over the second, another strategy over the first.

Where links differ, as within a host and between hosts, each strategy has the links that suit it: an
all-to-all moves few bytes and waits for them, and a ring's transfers run beside computation. Ulysses alone
needs as many heads as devices; here the heads are divided by the second axis alone.

    mesh axes (2, 2)        each device's tokens        after Ulysses over the second axis
    devices (0, 0) (0, 1)   0, 1: all heads             tokens 0 1: heads 0, heads 1
    devices (1, 0) (1, 1)   2, 3: all heads             tokens 2 3: heads 0, heads 1

What lies between is a call on sequences that are sharded over the first axis. Of zigzag's chunks the devices
of a row have neighbours, early ones and late ones, which make the early and the late chunk of that call.

Unified sequence parallelism: https://arxiv.org/abs/2405.07719.
"""

import dataclasses

import jax

from jax_flash.context_parallel.load_balance import Order
from jax_flash.context_parallel.sharded import Sharded


def split(of: Sharded) -> tuple[Sharded, Sharded]:
    """The call between the exchanges, over the first axis; and that by which Ulysses exchanges.

    The second one's sequences are the tokens of the devices of a row.
    """
    first, second = of.axis_name
    rows, columns = jax.lax.axis_size(first), jax.lax.axis_size(second)
    between = dataclasses.replace(of, axis_name=first, order=Order(of.order.kind, rows), own_rows=frozenset())
    exchange = dataclasses.replace(
        of,
        axis_name=second,
        order=Order(of.order.kind, columns),
        queries=of.queries // rows,
        keys=of.keys // rows,
    )
    return between, exchange
