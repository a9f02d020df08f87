"""Losses of windows: the right target, exact arithmetic, any batch size, too little memory.

The bug reports behind these: targets shifted twice or never, losses that change with the batch
size, dropout left on, tokens lost when a batch does not fit.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from oracles import CPU, TRAIN, Hungry, Oracle, make_split, real, traced_loss, tracer, uniform
from torch import Tensor, nn

from posbench import scoring
from posbench.errors import OutOfMemoryError
from posbench.model import LanguageModel
from posbench.scoring import Losses, window_losses

SPLIT = make_split()
VOCABULARY = len(SPLIT.tokens) + 1
ENDS = np.array([40, 41, 57, 90, 133, 200, 210, 400, 401, 402, 499])
FLOAT32 = {"rtol": 0, "atol": 1e-5}


def score(
    model: LanguageModel, length: int = TRAIN, last: int = TRAIN, batch: int = 4, **more: Any
) -> Losses:
    """Losses at ENDS with `batch` windows to a forward pass."""
    tokens = SPLIT.tokens if isinstance(model, Oracle) else make_split(vocabulary=31).tokens
    return window_losses(model, tokens, ENDS, length, last, CPU, batch * length, **more)


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    MemoryError(),
]


# ---------------------------------------------------------------- which target, which loss


@pytest.mark.parametrize("last", [1, 3, TRAIN])
def test_each_loss_is_that_of_the_token_after_its_input(last: int) -> None:
    model = Oracle(VOCABULARY, tracer)
    found = score(model, last=last)
    assert found.shape == (len(ENDS), last)
    assert found.dtype == np.float64
    for row, end in zip(found, ENDS.tolist(), strict=True):
        for loss, target in zip(row, range(end - last + 1, end + 1), strict=True):
            wanted = traced_loss(target, TRAIN - (end - target), TRAIN)
            assert loss == pytest.approx(wanted, rel=1e-12)
    asked = [(first, token + 1) for first, token, _ in model.asked]
    wanted_asked = [
        (end - TRAIN, target) for end in ENDS.tolist() for target in range(end - last + 1, end + 1)
    ]
    assert asked == wanted_asked  # each once, in order, from a window that starts `TRAIN` earlier


class Pointer(LanguageModel):
    """Certain that the token `ahead` of each input comes next: 1 is right, 0 and 2 are shifted."""

    def __init__(self, ahead: int) -> None:
        super().__init__()
        self.ahead = ahead

    def features(self, tokens: Tensor, positions: Any = None, last: int | None = None) -> Tensor:
        return 50.0 * nn.functional.one_hot(tokens + self.ahead, VOCABULARY + 2)[:, -last:].float()


def test_only_the_next_token_is_the_target() -> None:
    def loss(ahead: int) -> Losses:
        return window_losses(Pointer(ahead), SPLIT.tokens, ENDS, TRAIN, TRAIN, CPU, 64)

    assert loss(1).max() < 1e-6
    assert loss(0).min() > 49
    assert loss(2).min() > 49


def test_a_real_model_gives_the_log_softmax_of_its_own_logits() -> None:
    model = real("rope")
    split = make_split(vocabulary=31)
    found = score(model, length=20, last=7)
    for row, end in zip(found, ENDS.tolist(), strict=True):
        window = torch.from_numpy(split.tokens[end - 20 : end + 1].astype(np.int64))
        with torch.no_grad():
            chances = model(window[None, :-1]).double().log_softmax(-1)[0]
        wanted = -chances[torch.arange(20), window[1:]][-7:]
        np.testing.assert_allclose(row, wanted.numpy(), **FLOAT32)
    assert found.std() > 0.1  # the model does tell tokens apart


def test_half_precision_logits_are_scored_in_float32() -> None:
    class Half(LanguageModel):
        def features(self, tokens: Tensor, positions: Any = None, last: int = 1) -> Tensor:
            return torch.zeros(len(tokens), last, 50_257, dtype=torch.bfloat16)

    found = window_losses(Half(), SPLIT.tokens, ENDS, TRAIN, 2, CPU, 64)
    np.testing.assert_allclose(found, math.log(50_257), rtol=1e-6)  # bfloat16 is off by 1e-3


def test_tokens_past_65535_keep_their_number() -> None:
    tokens = np.arange(65_530, 65_560, dtype=np.uint32)
    model = Oracle(65_561, uniform(65_561))
    found = window_losses(model, tokens, np.array([20]), 8, 8, CPU, 64)
    np.testing.assert_allclose(found, math.log(65_561), rtol=1e-12)
    assert [token for _, token, _ in model.asked] == list(range(65_542, 65_550))


# ---------------------------------------------------------------- batches and memory


@pytest.mark.parametrize("encoding", ["rope", "alibi"])
@pytest.mark.parametrize("batch", [3, 8, 100])
def test_batch_size_changes_no_loss(encoding: str, batch: int) -> None:
    model = real(encoding)
    alone = score(model, length=20, last=7, batch=1)
    np.testing.assert_allclose(score(model, length=20, last=7, batch=batch), alone, **FLOAT32)


def test_the_head_in_parts_loses_no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three windows of seven targets, of which five positions fit at a time."""
    whole = score(real("rope"), length=20, last=7, batch=3)
    asked: list[int] = []
    model = real("rope")
    head = model.logits
    monkeypatch.setattr(model, "logits", lambda x: asked.append(x[..., 0].numel()) or head(x))
    monkeypatch.setattr(scoring, "HEAD_ROWS", 15)
    np.testing.assert_allclose(score(model, length=20, last=7, batch=3), whole, **FLOAT32)
    assert asked == [15, 6] * 3 + [14]


