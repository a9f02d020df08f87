"""Policies around an encoding: by plain loops, in training, in a run, on the command line."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from posbench.attention import Kernel, attend, score_rows
from posbench.cli.compose import configure
from posbench.config import EvalConfig, EvalSettings, ModelConfig
from posbench.config.encodings import ENCODINGS
from posbench.config.extensions import EXTENSIONS, StreamingConfig, YarnConfig
from posbench.config.policies import (
    PRESETS,
    Policies,
    Positions,
    Temperature,
    policies_of,
    scheme,
)
from posbench.encodings import CLASSES, Encoding, Hooks
from posbench.encodings.policies import draw_positions, ssmax_start, stretch, visible_keys
from posbench.encodings.regrouping import logn
from posbench.encodings.seeds import seeded
from posbench.errors import UnsupportedError, UserError
from posbench.jobs.evaluate import evaluate
from posbench.jobs.train import run_training
from posbench.model import GPT, build_model
from posbench.results import Status
from posbench.runs import load_run
from posbench.training import Trainer

CONTEXT, VOCABULARY = 24, 37
SIZE = ModelConfig(layers=2, width=24, heads=2)
RANDOMIZED = Policies(positions=Positions.randomized)
POSE = Policies(positions=Positions.pose)
READERS = [name for name in CLASSES if ENCODINGS[name].by_position]


def make(name: str, policies: Policies, seed: int = 0) -> GPT:
    """A model whose attention matters; the encoding's zeros are filled."""
    model = build_model(SIZE, ENCODINGS[name](), CONTEXT, VOCABULARY, seed, policies)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.std() < 0.05:
                parameter.mul_(8)
            if not parameter.any():
                parameter.normal_(0.0, 0.5, generator=torch.Generator().manual_seed(seed))
    return model.eval()


def tokens(length: int = CONTEXT) -> Tensor:
    return torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(3))


# ---------------------------------------------------------------- windows


