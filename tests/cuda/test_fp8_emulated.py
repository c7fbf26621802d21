"""Forward on e4m3 arrays, by the Hopper kernel in the emulator, against the definition in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_case import DEVICE, Case, draw, tile
from exhaustive import one_in, thinned
from float8_arrays import arranged
from kernel_emulator import KernelEmulator

import jax_flash
from jax_flash import _float8, _reference
from jax_flash._spec import Operands, shapes_of
from jax_flash.cuda import dropout
from jax_flash.cuda.sm90 import forward_plan, forward_tiles

CASES = (
    Case(H=128, T=200, S=300, N=2, B=2),
    Case(H=64, T=200, S=300, N=4, K=2, B=2, right=0),
    Case(H=32, V=48, T=130, S=140, N=2, left=40, right=10),
    Case(H=192, V=128, T=130, S=260, right=0, dtype="float16"),
    Case(H=256, T=100, S=260),
    Case(H=96, T=9, S=300, N=8, K=2, right=0),  # whose heads share a tile
    Case(H=128, T=260, S=300, N=2, B=2, lengths="qk", return_residual=True),
    Case(H=64, T=130, S=300, segments="mixed", soft_cap=2.0),
    Case(H=128, T=130, S=300, N=2, bias="1NTS", sinks="1N", alibi="1N", wide="all"),
    Case(H=64, T=200, S=300, N=2, score_mod="capped", block_mask="of_own_heads"),
    Case(H=128, T=200, S=1100, N=1, sinks="1N"),  # split among CTAs
    Case(H=64, T=200, S=300, N=4, K=2, B=2, right=0, dropout=0.3),
    Case(H=256, T=100, S=200, dropout=0.6),
    Case(H=128, T=130, S=2500, N=2, K=1, right=0),  # sums of several times eight blocks
)


def in_8_bits(spec, operands):
    """`_float8.quantized`, compiled as a whole: that takes less time than operation by operation."""
    specs = []  # plain Python, which a compiled function doesn't return

    def quantized(operands):
        of_8_bits, operands = _float8.quantized(spec, operands)
        specs.append(of_8_bits)
        return operands

    operands = jax.jit(quantized)(operands)
    return specs[0], operands


@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def reference(spec, operands):
    return _reference.reference(spec, operands, jnp.float64)


def of_8_bits(case, scales):
    """A case's call on e4m3 arrays; of the scales some have other sizes, signs, and are no powers of two."""
    spec, operands, _, _, seed = draw(case)
    random = np.random.default_rng(seed)
    # Blocks of rows of very different sizes.
    of_key_rows = 4.0 ** random.integers(-3, 4, (case.B, -(-case.S // 128), 1, 1)).repeat(128, 1)[:, : case.S]
    value = operands.value
    operands = operands.replace(value=(value * of_key_rows).astype(value.dtype))
    quantized = dataclasses.replace(spec, quantization="fp8")
    if scales == "incoherent":
        operands = operands.replace(rotation_signs=_float8.fixed_signs(case.H)[None])
    spec, operands = in_8_bits(quantized, operands)
    if scales == "any":
        names = ("query_descale", "key_descale", "value_descale")
        changed = {
            name: getattr(operands, name)
            * random.choice([0.7, 1.3, -1.0, 0.0], getattr(operands, name).shape)
            for name in names
        }
        operands = operands.replace(**{name: jnp.asarray(x, jnp.float32) for name, x in changed.items()})
    if scales == "none":
        arrays = operands.present()
        operands = Operands.of({name: x for name, x in arrays.items() if not name.endswith("_descale")})
        spec = dataclasses.replace(spec, scale=spec.scale * 2e-4)
    return spec, operands, seed


def run(spec, operands, emulator, seed):
    shapes = shapes_of(operands)
    plan = forward_plan.plan_forward(spec, shapes, DEVICE)
    metadata_plan = forward_plan.plan_forward_metadata(spec, shapes, DEVICE)
    arrays = {name: np.asarray(x) for name, x in jax.jit(arranged)(operands).items()}
    if metadata_plan is not None:
        arrays |= emulator.run(metadata_plan, arrays, seed)
    arrays |= forward_plan.forward_block_lists(spec, operands, arrays)
    arrays = {name: np.asarray(x) for name, x in arrays.items()}
    return emulator.run(plan, dropout.arranged(plan, arrays), seed)


def check(spec, operands, got):
    with jax.enable_x64(True):
        wide = jax.tree.map(_reference._widen, operands)
        out, lse = map(np.asarray, reference(spec, wide))
    np.testing.assert_allclose(got["lse"], lse, rtol=1e-4, atol=1e-4)
    # P is rounded to 4 bits, relative to 2^-4 of its own size at most; an output averages many.
    found = np.asarray(got["out"], np.float64)
    assert np.all(np.isfinite(found))
    error, size = np.linalg.norm(found - out, axis=-1), np.linalg.norm(out, axis=-1)
    assert np.linalg.norm(error) < 0.03 * np.linalg.norm(size)
    values = np.abs(np.asarray(_float8.dequantized(operands).value, np.float64))
    assert np.all(error <= 0.04 * size + 0.04 * np.linalg.norm(values.max(1).max(1), axis=-1)[:, None, None])


SCALES = ("incoherent", "any", "none")


def with_tile(case_and_scales):
    """What cases are thinned to: each once, and each tile shape with scales of every kind."""
    case, scales = case_and_scales
    return {case, *((width, scales) for width in tile(case))}


@pytest.mark.parametrize(
    "case,scales",
    # Each kind first in turn, as the first of a case is what `make test` runs.
    one_in(
        2, thinned([(case, SCALES[(i + k) % 3]) for k in range(3) for i, case in enumerate(CASES)], with_tile)
    ),
    ids=str,
)
def test_forward(case, scales, emulator):
    spec, operands, seed = of_8_bits(case, scales)
    check(spec, operands, run(spec, operands, emulator, seed))


def long_sum(keys):
    """A call whose scores are 0 and whose values have one sign; causal, so that no CTAs share a tile."""
    case = Case(H=64, T=64, S=keys, N=1, right=0)
    spec, operands, _, _, seed = draw(case)
    value = 1 + jnp.abs(operands.value) / jnp.max(jnp.abs(operands.value))
    operands = operands.replace(query=jnp.zeros_like(operands.query), value=value)
    return *in_8_bits(dataclasses.replace(spec, quantization="fp8"), operands), seed


def error_of_long_sum(keys, emulator):
    spec, operands, seed = long_sum(keys)
    got = np.asarray(run(spec, operands, emulator, seed)["out"], np.float64)
    value = np.asarray(_float8.dequantized(operands).value, np.float64)
    seen = np.arange(keys - 64, keys) + 1
    right = np.cumsum(value, 1)[:, -64:] / seen[:, None, None]
    return np.linalg.norm(got - right) / np.linalg.norm(right)


def test_long_sums(tmp_path, monkeypatch):
    """With tensor cores that keep 14 bits of a sum: by themselves they cut much off a long one."""
    emulator = KernelEmulator(tmp_path, SUM_BITS=14)
    assert error_of_long_sum(4096, emulator) < 0.01
    without = {dim: dataclasses.replace(tile, sum_blocks=0) for dim, tile in forward_tiles.FP8_TILES.items()}
    monkeypatch.setattr(forward_tiles, "FP8_TILES", without)
    assert error_of_long_sum(4096, emulator) > 0.03


def test_probabilities_in_another_order_are_found(emulator):
    """The order of keys in which values are stored is the kernel's."""
    spec, operands, seed = of_8_bits(CASES[0], "incoherent")
    first_half = jnp.arange(operands.value.shape[1]) % 16 < 8
    swapped = jnp.where(first_half[:, None, None], operands.value, jnp.roll(operands.value, 1, axis=1))
    got = run(spec, operands.replace(value=swapped), emulator, seed)
    with pytest.raises(AssertionError):
        check(spec, operands, got)


@pytest.mark.parametrize("where", ("value", "key", "query"))
def test_what_is_not_finite_reaches_those_that_see_it(where, emulator):
    case = Case(H=64, T=200, S=300, N=2, right=0)
    spec, operands, seed = of_8_bits(case, "incoherent")
    clean = run(spec, operands, emulator, seed)["out"]
    x = getattr(operands, where)
    spoilt = operands.replace(**{where: x.at[0, 250 if where != "query" else 50, 0, 3].set(jnp.nan)})
    out = run(spec, spoilt, emulator, seed)["out"]
    head, query = np.ogrid[:2, :200]
    of_head = head == 0 if where == "query" else head >= 0  # both share the key head
    sees = of_head & ((query == 50) if where == "query" else (query + 100 >= 250))
    found = np.isnan(np.asarray(out, np.float32)[0]).all(-1).T
    np.testing.assert_array_equal(found, sees)
    np.testing.assert_array_equal(np.asarray(out)[0][~sees.T], np.asarray(clean)[0][~sees.T])


@pytest.mark.parametrize("size", (-70, -110))
def test_scores_that_are_nearly_zero(size, emulator):
    """The product of the scale and the descales is 0 in float32. Causal, so that some scores are -inf."""
    spec, operands, _, _, seed = draw(Case(H=64, T=130, S=140, N=1, right=0))
    small = {name: (getattr(operands, name) * 2.0**size).astype("bfloat16") for name in ("query", "key")}
    spec, operands = in_8_bits(dataclasses.replace(spec, quantization="fp8"), operands.replace(**small))
    check(spec, operands, run(spec, operands, emulator, seed))


@pytest.mark.parametrize("block", (0, 1, 2))
@pytest.mark.parametrize("descale", (1e-12, np.finfo("float32").tiny, np.finfo("float32").tiny / 448))
def test_a_block_of_values_that_are_nothing(block, descale, emulator):
    """Zeros of a small descale, as of padding whose largest magnitude was clamped, change no other values."""
    spec, operands, seed = of_8_bits(Case(H=64, T=64, S=384, N=1), "incoherent")
    rows = slice(128 * block, 128 * (block + 1))
    operands = operands.replace(
        value=operands.value.at[:, rows].set(0),
        value_descale=operands.value_descale.at[..., block].set(descale),
    )
    check(spec, operands, run(spec, operands, emulator, seed))


@pytest.mark.every_turn
def test_lowered_for_a_gpu():
    """Quantization, transposition and the kernel in one program; backward the usual kernels."""
    query = jnp.ones((1, 200, 4, 96), jnp.bfloat16)
    key = jnp.ones((1, 300, 2, 96), jnp.bfloat16)

    def loss(query, key, value):
        out = jax_flash.flash_attention(query, key, value, is_causal=True, quantization="fp8")
        return out.astype(jnp.float32).sum()

    with jax_flash.planned_for("sm_90a"):
        step = jax.jit(jax.grad(loss, (0, 1, 2)))
        text = step.trace(query, key, key).lower(lowering_platforms=("cuda",)).as_text()
        packed = functools.partial(
            jax_flash.flash_attention_varlen,
            **{"cu_seqlens_q": np.array([0, 90, 200]), "cu_seqlens_kv": np.array([0, 90, 300])},
            **{"max_seqlen_q": 200, "max_seqlen_kv": 300, "quantization": "fp8"},
        )
        of_packed = (
            jax.jit(packed).trace(query[0], key[0], key[0]).lower(lowering_platforms=("cuda",)).as_text()
        )
        explained = jax_flash.explain(query, key, key, quantization="fp8")
        given = jax_flash.quantize(query, key, key, implementation="xla")._asdict()
        attend = jax.jit(jax_flash.flash_attention)
        of_arrays = attend.trace(**given).lower(lowering_platforms=("cuda",)).as_text()
    assert "f8E4M3FN" in text and "float8_e4m3fn" in text
    for target in ("jax_flash_quantize", "jax_flash_forward", "jax_flash_backward"):
        assert text.count(f"custom_call @{target}(") == 1
    for target in ("jax_flash_quantize", "jax_flash_forward"):
        assert of_packed.count(f"custom_call @{target}(") == 1
    for target in ("jax_flash_arrange", "jax_flash_forward"):
        assert of_arrays.count(f"custom_call @{target}(") == 1
    assert explained.picked == "cuda"
