"""Each encoding from end to end: it learns, it is measured, and it costs what its card says.

A new one is tested by being listed in posbench.encodings.CLASSES, or in posbench.config.policies.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny
import torch
from test_contract import value_of

from posbench import journal
from posbench.attention import Kernel, choose
from posbench.catalog import ENCODING_CARDS, POLICY_CARDS
from posbench.config import EvalConfig, EvalSettings, ModelConfig, TrainSettings
from posbench.config.encodings import ENCODINGS
from posbench.config.policies import PRESETS, Policies, Preset
from posbench.encodings import CLASSES, Encoding, Hooks, Shape, build
from posbench.jobs.evaluate import evaluate
from posbench.jobs.train import train
from posbench.model import shape_of
from posbench.results import Evaluation, Status
from posbench.runs import Run

CONTEXT, STEPS, VOCABULARY = 32, 50, 256
SIZE = ModelConfig(layers=4, width=64, heads=4)  # every fourth layer is one of them
LENGTHS = (CONTEXT, 2 * CONTEXT, 4 * CONTEXT)
CARDS = {card.id: card for card in (*ENCODING_CARDS, *POLICY_CARDS)}


class Measured(NamedTuple):
    """A trained run and its evaluation."""

    name: str
    run: Run
    evaluation: Evaluation


def settings_of(name: str, corpus: Path) -> TrainSettings:
    """A small run of an encoding or a preset."""
    preset = PRESETS.get(name, Preset(name, Policies()))
    size = {"layers": SIZE.layers, "width": SIZE.width, "heads": SIZE.heads}
    settings = tiny.small(corpus, preset.encoding, context=CONTEXT, steps=STEPS, **size)
    return dataclasses.replace(settings, **vars(preset.at(CONTEXT)))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module", params=[*CLASSES, *PRESETS])
def measured(request: Any, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    name: str = request.param
    run = train(settings_of(name, corpus), tmp_path_factory.mktemp("run") / name)
    config = EvalConfig(max_targets=256, span_tokens=1024, bootstrap=100)
    return Measured(name, run, evaluate([run.folder], EvalSettings(eval=config, threads=1)))


def test_the_loss_falls(measured: Measured) -> None:
    """From what knowing nothing costs, a byte in 256, by more than a nat."""
    records = journal.read(measured.run.folder / "metrics.jsonl")
    losses = [each["loss"] for each in records if "loss" in each]
    assert len(losses) == STEPS
    assert losses[0] == pytest.approx(math.log(VOCABULARY), abs=0.1)
    assert statistics.mean(losses[-5:]) < statistics.mean(losses[:5]) - 1.0


def test_every_cell_is_measured_or_says_why_not(measured: Measured) -> None:
    settings = measured.run.settings
    shape = shape_of(settings.model, CONTEXT, settings)
    longest = build(settings.encoding, shape).max_length
    means = [row for row in measured.evaluation.rows if row.metric == "ppl"]
    rows = {(row.protocol, row.eval_length): row for row in means}
    assert set(rows) == set(itertools.product(EvalConfig().protocols, LENGTHS))
    assert len(rows) == len(means)
    for row in measured.evaluation.rows:  # what follows from them
        assert row.status is Status.ok or row.reason
        assert (row.value is not None) == (row.status is Status.ok)
    for (_, length), row in rows.items():
        if longest is not None and length > longest:
            assert row.status is Status.unsupported
            assert (row.ppl, row.nll, row.n_targets) == (None, None, 0)
            assert str(longest) in row.reason
        else:
            assert row.status is Status.ok
            assert row.n_targets > 0
            assert row.nll is not None
            assert 0 < row.nll < 2 * math.log(VOCABULARY)
            assert row.ppl == pytest.approx(math.exp(row.nll))


def test_recorded_parameters_are_the_documented_formula(measured: Measured) -> None:
    config = measured.run.settings.encoding
    names = {"L": CONTEXT, "C": SIZE.width, "H": SIZE.heads, "D": SIZE.head_size, "N": SIZE.layers}
    names |= {key: value for key, value in vars(config).items() if isinstance(value, int)}
    expected = value_of(CARDS[measured.name].parameters, names)
    cost, (record,) = measured.run.manifest["cost"], measured.evaluation.runs
    assert cost["encoding_parameters"] == record["encoding_parameters"] == expected
    blocks = SIZE.layers * (12 * SIZE.width**2 + 2 * SIZE.width)
    others = VOCABULARY * SIZE.width + blocks + SIZE.width
    assert cost["parameters"] == record["parameters"] == others + expected


# ---------------------------------------------------------------- the class of the cost


def hooks_of(name: str) -> tuple[Encoding, Hooks]:
    """An encoding that is not at zero, and what its second layer does."""
    encoding = build(ENCODINGS[name](), Shape(4, 3, 8, 24, CONTEXT))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.normal_(generator=generator)
    return encoding, encoding.hooks(
        torch.randn(2, 10, 24, generator=generator), torch.arange(10), 1
    )


@pytest.mark.parametrize("name", CLASSES)
def test_form_is_the_documented_one(name: str) -> None:
    encoding, hooks = hooks_of(name)
    forms = {form for form in Hooks._fields if getattr(hooks, form) is not None} - {"temperature"}
    if hooks.temperature != 1.0:
        forms.add("temperature")
    if type(encoding).embed is not Encoding.embed:
        forms.add("embed")
    assert (", ".join(sorted(forms)) or "nothing") == CARDS[name].form


@pytest.mark.parametrize("name", CLASSES)
def test_memory_for_all_scores_is_documented(name: str) -> None:
    """On a CPU: a matrix of T x T scores where the card says so, and nowhere else."""
    _, hooks = hooks_of(name)
    has_matrix = choose(hooks, "cpu", 8) in (Kernel.dense, Kernel.own)
    cost = CARDS[name].cost
    assert ("dense scores" in cost or "all scores in memory" in cost) == has_matrix


@pytest.mark.parametrize("name", CLASSES)
def test_wider_queries_are_documented(name: str) -> None:
    _, hooks = hooks_of(name)
    wide = 8
    if hooks.rotate is not None:
        q, k = hooks.rotate(torch.zeros(2, 3, 10, 8), torch.zeros(2, 3, 10, 8))
        wide = q.shape[-1]
        assert k.shape[-1] == wide
    cost = CARDS[name].cost
    documented = 16 if "twice as wide" in cost else 8 + 24 if "widened by C channels" in cost else 8
    assert wide == documented
