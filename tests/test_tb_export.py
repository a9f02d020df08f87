"""`posbench tb-export`: what TensorBoard shows, rebuilt from the records, is what was seen live."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_jobs import begin

from posbench.cli import main
from posbench.errors import Exit
from posbench.jobs.train import run_training
from posbench.runs import Lock

SUB_RUNS = {
    "learned-seed0", "learned-seed1", "rope-seed0", "rope-seed1", "mean/learned", "mean/rope",
    "results",
}  # fmt: skip


@pytest.fixture
def copied(swept: Path, tmp_path: Path) -> Path:
    """The same, for tests that change it."""
    return Path(shutil.copytree(swept, tmp_path / "copy"))


def shown(board: Path) -> dict[str, dict[str, Any]]:
    """Everything TensorBoard reads: sub-run -> tag -> points (step, value, time), or contents."""
    folders = {file.parent for file in board.rglob("*tfevents*")}
    return {str(folder.relative_to(board)): _read(folder) for folder in sorted(folders)}


def _read(folder: Path) -> dict[str, Any]:
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    tags = reader.Tags()
    found: dict[str, Any] = {
        tag: [(e.step, e.value, e.wall_time) for e in reader.Scalars(tag)]
        for tag in tags["scalars"]
    }
    for tag in tags["tensors"]:
        events = reader.Tensors(tag)
        found[tag] = [(e.step, e.tensor_proto.SerializeToString()) for e in events]
    told = reader.summary_metadata.items()
    return found | {
        tag: metadata.plugin_data.content for tag, metadata in told if tag.startswith("_hparams_")
    }


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fails(capsys: pytest.CaptureFixture[str], *words: object, code: int = Exit.USER) -> str:
    """The one line that a refused export ends with."""
    capsys.readouterr()
    assert main(["tb-export", *map(str, words)]) == code
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1, err
    return err


# ---------------------------------------------------------------- the same as live


def test_a_rebuilt_run_is_the_one_seen_live(copied: Path) -> None:
    run = copied / "train" / "2-rope"
    before = shown(run / "tb")
    assert list(before) == ["rope-seed0"]
    curves = before["rope-seed0"]
    assert [step for step, *_ in curves["train/loss"]] == list(range(1, tiny.STEPS + 1))
    assert {"val/nll_1x", "val/ppl_1x", "val_by_ratio/nll_2x", "val_by_ratio/ppl_2x"} <= set(curves)
    assert main(["tb-export", str(run)]) == Exit.OK
    assert shown(run / "tb") == before


def test_a_rebuilt_evaluation_is_the_one_seen_live(copied: Path) -> None:
    before = shown(copied / "eval" / "tb")
    assert set(before) == SUB_RUNS
    assert main(["tb-export", str(copied / "eval")]) == Exit.OK
    assert shown(copied / "eval" / "tb") == before


def test_no_tag_of_training_is_one_of_the_evaluation(swept: Path) -> None:
    """A step is an optimizer step in the one and a length in the other."""
    train = {tag for run in shown(swept / "train").values() for tag in run}
    measured = {tag for run in shown(swept / "eval" / "tb").values() for tag in run}
    assert train & measured == {"custom_scalars__config__"}
    points = shown(swept / "eval" / "tb")["rope-seed0"]["by_length/ppl_controlled"]
    assert [step for step, *_ in points] == [16, 32, 64]


def test_a_board_that_was_lost_comes_back(copied: Path) -> None:
    board = copied / "eval" / "tb"
    before = shown(board)
    shutil.rmtree(board)
    for run in (copied / "train").iterdir():
        shutil.rmtree(run / "tb")
    assert main(["tb-export", str(copied)]) == Exit.OK
    assert shown(board) == before
    assert set(shown(copied / "train" / "3-rope" / "tb")) == {"rope-seed1"}


def test_a_run_that_was_killed_and_resumed_is_rebuilt_as_it_ended(
    swept: Path, tmp_path: Path
) -> None:
    settings = tiny.small(swept / "corpus", checkpoint_every=7)
    begin(settings, tmp_path / "run", until=10)
    run_training(settings, tmp_path / "run", [])
    live = shown(tmp_path / "run" / "tb")
    assert [step for step, *_ in live["rope-seed0"]["train/loss"]] == list(range(1, 21))
    assert main(["tb-export", str(tmp_path / "run")]) == Exit.OK
    assert shown(tmp_path / "run" / "tb") == live


def test_exporting_twice_doubles_nothing(copied: Path) -> None:
    for _ in range(2):
        assert main(["tb-export", str(copied / "eval")]) == Exit.OK
    boards = [path.parent for path in (copied / "eval" / "tb").rglob("*tfevents*")]
    assert len(boards) == len(set(boards)) == len(SUB_RUNS)


# ---------------------------------------------------------------- into one folder


def test_out_holds_all_with_a_legend_of_its_own(
    swept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(swept)
    out = tmp_path / "all"
    for words in (["--out", str(out)], [f"--out={out}"]):  # the second replaces the first
        assert main(["tb-export", str(swept), *words]) == Exit.OK
        trained = {f"train/{name}" for name in SUB_RUNS if "seed" in name}
        assert set(shown(out)) == trained | {f"eval/{name}" for name in SUB_RUNS}
    assert "4 runs, 1 evaluation" in capsys.readouterr().out
    assert files(swept) == before
    assert shown(out)["train/rope-seed1"] == shown(swept / "train" / "3-rope/tb")["rope-seed1"]
    assert shown(out / "eval") == shown(swept / "eval" / "tb")
    assert len(list(out.rglob("*tfevents*"))) == 4 + len(SUB_RUNS)


def test_runs_of_one_name_keep_apart(copied: Path, tmp_path: Path) -> None:
    shutil.copytree(copied / "train" / "2-rope", copied / "again" / "0-rope")
    shutil.copytree(copied / "train" / "2-rope", copied / "more" / "0-rope")
    assert main(["tb-export", str(copied), "--out", str(tmp_path / "all")]) == Exit.OK
    names = {name for name in shown(tmp_path / "all") if name.startswith("train/rope-seed0")}
    assert names == {
        "train/rope-seed0-0-rope", "train/rope-seed0-0-rope-2", "train/rope-seed0-2-rope",
    }  # fmt: skip


def test_several_evaluations_keep_apart_and_a_merged_one_stands_for_its_jobs(
    copied: Path, tmp_path: Path
) -> None:
    for job in ("0-none", "1-yarn"):
        shutil.copytree(copied / "eval", copied / "merged" / job)
    shutil.copy(copied / "eval" / "results.json", copied / "merged")
    paths = [str(copied / "merged"), str(copied / "eval")]
    assert main(["tb-export", *paths, "--out", str(tmp_path / "all")]) == Exit.OK
    groups = {name.split("/")[1] for name in shown(tmp_path / "all")}
    assert groups == {"merged", "eval"}


def test_a_run_that_is_still_trained_can_be_exported_elsewhere(
    copied: Path, tmp_path: Path
) -> None:
    lock = Lock(copied / "train" / "2-rope")
    try:
        words = [str(copied / "train" / "2-rope"), "--out", str(tmp_path / "all")]
        assert main(["tb-export", *words]) == Exit.OK
    finally:
        lock.release()


# ---------------------------------------------------------------- nothing else is touched


def test_files_of_others_stay_where_they_are(copied: Path) -> None:
    board = copied / "eval" / "tb"
    (board / "notes.txt").write_text("mine")
    (board / "rope-seed0" / "events.out.tfevents.1.host").write_bytes(b"of another program")
    (board / "old").mkdir()
    assert main(["tb-export", str(copied / "eval")]) == Exit.OK
    assert (board / "notes.txt").read_text() == "mine"
    assert (board / "rope-seed0" / "events.out.tfevents.1.host").exists()
    assert (board / "old").is_dir()
    assert not list(copied.rglob(".tb-*"))


def test_a_live_run_is_refused_and_the_others_are_left_alone(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(copied)
    lock = Lock(copied / "train" / "3-rope")
    try:
        line = fails(capsys, copied / "train")
    finally:
        lock.release()
    assert f"{copied / 'train' / '3-rope'} is in use" in line
    assert "--out DIR" in line
    changed = {path for path, data in files(copied).items() if before.get(path) != data}
    assert {Path(path).name for path in changed} <= {".lock"}


@pytest.mark.parametrize("place", ["full", "train/2-rope/tb", "train/2-rope", "corpus/0000.txt"])
def test_out_that_holds_anything_else_is_refused(
    copied: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    (copied / "full" / "deep").mkdir(parents=True)
    (copied / "full" / "deep" / "thesis.tex").write_text("mine")
    before = files(copied)
    line = fails(capsys, copied / "eval", "--out", copied / place)
    assert f"--out {copied / place}" in line
    assert files(copied) == before


def test_a_record_that_cannot_be_drawn_loses_nothing(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied / "train" / "2-rope"
    with (run / "metrics.jsonl").open("a") as journal:
        journal.write('{"step": 21, "loss": "low"}\n')
    before = shown(run / "tb")
    assert "metrics.jsonl" in fails(capsys, run)
    assert shown(run / "tb") == before
    assert not list(run.glob(".tb-*"))


# ---------------------------------------------------------------- what cannot be read


def test_nothing_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "note.txt").write_text("")
    assert "nothing to show" in fails(capsys, tmp_path / "empty")
    assert "nothing to show" in fails(capsys, tmp_path / "note.txt")
    assert "no such folder" in fails(capsys, tmp_path / "absent")
    assert "takes runs, sweeps or evaluations" in fails(capsys)
    assert "takes --out DIR once" in fails(capsys, tmp_path, "--out")
    assert "takes --out DIR once" in fails(capsys, tmp_path, "--out=a", "--out=b")
    assert "has no option --into" in fails(capsys, tmp_path, "--into")
    assert not list(tmp_path.glob("**/.lock"))


def test_what_is_damaged_is_told_and_the_rest_is_written(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / "train" / "0-learned" / "run.json").write_text("{")
    shutil.rmtree(copied / "train" / "2-rope" / "tb")
    capsys.readouterr()
    assert main(["tb-export", str(copied / "train")]) == Exit.CHECKPOINT
    captured = capsys.readouterr()
    assert "3 runs, 0 evaluations" in captured.out
    assert "0-learned/run.json cannot be read" in captured.err
    assert shown(copied / "train" / "2-rope" / "tb")


@pytest.mark.parametrize("text", ["{", "[]", '{"schema_version": 99}', '{"schema_version": 1}'])
def test_an_evaluation_that_is_damaged_is_one_line(
    copied: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (copied / "eval" / "results.json").write_text(text)
    before = files(copied / "eval" / "tb")
    assert "results.json was not written by posbench" in fails(capsys, copied / "eval")
    assert files(copied / "eval" / "tb") == before


def test_an_encoding_of_ones_own_needs_no_plugin(copied: Path) -> None:
    """Curves need no code: the run of a plugin is rebuilt although the plugin is not loaded."""
    run = copied / "train" / "2-rope"
    manifest = json.loads((run / "run.json").read_text())
    manifest["settings"]["encoding"] |= {"name": "mine", "source": "0" * 64}
    (run / "run.json").write_text(json.dumps(manifest))
    assert main(["tb-export", str(run)]) == Exit.OK
    assert set(shown(run / "tb")) == {"mine-seed0"}


def test_an_export_needs_no_torch(swept: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from posbench.cli import main\n"
        f"assert main(['tb-export', {str(swept)!r}, '--out', {str(tmp_path / 'all')!r}]) == 0\n"
        "assert not {'torch', 'tensorflow', 'hydra'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tiny_settings_are_what_the_records_say(swept: Path) -> None:
    """The HParams tab reads them from results.json alone."""
    (run, *_) = json.loads((swept / "eval" / "results.json").read_text())["runs"]
    config = tiny.small(swept / "corpus", "learned")
    sizes = {key: getattr(config.model, key) for key in ("layers", "width", "heads")}
    trained = dataclasses.asdict(config.train)
    known = {key: trained[key] for key in ("steps", "batch_size", "lr", "schedule")}
    assert run["training"] == {"encoding_settings": "", **sizes, **known}
