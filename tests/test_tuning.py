"""Tuning at the longer length: of a copy, on training text, repeatable, and told in full."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from posbench import training
from posbench.config import Beyond, EvalConfig, EvalSettings, Protocol
from posbench.config.encodings import ENCODINGS
from posbench.config.extensions import (
    EXTENSIONS,
    AbfConfig,
    DynamicNtkConfig,
    ExtensionConfig,
    NoExtensionConfig,
    PiConfig,
    ReropeConfig,
    StreamingConfig,
    YarnConfig,
)
from posbench.config.policies import Positions, Temperature
from posbench.data import Batches, Dataset, prepare, prepare_with
from posbench.errors import UserError
from posbench.jobs.adapting import NotAdaptedError, adapt
from posbench.jobs.evaluate import evaluate, run_evaluation
from posbench.jobs.measuring import variant_of
from posbench.jobs.train import run_training
from posbench.model import GPT, build_model
from posbench.report.lines import labels_of, subjects_of
from posbench.results import Evaluation, Status, read_results
from posbench.rules import check
from posbench.runs import Run, load_run
from posbench.runtime import Runtime
from posbench.training import Trainer

CPU = Runtime(torch.device("cpu"), torch.float32)
LONGEST = 4 * tiny.CONTEXT
RATE = 3e-3  # train.lr of the runs here


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tuning")
    for name in ("rope", "alibi", "learned"):
        run_training(tiny.small(corpus, name, dropout=0.1), folder / name, [])
    return {name: folder / name for name in ("rope", "alibi", "learned")}


def asked(
    extension: ExtensionConfig, runs: list[Path] | None = None, **config: Any
) -> EvalSettings:
    values: dict[str, Any] = {"max_targets": 256, "bootstrap": 100}
    return EvalSettings(
        runs=[str(run) for run in runs or []],
        eval=EvalConfig(**values | config),
        extension=extension,
        threads=1,
    )


def measured(
    runs: list[Path], extension: ExtensionConfig, folder: Path | None = None, **config: Any
) -> Evaluation:
    return evaluate(None, asked(extension, runs, **config), folder)


def numbers(evaluation: Evaluation) -> list[dict[str, Any]]:
    """All that rows say but for what a clock or a memory meter reads."""
    rows = [dataclasses.asdict(row) for row in evaluation.rows]
    for row in rows:
        for key in ("seconds", "tokens_per_s", "peak_mem_mb"):
            del row[key]
    return rows


def statuses(evaluation: Evaluation) -> set[Status]:
    return {row.status for row in evaluation.rows}


def reason(evaluation: Evaluation) -> str:
    (only,) = {row.reason for row in evaluation.rows}
    return only


def tuned(
    run: Run,
    dataset: Any,
    extension: ExtensionConfig,
    beyond: Beyond = Beyond.error,
    model: GPT | None = None,
    **config: Any,
) -> tuple[GPT, dict[str, Any]]:
    """The tuned model, and what tuning says it did."""
    model = model or run.model()
    model.encoding.go_beyond(beyond)
    done: dict[str, Any] = {}
    adapt(model, run, dataset, asked(extension, **config), CPU, lambda *_: None, done)
    return model, done["tuning"]


def dataset_of(run: Run) -> Dataset:
    return prepare_with(run.settings.data, run.tokenizer_json())


# ---------------------------------------------------------------- a copy, the same each time


def test_the_run_stays_as_it_is(runs: dict[str, Path]) -> None:
    def content() -> dict[Path, bytes]:
        return {
            path: path.read_bytes() for path in sorted(runs["rope"].rglob("*")) if path.is_file()
        }

    before = content()
    run = load_run(runs["rope"])
    model, _ = tuned(run, dataset_of(run), PiConfig(finetune_steps=3))
    assert content() == before
    old, new = dict(run.model().named_parameters()), dict(model.named_parameters())
    assert old.keys() == new.keys()
    for name in old:
        assert not torch.equal(old[name], new[name]), name
        assert new[name].grad is None
    assert not model.training


@pytest.mark.parametrize("name", ["rope", "alibi"])
def test_the_same_command_gives_the_same_numbers(runs: dict[str, Path], name: str) -> None:
    """With dropout, and in any state of torch's own generator."""
    extension = NoExtensionConfig(finetune_steps=3)
    one = measured([runs[name]], extension)
    torch.manual_seed(99)
    two = measured([runs[name]], extension)
    assert numbers(one) == numbers(two)
    assert statuses(one) == {Status.ok}
    assert {row.variant for row in one.rows} == {"finetune_steps=3"}
    assert {each.variant for each in one.documents} == {"finetune_steps=3"}


