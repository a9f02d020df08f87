"""posbench: what a positional encoding does to perplexity beyond the training length.

The same things as the command line, from Python:

    settings = posbench.configure("train", "encoding=rope", "train.steps=50")
    posbench.train(settings, "runs/rope")
    run = posbench.load_run("runs/rope")
    posbench.evaluate(["runs/rope"], posbench.configure("eval-extrapolate"), "runs/evaluation")
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from posbench.version import __version__

# Where each function lives: it is imported when it is first asked for, torch with it.
_FUNCTIONS = {
    "configure": "posbench.cli.compose",
    "train": "posbench.jobs.train",
    "evaluate": "posbench.jobs.evaluate",
    "load_run": "posbench.runs",
}

__all__ = ["__version__", "configure", "evaluate", "load_run", "train"]


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        return getattr(import_module(_FUNCTIONS[name]), name)
    raise AttributeError(f"module 'posbench' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_FUNCTIONS})
