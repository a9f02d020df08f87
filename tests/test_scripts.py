"""The scripts: what they start, where it goes, and what a missing part gets."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from posbench.cli.slots import cores

ROOT = Path(__file__).resolve().parent.parent

# Stands in for a program of the virtual environment: notes its words, one line per call.
NOTES = '#!/bin/sh\necho "$@" >> "$NOTES"\n'
# The same for python, which does work when asked a question.
PYTHON = f'#!/bin/sh\n[ "$1" = -c ] && exec "{sys.executable}" "$@"\necho "$@" >> "$NOTES"\n'
# A Debian python3 without python3-venv.
BARE = f"""#!/bin/sh
[ "$1" = -m ] || exec "{sys.executable}" "$@"
echo "The virtual environment was not created successfully because ensurepip is not available."
exit 1
"""


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a script that finds posbench installed: programs that only take notes."""
    folder = tmp_path / "venv"
    script(folder / "bin" / "posbench", NOTES)
    script(folder / "bin" / "python", PYTHON)
    wanted = "cat pyproject.toml constraints.txt | cksum"
    done = subprocess.run(wanted, shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
    (folder / ".posbench-installed").write_text(done.stdout)
    environment = os.environ | {"VENV": str(folder), "NOTES": str(tmp_path / "notes")}
    environment.pop("POSBENCH_OUTPUTS", None)
    return environment


def notes(environment: dict[str, str]) -> list[list[str]]:
    """The words of each call."""
    return [line.split() for line in Path(environment["NOTES"]).read_text().splitlines()]


def run(
    name: str, environment: dict[str, str], words: Sequence[str] = (), cwd: Path = ROOT
) -> None:
    command = [str(ROOT / "scripts" / name), *words]
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def value(words: list[str], key: str) -> Path:
    return Path(next(word.split("=", 1)[1] for word in words if word.startswith(f"{key}=")))


def test_quickstart_goes_where_a_bare_evaluation_looks(
    installed: dict[str, str], tmp_path: Path
) -> None:
    run("quickstart.sh", installed, cwd=tmp_path)
    train, evaluate = notes(installed)
    sweep = value(train, "hydra.sweep.dir")
    assert sweep.parent == Path("outputs/train")
    assert sweep.name.startswith("quickstart-")
    assert value(evaluate, "runs") == sweep
    assert value(evaluate, "hydra.run.dir") == Path("outputs/eval-extrapolate") / sweep.name


def test_quickstart_heeds_the_folder_of_all_outputs(
    installed: dict[str, str], tmp_path: Path
) -> None:
    run("quickstart.sh", installed | {"POSBENCH_OUTPUTS": str(tmp_path / "all")}, cwd=tmp_path)
    train, evaluate = notes(installed)
    assert value(train, "hydra.sweep.dir").parent == tmp_path / "all" / "train"
    assert value(evaluate, "hydra.run.dir").parent == tmp_path / "all" / "eval-extrapolate"


@pytest.mark.parametrize("absolute", [False, True])
def test_quickstart_takes_a_folder_as_its_caller_means_it(
    installed: dict[str, str], tmp_path: Path, absolute: bool
) -> None:
    run("quickstart.sh", installed, [str(tmp_path / "mine") if absolute else "mine"], cwd=tmp_path)
    train, evaluate = notes(installed)
    assert value(train, "hydra.sweep.dir") == value(evaluate, "runs") == tmp_path / "mine" / "train"
    assert value(evaluate, "hydra.run.dir") == tmp_path / "mine" / "eval"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity is a thing of Linux")
def test_tests_run_on_the_cores_they_may_use(installed: dict[str, str], tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})  # inherited by the script
        run("test.sh", installed)
        assert cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    run("test.sh", installed)
    run("test.sh", installed, ["tests/test_model.py"])
    one, all_of_them, given = notes(installed)
    assert one[one.index("-n") + 1] == "1"
    assert all_of_them[all_of_them.index("-n") + 1] == str(cores())
    assert given == ["-m", "pytest", "tests/test_model.py"]


def test_a_python_that_makes_no_environments_names_the_package(tmp_path: Path) -> None:
    copied = tmp_path / "clone"
    shutil.copytree(ROOT / "scripts", copied / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, copied)
    environment = os.environ | {"PYTHON": str(script(tmp_path / "python3", BARE))}
    environment.pop("VENV", None)
    done = subprocess.run(
        [str(copied / "scripts" / "test.sh")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "ensurepip is not available" in done.stdout + done.stderr
    assert "apt install python3-venv" in done.stderr.splitlines()[-1]
