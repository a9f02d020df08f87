"""The commands that take settings: Hydra composes them, posbench checks and runs them."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from posbench import config, plugins
from posbench.cli import arguments, compose, guard, launcher, looking, mistakes, plans
from posbench.cli.help import command_help
from posbench.cli.slots import places
from posbench.cli.space import APPS, App, configs_folder
from posbench.errors import (
    InterruptedRunError,
    PosbenchError,
    StorageError,
    SweepFailedError,
    UserError,
    exit_code,
)
from posbench.sweeps import Entry, State, ended_since, state_of, write_job
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


CHECK_HELP = """posbench check [COMMAND] [key=value ...]: would this command work?

  COMMAND        train (if left out) or eval-extrapolate, with all that can be typed after it

Every job of it is composed and checked: settings, rules, text that fills the context, folders, and
what is quick to check of an encoding of your own. Nothing runs and no folder is made. Exit code 0
and a line for each job, or 2 and the first mistake.

  posbench check encoding=alibi context=256
  posbench check train -m encoding=rope,alibi seed=0,1,2
  posbench check eval-extrapolate -m extension=none,ntk,yarn"""

_NOT_CHECKED = ("--cfg", "-c", "--info", "-i")


def run_check(words: list[str]) -> None:
    """Check `posbench WORDS` without running it; raises UserError for what would not work."""
    name, rest = (words[0], words[1:]) if words[:1] and words[0] in APPS else ("train", words)
    app, command = APPS[name], ["posbench", name, *rest]
    line = arguments.read(app, rest)
    if line.help:
        print(CHECK_HELP)
        return
    unwanted = [*line.resume, *(flag for flag in line.flags if flag in _NOT_CHECKED)]
    if name in ("inspect", "estimate") or unwanted:
        raise UserError(f"posbench check does not take {unwanted[0] if unwanted else name}.")
    folder = _typed_folder(line)
    with plugins.loaded(line.plugins), tempfile.TemporaryDirectory(prefix="posbench-") as scratch:
        line.overrides = _with_own_launcher(line.overrides)
        line.overrides.append(f"hydra.run.dir={arguments.quote(scratch)}")  # Hydra makes it
        _compose_and_run(app, line, command, partial(_look, folder))


def _typed_folder(line: arguments.Line) -> Path | None:
    """The folder of a single run, if one was named."""
    typed = [word for word in line.overrides if word.startswith("hydra.run.dir=")]
    return Path(typed[-1].partition("=")[2].strip("'\"")) if typed else None


def _with_own_launcher(words: list[str]) -> list[str]:
    """The words without the choice of another launcher and its settings: ours only looks."""
    if not any(word.startswith("hydra/launcher=") for word in words):
        return words
    return [word for word in words if not word.startswith(("hydra/launcher=", "hydra.launcher."))]


def _look(folder: Path | None, settings: config.Settings, _: Path, command: list[str]) -> None:
    """Check one run as a sweep's launcher checks each of its jobs, and say what it would do."""
    assert not isinstance(settings, config.InspectSettings)
    plan = plans.Plan(0, "", settings, plans.key_of(settings))
    plan = plan if folder is None else replace(plan, folder=folder)
    plans.check_plans([plan])
    print(f"{command[1]}: 1 job, {plans.standing(plan)}; all settings are valid")


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


Work = Callable[[config.Settings, Path, list[str]], None]


