"""The commands that take settings: Hydra composes them, posbench checks and runs them."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hydra
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from posbench import config, plugins
from posbench.cli import arguments, compose, guard, launcher, mistakes
from posbench.cli.help import command_help
from posbench.cli.space import APPS, App, configs_folder
from posbench.errors import (
    InterruptedRunError,
    PosbenchError,
    StorageError,
    SweepFailedError,
    UserError,
)
from posbench.version import __version__

# A full disk is told apart from a defect wherever it shows.
_STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


def run_app(name: str, words: list[str]) -> None:
    """Run `posbench NAME WORDS`; raises PosbenchError for what went wrong."""
    app, command = APPS[name], ["posbench", name, *words]
    line = arguments.read(app, words)
    if line.version:
        print(f"posbench {__version__}")
        return
    with plugins.loaded(line.plugins):
        if line.help:
            print(command_help(app, tuple(line.config_dirs)))
        elif line.resume:
            _resume(line, command)
        else:
            _compose_and_run(app, line, command)


def _resume(line: arguments.Line, command: list[str]) -> None:
    if "resume" not in line.resume:
        raise UserError(f"{next(iter(line.resume))} goes with resume=DIR.")
    if line.flags:
        raise UserError(f"resume=DIR goes on with one run; leave out {line.flags[0]}.")
    strict = line.resume.get("resume_strict", "false").lower()
    if strict not in ("true", "false"):
        raise UserError(f"resume_strict={strict} must be true or false.")
    folder = Path(line.resume["resume"].strip("'\"")).expanduser()
    names = line.resume.get("resume_allow", "").strip("[]").split(",")
    allow = [name.strip() for name in names if name.strip()]
    from posbench.jobs.train import resume_training

    resume_training(folder, strict == "true", allow, line.overrides, command)


class Task:
    """What Hydra calls for each job. It keeps errors, for Hydra would print and bury them."""

    def __init__(self, app: App, command: list[str]) -> None:
        self.app = app
        self.command = command
        self.jobs = 0
        self.folder: Path | None = None
        self.failures: list[Exception] = []
        self.interrupted: InterruptedRunError | None = None

    def __call__(self, composed: DictConfig) -> None:
        settings = HydraConfig.get()
        self.jobs += 1
        self.folder = Path(settings.runtime.output_dir)
        try:
            if settings.mode is RunMode.RUN:
                _check_single(settings)
            run(compose.settings_of(composed), self.folder, self.command)
        except InterruptedRunError as error:
            self.interrupted = error
            raise KeyboardInterrupt from error  # what ends Hydra's own sweep at once
        except Exception as error:
            self.failures.append(error)
            if settings.mode is RunMode.MULTIRUN:
                print(f"job {settings.job.num}: {error}", file=sys.stderr, flush=True)


def _check_single(settings: HydraConf) -> None:
    """Raise UserError for what only a sweep would heed."""
    given = {word.split("=")[0] for word in settings.overrides.hydra}
    if settings.sweeper.get("params"):
        raise UserError("the experiment is a sweep; add -m to run all of its jobs.")
    if "hydra.sweep.dir" in given:
        raise UserError("hydra.sweep.dir is for a sweep (-m); one run's folder is hydra.run.dir.")


def run(settings: config.Settings, folder: Path, command: list[str]) -> None:
    """Do the work of one job; torch is imported here and no earlier."""
    if isinstance(settings, config.TrainSettings):
        from posbench.jobs.train import run_training

        run_training(settings, folder, command)
    elif isinstance(settings, config.EvalSettings):
        from posbench.jobs.evaluate import run_evaluation

        run_evaluation(settings, folder, command)
    else:
        from posbench.inspection import run_inspect

        run_inspect(settings)


def _compose_and_run(app: App, line: arguments.Line, command: list[str]) -> None:
    if line.multirun and app.command == "inspect":
        raise UserError("inspect looks at one encoding at a time; leave out -m.")
    compose.register()
    flags = launcher.job_flags(line.config_dirs, line.plugins)
    launcher.register(launcher.Request(app.command, flags, command[2:]))
    task = Task(app, command)
    existing = _existing_folders(line)
    try:
        with _own_errors(app, line, task):
            _call_hydra(app, task, [*line.flags, *line.overrides])
            _raise_failures(task)
    except UserError:
        _discard(task.folder, existing)
        raise


def _existing_folders(line: arguments.Line) -> set[Path]:
    typed = [word.partition("=")[2].strip("'\"") for word in line.overrides if "run.dir=" in word]
    return {Path(folder).resolve() for folder in typed if Path(folder).exists()}


def _discard(folder: Path | None, existing: set[Path]) -> None:
    """Remove a folder that Hydra made for a run that a mistake kept from starting."""
    if folder is not None and folder.resolve() not in existing | {Path.cwd()}:
        with contextlib.suppress(OSError):  # it is not empty: something ran after all
            folder.rmdir()


@contextlib.contextmanager
def _own_errors(app: App, line: arguments.Line, task: Task) -> Iterator[None]:
    """Turn what Hydra raises into posbench's own errors; a defect passes as it is."""
    try:
        yield
    except PosbenchError:
        raise
    except KeyboardInterrupt:
        raise task.interrupted or KeyboardInterrupt from None
    except Exception as error:
        message = mistakes.explain(error, app, line.overrides, tuple(line.config_dirs))
        if message is not None:
            raise UserError(message) from error
        if isinstance(error, OSError) and (not task.jobs or error.errno in _STORAGE):
            where = error.filename or "the output folder"
            raise StorageError(f"cannot write {where}: {error.strerror or error}.") from error
        raise


def _raise_failures(task: Task) -> None:
    if task.failures and task.jobs > 1:
        failed = f"{len(task.failures)} of {task.jobs} jobs failed."
        raise SweepFailedError(failed) from task.failures[0]
    if task.failures:
        raise task.failures[0]


def _call_hydra(app: App, task: Task, words: list[str]) -> None:
    """Hydra's own main, with its exceptions left to us."""

    def job(composed: DictConfig) -> None:
        task(composed)

    entry = hydra.main(
        config_path=str(configs_folder()),
        config_name=app.command,
        version_base=compose.VERSION_BASE,
    )(job)
    GlobalHydra.instance().clear()
    arguments_before, full_before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [f"posbench {app.command}", *words]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        with guard.composed_configs_checked():
            entry()
    finally:
        sys.argv = arguments_before
        if full_before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_before
