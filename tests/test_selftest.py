"""`posbench selftest`: sound as it stands, and exit 1 for an evaluator that is wrong."""

from __future__ import annotations

import pytest
from oracles import MUTANTS

from posbench.cli import main

# The mistakes that are asked for by name; test_evaluation.py makes all of them.
WRONG = [
    "mean of window means",
    "last partial window dropped",
    "first token scored without context",
    "target is the input",
    "target shifted twice",
]


def test_a_sound_evaluator_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "cpu" in lines[0]
    assert len(lines) > 40
    assert all(line.startswith("ok ") and "expected" in line for line in lines[1:-1])


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_evaluator_does_not(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(*MUTANTS[name])
    assert main(["selftest"]) == 1
    said = capsys.readouterr()
    assert "FAIL" in said.out
    assert said.err.count("\n") == 1
    assert "do not trust" in said.err


def test_it_takes_no_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "now"]) == 2
    assert "takes nothing" in capsys.readouterr().err
    assert main(["selftest", "--help"]) == 0
    assert "Exit code 0" in capsys.readouterr().out