@pytest.mark.parametrize("kernel", [Kernel.dense, Kernel.strided])
@pytest.mark.parametrize("window", [1, 2, 7, 30])
def test_a_window_by_plain_loops(kernel: Kernel, window: int) -> None:
    """A query sees itself and window - 1 keys before it; 30 is all of 19."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 19, 4, generator=generator).double() for _ in range(3))
    found = attend(q, k, v, Hooks(window=window), kernel)
    for head in range(2):
        for i in range(19):
            seen = [j for j in range(19) if i - window < j <= i]
            scores = torch.stack([q[0, head, i] @ k[0, head, j] / 2 for j in seen])
            expected = scores.softmax(0) @ v[0, head, seen]
            torch.testing.assert_close(found[0, head, i], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CLASSES)
@torch.no_grad()
def test_nothing_outside_the_window_is_seen(name: str) -> None:
    """Two layers with windows of 5 look back on 9 tokens; a short convolution on a few more."""
    model = make(name, Policies(window=5))
    text = tokens()
    other = text.clone()
    other[:, 2] = (other[:, 2] + 1) % VOCABULARY
    changed = (model(text) - model(other)).abs().amax(dim=(0, 2))
    beside = {"path": 2, "dape_v2": 2}.get(name, 0)  # tokens that convolutions reach beyond
    reach = 2 + 2 * (4 + beside)
    assert changed[2] > 1e-3
    assert changed[reach + 1 :].max() <= 1e-6


# ---------------------------------------------------------------- layers


@torch.no_grad()
def test_every_nth_layer_goes_without() -> None:
    model = make("alibi", Policies(layers="every2nd", window=6))
    x = torch.zeros(1, 10, SIZE.width)
    first, second = (model.encoding.hooks(x, torch.arange(10), layer) for layer in range(2))
    assert first.distance_bias is not None
    assert first.window == 6
    assert second == Hooks()
    plain = make("none", Policies())
    missing = plain.load_state_dict(model.state_dict(), strict=False)
    assert missing == ([], [])
    assert (plain(tokens()) - model(tokens())).abs().max() > 1e-3


# ---------------------------------------------------------------- positions


@pytest.mark.parametrize("policies", [RANDOMIZED, POSE], ids=lambda p: str(p.positions))
def test_drawn_positions_rise_below_their_bound_and_cover_it(policies: Policies) -> None:
    seen = torch.zeros(4 * CONTEXT)
    for step in range(400):
        positions = draw_positions(policies, CONTEXT, seeded(0, f"positions/{step}"))
        assert positions is not None
        assert len(positions) == CONTEXT
        gaps = positions.diff()
        assert (gaps >= 1).all()
        assert positions[0] >= 0
        assert positions[-1] < 4 * CONTEXT
        if policies.positions is Positions.pose:
            assert positions[0] == 0
            assert (gaps > 1).sum() <= 1  # two parts
        seen[positions] += 1
    assert (seen > 0).all()
    again = draw_positions(policies, CONTEXT, seeded(0, "positions/399"))
    other = draw_positions(policies, CONTEXT, seeded(1, "positions/399"))
    assert again is not None
    assert other is not None
    assert torch.equal(again, positions)
    assert not torch.equal(other, positions)


def test_randomized_below_the_length_itself_is_plain() -> None:
    policies = replace(RANDOMIZED, max_position=CONTEXT)
    drawn = draw_positions(policies, CONTEXT, seeded(0, "any"))
    assert drawn is not None
    assert torch.equal(drawn, torch.arange(CONTEXT))
    assert draw_positions(Policies(), CONTEXT, seeded(0, "any")) is None


@pytest.mark.parametrize("name", READERS)
def test_drawn_positions_reach_every_encoding_that_reads_them(name: str) -> None:
    """In training, logits follow the draw: at 0, 1, 2, ... they are those of the plain model."""
    model = make(name, RANDOMIZED).train()
    drawn = draw_positions(RANDOMIZED, CONTEXT, seeded(0, "positions/0"))
    plain = model(tokens(), torch.arange(CONTEXT))
    assert (model(tokens(), drawn) - plain).abs().max() > 1e-4
    torch.testing.assert_close(plain, model.eval()(tokens()), rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_bias_by_distance_is_read_at_the_distance_of_drawn_positions() -> None:
    model = make("alibi", RANDOMIZED).train()
    drawn = draw_positions(RANDOMIZED, CONTEXT, seeded(0, "positions/1"))
    assert drawn is not None
    hooks = model.encoding.hooks(torch.zeros(1, CONTEXT, SIZE.width), drawn, 0)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, CONTEXT, 12, generator=generator) for _ in range(3))
    found = attend(q, k, v, hooks)
    for head, slope in enumerate((2**-4, 2**-8)):
        for i in range(CONTEXT):
            scores = torch.stack(
                [
                    q[0, head, i] @ k[0, head, j] / math.sqrt(12) - slope * int(drawn[i] - drawn[j])
                    for j in range(i + 1)
                ]
            )
            expected = scores.softmax(0) @ v[0, head, : i + 1]
            torch.testing.assert_close(found[0, head, i], expected, rtol=0, atol=1e-5)


def test_a_table_of_positions_is_as_long_as_what_is_drawn() -> None:
    model = make("learned", RANDOMIZED)
    assert model.encoding.max_length == 4 * CONTEXT
    assert model(tokens(4 * CONTEXT)).isfinite().all()
    with pytest.raises(UnsupportedError):
        model(tokens(4 * CONTEXT + 1))


# ---------------------------------------------------------------- dropping


@pytest.mark.parametrize("name", CLASSES)
@torch.no_grad()
def test_a_dropped_encoding_is_none(name: str) -> None:
    model = make(name, Policies(drop_at=0.5))
    plain = make("none", Policies())
    plain.load_state_dict(model.state_dict(), strict=False)
    model.encoding.trained_to(0.49)
    if name != "none":
        assert (model(tokens()) - plain(tokens())).abs().max() > 1e-4
    model.encoding.trained_to(0.5)
    assert torch.equal(model(tokens(2 * CONTEXT)), plain(tokens(2 * CONTEXT)))
    assert model.encoding.max_length is None


def test_the_drop_falls_at_its_step(tmp_path: Path) -> None:
    """Until the drop, the losses are those of the run without one; from it on, they differ."""
    corpus = tiny.write_corpus(tmp_path / "corpus")
    settings = tiny.small(corpus, "alibi", lr=1e-2)
    run_training(settings, tmp_path / "plain", [])
    run_training(replace(settings, drop_at=0.6), tmp_path / "dropped", [])
    plain, dropped = tiny.losses(tmp_path / "plain"), tiny.losses(tmp_path / "dropped")
    first = math.ceil(0.6 * tiny.STEPS)
    assert plain[:first] == dropped[:first]
    assert all(one != other for one, other in zip(plain[first:], dropped[first:], strict=True))
    run = load_run(tmp_path / "dropped")
    assert run.id.startswith("alibi+drop0.6-s0-")
    encoding = run.model().encoding
    assert encoding.hooks(torch.zeros(1, 9, 32), torch.arange(9), 0) == Hooks()


def test_an_extension_of_a_dropped_encoding_is_refused() -> None:
    encoding = make("rope", Policies(drop_at=0.5)).encoding
    encoding.trained_to(1.0)
    with pytest.raises(UnsupportedError, match=r"yarn has nothing .* drop_at=0.5"):
        encoding.extend(YarnConfig())


# ---------------------------------------------------------------- windows at evaluation


def test_streaming_hides_the_same_keys_in_layers_without_the_encoding() -> None:
    encoding = make("rope", Policies(layers="every2nd")).encoding
    encoding.extend(StreamingConfig(sinks=2, window=5))
    x, positions = torch.zeros(1, 40, SIZE.width), torch.arange(40)
    q, k = torch.randn(2, 1, 2, 40, 12, generator=torch.Generator().manual_seed(0))
    for layer in (0, 1):
        hooks = encoding.hooks(x, positions, layer)
        (scores,) = score_rows(q, k, hooks, [30])
        assert scores[0, 0].isfinite().nonzero().flatten().tolist() == [0, 1, 26, 27, 28, 29, 30]
    assert hooks.rotate is None


@torch.no_grad()
def test_streaming_of_a_dropped_encoding_is_that_of_none() -> None:
    model, plain = make("rope", Policies(drop_at=0.5)), make("none", Policies())
    plain.load_state_dict(model.state_dict())
    model.encoding.trained_to(1.0)
    text, extension = tokens(2 * CONTEXT), StreamingConfig(window=8)
    full = plain(text)
    for each in (model, plain):
        each.encoding.extend(extension)
    assert torch.equal(model(text), plain(text))
    assert (plain(text) - full).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["lm_infinite", "streaming"])
def test_a_window_at_evaluation_is_refused_where_training_had_one(name: str) -> None:
    encoding = make("rope", Policies(window=7)).encoding
    with pytest.raises(UnsupportedError, match=rf"^{name} gives a window .* with window=7"):
        encoding.extend(EXTENSIONS[name]())
    encoding.extend(YarnConfig())


# ---------------------------------------------------------------- temperature


def factors(temperature: Temperature, length: int, **policies: Any) -> Tensor:
    """What the scores of each query are multiplied by in the first layer."""
    chosen = Policies(temperature=temperature, **policies)
    encoding = build_model(SIZE, ENCODINGS["none"](), CONTEXT, VOCABULARY, 0, chosen).encoding
    hooks = encoding.hooks(torch.zeros(1, length, SIZE.width), torch.arange(length), 0)
    assert isinstance(hooks.temperature, Tensor)
    return hooks.temperature.detach()


def test_temperatures_by_their_formulas() -> None:
    length = 3 * CONTEXT
    for i, found in enumerate(factors(Temperature.logn, length).tolist()):
        assert found == pytest.approx(max(1, math.log(i + 1) / math.log(CONTEXT)), abs=1e-12)
    yarn = factors(Temperature.yarn, length)
    assert yarn.tolist() == pytest.approx([(0.1 * math.log(3) + 1) ** 2] * length, abs=1e-12)
    drope = factors(Temperature.drope, length)
    assert drope.tolist() == pytest.approx([1 + 0.412 * math.log(3)] * length, abs=1e-12)
    ssmax = factors(Temperature.ssmax, length)
    mean = sum(math.log(n) for n in range(1, CONTEXT + 1)) / CONTEXT
    for head in ssmax:
        for i, found in enumerate(head.tolist()):
            assert found == pytest.approx(math.log(i + 1) / mean, abs=1e-6)


def test_within_the_training_length_the_formulas_change_nothing() -> None:
    for temperature in (Temperature.logn, Temperature.yarn, Temperature.drope):
        model = make("rope", Policies(temperature=temperature))
        assert torch.equal(model(tokens()), make("rope", Policies())(tokens()))


def test_ssmax_starts_where_the_paper_does() -> None:
    assert ssmax_start(1024) == pytest.approx(0.168, abs=5e-4)


def test_keys_are_counted_within_the_window() -> None:
    assert visible_keys(5, None, torch.device("cpu")).tolist() == [1, 2, 3, 4, 5]
    assert visible_keys(5, 3, torch.device("cpu")).tolist() == [1, 2, 3, 3, 3]
    assert factors(Temperature.logn, 3 * CONTEXT, window=CONTEXT).max() == 1
    encoding = make("none", Policies(temperature=Temperature.logn)).encoding
    encoding.extend(StreamingConfig(sinks=4, window=2 * CONTEXT - 8))
    hooks = encoding.hooks(torch.zeros(1, 99, SIZE.width), torch.arange(99), 0)
    expected = math.log(2 * CONTEXT - 4) / math.log(CONTEXT)  # sinks are seen, too
    assert torch.as_tensor(hooks.temperature)[-1].item() == pytest.approx(expected)


def test_a_text_no_longer_than_training_is_not_stretched() -> None:
    assert [stretch(length, 8) for length in (1, 8, 16)] == [1, 1, 2]
    assert logn(torch.tensor([1.0, 8.0, 64.0]), 8).tolist() == pytest.approx([1, 1, 2])


@torch.no_grad()
def test_a_temperature_scales_scores_before_any_bias() -> None:
    """Scores of zero feel none: on them a bias by distance alone decides."""
    hooks = make("alibi", Policies(temperature=Temperature.drope)).encoding.hooks(
        torch.zeros(1, 50, SIZE.width), torch.arange(50), 0
    )
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 2, 50, 12, generator=generator) for _ in range(2))
    nothing = torch.zeros_like(k)
    plain = hooks._replace(temperature=1.0)
    assert torch.equal(attend(nothing, k, v, hooks), attend(nothing, k, v, plain))
    q = torch.randn(1, 2, 50, 12, generator=generator)
    scaled = attend(q * hooks.temperature[:, None], k, v, plain)  # type: ignore[index]
    torch.testing.assert_close(attend(q, k, v, hooks), scaled, rtol=0, atol=1e-6)


# ---------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_corpus(tmp_path_factory.mktemp("corpus"))


class Killed(BaseException):
    """Ends a run at once."""


def test_a_run_with_policies_goes_on_bit_exactly(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws and the drop depend on the step alone; stopped after the drop and gone on with."""
    settings = replace(
        tiny.small(corpus, "t5", checkpoint_every=8),
        positions=Positions.randomized,
        temperature=Temperature.ssmax,
        drop_at=0.6,
    )
    run_training(settings, tmp_path / "straight", [])
    original = Trainer._advance

    def advance(self: Trainer) -> Any:
        if self.step == 17:
            raise Killed
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_advance", advance)
        with pytest.raises(Killed):
            run_training(settings, tmp_path / "halves", [])
    run_training(settings, tmp_path / "halves", [])
    tiny.assert_same_run(tmp_path / "straight", tmp_path / "halves")


