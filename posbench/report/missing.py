"""Runs that a report should hold and does not: what became of them."""

from __future__ import annotations

from typing import Any

from posbench.results import Evaluation


def missing(evaluation: Evaluation) -> list[str]:
    """One line for each run that was named and could not be evaluated, in the order of folders."""
    found = {each["folder"]: f"{each['name']} ({each['why']})" for each in missing_runs(evaluation)}
    return list(found.values())


def missing_runs(evaluation: Evaluation) -> list[dict[str, Any]]:
    """The records of `posbench.jobs.absent`, of all evaluations merged into this one."""
    done = evaluation.provenance.get("evaluations", [])
    records = [each for one in done if isinstance(one, dict) for each in one.get("missing", [])]
    measured = {run["run_id"] for run in evaluation.runs}
    return [each for each in records if each["run_id"] not in measured]
