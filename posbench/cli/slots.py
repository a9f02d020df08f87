"""How many jobs run side by side, and on what: GPUs and cores, found without torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from posbench.config import Device, EvalSettings, TrainSettings


def places(
    jobs: Sequence[TrainSettings | EvalSettings], asked: int | None, per_gpu: int
) -> list[dict[str, str]]:
    """What each place for one of `jobs` adds to its environment, on this machine."""
    on_cpu = all(settings.device is Device.cpu for settings in jobs)
    return slots(len(jobs), asked, [] if on_cpu else visible_gpus(), per_gpu)


def slots(
    jobs: int, asked: int | None, gpus: Sequence[str], per_gpu: int = 1
) -> list[dict[str, str]]:
    """What each place for a job adds to its environment.

    `per_gpu` jobs on each GPU, or one per core: two one-thread jobs do more together than one job
    on two threads. Threads are set in the environment, so a job's settings are those of a run by
    itself. How many does not depend on how few `jobs` are left: one that goes on where it was
    interrupted then adds in the same order, and ends at the same bits.
    """
    places = asked or len(gpus) * per_gpu or cores()
    threads = {} if "OMP_NUM_THREADS" in os.environ else _threads(max(1, cores() // places))
    places = max(1, min(places, jobs))
    if not gpus:
        return [threads] * places
    return [{**threads, "CUDA_VISIBLE_DEVICES": gpus[n % len(gpus)]} for n in range(places)]


def _threads(count: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count)}


def cores() -> int:
    """Cores this process may use: its affinity, and a container's quota."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(available or 1, _quota()))


def _quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    try:
        quota, period = path.read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no such file, or "max"
        return 1_000_000


def visible_gpus() -> list[str]:
    """GPUs (or MIG slices) that jobs may use, as CUDA_VISIBLE_DEVICES names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name.strip() and name.strip() != "-1"]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        listed = subprocess.run(
            [tool, "-L"], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    slices = re.findall(r"^\s+MIG .*\(UUID: (MIG-[^)]+)\)", listed, re.MULTILINE)
    return slices or re.findall(r"^GPU (\d+):", listed, re.MULTILINE)
