"""Tokenizers: bytes, and byte-level byte-pair encoding. Both are exact: decode(encode(x)) == x.

The vocabulary of a task is one too, of words with spaces between them.

There are no special tokens, so no text is ever read as one. No torch here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from posbench.config import BpeConfig, BytesConfig, TokenizerConfig

TRAINING_CHARACTERS = 16_000_000  # merges hardly change with more text; the time does
Tokens = npt.NDArray[np.unsignedinteger[Any]]  # uint16 or uint32


class Tokenizer(ABC):
    """Text to token ids and back; `byte_lengths` [V] says how many bytes each id stands for."""

    vocabulary: int
    byte_lengths: npt.NDArray[np.int64]

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """The ids of each text, in the narrowest of uint16 and uint32 that holds every id."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD."""

    @abstractmethod
    def to_json(self) -> str:
        """All of the tokenizer, as `load_tokenizer` reads it."""

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """The type of the ids: a wider one where 16 bits would wrap."""
        return np.dtype(np.uint16 if self.vocabulary <= 1 << 16 else np.uint32)

    @property
    def sha256(self) -> str:
        """SHA-256 of `to_json`: two tokenizers with one hash give the same ids."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


class ByteTokenizer(Tokenizer):
    """One token per UTF-8 byte."""

    def __init__(self) -> None:
        self.vocabulary = 256
        self.byte_lengths = np.ones(256, dtype=np.int64)

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint16) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes([int(token) for token in ids]).decode("utf-8", "replace")

    def to_json(self) -> str:
        return '{"type": "bytes"}'


class BpeTokenizer(Tokenizer):
    """Byte-level BPE of Hugging Face tokenizers, from the JSON that library writes."""

    def __init__(self, text: str) -> None:
        self._json = text  # kept as it came, so that its hash outlives versions of the library
        self._inner = _library().Tokenizer.from_str(text)
        self.vocabulary = self._inner.get_vocab_size()
        # In the byte-level alphabet one character of a token's name stands for one byte.
        names = [self._inner.id_to_token(token) for token in range(self.vocabulary)]
        if None in names:
            raise ValueError("the ids of its vocabulary have gaps")
        self.byte_lengths = np.array([len(name) for name in names], dtype=np.int64)

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        encoded = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(item.ids, dtype=self.dtype) for item in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._inner.decode([int(token) for token in ids], skip_special_tokens=False))

    def to_json(self) -> str:
        return self._json


class ForeignTokenizer(Tokenizer):
    """The tokenizer of a model that others trained, from its tokenizer.json, whatever it does.

    Text that looks like a special token stays text. `byte_lengths` reads a token's name: bytes in
    the byte-level alphabet, <0x0A> as one byte, and a space for U+2581; 0 for ids without a name.
    """

    def __init__(self, text: str) -> None:
        self._json = text
        try:
            self._inner = _library().Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception for what it cannot parse
            raise ValueError(f"not a tokenizer: {error}") from error
        self._inner.no_padding()
        self._inner.no_truncation()
        self._inner.encode_special_tokens = True
        names = {token: name for name, token in self._inner.get_vocab(True).items()}
        self.vocabulary = max(names) + 1
        added = self._inner.get_added_tokens_decoder()
        saved = json.loads(text)
        by_bytes = "ByteLevel" in json.dumps([saved.get("pre_tokenizer"), saved.get("decoder")])
        self.byte_lengths = np.zeros(self.vocabulary, dtype=np.int64)
        for token, name in names.items():
            if by_bytes and token not in added:
                self.byte_lengths[token] = len(name)
            elif re.fullmatch("<0x[0-9A-F]{2}>", name):
                self.byte_lengths[token] = 1
            else:
                self.byte_lengths[token] = len(name.replace("\u2581", " ").encode())

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        encoded = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(item.ids, dtype=self.dtype) for item in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._inner.decode([int(token) for token in ids], skip_special_tokens=False))

    def to_json(self) -> str:
        return self._json


class WordTokenizer(Tokenizer):
    """One token per word of a fixed list; the vocabulary of a task, in the shape of a tokenizer."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.vocabulary = len(self.words)
        self.byte_lengths = np.array([len(word.encode()) for word in self.words], dtype=np.int64)
        self._ids = {word: token for token, word in enumerate(self.words)}
        if len(self._ids) < self.vocabulary or any(word.split() != [word] for word in self.words):
            raise ValueError("its words are not all different, or hold spaces")

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """The ids of each text; ValueError for a word that is not in the list."""
        return [np.array([self._id(word) for word in text.split()], self.dtype) for text in texts]

    def _id(self, word: str) -> int:
        if word not in self._ids:
            raise ValueError(f"{word!r} is not in the vocabulary")
        return self._ids[word]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.words[int(token)] for token in ids)

    def to_json(self) -> str:
        return json.dumps({"type": "words", "words": self.words})


