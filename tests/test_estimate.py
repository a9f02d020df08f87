"""What a run would cost: counts are the model's own, memory grows as it must, nothing is left."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch.utils.flop_counter import FlopCounterMode

from posbench import configure, costs
from posbench.attention import Kernel
from posbench.cli import main
from posbench.config import EvalConfig, TrainSettings
from posbench.config.encodings import ENCODINGS
from posbench.config.policies import policies_of
from posbench.costs import Growth, anatomy, run_bytes
from posbench.jobs import calibrating, estimating
from posbench.jobs.estimating import makespan
from posbench.jobs.train import run_training
from posbench.model import GPT, build_model, token_losses
from posbench.plan import plan, planned_tokens

VOCABULARY = 61


def model_of(settings: TrainSettings) -> GPT:
    return build_model(
        settings.model, settings.encoding, settings.context, VOCABULARY, 0, policies_of(settings)
    )


@pytest.mark.parametrize("name", ENCODINGS)
def test_parameters_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    settings = tiny.small(tmp_path, name)
    model, found = model_of(settings), anatomy(settings, VOCABULARY)
    assert found.parameters == sum(each.numel() for each in model.parameters())
    assert found.encoding_parameters == model.encoding.parameter_count()
    blocks = sum(each.numel() for each in (*model.blocks.parameters(), *model.norm.parameters()))
    assert found.non_embedding_parameters == blocks


def test_an_untied_head_is_an_embedding_too(tmp_path: Path) -> None:
    settings = tiny.small(tmp_path, "none", tied=False)
    found = anatomy(settings, VOCABULARY)
    assert found.embedding_parameters == 2 * VOCABULARY * settings.model.width


def test_operations_are_those_that_torch_counts(tmp_path: Path) -> None:
    """Norms, softmax and the like are no matrix products: within 1 %."""
    settings = tiny.small(tmp_path, "none", width=64, layers=3, context=48)
    model, found = model_of(settings), anatomy(settings, VOCABULARY)
    model.use_kernel(Kernel.dense)  # the formula counts the square of attention whole
    tokens = torch.zeros(2, 48, dtype=torch.long)
    with FlopCounterMode(display=False) as forward:
        logits = model(tokens)
    with FlopCounterMode(display=False) as backward:
        token_losses(logits, tokens).sum().backward()
    per_token = (forward.get_total_flops() + backward.get_total_flops()) / tokens.numel()
    assert found.training_flops_per_token == pytest.approx(per_token, rel=0.01)
    assert found.forward_flops_per_token(48, 48) == pytest.approx(
        forward.get_total_flops() / tokens.numel(), rel=0.01
    )
    tokens = torch.zeros(2, 96, dtype=torch.long)
    with FlopCounterMode(display=False) as longer:
        model(tokens)
    assert found.forward_flops_per_token(48, 96) == pytest.approx(
        longer.get_total_flops() / tokens.numel(), rel=0.01
    )


@pytest.mark.parametrize("name", ["rope", "t5", "fire", "fox"])
def test_memory_never_falls_with_size(name: str, tmp_path: Path) -> None:
    settings = tiny.small(tmp_path, name, layers=2, context=64)
    found = anatomy(settings, VOCABULARY)
    for grows in (found.training_bytes, found.evaluation_bytes):
        assert grows(1, 64) < grows(2, 64) < grows(2, 128) < grows(2, 1024)
    deeper = anatomy(tiny.small(tmp_path, name, layers=6, context=64), VOCABULARY)
    assert deeper.training_bytes(2, 64) > found.training_bytes(2, 64)
    assert found.training_bytes(2, 64) > found.evaluation_bytes(2, 64)


def test_memory_of_pairs_is_counted_where_attention_keeps_them(tmp_path: Path) -> None:
    """As many tokens in fewer, longer texts: the fused kernel needs no more, kept scores do."""

    def ratio(name: str) -> float:
        kept = anatomy(tiny.small(tmp_path, name, context=64), VOCABULARY).kept
        return kept.bytes(2, 2048) / kept.bytes(32, 128)

    assert ratio("rope") == pytest.approx(1, abs=0.05)
    assert ratio("alibi") == pytest.approx(1, abs=0.05)
    assert ratio("t5") > 2  # a trained table: its gradient goes through the scores
    assert ratio("fox") > 2


def test_a_layer_more_adds_what_the_second_added() -> None:
    one, two = Growth(10, 1, 0, 3), Growth(16, 1.5, 2, 2)
    assert one.carried_on(two, 1) == one
    assert one.carried_on(two, 5) == Growth(34, 3, 8, 3)  # nothing is taken away


def test_a_run_needs_no_more_disk_than_was_said(tmp_path: Path) -> None:
    corpus = tiny.write_corpus(tmp_path / "corpus")
    settings = tiny.small(corpus, "t5", checkpoint_every=5)
    run_training(settings, tmp_path / "run", [])
    used = sum(each.stat().st_size for each in (tmp_path / "run").rglob("*") if each.is_file())
    said = run_bytes(anatomy(settings, 256), settings)
    assert used <= said <= 3 * used


def test_jobs_are_done_as_places_fall_free() -> None:
    assert makespan([3, 1, 1, 1], 2) == 3
    assert makespan([1, 1, 3], 2) == 4
    assert makespan([2, 2], 1) == 4
    assert makespan([2, None], 1) is None


def test_tokens_of_an_evaluation_are_those_of_a_plan_on_long_documents() -> None:
    settings, config = configure("train", "context=32"), EvalConfig(max_targets=2048)
    assert isinstance(settings, TrainSettings)
    text = calibrating._random_text(1500, 256, 40)
    tokens = calibrating.evaluation_tokens(settings, config, "cpu")
    assert set(tokens) == {32, 64, 128}
    # At 1x: windows of 32 for 16 targets each, and blocks of 32 over as many targets once more.
    assert tokens[32] == pytest.approx(2048 / 16 * 32 + 2048, rel=0.1)
    expected = planned_tokens(plan(text, 32, config, "cpu"), config)
    assert sum(tokens.values()) == pytest.approx(expected, rel=0.1)


# ---------------------------------------------------------------- the command

SMALL = ["model.layers=1", "model.width=32", "model.heads=2", "context=32", "device=cpu"]


def estimate(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["estimate", "format=json", *SMALL, *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)  # nothing else on stdout
    return found


def test_a_sweep_is_estimated_whole_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibrating, "MOST_TIMES", 1)
    sweep = ["-m", "encoding=rope,learned", "seed=0,1", "hydra.sweep.dir=x"]
    found = estimate(capsys, *sweep, "hydra.launcher.jobs=2", "train.steps=7")
    assert list(tmp_path.iterdir()) == []
    jobs, total = found["jobs"], found["total"]
    assert [(job["encoding"], job["seed"]) for job in jobs] == [
        ("rope", 0), ("rope", 1), ("learned", 0), ("learned", 1),
    ]  # fmt: skip
    assert {key: jobs[0][key] for key in ("steps", "tokens", "encoding_parameters")} == {
        "steps": 7, "tokens": 7 * 16 * 32, "encoding_parameters": 0,
    }  # fmt: skip
    assert jobs[2]["encoding_parameters"] == 32 * 32
    assert jobs[0]["training_seconds"] == jobs[1]["training_seconds"] > 0  # timed once
    seconds = [job["training_seconds"] for job in jobs]
    assert total["training_seconds"] == pytest.approx(makespan(seconds, 2))
    assert total["flops"] == sum(job["flops"] for job in jobs)
    assert total["misfits"] == []


def test_another_launcher_runs_nothing_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = estimate(
        capsys, "-m", "seed=0,1", "hydra/launcher=basic", "calibrate=false", "device=cpu"
    )
    assert found["total"]["jobs"] == 2
    assert list(tmp_path.iterdir()) == []


def test_jobs_on_each_gpu_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    words = ["-m", "seed=0,1,2,3,4,5", "calibrate=false", "device=auto"]
    assert estimate(capsys, *words, "hydra.launcher.jobs_per_gpu=2")["total"]["at_a_time"] == 4


def test_the_file_cache_of_a_container_is_free(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 500\nactive_file 100\n")
    assert costs._container_room(tmp_path) == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert costs._container_room(tmp_path) > 1 << 60


def test_without_a_calibration_there_are_counts_but_no_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = estimate(capsys, "calibrate=false", "hydra.run.dir=y", "ratios=[1,8]")
    assert list(tmp_path.iterdir()) == []
    (job,) = found["jobs"]
    assert job["training_seconds"] is None
    assert set(job["evaluation_bytes"]) == {"1x", "8x"}
    assert main(["estimate", "calibrate=false", *SMALL]) == 0
    shown = capsys.readouterr().out
    assert f"{job['parameters']:,}" in shown
    assert "not measured" in shown


def test_what_does_not_fit_is_told_and_not_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(estimating, "free_memory", lambda device: 420 << 20)
    words = ["-m", "train.batch_size=1,4096", "hydra.launcher.jobs=1"]
    found = estimate(capsys, *words, "calibrate=false")
    assert [bool(job["misfit"]) for job in found["jobs"]] == [False, True]
    (told,) = found["total"]["misfits"]
    assert told.startswith("job 1 (rope): training needs")
    assert "train.micro_batch=2048" in told


def test_only_what_decides_the_model_is_looked_at_again() -> None:
    settings = configure("train", *SMALL)
    assert isinstance(settings, TrainSettings)
    key = estimating._model_key(settings)
    assert estimating._model_key(replace(settings, seed=5)) == key
    longer = replace(settings, train=replace(settings.train, steps=9999))
    assert estimating._model_key(longer) == key
    assert estimating._model_key(replace(settings, context=64)) != key


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["ratios=[0]"], "ratios holds 0"),
        (["calibrate=perhaps"], "calibrate must be true or false"),
        (["eval.ratios=[1]"], "eval-extrapolate"),
        (["seed=0,1"], "-m"),
        (["-m", "seed=0,1", "hydra.launcher.jobs=0"], "hydra.launcher.jobs=0"),
        (["-m", "model.heads=2,3"], "job 1 (model.heads=3)"),
    ],
)
def test_a_mistake_is_one_line(
    typed: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["estimate", *typed]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert expected in said.err
    assert list(tmp_path.iterdir()) == []
