"""Token data: documents tokenized once into a memory-mapped cache, and batches drawn from them.

A batch is a pure function of (seed, step), so a resumed run and every encoding see the same ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from posbench.config import BpeConfig, DataConfig, EvalSplit, TokenizerConfig, TrainSettings
from posbench.corpus import SPLITS, Corpus, Document, check_size, load_corpus, split_documents
from posbench.errors import StorageError, UserError
from posbench.files import write_bytes, write_text
from posbench.progress import Progress
from posbench.tokenizer import Tokenizer, Tokens, load_tokenizer, train_tokenizer

FORMAT = 1  # a cache of another format has another key, and is left alone
CHUNK_CHARACTERS = 2_000_000  # tokenized in one call; bounds the memory that takes
Note = Callable[[str], None]


@dataclass(frozen=True)
class Split:
    """The documents of one split, end to end; document i is tokens[offsets[i]:offsets[i + 1]]."""

    tokens: Tokens
    offsets: npt.NDArray[np.int64]  # [documents + 1]
    names: list[str]
    corpus: str = ""  # for messages only

    def __len__(self) -> int:
        return len(self.names)

    def document(self, index: int) -> Tokens:
        """The tokens of one document, as a view."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document."""
        return np.diff(self.offsets)


@dataclass(frozen=True)
class Dataset:
    """A corpus as tokens, with what a run records of it."""

    train: Split
    validation: Split
    test: Split
    tokenizer: Tokenizer
    fingerprint: str
    corpus: str
    documents: int
    characters: int
    dropped_duplicates: int
    note: dict[str, str]  # the versions the text came from

    def batches(self, context: int, batch_size: int, seed: int) -> Batches:
        """What a run is trained on."""
        return Batches(self.train, context, batch_size, seed)

    def split(self, name: EvalSplit) -> Split:
        """The documents that are to be scored."""
        if name is EvalSplit.all:
            return self._everything()
        return {EvalSplit.test: self.test, EvalSplit.validation: self.validation}[name]

    def _everything(self) -> Split:
        """The documents of all splits: for a model that was trained on none of them."""
        splits = [self.train, self.validation, self.test]
        lengths = np.concatenate([split.lengths for split in splits])
        return Split(
            np.concatenate([split.tokens for split in splits]),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            [name for split in splits for name in split.names],
            self.corpus,
        )

    def describe(self, settings: TrainSettings) -> str:
        """What it is, in one line for people."""
        return (
            f"{self.corpus}, {self.documents:,} documents, {self.tokenizer.vocabulary} tokens in "
            f"the vocabulary (tokenizer={settings.tokenizer.name})"
        )

    def record(self) -> dict[str, Any]:
        """What a run keeps of it, beside name and fingerprint."""
        return {
            "documents": self.documents,
            "dropped_duplicates": self.dropped_duplicates,
            "characters": self.characters,
            "train_tokens": int(self.train.offsets[-1]),
            **self.note,
        }


