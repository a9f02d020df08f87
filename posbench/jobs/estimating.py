"""`posbench estimate`: what runs would cost, from formulas and a short calibration here."""

from __future__ import annotations

import dataclasses
import heapq
import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.config import EstimateSettings, EvalConfig, Format, TrainSettings
from posbench.costs import PROCESS_BYTES, Anatomy, anatomy, free_memory, run_bytes
from posbench.discovery import outputs
from posbench.errors import PosbenchError
from posbench.jobs.calibrating import Speed, calibrate, evaluation_tokens, vocabulary_of
from posbench.jobs.session import duration
from posbench.progress import Progress
from posbench.runs import fingerprint, scheme_of
from posbench.runtime import Runtime, resolve

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 140  # where there is no terminal to ask


@dataclass(frozen=True)
class Estimate:
    """What one training run would cost. Memory and disk in bytes, time in seconds."""

    settings: TrainSettings
    model: Anatomy
    tokens: int
    training_bytes: int
    evaluation_bytes: dict[float, int]  # by ratio
    disk_bytes: int
    speed: Speed | None  # None: not calibrated
    misfit: str  # why it will not fit here; empty if it will

    @property
    def flops(self) -> int:
        """Floating-point operations of the whole training."""
        return self.tokens * self.model.training_flops_per_token

    @property
    def training_seconds(self) -> float | None:
        """Of the whole run, its start included; None without a calibration."""
        return None if self.speed is None else self.speed.training_seconds(self.settings)

    def evaluation_seconds(self, config: EvalConfig, device: str, runs: int = 1) -> float | None:
        """Of evaluating `runs` runs like this one in one process; None without a calibration."""
        if self.speed is None:
            return None
        tokens = evaluation_tokens(self.settings, config, device)
        return self.speed.evaluation_seconds(tokens, runs)


