"""score_mod and block_mask by Triton, on the CPU: in the interpreter against the definition, and lowering."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive import fields, one_in, thinned
from function_cases import MASK_MODS, SCORE_MODS, Case, check, with_gradients
from function_harness import reference
from function_primitives import CASES, arguments_of
from jax import lax, nn
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from pallas_lowering import only_lowering

import jax_flash
from jax_flash import _device, _function_arguments
from jax_flash._spec import AttentionSpec, BlockMaskSpec, Operands
from jax_flash.functions import trace_score_mod
from jax_flash.functions.graph import DTYPES
from jax_flash.pallas import compat, features, lowering
from jax_flash.pallas.triton import block_mask, functions, tiles

# JAX 0.11 and newer say at every lowering that the Triton lowering will go.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

TRITON_CALL = "__gpu$xla.gpu.triton"
A10 = _device.Device("cuda", "NVIDIA A10", (8, 6), 72)
OTHERS = (
    ((), ("is_causal",)),
    (("lengths", "cap"), ("bias", "sinks", "dropout")),
    (("is_causal", "cap", "bias"), ("lengths", "dropout")),
)


@pytest.fixture(autouse=True, scope="module")
def by_triton():
    with only_lowering(lowering.TRITON):
        yield


CASES_OF_FUNCTIONS = [
    Case(name, None, ("bfloat16", "float16")[(turn + second) % 2], captured, others=OTHERS[turn % 3][second])
    for turn, name in enumerate(SCORE_MODS)
    for second, captured in enumerate(("float32", "bfloat16"))
]


CASES_OF_MASKS = [
    Case(
        "documents" if turn % 3 == 1 else None,
        name,
        ("bfloat16", "float16")[turn % 2],
        block_size=(32, (48, 20), (300, 16))[turn % 3],
        others=((), ("lengths", "cap", "bias"), ("is_causal", "sinks", "dropout"))[turn % 3],
    )
    for turn, name in enumerate(MASK_MODS)
]


@pytest.mark.parametrize("case", one_in(2, thinned(CASES_OF_FUNCTIONS + CASES_OF_MASKS, fields)), ids=str)
def test_agrees_with_the_definition(case):
    inputs, cotangents, mask = case.inputs(), case.cotangents(), case.block_mask()
    with compat.interpret():
        got = with_gradients(lambda x: case.attend(x, mask, implementation="pallas"), inputs, cotangents)
    check(case, got, inputs, cotangents)


@pytest.mark.parametrize(
    "rows, heads, block_size", one_in(2, [(1, 1, 16), (2, 1, 48), (1, 4, (20, 64)), (2, 4, 200)])
)
def test_layouts_of_blocks(rows, heads, block_size):
    """A block mask without a mask function, with a bias: its gradient is 0 in skipped blocks."""
    T, S = 150, 170
    sides = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    shape = rows, heads, -(-T // sides[0]), -(-S // sides[1])
    layout = np.random.default_rng(0).random(shape) < 0.5
    mask = jax_flash.BlockMask.from_blocks(layout, lengths=(T, S), block_size=block_size)
    bias = jax.random.normal(jax.random.key(1), (2, 4, T, S), jnp.bfloat16)

    def attend(implementation, query, key, value, bias):
        return jax_flash.flash_attention(
            query, key, value, bias, block_mask=mask, implementation=implementation
        )

    arrays = (*drawn(T, S, 4, B=2), bias)
    expected = with_vjp(functools.partial(attend, "xla"), *arrays)
    with compat.interpret():
        got = with_vjp(functools.partial(attend, "pallas"), *arrays)
    for x, y in zip(got, expected, strict=True):
        assert np.linalg.norm(x - y) <= 2**-7 * np.linalg.norm(y)


def test_blocks_that_a_mask_hides_are_not_visited():
    layout = np.zeros((1, 1, 4, 4), bool)
    layout[..., 0, 1] = layout[..., 2, (0, 3)] = True
    kinds = jax_flash.BlockMask.from_blocks(layout, block_size=16).kinds
    spec = AttentionSpec(1.0, block_mask=BlockMaskSpec((16, 16), None))
    query, key, value = drawn(64, 64)
    operands = Operands(query, key, value, block_kinds=kinds)
    found = block_mask.lists(spec, operands, (16, 32), False, None)
    blocks, counts = (np.asarray(found[name])[0, 0] for name in block_mask.LISTS)
    np.testing.assert_array_equal(counts, [[0, 1], [0, 0], [0, 2], [0, 0]])
    np.testing.assert_array_equal(blocks, [[0, 1], [0, 1], [0, 1], [0, 1]])
    found = block_mask.lists(spec, operands, (16, 16), True, None)
    blocks, counts = (np.asarray(found[name])[0, 0] for name in block_mask.LISTS)
    np.testing.assert_array_equal(counts, [[1, 1], [1, 1], [0, 0], [1, 1]])
    np.testing.assert_array_equal(blocks[:, 0], [2, 0, 0, 2])


def drawn(T=40, S=50, N=2, B=1):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (B, T, N, 16), (B, S, N, 16), (B, S, N, 16)
    return [jax.random.normal(key, x, jnp.bfloat16) for key, x in zip(keys, shapes, strict=True)]


def with_vjp(attend, *arrays):
    """The output and gradients, of the output as its own cotangent, in float32."""
    out, vjp = jax.vjp(attend, *arrays)
    return [np.asarray(x, np.float32) for x in (out, *vjp(out))]


@pytest.mark.parametrize("is_causal", (False, True))
def test_what_a_function_is_elsewhere_reaches_nothing(is_causal):
    """Tiles reach beyond the sequences, and over hidden pairs, where values and derivatives are NaN."""
    T, S = 40, 50
    scales = jnp.linspace(0.5, 1.5, T)

    def score_mod(score, b, h, q, k):
        is_there = (q < T) & (k < S) & ((k <= q + S - T) | (not is_causal))
        number = jnp.where(is_there, 1.0, -1.0)
        return score * scales[q] * jnp.sqrt(number)

    def attend(implementation, query, key, value):
        return jax_flash.flash_attention(
            query, key, value, is_causal=is_causal, score_mod=score_mod, implementation=implementation
        )

    arrays = drawn(T, S)
    expected = with_vjp(functools.partial(attend, "xla"), *arrays)
    with compat.interpret():
        got = with_vjp(functools.partial(attend, "pallas"), *arrays)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0.05, atol=0.02)


def test_a_sharded_jit_stays_sharded():
    """Each device has batch rows and heads of its own, with their indices in the whole call."""
    mesh = jax.make_mesh((2, 2), ("batch", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch", None, "heads", None))
    whole = drawn(20, 20, 2, B=2)
    table = jnp.arange(8.0).reshape(2, 4) / 4

    def attend(query, key, value, table):
        return jax_flash.flash_attention(
            query,
            key,
            value,
            score_mod=lambda score, b, h, q, k: score * (1 + b) + table[h, k % 4],
            implementation="pallas",
        )

    run = jax.jit(lambda *arrays: jax.vjp(attend, *arrays)[1](arrays[0]))
    with compat.interpret():
        got = run(*(jax.device_put(x, sharding) for x in whole), table)
        expected = run(*whole, table)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=1e-5, atol=1e-5)


REFUSED = ("unary-round_even", "unary-round_away", "unary-erf", "unary-erfc", "unary-lgamma")


def tile_of(name):
    """A case's arguments as tiles of 32 columns, of which there is a power of two, and how many there are."""
    arguments = dict(zip(("score", "batch", "head", "query", "key"), arguments_of(name), strict=True))
    count = arguments["score"].size
    size = max(512, 1 << (count - 1).bit_length())
    return {key: np.resize(x, size).reshape(-1, 32) for key, x in arguments.items()}, count


