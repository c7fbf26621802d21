"""The test class that every implementation runs.

An implementation gets the whole suite by naming itself and what it claims:

    from implementation_suite import FEATURES, ImplementationSuite

    class TestXla(ImplementationSuite):
        implementation = "xla"
        dtypes = ("float32", "bfloat16", "float16")
        features = FEATURES

Every case draws its inputs from a seed of its own (seeds.py), goes down the whole way from the public
function, and compares the output, the residual and every gradient with the definition in float64. What is
claimed must run, and what isn't must be refused.
"""

import contextlib
import functools
import re
from typing import Any

import call_forms
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import compare
from attention_case import Case, draw
from call_forms import in_form_of
from exhaustive import thinned

from jax_flash import _device, _dispatch, _reference

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
    "packed",
    "value_head_dim",  # V != H
    "deterministic",
    "score_mod",  # whose derivative is a factor, and which captures an array
    "block_mask",  # of which each head has its own, and which captures an array
)
ODD_LENGTHS = (1, 7, 63, 65, 127, 129, 257, 1000)


class Implementation:
    """How one implementation is called by a test."""

    implementation: str
    compiler_options: dict[str, Any] | None = None
    reports_errors: bool = True  # by how much they exceed plain attention's; or just checks them
    p_is_converted: bool = True  # to 16 bits, before dS is made of it: bounds are tighter where it isn't

    def environment(self):
        """A context that the implementation runs in (an interpreter, an assumed device, …)."""
        return contextlib.nullcontext()

    def before_run(self, nbytes: int):
        """Called before each run with about the number of bytes it writes; may poison memory."""

    def refusal(self, case: Case) -> str | None:
        """Why the implementation doesn't run the case, by its own account; None where it does."""
        with self.environment():
            return _dispatch.reason(self.implementation, case.spec(), case.operands(), _device.current())

    def attend(self, arguments, **options):
        return call_forms.attend(arguments, **options, implementation=self.implementation)

    def run(self, arguments, d_out, d_lse):
        return self.program(arguments, d_out, d_lse)()

    def program(self, arguments, d_out, d_lse, attend=None, return_residual=None):
        """A function that runs the call forward and backward.

        It returns output, residual and a dict of gradients as NumPy arrays. The residual is not used in
        the loss where `d_lse` is None, nor returned unless `return_residual` says so. `attend` may wrap
        the method of that name. The function takes floating arguments, `d_out` and `d_lse` by name, to run
        the same program on others.
        """
        attend = attend or self.attend
        return_residual = d_lse is not None if return_residual is None else return_residual
        static = {name: x for name, x in arguments.items() if not hasattr(x, "shape")}
        arrays = {name: x for name, x in arguments.items() if name not in static}
        inputs = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        others = {name: x for name, x in arrays.items() if name not in inputs}

        @functools.partial(jax.jit, compiler_options=self.compiler_options)
        def forward_and_backward(inputs, others, d_out, d_lse):
            def loss_terms(inputs):
                result = attend(static | others | inputs, return_residual=return_residual)
                out, lse = result if return_residual else (result, None)
                return (out, None if d_lse is None else lse), lse

            (out, _), vjp, lse = jax.vjp(loss_terms, inputs, has_aux=True)
            (gradients,) = vjp((d_out, d_lse))
            return out, lse, gradients

        def run(d_out=d_out, d_lse=d_lse, **changed):
            self.before_run(2 * sum(x.nbytes for x in inputs.values()) + d_out.nbytes)
            with self.environment():
                results = forward_and_backward(inputs | changed, others, d_out, d_lse)
                return jax.tree.map(np.asarray, results)

        return run

    def compare(self, case: Case, spec, operands, d_out, d_lse, got) -> dict[str, float]:
        """Compare a run with the definition: `agreement.compare`."""
        return compare(case, spec, operands, d_out, d_lse, got, self.reports_errors, self.p_is_converted)

    def check(self, case: Case) -> dict[str, float]:
        """Run a case in the form that it has, and compare it with the definition: its ratios."""
        arguments, spec, operands, d_out, d_lse = draw(case)
        d_lse = d_lse if case.residual == "used" else None
        attend = in_form_of(case, self.attend)
        program = self.program(arguments, d_out, d_lse, attend, return_residual=case.residual != "absent")
        got = program()
        ratios = self.compare(case, spec, operands, d_out, d_lse, got)
        if spec.deterministic:
            jax.tree.map(np.testing.assert_array_equal, got, program())
        return ratios

    def check_refused(self, case: Case, reason: str | None = None):
        """A case is refused when it is traced, and the error names the implementation or its reason."""
        arguments, *_ = draw(case)
        attend = in_form_of(case, self.attend)
        said = re.escape(reason or self.implementation)
        with self.environment(), pytest.raises(NotImplementedError, match=said):
            jax.eval_shape(lambda: attend(arguments, return_residual=False))


