"""Every promise of the Encoding contract, measured on one encoding in under a minute.

`posbench check-encoding` prints what is found here; training with a plugin asks the quick ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from posbench.config import ModelConfig
from posbench.config.encodings import EncodingConfig
from posbench.errors import UserError
from posbench.plugins import LOADED
from posbench.promises import learning, logits, signs, tables
from posbench.promises.probe import ROUNDING, Measured, Subject, number, raised
from posbench.promises.reference import reference


class Verdict(StrEnum):
    """What became of one promise."""

    holds = "holds"
    fails = "FAILS"
    slow = "holds, slowly"
    open = "not checked"  # what it rests on fails already


@dataclass(frozen=True)
class Promise:
    """One promise: how it is measured, why it matters, and which others it rests on."""

    name: str
    check: Callable[[Subject], Measured]
    why: str
    where: str = ""  # to look, unless the measurement knows better
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """A promise and what was measured of it."""

    promise: Promise
    verdict: Verdict
    found: str
    bound: str
    where: str


PROMISES = (
    Promise(
        "builds and runs",
        learning.runs,
        "nothing else can be said of it",
    ),
    Promise(
        "finite to 4x",
        logits.finite,
        "a length that is not defined must be refused, not computed",
        "give the class a `max_length`, or find what overflows",
        needs=("builds and runs",),
    ),
    Promise(
        "same seed",
        logits.same_seed,
        "comparisons are paired: one seed, the same other weights under every encoding",
        needs=("builds and runs",),
    ),
    Promise(
        "says something",
        logits.effect,
        "a model with it is a model without an encoding",
        "is the method called `embed` or `hooks`, and does it return what it made?",
        needs=("builds and runs",),
    ),
    Promise(
        "nothing kept",
        learning.state,
        "a kept table is left behind by casts, devices and longer texts",
        needs=("builds and runs",),
    ),
    Promise(
        "order of lengths",
        logits.order_of_lengths,
        "what is remembered from one text spoils the next",
        "something is cached in self",
        needs=("same seed",),
    ),
    Promise(
        "causal",
        logits.causal,
        "a model that sees the next token has a perplexity that means nothing",
        "of x, a score of query i and key j may read x[:, i] and x[:, j], and nothing after i",
        needs=("builds and runs",),
    ),
    Promise(
        "rows independent",
        logits.rows_independent,
        "a text's perplexity would depend on what else is in the batch",
        "something is averaged over, or indexed along, the first axis",
        needs=("builds and runs",),
    ),
    Promise(
        "exact positions",
        tables.exact,
        "rounded positions make far tokens look alike, in bfloat16 from 257 on",
        needs=("builds and runs",),
    ),
    Promise(
        "relative",
        logits.shifts,
        "reports and `inspect` say so; a wrong sign shows here first",
        needs=("exact positions",),
    ),
    Promise(
        "sign",
        signs.sign,
        "a model that favours the farthest token learns little, and less at every length",
        needs=("relative",),
    ),
    Promise(
        "no look at the length",
        logits.prefixes,
        "one pass at the longest text would not give the losses of the shorter ones",
        needs=("causal",),
    ),
    Promise(
        "formula",
        reference,
        "what is trained should be what the paper says",
        "one of the two is wrong",
        needs=("builds and runs",),
    ),
    Promise(
        "fast is exact",
        learning.fast_path,
        "training and evaluation would measure rounding",
        needs=("causal", "same seed"),
    ),
    Promise(
        "dtype kept",
        learning.dtypes,
        "on a GPU models train in bfloat16",
        "what is added drowns the token embeddings (0.02 at first), or a result is rounded twice",
        needs=("exact positions",),
    ),
    Promise(
        "every value trains",
        learning.trains,
        "what never trains is noise, and is counted as a parameter",
        needs=("builds and runs",),
    ),
    Promise(
        "saved and loaded",
        learning.round_trip,
        "a run is evaluated from its checkpoint, in another process",
        needs=("same seed",),
    ),
    Promise(
        "learns",
        learning.learns,
        "a run would be wasted",
        "a sign, or a scale that drowns the scores",
        needs=("builds and runs",),
    ),
    Promise(
        "one graph",
        learning.compiles,
        "a graph break costs more time than encodings differ by",
        "no Python `if` on tensors, no .item()",
        needs=("builds and runs",),
    ),
)


def check(config: EncodingConfig) -> Iterator[Finding]:
    """Each promise in turn, measured on small models; nothing more if the first one fails."""
    subject = Subject(config)
    failed: set[str] = set()
    for promise in PROMISES:
        finding = _measure(promise, subject, failed)
        if finding.verdict in (Verdict.fails, Verdict.open):
            failed.add(promise.name)
        yield finding
        if PROMISES[0].name in failed:
            return
        if promise.check is logits.finite and finding.verdict is Verdict.fails:
            subject.cap = subject.context  # the other promises are measured on what works


def _measure(promise: Promise, subject: Subject, failed: set[str]) -> Finding:
    missing = [name for name in promise.needs if name in failed]
    if missing:
        return Finding(promise, Verdict.open, f"{missing[0]} fails", "", "")
    try:
        measured = promise.check(subject)
    except Exception as error:
        measured = Measured(False, raised(error, subject), "no error")
    verdict = Verdict.holds if measured.holds else Verdict.fails
    if measured.slow:
        verdict = Verdict.slow
    return Finding(
        promise, verdict, measured.found, measured.bound, measured.where or promise.where
    )


# ---------------------------------------------------------------- before training


def refuse_broken(config: EncodingConfig, model: ModelConfig, context: int) -> None:
    """Raise UserError if a plugin does not build, leaks, or is not finite, in a run of this size.

    One layer and at most 256 tokens: this is to take no longer than a second.
    """
    size = replace(model, layers=1, dropout=0.0)
    subject = Subject(config, size, context)
    length = min(context, 256)
    try:
        built = subject.fresh()
        place, leak = logits.worst_leak(built.double(), length)
    except Exception as error:
        raise UserError(_broken(config, "does not run", raised(error, subject))) from error
    if leak != leak:
        raise UserError(_broken(config, "is not finite", f"logits of nan or inf at T={length}"))
    if leak > ROUNDING:
        found = (
            f"changing token {place} moves the logits before it by {number(leak)}, and may by "
            f"{ROUNDING:g}"
        )
        raise UserError(_broken(config, "is not causal", found))


def _broken(config: EncodingConfig, what: str, found: str) -> str:
    plugin = LOADED[config.name]
    return (
        f"encoding={config.name} {what}: {found}. `posbench check-encoding {plugin.path}` "
        "measures all it promises."
    )
