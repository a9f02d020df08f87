"""The jobs of a sweep, composed and checked; here nothing is started, nothing written."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict, read_write

from posbench import config
from posbench.cli import compose
from posbench.cli.compose import LauncherConfig
from posbench.errors import UserError
from posbench.sweeps import component


@dataclass(frozen=True)
class Composed:
    """One job: the overrides that a sweep gives it, and its settings."""

    number: int
    label: str
    settings: config.Settings
    name_of: Callable[[int], str]  # the name that its folder has for a number


class ComposingLauncher(Launcher):
    """What all of posbench's launchers share: the settings of a launcher, and composing a job."""

    def __init__(self, **given: Any) -> None:
        self.settings = LauncherConfig(**given)

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.context = hydra_context
        self.config = config
        # Hydra writes multirun.yaml into a sweep's folder before it asks the launcher.
        self.scratch = tempfile.TemporaryDirectory(prefix="posbench-")
        with read_write(config), open_dict(config):
            config.hydra.sweep.dir = self.scratch.name

    def compose_all(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> list[Composed]:
        """Every job; raises UserError for the first that cannot work."""
        self.settings.check()
        numbered = enumerate(job_overrides, start=initial_job_idx)
        return [self._composed(number, list(words)) for number, words in numbered]

    def _composed(self, number: int, words: list[str]) -> Composed:
        composed = self.context.config_loader.load_sweep_config(self.config, words)
        hydra = composed.hydra
        task = copy.deepcopy(composed)
        with read_write(task), open_dict(task):
            del task["hydra"]

        def name_of(number: int) -> str:
            with read_write(hydra), open_dict(hydra):
                hydra.job.id = hydra.job.num = number
            HydraConfig.instance().set_config(composed)
            return component(str(hydra.sweep.subdir))

        name_of(number)  # settings may name the number of their job
        label = " ".join(filter_overrides(words))
        try:
            settings = compose.settings_of(task)
        except UserError as error:
            raise UserError(f"job {number} ({label}): {error} No job was started.") from error
        return Composed(number, label, settings, name_of)


class LookingLauncher(ComposingLauncher):
    """Keeps what a sweep's jobs are composed to, in the place of running them."""

    jobs: list[Composed]  # set by register(), like the next
    asked: LauncherConfig

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Compose every job; raises UserError for the first that cannot work."""
        self.scratch.cleanup()
        self.jobs += self.compose_all(job_overrides, initial_job_idx)
        type(self).asked = self.settings
        return [JobReturn(status=JobStatus.COMPLETED) for _ in job_overrides]


def register() -> type[LookingLauncher]:
    """Put it in the place of posbench's launcher; the class holds what it then sees."""
    LookingLauncher.jobs = []
    LookingLauncher.asked = LauncherConfig()
    Plugins.instance().class_name_to_class[compose.LAUNCHER] = LookingLauncher
    return LookingLauncher
