"""Cached tokens and batches: nothing stale is trusted, nothing crosses a document."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from posbench import data as module
from posbench.config import BpeConfig, BytesConfig, StdlibConfig, TextConfig, TokenizerConfig
from posbench.data import Batches, Dataset, Split, check_context, prepare, prepare_with
from posbench.errors import UserError
from posbench.tokenizer import ByteTokenizer, Tokens

BYTES = BytesConfig()
BPE = BpeConfig(vocab_size=300)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POSBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def text(tmp_path: Path) -> TextConfig:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(f"text {number} \u00e9\n" * (number + 1))
    return TextConfig(path=str(folder))


def count_encodes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts each later call to encode is given."""
    calls: list[int] = []
    original = ByteTokenizer.encode

    def encode(self: ByteTokenizer, texts: Sequence[str]) -> list[Tokens]:
        calls.append(len(texts))
        return original(self, texts)

    monkeypatch.setattr(ByteTokenizer, "encode", encode)
    return calls


def assert_same(first: Dataset, second: Dataset) -> None:
    assert first.fingerprint == second.fingerprint
    for name in ("train", "validation", "test"):
        left, right = getattr(first, name), getattr(second, name)
        assert left.names == right.names
        np.testing.assert_array_equal(left.tokens, right.tokens)
        np.testing.assert_array_equal(left.offsets, right.offsets)


# ---------------------------------------------------------------- documents as tokens


@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])
def test_tokens_are_the_documents_under_their_names(
    cache: Path, text: TextConfig, tokenizer: TokenizerConfig
) -> None:
    dataset = prepare(text, tokenizer)
    names = []
    for split in (dataset.train, dataset.validation, dataset.test):
        assert len(split) == len(split.names) == len(split.lengths) > 0
        assert split.offsets[0] == 0
        assert split.offsets[-1] == len(split.tokens) == split.lengths.sum()
        for index, name in enumerate(split.names):
            original = Path(text.path, name).read_text()
            assert dataset.tokenizer.decode(split.document(index)) == original
        names += split.names
    assert sorted(names) == [f"{number:02}.txt" for number in range(60)]
    assert dataset.documents == 60
    assert dataset.corpus == "text"


def test_tokenizer_sees_the_train_split_only(cache: Path, text: TextConfig) -> None:
    before = prepare(text, BPE)
    for name in (*before.test.names, *before.validation.names):
        Path(text.path, name).write_text(f"{name} zqzqzqzqzq " * 500)
    after = prepare(text, BPE)
    assert after.fingerprint != before.fingerprint
    assert after.tokenizer.sha256 == before.tokenizer.sha256
    Path(text.path, before.train.names[0]).write_text("zqzqzqzqzq " * 500)
    assert prepare(text, BPE).tokenizer.sha256 != before.tokenizer.sha256


def test_evaluation_uses_the_tokenizer_it_is_given(cache: Path, text: TextConfig) -> None:
    trained = prepare(text, BPE)
    assert_same(prepare_with(text, trained.tokenizer.to_json()), trained)
    other = prepare_with(text, ByteTokenizer().to_json())
    assert other.tokenizer.vocabulary == 256
    assert other.test.lengths.sum() > trained.test.lengths.sum()
    with pytest.raises(ValueError, match="not a tokenizer"):
        prepare_with(text, '{"model": 1}')


def test_a_vocabulary_that_was_not_reached_is_said_once(cache: Path, text: TextConfig) -> None:
    for _ in range(2):
        notes: list[str] = []
        dataset = prepare(text, BpeConfig(vocab_size=5000), notes.append)
        assert len(notes) == 1
        assert f"gives {dataset.tokenizer.vocabulary} entries" in notes[0]


# ---------------------------------------------------------------- the cache


