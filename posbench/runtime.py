"""Where and how numbers are computed: device, precision, threads, compilation, memory."""

from __future__ import annotations

import contextlib
import resource
import sys
from dataclasses import dataclass

import torch

from posbench.config import Device, Precision, Switch
from posbench.errors import UserError
from posbench.toolchain import can_compile


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
            "compile": self.compile,
            "cpu": torch.backends.cpu.get_cpu_capability(),
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

    dtype=auto trains in bfloat16 on a GPU that has it, and is float32 everywhere else.
    compile=auto compiles on CUDA where that works.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    available = torch.cuda.is_available()
    if device is Device.cuda and not available:
        raise UserError("device=cuda, but torch sees no CUDA device. Use device=auto or cpu.")
    kind = "cuda" if available and device is not Device.cpu else "cpu"
    return Runtime(torch.device(kind), _precision(dtype, kind, training), _compiled(compile, kind))


def _compiled(compile: Switch, kind: str) -> bool:
    if kind == "cpu" or compile is Switch.off:
        return compile is Switch.on
    if compile is Switch.on and not can_compile():
        raise UserError("compile=on, but torch.compile does not work here. Use compile=off.")
    return can_compile()


def _precision(dtype: Precision, kind: str, training: bool) -> torch.dtype:
    if dtype is Precision.auto:
        wanted = kind == "cuda" and training and _has_bfloat16(kind)
        return torch.bfloat16 if wanted else torch.float32
    if dtype is Precision.bfloat16 and not _has_bfloat16(kind):
        name = "GPU" if kind == "cuda" else "CPU"
        raise UserError(
            f"dtype=bfloat16, but this {name} has no bfloat16 arithmetic and would be far slower "
            "with it. Use dtype=float32."
        )
    return torch.bfloat16 if dtype is Precision.bfloat16 else torch.float32


def _has_bfloat16(kind: str) -> bool:
    if kind == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return _cpu_has_bfloat16()


def _cpu_has_bfloat16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is torch's word for too little memory, on a GPU or a CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