class Estimator:
    """Estimates of runs; a model that several of them share is counted and timed once."""

    def __init__(self, ratios: Sequence[float], calibrated: bool, threads: int | None) -> None:
        self.ratios, self.calibrated, self.threads = ratios, calibrated, threads
        self._known: dict[str, tuple[Anatomy, Speed | None, str]] = {}

    def estimate(self, runs: Sequence[TrainSettings]) -> list[Estimate]:
        """One estimate for each of `runs`; progress is told on stderr."""
        distinct = {_model_key(settings): settings for settings in runs}
        with Progress("estimate", len(distinct), unit="models") as progress:
            for number, (key, settings) in enumerate(distinct.items()):
                progress.update(number, scheme_of(settings))
                if key not in self._known:
                    self._known[key] = self._examine(settings)
            progress.update(len(distinct), "")
        return [self._estimate(settings) for settings in runs]

    def _examine(self, settings: TrainSettings) -> tuple[Anatomy, Speed | None, str]:
        runtime = self.runtime(settings)
        model = anatomy(settings, vocabulary_of(settings), runtime.device.type, runtime.dtype)
        misfit = self._misfit(settings, model, runtime)
        speed = None
        if self.calibrated and not misfit:
            lengths = [max(2, round(ratio * settings.context)) for ratio in self.ratios]
            try:
                speed = calibrate(settings, lengths, runtime)
            except PosbenchError as error:  # what a few steps showed, a run would meet
                misfit = str(error)
        return model, speed, misfit

    def runtime(self, settings: TrainSettings) -> Runtime:
        """What a run with these settings would be computed on."""
        threads = settings.threads or self.threads
        return resolve(settings.device, settings.dtype, settings.compile, threads)

    def _misfit(self, settings: TrainSettings, model: Anatomy, runtime: Runtime) -> str:
        free = free_memory(runtime.device)
        process = PROCESS_BYTES if runtime.device.type == "cpu" else 0
        where = "this machine" if runtime.device.type == "cpu" else "the GPU"
        needed = process + _training_bytes(settings, model)
        if needed > free:
            size = settings.train.micro_batch or settings.train.batch_size
            way = (
                f"train.micro_batch={size // 2} needs less"
                if size > 1
                else "take a smaller model or context"
            )
            return (
                f"training needs {size_in_words(needed)}, {where} has {size_in_words(free)} free; "
                f"{way}"
            )
        longest = max(2, round(max(self.ratios) * settings.context))
        needed = process + model.evaluation_bytes(1, longest)
        if needed > free:
            return (
                f"evaluation at {longest} tokens needs {size_in_words(needed)}, {where} has "
                f"{size_in_words(free)} free"
            )
        return ""

    def _estimate(self, settings: TrainSettings) -> Estimate:
        model, speed, misfit = self._known[_model_key(settings)]
        runtime = self.runtime(settings)
        process = PROCESS_BYTES if runtime.device.type == "cpu" else 0
        per_pass = EvalConfig().batch_tokens
        evaluation = {}
        for ratio in self.ratios:
            length = max(2, round(ratio * settings.context))
            rows = max(1, per_pass // length)
            evaluation[ratio] = process + model.evaluation_bytes(rows, length)
        return Estimate(
            settings=settings,
            model=model,
            tokens=settings.train.steps * settings.train.batch_size * settings.context,
            training_bytes=process + _training_bytes(settings, model),
            evaluation_bytes=evaluation,
            disk_bytes=run_bytes(model, settings),
            speed=speed,
            misfit=misfit,
        )


def _training_bytes(settings: TrainSettings, model: Anatomy) -> int:
    size = settings.train.micro_batch or settings.train.batch_size
    return model.training_bytes(size, settings.context)


def _model_key(settings: TrainSettings) -> str:
    """What decides counts and times: all but the seed and the length of the run."""
    train = replace(settings.train, steps=1)
    return fingerprint(replace(settings, train=train), without_seed=True)


def makespan(seconds: Sequence[float | None], places: int) -> float | None:
    """Time until all jobs are done when each place takes the next one as it falls free.

    None if that of any is not known.
    """
    busy = [0.0] * max(1, places)
    for each in seconds:
        if each is None:
            return None
        heapq.heapreplace(busy, busy[0] + each)
    return max(busy)


# ---------------------------------------------------------------- the command


def run_estimate(runs: Sequence[EstimateSettings], slots: Sequence[dict[str, str]]) -> None:
    """Print what `runs` would cost to stdout; `slots` are the places that a sweep has for jobs."""
    first = runs[0]
    threads = int(slots[0].get("OMP_NUM_THREADS", 0)) or None
    estimator = Estimator(first.ratios, first.calibrate, threads if len(runs) > 1 else None)
    estimates = estimator.estimate([_plain(settings) for settings in runs])
    device = estimator.runtime(first).device.type
    config = EvalConfig(ratios=first.ratios)
    record = _record(estimates, config, device, len(slots))
    if first.format is Format.json:
        print(json.dumps(record, indent=1, allow_nan=False))
    else:
        _print_tables(estimates, record)


def _plain(settings: EstimateSettings) -> TrainSettings:
    """The settings of the run alone."""
    names = [item.name for item in dataclasses.fields(TrainSettings)]
    return TrainSettings(**{name: getattr(settings, name) for name in names})


def _record(
    estimates: list[Estimate], config: EvalConfig, device: str, places: int
) -> dict[str, Any]:
    jobs = [_job(each, config, device) for each in estimates]
    free_disk = shutil.disk_usage(existing(outputs().absolute())).free
    disk = sum(job["disk_bytes"] for job in jobs)
    total: dict[str, Any] = {
        "jobs": len(jobs),
        "at_a_time": places,
        "tokens": sum(job["tokens"] for job in jobs),
        "flops": sum(job["flops"] for job in jobs),
        "disk_bytes": disk,
        "free_disk_bytes": free_disk,
        "training_seconds": makespan([job["training_seconds"] for job in jobs], places),
        # One process evaluates all runs unless it is told otherwise.
        "evaluation_seconds": makespan([job["evaluation_seconds"] for job in jobs], 1),
    }
    total["misfits"] = _misfits(jobs, estimates, places, disk, free_disk)
    return {"jobs": jobs, "total": total}


def existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    return next(each for each in (folder, *folder.parents) if each.exists())


def _job(estimate: Estimate, config: EvalConfig, device: str) -> dict[str, Any]:
    settings, model = estimate.settings, estimate.model
    ratios = {ratio: round(ratio * settings.context) for ratio in estimate.evaluation_bytes}
    forward = {
        f"{ratio:g}x": model.forward_flops_per_token(settings.context, length)
        for ratio, length in ratios.items()
    }
    return {
        "encoding": scheme_of(settings),
        "model": settings.model.name,
        "context": settings.context,
        "seed": settings.seed,
        "steps": settings.train.steps,
        "tokens": estimate.tokens,
        "parameters": model.parameters,
        "non_embedding_parameters": model.non_embedding_parameters,
        "encoding_parameters": model.encoding_parameters,
        "attention": sorted({str(kernel) for kernel in model.kernels}),
        "training_flops_per_token": model.training_flops_per_token,
        "forward_flops_per_token": forward,
        "flops": estimate.flops,
        "training_bytes": estimate.training_bytes,
        "evaluation_bytes": {f"{r:g}x": size for r, size in estimate.evaluation_bytes.items()},
        "disk_bytes": estimate.disk_bytes,
        "training_seconds": estimate.training_seconds,
        "evaluation_seconds": estimate.evaluation_seconds(config, device),
        "misfit": estimate.misfit or None,
    }


def _misfits(
    jobs: list[dict[str, Any]], estimates: list[Estimate], places: int, disk: int, free_disk: int
) -> list[str]:
    """What of the whole will not fit, one sentence each."""
    found = [
        f"job {number} ({job['encoding']}): {job['misfit']}"
        for number, job in enumerate(jobs)
        if job["misfit"]
    ]
    if disk > free_disk:
        found.append(
            f"the runs need {size_in_words(disk)} of disk, {size_in_words(free_disk)} are free"
        )
    import torch

    from posbench.config import Device

    on_gpu = torch.cuda.is_available() and estimates[0].settings.device is not Device.cpu
    together = sum(sorted((job["training_bytes"] for job in jobs), reverse=True)[:places])
    free = 0 if on_gpu else free_memory(torch.device("cpu"))
    if not on_gpu and together > free and not found:
        found.append(
            f"{places} jobs at a time need up to {size_in_words(together)} of memory, "
            f"{size_in_words(free)} are free; hydra.launcher.jobs={max(1, places // 2)} needs less"
        )
    return found


def size_in_words(size: float) -> str:
    """Bytes in words."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _print_tables(estimates: list[Estimate], record: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(_table(record["jobs"]))
    print("\n".join(_totals(estimates[0], record)), flush=True)


def _table(jobs: list[dict[str, Any]]) -> Table:
    from rich import box
    from rich.table import Table

    columns = _columns(jobs)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("jobs", justify="right")
    for name in columns:
        left = name in ("encoding", "model")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    alike = Counter(tuple(cell(job) for cell in columns.values()) for job in jobs)
    for cells, count in alike.items():  # jobs that differ in nothing shown, such as the seed
        table.add_row(str(count), *cells)
    return table


def _columns(jobs: list[dict[str, Any]]) -> dict[str, Callable[[dict[str, Any]], str]]:
    """Title -> cell, model and context only where they differ."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "encoding": lambda job: str(job["encoding"]),
    }
    for key in ("model", "context"):
        if len({job[key] for job in jobs}) > 1:
            columns[key] = lambda job, key=key: str(job[key])  # type: ignore[misc]
    for key, title in _COUNTS.items():
        columns[title] = lambda job, key=key: f"{job[key]:,}"  # type: ignore[misc]
    columns["FLOPs"] = lambda job: f"{job['flops']:.1e}"
    columns["MiB train"] = lambda job: _mib(job["training_bytes"])
    for ratio in jobs[0]["evaluation_bytes"]:
        columns[ratio] = lambda job, ratio=ratio: _mib(  # type: ignore[misc]
            job["evaluation_bytes"][ratio]
        )
    columns["disk"] = lambda job: _mib(job["disk_bytes"])
    columns["time train"] = lambda job: _duration(job["training_seconds"])
    columns["eval"] = lambda job: _duration(job["evaluation_seconds"])
    return columns


