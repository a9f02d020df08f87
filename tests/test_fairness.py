"""One seed, one start, one stream of batches: encodings differ in the encoding alone."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

from posbench.checkpoint import Checkpoint, load, save
from posbench.config import BytesConfig, Mlp, TextConfig
from posbench.data import Batches, Dataset, prepare
from posbench.encodings import CLASSES
from posbench.runtime import Runtime
from posbench.training import Trainer

CPU = Runtime(torch.device("cpu"), torch.float32)
ENCODINGS = sorted(CLASSES)
FIRST = 5  # batches hashed


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def dataset(corpus: Path) -> Dataset:
    return prepare(TextConfig(path=str(corpus)), BytesConfig())


def shared_weights(trainer: Trainer) -> str:
    """SHA-256 of all weights that are not the encoding's, with their names."""
    state = trainer.model.state_dict()
    return tiny.digest({k: v for k, v in state.items() if not k.startswith("encoding.")})


def batches_sha256(batches: Batches, steps: range) -> str:
    state = hashlib.sha256()
    for step in steps:
        for tensor in batches.batch(step):
            state.update(tensor.numpy().tobytes())
    return state.hexdigest()


class Spy(Batches):
    """Notes which batches training asks for, and what they hold."""

    seen: list[tuple[int, str]]

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = super().batch(step)
        text = hashlib.sha256(inputs.numpy().tobytes() + targets.numpy().tobytes()).hexdigest()
        self.seen.append((step, text))
        return inputs, targets


def spied(trainer: Trainer) -> list[tuple[int, str]]:
    trainer.batches.__class__ = Spy
    assert isinstance(trainer.batches, Spy)
    trainer.batches.seen = []
    return trainer.batches.seen


def stored(trainer: Trainer, folder: Path) -> Checkpoint:
    save(folder, trainer.step, trainer.model, trainer.optimizer, {}, keep=9)
    return load(folder / f"step-{trainer.step:08d}")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mlp", list(Mlp))
def test_weights_that_are_not_the_encodings_start_equal(
    corpus: Path, dataset: Dataset, mlp: Mlp, tied: bool
) -> None:
    starts = {
        name: shared_weights(
            Trainer(tiny.small(corpus, name, mlp=mlp, tied=tied, layers=4), dataset, CPU)
        )
        for name in ENCODINGS
    }
    assert len(set(starts.values())) == 1, starts
    other = Trainer(tiny.small(corpus, "rope", mlp=mlp, tied=tied, layers=4, seed=1), dataset, CPU)
    assert shared_weights(other) not in starts.values()  # the seed does decide


def test_the_first_batches_are_equal_for_all_encodings(corpus: Path, dataset: Dataset) -> None:
    """What training really read, not what it would have been given."""
    read = {}
    for name in ENCODINGS:
        trainer = Trainer(tiny.small(corpus, name, steps=FIRST), dataset, CPU)
        seen = spied(trainer)
        for _ in trainer.run():
            pass
        assert [step for step, _ in seen] == list(range(FIRST))
        read[name] = tuple(seen)
    assert len(set(read.values())) == 1
    other = Trainer(tiny.small(corpus, seed=1), dataset, CPU)
    assert batches_sha256(other.batches, range(FIRST)) != batches_sha256(
        Trainer(tiny.small(corpus), dataset, CPU).batches, range(FIRST)
    )


@pytest.mark.parametrize("name", ENCODINGS)
def test_batches_after_a_resume_are_those_of_a_straight_run(
    corpus: Path, dataset: Dataset, tmp_path: Path, name: str
) -> None:
    settings = tiny.small(corpus, name, steps=8)
    straight = Trainer(settings, dataset, CPU)
    wanted = spied(straight)
    for step in straight.run():
        if step.step == 3:
            saved = stored(straight, tmp_path)
    resumed = Trainer(settings, dataset, CPU)
    resumed.restore(saved)
    seen = spied(resumed)
    for _ in resumed.run():
        pass
    assert seen == wanted[3:]


def draw_junk() -> None:
    """What other code may do between two steps: move every global generator."""
    torch.rand(1000)
    torch.manual_seed(random.getrandbits(32))
    np.random.seed(random.getrandbits(31))
    random.random()


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("micro_batch", [None, 3])
def test_global_randomness_between_steps_changes_nothing(
    corpus: Path, dataset: Dataset, name: str, micro_batch: int | None
) -> None:
    settings = tiny.small(corpus, name, steps=6, dropout=0.1, micro_batch=micro_batch)
    torch.manual_seed(1)
    quiet = Trainer(settings, dataset, CPU)
    quiet_losses = [step.loss for step in quiet.run()]
    draw_junk()
    loud = Trainer(settings, dataset, CPU)
    loud_losses = []
    for step in loud.run():
        loud_losses.append(step.loss)
        draw_junk()
    assert loud_losses == quiet_losses
    assert tiny.digest(loud.model.state_dict()) == tiny.digest(quiet.model.state_dict())


def test_dropout_differs_between_steps_and_parts(corpus: Path, dataset: Dataset) -> None:
    """The same mask at every step would be fair, and no dropout."""
    trainer = Trainer(tiny.small(corpus, dropout=0.5), dataset, CPU)
    masks = []
    for step, part in [(0, 0), (0, 1), (1, 0)]:
        trainer._seed_dropout(step, part)
        masks.append(torch.dropout(torch.ones(64), 0.5, True))
    assert not any(torch.equal(masks[a], masks[b]) for a, b in [(0, 1), (0, 2), (1, 2)])


def test_dropout_is_off_when_a_model_is_evaluated(corpus: Path, dataset: Dataset) -> None:
    with_dropout = Trainer(tiny.small(corpus, dropout=0.5), dataset, CPU).model.eval()
    without = Trainer(tiny.small(corpus), dataset, CPU).model.eval()
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(with_dropout(tokens), with_dropout(tokens))
        assert torch.equal(with_dropout(tokens), without(tokens))
        with_dropout.train()
        assert not torch.equal(with_dropout(tokens), with_dropout(tokens))