def test_another_temperature_at_evaluation_is_a_variant(corpus: Path, tmp_path: Path) -> None:
    run_training(tiny.small(corpus, "none", lr=1e-2), tmp_path / "run", [])
    config = EvalConfig(max_targets=64, ratios=[1.0, 2.0])
    rows = {}
    for temperature in (None, Temperature.none, Temperature.drope):
        settings = EvalSettings(eval=replace(config, temperature=temperature))
        found = evaluate(tmp_path / "run", settings)
        controlled = [row for row in found.rows if row.protocol == "controlled"]
        assert {row.variant for row in controlled} == {
            "" if temperature is None else f"temperature={temperature}"
        }
        rows[temperature] = [row.nll for row in controlled]
    assert rows[None] == rows[Temperature.none]
    assert rows[Temperature.drope][0] == rows[None][0]  # at 1x
    assert rows[Temperature.drope][1] != rows[None][1]


def test_a_trained_temperature_is_not_replaced(corpus: Path, tmp_path: Path) -> None:
    settings = replace(tiny.small(corpus, "rope"), temperature=Temperature.ssmax)
    run_training(settings, tmp_path / "run", [])
    again = EvalSettings(eval=EvalConfig(max_targets=64, temperature=Temperature.logn))
    with pytest.raises(UserError, match="ssmax"):
        evaluate(tmp_path / "run", again)


