"""Documents: the right files, each once, in a split that depends on the name alone."""

from __future__ import annotations

import os
import random
import sysconfig
from pathlib import Path

import pytest

from posbench import corpus as module
from posbench.config import PysourceConfig, StdlibConfig, TextConfig
from posbench.corpus import (
    FEW_FILES,
    PART_CHARACTERS,
    SPLITS,
    Corpus,
    Document,
    is_degenerate,
    load_corpus,
    split_documents,
    split_of,
)
from posbench.errors import UserError


def text_config(path: Path | str, **shares: float) -> TextConfig:
    return TextConfig(path=str(path), **shares)


def write_files(folder: Path, count: int) -> Path:
    """Files whose texts differ, with sub-folders."""
    for number in range(count):
        path = folder / f"part{number % 3}" / f"{number:03}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"document {number}\n" * 5)
    return folder


def made(count: int) -> Corpus:
    documents = [Document(f"{number:04}.txt", str(number), str(number)) for number in range(count)]
    return Corpus("made", documents, "", 0, {})


# ---------------------------------------------------------------- a folder of text


def test_folder_gives_one_document_per_file_with_relative_names(tmp_path: Path) -> None:
    write_files(tmp_path / "text", 30)
    (tmp_path / "text" / ".hidden.txt").write_text("no")
    (tmp_path / "text" / ".git").mkdir()
    (tmp_path / "text" / ".git" / "a.txt").write_text("no")
    (tmp_path / "text" / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "text" / "empty.md").write_text(" \n\t")
    corpus = load_corpus(text_config(tmp_path / "text"))
    assert [document.name for document in corpus.documents] == sorted(
        f"part{number % 3}/{number:03}.txt" for number in range(30)
    )


def test_fingerprint_is_of_the_content_not_of_the_place(tmp_path: Path) -> None:
    here, there = write_files(tmp_path / "here", 25), write_files(tmp_path / "there", 25)
    first = load_corpus(text_config(here)).fingerprint
    assert load_corpus(text_config(there)).fingerprint == first
    changed = there / "part0" / "003.txt"
    raw = bytearray(changed.read_bytes())
    raw[0] ^= 1
    changed.write_bytes(raw)
    assert load_corpus(text_config(there)).fingerprint != first
    changed.write_bytes((here / "part0" / "003.txt").read_bytes())
    changed.rename(changed.with_name("004.txt"))  # the order stays
    assert load_corpus(text_config(there)).fingerprint != first


def test_a_text_that_stands_twice_is_kept_once_under_the_first_name(tmp_path: Path) -> None:
    write_files(tmp_path, 25)
    (tmp_path / "a.txt").write_text("twice")
    (tmp_path / "z.txt").write_text("twice")
    corpus = load_corpus(text_config(tmp_path))
    assert corpus.dropped_duplicates == 1
    names = [document.name for document in corpus.documents]
    assert "a.txt" in names
    assert "z.txt" not in names
    assert len({document.text for document in corpus.documents}) == 26


def test_glob_takes_any_visible_file_it_names(tmp_path: Path) -> None:
    for name in ("x/a.log", "x/y/b.log", "x/c.txt", "x/.h.log"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    corpus = load_corpus(text_config(tmp_path / "**" / "*.log"))
    assert [document.name for document in corpus.documents] == ["x/a.log", "x/y/b.log"]


def test_relative_paths_and_globs_are_seen_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path / "text", 25)
    monkeypatch.chdir(tmp_path)
    absolute = load_corpus(text_config(tmp_path / "text")).fingerprint
    assert load_corpus(text_config("text")).fingerprint == absolute
    assert load_corpus(text_config("text/**/*.txt")).fingerprint == absolute
    monkeypatch.chdir(tmp_path / "text")
    assert load_corpus(text_config("part?/*.txt")).fingerprint == absolute


def test_byte_order_mark_is_dropped_and_line_ends_are_kept(tmp_path: Path) -> None:
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    (document,) = load_corpus(text_config(tmp_path / "bom.txt")).documents
    assert document.text == "one\r\ntwo\r\n"


def test_file_names_that_are_not_utf8_are_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    (document,) = load_corpus(text_config(tmp_path)).documents
    assert document.name.encode().isascii()


# ---------------------------------------------------------------- cutting few files


