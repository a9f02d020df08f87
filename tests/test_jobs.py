"""A run that is killed, stopped or resumed ends as if nothing had happened, to the last bit."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import posbench.jobs.train as jobs
from posbench import board, checkpoint, files, training
from posbench.config import TrainSettings
from posbench.encodings import CLASSES
from posbench.errors import CheckpointError, Exit, InterruptedRunError, UserError
from posbench.jobs.session import Session, duration
from posbench.jobs.train import resume_training, run_training
from posbench.journal import Journal
from posbench.runs import load_run
from posbench.signals import StopRequest
from posbench.training import Trainer

EVERY = 7  # steps between checkpoints: off the grid of validations, and of the end


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """The uninterrupted run that the others are held against."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    run_training(interruptible(corpus), folder, [])
    return folder


def interruptible(corpus: Path, encoding: str = "rope", **changes: Any) -> TrainSettings:
    """Dropout is on, so that a random state that went astray would show."""
    return tiny.small(corpus, encoding, **{"dropout": 0.1, "checkpoint_every": EVERY} | changes)


class Killed(BaseException):
    """Ends a run at once, as far as this can be done without ending the process."""


def stop_at(patch: pytest.MonkeyPatch, step: int) -> None:
    """Make training end abruptly after a step, with nothing saved for it."""
    original = Trainer._advance

    def advance(self: Trainer) -> Any:
        if self.step == step:
            raise Killed
        return original(self)

    patch.setattr(Trainer, "_advance", advance)


def begin(settings: TrainSettings, folder: Path, until: int) -> None:
    """The first `until` steps of a run, which is then lost."""
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, until)
        with pytest.raises(Killed):
            run_training(settings, folder, [])


def status(folder: Path) -> Any:
    return json.loads((folder / "run.json").read_text())["status"]


def settled(folder: Path) -> dict[str, Any]:
    """What a manifest says once it is finished, but for clocks and machines."""
    manifest: dict[str, Any] = json.loads((folder / "run.json").read_text())
    passing = ("started", "finished", "tokens_per_s", "peak_mem_mb", "command")
    return {key: value for key, value in manifest.items() if key not in passing}


def resume(
    folder: Path, *changes: str, strict: bool = False, allow: list[str] | None = None
) -> None:
    resume_training(folder, strict, allow or [], list(changes), [])


# ---------------------------------------------------------------- ten and ten make twenty


@pytest.mark.parametrize("encoding", CLASSES)
@pytest.mark.parametrize("changes", [{"dropout": 0.0}, {}, {"micro_batch": 3}], ids=str)
def test_ten_steps_and_ten_more_are_twenty(
    corpus: Path, tmp_path: Path, encoding: str, changes: dict[str, Any]
) -> None:
    """Weights, optimizer state and every loss, with validations before and after."""
    settings = interruptible(corpus, encoding, checkpoint_every=10, **changes)
    run_training(settings, tmp_path / "straight", [])
    begin(settings, tmp_path / "halves", until=10)
    assert tiny.last(tmp_path / "halves").step == 10
    assert len(tiny.validations(tmp_path / "halves")) == 5
    torch.manual_seed(99)  # another process would have another state
    run_training(settings, tmp_path / "halves", [])
    tiny.assert_same_run(tmp_path / "straight", tmp_path / "halves")
    assert [step for step, _ in tiny.losses(tmp_path / "halves")] == list(range(1, 21))
    assert settled(tmp_path / "straight") == settled(tmp_path / "halves")


@pytest.mark.parametrize("until", [0, 1, 6, 7, 8, 13, 14, 19])
def test_the_same_command_goes_on_from_anywhere(
    corpus: Path, tmp_path: Path, straight: Path, until: int
) -> None:
    settings = interruptible(corpus)
    begin(settings, tmp_path / "run", until)
    assert status(tmp_path / "run") == "running"
    run_training(settings, tmp_path / "run", [])
    tiny.assert_same_run(straight, tmp_path / "run")