_COUNTS = {
    "parameters": "parameters",
    "non_embedding_parameters": "non-emb.",
    "encoding_parameters": "its own",
}


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f}"


def _duration(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds)


def _totals(first: Estimate, record: dict[str, Any]) -> list[str]:
    total = record["total"]
    per_token = first.model.training_flops_per_token
    settings = first.settings
    lines = [
        f"model      {settings.model.name} of {settings.model.layers} layers and width "
        f"{settings.model.width}, context {settings.context}"
        + (" in the first job" if total["jobs"] > 1 else ""),
        f"tokens     {total['tokens']:,} in {total['jobs']} job{'s' if total['jobs'] > 1 else ''}",
        f"FLOPs      {total['flops']:.2e} by 6 N + 12 layers width context per token "
        f"({per_token:,} in the first job), the square of attention counted whole",
        "memory     estimated: of training, and of evaluation at each length, the process included",
        f"disk       {size_in_words(total['disk_bytes'])}; "
        f"{size_in_words(total['free_disk_bytes'])} are free",
    ]
    if total["training_seconds"] is None:
        lines.append("time       not measured")
    else:
        lines.append(
            f"time       about {duration(total['training_seconds'])} to train, "
            f"{total['at_a_time']} at a time, and {duration(total['evaluation_seconds'])} to "
            "evaluate; from a few steps and passes here"
        )
    misfits = total["misfits"]
    lines += [f"fits       no: {each}" for each in misfits] or ["fits       yes"]
    return lines
