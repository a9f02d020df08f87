"""A study: one file, one command, and nothing done twice."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml

from posbench import configure, plugins
from posbench.cli import apps, comparing, launcher, main, studyfile, studyrun
from posbench.cli.space import configs_folder, options
from posbench.cli.studyplan import Plan, plan_of
from posbench.config import TrainSettings
from posbench.errors import Exit, SweepFailedError
from posbench.results import read_results
from posbench.runs import fingerprint

MINI = """
title: Which is better?
question: Of two.
train:
  encoding: [rope, alibi]
  data: text
  data.path: {corpus}
  model: {{layers: 1, width: 32, heads: 2}}
  context: 16
  train.batch_size: 4
  train.steps: 3
  train.validate_targets: 64
evaluate:
  eval.max_targets: 256
  eval.bootstrap: 100
  extensions:
    none: all
    ntk: [rope]
baseline: rope
"""
QUICK = ["device=cpu", "threads=1", "calibrate=false"]


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study file of two encodings and one seed."""
    folder = tmp_path_factory.mktemp("study")
    corpus = tiny.write_corpus(folder / "corpus")
    (folder / "mini.yaml").write_text(MINI.format(corpus=corpus))
    return folder / "mini.yaml"


@pytest.fixture(scope="module")
def done(mini: Path) -> Path:
    """The folder of that study, run to its end; the training by real processes."""
    folder = mini.parent / "done"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(studyrun, "Pool", Here)
        assert main(["study", str(mini), *QUICK, "--dir", str(folder)]) == Exit.OK
    return folder


class Here:
    """Stands in for the pool: runs each job in this process, which has torch already."""

    stopped = None

    def __init__(self, jobs: list[Any], slots: list[Any]) -> None:
        self.jobs = jobs

    def run(self) -> list[Any]:
        for job in self.jobs:
            words = job.command[len(launcher.PROGRAM) :]
            assert (*launcher.PROGRAM, *words) == job.command
            assert main(list(words)) == Exit.OK
        return []


