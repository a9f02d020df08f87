"""posbench runs: what is listed, what differs, and that nothing is deleted but what may be."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from posbench.cli import inventory, main
from posbench.cli import runs as command
from posbench.config import TrainSettings
from posbench.config.encodings import AlibiConfig
from posbench.runs import FORMAT, Lock, fingerprint
from posbench.saved import to_dict
from posbench.sweeps import Entry, State, Sweep, write_job


def make_run(folder: Path, status: str = "finished", **changes: Any) -> Path:
    """A run's folder with all but its checkpoint."""
    settings = TrainSettings()
    for key, value in changes.items():
        setattr(settings, key, value)
    folder.mkdir(parents=True)
    manifest = {
        "format": FORMAT,
        "status": status,
        "run_id": f"{settings.encoding.name}-s{settings.seed}-0",
        "settings": to_dict(settings),
        "started": "2026-11-30T00:00:00.000+00:00",
        "posbench": "0.1.0",
        "python": "3.11.7",
        "corpus": {"fingerprint": "f", "vocabulary": 256},
        "files": {},
    }
    (folder / "run.json").write_text(json.dumps(manifest))
    (folder / "job.log").write_bytes(b"x" * 1000)
    return folder


def make_sweep(folder: Path, *states: State) -> Path:
    """A sweep with a job in each of these states, seeds 0, 1, ..."""
    jobs = []
    for seed, state in enumerate(states):
        job = Entry(f"{seed}-rope", fingerprint(TrainSettings(seed=seed)), f"seed={seed}", state)
        jobs.append(job)
        if state is not State.waiting:
            status = "finished" if state is State.done else "running"
            write_job(make_run(folder / job.folder, status, seed=seed), job, [], [])
    Sweep(folder, "train", ["-m"], jobs=jobs).save()
    return folder


def make_evaluation(folder: Path) -> Path:
    folder.mkdir(parents=True)
    asked = {"eval.ratios": [1.0, 2.0]}
    record = {"provenance": {"evaluations": [{"asked": asked}], "dtype": "float32"}, "rows": []}
    (folder / "results.json").write_text(json.dumps(record))
    return folder


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default folder, empty, below the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POSBENCH_OUTPUTS", "out")
    return Path("out")


