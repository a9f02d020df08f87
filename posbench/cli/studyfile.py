"""Study files: which runs, evaluated how, compared with what. Neither Hydra nor torch.

A study is YAML that a person reads: title, question, train, evaluate, baseline. docs/studies.md
explains each key.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from posbench.cli.arguments import quote
from posbench.cli.matching import did_you_mean
from posbench.cli.space import APPS, all_keys, configs_folder, options
from posbench.errors import UserError

ALL = "all"
EXTENSIONS = "extensions"
_KEYS = ("title", "question", "train", "evaluate", "baseline")
_BOTH = ("device", "threads")  # settings that training and evaluation share
_PLAIN = re.compile(r"[\w.+/-]+")  # needs no quotes in Hydra's grammar


@dataclass(frozen=True)
class Block:
    """One sweep of training runs: each key with the values it takes, all combined."""

    name: str
    values: dict[str, list[Any]]

    @property
    def runs(self) -> int:
        """How many runs it is."""
        return math.prod(len(each) for each in self.values.values())

    @property
    def encodings(self) -> list[str]:
        """What it trains."""
        return [str(each) for each in self.values.get("encoding", ["rope"])]

    def words(self) -> list[str]:
        """The same as typed after `posbench train -m`."""
        return [
            f"{key}={','.join(_typed(each) for each in chosen)}"
            for key, chosen in self.values.items()
        ]


@dataclass(frozen=True)
class Study:
    """A study as its file, and the command line, have it."""

    name: str
    title: str
    question: str
    train: tuple[Block, ...]
    evaluate: dict[str, Any]  # settings of eval-extrapolate
    extensions: dict[str, list[str]]  # an extension and its settings, as typed -> encodings
    baseline: str | None

    @property
    def runs(self) -> int:
        """How many runs it trains."""
        return sum(block.runs for block in self.train)

    @property
    def encodings(self) -> list[str]:
        """All that it trains, each once."""
        return list(dict.fromkeys(each for block in self.train for each in block.encodings))

    def evaluate_words(self, extension: str = "none") -> list[str]:
        """The evaluation under an extension, as typed after `posbench eval-extrapolate`."""
        first, *rest = extension.split()
        settings = [f"{key}={_typed(value)}" for key, value in self.evaluate.items()]
        return [*settings, f"extension={first}", *rest]

    def plain(self) -> dict[str, Any]:
        """The study as its YAML file would have it, with what the command line changed."""
        blocks = [
            {
                "name": block.name,
                **{k: v[0] if _is_single(v) else v for k, v in block.values.items()},
            }
            for block in self.train
        ]
        if len(blocks) == 1:
            blocks[0].pop("name")
        extensions = {
            name: ALL if encodings == [ALL] else encodings
            for name, encodings in self.extensions.items()
        }
        return {
            "title": self.title,
            "question": self.question,
            "train": blocks[0] if len(blocks) == 1 else blocks,
            "evaluate": {**self.evaluate, EXTENSIONS: extensions},
            "baseline": self.baseline,
        }

    def identity(self) -> dict[str, str | None]:
        """What decides its results, flat: key as typed -> value."""
        several = len(self.train) > 1
        found = {
            f"{block.name}: {key}" if several else key: ",".join(map(_typed, values))
            for block in self.train
            for key, values in block.values.items()
        }
        found |= {f"evaluate {key}": _typed(value) for key, value in self.evaluate.items()}
        found |= {f"{EXTENSIONS}.{key}": ",".join(each) for key, each in self.extensions.items()}
        return found | {"baseline": self.baseline}


def _is_single(values: list[Any]) -> bool:
    return len(values) == 1 and not isinstance(values[0], list)


def _typed(value: Any) -> str:
    """A value in Hydra's grammar."""
    if isinstance(value, list):
        return "[" + ",".join(_typed(each) for each in value) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = str(value)
    return text if _PLAIN.fullmatch(text) else quote(text)


