"""Which of many cases `make test` runs: a few that have everything which the others have, each thing once.

The others have the marker `exhaustive`, and belong to `make test-all`. For each commit continuous integration
(`.ci/run`) runs a part of them, and all of a test with the marker `every_case`. The cases of `make test` it
takes in turns: a turn has an equal share of each test's cases, and all of a test marked `every_turn`.
"""

import dataclasses
import zlib
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence, Set
from typing import Any

import pytest

SIZES = ("T", "S", "B", "N", "K", "seed")  # of a case, whose values are no traits by themselves


def thinned(cases: Iterable[Any], traits: Callable[[Any], Collection[Hashable]]) -> list:
    """Parameters for pytest, in order. A tuple has the values of several arguments."""
    cases = list(cases)
    chosen = covering([set(traits(case)) for case in cases])
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if i in chosen else pytest.mark.exhaustive,
        )
        for i, case in enumerate(cases)
    ]


def covering(sets: Sequence[Set[Hashable]]) -> Set[int]:
    """Indices of sets that have all elements between them, found greedily: next is that with most new ones.

    They are fewer than the sets that bring something new in order, where plain cases come before rich ones.
    """
    chosen: set[int] = set()
    missing = set().union(*sets)
    most = {i: len(elements) for i, elements in enumerate(sets)}  # new elements, at most
    while missing:
        best = None
        for i in sorted(most, key=lambda i: (-most[i], i)):
            if best is not None and (most[i], -i) < (most[best], -best):
                break
            most[i] = len(sets[i] & missing)
            if best is None or (most[i], -i) > (most[best], -best):
                best = i
        chosen.add(best)
        missing -= sets[best]
        del most[best]
    return chosen


def in_turn(cases: Iterable[Any], others: Sequence[Any]) -> list:
    """Parameters for pytest: each case with each of the others, in `make test` with one of them, in turn."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            other,
            marks=() if i % len(others) == j else pytest.mark.exhaustive,
        )
        for i, case in enumerate(cases)
        for j, other in enumerate(others)
    ]


def one_in(count: int, cases: Iterable[Any]) -> list:
    """Parameters for pytest: of cases that take long and bring little of their own, `make test` has one in
    `count`. A tuple has the values of several arguments."""
    params = [
        case
        if hasattr(case, "marks")  # as pytest.param makes them
        else pytest.param(*(case if isinstance(case, tuple) else (case,)))
        for case in cases
    ]
    of_make_test = [param for param in params if not param.marks]
    left_out = {id(param) for i, param in enumerate(of_make_test) if i % count}
    marks = (pytest.mark.exhaustive,)
    return [param._replace(marks=marks) if id(param) in left_out else param for param in params]


def thorough(*values: Any) -> list:
    """Parameters for pytest that `make test` leaves out, all of them."""
    return [pytest.param(value, marks=pytest.mark.exhaustive) for value in values]


def in_part(case_id: str, part: int, parts: int) -> bool:
    """Whether a case is one of that part, 0 to `parts` - 1. Each is in one, the same in every process."""
    return zlib.crc32(case_id.encode()) % parts == part


def of_turn(tests: Iterable[str], turn: int, turns: int) -> list[bool]:
    """Which cases are of that turn, 0 to `turns` - 1, given the name of each case's test. A test deals its
    cases to the turns one after another; its name decides which turn gets the first."""
    next_turn: dict[str, int] = {}
    chosen = []
    for test in tests:
        its_turn = next_turn.get(test, zlib.crc32(test.encode()) % turns)
        next_turn[test] = (its_turn + 1) % turns
        chosen.append(its_turn == turn)
    return chosen


def numbers_of_part(text: str) -> tuple[int, int]:
    """Part and number of parts (turn and number of turns) from `"K/N"`."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise ValueError(f"a part is K/N, with K from 0 to N - 1, not {text!r}")
    return int(part), int(parts)


def fields(case: Any) -> set[tuple[str, Hashable]]:
    """The fields of a dataclass that are not its defaults, those of several values one by one."""
    found = set()
    for field in dataclasses.fields(case):
        value = getattr(case, field.name)
        if field.name in SIZES or value == field.default:
            continue
        if field.name in ("left", "right", "local_window_size", "scale", "magnitude"):
            value = True  # that there is one
        found |= {(field.name, x) for x in (value if isinstance(value, tuple) else (value,))}
    return found or {("all defaults", True)}
