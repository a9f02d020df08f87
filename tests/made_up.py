"""Evaluations that nobody measured: smooth numbers of the shape that real ones have."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from posbench.results import (
    DocumentLoss,
    Evaluation,
    HeadAttention,
    PositionCurve,
    Row,
    Status,
)

L = 128
RATIOS = (1.0, 2.0, 4.0)
DOCUMENTS = 24
FIVE = ("none", "sinusoidal", "learned", "rope", "alibi")
# Nats added at 4x over 1x; what has none of its own gets one by its name.
RISE = {"none": 0.35, "sinusoidal": 1.6, "rope": 0.5, "alibi": -0.03, "rope+ntk": 0.12}
RISE |= {"rope+yarn": 0.05, "rope+pi": 0.4}


def made_up(
    encodings: Sequence[str] = FIVE,
    seeds: Sequence[int] = (0, 1, 2),
    extensions: Sequence[str] = ("none",),
    attention: bool = False,
) -> Evaluation:
    """Perplexities, gains, losses by position and of documents of runs at 1x, 2x and 4x."""
    evaluation = Evaluation(provenance=_provenance())
    for encoding in encodings:
        for seed in seeds:
            evaluation.runs.append(_run(encoding, seed))
            for extension in extensions:
                _measure(evaluation, encoding, extension, seed)
                if attention and extension == "none" and encoding != "learned":
                    evaluation.attention += _heads(encoding, seed)
    return evaluation


def _measure(evaluation: Evaluation, encoding: str, extension: str, seed: int) -> None:
    foreign = extension != "none" and encoding != "rope"
    name = encoding if extension == "none" else f"{encoding}+{extension}"
    noise = random.Random(f"{name} {seed}")
    own = random.Random(encoding).uniform(-0.1, 0.1)
    rise = RISE.get(name, random.Random(name).uniform(-0.05, 1.2))
    base = 1.8 + own + noise.gauss(0, 0.01)
    losses = {r: base + rise * math.log2(r) / 2 + noise.gauss(0, 0.01) for r in RATIOS}
    for protocol in ("controlled", "nonoverlap"):
        early = 0.0 if protocol == "controlled" else 0.08
        for ratio in RATIOS:
            row = _row(encoding, extension, seed, ratio, protocol)
            if foreign:
                row.status, row.reason = Status.unsupported, f"{extension} does not fit {encoding}"
                evaluation.rows.append(row)
                continue
            if encoding == "learned" and ratio > 1:
                row.status = Status.unsupported
                row.reason = f"learned table has {L} rows; {row.eval_length} positions requested"
                evaluation.rows.append(row)
                continue
            nll = losses[ratio] + early / ratio
            row.nll, row.ppl = nll, math.exp(nll)
            row.value, row.bpb = row.ppl, nll / math.log(2)
            row.ci_lo, row.ci_hi = row.ppl * 0.96, row.ppl * 1.04
            row.n_targets, row.n_docs, row.min_context = 4096, DOCUMENTS, row.eval_length - 63
            row.mean_context, row.targets_sha256 = row.eval_length - 32.0, "ab" * 32
            evaluation.rows.append(row)
            if protocol == "controlled":
                evaluation.documents += _documents(row, nll, noise)
                if ratio > 1:
                    evaluation.rows += _derived(row, losses[1.0])
    if not foreign:
        evaluation.curves.append(_curve(encoding, extension, seed, losses, noise))


def _row(encoding: str, extension: str, seed: int, ratio: float, protocol: str) -> Row:
    return Row(
        f"{encoding}-s{seed}", encoding, extension, "", "tiny", seed, L, round(ratio * L), ratio,
        protocol, corpus_fingerprint="cd" * 32, tokenizer_sha256="ef" * 32,
    )  # fmt: skip


def _derived(row: Row, at_1x: float) -> list[Row]:
    assert row.nll is not None
    gain = at_1x - row.nll
    values = {"gain": (gain, 0.02), "extrapolation_ratio": (math.exp(-gain), 0.03)}
    found = []
    for metric, (value, half) in values.items():
        other = Row(**(vars(row) | {"metric": metric, "value": value}))
        other.ppl = other.nll = None
        other.ci_lo, other.ci_hi = value - half, value + half
        found.append(other)
    return found


def _documents(row: Row, nll: float, noise: random.Random) -> list[DocumentLoss]:
    return [
        DocumentLoss(
            row.run_id, row.extension, row.protocol, row.eval_length, f"doc{number}",
            170 * (nll + 1.5 * math.sin(number) + noise.gauss(0, 0.01)), 170,
        )
        for number in range(DOCUMENTS)
    ]  # fmt: skip


def _curve(
    encoding: str, extension: str, seed: int, losses: dict[float, float], noise: random.Random
) -> PositionCurve:
    longest = L if encoding == "learned" else 4 * L
    lo = [0, 8, 16, 32, *range(64, longest, 32)]
    hi = [*lo[1:], longest]
    rise = losses[4.0] - losses[1.0] if encoding != "learned" else 0.0
    nll = []
    for low, high in zip(lo, hi, strict=True):
        middle = (low + high) / 2
        beyond = max(0.0, math.log2(middle / L)) / 2
        nll.append(losses[1.0] + 2 / (1 + middle / 4) + rise * beyond + noise.gauss(0, 0.01))
    count = len(lo)
    return PositionCurve(
        f"{encoding}-s{seed}", encoding, extension, seed, L, longest, lo, hi, nll, [0.2] * count,
        [64] * count,
    )  # fmt: skip


def _heads(encoding: str, seed: int) -> list[HeadAttention]:
    random_ = random.Random(f"{encoding} {seed} heads")
    return [
        HeadAttention(
            f"{encoding}-s{seed}", encoding, "none", "", seed, L, 4 * L, layer, head,
            random_.uniform(0.3, 0.9), random_.uniform(5, 90), random_.random() ** 2,
            random_.random() / 4,
        )
        for layer in range(4)
        for head in range(4)
    ]  # fmt: skip


def _run(encoding: str, seed: int) -> dict[str, Any]:
    return {
        "run_id": f"{encoding}-s{seed}",
        "folder": f"outputs/train/made-up/{encoding}-{seed}",
        "encoding": encoding,
        "model": "tiny",
        "seed": seed,
        "train_length": L,
        "parameters": 820_352 + (8192 if encoding == "learned" else 0),
        "encoding_parameters": 8192 if encoding == "learned" else 0,
        "tokens": 1_024_000,
        "train_tokens_per_s": 21_500.0 + 10 * seed,
        "train_peak_mem_mb": 512.25,
        "validation_nll": 1.8,
        "checkpoint_sha256": "12" * 32,
        "settings_id": f"{encoding:x<16}"[:16],
        "corpus": "pysource",
        "tokenizer": "bpe",
        "unigram_ppl": 180.5,
        "protocol": {"protocol": "posbench-v1", "split": "test"},
    }


def _provenance() -> dict[str, Any]:
    command = ["posbench", "eval-extrapolate", "runs=outputs/train/made-up"]
    return {
        "posbench": "0.1.0",
        "device": "cpu",
        "dtype": "float32",
        "torch": "2.13.0",
        "evaluations": [{"command": command, "created": "2026-01-01T00:00:00", "asked": {}}],
    }
