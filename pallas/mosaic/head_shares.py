"""How many head shares a key head has: blocks of the grid that divide the query heads of its tiles.

The kernels for dK and dV go through tiles of keys, and each tile meets all query heads of its key head. With
few key heads there are few tiles, of unequal length under a causal mask, and some multiprocessors have
nothing to do. So a tile's query heads may be divided into head shares. A share is scheduled as if it were a
key head of its own. It writes its dK and dV in float32, and XLA adds those of all shares, always in the same
order. The CUDA kernels have the same shares (`cuda/sm90/backward_units.py`), and add to one sum instead.
"""

import dataclasses
import math
import statistics

from jax_flash._mask import keys_of_queries
from jax_flash._spec import AttentionSpec, Sizes

from .backward_problem import KERNELS, BackwardProblem
from .tiles import BackwardConfig, BackwardConfigs

_MOST = 16
"""The most shares of a key head. With 16, 1024 keys in eight tiles occupy nearly all multiprocessors."""

# Rates of Hopper, from which times are estimated. They decide on speed alone.
_FLOPS_PER_US = 4.7e6  # of a multiprocessor at work
_BYTES_PER_US = 2.5e6  # of memory
_LAUNCH_US = 5.0  # of the sum over shares, and the gap before it

# Under a causal mask tiles don't stay in step, and so are at different query heads of their shares. For each
# doubling of what they read beyond the size of L2, a kernel takes longer by this part of its time. Measured
# with the CUDA kernels on an H100.
_MISSES = 0.06
_L2_BYTES = 36 << 20

# Shares have to gain this much to be worth their memory.
_LEAST_GAIN = 0.02


def divided(
    configs: BackwardConfigs, spec: AttentionSpec, size: Sizes, multiprocessors: int
) -> BackwardConfigs:
    """The same configurations, with the head shares with which each kernel is estimated to end first."""

    def of_kernel(name: str, config: BackwardConfig) -> BackwardConfig:
        kernel = KERNELS[name]
        if not kernel.rows_are_keys or size.group == 1:
            return config
        mask = keys_of_queries(spec, size).transposed()
        problem = BackwardProblem(size, mask, config, kernel, multiprocessors)
        return dataclasses.replace(config, head_shares=choose(problem))

    fields = {"all": "keys", "keys_and_values": "keys"}
    changed = {fields.get(name, name): of_kernel(name, config) for name, config in configs.kernels.items()}
    return configs._replace(**changed)


def choose(problem: BackwardProblem) -> int:
    """The number of head shares of one of the kernels."""
    found = {shares: microseconds(with_shares(problem, shares)) for shares in _candidates(problem)}
    threshold = found[1] * (1 - _LEAST_GAIN)
    best = min(found, key=found.__getitem__)
    return best if found[best] < threshold else 1


def with_shares(problem: BackwardProblem, shares: int) -> BackwardProblem:
    return dataclasses.replace(problem, config=dataclasses.replace(problem.config, head_shares=shares))


def sum_bytes(problem: BackwardProblem) -> int:
    """What the gradients of all shares take."""
    size, config = problem.size, problem.config
    widths = sum(width for width, own in zip((size.H, size.V), problem.owns, strict=True) if own)
    return 4 * size.B * size.S * size.K * config.head_shares * widths if config.head_shares > 1 else 0


def microseconds(problem: BackwardProblem) -> float:
    """The estimated time of a kernel, and of the sum over its shares."""
    size, config, owns = problem.size, problem.config, problem.owns
    # Scores, dP, dV, dK and dQ, as far as the kernel computes them.
    products = size.H + size.V * (owns.key_or_query + owns.value_or_d_out)
    products += size.H * (owns.key_or_query + problem.kernel.adds_d_query)
    block_us = 2 * problem.rows_of_tile * config.columns * products / _FLOPS_PER_US
    counts = problem.mask.block_counts(problem.rows_of_tile, config.columns)
    time = problem.scheduler.makespan(statistics.fmean(counts), problem.multiprocessors) * block_us
    if problem.scheduler.uneven:
        query_bytes = 2 * (size.H + size.V) + 4 * size.H * problem.kernel.adds_d_query
        head_bytes = max(counts) * config.columns * query_bytes * size.group / config.head_shares
        fills = problem.scheduler.heads_at_work * head_bytes / _L2_BYTES
        time *= 1 + _MISSES * math.log2(max(1.0, fills))
    # Written, read, and written in 16 bits.
    summing = _LAUNCH_US + sum_bytes(problem) * (2 + 0.5 / config.head_shares) / _BYTES_PER_US
    return time + (summing if config.head_shares > 1 else 0)


def _candidates(problem: BackwardProblem) -> list[int]:
    """Whose gradients take no more memory than those of the call take in float32."""
    size = problem.size
    most = 4 * size.B * (size.T * size.N * size.H + size.S * size.K * (size.H + size.V))
    shares = range(1, min(size.group, _MOST) + 1)
    return [n for n in shares if n == 1 or sum_bytes(with_shares(problem, n)) <= most]
