"""`posbench new-encoding` and `posbench check-encoding`: encodings of somebody's own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posbench import plugins
from posbench.config.encodings import ENCODINGS, EncodingConfig
from posbench.errors import PosbenchError, UserError
from posbench.files import write_text

if TYPE_CHECKING:
    from posbench.promises import Finding

NEW_HELP = """posbench new-encoding NAME: write an encoding to start from, NAME.py and NAME.yaml.

  NAME     what it will be called: encoding=NAME

  posbench new-encoding mine
  posbench check-encoding mine.py
  posbench train -m encoding=rope,alibi,mine plugins=[mine.py]
  posbench eval-extrapolate plugins=[mine.py]"""

CHECK_HELP = """posbench check-encoding FILE [NAME]: measure every promise of your own encoding.

  FILE     the plugin: a Python file
  NAME     which encoding, if the file has several

  Exit 0 if all promises hold, 1 if not, 2 if the file is no plugin.

  posbench check-encoding mine.py"""

TEMPLATES = Path(__file__).resolve().parents[1] / "templates"
WIDTH = 110  # where there is no terminal to ask


def new_encoding(words: list[str]) -> None:
    """`posbench new-encoding NAME`."""
    if "--help" in words or "-h" in words:
        print(NEW_HELP)
        return
    if len(words) != 1:
        raise UserError("posbench new-encoding takes one name: posbench new-encoding mine.")
    name = words[0].removesuffix(".py")
    plugins.check_id(name, f"new-encoding {words[0]}")
    targets = {suffix: Path(f"{name}.{suffix}") for suffix in ("py", "yaml")}
    for target in targets.values():
        if target.exists():
            raise UserError(f"{target} is there already; choose another name, or move it away.")
    for suffix, target in targets.items():
        text = (TEMPLATES / f"mine.{suffix}").read_text(encoding="utf-8")
        try:
            write_text(target, renamed(text, name), exclusive=True)
        except FileExistsError:
            raise UserError(f"{target} is there already; it was left as it is.") from None
    print(f"written  {name}.py, {name}.yaml")
    print(f"next     posbench check-encoding {name}.py")
    print(f"         posbench train -m encoding=rope,alibi,{name} plugins=[{name}.py]")
    print(f"         posbench eval-extrapolate plugins=[{name}.py]")


def renamed(text: str, name: str) -> str:
    """The template's text with its encoding called `name`."""
    title = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    return re.sub(r"\bMine(?=Config\b|\b)", title, re.sub(r"\bmine\b", name, text))


def check_encoding(words: list[str]) -> None:
    """`posbench check-encoding FILE [NAME]`; raises PosbenchError if a promise does not hold."""
    if "--help" in words or "-h" in words:
        print(CHECK_HELP)
        return
    if len(words) not in (1, 2):
        raise UserError("posbench check-encoding takes a file: posbench check-encoding mine.py.")
    path = Path(words[0]).expanduser()
    with plugins.loaded([path]):
        found = [each.id for each in plugins.LOADED.values() if each.path == path.resolve()]
        if words[1:] and words[1] not in found:
            raise UserError(f"{path.name} has no encoding {words[1]}; it has {', '.join(found)}.")
        broken = [name for name in words[1:] or found if not _keeps_all(name, path)]
    if broken:
        raise PosbenchError(f"{path.name}: not every promise holds ({', '.join(broken)}).")


def _keeps_all(name: str, path: Path) -> bool:
    """Measure and print; whether no promise fails."""
    from posbench.progress import Progress
    from posbench.promises import PROMISES, Verdict, check

    config = ENCODINGS[name]()
    findings: list[Finding] = []
    with Progress(f"check {name}", len(PROMISES), unit="promises") as progress:
        for finding in check(config):
            findings.append(finding)
            progress.update(len(findings), finding.promise.name)
    print(f"encoding={name} of {path}{_settings(config)}")
    _print_table(findings)
    failed = [each for each in findings if each.verdict is Verdict.fails]
    for each in findings:
        if each.verdict is Verdict.fails or each.verdict is Verdict.slow:
            _explain(each)
    kept = sum(each.verdict in (Verdict.holds, Verdict.slow) for each in findings)
    unseen = len(PROMISES) - kept - len(failed)
    beside = f", {unseen} not checked" if unseen else ""
    print(f"{kept} of {len(PROMISES)} promises hold, {len(failed)} fail{beside}.", flush=True)
    return not failed


def _settings(config: EncodingConfig) -> str:
    hidden = ("name", plugins.SOURCE)
    typed = [f"{key}={value}" for key, value in vars(config).items() if key not in hidden]
    return f", {', '.join(typed)}" if typed else ""


def _print_table(findings: Sequence[Finding]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from posbench.promises import Verdict

    styles = {Verdict.holds: "green", Verdict.fails: "bold red"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("promise", "", "measured", "bound"):
        table.add_column(column, no_wrap=column in ("promise", ""), overflow="fold")
    for each in findings:
        verdict = f"[{styles.get(each.verdict, 'yellow')}]{each.verdict}[/]"
        table.add_row(each.promise.name, verdict, _plain(each.found), _plain(each.bound))
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    console.print(table, highlight=False)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _explain(finding: Finding) -> None:
    print(f"{finding.promise.name}: {finding.verdict}")
    print(f"  measured  {finding.found}")
    print(f"  bound     {finding.bound}")
    print(f"  matters   {finding.promise.why}")
    if finding.where:
        print(f"  look      {finding.where}")
    print()
