"""The command line: a table of commands, and how each of them may end."""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial

from posbench.errors import Exit, InterruptedRunError, PosbenchError, UserError
from posbench.version import __version__

Command = Callable[[list[str]], None]


def _settings_command(name: str, words: list[str]) -> None:
    from posbench.cli.apps import run_app

    run_app(name, words)


def _check(words: list[str]) -> None:
    from posbench.cli.apps import run_check

    run_check(words)


def _runs(words: list[str]) -> None:
    from posbench.cli.runs import run_runs

    run_runs(words)


def _list(words: list[str]) -> None:
    from posbench.cli.listing import run_list

    run_list(words)


def _sample(words: list[str]) -> None:
    from posbench.cli.plain import sample

    sample(words)


def _report(words: list[str]) -> None:
    from posbench.cli.plain import report

    report(words)


def _compare(words: list[str]) -> None:
    from posbench.cli.comparing import compare

    compare(words)


def _power(words: list[str]) -> None:
    from posbench.cli.comparing import power

    power(words)


def _tb_export(words: list[str]) -> None:
    from posbench.cli.plain import tb_export

    tb_export(words)


def _study(words: list[str]) -> None:
    from posbench.cli.study import run_study

    run_study(words)


def _new_encoding(words: list[str]) -> None:
    from posbench.cli.own import new_encoding

    new_encoding(words)


def _check_encoding(words: list[str]) -> None:
    from posbench.cli.own import check_encoding

    check_encoding(words)


def _selftest(words: list[str]) -> None:
    from posbench.cli.plain import selftest

    selftest(words)


def _completion(words: list[str]) -> None:
    from posbench.cli.completion import run_completion

    run_completion(words)


# In the order of --help: the way a person works.
COMMANDS: dict[str, tuple[str, Command]] = {
    "train": ("train one model with one encoding, or a sweep", partial(_settings_command, "train")),
    "eval-extrapolate": (
        "measure perplexity at 1x, 2x, 4x the training length",
        partial(_settings_command, "eval-extrapolate"),
    ),
    "study": ("a whole study from one file: train, evaluate, compare, report", _study),
    "compare": ("differences from a baseline, paired by seed, and their tests", _compare),
    "report": ("write the report of an evaluation again", _report),
    "inspect": ("show an encoding's numbers", partial(_settings_command, "inspect")),
    "list": ("what there is: encodings, extensions, protocols, models, data", _list),
    "estimate": ("say what a run or a sweep would cost", partial(_settings_command, "estimate")),
    "check": ("check a command, every job of it, without running it", _check),
    "runs": ("list runs and sweeps; runs diff, runs prune", _runs),
    "sample": ("let a trained model write", _sample),
    "power": ("how many seeds it takes to find a difference", _power),
    "tb-export": ("write TensorBoard's files again, from the records", _tb_export),
    "new-encoding": ("write an encoding of your own to start from", _new_encoding),
    "check-encoding": ("measure every promise on an encoding of your own", _check_encoding),
    "selftest": ("check the evaluator here on models whose losses are known", _selftest),
    "completion": ("print a completion script for bash, zsh or fish", _completion),
}


def usage() -> str:
    """What `posbench --help` prints."""
    lines = [
        "posbench measures what positional encodings do to perplexity beyond the training length.",
        "",
        "usage: posbench COMMAND [key=value ...]",
        "",
        *(f"  {name:<18}{text}" for name, (text, _) in COMMANDS.items()),
        "",
        "posbench COMMAND --help explains a command; posbench --version prints the version.",
        "",
        "  posbench train -m encoding=rope,alibi    two models, side by side",
        "  posbench eval-extrapolate                their perplexity at 1x, 2x and 4x",
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run one command line; the exit code says how it ended (see errors.Exit)."""
    words = sys.argv[1:] if arguments is None else arguments
    is_job = _follow_parent()
    try:
        dispatch(words)
        sys.stdout.flush()
    except PosbenchError as error:
        if is_job and not isinstance(error, InterruptedRunError):
            traceback.print_exc()  # into the job's own log
        return _fail(str(error), error.code)
    except KeyboardInterrupt:
        return _fail("interrupted.", Exit.INTERRUPTED)
    except BrokenPipeError:
        # The reader went away (`posbench list | head`): nothing is left to say, to nobody.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.OK
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # rich's way of saying the same
            return Exit.OK
        if is_job and error.code:
            traceback.print_exc()
        if error.code is None or isinstance(error.code, int):
            return error.code or Exit.OK
        return _fail(str(error.code), Exit.FAILED)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            return _defect(error)
        return _fail(f"{error.filename}: no disk takes a name as long as this.", Exit.USER)
    except MemoryError:
        return _fail("the machine ran out of memory.", Exit.MEMORY)
    except Exception as error:
        return _defect(error)
    return Exit.OK


def _follow_parent() -> bool:
    """As a job of a sweep: be told to stop, by the system, when the sweep's process is killed.

    Returns whether this is one.
    """
    parent = os.environ.pop("POSBENCH_PARENT", None)
    if parent is None or sys.platform != "linux":
        return parent is not None
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != int(parent):  # it was gone before we asked
        os.kill(os.getpid(), signal.SIGTERM)
    return True


def _defect(error: Exception) -> int:
    traceback.print_exc()
    return _fail(f"{type(error).__name__}: {error} -- this is a bug in posbench.", Exit.FAILED)


def _fail(message: str, code: Exit) -> int:
    print(f"posbench: {message}", file=sys.stderr, flush=True)
    return int(code)


def dispatch(words: list[str]) -> None:
    """Run the command that the first word names."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
    elif words[0] in ("--version", "-V"):
        print(f"posbench {__version__}")
    elif words[0] in COMMANDS:
        COMMANDS[words[0]][1](words[1:])
    else:
        from posbench.cli.matching import did_you_mean

        hint = did_you_mean(words[0], COMMANDS, "posbench {}")
        known = ", ".join(COMMANDS)
        raise UserError(f"{words[0]!r} is not a command.{hint} Commands: {known}.")


__all__ = ["COMMANDS", "main"]
