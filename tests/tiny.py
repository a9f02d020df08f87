"""Runs so small that a test can afford many: one layer, 20 steps, a corpus made on the spot."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from posbench import journal
from posbench.checkpoint import Checkpoint, load
from posbench.config import (
    BytesConfig,
    Device,
    EvalConfig,
    EvalSettings,
    ModelConfig,
    TextConfig,
    TrainConfig,
    TrainSettings,
)
from posbench.config.encodings import ENCODINGS

CONTEXT, STEPS = 16, 20
TEXT = "the quick brown fox jumps over one lazy dog while seven wizards boil purple tea"


def write_corpus(folder: Path, documents: int = 120) -> Path:
    """Some hundred short documents of random words, the same in every run."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(7)
    for number in range(documents):
        words = (generator.choice(TEXT.split()) for _ in range(generator.randint(20, 60)))
        (folder / f"{number:04}.txt").write_text(" ".join(words) + "\n")
    return folder


def small(corpus: Path, encoding: str = "rope", **changes: Any) -> TrainSettings:
    """Settings of a tiny run; keys of TrainConfig and ModelConfig go to their groups."""
    config = ENCODINGS[encoding]()
    layers = getattr(config, "global_every", None) or 1  # what differs by layer needs several
    model = ModelConfig(layers=layers, width=32, heads=2)
    train = TrainConfig(steps=STEPS, batch_size=4, log_every=1, validate_targets=64)
    settings = TrainSettings(
        encoding=config,
        model=model,
        data=TextConfig(path=str(corpus)),
        tokenizer=BytesConfig(),
        train=train,
        context=CONTEXT,
        device=Device.cpu,
        threads=1,
    )
    for key, value in changes.items():
        owner = next(node for node in (train, model, settings) if hasattr(node, key))
        setattr(owner, key, value)
    return settings


def sweep(folder: Path) -> Path:
    """A learned table and RoPE, two seeds each, trained in folder/train and evaluated in
    folder/eval: some cells have no number, and each encoding has a mean over seeds."""
    from posbench.jobs.evaluate import evaluate
    from posbench.jobs.train import train

    corpus = write_corpus(folder / "corpus")
    for number, (encoding, seed) in enumerate(itertools.product(("learned", "rope"), (0, 1))):
        settings = small(corpus, encoding, seed=seed, validate_ratios=[1.0, 2.0])
        train(settings, folder / "train" / f"{number}-{encoding}")
    config = EvalConfig(max_targets=256, span_tokens=1024, bootstrap=100)
    settings_of_eval = EvalSettings(eval=config, threads=1, device=Device.cpu)
    evaluate(folder / "train", settings_of_eval, folder / "eval")
    return folder


def overrides(settings: TrainSettings) -> list[str]:
    """The same settings as typed after `posbench train`, as far as `small` sets them."""
    model, train = settings.model, settings.train
    typed = {
        "encoding": settings.encoding.name,
        "model.layers": model.layers,
        "model.width": model.width,
        "model.heads": model.heads,
        "model.dropout": model.dropout,
        "data": "text",
        "data.path": getattr(settings.data, "path", ""),
        "tokenizer": "bytes",
        "train.steps": train.steps,
        "train.batch_size": train.batch_size,
        "train.log_every": train.log_every,
        "train.validate_targets": train.validate_targets,
        "train.checkpoint_every": train.checkpoint_every or "null",
        "context": settings.context,
        "device": "cpu",
        "threads": 1,
    }
    return [f"{key}={value}" for key, value in typed.items()]


def start(*words: str) -> subprocess.Popen[str]:
    """A real Python process: `python WORDS`."""
    return subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )


def command(*words: str) -> subprocess.Popen[str]:
    """A real process: `posbench WORDS`."""
    return start("-m", "posbench", *words)


def last(folder: Path) -> Checkpoint:
    """The newest checkpoint of a run, verified."""
    return load(max((folder / "checkpoints").glob("step-????????")))


def digest(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over names and bytes."""
    state = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        state.update(name.encode())
        state.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return state.hexdigest()


def losses(folder: Path) -> list[tuple[int, str]]:
    """(step, loss to the last bit) of each logged step, in file order."""
    records = journal.read(folder / "metrics.jsonl")
    return [(each["step"], each["loss"].hex()) for each in records if "loss" in each]


def validations(folder: Path) -> list[dict[str, Any]]:
    """The validation records, in file order, without the time of day."""
    records = [each for each in journal.read(folder / "metrics.jsonl") if "val_nll" in each]
    return [{key: value for key, value in each.items() if key != "time"} for each in records]


def assert_same_run(left: Path, right: Path) -> None:
    """Both runs ended with the same weights, optimizer state and records, bit for bit."""
    one, other = last(left), last(right)
    assert one.step == other.step
    assert digest(one.weights) == digest(other.weights)
    assert digest(one.optimizer) == digest(other.optimizer)
    assert losses(left) == losses(right)
    assert validations(left) == validations(right)
