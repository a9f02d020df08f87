"""What an evaluation will score, before any model is looked at: lengths, places, and cells."""

from __future__ import annotations

from dataclasses import dataclass, replace

from posbench.config import EvalConfig, EvalSplit, Protocol
from posbench.data import Split
from posbench.diagnostics import ATTENTION, SHIFTS
from posbench.errors import UserError
from posbench.induction import METRIC as INDUCTION
from posbench.induction import SEQUENCES
from posbench.passes import Sharing
from posbench.protocols import BY_WINDOWS, Layout, Places, layout
from posbench.results import Row
from posbench.targets import anchors, beginnings, digest, spans, stretches

USUAL_RATIOS = (1.0, 2.0, 4.0)  # targets are chosen for these, so 1x alone scores the same tokens
MAX_TARGETS = {"cpu": 16_384, "cuda": 131_072}
PROBES = 16  # windows that `shift` and `attention` look at


@dataclass(frozen=True)
class Plan:
    """What is scored, before any model is looked at."""

    train_length: int
    lengths: dict[float, int]
    longest: int  # the context that every anchor has before it
    reach: int  # the longest length that a document holds
    places: Places
    probes: list[int]  # ends of the windows that diagnostics look at
    layouts: dict[tuple[Protocol, int], Layout]
    digests: dict[tuple[Protocol, int], str]
    kept_documents: int  # those long enough for the longest window
    kept_tokens: int
    corpus: str
    split: str

    def check_length(self, length: int) -> None:
        """Raise ShortageError for a length that no document has."""
        if length > self.reach:
            kind = "" if self.split == EvalSplit.all else f"{self.split} "
            raise ShortageError(
                f"no {kind}document of data={self.corpus} has {length + 1} tokens; "
                f"the longest has {self.reach + 1}"
            )

    def foreign_count(self, config: EvalConfig, length: int) -> int:
        """How many tokens of a window `context_ablation` replaces: those far from all targets."""
        return length - self.places.size + 1 - (config.ablate_beyond or self.train_length)


class ShortageError(Exception):
    """Too little text."""


