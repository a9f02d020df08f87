"""The jobs that a command would run, composed and checked; nothing is started, nothing written."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
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
from posbench.errors import UserError


@dataclass(frozen=True)
class Composed:
    """One job: the overrides that a sweep gives it, and its settings."""

    label: str
    settings: config.Settings


class LookingLauncher(Launcher):
    """Keeps what a sweep's jobs are composed to, in the place of running them."""

    jobs: list[Composed]  # set by register(), like the next
    at_a_time: int | None

    def __init__(self, jobs: int | None = None, **_others: Any) -> None:
        type(self).at_a_time = jobs

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.context = hydra_context
        self.config = config
        # Hydra writes multirun.yaml into a sweep's folder before it asks the launcher.
        self.scratch = tempfile.TemporaryDirectory(prefix="posbench-")
        with read_write(config), open_dict(config):
            config.hydra.sweep.dir = self.scratch.name

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Compose every job; raises UserError for the first that cannot work."""
        self.scratch.cleanup()
        if self.at_a_time is not None and self.at_a_time < 1:
            raise UserError(f"hydra.launcher.jobs={self.at_a_time} is too small; the least is 1.")
        for number, words in enumerate(job_overrides, start=initial_job_idx):
            self.jobs.append(self._composed(number, list(words)))
        return [JobReturn(status=JobStatus.COMPLETED) for _ in job_overrides]

    def _composed(self, number: int, words: list[str]) -> Composed:
        composed = self.context.config_loader.load_sweep_config(self.config, words)
        with open_dict(composed):
            composed.hydra.job.id = composed.hydra.job.num = number
        HydraConfig.instance().set_config(composed)
        label = " ".join(filter_overrides(words))
        with read_write(composed), open_dict(composed):
            del composed["hydra"]
        try:
            return Composed(label, compose.settings_of(composed))
        except UserError as error:
            raise UserError(f"job {number} ({label}): {error}") from error


def register() -> type[LookingLauncher]:
    """Put it in the place of posbench's launcher; the class holds what it then sees."""
    LookingLauncher.jobs = []
    LookingLauncher.at_a_time = None
    Plugins.instance().class_name_to_class[compose.LAUNCHER] = LookingLauncher
    return LookingLauncher
