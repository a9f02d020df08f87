"""The wheel, installed in a fresh virtual environment, works from any folder."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """posbench built as a wheel, without isolation: the build backend is among the dev tools."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/posbench of a new environment: posbench from the wheel, its dependencies borrowed."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*install, "--no-deps", "--no-index", str(wheel)], check=True)
    # A line in a .pth file adds a folder, but not the editable installs inside that folder.
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "bin" / "posbench"


def test_wheel_holds_configs_and_templates(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for source in (ROOT / "configs").rglob("*.yaml"):
        assert f"posbench/configs/{source.relative_to(ROOT / 'configs').as_posix()}" in names
    for source in (ROOT / "posbench").rglob("*.j2"):
        assert f"posbench/{source.relative_to(ROOT / 'posbench').as_posix()}" in names
    assert {"posbench/templates/mine.py", "posbench/templates/mine.yaml"} <= names
    assert not [name for name in names if name.startswith(("tests/", "outputs/"))]


def test_installed_commands_work_from_another_folder(installed: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(60):
        lines = [f"line {i} of document {number}, " * 2 for i in range(12)]
        (text / f"{number}.txt").write_text("\n".join(lines))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"POSBENCH_CACHE": str(tmp_path / "cache")}
    environment.pop("POSBENCH_OUTPUTS", None)

    def posbench(*words: str) -> str:
        done = subprocess.run(
            [str(installed), *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    location = subprocess.run(
        [str(installed.with_name("python")), "-c", "import posbench; print(posbench.__file__)"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert str(installed.parent.parent) in location.stdout
    assert {"rope", "alibi"} <= {
        each["id"] for each in json.loads(posbench("list", "encodings", "--json"))
    }
    small = ["model.layers=1", "model.width=32", "model.heads=2", "context=32", "train.steps=3"]
    small.append("device=cpu")
    posbench("train", "encoding=rope", "data=text", "data.path=text", "data.test=0.3", *small)
    posbench("eval-extrapolate", "eval.max_targets=512", "device=cpu")
    folder = next((tmp_path / "outputs" / "eval-extrapolate").iterdir())
    rows = list(csv.DictReader((folder / "results.csv").open()))
    assert {row["status"] for row in rows} == {"ok"}
    assert len([row for row in rows if row["metric"] == "ppl"]) == 9
    for name in ("results.json", "report.md", "report.html", "curves.png"):
        assert (folder / name).stat().st_size > 0