def of_tile(traced, inputs):
    """The function's values, computed in a kernel."""

    def kernel(inputs, result):
        loaded = {name: triton.load(ref) for name, ref in inputs.items()}
        (x,) = functions.values([traced.output], loaded, lambda *_: None)
        triton.store(result.at[:, :], jnp.broadcast_to(x, result.shape))

    shape = inputs["score"].shape
    whole = pl.BlockSpec(shape, lambda *_: (0, 0))
    return compat.triton_call(
        kernel,
        grid=(1,),
        in_specs=[dict.fromkeys(inputs, whole)],
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        num_warps=4,
        num_stages=1,
        name="primitive",
    )(inputs)


@pytest.mark.every_turn
@pytest.mark.parametrize("name", [name for name in CASES if name not in REFUSED])
def test_primitives_agree_with_jax_and_lower(name):
    function, _, tolerance = CASES[name]
    traced = trace_score_mod(function, functions.unsupported)
    inputs, count = tile_of(name)
    with compat.interpret():
        value = np.asarray(jax.jit(lambda x: of_tile(traced, x))(inputs)).reshape(-1)[:count]
    expected = reference(function, arguments_of(name))
    np.testing.assert_allclose(value, expected, rtol=tolerance, atol=1e-6 if tolerance else 0)
    with compat.lowering_for(_device.H100.kind):
        lowered = jax.jit(lambda x: of_tile(traced, x)).trace(inputs).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count(TRITON_CALL) == 1


