"""`posbench COMMAND --help`, made from the dataclasses and YAML files, so it cannot go stale."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from posbench import config
from posbench.cli.space import (
    HYDRA_KEYS,
    PLUGINS_HELP,
    RESUME_KEYS,
    TYPED,
    App,
    Key,
    Option,
    configs_folder,
    keys,
    option_keys,
    options,
)

WIDTH = 100

FLAG_HELP = {
    "-m, --multirun": "run once for each combination of comma-separated values",
    "--cfg job": "print the composed settings and stop",
    "--config-dir DIR": "also look for groups in DIR, such as DIR/encoding/mine.yaml",
    "--info": "print where the settings come from and stop",
    "-h, --help": "this page",
}


def command_help(app: App, extra: tuple[Path, ...] = ()) -> str:
    """Every group with its options, every key with its meaning and default, then examples."""
    parts = [
        f"posbench {app.command}: {app.summary}.",
        f"usage: posbench {app.command} [key=value ...]",
    ]
    parts += [_group(app, group, extra) for group in app.groups if options(group, extra)]
    parts.append(_section("settings (key=default)", _key_rows(app)))
    if app.command == "train":
        parts.append(_section("going on with a run", RESUME_KEYS.items()))
    parts.append(_section("encodings of your own", PLUGINS_HELP.items()))
    parts.append(
        _section("folders and jobs", HYDRA_KEYS.items())
        if app.command not in ("inspect", "estimate")
        else ""
    )
    parts.append(_section("flags", FLAG_HELP.items()))
    parts.append("\n".join(["examples", *(f"  {example}" for example in app.examples)]))
    return "\n\n".join(part for part in parts if part)


def _group(app: App, group: str, extra: tuple[Path, ...]) -> str:
    default = _default_option(app, group)
    title = f"{group}=OPTION" + (f" (default {default})" if default else "")
    rows: list[tuple[str, str]] = []
    for option in options(group, extra).values():
        rows.append((option.name, option.text))
        rows += [(f"  {key.path}={_shown(key)}", _meaning(key)) for key in _own_keys(group, option)]
    return _section(title, rows)


def _own_keys(group: str, option: Option) -> list[Key]:
    """Keys to list below an option: those that not every option of the group has."""
    table = config.GROUPS.get(group, {})
    shared = [
        {key.path for key in option_keys(group, Option(name, "", name, option.path))}
        for name in table
    ]
    everywhere = set.intersection(*shared) if shared else set()
    return [key for key in option_keys(group, option) if key.path not in everywhere]


def _default_option(app: App, group: str) -> str | None:
    for line in (configs_text(app)).splitlines():
        name, _, value = line.strip().removeprefix("- ").partition(": ")
        if name == group:
            option = value.split("#")[0].strip()
            return None if option == "null" else option
    return None


def configs_text(app: App) -> str:
    """The primary YAML file of a command."""
    return (configs_folder() / f"{app.command}.yaml").read_text()


def _key_rows(app: App) -> list[tuple[str, str]]:
    """The keys that do not depend on which option a group has."""
    own = {
        key.path
        for group in app.groups
        if group in config.GROUPS
        for option in options(group).values()
        for key in _own_keys(group, option)
    }
    return [
        (f"{TYPED.get(key.path, key.path)}={_shown(key)}", _meaning(key))
        for key in keys(app)
        if key.path not in own
    ]


def _shown(key: Key) -> str:
    return show(key.default)


def show(value: Any) -> str:
    """A value as it would be typed."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(show(item) for item in value) + "]"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _meaning(key: Key) -> str:
    """Its help, and what can be chosen if the help does not say so."""
    names = [choice for choice in key.choices if choice not in ("true", "false", "null")]
    if names and not all(name in key.help for name in names):
        return f"{key.help} ({', '.join(names)})"
    return key.help


def _section(title: str, rows: Any) -> str:
    rows = list(rows)
    column = min(34, max((len(left) for left, _ in rows), default=0) + 2)
    lines = [title]
    for left, right in rows:
        indent = " " * (column + 2)
        head = f"  {left}".ljust(column + 2)
        if len(left) + 2 > column:
            lines.append(f"  {left}")
            head = indent
        lines += textwrap.wrap(
            right,
            WIDTH,
            initial_indent=head,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [head.rstrip()]
    return "\n".join(lines)