class Task:
    """What Hydra calls for each job. It keeps errors, for Hydra would print and bury them."""

    def __init__(self, app: App, command: list[str], work: Work) -> None:
        self.app = app
        self.work = work
        self.command = command
        self.started = time.time()
        self.ran = False
        self.folder: Path | None = None
        self.launcher = ""  # another than ours, if that runs a sweep,
        self.sweep: Path | None = None  # and where
        self.failure: Exception | None = None
        self.interrupted: InterruptedRunError | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arrive in a process that a launcher started: Hydra there has to know our names."""
        self.__dict__.update(state)
        compose.register()

    def see(self, composed: DictConfig) -> None:
        """Note where a sweep goes that another launcher runs; refuse what it cannot do."""
        if composed.hydra.launcher.get("_target_") == compose.LAUNCHER:
            return
        self.sweep = Path(composed.hydra.sweep.dir)
        self.launcher = composed.hydra.runtime.choices["hydra/launcher"]
        if plugins.LOADED and self.launcher != "basic":
            names = ", ".join(plugins.LOADED)
            raise UserError(
                f"hydra/launcher={self.launcher} starts processes that do not know {names}; leave "
                "it out to have posbench's own launcher."
            )

    def __call__(self, composed: DictConfig) -> None:
        settings = HydraConfig.get()
        self.ran = True
        self.folder = Path(settings.runtime.output_dir)
        is_job = settings.mode is RunMode.MULTIRUN
        try:
            if not is_job:
                _check_single(settings)
            self.work(compose.settings_of(composed), self.folder, self.command)
        except InterruptedRunError as error:
            self.interrupted = error
            raise KeyboardInterrupt from error  # what ends Hydra's own sweep at once
        except Exception as error:
            self.failure = error
        if is_job:
            self._record_job(settings, self.folder)

    def _record_job(self, settings: HydraConf, folder: Path) -> None:
        """Write down how a job ended: it may run in another process, which takes no more along."""
        error, self.failure = self.failure, None
        label = " ".join(settings.overrides.task)
        job = Entry(folder.name, "", label, State.done, 0)
        said: list[str] = []
        if error is not None:
            print(f"job {settings.job.num}: {error}", file=sys.stderr, flush=True)
            job.code = exit_code(error)
            job.state, job.reason = state_of(job.code), str(error)
            said = "".join(traceback.format_exception(error)).splitlines()
        write_job(folder, job, self.command, said)


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


def _compose_and_run(
    app: App, line: arguments.Line, command: list[str], work: Work | None = None
) -> None:
    """Have Hydra compose the jobs, and do them; `work` only looks at them instead."""
    if line.multirun and app.command == "inspect":
        raise UserError("inspect looks at one encoding at a time; leave out -m.")
    if app.command == "estimate":
        _estimate(app, line)
        return
    compose.register()
    flags = launcher.job_flags(line.config_dirs, line.plugins)
    launcher.register(launcher.Request(app.command, flags, command[2:], work is not None))
    task = Task(app, command, work or run)
    existing = _existing_folders(line)
    try:
        with _own_errors(app, line, task):
            _call_hydra(app, task, [*line.flags, *line.overrides])
            if task.failure is not None:
                raise task.failure
            if task.sweep is not None:
                _finish_foreign(task, task.sweep)
    except UserError:
        _discard(task.folder, existing)
        raise


def _finish_foreign(task: Task, sweep: Path) -> None:
    """The end of a sweep that another launcher ran, told by what its jobs left."""
    jobs = ended_since(sweep, task.started)
    if jobs:
        launcher.finish(task.app.command, sweep, jobs)


Jobs = list[tuple[str, config.Settings]]  # the overrides that a sweep gives each, its settings


def jobs_of(app: App, line: arguments.Line) -> tuple[Jobs, compose.LauncherConfig]:
    """Every job of a command, and what is asked of the launcher; no folder is made.

    Raises UserError for settings that cannot work.
    """
    words = [
        word
        for word in _with_own_launcher(line.overrides)
        if word.split("=")[0] not in arguments.FOLDER_KEYS
    ]
    compose.register()
    seen, single = looking.register(), Jobs()

    def keep(settings: config.Settings, folder: Path, command: list[str]) -> None:
        single.append(("", settings))

    look = Task(app, [], keep)
    with _own_errors(app, line, look):
        _call_hydra(app, look, [*line.flags, *words])
        if look.failure is not None:
            raise look.failure
    return single or [(job.label, job.settings) for job in seen.jobs], seen.asked


def _estimate(app: App, line: arguments.Line) -> None:
    jobs, asked = jobs_of(app, line)
    runs = [settings for _, settings in jobs if isinstance(settings, config.EstimateSettings)]
    if runs:  # none: --cfg and --info only show settings
        from posbench.jobs.estimating import run_estimate

        run_estimate(runs, places(runs, asked.jobs, asked.jobs_per_gpu))


def _existing_folders(line: arguments.Line) -> set[Path]:
    typed = [word.partition("=")[2].strip("'\"") for word in line.overrides if "run.dir=" in word]
    existing = set()
    for folder in typed:
        with contextlib.suppress(OSError):  # a name too long for a disk
            existing |= {Path(folder).resolve()} if Path(folder).exists() else set()
    return existing


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
        if isinstance(error, OSError) and (not task.ran or error.errno in _STORAGE):
            where = error.filename or "the output folder"
            raise StorageError(f"cannot write {where}: {error.strerror or error}.") from error
        if task.sweep is not None and not task.ran:
            _finish_foreign(task, task.sweep)
            why = str(error).strip().splitlines()[:1] or [type(error).__name__]
            raise SweepFailedError(f"hydra/launcher={task.launcher} gave up: {why[0]}") from error
        raise


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
        with guard.composed_configs_checked(task.see):
            entry()
    finally:
        sys.argv = arguments_before
        if full_before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_before
