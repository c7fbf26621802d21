"""Attention on key-value caches by Triton, on the CPU: in the interpreter, and lowering for GPUs."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_case import CacheCase, Draw, as_jax, check
from exhaustive import fields, one_in, thinned, thorough
from jax.experimental import pallas as pl
from pallas_lowering import only_lowering

import jax_flash
from jax_flash import _device
from jax_flash._cache_spec import CacheOperands, CacheSpec, cache_sizes
from jax_flash._spec import AttentionSpec
from jax_flash.pallas import compat, decoding, lowering
from jax_flash.pallas.triton import decode_tiles, scores
from jax_flash.pallas.triton.decode_schedule import Schedule, Share

# JAX 0.11 and newer say at every lowering that the Triton lowering will go.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

A10 = _device.Device("cuda", "NVIDIA A10", (8, 6), 72)
TRITON_CALL = "__gpu$xla.gpu.triton"

CASES = (
    CacheCase(),
    CacheCase(T=5, U=5, right=0, left=30, score_mod=True, soft_cap=2.0, sinks=True, rotary=32),
    CacheCase(page=8, T=33, packed=True, right=0, B=5, S=96, score_mod=True, alibi="BN"),
    CacheCase(T=5, U=5, S=60, score_mod=True, mask_mod=True, soft_cap=2.0, alibi="1N", sinks=True),
    CacheCase(U=1, dtype="float16", N=6, K=1, H=16),
    CacheCase(T=5, U=5, right=0, dtype="float16", rotary=64),
    CacheCase(T=3, U=2, right=0, left=40, rotary=32, rotary_interleaved=True, soft_cap=2.0),
    CacheCase(T=70, U=70, right=0, dtype="float16", N=2, S=300),
    CacheCase(T=4, U=2, query_positions="first", rotary=16, alibi="BN", left_padding=True),
    CacheCase(T=4, U=6, query_positions="appended", rotary=16, right=0, batch_index=True, sinks=True),
    CacheCase(U=3, layers=3, B=2, H=40, V=24, alibi="1N"),
    CacheCase(page=16, U=1, rotary=64),
    CacheCase(page=1, U=2, B=2, S=60, dtype="float16"),
    CacheCase(page=3, T=5, U=4, S=50, right=0, left=20),
    CacheCase(page=128, T=2, S=500, layers=2, U=2, right=0, N=6, K=1),
    CacheCase(page=384, S=384, dtype="float16", U=4, B=2, N=2),
    CacheCase(page=32, S=160, shares_pages=True, left=50),
    CacheCase(page=16, T=40, packed=True, interleaved=True, right=0, B=4, S=128, sinks=True),
    CacheCase(page=8, T=33, packed=True, interleaved=True, right=0, left=30, soft_cap=3.0, B=5, S=96),
    CacheCase(T=40, packed=True, right=0, B=4, S=128, V=32, alibi="BN"),
    CacheCase(page=16, T=12, packed=True, right=0, B=3, S=64, rotary=16),
    CacheCase(S=600, full=True, U=3, H=16, V=130),
    CacheCase(S=300, full=True, num_splits=2),
    CacheCase(T=9, U=2, B=2, right=0, S=12),  # more queries than keys
    CacheCase(T=2, U=2, right=-3, left=9, S=40, H=16),
    CacheCase(T=3, U=2, right=0, S=60, float8=True, descales=True, soft_cap=2.0, rotary=32),
    CacheCase(page=16, S=64, U=1, H=40, V=24, layers=2, float8=True, descales=True, dtype="float16"),
    CacheCase(page=3, S=60, float8=True),
    CacheCase(page=16, T=12, packed=True, interleaved=True, right=0, B=3, S=64, float8=True),
    CacheCase(page=16, T=2, S=64, U=2, right=0, mask_mod=True, layers=2, float8=True, descales=True),
)

# So few and small that a short sequence has many blocks in many splits, and several tiles of queries.
SMALL_TILES = {
    "MOST_ROWS": 16,
    "BLOCKS_OF_SPLIT": 1,
    "PROGRAMS_OF_SM": 1,
    "_AMPERE": {64: (16, 1), 128: (16, 1), 256: (16, 1)},
}


def run(case: CacheCase, operands: CacheOperands, device: _device.Device) -> tuple:
    # Most of the time goes into compiling what the interpreter makes of kernels.
    options = {"xla_backend_optimization_level": 0}
    forward = jax.jit(functools.partial(decoding.forward, case.spec), compiler_options=options)
    with compat.interpret(), _device.assume(device):
        return forward(as_jax(operands))


def gpu(sm_count: int) -> _device.Device:
    return dataclasses.replace(A10, sm_count=sm_count)


@pytest.mark.parametrize("case", [*CASES[:7], *thorough(*CASES[7:])], ids=str)
def test_equals_the_definition(case):
    operands = Draw(case).operands
    check(case, operands, run(case, operands, A10))


@pytest.mark.parametrize("case", one_in(2, thinned(CASES, fields)), ids=str)
def test_in_many_splits(case):
    operands = Draw(case).operands
    with mock.patch.multiple(decode_tiles, **SMALL_TILES):
        assert decode_tiles.choose(case.spec, operands, gpu(60)).splits > 1
        check(case, operands, run(case, operands, gpu(60)))


@pytest.mark.parametrize("case", [CacheCase(T=3, S=60), CacheCase(T=40, packed=True, S=60)], ids=str)
def test_without_splits(case):
    case = dataclasses.replace(case, num_splits=1)
    operands = Draw(case).operands
    with mock.patch.multiple(decode_tiles, **SMALL_TILES):
        check(case, operands, run(case, operands, gpu(60)))


@pytest.mark.parametrize("layer", [-1, 2, -(2**31), 2**31 - 1])
def test_a_layer_that_is_not_there_has_no_keys(layer):
    case = CacheCase(layers=2, U=1, S=40, H=16)
    operands = Draw(case).operands.replace(layer=np.int32(layer))
    out, lse, key, _ = run(case, operands, A10)
    assert not out.any() and np.isneginf(lse).all()
    np.testing.assert_array_equal(key.astype(np.float32), operands.key.astype(np.float32))


def exported_for(device: _device.Device, case: CacheCase) -> jax.export.Exported:
    """The call, as kernels for that GPU."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), Draw(case).operands)
    assert decoding.supports(case.spec, shapes, device) is None
    with _device.assume(device), compat.lowering_for(device.kind):
        function = jax.jit(functools.partial(decoding.forward, case.spec))
        checks = [jax.export.DisabledSafetyCheck.custom_call(TRITON_CALL)]
        exported = jax.export.export(function, platforms=["cuda"], disabled_checks=checks)(shapes)
    cut = decode_tiles.choose(case.spec, shapes, device)
    kernels = 1 + (cut.splits > 1 or case.packed)
    assert exported.mlir_module().count(TRITON_CALL) == kernels
    return exported


