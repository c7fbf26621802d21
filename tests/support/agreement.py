"""What a run gave against the definition in float64: as a whole, and row by row.

Two yardsticks say how far off a right result may be: what plain attention in the same dtype gets, and what
rounding must be expected to make (rounding.py), for where plain attention happens to be exact.
"""

import dataclasses
import functools

import jax
import numpy as np
import rounding
from attention_case import Case

from jax_flash import _reference
from jax_flash._spec import AttentionSpec, Gradients, Operands

MANY = 256  # roundings, that plain attention's error isn't small by luck
WITHOUT_ROWS = ("lse", "d_alibi_slopes", "d_sinks")  # each of whose numbers has a bound of its own
SUMS_OVER_ROWS = ("d_bias", "d_alibi_slopes", "d_sinks")
# Standard deviations. No number of a normal distribution is found 6 of them off, of as many as there are.
OF_A_ROW = 6


@dataclasses.dataclass(frozen=True)
class Result:
    """One array of a run, in float64, and all that it is measured by. Rows of -inf are 0 in each."""

    name: str
    got: np.ndarray
    reference: np.ndarray
    deviation: np.ndarray  # that rounding is expected to make
    roundings: int  # at most so many of its numbers are off independently of the others

    @property
    def error(self) -> float:
        return float(np.linalg.norm(self.got - self.reference))

    def floor(self, case: Case) -> float:
        """The error that is accepted where plain attention happens to make less."""
        whole = deviations_of_the_whole(self.name, case, self.roundings)
        return whole * float(np.linalg.norm(self.deviation))

    def rows(self, x: np.ndarray) -> np.ndarray:
        """The norm of each row of an array like this: along its last axis, or each number alone."""
        return (
            np.abs(x) if self.name in WITHOUT_ROWS or _is_captured(self.name) else np.linalg.norm(x, axis=-1)
        )

    def complaint_of_rows(self, plain: np.ndarray | None = None) -> str | None:
        """Says which row is off by more than rounding makes, and than twice plain attention's error."""
        errors = self.rows(self.got - self.reference)
        bounds = OF_A_ROW * self.rows(self.deviation)
        if plain is not None:
            bounds = np.maximum(bounds, 2 * self.rows(plain - self.reference))
        wrong = errors > bounds
        if not wrong.any():
            return None
        worst = np.unravel_index(np.argmax(errors - bounds), wrong.shape)
        norm = self.rows(self.reference)[worst]
        return (
            f"{self.name}: {wrong.sum()} of {wrong.size} rows are wrong, most {tuple(map(int, worst))}: "
            f"error {errors[worst]:.3g} over {bounds[worst]:.3g} (of norm {norm:.3g})"
        )


def compare(case, spec, operands, d_out, d_lse, got, ratios=True, p_is_converted=True) -> dict[str, float]:
    """Check a run against the definition in float64: `Yardsticks.check`, of a call that is run once."""
    return Yardsticks(case, spec, operands, d_out, d_lse, p_is_converted).check(got, ratios)