def prose(characters: int, blank: str = "\n\n") -> str:
    draw = random.Random(0)
    words = [str(draw.randrange(10**6)) for _ in range(characters // 6)]
    lines = [" ".join(words[start : start + 9]) for start in range(0, len(words), 9)]
    return blank.join(lines)


@pytest.mark.parametrize("blank", ["\n\n", "\r\n\r\n", "\n", " "])
@pytest.mark.parametrize("characters", [7_000, 300_000])
def test_one_file_is_cut_into_parts_that_make_it_up_again(
    tmp_path: Path, blank: str, characters: int
) -> None:
    text = prose(characters, blank)
    (tmp_path / "book.txt").write_bytes(text.encode())
    parts = load_corpus(text_config(tmp_path / "book.txt")).documents
    assert "".join(part.text for part in parts) == text
    assert [part.name for part in parts] == [f"book.txt#{i:04}" for i in range(len(parts))]
    size = max(PART_CHARACTERS[0], len(text) // module.PARTS)
    assert max(len(part.text) for part in parts) <= size
    assert min(len(part.text) for part in parts) > size // 3
    if blank != " ":
        assert all(part.text.endswith(blank) for part in parts[:-1])


def test_parts_without_a_word_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "gap.txt").write_text(prose(5000) + "\n" * 9000 + "the end")
    parts = load_corpus(text_config(tmp_path / "gap.txt")).documents
    assert all(part.text.strip() for part in parts)
    assert parts[-1].text.endswith("the end")


def test_many_files_are_never_cut(tmp_path: Path) -> None:
    write_files(tmp_path, FEW_FILES - 1)
    (tmp_path / "long.txt").write_text(prose(100_000))
    names = [document.name for document in load_corpus(text_config(tmp_path)).documents]
    assert len(names) == FEW_FILES
    assert not any("#" in name for name in names)


# ---------------------------------------------------------------- text that cannot be used


def make_bad(folder: Path, kind: str) -> Path | str:
    path = folder / "bad.txt"
    match kind:
        case "missing":
            return folder / "nowhere.txt"
        case "empty":
            path.write_bytes(b"")
        case "whitespace":
            path.write_bytes(b" \n\t\r\n")
        case "latin":
            path.write_bytes(b"plain\xe9text")
        case "latin after a mark":
            path.write_bytes(b"\xef\xbb\xbfab\xe9")
        case "utf16":
            path.write_bytes("hello".encode("utf-16"))
        case "nul":
            path.write_bytes(b"abc\0def")
        case "no text in folder":
            (folder / "picture.png").write_bytes(b"\x89PNG")
            return folder
        case "empty folder":
            return folder
        case "glob":
            return folder / "*.nothing"
        case "one bad of many":
            write_files(folder, 25)
            path.write_bytes(b"\xff")
            return folder
        case "fifo":
            os.mkfifo(path)
    return path


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("missing", "nowhere.txt does not exist"),
        ("empty", "holds no text: 1 file"),
        ("whitespace", "holds no text: 1 file"),
        ("latin", "bad.txt is not UTF-8: byte 0xe9 at offset 5"),
        ("latin after a mark", "bad.txt is not UTF-8: byte 0xe9 at offset 5"),
        ("utf16", "bad.txt is not UTF-8: byte 0xff at offset 0"),
        ("nul", "bad.txt is not text: a NUL byte at offset 3"),
        ("no text in folder", "looked for *.txt, *.md"),
        ("empty folder", "looked for *.txt, *.md"),
        ("glob", "*.nothing matches no file"),
        ("one bad of many", "bad.txt is not UTF-8: byte 0xff at offset 0"),
        ("fifo", "neither a file nor a folder"),
    ],
)
def test_unusable_text_is_one_line_that_names_it(tmp_path: Path, kind: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        load_corpus(text_config(make_bad(tmp_path, kind)))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "secret.txt").write_text("x")
    monkeypatch.setattr(Path, "read_bytes", refuse)  # root may read whatever its mode says
    with pytest.raises(UserError, match=r"secret\.txt cannot be read: Permission denied"):
        load_corpus(text_config(tmp_path / "secret.txt"))


# ---------------------------------------------------------------- splits


def test_split_depends_on_the_name_alone_and_shares_are_kept() -> None:
    config = TextConfig(validation=0.1, test=0.2)
    splits = [split_of(Document(f"{number}.txt", "", ""), config) for number in range(5000)]
    for split, share in (("test", 0.2), ("validation", 0.1), ("train", 0.7)):
        # Five standard deviations of a binomial count.
        assert abs(splits.count(split) - 5000 * share) < 5 * (5000 * share * (1 - share)) ** 0.5
    other = Document("7.txt", "another text", "another hash")
    assert split_of(other, config) == splits[7]


