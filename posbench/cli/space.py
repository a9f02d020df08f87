"""What can be typed after each command: groups, their options, keys. Neither Hydra nor torch.

Help, completion, lists and the nearest match for a typing error all read it here, from the
dataclasses and the YAML files themselves.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from posbench import config, plugins
from posbench.config.fields import default_of
from posbench.config.policies import PRESETS

_PACKAGE = Path(__file__).resolve().parents[1]


def configs_folder() -> Path:
    """Where the YAML files are: inside an installed package, beside it in a checkout."""
    places = (_PACKAGE / "configs", _PACKAGE.parent / "configs")
    return next(folder for folder in places if (folder / "train.yaml").is_file())


@dataclass(frozen=True)
class App:
    """One command that takes settings: their dataclass, and the groups to choose from."""

    command: str
    summary: str
    settings: type[Any]
    groups: tuple[str, ...]
    examples: tuple[str, ...]


APPS = {
    app.command: app
    for app in (
        App(
            "train",
            "train one model with one encoding, or a sweep of them",
            config.TrainSettings,
            ("encoding", "model", "data", "tokenizer", "experiment"),
            (
                "posbench train encoding=alibi",
                "posbench train encoding=rope encoding.theta=500000 train.steps=2000",
                "posbench train -m encoding=rope,alibi seed=0,1,2",
                "posbench train data=text data.path=book.txt",
                "posbench train -m data=copy encoding=rope,alibi context=32",
                "posbench train experiment=quickstart",
                "posbench train resume=outputs/train/20261130-061502-1f3a-rope",
            ),
        ),
        App(
            "eval-extrapolate",
            "measure perplexity, or the task trained on, at 1x, 2x, 4x the training length",
            config.EvalSettings,
            ("eval", "extension", "data"),
            (
                "posbench eval-extrapolate",
                "posbench eval-extrapolate runs=outputs/train/20261130-061502-1f3a-rope",
                "posbench eval-extrapolate -m extension=none,ntk,yarn",
                "posbench eval-extrapolate -m extension=none,pi extension.finetune_steps=0,200",
                "posbench eval-extrapolate eval.ratios=[0.5,1,2,4,8,16]",
                "posbench eval-extrapolate eval=all",
                "posbench eval-extrapolate model=hf:FOLDER data=text data.path=book.txt",
            ),
        ),
        App(
            "estimate",
            "say what a training run, or a sweep of them, would cost",
            config.EstimateSettings,
            ("encoding", "model", "data", "tokenizer", "experiment"),
            (
                "posbench estimate encoding=alibi model=small context=512",
                "posbench estimate -m encoding=rope,t5,fire seed=0,1,2",
                "posbench estimate experiment=quickstart",
                "posbench estimate model=medium context=2048 calibrate=false format=json",
            ),
        ),
        App(
            "inspect",
            "show the numbers an encoding works with",
            config.InspectSettings,
            ("encoding", "extension", "model"),
            (
                "posbench inspect encoding=alibi model.heads=12 model.width=768",
                "posbench inspect encoding=rope extension=yarn eval_length=512 format=json",
                "posbench inspect encoding=rope plot=rope.png",
            ),
        ),
    )
}

# Settings of Hydra's own that a person may have a use for.
HYDRA_KEYS = {
    "hydra.run.dir": "folder of this run",
    "hydra.sweep.dir": "folder of a sweep, to begin there or to go on with; without it, the same "
    "command goes on with its newest unfinished sweep",
    "hydra.sweep.subdir": "name of a job's folder inside it",
    "hydra.launcher.jobs": "jobs at a time; null: one per GPU, or one per CPU core",
    "hydra.launcher.jobs_per_gpu": "jobs side by side on each GPU (1)",
    "hydra.launcher.timeout": "seconds that one job may take; null: no limit",
    "hydra.launcher.on_failure": "continue with the other jobs, or stop them all",
    "hydra/launcher": "posbench: a process per job; basic: one after another in this process; "
    "joblib, submitit_local: from packages of their own",
}

# How a setting is typed whose own name differs: Hydra would look for `model=` among the sizes.
TYPED = {"models": "model"}

# What `posbench train` takes besides settings: it goes on with a run instead of composing one.
RESUME_KEYS = {
    "resume": "go on with the run in this folder, with its own settings",
    "resume_strict": "true refuses to go on where the result would not be bit-exact",
    "resume_allow": "changes admitted although they change the result: [data,schedule]",
}

# Read before any setting, by every command that knows encodings: it names code to run.
PLUGINS_KEY = "plugins"
PLUGINS_HELP = {
    PLUGINS_KEY: "files with encodings of your own, mine.py or [a.py,b.py]; each runs as code. "
    "`posbench new-encoding mine` writes an example"
}


@dataclass(frozen=True)
class Option:
    """One thing a group can be set to."""

    name: str
    text: str  # one line
    schema: str | None  # which dataclass of the group it fills
    path: Path


def options(group: str, extra: tuple[Path, ...] = ()) -> dict[str, Option]:
    """The options of `group`, by name, in the order of the name tables, then as files sort."""
    foreign = tuple(plugins.LOADED.values()) if group == "encoding" else ()
    return _options(group, extra, foreign)


@cache
def _options(
    group: str, extra: tuple[Path, ...], foreign: tuple[plugins.Plugin, ...]
) -> dict[str, Option]:
    found = {
        each.id: Option(each.id, summary(config.GROUPS[group][each.id]), each.id, each.path)
        for each in foreign
    }
    for folder in (configs_folder(), *extra):
        for path in sorted((folder / group).glob("*.yaml")):
            found[path.stem] = _option(group, path, found)
    order = [*config.GROUPS.get(group, {}), *_EXTRA.get(group, ())]
    known = {name: found[name] for name in order if name in found}
    return {**known, **found}


# Options beside those of the name tables, in the order that people look for them.
_EXTRA = {
    "model": ("tiny", "small", "base", "medium"),
    "encoding": tuple(PRESETS),
    "eval": ("v1", "all", "diagnostics"),
}


def _option(group: str, path: Path, known: dict[str, Option]) -> Option:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    comments = [line[1:].strip() for line in lines if line.startswith("#")]
    text = next((line for line in comments if not line.startswith("@")), "")
    schema = _schema(group, "\n".join(lines), known)
    if not text and schema:
        text = summary(config.GROUPS[group][schema])
    return Option(path.stem, text, schema, path)


def _schema(group: str, text: str, known: dict[str, Option]) -> str | None:
    """The dataclass a YAML file builds on: `/encoding_rope`, or that of an option it names."""
    named = re.search(rf"/{group}_(\w+)", text)
    if named:
        return named[1] if named[1] in config.GROUPS.get(group, {}) else None
    bare = re.search(r"defaults:\s*(?:\[|\n\s*-)\s*([\w-]+)", text)
    return known[bare[1]].schema if bare and bare[1] in known else None


def summary(kind: type[Any]) -> str:
    """The promise of a class in one line: its docstring's first."""
    return (kind.__doc__ or "").strip().splitlines()[0]


