import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jax_flash.cuda as cuda
from jax_flash._device import CPU, H100, Device
from jax_flash._spec import AttentionSpec, Operands
from jax_flash.cuda import compile as compile_


def shapes(H=64, V=None, dtype=jnp.bfloat16, **operands):
    query = jax.ShapeDtypeStruct((2, 128, 4, H), dtype)
    value = jax.ShapeDtypeStruct((2, 128, 4, V or H), dtype)
    return Operands(query, query, value, **operands)


def reason(spec=None, device=H100, **kwargs):
    return cuda.supports(spec or AttentionSpec(0.1), shapes(**kwargs), device)


@pytest.mark.parametrize("head_dim", [1, 8, 60, 64, 80, 96, 100, 128, 160, 192, 255, 256])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_supports_every_head_dim_of_the_contract(head_dim, dtype):
    assert reason(H=head_dim, dtype=dtype) is None
    spec = AttentionSpec(0.1, left=5, right=0, return_residual=True)
    assert reason(spec, H=head_dim, dtype=dtype) is None


@pytest.mark.parametrize("dims", [(192, 128), (64, 128), (128, 64), (1, 256), (256, 1), (20, 12)])
def test_values_may_have_a_head_dim_of_their_own(dims):
    assert reason(H=dims[0], V=dims[1]) is None


def test_says_what_device_it_needs():
    assert "needs a CUDA GPU" in reason(device=CPU)
    assert "needs a Hopper GPU" in reason(device=Device("cuda", "NVIDIA A100", (8, 0), 108))


def test_rates_of_dropout():
    words = dict(
        dropout_rows=jax.ShapeDtypeStruct((2, 4, 128), jnp.uint32),
        dropout_columns=jax.ShapeDtypeStruct((2, 128), jnp.uint32),
    )
    for rate in (1e-9, 0.1, 0.96875):
        assert reason(AttentionSpec(0.1, dropout_rate=rate), **words) is None
    assert "up to 0.96875" in reason(AttentionSpec(0.1, dropout_rate=0.97), **words)


def test_what_makes_logits_of_scores():
    def struct(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    capped = AttentionSpec(0.1, logits_soft_cap=30.0)
    bias, slopes = struct(1, 4, 128, 128), struct(1, 4)
    for spec in (AttentionSpec(0.1), capped, AttentionSpec(0.1, deterministic=True)):
        assert reason(spec, bias=bias, mask=struct(2, 1, 1, 128, dtype=jnp.bool_), sinks=slopes) is None
        assert reason(spec, alibi_slopes=slopes) is None
    assert reason(capped, H=256, bias=bias, alibi_slopes=slopes) is None
    assert "float64" in reason(bias=jax.ShapeDtypeStruct((1, 4, 128, 128), "float64"))


def test_what_queries_see_may_be_data():
    ids, lengths = jax.ShapeDtypeStruct((2, 128), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    offsets = jax.ShapeDtypeStruct((2, 4), jnp.int32)
    for spec in (AttentionSpec(0.1), AttentionSpec(0.1, right=0, deterministic=True)):
        assert reason(spec, query_segment_ids=ids, key_value_segment_ids=ids) is None
        assert reason(spec, key_value_seq_lengths=lengths) is None
        packed = dataclasses.replace(spec, max_query_length=100, max_key_value_length=100)
        assert reason(packed, query_offsets=offsets, key_value_offsets=offsets) is None


def test_refuses_operands_and_types():
    assert "float32" in reason(dtype=jnp.float32)
    assert reason(H=264) == "key's head dim is 264; it may be up to 256"
    assert reason(H=576, V=512) == "key's head dim is 576; it may be up to 256"
    assert reason(H=64, V=257) == "value's head dim is 257; it may be up to 256"


def test_missing_nvrtc_is_said_where_no_limit_is(monkeypatch):
    def missing():
        raise compile_.NvrtcNotFoundError("pip install 'jax_flash[cuda13]'")

    monkeypatch.setattr(compile_, "nvrtc_version", missing)
    cuda.require_nvrtc.cache_clear()
    try:
        with pytest.raises(compile_.NvrtcNotFoundError, match="cuda13"):
            reason()
        assert "float32" in reason(dtype=jnp.float32)
        assert "needs a CUDA GPU" in reason(device=CPU)
    finally:
        cuda.require_nvrtc.cache_clear()


def test_describe_names_the_tile():
    text = cuda.describe(AttentionSpec(0.1), shapes(H=80), H100)
    assert "head dim 80:" in text and "forward 128 queries × 128 keys" in text
    text = cuda.describe(AttentionSpec(0.1), shapes(H=192, V=128), H100)
    assert "head dims 192 of keys and 128 of values:" in text and "forward 128 queries × 128 keys" in text