def test_resuming_again_and_again(corpus: Path, tmp_path: Path, straight: Path) -> None:
    """Every checkpoint is one that a resumed run wrote, and the next starts from."""
    settings = interruptible(corpus, checkpoint_every=1)
    for until in range(2, tiny.STEPS, 2):
        begin(settings, tmp_path / "run", until)
    resume(tmp_path / "run")
    tiny.assert_same_run(straight, tmp_path / "run")


def test_validation_never_touches_training(corpus: Path, tmp_path: Path, straight: Path) -> None:
    often = interruptible(corpus, validate_every=1, validate_ratios=[1.0, 2.0])
    run_training(often, tmp_path / "often", [])
    seldom = interruptible(corpus, validate_every=1000)
    run_training(seldom, tmp_path / "seldom", [])
    assert len(tiny.validations(tmp_path / "often")) == 20
    assert len(tiny.validations(tmp_path / "seldom")) == 1  # the last step always
    for folder in (tmp_path / "often", tmp_path / "seldom"):
        assert tiny.losses(folder) == tiny.losses(straight)
        assert tiny.digest(tiny.last(folder).weights) == tiny.digest(tiny.last(straight).weights)


def test_validation_at_each_ratio_leaves_out_what_cannot_be(corpus: Path, tmp_path: Path) -> None:
    ratios = {"validate_ratios": [1.0, 2.0, 4.0], "steps": 2}
    run_training(tiny.small(corpus, "alibi", **ratios), tmp_path / "alibi", [])
    run_training(tiny.small(corpus, "learned", **ratios), tmp_path / "learned", [])
    assert set(tiny.validations(tmp_path / "alibi")[-1]["val_nll"]) == {"1x", "2x", "4x"}
    assert set(tiny.validations(tmp_path / "learned")[-1]["val_nll"]) == {"1x"}


def test_a_damaged_checkpoint_costs_its_steps_and_is_told(
    corpus: Path, tmp_path: Path, straight: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    begin(interruptible(corpus), run, until=16)
    (run / "checkpoints" / "step-00000014" / "weights.safetensors").write_bytes(b"torn")
    resume(run)
    told = capsys.readouterr()
    assert "step-00000014" in told.err
    assert "SHA-256" in told.err
    assert "resuming   from step 7" in told.out
    tiny.assert_same_run(straight, run)
    assert (run / "checkpoints" / "step-00000014.corrupt").is_dir()


def test_all_checkpoints_damaged_is_no_fresh_start(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    begin(interruptible(corpus), run, until=16)
    for folder in (run / "checkpoints").iterdir():
        (folder / "manifest.json").write_text("{}")
    for again in (lambda: resume(run), lambda: run_training(interruptible(corpus), run, [])):
        with pytest.raises(CheckpointError, match="no usable checkpoint"):
            again()
    run_training(interruptible(corpus, overwrite=True), run, [])  # unless asked for
    assert status(run) == "finished"


def test_a_checkpoint_of_other_settings_is_no_place_to_start(corpus: Path, tmp_path: Path) -> None:
    """The same names and shapes, another rotation: only the settings can tell."""
    run, other = tmp_path / "run", tmp_path / "other"
    settings = interruptible(corpus)
    settings.encoding.theta = 500.0  # type: ignore[attr-defined]
    begin(interruptible(corpus), run, until=8)
    begin(settings, other, until=8)
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(other / "checkpoints", run / "checkpoints")
    with pytest.raises(CheckpointError, match="trained with other settings"):
        resume(run)


# ---------------------------------------------------------------- TensorBoard, a view


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder / "tb" / "rope-seed0"), size_guidance={"scalars": 0})
    reader.Reload()
    tags = reader.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in tags}


@pytest.mark.parametrize("until", [3, 10, 16])
def test_a_resumed_curve_has_no_step_twice(
    corpus: Path, tmp_path: Path, straight: Path, until: int
) -> None:
    """3 is before the first checkpoint: the new start must forget those steps too."""
    settings = interruptible(corpus)
    begin(settings, tmp_path / "run", until)
    assert [step for step, _ in points(tmp_path / "run")["train/loss"]] == list(range(1, until + 1))
    run_training(settings, tmp_path / "run", [])
    wanted, curves = points(straight), points(tmp_path / "run")
    assert [step for step, _ in curves["train/loss"]] == list(range(1, tiny.STEPS + 1))
    for tag in ("train/loss", "train/lr", "train/grad_norm", "val/nll_1x", "val/ppl_1x"):
        assert curves[tag] == wanted[tag]


