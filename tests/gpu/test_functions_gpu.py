"""score_mod and block_mask on the GPU, against the functions' own values for all pairs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from function_cases import MASK_MODS, SCORE_MODS, Case, check, with_gradients
from gpu_memory import poison

import jax_flash


@pytest.mark.parametrize("dtype, captured", (("bfloat16", "float32"), ("float16", "bfloat16")))
@pytest.mark.parametrize(
    "others",
    ((), ("is_causal",), ("lengths", "cap"), ("bias", "sinks", "dropout"), ("is_causal", "cap", "bias")),
    ids="-".join,
)
@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mod_by_cuda(name, others, captured, dtype):
    case = Case(name, None, dtype, captured, others=others)
    inputs, cotangents = case.inputs(), case.cotangents()
    poison(sum(x.nbytes for x in jax.tree.leaves(inputs)))
    got = with_gradients(lambda x: case.attend(x, None, implementation="cuda"), inputs, cotangents)
    check(case, got, inputs, cotangents)


@pytest.mark.parametrize("others", ((), ("lengths", "cap"), ("is_causal", "bias", "dropout")), ids="-".join)
@pytest.mark.parametrize("name", SCORE_MODS)
def test_deterministic_gradients_by_cuda(name, others):
    case = Case(name, None, "bfloat16", others=others)
    inputs, cotangents = case.inputs(), case.cotangents()

    def run():
        poison(sum(x.nbytes for x in jax.tree.leaves(inputs)))
        options = {"implementation": "cuda", "deterministic": True}
        return with_gradients(lambda x: case.attend(x, None, **options), inputs, cotangents)

    got = run()
    check(case, got, inputs, cotangents)
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, run(), got)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("dtype, captured", (("bfloat16", "float32"), ("float16", "bfloat16")))
@pytest.mark.parametrize("others", ((), ("lengths", "cap"), ("is_causal", "bias", "dropout")), ids="-".join)
@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mod_by_pallas(name, others, dtype, captured):
    case = Case(name, None, dtype, captured, others=others)
    inputs, cotangents = case.inputs(), case.cotangents()
    poison(sum(x.nbytes for x in jax.tree.leaves(inputs)))
    got = with_gradients(lambda x: case.attend(x, None, implementation="pallas"), inputs, cotangents)
    check(case, got, inputs, cotangents)


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("block_size", (32, (64, 48)), ids=str)
@pytest.mark.parametrize("others", ((), ("is_causal", "cap"), ("lengths", "sinks", "dropout")), ids="-".join)
@pytest.mark.parametrize("mask", MASK_MODS)
def test_block_masks_by_cuda(mask, others, block_size, deterministic):
    score_mod = "hides" if others and not deterministic else None
    case = Case(score_mod, mask, "bfloat16", block_size=block_size, others=others)
    inputs, cotangents, block_mask = case.inputs(), case.cotangents(), case.block_mask()
    poison(sum(x.nbytes for x in jax.tree.leaves(inputs)))
    options = {"implementation": "cuda", "deterministic": deterministic}
    got = with_gradients(lambda x: case.attend(x, block_mask, **options), inputs, cotangents)
    check(case, got, inputs, cotangents)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("block_size", (32, (64, 48)), ids=str)
@pytest.mark.parametrize("others", ((), ("lengths", "sinks", "dropout", "bias")), ids="-".join)
@pytest.mark.parametrize("mask", MASK_MODS)
def test_block_masks_by_pallas(mask, others, block_size):
    case = Case("documents" if others else None, mask, "bfloat16", block_size=block_size, others=others)
    inputs, cotangents, block_mask = case.inputs(), case.cotangents(), case.block_mask()
    poison(sum(x.nbytes for x in jax.tree.leaves(inputs)))
    got = with_gradients(lambda x: case.attend(x, block_mask, implementation="pallas"), inputs, cotangents)
    check(case, got, inputs, cotangents)


@pytest.mark.parametrize("rows", (1, 2))
@pytest.mark.parametrize("heads", (1, 4))
@pytest.mark.parametrize("share", (0.05, 0.5))
@pytest.mark.parametrize("by", ("cuda", "pallas"))
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_layouts_of_blocks_by_kernels(share, rows, heads, by):
    """Larger calls, in which most blocks are skipped, against plain JAX."""
    random = np.random.default_rng(0)
    layout = random.random((rows, heads, 16, 12)) < share
    block_mask = jax_flash.BlockMask.from_blocks(layout)
    shapes = (2, 2048, 4, 128), (2, 1536, 2, 128), (2, 1536, 2, 128), (2, 2048, 4, 128)
    *arrays, d_out = (jnp.asarray(random.standard_normal(x), jnp.bfloat16) for x in shapes)

    def run(implementation):
        attend = functools.partial(
            jax_flash.flash_attention, block_mask=block_mask, implementation=implementation
        )
        out, vjp = jax.vjp(attend, *arrays)
        return jax.tree.map(lambda x: np.asarray(x, np.float32), (out, *vjp(d_out)))

    for got, expected in zip(run(by), run("xla"), strict=True):
        assert np.linalg.norm(got - expected) <= 2**-7 * np.linalg.norm(expected)


@pytest.mark.parametrize("mask", ("window", "of both"))
@pytest.mark.parametrize("name", ("relative_position", "documents"))
def test_block_masks_by_xla(name, mask):
    case = Case(name, mask, "bfloat16")
    inputs, cotangents, block_mask = case.inputs(), case.cotangents(), case.block_mask()
    got = with_gradients(lambda x: case.attend(x, block_mask, implementation="xla"), inputs, cotangents)
    check(case, got, inputs, cotangents)