@pytest.mark.parametrize("name", REFUSED)
def test_primitives_that_are_refused(name):
    with pytest.raises(NotImplementedError, match="the Triton lowering of Pallas has no such primitive"):
        lowered_text(CASES[name][0], _device.H100)


def lowered_text(score_mod, device, captured=(), transform=lambda f: f, **options):
    """The program of a call and its gradients for a GPU. `score_mod` takes the captured arrays, if any."""

    @transform
    def gradients(query, key, value, *captured):
        def loss(query, key, value, *captured):
            function = score_mod(*captured) if captured else score_mod
            out = jax_flash.flash_attention(
                query, key, value, score_mod=function, implementation="pallas", **options
            )
            return out.astype(jnp.float32).sum()

        floats = [i for i, x in enumerate(captured) if jnp.issubdtype(x.dtype, jnp.floating)]
        return jax.grad(loss, argnums=(0, 1, 2, *(3 + i for i in floats)))(query, key, value, *captured)

    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in drawn(150, 170, B=2)]
    with _device.assume(device), compat.lowering_for(device.kind):
        traced = jax.jit(gradients).trace(*arrays, *captured)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def captured_of(name, dtype):
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in SCORE_MODS[name][1]]


@pytest.mark.every_turn
@pytest.mark.parametrize("device", (A10, _device.H100), ids=lambda device: device.kind)
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("name", SCORE_MODS)
def test_lowers(name, dtype, device):
    text = lowered_text(SCORE_MODS[name][0], device, captured_of(name, dtype))
    assert text.count(TRITON_CALL) == 3


@pytest.mark.every_turn
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lowers_captured_arrays_of_every_dtype(dtype):
    def make(table):
        return lambda score, b, h, q, k: score + table[b, h, k % 5].astype(jnp.float32)

    lowered_text(make, _device.H100, [jax.ShapeDtypeStruct((2, 2, 5), dtype)], is_causal=True)


@pytest.mark.every_turn
def test_lowers_with_64_bit_types():
    with jax.enable_x64(True):
        lowered_text(SCORE_MODS["documents"][0], _device.H100, captured_of("documents", "float32"))