def test_splits_hold_every_document_once_and_stay_when_one_is_added(tmp_path: Path) -> None:
    config = text_config(write_files(tmp_path, 200))
    corpus = load_corpus(config)
    before = split_documents(corpus, config)
    together = [document for split in SPLITS for document in before[split]]
    assert sorted(together) == corpus.documents
    (tmp_path / "added.txt").write_text("added")
    after = split_documents(load_corpus(config), config)
    for split in SPLITS:
        assert [item for item in after[split] if item.name != "added.txt"] == before[split]


@pytest.mark.parametrize("count", [3, 4, 5, 8, 20])
@pytest.mark.parametrize("shares", [(0.001, 0.001), (0.05, 0.1), (0.5, 0.4), (0.4, 0.5)])
def test_a_small_corpus_leaves_no_split_empty(count: int, shares: tuple[float, float]) -> None:
    config = TextConfig(validation=shares[0], test=shares[1])
    splits = split_documents(made(count), config)
    assert sorted(item for split in splits.values() for item in split) == made(count).documents
    assert all(splits[split] for split in SPLITS)


def test_too_few_documents_for_three_splits_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a line of text\n")
    config = text_config(tmp_path / "short.txt")
    with pytest.raises(UserError, match="has 1 document, without 0 duplicates"):
        split_documents(load_corpus(config), config)


# ---------------------------------------------------------------- Python sources


def test_degenerate_files_are_tables_not_modules() -> None:
    assert is_degenerate(b"    0x00: 'abc',\n" * 2000)
    assert not is_degenerate(Path(module.__file__).read_bytes())


def write_sources(folder: Path) -> None:
    sources = {
        "good.py": "import os\n",
        "json/decoder.py": "def decode(text): return text\n",
        "json/notes.txt": "not a source\n",
        "json/blank.py": "\n",
        "test/test_good.py": "skipped = 1\n",
        "a/tests/t.py": "skipped = 2\n",
        "encodings/cp1.py": "skipped = 3\n",
        "site-packages/p/q.py": "skipped = 4\n",
        "config-3.11-x86/c.py": "skipped = 5\n",
        "_sysconfigdata_linux.py": "skipped = 6\n",
        "sitecustomize.py": "skipped = 7\n",
        "table.py": "x = 0, 0, 0, 0, 0\n" * 999,
    }
    for name, text in sources.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "json" / "mark.py").write_bytes(b"\xef\xbb\xbfmark = 1\n")
    (folder / "latin.py").write_bytes(b"# -*- coding: latin-1 -*- \xe9\n")


def test_source_filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sources(tmp_path)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    corpus = load_corpus(StdlibConfig())
    names = [document.name for document in corpus.documents]
    assert names == ["stdlib/good.py", "stdlib/json/decoder.py", "stdlib/json/mark.py"]
    assert corpus.documents[2].text == "mark = 1\n"


def test_stdlib_of_this_machine() -> None:
    corpus = load_corpus(StdlibConfig())
    names = [document.name for document in corpus.documents]
    assert len(names) > 200
    assert "stdlib/json/decoder.py" in names
    assert all(name.startswith("stdlib/") for name in names)
    assert names == sorted(set(names))
    assert list(corpus.note) == ["python"]


def test_a_python_without_sources_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        monkeypatch.setattr(sysconfig, "get_paths", lambda here=folder: {"stdlib": str(here)})
        for config in (StdlibConfig(), PysourceConfig()):
            with pytest.raises(UserError, match=r"data=text data\.path="):
                load_corpus(config)


def test_pysource_is_the_stdlib_and_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("python", "torch"):
        write_sources(tmp_path / name)
    (tmp_path / "torch" / "sitecustomize.py").unlink()
    (tmp_path / "torch" / "version.py").write_text("built_here = 1\n")
    (tmp_path / "torch" / "only.py").write_text("torch = 1\n")
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "python")})

    class Spec:
        submodule_search_locations = (str(tmp_path / "torch"),)

    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: Spec)
    corpus = load_corpus(PysourceConfig())
    assert [document.name for document in corpus.documents] == [
        "stdlib/good.py",
        "stdlib/json/decoder.py",
        "stdlib/json/mark.py",
        "torch/__init__.py",
        "torch/only.py",
    ]
    assert corpus.dropped_duplicates == 3  # what stands below stdlib already
    assert set(corpus.note) == {"python", "torch"}
