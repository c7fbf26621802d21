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


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_supports_every_head_dim_of_the_contract(head_dim, dtype):
    assert reason(H=head_dim, dtype=dtype) is None
    spec = AttentionSpec(0.1, left=5, right=0, return_residual=True)
    assert reason(spec, H=head_dim, dtype=dtype) is None


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

    capped, fixed = AttentionSpec(0.1, logits_soft_cap=30.0), AttentionSpec(0.1, deterministic=True)
    bias, slopes = struct(1, 4, 128, 128), struct(1, 4)
    for spec in (AttentionSpec(0.1), capped):
        assert reason(spec, bias=bias, mask=struct(2, 1, 1, 128, dtype=jnp.bool_), sinks=slopes) is None
        assert reason(spec, alibi_slopes=slopes) is None
    assert reason(capped, H=256) is None
    assert "up to head dim 192, not 256" in reason(capped, H=256, bias=bias)
    assert "up to head dim 192, not 200" in reason(capped, H=200, alibi_slopes=slopes)
    assert "float64" in reason(bias=jax.ShapeDtypeStruct((1, 4, 128, 128), "float64"))
    assert "broadcast" in reason(fixed, bias=bias)
    assert reason(fixed, bias=struct(2, 4, 128, 128), alibi_slopes=slopes) is None


def test_refuses_operands_and_types():
    ids = jax.ShapeDtypeStruct((2, 128), jnp.int32)
    assert "query_segment_ids" in reason(query_segment_ids=ids, key_value_segment_ids=ids)
    assert "float32" in reason(dtype=jnp.float32)
    assert "256" in reason(H=264)
    assert "multiple of 8" in reason(H=60)
    assert "differ" in reason(H=64, V=128)


def test_missing_nvrtc_names_the_extra_and_warns_once(monkeypatch):
    def missing():
        raise compile_.NvrtcNotFoundError("pip install 'jax_flash[cuda13]'")

    monkeypatch.setattr(compile_, "nvrtc_version", missing)
    cuda._nvrtc_missing.cache_clear()
    try:
        with pytest.warns(UserWarning, match="cuda13"):
            assert "cuda13" in reason()
        assert "cuda13" in reason()
    finally:
        cuda._nvrtc_missing.cache_clear()


def test_describe_names_the_tile():
    text = cuda.describe(AttentionSpec(0.1), shapes(H=80), H100)
    assert "head dim 80" in text and "forward 128 queries × 128 keys" in text