def test_no_steps_are_exactly_the_untuned_model(runs: dict[str, Path]) -> None:
    plain = measured([runs["rope"]], PiConfig())
    none = measured([runs["rope"]], PiConfig(finetune_steps=0, finetune_lr=1.0))
    assert numbers(plain) == numbers(none)
    assert {row.variant for row in none.rows} == {""}
    assert "adaptations" not in none.runs[0]
    some = measured([runs["rope"]], PiConfig(finetune_steps=1))
    for before, after in zip(plain.rows, some.rows, strict=True):
        if before.nll is None:
            continue  # derived
        assert before.nll != after.nll


@pytest.mark.parametrize("name", ENCODINGS)
def test_every_encoding_can_be_tuned(corpus: Path, tmp_path: Path, name: str) -> None:
    settings = tiny.small(corpus, name)
    dataset = prepare(settings.data, settings.tokenizer)
    model = build_model(
        settings.model, settings.encoding, tiny.CONTEXT, dataset.tokenizer.vocabulary, 0
    )
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    run = Run(tmp_path, {"run_id": name}, settings)
    extension = NoExtensionConfig(finetune_steps=2)
    if model.encoding.max_length is not None and model.encoding.max_length < LONGEST:
        with pytest.raises(NotAdaptedError, match=f"needs {LONGEST} positions") as refused:
            tuned(run, dataset, extension, model=model)
        assert refused.value.status is Status.unsupported
        return
    _, record = tuned(run, dataset, extension, model=model)
    assert np.isfinite([record["first_loss"], record["last_loss"]]).all()
    for key, value in model.named_parameters():
        assert value.isfinite().all()
        assert not torch.equal(value, before[key]), key


# ---------------------------------------------------------------- what is tuned on


@pytest.mark.parametrize(
    ("extension", "ratios", "length"),
    [
        (NoExtensionConfig(), [1.0, 2.0, 4.0], LONGEST),
        (NoExtensionConfig(), [2.0, 1.0], 2 * tiny.CONTEXT),
        (NoExtensionConfig(), [0.5], tiny.CONTEXT),
        (AbfConfig(), [1.0, 4.0], LONGEST),
        (ReropeConfig(), [1.0, 4.0], LONGEST),
        (DynamicNtkConfig(factor=3.0), [1.0, 2.0], 2 * tiny.CONTEXT),
        (PiConfig(), [1.0, 2.0], 2 * tiny.CONTEXT),
        (PiConfig(factor=4.0), [1.0, 2.0], LONGEST),
        (YarnConfig(factor=1.5), [1.0, 4.0], 24),
    ],
    ids=str,
)
def test_the_length_and_the_tokens_of_a_step(
    runs: dict[str, Path], extension: ExtensionConfig, ratios: list[float], length: int
) -> None:
    """Four sequences of 16 tokens in training: as many tokens a step, in whole sequences."""
    run = load_run(runs["rope"])
    steps = dataclasses.replace(extension, finetune_steps=2)
    _, record = tuned(run, dataset_of(run), steps, ratios=ratios)
    sequences = {16: 4, 24: 2, 32: 2, 64: 1}[length]
    assert (record["length"], record["batch_size"]) == (length, sequences)
    assert record["tokens"] == 2 * sequences * length


def test_a_longer_text_than_a_step_is_still_one_sequence(runs: dict[str, Path]) -> None:
    run = load_run(runs["rope"])
    _, record = tuned(run, dataset_of(run), PiConfig(finetune_steps=1, factor=8.0))
    assert (record["length"], record["batch_size"], record["tokens"]) == (128, 1, 128)