@pytest.mark.every_turn
def test_lowers_within_shard_map_and_its_replication_check():
    device = jax.sharding.AbstractDevice(_device.H100.kind, num_cores=None, platform="gpu")
    types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.sharding.AbstractMesh((2, 2), ("batch", "heads"), axis_types=types, abstract_device=device)
    split, whole = jax.sharding.PartitionSpec("batch", None, "heads", None), jax.sharding.PartitionSpec()
    of_arrays = (split,) * 3 + (whole,)
    transform = functools.partial(jax.shard_map, mesh=mesh, in_specs=of_arrays, out_specs=of_arrays)
    captured = captured_of("relative_position", "float32")
    lowered_text(SCORE_MODS["relative_position"][0], _device.H100, captured, transform)


def counted(score, b, h, q, k):
    return lax.while_loop(lambda x: x < 10, lambda x: x + 1, score)


TABLE = jnp.ones(5)


@jax.custom_vjp
def with_its_own_rule(x):
    return x


with_its_own_rule.defvjp(lambda x: (x, None), lambda _, d: (d,))


@pytest.mark.parametrize(
    "score_mod, options, reason",
    [
        (counted, {}, "score_mod has while, at "),
        (lambda score, b, h, q, k: with_its_own_rule(score), {}, "a custom_jvp has"),
        (lambda score, b, h, q, k: score + TABLE[k % 5], {"deterministic": True}, "in no fixed order"),
        (lambda score, b, h, q, k: nn.gelu(score, approximate=False), {}, "no such primitive"),
    ],
)
def test_says_why_it_refuses(score_mod, options, reason):
    query, key, value = drawn()
    with compat.interpret(), pytest.raises(NotImplementedError, match=re.escape(reason)):
        jax_flash.flash_attention(query, key, value, score_mod=score_mod, implementation="pallas", **options)


def test_a_deterministic_call_takes_a_function_without_gradients_of_its_own():
    lowered_text(lambda score, b, h, q, k: score * (1 + h), _device.H100, deterministic=True)


def test_explain_says_that_triton_runs_it():
    query, key, value = drawn()
    with _device.assume(_device.H100):
        explained = jax_flash.explain(query, key, value, score_mod=lambda score, b, h, q, k: score * q)
    (kernel,) = (choice.kernel for choice in explained.choices if choice.name == "pallas")
    assert kernel.startswith("Triton forward")


@pytest.mark.parametrize("H", [64, 128, 256])
@pytest.mark.parametrize("device, kib", [(A10, 99), (_device.H100, 227)])
def test_what_is_looked_up_for_each_score_fits_in_shared_memory(H, device, kib):
    """Triton loads all of it ahead, in each stage but one. The tables of tiles have room for one number."""
    shape, size = (1, 1000, 2, H), (1000, 1000, 2)
    arrays = [jnp.zeros((2, 129)) for _ in range(4)]

    def chosen(lookups):
        def score_mod(score, batch, head, query, key):
            for i, array in enumerate(arrays[:lookups]):
                score = score + array[head, jnp.clip(query - key, -60 - i, 60 + i) + 64]
            return score

        function, _, others = _function_arguments.operands(score_mod, None, (1,), size)
        spec = AttentionSpec(0.1, right=0, score_mod=function)
        operands = Operands.of(
            dict.fromkeys(("query", "key", "value"), jnp.zeros(shape, jnp.bfloat16)) | others
        )
        assert features.loads_of_a_score(spec, operands) == (0, lookups)
        return tiles.choose(spec, operands, device)

    one, four = chosen(1), chosen(4)
    for kernel in ("forward", "backward_keys", "backward_queries"):
        tile = getattr(four, kernel)
        assert 1 <= tile.num_stages <= getattr(one, kernel).num_stages
        ahead = tile.num_stages - 1
        looked_up = ahead * 4 * tile.queries * tile.keys * 4
        blocks = ahead * min(tile.queries, tile.keys) * 2 * H * 2
        assert looked_up + blocks <= kib * 1024
    assert four.forward.num_stages < one.forward.num_stages or (H == 256 and kib == 227)
