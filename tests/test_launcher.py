"""Sweeps: a process per job, failures isolated, signals passed on, nobody left behind."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

from posbench import sweeps
from posbench.cli import apps, launcher, main, plans, pool
from posbench.cli.pool import Job, Pool
from posbench.cli.slots import cores, slots, visible_gpus
from posbench.cli.sweepview import JobProgress, SweepView, table
from posbench.corpus import Corpus, load_corpus
from posbench.errors import DivergedError, UserError
from posbench.jobs.train import train
from posbench.runs import Lock
from posbench.sweeps import Entry, State

# Stands in for `python -m posbench`: notes how it was called, then does what its seed says.
FAKE = """
import json, os, pathlib, signal, sys, time
words = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
folder = pathlib.Path(words["hydra.run.dir"].strip("'"))
notes = pathlib.Path("calls") / folder.name
notes.mkdir(parents=True, exist_ok=True)
kept = {k: os.environ.get(k) for k in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")}
(notes / "call.json").write_text(json.dumps({"words": sys.argv[1:], "env": kept}))
with open("started", "a") as file:
    file.write(folder.name + " ")
pathlib.Path(os.environ["POSBENCH_PROGRESS"]).write_text(
    '{"title": "training", "done": 1, "total": 2, "note": ""}')

def wait(*_):
    (notes / "ready").touch()
    time.sleep(60)

def stop(number, _):
    (notes / "saved").write_text(signal.Signals(number).name)
    sys.exit(128 + number)

match "" if "FIXED" in os.environ else words.get("seed"):
    case "1":
        sys.exit("posbench: the loss is not finite at step 3.")
    case "2":
        os.kill(os.getpid(), signal.SIGKILL)
    case "9":
        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGTERM, stop)
        wait()
    case "8":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        wait()
    case "10":
        while not any(pathlib.Path("calls").glob("*/ready")):
            time.sleep(0.05)
        sys.exit(1)
    case "20":
        {}["told to raise"]
    case "21":
        sys.exit(5)
    case "22":
        sys.exit(6)
    case "23":
        sys.exit(7)
    case "24":
        sys.exit(0)
name = "run.json" if sys.argv[1] == "train" else "results.json"
jobs = json.loads((folder.parent / "sweep.json").read_text())["jobs"]
key = next(job["key"] for job in jobs if job["folder"] == folder.name)
(folder / name).write_text(json.dumps({"status": "finished", "settings": {"key": key}}))
"""

# A real posbench process whose jobs are the fake.
DRIVER = """
import sys
from posbench.cli import launcher, main, plans, pool
launcher.PROGRAM = (sys.executable, sys.argv[1])
pool.GRACE_SECONDS = float(sys.argv[2])
sys.exit(main(sys.argv[3:]))
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, and a stand-in for the program that jobs run."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    monkeypatch.setattr(launcher, "PROGRAM", (sys.executable, str(script)))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(plans, "load_corpus", _loaded_once)
    # What the fake leaves is known by the key that it copies, not by settings.
    monkeypatch.setattr(sweeps, "digest", lambda kept: kept["key"])
    monkeypatch.setenv("POSBENCH_OUTPUTS", "out")
    return script


_LOADED: dict[str, Corpus] = {}


def _loaded_once(config: Any) -> Corpus:
    """The default corpus takes seconds to read: once for all tests."""
    if config.name == "text":
        return load_corpus(config)
    if config.name not in _LOADED:
        _LOADED[config.name] = load_corpus(config)
    return _LOADED[config.name]


