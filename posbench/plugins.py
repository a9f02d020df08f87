"""Encodings that posbench did not bring: files named in `plugins=`, and installed packages.

A plugin is code. It runs because a person named its file or installed its package (entry point
group `posbench.encodings`), never because a run folder holds it. Its settings carry the SHA-256 of
its file as `source`, so a run says which code it was trained with. No torch until one is loaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_type_hints

from posbench.config.encodings import ENCODINGS, EncodingConfig
from posbench.config.fields import default_of, setting
from posbench.errors import PosbenchError, UserError
from posbench.rules import check_ranges
from posbench.saved import from_dict, to_dict

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from posbench.encodings import Encoding

GROUP = "posbench.encodings"  # of entry points
SOURCE = "source"  # the setting that holds the hash


@dataclass(frozen=True)
class Plugin:
    """An encoding that is loaded now, and the file it came from."""

    id: str
    path: Path
    code: bytes
    sha256: str
    package: str = ""  # the installed one that registered it


LOADED: dict[str, Plugin] = {}


def source_of(config: EncodingConfig) -> str:
    """SHA-256 of the plugin that an encoding's settings belong to; empty for posbench's own."""
    return str(getattr(config, SOURCE, ""))


def changed_plugin(config: EncodingConfig) -> str:
    """`plugin=HASH` of the code that is loaded if settings were saved with other code, else ''."""
    here = LOADED.get(config.name)
    if here is None or getattr(config, SOURCE, here.sha256) == here.sha256:
        return ""
    return f"plugin={here.sha256[:8]}"


def check_id(name: Any, what: str) -> None:
    """Raise UserError unless `name` can be typed as encoding=NAME and is not taken."""
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(
            f"{what}: {name!r} cannot be an encoding's name; it takes small letters, digits and _, "
            "a letter first."
        )
    if name in ("null", "true", "false", "nan", "inf"):
        raise UserError(f"{what}: encoding={name} would not be read as a name; take another.")
    if name in LOADED:
        other = LOADED[name]
        whose = f"the installed package {other.package}" if other.package else str(other.path)
        raise UserError(f"{what}: encoding={name} is already that of {whose}.")
    if name in ENCODINGS:
        raise UserError(f"{what}: encoding={name} is one of posbench's own; take another name.")


def named_paths(value: str) -> list[Path]:
    """The files that plugins=VALUE names: one, or several in brackets."""
    inner = value.strip()
    parts = inner[1:-1].split(",") if inner[:1] + inner[-1:] == "[]" else [inner]
    names = [part.strip().strip("'\"") for part in parts]
    if not all(names):
        raise UserError(f"plugins={value} names no file; plugins=[mine.py] does.")
    return [Path(name).expanduser() for name in names]


# ---------------------------------------------------------------- loading


@contextmanager
def loaded(paths: Iterable[Path]) -> Iterator[None]:
    """Inside, installed plugins and those in `paths` are encodings like any other.

    What they raise there becomes a UserError that names the line.
    """
    before = set(LOADED)
    try:
        load_installed()
        load(paths)
        yield
    except PosbenchError:
        raise
    except Exception as error:
        blamed = blame(error)
        if not blamed:
            raise
        raise UserError(blamed) from error
    finally:
        for name in set(LOADED) - before:
            _forget(name)


def load(paths: Iterable[Path]) -> list[Plugin]:
    """Import each file and register its encodings; a file loaded before is read anew.

    Raises UserError for a file that is missing, does not import, or has no encoding that fits in.
    """
    found: list[Plugin] = []
    for path in dict.fromkeys(Path(each).expanduser().resolve() for each in paths):
        for name in [name for name, plugin in LOADED.items() if plugin.path == path]:
            _forget(name)
        what = f"plugins={path.name}"
        code = _read(path, what)
        module = _import(path, code, what)
        found += _register(_encodings(module, what), path, code, what)
    return found


def _read(path: Path, what: str) -> bytes:
    if path.is_dir():
        raise UserError(f"{what}: {path} is a folder; name the Python file.")
    if not path.is_file():
        hint = " Several go in brackets: plugins=[a.py,b.py]." if "," in path.name else ""
        raise UserError(f"{what}: no such file ({path}).{hint}")
    if path.suffix != ".py":
        raise UserError(f"{what}: a plugin is a Python file, NAME.py.")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{what} cannot be read: {error.strerror}.") from None


def _import(path: Path, code: bytes, what: str) -> ModuleType:
    """A module of these very bytes, under a name of its own."""
    import posbench.plugin  # noqa: F401  a mistake in torch is not the plugin's

    module = ModuleType(f"posbench_plugin_{hashlib.sha256(code + bytes(path)).hexdigest()[:16]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look their annotations up there
    try:
        exec(compile(code, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        raise UserError(f"{what} does not import: {told(error, path)}.") from error
    return module


def told(error: BaseException, path: Path) -> str:
    """An exception in one line, with the last line of `path` that led to it."""
    words = " ".join(str(error).split()).rstrip(".")
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        words, lines = str(error.msg), [error.lineno]
    where = f" ({path.name}, line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {words}{where}" if words else f"{type(error).__name__}{where}"


def blame(error: BaseException) -> str:
    """One sentence that names the plugin whose code raised `error`; empty if none did."""
    if isinstance(error, PosbenchError):
        return ""
    files = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
    for plugin in LOADED.values():
        if str(plugin.path) in files:
            return (
                f"encoding={plugin.id} failed: {told(error, plugin.path)}. "
                f"`posbench check-encoding {plugin.path.name}` looks into it."
            )
    return ""


def load_installed() -> None:
    """Register what installed packages offer; raises UserError naming the one that does not fit."""
    from importlib.metadata import entry_points

    for point in entry_points(group=GROUP):
        package = point.dist.name if point.dist else point.value
        what = f"the installed package {package} (entry point {point.name} of {GROUP})"
        if any(plugin.package == package and _offers(point, plugin) for plugin in LOADED.values()):
            continue
        try:
            value = point.load()
            module = value if isinstance(value, ModuleType) else sys.modules[value.__module__]
            path = Path(str(module.__file__))
            code = path.read_bytes()
        except (Exception, SystemExit) as error:
            raise UserError(
                f"{what} cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())}."
            ) from error
        kinds = _encodings(module, what)
        if value is not module:
            kinds = [kind for kind in kinds if kind is value]
        _register(kinds, path, code, what, package)


def _offers(point: EntryPoint, plugin: Plugin) -> bool:
    module = sys.modules.get(point.module)
    return module is not None and str(module.__file__) == str(plugin.path)


def _forget(name: str) -> None:
    from posbench.encodings import CLASSES

    for table in (LOADED, ENCODINGS, CLASSES):
        table.pop(name, None)


# ---------------------------------------------------------------- what a file must hold


def _encodings(module: ModuleType, what: str) -> list[type[Encoding]]:
    """The encodings that `module` defines itself; a name with an underscore is a helper's."""
    from posbench.encodings import Encoding

    kinds = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, Encoding)
        and kind.__module__ == module.__name__
        and not kind.__name__.startswith("_")
    ]
    if not kinds:
        raise UserError(
            f"{what} has no encoding: no class there extends posbench.plugin.Encoding. "
            "`posbench new-encoding NAME` writes an example."
        )
    return list(dict.fromkeys(kinds))


