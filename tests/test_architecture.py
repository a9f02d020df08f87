"""Which module may know which, and what must stay quick to start."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import posbench

ROOT = Path(posbench.__file__).parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}

# Left: a module and all below it. Right: all it may import from posbench.
ONLY = {
    "version": set(),
    "errors": set(),
    "catalog": set(),
    "progress": set(),
    "config": {"config"},
    "rules": {"config", "errors"},
    "saved": {"config"},
    "files": {"errors"},
    "toolchain": set(),
    "schema": set(),
    "results": {"files", "errors", "schema"},
    "plugin": {"encodings", "config", "errors"},
    "templates": {"plugin"},
    "encodings": {"encodings", "config", "errors", "rules"},
    "longrope_search": {"encodings", "config", "errors"},
    "attention": {"encodings", "toolchain", "config", "errors"},
    "model": {"attention", "encodings", "config", "errors"},
}

# Left: what is imported. Right: the only ones that may.
OWNERS = {
    "cli": {"cli", "__main__"},
    "jobs": {"jobs", "cli"},
    "training": {"jobs"},
    "evaluation": {"jobs"},
    "board": {"jobs", "board", "journal"},
    "inspection": {"inspection", "cli"},
    "promises": {"promises", "jobs", "cli"},
}

LIBRARIES = {
    "hydra": {"cli"},
    "omegaconf": {"cli"},
    "tensorboard": {"board"},
    "transformers": {"foreign"},
}


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports, wherever in it, except for type checking alone."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            yield from (f"{node.module}.{name.name}" for name in node.names)


def own_imports(path: Path) -> set[str]:
    """Top-level modules of posbench that a file imports."""
    found = {name.split(".")[1] for name in imports(path) if name.startswith("posbench.")}
    return {name for name in found if name in {module.split(".")[0] for module in MODULES}}


def top(module: str) -> str:
    return module.split(".")[0]


@pytest.mark.parametrize("module", [module for module in MODULES if top(module) in ONLY])
def test_the_lower_modules_know_only_what_lies_below(module: str) -> None:
    assert own_imports(MODULES[module]) <= ONLY[top(module)]


@pytest.mark.parametrize("module", [module for module in MODULES if module])
def test_the_upper_modules_are_known_only_above(module: str) -> None:
    wrong = {
        name
        for name in own_imports(MODULES[module])
        if name in OWNERS and top(module) not in OWNERS[name] | {name}
    }
    assert wrong == set()


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_has_one_place(library: str) -> None:
    importers = {
        top(module)
        for module, path in MODULES.items()
        if any(name.split(".")[0] == library for name in imports(path))
        # torch's own way to TensorBoard counts as TensorBoard
        or any(name.startswith(f"torch.utils.{library}") for name in imports(path))
    }
    assert importers == LIBRARIES[library]


def test_the_rules_see_imports_inside_functions() -> None:
    assert "jobs" in own_imports(MODULES["cli.apps"])  # imported when a command runs
    assert {"attention", "encodings"} <= own_imports(MODULES["model"])


def test_no_scheme_is_asked_for_its_name() -> None:
    """Choices between encodings go through the contract, never through `if name == ...`."""
    names = {"sinusoidal", "learned", "rope", "alibi"}
    files = [path for module, path in MODULES.items() if top(module) in
             {"attention", "encodings", "evaluation", "model", "scoring", "training"}]  # fmt: skip
    found = [
        f"{path.name}:{node.lineno}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        and any(isinstance(part, ast.Constant) and part.value in names for part in ast.walk(node))
    ]
    assert files
    assert found == []


def modules_after(code: str, tmp_path: Path) -> set[str]:
    """The modules a fresh process has imported when `code` has run."""
    script = f"{code}\nimport sys; print('MODULES', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("MODULES"))
    return set(line.split()[1:])


HEAVY = {"torch", "numpy", "scipy", "matplotlib", "datasets", "tokenizers", "tensorboard"}


@pytest.mark.parametrize(
    ("words", "also_absent"),
    [
        (["--help"], ["hydra", "rich"]),
        (["--version"], ["hydra", "rich"]),
        (["list", "encodings"], ["hydra"]),
        (["compare", "--help"], ["hydra", "rich"]),
        (["power", "--help"], ["hydra", "rich"]),
        (["completion", "bash"], ["hydra", "rich"]),
        (["completion", "query", "posbench train encoding="], ["hydra", "rich"]),
        (["runs"], ["hydra"]),
        (["check", "--help"], []),
        (["check", "train", "-m", "data=copy", "encoding=rope,alibi"], []),
        (["train", "--help"], []),
        (["train", "--cfg", "job"], []),
        (["eval-extrapolate", "--cfg", "job"], []),
    ],
    ids=" ".join,
)
def test_words_come_without_torch(words: list[str], also_absent: list[str], tmp_path: Path) -> None:
    code = f"from posbench.cli import main; assert main({words!r}) == 0"
    assert modules_after(code, tmp_path) & HEAVY.union(also_absent) == set()


def test_mistakes_come_without_torch(tmp_path: Path) -> None:
    words = ["train", "-m", "model.heads=4,3"]
    code = f"from posbench.cli import main; assert main({words!r}) == 2"
    assert modules_after(code, tmp_path) & HEAVY == set()


def test_the_package_and_its_settings_are_light(tmp_path: Path) -> None:
    light = "import posbench, posbench.config, posbench.catalog, posbench.files, posbench.results"
    assert modules_after(light, tmp_path) & (HEAVY | {"hydra"}) == set()
    bare = {name for name in modules_after("import posbench", tmp_path) if name.startswith("posb")}
    assert bare == {"posbench", "posbench.version"}


def test_the_public_functions_are_there() -> None:
    for name in posbench.__all__:
        assert hasattr(posbench, name), name
    assert set(posbench.__all__) <= set(dir(posbench))
    with pytest.raises(AttributeError, match="trian"):
        posbench.trian  # noqa: B018
