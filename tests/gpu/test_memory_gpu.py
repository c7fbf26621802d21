"""What a call takes of the GPU's memory: linear in its length, and nothing for each query head but its dQ."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash._device import current
from jax_flash._spec import AttentionSpec, Operands
from jax_flash.cuda.sm90.forward_plan import plan_forward

# XLA aligns each of the custom call's results, three gradients and six pieces of scratch memory (sum of dQ,
# statistics, counters), to 256 bytes at most, and keeps a table of their addresses.
SLACK = 9 * (256 + 8)
PARTIAL_SUMS = 1 << 20  # of a loss over all of the output


@dataclasses.dataclass(frozen=True)
class Shapes:
    B: int = 2
    T: int = 4096
    S: int = 4096
    N: int = 8
    K: int = 8
    H: int = 128
    is_causal: bool = False

    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """Query, key, value and the cotangent of the output."""
        query, key = (self.B, self.T, self.N, self.H), (self.B, self.S, self.K, self.H)
        return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (query, key, key, query)]

    def attend(self, query, key, value, **options):
        return jax_flash.flash_attention(
            query, key, value, is_causal=self.is_causal, implementation="cuda", **options
        )

    @property
    def backward_bytes(self) -> int:
        """dQ in float32 and two rows of statistics, with T in whole blocks and H a multiple of 16.

        And 4 bytes for each head and each four blocks, which count, and for each block of a call that hides
        pairs.
        """
        rows = self.B * self.N * math.ceil(self.T / 128) * 128
        counters = self.B * self.N * (math.ceil(self.T / 256) + 1)
        flags = rows // 64 * self.is_causal
        return rows * math.ceil(self.H / 16) * 16 * 4 + 2 * rows * 4 + (counters + flags) * 4

    @property
    def residual_bytes(self) -> int:
        """Output and log-sum-exp, which the backward pass is given."""
        return self.B * self.T * self.N * (2 * self.H + 4)

    @property
    def forward_scratch_bytes(self) -> int:
        spec = AttentionSpec(self.H**-0.5, right=0 if self.is_causal else None)
        plan = plan_forward(spec, Operands(*self.structs()[:3]), current())
        return sum(buffer.bytes + 256 for buffer in plan.results[2:])


CASES = {
    "d64": Shapes(H=64),
    "d64-causal": Shapes(H=64, is_causal=True),
    "d128": Shapes(),
    "d128-causal": Shapes(is_causal=True),
    "d256-causal": Shapes(H=256, is_causal=True),
    "d80-odd": Shapes(T=1000, S=3001, H=80),
    # dK or dV of each query head would take 64 times what dQ takes.
    "gqa": Shapes(T=256, S=16384, N=32, K=4, is_causal=True),
    "mqa-d256": Shapes(B=1, T=256, S=16384, N=16, K=1, H=256),
}
cases = pytest.mark.parametrize("shapes", [pytest.param(case, id=name) for name, case in CASES.items()])


def temporaries(function, *arguments) -> int:
    return jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


@cases
def test_backward_takes_dq_and_two_rows_of_statistics(shapes, record_property):
    *inputs, d_out = shapes.structs()
    vjp = jax.eval_shape(lambda *inputs: jax.vjp(shapes.attend, *inputs)[1], *inputs)
    taken = temporaries(lambda vjp, d_out: vjp(d_out), vjp, d_out)
    record_property("temporaries", taken)
    assert taken <= shapes.backward_bytes + SLACK


@cases
def test_both_passes_take_the_residuals_beside_it(shapes, record_property):
    def loss(query, key, value, weights):
        out = shapes.attend(query, key, value)
        return jnp.sum(out.astype(jnp.float32) * weights.astype(jnp.float32))

    taken = temporaries(jax.value_and_grad(loss, argnums=(0, 1, 2)), *shapes.structs())
    record_property("temporaries", taken)
    d_out_bytes = 2 * shapes.B * shapes.T * shapes.N * shapes.H
    both = shapes.backward_bytes + shapes.residual_bytes + d_out_bytes + shapes.forward_scratch_bytes
    assert taken <= both + SLACK + PARTIAL_SUMS


class LongSequence:
    """131072 tokens, whose logits would take 275 GB in bfloat16; compared with the definition in places."""

    shapes = Shapes(B=1, T=131072, S=131072, is_causal=True)
    heads = (0, 7)
    queries = (7, 127, 128, 70_001, 131_071)
    keys = (0, 127, 65_536, 131_071)
    tolerance = 0.02  # ‖error‖ / ‖expected‖ of one row, of which rounding to bfloat16 makes 0.002 to 0.01


@pytest.fixture(scope="module")
def arrays():
    """Inputs, results and gradients by name, and what memory they and temporaries took."""
    shapes = LongSequence.shapes
    names = ("query", "key", "value", "d_out")
    arrays = {
        name: jax.random.normal(jax.random.key(i), struct.shape, struct.dtype)
        for i, (name, struct) in enumerate(zip(names, shapes.structs(), strict=True))
    }

    def both(query, key, value, d_out):
        out, vjp = jax.vjp(shapes.attend, query, key, value)
        return out, *vjp(d_out)

    compiled = jax.jit(both).lower(*arrays.values()).compile()
    inputs = arrays["query"], arrays["key"], arrays["value"]
    _, arrays["lse"] = jax.jit(functools.partial(shapes.attend, return_residual=True))(*inputs)
    results = compiled(*inputs, arrays["d_out"])
    arrays |= dict(zip(("out", "d_query", "d_key", "d_value"), results, strict=True))
    memory = compiled.memory_analysis()
    used = (memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes)
    return arrays | {"bytes": sum(used)}


@pytest.fixture(scope="module", params=LongSequence.heads)
def of_head(arrays, request):
    """Each array of one head, `(T, H)` or `(T,)`, in float64."""
    return {
        name: np.asarray(x[0, :, request.param]).astype(np.float64)
        for name, x in arrays.items()
        if name != "bytes"
    }


class TestLongSequence(LongSequence):
    def test_fits_an_80_gb_gpu_many_times(self, arrays, record_property):
        record_property("bytes", arrays["bytes"])
        assert arrays["bytes"] < 4e9

    def test_is_finite(self, arrays):
        for name in ("out", "lse", "d_query", "d_key", "d_value"):
            assert jnp.isfinite(arrays[name]).all(), name

    def test_rows_of_queries(self, of_head):
        scale = self.shapes.H**-0.5
        for i in self.queries:
            key, value = of_head["key"][: i + 1], of_head["value"][: i + 1]
            weights = np.exp(scale * key @ of_head["query"][i])
            lse = np.log(weights.sum())
            weights /= weights.sum()
            out = weights @ value
            assert abs(of_head["lse"][i] - lse) < 1e-3, f"log-sum-exp of query {i}"
            d_out = of_head["d_out"][i]
            d_logits = weights * (value @ d_out - out @ d_out)
            self.compare(of_head["out"][i], out, f"out of query {i}")
            self.compare(of_head["d_query"][i], scale * d_logits @ key, f"gradient of query {i}")

    def test_rows_of_keys(self, of_head):
        """From the kernel's own outputs and normalisers, of which there is one for every query."""
        scale = self.shapes.H**-0.5
        delta = np.sum(of_head["d_out"] * of_head["out"], axis=1)
        for j in self.keys:
            query, d_out = of_head["query"][j:], of_head["d_out"][j:]
            weights = np.exp(scale * query @ of_head["key"][j] - of_head["lse"][j:])
            d_logits = weights * (d_out @ of_head["value"][j] - delta[j:])
            self.compare(of_head["d_value"][j], weights @ d_out, f"gradient of value {j}")
            self.compare(of_head["d_key"][j], scale * d_logits @ query, f"gradient of key {j}")

    def compare(self, got, expected, what):
        error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
        assert error <= self.tolerance, f"{what} is off by {error:.3g} of its norm"
