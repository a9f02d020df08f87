"""What a sweep saves against the same runs one after another, measured: a ratio of seconds.

    python scripts/bench_sweep.py [STEPS] [ROUNDS]

The serial runs have every core for themselves; the sweep has one job per core. Both are processes
from start to end, so imports count on both sides. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time

from posbench.cli.slots import cores

ENCODINGS = ("none", "rope", "alibi", "learned")
MODEL = ("data=copy", "context=128", "device=cpu")


def main(steps: int = 100, rounds: int = 3) -> None:
    """Print seconds of both and their ratio, the median of rounds that take turns."""
    common = (*MODEL, f"train.steps={steps}")
    serial, sweep = [], []
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            for encoding in ENCODINGS:
                _train(f"encoding={encoding}", *common, f"hydra.run.dir={folder}/{encoding}")
            serial.append(time.perf_counter() - started)
            started = time.perf_counter()
            _train("-m", f"encoding={','.join(ENCODINGS)}", *common, f"hydra.sweep.dir={folder}/s")
            sweep.append(time.perf_counter() - started)
        print(f"round {number}: {serial[-1]:.1f} s one after another, {sweep[-1]:.1f} s as a sweep")
    one, other = statistics.median(serial), statistics.median(sweep)
    print(
        f"{len(ENCODINGS)} runs of {steps} steps on {cores()} cores: {one:.1f} s one after "
        f"another, {other:.1f} s as a sweep, ratio {other / one:.2f}"
    )


def _train(*words: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    command = (sys.executable, "-m", "posbench", "train", *words)
    subprocess.run(command, check=True, capture_output=True, env=environment)


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