def _register(
    kinds: list[type[Encoding]], path: Path, code: bytes, what: str, package: str = ""
) -> list[Plugin]:
    from posbench.encodings import CLASSES

    sha256 = hashlib.sha256(code).hexdigest()
    names: dict[str, str] = {}
    accepted = []
    for kind in kinds:
        settings = _settings(kind, what)
        name = settings().name
        if name in names:
            raise UserError(
                f"{what} has two encodings of one name, {name}: {names[name]} and {kind.__name__}."
            )
        check_id(name, what)
        names[name] = kind.__name__
        defaults = _defaults(settings, path.with_name(f"{name}.yaml"))
        accepted.append((name, kind, _with_source(settings, defaults, sha256)))
    plugins = []
    for name, kind, settings in accepted:
        ENCODINGS[name], CLASSES[name] = settings, kind
        LOADED[name] = Plugin(name, path, code, sha256, package)
        plugins.append(LOADED[name])
    return plugins


def _settings(kind: type[Encoding], what: str) -> type[EncodingConfig]:
    """The dataclass of an encoding's settings, from the annotation of `config`."""
    try:
        settings = get_type_hints(kind).get("config")
    except Exception as error:
        raise UserError(f"{what}: {kind.__name__}: {type(error).__name__}: {error}.") from error
    if not (isinstance(settings, type) and issubclass(settings, EncodingConfig)):
        raise UserError(
            f"{what}: {kind.__name__} does not say which settings it has; give it "
            "`config: MineConfig`, a dataclass that extends posbench.plugin.EncodingConfig."
        )
    if "__dataclass_fields__" not in vars(settings):
        raise UserError(f"{what}: {settings.__name__} lacks @dataclass above it.")
    names = {item.name for item in dataclasses.fields(settings)}
    if SOURCE in names:
        raise UserError(f"{what}: {settings.__name__}.{SOURCE} is a name posbench needs itself.")
    try:
        defaults = settings()
        from_dict(settings, to_dict(defaults))
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise UserError(
            f"{what}: {settings.__name__}: {error}. A setting has a default, and is a number, "
            "true or false, text, a StrEnum, a list of these, or null."
        ) from error
    check_ranges(defaults, f"{what}: {settings.__name__}.")
    return settings


def _defaults(settings: type[EncodingConfig], path: Path) -> EncodingConfig:
    """The settings' defaults, with what the YAML file beside the plugin says otherwise."""
    if not path.is_file():
        return settings()
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """YAML with numbers as people write them: 1e-3 is one."""

    number = re.compile(r"[-+]?\d+[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader)
        if values is None:
            return settings()
        if not isinstance(values, dict):
            raise ValueError("it holds no `setting: value` lines")
        if "name" in values:
            raise ValueError("name is set by the class")
        defaults: EncodingConfig = from_dict(settings, values)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{line}: not valid YAML: {error.problem}.") from error
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}.") from error
    check_ranges(defaults, f"{path}: ")
    return defaults


def _with_source(
    settings: type[EncodingConfig], defaults: EncodingConfig, sha256: str
) -> type[EncodingConfig]:
    """The same dataclass with these defaults, and with the hash of the code they belong to."""
    fields: list[tuple[str, Any, Any]] = []
    for item in dataclasses.fields(settings):
        value, told = getattr(defaults, item.name), item.metadata
        if value != default_of(item):
            field = setting(value, told.get("help", ""), told.get("low"), told.get("high"))
            fields.append((item.name, item.type, field))
    fields.append((SOURCE, str, setting(sha256, "SHA-256 of the plugin's file")))
    made = dataclasses.make_dataclass(
        settings.__name__, fields, bases=(settings,), namespace={"__doc__": settings.__doc__}
    )
    made.__module__ = settings.__module__  # where its annotations have a meaning
    return made
