"""Rows in which every two values of any two factors meet: far fewer than all combinations of values.

Most faults of code with many options show when two of them meet. The rows are found greedily: each
begins with a pair that no row has yet, and takes, factor by factor, the value that brings most new ones.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence

Setting = tuple[str, str]
"""A factor and one of its values."""


def pairs(row: Mapping[str, str]) -> list[tuple[Setting, Setting]]:
    """The pairs that a row has, each in the order of the row's factors."""
    return list(itertools.combinations(row.items(), 2))


def allowed_pairs(
    factors: Mapping[str, Sequence[str]], allowed: Callable[[Setting, Setting], bool]
) -> list[tuple[Setting, Setting]]:
    """All pairs of values of different factors that may meet."""
    return [
        ((a, x), (b, y))
        for a, b in itertools.combinations(factors, 2)
        for x, y in itertools.product(factors[a], factors[b])
        if allowed((a, x), (b, y))
    ]


def covering_rows(
    factors: Mapping[str, Sequence[str]], allowed: Callable[[Setting, Setting], bool]
) -> list[dict[str, str]]:
    """Rows of one value for each factor: every allowed pair is in one of them, and no other pair in any.

    Args:
      factors: the values of each. Where several would do, a row takes the one listed first.
      allowed: whether two values may meet. Each factor must have a value that goes with all others'.
    """
    may_meet = allowed_pairs(factors, allowed)
    partners = {(name, value): set() for name in factors for value in factors[name]}
    for one, other in may_meet:
        partners[one].add(other)
        partners[other].add(one)
    missing = {setting: set(others) for setting, others in partners.items()}
    # Those with many values decide how many rows there are, so they choose first.
    order = sorted(factors, key=lambda name: -len(factors[name]))
    rows = []
    for first in may_meet:
        if first[1] not in missing[first[0]]:
            continue
        row = dict(first)
        for name in order:
            if name in row:
                continue
            so_far = set(row.items())
            possible = [value for value in factors[name] if so_far <= partners[name, value]]
            row[name] = max(possible, key=lambda value: len(so_far & missing[name, value]))
        rows.append({name: row[name] for name in factors})
        for one, other in pairs(row):
            missing[one].discard(other)
            missing[other].discard(one)
    return rows