@pytest.mark.every_turn
@pytest.mark.parametrize("case", CASES, ids=str)
def test_lowers_for_cuda(case):
    exported_for(_device.H100, dataclasses.replace(case, S=8 * case.S))


@pytest.mark.every_turn
@pytest.mark.parametrize("case", [CacheCase(num_splits=1), CASES[1], CASES[4], CASES[17]], ids=str)
def test_lowers_with_64_bit_types(case):
    with jax.enable_x64(True):
        exported_for(A10, case)


@pytest.mark.every_turn
@pytest.mark.parametrize("H, V", [(1, 1), (72, 200), (256, 256), (16, 96)])
def test_lowers_every_head_dim(H, V):
    for device in (A10, _device.H100):
        exported_for(device, CacheCase(H=H, V=V, S=1000, page=64))


@pytest.mark.every_turn
def test_lowers_a_cache_of_more_than_4_gib():
    shape = (2**17, 16, 8, 128)
    operands = CacheOperands(
        *(jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((4, 1, 32, 128), shape, shape)),
        lengths=jax.ShapeDtypeStruct((4,), jnp.int32),
        page_table=jax.ShapeDtypeStruct((4, 2048), jnp.int32),
    )
    spec = CacheSpec(AttentionSpec(0.1))
    with _device.assume(_device.H100), compat.lowering_for(_device.H100.kind):
        traced = jax.jit(functools.partial(decoding.forward, spec)).trace(operands)
        assert TRITON_CALL in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.every_turn