def test_rows_carry_the_name_of_the_scheme(corpus: Path, tmp_path: Path) -> None:
    run_training(replace(tiny.small(corpus, "alibi"), window=5), tmp_path / "run", [])
    found = evaluate(tmp_path / "run", EvalSettings(eval=EvalConfig(max_targets=64)))
    assert {row.encoding for row in found.rows} == {"alibi+window5"}
    assert {row.status for row in found.rows} == {Status.ok}


# ---------------------------------------------------------------- names and presets


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("context", [64, 100])
def test_a_preset_on_the_command_line_is_the_preset_of_the_table(name: str, context: int) -> None:
    settings: Any = configure("train", f"encoding={name}", f"context={context}")
    assert settings.encoding == ENCODINGS[PRESETS[name].encoding]()
    assert policies_of(settings) == PRESETS[name].at(context)
    assert scheme(settings.encoding.name, policies_of(settings), context) == name


def test_other_policies_are_told_apart_by_name() -> None:
    everything = Policies("every4th", 7, Positions.pose, 99, 0.25, Temperature.logn)
    assert scheme("alibi", everything, 32) == "alibi+every4th+window7+pose99+drop0.25+logn"
    assert scheme("rope", Policies(), 32) == "rope"
    assert scheme("rope", Policies(window=32), 32) == "swa"
    assert scheme("rope", Policies(window=32), 64) == "rope+window32"
    assert scheme("rope", replace(RANDOMIZED, max_position=99), 32) == "rope+randomized99"