@dataclass(frozen=True)
class Key:
    """One setting that can be typed as `path=value`."""

    path: str
    help: str
    type: str
    default: Any
    choices: tuple[str, ...] = ()


def keys(app: App, chosen: dict[str, str] | None = None, extra: tuple[Path, ...] = ()) -> list[Key]:
    """Every key of `app`, with those of the options in `chosen` where a group has its own."""
    found = []
    hints = typing.get_type_hints(app.settings)
    for item in dataclasses.fields(app.settings):
        default = default_of(item)
        if not dataclasses.is_dataclass(default) and item.name not in app.groups:
            found.append(_key(hints[item.name], item, ""))
            continue
        base = typing.get_args(hints[item.name])[0] if default is None else type(default)
        kind = _kind(item.name, base, chosen or {}, extra)
        found += _group_keys(kind, item.name)
    return found


def empty_groups(app: App) -> list[str]:
    """Groups of `app` of which nothing is chosen unless it is typed."""
    items = dataclasses.fields(app.settings)
    return [item.name for item in items if item.name in app.groups and default_of(item) is None]


def _kind(
    group: str, fallback: type[Any], chosen: dict[str, str], extra: tuple[Path, ...]
) -> type[Any]:
    option = options(group, extra).get(chosen.get(group, ""))
    if option is None or option.schema is None:
        return fallback
    kind: type[Any] = config.GROUPS[group][option.schema]
    return kind


def _group_keys(kind: type[Any], prefix: str) -> Iterator[Key]:
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        if item.name not in ("name", plugins.SOURCE):  # the option sets them
            yield _key(hints[item.name], item, f"{prefix}.")


def option_keys(group: str, option: Option) -> list[Key]:
    """The keys that come with `option`, as `group.key`."""
    if option.schema is None:
        return []
    return list(_group_keys(config.GROUPS[group][option.schema], group))


def _key(hint: Any, item: dataclasses.Field[Any], prefix: str) -> Key:
    words, choices = _type_words(hint)
    meaning = item.metadata.get("help", "")
    return Key(f"{prefix}{item.name}", meaning, words, default_of(item), choices)


_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
}


def _type_words(hint: Any) -> tuple[str, tuple[str, ...]]:
    """A type in words, and what can be chosen: bool and enums have choices."""
    if isinstance(hint, types.UnionType):
        inner = [part for part in typing.get_args(hint) if part is not type(None)]
        words, choices = _type_words(inner[0])
        return f"{words} or null", (*choices, "null")
    if typing.get_origin(hint) is list:
        words, choices = _type_words(typing.get_args(hint)[0])
        return f"a list, each {words}", choices
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        names = tuple(hint.__members__)
        return "one of " + ", ".join(names), names
    return _WORDS.get(hint, "text or a list"), ("true", "false") if hint is bool else ()


def all_keys(app: App, extra: tuple[Path, ...] = ()) -> Iterable[str]:
    """Every key that some choice of options gives `app`."""
    names = {TYPED.get(key.path, key.path) for key in keys(app)}
    for group in app.groups:
        for option in options(group, extra).values():
            names.update(key.path for key in option_keys(group, option))
    return sorted(names)
