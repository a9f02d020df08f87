"""Hydra's and OmegaConf's exceptions as one message that names what was typed and the way out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from hydra.errors import (
    HydraException,
    MissingConfigException,
    OverrideParseException,
    SearchPathException,
)
from omegaconf.errors import OmegaConfBaseException

from posbench.cli.matching import did_you_mean
from posbench.cli.space import APPS, HYDRA_KEYS, App, all_keys, keys, option_keys, options

Folders = tuple[Path, ...]

# Launchers of Hydra's that come with a package of their own.
_PACKAGES = {
    "joblib": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
}


def explain(
    error: BaseException, app: App, overrides: list[str], extra: Folders = ()
) -> str | None:
    """One message for a person's mistake; None if the error is not one Hydra or OmegaConf made."""
    chain = list(_chain(error))
    for link in chain:
        if isinstance(link, OverrideParseException):
            return _unparsable(link)
        if isinstance(link, MissingConfigException):
            return _missing(link, app, extra)
        if isinstance(link, SearchPathException):
            return str(link)
    for link in chain:
        text = str(link)
        if text.startswith("Ambiguous value"):
            return _ambiguous(text, app)
        if "requires --multirun" in text:
            return f"{_quoted(text)} sweeps over several values; add -m to do that."
        key = re.search(r"Could not override '([^']+)'", text)
        if key:
            return unknown_key(key[1], app, overrides, extra)
        if "looks like a config group override" in text:
            word = text.split()[1]
            return unknown_key(word.split("=")[0], app, overrides, extra)
    for link in chain:
        if isinstance(link, OmegaConfBaseException) and getattr(link, "full_key", None):
            return _bad_value(link, app, overrides, extra)
    if any(isinstance(link, HydraException | OmegaConfBaseException) for link in chain):
        return _plain(error)
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _quoted(text: str) -> str:
    found = re.search(r"'(.*)'", text)
    return found[1] if found else text


def _plain(error: BaseException) -> str:
    """What Hydra says, without its advice to add a plus and without its list of folders."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [
        line for line in lines if not re.match(r"To append|Set the environment|Config search", line)
    ]
    return " ".join(kept[:3])


def _unparsable(error: OverrideParseException) -> str:
    typed = error.override
    key, _, value = typed.partition("=")
    hint = (
        f"A value with spaces or any of , = {{ }} [ ] ( ) ' \" needs quotes inside quotes: "
        f"\"{key}='{value}'\""
        if value
        else "Settings are typed as key=value"
    )
    return f"{typed!r} cannot be read as a setting. {hint}."


def _ambiguous(text: str, app: App) -> str:
    typed = re.search(r"argument '(.*)'", text)
    assert typed is not None
    key, _, value = typed[1].partition("=")
    lists = {item.path for item in keys(app) if "list" in item.type}
    way = f", or write a list as {key}=[{value}]" if key in lists else ""
    return f"{typed[1]} holds several values. Add -m to run once for each of them{way}."


def _missing(error: MissingConfigException, app: App, extra: Folders) -> str:
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    if not group:
        return _plain(error)
    if group == "hydra/launcher" and name in _PACKAGES:
        return f"hydra/launcher={name} comes with a package: pip install {_PACKAGES[name]}."
    if group.startswith("hydra/"):
        known = [option for option in error.options or [] if not option.startswith("_")]
    else:
        known = list(options(group, extra))
    hint = did_you_mean(name, known, group + "={}")
    if group == "encoding" and os.path.isfile(f"{name}.py"):  # noqa: PTH113  no error, however long
        hint = f" If {name}.py is a plugin, add plugins=[{name}.py]."
    return f"{group}={name} is not an option.{hint} Options: {', '.join(known)}."


def chosen_options(app: App, overrides: list[str]) -> dict[str, str]:
    """Which option of each group the command line names, where it names a single one."""
    pairs = (word.split("=", 1) for word in overrides if "=" in word)
    return {key: value for key, value in pairs if key in app.groups and "," not in value}


def unknown_key(key: str, app: App, overrides: list[str], extra: Folders = ()) -> str:
    """Why `key` cannot be set here, and what was probably meant."""
    if key.startswith("hydra"):
        hint = did_you_mean(key, HYDRA_KEYS)
        return f"{key} is not a setting.{hint} These are of use: {', '.join(HYDRA_KEYS)}."
    chosen = chosen_options(app, overrides)
    group = key.split(".")[0]
    owners = [
        option.name
        for option in (options(group, extra).values() if group in app.groups else ())
        if key in {item.path for item in option_keys(group, option)}
    ]
    if owners:
        names = ", ".join(f"{group}={name}" for name in owners)
        what = f"{group}={chosen[group]}" if group in chosen else f"the {group} chosen here"
        return f"{key} is not a setting of {what}; it belongs to {names}."
    others = [
        other.command
        for other in APPS.values()
        if other is not app and (key in all_keys(other) or key in other.groups)
    ]
    if others:
        return f"{key} is not a setting of posbench {app.command}, but of {', '.join(others)}."
    here = {item.path for item in keys(app, chosen, extra)} | set(app.groups)
    hint = did_you_mean(key, sorted(here)) or did_you_mean(key, all_keys(app, extra))
    listing = _siblings(group, here) if "." in key else ""
    help_hint = listing or f" posbench {app.command} --help lists all settings."
    return f"{key} is not a setting of posbench {app.command}.{hint}{help_hint}"


def _siblings(group: str, here: set[str]) -> str:
    names = sorted(path for path in here if path.startswith(f"{group}."))
    return f" Settings here: {', '.join(names)}." if names else ""


def _bad_value(
    error: OmegaConfBaseException, app: App, overrides: list[str], extra: Folders
) -> str:
    key = str(error.full_key)
    bare = re.sub(r"\[\d+\]$", "", key)
    chosen = chosen_options(app, overrides)
    known = {item.path: item for item in keys(app, chosen, extra)}
    for group in app.groups:
        for option in options(group, extra).values():
            known |= {
                item.path: item for item in option_keys(group, option) if item.path not in known
            }
    typed = next((word for word in overrides if word.split("=", 1)[0] == bare), None)
    if bare in known:
        what = typed or bare
        return f"{what} is not valid: {bare} must be {known[bare].type} ({known[bare].help})."
    if any(path.startswith(f"{bare}.") for path in known):
        return (
            f"{typed or bare} is not valid: {bare} is not one setting.{_siblings(bare, set(known))}"
        )
    reason = str(error).splitlines()[0]
    where = next(
        (str(link).split(":")[0] for link in _chain(error) if str(link).startswith("In '")), ""
    )
    if type(error).__name__ in ("ConfigKeyError", "ConfigAttributeError"):
        return " ".join(filter(None, (where, unknown_key(bare, app, overrides, extra))))
    return f"{typed or key} is not valid: {reason}."
