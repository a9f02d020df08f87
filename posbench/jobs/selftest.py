"""`posbench selftest`: the evaluator on models whose losses are known, here and on this device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posbench.config import Device, EvalConfig, Precision, Protocol
from posbench.errors import SelftestFailedError
from posbench.results import Evaluation, Row, Status

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from posbench.data import Split
    from posbench.model import LanguageModel
    from posbench.runtime import Runtime

EXACT = 1e-10  # oracles give float64 logits
ALL = 1_000_000  # more targets than there are: every place is chosen
RATIOS = [0.75, 1.0, 2.0, 4.0]  # 0.75: six does not divide the 32 tokens of a span
STRIDE = 3  # nor does three what is left of one after a window


@dataclass(frozen=True)
class Check:
    """One number that the evaluator gave, beside the one that it had to give."""

    what: str  # the oracle and the protocol
    of: str  # the length and the quantity
    expected: float
    got: float | None

    @property
    def ok(self) -> bool:
        return self.got is not None and (
            self.got == self.expected or math.isclose(self.got, self.expected, rel_tol=EXACT)
        )

    def __str__(self) -> str:
        word = "ok  " if self.ok else "FAIL"
        got = "nothing" if self.got is None else f"{self.got:.10g}"
        return f"{word} {self.what:<26}{self.of:<26}expected {self.expected:.10g}, got {got}"


def run_selftest() -> None:
    """Print a line for each oracle and protocol; raises SelftestFailedError if one deviates."""
    from posbench.runtime import resolve

    runtime = resolve(Device.auto, Precision.auto, training=False)
    print(f"The evaluator on models whose losses are known ({runtime.record()['device']}):")
    failed = 0
    try:
        for _, group in itertools.groupby(checks(runtime), key=lambda check: check.what):
            found = list(group)
            wrong = [check for check in found if not check.ok]
            failed += bool(wrong)
            print((wrong or found)[-1], flush=True)
    except ValueError as error:  # tables that do not fit together
        raise SelftestFailedError(f"the evaluator could not finish: {error}") from error
    if failed:
        raise SelftestFailedError(f"{failed} lines above deviate: do not trust these measures.")
    print("Every number is as it must be.")


def measure(
    model: LanguageModel,
    split: Split,
    runtime: Runtime,
    train_length: int,
    byte_lengths: npt.NDArray[np.int64] | None = None,
    **settings: Any,
) -> Evaluation:
    """What the real evaluator says of `model` on `split`; every place is scored unless told."""
    import numpy

    from posbench.evaluation import Subject, evaluate_model
    from posbench.plan import plan

    config = EvalConfig(**({"max_targets": ALL, "span_tokens": ALL, "bootstrap": 100} | settings))
    config.protocols = [Protocol(each) for each in config.protocols]
    row = Row("r", "oracle", "none", "", "tiny", 0, train_length, 0, 0.0, "")
    if byte_lengths is None:
        byte_lengths = numpy.ones(int(split.tokens.max(initial=0)) + 2, dtype=numpy.int64)
    subject = Subject(model, row, split, byte_lengths)
    made = plan(split, train_length, config, "cpu")
    return evaluate_model(subject, made, config, runtime)


def checks(runtime: Runtime) -> Iterator[Check]:
    """Every number about an oracle, and what it must be."""
    from posbench import oracles
    from posbench.oracles import TRAIN

    split = oracles.make_split()
    vocabulary = len(split.tokens) + 1
    # Losses that depend on the window's length stand for an encoding whose prefixes do too.
    varying = oracles.Oracle(vocabulary, oracles.tracer, oracles.OracleEncoding(consistent=False))
    steady = oracles.Oracle(vocabulary, oracles.traced_prefix)
    even = oracles.Oracle(vocabulary, oracles.uniform(vocabulary))
    asked: dict[str, Any] = {"ratios": RATIOS, "stride": STRIDE, "protocols": oracles.MEANS}

    def rows(model: oracles.Oracle, **more: Any) -> list[Row]:
        return measure(model, split, runtime, TRAIN, **(asked | more)).rows

    for name, model in (("traced", varying), ("steady", steady)):

        def loss(target: int, visible: int, window: int, model: oracles.Oracle = model) -> float:
            return float(oracles.traced_loss(target, visible, window if model is varying else 0))

        for row in rows(model):
            if row.metric == "ppl":
                yield from _traced(f"{name}: {row.protocol}", row, split, loss)
    for row in rows(even):
        if row.metric == "ppl":
            at = f"{row.eval_length} tokens: ppl"
            yield Check(f"uniform: {row.protocol}", at, vocabulary, row.ppl)

    # Tokens 4, 5, ... of a window are lost; `controlled` at 8 scores its tokens 4 to 7.
    lost = oracles.Oracle(vocabulary, oracles.broken_at(4))
    for row in rows(lost, protocols=["controlled"], ratios=[1.0, 2.0, 4.0]):
        if row.metric == "ppl":
            hit = row.eval_length == TRAIN
            at = f"{row.eval_length} tokens: "
            wanted = Status.nonfinite if hit else Status.ok
            yield Check("lost losses: controlled", f"{at}status", 1, row.status is wanted)
            ppl = math.inf if hit else math.exp(2)
            yield Check("lost losses: controlled", f"{at}ppl", ppl, row.ppl)
    cliff = oracles.Oracle(vocabulary, oracles.cliff(TRAIN))
    for row in rows(cliff, protocols=["controlled", "position"], ratios=[1.0, 2.0, 4.0]):
        if row.metric in ("cliff_position", "effective_length"):
            yield Check(f"cliff: {row.metric}", "tokens", TRAIN, row.value)
        if row.metric == "gain":
            yield Check("cliff: gain", f"{row.eval_length} tokens: nats", -4, row.value)


def _traced(what: str, row: Row, split: Split, loss: Any) -> Iterator[Check]:
    from posbench.oracles import TRAIN, expected_mean, expected_windows

    windows = expected_windows(split, row.protocol, row.eval_length, 4 * TRAIN, TRAIN // 2, STRIDE)
    seen = [visible for window in windows for _, visible, _ in window]
    nll = expected_mean(row.protocol, windows, loss)
    for quantity, expected, got in (
        ("targets", len(seen), row.n_targets),
        ("least context", min(seen), row.min_context),
        ("mean context", math.fsum(seen) / len(seen), row.mean_context),
        ("nll", nll, row.nll),
        ("ppl", math.exp(nll), row.ppl),
    ):
        yield Check(what, f"{row.eval_length} tokens: {quantity}", expected, got)