def call(folder: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((Path("calls") / folder / "call.json").read_text())
    return record


def test_each_job_is_a_command_line_of_its_own(fake: Path) -> None:
    words = ["train", "-m", "encoding=rope,alibi", "seed=0", "hydra.sweep.dir=s"]
    assert main([*words, "hydra.launcher.jobs=2"]) == 0
    assert {path.name for path in Path("s").iterdir()} == {
        ".lock", "multirun.yaml", "sweep.json", "0-rope", "1-alibi",
    }  # fmt: skip
    first = call("0-rope")
    assert first["words"][:3] == ["train", "encoding=rope", "seed=0"]
    assert "hydra.run.dir='s/0-rope'" in first["words"]
    # Threads come through the environment: the job's settings are those of a run by itself.
    assert not any(word.startswith("threads") for word in first["words"])
    assert first["env"]["OMP_NUM_THREADS"] == str(max(1, cores() // 2))


def test_a_job_is_composed_as_a_single_run(fake: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    (own / "experiment").mkdir(parents=True)
    (own / "experiment" / "mine.yaml").write_text(
        "# @package _global_\n# Two seeds\nhydra: {sweeper: {params: {seed: '3,4'}}}\n"
    )
    words = ["train", "--config-dir", str(own), "experiment=mine"]
    assert main(words) == 2  # a sweep that nobody asked to sweep would train one job only
    assert main([*words, "-m", "hydra.sweep.dir=s"]) == 0
    replay = call("1-rope")["words"]
    assert replay[:3] == ["train", "--config-dir", str(own)]
    from posbench.cli import apps

    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apps, "run", lambda *arguments: seen.append(arguments))
        assert main(replay) == 0
    assert [(settings.seed, folder.name) for settings, folder, _ in seen] == [(4, "1-rope")]


def test_an_experiment_may_ask_for_its_sweep(fake: Path) -> None:
    assert main(["train", "experiment=quickstart", "hydra.sweep.dir=s"]) == 0
    names = [path.name for path in sorted(Path("s").iterdir()) if path.is_dir()]
    assert names == ["0-none", "1-sinusoidal", "2-learned", "3-rope", "4-alibi"]


def test_failed_jobs_do_not_stop_the_others(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "-m", "seed=0,1,2,3", "hydra.sweep.dir=s"]) == 1
    assert (Path("calls") / "3-rope" / "call.json").exists()
    said = capsys.readouterr().err
    assert "s: 2 of 4 jobs done" in said
    rows = [line.split(maxsplit=5) for line in said.splitlines() if line.startswith("  ")]
    assert rows[0] == ["job", "status", "exit", "time", "reason"]
    assert [row[:3] for row in rows[1:5]] == [
        ["0-rope", "done", "0"],
        ["1-rope", "failed", "1"],
        ["2-rope", "killed", "-9"],
        ["3-rope", "done", "0"],
    ]
    assert rows[2][5] == "the loss is not finite at step 3."
    assert rows[3][5].startswith("killed by SIGKILL")
    assert said.splitlines()[-1] == "posbench: 2 of 4 jobs failed."


def test_nothing_starts_if_the_last_job_cannot_work(
    fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "-m", "model.heads=4,2,3", "hydra.sweep.dir=s"]) == 2
    assert "job 2 (model.heads=3)" in capsys.readouterr().err
    assert not Path("s").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "context=32,10000000 data=stdlib",
            "job 1 (context=10000000 data=stdlib): context=10000000 needs",
        ),
        (
            "data=text data.path=ten,nowhere",
            "job 1 (data=text data.path=nowhere): data.path=nowhere does",
        ),
        (
            "data=text data.path=ten,two",
            "job 1 (data=text data.path=two): data=text has 2 documents",
        ),
    ],
)
def test_nothing_starts_if_the_text_of_the_last_job_does_not_do(
    words: str, says: str, fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, count in (("ten", 10), ("two", 2)):
        Path(folder).mkdir()
        for number in range(count):
            (Path(folder) / f"{number}.txt").write_text(f"{number} " * 100)
    assert main(["train", "-m", *words.split(), "hydra.sweep.dir=s"]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert not Path("s").exists()


def test_a_corpus_is_read_once_for_all_jobs_and_not_for_runs_that_have_begun(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("mine").mkdir()
    for number in range(10):
        (Path("mine") / f"{number}.txt").write_text(f"{number} " * 200)
    read: list[str] = []

    def load(config: Any) -> Corpus:
        read.append(config.path)
        return load_corpus(config)

    monkeypatch.setattr(plans, "load_corpus", load)
    words = ["train", "-m", "data=text", "data.path=mine", "seed=0,3", "hydra.sweep.dir=s"]
    assert main(words) == 0
    assert read == ["mine"]
    assert main(words) == 0
    assert read == ["mine"]  # what has begun has had its text
    assert main([*words, "overwrite=true"]) == 0
    assert read == ["mine", "mine"]


def test_two_jobs_never_share_a_folder(fake: Path) -> None:
    words = ["train", "-m", "seed=0,1", "hydra.sweep.dir=s", "hydra.sweep.subdir=x"]
    assert main(words) == 2
    assert not Path("s").exists()


def test_evaluations_are_merged_even_if_one_failed(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged: list[Any] = []
    module = type(sys)("posbench.jobs.evaluate")
    module.merge_evaluations = lambda *arguments: merged.append(arguments)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "posbench.jobs.evaluate", module)
    Path("r").mkdir()
    Path("r/run.json").write_text("{}")
    words = ["eval-extrapolate", "-m", "extension=none,ntk,yarn", "runs=r", "hydra.sweep.dir=s"]
    partly = "(folder / 'results.json').write_text('{}'); sys.exit(3)"
    fake.write_text(FAKE.replace("match", f"if 'extension=ntk' in sys.argv: {partly}\nmatch"))
    assert main(words) == 1
    folder = Path("s")
    assert merged == [([folder / "0-none", folder / "1-ntk", folder / "2-yarn"], folder)]


# ---------------------------------------------------------------- the pool itself


def job(tmp_path: Path, number: int, code: str) -> Job:
    return Job(number, tmp_path / f"job{number}", "", (sys.executable, "-c", code))


def test_the_pool_holds_to_its_slots_and_reuses_them(tmp_path: Path) -> None:
    record = tmp_path / "record"
    code = (
        f"import os, time; f = open({str(record)!r}, 'a'); e = os.environ['SLOT'];"
        "f.write('+' + e); f.flush(); time.sleep(0.2); f.write('-' + e)"
    )
    jobs = [job(tmp_path, number, code) for number in range(6)]
    outcomes = Pool(jobs, [{"SLOT": "a"}, {"SLOT": "b"}]).run()
    assert [outcome.code for outcome in outcomes] == [0] * 6
    assert [outcome.job.number for outcome in outcomes] == list(range(6))
    busy: set[str] = set()
    marks = record.read_text()
    for sign, slot in zip(marks[::2], marks[1::2], strict=True):
        assert (slot in busy) == (sign == "-")
        busy ^= {slot}
    assert {slot: marks.count("+" + slot) for slot in "ab"}.keys() == {"a", "b"}
    assert min(marks.count("+a"), marks.count("+b")) >= 1


def test_a_program_that_cannot_start_is_one_failed_job(tmp_path: Path) -> None:
    jobs = [Job(0, tmp_path / "a", "", ("/nowhere/python",)), job(tmp_path, 1, "pass")]
    outcomes = Pool(jobs, [{}]).run()
    assert [outcome.code == 0 for outcome in outcomes] == [False, True]
    assert "/nowhere/python" in outcomes[0].reason


def test_a_log_that_cannot_be_written_is_one_failed_job(tmp_path: Path) -> None:
    (tmp_path / "a").touch()  # a file where its folder goes
    jobs = [Job(0, tmp_path / "a", "", (sys.executable, "-c", "")), job(tmp_path, 1, "pass")]
    outcomes = Pool(jobs, [{}]).run()
    assert [outcome.code == 0 for outcome in outcomes] == [False, True]
    assert str(tmp_path / "a") in outcomes[0].reason


def test_a_job_imports_nothing_that_lies_in_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('the wrong random')")
    (tmp_path / "torch.py").write_text("raise SystemExit('the wrong torch')")
    sweep = (  # as the script `posbench` would, which does not look there
        "import subprocess; from posbench.cli.launcher import PROGRAM;"
        "raise SystemExit(subprocess.run([*PROGRAM, 'list', 'models']).returncode)"
    )
    command = [sys.executable, "-P", "-c", sweep]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_names_are_shown_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with SweepView(1) as view:
        view.show([JobProgress("0-[b]x[/i]", "training", 1, 2, "[/]")], 0)
    assert "0-[b]x[/i]" in screen.getvalue()


def test_what_a_job_leaves_running_is_ended_with_it(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c',"
        f"'import time; time.sleep(60)']); open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid))"
    )
    Pool([job(tmp_path, 0, code)], [{}]).run()
    wait_until(lambda: not alive(int((tmp_path / "pid").read_text())))


@pytest.mark.parametrize("text", ["", "{", '{"title": "x"}'])
def test_half_a_progress_report_reads_as_starting(tmp_path: Path, text: str) -> None:
    (tmp_path / "report").write_text(text)
    assert JobProgress.read("job", tmp_path / "report") == JobProgress("job")
    assert JobProgress.read("job", tmp_path / "none").share == 0


# ---------------------------------------------------------------- signals, in real processes


def alive(pid: int) -> bool:
    """Whether a process exists and is more than an entry waiting to be collected."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def wait_until(holds: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def start(fake: Path, seed: str, grace: float = 30) -> subprocess.Popen[str]:
    text = Path("text")
    text.mkdir()
    for name in ("a", "b", "c"):
        (text / f"{name}.txt").write_text(name * 200)
    words = ["train", "-m", f"seed={seed}", "hydra.sweep.dir=s", "hydra.launcher.jobs=1"]
    words += ["data=text", "data.path=text"]
    driver = [sys.executable, "-c", DRIVER, str(fake), str(grace), *words]
    process = subprocess.Popen(driver, stderr=subprocess.PIPE, text=True)
    wait_until(Path("calls/0-rope/ready").exists)
    return process


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_reaches_the_job_and_it_may_save(
    fake: Path, number: signal.Signals, code: int
) -> None:
    sweep = start(fake, "9,0")
    sweep.send_signal(number)
    _, said = sweep.communicate(timeout=30)
    assert sweep.returncode == code
    assert Path("calls/0-rope/saved").read_text() == number.name
    assert "0-rope  stopped" in said
    assert "1-rope  not started" in said
    assert "the same command again goes on." in said
    assert not Path("s/1-rope").exists()


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("times", [1, 2])
def test_a_job_that_will_not_stop_is_killed(fake: Path, times: int) -> None:
    """After its grace period, or at once when asked twice."""
    sweep = start(fake, "8", grace=0.5 if times == 1 else 1000)
    [child] = children(sweep.pid)
    for _ in range(times):
        sweep.send_signal(signal.SIGINT)
        time.sleep(0.3)
    sweep.communicate(timeout=30)
    assert sweep.returncode == 130
    assert not alive(child)


@pytest.mark.skipif(sys.platform != "linux", reason="the parent's death is a signal on Linux only")
def test_jobs_do_not_outlive_a_killed_sweep(fake: Path) -> None:
    # Only posbench itself asks to be told of its parent's end, so the fake does as it does.
    fake.write_text("from posbench.cli import _follow_parent; _follow_parent()\n" + FAKE)
    sweep = start(fake, "9")
    [child] = children(sweep.pid)
    sweep.kill()
    sweep.communicate(timeout=30)
    wait_until(lambda: not alive(child))
    assert Path("calls/0-rope/saved").read_text() == "SIGTERM"


# ---------------------------------------------------------------- places for jobs


def test_places_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("posbench.cli.slots.cores", lambda: 8)
    assert [place["OMP_NUM_THREADS"] for place in slots(20, None, [])] == ["1"] * 8
    assert [place["OMP_NUM_THREADS"] for place in slots(3, None, [])] == ["1"] * 3
    assert [place["OMP_NUM_THREADS"] for place in slots(20, 2, [])] == ["4", "4"]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert slots(20, 2, []) == [{}, {}]


def test_places_on_gpus() -> None:
    shown = [place["CUDA_VISIBLE_DEVICES"] for place in slots(9, None, ["0", "1"])]
    assert shown == ["0", "1"]
    shown = [place["CUDA_VISIBLE_DEVICES"] for place in slots(9, 3, ["0", "1"])]
    assert shown == ["0", "1", "0"]
    shown = [place["CUDA_VISIBLE_DEVICES"] for place in slots(9, None, ["0", "1"], per_gpu=2)]
    assert shown == ["0", "1", "0", "1"]


@pytest.mark.parametrize(
    ("listing", "expected"),
    [
        ("GPU 0: X (UUID: GPU-a)\nGPU 1: X (UUID: GPU-b)\n", ["0", "1"]),
        ("GPU 0: X (UUID: GPU-a)\n  MIG 1g.5gb Device 0: (UUID: MIG-c)\n", ["MIG-c"]),
        ("No devices were found\n", []),
    ],
)
def test_gpus_are_found_without_torch(
    listing: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    (tmp_path / "listing").write_text(listing)
    tool.write_text(f"#!/bin/sh\nexec cat '{tmp_path}/listing'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == expected
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert visible_gpus() == ["3", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert visible_gpus() == []


def test_the_table_fits_its_jobs() -> None:
    done = Entry("0-rope", "", "", State.done, 0, 12.0)
    lines = table(Path("s"), [done, Entry("1-rope", "", "")]).splitlines()
    assert lines == [
        "s: 1 of 2 jobs done",
        "  job     status       exit  time  reason",
        "  0-rope  done            0  12 s",
        "  1-rope  not started",
    ]


# ---------------------------------------------------------------- how jobs end, and going on


TASK = "data=copy"  # there is no text to read


def started() -> list[str]:
    """The folders of the jobs that were started since this was last asked, by name."""
    path = Path("started")
    names = path.read_text().split() if path.exists() else []
    path.unlink(missing_ok=True)
    return sorted(names, key=sweeps.natural)


def rows(said: str) -> dict[str, list[str]]:
    """The table at the end of a sweep: job -> status, exit code, and all after them."""
    lines = said[said.index("jobs done") :].splitlines()
    head = lines[1]
    starts = [head.index(word) for word in ("job", "status", "exit")]
    table = {}
    for line in lines[2:]:
        if line.startswith("  ") and "how a job ended" not in line:
            name, state = line[starts[0] : starts[1]].strip(), line[starts[1] : starts[2]].strip()
            table[name] = [state, *line[starts[2] :].split(maxsplit=3)]
    return table


ENDS = {
    # seed: (status, exit code, in the reason)
    0: ("done", 0, ""),
    3: ("done", 0, ""),
    1: ("failed", 1, "the loss is not finite at step 3."),
    2: ("killed", -9, "killed by SIGKILL"),
    8: ("timed out", -9, "timed out after 4 s"),
    9: ("timed out", 143, "timed out after 4 s"),
    20: ("failed", 1, "KeyError: 'told to raise'"),
    21: ("diverged", 5, "it said nothing"),
    22: ("out of memory", 6, "it said nothing"),
    23: ("failed", 7, "it said nothing"),
    24: ("failed", 0, "exit 0, but it has not finished"),
    4: ("done", 0, ""),
}


def test_every_way_to_end_is_told_and_the_same_command_does_only_what_is_unfinished(
    fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pool, "GRACE_SECONDS", 1.0)
    words = ["train", "-m", TASK, f"seed={','.join(map(str, ENDS))}"]
    words += ["hydra.launcher.jobs=4", "hydra.launcher.timeout=4"]
    assert main(words) == 1
    assert len(started()) == 12
    said = capsys.readouterr().err
    [folder] = Path("out/train").iterdir()
    record = json.loads((folder / "sweep.json").read_text())
    for number, (state, code, reason) in enumerate(ENDS.values()):
        name = f"{number}-rope"
        row, told = rows(said)[name], record["jobs"][number]
        assert row[:2] == [state, str(code)], name
        assert (told["folder"], told["state"], told["code"]) == (name, state, code)
        assert reason in told["reason"]
        assert reason in " ".join(row)
        alone = json.loads((folder / name / "job.json").read_text())
        assert {key: alone[key] for key in told} == told
        assert bool(alone["traceback"]) == (code == 1)  # the only ones that said anything
    raised = json.loads((folder / "6-rope" / "job.json").read_text())["traceback"]
    assert raised[0].startswith("Traceback")
    assert raised[-1] == "KeyError: 'told to raise'"
    assert said.splitlines()[-1] == "posbench: 9 of 12 jobs failed."

    monkeypatch.setenv("FIXED", "1")
    assert main(words) == 0
    finished = {f"{n}-rope" for n, (state, *_) in enumerate(ENDS.values()) if state == "done"}
    assert set(started()) == set(record_names(record)) - finished
    said = capsys.readouterr().err
    assert f"goes on with the sweep in {folder}" in said
    assert "3 of 12 jobs are finished there" in said
    assert {row[0] for row in rows(said).values()} == {"done"}
    states = {job["state"] for job in json.loads((folder / "sweep.json").read_text())["jobs"]}
    assert states == {"done"}


def record_names(record: dict[str, Any]) -> list[str]:
    return [job["folder"] for job in record["jobs"]]


def test_on_failure_stop_lets_the_others_save_and_starts_no_more(
    fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "-m", TASK, "seed=9,10,0", "hydra.launcher.on_failure=stop"]
    assert main([*words, "hydra.launcher.jobs=2"]) == 1
    assert Path("calls/0-rope/saved").read_text() == "SIGTERM"
    said = capsys.readouterr().err
    states = [row[0] for row in rows(said).values()]
    assert states == ["stopped", "failed", "not started"]
    assert said.splitlines()[-1] == "posbench: 1 of 3 jobs failed, 2 did not finish."


def test_a_finished_sweep_begins_anew_and_a_wider_one_keeps_what_it_has(
    fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "-m", TASK, "seed=0,3"]) == 0
    assert main(["train", "-m", TASK, "seed=0,3"]) == 0
    assert started() == ["0-rope", "0-rope", "1-rope", "1-rope"]
    first, second = sorted(Path("out/train").iterdir(), key=lambda each: each.stat().st_ctime)
    capsys.readouterr()
    # Numbers shift, folders stay.
    assert main(["train", "-m", TASK, "encoding=alibi,rope", "seed=0,3"]) == 0
    assert started() == ["2-alibi", "3-alibi"]
    assert f"goes on with the sweep in {second}" in capsys.readouterr().err
    assert len(list(first.iterdir())) == 5
    # Fewer jobs than a sweep has are no reason to go on with it.
    assert main(["train", "-m", TASK, "encoding=alibi", "seed=0"]) == 0
    assert len(list(Path("out/train").iterdir())) == 3


def record_of(folder: Path, created: str, **jobs: bool) -> Path:
    """A sweep's record: the key of each job, and whether it is finished."""
    entries = []
    for key, done in jobs.items():
        state = State.done if done else State.failed
        entries.append(Entry(key, key, "", state))
        (folder / key).mkdir(parents=True)
        if done:
            (folder / key / "results.json").touch()
    sweeps.Sweep(folder, "eval-extrapolate", [], created, entries).save()
    return folder


def test_which_sweep_a_command_goes_on_with(tmp_path: Path) -> None:
    def found(*keys: str) -> str | None:
        sweep = sweeps.continued(tmp_path, "eval-extrapolate", keys)
        return sweep.folder.name if sweep else None

    record_of(tmp_path / "same", "1", a=True, b=False)
    record_of(tmp_path / "narrower", "2", a=False)
    record_of(tmp_path / "wider", "3", a=False, b=False, c=False, d=False)
    record_of(tmp_path / "finished", "4", a=True, b=True)
    record_of(tmp_path / "foreign", "5", x=False)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "sweep.json").write_text("{")
    assert found("a", "b") == "same"  # older than others, but the very same jobs
    assert found("b", "a") == "same"
    assert found("a", "b", "c") == "finished"  # the newest of those it makes wider
    assert found("y") is None
    assert sweeps.continued(tmp_path, "train", ["a", "b"]) is None
    lock = Lock(tmp_path / "same")
    with pytest.raises(UserError, match=r"this sweep is running, in .*same"):
        found("a", "b")
    lock.release()
    (tmp_path / "same" / "b" / "results.json").touch()
    sweep = sweeps.load_sweep(tmp_path / "same")
    sweep.jobs[1].state = State.done
    sweep.save()
    assert found("a", "b") == "narrower"  # all that have the very same jobs are finished


def test_overwrite_starts_anew(fake: Path) -> None:
    assert main(["train", "-m", TASK, "seed=0,4", "hydra.sweep.dir=s"]) == 0
    started()
    other = ["train", "-m", TASK, "seed=3", "hydra.sweep.dir=s"]
    assert main(other) == 2
    assert main([*other, "overwrite=true"]) == 0
    assert started() == ["0-rope"]
    record = json.loads(Path("s/sweep.json").read_text())
    assert [job["label"] for job in record["jobs"]] == ["data=copy seed=3 overwrite=True"]
    assert not Path("s/1-rope").exists()


def test_what_a_sweep_cannot_be_is_one_line_and_changes_nothing(
    fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "-m", TASK, "seed=0", "hydra.sweep.dir=s"]) == 0
    before = {path: path.stat().st_mtime_ns for path in Path("s").rglob("*")}
    capsys.readouterr()
    for words, says in {
        "train -m data=copy seed=3": "s holds another sweep (posbench train -m data=copy seed=0",
        "eval-extrapolate -m extension=none,ntk runs=s/0-rope": "s holds another sweep",
        "train -m seed=0,0": "job 1 (seed=0): the same settings as job 0",
        "train -m seed=3,4 hydra.sweep.subdir=x": "gives two jobs the same folder",
        "train -m seed=0,3 hydra.launcher.timeout=0": "hydra.launcher.timeout=0 must be more",
        "train -m seed=0,3 hydra.launcher.jobs_per_gpu=0": "jobs_per_gpu=0 is too small",
        "train -m seed=0,3 hydra.launcher.on_failure=go": "on_failure=go is not continue or stop",
        "train -m seed=3 hydra/launcher=submitit_local": "pip install hydra-submitit-launcher",
    }.items():
        folder = "new" if "subdir" in words else "s"
        assert main([*words.split(), f"hydra.sweep.dir={folder}"]) == 2
        said = capsys.readouterr().err
        assert says in said
        assert said.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in Path("s").rglob("*")} == before
    assert not Path("new").exists()


