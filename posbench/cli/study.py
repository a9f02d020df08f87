"""`posbench study`: train, evaluate, compare and report, from one file and in one folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from posbench import plugins
from posbench.cli import studyfile
from posbench.cli.matching import did_you_mean
from posbench.cli.space import PLUGINS_KEY
from posbench.discovery import outputs
from posbench.errors import UserError

HELP = """posbench study NAME [key=value ...] [--dir DIR] [--yes] [--check]: a whole study.

  NAME             one of posbench's own studies, or a file of yours, mine.yaml
  key=value        settings of training or evaluation, or the baseline, in place of the study's:
                   seed=0,1,2,3,4 or train.steps=2000 or eval.ratios=[1,2,4,8]
  plugins=FILE     encodings of your own, mine.py or [a.py,b.py], trained beside the others
  calibrate=false  do not time a few steps first: no times in the cost
  --dir DIR        folder of the study (default outputs/study/NAME)
  --yes            start without asking; nobody is asked where there is no terminal
  --check          check every job and say what it would cost; nothing is started or written

  It says what it costs, trains, evaluates every run under every extension, compares with the
  baseline, and reports. The same command goes on where it stopped.

  posbench study seed_claims
  posbench study seed_claims plugins=mine.py --dir outputs/study/mine
  posbench study extensions encoding=rope,rope_abf --check"""


@dataclass
class Request:
    """What was typed."""

    name: str = ""
    words: list[str] = field(default_factory=list)
    launcher: list[str] = field(default_factory=list)  # hydra.launcher.*, for the sweeps
    plugins: list[Path] = field(default_factory=list)
    folder: Path | None = None
    yes: bool = False
    check: bool = False
    calibrate: bool = True
    typed: list[str] = field(default_factory=list)

    @property
    def plugin_paths(self) -> list[Path]:
        """The files of plugins, as they are known once loaded."""
        return [path.expanduser().resolve() for path in self.plugins]


def run_study(words: list[str]) -> None:
    """`posbench study`; raises SweepFailedError at the end if anything of it is missing."""
    if "--help" in words or "-h" in words:
        print(f"{HELP}\n\nstudies\n{_names()}")
        return
    request = _read(words)
    with plugins.loaded(request.plugins):
        study = studyfile.load(studyfile.find(request.name))
        added = [each.id for each in plugins.LOADED.values() if each.path in request.plugin_paths]
        study = studyfile.changed(study, request.words, added)
        folder = request.folder or outputs() / "study" / study.name
        from posbench.cli.studyplan import plan_of
        from posbench.cli.studyrun import Runner

        runner = Runner(folder, plan_of(study, request.launcher), request)
        if request.check:
            runner.check()
        else:
            runner.run()


def _names() -> str:
    loaded = {name: studyfile.load(path) for name, path in studyfile.studies().items()}
    return "\n".join(f"  {name:<16} {study.title}" for name, study in loaded.items())


def _read(words: list[str]) -> Request:
    request = Request(typed=list(words))
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.partition("=")
        if word in ("--yes", "-y"):
            request.yes = True
        elif word == "--check":
            request.check = True
        elif key == "--dir":
            value = value if equals else rest.pop(0) if rest else ""
            if not value or value.startswith("-"):  # a forgotten folder, and the next option
                raise UserError("--dir needs a folder after it.")
            request.folder = Path(value).expanduser()
        elif word.startswith("-"):
            hint = did_you_mean(word, ("--dir", "--yes", "--check", "--help"))
            raise UserError(f"posbench study has no option {word}.{hint}")
        elif key == PLUGINS_KEY:
            request.plugins += plugins.named_paths(value)
        elif key == "calibrate" and equals:
            if value not in ("true", "false"):
                raise UserError(f"{word} is not valid: calibrate must be true or false.")
            request.calibrate = value == "true"
        elif key.startswith("hydra.launcher."):
            request.launcher.append(word)
        elif equals and not word.endswith((".yaml", ".yml")):
            request.words.append(word)
        elif request.name:
            raise UserError(f"posbench study takes one study, not {request.name} and {word}.")
        else:
            request.name = word
    if not request.name:
        names = ", ".join(studyfile.studies())
        raise UserError(f"say which study: posbench study NAME. Studies: {names}.")
    return request
