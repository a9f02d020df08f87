"""A sweep runs each job in a process of its own: pinned, isolated, and none started in vain.

This is a Hydra launcher (`hydra/launcher=posbench`, the default). Every job is composed and
checked before the first one starts, so a mistake in the last one costs nothing. What is finished
of the same sweep, started before, is kept.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from posbench.cli import arguments, compose
from posbench.cli.looking import Composed, ComposingLauncher
from posbench.cli.plans import Plan, check_plans, distinct, key_of, standing
from posbench.cli.pool import Job, Outcome, Pool
from posbench.cli.slots import places
from posbench.cli.sweepview import table
from posbench.config import InspectSettings
from posbench.discovery import outputs
from posbench.errors import Exit, InterruptedRunError, StorageError, SweepFailedError, UserError
from posbench.files import write_text
from posbench.runs import Lock
from posbench.sweeps import (
    MULTIRUN,
    RESULTS,
    Entry,
    State,
    Sweep,
    continued,
    has_finished,
    start_anew,
    sweep_in,
    write_job,
)

# A job is a run by itself, whatever sweep its experiment asks for.
_SINGLE = ("hydra.mode=RUN", "hydra.sweeper.params=null")

_STAMPED = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}-sweep")  # the folder of a sweep without a name

# Files of the current folder are imported by a job only if they are by this process: `-m` alone
# would take a random.py that lies there for Python's own.
_SEES_HERE = bool({"", os.getcwd()} & set(sys.path))  # noqa: PTH109  as sys.path has it
PROGRAM = (sys.executable, *(() if _SEES_HERE else ("-P",)), "-m", "posbench")


@dataclass
class Request:
    """What the launcher has to know and Hydra does not tell it."""

    command: str
    flags: tuple[str, ...]  # that every job needs too
    words: list[str] = field(default_factory=list)  # as typed
    check_only: bool = False


class PosbenchLauncher(ComposingLauncher):
    """Runs the jobs of a sweep side by side, one process each."""

    request: Request  # set by register()

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.folder = Path(config.hydra.sweep.dir)
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run every job; raises SweepFailedError at the end if any failed."""
        self._check_words()
        composed = self.compose_all(job_overrides, initial_job_idx)
        plans = distinct([_plan(each) for each in composed])
        labels = _distinguishing(job_overrides)
        sweep, is_new = self._sweep(plans)
        plans = _with_folders(sweep, plans, [each.name_of for each in composed])
        kept = {plan.key for plan in plans if _is_done(sweep, plan)}
        check_plans(plan for plan in plans if plan.key not in kept)
        if self.request.check_only:
            _print_plans(sweep, is_new, plans, kept, labels)
        else:
            self._prepare(sweep, is_new, plans, kept, labels)
            words = {plan.key: each for plan, each in zip(plans, job_overrides, strict=True)}
            self._run(sweep, plans, kept, words)
        # Hydra reads one result for each job.
        return [JobReturn(status=JobStatus.COMPLETED) for _ in plans]

    def _check_words(self) -> None:
        if any(word.startswith("hydra.run.dir=") for word in self.request.words):
            raise UserError("hydra.run.dir is for one run; a sweep's folder is hydra.sweep.dir.")
        if self.config.hydra.sweeper.get("max_batch_size") is not None:
            raise UserError(
                "hydra.sweeper.max_batch_size cuts a sweep into several; leave it out. "
                "hydra.launcher.jobs says how many jobs run side by side."
            )

    def _sweep(self, plans: list[Plan]) -> tuple[Sweep, bool]:
        """The sweep to go on with, or a new one, and whether it is new; nothing is written."""
        command = self.request.command
        keys, overwrite = [plan.key for plan in plans], _starts_anew(plans)
        root = outputs() / command
        if self._is_named(root):
            found = sweep_in(self.folder, command, keys, overwrite)
        else:
            found = None if overwrite else continued(root, command, keys)
        if found is None:
            return Sweep(self.folder, command, self.request.words), True
        self.folder = found.folder
        return found, False

    def _is_named(self, root: Path) -> bool:
        """Whether a person chose the sweep's folder, by a word or in YAML."""
        given = [word.split("=")[0] for word in self.config.hydra.overrides.hydra]
        is_stamped = self.folder.parent == root and _STAMPED.fullmatch(self.folder.name)
        return "hydra.sweep.dir" in given or not is_stamped

    def _prepare(
        self, sweep: Sweep, is_new: bool, plans: list[Plan], kept: set[str], labels: list[str]
    ) -> None:
        """Take the sweep's folder and write down what is asked of it."""
        self.lock = Lock(sweep.folder)  # held until this process ends
        if _starts_anew(plans):
            start_anew(sweep)
        elif not is_new:
            _tell_continued(sweep, plans, kept)
        for plan, label in zip(plans, labels, strict=True):
            if sweep.entry(plan.key) is None:
                sweep.jobs.append(Entry(plan.folder.name, plan.key, label))
        sweep.words = self.request.words
        write_text(sweep.folder / MULTIRUN, Path(self.scratch.name, MULTIRUN).read_text())
        sweep.save()

    def _run(
        self,
        sweep: Sweep,
        plans: list[Plan],
        kept: set[str],
        overrides: dict[str, Sequence[str]],
    ) -> None:
        """Run what is not finished, and end with the table of all that was asked for."""
        todo = {
            self._job(plan, overrides[plan.key]): plan for plan in plans if plan.key not in kept
        }
        asked = self.settings
        pool = Pool(
            list(todo),
            places([plan.settings for plan in todo.values()], asked.jobs, asked.jobs_per_gpu),
            timeout=asked.timeout,
            stop_on_failure=asked.on_failure == "stop",
            note=lambda outcome: _record(sweep, todo[outcome.job].key, outcome),
            has_finished=lambda job: has_finished(sweep.command, job.folder),
        )
        outcomes = {todo[outcome.job].key: outcome for outcome in pool.run()} if todo else {}
        jobs = []
        for plan in plans:
            entry = _entry(sweep, plan.key)
            if plan.key in kept:
                jobs.append(replace(entry, state=State.done, code=None, seconds=0, reason="before"))
            else:
                jobs.append(_as_ended(entry, outcomes[plan.key]))
        finish(sweep.command, sweep.folder, jobs, pool.stopped)

    def _job(self, plan: Plan, words: Sequence[str]) -> Job:
        target = f"hydra.run.dir={arguments.quote(str(plan.folder))}"
        own = (self.request.command, *self.request.flags, *words, *_SINGLE, target)
        return Job(plan.number, plan.folder, plan.label, (*PROGRAM, *own))


