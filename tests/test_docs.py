"""What the documentation says exists, resolves, composes, and is what its scripts write."""

from __future__ import annotations

import importlib.util
import re
import shlex
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest

from posbench import configure
from posbench.catalog import (
    ENCODING_CARDS,
    EXTENSION_CARDS,
    POLICY_CARDS,
    EncodingCard,
    ExtensionCard,
)
from posbench.cli import COMMANDS
from posbench.cli.listing import LISTS
from posbench.cli.space import APPS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FAMILY_PAGES = [page for page in PAGES if page.parent.name == "encodings"]
CARDS = (*ENCODING_CARDS, *POLICY_CARDS)
REGENERATE = "run: python scripts/encodings_table.py"


def script(name: str) -> ModuleType:
    path = ROOT / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"posbench_scripts_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def headings(page: Path) -> list[str]:
    return re.findall(r"^## `(\w+)`$", page.read_text(), re.MULTILINE)


# ---------------------------------------------------------------- the page of all encodings


def test_the_page_of_all_encodings_is_what_its_script_writes() -> None:
    table = script("encodings_table")
    assert table.PAGE.read_text() == table.page(), REGENERATE


@pytest.mark.parametrize("card", [*CARDS, *EXTENSION_CARDS], ids=lambda card: card.id)
def test_the_page_of_all_encodings_has_every_id(card: EncodingCard | ExtensionCard) -> None:
    text = (ROOT / "docs" / "encodings.md").read_text()
    assert f"[`{card.id}`](" in text, REGENERATE


def test_what_was_not_measured_says_so_and_what_has_no_number_its_status() -> None:
    table = script("encodings_table")
    row = {"status": "ok", "ppl": "8.0"}
    beyond = {"status": "unsupported", "ppl": ""}
    missing = ("not measured",) * 3
    assert table._cells({}) == (*missing, "")
    assert table._cells({1.0: row, 2.0: beyond, 4.0: beyond}) == (
        "8.00", "unsupported", "unsupported", "",
    )  # fmt: skip
    assert table._cells({1.0: row, 2.0: row, 4.0: row | {"ppl": "12.0"}})[2:] == ("12.00", "1.50")


# ---------------------------------------------------------------- the pages of families


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.id)
def test_every_encoding_is_explained_on_the_page_of_its_family(card: EncodingCard) -> None:
    family = ROOT / "docs" / script("encodings_table").page_of(card.family)
    pages = [page for page in FAMILY_PAGES if page.name != "extensions.md"]
    explained = [page for page in pages for each in headings(page) if each == card.id]
    assert explained == [family], f"explain {card.id} once, below a heading of its own"


def test_every_extension_is_explained_once_in_the_order_of_the_catalogue() -> None:
    page = ROOT / "docs" / "encodings" / "extensions.md"
    assert headings(page) == [card.id for card in EXTENSION_CARDS]


def test_no_page_explains_what_there_is_not() -> None:
    known = {card.id for card in (*CARDS, *EXTENSION_CARDS)}
    assert {each for page in FAMILY_PAGES for each in headings(page)} <= known


def test_every_figure_is_shown_and_together_they_are_small() -> None:
    folder = ROOT / "docs" / "encodings" / "figures"
    drawn = {path.stem: path.stat().st_size for path in folder.iterdir()}
    assert set(drawn) <= set(script("figures").SUBJECTS)
    assert sum(drawn.values()) < 1.5 * 2**20
    text = "".join(page.read_text() for page in FAMILY_PAGES)
    assert {name for name in drawn if f"![{name}](figures/{name}.png)" not in text} == set()


# ---------------------------------------------------------------- links and commands


def anchors(page: Path) -> set[str]:
    """What a link may name after #: headings as they are addressed on GitHub."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line).strip().lower().replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        place = page.parent / path if path else page
        assert place.exists(), target
        if anchor:
            assert anchor in anchors(place), target


def commands(page: Path) -> list[str]:
    """Lines of code blocks that start posbench, without what a shell does around them."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = [
        line.split("  #")[0].strip()
        for block in blocks
        for line in block.replace("\\\n", " ").splitlines()
    ]
    return [line for line in lines if line.startswith("posbench ")]


def choices(word: str) -> list[str]:
    """The single words that a word of a sweep stands for; a choice by pattern is left to Hydra."""
    key, equals, value = word.partition("=")
    if not equals or value.startswith(("[", "glob(")):
        return [] if value.startswith("glob(") else [word]
    return [f"{key}={each}" for each in value.split(",")]


@pytest.mark.parametrize(
    ("page", "line"),
    [(page, line) for page in PAGES for line in commands(page)],
    ids=lambda each: each if isinstance(each, str) else name_of(each),
)
def test_every_command_composes(page: Path, line: str) -> None:
    _, command, *words = shlex.split(line)
    assert command in COMMANDS
    if command == "list":
        assert words[0] in LISTS
    if command not in APPS or any(word.startswith("plugins=") for word in words):
        return  # plain words, or a file that a reader has yet to write
    several = "-m" in words
    words = [word for word in words if word != "-m" and not word.startswith("hydra.")]
    options = [choices(word) if several else [word] for word in words]
    for chosen in product(*filter(None, options)):
        configure(command, *chosen)


def test_the_experiment_trains_every_encoding_and_preset() -> None:
    text = (ROOT / "configs" / "experiment" / "encodings.yaml").read_text()
    assert "encoding: glob(*)" in text
    options = {path.stem for path in (ROOT / "configs" / "encoding").glob("*.yaml")}
    assert options == {card.id for card in CARDS}