def _to_stderr(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def prepare(
    data: DataConfig, tokenizer: TokenizerConfig, note: Note = _to_stderr, context: int = 0
) -> Dataset:
    """The corpus under a tokenizer learned from its train split; `note` hears what takes time.

    Raises UserError before any work if no document can fill a training window of `context`.
    """
    corpus = load_corpus(data)
    check_size(corpus, context)
    splits = split_documents(corpus, data)
    learned = _learn(tokenizer, splits["train"], note)
    if isinstance(tokenizer, BpeConfig) and learned.vocabulary < tokenizer.vocab_size:
        note(
            f"tokenizer.vocab_size={tokenizer.vocab_size} was not reached: the text of "
            f"data={corpus.name} gives {learned.vocabulary} entries, and those are used."
        )
    return _dataset(corpus, splits, learned, note)


def prepare_with(data: DataConfig, tokenizer_json: str, note: Note = _to_stderr) -> Dataset:
    """The corpus under the tokenizer a run was trained with; ValueError if that is malformed."""
    tokenizer = load_tokenizer(tokenizer_json)
    corpus = load_corpus(data)
    return _dataset(corpus, split_documents(corpus, data), tokenizer, note)


def prepare_foreign(
    data: DataConfig, tokenizer: Tokenizer, note: Note = _to_stderr
) -> tuple[Dataset, bool]:
    """The corpus under the tokenizer of a model that others trained.

    And whether its `byte_lengths` add up to the bytes of each document. One more is allowed: many
    put a space before a text.
    """
    corpus = load_corpus(data)
    dataset = _dataset(corpus, split_documents(corpus, data), tokenizer, note)
    sizes = {document.name: len(document.text.encode()) for document in corpus.documents}
    for split in (dataset.train, dataset.validation, dataset.test):
        up_to = np.concatenate([[0], np.cumsum(tokenizer.byte_lengths[split.tokens])])
        extra = np.diff(up_to[split.offsets]) - [sizes[name] for name in split.names]
        if ((extra < 0) | (extra > 1)).any():
            return dataset, False
    return dataset, True


# ---------------------------------------------------------------- the cache


def cache_folder() -> Path:
    """Where tokenizers and tokens are kept: $POSBENCH_CACHE, or the user's cache folder."""
    given = os.environ.get("POSBENCH_CACHE")
    if given:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "posbench"


def _key(*parts: Any) -> str:
    return _sha256(json.dumps([FORMAT, *parts], sort_keys=True))[:32]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.contextmanager
def _locked(path: Path, note: Note) -> Iterator[None]:
    """Hold `path` as a lock between processes; without locks (some network disks) just go on.

    The lock only saves work: writers rename finished files into place, so two do no harm.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("w"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                note("another process is preparing the same data; waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _learn(config: TokenizerConfig, documents: list[Document], note: Note) -> Tokenizer:
    """The tokenizer of `config` for these documents, trained or read from the cache."""
    key = _key(vars(config), [document.sha256 for document in documents])
    path = cache_folder() / "tokenizers" / f"{key}.json"
    with _locked(path.with_suffix(".lock"), note):
        cached = _read_tokenizer(path)
        if cached is not None:
            return cached
        tokenizer = train_tokenizer(config, [document.text for document in documents])
        text = tokenizer.to_json()
        with contextlib.suppress(StorageError):  # a disk that takes no cache is noted with tokens
            write_text(path, json.dumps({"sha256": _sha256(text), "tokenizer": text}))
        return tokenizer


def _read_tokenizer(path: Path) -> Tokenizer | None:
    """The cached tokenizer; None if there is none or it is not what was written."""
    try:
        saved = json.loads(path.read_text())
        text = saved["tokenizer"]
        return load_tokenizer(text) if _sha256(text) == saved["sha256"] else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _dataset(
    corpus: Corpus, splits: dict[str, list[Document]], tokenizer: Tokenizer, note: Note
) -> Dataset:
    names = {split: [document.name for document in splits[split]] for split in SPLITS}
    key = _key(corpus.fingerprint, names, tokenizer.sha256)
    path = cache_folder() / "tokens" / f"{key}.bin"
    ordered = [document for split in SPLITS for document in splits[split]]
    with _locked(path.with_suffix(".lock"), note):
        tokens, offsets = _read_tokens(path, len(ordered), tokenizer) or _tokenize(
            path, ordered, tokenizer, note
        )
    pieces: dict[str, Split] = {}
    first = 0
    for split in SPLITS:
        ends = offsets[first : first + len(names[split]) + 1]
        pieces[split] = Split(tokens[ends[0] : ends[-1]], ends - ends[0], names[split], corpus.name)
        first += len(names[split])
    return Dataset(
        **pieces,
        tokenizer=tokenizer,
        fingerprint=corpus.fingerprint,
        corpus=corpus.name,
        documents=len(ordered),
        characters=sum(len(document.text) for document in ordered),
        dropped_duplicates=corpus.dropped_duplicates,
        note=corpus.note,
    )


# One file: SHA-256 of all that follows (32 bytes), offsets (int64), tokens (uint16 or uint32).
_HEADER = 32
Stored = tuple[Tokens, npt.NDArray[np.int64]]


def _read_tokens(path: Path, documents: int, tokenizer: Tokenizer) -> Stored | None:
    """Tokens and offsets from the cache; None if there are none or a byte is not as written."""
    try:
        raw = np.memmap(path, np.uint8, mode="r")
    except (OSError, ValueError):  # ValueError: an empty file cannot be mapped
        return None
    if hashlib.sha256(raw[_HEADER:].data).digest() != bytes(raw[:_HEADER]):
        return None
    start = _HEADER + 8 * (documents + 1)
    return raw[start:].view(tokenizer.dtype), raw[_HEADER:start].view(np.int64)


def _tokenize(path: Path, documents: list[Document], tokenizer: Tokenizer, note: Note) -> Stored:
    """Tokens and offsets of the documents, kept in the cache if the disk allows."""
    pieces: list[Tokens] = []
    with Progress("tokenizing", len(documents), "documents") as progress:
        for chunk in _chunks(documents):
            pieces += tokenizer.encode([document.text for document in chunk])
            progress.update(len(pieces))
    offsets = np.cumsum([0, *(len(piece) for piece in pieces)], dtype=np.int64)
    tokens = np.concatenate(pieces)
    body = offsets.tobytes() + tokens.tobytes()
    try:
        write_bytes(path, hashlib.sha256(body).digest() + body)
    except StorageError as error:
        note(f"tokens are not cached ({error}) Set POSBENCH_CACHE to a folder that can be written.")
    return tokens, offsets


def _chunks(documents: list[Document]) -> Iterator[list[Document]]:
    chunk: list[Document] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += len(document.text)
        if size >= CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


# ---------------------------------------------------------------- batches


def check_context(split: Split, context: int) -> None:
    """Raise UserError unless some document holds a window of `context` inputs and their targets."""
    longest = int(split.lengths.max())
    if longest > context:
        return
    where = f"data={split.corpus}" if split.corpus else "the corpus"
    way_out = "Use another corpus"
    if longest > 2:
        way_out = f"Try context={1 << ((longest - 1).bit_length() - 1)}, or another corpus"
    raise UserError(
        f"context={context} needs a document of {context + 1} tokens; the longest of the "
        f"{len(split)} training documents of {where} has {longest}. {way_out}."
    )


class Batches:
    """Windows of context + 1 tokens inside one document, all equally likely, drawn with return."""

    def __init__(self, split: Split, context: int, batch_size: int, seed: int) -> None:
        check_context(split, context)
        self.context, self.batch_size, self.seed = context, batch_size, seed
        self._tokens: Tokens = np.asarray(split.tokens)
        windows = np.maximum(split.lengths - context, 0)
        self._windows_before = np.cumsum(windows) - windows  # [documents]
        self._windows_up_to = np.cumsum(windows)
        self._offsets = split.offsets[:-1]
        self.usable_documents = int((windows > 0).sum())
        self.usable_tokens = int(split.lengths[windows > 0].sum())

    def starts(self, step: int) -> npt.NDArray[np.int64]:
        """Where the windows of one step begin in the split [batch_size]."""
        # Raw draws are the same in every version of numpy; the bias of `%` is below 1e-9.
        stream = np.random.Philox(np.random.SeedSequence([self.seed, step]))
        draws = stream.random_raw(self.batch_size) % np.uint64(self._windows_up_to[-1])
        window = draws.astype(np.int64)
        document = np.searchsorted(self._windows_up_to, window, side="right")
        starts: npt.NDArray[np.int64] = (
            self._offsets[document] + window - self._windows_before[document]
        )
        return starts

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets [batch_size, context], int64: a pure function of (seed, step)."""
        places = self.starts(step)[:, None] + np.arange(self.context + 1)
        tokens = torch.from_numpy(self._tokens[places].astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def record(self) -> dict[str, Any]:
        """What a run keeps of them."""
        return {
            "usable_train_documents": self.usable_documents,
            "usable_train_tokens": self.usable_tokens,
        }