@pytest.fixture
def again(done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The finished study, in which no process may be started; as it was for the next test."""
    monkeypatch.setattr(apps, "run_app", _never)
    monkeypatch.setattr(studyrun, "Pool", _never)
    shutil.copytree(done, tmp_path / "kept")
    yield done
    shutil.rmtree(done)
    shutil.copytree(tmp_path / "kept", done)


def _never(*arguments: Any) -> Any:
    raise AssertionError(f"done twice: {arguments}")


def study(mini: Path, folder: Path, *words: str) -> int:
    return main(["study", str(mini), *QUICK, "--dir", str(folder), *words])


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "study.json").read_text())
    return found


# ---------------------------------------------------------------- a whole one


def test_a_study_trains_evaluates_compares_and_reports(done: Path, mini: Path) -> None:
    evaluation = read_results(done / "evaluation")
    lines = {(row.encoding, row.extension) for row in evaluation.rows}
    assert lines == {("rope", "none"), ("rope", "ntk"), ("alibi", "none")}
    assert {run["encoding"] for run in evaluation.runs} == {"rope", "alibi"}  # none trained twice
    for name in ("report.md", "report.html", "results.csv", "tb"):
        assert (done / "evaluation" / name).exists()
    compared = json.loads((done / "compare.json").read_text())
    assert compared["baseline"] == "rope"
    assert "alibi" in (done / "compare.md").read_text()
    report = (done / "evaluation" / "report.md").read_text()
    assert "## Differences from the baseline" in report
    assert f"| command | posbench study {mini} " in report
    found = record(done)
    assert found["status"] == "finished"
    assert found["missing"] == []
    assert found["runs"] == {"planned": 2, "finished": 2}
    assert found["command"][:3] == ["posbench", "study", str(mini)]
    assert set(found["seconds"]) == {"train", "evaluate", "merge", "compare"}
    page = (done / "study.md").read_text()
    assert "# Which is better?" in page
    assert "2 of 2 runs" in page


def test_what_a_study_keeps_names_no_folder_above_it(done: Path) -> None:
    """study.yaml names the text trained on, as its author did."""
    asked = read_results(done / "evaluation").provenance["evaluations"]
    runs = sorted(run.split()[0] for each in asked for run in each["asked"]["runs"])
    assert runs == ["runs/0-rope", "runs/0-rope", "runs/1-alibi"]


def test_the_file_it_leaves_is_the_study(done: Path, mini: Path) -> None:
    left = studyfile.load(done / "study.yaml")
    words = [word for word in QUICK if "calibrate" not in word]
    assert left.identity() == studyfile.changed(studyfile.load(mini), words).identity()
    assert left.title == "Which is better?"


def test_a_finished_study_does_nothing_again(
    again: Path, mini: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = ("results.json", "report.html")
    before = {name: (again / "evaluation" / name).stat().st_mtime_ns for name in kept}
    assert study(mini, again) == Exit.OK
    assert before == {name: (again / "evaluation" / name).stat().st_mtime_ns for name in kept}
    said = capsys.readouterr()
    assert "2 of 2 runs are done" in said.out
    assert "estimate" not in said.err
    assert record(again)["seconds"].keys() == {"train", "evaluate", "merge", "compare"}


def test_only_what_is_not_done_is_done(
    again: Path, mini: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that was cut short is made again; the other two are not, and no run is."""
    (again / "parts" / "rope-ntk" / "results.json").unlink()
    seen: list[Any] = []

    class Stopped:
        stopped = 2  # SIGINT

        def __init__(self, jobs: list[Any], slots: list[Any]) -> None:
            seen.extend(jobs)

        def run(self) -> list[Any]:
            return []

    monkeypatch.setattr(studyrun, "Pool", Stopped)
    assert study(mini, again) == Exit.INTERRUPTED
    assert [job.name for job in seen] == ["rope-ntk"]
    assert f"runs=['{again}/runs/0-rope']" in seen[0].command
    assert record(again)["status"] == "interrupted"


def test_a_study_goes_on_without_a_run_that_failed(
    again: Path, mini: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(again / "runs" / "1-alibi")
    asked: list[list[str]] = []

    def failing(_command: str, words: list[str]) -> None:
        asked.append(words)
        raise SweepFailedError("1 of 2 jobs failed.")

    monkeypatch.setattr(apps, "run_app", failing)
    assert study(mini, again) == Exit.FAILED
    (words,) = asked  # the sweep itself keeps what it has
    assert f"hydra.sweep.dir={again / 'runs'}" in words
    assert {row.encoding for row in read_results(again / "evaluation").rows} == {"rope"}
    assert "alibi seed 0" in capsys.readouterr().err.splitlines()[-1]
    assert record(again)["status"] == "incomplete"
    assert "Missing: 1 of 2 runs (alibi seed 0)." in (again / "study.md").read_text()


def test_a_comparison_that_fails_is_missing_and_the_report_stays(
    again: Path, mini: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_words: list[str]) -> None:
        raise SweepFailedError("nothing alike")

    for path in again.glob("compare.*"):
        path.unlink()
    monkeypatch.setattr(comparing, "compare", failing)
    assert study(mini, again) == Exit.FAILED
    assert record(again)["missing"] == ["the comparison (nothing alike)"]
    assert (again / "evaluation" / "report.html").exists()


# ---------------------------------------------------------------- what is refused


def test_another_study_in_the_folder_is_refused_with_the_difference(
    again: Path, mini: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (again / "study.json").read_bytes()
    assert study(mini, again, "seed=0,1", "eval.ratios=[1]") == Exit.USER
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "seed=None there, 0,1 here" in said
    assert "evaluate eval.ratios=None there, [1] here" in said
    assert (again / "study.json").read_bytes() == before


def test_a_folder_of_something_else_is_refused(mini: Path, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    assert study(mini, tmp_path) == Exit.USER
    assert [each.name for each in tmp_path.iterdir()] == ["letter.txt"]


MISTAKES = [
    (["nothing"], "is not a study"),
    (["seed_clams"], "Did you mean posbench study seed_claims?"),
    (["none.yaml"], "no such file"),
    ([], "say which study"),
    (["MINI", "seed_claims"], "takes one study"),
    (["MINI", "--dri=x"], "Did you mean --dir?"),
    (["MINI", "--dir"], "--dir needs a folder"),
    (["MINI", "--dir", "--check"], "--dir needs a folder"),
    (["MINI", "--dir", "MINI", "--check"], "is a file. Choose another --dir"),
    (["MINI", "eval.ratios=[1,2"], "eval.ratios=[1,2 is not valid"),
    (["MINI", "data.path=*x"], "data.path=*x is not valid"),
    (["MINI", "seed=0,0"], "twice"),
    (["MINI", "threads=1000000"], "threads=1000000 is too large"),
    (["MINI", "hydra.launcher.on_failure=perhaps"], "hydra.launcher.on_failure=perhaps"),
    (["MINI", "context=100000"], "context=100000"),
    (["MINI", "trian.steps=5"], "trian.steps is not a setting"),
    (["MINI", "train.steps=x"], "train.steps must be a whole number"),
    (["MINI", "eval.ratios=[0]"], "eval.ratios holds 0"),
    (["MINI", "eval.ratios=1,2"], "takes one value"),
    (["MINI", "extension=yarn"], "extension is not a setting that a study takes"),
    (["MINI", "baseline=rpe"], "Did you mean baseline=rope?"),
    (["MINI", "model.heads=3"], "model.heads=3"),
    (["MINI", "calibrate=no"], "calibrate must be true or false"),
    (["MINI", "plugins=gone.py"], "no such file"),
]


@pytest.mark.parametrize(("words", "expected"), MISTAKES, ids=[str(words) for words, _ in MISTAKES])
def test_a_mistake_is_one_line_and_leaves_nothing(
    words: list[str], expected: str, mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POSBENCH_OUTPUTS", str(tmp_path / "outputs"))
    assert main(["study", *(str(mini) if word == "MINI" else word for word in words)]) == Exit.USER
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert expected in said.err
    assert list(tmp_path.iterdir()) == []


FILES = [
    ("a: [", "line 1: not valid YAML"),
    ("train: {seed: 0}\ntrain: {seed: 1}", "line 2: not valid YAML: train stands there twice"),
    ("train: {train.validate_ratios: &a [*a]}", "a list or mapping that holds itself"),
    ('train: {seed: 0}\nevaluate: {extensions: {"": all}}', "is not an extension"),
    ("? [train]\n: {seed: 0}", "line 1: not valid YAML"),
    ("title: x", "a study says what to train"),
    ("train: {seed: 0}\nbaselin: rope", "Did you mean baseline?"),
    ("train: {sed: 0}", "sed is not a key of train. Did you mean seed?"),
    ("train: 5", "train must be a mapping"),
    ("train: {seed: []}", "train.seed is an empty list"),
    ("train: [{name: a/b}]", "names a folder"),
    ("train: [{name: a}, {name: a}]", "the same name"),
    ("train: {seed: 0}\nevaluate: {runs: x}", "evaluate.runs is the study's own"),
    ("train: {seed: 0}\nevaluate: {ratios: [1]}", "Did you mean eval.ratios?"),
    ("train: {seed: 0}\nevaluate: {extensions: {yarm: all}}", "Did you mean yarn?"),
    ("train: {seed: 0}\nevaluate: {extensions: {yarn: [roppe]}}", "Did you mean rope?"),
]


@pytest.mark.parametrize(("text", "expected"), FILES, ids=[text for text, _ in FILES])
def test_a_mistake_in_a_file_names_the_file_and_the_key(
    text: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    assert main(["study", str(tmp_path / "mine.yaml")]) == Exit.USER
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(tmp_path / "mine.yaml") in said
    assert expected in said


# ---------------------------------------------------------------- before it starts


def test_check_says_what_it_would_do_and_leaves_nothing(
    mini: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert study(mini, tmp_path / "new", "--check", "seed=0,1,2") == Exit.OK
    said = capsys.readouterr().out
    assert "6 runs" in said
    assert "evaluate   9 times" in said
    assert "disk" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("answer", "starts"), [("y", True), ("", False)])
def test_whoever_is_at_a_terminal_is_asked(
    answer: str, starts: bool, mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def train(*_: Any) -> None:
        raise SweepFailedError("stop here")

    def reply(question: str) -> str:
        asked.append(question)
        return answer

    monkeypatch.setattr(apps, "run_app", train)
    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda _: True})())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", reply)
    assert study(mini, tmp_path / "new") == (Exit.FAILED if starts else Exit.OK)
    assert len(asked) == 1
    assert (tmp_path / "new").exists() == starts


# ---------------------------------------------------------------- the files that are there


@cache
def planned(name: str) -> Plan:
    """A study of posbench; of all encodings, which other tests compose, a few."""
    words = ["encoding=rope,alibi,swan"] if name == "everything" else []
    return plan_of(studyfile.changed(studyfile.load(studyfile.find(name)), words))


@pytest.mark.parametrize("name", studyfile.studies())
def test_a_study_of_posbench_is_planned_as_it_says(name: str) -> None:
    plan, study = planned(name), planned(name).study
    assert study.question
    assert all(len(block.values["seed"]) >= 3 for block in study.train)  # enough to infer from
    assert len(plan.runs) == study.runs
    pairs = {(part.runs[0].scheme, part.extension) for part in plan.parts}
    assert {scheme for scheme, _ in pairs} == set(study.encodings)
    assert {extension for _, extension in pairs} == set(study.extensions)  # none fits nothing


def test_the_studies_are_listed_with_their_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "studies", "--json"]) == Exit.OK
    rows = {row["id"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == {"seed_claims", "kerple_table", "alibi_table", "extensions", "everything"}
    assert rows["seed_claims"]["runs"] == 15
    assert rows["everything"]["runs"] == 3 * len(options("encoding"))


def test_the_seeds_study_trains_what_the_quickstart_trains() -> None:
    plan = planned("seed_claims")
    text = (configs_folder() / "experiment" / "quickstart.yaml").read_text()
    assert f"encoding: {','.join(plan.study.encodings)}\n" in text
    quickstart = configure("train", "experiment=quickstart", "encoding=alibi")
    assert isinstance(quickstart, TrainSettings)
    assert fingerprint(quickstart) in {run.key for run in plan.runs}


# ---------------------------------------------------------------- words and files


def loaded(text: str, tmp_path: Path, *words: str) -> studyfile.Study:
    (tmp_path / "mine.yaml").write_text(text)
    return studyfile.changed(studyfile.load(tmp_path / "mine.yaml"), words)


def test_a_list_is_swept_and_a_list_in_it_is_one_value(tmp_path: Path) -> None:
    text = "train: {seed: [0, 1], train.validate_ratios: [[1, 2]], compile: on, threads: null}"
    study = loaded(text, tmp_path)
    assert study.train[0].words() == [
        "seed=0,1", "train.validate_ratios=[1,2]", "compile=on", "threads=null",
    ]  # fmt: skip
    assert study.runs == 2
    assert yaml.safe_load(studyfile.dump(study.plain()))["train"] == {
        "seed": [0, 1], "train.validate_ratios": [[1, 2]], "compile": "on", "threads": None,
    }  # fmt: skip


def test_the_command_line_wins_and_each_word_finds_its_place(tmp_path: Path) -> None:
    text = "train: {seed: 0, train: {steps: 5}}\nevaluate: {eval.ratios: [1, 2]}"
    words = ["train.steps=9,10", "eval.ratios=[1,4]", "device=cpu", "data.path=a b.txt"]
    study = loaded(text, tmp_path, *words)
    assert study.train[0].words() == [
        "seed=0", "train.steps=9,10", "device=cpu", "data.path='a b.txt'",
    ]  # fmt: skip
    assert study.evaluate_words("pi extension.factor=2") == [
        "eval.ratios=[1,4]", "device=cpu", "extension=pi", "extension.factor=2",
    ]  # fmt: skip


def test_an_encoding_of_ones_own_is_trained_beside_the_others(
    mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new-encoding", "mine"]) == Exit.OK
    with plugins.loaded([Path("mine.py")]):
        study = studyfile.changed(studyfile.load(mini), [], ["mine"])
        assert study.train[0].encodings == ["rope", "alibi", "mine"]
        plan = plan_of(study)
        assert [part.name for part in plan.parts] == [
            "rope-none", "rope-ntk", "alibi-none", "mine-none",
        ]  # fmt: skip
        said = studyfile.changed(studyfile.load(mini), ["encoding=rope,mine"], ["mine"])
        assert said.train[0].encodings == ["rope", "mine"]


def test_two_parts_of_the_training_have_sweeps_of_their_own(mini: Path, tmp_path: Path) -> None:
    tree = yaml.safe_load(mini.read_text())
    blocks = [tree["train"] | {"name": f"L{n}", "context": n} for n in (16, 32)]
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(tree | {"train": blocks}))
    study = studyfile.load(tmp_path / "two.yaml")
    plan = plan_of(study)
    assert [part.name for part in plan.parts] == [
        "L16-rope-none", "L16-rope-ntk", "L16-alibi-none",
        "L32-rope-none", "L32-rope-ntk", "L32-alibi-none",
    ]  # fmt: skip
    assert "L16: context" in study.identity()