def test_budget_of_tokens_sets_the_rows_and_is_never_below_one_window() -> None:
    model = Oracle(VOCABULARY, tracer)
    score(model, batch=4)
    assert model.batches == [4, 4, 3]
    model.batches.clear()
    window_losses(model, SPLIT.tokens, ENDS[:2], TRAIN, 1, CPU, 1)
    assert model.batches == [1, 1]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("most", [1, 2, 5])
def test_a_batch_that_does_not_fit_loses_no_target(most: int, error: Exception) -> None:
    model = Hungry(real("rope"), 20 * most, error)
    heard: list[int] = []
    found = score(model, length=20, last=7, batch=8, scored=heard.append)
    assert model.refused
    np.testing.assert_allclose(found, score(real("rope"), length=20, last=7), **FLOAT32)
    assert sum(heard) == 20 * len(ENDS)


def test_one_window_that_does_not_fit_is_said_so() -> None:
    with pytest.raises(OutOfMemoryError, match="one window of 20 tokens"):
        score(Hungry(real("rope"), 0, OUT_OF_MEMORY[0]), length=20)


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    model = Hungry(real("rope"), 2 * 20, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="shapes"):
        score(model, length=20)
    assert model.refused == 1


# ---------------------------------------------------------------- mode


def test_dropout_is_off_while_scoring() -> None:
    wet, dry = real("rope", dropout=0.5).train(), real("rope")
    first = score(wet)
    np.testing.assert_array_equal(first, score(wet))
    np.testing.assert_array_equal(first, score(dry))


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_left_as_it_was(training: bool) -> None:
    model = real("rope", dropout=0.5).train(training)
    score(model)
    assert all(module.training is training for module in model.modules())
    hungry = Hungry(model, 0, OUT_OF_MEMORY[0]).train(training)
    with pytest.raises(OutOfMemoryError):
        score(hungry)
    assert all(module.training is training for module in hungry.modules())


def test_scoring_draws_no_random_number_and_leaves_no_gradient() -> None:
    model = real("alibi", dropout=0.5).train()
    state = torch.get_rng_state()
    score(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
