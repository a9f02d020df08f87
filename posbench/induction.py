"""The probe `induction`: random tokens, then the same again. What does a model gain from the copy?

No training on a task is needed, and perplexity on text cannot tell: text is predicted from what
is near. A model that looks back finds each token after its first occurrence, half a sequence
before (induction heads; Olsson et al. 2022). The length of the sequence sets that distance.
"""

from __future__ import annotations

import math
import time

import numpy as np

from posbench.config import EvalConfig
from posbench.model import LanguageModel
from posbench.results import Row, Status
from posbench.runtime import Runtime
from posbench.scoring import Scored, window_losses
from posbench.statistics import bootstrap_interval
from posbench.targets import PROTOCOL
from posbench.task_evaluation import status_of
from posbench.tasks import Draws
from posbench.tasks.examples import Examples

METRIC = "induction_gain"
SEQUENCES = 100


def repeated(vocabulary: int, half: int) -> Examples:
    """Sequences [SEQUENCES, 2 half] of `half` random tokens that come twice.

    Tokens are uniform over the vocabulary; no seed and no encoding changes them. What is marked is
    the repeat but for its first token, before which nothing says that a repeat begins.
    """
    drawn = [
        Draws(PROTOCOL, "induction", vocabulary, half, index).below(vocabulary, half)
        for index in range(SEQUENCES)
    ]
    tokens = np.tile(np.stack(drawn), 2)
    return Examples(tokens, np.broadcast_to(np.arange(2 * half) > half, tokens.shape))


def measure_induction(
    model: LanguageModel,
    row: Row,
    config: EvalConfig,
    runtime: Runtime,
    scored: Scored = lambda _: None,
) -> Row:
    """Fill in the row of one length: `row.eval_length` tokens, half of them the repeat.

    value: mean loss of the tokens when they come first, less that when they come again, nats. nll:
    the latter. The interval resamples sequences. The same tokens are predicted both times.
    """
    row.metric = METRIC
    with status_of([row]):
        model.encoding.check_length(row.eval_length)
        _measure(model, row, config, runtime, scored)
    return row


def _measure(
    model: LanguageModel, row: Row, config: EvalConfig, runtime: Runtime, scored: Scored
) -> None:
    half = row.eval_length // 2
    if half < 2:
        row.status = Status.not_enough_data
        row.reason = f"{row.eval_length} tokens cannot hold two tokens and their repeat"
        return
    sequences = repeated(model.vocabulary, half)
    flat = sequences.tokens.ravel().astype(np.uint32)
    ends = np.arange(1, SEQUENCES + 1) * 2 * half - 1
    reads = 2 * half - 1
    runtime.reset_peak_memory()
    started = time.perf_counter()
    losses = window_losses(
        model, flat, ends, reads, reads, runtime, config.batch_tokens, scored
    )  # of tokens 1 .. 2 half - 1
    row.seconds = time.perf_counter() - started
    row.tokens_per_s = SEQUENCES * reads / row.seconds
    row.peak_mem_mb = runtime.peak_memory_mb()
    first, again = losses[:, : half - 1], losses[:, half:]
    row.n_targets, row.n_docs, row.targets_sha256 = again.size, SEQUENCES, sequences.sha256
    row.min_context, row.mean_context = half + 1, float(np.arange(half + 1, 2 * half).mean())
    row.n_nonfinite = int((~np.isfinite(losses)).sum())
    if row.n_nonfinite:
        row.status, row.value, row.nll = Status.nonfinite, math.nan, math.inf
        row.reason = f"{row.n_nonfinite} of {losses.size} losses are not finite"
        return
    gains = first - again
    row.value, row.nll = float(gains.mean()), float(again.mean())
    counts = np.full(SEQUENCES, gains.shape[1], dtype=np.int64)
    interval = bootstrap_interval(gains.sum(axis=1), counts, config.bootstrap)
    if interval is not None:
        row.ci_lo, row.ci_hi = interval
    row.reason = f"repeat {half} tokens after the original"
