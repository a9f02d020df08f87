"""TensorBoard files: a view of what metrics.jsonl and results.json hold, never the record itself.

TensorBoard's x axis is one whole number per point, the step. Training writes optimizer steps; the
curves of an evaluation write *lengths*, in sub-runs of their own, so that the two never mix.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from posbench.report.lines import HEADLINE, Subject, labels_of, subjects_of, word
from posbench.report.tables import terminal_table
from posbench.results import Evaluation, PositionCurve, Row, Status

_log = logging.getLogger(__name__)
_serial = itertools.count()


class EventFile:
    """One TensorBoard event file, written as it is given; every call may raise OSError.

    Written here rather than through a `SummaryWriter`: that one imports torch, and writes from a
    thread whose errors are printed or lost.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        # Readers take the files of a folder in the order of their names.
        name = f"{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}.{next(_serial):04d}"
        self._file: BinaryIO = (folder / f"events.out.tfevents.{name}").open("xb")
        self._records = RecordWriter(self._file)
        self._event(file_version="brain.Event:2")

    def _event(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())
        self._file.flush()

    def purge(self, step: int) -> None:
        """Tell readers to forget the points of earlier files from `step` on."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._event(step=step, session_log=SessionLog(status=SessionLog.START))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One point for each tag; a value that is not finite is left out."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        points = [
            Summary.Value(tag=tag, simple_value=value)
            for tag, value in values.items()
            if math.isfinite(value)
        ]
        if points:
            self._event(step=step, summary=Summary(value=points))

    def text(self, tag: str, markdown: str) -> None:
        """A text, shown as Markdown."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.plugins.text.metadata import create_summary_metadata

        content = TensorProto(dtype="DT_STRING", string_val=[markdown.encode()])
        metadata = create_summary_metadata(display_name=tag, description="")
        value = Summary.Value(tag=tag, metadata=metadata, tensor=content)
        self._event(step=0, summary=Summary(value=[value]))

    def close(self) -> None:
        self._file.close()


class TrainBoard:
    """The curves of one training run. An error of the board is a warning, never the run's end."""

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        self.folder, self.purge_step = folder, purge_step
        self._events: EventFile | None = None

    def __enter__(self) -> Self:
        try:
            self._events = EventFile(self.folder)
            if self.purge_step is not None:
                self._events.purge(self.purge_step)
        except OSError as error:
            self._give_up(error)
        return self

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one point for each tag at an optimizer step."""
        if self._events is None:
            return
        try:
            self._events.scalars(step, values)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        _warn(self.folder, error)
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
                _warn(self.folder, error)
            self._events = None


def _warn(folder: Path, error: OSError) -> None:
    _log.warning("TensorBoard files in %s stop here: %s", folder, error.strerror or error)


# ---------------------------------------------------------------- an evaluation


def write_evaluation_board(evaluation: Evaluation, folder: Path) -> None:
    """Write one sub-run of `folder` for each evaluated run and extension; step = length in tokens.

    What an earlier call left in `folder` is removed first: a point is never there twice.
    """
    try:
        _clear(folder)
        for name, rows, curves in _sub_runs(evaluation):
            _write_sub_run(folder / name, rows, curves)
        _write_table(folder / "results", evaluation)
    except OSError as error:
        _warn(folder, error)


def _clear(folder: Path) -> None:
    for file in folder.glob("*/events.out.tfevents.*"):
        file.unlink()
        with contextlib.suppress(OSError):  # not empty: something that is not ours
            file.parent.rmdir()


def _sub_runs(evaluation: Evaluation) -> list[tuple[str, list[Row], list[PositionCurve]]]:
    """(readable name, rows, curves) of each run under each extension and variant."""
    subjects = subjects_of(evaluation)
    labels = labels_of(subjects.values(), evaluation)
    found = []
    for (run_id, extension, variant), subject in subjects.items():
        mine = [
            row
            for row in evaluation.rows
            if (row.run_id, row.extension, row.variant) == (run_id, extension, variant)
        ]
        curves = [
            curve
            for curve in evaluation.curves
            if (curve.run_id, curve.extension, curve.variant) == (run_id, extension, variant)
        ]
        name = run_name(labels, subject, mine[0].seed)
        found.append((name, mine, curves))
    return found


def run_name(labels: Mapping[Subject, str], subject: Subject, seed: int) -> str:
    """`rope-seed0`, `rope+yarn-seed1`: a folder's name that reads well in a legend."""
    plain = re.sub(r"[^\w.+-]+", "-", labels[subject].replace(" + ", "+")).strip("-")
    return f"{plain}-seed{seed}"


def _write_sub_run(folder: Path, rows: list[Row], curves: list[PositionCurve]) -> None:
    events = EventFile(folder)
    try:
        for row in rows:
            if row.status is not Status.ok or row.value is None:
                continue
            if row.metric == "gain":
                _write_gain(events, row)
            elif row.metric in ("exact_match", "token_accuracy", "induction_gain"):
                events.scalars(row.eval_length, {f"by_length/{row.metric}": row.value})
        rows = [row for row in rows if row.metric in ("ppl", "exact_match", "induction_gain")]
        at_1x = {row.protocol: row for row in rows if row.ratio == 1}
        for row in sorted(rows, key=lambda row: row.eval_length):
            _write_row(events, row, at_1x.get(row.protocol))
        for curve in curves:
            for low, high, nll in zip(curve.lo, curve.hi, curve.nll, strict=True):
                events.scalars((low + high) // 2, {"by_position/nll": nll})
        failed = [row for row in rows if row.status is not Status.ok]
        if failed:
            events.text("by_length/status", _statuses(failed))
    finally:
        events.close()


def _write_row(events: EventFile, row: Row, base: Row | None) -> None:
    if row.status is not Status.ok or row.metric != "ppl":
        return
    points = {f"by_length/ppl_{row.protocol}": row.ppl, f"by_length/nll_{row.protocol}": row.nll}
    if row.protocol == HEADLINE:
        ratio = row.ppl / base.ppl if row.ppl and base and base.ppl else None
        points |= {"by_length/ci_lo": row.ci_lo, "by_length/ci_hi": row.ci_hi}
        points["by_length/ratio_vs_1x"] = ratio
        if ratio is not None:
            events.scalars(round(100 * row.ratio), {"by_percent/ratio_vs_1x": ratio})
    events.scalars(row.eval_length, {tag: v for tag, v in points.items() if v is not None})


def _write_gain(events: EventFile, row: Row) -> None:
    points = {"gain_nats": row.value, "gain_ci_lo": row.ci_lo, "gain_ci_hi": row.ci_hi}
    events.scalars(
        row.eval_length, {f"by_length/{tag}": v for tag, v in points.items() if v is not None}
    )


def _statuses(rows: list[Row]) -> str:
    lines = [
        f"| {row.protocol} | {row.eval_length} | {word(row)} | {row.status} | {row.reason} |"
        for row in rows
    ]
    return "\n".join(
        ["| protocol | length | shown as | status | reason |", "|---|---|---|---|---|", *lines]
    )


def _write_table(folder: Path, evaluation: Evaluation) -> None:
    """The tables of the terminal as one text."""
    events = EventFile(folder)
    try:
        events.text("results", f"```\n{terminal_table(evaluation, 140)}\n```")
    finally:
        events.close()
