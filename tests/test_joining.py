"""Evaluations are found, checked as they are read, and joined only where they are alike."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_up import made_up
from sweeps import sweep

from posbench.config import EvalSettings
from posbench.errors import UserError
from posbench.jobs.evaluate import FILES, earlier, merge_evaluations
from posbench.joining import MISMATCH, Part, find_evaluations, join, newest_evaluation
from posbench.report import run_report, terminal_table
from posbench.report.answer import answer, caveats
from posbench.report.lines import tables
from posbench.results import Evaluation, Status, read_results, write_results

ROPE = {"rope": [[2.0, 2.1, 2.4], [2.1, 2.2, 2.6]]}
ALIBI = {"alibi": [[2.0, 2.0, 2.0], [2.1, 2.1, 2.0]]}


def saved(evaluation: Evaluation, folder: Path) -> Path:
    write_results(evaluation, folder)
    return folder


def parts(one: Evaluation, two: Evaluation) -> list[Part]:
    return [Part(Path("A"), one), Part(Path("B"), two)]


# ---------------------------------------------------------------- a file edited by hand

EDITS: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda row: row.update(ppl=5.0), r"row 2: value=.* is not ppl=5.0"),
    (lambda row: row.update(ppl=5.0, value=5.0), r"row 2: ppl=5.0 is not exp\(nll=2.1\)"),
    (lambda row: row.update(nll=2.2), r"row 2: ppl=.* is not exp\(nll=2.2\)"),
    (lambda row: row.update(nll=None), r"row 2: status=ok with nll=None"),
    (lambda row: row.update(nll="inf", ppl="inf", value="inf"), r"row 2: status=ok with nll=inf"),
    (lambda row: row.update(value=None), r"row 2: status=ok without a value"),
    (lambda row: row.update(value="8.1"), r"row 2: value='8.1' is not a number or null"),
    (lambda row: row.update(n_docs=True), r"row 2: n_docs=True is not a whole number"),
    (lambda row: row.update(seed=0.5), r"row 2: seed=0.5 is not a whole number"),
    (lambda row: row.update(encoding=None), r"row 2: encoding=None is not a text"),
    (lambda row: row.update(status="good"), r"row 2: status='good' is not one of ok, unsupported"),
    (lambda row: row.update(perplexity=8.0), r"row 2: unknown column 'perplexity'"),
    (lambda row: row.pop("targets_sha256"), r"row 2: column 'targets_sha256' is missing"),
    (lambda row: row.update(ci_lo=9.0, ci_hi=8.0), r"row 2: ci_lo=9.0 is above ci_hi=8.0"),
    (lambda row: row.update(status="oom"), r"row 2: status=oom with value=8.1"),
    (lambda row: row.update(status="nonfinite"), r"row 2: status=nonfinite with ppl=8.1"),
    (lambda row: row.update(ratio=0.0), r"row 2: ratio=0.0 is not above 0"),
    (lambda row: row.update(eval_length=-5), r"row 2: eval_length=-5 is not above 0"),
    (lambda row: row.update(ratio=3.0), r"row 2: eval_length=128 is not ratio=3 times"),
    (lambda row: row.update(ratio=1.0, eval_length=64), r"row 2 is the cell of row 1, with"),
]


@pytest.mark.parametrize(("edit", "message"), EDITS, ids=[message for _, message in EDITS])
def test_an_edited_results_file_is_refused_by_its_row(
    edit: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    file = saved(sweep(ROPE), tmp_path) / "results.json"
    content = json.loads(file.read_text())
    edit(content["rows"][1])
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        read_results(tmp_path)
    for command in (lambda: run_report([tmp_path]), lambda: find_evaluations([tmp_path])):
        with pytest.raises(UserError, match=message) as caught:
            command()
        assert "results.json" in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rows", {}, "rows is not a list"),
        ("rows", [[]], "row 1 is not a mapping"),
        ("documents", [{"run_id": "r"}], "document 1: column 'extension' is missing"),
        ("curves", [{"lo": 3}], r"curve 1: column 'run_id' is missing"),
        ("runs", [{}], "no run_id"),
        ("runs", [{"run_id": "r", "unigram_ppl": "high"}], "run 1: unigram_ppl='high' is not a"),
        ("provenance", [], "provenance"),
        ("provenance", {"evaluations": 3}, "provenance"),
        ("provenance", {"study": "posbench study mine"}, "study='posbench study mine'"),
    ],
)
def test_other_records_are_looked_at_too(
    key: str, value: object, message: str, tmp_path: Path
) -> None:
    file = saved(sweep(ROPE), tmp_path) / "results.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ValueError, match=message):
        read_results(tmp_path)


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("documents", {"n": 0}, "document 1: n=0 is less than 1"),
        ("curves", {"nll": [1.0]}, "curve 1: its columns are not equally long"),
        ("attention", {"run_id": "nobody"}, "head 1: run_id='nobody' has no row"),
    ],
)
def test_an_edit_beside_the_rows_is_refused(
    key: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = saved(made_up(("rope",), (0,), attention=True), tmp_path) / "results.json"
    read_results(tmp_path)
    content = json.loads(file.read_text())
    content[key][0] |= change
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        read_results(tmp_path)


def test_an_edited_file_is_neither_complete_nor_a_part_of_a_sweep(tmp_path: Path) -> None:
    """A second `eval-extrapolate` into the folder, and the table over a sweep's jobs, name it."""
    for name in FILES:
        (tmp_path / name).touch()
    file = saved(sweep(ROPE), tmp_path) / "results.json"
    content = json.loads(file.read_text())
    content["rows"][1]["nll"] = 1.0
    file.write_text(json.dumps(content))
    commands: list[Callable[[], object]] = [
        lambda: earlier(tmp_path, EvalSettings()),
        lambda: merge_evaluations([tmp_path], tmp_path / "all"),
    ]
    for command in commands:
        with pytest.raises(UserError, match=r"results\.json .*row 2: ppl=.* is not exp"):
            command()