class Forbidden:
    """A split that must not be looked at."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} of a forbidden split was read")


def test_only_training_documents_are_read(runs: dict[str, Path]) -> None:
    run = load_run(runs["rope"])
    dataset = dataset_of(run)
    extension = NoExtensionConfig(finetune_steps=3)
    expected, _ = tuned(run, dataset, extension)
    kept = dataclasses.replace(dataset, validation=Forbidden(), test=Forbidden())  # type: ignore[arg-type]
    model, _ = tuned(run, kept, extension)
    assert tiny.digest(model.state_dict()) == tiny.digest(expected.state_dict())
    with pytest.raises(AssertionError, match="forbidden split was read"):
        tuned(run, dataclasses.replace(kept, train=Forbidden()), extension)  # type: ignore[arg-type]


def test_no_window_of_training_comes_again(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the lengths agree; and each run's seed gives its own."""
    seen: list[tuple[int, list[int]]] = []
    original = Batches.starts

    def starts(self: Batches, step: int) -> Any:
        found = original(self, step)
        seen.append((self.context, found.tolist()))
        return found

    monkeypatch.setattr(Batches, "starts", starts)
    run = load_run(runs["rope"])
    dataset = dataset_of(run)
    tuned(run, dataset, NoExtensionConfig(finetune_steps=5), ratios=[1.0])
    tuning = [each for _, each in seen]
    assert [context for context, _ in seen] == [tiny.CONTEXT] * 5
    batches = Batches(dataset.train, tiny.CONTEXT, 4, run.settings.seed)
    trained = [original(batches, step).tolist() for step in range(tiny.STEPS)]
    assert not any(each in trained for each in tuning)
    seen.clear()
    other = Run(run.folder, run.manifest, dataclasses.replace(run.settings, seed=1))
    tuned(other, dataset, NoExtensionConfig(finetune_steps=5), model=run.model(), ratios=[1.0])
    assert [each for _, each in seen] != tuning


def test_the_rate_is_small_and_constant_after_warming_up(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float] = []
    original = Trainer.run

    def recorded(self: Trainer) -> Iterator[training.Step]:
        for step in original(self):
            rates.append(step.lr)
            yield step

    monkeypatch.setattr(Trainer, "run", recorded)
    run = load_run(runs["rope"])
    dataset = dataset_of(run)
    _, record = tuned(run, dataset, NoExtensionConfig(finetune_steps=40), ratios=[1.0])
    full = 0.1 * RATE
    assert rates == pytest.approx([full / 4, full / 2, 3 * full / 4] + [full] * 37, rel=1e-12)
    assert record["lr"] == pytest.approx(full)
    rates.clear()
    tuned(run, dataset, NoExtensionConfig(finetune_steps=300, finetune_lr=1e-4), ratios=[1.0])
    assert rates[:20] == pytest.approx([1e-4 * (n + 1) / 20 for n in range(20)], rel=1e-12)
    assert set(rates[20:]) == {1e-4}


def test_one_scale_for_every_length(runs: dict[str, Path]) -> None:
    """A model tuned under PI keeps its scale at 1x; dynamic NTK goes on following the text."""
    run = load_run(runs["rope"])
    dataset = dataset_of(run)
    plain = run.model().encoding.describe(16)["inverse_frequencies"]
    model, record = tuned(run, dataset, PiConfig(finetune_steps=1))
    assert record["settings"]["factor"] == 4.0
    assert model.encoding.prefix_consistent
    for length in (16, 32, 64):
        found = model.encoding.describe(length)["inverse_frequencies"]
        assert torch.equal(found, plain / 4)
    model, _ = tuned(run, dataset, DynamicNtkConfig(finetune_steps=1))
    assert not model.encoding.prefix_consistent
    assert torch.equal(model.encoding.describe(16)["inverse_frequencies"], plain)


@pytest.mark.parametrize("name", EXTENSIONS)
def test_every_extension_can_be_tuned(runs: dict[str, Path], name: str) -> None:
    needed: dict[str, Any] = {"longrope": {"factors": [2.0] * 8}}
    extension = EXTENSIONS[name](finetune_steps=2, **needed.get(name, {}))
    able = next(key for key in ("rope", "alibi") if ENCODINGS[key]().takes(extension))
    evaluation = measured([runs[able]], extension, protocols=[Protocol.controlled])
    assert statuses(evaluation) == {Status.ok}
    (record,) = evaluation.runs[0]["adaptations"]
    assert record["extension"] == name
    assert record["tuning"]["steps"] == 2


def test_tuning_helps_where_interpolation_alone_hurts(corpus: Path, tmp_path: Path) -> None:
    """PI after tuning against PI alone, and against the model as trained, at the length tuned."""
    settings = tiny.small(corpus, steps=400, batch_size=16)
    run_training(settings, tmp_path / "run", [])
    at_4x = {"protocols": [Protocol.controlled], "ratios": [4.0], "max_targets": 2048}
    plain, alone, after = (
        measured([tmp_path / "run"], extension, **at_4x).rows[0].nll
        for extension in (NoExtensionConfig(), PiConfig(), PiConfig(finetune_steps=100))
    )
    assert plain is not None
    assert alone is not None
    assert after is not None
    assert after < 0.7 * min(plain, alone)


# ---------------------------------------------------------------- what goes wrong


