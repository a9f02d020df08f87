"""YAML of a person's own chooses settings; it never names code that Hydra would run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import posbench.cli.apps
from posbench.cli import main

HEADER = "# @package _global_\n"

# Files of a --config-dir; {mark} is a file that exists once the code they name has run.
HARMFUL = {
    "plain": {"x.yaml": "hydra: {{callbacks: {{a: {{_target_: logging.FileHandler}}}}}}"},
    "escaped": {
        "x.yaml": 'hydra: {{callbacks: {{a: {{"\\x5ftarget_": logging.FileHandler, '
        "filename: {mark}}}}}}}"
    },
    "merged": {
        "x.yaml": "hydra:\n  help: {{template: &t x}}\n  callbacks:\n"
        "    a: {{? !!str _target_ : logging.FileHandler, filename: {mark}}}"
    },
    "interpolated": {
        "x.yaml": "hydra: {{callbacks: {{a: \"${{oc.create:'{{\\x5ftarget_: logging.FileHandler, "
        "filename: {mark}}}'}}\"}}}}"
    },
    "handler": {
        "x.yaml": "hydra: {{job_logging: {{version: 1, root: {{handlers: [f]}}, "
        "handlers: {{f: {{class: logging.handlers.WatchedFileHandler, filename: {mark}}}}}}}}}"
    },
    "factory": {
        "x.yaml": "hydra: {{hydra_logging: {{version: 1, root: {{handlers: [f]}}, "
        "handlers: {{f: {{(): logging.FileHandler, filename: {mark}}}}}}}}}"
    },
    "launcher": {"x.yaml": "hydra: {{launcher: {{_target_: logging.FileHandler}}}}"},
    "nested": {
        "x.yaml": "hydra: {{sweeper: {{params: {{a: {{_target_: logging.FileHandler, "
        "filename: {mark}}}}}}}}}"
    },
}


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The settings of each run that was started, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    settings: list[Any] = []
    monkeypatch.setattr(posbench.cli.apps, "run", lambda *given: settings.append(given[0]))
    return settings


def write(folder: Path, files: dict[str, str], mark: Path) -> None:
    for name, text in files.items():
        (folder / "experiment").mkdir(parents=True, exist_ok=True)
        (folder / "experiment" / name).write_text(HEADER + text.format(mark=mark) + "\n")


@pytest.mark.parametrize("kind", HARMFUL)
@pytest.mark.parametrize("linked", [False, True], ids=["there", "behind a link"])
def test_yaml_that_names_code_is_refused(
    kind: str, linked: bool, tmp_path: Path, ran: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "true", HARMFUL[kind], tmp_path / "mark")
    own = tmp_path / "true"
    if linked:
        own = tmp_path / "own"
        own.mkdir()
        (own / "experiment").symlink_to(tmp_path / "true" / "experiment")
    assert main(["train", "--config-dir", str(own), "experiment=x"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "x.yaml" in said
    assert ran == []
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("kind", HARMFUL)
@pytest.mark.parametrize("words", [[], ["-m", "hydra/launcher=basic"]], ids=["one", "sweep"])
def test_code_from_a_file_outside_the_folder_is_refused_before_it_runs(
    kind: str, words: list[str], tmp_path: Path, ran: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """A defaults list may climb out of the folder that was read; Hydra's result is read too."""
    write(tmp_path / "far", HARMFUL[kind], tmp_path / "mark")
    own = tmp_path / "own"
    (own / "experiment").mkdir(parents=True)
    (own / "experiment" / "y.yaml").write_text(
        HEADER + "defaults: [/../far/experiment/x@_global_]\n"
    )
    assert main(["train", "--config-dir", str(own), "experiment=y", *words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "Traceback" not in said
    assert ran == []
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"a: [1,\n", "line 3"),
        (b"a: ${b\n", "x.yaml"),
        (b"a: \xff\n", "UTF-8"),
        (b"a: 1\na: 2\n", "duplicate"),
    ],
)
def test_malformed_yaml_is_one_line_that_names_it(
    text: bytes, says: str, tmp_path: Path, ran: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    (tmp_path / "own" / "experiment" / "x.yaml").write_bytes(HEADER.encode() + text)
    assert main(["train", "--config-dir", "own", "experiment=x"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "x.yaml" in said
    assert says in said


def test_a_folder_of_settings_is_welcome(tmp_path: Path, ran: list[Any]) -> None:
    files = {
        "x.yaml": "# _target_ in a comment is only a word\nseed: 3\nhydra: {{job: {{name: own}}}}",
        "empty.yaml": "",
    }
    write(tmp_path / "own", files, tmp_path)
    (tmp_path / "own" / "loop").symlink_to(tmp_path / "own")
    words = ["train", "--config-dir", "own", "experiment=x"]
    assert main(words) == 0
    assert main([*words, "hydra/job_logging=default", "hydra/hydra_logging=default"]) == 0
    assert main([*words, "-m", "seed=4,5", "hydra/launcher=basic"]) == 0
    assert [settings.seed for settings in ran] == [3, 3, 4, 5]