def test_second_start_does_not_tokenize(
    cache: Path, text: TextConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_encodes(monkeypatch)
    first = prepare(text, BYTES)
    assert sum(calls) == 60
    second = prepare(text, BYTES)
    assert sum(calls) == 60
    assert_same(first, second)
    assert isinstance(second.train.tokens, np.memmap)


def test_trained_tokenizer_is_cached(
    cache: Path, text: TextConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare(text, BPE)

    def refuse(*_: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(module, "train_tokenizer", refuse)
    assert prepare(text, BPE).tokenizer.sha256 == first.tokenizer.sha256
    with pytest.raises(AssertionError, match="trained again"):
        prepare(text, BpeConfig(vocab_size=301))


def test_changed_text_is_never_served_from_the_cache(cache: Path, text: TextConfig) -> None:
    before = prepare(text, BYTES)
    changed = Path(text.path, before.train.names[0])
    changed.write_text(changed.read_text().replace("text", "TEXT"))  # the same length
    after = prepare(text, BYTES)
    assert after.fingerprint != before.fingerprint
    assert after.tokenizer.decode(after.train.document(0)) == changed.read_text()


@pytest.mark.parametrize(
    "damage", ["flip first", "flip middle", "flip last", "cut", "empty", "grow"]
)
@pytest.mark.parametrize("kind", ["tokens", "tokenizers"])
def test_damaged_cache_is_rebuilt(cache: Path, text: TextConfig, damage: str, kind: str) -> None:
    good = prepare(text, BPE)
    (path,) = (item for item in (cache / kind).iterdir() if item.suffix != ".lock")
    raw = path.read_bytes()
    place = {"flip first": 0, "flip middle": len(raw) // 2, "flip last": len(raw) - 2}.get(damage)
    if place is not None:
        bad = raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :]
    else:
        bad = {"cut": raw[:-3], "empty": b"", "grow": raw + b"x"}[damage]
    path.write_bytes(bad)
    again = prepare(text, BPE)
    assert again.tokenizer.sha256 == good.tokenizer.sha256
    for name in ("train", "validation", "test"):
        np.testing.assert_array_equal(getattr(again, name).tokens, getattr(good, name).tokens)
    assert path.read_bytes() == raw


def test_a_cached_tokenizer_that_would_still_load_is_checked(cache: Path, text: TextConfig) -> None:
    good = prepare(text, BPE)
    (path,) = (cache / "tokenizers").glob("*.json")
    saved = json.loads(path.read_text())
    inner = json.loads(saved["tokenizer"])
    inner["model"]["merges"].pop()
    path.write_text(json.dumps(saved | {"tokenizer": json.dumps(inner)}))
    assert prepare(text, BPE).tokenizer.sha256 == good.tokenizer.sha256


def test_a_cache_that_cannot_be_written_is_only_a_note(
    tmp_path: Path, text: TextConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way of the folder")
    monkeypatch.setenv("POSBENCH_CACHE", str(tmp_path / "file"))
    notes: list[str] = []
    dataset = prepare(text, BPE, notes.append)
    assert dataset.documents == 60
    assert len(notes) == 1
    assert "POSBENCH_CACHE" in notes[0]


def test_of_two_starts_at_once_one_tokenizes_and_both_agree(
    cache: Path, text: TextConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_encodes(monkeypatch)
    counted, inside, waiting = ByteTokenizer.encode, threading.Event(), threading.Event()

    def slow(self: ByteTokenizer, texts: Sequence[str]) -> list[Tokens]:
        inside.set()
        assert waiting.wait(30)
        return counted(self, texts)

    monkeypatch.setattr(ByteTokenizer, "encode", slow)
    results: list[Dataset] = []
    first = threading.Thread(target=lambda: results.append(prepare(text, BYTES)))
    first.start()
    assert inside.wait(30)
    results.append(prepare(text, BYTES, lambda message: waiting.set()))  # says that it waits
    first.join()
    assert sum(calls) == 60
    assert_same(*results)


def test_cache_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSBENCH_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert module.cache_folder() == tmp_path / "own"
    monkeypatch.delenv("POSBENCH_CACHE")
    assert module.cache_folder() == tmp_path / "xdg" / "posbench"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert module.cache_folder() == tmp_path / "home" / ".cache" / "posbench"


# ---------------------------------------------------------------- batches


def marked(lengths: Sequence[int]) -> Split:
    """Document d holds the tokens 1000 d, 1000 d + 1, ...: a token tells where it stands."""
    tokens = np.concatenate([1000 * d + np.arange(n) for d, n in enumerate(lengths)])
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    return Split(tokens.astype(np.uint16), offsets, [str(d) for d in range(len(lengths))], "made")


LENGTHS = [40, 9, 10, 3, 700, 11, 1]
GOLDEN_STARTS = [
    [153, 81, 717, 516],
    [547, 709, 522, 749],
    [548, 585, 571, 339],
]  # of seed 5, steps 0, 1 and 1000


def test_windows_stay_inside_one_document_and_targets_are_shifted() -> None:
    batches = Batches(marked(LENGTHS), context=9, batch_size=64, seed=0)
    for step in range(50):
        inputs, targets = batches.batch(step)
        assert inputs.shape == targets.shape == (64, 9)
        assert inputs.dtype == targets.dtype == torch.int64
        torch.testing.assert_close(targets, inputs + 1, rtol=0, atol=0)  # 9 tokens in a row
        assert set((inputs[:, 0] // 1000).tolist()) <= {0, 2, 4, 5}
        torch.testing.assert_close(inputs[:, 1:], targets[:, :-1], rtol=0, atol=0)
    assert batches.usable_documents == 4
    assert batches.usable_tokens == 40 + 10 + 700 + 11


def test_every_window_is_equally_likely() -> None:
    batches = Batches(marked([12, 10, 5, 11]), context=9, batch_size=6000, seed=3)
    starts, counts = np.unique(batches.batch(0)[0][:, 0].numpy(), return_counts=True)
    assert starts.tolist() == [0, 1, 2, 1000, 3000, 3001]
    # Five standard deviations of a binomial count.
    assert np.abs(counts - 1000).max() < 5 * (6000 * (1 / 6) * (5 / 6)) ** 0.5


def test_batch_is_a_pure_function_of_seed_and_step() -> None:
    split = marked(LENGTHS)
    first, second = (Batches(split, 9, 16, seed=7) for _ in range(2))
    wanted = [first.batch(step) for step in range(5)]
    torch.manual_seed(99)
    np.random.seed(99)
    for step in (3, 0, 4, 4, 1, 2):
        for left, right in zip(wanted[step], second.batch(step), strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=0)
    state = torch.get_rng_state()
    second.batch(0)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(wanted[0][0], wanted[1][0])
    assert not torch.equal(wanted[0][0], Batches(split, 9, 16, seed=8).batch(0)[0])


def test_batches_are_the_same_in_every_version() -> None:
    batches = Batches(marked(LENGTHS), context=9, batch_size=4, seed=5)
    assert [batches.starts(step).tolist() for step in (0, 1, 1000)] == GOLDEN_STARTS


def test_wide_tokens_come_out_whole() -> None:
    tokens = np.array([70_000, 70_001, 70_002], dtype=np.uint32)
    batches = Batches(Split(tokens, np.array([0, 3]), ["a"]), context=2, batch_size=1, seed=0)
    assert batches.batch(0)[1].tolist() == [[70_001, 70_002]]


@pytest.mark.parametrize("context", [700, 4096])
def test_a_context_no_document_fills_names_both_lengths(context: int) -> None:
    for refuse in (check_context, lambda split, size: Batches(split, size, 4, 0)):
        with pytest.raises(UserError) as caught:
            refuse(marked(LENGTHS), context)
        message = str(caught.value)
        assert f"context={context} needs a document of {context + 1} tokens" in message
        assert "of data=made has 700. Try context=512" in message


def test_the_longest_context_and_the_advice_both_work() -> None:
    for context in (699, 512):
        check_context(marked(LENGTHS), context)
        assert Batches(marked(LENGTHS), context, 2, 0).usable_documents == 1


def test_default_small_corpus_fills_a_training_context(cache: Path) -> None:
    dataset = prepare(StdlibConfig(), BYTES)
    assert Batches(dataset.train, 128, 4, 0).usable_documents > 200
    assert (dataset.test.lengths > 4 * 128).sum() > 20
