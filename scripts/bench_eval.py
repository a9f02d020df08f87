"""What an evaluation costs beside its longest pass, measured: two ratios of seconds.

    python scripts/bench_eval.py [CONTEXT] [WIDTH] [LAYERS]

`position` and the prefixes at 1x, 2x, 4x against the pass at 4x alone; and the default report
against that pass. The model is untrained: weights do not change the time.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import numpy as np

from posbench.config import Device as DeviceChoice
from posbench.config import EvalConfig, ModelConfig, Precision, Protocol
from posbench.config.encodings import RopeConfig
from posbench.data import Split
from posbench.evaluation import Subject, evaluate_model
from posbench.model import build_model
from posbench.plan import plan
from posbench.results import Row
from posbench.runtime import resolve

ROUNDS = 3
TARGETS = 4096


def main(context: int = 128, width: int = 128, layers: int = 4) -> None:
    """Print seconds and ratios, the median of rounds that take turns."""
    runtime = resolve(DeviceChoice.auto, Precision.auto, training=False)
    heads = max(1, width // 32)
    size = ModelConfig(layers=layers, width=width, heads=heads)
    model = build_model(size, RopeConfig(), context, 256, seed=0).to(runtime.device)
    split = _text(60, 40 * context)
    row = Row("bench", "rope", "none", "", "bench", 0, context, 0, 0.0, "")
    subject = Subject(model, row, split, np.ones(256, dtype=np.int64))
    asked = {
        "the pass at 4x": _config(ratios=[4.0], protocols=[Protocol.controlled]),
        "position at 4x": _config(ratios=[4.0], protocols=[Protocol.position]),
        "position at 1x, 2x, 4x": _config(protocols=[Protocol.position]),
        "default report": _config(),
    }
    plans = {what: plan(split, context, each, runtime.device.type) for what, each in asked.items()}
    # On a CPU that others use too, seconds of this process are what counts.
    clock = time.process_time if runtime.device.type == "cpu" else time.perf_counter
    times: dict[str, list[float]] = {what: [] for what in asked}
    for _ in range(ROUNDS + 1):
        for what, config in asked.items():
            started = clock()
            evaluate_model(subject, plans[what], config, runtime)
            times[what].append(clock() - started)
    seconds = {what: statistics.median(each[1:]) for what, each in times.items()}
    for what, each in seconds.items():
        print(f"{what:<24}{each:8.2f} s")
    prefix = seconds["position at 1x, 2x, 4x"] / seconds["position at 4x"]
    report = seconds["default report"] / seconds["the pass at 4x"]
    print(f"position at 1x, 2x, 4x costs {prefix:.2f} times position at 4x alone")
    print(f"the default report costs {report:.2f} times the pass at 4x alone")


def _config(**asked: Any) -> EvalConfig:
    return EvalConfig(max_targets=TARGETS, **asked)


def _text(documents: int, length: int) -> Split:
    tokens = np.random.default_rng(0).integers(0, 256, documents * length).astype(np.uint16)
    offsets = np.arange(documents + 1, dtype=np.int64) * length
    return Split(tokens, offsets, [f"{n}.txt" for n in range(documents)], "random")


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