def test_the_newest_evaluation_is_not_passed_over_for_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSBENCH_OUTPUTS", str(tmp_path))
    saved(sweep(ROPE), tmp_path / "old")
    file = saved(sweep(ALIBI), tmp_path / "new") / "results.json"
    file.write_text(file.read_text().replace('"ok"', '"good"', 1))
    os.utime(tmp_path / "old" / "results.json", (1, 1))
    with pytest.raises(UserError, match=r"new/results\.json .*row 1: status='good'"):
        newest_evaluation()
    os.utime(file, (0, 0))
    assert newest_evaluation().folder == tmp_path / "old"


def test_every_status_comes_back(tmp_path: Path) -> None:
    """What the check must let through: a row of each status, and a perplexity past all floats."""
    cells: list[list[float | Status]] = [[each, math.inf, 800.0] for each in Status]
    cells[0][0] = 2.0
    written = sweep({"rope": cells})
    again = read_results(saved(written, tmp_path))
    assert repr(again.rows) == repr(written.rows)
    assert {row.status for row in again.rows} >= set(Status) - {Status.ok}


# ---------------------------------------------------------------- joining


def test_alike_evaluations_are_joined() -> None:
    joined = join(parts(sweep(ROPE), sweep(ALIBI)))
    assert [run["run_id"] for run in joined.runs] == ["rope-s0", "rope-s1", "alibi-s0", "alibi-s1"]
    assert MISMATCH not in joined.provenance


def test_a_cell_measured_twice_alike_counts_once() -> None:
    once, again = sweep(ROPE), sweep(ROPE)
    for row in again.rows:
        row.seconds, row.tokens_per_s = 1.5, 99.0  # never twice the same
    joined = join(parts(once, again))
    assert joined.rows == once.rows
    assert joined.documents == once.documents


def other(evaluation: Evaluation, **values: Any) -> Evaluation:
    return replace(evaluation, rows=[replace(row, **values) for row in evaluation.rows])


def other_protocol(evaluation: Evaluation) -> Evaluation:
    runs = [run | {"protocol": {"protocol": "posbench-v2"}} for run in evaluation.runs]
    return replace(evaluation, runs=runs)


