"""Losses of a model on windows of tokens: the one place where logits become numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from posbench.errors import OutOfMemoryError
from posbench.model import token_losses
from posbench.runtime import Runtime, is_out_of_memory

Losses = npt.NDArray[np.float64]
Scored = Callable[[int], None]


def window_losses(
    model: nn.Module,
    tokens: npt.NDArray[np.unsignedinteger],
    ends: npt.NDArray[np.int64],
    length: int,
    last: int,
    runtime: Runtime,
    batch_tokens: int,
    scored: Scored = lambda _: None,
) -> Losses:
    """Nats of the last `last` targets of each window, float64 [N, last].

    Window n reads tokens [end - length, end) at positions 0, 1, ... and predicts the tokens one
    further on, up to and including `ends[n]`. Logits are float32. A batch that does not fit is
    halved, down to one window; then OutOfMemoryError. `scored(tokens)` hears of each batch.
    """
    out = np.empty((len(ends), last), dtype=np.float64)
    rows = max(1, batch_tokens // length)
    start = 0
    was_training = model.training
    model.eval()
    try:
        while start < len(ends):
            chosen = ends[start : start + rows]
            try:
                out[start : start + len(chosen)] = _batch(
                    model, tokens, chosen, length, last, runtime
                )
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if rows == 1:
                    raise OutOfMemoryError(f"one window of {length} tokens does not fit") from None
                rows //= 2
                continue
            scored(len(chosen) * length)
            start += len(chosen)
    finally:
        model.train(was_training)
    return out


@torch.inference_mode()
def _batch(
    model: nn.Module,
    tokens: npt.NDArray[np.unsignedinteger],
    ends: npt.NDArray[np.int64],
    length: int,
    last: int,
    runtime: Runtime,
) -> Losses:
    places = ends[:, None] + np.arange(-length, 1)
    windows = torch.from_numpy(tokens[places].astype(np.int64)).to(runtime.device)
    inputs, targets = windows[:, :-1], windows[:, 1:]
    with runtime.autocast():
        logits = model(inputs, last=last)
    losses: Losses = token_losses(logits, targets[:, -last:]).double().cpu().numpy()
    return losses
