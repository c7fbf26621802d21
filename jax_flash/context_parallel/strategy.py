"""Which strategy runs a call, and why not the others."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal, cast

import jax

from jax_flash import _validate
from jax_flash._spec import Operands, Sizes
from jax_flash.context_parallel import gather, ring, ulysses
from jax_flash.context_parallel.load_balance import STRIPED
from jax_flash.context_parallel.sharded import Sharded

Strategy = Literal["ring", "all_gather", "ulysses"]
STRATEGIES: tuple[Strategy, ...] = ("ring", "ulysses", "all_gather")
"""In order of preference among those of equal cost."""
AUTO: Literal["auto"] = "auto"

FLOPS_PER_BYTE = 2200
"""What a device computes while it sends a byte to its neighbour: of H100s, 610 to 630 TFLOP/s of attention
forward and backward, over the 283 GB/s of a `ppermute` by NVLink (`scale_out_2xh100.json`)."""

HOST_DEVICES = 8
ACROSS_HOSTS = 6
"""More devices than a host has are taken to be on several. Links between these, of 400 Gb/s, are so many
times slower than NVLink."""

COMBINED_BYTES = 4
"""The time that each step of a ring but the first takes beside its products and transfers: as long as a
device sends so many bytes for each element of its queries and of the output. Results of steps are float32;
they are written, read and added up. Measured as the difference of rings and all-gathers
(docs/tuning/scale-out.md)."""

BACKWARD_FLOPS = 2.5
"""Of the backward pass for each of the forward pass: five products to two."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What the cost of a call depends on."""

    local: Sizes  # of one device's arrays, with one batch axis
    shards: int
    steps: int  # of a ring
    itemsize: int
    visible: float  # the share of pairs of a query and a key that attention computes
    busiest: float = 1.0  # pairs of the device with most of them, over the mean; by Ulysses it is 1
    keeps_heads: bool = True  # whether Ulysses keeps each device's heads for the backward pass
    gathered: int | None = None  # keys that an all-gather gets; None: all of other devices


def exposed_bytes(strategy: Strategy, work: Work) -> float:
    """The bytes that a device sends, forward and backward, and that no computation hides.

    - all_gather: keys and values go to each other device, or what a window reaches to the next ones, forward
      and again backward, and come back as float32 gradients.
    - ring: the same bytes, one device at a time, and the gradients once more, to go home. A window needs
      fewer steps. Transfers run beside the steps' computation; only what takes longer than that counts. What
      it takes to add up the steps' results is in `combined_bytes`.
    - ulysses: all but one part in n of queries, keys, values and output, there or back, forward and backward;
      a third time if devices don't keep their heads. Key heads count as often as they are repeated.
    """
    n, shards = work.local, work.shards
    key_elements = n.B * n.S * n.K * (n.H + n.V)
    if strategy == "ulysses":
        key_elements *= ulysses.key_heads_sent(n.K, shards) // n.K
        elements = n.B * n.T * n.N * (n.H + n.V) + key_elements
        exchanges = 2 if work.keeps_heads else 3
        return exchanges * elements * work.itemsize * (shards - 1) / shards
    if strategy == "all_gather":
        gathered = (shards - 1) * n.S if work.gathered is None else work.gathered
        return gathered * n.B * n.K * (n.H + n.V) * (2 * work.itemsize + 4)
    sends = work.steps - 1
    sent = key_elements * (2 * sends * work.itemsize + 4 * (sends + 1 if sends else 0))
    return max(0.0, sent - flops(work) / flops_per_byte(work))


def combined_bytes(strategy: Strategy, work: Work) -> float:
    """What a device could send, within a host, while it adds up the results of a ring's steps."""
    n = work.local
    return COMBINED_BYTES * (work.steps - 1) * n.B * n.T * n.N * (n.H + n.V) if strategy == "ring" else 0.0


def flops_per_byte(work: Work) -> float:
    """What a device computes while it sends a byte."""
    return FLOPS_PER_BYTE * (ACROSS_HOSTS if work.shards > HOST_DEVICES else 1)


def flops(work: Work) -> float:
    """What a device computes in the mean, forward and backward."""
    n = work.local
    return (1 + BACKWARD_FLOPS) * 2 * n.B * n.N * n.T * n.S * (n.H + n.V) * work.steps * work.visible


def cost(strategy: Strategy, work: Work) -> float:
    """The time that a device loses in a call, forward and backward, in operations that it could do meanwhile.

    It is the time in which it only sends, adds up the results of steps, or waits for the busiest device. By
    Ulysses all devices compute alike. On two H200 under a causal mask, tokens in order, it took 0.69 of a
    ring's time (benchmarks/results/scale_out_2xh200.json).
    """
    waiting = 0.0 if strategy == "ulysses" else (work.busiest - 1) * flops(work)
    combining = combined_bytes(strategy, work) * FLOPS_PER_BYTE
    return exposed_bytes(strategy, work) * flops_per_byte(work) + combining + waiting


