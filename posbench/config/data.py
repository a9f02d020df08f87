"""What a model is trained on: what every corpus and every task has."""

from __future__ import annotations

from dataclasses import dataclass

from posbench.config.fields import setting


@dataclass
class DataConfig:
    """Where the documents, or the examples of a task, come from."""

    name: str = setting("pysource", "id of the corpus")
    validation: float = setting(
        0.05, "share of documents (or examples) held out for validation", 0.001, 0.5
    )
    test: float = setting(
        0.10, "share of documents (or examples) held out for evaluation", 0.001, 0.5
    )
