"""One TensorBoard event file, and how the files of an earlier writing go away."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

_log = logging.getLogger(__name__)
_serial = itertools.count()
_OURS = ".posbench"  # how the name of a file ends that posbench wrote, and may delete
_LARGEST = 3.4028234e38  # a point is a 32-bit float


class EventFile:
    """One TensorBoard event file, written as it is given; every call may raise OSError.

    Written here rather than through a `SummaryWriter`: that one imports torch, and writes from a
    thread whose errors are printed or lost. `at` is the time of an event, in seconds since the
    epoch; None is now.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        # Readers take the files of a folder in the order of their names.
        parts = (f"{time.time():017.6f}", socket.gethostname(), os.getpid(), f"{next(_serial):04d}")
        name = f"events.out.tfevents.{'.'.join(map(str, parts))}{_OURS}"
        self._file: BinaryIO = (folder / name).open("xb")
        self._records = RecordWriter(self._file)
        self._event(None, file_version="brain.Event:2")
        self._forget_earlier()

    def _forget_earlier(self) -> None:
        """Tell a TensorBoard that has read an earlier file of this folder to forget it."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._event(None, step=0, session_log=SessionLog(status=SessionLog.START))

    def _event(self, at: float | None, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        event = Event(wall_time=time.time() if at is None else at, **fields)
        self._records.write(event.SerializeToString())
        self._file.flush()

    def scalars(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        """One point for each tag; a value that is not drawable is left out."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        points = [
            Summary.Value(tag=tag, simple_value=value)
            for tag, value in values.items()
            if drawable(value)
        ]
        if points:
            self._event(at, step=step, summary=Summary(value=points))

    def text(self, tag: str, markdown: str, at: float | None = None) -> None:
        """A text, shown as Markdown."""
        from tensorboard.plugins.text.metadata import create_summary_metadata

        metadata = create_summary_metadata(display_name=tag, description="")
        self.content(tag, metadata, markdown.encode(), at)

    def content(self, tag: str, metadata: Any, content: bytes, at: float | None = None) -> None:
        """Bytes for a plugin of TensorBoard, named by `metadata`, that reads them."""
        from tensorboard.compat.proto.tensor_pb2 import TensorProto

        tensor = TensorProto(dtype="DT_STRING", string_val=[content])
        self._tensor(tag, metadata, tensor, at)

    def metadata(self, tag: str, metadata: Any, at: float | None = None) -> None:
        """A message for a plugin of TensorBoard that reads only `metadata` itself."""
        from tensorboard.plugins.hparams.metadata import NULL_TENSOR

        self._tensor(tag, metadata, NULL_TENSOR, at)

    def _tensor(self, tag: str, metadata: Any, tensor: Any, at: float | None) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        value = Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
        self._event(at, step=0, summary=Summary(value=[value]))

    def close(self) -> None:
        """No more events."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def drawable(value: float | None) -> bool:
    """Whether a value can be a point: finite, also as a 32-bit float."""
    return value is not None and abs(value) <= _LARGEST


def is_ours(file: Path) -> bool:
    """Whether posbench wrote this file, and may delete it."""
    return file.name.startswith("events.out.tfevents.") and file.name.endswith(_OURS)


def clear(folder: Path) -> None:
    """Remove the event files that posbench wrote below `folder`, and folders left empty by that."""
    for file in [path for path in folder.rglob(f"*{_OURS}") if is_ours(path)]:
        file.unlink()
        for parent in file.parents[: len(file.relative_to(folder).parts) - 1]:
            with contextlib.suppress(OSError):  # not empty: something that is not ours
                parent.rmdir()


def empty(folder: Path) -> None:
    """Empty the event files that posbench wrote in `folder` itself.

    They stay until the next time: a TensorBoard that watches a file waits for ever if it goes, but
    reads on in the next one if it ends.
    """
    for file in [path for path in folder.glob(f"*{_OURS}") if is_ours(path)]:
        if file.stat().st_size:
            os.truncate(file, 0)
        else:
            file.unlink()


def warn(folder: Path, error: OSError) -> None:
    """Say that the board ends; the run, or the evaluation, goes on."""
    _log.warning("TensorBoard files in %s stop here: %s", folder, error.strerror or error)