def bytes_of_whole_keys(work: Work, parts: int) -> float:
    """The bytes that a device sends if keys are in `parts` shards over other mesh axes than the queries.

    One part: they are whole.

    Each device gathers the other parts, forward and backward. Their float32 gradients are added up by an
    all-reduce, which sends nearly all of them twice.
    """
    n, shards = work.local, work.shards
    elements = n.B * n.S * n.K * (n.H + n.V)
    return 2 * elements * work.itemsize * (parts - 1) / parts + 2 * elements * 4 * (shards - 1) / shards


def cheapest(work: Work, strategies: Sequence[Strategy] = STRATEGIES) -> Strategy:
    """The strategy of these that costs least; the first of `STRATEGIES` among equals."""
    return min((x for x in STRATEGIES if x in strategies), key=lambda strategy: cost(strategy, work))


def work_of(of: Sharded, operands: Operands, keeps_heads: bool = True) -> Work:
    """Of a call on shards; its operands may have any number of batch axes."""
    *batch, T, N, H = operands.query.shape
    S, K, V = operands.value.shape[-3:]
    local = Sizes(math.prod(batch), T, S, N, K, H, V)
    steps, window = ring.steps(of), of.window
    # As under a causal mask; narrow windows have fewer steps. How much a block mask hides is data.
    visible = 1.0 if window.unbounded and of.spec.block_mask is None else 0.5
    if window.left is not None and window.right is not None:
        visible = min(visible, max(window.left + window.right + 1, 0) / (steps * max(S, 1)))
    # Of tokens in order, the last of n devices sees n - 1/2 shards of keys, and they see n / 2 in the mean.
    one_sided = (window.left is None) != (window.right is None)
    shards = of.order.shards
    busiest = 2 - 1 / shards if one_sided and of.order.kind is None else 1.0
    gathered = gather.gathered_keys(of)
    return Work(local, shards, steps, operands.query.dtype.itemsize, visible, busiest, keeps_heads, gathered)


def choose(of: Sharded, operands: Operands, named: str, exchange: Sharded | None = None) -> Strategy:
    """The strategy of that name, or for "auto" the cheapest that takes the call.

    Args:
      exchange: the call over the second mesh axis, whose operands Ulysses exchanges first (`two_axes.py`).

    Raises:
      NotImplementedError: it can't run the call, or none can.
    """
    _validate.one_of("strategy", named, (AUTO, *STRATEGIES))
    refused = {strategy: refusal(strategy, of, operands) for strategy in STRATEGIES}
    if exchange is not None:
        refused["ulysses"] = "over two mesh axes it goes over the second, and another one over the first"
        if (reason := _refusal_of_two_axes(exchange, operands)) is not None:
            raise NotImplementedError(f"axis_name {(of.axis_name, exchange.axis_name)}: {reason}")
        operands = jax.eval_shape(functools.partial(ulysses.by_heads, exchange), operands)
    if named != AUTO:
        if (reason := refused[named]) is not None:
            raise NotImplementedError(f'strategy "{named}" can\'t run this call: {reason}')
        return cast(Strategy, named)
    able = [strategy for strategy in STRATEGIES if refused[strategy] is None]
    if not able:
        reasons = "; ".join(f"{strategy}: {reason}" for strategy, reason in refused.items())
        raise NotImplementedError(f"no strategy can run this call: {reasons}")
    return cheapest(work_of(of, operands), able)


def _refusal_of_two_axes(exchange: Sharded, operands: Operands) -> str | None:
    if exchange.order.kind == STRIPED:
        return 'load_balance "striped" goes with one mesh axis; with two, "zigzag" does'
    return ulysses.refusal(exchange, operands)


def refusal(strategy: Strategy, of: Sharded, operands: Operands) -> str | None:
    """Why a strategy can't run the call, or None."""
    if strategy == "ulysses":
        return ulysses.refusal(of, operands)
    if explicit := jax.typeof(operands.query).sharding.mesh.explicit_axes:
        return f"the surrounding shard_map leaves the Explicit axes {explicit}; it must map over them too"
    # The compiler would communicate along them within a step, which some devices skip.
    if strategy == "ring" and of.automatic:
        return f"the surrounding shard_map leaves the Auto axes {of.automatic}; it must map over them too"
    if of.order.kind == STRIPED and of.is_positional and (reason := _refusal_of_stripes(strategy, of)):
        return reason
    return of.refusal_of_functions(keys_are_whole=strategy == "all_gather")


def _refusal_of_stripes(strategy: Strategy, of: Sharded) -> str | None:
    if strategy == "all_gather":
        return (
            'load_balance "striped" under a causal mask, window, ALiBi, score_mod or block_mask goes with '
            '"ring" and "ulysses"'
        )
    if of.has_alibi:
        return 'alibi_slopes with load_balance "striped" goes with "ulysses"; with "zigzag" each has it'
    if None not in of.window:
        return (
            'a window with two sides (local_window_size, with is_causal too) and load_balance "striped" goes '
            'with "ulysses"; with "zigzag" each strategy has it'
        )
    return None
