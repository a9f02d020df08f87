"""The worked example of docs/own-model.md: it runs, and it is posbench's own attention."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from posbench import plugins
from posbench.config import ModelConfig
from posbench.config.encodings import ENCODINGS
from posbench.encodings import build
from posbench.model import build_model
from posbench.promises import Verdict, check

DOCS = Path(__file__).resolve().parent.parent / "docs"
SIZE = ModelConfig(layers=2, width=48, heads=3)


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """The names that the example defines."""
    [code] = re.findall(r"```python\n(.*?)```", (DOCS / "own-model.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "own-model.md", "exec"), names)
    return names


def test_the_example_runs_as_it_stands(
    example: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert example["model"](torch.zeros(1, 9, dtype=torch.long)).shape == (1, 9, 256)


@pytest.mark.parametrize("name", ENCODINGS)
@torch.no_grad()
def test_its_attention_is_posbenchs_own(name: str, example: dict[str, Any]) -> None:
    """Equal weights, equal input, every layer: equal output, bit for bit."""
    model = build_model(SIZE, ENCODINGS[name](), 32, 50, seed=1).eval()
    encoding = build(name, model.encoding.shape, seed=1).eval()
    x = torch.randn(2, 32, SIZE.width, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(32)
    for layer, block in enumerate(model.blocks):
        own = example["Attention"](SIZE.width, SIZE.heads)
        own.load_state_dict(block.attention.state_dict())
        expected = block.attention(x, model.encoding, positions, layer)
        assert torch.equal(own(x, encoding, positions, layer), expected)
    assert torch.equal(encoding.embed(x, positions), model.encoding.embed(x, positions))


def test_the_plugin_in_the_docs_keeps_every_promise(tmp_path: Path) -> None:
    [code] = re.findall(r"```python\n(.*?)```", (DOCS / "own-encoding.md").read_text(), re.DOTALL)
    path = tmp_path / "linear.py"
    path.write_text(code)
    with plugins.loaded([path]):
        assert {each.verdict for each in check(ENCODINGS["linear"]())} == {Verdict.holds}