class ImplementationSuite(Implementation):
    """Subclass it in a test file; the name must start with `Test`."""

    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    lengths: tuple[int, ...] = ODD_LENGTHS
    typical_length: int = 129  # of the cases that are about something else
    head_dims: tuple[int, ...] = (64,)
    heads: tuple[tuple[int, int], ...] = ((3, 1), (6, 2), (8, 1), (16, 2))  # (N, K)
    features: tuple[str, ...] = ()
    thorough: bool = False  # every dtype and mask for each length, head dim, …, not one in turn
    slow: bool = False  # so that `make test` runs a few of the cases, with every feature and category

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
            cases = self.cases()
            metafunc.parametrize("case", thinned(cases, _traits) if self.slow else cases, ids=str)
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
        ratios = self.compare(case, spec, operands, d_out, d_lse, got)
        record_property("error_ratios", ratios)

    def test_without_residual(self, dtype):
        case = self._typical(dtype)
        arguments, spec, operands, d_out, _ = draw(case)
        got = self.run(arguments, d_out, None)
        self.compare(case, spec, operands, d_out, None, got)

    def test_rows_with_nothing_to_attend_to(self, dtype):
        T, S = self.typical_length, self.typical_length // 2
        case = self._typical(dtype, T=T, S=S, is_causal=True)
        arguments, spec, operands, d_out, d_lse = draw(case)
        out, lse, gradients = self.run(arguments, d_out, d_lse)
        self.compare(case, spec, operands, d_out, d_lse, (out, lse, gradients))
        empty = slice(0, T - S)
        assert np.all(out[:, empty] == 0)
        assert np.all(np.isneginf(lse[:, empty]))
        assert np.all(np.isfinite(lse[:, T - S :]))
        assert np.all(gradients["query"][:, empty] == 0)

    def test_log_sum_exp_is_nan_where_logits_are(self):
        """Of the rows that see them alone."""
        row, of_query, of_key = self.typical_length // 2, np.s_[0, :, 1], np.s_[1, -9:, 0]
        lse = self._check_lse({"query": np.s_[0, row, 1, 3], "key": np.s_[1, -9, 0, 3]}, np.nan)
        assert np.isnan(lse[of_query][row]) and np.isnan(lse[of_key]).all() and np.isnan(lse).sum() == 10

    def test_rows_whose_bias_is_very_low_have_a_mean(self):
        """The lowest float32 is what users add to hide keys."""
        if "bias" not in self.features:
            pytest.skip("takes no bias")
        for low in (-1e38, np.finfo(np.float32).min):
            self._check_lse({"bias": np.s_[:, 0, self.typical_length // 2]}, low, ("bias",))

    def _check_lse(self, places: dict, value, features=()):
        """Put `value` at those places of arguments, and compare lse with the definition. Returns it."""
        case = self._typical(self.dtypes[0], is_causal=True, features=features, bias_dtype="float32")
        arguments, spec, operands, d_out, d_lse = draw(case)
        for name, place in places.items():
            x = np.array(arguments[name])
            x[place] = value
            arguments[name], operands = x, operands.replace(**{name: x})
        _, expected, _ = _reference.reference_with_gradients(spec, operands, d_out)
        _, lse, _ = self.run(arguments, d_out, d_lse)
        np.testing.assert_allclose(lse.transpose(0, 2, 1), expected, rtol=1e-3, atol=1e-3)
        return lse

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
        self.check_refused(case)

    def _typical(self, dtype, **fields):
        length, H = self.typical_length, self.head_dims[0]
        return Case("typical", dtype, **{"T": length, "S": length, "H": H, **fields})


def _traits(case: Case) -> set[tuple[str, str]]:
    return {("category", case.category), *(("feature", name) for name in case.features)}
