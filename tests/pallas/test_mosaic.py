"""Pallas by Mosaic GPU, on the CPU: kernels in JAX's interpreter against the definition, and lowering."""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_case import Case
from exhaustive import in_turn, one_in, thinned, thorough
from implementation_suite import FEATURES, ImplementationSuite
from pallas_lowering import only_lowering

import jax_flash
from jax_flash import _device, _varlen_unpacking, pallas
from jax_flash._spec import AttentionSpec, Operands, sizes
from jax_flash.pallas import compat, lowering
from jax_flash.pallas.mosaic import backward as mosaic_backward
from jax_flash.pallas.mosaic import forward as mosaic_forward
from jax_flash.pallas.mosaic import head_dims
from jax_flash.pallas.mosaic import tiles as mosaic_tiles
from jax_flash.pallas.mosaic.tiles import BackwardConfig, BackwardConfigs, ForwardConfig

# JAX 0.11 and newer say at every lowering that the Triton lowering will go.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
    pytest.mark.every_turn,
]

# Of kernels that the interpreter takes ten seconds or more for.
WINDOWS = [(None, 0), *thorough((None, None), (70, 9))]
OPTIONS = ("logits_soft_cap", "sinks", "seq_lengths", "segment_ids")
MOSAIC_CALL = "mosaic_gpu_v2"
TRITON_CALL = "__gpu$xla.gpu.triton"
A10 = _device.Device("cuda", "NVIDIA A10", (8, 6), 72)


@contextlib.contextmanager
def interpreted_by_mosaic():
    with compat.interpret(), only_lowering(lowering.MOSAIC):
        yield


def shapes(B=1, T=257, S=300, N=4, K=2, H=64, V=None, dtype="bfloat16") -> Operands:
    V = H if V is None else V
    query, key, value = ((B, T, N, H), (B, S, K, H), (B, S, K, V))
    return Operands(*(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in (query, key, value)))


@pytest.mark.skipif(not compat.mosaic_interprets(), reason="this JAX interprets no Mosaic GPU kernels")
class TestMosaicInterpreted(ImplementationSuite):
    implementation = "pallas"
    lengths = (1, 65, 150)
    typical_length = 150
    head_dims = (64, 96)
    heads = ((6, 2),)
    features = ("value_head_dim", "deterministic", *OPTIONS, "packed")
    reports_errors = False
    slow = True

    def environment(self):
        return interpreted_by_mosaic()

    @classmethod
    def cases(cls):
        """Few, as the interpreter takes some ten seconds for each."""
        every = {"length": 2, "cross": 2, "head dim": 3, "groups": 1, "window": 4, "large": 2, "feature": 2}
        found = super().cases()
        kinds = ([case for case in found if case.category == name][::n] for name, n in every.items())
        # Kernels of their own for dK and dV; in the second, with dV staged in a place of its own.
        wide = [
            Case("head dim", "bfloat16", T=65, S=150, N=4, K=2, H=256),
            Case("head dim", "float16", T=150, S=70, N=2, K=2, H=192, V=128, is_causal=True),
            Case("feature", "bfloat16", T=70, S=150, N=2, K=1, H=256, features=("logits_soft_cap",)),
            Case("feature", "bfloat16", T=150, S=200, N=2, K=1, H=128, features=OPTIONS, is_causal=True),
            Case("feature", "float16", T=70, S=150, N=2, K=1, H=256, features=OPTIONS),
        ]
        # Head dims that are padded.
        padded = [
            Case("head dim", "bfloat16", T=65, S=150, N=2, K=1, H=40, is_causal=True),
            Case("head dim", "float16", T=70, S=65, N=2, K=2, H=72, V=20, local_window_size=(40, 9)),
        ]
        return [case for kind in kinds for case in kind] + wide + padded


