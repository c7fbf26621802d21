"""Which implementation is picked, and what is said when none can be."""

import types

import jax
import jax.numpy as jnp
import pytest

import jax_flash
from jax_flash import _device, _dispatch
from jax_flash._spec import AttentionSpec, Operands

SPEC = AttentionSpec(scale=1.0)
SHAPES = Operands(*[jax.ShapeDtypeStruct((1, 4, 2, 8), jnp.float32)] * 3)


@pytest.fixture
def support(monkeypatch):
    """Stand-ins for the implementations, each with its reason why it can't run a call."""

    def use(**reasons):
        def get(name):
            if isinstance(reasons[name], Exception):
                raise reasons[name]
            return types.SimpleNamespace(name=name, supports=lambda spec, shapes, device: reasons[name])

        monkeypatch.setattr(_dispatch, "get", get)

    return use


def select(names):
    return _dispatch.select(SPEC, SHAPES, names, _device.H100)


def test_none_picks_the_first_that_supports_the_call(support):
    support(cuda=None, pallas=None, xla=None)
    assert select(None) == ("cuda", "xla")
    support(cuda="no sinks yet", pallas=None, xla=None)
    assert select(None) == ("pallas", "xla")
    support(cuda="no sinks yet", pallas="no sinks yet", xla=None)
    assert select(None) == ("xla",)


def test_a_named_one_stands_alone(support):
    support(cuda=None, pallas=None, xla=None)
    for name in _dispatch.IMPLEMENTATIONS:
        assert select([name]) == (name,)


def test_a_sequence_is_tried_in_order(support):
    support(cuda=None, pallas=None, xla=None)
    assert select(("pallas", "cuda")) == ("pallas",)
    assert select(("pallas", "xla")) == ("pallas", "xla")
    assert select(("xla", "cuda")) == ("xla",)
    support(cuda="no", pallas="no", xla=None)
    assert select(("cuda", "xla")) == ("xla",)


def test_a_named_one_that_can_not(support):
    support(cuda="head dim 320 is more than 256", pallas=None, xla=None)
    with pytest.raises(NotImplementedError) as raised:
        select(["cuda"])
    assert str(raised.value) == (
        'implementation "cuda" can\'t run this call on NVIDIA H100 (cuda): head dim 320 is more than 256'
    )


def test_none_of_a_sequence_can(support):
    support(cuda="no sinks yet", pallas="no bias yet", xla=None)
    with pytest.raises(NotImplementedError, match="cuda: no sinks yet; pallas: no bias yet"):
        select(["cuda", "pallas"])


def test_one_that_can_not_be_imported_says_so(support):
    support(cuda=ImportError("no module named cuda_thing"), pallas=None, xla=None)
    assert select(None) == ("pallas", "xla")
    reasons = _dispatch.reasons(SPEC, SHAPES, _device.H100)
    assert reasons == {
        "cuda": "it can't be imported (no module named cuda_thing)",
        "pallas": None,
        "xla": None,
    }


@pytest.mark.parametrize("name", ["cuda", "pallas"])
def test_no_gpu(name):
    """The real implementations, on a device without a GPU."""
    query = jnp.ones((1, 4, 2, 64), jnp.bfloat16)
    with _device.assume(_device.CPU), pytest.raises(NotImplementedError) as raised:
        jax_flash.flash_attention(query, query, query, implementation=name)
    assert f'implementation "{name}" can\'t run this call on cpu (cpu): ' in str(raised.value)
    assert "GPU" in str(raised.value)


def test_no_gpu_is_said_while_tracing():
    query = jnp.ones((1, 4, 2, 64), jnp.bfloat16)
    with _device.assume(_device.CPU), pytest.raises(NotImplementedError, match="GPU"):
        jax.eval_shape(lambda x: jax_flash.flash_attention(x, x, x, implementation="cuda"), query)


def test_no_gpu_and_a_sequence_with_a_way_out():
    query = jnp.ones((1, 4, 2, 64), jnp.bfloat16)
    with _device.assume(_device.CPU):
        out = jax_flash.flash_attention(query, query, query, implementation=["cuda", "xla"])
    assert out.shape == query.shape


def test_the_portable_one_runs_everything_everywhere():
    for device in (_device.CPU, _device.H100, _device.Device("tpu", "TPU v5e")):
        assert _dispatch.reasons(SPEC, SHAPES, device)["xla"] is None
