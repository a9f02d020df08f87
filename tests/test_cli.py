"""What a person types and what they get: one message, the right exit code, nothing left behind."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import posbench.cli.apps
from posbench import config
from posbench.cli import COMMANDS, main
from posbench.cli.completion import query
from posbench.cli.compose import stamp
from posbench.config.encodings import AlibiConfig, NoneConfig
from posbench.config.policies import PRESETS
from posbench.errors import DivergedError, InterruptedRunError, PosbenchError
from posbench.version import __version__

# What is typed, and words that the answer must hold.
MISTAKES = [
    ("trian", ["Did you mean posbench train?"]),
    ("train encodng=rope", ["encodng", "Did you mean encoding?"]),
    ("train encoding=ropee", ["encoding=ropee", "Did you mean encoding=rope?", "alibi"]),
    ("train encoding.thetta=5", ["Did you mean encoding.theta?", "encoding.fraction"]),
    ("train encoding=alibi encoding.theta=5", ["encoding=alibi", "belongs to encoding=rope"]),
    ("train encoding.theta=abc", ["encoding.theta=abc", "must be a number"]),
    ("train seed=1.5", ["seed=1.5", "must be a whole number"]),
    ("train seed=null", ["seed=null", "must be a whole number"]),
    ("train model.qk_norm=maybe", ["true or false"]),
    ("train train.validate_ratios=1", ["must be a list"]),
    ("train device=gpu", ["one of auto, cpu, cuda"]),
    ("train lr=1", ["Did you mean train.lr?"]),
    ("train train=fast", ["train=fast", "train.steps"]),
    ("train extension=yarn", ["eval-extrapolate", "inspect"]),
    ("train eval.ratios=[1]", ["eval-extrapolate"]),
    ("train +encoding=rope", ["type encoding=rope"]),
    ("train ++foo=1", ["type foo=1"]),
    ("train ~seed", ["cannot be removed"]),
    ("train seed=0,2", ["-m"]),
    ("train encoding=rope,alibi", ["-m"]),
    ("train seed=range(3)", ["-m"]),
    ("train encoding=[rope,alibi]", ["one option", "-m"]),
    ("train 'seed=a b=c'", ["quotes"]),
    ("train rope", ["'rope'", "key=value"]),
    ("train experiment=quik", ["Did you mean experiment=quickstart?"]),
    ("train model.heads=3", ["model.heads=3", "Try model.heads=2"]),
    ("train -m model.heads=4,3", ["job 1", "model.heads=3", "No job was started"]),
    ("train -m encoding=rope,foo", ["encoding=foo"]),
    ("train -m encoding=rope,alibi encoding.theta=1", ["encoding.theta", "encoding=rope"]),
    ("train -m hydra.run.dir=x", ["hydra.sweep.dir"]),
    ("train hydra.sweep.dir=x", ["hydra.run.dir"]),
    ("train -m hydra.launcher.jobs=0", ["hydra.launcher.jobs=0"]),
    ("train -m hydra.launcher.jobs=1000000", ["hydra.launcher.jobs=1000000", "the most is 1024"]),
    ("train -m hydra.launcher.jobs_per_gpu=1000000", ["jobs_per_gpu=1000000", "the most is 64"]),
    ("train threads=1000000", ["threads=1000000", "the most is 1024"]),
    ("eval-extrapolate threads=1000000", ["threads=1000000", "the most is 1024"]),
    ("estimate -m hydra.launcher.on_failure=perhaps", ["on_failure=perhaps"]),
    ("estimate -m hydra/launcher=basic model.heads=3", ["model.heads=3"]),
    ("check estimate encoding=rope", ["does not take estimate"]),
    ("train -m hydra.launcher.jobs=two", ["hydra.launcher.jobs=two"]),
    ("train hydra.launcher=basic", ["hydra/launcher=basic"]),
    ("train hydra/launcher=basik", ["Did you mean hydra/launcher=basic?"]),
    ("train hydra.run.dirr=x", ["Did you mean hydra.run.dir?"]),
    ("train data=text", ["data.path="]),
    ("train 'seed=${seed}'", ["seed"]),
    ("train --config-dir nowhere", ["--config-dir nowhere"]),
    ("train --config-dir", ["needs a value"]),
    ("train --multirn", ["Did you mean --multirun?"]),
    ("train --cfg jib", ["jib", "job"]),
    ("train --cfg job -m", ["cannot go together"]),
    ("train --experimental-rerun x", ["resume=DIR"]),
    ("train -sc query=bash", ["posbench completion"]),
    ("train hydra.callbacks.x._target_=os.abort", ["no code"]),
    ("train hydra/callbacks=x", ["no code"]),
    ("train hydra.searchpath=[x]", ["--config-dir"]),
    ("train resume_strict=true", ["resume=DIR"]),
    ("train resume=x -m", ["-m"]),
    ("train resume=x resume_strict=perhaps", ["true or false"]),
    ("eval-extrapolate outputs/x", ["runs=outputs/x"]),
    ("eval-extrapolate context=5", ["train", "inspect"]),
    ("eval-extrapolate eval.protocols=[fast]", ["controlled, nonoverlap, sliding, position"]),
    ("eval-extrapolate eval=fast", ["v1, all, diagnostics"]),
    ("eval-extrapolate tune=per_encodng", ["tune=per_encodng", "per_encoding"]),
    ("eval-extrapolate tune=per_encoding model=hf:x", ["tune=per_encoding", "model="]),
    ("eval-extrapolate eval.stride=0", ["eval.stride=0", "the least is 1"]),
    ("eval-extrapolate eval.split=train", ["eval.split=train", "trained on"]),
    ("eval-extrapolate eval.split=dev", ["eval.split=dev", "test, validation"]),
    ("eval-extrapolate eval.ratios=[0,1]", ["eval.ratios holds 0", "greater than 0"]),
    ("eval-extrapolate eval.ratios=[-1]", ["eval.ratios holds -1", "greater than 0"]),
    ("eval-extrapolate eval.ratios=[]", ["eval.ratios is empty"]),
    ("eval-extrapolate eval.protocols=[]", ["eval.protocols is empty"]),
    ("eval-extrapolate eval.max_targets=0", ["eval.max_targets=0", "the least is 1"]),
    ("eval-extrapolate eval.tolerance=-0.1", ["eval.tolerance=-0.1", "the least is 0"]),
    ("inspect -m encoding=rope,alibi", ["-m"]),
    ("inspect encoding=alibi extension=yarn", ["encoding=rope"]),
    ("list", ["encodings"]),
    ("list encoding", ["Did you mean posbench list encodings?"]),
    ("completion bsh", ["Did you mean bash?"]),
    ("sample", ["posbench sample RUN"]),
    ("sample RUN tokens=many", ["tokens=many", "whole number"]),
    ("sample RUN tokens=0", ["tokens=0"]),
    ("sample RUN temperature=-1", ["temperature=-1", "0 or a positive number"]),
    ("sample RUN temperature=nan", ["temperature=nan"]),
    ("sample RUN prompt=", ["prompt is empty"]),
    ("sample RUN temprature=1", ["Did you mean temperature?"]),
    ("report", ["nothing to report"]),
]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, outputs below it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POSBENCH_OUTPUTS", str(tmp_path / "outputs"))
    return tmp_path


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if not (path.is_dir() and any(path.iterdir()))]


@pytest.mark.parametrize(("typed", "expected"), MISTAKES, ids=[typed for typed, _ in MISTAKES])
def test_a_mistake_gets_one_message_and_exit_2(
    typed: str,
    expected: list[str],
    work: Path,
    ran: list[Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(shlex.split(typed)) == 2
    assert ran == []
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "Traceback" not in said.err
    assert "append" not in said.err.lower()  # Hydra's advice to add a plus
    for word in expected:
        assert word in said.err
    # Only the (empty) folder of all outputs may remain.
    assert {path.name for path in files_below(work)} <= {"train", "eval-extrapolate"}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The jobs that a command would have run, instead of running them."""
    jobs: list[Any] = []

    def note(settings: config.Settings, folder: Path, command: list[str]) -> None:
        jobs.append((settings, folder, command))

    monkeypatch.setattr(posbench.cli.apps, "run", note)
    return jobs