def finish(
    command: str, folder: Path, jobs: Sequence[Entry], stopped: signal.Signals | None = None
) -> None:
    """End a sweep with its table; raises InterruptedRunError or SweepFailedError."""
    print(table(folder, jobs), file=sys.stderr, flush=True)
    if stopped is not None:
        code = Exit.TERMINATED if stopped is signal.SIGTERM else Exit.INTERRUPTED
        raise InterruptedRunError("stopped; the same command again goes on.", code)
    if command == "eval-extrapolate":
        _merge([folder / job.folder for job in jobs], folder)
    failed = sum(job.state.is_failure for job in jobs)
    left = sum(job.state in (State.stopped, State.waiting) for job in jobs)
    if failed:
        rest = f", {left} did not finish" if left else ""
        raise SweepFailedError(f"{failed} of {len(jobs)} jobs failed{rest}.")


def _plan(job: Composed) -> Plan:
    assert not isinstance(job.settings, InspectSettings)
    return Plan(job.number, job.label, job.settings, key_of(job.settings))


def _distinguishing(overrides: Sequence[Sequence[str]]) -> list[str]:
    """For each job the overrides that not every job has; all of them if there is one job."""
    shared = set.intersection(*(set(words) for words in overrides)) if len(overrides) > 1 else set()
    return [" ".join(word for word in words if word not in shared) for words in overrides]


def _starts_anew(plans: list[Plan]) -> bool:
    return any(plan.overwrite for plan in plans)


def _is_done(sweep: Sweep, plan: Plan) -> bool:
    entry = sweep.entry(plan.key)
    return entry is not None and not plan.overwrite and sweep.is_done(entry)


