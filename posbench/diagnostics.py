"""What is more than a mean loss: where attention goes, and what far text is for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from posbench.data import Split
from posbench.errors import OutOfMemoryError
from posbench.model import LanguageModel
from posbench.results import Status
from posbench.runtime import Runtime, is_out_of_memory
from posbench.scoring import Foreign, Scored
from posbench.targets import Integers, documents_of

SHIFTS = (0.5, 1.0, 3.0)  # how far `shift` moves all positions, in training lengths
ALPHA = 2.0  # nats that far context must save on a key token (Fang et al. 2025, LongPPL)
KNOWN = 2.0  # nats that it may cost with far context
ATTENTION = ("entropy", "mean_distance", "mass_beyond", "mass_on_first")


@dataclass(frozen=True)
class KeyTokens:
    """Which targets are key tokens [n], or why nobody can say."""

    chosen: npt.NDArray[np.bool_]
    status: Status = Status.ok
    reason: str = ""


def key_tokens(
    short: npt.NDArray[np.float64], long: npt.NDArray[np.float64]
) -> npt.NDArray[np.bool_]:
    """Targets that hang on far context, by their losses with short and with long context.

    Fang et al. 2025, "What is Wrong with Perplexity for Long-context Language Modeling?".
    """
    found: npt.NDArray[np.bool_] = (short - long > ALPHA) & (long < KNOWN)
    return found


def foreign(split: Split, ends: Integers, count: int) -> Foreign | None:
    """For each window the next one that lies in another document; None if there is but one."""
    owners = documents_of(split, ends)
    if len({*owners.tolist()}) < 2:
        return None
    donors = []
    for index, owner in enumerate(owners):
        later = np.flatnonzero(np.roll(owners, -index) != owner)
        donors.append(ends[(index + later[0]) % len(ends)])
    return Foreign(np.array(donors, np.int64), count)


@torch.inference_mode()
def attention(
    model: LanguageModel,
    tokens: npt.NDArray[np.unsignedinteger],
    ends: Integers,
    length: int,
    train_length: int,
    runtime: Runtime,
    scored: Scored = lambda _: None,
) -> npt.NDArray[np.float64]:
    """Where the heads look in windows of `length` tokens: [layers, heads, 4], as in ATTENTION.

    Means over queries 1, 2, ... (query 0 has no choice) of all windows: the entropy of the weights
    divided by ln(i + 1), that of even weights; the distance i - j; the weight on distances from the
    training length on; and the weight on the window's first token.
    """
    shape = model.encoding.shape
    total = np.zeros((shape.layers, shape.heads, len(ATTENTION)))

    def look(layer: int, rows: Tensor, shares: Tensor) -> None:
        total[layer] += _looked(rows, shares, train_length).cpu().numpy()

    was_training = model.training
    model.eval()
    try:
        with model.watched(look):
            for end in ends.tolist():  # one at a time: scores of all heads are held at once
                window = torch.from_numpy(tokens[end - length : end].astype(np.int64))
                model(window[None].to(runtime.device), last=1)
                scored(length)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(f"one window of {length} tokens does not fit") from None
    finally:
        model.train(was_training)
    return total / (len(ends) * (length - 1))


def _looked(rows: Tensor, shares: Tensor, train_length: int) -> Tensor:
    """The four numbers of ATTENTION summed over queries [H, 4]; shares [1, H, R, S]."""
    shares = shares[0].double()
    distances = rows[:, None] - torch.arange(shares.shape[-1], device=shares.device)
    free = rows > 0
    even = torch.log(rows.double() + 1).clamp(min=math.log(2))
    entropy = torch.special.entr(shares).sum(-1) / even
    far = (shares * (distances >= train_length)).sum(-1)
    mean = (shares * distances.clamp(min=0)).sum(-1)
    found = torch.stack([entropy, mean, far, shares[..., 0]], dim=-1)
    return (found * free[:, None]).sum(1)