def test_a_run_gets_settings_folder_and_command(work: Path, ran: list[Any]) -> None:
    assert main(["train", "encoding=alibi", "seed=3", "hydra.run.dir=a b,c=d"]) == 0
    [(settings, folder, command)] = ran
    assert settings == config.TrainSettings(encoding=AlibiConfig(), seed=3)
    assert folder == work / "a b,c=d"
    assert command == ["posbench", "train", "encoding=alibi", "seed=3", "hydra.run.dir=a b,c=d"]
    assert list(folder.iterdir()) == []  # Hydra leaves nothing of its own in it


def test_default_folders_are_named_and_never_shared(work: Path, ran: list[Any]) -> None:
    for _ in range(2):
        assert main(["train"]) == 0
    assert main(["eval-extrapolate"]) == 0
    first, second, third = (folder for _, folder, _ in ran)
    assert first != second
    assert first.parent == work / "outputs" / "train"
    assert first.name.endswith("-rope")
    assert third.parent == work / "outputs" / "eval-extrapolate"
    assert len({stamp() for _ in range(20)}) > 15  # all within one second


def test_inspect_leaves_no_folder(work: Path, ran: list[Any]) -> None:
    assert main(["inspect", "encoding=alibi"]) == 0
    assert list(work.iterdir()) == []


