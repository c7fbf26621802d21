"""Pallas by Triton, on the CPU: kernels in the interpreter against the definition, and lowering for GPUs."""

import functools
import itertools

import call_factors
import jax
import jax.numpy as jnp
import numpy as np
import pairwise_suite
import pytest
from attention_case import Case
from call_factors import BROADCAST_FORMS
from exhaustive import fields, one_in, thinned
from implementation_suite import FEATURES, ImplementationSuite
from nonfinite_suite import NonFiniteSuite
from pairwise_suite import PairwiseSuite
from pallas_lowering import only_lowering

import jax_flash
from jax_flash import _device, _varlen_unpacking, pallas
from jax_flash._spec import AttentionSpec, Operands, sizes
from jax_flash.pallas import compat, features, lowering
from jax_flash.pallas.triton import scores
from jax_flash.pallas.triton import tiles as triton_tiles

# JAX 0.11 and newer say at every lowering that the Triton lowering will go.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

A10 = _device.Device("cuda", "NVIDIA A10", (8, 6), 72)
TRITON_CALL = "__gpu$xla.gpu.triton"
T4 = _device.Device("cuda", "Tesla T4", (7, 5), 40)


EVERYTHING = (
    "mask:B11S",
    "logits_soft_cap",
    "alibi_slopes",
    "sinks",
    "dropout",
    "seq_lengths",
    "segment_ids",
    "score_mod",
    "block_mask",
)


@pytest.fixture(autouse=True, scope="module")
def by_triton():
    with only_lowering(lowering.TRITON):
        yield


class TestPallasInterpreted(ImplementationSuite):
    implementation = "pallas"
    p_is_converted = False
    # Most of the time goes into compiling what the interpreter makes of kernels.
    compiler_options = {"xla_backend_optimization_level": 0}  # noqa: RUF012
    lengths = (1, 65, 150)
    head_dims = (64, 80, 256)
    heads = ((6, 2),)
    features = FEATURES
    reports_errors = False
    slow = True

    def environment(self):
        return compat.interpret()

    @classmethod
    def cases(cls):
        """Those of all; a bias in every form whose gradient is summed up elsewhere; and all at once."""
        forms = [("bias:1NTS",), ("bias:B1TS",), ("bias:11TS", *EVERYTHING), ("bias:BNT1",), ("bias:1111",)]
        small = {"T": 70, "S": 150, "N": 4, "K": 2, "B": 3}
        return super().cases() + [
            Case("feature", dtype, features=features, **small)
            for dtype, features in zip(itertools.cycle(cls.dtypes), [*forms, ("bias:BNTS", *EVERYTHING)])
        ]


class TestPallasInterpretedAsForHopper(TestPallasInterpreted):
    """The tiles of the other table, at lengths that they divide."""

    lengths = (128, 256)
    typical_length = 256

    @classmethod
    def cases(cls):
        return [case for case in super().cases() if case.category in ("length", "cross")]

    @pytest.fixture(autouse=True)
    def assume_hopper(self):
        with _device.assume(_device.H100):
            yield


class TestPallasNonFinite(NonFiniteSuite):
    implementation = "pallas"
    compiler_options = {"xla_backend_optimization_level": 0}  # noqa: RUF012

    def environment(self):
        return compat.interpret()


class TestPallasPairwise(PairwiseSuite):
    """What becomes of scores alone; all pairs run on a GPU (tests/gpu/test_pairwise_gpu.py)."""

    implementation = "pallas"
    compiler_options = TestPallasInterpreted.compiler_options
    reports_errors = False

    def environment(self):
        return compat.interpret()

    def factors(self):
        factors = call_factors.factors(
            self.dtypes,
            lengths=((65, 70),),
            head_dims=(16,),
            value_head_dim=24,
            heads=((4, 2),),
            masks=("B1TS", "1N1S"),
            biases=("1NTS", "BN1S"),
        )
        features = ("mask", "bias", "alibi_slopes", "seq_lengths", *call_factors.FEATURES)
        others = ("transform", "batch axes", "bias dtype", "residual", "deterministic")
        return {
            name: values if name in features and name not in others else dict(list(values.items())[:1])
            for name, values in factors.items()
        }


def shapes(B=1, T=257, S=300, N=4, K=2, H=64, V=None, dtype="bfloat16") -> Operands:
    V = H if V is None else V
    query, key, value = ((B, T, N, H), (B, S, K, H), (B, S, K, V))
    return Operands(*(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in (query, key, value)))


def forward_and_backward(spec: AttentionSpec, operands: Operands, d_lse: bool = True):
    """A function of the operands, out's cotangent taken as out, and lse's as lse or None."""
    out, lse = pallas.forward(spec, operands)
    return out, lse, pallas.backward(spec, operands, out, lse, out, lse if d_lse else None)