@dataclasses.dataclass(frozen=True)
class Yardsticks:
    """What the results of a call are measured by, each found when it is first asked for."""

    case: Case
    spec: AttentionSpec
    operands: Operands
    d_out: np.ndarray  # (B, T, N, V)
    d_lse: np.ndarray | None  # (B, T, N)
    p_is_converted: bool = True  # by the implementation: to 16 bits, before dS is made of it

    @functools.cached_property
    def references(self) -> dict[str, np.ndarray]:
        return self._results_of(_reference.reference_with_gradients)

    @functools.cached_property
    def plains(self) -> dict[str, np.ndarray]:
        return self._results_of(_reference.plain_with_gradients)

    @functools.cached_property
    def deviations(self) -> dict[str, np.ndarray]:
        return rounding.deviations(self.terms, self.references)

    @functools.cached_property
    def terms(self) -> rounding.Terms:
        of_call = self.case.dtype, self.spec, self.operands, self.references, self.d_out, self.d_lse
        rows_of_a_step = self.case.rows_of_a_call if self.case.transform == "scan" else None
        return rounding.terms_of(*of_call, self.p_is_converted, rows_of_a_step)

    def _results_of(self, attention) -> dict[str, np.ndarray]:
        """Output, residual and gradients by name, the residual as `(B, T, N)`."""
        d_lse = None if self.d_lse is None else self.d_lse.transpose(0, 2, 1)
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            out, lse, gradients = attention(self.spec, self.operands, self.d_out, d_lse)
        return {"out": out, "lse": lse.transpose(0, 2, 1), **by_name(gradients)}

    def check(self, got, ratios=True) -> dict[str, float]:
        """Compare a run with the definition.

        Args:
          got: output `(B, T, N, V)`, residual `(B, T, N)` or None, and a dict of gradients.
          ratios: whether plain attention is run where what rounding makes accepts all results anyway.

        Returns:
          for each result, its error over that of plain attention in the same dtype, where that is
          what bounds it.
        """
        results, complaints = self._results(*got)
        within = all(result.error <= result.floor(self.case) for result in results)
        if not ratios and not complaints and within and not any(x.complaint_of_rows() for x in results):
            return {}
        over_plain = {}
        plains = {name: finite(x) for name, x in self.plains.items()}
        plains = rounding.with_delta_of(got[0], self.terms, plains)
        for result in results:
            plain = plains[result.name].reshape(result.reference.shape)
            plain_error, floor = float(np.linalg.norm(plain - result.reference)), result.floor(self.case)
            few = self.case.is_drawn and result.roundings < MANY
            allowed = (4 if few else 2) * plain_error
            if plain_error and allowed >= floor:
                over_plain[result.name] = result.error / plain_error
            if not result.error <= max(allowed, floor):
                complaints.append(
                    f"{result.name}: error {result.error:.3g} over {max(allowed, floor):.3g} (of norm "
                    f"{np.linalg.norm(result.reference):.3g}; plain attention {plain_error:.3g})"
                )
            complaints.append(result.complaint_of_rows(plain))
        complaints = [complaint for complaint in complaints if complaint is not None]
        assert not complaints, "; ".join(complaints)
        return over_plain

    def _results(self, out, lse, gradients) -> tuple[list[Result], list[str]]:
        """The results whose numbers can be compared, and what is wrong with the others."""
        arrays = {"out": out, **{f"d_{name}": x for name, x in gradients.items()}}
        assert out.dtype == self.operands.query.dtype
        if lse is not None:
            assert lse.dtype == np.float32
            arrays["lse"] = lse
        results, complaints = [], []
        references = rounding.with_delta_of(out, self.terms, self.references)
        for name, x in arrays.items():
            reference, deviation = references[name], self.deviations[name]
            if name.startswith("d_"):
                assert x.dtype == self.operands.present()[name.removeprefix("d_")].dtype, name
                # Without the axes that a broadcast operand has in canonical form.
                reference, deviation = reference.reshape(x.shape), deviation.reshape(x.shape)
            assert x.shape == reference.shape, name
            complaint = complaint_of_values(name, x, reference)
            if complaint is None:
                # All columns of a row share what its probabilities are off.
                roundings = min(reference.size, np.count_nonzero(self.terms.w))
                results.append(Result(name, finite(x), finite(reference), deviation, roundings))
            else:
                complaints.append(complaint)
        return results, complaints


def complaint_of_values(name: str, got: np.ndarray, reference: np.ndarray) -> str | None:
    """Says where numbers are not finite that ought to be, or the other way round."""
    if not np.array_equal(np.isneginf(got), np.isneginf(reference)):
        return f"{name} is -inf in other rows than the definition"
    if not np.all(np.isfinite(finite(got))):
        return f"{name} has {np.sum(~np.isfinite(finite(got)))} of {got.size} not finite"
    return None


def deviations_of_the_whole(name: str, case: Case, roundings: int) -> float:
    """How many standard deviations the norm of all of a result may be off, where plain attention is less.

    - Of many numbers the mean is near 1, and plain attention's like it: less than that will do, for where
      some of its roundings are exact by luck (one key: its probability is exactly 1).
    - The rounding of delta, which plain attention has not, goes into gradients of logits. In calls that are
      drawn rows may have so few keys that nothing else is left: one key's gradient is 0.
    - Few numbers may all be unlucky, each sum over all rows in every call. In calls that are drawn rows may
      be alike, and their roundings too.
    """
    few = roundings < MANY
    if few and (case.is_drawn or is_sum_over_rows(name)):
        return 4
    if case.is_drawn and (name in ("d_query", "d_key") or is_sum_over_rows(name)):
        return 3
    return 0.8


def is_sum_over_rows(name: str) -> bool:
    return name in SUMS_OVER_ROWS or _is_captured(name)


def _is_captured(name: str) -> bool:
    """Whether a result is the gradient of an array that score_mod captures."""
    return name.startswith("d_score_mod_")


def by_name(gradients: Gradients) -> dict[str, np.ndarray]:
    return {f"d_{name}": x for name, x in gradients.present().items()}


def finite(x: np.ndarray) -> np.ndarray:
    return np.where(np.isneginf(x), 0, x).astype(np.float64)
