"""A person's own YAML chooses settings; what would have Hydra run code is refused.

Twice: each file of a --config-dir as it stands, so that the message can name it, and every config
that Hydra has composed, before it makes anything of it, for a defaults list can reach other files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from posbench.errors import UserError

_NONE = "which names code to run; posbench runs none."

# `_target_` is Hydra's word for code to run; `()` and `class` are those of Python's logging.
_NAMES_CODE = ("_target_", "()", "class")
_STOCK_LOGGING = ("logging.StreamHandler", "logging.FileHandler", "logging.Formatter")
_STOCK_STREAMS = ("ext://sys.stdout", "ext://sys.stderr")
# Hydra takes nothing but installed plugins there.
_PLUGIN_MODULES = ("hydra_plugins.", "hydra._internal.core_plugins.")
_PLUGINS = {("hydra", "launcher", "_target_"), ("hydra", "sweeper", "_target_")}
_LOGGING = ("job_logging", "hydra_logging")

Place = tuple[str, ...]


def check_config_dir(folder: Path) -> None:
    """Raise UserError if `folder` is missing, or holds YAML that is malformed or names code."""
    if not folder.is_dir():
        raise UserError(f"--config-dir {folder} is not a folder.")
    for path in _yaml_files(folder):
        tree = _read(path)
        for place, _ in _walk(tree):
            key = place[-1]
            if key in ("_target_", "()"):
                raise UserError(f"{path} holds {key}, {_NONE}")
            if place[-2:-1] == ("hydra",) and key in ("callbacks", *_LOGGING):
                raise UserError(f"{path} sets hydra.{key}, {_NONE}")


def _yaml_files(folder: Path) -> Iterator[Path]:
    """Every YAML file below `folder`, behind links too, each folder once."""
    seen: set[str] = set()
    for where, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(
            name for name in folders if os.path.realpath(Path(where, name)) not in seen
        )
        seen.add(os.path.realpath(where))
        yield from (Path(where, name) for name in sorted(files) if name.endswith(".yaml"))


def _read(path: Path) -> Any:
    """The content of a YAML file as Hydra reads it, interpolations left as they are."""
    try:
        return OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}).") from error
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{line}: not valid YAML: {error.problem}.") from error
    except (OSError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error


def _walk(node: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Every key below `node`, as the keys that lead to it, with what it holds."""
    if not isinstance(node, dict | list):
        return
    pairs = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in pairs:
        here = (*place, str(key))
        yield here, value
        yield from _walk(value, here)


def check_composed(config: DictConfig) -> None:
    """Raise UserError if a composed config holds anything that names code, but Hydra's stock."""
    tree = OmegaConf.to_container(config, resolve=False)
    assert isinstance(tree, dict)
    if tree["hydra"]["callbacks"]:
        raise UserError(f"hydra.callbacks is set, {_NONE}")
    for place, value in _walk(tree):
        if not _is_harmless(place, value):
            raise UserError(f"{'.'.join(place)} is set to {value!r}, {_NONE}")


def _is_harmless(place: Place, value: Any) -> bool:
    key = place[-1]
    if place in _PLUGINS:
        return isinstance(value, str) and value.startswith(_PLUGIN_MODULES)
    if key in _NAMES_CODE:
        return key == "class" and value in _STOCK_LOGGING
    if isinstance(value, str) and place[0] == "hydra":
        # A resolver that makes a tree of a text would hide keys from this check.
        made = any(word in value for word in ("oc.create", "oc.decode"))
        return not made and ("ext://" not in value or value in _STOCK_STREAMS)
    return True


@contextlib.contextmanager
def composed_configs_checked(see: Callable[[DictConfig], None]) -> Iterator[None]:
    """Inside, Hydra gets no config, of a run or of a sweep's job, that `check_composed` refuses.

    `see` is shown that of a sweep as a whole.
    """
    load = ConfigLoaderImpl.load_configuration

    def checked(self: ConfigLoaderImpl, *given: Any, **named: Any) -> DictConfig:
        try:
            config = load(self, *given, **named)
        except yaml.YAMLError as error:
            raise UserError(f"not valid YAML: {' '.join(str(error).split())}") from error
        check_composed(config)
        if named.get("run_mode") is RunMode.MULTIRUN:
            see(config)
        return config

    ConfigLoaderImpl.load_configuration = checked  # type: ignore[method-assign]
    try:
        yield
    finally:
        ConfigLoaderImpl.load_configuration = load  # type: ignore[method-assign]