def plan(split: Split, train_length: int, config: EvalConfig, device: str) -> Plan:
    """Lengths and targets for one split. Raises UserError for settings that contradict."""
    lengths = _lengths(train_length, config)
    shortest = min(lengths.values())
    size = config.anchor_targets or min(256, train_length // 2)
    if size > shortest:
        raise UserError(
            f"eval.ratios asks for windows of {shortest} tokens, too short for {size} targets. "
            f"Set eval.anchor_targets={shortest} or less."
        )
    if config.stride is not None and config.stride > shortest:
        raise UserError(
            f"eval.stride={config.stride} is longer than the shortest window, {shortest} tokens: "
            f"tokens between windows would not be scored. The most is {shortest}."
        )
    usual = {round(ratio * train_length) for ratio in USUAL_RATIOS}
    reach = int(max(split.lengths, default=0)) - 1  # one more token is predicted
    longest = max((n for n in usual | {*lengths.values()} if n <= reach), default=shortest)
    most = config.max_targets or MAX_TARGETS[device]
    disjoint = spans(split, longest, size, most)
    places = Places(
        anchors(split, longest, size, most).tolist(),
        size,
        disjoint,
        disjoint[: max(1, (config.span_tokens or most) // longest)],
        stretches(split, longest, size, most),
        beginnings(split, longest, most),
        config.stride or max(1, train_length // 4),
    )
    kept = split.lengths[split.lengths > longest]
    layouts = {
        (protocol, length): layout(protocol, places, length)
        for protocol, length in _by_windows(config, lengths, train_length)
        if length <= reach
    }
    return Plan(
        train_length,
        lengths,
        longest,
        reach,
        places,
        anchors(split, longest, size, PROBES * size).tolist(),
        layouts,
        {key: digest(split, each.targets()) for key, each in layouts.items() if each.windows},
        len(kept),
        int(kept.sum()),
        split.corpus,
        str(config.split),
    )


def _lengths(train_length: int, config: EvalConfig) -> dict[float, int]:
    lengths = {ratio: round(ratio * train_length) for ratio in config.ratios}
    for ratio, length in lengths.items():
        if length < 2:
            raise UserError(f"eval.ratios holds {ratio}: {length} tokens; the least is 2.")
    if len(set(lengths.values())) < len(lengths):
        raise UserError(
            f"eval.ratios={config.ratios}: two of them round to one length at context "
            f"{train_length}."
        )
    return lengths


def _by_windows(
    config: EvalConfig, lengths: dict[float, int], train_length: int
) -> list[tuple[Protocol, int]]:
    """Of which protocols and lengths the windows are needed, asked for or not."""
    every = [Protocol.controlled] if Protocol.context_ablation in config.protocols else []
    found = [
        (protocol, length)
        for protocol in [*config.protocols, *every]
        for length in lengths.values()
        if protocol in BY_WINDOWS
    ]
    if Protocol.longppl_self in config.protocols:
        found += [(Protocol.controlled, n) for n in (train_length, *lengths.values())]
    return list(dict.fromkeys(found))


def planned_tokens(plan: Plan, config: EvalConfig) -> int:
    """Tokens that go through the model for one subject, about: for a progress bar."""
    asked = [windows for each in plan.layouts.values() for windows in each.windows]
    read = sum(len(each.starts) * each.length for each in Sharing(asked).read())
    lengths = [length for length in plan.lengths.values() if length <= plan.reach]
    probes = len(plan.probes)
    if Protocol.shift in config.protocols:
        read += probes * plan.train_length * 4
    if Protocol.attention in config.protocols:
        read += probes * sum(lengths)
    if Protocol.induction in config.protocols:
        read += SEQUENCES * sum(2 * (length // 2) - 1 for length in plan.lengths.values())
    if Protocol.context_ablation in config.protocols:
        read += sum(
            length * len(plan.places.anchors)
            for length in lengths
            if plan.foreign_count(config, length) > 0
        )
    return read


# ---------------------------------------------------------------- which cells there are


@dataclass(frozen=True)
class CellKey:
    """What a row is about, beside the model."""

    protocol: Protocol
    metric: str
    ratio: float
    length: int


def cell_keys(protocol: Protocol, lengths: dict[float, int], train_length: int) -> list[CellKey]:
    """The cells of one protocol: those that every run has, evaluated or not."""
    longest = max(lengths, key=lengths.__getitem__)

    def each(*metrics: str, at: dict[float, int] = lengths) -> list[CellKey]:
        return [CellKey(protocol, m, ratio, n) for m in metrics for ratio, n in at.items()]

    others = {ratio: length for ratio, length in lengths.items() if ratio != 1}
    last = {longest: lengths[longest]}
    match protocol:
        case Protocol.controlled:
            derived = each("gain", "extrapolation_ratio", at=others)
            return each("ppl") + derived + each("effective_length", at=last)
        case Protocol.position:
            return each("ppl") + each("cliff_position", at=last)
        case Protocol.shift:
            moved = {1 + by: round(train_length * (1 + by)) for by in SHIFTS}
            return each("max_abs_delta_nll", at=moved)
        case Protocol.context_ablation:
            return each("loss_change")
        case Protocol.longppl_self:
            return each("key_ppl") + each("key_fraction", at=last)
        case Protocol.attention:
            return each(*ATTENTION)
        case Protocol.induction:
            return each(INDUCTION)
        case _:
            return each("ppl")


def skipped_rows(row: Row, config: EvalConfig) -> list[Row]:
    """Rows that say why a run was not evaluated (`row.reason`), one per cell it would have had."""
    lengths = {ratio: round(ratio * row.train_length) for ratio in config.ratios}
    return [
        row_of(row, key)
        for protocol in config.protocols
        for key in cell_keys(protocol, lengths, row.train_length)
    ]


def row_of(row: Row, key: CellKey) -> Row:
    """`row`, which says which model it is, as the row of one cell."""
    return replace(
        row,
        protocol=key.protocol.value,
        metric=key.metric,
        ratio=key.ratio,
        eval_length=key.length,
    )
