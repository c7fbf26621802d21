"""Pallas by Mosaic GPU, on the CPU: what isn't finite and isn't seen, in JAX's interpreter, and lowering."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive import thorough
from nonfinite_suite import NonFiniteSuite

import jax_flash
from jax_flash import _device, pallas
from jax_flash._spec import AttentionSpec, Operands, sizes
from jax_flash.pallas import compat, lowering
from jax_flash.pallas.mosaic import nonfinite
from jax_flash.pallas.mosaic import tiles as mosaic_tiles

MOSAIC_CALL = "mosaic_gpu_v2"


@contextlib.contextmanager
def interpreted_by_mosaic():
    with compat.interpret(), lowering.only(lowering.MOSAIC):
        yield


@pytest.mark.skipif(not compat.mosaic_interprets(), reason="this JAX interprets no Mosaic GPU kernels")
class TestMosaicNonFinite(NonFiniteSuite):
    implementation = "pallas"
    sizes = dict(T=150, S=290, N=2, K=1, B=1, H=64)  # noqa: RUF012
    situations = ("window",)

    def environment(self):
        return interpreted_by_mosaic()


@pytest.mark.exhaustive
class TestMosaicNonFiniteCausal(TestMosaicNonFinite):
    """With queries that see nothing, and values of another head dim."""

    sizes = dict(T=300, S=210, N=2, K=1, B=1, H=64, V=96)  # noqa: RUF012
    situations = ("causal",)


@pytest.mark.exhaustive
class TestMosaicNonFiniteOfWideHeads(TestMosaicNonFinite):
    """With kernels of their own for dK and dV."""

    sizes = dict(T=130, S=150, N=2, K=2, B=1, H=256)  # noqa: RUF012


@pytest.mark.exhaustive
class TestMosaicNonFiniteTogether(TestMosaicNonFinite):
    """With one kernel for all gradients. That of dQ alone computes dQ again."""

    sizes = dict(T=150, S=290, N=2, K=1, B=1, H=128)  # noqa: RUF012
    sums_in_any_order = ("d_query",)

    @pytest.fixture(autouse=True)
    def together(self, monkeypatch):
        monkeypatch.setattr(mosaic_tiles, "KEYS_TO_SUM_TOGETHER", 0)


def test_marks_of_rows():
    x = np.zeros((2, 40, 3, 8), np.float32)
    x[0, 17, 1, 3], x[1, 0, 2, 0], x[1, 39, 0, 7] = np.nan, np.inf, -np.inf
    marks = nonfinite.marks_of_rows(jnp.asarray(x), tile_rows=64)
    assert marks.shape == (2, 3, 4)
    assert set(zip(*(index.tolist() for index in np.nonzero(np.asarray(marks))), strict=True)) == {
        (0, 1, 1),
        (1, 2, 0),
        (1, 0, 2),
    }


def shapes(B=1, T=257, S=300, N=4, K=2, H=64, V=None, dtype="bfloat16") -> Operands:
    query, key, value = ((B, T, N, H), (B, S, K, H), (B, S, K, H if V is None else V))
    return Operands(*(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in (query, key, value)))


def lowered_for_hopper(function, *args) -> str:
    with _device.assume(_device.H100), compat.lowering_for(_device.H100.kind):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def kernels(spec: AttentionSpec, operands: Operands) -> int:
    """How many kernels a call is lowered to, forward and backward."""

    def forward_and_backward(operands):
        out, lse = pallas.forward(spec, operands)
        return out, lse, pallas.backward(spec, operands, out, lse, out, lse)

    return lowered_for_hopper(forward_and_backward, operands).count(MOSAIC_CALL)


@pytest.mark.parametrize("window", [(None, 0), (9, None), (100, 20)], ids=str)
@pytest.mark.parametrize("head_dims", [(64, 64), (192, 128), *thorough((16, 16), (64, 256))], ids=str)
def test_each_kernel_has_a_second_one_where_pairs_are_hidden(head_dims, window):
    H, V = head_dims
    operands = shapes(H=H, V=V)
    expected = 1 + len(mosaic_tiles.backward(sizes(operands), together=False).kernels)
    assert kernels(AttentionSpec(0.1, *window), operands) == 2 * expected
    assert kernels(AttentionSpec(0.1), operands) == expected


@pytest.mark.parametrize("head_dim", [80, 256, *thorough(*range(16, 80, 16), *range(96, 256, 16))])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_second_kernels_lower_at_every_head_dim(head_dim, dtype):
    operands = shapes(H=head_dim, dtype=dtype)
    assert kernels(AttentionSpec(0.1, None, 0), operands) == (6 if head_dim <= 128 else 8)


@pytest.mark.skipif(not compat.adds_to_arrays(), reason="kernels of this JAX add to no array")
def test_the_sum_of_all_gradients_is_repeated_by_two_kernels():
    assert kernels(AttentionSpec(0.1, None, 0), shapes(T=2048, S=2048, H=128)) == 5
    assert kernels(AttentionSpec(0.1), shapes(T=2048, S=2048, H=128)) == 2


def test_second_kernels_lower_with_64_bit_types():
    with jax.enable_x64(True):
        assert kernels(AttentionSpec(0.125, 5, 3), shapes()) == 6


def test_second_kernels_lower_within_shard_map_and_its_replication_check():
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

    with lowering.only(lowering.MOSAIC):
        text = lowered_for_hopper(gradients, operands.query, operands.key, operands.value)
    assert text.count(MOSAIC_CALL) == 6
