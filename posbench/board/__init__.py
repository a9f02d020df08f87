"""TensorBoard files: a view of what metrics.jsonl and results.json hold, never the record itself.

TensorBoard's x axis is one whole number per point, the step. Training writes optimizer steps; the
curves of an evaluation write *lengths*, in sub-runs of their own, so that the two never mix.

Both write what pure functions make of the record, so that a rebuilt board is the one seen live.
"""

from __future__ import annotations

from posbench.board.evaluation import SubRun, sub_runs, write_evaluation_board, write_sub_runs
from posbench.board.events import EventFile, clear, is_ours
from posbench.board.names import folder_name, run_name
from posbench.board.train import TrainBoard, train_points, write_train_board

__all__ = [
    "EventFile",
    "SubRun",
    "TrainBoard",
    "clear",
    "folder_name",
    "is_ours",
    "run_name",
    "sub_runs",
    "train_points",
    "write_evaluation_board",
    "write_sub_runs",
    "write_train_board",
]
