"""What only a GPU can show: fused kernels, bfloat16, torch.compile and the CUDA optimizer.

Each test compares the GPU with the same numbers made the plain way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor

from posbench import checkpoint
from posbench.attention import Kernel, attend
from posbench.data import Dataset, prepare
from posbench.encodings.base import Hooks
from posbench.encodings.bias import alibi_slopes
from posbench.runtime import Runtime
from posbench.scoring import window_losses
from posbench.targets import anchors
from posbench.toolchain import can_compile
from posbench.training import Step, Trainer

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CPU = Runtime(torch.device("cpu"), torch.float32)
GPU = Runtime(torch.device("cuda"), torch.float32)
B, H, D = 2, 4, 32
LENGTHS = [77, 200, 1025]  # none a multiple of a kernel's block
FLOAT32 = {"rtol": 1e-3, "atol": 1e-3}


@pytest.fixture
def compiler() -> None:
    if not can_compile():
        pytest.skip("torch.compile does not work here: no C compiler or no Python headers")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Compiled code of one test serves no other."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def dataset(corpus: Path) -> Dataset:
    settings = tiny.small(corpus)
    return prepare(settings.data, settings.tokenizer)


def inputs(length: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    q, k, v = torch.randn(3, B, H, length, D, generator=generator).to("cuda", dtype)
    return q, k, v


def alibi(table: Tensor) -> Hooks:
    slopes = alibi_slopes(H, table.device).float()
    return Hooks(distance_bias=lambda n: -slopes.view(-1, *(1,) * n.dim()) * n)


def learned(table: Tensor) -> Hooks:
    return Hooks(distance_bias=lambda n: table[:, n.long()])


def attention(
    length: int, form: Callable[[Tensor], Hooks], kernel: Kernel, dtype: torch.dtype
) -> list[Tensor]:
    """The output, and the gradients of q, k, v and the table [H, T], all as float32."""
    q, k, v = (tensor.requires_grad_() for tensor in inputs(length, dtype))
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(H, length, generator=generator).cuda().requires_grad_()
    out = attend(q, k, v, form(table), kernel)
    weights = torch.cos(torch.arange(out.numel(), device="cuda")).view(out.shape)
    (out.float() * weights).sum().backward()
    found = [out.detach(), *(leaf.grad for leaf in (q, k, v, table) if leaf.grad is not None)]
    return [tensor.float() for tensor in found]


def assert_near(found: list[Tensor], expected: list[Tensor], share: float) -> None:
    """Every tensor off by at most `share` of its own norm."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= share * theirs.norm()


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("form", [alibi, learned])
@pytest.mark.parametrize("length", LENGTHS)
def test_flex_is_dense_forward_and_gradient(length: int, form: Callable[[Tensor], Hooks]) -> None:
    expected = attention(length, form, Kernel.dense, torch.float32)
    found = attention(length, form, Kernel.flex, torch.float32)
    assert len(found) == (5 if form is learned else 4)
    torch.testing.assert_close(found[0], expected[0], **FLOAT32)
    assert_near(found, expected, 1e-3)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("form", [alibi, learned])
def test_flex_in_bfloat16_is_near_float32(form: Callable[[Tensor], Hooks]) -> None:
    expected = attention(200, form, Kernel.dense, torch.float32)
    assert_near(attention(200, form, Kernel.flex, torch.bfloat16), expected, 3e-2)


# ---------------------------------------------------------------- training


def steps(trainer: Trainer, count: int) -> list[Step]:
    run = trainer.run()
    return [next(run) for _ in range(count)]


def weights(trainer: Trainer) -> Tensor:
    return torch.cat([each.detach().flatten().cpu() for each in trainer.model.parameters()])


def trainer(corpus: Path, dataset: Dataset, runtime: Runtime, *names: str, **keys: Any) -> Trainer:
    return Trainer(tiny.small(corpus, *names, **keys), dataset, runtime)


def test_a_gpu_trains_as_a_cpu_does(corpus: Path, dataset: Dataset) -> None:
    ours, theirs = (trainer(corpus, dataset, runtime) for runtime in (GPU, CPU))
    found, expected = ([step.loss for step in steps(each, 10)] for each in (ours, theirs))
    assert found == pytest.approx(expected, abs=5e-3)


def test_bfloat16_trains_nearly_as_float32(corpus: Path, dataset: Dataset) -> None:
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU has no bfloat16 arithmetic")
    half = Runtime(torch.device("cuda"), torch.bfloat16)
    ours, theirs = (trainer(corpus, dataset, runtime) for runtime in (half, GPU))
    found, expected = ([step.loss for step in steps(each, 10)] for each in (ours, theirs))
    assert found != expected
    assert found == pytest.approx(expected, rel=2e-2)


def test_a_restored_optimizer_goes_on_as_if_never_stopped(
    corpus: Path, dataset: Dataset, tmp_path: Path
) -> None:
    straight = trainer(corpus, dataset, GPU)
    steps(straight, 20)
    first = trainer(corpus, dataset, GPU)
    steps(first, 10)
    checkpoint.save(tmp_path, 10, first.model, first.optimizer, {}, 1)
    second = trainer(corpus, dataset, GPU)
    second.restore(checkpoint.load(tmp_path / "step-00000010"))
    steps(second, 10)
    assert second.step == straight.step == 20
    assert_near([weights(second)], [weights(straight)], 1e-3)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("encoding", ["rope", "alibi"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_model_trains_as_the_plain_one(
    corpus: Path, dataset: Dataset, encoding: str, dtype: torch.dtype
) -> None:
    compiled = Runtime(torch.device("cuda"), dtype, compile=True)
    ours, theirs = (trainer(corpus, dataset, each, encoding) for each in (compiled, GPU))
    found, expected = ([step.loss for step in steps(each, 3)] for each in (ours, theirs))
    assert np.isfinite(found).all()
    tolerance = 1e-3 if dtype is torch.float32 else 2e-2
    assert found == pytest.approx(expected, rel=tolerance)


# ---------------------------------------------------------------- evaluation


@pytest.mark.parametrize("encoding", ["rope", "alibi"])
def test_an_evaluation_on_a_gpu_is_that_of_a_cpu(
    corpus: Path, dataset: Dataset, encoding: str
) -> None:
    """And at lengths and batches that change; a training step follows, which may use the same."""
    tested = trainer(corpus, dataset, GPU, encoding)
    steps(tested, 10)
    plain = trainer(corpus, dataset, CPU, encoding)
    plain.model.load_state_dict({k: v.cpu() for k, v in tested.model.state_dict().items()})
    places = anchors(dataset.validation, 64, 8, 400)
    for length in (16, 32, 64):
        found, expected = (
            window_losses(
                each.model, dataset.validation.tokens, places, length, 8, each.runtime, 700
            )
            for each in (tested, plain)
        )
        assert np.abs(found - expected).max() < 1e-3
    steps(tested, 1)
