"""Tokenizers: exact round trips, known byte lengths, the same training twice."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from posbench import tokenizer as module
from posbench.config import BpeConfig, BytesConfig
from posbench.tokenizer import (
    BpeTokenizer,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    train_tokenizer,
)

SOURCE = Path(module.__file__).read_text()
TEXTS = [SOURCE[start : start + 500] for start in range(0, len(SOURCE), 500)]
HARD = [
    "",
    "plain ascii\n",
    "\ttabs\t\tand  spaces   \r\n\r\n",
    "na\u00efve \u4f60\u597d \U0001f600 e\u0301 \ufeff \u200b \x00 \x7f",
    "<|endoftext|> <s> </s> [PAD] <unk> \u0120 \u010a",
    " leading and trailing ",
    "x" * 5000,
    "".join(chr(point) for point in range(0x20, 0x2000)),
]


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    config = BytesConfig() if request.param == "bytes" else BpeConfig(vocab_size=400)
    return train_tokenizer(config, TEXTS)


@pytest.mark.parametrize("text", HARD, ids=range(len(HARD)))
def test_round_trip_and_byte_lengths_are_exact(tokenizer: Tokenizer, text: str) -> None:
    (ids,) = tokenizer.encode([text])
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids.tolist()) == text
    assert tokenizer.byte_lengths[ids].sum() == len(text.encode())


def test_every_id_is_in_range_and_no_entry_is_empty(tokenizer: Tokenizer) -> None:
    assert tokenizer.byte_lengths.shape == (tokenizer.vocabulary,)
    assert tokenizer.byte_lengths.min() == 1
    for ids in tokenizer.encode(TEXTS):
        assert ids.dtype == np.uint16
        assert ids.max() < tokenizer.vocabulary


def test_a_batch_is_the_texts_one_by_one(tokenizer: Tokenizer) -> None:
    together = tokenizer.encode(HARD)
    for text, ids in zip(HARD, together, strict=True):
        np.testing.assert_array_equal(tokenizer.encode([text])[0], ids)


def test_saved_tokenizer_is_the_same_one(tokenizer: Tokenizer) -> None:
    loaded = load_tokenizer(tokenizer.to_json())
    assert (loaded.to_json(), loaded.sha256) == (tokenizer.to_json(), tokenizer.sha256)
    np.testing.assert_array_equal(loaded.encode(TEXTS)[0], tokenizer.encode(TEXTS)[0])


def test_bpe_training_depends_on_the_texts_not_on_their_order() -> None:
    shuffled = random.Random(1).sample(TEXTS, len(TEXTS))
    first, again, other = (
        train_tokenizer(BpeConfig(vocab_size=350), texts) for texts in (TEXTS, TEXTS, shuffled)
    )
    assert first.to_json() == again.to_json() == other.to_json()
    assert first.vocabulary == 350
    fewer = train_tokenizer(BpeConfig(vocab_size=350), TEXTS[:2])
    assert fewer.sha256 != first.sha256


def test_bpe_learns_something() -> None:
    learned = train_tokenizer(BpeConfig(vocab_size=500), TEXTS)
    assert len(learned.encode([SOURCE])[0]) < 0.6 * len(SOURCE.encode())


def test_bytes_never_seen_in_training_still_have_ids() -> None:
    learned = train_tokenizer(BpeConfig(vocab_size=260), ["aaaa"])
    (ids,) = learned.encode(["xyz \u00e9\u4f60"])
    assert learned.decode(ids) == "xyz \u00e9\u4f60"
    assert len(ids) == len("xyz \u00e9\u4f60".encode())


def test_a_small_corpus_gives_the_vocabulary_it_has() -> None:
    learned = train_tokenizer(BpeConfig(vocab_size=4000), ["ab ab"])
    assert 256 <= learned.vocabulary < 300


def test_training_text_is_bounded() -> None:
    sample = module._sample((str(number) * 10 for number in range(10, 90)), budget=333)
    assert sum(len(text) for text in sample) == 333
    assert module._sample(["abc", "de"], budget=10) == module._sample(["de", "abc"], budget=10)


def big_bpe(entries: int) -> str:
    """A byte-level tokenizer with `entries` ids, whose last one is the token of `zz`."""
    saved = json.loads(train_tokenizer(BpeConfig(vocab_size=257), ["a"]).to_json())
    vocab = saved["model"]["vocab"]
    alphabet = sorted(vocab)[:256]
    pairs = (first + second for first in alphabet for second in alphabet)
    triples = (
        pair + third for pair in alphabet for third in (a + b for a in alphabet for b in "ab")
    )
    for name in [*pairs, *triples]:
        if len(vocab) == entries - 1:
            break
        if name != "zz":
            vocab.setdefault(name, len(vocab))
    vocab["zz"] = len(vocab)
    saved["model"]["merges"] = [["z", "z"]]
    return json.dumps(saved)


@pytest.mark.parametrize(
    ("entries", "dtype"), [(1 << 16, np.uint16), ((1 << 16) + 1, np.uint32), (70_000, np.uint32)]
)
def test_ids_beyond_16_bits_do_not_wrap(entries: int, dtype: type) -> None:
    tokenizer = load_tokenizer(big_bpe(entries))
    assert tokenizer.vocabulary == entries
    (ids,) = tokenizer.encode(["zz"])
    assert ids.dtype == dtype
    assert ids.tolist() == [entries - 1]


def broken(kind: str) -> str:
    saved = json.loads(train_tokenizer(BpeConfig(vocab_size=258), ["a"]).to_json())
    match kind:
        case "text":
            return "{not json"
        case "list":
            return "[]"
        case "object":
            return '{"type": "words"}'
        case "model":
            saved["model"]["type"] = "WordPiece"
        case "level":
            saved["pre_tokenizer"] = None
        case "prefix":
            saved["pre_tokenizer"]["add_prefix_space"] = True
        case "normalizer":
            saved["normalizer"] = {"type": "Lowercase"}
        case "special":
            plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            token = {"id": 258, "content": "<s>", "special": True}
            saved["added_tokens"] = [token | plain]
        case "byte":
            saved["model"]["vocab"].pop("z")
        case "gap":
            saved["model"]["vocab"]["zz"] = 9999
        case "vocab":
            saved["model"]["vocab"]["zz"] = "nine"
        case "merge":
            saved["model"]["merges"] = [["never", "seen"]]
    return json.dumps(saved)


BROKEN = ["text", "list", "object", "model", "level", "prefix", "normalizer", "special", "byte"]


@pytest.mark.parametrize("kind", [*BROKEN, "gap", "vocab", "merge"])
def test_malformed_tokenizers_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        load_tokenizer(broken(kind))


def test_hash_tells_permuted_merges_apart() -> None:
    saved = json.loads(train_tokenizer(BpeConfig(vocab_size=300), TEXTS).to_json())
    first = BpeTokenizer(json.dumps(saved))
    saved["model"]["merges"].reverse()
    second = BpeTokenizer(json.dumps(saved))
    assert first.vocabulary == second.vocabulary
    assert first.sha256 != second.sha256
    assert ByteTokenizer().sha256 not in (first.sha256, second.sha256)
