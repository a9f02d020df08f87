"""The training loop: schedules, gradients, the optimizer, and what stops it."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

from posbench.config import Device, Norm, Precision, Schedule, Switch, TrainConfig, TrainSettings
from posbench.data import Batches, Dataset, prepare
from posbench.encodings import CLASSES
from posbench.errors import DivergedError, Exit, OutOfMemoryError, UserError
from posbench.jobs.train import run_training
from posbench.model import token_losses
from posbench.runtime import Runtime, is_out_of_memory, resolve
from posbench.toolchain import can_compile
from posbench.training import Trainer, learning_rate, make_optimizer, validation_losses

CPU = Runtime(torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def dataset(corpus: Path) -> Dataset:
    settings = tiny.small(corpus)
    return prepare(settings.data, settings.tokenizer)


def rates(schedule: Schedule, steps: int = 100, **values: float) -> list[float]:
    config = TrainConfig(steps=steps, lr=2e-3, schedule=schedule, **values)
    return [learning_rate(step, config) for step in range(steps)]


# ---------------------------------------------------------------- learning rate


@pytest.mark.parametrize("schedule", list(Schedule))
def test_warmup_rises_evenly_from_above_zero_to_the_peak(schedule: Schedule) -> None:
    given = rates(schedule, warmup=0.1)
    assert given[:10] == pytest.approx([2e-3 * k / 10 for k in range(1, 11)], rel=1e-12)
    assert max(given) == pytest.approx(2e-3, rel=1e-12)


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("steps", [1, 2, 7, 100])
def test_after_warmup_the_rate_never_rises(schedule: Schedule, steps: int) -> None:
    given = rates(schedule, steps, warmup=0.1)
    after = given[round(0.1 * steps) :]
    assert all(later <= earlier for earlier, later in itertools.pairwise(after))
    assert min(given) > 0


def test_cosine_is_half_a_cosine_that_ends_at_the_floor() -> None:
    given = rates(Schedule.cosine, warmup=0.1, final_lr=0.05)
    assert given[-1] == pytest.approx(1e-4, rel=1e-12)
    turning = torch.polar(
        torch.ones(90).double(), torch.linspace(0, math.pi, 90, dtype=torch.float64)
    ).real
    assert given[10:] == pytest.approx((1e-4 + 1.9e-3 * (turning + 1) / 2).tolist(), rel=1e-9)


def test_wsd_is_flat_and_then_falls_along_a_line_to_the_floor() -> None:
    given = rates(Schedule.wsd, warmup=0.1, decay=0.2, final_lr=0.05)
    assert given[10:80] == [2e-3] * 70
    line = torch.linspace(2e-3, 1e-4, 21, dtype=torch.float64)[1:]
    assert given[80:] == pytest.approx(line.tolist(), rel=1e-9)


def test_constant_stays_at_the_peak() -> None:
    assert rates(Schedule.constant, warmup=0.1)[10:] == [2e-3] * 90


@pytest.mark.parametrize("schedule", [Schedule.cosine, Schedule.wsd])
def test_without_warmup_the_first_rate_is_the_peak(schedule: Schedule) -> None:
    assert rates(schedule, warmup=0.0)[0] == 2e-3


def test_the_rate_of_each_step_is_the_one_used(dataset: Dataset, corpus: Path) -> None:
    trainer = Trainer(tiny.small(corpus, steps=6), dataset, CPU)
    for step in trainer.run():
        used = {group["lr"] for group in trainer.optimizer.param_groups}
        assert used == {step.lr} == {learning_rate(step.step - 1, trainer.settings.train)}


# ---------------------------------------------------------------- gradients


def gradients(corpus: Path, dataset: Dataset, **changes: Any) -> tuple[float, dict[str, Tensor]]:
    trainer = Trainer(tiny.small(corpus, **changes), dataset, CPU)
    loss = float(trainer._gradients(3))
    return loss, {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("encoding", ["alibi", "learned"])
def test_micro_batches_give_the_gradient_of_the_whole_batch(
    corpus: Path, dataset: Dataset, encoding: str, micro_batch: int
) -> None:
    """3 and 5 do not divide 8: a smaller last part counts for less, not for a whole one."""
    whole_loss, whole = gradients(corpus, dataset, encoding=encoding, batch_size=8)
    loss, parts = gradients(
        corpus, dataset, encoding=encoding, batch_size=8, micro_batch=micro_batch
    )
    assert loss == pytest.approx(whole_loss, abs=1e-6)
    assert set(parts) == set(whole)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=0, atol=1e-6)


def test_the_loss_is_the_mean_over_tokens_of_the_whole_batch(
    corpus: Path, dataset: Dataset
) -> None:
    """Against cross-entropy written out: one mean of log-probabilities, shifted once."""
    trainer = Trainer(tiny.small(corpus, batch_size=8, micro_batch=3), dataset, CPU)
    inputs, targets = trainer.batches.batch(3)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    with torch.no_grad():
        chances = trainer.model(inputs).double().softmax(-1)
    wanted = -chances.gather(-1, targets[..., None]).log().mean()
    assert float(trainer._gradients(3)) == pytest.approx(float(wanted), abs=1e-6)


@pytest.mark.parametrize("clip", [1e-3, 0.1, 1e6])
def test_gradients_are_clipped_before_the_step_that_uses_them(
    corpus: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch, clip: float
) -> None:
    trainer = Trainer(tiny.small(corpus, clip=clip), dataset, CPU)
    _, raw = gradients(corpus, dataset)
    used: dict[str, Tensor] = {}

    def take() -> None:
        named = trainer.model.named_parameters()
        used.update({name: p.grad.clone() for name, p in named if p.grad is not None})

    monkeypatch.setattr(trainer.optimizer, "step", take)
    trainer.step = 3
    step = trainer._advance()

    def norm(of: dict[str, Tensor]) -> float:
        return math.sqrt(sum(float(each.double().square().sum()) for each in of.values()))

    assert step.grad_norm == pytest.approx(norm(raw), rel=1e-5)  # the record is of the raw one
    assert norm(used) == pytest.approx(min(clip, norm(raw)), rel=1e-4)


# ---------------------------------------------------------------- optimizer


@pytest.mark.parametrize("encoding", CLASSES)
@pytest.mark.parametrize("norm", list(Norm))
@pytest.mark.parametrize("tied", [True, False])
def test_only_matrices_that_multiply_activations_are_decayed(
    corpus: Path, dataset: Dataset, encoding: str, norm: Norm, tied: bool
) -> None:
    settings = tiny.small(corpus, encoding, norm=norm, tied=tied, weight_decay=0.3)
    settings.model.qk_norm = True
    model = Trainer(settings, dataset, CPU).model
    decayed, kept = make_optimizer(model, settings.train).param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0.0)
    matrices = {
        id(module.weight)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not name.startswith("encoding")
    }
    assert {id(parameter) for parameter in decayed["params"]} == matrices
    groups = [id(p) for group in (decayed, kept) for p in group["params"]]
    assert sorted(groups) == sorted(id(parameter) for parameter in model.parameters())


def test_decay_shrinks_matrices_and_leaves_tables_and_norms(corpus: Path, dataset: Dataset) -> None:
    """A step with no gradient: what moves, moved by decay alone."""
    settings = tiny.small(corpus, "learned", weight_decay=5.0, lr=0.1)
    trainer = Trainer(settings, dataset, CPU)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    for parameter in trainer.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    trainer.optimizer.step()
    for name, parameter in trainer.model.named_parameters():
        is_matrix = ".qkv." in name or ".out." in name or ".into." in name
        wanted = before[name] * (0.5 if is_matrix else 1.0)
        torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-6, atol=0)


def test_adamw_is_fused_and_takes_its_settings(corpus: Path, dataset: Dataset) -> None:
    trainer = Trainer(tiny.small(corpus, beta1=0.8, beta2=0.9), dataset, CPU)
    assert trainer.optimizer.defaults["fused"] is True
    assert all(group["betas"] == (0.8, 0.9) for group in trainer.optimizer.param_groups)


def test_one_step_is_adamw_as_published(corpus: Path, dataset: Dataset) -> None:
    """Against Loshchilov and Hutter (2019), algorithm 2, written out for the first step."""
    settings = tiny.small(corpus, lr=0.01, weight_decay=0.1, clip=1e9)
    trainer = Trainer(settings, dataset, CPU)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    _, raw = gradients(corpus, dataset)
    trainer.step = 3
    lr = trainer._advance().lr
    for name in ("blocks.0.mlp.into.weight", "embedding.weight"):
        decay = 0.1 if "mlp" in name else 0.0
        moved = raw[name] / (raw[name].abs() + 1e-8)  # m / (sqrt(v) + eps), bias corrected
        wanted = before[name] * (1 - lr * decay) - lr * moved
        actual = trainer.model.state_dict()[name]
        torch.testing.assert_close(actual, wanted, rtol=0, atol=2e-5)


def test_timing_a_step_changes_nothing(corpus: Path, dataset: Dataset) -> None:
    settings = tiny.small(corpus, dropout=0.1, steps=3)
    straight, timed = (Trainer(settings, dataset, CPU) for _ in range(2))
    assert timed.seconds_per_step() > 0
    one = [step.loss for step in straight.run()]
    assert one == [step.loss for step in timed.run()]
    assert tiny.digest(straight.model.state_dict()) == tiny.digest(timed.model.state_dict())


def test_training_learns(corpus: Path, dataset: Dataset) -> None:
    trainer = Trainer(tiny.small(corpus, steps=60, lr=1e-2, batch_size=8), dataset, CPU)
    losses = [step.loss for step in trainer.run()]
    assert losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert losses[-1] < 3.5  # byte frequencies alone, without which nothing was learned


# ---------------------------------------------------------------- not a number


class Poison:
    """Spoils the loss, a gradient or a weight at one step of training."""

    def __init__(self, trainer: Trainer, where: str, value: float, at: int) -> None:
        self.trainer, self.where, self.value, self.at = trainer, where, value, at
        self.gradients = trainer._gradients

    def __call__(self, step: int) -> Tensor:
        hit = step + 1 == self.at
        weight = self.trainer.model.get_parameter("blocks.0.mlp.into.weight")
        if hit and self.where == "weight":
            weight.data[0, 0] = self.value
        loss = self.gradients(step)
        if hit and self.where == "gradient":
            assert weight.grad is not None
            weight.grad[1, 2] = self.value
        return loss * self.value if hit and self.where == "loss" else loss


@pytest.mark.parametrize("where", ["loss", "gradient", "weight"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [1, 4, 6])
def test_what_is_not_finite_stops_before_the_update(
    corpus: Path, dataset: Dataset, where: str, value: float, at: int
) -> None:
    trainer = Trainer(tiny.small(corpus, steps=6), dataset, CPU)
    trainer._gradients = Poison(trainer, where, value, at)  # type: ignore[method-assign]
    clean = [(_weights(trainer), _moments(trainer))]
    steps = trainer.run()
    for _ in range(at - 1):
        next(steps)
        clean.append((_weights(trainer), _moments(trainer)))
    with pytest.raises(DivergedError) as caught:
        next(steps)
    message = str(caught.value)
    assert trainer.step == at - 1
    assert caught.value.code == Exit.DIVERGED == 5
    rate = learning_rate(at - 1, trainer.settings.train)
    assert f"at step {at}:" in message
    assert f"learning rate {rate:g}" in message
    assert "gradient norm" in message
    if where == "gradient":  # the one that is bad, not the first of all
        assert "blocks.0.mlp.into.weight" in message
    if where != "weight":
        assert (_weights(trainer), _moments(trainer)) == clean[-1]


def _weights(trainer: Trainer) -> str:
    return tiny.digest(trainer.model.state_dict())


def _moments(trainer: Trainer) -> str:
    states = enumerate(trainer.optimizer.state.values())
    return tiny.digest({f"{n}/{key}": v for n, state in states for key, v in state.items()})


@pytest.mark.parametrize("where", ["loss", "gradient", "weight"])
def test_a_diverged_run_says_so_and_keeps_its_last_good_checkpoint(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    original = Trainer.__init__

    def poisoned(self: Trainer, *arguments: Any) -> None:
        original(self, *arguments)
        self._gradients = Poison(self, where, math.nan, 7)  # type: ignore[method-assign]

    settings = tiny.small(corpus, checkpoint_every=2)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "__init__", poisoned)
        with pytest.raises(DivergedError):
            run_training(settings, tmp_path / "run", [])
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    assert manifest["status"] == "diverged"
    assert manifest["step"] == 6
    assert "at step 7" in manifest["reason"]
    assert tiny.last(tmp_path / "run").step == 6
    assert [step for step, _ in tiny.losses(tmp_path / "run")] == list(range(1, 7))
    # The cause removed, the same command ends as if nothing had happened.
    run_training(settings, tmp_path / "run", [])
    run_training(settings, tmp_path / "straight", [])
    tiny.assert_same_run(tmp_path / "run", tmp_path / "straight")
    assert "reason" not in json.loads((tmp_path / "run" / "run.json").read_text())


def test_weights_spoiled_by_the_last_update_are_never_saved(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Trainer._advance

    def spoil(self: Trainer) -> Any:
        done = original(self)
        if done.step == tiny.STEPS:
            self.model.embedding.weight.data[3, 3] = math.inf
        return done

    monkeypatch.setattr(Trainer, "_advance", spoil)
    with pytest.raises(DivergedError, match=r"embedding\.weight is not finite"):
        run_training(tiny.small(corpus, checkpoint_every=8), tmp_path / "run", [])
    assert tiny.last(tmp_path / "run").step == 16
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "diverged"


# ---------------------------------------------------------------- memory, device, precision


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."),
    ],
)
@pytest.mark.parametrize(("micro_batch", "advised"), [(None, 4), (3, 1), (1, None)])
def test_out_of_memory_names_a_smaller_micro_batch(
    corpus: Path,
    dataset: Dataset,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    micro_batch: int | None,
    advised: int | None,
) -> None:
    settings = tiny.small(corpus, batch_size=8, micro_batch=micro_batch)
    trainer = Trainer(settings, dataset, CPU)
    original = trainer._forward

    def hungry(rows: Tensor, positions: Tensor | None) -> Tensor:
        if len(rows) > (advised or 0):
            raise error
        return original(rows, positions)

    trainer._forward = hungry  # type: ignore[assignment]
    with pytest.raises(OutOfMemoryError) as caught:
        next(trainer.run())
    assert caught.value.code == Exit.MEMORY == 6
    if advised is None:
        assert "smaller model or context" in str(caught.value)
        return
    assert f"train.micro_batch={advised}" in str(caught.value)
    settings.train.micro_batch = advised  # and that one fits
    next(trainer.run())


def test_memory_that_runs_out_in_the_optimizer_is_told_too(
    corpus: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hungry() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    trainer = Trainer(tiny.small(corpus), dataset, CPU)
    monkeypatch.setattr(trainer.optimizer, "step", hungry)
    with pytest.raises(OutOfMemoryError, match=r"train\.micro_batch=2"):
        next(trainer.run())


def test_a_defect_is_not_taken_for_a_lack_of_memory(corpus: Path, dataset: Dataset) -> None:
    def broken(rows: Tensor, positions: Tensor | None) -> Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    trainer = Trainer(tiny.small(corpus), dataset, CPU)
    trainer._forward = broken  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        next(trainer.run())
    assert not is_out_of_memory(ValueError("can't allocate memory"))


def test_cuda_asked_for_and_absent_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"device=cuda.*device=auto or cpu"):
        resolve(Device.cuda, Precision.auto)
    assert resolve(Device.auto, Precision.auto).device.type == "cpu"


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [Precision.auto, Precision.float32])
def test_a_cpu_computes_in_float32(dtype: Precision, training: bool) -> None:
    runtime = resolve(Device.cpu, dtype, training=training)
    assert runtime.dtype is torch.float32
    assert not torch.is_autocast_enabled("cpu")
    with runtime.autocast():
        assert not torch.is_autocast_enabled("cpu")


def test_bfloat16_on_a_cpu_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posbench.runtime._cpu_has_bfloat16", lambda: False)
    with pytest.raises(UserError, match=r"dtype=bfloat16.*dtype=float32"):
        resolve(Device.cpu, Precision.bfloat16)


def test_bfloat16_keeps_losses_and_weights_in_float32(
    corpus: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posbench.runtime._cpu_has_bfloat16", lambda: True)
    runtime = resolve(Device.cpu, Precision.bfloat16)
    trainer = Trainer(tiny.small(corpus), dataset, runtime)
    with runtime.autocast():
        logits = trainer.model(trainer.batches.batch(0)[0])
    assert logits.dtype is torch.bfloat16  # the precision did reach the products
    assert token_losses(logits, trainer.batches.batch(0)[1]).dtype is torch.float32
    next(trainer.run())
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_threads_are_set_and_recorded() -> None:
    assert resolve(Device.cpu, Precision.auto, threads=2).record()["threads"] == 2
    assert resolve(Device.cpu, Precision.auto).record()["threads"] == 2  # null: left alone


@pytest.mark.parametrize(
    ("switch", "compiled"), [(Switch.auto, False), (Switch.off, False), (Switch.on, True)]
)
def test_compile_is_off_on_a_cpu_unless_asked_for(switch: Switch, compiled: bool) -> None:
    assert resolve(Device.cpu, Precision.auto, switch).compile is compiled


def test_a_compiled_run_saves_the_names_of_the_plain_model(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    class Wrapper(nn.Module):
        """What torch.compile returns: a module that holds the model as `_orig_mod`."""

        def __init__(self, model: nn.Module, **options: Any) -> None:
            super().__init__()
            self._orig_mod = model

        def forward(self, rows: Tensor, positions: Tensor | None) -> Any:
            calls.append(len(rows))
            return self._orig_mod(rows, positions)

    monkeypatch.setattr(torch, "compile", Wrapper)
    settings = tiny.small(corpus, compile=Switch.on)
    run_training(settings, tmp_path / "compiled", [])
    assert calls  # training did go through the wrapper
    run_training(tiny.small(corpus), tmp_path / "plain", [])
    tiny.assert_same_run(tmp_path / "compiled", tmp_path / "plain")
    assert not any("_orig_mod" in name for name in tiny.last(tmp_path / "compiled").weights)


def test_the_cost_is_counted_from_the_settings(corpus: Path, dataset: Dataset) -> None:
    settings: TrainSettings = tiny.small(corpus, "learned")
    cost = Trainer(settings, dataset, CPU).cost()
    width, table = 32, 16 * 32
    block = 4 * width * width + 8 * width * width + 2 * width
    assert cost["parameters"] == 256 * width + block + width + table
    assert cost["encoding_parameters"] == table
    assert cost["tokens"] == 20 * 4 * 16
    matrices = cost["parameters"] - table
    assert cost["flops"] == cost["tokens"] * (6 * matrices + 12 * width * 16)


def test_a_batch_is_drawn_at_its_step_alone(dataset: Dataset) -> None:
    """Batch k read first, last or twice is the same: resuming needs no replay."""
    one, other = (Batches(dataset.train, 16, 4, seed=3) for _ in range(2))
    forwards = [one.batch(step)[0] for step in range(40)]
    backwards = [other.batch(step)[0] for step in reversed(range(40))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forwards, backwards, strict=True))
    assert len({tiny.digest({"x": batch}) for batch in forwards}) == 40  # and no two are alike


# ---------------------------------------------------------------- a GPU, as far as a CPU can tell


class Gpu:
    """Makes torch say that it has a GPU, with or without bfloat16 and a compiler."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.tried = 0
        patch.setattr(torch.cuda, "is_available", lambda: True)
        self.has(bfloat16=True, compiler=True)

    def has(self, bfloat16: bool = True, compiler: bool = True) -> None:
        def supported(including_emulation: bool = True) -> bool:
            return bfloat16 or including_emulation  # every GPU can emulate it

        def can_compile() -> bool:
            self.tried += 1
            return compiler

        self.patch.setattr(torch.cuda, "is_bf16_supported", supported)
        self.patch.setattr("posbench.runtime.can_compile", can_compile)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_a_gpu_compiles_where_that_works(gpu: Gpu) -> None:
    assert resolve(Device.auto, Precision.auto, Switch.auto).compile is True
    gpu.has(compiler=False)
    assert resolve(Device.auto, Precision.auto, Switch.auto).compile is False
    with pytest.raises(UserError, match=r"compile=on.*compile=off"):
        resolve(Device.auto, Precision.auto, Switch.on)