def test_the_curve_is_a_view_of_the_journal(straight: Path) -> None:
    shown = points(straight)["train/loss"]
    for (step, value), (logged, loss) in zip(shown, tiny.losses(straight), strict=True):
        assert step == logged
        assert value == pytest.approx(float.fromhex(loss), rel=1e-6)


def test_a_board_that_cannot_be_written_does_not_end_the_run(
    corpus: Path, tmp_path: Path, straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(board.EventFile, "scalars", refuse)
    run_training(interruptible(corpus), tmp_path / "run", [])
    tiny.assert_same_run(straight, tmp_path / "run")


# ---------------------------------------------------------------- resume=DIR


@pytest.fixture
def halfway(corpus: Path, tmp_path: Path) -> Path:
    begin(interruptible(corpus), tmp_path / "run", until=10)
    return tmp_path / "run"


def test_resuming_needs_no_settings(halfway: Path, straight: Path) -> None:
    resume(halfway)
    tiny.assert_same_run(straight, halfway)


def test_resuming_a_finished_run_changes_nothing(
    straight: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (straight / "run.json").read_bytes()
    resume(straight)
    assert "complete" in capsys.readouterr().out
    assert (straight / "run.json").read_bytes() == before


def test_resuming_where_no_run_is_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"resume={tmp_path}/absent: no posbench run there"):
        resume(tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("seed=1", "seed=1 would make this another run"),
        ("encoding.theta=500.0", "another run"),
        ("model.dropout=0.0", "another run"),
        ("context=32", "another run"),
        ("dtype=bfloat16", "another run"),
        ("train.lr=0.5", r"train\.lr=0\.003 there, 0\.5 here.*resume_allow=\[schedule\]"),
        ("train.steps=30", r"resume_allow=\[schedule\]"),
        ("train.batch_size=8", r"resume_allow=\[schedule\]"),
        ("data.validation=0.2", r"resume_allow=\[data\]"),
        ("train.lrr=1", r"train\.lrr is not a setting"),
        ("hydra.run.dir=x", "not a setting"),
        ("encoding._target_=os.system", "not a setting"),
        ("train", "not a setting"),
        ("train.steps.x=1", "not a setting"),
        ("train.steps=many", r"train\.steps='many' is not a whole number"),
        ("train.steps=1.5", r"train\.steps=1\.5 is not a whole number"),
        ("train.micro_batch=two", r"train\.micro_batch='two' is not a whole number"),
        ("train.checkpoint_every=-1", r"train\.checkpoint_every=-1 is too small"),
        ("train.validate_ratios=[a]", "is not a list"),
        ('train.validate_ratios=["a"]', "is not a number"),
        ("train.lr=1" + "0" * 400, "."),
        ("train.schedule=linear", "is not one of cosine, wsd, constant"),
        ("threads=0", "threads=0 is too small"),
        ("encoding.name=[1]", r"name=\[1\] is not one of"),
        ("encoding.name=alibi", "unknown setting"),
    ],
)
def test_a_change_that_is_not_admitted_leaves_no_trace(
    halfway: Path, change: str, words: str
) -> None:
    before = (halfway / "run.json").read_bytes()
    with pytest.raises(UserError, match=words):
        resume(halfway, change)
    assert (halfway / "run.json").read_bytes() == before


def test_an_unknown_permission_is_refused(halfway: Path) -> None:
    with pytest.raises(UserError, match="resume_allow=everything is not known"):
        resume(halfway, allow=["everything"])


@pytest.mark.parametrize("allow", [["schedule"], ["data", "schedule"]])
def test_identity_is_never_admitted(halfway: Path, allow: list[str]) -> None:
    with pytest.raises(UserError, match="another run"):
        resume(halfway, "seed=1", allow=allow)