def train_tokenizer(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """A tokenizer learned from `texts`; the same texts give the same one, in whatever order.

    It may be smaller than asked for: a small corpus has no more pairs to merge.
    """
    return _TRAINERS[type(config)](config, texts)


def load_tokenizer(text: str) -> Tokenizer:
    """The tokenizer that `to_json` wrote; raises ValueError if it is none or not byte-exact."""
    saved = json.loads(text)
    if not isinstance(saved, dict):
        raise ValueError("not a tokenizer: its JSON is no object")
    if saved == {"type": "bytes"}:
        return ByteTokenizer()
    if saved.get("type") == "words":
        return WordTokenizer(_words(saved.get("words")))
    _check_byte_level(saved)
    try:
        return BpeTokenizer(text)
    except ValueError:
        raise
    except Exception as error:  # the library raises bare Exception for whatever it cannot parse
        raise ValueError(f"not a tokenizer: {error}") from error


def _words(saved: Any) -> list[str]:
    if not isinstance(saved, list) or not all(isinstance(word, str) for word in saved):
        raise ValueError("not a vocabulary: its words are no list of text")
    return saved


def _check_byte_level(saved: dict[str, Any]) -> None:
    """Raise ValueError unless every byte has an id and nothing rewrites or hides text."""
    model, before = saved.get("model"), saved.get("pre_tokenizer")
    if not isinstance(model, dict) or model.get("type") != "BPE":
        raise ValueError("not a tokenizer: its model is not BPE")
    if not isinstance(before, dict) or before.get("type") != "ByteLevel":
        raise ValueError("not a byte-level tokenizer")
    if before.get("add_prefix_space") or saved.get("normalizer") or saved.get("added_tokens"):
        raise ValueError("a tokenizer that changes text or has special tokens cannot be used")
    if not set(_library().pre_tokenizers.ByteLevel.alphabet()) <= set(model.get("vocab", ())):
        raise ValueError("a tokenizer without all 256 bytes would drop text silently")


def _train_bytes(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    return ByteTokenizer()


def _train_bpe(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    assert isinstance(config, BpeConfig)
    library = _library()
    level = library.pre_tokenizers.ByteLevel
    inner = library.Tokenizer(library.models.BPE())
    inner.pre_tokenizer = level(add_prefix_space=False)
    inner.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        initial_alphabet=sorted(level.alphabet()),  # else bytes unseen here would vanish later
        special_tokens=[],
        show_progress=False,
    )
    inner.train_from_iterator(_sample(texts, TRAINING_CHARACTERS), trainer)
    return BpeTokenizer(inner.to_str())


def _sample(texts: Iterable[str], budget: int) -> list[str]:
    """Texts of at most `budget` characters in all, chosen by their hash, not by their order."""
    sample = []
    for text in sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest()):
        sample.append(text[:budget])
        budget -= len(sample[-1])
        if not budget:
            break
    return sample


def _library() -> Any:
    """Hugging Face tokenizers; its threads are on, and it must not warn at every later fork."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    import tokenizers

    return tokenizers


_TRAINERS: dict[type[TokenizerConfig], Callable[[TokenizerConfig, Iterable[str]], Tokenizer]] = {
    BytesConfig: _train_bytes,
    BpeConfig: _train_bpe,
}