def test_the_compiler_is_tried_only_for_a_gpu_that_is_to_compile(gpu: Gpu) -> None:
    resolve(Device.auto, Precision.auto, Switch.off)
    resolve(Device.cpu, Precision.auto, Switch.auto)
    resolve(Device.cpu, Precision.auto, Switch.on)
    assert gpu.tried == 0


def test_a_gpu_that_only_emulates_bfloat16_trains_in_float32(gpu: Gpu) -> None:
    assert resolve(Device.auto, Precision.auto).dtype is torch.bfloat16
    assert resolve(Device.auto, Precision.auto, training=False).dtype is torch.float32
    gpu.has(bfloat16=False)
    assert resolve(Device.auto, Precision.auto).dtype is torch.float32
    with pytest.raises(UserError, match=r"dtype=bfloat16.*GPU.*dtype=float32"):
        resolve(Device.auto, Precision.bfloat16)


def test_resolving_changes_no_setting_of_torch(gpu: Gpu) -> None:
    resolve(Device.auto, Precision.auto, Switch.auto)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_failing_compiler_is_told_once_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    tries: list[int] = []

    def attempt() -> None:
        tries.append(1)
        raise RuntimeError("Failed to find C compiler.\n" + "and a long story\n" * 30)

    assert not can_compile(attempt)
    assert not can_compile(attempt)
    assert len(tries) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: torch.compile does not work here")
    assert "build-essential python3-dev" in line
    assert "Failed to find C compiler" in line
    assert len(line) < 400
    assert can_compile(lambda: None)
    assert capsys.readouterr().err == ""


