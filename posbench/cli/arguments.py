"""What was typed, made ready for Hydra: flags first, paths quoted, dead ends refused."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from posbench.cli.guard import check_config_dir
from posbench.cli.matching import did_you_mean
from posbench.cli.space import PLUGINS_KEY, RESUME_KEYS, TYPED, App, empty_groups
from posbench.errors import UserError
from posbench.plugins import named_paths

# Flag -> what follows it: nothing, a value, or perhaps one ("?").
FLAGS = {
    "--multirun": "", "-m": "",
    "--cfg": "value", "-c": "value",
    "--info": "?", "-i": "?",
    "--config-dir": "value", "-cd": "value",
    "--resolve": "",
    "--package": "value", "-p": "value",
    "--run": "", "-r": "",
    "--help": "", "-h": "",
    "--version": "",
    "--hydra-help": "",
}  # fmt: skip

_SHOWN = ("job", "hydra", "all")
_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_CHOICES = {"--cfg": _SHOWN, "-c": _SHOWN, "--info": _INFO, "-i": _INFO}
_MODES = {"--run", "-r", "--multirun", "-m", "--cfg", "-c", "--info", "-i"}

REFUSED = {
    "--config-path": "use --config-dir DIR to add your own YAML files",
    "-cp": "use --config-dir DIR to add your own YAML files",
    "--config-name": "use experiment=NAME, or --config-dir DIR for your own YAML files",
    "-cn": "use experiment=NAME, or --config-dir DIR for your own YAML files",
    "--experimental-rerun": "it runs a pickle; repeat the command, or use resume=DIR",
    "--shell-completion": "use `posbench completion bash`",
    "-sc": "use `posbench completion bash`",
}

# Settings whose value is a path: typed as it is, whatever characters it has.
PATH_KEYS = ("data.path", "runs", "plot", "eval.reference")
FOLDER_KEYS = ("hydra.run.dir", "hydra.sweep.dir")  # never swept over


@dataclass
class Line:
    """One command line, taken apart."""

    overrides: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)  # as Hydra takes them, values included
    resume: dict[str, str] = field(default_factory=dict)
    plugins: list[Path] = field(default_factory=list)
    config_dirs: list[Path] = field(default_factory=list)
    multirun: bool = False
    help: bool = False
    version: bool = False


def read(app: App, words: list[str]) -> Line:
    """Take the words after a command apart; raises UserError for what cannot be meant."""
    line = Line()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("-") and word != "-":
            _flag(app, word, rest, line)
        elif word.split("=", 1)[0] in RESUME_KEYS and "=" in word and app.command == "train":
            key, value = word.split("=", 1)
            line.resume[key] = value
        elif word.startswith(f"{PLUGINS_KEY}="):
            line.plugins += named_paths(word.partition("=")[2])
        else:
            line.overrides.append(word)
    _check_modes(line)
    check_groups(app, line.overrides)
    line.overrides = [prepare(app, word, line.multirun) for word in line.overrides]
    return line


def check_groups(app: App, words: list[str]) -> None:
    """Raise UserError for a setting of a group that is left empty: Hydra has no words for it."""
    for group in empty_groups(app):
        keys = [word.partition("=")[0] for word in words]
        below = [key for key in keys if key.startswith(f"{group}.")]
        if below and group not in keys:
            raise UserError(f"{below[0]} goes with {group}=OPTION; add it, as in {group}=text.")


def _check_modes(line: Line) -> None:
    modes = [flag for flag in line.flags if flag in _MODES]
    if len(modes) > 1:
        raise UserError(f"{modes[0]} and {modes[1]} cannot go together.")
    if "--resolve" in line.flags and not {"--cfg", "-c"} & set(line.flags):
        raise UserError("--resolve goes with --cfg job.")


def _flag(app: App, word: str, rest: list[str], line: Line) -> None:
    name, equals, value = word.partition("=")
    if name in REFUSED:
        raise UserError(f"{name} is not offered: {REFUSED[name]}.")
    if name not in FLAGS:
        hint = did_you_mean(name, FLAGS)
        raise UserError(f"posbench {app.command} has no option {name}.{hint}")
    kind = FLAGS[name]
    if equals and not kind:
        raise UserError(f"{name} takes no value.")
    if kind == "value" and not equals:
        if not rest:
            raise UserError(f"{name} needs a value after it.")
        value = rest.pop(0)
    if kind == "?" and not equals and rest and re.fullmatch(r"[a-z-]+", rest[0]):
        value = rest.pop(0)
    if name in _CHOICES and value and value not in _CHOICES[name]:
        raise UserError(f"{name} {value} is not valid; one of {', '.join(_CHOICES[name])}.")
    line.flags += [name, value] if value else [name]
    line.multirun |= name in ("-m", "--multirun")
    line.help |= name in ("-h", "--help")
    line.version |= name == "--version"
    if name in ("--config-dir", "-cd"):
        check_config_dir(Path(value))
        line.config_dirs.append(Path(value))


def prepare(app: App, word: str, multirun: bool) -> str:
    """One override as Hydra should see it; raises UserError for a form that leads astray."""
    if "=" not in word and not word.startswith("~"):
        raise UserError(f"{word!r} is not a setting; {_bare_hint(app, word)}.")
    if word.startswith(("+", "~")):
        word = _without_sign(word)
    key, _, value = word.partition("=")
    _refuse(key, word)
    if key in app.groups and value[:1] in ("[", "{"):
        raise UserError(f"{word}: {key} takes one option; -m {key}=A,B runs once for each.")
    if key in (*TYPED, *TYPED.values()) and app.command == "eval-extrapolate":
        return f"models={_models(value, multirun)}"
    if key in FOLDER_KEYS or (key in PATH_KEYS and not (multirun and "," in value)):
        return f"{key}={quote(value)}"
    return word


def _models(value: str, multirun: bool) -> str:
    """The value of `model=`, each path in it quoted: one, a list, or several to sweep over."""
    inside = value.removeprefix("[").removesuffix("]")
    models = re.split(r",(?=hf:)", inside)
    quoted = ",".join(quote(each) for each in models)
    if value == f"[{inside}]":
        return f"[{quoted}]"
    if len(models) > 1 and not multirun:
        raise UserError(
            f"model={value} holds several models. Write a list for one table of all, "
            f"model=[{value}], or add -m to run once for each."
        )
    return quoted


def _bare_hint(app: App, word: str) -> str:
    if app.command == "eval-extrapolate":
        return f"for a run write runs={word}"
    return f"settings are typed as key=value (posbench {app.command} --help lists them)"


def _without_sign(word: str) -> str:
    bare = word.lstrip("+~")
    if word.startswith("+experiment="):
        return bare
    if word.startswith("~"):
        key = bare.split("=", 1)[0]
        raise UserError(f"{word}: a setting cannot be removed; give it another value: {key}=...")
    raise UserError(f"{word}: settings take no plus here, and none can be added; type {bare}")


def _refuse(key: str, word: str) -> None:
    if "_target_" in word or re.match(r"hydra[./]callbacks", key):
        raise UserError(f"{word}: posbench runs no code named by a setting.")
    if key in ("hydra.launcher", "hydra.sweeper"):
        raise UserError(f"{word}: choose it with a slash, as in hydra/launcher=basic.")
    if key == "hydra.searchpath":
        raise UserError(f"{word}: use --config-dir DIR to add your own YAML files.")


def quote(value: str) -> str:
    """A path for Hydra's grammar; lists, null, quoted and empty values stay as they are."""
    if not value or value == "null" or value[0] in "['\"":
        return value
    if value.startswith("~"):
        value = str(Path(value).expanduser())
    escaped = re.sub(r"(\\*)(')", r"\1\1\\\2", value)  # backslashes count only before a quote
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f"'{escaped}'"
