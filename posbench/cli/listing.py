"""`posbench list`: what there is to choose from, as a table or as JSON."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

from posbench import catalog, plugins
from posbench.cli.matching import did_you_mean
from posbench.cli.space import PLUGINS_KEY, options, summary
from posbench.config.encodings import ENCODINGS
from posbench.errors import UserError

HELP = """posbench list WHAT [--json] [plugins=FILE]: what there is to choose from.

  WHAT           one of encodings, extensions, protocols, models, data, tokenizers,
                 experiments, studies
  --json         a JSON array of objects, for programs
  plugins=FILE   encodings of your own too: mine.py, or [a.py,b.py]"""

Row = dict[str, Any]


def _encodings() -> list[Row]:
    cards = [dataclasses.asdict(card) for card in (*catalog.ENCODING_CARDS, *catalog.POLICY_CARDS)]
    foreign = [dataclasses.asdict(_card(plugin)) for plugin in plugins.LOADED.values()]
    return cards + foreign


def _card(plugin: plugins.Plugin) -> catalog.EncodingCard:
    """What can be said of a plugin without building it."""
    rest = [item.name for item in dataclasses.fields(catalog.EncodingCard)][3:]
    words = dict.fromkeys(rest, "not stated") | {"paper": str(plugin.path)}
    return catalog.EncodingCard(plugin.id, "plugin", summary(ENCODINGS[plugin.id]), **words)


def _extensions() -> list[Row]:
    return [dataclasses.asdict(card) for card in catalog.EXTENSION_CARDS]


def _protocols() -> list[Row]:
    return [dataclasses.asdict(card) for card in catalog.PROTOCOL_CARDS]


def _models() -> list[Row]:
    rows = []
    for option in options("model").values():
        values = dict(re.findall(r"^(layers|width|heads): (\d+)", option.path.read_text(), re.M))
        shape = {key: int(value) for key, value in values.items()}
        # The matrices of attention and feed-forward; embeddings come on top.
        weights = 12 * shape["layers"] * shape["width"] ** 2
        rows.append({"id": option.name, **shape, "block_weights": weights, "summary": option.text})
    return rows


def _group(group: str) -> Callable[[], list[Row]]:
    def rows() -> list[Row]:
        return [{"id": item.name, "summary": item.text} for item in options(group).values()]

    return rows


def _studies() -> list[Row]:
    from posbench.cli import studyfile

    loaded = [studyfile.load(path) for path in studyfile.studies().values()]
    return [
        {
            "id": study.name,
            "runs": study.runs,
            "seeds": len(study.train[0].values.get("seed", [0])),
            "encodings": ", ".join(study.encodings),
            "extensions": ", ".join(study.extensions),
            "summary": study.title,
        }
        for study in loaded
    ]


# What can be listed, and the columns a terminal has room for.
LISTS: dict[str, tuple[Callable[[], list[Row]], tuple[str, ...]]] = {
    "encodings": (
        _encodings,
        ("id", "max_length", "extrapolation_claim", "summary"),
    ),
    "extensions": (_extensions, ("id", "formula", "applies_to", "summary")),
    "protocols": (_protocols, ("id", "kind", "scores", "source")),
    "models": (_models, ("id", "layers", "width", "heads", "block_weights", "summary")),
    "data": (_group("data"), ("id", "summary")),
    "tokenizers": (_group("tokenizer"), ("id", "summary")),
    "experiments": (_group("experiment"), ("id", "summary")),
    "studies": (_studies, ("id", "runs", "seeds", "summary")),
}


def run_list(words: list[str]) -> None:
    """Print one list to stdout."""
    as_json = "--json" in words
    named = [word for word in words if word.startswith(f"{PLUGINS_KEY}=")]
    rest = [word for word in words if word not in ("--json", *named)]
    if "--help" in rest or "-h" in rest:
        print(HELP)
        return
    if len(rest) != 1 or rest[0] not in LISTS:
        typed = " ".join(rest)
        hint = did_you_mean(typed, LISTS, "posbench list {}") if typed else ""
        what = f"there is no list {typed!r}." if typed else "say what to list."
        raise UserError(f"{what}{hint} Lists: {', '.join(LISTS)}.")
    files = [path for word in named for path in plugins.named_paths(word.partition("=")[2])]
    with plugins.loaded(files):
        rows, columns = LISTS[rest[0]][0](), LISTS[rest[0]][1]
    if as_json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
    else:
        _print_table(rows, columns)


def _print_table(rows: list[Row], columns: tuple[str, ...]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        number = all(isinstance(row[column], int) for row in rows)
        table.add_column(
            column.replace("_", " "),
            justify="right" if number else "left",
            no_wrap=column == "id",
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(_cell(row[column]) for column in columns))
    Console(markup=False).print(table)


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