UNLIKE = {
    "targets_sha256": (
        other(sweep(ALIBI), targets_sha256="b" * 64),
        "aaaaaaaaaaaa",
        "bbbbbbbbbbbb",
    ),
    "corpus_fingerprint": (other(sweep(ALIBI), corpus_fingerprint="d" * 64), "cccc", "dddd"),
    "tokenizer_sha256": (other(sweep(ALIBI), tokenizer_sha256="u" * 64), "tttt", "uuuu"),
    "train_length": (other(sweep(ALIBI), train_length=128), "64", "128"),
    "protocol id": (other_protocol(sweep(ALIBI)), "posbench-v1", "posbench-v2"),
    "min_context": (other(sweep(ALIBI), min_context=7), "None", "7"),
    "measured twice": (other(sweep(ROPE), nll=1.0), "rope-s0", "7.38"),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_what_differs_is_refused_by_name_and_admitted_on_demand(what: str) -> None:
    two, here, there = UNLIKE[what]
    with pytest.raises(UserError, match=r"--allow-mismatch") as caught:
        join(parts(sweep(ROPE), two))
    message = str(caught.value)
    for word in (what, "A", "B", here, there):
        assert word in message
    assert "\n" not in message
    joined = join(parts(sweep(ROPE), two), allow_mismatch=True)
    assert joined.provenance[MISMATCH]
    assert any(what in each for each in caveats(joined, tables(joined)))


def test_one_evaluation_may_hold_several_training_lengths_and_texts() -> None:
    """They are blocks of one evaluation; only its own columns must be alike."""
    long = other(sweep(ALIBI), train_length=128, targets_sha256="b" * 64)
    text = other(sweep({"t5": [[2.0, 2.0, 2.0]]}), corpus_fingerprint="d", targets_sha256="e" * 64)
    evaluation = sweep(ROPE).merged(long).merged(text)
    assert join([Part(Path("A"), evaluation)]).rows == evaluation.rows


def test_rows_without_numbers_differ_from_nothing() -> None:
    beyond = sweep({"learned": [[2.0, Status.unsupported, Status.oom]]})
    for row in beyond.rows[1:]:
        row.targets_sha256 = "b" * 64
    assert len(join(parts(sweep(ROPE), beyond)).rows) == 9


def test_lines_scored_on_other_tokens_are_not_ranked() -> None:
    long = other(sweep(ALIBI), train_length=128, targets_sha256="b" * 64)
    (table,) = tables(sweep(ROPE).merged(long))
    assert "No two lines share target tokens." in answer(table)[1]
    fire = sweep({"fire": [[1.9, 1.9, 1.9], [1.9, 1.9, 1.9]]})
    (table,) = tables(sweep(ROPE).merged(fire).merged(long))
    sentence = answer(table)[1]
    assert "among lines scored on the same tokens" in sentence
    assert "fire" in sentence
    assert "alibi" not in sentence


# ---------------------------------------------------------------- reports


def test_a_report_of_unlike_rows_is_refused_or_says_so(tmp_path: Path) -> None:
    mixed = sweep(ROPE).merged(other(sweep(ALIBI), targets_sha256="b" * 64))
    saved(mixed, tmp_path)
    with pytest.raises(UserError, match=r"targets_sha256=aaaa.*bbbb.*--allow-mismatch"):
        run_report([tmp_path])
    assert not (tmp_path / "report.md").exists()
    run_report([tmp_path], allow_mismatch=True)
    text = (tmp_path / "report.md").read_text()
    assert "Not alike, and shown on demand (--allow-mismatch)" in text
    assert read_results(tmp_path).provenance[MISMATCH]


def test_jobs_of_a_sweep_that_scored_other_tokens_get_no_common_table(tmp_path: Path) -> None:
    jobs = [
        saved(sweep(ROPE), tmp_path / "0"),
        saved(other(sweep(ALIBI), targets_sha256="b" * 64), tmp_path / "1"),
    ]
    with pytest.raises(UserError, match=r"in its folder.*targets_sha256"):
        merge_evaluations(jobs, tmp_path / "all")
    assert not (tmp_path / "all").exists()


# ---------------------------------------------------------------- finding


def run_folder(folder: Path, run_id: str) -> Path:
    folder.mkdir(parents=True)
    digest = {"checkpoint": {"sha256": f"sha-{run_id}", "step": 1}, "started": "2026-01-01"}
    (folder / "run.json").write_text(json.dumps(digest))
    return folder


def at(evaluation: Evaluation, created: str) -> Evaluation:
    evaluation.provenance["evaluations"][0]["created"] = created
    return evaluation


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POSBENCH_OUTPUTS", str(tmp_path / "outputs"))
    for number, run_id in enumerate(("rope-s0", "rope-s1", "alibi-s0", "alibi-s1")):
        run_folder(tmp_path / "outputs" / "train" / "sweep" / f"{number}-x", run_id)
    return tmp_path / "outputs"


def test_a_sweep_stands_for_its_newest_evaluation_that_holds_all_its_runs(outputs: Path) -> None:
    both = ROPE | ALIBI
    old = saved(at(sweep(both), "2026-01-01"), outputs / "eval" / "old")
    new = saved(at(sweep(both), "2026-01-03"), outputs / "eval" / "new")
    saved(at(sweep(ROPE), "2026-01-04"), outputs / "eval" / "part")  # newer, but holds only half
    saved(at(sweep(both), "2026-01-02"), outputs / "eval" / "between")
    (outputs / "eval" / "broken").mkdir()
    (outputs / "eval" / "broken" / "results.json").write_text("{")  # nobody asked for it
    found, missing = find_evaluations([outputs / "train" / "sweep"])
    assert ([part.folder.name for part in found], missing) == (["new"], [])
    assert len(found[0].evaluation.rows) == 12
    named, _ = find_evaluations([old, new])  # named itself, an evaluation is what it is
    assert [part.folder for part in named] == [old, new]


def test_runs_of_several_evaluations_are_taken_from_the_newest_of_each(
    outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(at(sweep(ROPE | ALIBI), "2026-01-01"), outputs / "eval" / "old")
    (outputs / "eval" / "old" / "results.json").unlink()
    saved(at(sweep(ROPE), "2026-01-02"), outputs / "eval" / "rope")
    saved(at(sweep({"alibi": ALIBI["alibi"][:1]}), "2026-01-03"), outputs / "eval" / "alibi")
    found, missing = find_evaluations([outputs / "train" / "sweep"])
    assert [part.folder.name for part in found] == ["rope", "alibi"]
    assert len(missing) == 1
    assert "3-x has not been evaluated" in missing[0]
    run_folder(outputs / "train" / "sweep" / "4-x", "t5-s0")
    _, missing = find_evaluations([outputs / "train" / "sweep"])
    assert missing == ["2 runs have not been evaluated, and are left out: 3-x, 4-x."]
    run_report([outputs / "train" / "sweep"])
    assert missing[0] in capsys.readouterr().out


def test_one_run_leaves_out_the_rows_of_the_others(outputs: Path) -> None:
    saved(sweep(ROPE | ALIBI), outputs / "eval" / "all")
    sweep_folder = outputs / "train" / "sweep"
    found, _ = find_evaluations([sweep_folder / "0-x", sweep_folder / "2-x"])
    rows = found[0].evaluation.rows
    assert {row.run_id for row in rows} == {"rope-s0", "alibi-s0"}
    assert {each.run_id for each in found[0].evaluation.documents} == {"rope-s0", "alibi-s0"}


def test_runs_that_were_never_evaluated_are_one_line(outputs: Path) -> None:
    with pytest.raises(UserError, match=r"has been evaluated.*posbench eval-extrapolate runs="):
        find_evaluations([outputs / "train" / "sweep"])
    with pytest.raises(UserError, match=r"neither results\.json nor a run"):
        find_evaluations([outputs.parent / "outputs" / "train" / "sweep" / "0-x" / "run.json"])
    with pytest.raises(UserError, match="no such folder"):
        find_evaluations([outputs / "nowhere"])


def test_the_terminal_table_of_a_joined_evaluation_averages_no_run_twice() -> None:
    joined = join(parts(sweep(ROPE), sweep(ROPE)))
    assert terminal_table(joined) == terminal_table(sweep(ROPE))
