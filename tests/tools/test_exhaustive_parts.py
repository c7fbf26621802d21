"""`--exhaustive-part` and `--turn`, by which continuous integration takes some of the cases."""

import subprocess
import sys
from pathlib import Path

import pytest
from exhaustive import covering, numbers_of_part, of_turn

TESTS = Path(__file__).parents[1]
THINNED = TESTS / "tools" / "test_agreement.py"
EVERY_CASE = TESTS / "cuda" / "test_decode_plan.py"


def run(*options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:xdist", *options]
    return subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True)


def cases(path: Path, *options: str) -> set[str]:
    found = run(str(path), *options).stdout.splitlines()
    return {line for line in found if "::" in line}


def test_a_covering_has_every_element():
    """And needs no plain set before a rich one. The first set is taken of those that bring as much."""
    assert covering([{1}, {1, 2}, {3}, {2, 3, 4}, {4, 3, 2}, set()]) == {0, 3}
    assert covering([set(), set()]) == set()


@pytest.mark.parametrize("kind, option", [("exhaustive", "--exhaustive-part"), ("not exhaustive", "--turn")])
def test_each_case_is_in_one_part(kind, option):
    every = cases(THINNED, "-m", kind)
    parts = [cases(THINNED, "-m", kind, f"{option}={part}/2") for part in range(2)]
    assert parts[0] | parts[1] == every
    assert not parts[0] & parts[1]
    assert min(map(len, parts)) > len(every) / 4


def test_other_cases_are_in_every_part():
    assert cases(THINNED, "-m", "not exhaustive", "--exhaustive-part=1/1000") == cases(
        THINNED, "-m", "not exhaustive"
    )


def test_a_test_of_every_case_is_in_every_part():
    of_part = cases(EVERY_CASE, "-m", "exhaustive", "--exhaustive-part=1/1000")
    assert of_part
    assert of_part == cases(EVERY_CASE, "-m", "exhaustive and every_case")


def test_each_test_gives_each_turn_its_share_of_cases():
    tests = ["a", "b", "a", "a", "c", "a", "a"]
    turns = [of_turn(tests, turn, 2) for turn in range(2)]
    assert all(one != other for one, other in zip(*turns, strict=True))
    of_a = [sum(chosen for test, chosen in zip(tests, turn, strict=True) if test == "a") for turn in turns]
    assert sorted(of_a) == [2, 3]


def test_turns_leave_out_no_case_of_a_test_marked_every_turn_and_no_exhaustive_case():
    assert cases(EVERY_CASE, "--turn=1/1000") == cases(EVERY_CASE)
    assert cases(THINNED, "-m", "exhaustive", "--turn=1/1000") == cases(THINNED, "-m", "exhaustive")


@pytest.mark.parametrize("text", ["3", "3/3", "-1/3", "a/b", "1/0", "1/", ""])
def test_what_is_no_part(text):
    with pytest.raises(ValueError, match="a part is K/N"):
        numbers_of_part(text)


@pytest.mark.parametrize("option", ["--exhaustive-part", "--turn"])
def test_the_command_line_says_what_a_part_is(option):
    done = run(str(THINNED), f"{option}=3/3")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"{option}: a part is K/N" in done.stderr