def test_lowers_within_shard_map_and_its_replication_check():
    device = jax.sharding.AbstractDevice(_device.H100.kind, num_cores=None, platform="gpu")
    types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.sharding.AbstractMesh((2, 2), ("batch", "heads"), axis_types=types, abstract_device=device)
    sequences, heads = (jax.sharding.PartitionSpec("batch", *x) for x in ((), (None, "heads")))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(*[heads] * 5, sequences), out_specs=heads)
    def attend(query, key, value, new_key, new_value, lengths):
        cache = jax_flash.KVCache(key, value, lengths)
        out, cache = jax_flash.flash_attention_with_cache(
            query, cache, new_key, new_value, implementation="pallas"
        )
        return out, cache.key, cache.value

    operands = Draw(CacheCase(U=1, B=2)).operands
    names = ("query", "key", "value", "new_key", "new_value", "lengths")
    with _device.assume(_device.H100), compat.lowering_for(_device.H100.kind):
        traced = jax.jit(attend).trace(*(getattr(operands, name) for name in names))
        assert traced.lower(lowering_platforms=("cuda",)).as_text().count(TRITON_CALL) == 2


def shapes(B=4, T=1, S=300, N=4, K=2, H=64, V=None, dtype="bfloat16", **others) -> CacheOperands:
    arrays = ((B, T, N, H), (B, S, K, H), (B, S, K, V or H))
    query, key, value = (jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in arrays)
    return CacheOperands(query, key, value, lengths=jax.ShapeDtypeStruct((B,), jnp.int32), **others)


OFFSETS = jax.ShapeDtypeStruct((5001,), jnp.int32)


@pytest.mark.parametrize(
    "operands, device, reason",
    [
        (shapes(), _device.CPU, "it needs an NVIDIA GPU, and the device is 'cpu'"),
        (shapes(), _device.Device("cuda", "Tesla T4", (7, 5), 40), "Tesla T4 has 7.5"),
        (shapes(H=257), A10, "at most 256, not 257"),
        (shapes(V=320), A10, "at most 256, not 320"),
        (shapes(dtype="float32"), A10, "bfloat16 or all float16, not float32"),
        (shapes(B=1, S=2**30), A10, "at most 536870912 long"),
        (shapes(B=5000, query_offsets=OFFSETS), A10, "at most 4096 sequences, not 5000"),
        (shapes(B=5000), A10, None),
    ],
)
def test_says_what_it_can_not_do(operands, device, reason):
    said = decoding.supports(CacheSpec(AttentionSpec(0.1)), operands, device)
    assert said is None if reason is None else said is not None and reason in said


def test_float8_caches_need_their_conversion():
    case = CacheCase(float8=True)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), Draw(case).operands)
    with compat.lowering_for(_device.H100.kind):
        assert decoding.supports(case.spec, shapes, _device.H100) is None
    assert decoding.supports(case.spec, shapes, A10) == (
        "key's dtype is float8_e4m3fn, which needs compute capability 8.9 (Ada) or newer, and "
        "NVIDIA A10 has 8.6"
    )


def test_mosaic_has_no_kernels_for_it():
    with only_lowering(lowering.MOSAIC):
        said = decoding.supports(CacheSpec(AttentionSpec(0.1)), shapes(), _device.H100)
    assert said == "only mosaic is allowed, which has no kernels for key-value caches"