def test_the_plus_before_experiment_is_forgiven(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "+experiment=seeds", "--cfg", "job", "-p", "seed"]) == 0
    assert capsys.readouterr().out.strip() == "0"


def test_flags_may_stand_between_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "seed=5", "--cfg", "job", "context=64", "-p", "context"]) == 0
    assert capsys.readouterr().out.strip() == "64"


def test_a_sweep_by_the_basic_launcher_runs_every_job_and_says_which_failed(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds: list[int] = []

    def diverge_at_1(settings: Any, folder: Path, command: list[str]) -> None:
        seeds.append(settings.seed)
        if settings.seed == 1:
            raise DivergedError("the loss is not finite.")

    monkeypatch.setattr(posbench.cli.apps, "run", diverge_at_1)
    assert main(["train", "-m", "seed=0,1,2", "hydra/launcher=basic", "hydra.sweep.dir=s"]) == 1
    assert seeds == [0, 1, 2]
    said = capsys.readouterr().err
    assert "job 1: the loss is not finite." in said
    assert "1 of 3 jobs failed" in said
    assert {path.name for path in (work / "s").iterdir() if path.is_dir()} == {
        "0-rope",
        "1-rope",
        "2-rope",
    }


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (DivergedError("the loss is not finite."), 5, "the loss is not finite."),
        (InterruptedRunError("saved."), 130, "saved."),
        (KeyboardInterrupt(), 130, "interrupted."),
        (MemoryError(), 6, "memory"),
        (SystemExit("a library gave up."), 1, "a library gave up."),
        (OSError(28, "No space left on device", "x"), 4, "No space left on device"),
    ],
)
def test_how_a_run_ends_is_its_exit_code(
    error: BaseException,
    code: int,
    message: str,
    work: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(posbench.cli.apps, "run", fail)
    assert main(["train"]) == code
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_defect_shows_its_traceback_and_exits_1(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(posbench.cli.apps, "run", fail)
    assert main(["train"]) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "bug in posbench" in said.splitlines()[-1]


@pytest.mark.parametrize("words", [["train", "hydra.run.dir=F"], ["train", "hydra.run.dir=F/x"],
                                   ["train", "-m", "seed=0,1", "hydra.sweep.dir=F"]])  # fmt: skip
def test_a_folder_that_cannot_be_made_is_exit_4(
    words: list[str], work: Path, ran: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (work / "F").write_text("a file")
    assert main(words) == 4
    assert "F" in capsys.readouterr().err
    assert ran == []


def test_a_folder_that_was_there_survives_a_mistake(work: Path) -> None:
    (work / "mine").mkdir()
    assert main(["train", "model.heads=3", "hydra.run.dir=mine"]) == 2
    assert (work / "mine").is_dir()
    assert main(["train", "model.heads=3", "hydra.run.dir=new"]) == 2
    assert not (work / "new").exists()


def test_resume_needs_no_composing(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    fake = type(sys)("posbench.jobs.train")
    fake.resume_training = lambda *arguments: calls.append(arguments)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "posbench.jobs.train", fake)
    words = ["train", "resume=a b", "resume_allow=[data, schedule]", "train.steps=9"]
    assert main(words) == 0
    command = ["posbench", *words]
    assert calls == [(Path("a b"), False, ["data", "schedule"], ["train.steps=9"], command)]


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_usage_names_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    said = capsys.readouterr().out
    for name, (text, _) in COMMANDS.items():
        assert f"  {name} " in said
        assert text in said


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"posbench {command}" in capsys.readouterr().out


def test_list_encodings_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "encodings", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["id"] for row in rows] == [*config.ENCODINGS, *PRESETS]
    promised = {"id", "family", "form", "parameters", "max_length", "extrapolation_claim",
                "used_by", "paper"}  # fmt: skip
    assert all(promised <= set(row) for row in rows)


@pytest.mark.parametrize(
    ("what", "expected"),
    [("encodings", "sinusoidal"), ("extensions", "yarn"), ("models", "medium"),
     ("data", "pysource"), ("tokenizers", "bpe"), ("experiments", "quickstart")],
)  # fmt: skip
def test_lists_show_what_there_is(
    what: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", what]) == 0
    assert expected in capsys.readouterr().out
    assert main(["list", what, "--json"]) == 0
    assert expected in [row["id"] for row in json.loads(capsys.readouterr().out)]


def test_model_list_counts_block_weights_as_the_model_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import torch

    from posbench.encodings import Shape, build
    from posbench.model import GPT

    assert main(["list", "models", "--json"]) == 0
    listed = {row["id"]: row["block_weights"] for row in json.loads(capsys.readouterr().out)}
    size = config.ModelConfig()
    with torch.device("meta"):
        encoding = build(
            NoneConfig(), Shape(size.layers, size.heads, size.head_size, size.width, 128)
        )
        model = GPT(size, encoding, 256)
    weights = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert listed["tiny"] == weights - 256 * size.width


COMPLETIONS = [
    ("posbench tr", ["train"]),
    ("posbench train encoding=sin", ["encoding=sinusoidal"]),
    ("posbench train encoding=rope,sin", ["encoding=rope,sinusoidal"]),
    ("posbench train enc", ["encoding=", "encoding."]),
    ("posbench train encoding=rope encoding.", ["encoding.theta=", "encoding.layout=",
                                                "encoding.global_theta=", "encoding.global_every=",
                                                "encoding.fraction="]),
    ("posbench train encoding=sinusoidal encoding.s", ["encoding.scale="]),
    ("posbench train train.log", ["train.log_every="]),
    ("posbench train device=c", ["device=cpu", "device=cuda"]),
    ("posbench train hydra.run", ["hydra.run.dir="]),
    ("posbench train resu", ["resume=", "resume_strict=", "resume_allow="]),
    ("posbench train --cf", ["--cfg"]),
    ("posbench train --cfg j", ["job"]),
    ("posbench eval-extrapolate extension=y", ["extension=yarn"]),
    ("posbench eval-extrapolate ru", ["runs="]),
    ("posbench list en", ["encodings"]),
    ("posbench completion f", ["fish"]),
    ("posbench sample RUN p", ["prompt=", "plugins=", "plugins_changed="]),
    ("posbench compare FOLDER --b", ["--baseline"]),
    ("posbench power --sd 1 --d", ["--diff"]),
    ("posbench train data.path=/et", []),
]  # fmt: skip


@pytest.mark.parametrize(("line", "expected"), COMPLETIONS)
def test_completion(line: str, expected: list[str]) -> None:
    assert query(line) == expected


def test_completion_knows_the_users_own_options(tmp_path: Path) -> None:
    (tmp_path / "encoding").mkdir()
    (tmp_path / "encoding" / "mine.yaml").write_text("defaults: [/encoding_rope]\n")
    assert query(f"posbench train --config-dir {tmp_path} encoding=m") == ["encoding=mine"]


# ---------------------------------------------------------------- real processes


def process(*words: str, **keywords: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "posbench", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **keywords)


def test_a_real_process_from_another_folder(tmp_path: Path) -> None:
    version = process("--version", cwd=tmp_path)
    assert (version.returncode, version.stdout) == (0, f"posbench {__version__}\n")
    wrong = process("train", "encoding=ropee", cwd=tmp_path)
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1
    shown = process("train", "--cfg", "job", cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "name: rope" in shown.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", ["train --help | head -1", "list encodings | true"])
def test_a_reader_that_stops_reading_is_no_error(words: str) -> None:
    command = f"{sys.executable} -m posbench {words}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("posbench tr", ["train"]),
        ("posbench train encoding=sin", ["sinusoidal"]),  # bash ends a word at =
        ("posbench train --config-dir x encoding=rope encoding.th", ["encoding.theta="]),
    ],
)
def test_the_bash_script_completes(line: str, expected: list[str]) -> None:
    script = f"""
        posbench() {{ {sys.executable} -m posbench "$@"; }}
        eval "$(posbench completion bash)"
        COMP_LINE={shlex.quote(line)}; COMP_POINT=${{#COMP_LINE}}
        compopt() {{ :; }}  # only there while bash itself completes
        COMP_WORDBREAKS=$' \\t\\n"\\'><=;|&(:'
        _posbench; printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, env=os.environ
    )
    assert done.stdout.split() == expected
    assert done.stderr == ""


def test_errors_have_documented_codes() -> None:
    assert {int(kind.code) for kind in PosbenchError.__subclasses__()} <= {1, 2, 3, 4, 5, 6, 130}


# ---------------------------------------------------------------- names too long for a disk

LONG = "n" * 256  # bytes; disks take 255


@pytest.mark.parametrize(
    "typed",
    [
        f"train hydra.run.dir={LONG}",
        f"train hydra.run.dir=x/{LONG}",
        f"train -m hydra.sweep.dir={LONG}",
        f"train resume={LONG}",
        f"train data=text data.path={LONG}",
        f"train encoding={LONG}",
        f"train plugins={LONG}.py",
        f"train --config-dir {LONG}",
        f"eval-extrapolate hydra.run.dir={LONG}",
        f"eval-extrapolate runs={LONG}",
        f"inspect plot={LONG}.png",
        f"check hydra.run.dir={LONG}",
        f"check -m hydra.sweep.dir={LONG}",
        f"study {LONG}",
        f"study {LONG}.yaml",
        f"study extensions --dir {LONG} calibrate=false --check",
        f"compare {LONG}",
        f"report {LONG}",
        f"tb-export {LONG}",
        f"sample {LONG}",
        f"runs {LONG}",
        f"runs diff {LONG} {LONG}",
        f"runs prune {LONG} --yes",
        f"new-encoding {LONG}",
        f"check-encoding {LONG}.py",
    ],
    ids=lambda typed: typed.replace(LONG, "LONG"),
)
def test_a_name_too_long_for_a_disk_is_one_line_and_leaves_nothing(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(typed.split()) in (2, 4)
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert "Traceback" not in said.err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
