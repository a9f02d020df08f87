"""The curves of training: every record of metrics.jsonl as points at its optimizer step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from posbench.board.events import EventFile, empty, warn
from posbench.board.layout import TRAINING, write_layout
from posbench.statistics import perplexity

_TAGS = ("loss", "lr", "grad_norm", "tokens_per_s")
Record = dict[str, Any]  # a line of metrics.jsonl


def train_points(record: Record) -> dict[str, float]:
    """What is drawn of one record: tag -> value. The 1x validation also stands by itself."""
    points = {f"train/{tag}": record[tag] for tag in _TAGS if tag in record}
    for ratio, loss in record.get("val_nll", {}).items():
        points |= _validation(ratio, "nll", loss) | _validation(ratio, "ppl", perplexity(loss))
    for ratio, share in record.get("val_exact_match", {}).items():
        points |= _validation(ratio, "exact_match", share)
    return points


def _validation(ratio: str, what: str, value: float) -> dict[str, float]:
    alone = {f"val/{what}_1x": value} if ratio == "1x" else {}
    return {**alone, f"val_by_ratio/{what}_{ratio}": value}


class TrainBoard:
    """The curves of one training run. An error of the board is a warning, never the run's end.

    `folder` is the run's own, `name` that of the one sub-run in it. What an earlier stretch of the
    run left there is written anew from its `records`: a point is never there twice.
    """

    def __init__(self, folder: Path, name: str, records: Iterable[Record] = ()) -> None:
        self.folder, self.name, self.records = folder, name, records
        self._events: EventFile | None = None

    def __enter__(self) -> Self:
        try:
            empty(self.folder / self.name)
            self._events = EventFile(self.folder / self.name)
            write_layout(self._events, TRAINING)
        except OSError as error:
            self._give_up(error)
        for record in self.records:
            self.write(record)
        return self

    def write(self, record: Record) -> None:
        """Draw one record of the journal."""
        if self._events is None:
            return
        try:
            _write_record(self._events, record)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        warn(self.folder, error)
        if self._events is not None:
            with contextlib.suppress(OSError):
                self._events.close()
        self._events = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._events is not None:
            try:
                self._events.close()
            except OSError as error:
                warn(self.folder, error)
            self._events = None


def write_train_board(folder: Path, records: Iterable[Record]) -> None:
    """Write the board of a whole run into `folder`, as TrainBoard wrote it; may raise OSError."""
    with EventFile(folder) as events:
        write_layout(events, TRAINING)
        for record in records:
            _write_record(events, record)


def _write_record(events: EventFile, record: Record) -> None:
    events.scalars(record["step"], train_points(record), record.get("time"))
