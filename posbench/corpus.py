"""Documents: where text comes from, what is dropped, and which split each document belongs to.

Names are relative, so a corpus has the same fingerprint on every machine that holds the same bytes.
Files are read as text, never imported. No torch here.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from posbench.config import DataConfig, PysourceConfig, StdlibConfig, TextConfig
from posbench.errors import UserError

# Tests repeat themselves; encodings and pydoc_data are tables; the others are packages of their own
# in some distributions, so that leaving them out makes machines more alike.
# fmt: off
SKIPPED_FOLDERS = frozenset([
    "site-packages", "dist-packages", "__pycache__",
    "test", "tests", "testing", "idle_test",
    "encodings", "pydoc_data",
    "lib2to3", "distutils", "idlelib", "tkinter", "turtledemo", "ensurepip",
])
# fmt: on
SKIPPED_PREFIXES = ("config-", "_sysconfigdata")
# Written by the build or by the machine's owner: the same release differs from machine to machine.
SKIPPED_FILES = frozenset({"torch/version.py", "stdlib/sitecustomize.py"})
LEAST_ZLIB_RATIO = 0.12  # below are serialised tables; the lowest of real stdlib modules is 0.18

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".tex")
FEW_FILES = 20  # fewer files than this are cut into parts, or a split would be left without any
PARTS = 64
PART_CHARACTERS = (2048, 131_072)  # the least and the most that one part holds
SPLITS = ("train", "validation", "test")


class Document(NamedTuple):
    """One text; `sha256` is that of its UTF-8 bytes."""

    name: str
    text: str
    sha256: str


@dataclass(frozen=True)
class Corpus:
    """Documents sorted by name, no text twice; `note` holds the versions the text came from."""

    name: str
    documents: list[Document]
    fingerprint: str
    dropped_duplicates: int
    note: dict[str, str]


def load_corpus(config: DataConfig) -> Corpus:
    """The documents that `config` names; raises UserError if there are none to be had."""
    documents, note = _LOADERS[type(config)](config)
    kept = _without_duplicates(documents)
    dropped = len(documents) - len(kept)
    return Corpus(config.name, kept, _fingerprint(kept), dropped, note)


def check_size(corpus: Corpus, context: int) -> None:
    """Raise UserError if no document can hold context + 1 tokens, each being a byte or more."""
    most = max((len(document.text.encode()) for document in corpus.documents), default=0)
    if most <= context:
        raise UserError(
            f"context={context} needs a document of {context + 1} tokens; the longest of "
            f"data={corpus.name} has {most} at the most. Give longer text, or a smaller context."
        )


def split_of(document: Document, config: DataConfig) -> str:
    """The split of one document, by the hash of its name alone: no other document matters."""
    place = _place(document)
    if place < config.test:
        return "test"
    return "validation" if place < config.test + config.validation else "train"


def split_documents(corpus: Corpus, config: DataConfig) -> dict[str, list[Document]]:
    """All documents by split, as `split_of` says; in a small corpus no split is left empty.

    An empty split takes the document that is nearest to its border, from a split that has two.
    """
    if len(corpus.documents) < len(SPLITS):
        raise UserError(
            f"data={corpus.name} has {_count(corpus.documents, 'document')}, without "
            f"{_count(range(corpus.dropped_duplicates), 'duplicate')} and with files cut into "
            f"parts of {PART_CHARACTERS[0]} characters or more; train, validation and test need "
            "one each. Give more text."
        )
    splits: dict[str, list[Document]] = {split: [] for split in SPLITS}
    for document in sorted(corpus.documents, key=_place):
        splits[split_of(document, config)].append(document)
    if not splits["train"]:
        giver = max(("validation", "test"), key=lambda split: len(splits[split]))
        splits["train"].append(splits[giver].pop())
    for empty, other in (("test", "validation"), ("validation", "test")):
        if not splits[empty]:
            giver = "train" if len(splits["train"]) > 1 else other
            splits[empty].append(splits[giver].pop(0))
    return {split: sorted(documents) for split, documents in splits.items()}


def _place(document: Document) -> float:
    """A number in [0, 1), uniform over names."""
    return int.from_bytes(hashlib.sha256(document.name.encode()).digest()[:8]) / 2**64


def _without_duplicates(documents: Sequence[Document]) -> list[Document]:
    kept: dict[str, Document] = {}
    for document in sorted(documents):
        kept.setdefault(document.sha256, document)
    return list(kept.values())


def _fingerprint(documents: Sequence[Document]) -> str:
    lines = "".join(f"{document.name}\t{document.sha256}\n" for document in documents)
    return hashlib.sha256(lines.encode()).hexdigest()


def _document(name: str, text: str) -> Document:
    return Document(name, text, hashlib.sha256(text.encode()).hexdigest())


# ---------------------------------------------------------------- Python sources


def _load_stdlib(config: DataConfig) -> tuple[list[Document], dict[str, str]]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    documents = _read_sources("stdlib", folder, config)
    return documents, {"python": platform.python_version()}


def _load_pysource(config: DataConfig) -> tuple[list[Document], dict[str, str]]:
    documents, note = _load_stdlib(config)
    spec = importlib.util.find_spec("torch")  # locates the package, does not import it
    places = list(spec.submodule_search_locations or []) if spec else []
    if not places:
        raise UserError(f"data={config.name} reads the sources of torch, and torch is not found.")
    documents += _read_sources("torch", Path(places[0]), config)
    return documents, note | {"torch": importlib.metadata.version("torch")}


def _read_sources(prefix: str, folder: Path, config: DataConfig) -> list[Document]:
    paths = [
        (f"{prefix}/{path.relative_to(folder).as_posix()}", path)
        for path in _walk(folder, _is_wanted_folder)
        if path.suffix == ".py" and not path.name.startswith(SKIPPED_PREFIXES)
    ]
    wanted = [(name, path) for name, path in paths if name not in SKIPPED_FILES]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # zlib releases the GIL
        documents = [found for found in pool.map(_read_source, wanted) if found]
    if not documents:
        raise UserError(
            f"data={config.name} reads Python sources, and {folder} holds none (an embedded, "
            "frozen or zipped Python). Use your own text: data=text data.path=FOLDER."
        )
    return documents


def _is_wanted_folder(name: str) -> bool:
    return name not in SKIPPED_FOLDERS and not name.startswith(SKIPPED_PREFIXES)


def _read_source(named: tuple[str, Path]) -> Document | None:
    """A source file as a document; None if it is not prose-like UTF-8 text."""
    name, path = named
    raw = _read(path)
    if not raw.strip() or is_degenerate(raw):
        return None
    try:
        return _document(name, raw.removeprefix(codecs.BOM_UTF8).decode())
    except UnicodeDecodeError:
        return None


def is_degenerate(raw: bytes) -> bool:
    """Whether a file repeats itself so much that it must be a generated table."""
    return len(zlib.compress(raw)) < LEAST_ZLIB_RATIO * len(raw)


# ---------------------------------------------------------------- a person's own text


def _load_text(config: DataConfig) -> tuple[list[Document], dict[str, str]]:
    """One document per file; fewer than FEW_FILES files are cut into about PARTS parts.

    Parts end at blank lines where there are any and are named `file.txt#0003`. Parts of one file
    may stand in different splits; only a corpus of many files is split by file.
    """
    assert isinstance(config, TextConfig)
    try:
        found = _find_text(config.path)
    except OSError as error:  # a folder on the way that may not be entered
        raise UserError(f"data.path={config.path} cannot be read: {error.strerror}.") from error
    files = [(name, _decode(path)) for name, path in found]
    texts = [(name, text) for name, text in files if text.strip()]
    if not texts:
        raise UserError(
            f"data.path={config.path} holds no text: {_count(files, 'file')}, all empty."
        )
    if len(texts) < FEW_FILES:
        least, most = PART_CHARACTERS
        size = min(most, max(least, sum(len(text) for _, text in texts) // PARTS))
        texts = [part for name, text in texts for part in _cut(name, text, size)]
    return [_document(name, text) for name, text in texts], {}


def _count(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}" if len(things) == 1 else f"{len(things)} {name}s"


def _cut(name: str, text: str, size: int) -> Iterator[tuple[str, str]]:
    """Parts of at most `size` characters and at least about half of it, at blank lines if any."""
    if len(text) <= size:
        yield name, text
        return
    start = number = 0
    while start < len(text):
        left = len(text) - start
        target = -(-left // -(-left // size))  # equal parts, so that the last is not a stub
        end = start + target if target < left else len(text)
        if end < len(text):
            end = _snap(text, start + target // 2, end)
        if text[start:end].strip():
            yield f"{name}#{number:04}", text[start:end]
            number += 1
        start = end


def _snap(text: str, low: int, high: int) -> int:
    """The last position in (low, high] after a blank line, else after a line, else `high`."""
    for separator in ("\n\n", "\n\r\n", "\n"):
        found = text.rfind(separator, low, high)
        if found >= 0:
            return found + len(separator)
    return high


def _find_text(given: str) -> list[tuple[str, Path]]:
    """The files that data.path means, each with its name relative to the folder or the glob."""
    path = Path(given).expanduser()
    if path.is_file():
        return [(_portable(path.name), path)]
    if path.is_dir():
        found = [item for item in _walk(path, _is_visible) if _is_text(item)]
        if not found:
            looked = ", ".join(f"*{suffix}" for suffix in TEXT_SUFFIXES)
            raise UserError(
                f"data.path={given} is a folder without text; looked for {looked} in it and in "
                "its sub-folders. For other names give a quoted glob such as 'FOLDER/**/*.log'."
            )
        return [(_portable(item.relative_to(path).as_posix()), item) for item in found]
    if path.exists():
        raise UserError(f"data.path={given} is neither a file nor a folder.")
    if glob.has_magic(str(path)):
        return _find_glob(given, path)
    raise UserError(f"data.path={given} does not exist (looked from {Path.cwd()}).")


def _find_glob(given: str, pattern: Path) -> list[tuple[str, Path]]:
    magic = next(index for index, part in enumerate(pattern.parts) if glob.has_magic(part))
    root = Path(*pattern.parts[:magic])
    # Path.glob would also find hidden files, which a person does not mean by `*`.
    found = glob.glob(str(pattern), recursive=True)  # noqa: PTH207
    files = sorted(path for path in {Path(name) for name in found} if path.is_file())
    if not files:
        raise UserError(f"data.path={given} matches no file (looked from {Path.cwd()}).")
    return [(_portable(path.relative_to(root).as_posix()), path) for path in files]


def _is_visible(name: str) -> bool:
    return not name.startswith(".")


def _is_text(path: Path) -> bool:
    return _is_visible(path.name) and path.suffix.lower() in TEXT_SUFFIXES and path.is_file()


def _portable(name: str) -> str:
    """A file name that is valid UTF-8, whatever bytes the file system holds."""
    return name.encode("utf-8", "backslashreplace").decode()


def _decode(path: Path) -> str:
    raw = _read(path)
    start = len(codecs.BOM_UTF8) if raw.startswith(codecs.BOM_UTF8) else 0
    try:
        text = raw[start:].decode()
    except UnicodeDecodeError as error:
        offset = start + error.start
        raise UserError(
            f"{path} is not UTF-8: byte 0x{raw[offset]:02x} at offset {offset}. "
            "Convert it first, or leave it out of data.path."
        ) from None
    if "\0" in text:
        raise UserError(f"{path} is not text: a NUL byte at offset {raw.index(0)}.")
    return text


# ---------------------------------------------------------------- reading


def _walk(folder: Path, wanted: Callable[[str], bool]) -> Iterator[Path]:
    """Every file below `folder`, without the sub-folders whose name is not wanted."""

    def stop(error: OSError) -> None:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}.") from error

    if not folder.is_dir():
        return
    for where, folders, files in os.walk(folder, onerror=stop):
        folders[:] = sorted(name for name in folders if wanted(name))
        yield from (Path(where, name) for name in sorted(files))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error


Loader = Callable[[DataConfig], tuple[list[Document], dict[str, str]]]
_LOADERS: dict[type[DataConfig], Loader] = {
    PysourceConfig: _load_pysource,
    StdlibConfig: _load_stdlib,
    TextConfig: _load_text,
}