def exported_for(device: _device.Device, spec: AttentionSpec, operands: Operands) -> jax.export.Exported:
    """Checks that there are the kernels that are expected."""
    unpacked_spec, unpacked = _varlen_unpacking.unpacked_shapes(spec, operands)
    of = scores.Scores(unpacked_spec, sizes(unpacked), unpacked.present())
    kernels = (6 if of.isolates else 3) + (features.bias_gradient(operands) == "shared")
    with _device.assume(device), compat.lowering_for(device.kind):
        function = jax.jit(lambda operands: forward_and_backward(spec, operands))
        checks = [jax.export.DisabledSafetyCheck.custom_call(TRITON_CALL)]
        exported = jax.export.export(function, platforms=["cuda"], disabled_checks=checks)(operands)
    assert exported.mlir_module().count(TRITON_CALL) == kernels
    return exported


@pytest.mark.every_turn
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [1, 16, 64, 72, 80, 96, 128, 160, 192, 256])
def test_lowers_for_cuda(head_dim, dtype):
    spec = AttentionSpec(head_dim**-0.5, left=None, right=0)
    operands = shapes(H=head_dim, dtype=dtype)
    exported = exported_for(_device.H100, spec, operands)
    leaves = [operands.query, operands.key, operands.value]
    assert [(x.shape, x.dtype) for x in exported.out_avals[2:]] == [(x.shape, x.dtype) for x in leaves]


@pytest.mark.every_turn
@pytest.mark.parametrize("window", [(None, None), (None, 0), (9, None), (100, 20)], ids=str)
@pytest.mark.parametrize("device, T, S", [(A10, 1, 1), (_device.H100, 256, 256), (A10, 3, 1000)])
def test_lowers_every_mask_and_length(device, T, S, window):
    left, right = window
    exported_for(device, AttentionSpec(0.125, left, right), shapes(T=T, S=S, V=128))


@pytest.mark.every_turn
def test_lowers_with_64_bit_types():
    with jax.enable_x64(True):
        exported_for(_device.H100, AttentionSpec(0.125, 5, 3), shapes())


def test_kernels_take_their_sum_in_float32_whatever_the_default_precision():
    with jax.default_matmul_precision("BF16_BF16_F32_X3"):
        exported_for(_device.H100, AttentionSpec(0.125), shapes())


@pytest.mark.every_turn
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

    with _device.assume(_device.H100), compat.lowering_for(_device.H100.kind):
        traced = jax.jit(gradients).trace(operands.query, operands.key, operands.value)
        lowered = traced.lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count(TRITON_CALL) == 6  # with those that keep apart what isn't finite


