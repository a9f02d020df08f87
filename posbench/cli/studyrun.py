"""A study in its folder, step by step.

study.yaml    the study as it was run: the file, and what the command line changed
study.json    the command, versions, machine, times, and what is missing
study.md      the same for people, and where to look
runs/         the training runs: a sweep, or one for each part of the training
parts/        an evaluation for each scheme and extension
evaluation/   all of them as one: results, report, TensorBoard
compare.*     differences from the baseline

Each step does only what is not done, so the same command goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.cli import apps, comparing, launcher, studyfile
from posbench.cli.arguments import quote
from posbench.cli.pool import Job, Outcome, Pool
from posbench.cli.slots import cores, visible_gpus
from posbench.cli.space import PLUGINS_KEY
from posbench.cli.studyfile import Block
from posbench.cli.studyplan import (
    Part,
    Plan,
    check_inputs,
    cost_of,
    listed,
    steps,
)
from posbench.cli.sweepview import table
from posbench.errors import (
    CheckpointError,
    Exit,
    InterruptedRunError,
    PosbenchError,
    SweepFailedError,
    UserError,
)
from posbench.files import sha256_file, write_json, write_text
from posbench.jobs.evaluate import announce, is_evaluated, merge_evaluations
from posbench.runs import MANIFEST, Lock, PluginError, Run, describe, fingerprint, load_run, now
from posbench.sweeps import Entry, write_job
from posbench.version import __version__

if TYPE_CHECKING:
    from posbench.cli.study import Request

RECORD, FILE, PAGE = "study.json", "study.yaml", "study.md"

# What of a study's folder is large, or can be made again, or names this machine.
IGNORED = """# What the command in study.json makes again, or what names the machine it ran on.
/.lock
/runs/
/parts/
/evaluation/tb/
/evaluation/*.json
/evaluation/*.parquet
/evaluation/per_doc.csv
/evaluation/attention.csv
"""


class Runner:
    """One study in one folder."""

    def __init__(self, folder: Path, plan: Plan, request: Request) -> None:
        self.folder, self.plan, self.request = folder, plan, request
        self.study = plan.study
        self.record: dict[str, Any] = {}
        self.missing: list[str] = []

    def check(self) -> None:
        """Print the steps and their cost; raises UserError for what cannot work."""
        self._check_folder()
        check_inputs(self.plan)
        self._show_cost()
        print(f"{self.study.name} can be run; --check started nothing.")

    def _show_cost(self) -> None:
        print("\n".join([*steps(self.plan), f"folder     {self.folder}"]), flush=True)
        cost = cost_of(self.plan, self.folder, self.request.calibrate)
        print("\n".join(cost.lines()), flush=True)
        self.record["expected_seconds"] = {
            "train": _rounded(cost.train_seconds),
            "evaluate": _rounded(cost.evaluate_seconds),
        }

    def run(self) -> None:
        """All steps, each doing what is not done; SweepFailedError if anything is missing then."""
        self._check_folder()
        finished = self._finished()
        if finished:
            print(
                f"goes on    {self.folder}: {len(finished)} of {len(self.plan.runs)} runs are done",
                flush=True,
            )
        else:
            check_inputs(self.plan)
            self._show_cost()
            if not self._agreed():
                print("not started.")
                return
        lock = Lock(self.folder)
        try:
            self._begin()
            try:
                self._train()
                self._evaluate()
                self._compare()
            except (InterruptedRunError, KeyboardInterrupt) as stop:
                self._end("interrupted")
                code = stop.code if isinstance(stop, InterruptedRunError) else Exit.INTERRUPTED
                raise InterruptedRunError(
                    "stopped; the same command goes on where it was.", code
                ) from None
            except PosbenchError as error:
                self.missing.append(str(error).rstrip("."))
                self._end("failed")
                raise
            self._end("incomplete" if self.missing else "finished")
        finally:
            lock.release()
        print(f"study      {self.folder / PAGE}", flush=True)
        if self.missing:
            raise SweepFailedError(
                f"{self.study.name} is not complete: {'; '.join(self.missing)}. "
                "The same command tries again."
            )

    def _check_folder(self) -> None:
        """Raise UserError unless the folder is free, or holds this very study."""
        if not self.folder.is_dir():
            if self.folder.exists():
                raise UserError(f"{self.folder} is a file. Choose another --dir.")
            return
        names = sorted(each.name for each in self.folder.iterdir() if each.name != ".lock")
        if names and FILE not in names:
            raise UserError(
                f"{self.folder} is not empty and holds no posbench study (it has {names[0]}). "
                "Choose another --dir."
            )
        if not names:
            return
        before = studyfile.load(self.folder / FILE).identity()
        now = self.study.identity()
        changed = {
            key: (before.get(key), now.get(key))
            for key in [*before, *(key for key in now if key not in before)]
            if before.get(key) != now.get(key)
        }
        if changed:
            raise UserError(
                f"{self.folder} holds another study: {describe(changed)}. Choose another --dir."
            )
        saved = _read_json(self.folder / RECORD).get("plugins", {})
        if saved != self._plugin_hashes():
            raise UserError(
                f"{self.folder} was made with other code of plugins= ({_named(saved)} there, "
                f"{_named(self._plugin_hashes())} here). Choose another --dir."
            )

    def _agreed(self) -> bool:
        """Ask whoever is at the terminal; where there is none, the command is the answer."""
        if self.request.yes or not (sys.stdin.isatty() and sys.stdout.isatty()):
            return True
        try:
            return input("start? [y/N] ").strip().lower() in ("y", "yes")
        except EOFError:
            return False

    def _begin(self) -> None:
        saved = _read_json(self.folder / RECORD)
        new = {
            "format": 1,
            "study": self.study.name,
            "status": "running",
            "command": ["posbench", "study", *self.request.typed],
            "started": saved.get("started") or now(),
            "posbench": __version__,
            "environment": environment(),
            "plugins": self._plugin_hashes(),
            "seconds": saved.get("seconds", {}),
        }
        self.record = saved | self.record | new
        write_text(self.folder / FILE, studyfile.dump(self.study.plain()))
        write_text(self.folder / ".gitignore", IGNORED)
        write_json(self.folder / RECORD, self.record)

    def _plugin_hashes(self) -> dict[str, str]:
        return {path.name: sha256_file(path) for path in self.request.plugin_paths}

    @contextlib.contextmanager
    def _step(self, name: str, title: str) -> Iterator[None]:
        """Tell of a step, and how long it took in all, however often it was stopped."""
        print(f"{name:<10} {title}", flush=True)
        started = time.monotonic()
        try:
            yield
        finally:
            seconds = self.record["seconds"]
            seconds[name] = round(seconds.get(name, 0.0) + time.monotonic() - started, 1)

    def _sweep_folder(self, block: Block) -> Path:
        runs = self.folder / "runs"
        return runs / block.name if len(self.study.train) > 1 else runs

    def _finished(self) -> dict[str, Run]:
        """The runs of this study that are trained to their end, by key."""
        wanted = {each.key for each in self.plan.runs}
        found: dict[str, Run] = {}
        for manifest in sorted((self.folder / "runs").rglob(MANIFEST)):
            with contextlib.suppress(CheckpointError, PluginError):
                run = load_run(manifest.parent)
                if run.finished and fingerprint(run.settings) in wanted:
                    found.setdefault(fingerprint(run.settings), run)
        return found

    def _train(self) -> None:
        flags = [f"{PLUGINS_KEY}={listed(self.request.plugins)}"] if self.request.plugins else []
        for block in self.study.train:
            finished = self._finished()
            runs = [each for each in self.plan.runs if each.block is block]
            todo = [each for each in runs if each.key not in finished]
            if not todo:
                continue
            target = f"hydra.sweep.dir={self._sweep_folder(block)}"
            words = [*flags, "-m", *block.words(), *self.request.launcher, target]
            title = f"{len(todo)} of {len(runs)} runs in {self._sweep_folder(block)}"
            # What a sweep with failures lacks is told below.
            with self._step("train", title), contextlib.suppress(SweepFailedError):
                apps.run_app("train", words)
        finished = self._finished()
        lost = [each for each in self.plan.runs if each.key not in finished]
        if lost:
            names = ", ".join(f"{each.scheme} seed {each.settings.seed}" for each in lost)
            self.missing.append(f"{len(lost)} of {len(self.plan.runs)} runs ({names})")
        if not finished:
            raise SweepFailedError(f"none of the {len(self.plan.runs)} runs was trained.")

    def _evaluate(self) -> None:
        finished = self._finished()
        wanted = {
            part: [finished[run.key].folder for run in part.runs if run.key in finished]
            for part in self.plan.parts
        }
        wanted = {part: runs for part, runs in wanted.items() if runs}
        todo = {part: runs for part, runs in wanted.items() if not self._is_done(part, runs)}
        if todo:
            with self._step("evaluate", f"{len(todo)} of {len(wanted)} (scheme, extension) pairs"):
                self._run_parts(todo)
        done = [part for part, runs in wanted.items() if self._is_done(part, runs)]
        if len(done) < len(wanted):
            lost = ", ".join(part.name for part in wanted if part not in done)
            self.missing.append(f"{len(wanted) - len(done)} evaluations ({lost})")
        if not done:
            raise SweepFailedError("no run could be evaluated.")
        self._merge(done)

    def _part_folder(self, part: Part) -> Path:
        return self.folder / "parts" / part.name

    def _is_done(self, part: Part, runs: list[Path]) -> bool:
        return is_evaluated(self.plan.settings_of(part, runs), self._part_folder(part))

    def _run_parts(self, todo: dict[Part, list[Path]]) -> None:
        flags = [f"{PLUGINS_KEY}={path}" for path in self.request.plugins]
        jobs = []
        for number, (part, runs) in enumerate(todo.items()):
            folder = self._part_folder(part)
            shutil.rmtree(folder, ignore_errors=True)  # of other runs, or cut short
            words = [*flags, *self.study.evaluate_words(part.extension), f"runs={listed(runs)}"]
            target = f"hydra.run.dir={quote(str(folder))}"
            command = (*launcher.PROGRAM, "eval-extrapolate", *words, target)
            jobs.append(Job(number, folder, part.name, command))
        first = [part.runs[0].settings for part in todo]
        pool = Pool(jobs, self.plan.places(first))
        ended = [_record(outcome) for outcome in pool.run()]
        print(table(self.folder / "parts", ended), file=sys.stderr)
        if pool.stopped is not None:
            raise InterruptedRunError("stopped", Exit(128 + pool.stopped))

    def _merge(self, parts: list[Part]) -> None:
        folders = [self._part_folder(part) for part in parts]
        made_of = {folder.name: sha256_file(folder / "results.json") for folder in folders}
        target = self.folder / "evaluation"
        if self.record.get("merged") == made_of and (target / "report.html").is_file():
            announce(target)
            return
        with self._step("merge", f"{len(folders)} evaluations into {target}"):
            command = self.record["command"]
            merge_evaluations(folders, target, self.folder, self.study.baseline, command)
        self.record["merged"] = made_of
        self.record.pop("compared", None)
        write_json(self.folder / RECORD, self.record)

    def _compare(self) -> None:
        """Differences from the baseline, as files beside the report that shows them too."""
        evaluation = self.folder / "evaluation"
        if self.study.baseline is None:
            return
        state = f"{self.study.baseline} {sha256_file(evaluation / 'results.json')}"
        if self.record.get("compared") == state and any(self.folder.glob("compare.*")):
            return
        words = [str(evaluation), "--baseline", self.study.baseline, "--out", str(self.folder)]
        with self._step("compare", f"with {self.study.baseline}"):
            try:
                comparing.compare(words)
            except PosbenchError as error:
                self.missing.append(f"the comparison ({str(error).rstrip('.')})")
                return
        self.record["compared"] = state

    # ------------------------------------------------------------ what is left of it

    def _end(self, status: str) -> None:
        self.record |= {"status": status, "ended": now(), "missing": self.missing}
        finished = self._finished()
        self.record["runs"] = {"planned": len(self.plan.runs), "finished": len(finished)}
        write_json(self.folder / RECORD, self.record)
        write_text(self.folder / PAGE, self._page(finished))

    def _page(self, finished: dict[str, Run]) -> str:
        study, record = self.study, self.record
        command = shlex.join(record["command"])
        machine = record["environment"]
        spent = ", ".join(f"{name} {each / 60:.1f} min" for name, each in record["seconds"].items())
        lines = [
            f"# {study.title}", "", study.question, "",
            "```", command, "```", "",
            f"Status: {record['status']}; {len(finished)} of {len(self.plan.runs)} runs.",
            *(f"Missing: {each}." for each in self.missing),
            "",
            f"posbench {__version__}, torch {machine['torch']}, Python {machine['python']}, "
            f"{machine['cpu']}, {machine['cores']} cores, {machine['gpus']} GPUs. "
            f"{record['started'][:10]}; {spent}.",
            "",
        ]  # fmt: skip
        shown = {
            "evaluation/report.md": "tables, figures and how to read them",
            "evaluation/report.html": "the same as one page that needs no other file",
            "evaluation/results.csv": "every number, a row each",
            "compare.md": f"differences from {study.baseline}, paired by seed",
            "compare.csv": "the same, a row each",
            FILE: "what was asked, as a study file",
            RECORD: "the command, versions, machine and times",
        }
        lines += [
            f"- [{name}]({name}): {text}"
            for name, text in shown.items()
            if (self.folder / name).is_file()
        ]
        return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- small things


def _record(outcome: Outcome) -> Entry:
    """How an evaluation ended, written into its folder too if it was started."""
    job = outcome.job
    seconds = round(outcome.seconds, 1)
    ended = Entry(job.name, "", job.label, outcome.state, outcome.code, seconds, outcome.reason)
    if outcome.code is not None:
        write_job(job.folder, ended, list(job.command), outcome.said)
    return ended


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


def _named(hashes: dict[str, str]) -> str:
    return ", ".join(f"{name} {sha256[:12]}" for name, sha256 in hashes.items()) or "none"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def environment() -> dict[str, Any]:
    """What of this machine a result depends on. No name of it."""
    packages = {}
    for name in ("torch", "numpy", "scipy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return {
        "python": platform.python_version(),
        **packages,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": cores(),
        "gpus": len(visible_gpus()),
    }


def _cpu() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or "unknown CPU"
