"""The test class that every implementation runs.

An implementation gets the whole suite by naming itself and what it claims:

    from implementation_suite import FEATURES, ImplementationSuite

    class TestXla(ImplementationSuite):
        implementation = "xla"
        dtypes = ("float32", "bfloat16", "float16")
        features = FEATURES

Every case draws fresh inputs (the seed is printed when it fails, and `JAX_FLASH_TEST_SEED` fixes
it), goes down the whole way from `jax_flash.flash_attention`, and compares the output, the residual
and every gradient with the definition in float64. What is claimed must run, and what isn't must be
refused.
"""

import contextlib
import dataclasses
import os
import secrets
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import _dropout, _reference
from jax_flash._spec import AttentionSpec, Operands

FEATURES = (
    "bias",  # one for each batch row, head, query and key
    "bias_broadcast",  # (1, N, 1, S)
    "mask",
    "logits_soft_cap",
    "alibi_slopes",
    "sinks",
    "dropout",
    "seq_lengths",
    "segment_ids",
    "value_head_dim",  # V != H
    "deterministic",
)
ODD_LENGTHS = (1, 7, 63, 65, 127, 129, 257, 1000)
UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call, described by what it exercises (`category`) and how it differs from the usual."""

    category: str
    dtype: str
    T: int = 129
    S: int = 129
    B: int = 2
    N: int = 2
    K: int = 2
    H: int = 64
    V: int | None = None
    is_causal: bool = False
    local_window_size: int | tuple[int | None, int | None] | None = None
    scale: float | None = None
    magnitude: float = 1.0  # standard deviation of query, key and value
    features: tuple[str, ...] = ()

    def __str__(self):
        text = f"{self.category}-{self.dtype}-b{self.B}-t{self.T}-s{self.S}-h{self.N}/{self.K}-d{self.H}"
        if self.V is not None:
            text += f"-v{self.V}"
        if self.is_causal:
            text += "-causal"
        if self.local_window_size is not None:
            text += f"-window{self.local_window_size}".replace(" ", "")
        if self.scale is not None:
            text += f"-scale{self.scale}"
        return "-".join((text, *self.features))

    def spec(self) -> AttentionSpec:
        """The call as a spec, worked out apart from what the package does."""
        window = self.local_window_size
        window = (window, window) if isinstance(window, int) else window or (None, None)
        left, right = (None if side == -1 else side for side in window)
        if self.is_causal:
            right = 0 if right is None else min(right, 0)
        return AttentionSpec(
            scale=self.H**-0.5 if self.scale is None else self.scale,
            left=left,
            right=right,
            logits_soft_cap=5.0 if "logits_soft_cap" in self.features else None,
            dropout_rate=0.2 if "dropout" in self.features else 0.0,
            return_residual=True,
        )


class ImplementationSuite:
    """Subclass it in a test file; the name must start with `Test`."""

    implementation: str
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    lengths: tuple[int, ...] = ODD_LENGTHS
    typical_length: int = 129  # of the cases that are about something else
    head_dims: tuple[int, ...] = (64,)
    heads: tuple[tuple[int, int], ...] = ((3, 1), (6, 2), (8, 1), (16, 2))  # (N, K)
    features: tuple[str, ...] = ()
    thorough: bool = False  # every dtype and mask for each length, head dim, …, not one in turn

    def environment(self):
        """A context that the implementation runs in (an interpreter, an assumed device, …)."""
        return contextlib.nullcontext()

    def before_run(self, nbytes: int):
        """Called before each run with about the number of bytes it writes; may poison memory."""

    # What is run.

    @classmethod
    def cases(cls) -> list[Case]:
        cases = []
        masks = ({}, {"is_causal": True})
        typical = {"T": cls.typical_length, "S": cls.typical_length, "H": cls.head_dims[0]}

        def add(category, masks=masks, **fields):
            """One case, dtype and mask taken in turn; or, when thorough, all of them."""
            combinations = [(dtype, mask) for mask in masks for dtype in cls.dtypes]
            if "dtype" in fields:
                combinations = [(fields["dtype"], mask) for mask in masks]
            elif not cls.thorough:
                turn = sum(case.category == category for case in cases)
                # Off by one each round, or a pair of equal periods would repeat itself.
                dtype = cls.dtypes[(turn + turn // len(cls.dtypes)) % len(cls.dtypes)]
                combinations = [(dtype, masks[turn % len(masks)])]
            for dtype, mask in combinations:
                cases.append(Case(category, **{"dtype": dtype, **typical, **mask, **fields}))

        count = len(cls.lengths)
        for i, length in enumerate(cls.lengths):
            add("length", T=length, S=length)
            other = cls.lengths[(i + count // 2) % count]
            if other != length:
                add("cross", T=length, S=other)
        for head_dim in cls.head_dims:
            add("head dim", (*masks, {"local_window_size": (40, 10)}), H=head_dim)
        for N, K in cls.heads:
            add("groups", N=N, K=K)
        long, short = max(cls.lengths[-2:]), cls.typical_length
        for window in ((0, 0), (16, 0), (0, 16), (5, 9), 32, (None, 3), (7, None), (-1, 5)):
            add("window", local_window_size=window)
        add("window", T=short, S=min(long, 2 * short + 1), local_window_size=(20, 6))
        add("window", T=min(long, 2 * short + 1), S=short, local_window_size=(20, 6))
        for scale in (0.3, -0.2, 0.0):
            add("scale", scale=scale)
        add("batch", B=1, T=1, S=1, N=1, K=1)
        add("batch", B=5, N=3, K=3)
        for dtype in cls.dtypes:
            # Products of numbers this large are what half precision still holds.
            magnitude = 8.0 if dtype == "float16" else 30.0
            # In float32 only rows with two keys on a par have an error to speak of, one in 100: it takes
            # many rows to compare errors, and not luck.
            rows = {"T": 1025} if dtype == "float32" else {}
            add("large", (masks[0],), dtype=dtype, magnitude=magnitude, **rows)
        for feature in cls.features:
            value_head_dim = {"V": cls.head_dims[0] // 2} if feature == "value_head_dim" else {}
            add("feature", features=(feature,), N=4, K=2, **value_head_dim)
            add("feature", features=(feature,), N=4, K=2, S=2 * short + 1, **value_head_dim)
        return list(dict.fromkeys(cases))

    def pytest_generate_tests(self, metafunc):
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.cases(), ids=str)
        if "dtype" in metafunc.fixturenames:
            metafunc.parametrize("dtype", self.dtypes)
        if "unclaimed" in metafunc.fixturenames:
            metafunc.parametrize("unclaimed", [f for f in FEATURES if f not in self.features])

    # Tests.

    def test_matches_the_definition(self, case, record_property):
        record_property("implementation", self.implementation)
        record_property("category", case.category)
        arguments, spec, operands, d_out, d_lse = draw(case)
        got = self.run(arguments, d_out, d_lse)
        ratios = compare(case, spec, operands, d_out, d_lse, got)
        record_property("error_ratios", ratios)

    def test_without_residual(self, dtype):
        case = self._typical(dtype)
        arguments, spec, operands, d_out, _ = draw(case)
        got = self.run(arguments, d_out, None)
        compare(case, spec, operands, d_out, None, got)

    def test_rows_with_nothing_to_attend_to(self, dtype):
        T, S = self.typical_length, self.typical_length // 2
        case = self._typical(dtype, T=T, S=S, is_causal=True)
        arguments, spec, operands, d_out, d_lse = draw(case)
        out, lse, gradients = self.run(arguments, d_out, d_lse)
        compare(case, spec, operands, d_out, d_lse, (out, lse, gradients))
        empty = slice(0, T - S)
        assert np.all(out[:, empty] == 0)
        assert np.all(np.isneginf(lse[:, empty]))
        assert np.all(np.isfinite(lse[:, T - S :]))
        assert np.all(gradients["query"][:, empty] == 0)

    def test_same_bits_every_time(self, dtype):
        """Forward always; gradients where `deterministic` is claimed."""
        deterministic = "deterministic" in self.features
        case = self._typical(dtype, N=4, K=2, is_causal=True)
        arguments, _, _, d_out, d_lse = draw(case)
        arguments["deterministic"] = deterministic
        program = self.program(arguments, d_out, d_lse)
        first = program()
        for _ in range(3):
            again = program()
            compared = (first, again) if deterministic else (first[:2], again[:2])
            jax.tree.map(np.testing.assert_array_equal, *compared)

    def test_refuses_what_it_does_not_claim(self, unclaimed):
        V = self.head_dims[0] // 2 if unclaimed == "value_head_dim" else None
        case = self._typical(self.dtypes[0], V=V, features=(unclaimed,))
        arguments, *_ = draw(case)
        with self.environment(), pytest.raises(NotImplementedError, match=self.implementation):
            jax.eval_shape(lambda: self._attend(arguments, return_residual=False))

    # How it is run.

    def _typical(self, dtype, **fields):
        length, H = self.typical_length, self.head_dims[0]
        return Case("typical", dtype, **{"T": length, "S": length, "H": H, **fields})

    def _attend(self, arguments, **options):
        return jax_flash.flash_attention(**arguments, **options, implementation=self.implementation)

    def run(self, arguments, d_out, d_lse):
        return self.program(arguments, d_out, d_lse)()

    def program(self, arguments, d_out, d_lse):
        """A function of no arguments that runs the call forward and backward.

        It returns output, residual and a dict of gradients as NumPy arrays; no residual where
        `d_lse` is None.
        """
        static = {name: x for name, x in arguments.items() if not hasattr(x, "shape")}
        arrays = {name: x for name, x in arguments.items() if name not in static}
        inputs = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        others = {name: x for name, x in arrays.items() if name not in inputs}

        @jax.jit
        def forward_and_backward(inputs, others, d_out, d_lse):
            def attend(inputs):
                return self._attend(static | others | inputs, return_residual=d_lse is not None)

            result, vjp = jax.vjp(attend, inputs)
            (gradients,) = vjp(d_out if d_lse is None else (d_out, d_lse))
            out, lse = (result, None) if d_lse is None else result
            return out, lse, gradients

        def run():
            self.before_run(2 * sum(x.nbytes for x in inputs.values()) + d_out.nbytes)
            with self.environment():
                return jax.tree.map(np.asarray, forward_and_backward(inputs, others, d_out, d_lse))

        return run


def draw(case: Case):
    """Fresh random inputs of a call.

    Returns:
      the arguments of `flash_attention` (NumPy arrays and static values) but for
      `implementation` and `return_residual`; the spec and operands that they must amount to; and
      cotangents of the output `(B, T, N, V)` and of the residual `(B, T, N)`.
    """
    seed = int(os.environ.get("JAX_FLASH_TEST_SEED", secrets.randbits(32)))
    print(f"JAX_FLASH_TEST_SEED={seed} {case}")
    generator = np.random.default_rng(seed)
    dtype = jnp.dtype(case.dtype)
    B, T, S, N, K, H = case.B, case.T, case.S, case.N, case.K, case.H
    V = H if case.V is None else case.V

    def normal(*shape, dtype=dtype, magnitude=1.0):
        return (magnitude * generator.standard_normal(shape)).astype(dtype)

    arguments: dict[str, Any] = {
        "query": normal(B, T, N, H, magnitude=case.magnitude),
        "key": normal(B, S, K, H, magnitude=case.magnitude),
        "value": normal(B, S, K, V, magnitude=case.magnitude),
    }
    canonical = {}  # operands whose shape or name differs from the argument's
    for feature in case.features:
        match feature:
            case "bias":
                arguments["bias"] = normal(B, N, T, S)
            case "bias_broadcast":
                bias = normal(N, 1, S)
                arguments["bias"], canonical["bias"] = bias, bias[None]
            case "mask":
                arguments["mask"] = generator.random((B, 1, T, S)) < 0.7
            case "alibi_slopes":
                slopes = generator.uniform(0.01, 0.5, N).astype(np.float32)
                arguments["alibi_slopes"], canonical["alibi_slopes"] = slopes, slopes[None]
            case "sinks":
                sinks = normal(N, dtype=np.float32)
                arguments["sinks"], canonical["sinks"] = sinks, sinks[None]
            case "seq_lengths":
                for name, length in (("query_seq_lengths", T), ("key_value_seq_lengths", S)):
                    arguments[name] = generator.integers(0, length, B, np.int32, endpoint=True)
            case "segment_ids":
                for name, length in (("query_segment_ids", T), ("key_value_segment_ids", S)):
                    arguments[name] = np.sort(generator.integers(0, 3, (B, length), np.int32))
            case "dropout":
                key = jax.random.key(int(generator.integers(2**31)))
                arguments["dropout_key"] = key
                canonical["dropout_seeds"] = _dropout.seeds(key, B, N)
    operands = {name: x for name, x in arguments.items() if name != "dropout_key"} | canonical
    spec = case.spec()
    arguments |= {
        "is_causal": case.is_causal,
        "local_window_size": case.local_window_size,
        "scale": case.scale,
        "logits_soft_cap": spec.logits_soft_cap,
        "dropout_rate": spec.dropout_rate,
        "deterministic": "deterministic" in case.features,
    }
    d_out, d_lse = normal(B, T, N, V), normal(B, T, N, dtype=np.float32)
    return arguments, spec, Operands(**operands), d_out, d_lse


def compare(case, spec, operands, d_out, d_lse, got) -> dict[str, float]:
    """Check a run against the definition in float64; the yardstick is plain attention.

    Args:
      got: output `(B, T, N, V)`, residual `(B, T, N)` or None, and a dict of gradients.

    Returns:
      for each result, its error over that of plain attention in the same dtype, where that is
      what bounds it.
    """
    out, lse, gradients = got
    transposed = None if d_lse is None else d_lse.transpose(0, 2, 1)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        references, plains = (
            _by_name(*f(spec, operands, d_out, transposed))
            for f in (_reference.reference_with_gradients, _reference.plain_with_gradients)
        )
    results = {"out": out, **{f"d_{name}": x for name, x in gradients.items()}}
    if lse is not None:
        assert lse.dtype == np.float32
        results["lse"] = lse
    assert out.dtype == operands.query.dtype
    ratios, complaints = {}, []
    for name, result in results.items():
        reference, plain = references[name], plains[name]
        if name != "out" and name != "lse":
            argument = getattr(operands, name.removeprefix("d_"))
            assert result.dtype == argument.dtype, name
            reference, plain = (x.reshape(result.shape) for x in (reference, plain))
        assert result.shape == reference.shape, name
        empty = np.isneginf(reference)
        if not np.array_equal(np.isneginf(result), empty):
            complaints.append(f"{name} is -inf in other rows than the definition")
            continue
        result, reference, plain = (
            np.where(empty, 0, x).astype(np.float64) for x in (result, reference, plain)
        )
        if not np.all(np.isfinite(result)):
            complaints.append(f"{name} has {np.sum(~np.isfinite(result))} of {result.size} not finite")
            continue
        error, plain_error = np.linalg.norm(result - reference), np.linalg.norm(plain - reference)
        floor = _floor(name, case, reference, references["lse"])
        bound = max(2 * plain_error, floor)
        if 2 * plain_error >= floor:
            ratios[name] = float(error / plain_error)
        if not error <= bound:
            norm = np.linalg.norm(reference)
            complaints.append(
                f"{name}: error {error:.3g} over {bound:.3g} (of norm {norm:.3g}; plain attention "
                f"{plain_error:.3g})"
            )
    assert not complaints, "; ".join(complaints)
    return ratios


def _by_name(out, lse, gradients):
    named = {f"d_{f.name}": getattr(gradients, f.name) for f in dataclasses.fields(gradients)}
    return {"out": out, "lse": lse.transpose(0, 2, 1), **named}


def _floor(name, case, reference, lse):
    """The error that is allowed where plain attention happens to make less.

    - In the mean a number rounded to its dtype is off by up to half a unit roundoff, so a result
      is not blamed for that much where the yardstick is exact by luck (one key: p is exactly 1). A
      gradient of a few numbers, each a sum over a whole head of terms of both signs, may be small by
      chance where its rounding isn't.
    - Sums in float32 of terms that cancel leave a rest, though the true result be 0: a gradient
      where there is one key, say. It is measured against the size of the terms. With half-precision
      products the terms pass through the approximate base-2 exponential and the tensor cores'
      shorter sums, a few bits worse than float32 in order. What is summed over a whole head has a
      term for each row, of the size of dP, about sqrt(H), and for a slope times the distance.
    - Large logits are known from their lse alone when the backward pass computes them again, and
      `exp(x - lse)` turns the rounding of lse, absolute, into a relative error. And as one
      probability of a row is nearly 1, its dP nearly equals D = rowsum(dO * O): what is left of
      the difference is mostly the rounding of O to its dtype, which goes into the gradients of
      query and key. Plain attention suffers from neither.
    """
    float32 = UNIT_ROUNDOFF["float32"]
    roundoff = float32 if name == "lse" else UNIT_ROUNDOFF[case.dtype]
    terms = {"out": 1, "lse": 2, "d_value": 0}.get(name, 2)  # how many large factors they have
    size_of_terms = case.magnitude**terms * np.sqrt(reference.size)
    noise = 2.0**-20 if case.dtype == "float32" else 2.0**-16
    if name in ("d_alibi_slopes", "d_sinks"):
        distance = max(case.T, case.S) if name == "d_alibi_slopes" else 1
        size_of_terms *= distance * np.sqrt(case.B * case.T * case.H)
        noise = 2 * float32
    relative = 16 * roundoff if name in ("d_alibi_slopes", "d_sinks") else roundoff / 2
    if case.category == "large" and name.startswith("d_"):
        relative = max(relative, float32 * np.max(np.abs(lse), initial=0, where=np.isfinite(lse)))
        if name != "d_value":
            noise = max(noise, roundoff / 2)
    return max(relative * np.linalg.norm(reference), noise * size_of_terms)