def _with_folders(sweep: Sweep, plans: list[Plan], names: list[Callable[[int], str]]) -> list[Plan]:
    """The plans with the folders they had before in this sweep, or free ones."""
    before = {} if _starts_anew(plans) else {job.key: job.folder for job in sweep.jobs}
    taken = set(before.values())
    found = []
    for plan, name_of in zip(plans, names, strict=True):
        name = before.get(plan.key) or _free_name(name_of, taken)
        taken.add(name)
        found.append(replace(plan, folder=sweep.folder / name))
    return found


def _free_name(name_of: Callable[[int], str], taken: set[str]) -> str:
    """The name of the next job: its number is how many there are, unless that is taken."""
    for number in itertools.count(len(taken)):
        name = name_of(number)
        if name not in taken:
            return name
        if name_of(number + 1) == name:
            break
    raise UserError("hydra.sweep.subdir gives two jobs the same folder; leave it out.")


def _tell_continued(sweep: Sweep, plans: list[Plan], kept: set[str]) -> None:
    asked = {plan.key for plan in plans}
    others = len(sweep.keys - asked)
    beside = f"; {others} more of its jobs are not asked for now" if others else ""
    anew = "overwrite=true" if sweep.command == "train" else "hydra.sweep.dir=DIR"
    print(
        f"goes on with the sweep in {sweep.folder}, begun {sweep.created[:10]}: {len(kept)} of "
        f"{len(plans)} jobs are finished there{beside}. {anew} starts anew.",
        file=sys.stderr,
        flush=True,
    )


def _print_plans(
    sweep: Sweep, is_new: bool, plans: list[Plan], kept: set[str], labels: list[str]
) -> None:
    """One line for each job: what would happen to it, and the overrides that set it apart."""
    what = "a new sweep" if is_new else f"goes on with the sweep in {sweep.folder}"
    jobs = "1 job" if len(plans) == 1 else f"{len(plans)} jobs"
    lines = [f"{sweep.command}: {jobs}, {what}; all settings are valid"]
    width = max(len(plan.folder.name) for plan in plans)
    for plan, label in zip(plans, labels, strict=True):
        does = "finished" if plan.key in kept else standing(plan)
        lines.append(f"  {plan.folder.name:<{width}}  {does:<11}  {label}".rstrip())
    print("\n".join(lines))


def _entry(sweep: Sweep, key: str) -> Entry:
    entry = sweep.entry(key)
    assert entry is not None
    return entry


def _as_ended(entry: Entry, outcome: Outcome) -> Entry:
    seconds = round(outcome.seconds, 1)
    return replace(
        entry, state=outcome.state, code=outcome.code, seconds=seconds, reason=outcome.reason
    )


def _record(sweep: Sweep, key: str, outcome: Outcome) -> None:
    """Write down how a job stands; a full disk must not end the other jobs."""
    entry = _as_ended(_entry(sweep, key), outcome)
    sweep.jobs = [entry if job.key == key else job for job in sweep.jobs]
    try:
        sweep.save()
        if outcome.state is not State.running:
            write_job(outcome.job.folder, entry, outcome.job.command, outcome.said)
    except StorageError as error:
        print(f"warning: {error}", file=sys.stderr, flush=True)


def _merge(folders: list[Path], sweep: Path) -> None:
    """One table and report over the jobs that gave results."""
    evaluated = [folder for folder in folders if (folder / RESULTS).is_file()]
    if evaluated:
        from posbench.jobs.evaluate import merge_evaluations

        merge_evaluations(evaluated, sweep)


def register(request: Request) -> None:
    """Make the launcher known to Hydra, for the jobs of a command."""
    PosbenchLauncher.request = request
    Plugins.instance().class_name_to_class[compose.LAUNCHER] = PosbenchLauncher


def job_flags(config_dirs: Sequence[Path], plugins: Sequence[Path]) -> tuple[str, ...]:
    """What each job's own command line needs to know the same files."""
    flags = [word for folder in config_dirs for word in ("--config-dir", str(folder.resolve()))]
    return (*flags, *(f"plugins={path.resolve()}" for path in plugins))
