"""Losses of a model on windows of tokens: the one place where logits become numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from posbench.errors import OutOfMemoryError
from posbench.model import LanguageModel, token_losses
from posbench.runtime import Runtime, is_out_of_memory

Losses = npt.NDArray[np.float64]
Scored = Callable[[int], None]

# Logits of so many targets are held at a time: 8,192 of 50,257 tokens are 1.6 GB in float32.
HEAD_ROWS = 8192


class Foreign(NamedTuple):
    """The first `tokens` of window n become those of the window that ends at `ends[n]`."""

    ends: npt.NDArray[np.int64]  # [N]
    tokens: int


def window_losses(
    model: LanguageModel,
    tokens: npt.NDArray[np.unsignedinteger],
    ends: npt.NDArray[np.int64],
    length: int,
    last: int,
    runtime: Runtime,
    batch_tokens: int,
    scored: Scored = lambda _: None,
    *,
    offset: int = 0,
    foreign: Foreign | None = None,
) -> Losses:
    """Nats of the last `last` targets of each window, float64 [N, last].

    Window n reads tokens [end - length, end) at positions `offset`, `offset` + 1, ... and predicts
    the tokens one further on, up to and including `ends[n]`; `foreign` replaces the first of the
    tokens it reads. Logits are float32, of HEAD_ROWS targets at a time. A batch that
    does not fit is halved, down to one window; then OutOfMemoryError. `scored(tokens)` hears of
    each batch.
    """
    out = np.empty((len(ends), last), dtype=np.float64)

    def score(rows: slice) -> None:
        places = ends[rows, None] + np.arange(-length, 1)
        if foreign is not None:
            donors = foreign.ends[rows, None] - length
            places[:, : foreign.tokens] = donors + np.arange(foreign.tokens)
        out[rows] = _batch(model, tokens[places], offset, last, runtime)

    _in_batches(model, len(ends), length, batch_tokens, scored, score)
    return out


def answer_scores(
    model: LanguageModel,
    tokens: npt.NDArray[np.int64],
    is_answer: npt.NDArray[np.bool_],
    runtime: Runtime,
    batch_tokens: int,
    scored: Scored = lambda _: None,
) -> tuple[Losses, npt.NDArray[np.bool_]]:
    """Nats of each answer token [N, A], and whether it is the model's first choice [N, A].

    Each of the N rows of `tokens` [N, n] has A tokens marked in `is_answer` [N, n]. The model reads
    the right answer so far (teacher forcing). Greedy decoding writes the whole answer if and only
    if every token of it is the first choice here: up to its first mistake it reads the same.
    """
    count = int(is_answer[0].sum())
    losses = np.empty((len(tokens), count), dtype=np.float64)
    right = np.empty((len(tokens), count), dtype=np.bool_)
    length = tokens.shape[1] - 1
    last = length - int(is_answer[:, 1:].any(axis=0).argmax())  # from the first answer on

    def score(rows: slice) -> None:
        losses[rows], right[rows] = _answers(model, tokens[rows], is_answer[rows], last, runtime)

    _in_batches(model, len(tokens), length, batch_tokens, scored, score)
    return losses, right


def _in_batches(
    model: LanguageModel,
    count: int,
    length: int,
    batch_tokens: int,
    scored: Scored,
    score: Callable[[slice], None],
) -> None:
    """Call `score` on all of `count` rows, in evaluation mode, in batches that fit into memory."""
    rows = max(1, batch_tokens // length)
    start = 0
    was_training = model.training
    model.eval()
    try:
        while start < count:
            stop = min(start + rows, count)
            try:
                score(slice(start, stop))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if rows == 1:
                    raise OutOfMemoryError(f"one window of {length} tokens does not fit") from None
                rows //= 2
                continue
            scored((stop - start) * length)
            start = stop
    finally:
        model.train(was_training)


@torch.inference_mode()
def _batch(
    model: LanguageModel,
    windows: npt.NDArray[np.unsignedinteger],
    offset: int,
    last: int,
    runtime: Runtime,
) -> Losses:
    read = torch.from_numpy(windows.astype(np.int64)).to(runtime.device)
    inputs, targets = read[:, :-1], read[:, 1:]
    positions = None  # 0, 1, ...
    if offset:
        positions = torch.arange(offset, offset + inputs.shape[1], device=runtime.device)
    with runtime.autocast():
        features = model.features(inputs, positions, last)
    targets = targets[:, -last:]
    parts = max(1, HEAD_ROWS // len(windows))
    losses = [
        token_losses(model.logits(some), wanted)
        for some, wanted in zip(
            torch.split(features, parts, 1), torch.split(targets, parts, 1), strict=True
        )
    ]
    found: Losses = torch.cat(losses, dim=1).double().cpu().numpy()
    return found


@torch.inference_mode()
def _answers(
    model: LanguageModel,
    tokens: npt.NDArray[np.int64],
    is_answer: npt.NDArray[np.bool_],
    last: int,
    runtime: Runtime,
) -> tuple[Losses, npt.NDArray[np.bool_]]:
    rows = torch.from_numpy(tokens).to(runtime.device)
    wanted = torch.from_numpy(is_answer).to(runtime.device)[:, -last:]
    targets = rows[:, -last:]
    with runtime.autocast():
        logits = model(rows[:, :-1], last=last)
    losses = token_losses(logits, targets)
    right = (logits.argmax(-1) == targets) & losses.isfinite()
    shape = len(tokens), -1
    return (
        losses[wanted].view(shape).double().cpu().numpy(),
        right[wanted].view(shape).cpu().numpy(),
    )