def test_an_admitted_schedule_is_used_and_recorded(halfway: Path) -> None:
    resume(halfway, "train.steps=24", "train.lr=0.001", allow=["schedule"])
    run = load_run(halfway)
    assert run.finished
    assert run.settings.train.steps == run.checkpoint().step == 24
    (change,) = run.manifest["changes"]
    assert change["settings"] == {"train.steps": [20, 24], "train.lr": [0.003, 0.001]}
    assert [step for step, _ in tiny.losses(halfway)] == list(range(1, 25))


def test_changes_can_follow_one_another(halfway: Path) -> None:
    """The second resume starts from a checkpoint of the settings before the first change."""
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 8)
        with pytest.raises(Killed):
            resume(halfway, "train.lr=0.001", allow=["schedule"])
    assert tiny.last(halfway).step == 7
    resume(halfway, "train.lr=0.002", allow=["schedule"])
    run = load_run(halfway)
    assert run.checkpoint().step == 20
    assert len(run.manifest["changes"]) == 2


def test_a_finished_run_can_be_given_more_steps(straight: Path, tmp_path: Path) -> None:
    run = shutil.copytree(straight, tmp_path / "run")
    resume(run, "train.steps=22", allow=["schedule"])
    assert load_run(run).checkpoint().step == 22


def test_a_run_cannot_end_before_what_it_has_trained(straight: Path, tmp_path: Path) -> None:
    run = shutil.copytree(straight, tmp_path / "run")
    before = (run / "run.json").read_bytes()
    with pytest.raises(UserError, match=r"train\.steps=10, but .* has already trained 20 steps"):
        resume(run, "train.steps=10", allow=["schedule"])
    assert (run / "run.json").read_bytes() == before


def test_free_settings_change_without_permission(halfway: Path, straight: Path) -> None:
    resume(halfway, "train.checkpoint_every=3", "train.keep_checkpoints=4")
    tiny.assert_same_run(straight, halfway)
    kept = sorted(entry.name for entry in (halfway / "checkpoints").iterdir())
    assert kept == [f"step-{step:08d}" for step in (12, 15, 18, 20)]


@pytest.fixture
def text(corpus: Path, tmp_path: Path) -> Path:
    """A corpus that a test may alter."""
    return shutil.copytree(corpus, tmp_path / "text")


