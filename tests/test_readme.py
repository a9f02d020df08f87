"""What the README says works when pasted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from posbench.errors import Exit

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_python_example_runs_as_it_stands(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 1
    script = tmp_path / "example.py"
    script.write_text(blocks[0])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    measured = [line[0:4:2] + line[3:4] for line in lines if line[1:2] == ["ppl"]]
    assert measured == [
        [protocol, length, "ok"]
        for protocol in ("controlled", "nonoverlap", "position")
        for length in ("128", "256", "512")
    ]


def test_every_exit_code_is_documented() -> None:
    section = README.split("## Exit codes")[1].split("\n## ")[0]
    documented = {int(number) for number in re.findall(r"(?:^|; *\n?|\n)(\d+) ", section)}
    assert documented == {int(code) for code in Exit}


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
