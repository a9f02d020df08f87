"""Signs: a bias that favours what is far, a query and a key that turn away from each other."""

from __future__ import annotations

import torch
from torch import Tensor

from posbench.attention import score_rows
from posbench.encodings import Encoding, Hooks
from posbench.promises.probe import Measured, Subject, largest

DRAWS = 8  # of random parameters: a sign that only some of them have is a matter of training


@torch.no_grad()
def sign(subject: Subject) -> Measured:
    """Scores do not depend on i + j, and no bias rises with distance whatever is trained."""
    if turned_apart(subject):
        return Measured(
            False,
            "a score depends on i + j alone",
            "i - j",
            "are q and k turned in opposite directions?",
        )
    biases = _biases(subject)
    if not any(bool(bias.any()) for bias in biases):
        return Measured(True, "no bias by index", "")
    rising = all(bool(_rises(bias).all()) for bias in biases)
    last = biases[0].shape[-1] - 1
    gained = float((biases[0][:, -1] - biases[0][:, 0]).max())
    found = f"bias at distance {last} is {gained:+.3g} beside that at 0"
    if rising:
        found += ", and rises all the way in every head"
    where = "the farthest token is favoured: the sign of the bias is turned"
    return Measured(not rising, found, "not rising", where)


def _biases(subject: Subject) -> list[Tensor]:
    """Bias [H, distance] to 4x, at the initial parameters and at random ones."""
    encoding = subject.fresh().double().encoding
    length = subject.lengths[-1]
    biases = [bias_by_distance(encoding, length, torch.float64)]
    parameters = list(encoding.parameters())
    for draw in range(DRAWS if parameters else 0):
        generator = torch.Generator().manual_seed(draw)
        for parameter in parameters:
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        biases.append(bias_by_distance(encoding, length, torch.float64))
    return biases


def _rises(bias: Tensor) -> Tensor:
    """Whether each head's bias never falls with distance, and is not flat either."""
    steps = bias.diff(dim=-1)
    return (steps >= 0).all(dim=-1) & (steps > 0).any(dim=-1)


def bias_by_distance(encoding: Encoding, length: int, dtype: torch.dtype) -> Tensor:
    """What the last of `length` queries adds to its scores, [H, distance], for q = k = 0."""
    shape = encoding.shape
    x = torch.zeros(1, length, shape.width, dtype=dtype)
    hooks = encoding.hooks(x, torch.arange(length), 0)
    exact = torch.float64 if dtype is torch.float64 else torch.float32
    return only_bias(hooks, shape.heads, shape.head_size, length, exact)


def only_bias(hooks: Hooks, heads: int, size: int, length: int, dtype: torch.dtype) -> Tensor:
    """The same, of hooks already made; zero where there is neither bias nor score rule."""
    if hooks.distance_bias is None and hooks.score_mod is None:
        return torch.zeros(heads, length, dtype=dtype)
    nothing = torch.zeros(1, heads, length, size, dtype=dtype)
    alone = Hooks(distance_bias=hooks.distance_bias, score_mod=hooks.score_mod)
    with torch.autocast("cpu", enabled=False):  # as `attend` calls them
        return score_rows(nothing, nothing, alone, [length - 1])[0][0].flip(-1)


@torch.no_grad()
def turned_apart(subject: Subject) -> bool:
    """Whether the score of one and the same token depends on i + j, and on nothing else."""
    encoding = subject.exact().encoding
    shape = encoding.shape
    length = min(subject.lengths[-1], 2 * subject.context)
    hooks = encoding.hooks(
        torch.zeros(1, length, shape.width, dtype=torch.float64), torch.arange(length), 0
    )
    if hooks.rotate is None:
        return False
    generator = torch.Generator().manual_seed(3)
    q, k = (
        torch.randn(1, shape.heads, 1, shape.head_size, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    q, k = q.expand(-1, -1, length, -1), k.expand(-1, -1, length, -1)
    last, earlier = score_rows(q, k, Hooks(rotate=hooks.rotate), [length - 1, length - 2])
    # score(i - 1, j + 1) beside score(i, j)
    along = largest(earlier[..., 1:] - last[..., : length - 2])
    varies = largest(last[..., 1:] - last[..., :-1])
    return varies > 1e-3 and along < 1e-5 * varies