def test_divergence_is_a_status(runs: dict[str, Path], tmp_path: Path) -> None:
    extension = NoExtensionConfig(finetune_steps=20, finetune_lr=1e30)
    evaluation = measured([runs["rope"]], extension, tmp_path)
    assert statuses(evaluation) == {Status.nonfinite}
    assert {row.ppl for row in evaluation.rows} == {float("inf")}
    assert "diverged at step" in reason(evaluation)
    assert "extension.finetune_lr than 1e+30" in reason(evaluation)
    assert statuses(read_results(tmp_path)) == {Status.nonfinite}


def test_a_run_that_diverges_does_not_stop_the_others(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Trainer._gradients

    def gradients(self: Trainer, step: int) -> Any:
        loss = original(self, step)
        return loss * float("nan") if self.settings.encoding.name == "rope" else loss

    monkeypatch.setattr(Trainer, "_gradients", gradients)
    evaluation = measured([runs["rope"], runs["alibi"]], NoExtensionConfig(finetune_steps=2))
    found = {(row.encoding, row.status) for row in evaluation.rows}
    assert found == {("rope", Status.nonfinite), ("alibi", Status.ok)}


def test_too_little_memory_is_a_status(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(training, "token_losses", full)
    evaluation = measured([runs["rope"]], NoExtensionConfig(finetune_steps=2))
    assert statuses(evaluation) == {Status.oom}
    assert reason(evaluation) == "one tuning step of 1 x 64 tokens does not fit"


def test_short_training_documents_are_told(runs: dict[str, Path]) -> None:
    extension = PiConfig(finetune_steps=2, factor=64.0)
    evaluation = measured([runs["rope"]], extension)
    assert statuses(evaluation) == {Status.not_enough_data}
    wanted = "extension.finetune_steps=2 needs a training document of 1025 tokens; the longest of"
    assert reason(evaluation).startswith(wanted)


def test_settings_of_an_extension_are_told_apart() -> None:
    """Rows of two factors must not pass for two seeds."""
    variants = {
        variant_of(EvalSettings(extension=extension))
        for extension in (PiConfig(), PiConfig(factor=2.0), PiConfig(factor=4.0))
    }
    assert variants == {"", "factor=2", "factor=4"}
    streaming = StreamingConfig(sinks=0, window=9, finetune_steps=3)
    assert variant_of(EvalSettings(extension=streaming)) == "sinks=0 window=9 finetune_steps=3"


def test_a_table_that_ends_is_tuned_as_a_variant(runs: dict[str, Path]) -> None:
    extension = NoExtensionConfig(finetune_steps=2)
    refused = measured([runs["learned"]], extension)
    assert statuses(refused) == {Status.unsupported}
    assert reason(refused).endswith("needs 64 positions; learned ends after 16")
    evaluation = measured([runs["learned"]], extension, beyond=Beyond.interpolate)
    assert statuses(evaluation) == {Status.ok}
    assert {row.variant for row in evaluation.rows} == {"beyond=interpolate finetune_steps=2"}
    untuned = measured([runs["learned"]], NoExtensionConfig(), beyond=Beyond.interpolate)
    losses = [{row.nll for row in each.rows if row.nll} for each in (untuned, evaluation)]
    assert losses[0].isdisjoint(losses[1])


@pytest.mark.parametrize("encoding", ["alibi", "rope"])
@pytest.mark.parametrize("positions", [Positions.randomized, Positions.pose])
def test_drawn_positions_end_where_tuning_begins(
    corpus: Path, tmp_path: Path, encoding: str, positions: Positions
) -> None:
    """Trained below position 32 and tuned on 64 tokens: they are numbered as they are measured."""
    settings = tiny.small(corpus, encoding, positions=positions, max_position=32, steps=5)
    run_training(settings, tmp_path / "run", [])
    run = load_run(tmp_path / "run")
    seen: list[list[int]] = []

    model = run.model()
    original = model.encoding.hooks

    def hooks(x: torch.Tensor, positions: torch.Tensor, layer: int) -> Any:
        seen.append(positions.tolist())
        return original(x, positions, layer)

    model.encoding.hooks = hooks  # type: ignore[method-assign]
    tuned(run, dataset_of(run), NoExtensionConfig(finetune_steps=2), model=model)
    assert seen == [list(range(LONGEST))] * 2


def test_a_dropped_encoding_stays_dropped(corpus: Path, tmp_path: Path) -> None:
    """Tuned as NoPE: positions make no difference to any gradient."""
    run_training(tiny.small(corpus, "rope", drop_at=0.5), tmp_path / "run", [])
    run = load_run(tmp_path / "run")
    extension = NoExtensionConfig(finetune_steps=3)
    model, _ = tuned(run, dataset_of(run), extension)
    bare = dataclasses.replace(run.settings, encoding=ENCODINGS["none"](), drop_at=None)
    nope = build_model(bare.model, bare.encoding, bare.context, model.vocabulary, 0)
    nope.load_state_dict(run.model().state_dict())
    tuned(Run(run.folder, run.manifest, bare), dataset_of(run), extension, model=nope)
    assert tiny.digest(nope.state_dict()) == tiny.digest(model.state_dict())


def test_another_temperature_is_tuned_too(runs: dict[str, Path]) -> None:
    extension = PiConfig(finetune_steps=2)
    evaluation = measured([runs["rope"]], extension, temperature=Temperature.logn)
    assert statuses(evaluation) == {Status.ok}
    assert {row.variant for row in evaluation.rows} == {"temperature=logn finetune_steps=2"}
    losses = [
        each.runs[0]["adaptations"][0]["tuning"]["first_loss"]
        for each in (evaluation, measured([runs["rope"]], extension))
    ]
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"finetune_steps": -1}, "extension.finetune_steps=-1 is too small; the least is 0"),
        ({"finetune_steps": 5, "finetune_lr": 0.0}, "extension.finetune_lr=0.0 changes nothing"),
        ({"finetune_steps": 5, "finetune_lr": -1.0}, "extension.finetune_lr=-1.0 is too small"),
        ({"finetune_lr": float("nan")}, "extension.finetune_lr=nan is not a finite number"),
    ],
)
def test_bad_settings(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check(EvalSettings(extension=PiConfig(**values)))


# ---------------------------------------------------------------- what is told


def test_what_was_spent_is_told(runs: dict[str, Path], tmp_path: Path) -> None:
    extension = PiConfig(finetune_steps=3, finetune_lr=1e-3)
    measured([runs["rope"]], extension, tmp_path)
    evaluation = read_results(tmp_path)
    assert {row.variant for row in evaluation.rows} == {"finetune_steps=3 finetune_lr=0.001"}
    (record,) = evaluation.runs[0]["adaptations"]
    assert (record["extension"], record["variant"]) == ("pi", evaluation.rows[0].variant)
    tuning = record["tuning"]
    assert tuning["seconds"] > 0
    assert {key: tuning[key] for key in ("steps", "length", "lr", "tokens")} == {
        "steps": 3,
        "length": LONGEST,
        "lr": 1e-3,
        "tokens": 3 * LONGEST,
    }
    for name in ("report.md", "report.html"):
        text = (tmp_path / name).read_text()
        assert "What search and tuning spent" in text
        assert "3 steps" in text
        assert "learning rate 0.001" in text
    measured([runs["rope"]], PiConfig(), tmp_path)
    assert "search and tuning" not in (tmp_path / "report.html").read_text()


def test_a_sweep_keeps_what_each_of_its_jobs_did(runs: dict[str, Path], tmp_path: Path) -> None:
    merged = Evaluation()
    for steps in (0, 1, 2):
        measured([runs["rope"]], PiConfig(finetune_steps=steps), tmp_path / str(steps))
        merged = merged.merged(read_results(tmp_path / str(steps)))
    (run,) = merged.runs
    assert [each["tuning"]["steps"] for each in run["adaptations"]] == [1, 2]
    labels = set(labels_of(subjects_of(merged).values(), merged).values())
    assert labels == {"rope + pi", "rope + pi (finetune_steps=1)", "rope + pi (finetune_steps=2)"}


def test_a_folder_knows_which_tuning_it_holds(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = asked(PiConfig(finetune_steps=1), [runs["rope"]])
    run_evaluation(settings, tmp_path / "eval", [])
    capsys.readouterr()
    run_evaluation(settings, tmp_path / "eval", [])
    assert "complete:" in capsys.readouterr().out
    for changed in (PiConfig(), PiConfig(finetune_steps=1, finetune_lr=1e-3)):
        with pytest.raises(UserError, match=r"extension\.finetune_\w+=.* there, .* here"):
            run_evaluation(asked(changed, [runs["rope"]]), tmp_path / "eval", [])


def test_steps_are_seen(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("posbench.progress.PLAIN_SECONDS", 0.0)
    measured([runs["rope"]], NoExtensionConfig(finetune_steps=2))
    shown = capsys.readouterr().err
    assert "rope tuning 1/2, loss" in shown
    assert "rope tuning 2/2, loss" in shown
    assert not shown.splitlines()[-1].endswith("rope tuning 2/2")
