"""The paper's formula in plain Python, if the class gives one, beside what the tensors make."""

from __future__ import annotations

import torch

from posbench.attention import score_rows
from posbench.promises.probe import ROUNDING, Measured, Subject, number

ROWS = (0, 1, 7, 8, 100, -1)  # queries compared, each with some ten keys


@torch.no_grad()
def reference(subject: Subject) -> Measured:
    """Scores before the softmax are `reference(q, k, i, j, head, layer)`."""
    encoding = subject.exact().encoding
    formula = getattr(encoding, "reference", None)
    if formula is None:
        return Measured(True, "the class has no `reference`", "")
    shape, length = encoding.shape, subject.lengths[-1]
    generator = torch.Generator().manual_seed(2)
    size = (1, shape.heads, length, shape.head_size)
    q, k = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2))
    x = torch.zeros(1, length, shape.width, dtype=torch.float64)
    rows = sorted({row % length for row in ROWS if row < length})
    worst, place = 0.0, ""
    for layer in range(shape.layers):
        hooks = encoding.hooks(x, torch.arange(length), layer)
        if hooks.attend is not None:
            return Measured(True, "not compared: `attend` shows no scores", "")
        for i, scores in zip(rows, score_rows(q, k, hooks, rows), strict=True):
            for head in range(shape.heads):
                for j in sorted({*range(0, i + 1, max(1, i // 8)), i}):
                    query, key = q[0, head, i].tolist(), k[0, head, j].tolist()
                    expected = float(formula(query, key, i, j, head, layer))
                    error = abs(float(scores[0, head, j]) - expected) / max(1.0, abs(expected))
                    if not error <= worst:
                        worst = error
                        place = (
                            f": {float(scores[0, head, j]):.6g} is {expected:.6g} by the formula "
                            f"at i={i}, j={j}, head {head}, layer {layer}"
                        )
    holds = worst <= ROUNDING
    return Measured(
        holds, f"off by {number(worst)}{'' if holds else place}", f"at most {ROUNDING:g}"
    )