def test_a_preset_gives_way_to_what_is_typed() -> None:
    settings: Any = configure("train", "encoding=swan", "layers=all", "context=64")
    assert policies_of(settings) == Policies(window=32)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["layers=some"], r"layers=some must be all, or everyNth as in layers=every4th"),
        (["layers=every1st"], r"layers=every1st must be all, or everyNth"),
        (["layers=every3rd"], r"layers=every3rd does not divide model.layers=4 .* layers=every2nd"),
        (["layers=every4th", "model.layers=9"], r"does not divide .* Try layers=every3rd"),
        (["layers=every2nd", "encoding=sinusoidal"], r"changes nothing: encoding=sinusoidal does"),
        (["window=0"], r"window=0 is too small; the least is 1"),
        (["max_position=999"], r"max_position=999 goes with positions=randomized or pose"),
        (["positions=pose", "max_position=128"], r"must be greater than context=128"),
        (["positions=randomized", "encoding=fox"], r"encoding=fox does not read the numbers"),
        (["positions=pose", "encoding=xpos", "max_position=99999"], r"scales overflow beyond"),
        (["drop_at=0.5", "encoding=none"], r"encoding=none leaves nothing to drop"),
        (["drop_at=0"], r"drop_at=0.0 of train.steps=500 leaves no step before the drop"),
        (["drop_at=0.9", "train.steps=5"], r"leaves no step after the drop"),
        (["temperature=hot"], r"temperature"),
    ],
)
def test_what_cannot_be_meant_is_one_line(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        configure("train", *words)
    assert "\n" not in str(error.value)


def test_ssmax_at_evaluation_is_refused() -> None:
    with pytest.raises(UserError, match=r"eval.temperature=ssmax has weights"):
        configure("eval-extrapolate", "eval.temperature=ssmax")


def test_without_policies_nothing_is_wrapped() -> None:
    model = make("none", Policies())
    assert type(model.encoding) is Encoding
    assert copy.deepcopy(model).state_dict().keys() == model.state_dict().keys()