def test_a_corpus_that_changed_is_refused_unless_admitted(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    begin(interruptible(text), run, until=10)
    before = load_run(run).manifest["corpus"]["fingerprint"]
    with (text / "0005.txt").open("a") as file:
        file.write("!")
    for again in (lambda: resume(run), lambda: run_training(interruptible(text), run, [])):
        with pytest.raises(UserError, match=r"data=text has changed.*resume_allow=\[data\]"):
            again()
        assert load_run(run).manifest["corpus"]["fingerprint"] == before
    resume(run, allow=["data"])
    assert load_run(run).manifest["corpus"]["fingerprint"] != before
    assert load_run(run).checkpoint().step == 20


@pytest.mark.parametrize("text_of_it", ['{"type": "bytes"} ', "", "{}"])
def test_an_altered_tokenizer_is_refused(halfway: Path, text_of_it: str) -> None:
    (halfway / "tokenizer.json").write_text(text_of_it)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not what was saved"):
        resume(halfway)


@pytest.mark.parametrize(
    ("key", "then", "words"),
    [
        ("threads", 2, "threads 2 -> 1"),
        ("device", "NVIDIA H200", "device NVIDIA H200 -> cpu"),
        ("torch", "2.10.0", "torch 2.10.0 -> "),
        ("dtype", "bfloat16", "dtype bfloat16 -> float32"),
    ],
)
def test_another_machine_is_told_or_refused(
    halfway: Path, capsys: pytest.CaptureFixture[str], key: str, then: Any, words: str
) -> None:
    manifest = json.loads((halfway / "run.json").read_text())
    manifest["runtime"][key] = then
    (halfway / "run.json").write_text(json.dumps(manifest))
    before = (halfway / "run.json").read_bytes()
    with pytest.raises(UserError, match=f"not bit-exact.*{words}.*resume_strict"):
        resume(halfway, strict=True)
    assert (halfway / "run.json").read_bytes() == before
    resume(halfway)
    assert f"warning: not bit-exact with the part already trained: {words}" in (
        capsys.readouterr().err
    )
    assert load_run(halfway).finished


def test_the_same_machine_is_strictly_the_same(
    halfway: Path, straight: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resume(halfway, strict=True)
    assert "warning" not in capsys.readouterr().err
    tiny.assert_same_run(straight, halfway)


def test_a_live_run_cannot_be_resumed(halfway: Path) -> None:
    lock = jobs.Lock(halfway)
    with pytest.raises(UserError, match="in use by process"):
        resume(halfway)
    lock.release()


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
@pytest.mark.parametrize("at", [1, 7, 11])
def test_a_signal_saves_at_the_step_boundary(
    corpus: Path, tmp_path: Path, straight: Path, number: int, code: int, at: int
) -> None:
    """7 is where a checkpoint was due anyway."""

    def noted(self: Trainer) -> Any:
        if self.step + 1 == at:
            signal.raise_signal(number)
        return advance(self)

    advance = Trainer._advance
    before = signal.getsignal(number)
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_advance", noted)
        with pytest.raises(InterruptedRunError) as caught:
            run_training(interruptible(corpus), run, [])
    assert caught.value.code == code
    assert f"posbench train resume={run}" in str(caught.value)
    assert (status(run), tiny.last(run).step) == ("interrupted", at)
    assert signal.getsignal(number) is before
    run_training(interruptible(corpus), run, [])
    tiny.assert_same_run(straight, run)
    assert settled(run) == settled(straight)


def test_the_first_signal_asks_and_the_second_acts() -> None:
    with StopRequest() as stop:
        assert stop.code is None
        signal.raise_signal(signal.SIGINT)
        assert stop.code is Exit.INTERRUPTED
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_signals_belong_to_the_caller_outside_the_main_thread(corpus: Path, tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        settings = tiny.small(corpus, steps=2)
        pool.submit(run_training, settings, tmp_path / "run", []).result()
    assert status(tmp_path / "run") == "finished"


LONG = 200  # steps: enough for a signal to arrive on the way


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_from_outside_ends_the_command_line_as_documented(
    corpus: Path, tmp_path: Path, number: int, code: int
) -> None:
    settings = tiny.small(corpus, steps=LONG)
    run = tmp_path / "run"
    words = [*tiny.overrides(settings), f"hydra.run.dir={run}"]
    process = tiny.command("train", *words)
    await_steps(process, run, 3)
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == code, told
    assert f"posbench train resume={run}" in told
    assert "Traceback" not in told
    assert status(run) == "interrupted"
    stopped = tiny.last(run).step
    assert 3 <= stopped < LONG
    assert [step for step, _ in tiny.losses(run)] == list(range(1, stopped + 1))
    resume(run, strict=True)
    run_training(settings, tmp_path / "straight", [])
    tiny.assert_same_run(tmp_path / "straight", run)


def await_steps(process: subprocess.Popen[str], run: Path, steps: int) -> None:
    """Wait until a running process has logged so many steps."""
    end = time.monotonic() + 120
    while len(tiny.losses(run)) < steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


# ---------------------------------------------------------------- killed


def nth(owner: Any, name: str, call: int) -> Callable[[], None]:
    """Have this process killed at the given call of a function, before it does anything."""

    def arm() -> None:
        original, left = getattr(owner, name), [call]

        def deadly(*arguments: Any, **keywords: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **keywords)

        setattr(owner, name, deadly)

    return arm


def half_a_line() -> None:
    """Die with half a record written, as a crash in the middle of a write would."""
    original = Journal.write

    def write(self: Journal, record: dict[str, Any]) -> None:
        if record["step"] == 9:
            self._file.write(json.dumps(record)[:20])
            self._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, record)

    Journal.write = write  # type: ignore[method-assign]


# Two checkpoints are due before the end (7 and 14), each of three files, then the last (20).
PHASES = {
    "writing the first manifest": nth(files.Path, "replace", 1),
    "before any data": nth(jobs, "_dataset", 1),
    "building the model": nth(training.Trainer, "__init__", 1),
    "before the first checkpoint": nth(training.Trainer, "_advance", 5),
    "writing the first checkpoint": nth(checkpoint, "write_bytes", 2),
    "naming the first checkpoint": nth(checkpoint.Path, "rename", 1),
    "after the first checkpoint": nth(checkpoint, "sync_folder", 1),
    "half a line of the journal": half_a_line,
    "during a validation": nth(training, "window_losses", 5),
    "writing the manifest of the second": nth(checkpoint, "write_bytes", 6),
    "while pruning": nth(checkpoint.shutil, "rmtree", 1),
    "naming the last checkpoint": nth(checkpoint.Path, "rename", 3),
    "before the run is called finished": nth(Session, "_finish", 1),
}


def in_child(work: Callable[[], None]) -> int:
    """Do `work` in a fork of this process; how it ended, as os.waitpid says it."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            work()
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1]


def kill_and_restart(corpus: Path, folder: Path) -> None:
    """Every phase in a folder of its own, and one run killed at random times until it is done."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    settings = interruptible(corpus)
    run_training(settings, folder / "warm", [])  # what is imported here, no fork imports again

    for name, arm in PHASES.items():

        def deadly(arm: Callable[[], None] = arm, name: str = name) -> None:
            arm()
            run_training(settings, folder / name, [])

        def again(name: str = name) -> None:
            run_training(settings, folder / name, [])

        assert in_child(deadly) == signal.SIGKILL, name
        assert in_child(again) == 0, name
    _kill_at_random(interruptible(corpus, checkpoint_every=2), folder / "at random")


def _kill_at_random(settings: TrainSettings, run: Path) -> None:
    generator = random.Random(3)
    kills = 0
    for attempt in range(60):
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                run_training(settings, run, [])
                os._exit(0)
            os._exit(1)
        # Later attempts are given longer, so that an end is reached on any machine.
        time.sleep(generator.uniform(0.0, 0.1 * (1 + attempt / 3)))
        os.kill(child, signal.SIGKILL)
        how = os.waitpid(child, 0)[1]
        assert how in (0, signal.SIGKILL), how
        kills += how == signal.SIGKILL
        if how == 0:
            break
    (run.parent / "kills").write_text(str(kills))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Runs killed in another process and started again, by phase."""
    folder = tmp_path_factory.mktemp("killed")
    done = tiny.start(__file__, str(corpus), str(folder))
    _, told = done.communicate(timeout=300)
    assert done.returncode == 0, told
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("phase", [*PHASES, "at random"])
def test_a_killed_run_ends_as_if_nothing_had_happened(
    killed: Path, straight: Path, phase: str
) -> None:
    run = killed / phase
    tiny.assert_same_run(straight, run)
    assert status(run) == "finished"
    assert load_run(run).checkpoint().step == tiny.STEPS
    assert points(run)["train/loss"] == points(straight)["train/loss"]
    left = sorted(entry.name for entry in run.rglob("*") if "tmp" in entry.name)
    assert left == []  # nothing half-written is left behind
    if phase != "at random":
        assert settled(run)["validation_nll"] == settled(straight)["validation_nll"]


@pytest.mark.slow
def test_random_kills_did_hit_the_run(killed: Path) -> None:
    assert int((killed / "kills").read_text()) >= 3


# ---------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "0 s"), (89, "89 s"), (90, "2 min"), (3600, "60 min"), (5400, "1.5 h")],
)
def test_durations_are_told_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_a_run_says_what_it_will_cost_and_what_it_did(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_training(tiny.small(corpus, "learned", steps=4), tmp_path / "run", [])
    told = capsys.readouterr().out
    before, after = told.split("done  ")
    for words in ("parameters, of which 512 belong", "256 tokens,", "operations", "expected"):
        assert words in before
    for words in ("tokens/s", "peak memory", "MiB", "validation perplexity", str(tmp_path / "run")):
        assert words in after


if __name__ == "__main__":
    kill_and_restart(Path(sys.argv[1]), Path(sys.argv[2]))