# ---------------------------------------------------------------- reading


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML in which on, off, yes and no are words, as they are on the command line."""

    yaml_implicit_resolvers = {  # noqa: RUF012  the name is PyYAML's
        first: [each for each in resolvers if each[0] != "tag:yaml.org,2002:bool"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping; a key that stands there twice would lose what it had first."""
        seen: set[str] = set()
        for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]:
            if key.value in seen:
                problem = f"{key.value} stands there twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("true|false"), list("tf"))


def _loaded(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)  # safe: it makes nothing but plain values


def _problem(error: yaml.YAMLError) -> str:
    return getattr(error, "problem", None) or " ".join(str(error).split())


def studies() -> dict[str, Path]:
    """posbench's own studies: name -> file."""
    return {path.stem: path for path in sorted((configs_folder() / "study").glob("*.yaml"))}


def find(name: str) -> Path:
    """The file of a study: one of posbench's own by name, or the path of another."""
    known = studies()
    if name in known:
        return known[name]
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return path
    if path.suffix in (".yaml", ".yml") or "/" in name:
        raise UserError(f"posbench study {name}: no such file ({Path.cwd() / path}).")
    hint = did_you_mean(name, known, "posbench study {}")
    raise UserError(
        f"{name!r} is not a study.{hint} Studies: {', '.join(known)}; or name a file, mine.yaml."
    )


def load(path: Path) -> Study:
    """The study in a file; raises UserError, which names the file and the key, if it is none."""
    try:
        tree = _loaded(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}{line}: not valid YAML: {_problem(error)}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}.") from None
    try:
        _check_finite(tree)
        return _study(path.stem, tree)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _check_finite(tree: Any) -> None:
    try:
        json.dumps(tree, default=str, skipkeys=True)
    except (ValueError, RecursionError):
        raise UserError("there is a list or mapping that holds itself.") from None


def _study(name: str, tree: Any) -> Study:
    if not isinstance(tree, dict) or "train" not in tree:
        raise UserError("a study says what to train: a mapping with the key train.")
    _check_keys("a study", tree, _KEYS)
    evaluate = _mapping("evaluate", tree.get("evaluate") or {})
    extensions = evaluate.pop(EXTENSIONS, None) or {"none": ALL}
    if not isinstance(extensions, dict):
        raise UserError(f"evaluate.{EXTENSIONS} maps each extension to encodings, or to all.")
    study = Study(
        name=name,
        title=str(tree.get("title") or name),
        question=" ".join(str(tree.get("question") or "").split()),
        train=tuple(_blocks(tree["train"])),
        evaluate=evaluate,
        extensions={str(key): _names(str(key), value) for key, value in extensions.items()},
        baseline=None if tree.get("baseline") is None else str(tree["baseline"]),
    )
    _check(study)
    return study


def _check_keys(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for key in given:
        if key not in known:
            hint = did_you_mean(str(key), known)
            raise UserError(f"{key} is not a key of {what}.{hint}")


def _mapping(what: str, node: Any) -> dict[str, Any]:
    """Nested settings as one mapping, keys as typed: {train: {steps: 5}} is train.steps=5."""
    if not isinstance(node, dict):
        raise UserError(f"{what} must be a mapping of settings to values, not {node!r}.")
    flat: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, dict) and key != EXTENSIONS:
            flat |= {f"{key}.{name}": each for name, each in _mapping(str(key), value).items()}
        else:
            flat[str(key)] = value
    return flat


def _blocks(node: Any) -> Iterator[Block]:
    nodes = node if isinstance(node, list) else [node]
    if not nodes:
        raise UserError("train is empty.")
    for number, each in enumerate(nodes):
        settings = _mapping("train", each)
        name = str(settings.pop("name", number))
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise UserError(f"train.name={name} names a folder: letters, digits, _, - and dots.")
        values = {key: _values(key, value) for key, value in settings.items()}
        yield Block(name, values)


def _values(key: str, value: Any) -> list[Any]:
    """The values that a setting takes: a list is swept over, and a list in it is one value."""
    if key == "encoding" and value == ALL:
        return list(options("encoding"))
    if value == []:
        raise UserError(f"train.{key} is an empty list.")
    return list(value) if isinstance(value, list) else [value]


