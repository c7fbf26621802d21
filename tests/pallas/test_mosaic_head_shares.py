"""Head shares of the backward kernels by Mosaic GPU: results, lowering, and how many there are."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive import in_turn
from nonfinite_suite import NonFiniteSuite
from pallas_lowering import only_lowering

from jax_flash import _device, pallas
from jax_flash._mask import keys_of_queries
from jax_flash._spec import AttentionSpec, Operands, Sizes, sizes
from jax_flash.pallas import compat, lowering
from jax_flash.pallas.mosaic import backward as mosaic_backward
from jax_flash.pallas.mosaic import forward as mosaic_forward
from jax_flash.pallas.mosaic import head_shares
from jax_flash.pallas.mosaic import tiles as mosaic_tiles
from jax_flash.pallas.mosaic.backward_problem import KERNELS, BackwardProblem
from jax_flash.pallas.mosaic.tiles import BackwardConfig, BackwardConfigs, ForwardConfig

# JAX 0.11 and newer say at every lowering that the Triton lowering will go.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
    pytest.mark.every_turn,
]

interpreted = pytest.mark.skipif(
    not compat.mosaic_interprets(), reason="this JAX interprets no Mosaic GPU kernels"
)
MULTIPROCESSORS = 132
_CONFIG = BackwardConfig(2, 64, 2, persistent=True, row_stages=2, head_shares=2)


@contextlib.contextmanager
def interpreted_by_mosaic():
    with compat.interpret(), only_lowering(lowering.MOSAIC):
        yield


def shapes(B=1, T=150, S=210, N=5, K=1, H=64, V=None, dtype="bfloat16") -> Operands:
    V = H if V is None else V
    query, key, value = ((B, T, N, H), (B, S, K, H), (B, S, K, V))
    return Operands(*(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in (query, key, value)))


def problem_of(kernel, size, spec, multiprocessors=MULTIPROCESSORS, shares=1):
    config = mosaic_tiles.backward(size, together=kernel == "all").kernels[kernel]
    mask = keys_of_queries(spec, size).transposed()
    problem = BackwardProblem(size, mask, config, KERNELS[kernel], multiprocessors)
    return head_shares.with_shares(problem, shares)


@interpreted
@pytest.mark.parametrize(
    "window, case, kernels, config",
    [
        ((None, 0), dict(N=3), ("keys_and_values",), _CONFIG),
        ((70, 9), dict(N=4, K=2, V=96), ("keys", "values"), BackwardConfig(1, 64, 2, head_shares=2)),
        ((None, None), dict(N=3, H=128), ("all",), dataclasses.replace(_CONFIG, row_stages=1, head_shares=3)),
        pytest.param(
            *((None, 0), dict(N=5, H=128, B=2), ("all",), dataclasses.replace(_CONFIG, row_stages=1)),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=str,
)
def test_shares_give_what_undivided_tiles_give(window, case, kernels, config):
    spec, size = AttentionSpec(0.125, *window), sizes(shapes(**case))
    assert all(mosaic_tiles.backward_kernel_fits(size, kernel, config) for kernel in kernels)
    leaves = jax.tree.leaves(shapes(**case))
    d_out = jax.ShapeDtypeStruct((size.B, size.T, size.N, size.V), leaves[0].dtype)
    leaves += [d_out, jax.ShapeDtypeStruct((size.B, size.N, size.T), jnp.float32)]
    keys = jax.random.split(jax.random.key(0), len(leaves))
    *arrays, d_out, d_lse = map(lambda key, x: jax.random.normal(key, x.shape, x.dtype), keys, leaves)
    operands = Operands(*arrays)

    def run(configs):
        # Two blocks of the grid for some tiles each, where they are persistent.
        arguments = (spec, operands, out, lse, d_out, d_lse, configs, 2)
        return jax.jit(lambda: mosaic_backward.backward(*arguments))()

    undivided = BackwardConfig(1, 64, 2)
    with interpreted_by_mosaic():
        out, lse = mosaic_forward.forward(spec, operands, ForwardConfig(2, 64, 2, 1), 2)
        expected = run(BackwardConfigs(undivided, undivided))
        if kernels == ("all",):
            found = run(BackwardConfigs(config))
        else:
            found = run(BackwardConfigs(config, undivided, config if "values" in kernels else None))
    for name in ("query", "key", "value"):
        gradient, reference = getattr(found, name), getattr(expected, name)
        assert gradient.shape == reference.shape and gradient.dtype == reference.dtype
        # Both round to bfloat16, from float32 sums in another order.
        difference = gradient.astype(jnp.float32) - reference.astype(jnp.float32)
        assert float(jnp.abs(difference).max()) <= 0.02 * float(jnp.abs(reference).max()), name


@interpreted
class TestNonFiniteByShares(NonFiniteSuite):
    implementation = "pallas"
    sizes = dict(T=150, S=290, N=3, K=1, B=1, H=64)  # noqa: RUF012
    situations = ("window",)

    @pytest.fixture(autouse=True)
    def shares(self, monkeypatch):
        monkeypatch.setattr(head_shares, "choose", lambda problem: 2)

    def environment(self):
        return interpreted_by_mosaic()


@pytest.mark.parametrize("shares", [1, 2, 3, 7])
@pytest.mark.parametrize("kernel, H", [("keys_and_values", 64), ("all", 128), ("keys", 256)])
def test_each_query_head_is_in_one_share(kernel, H, shares):
    problem = problem_of(kernel, Sizes(2, 200, 300, 14, 2, H, H), AttentionSpec(1.0), shares=shares)
    heads = [
        (int(problem.head_and_share(head)[0]), int(problem.column_head(head, jnp.int32(of_pass))))
        for head in map(jnp.int32, range(problem.heads))
        for of_pass in range(int(problem.passes(head)))
    ]
    assert heads == [(head // 7, head) for head in range(14)]


@pytest.mark.parametrize("window", [(None, None), (None, 0), (100, 0)], ids=str)
@pytest.mark.parametrize("shares", [1, 2, 3])
@pytest.mark.parametrize("kernel, H", [("keys_and_values", 64), ("all", 128), ("keys", 192)])
def test_makespan_is_that_of_the_tiles_taken(kernel, H, shares, window):
    size = Sizes(2, 2000, 2000, 10, 2, H, H)
    problem = problem_of(kernel, size, AttentionSpec(1.0, *window), shares=shares)
    scheduler = problem.scheduler
    passes = [int(problem.passes(jnp.int32(head))) for head in range(problem.heads)]

    def item(index):
        def body(tile, head, batch, carry):
            length = 7 if scheduler.lengths is None else jnp.asarray(scheduler.lengths)[tile]
            return carry + length * jnp.asarray(passes)[head] + 1.2

        return scheduler._item(index, body, jnp.float32(0))

    times = np.asarray(jax.vmap(item)(jnp.arange(scheduler.items, dtype=jnp.int32)))
    ends = np.zeros(scheduler.grid if scheduler.blocks else MULTIPROCESSORS)
    for number, time in enumerate(times):
        ends[number % len(ends) if scheduler.blocks else ends.argmin()] += time
    assert scheduler.makespan(7, MULTIPROCESSORS) == pytest.approx(ends.max(), rel=1e-4)


# The calls of models with few key heads for a device, and one that fills it.
@pytest.mark.parametrize(
    "shape, kernel, is_divided",
    [
        ((2, 4096, 16, 1, 128), "all", True),
        ((4, 2048, 71, 1, 64), "keys_and_values", True),
        ((2, 8192, 8, 1, 128), "all", True),
        ((1, 4096, 28, 4, 128), "all", True),
        ((1, 5000, 48, 3, 128), "all", True),
        ((4, 2048, 14, 2, 64), "keys_and_values", True),
        ((4, 2048, 32, 8, 128), "all", False),
        ((1, 4096, 8, 8, 128), "all", False),
    ],
    ids=str,
)
def test_shares_fill_the_multiprocessors(shape, kernel, is_divided):
    B, T, N, K, H = shape
    size, spec = Sizes(B, T, T, N, K, H, H), AttentionSpec(1.0, right=0)
    problem = problem_of(kernel, size, spec)
    divided = head_shares.with_shares(problem, head_shares.choose(problem))
    assert (divided.config.head_shares > 1) == is_divided
    ideal = sum(problem.scheduler.lengths) * B * N / MULTIPROCESSORS
    assert ideal >= 0.8 * divided.scheduler.makespan(0, MULTIPROCESSORS)
    # As much as the gradients take in float32, or less.
    gradients = 4 * B * T * H * (N + 2 * K)
    assert head_shares.sum_bytes(divided) <= gradients


def test_no_sum_is_larger_than_the_gradients():
    # The keys of each head would take 64 times what dQ takes.
    size = Sizes(2, 128, 1 << 18, 32, 1, 128, 128)
    assert head_shares.choose(problem_of("all", size, AttentionSpec(1.0, right=0), 1 << 16)) == 1


@pytest.mark.parametrize(
    "H, dtype, deterministic",
    in_turn([(64, "float16"), (128, "bfloat16"), (256, "bfloat16")], (False, True)),
)
def test_lowers_for_hopper(H, dtype, deterministic):
    spec = AttentionSpec(H**-0.5, right=0, deterministic=deterministic)
    operands = shapes(T=2048, S=2048, N=7, K=1, H=H, dtype=dtype)
    assert "head shares" in pallas.describe(spec, operands, _device.H100)

    def both(operands):
        out, lse = pallas.forward(spec, operands)
        return out, lse, pallas.backward(spec, operands, out, lse, out, lse)

    with _device.assume(_device.H100), compat.lowering_for(_device.H100.kind):
        text = jax.jit(both).trace(operands).lower(lowering_platforms=("cuda",)).as_text()
    together = H == 128 and compat.adds_to_arrays() and not deterministic
    kernels = 1 if together else 3 if H == 256 else 2
    # And a second kernel for each result, that keeps what isn't finite apart.
    assert text.count("mosaic_gpu_v2") == 1 + kernels + 1 + (2 if together else kernels)
    assert "__gpu$xla.gpu.triton" not in text