def test_jobs_that_only_run_differently_are_two(fake: Path) -> None:
    assert main(["train", "-m", TASK, "threads=1,2", "hydra.sweep.dir=s"]) == 0
    keys = [job["key"] for job in json.loads(Path("s/sweep.json").read_text())["jobs"]]
    assert keys[1] == f"{keys[0]}-2"


def test_a_real_run_is_known_by_its_settings(
    tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the fake's tests take for granted: the key is the hash of what a manifest says."""
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "PROGRAM", (sys.executable, str(fake)))
    settings = tiny.small(tiny.write_corpus(tmp_path / "text"), steps=1)
    words = ["train", "-m", *tiny.overrides(settings), "seed=0,3", "hydra.sweep.dir=s"]
    key = plans.key_of(settings)
    train(settings, Path("s/mine"))
    job = Entry("mine", key, "", State.failed, 9)  # the folder knows better than the record
    sweeps.Sweep(Path("s"), "train", [], jobs=[job]).save()
    assert main(words) == 0
    assert started() == ["1-rope"]
    settings.train.lr *= 2
    assert plans.key_of(settings) != key


@pytest.mark.parametrize("name", ["0-rope", "a", "x" * 100, "Ünïcode"])
def test_a_name_that_will_do_is_kept(name: str) -> None:
    assert sweeps.component(name) == name


