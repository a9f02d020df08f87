"""Encodings of one's own in a file: loaded when named, kept, hashed, never run by themselves."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from posbench import configure, load_run, plugins
from posbench.cli import apps, main
from posbench.cli.own import TEMPLATES, renamed
from posbench.config.encodings import ENCODINGS, RopeConfig
from posbench.encodings import CLASSES, Shape, build
from posbench.errors import CheckpointError, Exit, UserError
from posbench.jobs.train import run_training
from posbench.model import build_model
from posbench.plugins import LOADED
from posbench.runs import PluginError, differences

TEMPLATE = (TEMPLATES / "mine.py").read_text()
QUICK = ["eval.max_targets=256", "eval.bootstrap=100", "device=cpu"]


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    """Every command leaves the tables as they were."""
    before = list(ENCODINGS), list(CLASSES)
    yield
    assert (list(ENCODINGS), list(CLASSES), LOADED) == (*before, {})


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with the template's plugin in it."""
    monkeypatch.chdir(tmp_path)
    write("mine")
    return tmp_path


def write(name: str, text: str = TEMPLATE, file: str | None = None) -> Path:
    path = Path(file or f"{name}.py")
    path.write_text(renamed(text, name))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with mine.py, and below runs/ a run of it and one of rope."""
    folder = tmp_path_factory.mktemp("trained")
    corpus = tiny.write_corpus(folder / "corpus")
    (folder / "mine.py").write_text(TEMPLATE)
    with plugins.loaded([folder / "mine.py"]):
        for number, name in enumerate(("rope", "mine")):
            run_training(tiny.small(corpus, name), folder / "runs" / f"{number}-{name}", ["test"])
    return folder


@pytest.fixture
def runs(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runs, from a folder of its own that holds a copy of mine.py."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(TEMPLATE)
    return trained / "runs"


def evaluate(runs: Path, out: str, *words: str) -> int:
    return main(["eval-extrapolate", f"runs={runs}", f"hydra.run.dir={out}", *QUICK, *words])


def rows_of(out: str) -> dict[str, list[dict[str, str]]]:
    """Rows by encoding."""
    found: dict[str, list[dict[str, str]]] = {}
    with (Path(out) / "results.csv").open() as file:
        for row in csv.DictReader(file):
            found.setdefault(row["encoding"], []).append(row)
    return found


def statuses(out: str) -> dict[str, set[str]]:
    return {name: {row["status"] for row in rows} for name, rows in rows_of(out).items()}


# ---------------------------------------------------------------- a sweep, from the command line


def test_a_plugin_is_trained_and_evaluated_beside_others(work: Path) -> None:
    corpus = tiny.write_corpus(work / "corpus")
    words = [word for word in tiny.overrides(tiny.small(corpus)) if word[:9] != "encoding="]
    sweep = ["train", "-m", "encoding=rope,mine", "plugins=[mine.py]", "hydra.sweep.dir=runs"]
    assert main([*sweep, *words]) == Exit.OK
    manifest = json.loads(Path("runs/1-mine/run.json").read_text())
    kept = Path("runs/1-mine/plugins/mine.py")
    assert kept.read_text() == TEMPLATE
    assert f"plugins={work / 'mine.py'}" in manifest["command"]  # as an absolute path
    sha256 = manifest["settings"]["encoding"]["source"]
    assert manifest["files"]["plugins/mine.py"] == sha256
    assert sha256 == subprocess.check_output(["sha256sum", kept], text=True).split()[0]
    assert not Path("runs/0-rope/plugins").exists()
    assert (
        "source" not in json.loads(Path("runs/0-rope/run.json").read_text())["settings"]["encoding"]
    )
    assert evaluate(Path("runs"), "out", "plugins=[mine.py]") == Exit.OK
    assert statuses("out") == {"rope": {"ok"}, "mine": {"ok"}}
    assert {row["variant"] for row in rows_of("out")["mine"]} == {""}
    assert all(
        row["ci_lo"]
        for row in rows_of("out")["mine"]
        if row["protocol"] == "controlled" and row["metric"] == "ppl"
    )


# ---------------------------------------------------------------- evaluation


def test_without_the_plugin_the_others_are_evaluated(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(runs, "out") == Exit.OK
    assert statuses("out") == {"rope": {"ok"}, "mine": {"skipped"}}
    sentence = (
        "encoding=mine comes from a plugin; add plugins=[mine.py] "
        f"(a copy is in {runs / '1-mine' / 'plugins' / 'mine.py'})."
    )
    assert {row["reason"] for row in rows_of("out")["mine"]} == {sentence}
    assert {row["train_length"] for row in rows_of("out")["mine"]} == {str(tiny.CONTEXT)}
    assert f"warning: {sentence}" in capsys.readouterr().err
    # An evaluation that left a run out is not complete: with the plugin it is done again.
    assert evaluate(runs, "out", "plugins=mine.py") == Exit.OK
    assert statuses("out") == {"rope": {"ok"}, "mine": {"ok"}}


def test_a_run_that_needs_a_plugin_alone_is_exit_2(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(runs / "1-mine", "out") == Exit.USER
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "add plugins=[mine.py]" in said
    assert not Path("out").exists()
    assert main(["sample", str(runs / "1-mine"), "prompt=the"]) == Exit.USER
    assert "add plugins=[mine.py]" in capsys.readouterr().err
    assert main(["sample", str(runs / "1-mine"), "prompt=the", "plugins=mine.py"]) == Exit.OK


def test_nothing_in_a_run_folder_is_run_by_itself(runs: Path, tmp_path: Path) -> None:
    mark = tmp_path / "was-here"
    copy = tmp_path / "run"
    subprocess.run(["cp", "-r", runs / "1-mine", copy], check=True)
    trap = f"{TEMPLATE}\nopen({str(mark)!r}, 'w').close()\n"
    (copy / "plugins" / "mine.py").write_text(trap)
    (copy / "mine.py").write_text(trap)
    assert evaluate(tmp_path / "run", "out") == Exit.USER
    assert main(["train", f"resume={copy}"]) == Exit.USER
    with pytest.raises(PluginError):
        load_run(copy)
    assert evaluate(copy, "out", "plugins=mine.py") == Exit.OK  # mine.py of this folder
    assert not mark.exists()
    # Only who names it runs it; and it is not what the run was trained with.
    assert evaluate(copy, "other", f"plugins={copy / 'plugins' / 'mine.py'}") == Exit.USER
    assert mark.exists()


def test_another_plugin_of_that_name_is_refused_with_both_hashes(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.py").write_text(TEMPLATE + "# changed\n")
    there = json.loads((runs / "1-mine" / "run.json").read_text())["settings"]["encoding"]["source"]
    with plugins.loaded([Path("mine.py")]):
        here = LOADED["mine"].sha256
    assert evaluate(runs, "out", "plugins=[mine.py]") == Exit.OK
    assert statuses("out") == {"rope": {"ok"}, "mine": {"skipped"}}
    for row in rows_of("out")["mine"]:
        assert f"SHA-256 {there[:12]} there, {here[:12]} here" in row["reason"]
        assert "plugins_changed=true" in row["reason"]
        assert row["variant"] == ""
    assert evaluate(runs / "1-mine", "alone", "plugins=[mine.py]") == Exit.USER
    assert f"{there[:12]} there, {here[:12]} here" in capsys.readouterr().err
    # Told to, it evaluates, and every row says with what.
    assert evaluate(runs, "told", "plugins=[mine.py]", "plugins_changed=true") == Exit.OK
    assert statuses("told") == {"rope": {"ok"}, "mine": {"ok"}}
    assert {row["variant"] for row in rows_of("told")["mine"]} == {f"plugin={here[:8]}"}
    assert {row["variant"] for row in rows_of("told")["rope"]} == {""}
    asked = json.loads(Path("told/results.json").read_text())["provenance"]["evaluations"][0]
    assert f"plugin={here[:8]}" in asked["asked"]["runs"][1]
    # The code it was trained with is in the run folder, for who wants it.
    kept = runs / "1-mine" / "plugins" / "mine.py"
    assert evaluate(runs, "kept", f"plugins=[{kept}]") == Exit.OK
    assert statuses("kept") == {"rope": {"ok"}, "mine": {"ok"}}


def test_a_plugin_that_fails_at_evaluation_spoils_only_its_own_rows(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "        slopes = self.log_slope[layer].double().exp()\n"
    text = TEMPLATE.replace(line, f"{line}        assert len(positions) < 20, 'too long'\n")
    Path("mine.py").write_text(text)
    words = ["plugins=[mine.py]", "plugins_changed=true"]
    assert evaluate(runs, "out", *words) == Exit.OK
    assert statuses("out") == {"rope": {"ok"}, "mine": {"skipped"}}
    reason = rows_of("out")["mine"][0]["reason"]
    number = text.splitlines().index("        assert len(positions) < 20, 'too long'") + 1
    assert f"AssertionError: too long (mine.py, line {number})" in reason
    capsys.readouterr()
    assert evaluate(runs / "1-mine", "alone", *words) == Exit.USER
    assert "Traceback" not in capsys.readouterr().err


def test_a_damaged_run_is_still_called_damaged(runs: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    subprocess.run(["cp", "-r", runs / "1-mine", copy], check=True)
    manifest = json.loads((copy / "run.json").read_text())
    for encoding in ({"name": "mine"}, {"name": "mine", "source": 7}, {"name": 7, "source": "a"}):
        changed = manifest | {"settings": manifest["settings"] | {"encoding": encoding}}
        (copy / "run.json").write_text(json.dumps(changed))
        with pytest.raises(CheckpointError):
            load_run(copy)


# ---------------------------------------------------------------- training


def test_a_run_goes_on_with_its_plugin_and_no_other(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs / "1-mine"
    assert main(["train", f"resume={run}"]) == Exit.USER
    assert "add plugins=[mine.py]" in capsys.readouterr().err
    assert main(["train", f"resume={run}", "plugins=[mine.py]"]) == Exit.OK
    assert "complete" in capsys.readouterr().out
    Path("mine.py").write_text(TEMPLATE + "# changed\n")
    assert main(["train", f"resume={run}", "plugins=[mine.py]"]) == Exit.USER
    assert "trained with another mine.py" in capsys.readouterr().err


def test_a_changed_plugin_is_another_run(trained: Path, work: Path) -> None:
    first, second = Path("a.py"), Path("b.py")
    first.write_text(TEMPLATE)
    second.write_text(TEMPLATE + "# changed\n")
    settings = []
    for path in (first, second):
        with plugins.loaded([path]):
            settings.append(tiny.small(trained, "mine"))
    assert set(differences(*settings)) == {"encoding.source"}
    with plugins.loaded([second]), pytest.raises(UserError, match="overwrite=true"):
        run_training(settings[1], trained / "runs" / "1-mine", ["test"])


def test_starting_anew_replaces_what_was_kept(trained: Path, work: Path) -> None:
    settings: list[Any] = []
    for text in (TEMPLATE, TEMPLATE + "# changed\n"):
        Path("mine.py").write_text(text)
        with plugins.loaded([Path("mine.py")]):
            settings.append(tiny.small(trained / "corpus", "mine", steps=2, overwrite=True))
            run_training(settings[-1], work / "run", ["test"])
        assert Path("run/plugins/mine.py").read_text() == text
    with plugins.loaded([Path("run/plugins/mine.py")]):  # from the very file that is replaced
        run_training(settings[-1], work / "run", ["test"])
    assert Path("run/plugins/mine.py").read_text() == TEMPLATE + "# changed\n"
    posbench_s_own = tiny.small(trained / "corpus", "rope", steps=2, overwrite=True)
    run_training(posbench_s_own, work / "run", ["test"])
    assert not Path("run/plugins").exists()


BROKEN = {
    "leaks": (
        "distance_bias=bias)",
        "score_mod=lambda s, b, h, i, j: s + x[b, -1, 0] * j)",
        "causal",
    ),
    "raises": ("distance_bias=bias)", "distance_bias=bias, other=1)", "line"),
    "is not filled": ('std=0.02, generator=generators("log_slope")', "std=float('nan')", "nan"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_training_refuses_a_plugin_that_breaks_a_promise(
    how: str, trained: Path, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new, word = BROKEN[how]
    assert old in TEMPLATE
    Path("mine.py").write_text(TEMPLATE.replace(old, new))
    words = tiny.overrides(tiny.small(trained / "corpus"))
    words[0] = "encoding=mine"
    start = ["train", "plugins=[mine.py]", *words]
    assert main([*start, "hydra.run.dir=run"]) == Exit.USER
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "encoding=mine" in said
    assert word in said
    assert "posbench check-encoding" in said
    assert not Path("run").exists()
    words[0] = "encoding=rope,mine"
    assert main(["train", "-m", "plugins=[mine.py]", *words, "hydra.sweep.dir=s"]) == Exit.USER
    assert "No job was started." in capsys.readouterr().err
    assert not Path("s").exists()


# ---------------------------------------------------------------- what cannot be loaded

CONFIG = '''class MineConfig(EncodingConfig):
    """A bias that falls with the logarithm of the distance, trained per head."""
'''
assert CONFIG in TEMPLATE


def without(text: str, instead: str = "") -> str:
    assert text in TEMPLATE
    return TEMPLATE.replace(text, instead)


BAD = {
    "a mistake": ("import math\nx = 1 / 0\n", ["does not import", "ZeroDivisionError", "line 2"]),
    "no python": ("def f(:\n", ["does not import", "SyntaxError", "line 1"]),
    "no text": ("a\0b", ["does not import"]),
    "an exit": ("raise SystemExit(0)", ["does not import", "SystemExit"]),
    "a missing package": ("import nowhere_to_be_found", ["nowhere_to_be_found", "line 1"]),
    "nothing": ("x = 1\n", ["no encoding", "posbench new-encoding"]),
    "one that is imported": ("from posbench.encodings import Encoding\n", ["no encoding"]),
    "two of one name": (TEMPLATE + "\n\nclass Other(Mine):\n    pass\n", ["two", "Mine and Other"]),
    "a name of posbench": (without('"mine", "id', '"rope", "id'), ["encoding=rope", "own"]),
    "no name": (without('"mine", "id', '"", "id'), ["cannot be an encoding's name"]),
    "a word": (without('"mine", "id', '"true", "id'), ["encoding=true"]),
    "no name of its own": (without("    name: str = setting(", "    n: str = setting("), ["none"]),
    "no settings": (without("    config: MineConfig\n"), ["Mine", "config: MineConfig"]),
    "settings of nothing": (without("    config: MineConfig\n", "    config: Min\n"), ["Min"]),
    "no dataclass": (without(f"@dataclass\n{CONFIG}", CONFIG), ["lacks @dataclass"]),
    "no default": (without(CONFIG, CONFIG + "    x: float\n"), ["non-default argument"]),
    "a kind of setting": (
        without(CONFIG, CONFIG + "    x: tuple[int, int] = (1, 2)\n"),
        ["MineConfig", "a number"],
    ),
    "out of its range": (without("setting(1.0, ", "setting(0.0, "), ["slope=0.0", "too small"]),
    "our own setting": (without(CONFIG, CONFIG + '    source: str = ""\n'), ["source"]),
}


@pytest.mark.parametrize("how", BAD)
def test_a_file_that_is_no_plugin_is_one_line_and_exit_2(
    how: str, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, words = BAD[how]
    Path("mine.py").write_text(text)
    for command in (["check-encoding", "mine.py"], ["train", "plugins=[mine.py]", "--cfg", "job"]):
        assert main(command) == Exit.USER
        said = capsys.readouterr()
        assert said.err.count("\n") == 1, said.err
        assert "mine.py" in said.err
        assert "Traceback" not in said.err
        for word in words:
            assert word in said.err


MISTAKES = [
    ("train plugins=nowhere.py", ["plugins=nowhere.py", "no such file"]),
    ("train plugins=a.py,b.py", ["plugins=[a.py,b.py]"]),
    ("train plugins=.", ["is a folder"]),
    ("train plugins=mine.yaml", ["Python file"]),
    ("train plugins=", ["names no file"]),
    ("train plugins=[]", ["names no file"]),
    ("train plugins=[mine.py,again.py]", ["encoding=mine", "mine.py"]),
    ("train encoding=mine", ["add plugins=[mine.py]"]),
    ("train encoding=mine plugins=mine.py encoding.slop=1", ["Did you mean encoding.slope?"]),
    ("train encoding=mine plugins=mine.py encoding.slope=0", ["encoding.slope=0.0", "too small"]),
    ("train encoding=mine plugins=mine.py encoding.slope=x", ["must be a number"]),
    ("train encoding=mine plugins=mine.py encoding.source=a", ["cannot be set"]),
    ("train encoding=mine plugins=mine.py encoding.source=", ["cannot be set"]),
    ("train encoding=rope encoding.slope=2 plugins=mine.py", ["belongs to encoding=mine"]),
    ("train encoding=rope encoding.source=a", ["encoding.source is not a setting"]),
    ("new-encoding", ["one name"]),
    ("new-encoding a b", ["one name"]),
    ("new-encoding mine", ["mine.py is there already"]),
    ("new-encoding rope", ["posbench's own"]),
    ("new-encoding My-Own", ["small letters"]),
    ("new-encoding null", ["encoding=null"]),
    ("new-encoding ../x", ["small letters"]),
    ("check-encoding", ["posbench check-encoding mine.py"]),
    ("check-encoding nowhere.py", ["no such file"]),
    ("check-encoding mine.py other", ["has no encoding other", "mine"]),
    ("sample RUN plugins=nowhere.py", ["no such file"]),
    ("sample RUN plugins_changed=perhaps", ["true or false"]),
    ("list encodings plugins=nowhere.py", ["no such file"]),
    ("inspect encoding=mine plugins=nowhere.py", ["no such file"]),
]


@pytest.mark.parametrize(("typed", "words"), MISTAKES, ids=[typed for typed, _ in MISTAKES])
def test_a_mistake_gets_one_line_and_exit_2(
    typed: str, words: list[str], work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write("mine", file="again.py")
    Path("mine.yaml").write_text("slope: 2.0\n")
    before = {path: path.read_text() for path in work.iterdir()}
    assert main(typed.split()) == Exit.USER
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    for word in words:
        assert word in said
    # A refused command writes nothing, but for the (empty) folder of all outputs.
    assert {path: path.read_text() for path in work.iterdir() if path.is_file()} == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("slop: 1\n", ["unknown setting 'slop'"]),
        ("slope: fast\n", ["slope='fast' is not a number"]),
        ("slope: 0\n", ["slope=0.0", "too small"]),
        ("name: other\n", ["name is set by the class"]),
        ("- 1\n", ["setting: value"]),
        ("slope: [\n", ["line 2", "not valid YAML"]),
        ("source: a\n", ["unknown setting 'source'"]),
        ("_target_: os.abort\n", ["unknown setting '_target_'"]),
    ],
)
def test_a_mistake_in_the_yaml_names_the_file(
    text: str, words: list[str], work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.yaml").write_text(text)
    assert main(["train", "encoding=mine", "plugins=[mine.py]", "--cfg", "job"]) == Exit.USER
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    for word in ("mine.yaml", *words):
        assert word in said


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(("text", "expected"), [(None, 1.0), ("slope: 5e-1\n", 0.5), ("#\n", 1.0)])
def test_the_yaml_beside_the_file_gives_the_defaults(
    text: str | None, expected: float, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        Path("mine.yaml").write_text(text)
    with plugins.loaded([Path("mine.py")]):
        assert configure("train", "encoding=mine").encoding == ENCODINGS["mine"]()
        assert ENCODINGS["mine"]().slope == expected
        assert configure("train", "encoding=mine", "encoding.slope=3").encoding.slope == 3.0
    assert main(["train", "plugins=mine.py", "--help"]) == Exit.OK
    shown = capsys.readouterr().out
    assert f"encoding.slope={expected:g}" in shown
    assert "encoding.source" not in shown
    meaning = "A bias that falls with the logarithm of the distance, trained per head."
    assert meaning in " ".join(shown.split())


def test_posbenchs_own_settings_know_nothing_of_plugins(work: Path) -> None:
    """Runs made before there were any keep their fingerprints."""
    assert "source" not in {item.name for item in dataclasses.fields(RopeConfig)}


def test_several_files_and_several_encodings_in_one(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write("other", TEMPLATE.replace("from __future__", "# other\nfrom __future__"), "two words.py")
    with Path("mine.py").open("a") as file:
        file.write(renamed(TEMPLATE.split("setting\n\n\n")[1], "third"))
    assert main(["list", "encodings", "--json", "plugins=['two words.py', mine.py]"]) == Exit.OK
    listed = [each["id"] for each in json.loads(capsys.readouterr().out)]
    assert listed[-3:] == ["other", "mine", "third"]
    assert main(["inspect", "encoding=third", "plugins=mine.py"]) == Exit.OK
    assert "source" not in capsys.readouterr().out
    assert main(["list", "encodings", "--json"]) == Exit.OK
    assert "mine" not in capsys.readouterr().out


def test_a_plugin_is_not_left_behind(work: Path) -> None:
    assert main(["train", "encoding=mine", "plugins=mine.py", "--cfg", "job"]) == Exit.OK
    assert main(["train", "encoding=mine", "--cfg", "job"]) == Exit.USER
    with pytest.raises(UserError, match="is not an encoding"):
        build("mine", Shape(1, 2, 8, 16, 32))


def test_a_file_loaded_again_is_read_anew(work: Path) -> None:
    """As in a notebook, where the cell runs again after an edit."""
    before = set(LOADED)
    try:
        first = configure("train", "encoding=mine", "plugins=[mine.py]").encoding
        Path("mine.py").write_text(TEMPLATE.replace("setting(1.0", "setting(2.0"))
        second = configure("train", "encoding=mine", "plugins=[mine.py]").encoding
        assert (first.slope, second.slope) == (1.0, 2.0)
        assert first.source != second.source
        with pytest.raises(UserError, match="already that of"):
            plugins.load([write("mine", file="again.py")])
    finally:
        for name in set(LOADED) - before:
            plugins._forget(name)


def test_a_plugin_may_build_on_posbenchs_own(work: Path) -> None:
    Path("slow.py").write_text(
        "from dataclasses import dataclass\n"
        "from posbench.config.encodings import RopeConfig\n"
        "from posbench.encodings.rotary import Rope\n"
        "from posbench.plugin import setting\n\n"
        "@dataclass\n"
        "class SlowConfig(RopeConfig):\n"
        "    '''RoPE at half the speed.'''\n"
        "    name: str = setting('slow', 'id of the scheme')\n\n"
        "class Slow(Rope):\n"
        "    config: SlowConfig\n"
        "    def trained(self, device):\n"
        "        return super().trained(device) / 2\n"
    )
    size = Shape(1, 2, 8, 16, 32)
    with plugins.loaded([Path("slow.py")]):
        slow = build("slow", size, theta=100.0)
        described = slow.describe(4)["inverse_frequencies"]
    plain = build("rope", size, theta=100.0).describe(4)["inverse_frequencies"]
    assert torch.equal(2 * described, plain)


# ---------------------------------------------------------------- new-encoding


def test_new_encoding_writes_a_plugin_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new-encoding", "log_fall"]) == Exit.OK
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log_fall.py", "log_fall.yaml"]
    text = Path("log_fall.py").read_text() + Path("log_fall.yaml").read_text()
    assert not re.search(r"\bmine\b|Mine", text)
    with plugins.loaded([Path("log_fall.py")]):
        assert configure("train", "encoding=log_fall").encoding.slope == 1.0
        assert CLASSES["log_fall"].__name__ == "LogFall"
    assert main(["new-encoding", "log_fall"]) == Exit.USER
    Path("log_fall.py").unlink()
    assert main(["new-encoding", "log_fall"]) == Exit.USER  # the YAML is there still
    assert not Path("log_fall.py").exists()


# ---------------------------------------------------------------- installed packages


def install(folder: Path, package: str, module: str, text: str, value: str | None = None) -> None:
    """A distribution as pip leaves it: a module, and metadata with an entry point."""
    (folder / f"{module}.py").write_text(text)
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    point = f"[posbench.encodings]\nsomething = {value or module}\n"
    (info / "entry_points.txt").write_text(point)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path in which packages can be installed."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in [
        n for n, m in sys.modules.items() if str(folder) in str(getattr(m, "__file__", ""))
    ]:
        del sys.modules[name]


@pytest.mark.parametrize("value", ["posmine_module", "posmine_module:Mine"])
def test_an_installed_package_registers_its_encodings(
    value: str, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    install(site, "posmine", "posmine_module", TEMPLATE, value)
    ran: list[Any] = []
    monkeypatch.setattr(apps, "run", lambda *given: ran.append(given))
    for _ in range(2):
        assert main(["train", "encoding=mine", "encoding.slope=2", "hydra.run.dir=run"]) == Exit.OK
    assert ran[0][0].encoding.slope == 2.0
    assert len(ran[0][0].encoding.source) == 64
    assert main(["list", "encodings"]) == Exit.OK


def test_an_installed_run_is_evaluated_without_plugins(
    runs: Path, site: Path, tmp_path: Path
) -> None:
    install(site, "posmine", "posmine_module", TEMPLATE)  # the very code it was trained with
    assert evaluate(runs, "out") == Exit.OK
    assert statuses("out") == {"rope": {"ok"}, "mine": {"ok"}}


@pytest.mark.parametrize(
    ("text", "value", "words"),
    [
        (TEMPLATE.replace('"mine", "id', '"rope", "id'), None, ["encoding=rope", "own"]),
        ("x = 1\n", None, ["has no encoding"]),
        ("import nowhere_to_be_found\n", None, ["cannot be loaded", "nowhere_to_be_found"]),
        (TEMPLATE, "posmine_module:Nothing", ["cannot be loaded", "Nothing"]),
    ],
)
def test_an_installed_package_that_does_not_fit_is_named(
    text: str, value: str | None, words: list[str], site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(site, "posmine", "posmine_module", text, value)
    assert main(["list", "encodings"]) == Exit.USER
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    for word in ("installed package posmine", *words):
        assert word in said


def test_a_file_may_not_take_the_name_of_an_installed_encoding(
    work: Path, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(site, "posmine", "posmine_module", TEMPLATE)
    assert main(["train", "plugins=[mine.py]", "--cfg", "job"]) == Exit.USER
    assert "already that of the installed package posmine" in capsys.readouterr().err


def test_help_loads_no_installed_package(site: Path) -> None:
    install(site, "posmine", "posmine_module", "raise SystemExit('it was loaded')")
    for words in (["--help"], ["--version"], ["completion", "bash"], ["train", "--version"]):
        assert main(words) == Exit.OK


# ---------------------------------------------------------------- build, anywhere


def test_build_takes_an_id_or_settings_and_a_seed() -> None:
    size = Shape(2, 4, 8, 32, 64)
    by_name, by_config = (
        build("rope", size, theta=500_000.0),
        build(RopeConfig(theta=500_000.0), size),
    )
    assert by_name.config == by_config.config
    for words, message in (
        ({"encoding": "ropee"}, "is not an encoding"),
        ({"encoding": "rope", "thetta": 1.0}, "thetta"),
        ({"encoding": "rope", "theta": 0.0}, "rope.theta=0.0 is too small"),
        ({"encoding": RopeConfig(), "theta": 1.0}, "theta"),
    ):
        with pytest.raises(UserError, match=message):
            build(shape=size, **words)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["learned", "t5", "fox", "kerple_log"])
def test_a_seed_gives_the_parameters_of_posbenchs_own_model(name: str) -> None:
    model = build_model(tiny.small(Path(), name).model, ENCODINGS[name](), 16, 50, seed=3)
    built = build(name, model.encoding.shape, seed=3)
    expected = model.encoding.state_dict()
    assert built.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in built.state_dict().items())


def test_the_plugin_module_offers_what_the_template_needs() -> None:
    import posbench.plugin

    for name in posbench.plugin.__all__:
        assert hasattr(posbench.plugin, name)