@pytest.mark.skipif(not compat.mosaic_interprets(), reason="this JAX interprets no Mosaic GPU kernels")
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize(
    "config",
    [
        ForwardConfig(2, 64, 2, 1, pingpong=False, persistent=False),
        ForwardConfig(2, 64, 3, 2),
        ForwardConfig(3, 64, 2, 1, pingpong=False),
        ForwardConfig(1, 128, 2, 2, persistent=False),
    ],
    ids=str,
)
def test_every_schedule_gives_the_same(config, window):
    spec = AttentionSpec(0.125, *window)
    keys = jax.random.split(jax.random.key(0), 3)
    leaves = jax.tree.leaves(shapes(T=333, S=290, N=2, K=1))
    operands = Operands(*map(lambda key, x: jax.random.normal(key, x.shape, x.dtype), keys, leaves))

    def run(config):
        # Two blocks of the grid for some tiles each, where they are persistent.
        return jax.jit(lambda x: mosaic_forward.forward(spec, x, config, 2))(operands)

    with interpreted_by_mosaic():
        (out, lse), (expected_out, expected_lse) = run(config), run(ForwardConfig(2, 128, 2, 1))
    assert jnp.allclose(out.astype(jnp.float32), expected_out.astype(jnp.float32), atol=0.02)
    assert jnp.allclose(lse, expected_lse, atol=1e-5)


@pytest.mark.skipif(not compat.mosaic_interprets(), reason="this JAX interprets no Mosaic GPU kernels")
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize(
    "head_dim, config",
    [
        (64, BackwardConfig(2, 64, 2, persistent=True, row_stages=2)),
        (64, BackwardConfig(3, 64, 3, 2, persistent=True)),
        (128, BackwardConfig(2, 64, 2, persistent=True)),
        (128, BackwardConfig(1, 64, 2)),
    ],
    ids=str,
)
def test_every_backward_schedule_gives_the_same(head_dim, config, window):
    spec = AttentionSpec(0.125, *window)
    keys = jax.random.split(jax.random.key(0), 5)
    leaves = jax.tree.leaves(shapes(T=333, S=290, N=2, K=1, H=head_dim))
    leaves += [leaves[0], jax.ShapeDtypeStruct((1, 2, 333), jnp.float32)]
    *arrays, d_out, d_lse = map(lambda key, x: jax.random.normal(key, x.shape, x.dtype), keys, leaves)
    operands = Operands(*arrays)

    def run(configs):
        # Two blocks of the grid for some tiles each, where they are persistent.
        arguments = (spec, operands, out, lse, d_out, d_lse, configs, 2)
        return jax.jit(lambda: mosaic_backward.backward(*arguments))()

    with interpreted_by_mosaic():
        out, lse = mosaic_forward.forward(spec, operands, ForwardConfig(2, 128, 2, 1), 2)
        expected = run(BackwardConfigs(BackwardConfig(1, 64, 2), BackwardConfig(1, 64, 2)))
        found = [run(BackwardConfigs(config, config)), run(BackwardConfigs(config, config, config))]
        if mosaic_tiles.backward_kernel_fits(sizes(operands), "all", config):
            found.append(run(BackwardConfigs(config)))
    for got in found:
        for name in ("query", "key", "value"):
            x, y = (getattr(gradients, name).astype(jnp.float32) for gradients in (got, expected))
            assert jnp.allclose(x, y, atol=0.03), name