@pytest.mark.parametrize("lengths", [(300,), (5, 300, 0, 77), tuple(range(0, 300, 20))], ids=str)
@pytest.mark.parametrize("T, left, sm_count", [(1, None, 60), (33, None, 20), (33, 40, 500)])
def test_splits_fit_the_programs(lengths, T, left, sm_count):
    """The schedule, for every program: each split of each tile has one, and none is without."""
    spec = CacheSpec(AttentionSpec(0.1, left=left, right=0))
    operands = shapes(B=len(lengths), T=T)
    with mock.patch.multiple(decode_tiles, **SMALL_TILES):
        cut = decode_tiles.choose(spec, operands, gpu(sm_count))
        shares = shares_of(spec, operands, cut, jnp.asarray(lengths, jnp.int32))
        assert cut.splits > 1
    there = shares["is_there"].astype(bool)
    assert not there[there.argmin() :].any() or there.all()
    found = [tuple(share) for share in np.stack([shares[x] for x in ("sequence", "tile", "split")], 1)[there]]
    splits = {
        (b, tile): count
        for b, tile, count in np.stack([shares[x] for x in ("sequence", "tile", "splits")], 1)[there]
    }
    tiles = cut.tiles // len(lengths)
    assert sorted(splits) == [(b, tile) for b in range(len(lengths)) for tile in range(tiles)]
    assert found == [(b, tile, i) for (b, tile), count in sorted(splits.items()) for i in range(count)]
    assert max(splits.values()) <= cut.splits


def shares_of(spec: CacheSpec, operands: CacheOperands, cut: decode_tiles.Cut, lengths: jax.Array) -> dict:
    """Each field of `Share`, by program."""
    names = [field.name for field in dataclasses.fields(Share)]

    def kernel(ref, *results):
        share = Schedule(spec, cache_sizes(operands), cut, ref, None).share(pl.program_id(0))
        for name, into in zip(names, results, strict=True):
            into[pl.program_id(0)] = jnp.asarray(getattr(share, name), jnp.int32)

    out_shape = [jax.ShapeDtypeStruct((cut.programs,), jnp.int32) for _ in names]
    with compat.interpret():
        results = compat.triton_call(
            kernel,
            grid=(cut.programs,),
            in_specs=[scores.whole(lengths)],
            out_specs=scores.whole(out_shape),
            out_shape=out_shape,
            num_warps=4,
            num_stages=1,
            name="shares",
        )(lengths)
    return {name: np.asarray(x) for name, x in zip(names, results, strict=True)}


@pytest.mark.parametrize("page", [None, 8, 256])
@pytest.mark.parametrize("H, V", [(64, 64), (128, 128), (64, 256), (256, 256)])
@pytest.mark.parametrize("device, kib", [(A10, 99), (_device.H100, 227)])
def test_what_is_looked_up_for_each_score_fits_in_shared_memory(H, V, page, device, kib):
    """Triton loads it ahead, as it does blocks of keys: with those of calls without functions, too much."""
    case = CacheCase(T=33, S=768, B=5, H=H, V=V, page=page, right=0, packed=True)
    operands = Draw(case).operands
    plain = decode_tiles.choose(case.spec, operands, device)
    spec = dataclasses.replace(case, score_mod=True).spec
    cut = decode_tiles.choose(spec, Draw(dataclasses.replace(case, score_mod=True)).operands, device)
    assert spec.attention.score_mod.lookups_of_a_score == 1
    assert cut.keys <= plain.keys and 2 <= cut.num_stages <= plain.num_stages
    # Stages of keys and values in 16 bits, what is looked up in all stages but the last, and the queries.
    blocks = cut.num_stages * cut.keys * (H + V) * 2
    looked_up = (cut.num_stages - 1) * cut.rows * cut.keys * 4
    assert blocks + looked_up + cut.rows * H * 2 <= kib * 1024
