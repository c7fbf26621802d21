"""The test class of what isn't finite: no query or key is the worse for another that it doesn't see.

NaN and infinities are put into one sequence, or into padding, or behind a mask, a window or the diagonal. All
results that don't depend on them by the definition must be the same bits as without them, forward and
backward; and results that do must not hide them.
"""

import dataclasses
import functools

import numpy as np
from attention_case import Case, draw
from implementation_suite import Implementation

from jax_flash import _reference
from jax_flash._spec import sizes

SITUATIONS = {
    "lengths": dict(features=("seq_lengths",)),
    "causal": dict(is_causal=True),
    "window": dict(local_window_size=(9, 3)),
    "window and soft cap": dict(local_window_size=(9, 3), features=("logits_soft_cap",)),
    "mask": dict(features=("mask:B11S", "bias", "logits_soft_cap"), is_causal=True),
    "segments": dict(features=("segment_ids", "alibi_slopes"), is_causal=True),
    "segments alone": dict(features=("segment_ids",)),
    "packed": dict(features=("packed", "dropout"), is_causal=True),
    "packed alone": dict(features=("packed",), local_window_size=(30, 5)),
}


@dataclasses.dataclass(frozen=True)
class Reached:
    """Which results depend on some queries and keys by the definition: bool arrays."""

    queries: np.ndarray  # (B, T, N)
    keys: np.ndarray  # (B, S, K)
    lonely: np.ndarray  # (B, T, N): queries that see no key

    @classmethod
    def by(cls, queries: np.ndarray, keys: np.ndarray, spec, operands) -> "Reached":
        """What depends on those queries `(B, T)` and keys `(B, S)`."""
        size = sizes(operands)
        sees = np.asarray(_reference._allowed(spec, operands))
        reached = (queries[:, None] & sees.any(-1)) | (sees & keys[:, None, None]).any(-1)  # (B, N, T)
        of_keys = (sees & reached[..., None]).any(2)  # (B, N, S)
        of_keys = of_keys.reshape(size.B, size.K, size.group, size.S).any(2)
        return cls(reached.transpose(0, 2, 1), of_keys.transpose(0, 2, 1), ~sees.any(-1).transpose(0, 2, 1))


class NonFiniteSuite(Implementation):
    """Subclass it in a test file; the name must start with `Test`."""

    dtype: str = "bfloat16"
    sizes: dict[str, int] = dict(T=70, S=90, N=4, K=2, H=16)  # noqa: RUF012
    situations: tuple[str, ...] = tuple(SITUATIONS)
    sums_in_any_order: tuple[str, ...] = ()  # gradients whose last bits may differ from run to run

    def pytest_generate_tests(self, metafunc):
        if "situation" in metafunc.fixturenames:
            metafunc.parametrize("situation", self.situations)

    def test_what_is_not_finite_reaches_no_further_than_by_definition(self, situation):
        case = Case("not finite", self.dtype, **self.sizes, **SITUATIONS[situation])
        arguments, spec, operands, d_out, d_lse = draw(case)
        queries, keys = spoiled(situation, case, operands)
        run = self.program(arguments, d_out, d_lse)
        clean = run()
        reached = Reached.by(queries, keys, spec, operands)
        assert queries.any() and keys.any() and not reached.queries.all()
        assert reached.keys.all() == (situation == "causal")  # as the last query sees all
        assert reached.queries.any() == reached.keys.any() == (situation != "lengths")
        for value in (np.nan, np.inf):
            put = functools.partial(with_value, value)
            behind_mask = {}
            if situation == "mask":
                behind_mask["bias"] = np.where(operands.mask, arguments["bias"], value).astype(self.dtype)
            got = run(
                **behind_mask,
                query=put(arguments["query"], queries),
                key=put(arguments["key"], keys),
                value=put(arguments["value"], keys),
                d_out=put(d_out, queries),
                d_lse=put(d_lse, queries),
            )
            check(got, clean, reached, not np.isnan(value), self.sums_in_any_order)


def with_value(value, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """`x (B, positions, …)` with a value at some of the positions."""
    return np.where(positions.reshape(*positions.shape, *(1,) * (x.ndim - 2)), x.dtype.type(value), x)


def check(got, clean, reached: Reached, are_hidden: bool, in_any_order: tuple[str, ...] = ()):
    """Compare a run with the clean one. Infinities may be hidden: all queries that they reach are finite."""
    (out, lse, gradients), (clean_out, clean_lse, clean_gradients) = got, clean
    of_queries = {"out": (out, clean_out), "lse": (lse, clean_lse)}
    of_queries["d_query"] = gradients["query"], clean_gradients["query"]
    if "bias" in gradients:
        of_queries["d_bias"] = tuple(x["bias"].transpose(0, 2, 1, 3) for x in (gradients, clean_gradients))
    of_keys = {f"d_{name}": (gradients[name], clean_gradients[name]) for name in ("key", "value")}
    for results, is_reached in ((of_queries, reached.queries), (of_keys, reached.keys)):
        for name, (x, expected) in results.items():
            assert np.isfinite(expected[~is_reached]).all() or name == "lse"
            pair = x[~is_reached], expected[~is_reached]
            if name in in_any_order:
                np.testing.assert_allclose(*(x.astype(np.float32) for x in pair), 0.02, 1e-3, err_msg=name)
            else:
                np.testing.assert_array_equal(*pair, name)
            if not are_hidden and name != "d_value":  # of a key that dropout leaves no query that is reached
                x = x[is_reached]
                assert np.isnan(x.reshape(len(x), np.prod(x.shape[1:], dtype=int))).any(-1).all(), (
                    f"{name} hides NaN"
                )
    assert (out[reached.lonely] == 0).all() and (gradients["query"][reached.lonely] == 0).all()
    assert np.isneginf(lse[reached.lonely]).all()


def spoiled(situation, case, operands):
    """The queries `(B, T)` and the keys `(B, S)` that NaN is put into."""
    i, j = np.arange(case.T)[None], np.arange(case.S)[None]
    match situation:
        case "lengths":
            return i >= operands.query_seq_lengths[:, None], j >= operands.key_value_seq_lengths[:, None]
        case "segments" | "segments alone":
            return operands.query_segment_ids == 1, operands.key_value_segment_ids == 1
        case "packed" | "packed alone":
            starts, ends = (operands.query_offsets[:, n, None] for n in (-2, -1))
            key_starts, key_ends = (operands.key_value_offsets[:, n, None] for n in (-2, -1))
            return (starts <= i) & (i < ends), (key_starts <= j) & (j < key_ends)
        case "mask":
            return np.repeat(i == 33, case.B, 0), ~operands.mask[:, 0, 0]
        case "causal":
            return np.repeat(i == case.T - 9, case.B, 0), np.repeat(j == case.S - 5, case.B, 0)
    return np.repeat(i == 33, case.B, 0), np.repeat(j == 47, case.B, 0)
