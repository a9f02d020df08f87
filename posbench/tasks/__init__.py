"""Tasks: generated examples with one right answer each, to train on and to be tested by."""

from posbench.tasks.examples import Examples, TaskBatches, TaskDataset
from posbench.tasks.generators import Draws, Example, Task, build_task

__all__ = ["Draws", "Example", "Examples", "Task", "TaskBatches", "TaskDataset", "build_task"]
