"""Results of sweeps that nobody trained: losses and documents as a test wants them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posbench.results import DocumentLoss, Evaluation, Row, Status
from posbench.statistics import perplexity

RATIOS = (1.0, 2.0, 4.0)
TARGETS = 64  # of each document


def sweep(
    nats: Mapping[str, Sequence[Sequence[float | Status]]],
    *,
    seeds: Sequence[int] = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9),
    documents: int = 12,
    ratios: Sequence[float] = RATIOS,
    spread: float = 0.1,
    **values: Any,
) -> Evaluation:
    """`nats[encoding][seed][ratio]`: mean losses, or what became of the cell.

    Documents differ by `spread` nats, half of it shared by all runs; `values` go to every row.
    """
    evaluation = Evaluation(provenance={"evaluations": [{"created": "2026-01-01", "asked": {}}]})
    generator = np.random.default_rng(3)
    shared = generator.normal(0.0, spread, documents)
    for encoding, by_seed in nats.items():
        for seed, losses in zip(seeds, by_seed, strict=False):
            run_id = f"{encoding}-s{seed}"
            evaluation.runs.append(
                {
                    "run_id": run_id,
                    "folder": f"runs/{run_id}",
                    "encoding": encoding,
                    "model": "tiny",
                    "seed": seed,
                    "tokens": 1000,
                    "settings_id": encoding,
                    "checkpoint_sha256": f"sha-{run_id}",
                    "protocol": {"protocol": "posbench-v1"},
                }
            )
            for ratio, loss in zip(ratios, losses, strict=True):
                row = Row(
                    run_id,
                    encoding,
                    "none",
                    "",
                    "tiny",
                    seed,
                    64,
                    round(64 * ratio),
                    ratio,
                    "controlled",
                    corpus_fingerprint="c" * 64,
                    tokenizer_sha256="t" * 64,
                    targets_sha256="a" * 64,
                )
                evaluation.rows.append(_filled(row, loss))
                for key, value in values.items():
                    setattr(row, key, value)
                easy = shared + generator.normal(0.0, spread, documents)
                easy -= easy.mean()
                if isinstance(loss, float) and math.isfinite(loss):
                    evaluation.documents += [
                        DocumentLoss(
                            run_id, "none", "controlled", row.eval_length, f"d{number:02}",
                            TARGETS * (loss + each), TARGETS,
                        )
                        for number, each in enumerate(easy)
                    ]  # fmt: skip
    return evaluation


def _filled(row: Row, loss: float | Status) -> Row:
    row.n_targets, row.n_docs = 768, 12
    if isinstance(loss, Status):
        row.status, row.reason, row.targets_sha256 = loss, f"{loss}, as the test wants", ""
        return row
    row.nll = loss
    row.ppl = row.value = perplexity(loss)
    row.status = Status.ok if math.isfinite(loss) else Status.nonfinite
    return row
