"""What a person may get wrong, and the documented exit codes. Imports nothing of ours."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of every posbench command."""

    OK = 0
    FAILED = 1  # a sweep had failed jobs, a check did not hold, or an unexpected error
    USER = 2  # what was typed cannot be done
    CHECKPOINT = 3  # no usable checkpoint
    STORAGE = 4  # a file or folder could not be written
    DIVERGED = 5  # loss or gradient is not finite
    MEMORY = 6  # out of memory
    INTERRUPTED = 130  # SIGINT
    TERMINATED = 143  # SIGTERM


class PosbenchError(Exception):
    """An error with one message for the person at the terminal, and an exit code; no traceback."""

    code: Exit = Exit.FAILED


class UserError(PosbenchError):
    """A setting, a path or a value that cannot work; the message names it and the way out."""

    code = Exit.USER


class CheckpointError(PosbenchError):
    """A run folder whose checkpoint is missing, truncated or altered."""

    code = Exit.CHECKPOINT


class StorageError(PosbenchError):
    """A file or folder that could not be written."""

    code = Exit.STORAGE


class DivergedError(PosbenchError):
    """Training met a loss or gradient that is not finite; raised before the optimizer step."""

    code = Exit.DIVERGED


class OutOfMemoryError(PosbenchError):
    """The device or the machine ran out of memory."""

    code = Exit.MEMORY


class InterruptedRunError(PosbenchError):
    """A signal asked the run to stop; it saved what it had and stopped at a step boundary."""

    def __init__(self, message: str, code: Exit = Exit.INTERRUPTED) -> None:
        super().__init__(message)
        self.code = code


class SweepFailedError(PosbenchError):
    """Some jobs of a sweep failed; the others ran to their end."""


class UnsupportedError(Exception):
    """An encoding cannot do what was asked (a length, an extension); a status of a cell."""


class SelftestFailedError(PosbenchError):
    """The evaluator gives another number than it must on a model whose losses are known."""

    code = Exit.FAILED


def exit_code(error: BaseException) -> int:
    """The exit code of a command that ended with `error`."""
    if isinstance(error, PosbenchError):
        return int(error.code)
    return int(Exit.MEMORY if isinstance(error, MemoryError) else Exit.FAILED)
