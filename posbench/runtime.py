"""Where and how numbers are computed: device, precision, threads, compilation, memory."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from dataclasses import dataclass

import torch

from posbench.config import Device, Precision, Switch
from posbench.errors import UserError


@dataclass(frozen=True)
class Runtime:
    """One resolved choice of device, autocast precision and compilation."""

    device: torch.device
    dtype: torch.dtype
    compile: bool = False

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """The precision of matrix products; float32 means nothing is changed."""
        if self.dtype is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def peak_memory_mb(self) -> float:
        """Most memory held so far, in MiB: of the GPU, or of this process on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**20
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20

    def reset_peak_memory(self) -> None:
        """Measure the peak from here on; a CPU keeps that of the whole process."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def synchronize(self) -> None:
        """Wait for the device, so that a clock read next means something."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def record(self) -> dict[str, str | int]:
        """What a result must carry of the machine that made it."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        return {
            "device": name,
            "dtype": str(self.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }


def resolve(
    device: Device,
    dtype: Precision,
    compile: Switch = Switch.off,
    threads: int | None = None,
    *,
    training: bool = True,
) -> Runtime:
    """The runtime that the settings ask for. Raises UserError for what this machine cannot do.

    dtype=auto trains in bfloat16 on CUDA and evaluates in float32; a CPU always gets float32.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    available = torch.cuda.is_available()
    if device is Device.cuda and not available:
        raise UserError("device=cuda, but torch sees no CUDA device. Use device=auto or cpu.")
    kind = "cuda" if available and device is not Device.cpu else "cpu"
    if kind == "cuda":
        _prefer_determinism()
    compiled = compile is Switch.on or (compile is Switch.auto and kind == "cuda")
    return Runtime(torch.device(kind), _precision(dtype, kind, training), compiled)


def _precision(dtype: Precision, kind: str, training: bool) -> torch.dtype:
    if dtype is Precision.auto:
        return torch.bfloat16 if kind == "cuda" and training else torch.float32
    if dtype is Precision.bfloat16 and kind == "cpu" and not _cpu_has_bfloat16():
        raise UserError(
            "dtype=bfloat16, but this CPU has no bfloat16 arithmetic (it would be about ten times "
            "slower). Use dtype=float32."
        )
    return torch.bfloat16 if dtype is Precision.bfloat16 else torch.float32


def _cpu_has_bfloat16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _prefer_determinism() -> None:
    # cuBLAS reads this when its first handle is made; warn_only, since a few kernels have no
    # deterministic form and refusing to run would help nobody.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is torch's word for too little memory, on a GPU or a CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