def test_how_each_thing_stands(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(out / "a")
    make_run(out / "b", "running", seed=3)
    make_run(out / "c", "diverged", encoding=AlibiConfig())
    live = make_run(out / "d", "running")
    make_sweep(out / "s", State.done, State.killed, State.timed_out, State.running, State.waiting)
    make_sweep(out / "t", State.done, State.done)
    make_evaluation(out / "e")
    (out / "mine").mkdir()
    (out / "mine" / "notes.txt").write_text("not posbench's")
    (out / "link").symlink_to(out.resolve() / "a")
    lock = Lock(live)
    assert main(["runs", "--json"]) == 0
    found = {Path(row["path"]).name: row for row in json.loads(capsys.readouterr().out)}
    lock.release()
    assert {name: (row["kind"], row["status"]) for name, row in found.items()} == {
        "a": ("run", "finished"),
        "b": ("run", "unfinished"),
        "c": ("run", "diverged"),
        "d": ("run", "running"),
        "s": ("sweep", "unfinished"),
        "t": ("sweep", "finished"),
        "e": ("evaluation", "finished"),
    }
    jobs = [job["status"] for job in found["s"]["jobs"]]
    assert jobs == ["finished", "killed", "timed out", "unfinished", "not started"]
    assert (found["c"]["encoding"], found["b"]["seed"]) == ("alibi", "3")
    assert found["a"]["bytes"] == sum(path.stat().st_size for path in (out / "a").iterdir())
    assert main(["runs", str(out / "s")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "unfinished 1/5" in lines[1]
    assert len(lines) == 7  # the head, the sweep, its jobs


def test_what_differs(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, same = make_run(out / "a"), make_run(out / "b")
    other = make_run(out / "c", seed=1, encoding=AlibiConfig())
    assert main(["runs", "diff", str(one), str(same)]) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert main(["runs", "diff", str(one), str(other)]) == 0
    told = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert told["seed"] == ["0", "->", "1"]
    assert told["encoding.name"] == ["rope", "->", "alibi"]
    assert {key.split(".")[0] for key in told} == {"seed", "encoding"}
    make_sweep(out / "s", State.done)
    make_sweep(out / "t", State.done, State.done)
    assert main(["runs", "diff", str(out / "s"), str(out / "t")]) == 0
    assert capsys.readouterr().out == "job seed=1  (not there) -> asked for\n"
    for words, says in {f"{one}": "takes two", f"{one} {out / 's'}": "cannot be compared",
                        f"{one} nowhere": "nowhere does not exist"}.items():  # fmt: skip
        assert main(["runs", "diff", *words.split()]) == 2
        said = capsys.readouterr().err
        assert says in said
        assert said.count("\n") == 1


def age(folder: Path, days: float) -> None:
    then = time.time() - days * 86400
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (then, then))


def left(out: Path) -> set[str]:
    return {str(path.parent.relative_to(out)) for path in out.rglob("run.json")}


def test_filters_take_jobs_and_whole_sweeps_only_if_nothing_in_them_is_kept(out: Path) -> None:
    make_run(out / "done")
    make_run(out / "begun", "interrupted")
    make_run(out / "bad", "diverged")
    make_sweep(out / "s", State.done, State.killed, State.stopped, State.waiting)
    make_sweep(out / "t", State.failed, State.failed)
    assert main(["runs", "prune", "--failed", "--yes"]) == 0
    assert left(out) == {"done", "begun", "s/0-rope", "s/2-rope"}
    assert not (out / "t").exists()
    age(out / "s", 8)
    assert main(["runs", "prune", "--unfinished", "--older-than", "7d", "--yes"]) == 0
    assert left(out) == {"done", "begun", "s/0-rope"}
    assert main(["runs", "prune", "--older-than=1w", "--yes"]) == 0
    assert left(out) == {"done", "begun"}
    assert main(["runs", "prune", "--unfinished", "--yes"]) == 0
    assert left(out) == {"done"}


@pytest.mark.parametrize(("answer", "kept"), [("y", False), ("", True), ("n", True)])
def test_a_person_is_asked(
    answer: str,
    kept: bool,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = make_run(out / "a")
    monkeypatch.setattr(command.sys.stdin, "isatty", lambda: True, raising=False)
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or answer)
    assert main(["runs", "prune", str(run)]) == 0
    assert run.exists() == kept
    assert asked[0].startswith("delete 1 run (")
    assert str(run) in capsys.readouterr().out  # the list comes first


def test_without_anybody_to_ask_nothing_is_deleted(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(out / "a")
    assert main(["runs", "prune", str(run)]) == 2
    assert "--yes" in capsys.readouterr().err
    assert run.exists()


def test_what_is_never_deleted(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, sweep = make_run(out / "a"), make_sweep(out / "s", State.done, State.killed)
    mine = make_run(out / "mine")
    (mine / "notes.txt").write_text("my own")
    (out / "plain").mkdir()
    (out / "link").symlink_to(run.resolve())
    outside = make_run(Path("outside"))
    linked = make_sweep(out / "linked", State.waiting)
    (linked / "0-rope").symlink_to(outside.resolve())
    live = Lock(sweep / "1-rope")
    before = sorted(Path().rglob("*"))
    capsys.readouterr()
    for path, says in {
        mine: "holds notes.txt, which posbench did not write",
        out / "plain": "is no run, sweep or evaluation",
        out / "link": "is a link",
        linked: "holds 0-rope",
        out: "is no run, sweep or evaluation",
        out / "nowhere": "does not exist",
        sweep: "1-rope is in use by a living process",
    }.items():
        assert main(["runs", "prune", str(run), str(path), "--yes"]) == 2
        said = capsys.readouterr().err
        assert says in said
        assert said.count("\n") == 1
    assert {path for path in Path().rglob("*") if path.name != ".lock"} == {
        path for path in before if path.name != ".lock"
    }
    assert main(["runs", "prune", "--failed", "--yes"]) == 0  # the live job is not among them
    assert (sweep / "1-rope").exists()
    live.release()
    assert main(["runs", "prune", str(sweep), str(sweep / "0-rope"), "--yes"]) == 0
    assert not sweep.exists()


@pytest.mark.parametrize(
    "words",
    [
        "prune",
        f"prune --older-than {'9' * 400}d",
        "prune --older-than 7",
        "prune --older-than",
        "prune --old",
        "--jsn",
        "x",
    ],
)
def test_words_that_cannot_be_meant(
    words: str, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(out / "a")
    assert main(["runs", *words.split()]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert left(out) == {"a"}


def test_places_that_overlap_give_each_thing_once(out: Path) -> None:
    sweep = make_sweep(out / "s", State.done, State.failed)
    places = [out, sweep, sweep / "1-rope", Path.cwd() / out]
    assert [item.path for item in inventory.items(places)] == [out / "s"]
    words = ["runs", "prune", "--failed", "--yes", *map(str, places)]
    assert main(words) == 0
    assert left(sweep) == {"0-rope"}


def test_a_damaged_record_is_listed_not_fatal(out: Path) -> None:
    (out / "r").mkdir(parents=True)
    (out / "r" / "run.json").write_text("{")
    (out / "s").mkdir()
    (out / "s" / "sweep.json").write_text('{"format": 1, "jobs": [{"folder": "../x"}]}')
    assert {item.status for item in inventory.items()} == {"unreadable"}