def test_the_record_tells_compiled_runs_and_cpus_apart() -> None:
    plain = resolve(Device.cpu, Precision.auto).record()
    compiled = resolve(Device.cpu, Precision.auto, Switch.on).record()
    assert {key for key in plain if plain[key] != compiled[key]} == {"compile"}
    assert plain["cpu"] == torch.backends.cpu.get_cpu_capability()


# ---------------------------------------------------------------- precision in evaluation


def test_logits_of_an_evaluation_are_float32_under_autocast(corpus: Path, dataset: Dataset) -> None:
    model = Trainer(tiny.small(corpus), dataset, CPU).model.eval()
    rows = torch.from_numpy(dataset.train.tokens[:32].astype("int64")).view(2, 16)
    streams: list[Tensor] = []
    model.norm.register_forward_hook(lambda module, given, out: streams.append(out))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model(rows)
    assert logits.dtype is torch.float32
    assert torch.equal(logits, streams[0].float() @ model.embedding.weight.T)
    with torch.no_grad():
        assert not torch.equal(logits, model(rows))  # the rest did follow the autocast


# ---------------------------------------------------------------- validation


def test_a_ratio_longer_than_every_document_costs_only_itself(
    corpus: Path, dataset: Dataset
) -> None:
    longest = int(dataset.validation.lengths.max()) - 1
    fits, too_long = longest / 16, (longest + 1) / 16
    ratios = [1.0, fits, too_long]
    model = Trainer(tiny.small(corpus), dataset, CPU).model
    found = validation_losses(model, dataset, tiny.small(corpus, validate_ratios=ratios), CPU)
    assert set(found) == {1.0, fits}
    without = tiny.small(corpus, validate_ratios=[1.0, fits])
    assert validation_losses(model, dataset, without, CPU) == found
    nothing = tiny.small(corpus, validate_ratios=[too_long])
    assert validation_losses(model, dataset, nothing, CPU) == {}


def test_what_validation_leaves_out_is_told_once(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tiny.small(corpus, "learned", steps=4, validate_every=1, validate_ratios=[1.0, 2.0])
    run_training(settings, tmp_path / "run", [])
    assert len(tiny.validations(tmp_path / "run")) == 4
    assert capsys.readouterr().err.count("warning: no validation at 2x") == 1
