"""score_mod and block_mask on the GPU, against the functions' own values for all pairs."""

import jax
import pytest
from function_cases import SCORE_MODS, Case, check, with_gradients
from gpu_memory import poison

import jax_flash

# Gradients of what these capture depend on the score, so the kernels refuse them.
REFUSED = {"soft_cap", "of_rows", "documents"}
BY_KERNELS = [name for name in SCORE_MODS if name not in REFUSED]


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("captured", ("float32", "bfloat16"))
@pytest.mark.parametrize(
    "others",
    ((), ("is_causal",), ("lengths", "cap"), ("bias", "sinks", "dropout"), ("is_causal", "cap", "bias")),
    ids="-".join,
)
@pytest.mark.parametrize("name", BY_KERNELS)
def test_score_mod_by_cuda(name, others, captured, dtype):
    case = Case(name, None, dtype, captured, others=others)
    inputs, cotangents = case.inputs(), case.cotangents()
    poison(sum(x.nbytes for x in jax.tree.leaves(inputs)))
    got = with_gradients(lambda x: case.attend(x, None, implementation="cuda"), inputs, cotangents)
    check(case, got, inputs, cotangents)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cuda_refuses(name):
    case = Case(name, None, "bfloat16")
    with pytest.raises(NotImplementedError, match="captures depends on the score"):
        case.attend(case.inputs(), None, implementation="cuda")


@pytest.mark.parametrize("mask", ("window", "of both"))
@pytest.mark.parametrize("name", ("relative_position", "documents"))
def test_block_masks_by_xla(name, mask):
    case = Case(name, mask, "bfloat16")
    inputs, cotangents, block_mask = case.inputs(), case.cotangents(), case.block_mask()
    with pytest.warns(jax_flash._dispatch.SlowerImplementationWarning):
        got = with_gradients(lambda x: case.attend(x, block_mask), inputs, cotangents)
    check(case, got, inputs, cotangents)
