"""The test class by which an implementation runs every pair of values of all factors of a call.

    from pairwise_suite import PairwiseSuite

    class TestXlaPairwise(PairwiseSuite):
        implementation = "xla"
        dtypes = ("float32", "bfloat16", "float16")

`make test` runs the calls that hold every value, `make test-all` those that hold every pair.

Which values and pairs the implementation runs is asked of itself. Those that it refuses by its own account
must be refused with that reason, and are counted at the end of the run.
"""

import call_factors
from attention_case import Case
from call_factors import Factors
from exhaustive import fields, thinned
from implementation_suite import Implementation
from pairwise import covering_rows


def supported(implementation: Implementation, factors: Factors) -> tuple[Factors, list[Case]]:
    """The values that run in an otherwise plain call; and for each of the others such a call."""
    plain = call_factors.plain_row(factors)
    runs, refused = {}, []
    for name, values in factors.items():
        runs[name] = {}
        for value, changes in values.items():
            case = call_factors.case_of(factors, plain | {name: value}, "refused")
            if implementation.refusal(case) is None:
                runs[name][value] = changes
            else:
                refused.append(case)
    return runs, refused


def cases(implementation: Implementation, factors: Factors) -> tuple[list[Case], list[Case]]:
    """Calls that hold every pair of values which runs; and a call for each value and pair that doesn't."""
    factors, refused = supported(implementation, factors)
    plain = call_factors.plain_row(factors)

    def allowed(one, other):
        if not call_factors.may_meet(one, other):
            return False
        case = call_factors.case_of(factors, plain | dict((one, other)), "refused")
        if implementation.refusal(case) is not None:
            refused.append(case)
            return False
        return True

    rows = covering_rows(factors, allowed)
    return [call_factors.case_of(factors, row, "pairs") for row in rows], refused


class PairwiseSuite(Implementation):
    """Subclass it in a test file; the name must start with `Test`."""

    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    lengths: tuple[tuple[int, int], ...] = ((65, 65), (33, 70), (70, 33), (1, 70), (33, 1))  # (T, S)
    head_dims: tuple[int, ...] = (40, 16)
    value_head_dim: int = 24

    def factors(self) -> Factors:
        return call_factors.factors(self.dtypes, self.lengths, self.head_dims, self.value_head_dim)

    def pytest_generate_tests(self, metafunc):
        if "case" in metafunc.fixturenames:
            runs, refused = cases(self, self.factors())
            metafunc.parametrize("case", thinned(runs, fields) + refused, ids=str)

    def test_matches_the_definition_or_is_refused(self, case, record_property):
        record_property("implementation", self.implementation)
        record_property("category", case.category)
        reason = self.refusal(case)
        if reason is None:
            record_property("error_ratios", self.check(case))
        else:
            self.check_refused(case, reason)
            record_property("refused", reason)
