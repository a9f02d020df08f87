"""Runs that were to be evaluated and have nothing to evaluate: unfinished, failed, not begun."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posbench import journal
from posbench.errors import UserError
from posbench.jobs.measuring import Candidate
from posbench.runs import MANIFEST, METRICS, Run, fingerprint
from posbench.sweeps import Entry, is_sweep, load_sweep


def absent(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """One record for each run that a report must name as missing.

    folder, name (of the folder, with the seed), why, run_id (as in its rows, if it has any) and
    settings_id ("" unless its manifest can be read).
    """
    jobs = _jobs({each.folder.parent for each in candidates})
    records = [_record(each, jobs.get(each.folder)) for each in candidates if each.skipped]
    return [*records, *_not_begun({each.folder for each in candidates}, jobs)]


def _jobs(folders: set[Path]) -> dict[Path, Entry]:
    """What the records of sweeps say of the jobs in these folders."""
    found: dict[Path, Entry] = {}
    for folder in sorted(folders):
        if is_sweep(folder):
            with contextlib.suppress(UserError):  # the runs are there all the same
                found |= {folder / job.folder: job for job in load_sweep(folder).jobs}
    return found


def _record(candidate: Candidate, job: Entry | None) -> dict[str, Any]:
    folder, run = candidate.folder, candidate.run
    if run is None:  # its rows carry the folder's name, too
        return _of(folder, folder.name, candidate.skipped) | {"run_id": folder.name}
    seed = f"seed{run.settings.seed}"
    name = folder.name if seed in folder.name else f"{folder.name}-{seed}"
    why = candidate.skipped if run.finished else _progress(run, job)
    ids = {"run_id": run.id, "settings_id": fingerprint(run.settings, without_seed=True)}
    return _of(folder, name, why) | ids


def _of(folder: Path, name: str, why: str) -> dict[str, Any]:
    return {"folder": str(folder), "name": name, "why": why, "run_id": "", "settings_id": ""}


def _progress(run: Run, job: Entry | None) -> str:
    """`unfinished at step 120 of 500`, and what stopped it if it was not asked to stop."""
    records = journal.read(run.folder / METRICS)
    step = records[-1]["step"] if records else 0
    words = f"unfinished at step {step} of {run.settings.train.steps}"
    status, reason = run.manifest.get("status"), run.manifest.get("reason")
    if status in ("running", "interrupted"):  # one that was killed could not say so itself
        status, reason = (job.state, job.reason) if job and job.state.is_failure else ("", "")
    return "; ".join(filter(None, (words, ": ".join(filter(None, (status, reason))))))


def _not_begun(named: set[Path], jobs: dict[Path, Entry]) -> list[dict[str, Any]]:
    """Jobs without a run, of sweeps of which every run was named."""
    whole = {
        sweep
        for sweep in {folder.parent for folder in jobs}
        if {each.parent for each in sweep.glob(f"*/{MANIFEST}")} <= named
    }
    return [
        _of(folder, folder.name, ": ".join(filter(None, (job.state, job.reason))))
        for folder, job in jobs.items()
        if folder.parent in whole and not (folder / MANIFEST).is_file()
    ]
