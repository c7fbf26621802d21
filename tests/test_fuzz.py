"""A short fuzz of the portable implementation, and that a fuzz finds what is wrong and makes it small."""

import fuzz
import jax
import pytest
from attention_case import Case
from flawed import add_flawed_implementation


@pytest.mark.parametrize("seed", range(4))  # always the same calls: others are for the command line
def test_random_calls_agree_with_the_definition(seed):
    report = fuzz.fuzz(fuzz.Xla(), 7, seed)
    assert report.failure is None, fuzz.to_json(report.failure[0]) + "\n" + report.failure[1]
    assert report.ran == 7
    assert not report.refused


class Flawed(fuzz.Xla):
    implementation = "flawed"
    lengths = (7,)
    head_dims = (16,)

    def environment(self):
        return jax.disable_jit()  # or each case would be compiled

    def factors(self):
        factors = super().factors()
        kept = ("dtype", "lengths", "H", "logits_soft_cap", "sinks", "segment_ids", "dropout")
        return {name: factors[name] for name in kept}


def test_a_fault_of_two_features_together_is_found_and_made_small(monkeypatch, capsys):
    add_flawed_implementation(monkeypatch)
    monkeypatch.setitem(fuzz.FUZZED, "flawed", Flawed)
    status = fuzz.main(["--implementation", "flawed", "--cases", "60", "--seed", "0"])
    assert status == 1
    said = capsys.readouterr().out
    assert "--seed 0" in said and "  no dropout of bfloat16 → " in said and "  no segments → 1\n" in said
    assert "AssertionError: " in said and "lse: error" in said
    again = said.splitlines()[-1].partition("--case '")[2].removesuffix("'")
    case = fuzz.from_json(again)
    assert str(case) == f"{Case('fuzz', 'float32', T=7, S=7, H=16)}-logits_soft_cap-sinks"
    with pytest.raises(AssertionError, match="lse: error"):
        fuzz.main(["--implementation", "flawed", "--case", again])


def test_a_printed_case_is_the_same_case(monkeypatch, capsys):
    case = Case("fuzz", "bfloat16", T=3, local_window_size=(None, 3), features=("sinks", "mask:B11S"), seed=5)
    assert fuzz.from_json(fuzz.to_json(case)) == case
    monkeypatch.setattr(fuzz.Xla, "check", lambda self, case: print(case))
    fuzz.main(["--implementation", "xla", "--case", fuzz.to_json(case)])
    assert str(case) in capsys.readouterr().out


def test_processes_share_the_cases():
    reports = fuzz.in_processes(2, "xla", 3, seed=0)
    assert [report.ran for report in reports] == [2, 1]