@pytest.mark.skipif(not compat.mosaic_interprets(), reason="this JAX interprets no Mosaic GPU kernels")
@pytest.mark.parametrize(
    "T, S, window", [(127, 300, (None, None)), (300, 127, (None, 0)), (200, 130, (70, 9))]
)
def test_warpgroups_that_sum_together_do_not_race(monkeypatch, T, S, window):
    """By the interpreter's detector. It can't tell of the other kernels: it takes what their products read
    for reads by threads, which TMA may not write over without a fence."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if "on_race" not in inspect.signature(plgpu.InterpretGPUParams).parameters:
        pytest.skip("this JAX raises nothing where it finds a race")
    detecting = functools.partial(plgpu.InterpretGPUParams, detect_races=True, on_race="raise")
    monkeypatch.setattr(compat, "_interpreter", detecting)
    keys = jax.random.split(jax.random.key(0), 4)
    leaves = jax.tree.leaves(shapes(B=2, T=T, S=S, N=2, K=1, H=128))
    query, key, value, d_out = map(
        lambda key, x: jax.random.normal(key, x.shape, x.dtype), keys, (*leaves, leaves[0])
    )
    window = tuple(-1 if side is None else side for side in window)
    attend = functools.partial(
        jax_flash.flash_attention, local_window_size=window, implementation="xla", return_residual=True
    )
    (out, lse), vjp = jax.vjp(attend, query, key, value)
    expected = vjp((d_out, jnp.zeros_like(lse)))
    lse = lse.swapaxes(1, 2)
    spec = AttentionSpec(128**-0.5, *(None if side == -1 else side for side in window))
    configs = BackwardConfigs(BackwardConfig(2, 64, 2, persistent=True))
    operands = Operands(query, key, value)
    with interpreted_by_mosaic():  # one block of the grid: between several, adding is no race on a GPU
        run = jax.jit(lambda: mosaic_backward.backward(spec, operands, out, lse, d_out, None, configs, 1))
        gradients = run()
    for got, reference in zip((gradients.query, gradients.key, gradients.value), expected, strict=True):
        assert jnp.allclose(got.astype(jnp.float32), reference.astype(jnp.float32), atol=0.03)


def forward_and_backward(spec: AttentionSpec, operands: Operands):
    """A function of the operands, out's cotangent taken as out, and lse's as lse."""
    out, lse = pallas.forward(spec, operands)
    return out, lse, pallas.backward(spec, operands, out, lse, out, lse)


@pytest.mark.skipif(not compat.mosaic_interprets(), reason="this JAX interprets no Mosaic GPU kernels")
@pytest.mark.parametrize(
    "sizes, window, lengths",
    [
        (dict(T=64, S=900), (20, 0), None),
        (dict(B=2, T=200, S=520), (None, 0), ((200, 60), (80, 100))),
    ],
    ids=("window", "lengths"),
)
def test_a_slow_warpgroup_misses_no_tile(monkeypatch, sizes, window, lengths):
    """Where warpgroups compute dQ together, and no query sees the keys of several tiles, one after another:
    there the rows of the next tile may come as soon as all have waited for those of this one."""
    barriers = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.shared_memory")
    kinds = [x for x in vars(barriers).values() if isinstance(x, type) and "_wait" in vars(x)]
    if not kinds:
        pytest.skip("the interpreter of this JAX waits in another way")
    waits = []

    def slow(wait, self, thread, *rest):
        if getattr(thread, "warpgroup_id", None) == 1:
            waits.append(thread)
            time.sleep(0.03)
        return wait(self, thread, *rest)

    for kind in kinds:
        wait = kind._wait
        monkeypatch.setattr(kind, "_wait", lambda *arguments, wait=wait: slow(wait, *arguments))
    leaves = jax.tree.leaves(shapes(**sizes, N=1, K=1, H=128))
    keys = jax.random.split(jax.random.key(0), 4)
    *arrays, d_out = map(lambda key, x: jax.random.normal(key, x.shape, x.dtype), keys, (*leaves, leaves[0]))
    of_rows = {}
    if lengths is not None:
        names = ("query_seq_lengths", "key_value_seq_lengths")
        of_rows = dict(zip(names, jnp.asarray(lengths, jnp.int32), strict=True))
    left, right = (-1 if side is None else side for side in window)
    attend = functools.partial(
        jax_flash.flash_attention, local_window_size=(left, right), implementation="xla", return_residual=True
    )
    (out, lse), vjp = jax.vjp(functools.partial(attend, **of_rows), *arrays)
    expected = vjp((d_out, jnp.zeros_like(lse)))
    spec = AttentionSpec(128**-0.5, *window)
    configs = BackwardConfigs(BackwardConfig(2, 64, 2, persistent=True))
    with interpreted_by_mosaic():  # one block of the grid has all tiles
        run = jax.jit(lambda *given: mosaic_backward.backward(spec, *given, None, configs, 1))
        got = run(Operands(*arrays, **of_rows), out, lse.swapaxes(1, 2), d_out)
    assert waits
    for name, right in zip(("query", "key", "value"), expected, strict=True):
        x, y = (x.astype(jnp.float32) for x in (getattr(got, name), right))
        assert jnp.allclose(x, y, atol=0.03), name


def calls_lowered_for_hopper(function, *args) -> tuple[int, int]:
    """How many Mosaic GPU kernels, and how many Triton ones."""
    with _device.assume(_device.H100), compat.lowering_for(_device.H100.kind):
        text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return text.count(MOSAIC_CALL), text.count(TRITON_CALL)


def check_lowers(spec: AttentionSpec, operands: Operands) -> None:
    size = head_dims.padded_sizes(operands)
    first_kernels = 1 + len(mosaic_tiles.backward(size, together=False).kernels)
    diagonal = np.arange(size.T)[:, None] + size.S - size.T
    distance = np.arange(size.S) - diagonal
    left, right = (np.inf if side is None else side for side in (spec.left, spec.right))
    hides_pairs = bool(((distance < -left) | (distance > right)).any())
    # A second kernel for each keeps what isn't finite from what doesn't see it.
    expected = first_kernels * (2 if hides_pairs else 1), 0
    assert calls_lowered_for_hopper(functools.partial(forward_and_backward, spec), operands) == expected


@pytest.mark.skipif(not compat.adds_to_arrays(), reason="kernels of this JAX add to no array")
def test_one_kernel_sums_all_gradients_where_that_pays_and_no_order_is_asked_for():
    def kernels(T, deterministic=False, **sides):
        spec = AttentionSpec(0.1, **sides, deterministic=deterministic)
        operands = shapes(T=T, S=T, H=128)
        return calls_lowered_for_hopper(functools.partial(forward_and_backward, spec), operands)

    assert kernels(1024) == (2, 0)
    assert kernels(1024, deterministic=True) == (3, 0)
    # And what isn't finite is kept apart by a second kernel for each result, dQ and both others alike.
    assert kernels(2048, right=0) == (2 + 3, 0)
    assert kernels(1024, right=0) == kernels(4096, left=500, right=0) == (3 + 3, 0)


DTYPES = ("bfloat16", "float16")


@pytest.mark.parametrize(
    "head_dim, dtype",
    [
        *in_turn((16, 64, 80, 128, 192, 256), DTYPES),
        *(
            pytest.param(*x, marks=pytest.mark.exhaustive)
            for x in itertools.product(range(32, 256, 16), DTYPES)
        ),
    ],
)
def test_lowers_for_hopper(head_dim, dtype):
    check_lowers(AttentionSpec(head_dim**-0.5, left=None, right=0), shapes(H=head_dim, dtype=dtype))


@pytest.mark.parametrize("H, V", one_in(3, [(192, 128), (64, 256), (256, 160)]))
def test_lowers_head_dims_of_values(H, V):
    check_lowers(AttentionSpec(H**-0.5, left=None, right=0), shapes(H=H, V=V))


@pytest.mark.parametrize("H, V", [(40, None), (72, 128), (64, 20), (250, None)])
def test_lowers_head_dims_that_it_pads(H, V):
    spec, operands = AttentionSpec(H**-0.5), shapes(H=H, V=V)
    assert lowering.mosaic_reason(spec, operands, _device.H100) is None
    assert "Triton" not in pallas.describe(spec, operands, _device.H100)
    results = jax.eval_shape(functools.partial(forward_and_backward, spec), operands)
    assert results[0].shape == (*operands.query.shape[:-1], operands.value.shape[-1])
    gradients = results[2]
    for name in ("query", "key", "value"):
        assert getattr(gradients, name).shape == getattr(operands, name).shape
    check_lowers(spec, operands)


@pytest.mark.parametrize(
    "T, S, window",
    thinned(
        [
            (*lengths, window)
            for lengths in ((1, 1), (256, 256), (3, 1000))
            for window in ((None, None), (None, 0), (9, None), (100, 20))
        ],
        lambda case: {(case[:2], case[2] == (None, None)), case[2]},
    ),
    ids=str,
)
def test_lowers_every_mask_and_length(T, S, window):
    check_lowers(AttentionSpec(0.125, *window), shapes(T=T, S=S, V=128))


def test_lowers_with_64_bit_types():
    with jax.enable_x64(True):
        check_lowers(AttentionSpec(0.125, 5, 3), shapes())
        check_lowers(AttentionSpec(0.125), shapes())


@pytest.mark.parametrize("name, is_causal", in_turn((*OPTIONS, "packed"), (False, True)))
def test_lowers_options_with_64_bit_types(name, is_causal):
    case = Case("", "bfloat16", T=150, S=256, N=4, K=2, H=64, is_causal=is_causal, features=(name,))
    run = functools.partial(forward_and_backward, case.spec())
    with jax.enable_x64(True):
        mosaic, triton = calls_lowered_for_hopper(run, case.operands())
    assert mosaic >= 3 and not triton


@pytest.mark.skipif(not compat.adds_to_arrays(), reason="kernels of this JAX add to no array")
def test_the_kernel_for_all_gradients_lowers_with_64_bit_types():
    operands = shapes(T=1100, S=1300, H=128)  # with a tile that isn't full
    with jax.enable_x64(True):
        run = functools.partial(forward_and_backward, AttentionSpec(0.1))
        assert calls_lowered_for_hopper(run, operands) == (2, 0)


def test_lowers_within_shard_map_and_its_replication_check():
    operands = shapes(B=2)
    device = jax.sharding.AbstractDevice(_device.H100.kind, num_cores=None, platform="gpu")
    types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.sharding.AbstractMesh((2, 2), ("batch", "heads"), axis_types=types, abstract_device=device)
    split = jax.sharding.PartitionSpec("batch", None, "heads", None)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=split, out_specs=split)
    def gradients(query, key, value):
        def loss(*arrays):
            out = jax_flash.flash_attention(*arrays, is_causal=True, implementation="pallas")
            return out.astype(jnp.float32).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(query, key, value)

    with only_lowering(lowering.MOSAIC):
        assert calls_lowered_for_hopper(gradients, operands.query, operands.key, operands.value) == (6, 0)


@pytest.mark.parametrize(
    "changes, device, reason",
    [
        ({}, A10, "Hopper"),
        ({"H": 250, "V": 200}, _device.H100, "head dims 250 and 200 need more shared memory"),
    ],
)
def test_leaves_to_triton_what_it_can_not_do(changes, device, reason):
    spec, operands = AttentionSpec(0.125), shapes(**changes)
    assert pallas.supports(spec, operands, device) is None
    assert "Mosaic" not in pallas.describe(spec, operands, device)
    assert reason in lowering.mosaic_reason(spec, operands, device)
    with only_lowering(lowering.MOSAIC):
        assert reason in pallas.supports(spec, operands, device)


@pytest.mark.parametrize(
    "feature",
    [name for name in FEATURES if name not in TestMosaicInterpreted.features],
)
def test_leaves_to_triton_what_becomes_of_scores(feature):
    case = Case("", "bfloat16", features=(feature,))
    spec, operands = _varlen_unpacking.unpacked_shapes(case.spec(), case.operands())
    assert pallas.supports(spec, operands, _device.H100) is None
    assert "Mosaic" not in pallas.describe(spec, operands, _device.H100)
    assert "take no " in lowering.mosaic_reason(spec, operands, _device.H100)
    with only_lowering(lowering.MOSAIC):
        assert "take no " in pallas.supports(case.spec(), case.operands(), _device.H100)


def test_describes_what_runs(monkeypatch):
    spec, operands = AttentionSpec(0.125), shapes()
    size = sizes(operands)
    forward, backward = mosaic_tiles.forward(size), mosaic_tiles.backward(size, together=False)
    described = pallas.describe(spec, operands, _device.H100)
    assert described == f"Mosaic GPU forward ({forward}), Mosaic GPU backward {backward}"
    monkeypatch.setenv("JAX_FLASH_PALLAS", "triton")
    assert "Mosaic" not in pallas.describe(spec, operands, _device.H100)
    monkeypatch.setenv("JAX_FLASH_PALLAS", "cutlass")
    with pytest.raises(ValueError, match='must be "mosaic" or "triton", not "cutlass"'):
        pallas.describe(spec, operands, _device.H100)


@pytest.mark.parametrize("head_dim", range(16, 257, 16))
@pytest.mark.parametrize("value_head_dim", [None, 16, 128, 256])
@pytest.mark.parametrize("together", [False, True])
def test_what_the_table_has_fits_in_shared_memory(head_dim, value_head_dim, together):
    size = sizes(shapes(H=head_dim, V=value_head_dim))
    if value_head_dim is None:
        assert mosaic_tiles.forward_fits(size, mosaic_tiles.forward(size))
        assert not mosaic_tiles.forward_fits(size, ForwardConfig(2, 512, 8, 1))
    backward = mosaic_tiles.backward(size, together)
    assert mosaic_tiles.backward_fits(size, backward)
    assert (backward.values is not None) == (max(size.H, size.V) > 128)
    assert (backward.queries is None) == (together and size.H == 128 >= size.V)
    for name, config in backward._asdict().items():
        if config is not None:
            more = backward._replace(**{name: dataclasses.replace(config, stages=64, second_stages=64)})
            assert not mosaic_tiles.backward_fits(size, more)