def _names(extension: str, value: Any) -> list[str]:
    names = [str(each) for each in value] if isinstance(value, list) else [str(value)]
    known = [ALL, *options("encoding")]
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise UserError(f"{EXTENSIONS}.{extension} names {name}, which is no encoding.{hint}")
    return names


def _check(study: Study) -> None:
    names = [block.name for block in study.train]
    if len(set(names)) < len(names):
        raise UserError("two parts of train have the same name.")
    trained = [*APPS["train"].groups, *all_keys(APPS["train"])]
    for block in study.train:
        _check_keys("train", block.values, trained)
    evaluated = [*APPS["eval-extrapolate"].groups, *all_keys(APPS["eval-extrapolate"])]
    _check_keys("evaluate", study.evaluate, evaluated)
    for key in ("runs", "extension"):
        if key in study.evaluate:
            raise UserError(f"evaluate.{key} is the study's own; write {EXTENSIONS} instead.")
    known = list(options("extension"))
    for extension in study.extensions:
        first = extension.split(" ")[0]
        if first not in known:
            raise UserError(
                f"{first} is not an extension.{did_you_mean(first, known)} Extensions: "
                f"{', '.join(known)}."
            )


# ---------------------------------------------------------------- what the command line changes


def changed(study: Study, words: Iterable[str], plugins: Iterable[str] = ()) -> Study:
    """The study with settings of the command line, and encodings of `plugins` beside its own.

    A word goes to every part of the training, or to the evaluation, whichever has that setting.
    Encodings of plugins are added unless a word says which encodings there are.
    """
    typed = dict(_split(word) for word in words)
    added = [] if "encoding" in typed else list(plugins)
    study = replace(study, train=tuple(_with(block, added) for block in study.train))
    for key, text in typed.items():
        study = _set(study, key, text)
    return study


def _split(word: str) -> tuple[str, str]:
    key, equals, text = word.partition("=")
    if not equals:
        raise UserError(f"{word!r} is not a setting; a study takes key=value.")
    return key, text


def _with(block: Block, encodings: list[str]) -> Block:
    more = [each for each in encodings if each not in block.encodings]
    if not more:
        return block
    return replace(block, values=block.values | {"encoding": [*block.encodings, *more]})


def _set(study: Study, key: str, text: str) -> Study:
    try:
        values = [_loaded(each) if each else "" for each in _top_level(text)]
    except yaml.YAMLError as error:
        raise UserError(f"{key}={text} is not valid: {_problem(error)}.") from None
    trained = [*APPS["train"].groups, *all_keys(APPS["train"])]
    evaluated = ["eval", *all_keys(APPS["eval-extrapolate"])]
    if key == "baseline":
        return replace(study, baseline=None if values[0] is None else str(values[0]))
    if key in ("runs", "extension", "experiment", "overwrite") or not (
        key in trained or key in evaluated
    ):
        known = [*trained, *evaluated, "baseline"]
        hint = "" if key in known else did_you_mean(key, known)
        raise UserError(f"{key} is not a setting that a study takes.{hint}")
    if key in trained:
        swept = _values(key, ALL) if values == [ALL] else values
        blocks = [replace(each, values=each.values | {key: swept}) for each in study.train]
        study = replace(study, train=tuple(blocks))
    if key not in trained or key in _BOTH:
        if len(values) > 1:
            raise UserError(f"{key}={text}: an evaluation takes one value.")
        study = replace(study, evaluate=study.evaluate | {key: values[0]})
    return study


def _top_level(text: str) -> list[str]:
    """The parts of a sweep, `1,[2,3]`: commas in brackets or quotes do not part."""
    parts = re.findall(r"(?:\[[^\]]*\]|'[^']*'|\"[^\"]*\"|[^,])+", text)
    return parts or [""]


def dump(tree: Mapping[str, Any]) -> str:
    """A study as YAML text."""
    text: str = yaml.safe_dump(dict(tree), sort_keys=False, allow_unicode=True, width=100)
    return text


__all__ = ["Block", "Study", "changed", "dump", "find", "load", "studies"]
