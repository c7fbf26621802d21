"""The whole public API, forward and backward, under each of JAX's strict settings.

"xla" runs here. "cuda" and "pallas" are lowered for a GPU; `tests/gpu` runs them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strict_settings
from strict_settings import SETTINGS, StrictSettingsSuite

import jax_flash
from jax_flash import _device
from jax_flash.cuda import call as cuda_call
from jax_flash.pallas import compat


class TestXla(StrictSettingsSuite):
    implementation = "xla"
    dtype = "float32"


class Lowered(StrictSettingsSuite):
    """Lowered for an assumed GPU, which needs no compiled kernel."""

    dtype = "bfloat16"

    @pytest.fixture(autouse=True)
    def without_compiling(self, monkeypatch):
        monkeypatch.setattr(cuda_call, "_compile_all", lambda plan: {})

    def run(self, call):
        def run(inputs, others):
            return call.replace(inputs, others).forward_and_backward(self.implementation)

        device = _device.H100
        with _device.assume(device), compat.lowering_for(device.kind):
            jax.jit(run).trace(call.inputs, call.others).lower(lowering_platforms=("cuda",))


@pytest.mark.every_turn
class TestCudaLowered(Lowered):
    implementation = "cuda"


@pytest.mark.every_turn
class TestPallasLowered(Lowered):
    implementation = "pallas"

    def takes(self, call):
        return call.takes_implementation and super().takes(call)


@pytest.mark.parametrize("implementation", ("xla", "pallas"))
@pytest.mark.parametrize("name,value,length", (("debug infs", 1.0, 0), ("debug nans", jnp.nan, 8)))
def test_what_is_looked_for_is_found(name, value, length, implementation):
    """The lse of a row without keys, and NaN. To find where, JAX would run a Pallas kernel without end."""
    query = jnp.ones((1, 8, 2, 16), jnp.bfloat16)
    values = value * query
    lengths = jnp.array([length])
    with compat.interpret(), strict_settings.setting(name), pytest.raises(FloatingPointError):
        jax_flash.flash_attention(
            query,
            query,
            values,
            key_value_seq_lengths=lengths,
            return_residual=True,
            implementation=implementation,
        )


@pytest.mark.parametrize("name", SETTINGS)
def test_dropout_mask_and_explain(name):
    key, query = jax.random.key(0), jax.ShapeDtypeStruct((2, 8, 2, 16), jnp.float32)
    with strict_settings.setting(name):
        kept = jax_flash.dropout_mask(key, 0.5, (2, 2, 8, 8))
        explanation = jax_flash.explain(query, query, query, is_causal=True)
    assert kept.shape == (2, 2, 8, 8) and explanation.automatic == "xla"


def test_results_do_not_depend_on_promotion_settings():
    call = strict_settings.calls("float32")["every change of scores"]
    plain = call.forward_and_backward("xla")
    with strict_settings.setting("rank promotion raise"), strict_settings.setting("dtype promotion strict"):
        strict = call.forward_and_backward("xla")
    jax.tree.map(np.testing.assert_array_equal, plain, strict)


@pytest.mark.parametrize("name", ["debug nans", "debug infs"])
def test_a_nan_of_the_users_is_still_found(name):
    """The settings are on for results: they are off for nothing but the lse of rows without keys."""
    query = jnp.ones((1, 8, 2, 16))
    value = jnp.full(query.shape, jnp.nan if name == "debug nans" else jnp.inf)
    with strict_settings.setting(name), pytest.raises(FloatingPointError):
        jax.block_until_ready(jax_flash.flash_attention(query, query, value))