def test_a_sharded_jit_stays_sharded():
    mesh = jax.make_mesh((2, 2), ("batch", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split = jax.sharding.PartitionSpec("batch", None, "heads", None)
    sharding = jax.sharding.NamedSharding(mesh, split)
    keys = jax.random.split(jax.random.key(0), 3)
    whole = [jax.random.normal(key, (2, 20, 2, 16), jnp.bfloat16) for key in keys]
    with compat.interpret():
        attend = jax.jit(lambda *arrays: jax_flash.flash_attention(*arrays, implementation="pallas"))
        parts = [jax.device_put(x, sharding) for x in whole]
        assert "all-gather" not in attend.lower(*parts).compile().as_text()
        np.testing.assert_array_equal(attend(*parts), attend(*whole))


@pytest.mark.parametrize(
    "spec, changes, device, reason",
    [
        ({}, {}, _device.CPU, "needs an NVIDIA GPU.*'cpu'"),
        ({}, {}, _device.Device("rocm", "MI300X"), "needs an NVIDIA GPU.*'rocm'"),
        ({}, {}, T4, "compute capability 8.0.*Tesla T4 has 7.5"),
        ({}, {"H": 257}, A10, "at most 256, not 257"),
        ({}, {"V": 320}, A10, "at most 256, not 320"),
        ({}, {"dtype": "float32"}, A10, "bfloat16 or all float16, not float32"),
        ({}, {"S": 2**30}, A10, "at most 536870912 long"),
    ],
)
def test_says_what_it_can_not_do(spec, changes, device, reason):
    spec = AttentionSpec(**{"scale": 0.125, **spec})
    said = pallas.supports(spec, shapes(**changes), device)
    assert said is not None
    with pytest.raises(NotImplementedError, match=reason):
        raise NotImplementedError(said)


@pytest.mark.parametrize(
    "operand, shape, dtype, reason",
    [
        ("bias", (1, 1, 257, 300), np.float64, "bfloat16 or float16 or float32, not float64"),
        ("mask", (5, 2, 257, 1_000_000), bool, "a mask of 2 to 4 GiB"),  # element offsets beyond int32
        ("mask", (9, 2, 257, 1_000_000), bool, None),
    ],
)
def test_says_which_operands_it_does_not_take(operand, shape, dtype, reason):
    operands = shapes().replace(**{operand: jax.ShapeDtypeStruct(shape, np.dtype(dtype))})
    said = pallas.supports(AttentionSpec(0.125), operands, A10)
    assert said is None if reason is None else reason in said


def lower_for(device: _device.Device, case: Case):
    assert pallas.supports(case.spec(), case.operands(), device) is None
    exported_for(device, case.spec(), case.operands())


def lower_for_all_gpus(case: Case):
    for device in (A10, _device.H100):
        lower_for(device, case)


@pytest.mark.every_turn
@pytest.mark.parametrize("T, S", [(129, 256), pytest.param(1, 1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "feature",
    [
        *FEATURES,
        "seq_lengths:query",
        "seq_lengths:key_value",
        "mask:1111",
    ],
)
def test_lowers_every_feature(feature, T, S):
    lower_for_all_gpus(Case("", "bfloat16", T=T, S=S, N=4, is_causal=True, features=(feature,)))


@pytest.mark.every_turn
@pytest.mark.parametrize("form", one_in(2, BROADCAST_FORMS[::3]))  # of each way to sum up the gradient some
def test_lowers_every_bias_with_everything(form):
    case = Case("", "float16", T=65, S=80, N=4, features=(*EVERYTHING, f"bias:{form}"), bias_dtype="float32")
    lower_for_all_gpus(case)


@pytest.mark.every_turn
@pytest.mark.parametrize("H, V", [(96, 48), (40, 100), (256, 48), (1, 200)])
def test_lowers_a_shared_bias_of_every_head_dim(H, V):
    case = Case("", "bfloat16", T=65, S=80, N=4, H=H, V=V, features=("bias:B1TS",))
    lower_for_all_gpus(case)


class PairsToLower(PairwiseSuite):
    """The interpreter runs a kernel with blocks of any width; the lowering wants powers of two, and has rules
    for what is broadcast that the interpreter lacks."""

    implementation = "pallas"

    def environment(self):
        return _device.assume(_device.H100)

    def factors(self):
        factors = call_factors.factors(
            self.dtypes,
            lengths=((129, 517), (128, 256)),  # with one query or key, or one batch row, less is shared
            head_dims=(96, 40, 256, 100),
            value_head_dim=48,
            heads=((4, 2), (4, 4)),
            windows=((20, 6), (None, 3), (7, -1)),
            masks=("BNTS", "1N1S", "B1T1", "1111"),
        )
        left_out = ("transform", "batch axes", "residual", "deterministic")
        return {name: values for name, values in factors.items() if name not in left_out}


def pairs_to_lower() -> list[Case]:
    suite = PairsToLower()
    runs, refused = pairwise_suite.cases(suite, suite.factors())
    assert not refused
    return runs


@pytest.mark.every_turn
@pytest.mark.parametrize(
    "turn, case",
    thinned(enumerate(pairs_to_lower()), lambda turn_and_case: fields(turn_and_case[1])),
    ids=str,
)
def test_lowers_pairs(turn, case):
    lower_for((A10, _device.H100)[turn % 2], case)


@pytest.mark.every_turn
def test_lowers_features_with_64_bit_types():
    with jax.enable_x64(True):
        lower_for_all_gpus(Case("", "bfloat16", features=(*EVERYTHING, "bias:1NTS")))


@pytest.mark.parametrize("device", [_device.H100, A10], ids=lambda device: device.kind)
def test_supports_and_describes(device):
    spec, operands = AttentionSpec(0.125), shapes()
    assert pallas.supports(spec, operands, device) is None
    chosen = triton_tiles.choose(spec, operands, device)
    for tile in (chosen.forward, chosen.backward_keys, chosen.backward_queries):
        assert str(tile) in pallas.describe(spec, operands, device)
    assert "of bias" not in pallas.describe(spec, operands, device)
    shared = operands.replace(bias=jax.ShapeDtypeStruct((1, 1, 257, 300), jnp.dtype("bfloat16")))
    of_bias = triton_tiles.choose(spec, shared, device).backward_bias
    assert f"of bias ({of_bias})" in pallas.describe(spec, shared, device)


def test_runs_on_the_cpu_only_where_it_is_asked_to_interpret():
    assert pallas.supports(AttentionSpec(0.125), shapes(), _device.CPU) is not None
    with compat.interpret():
        assert pallas.supports(AttentionSpec(0.125), shapes(), _device.CPU) is None
    assert pallas.supports(AttentionSpec(0.125), shapes(), _device.CPU) is not None


@pytest.mark.parametrize("device", [_device.H100, A10], ids=lambda device: device.kind)
@pytest.mark.parametrize("T", [1, 100, 4096])
@pytest.mark.parametrize("S", [1, 100, 4096])
@pytest.mark.parametrize("H", [1, 64, 80, 129, 256])
def test_tiles_are_powers_of_two(T, S, H, device):
    operands = shapes(T=T, S=S, H=H)
    masked = operands.replace(mask=jax.ShapeDtypeStruct((1, 1, T, S), np.dtype(bool)))
    chosen = [triton_tiles.choose(AttentionSpec(0.125), x, device) for x in (operands, masked)]
    for tile in itertools.chain(*(vars(of_call).values() for of_call in chosen)):
        for extent in (tile.queries, tile.keys, tile.num_warps):
            assert extent & (extent - 1) == 0
        assert min(tile.queries, tile.keys) >= 16


def test_blocks_of_other_segments_are_passed_over():
    queries = jnp.repeat(jnp.array([[0, 1, 2, 5]], jnp.int32), 4, axis=1)
    keys = jnp.array([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 3, 3]], jnp.int32)
    operands = Operands(None, None, None, query_segment_ids=queries, key_value_segment_ids=keys)
    found = scores.operands_of(AttentionSpec(0.125), operands, 4, 4)
    np.testing.assert_array_equal(
        [found[name][0] for name in scores.SEGMENT_BLOCKS], [[0, 1, 2, 0], [1, 3, 3, 0]]
    )
    found = scores.operands_of(AttentionSpec(0.125), operands, 4, 4, transposed=True)
    np.testing.assert_array_equal(
        [found[name][0] for name in scores.SEGMENT_BLOCKS], [[0, 1, 1, 0], [1, 2, 3, 0]]
    )


def test_a_bias_of_the_lowest_numbers_masks_and_gives_no_nan():
    keys = jax.random.split(jax.random.key(0), 3)
    query, key, value = (jax.random.normal(k, (1, 40, 2, 16), jnp.bfloat16) for k in keys)
    bias = np.zeros((1, 2, 40, 40), np.float32)
    bias[:, 0, 5] = np.finfo(np.float32).min  # all keys are as good, and as bad
    bias[:, 1, 5] = -np.inf  # none is there
    bias[:, :, :, 7] = -np.inf

    def attend(*arguments):
        return jax_flash.flash_attention(*arguments, return_residual=True, implementation="pallas")

    with compat.interpret():
        (out, lse), vjp = jax.vjp(attend, query, key, value, jnp.asarray(bias))
        gradients = vjp((out, jnp.ones_like(lse)))
    mean = np.delete(np.asarray(value, np.float32), 7, axis=1).mean(1)
    np.testing.assert_allclose(np.asarray(out, np.float32)[:, 5, 0], mean[:, 0], atol=1e-2)
    assert not np.asarray(out)[:, 5, 1].any() and np.isneginf(lse[:, 5, 1])
    for gradient in gradients:
        assert np.isfinite(np.asarray(gradient, np.float32)).all()
    assert not np.asarray(gradients[1])[:, 7].any()
    assert not np.asarray(gradients[3])[:, 1, 5].any()


def test_kept_probabilities_are_divided_by_the_rate_in_force():
    """0.9999 is not a multiple of 2**-15: 3 in 2**15 are kept. Logits are 0 and values the identity."""
    n, rate = 64, 0.9999
    query = jnp.zeros((4, n, 4, n), jnp.bfloat16)
    identity = jnp.broadcast_to(jnp.eye(n, dtype=jnp.bfloat16)[:, None], query.shape)
    dropout_key = jax.random.key(1)

    def attend(value):
        return jax_flash.flash_attention(
            query, query, value, dropout_rate=rate, dropout_key=dropout_key, implementation="pallas"
        )

    with compat.interpret():
        out, vjp = jax.vjp(attend, identity)
        (d_value,) = vjp(identity)
    kept = np.asarray(jax_flash.dropout_mask(dropout_key, rate, (4, 4, n, n)))
    assert 0 < kept.sum() < 30
    expected = kept / (n * 3 * 2**-15)
    np.testing.assert_allclose(out.astype(jnp.float32).transpose(0, 2, 1, 3), expected, rtol=0.01)
    np.testing.assert_allclose(d_value.astype(jnp.float32).transpose(0, 2, 3, 1), expected, rtol=0.01)
