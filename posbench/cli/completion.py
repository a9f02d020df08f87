"""Shell completion: commands, groups, options and keys, without importing Hydra or torch."""

from __future__ import annotations

import itertools
from pathlib import Path

from posbench.cli.matching import did_you_mean
from posbench.cli.space import (
    APPS,
    HYDRA_KEYS,
    PLUGINS_KEY,
    RESUME_KEYS,
    TYPED,
    App,
    Key,
    keys,
    options,
)
from posbench.errors import UserError

HELP = """posbench completion bash|zsh|fish: print a script that completes commands and settings.

  bash   eval "$(posbench completion bash)"          in ~/.bashrc
  zsh    eval "$(posbench completion zsh)"           in ~/.zshrc, after compinit
  fish   posbench completion fish | source           in ~/.config/fish/config.fish"""

BASH = r"""_posbench() {
    local line word IFS=$'\n'
    line="${COMP_LINE:0:COMP_POINT}"
    word="${line##* }"
    COMPREPLY=($(posbench completion query "$line" 2>/dev/null))
    # bash takes = and : for ends of words; give back only what follows the last one.
    local head="${word%"${word##*[=:]}"}"
    [[ "$COMP_WORDBREAKS" == *[=:]* ]] && COMPREPLY=("${COMPREPLY[@]#"$head"}")
    [[ ${#COMPREPLY[@]} == 0 ]] && compopt -o default
    [[ ${#COMPREPLY[@]} == 1 && "${COMPREPLY[0]}" == *[=.] ]] && compopt -o nospace
    return 0
}
complete -F _posbench posbench"""

ZSH = r"""_posbench() {
    local -a found
    found=("${(@f)$(posbench completion query "$LBUFFER" 2>/dev/null)}")
    found=(${found:#})
    if (( ${#found} )); then
        compadd -Q -S '' -- ${(M)found:#*[=.]}
        compadd -Q -- ${found:#*[=.]}
    else
        _files
    fi
}
compdef _posbench posbench"""

FISH = r"""complete -c posbench -f -a '(posbench completion query (commandline -cp) 2>/dev/null)'"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
FLAGS = ("--multirun", "--cfg", "--config-dir", "--info", "--help")


def run_completion(words: list[str]) -> None:
    """Print a script, or the answers to the query that the script makes."""
    if words[:1] == ["query"] and len(words) == 2:
        print("\n".join(query(words[1])))
    elif len(words) == 1 and words[0] in SCRIPTS:
        print(SCRIPTS[words[0]])
    elif "--help" in words or "-h" in words:
        print(HELP)
    else:
        typed = " ".join(words)
        hint = did_you_mean(typed, SCRIPTS)
        raise UserError(f"posbench completion takes bash, zsh or fish.{hint}")


def query(line: str) -> list[str]:
    """What the last word of a command line may become."""
    words = line.split()
    last = "" if line[-1:].isspace() else words.pop()
    words = words[1:]
    if not words:
        from posbench.cli import COMMANDS

        return _starting(last, [*COMMANDS, "--help", "--version"])
    if words[0] == "check":
        commands = _starting(last, ["train", "eval-extrapolate"]) if len(words) == 1 else []
        words = words[1:] if words[1:] and words[1] in APPS else ["train", *words[1:]]
        return [*commands, *_setting(APPS[words[0]], words[1:], last)]
    if words[0] in APPS:
        return _setting(APPS[words[0]], words[1:], last)
    return _starting(last, _plain(words[0], len(words)))


_OPTIONS = {
    "compare": ("--baseline", "--protocol", "--ratios", "--allow-mismatch", "--out", "--json"),
    "power": ("--sd", "--diff", "--alpha", "--power"),
    "report": ("--allow-mismatch",),
}


def _plain(command: str, position: int) -> list[str]:
    from posbench.cli.listing import LISTS
    from posbench.cli.runs import PRUNE_FLAGS

    if command == "list":
        return [*LISTS, "--json"] if position == 1 else ["--json"]
    if command == "runs":
        return ["diff", "prune", "--json"] if position == 1 else list(PRUNE_FLAGS)
    if command == "study":
        from posbench.cli.studyfile import studies

        return [*studies(), "plugins=", "--dir", "--yes", "--check"]
    if command == "completion" and position == 1:
        return list(SCRIPTS)
    if command == "tb-export":
        return ["--out"]
    if command == "sample" and position > 1:
        return ["prompt=", "tokens=", "temperature=", "seed=", "plugins=", "plugins_changed="]
    return list(_OPTIONS.get(command, ()))


def _setting(app: App, words: list[str], last: str) -> list[str]:
    extra = _config_dirs(words)
    if words and words[-1] in ("--cfg", "-c"):
        return _starting(last, ["job", "hydra", "all"])
    if last.startswith("-"):
        return _starting(last, FLAGS)
    chosen = dict(word.split("=", 1) for word in words if "=" in word)
    known = keys(app, {"model": "tiny", **chosen}, extra)
    name, equals, _ = last.partition("=")
    if equals:
        return _starting(last, _values(app, name, last, known, extra))
    own = [f"{TYPED.get(key.path, key.path)}=" for key in known]
    resume = [f"{key}=" for key in RESUME_KEYS] if app.command == "train" else []
    groups = [f"{group}=" for group in app.groups]
    files = [f"{PLUGINS_KEY}="]
    return _starting(last, groups + _folded(last, own) + files + resume + _hydra(last))


def _config_dirs(words: list[str]) -> tuple[Path, ...]:
    pairs = itertools.pairwise(words)
    folders = [Path(value) for flag, value in pairs if flag in ("--config-dir", "-cd")]
    return tuple(folder for folder in folders if folder.is_dir())


def _values(app: App, name: str, last: str, known: list[Key], extra: tuple[Path, ...]) -> list[str]:
    """`name=` with each value; after a comma each value goes on with the list before it."""
    head = last[: max(last.rfind("="), last.rfind(",")) + 1]
    if name in app.groups:
        return [head + option for option in options(name, extra)]
    key = next((key for key in known if key.path == name), None)
    return [head + choice for choice in key.choices] if key else []


def _folded(last: str, paths: list[str]) -> list[str]:
    """Keys at the depth being typed: `train.` stands for all below it until the dot is there."""
    depth = last.count(".")
    return [
        path if path.count(".") <= depth else ".".join(path.split(".")[: depth + 1]) + "."
        for path in paths
    ]


def _hydra(last: str) -> list[str]:
    return [f"{key}=" for key in HYDRA_KEYS] if last.startswith("hydra") else []


def _starting(prefix: str, words: list[str] | tuple[str, ...]) -> list[str]:
    return list(dict.fromkeys(word for word in words if word.startswith(prefix)))
