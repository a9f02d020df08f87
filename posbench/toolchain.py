"""Whether torch can compile kernels for this machine's GPU."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from functools import cache

import torch


def _compile_something() -> None:
    torch.compile(lambda x: 2 * x + 1)(torch.ones(8, device="cuda"))


@cache
def can_compile(attempt: Callable[[], object] = _compile_something) -> bool:
    """Whether `attempt` succeeds; tried once, and a failure is said once.

    Triton builds its launcher with a C compiler and Python's headers, which a fresh machine lacks.
    """
    try:
        attempt()
    except Exception as error:  # of torch, Triton or the compiler: all mean that it does not work
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 160, placeholder=" ...")
        print(
            "warning: torch.compile does not work here, so everything runs uncompiled and slower; "
            "install a C compiler and Python's headers (apt install build-essential python3-dev). "
            f"{reason}",
            file=sys.stderr,
            flush=True,
        )
        return False
    return True
