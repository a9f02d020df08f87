"""From YAML groups and overrides to typed settings. Below this module no Hydra object exists."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from posbench import config, plugins, rules
from posbench.cli import arguments, mistakes
from posbench.cli.space import APPS, PLUGINS_KEY, App, configs_folder
from posbench.config.encodings import EncodingConfig
from posbench.config.extensions import ExtensionConfig
from posbench.config.fields import default_of, setting
from posbench.config.policies import part_of
from posbench.errors import UserError
from posbench.files import stamp

VERSION_BASE = "1.3"

# Hydra finds a plugin by name and insists on this prefix; the class it finds is ours.
LAUNCHER = "hydra_plugins.posbench.PosbenchLauncher"


@dataclass
class LauncherConfig:
    """Settings of posbench's own launcher, `hydra.launcher.*`."""

    _target_: str = LAUNCHER
    jobs: int | None = setting(None, "jobs side by side", 1, 1024)
    timeout: float | None = setting(None, "seconds that one job may take; null sets no limit")
    on_failure: str = setting("continue", "continue, or stop the others")
    jobs_per_gpu: int = setting(1, "jobs side by side on each GPU", 1, 64)

    def check(self) -> None:
        """Raise UserError for a value that cannot work."""
        rules.check_ranges(self, "hydra.launcher.")
        if self.timeout is not None and not self.timeout > 0:
            raise UserError(
                f"hydra.launcher.timeout={self.timeout:g} must be more than 0 seconds; null sets "
                "no limit."
            )
        if self.on_failure not in ("continue", "stop"):
            raise UserError(f"hydra.launcher.on_failure={self.on_failure} is not continue or stop.")


# A group's key in the root schema has the base type, so that any option of the group fits in.
_BASES: dict[str, type[Any]] = {
    "encoding": EncodingConfig,
    "extension": ExtensionConfig,
    "data": config.DataConfig,
    "tokenizer": config.TokenizerConfig,
}


def register() -> None:
    """Make the dataclasses known to Hydra. At the root of the store, where no group lists them."""
    store = ConfigStore.instance()
    for name, root in (
        ("train_settings", config.TrainSettings),
        ("estimate_settings", config.EstimateSettings),
        ("eval_settings", config.EvalSettings),
        ("inspect_settings", config.InspectSettings),
    ):
        chosen = {item.name for item in dataclasses.fields(root) if default_of(item) is not None}
        bases = {group: base() for group, base in _BASES.items() if group in chosen}
        store.store(name=name, node=root(**bases))
    for group, table in config.GROUPS.items():
        for option, kind in table.items():
            store.store(name=f"{group}_{option}", node=kind, package=group)
    store.repo.pop("encoding", None)  # options of plugins that are no longer loaded
    for option in plugins.LOADED:
        store.store(name=option, node=config.GROUPS["encoding"][option], group="encoding")
    store.store("posbench", LauncherConfig, "hydra/launcher", provider="posbench")
    # Two starts in one second must not share a folder: the clock and four random digits.
    OmegaConf.register_new_resolver("posbench.stamp", stamp, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("posbench.part", part_of, replace=True)


def settings_of(composed: DictConfig) -> config.Settings:
    """The typed settings of a composed config, checked; raises UserError."""
    settings: config.Settings = OmegaConf.to_object(composed)  # type: ignore[assignment]
    for group, table in config.GROUPS.items():
        node = getattr(settings, group, None)
        if node is not None and table.get(node.name) is not type(node):
            raise UserError(
                f"{group}.name={node.name} cannot be set; choose with {group}=OPTION instead."
            )
    encoding = getattr(settings, "encoding", None)
    if encoding is not None and plugins.changed_plugin(encoding):
        raise UserError(
            f"encoding.{plugins.SOURCE}={plugins.source_of(encoding)} cannot be set; it is the "
            "SHA-256 of the plugin."
        )
    if isinstance(settings, config.EvalSettings):
        _check_runs(settings.runs)
    rules.check(settings)
    if isinstance(settings, config.InspectSettings):
        rules.check_extension(settings)
    return settings


def _check_runs(runs: Any) -> None:
    members = runs if isinstance(runs, list) else [runs]
    if runs is not None and not all(isinstance(member, str) and member for member in members):
        raise UserError(f"runs={runs} must be a folder, a glob, or a list of them: runs=[a,b].")


def configure(command: str, *overrides: str) -> config.Settings:
    """The settings that `posbench COMMAND OVERRIDES` would use; raises UserError.

    Encodings of `plugins=` stay known from then on.
    """
    app = app_of(command)
    named = [word for word in overrides if word.startswith(f"{PLUGINS_KEY}=")]
    plugins.load_installed()
    plugins.load(path for word in named for path in plugins.named_paths(word.partition("=")[2]))
    register()
    arguments.check_groups(app, list(overrides))
    words = [
        arguments.prepare(app, word, multirun=False) for word in overrides if word not in named
    ]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(configs_folder()), version_base=VERSION_BASE):
            return settings_of(compose(app.command, words))
    except Exception as error:
        message = mistakes.explain(error, app, words)
        if message is None:
            raise
        raise UserError(message) from error


def app_of(command: str) -> App:
    """The app of a command; raises UserError for a command that takes no settings."""
    if command not in APPS:
        raise UserError(f"{command!r} takes no settings; these do: {', '.join(APPS)}.")
    return APPS[command]