def test_a_name_that_will_not_do_is_one_part_of_a_path(tmp_path: Path) -> None:
    odd = [
        "a/b",
        "a/../../b",
        "..",
        ".",
        ".hidden",
        "a\0b",
        "a\nb",
        "x" * 101,
        "é" * 130,
        "",
        "a\\b",
    ]
    made = [sweeps.component(name) for name in [*odd, "a-b", "x" * 102]]
    assert len(set(made)) == len(made)
    for name in made:
        assert len(name.encode()) <= 100
        (tmp_path / name).mkdir()
        assert (tmp_path / name).parent == tmp_path
        assert not name.startswith(".")


def test_values_with_slashes_stay_inside_the_sweep(fake: Path) -> None:
    words = ["train", "-m", TASK, "seed=0,3", "hydra.sweep.dir=s"]
    assert main([*words, "hydra.sweep.subdir=../${seed}/x"]) == 0
    folders = [path for path in Path("s").iterdir() if path.is_dir()]
    assert len(folders) == 2
    assert all((folder / "job.log").is_file() for folder in folders)


def test_check_tells_of_every_job_and_leaves_nothing(
    fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "-m", TASK, "seed=0,1", "hydra.sweep.dir=s"]) == 1
    started()
    before = sorted(Path().rglob("*"))
    capsys.readouterr()
    assert main(["check", "train", "-m", TASK, "seed=0,1,3", "hydra.sweep.dir=s"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("train: 3 jobs, goes on with the sweep in s;")
    assert [line.split() for line in lines[1:]] == [
        ["0-rope", "finished", "seed=0"],
        ["1-rope", "new", "seed=1"],
        ["2-rope", "new", "seed=3"],
    ]
    assert main(["check", TASK, "encoding=alibi"]) == 0
    assert capsys.readouterr().out == "train: 1 job, new; all settings are valid\n"
    for words, says in {
        "encoding=ailbi": "alibi",
        "seed=0,1": "Add -m",
        "hydra.run.dir=calls": "calls is not empty and holds no posbench run",
        "eval-extrapolate runs=nowhere": "runs=nowhere",
        "inspect encoding=rope": "does not take inspect",
        "train --cfg job": "does not take --cfg",
    }.items():
        assert main(["check", *words.split()]) == 2
        said = capsys.readouterr().err
        assert says in said
        assert said.count("\n") == 1
    assert sorted(Path().rglob("*")) == before
    assert started() == []


def test_jobs_of_a_sweep_by_another_launcher_leave_the_same_records(
    fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def diverge_at_1(settings: Any, *_: Any) -> None:
        if settings.seed == 1:
            raise DivergedError("the loss is not finite.")

    monkeypatch.setattr(apps, "run", diverge_at_1)
    assert main(["train", "-m", TASK, "seed=0,1", "hydra/launcher=basic", "hydra.sweep.dir=s"]) == 1
    told = json.loads(Path("s/1-rope/job.json").read_text())
    assert (told["state"], told["code"]) == ("diverged", 5)
    assert told["traceback"][-1].endswith("DivergedError: the loss is not finite.")
    assert {name: row[0] for name, row in rows(capsys.readouterr().err).items()} == {
        "0-rope": "done",
        "1-rope": "diverged",
    }


def test_joblib_runs_a_sweep_and_says_which_job_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="hydra-joblib-launcher")
    monkeypatch.chdir(tmp_path)
    settings = tiny.small(tiny.write_corpus(tmp_path / "text"), steps=2)
    words = ["train", "-m", *tiny.overrides(settings), "train.lr=0.01,1e38"]
    assert main([*words, "hydra/launcher=joblib", "hydra.sweep.dir=s"]) == 1
    states = {name: row[0] for name, row in rows(capsys.readouterr().err).items()}
    assert states == {"0-rope": "done", "1-rope": "diverged"}
