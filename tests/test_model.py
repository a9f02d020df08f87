"""The transformer around the encodings: its arithmetic, initial weights, counts and losses."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posbench.attention import Kernel
from posbench.config import Mlp, ModelConfig, Norm
from posbench.config.encodings import ENCODINGS, EncodingConfig, SinusoidalConfig
from posbench.encodings import Encoding, Hooks
from posbench.model import (
    GPT,
    INIT_STD,
    build_model,
    decay_groups,
    flops_per_token,
    seeded,
    token_losses,
)

TINY = ModelConfig()
SMALLEST = ModelConfig(layers=2, width=32, heads=4)


def make(encoding: str = "none", vocabulary: int = 31, context: int = 16, **size: Any) -> GPT:
    config = dataclasses.replace(SMALLEST, **size)
    return build_model(config, ENCODINGS[encoding](), context, vocabulary, seed=0)


def tokens(rows: int, length: int, vocabulary: int = 31) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    return torch.randint(vocabulary, (rows, length), generator=generator)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# ---------------------------------------------------------------- arithmetic


def plain_norm(x: Tensor, weight: Tensor, kind: Norm) -> Tensor:
    if kind is Norm.rmsnorm:
        return weight * x / torch.sqrt(x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps)
    centred = x - x.mean(-1, keepdim=True)
    return weight * centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5)


def plain_mlp(x: Tensor, into: Tensor, out: Tensor, kind: Mlp) -> Tensor:
    inner = x @ into.T
    if kind is Mlp.gelu:
        return (0.5 * inner * (1 + torch.erf(inner / math.sqrt(2)))) @ out.T
    value, gate = inner.split(inner.shape[-1] // 2, -1)
    return (value * gate * torch.sigmoid(gate)) @ out.T


def plain_forward(weights: dict[str, Tensor], config: ModelConfig, text: Tensor) -> Tensor:
    """A pre-norm decoder without positions, from the weights alone."""
    x = weights["embedding.weight"][text]
    batch, length, width = x.shape
    future = torch.ones(length, length).triu(1).bool()
    for n in range(config.layers):
        of = {k.removeprefix(f"blocks.{n}."): w for k, w in weights.items()}
        normed = plain_norm(x, of["norm1.weight"], config.norm)
        heads = (normed @ of["attention.qkv.weight"].T).split(width, -1)
        q, k, v = (h.view(batch, length, config.heads, -1).transpose(1, 2) for h in heads)
        if config.qk_norm:
            q = plain_norm(q, of["attention.q_norm.weight"], config.norm)
            k = plain_norm(k, of["attention.k_norm.weight"], config.norm)
        scores = (q @ k.mT / math.sqrt(config.head_size)).masked_fill(future, float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + mixed @ of["attention.out.weight"].T
        normed = plain_norm(x, of["norm2.weight"], config.norm)
        x = x + plain_mlp(normed, of["mlp.into.weight"], of["mlp.out.weight"], config.mlp)
    head = weights.get("head.weight", weights["embedding.weight"])
    return plain_norm(x, weights["norm.weight"], config.norm) @ head.T


@pytest.mark.parametrize("norm", list(Norm))
@pytest.mark.parametrize("mlp", list(Mlp))
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_forward_is_the_transformer_written_out(
    norm: Norm, mlp: Mlp, qk_norm: bool, tied: bool
) -> None:
    model = make(norm=norm, mlp=mlp, qk_norm=qk_norm, tied=tied).double()
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():  # gains away from 1, weights that matter
        parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator).double())
    text = tokens(2, 13)
    expected = plain_forward(dict(model.named_parameters()), model.config, text)
    torch.testing.assert_close(model(text), expected, rtol=0, atol=1e-10)


@torch.no_grad()
def test_positions_count_from_zero_unless_given() -> None:
    model = make("learned")
    text = tokens(2, 10)
    assert torch.equal(model(text), model(text, torch.arange(10)))
    assert not torch.allclose(model(text), model(text, torch.arange(10) + 1))


@torch.no_grad()
def test_an_encoding_is_told_input_positions_and_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Tensor, Tensor, int]] = []

    def spy(encoding: Encoding, x: Tensor, positions: Tensor, layer: int) -> Hooks:
        seen.append((x, positions, layer))
        return Hooks()

    monkeypatch.setattr(Encoding, "hooks", spy)
    positions = torch.arange(10) ** 2
    make()(tokens(2, 10), positions)
    assert [layer for _, _, layer in seen] == [0, 1]
    for x, given, _ in seen:
        assert torch.equal(given, positions)
        torch.testing.assert_close(x.mean(-1), torch.zeros(2, 10), rtol=0, atol=1e-5)  # normalised
        torch.testing.assert_close(x.std(-1), torch.ones(2, 10), rtol=0, atol=0.05)


@torch.no_grad()
def test_rotation_follows_the_positions_given() -> None:
    model = make("rope").double()
    for parameter in model.parameters():
        parameter.mul_(8)
    text, near = tokens(2, 10), torch.arange(10)
    assert (model(text, near) - model(text, 3 * near)).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("encoding", sorted(ENCODINGS))
@torch.no_grad()
def test_logits_have_the_dtype_of_the_model(dtype: torch.dtype, encoding: str) -> None:
    logits = make(encoding).to(dtype)(tokens(2, 9))
    assert logits.dtype is dtype
    assert logits.shape == (2, 9, 31)


def test_each_layer_reports_and_obeys_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posbench.attention.can_compile", lambda: True)
    model = make("alibi", heads=2)
    assert model.kernels("cpu") == [Kernel.strided] * 2
    assert model.kernels("cuda") == [Kernel.flex] * 2
    assert make("alibi", heads=4).kernels("cuda") == [Kernel.dense] * 2  # heads of 8 channels
    assert make("rope").kernels("cuda") == [Kernel.sdpa] * 2
    model.use_kernel(Kernel.dense)
    assert [block.attention.kernel for block in model.blocks] == [Kernel.dense] * 2
    model.use_kernel(None)
    assert [block.attention.kernel for block in model.blocks] == [None] * 2


# ---------------------------------------------------------------- initial weights


@pytest.mark.parametrize("vocabulary", [256, 1024])
@pytest.mark.parametrize(
    "encoding", [config() for config in ENCODINGS.values()], ids=lambda c: c.name
)
@torch.no_grad()
def test_initial_loss_is_that_of_knowing_nothing(encoding: EncodingConfig, vocabulary: int) -> None:
    model = build_model(TINY, encoding, 128, vocabulary, seed=0)
    text = tokens(4, 129, vocabulary)
    loss = token_losses(model(text[:, :-1]), text[:, 1:]).mean().item()
    assert loss == pytest.approx(math.log(vocabulary), abs=0.3)


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(TINY, tied=False),
        dataclasses.replace(TINY, norm=Norm.rmsnorm, mlp=Mlp.swiglu, qk_norm=True),
        ModelConfig(layers=12, width=128, heads=4),
        ModelConfig(layers=1, width=1024, heads=16),
    ],
    ids=["untied", "llama", "deep", "wide"],
)
@pytest.mark.parametrize(
    "encoding", [ENCODINGS["rope"](), SinusoidalConfig(scale=1.0)], ids=lambda c: c.name
)
@torch.no_grad()
def test_initial_loss_holds_for_other_shapes(config: ModelConfig, encoding: EncodingConfig) -> None:
    model = build_model(config, encoding, 64, 256, seed=0)
    text = tokens(4, 65, 256)
    loss = token_losses(model(text[:, :-1]), text[:, 1:]).mean().item()
    assert loss == pytest.approx(math.log(256), abs=0.3)


def test_initial_weights_have_their_size() -> None:
    model = build_model(TINY, ENCODINGS["learned"](), 128, 1024, seed=0)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            assert (parameter == 1).all(), name
            continue
        residual = name.endswith(("attention.out.weight", "mlp.out.weight"))
        expected = INIT_STD / math.sqrt(2 * 4) if residual else INIT_STD
        assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
        assert abs(parameter.mean().item()) < 0.05 * expected, name


def test_each_parameter_draws_from_a_generator_of_its_own() -> None:
    def draw(seed: int, name: str) -> list[float]:
        return torch.rand(4, generator=seeded(seed, name)).tolist()

    assert draw(0, "a") == draw(0, "a")
    assert draw(0, "a") != draw(0, "b")
    assert draw(0, "a") != draw(1, "a")
    first, second = (block.attention.qkv.weight for block in make().blocks)
    assert not torch.equal(first, second)


# ---------------------------------------------------------------- counts


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("layers", "width", "heads"), [(4, 128, 4), (6, 384, 6)])
def test_parameter_count(layers: int, width: int, heads: int, tied: bool) -> None:
    vocabulary = 1024
    model = make(vocabulary=vocabulary, layers=layers, width=width, heads=heads, tied=tied)
    block = 4 * width**2 + 8 * width**2 + 2 * width
    heads_of_output = 1 if tied else 2
    assert count(model) == layers * block + heads_of_output * vocabulary * width + width


def test_swiglu_has_as_many_parameters_as_gelu() -> None:
    for width, heads in ((128, 4), (384, 6)):
        gelu = count(make(width=width, heads=heads).blocks)
        swiglu = count(make(width=width, heads=heads, mlp=Mlp.swiglu).blocks)
        assert swiglu == pytest.approx(gelu, rel=0.005)


def test_tied_head_is_the_token_embedding() -> None:
    tied, untied = make(), make(tied=False)
    assert "head.weight" not in tied.state_dict()
    assert "head.weight" in untied.state_dict()
    text = tokens(2, 8)
    for model in (tied, untied):
        model(text)[..., 30].sum().backward()
    unused = next(token for token in range(31) if token not in text)
    # As input only tokens of the text get a gradient; as output row 30 does.
    assert (tied.embedding.weight.grad[30] != 0).any()
    assert (untied.head.weight.grad[30] != 0).any()
    assert (untied.embedding.weight.grad[unused] == 0).all()
    with torch.no_grad():
        before = tied(text)
        tied.embedding.weight[unused] += 1.0
        changed = (tied(text) != before).any(dim=0).any(dim=0)
    assert changed.nonzero().flatten().tolist() == [unused]


def test_decay_groups_by_name() -> None:
    decayed, kept = decay_groups(build_model(TINY, ENCODINGS["learned"](), 128, 256, 0))
    matrices = ("attention.qkv", "attention.out", "mlp.into", "mlp.out")
    assert decayed == [f"blocks.{n}.{matrix}.weight" for n in range(4) for matrix in matrices]
    norms = [f"blocks.{n}.{norm}.weight" for n in range(4) for norm in ("norm1", "norm2")]
    assert kept == ["embedding.weight", "encoding.table", *norms, "norm.weight"]


def test_decay_groups_hold_every_parameter_once() -> None:
    for name in ENCODINGS:
        model = make(name, tied=False, qk_norm=True)
        decayed, kept = decay_groups(model)
        assert sorted(decayed + kept) == sorted(key for key, _ in model.named_parameters())
        assert "head.weight" in decayed
        assert "blocks.0.attention.q_norm.weight" in kept
        assert not [key for key in decayed if key.startswith("encoding.")]


def test_flops_per_token() -> None:
    """6 per weight that multiplies a token, 12 C T per layer for a full square of scores."""
    layers, width, vocabulary, length = 2, 32, 31, 48
    weights = layers * (12 * width**2 + 2 * width) + width + vocabulary * width
    expected = 6 * weights + 12 * layers * width * length
    for name in ENCODINGS:  # a table of positions is looked up, not multiplied
        for tied in (True, False):  # and so is a token embedding
            model = make(name, vocabulary=vocabulary, tied=tied)
            assert flops_per_token(model, length) == expected
    longer = flops_per_token(make(vocabulary=vocabulary), 2 * length)
    assert longer - expected == 12 * layers * width * length


# ---------------------------------------------------------------- losses


def oracle(text: Tensor, ahead: int) -> Tensor:
    """Logits of a model that is certain of the token `ahead` places after its input."""
    return 100.0 * F.one_hot(text.roll(-ahead, 1), 31).float()


def test_losses_are_of_the_next_token_and_no_other() -> None:
    text = tokens(3, 40)
    text[:, 1:][text[:, 1:] == text[:, :-1]] += 1  # no token twice in a row
    text %= 31
    inputs, targets = slice(0, 38), text[:, 1:39]
    losses = {ahead: token_losses(oracle(text, ahead)[:, inputs], targets) for ahead in (0, 1, 2)}
    assert losses[1].max() < 1e-6
    assert losses[0].median() > 50
    assert losses[2].median() > 50
    assert losses[1].shape == targets.shape


def test_losses_of_a_row_do_not_depend_on_other_rows() -> None:
    logits = torch.randn(3, 7, 31, generator=torch.Generator().manual_seed(0))
    targets = tokens(3, 7)
    together = token_losses(logits, targets)
    for row in range(3):
        alone = token_losses(logits[row : row + 1], targets[row : row + 1])
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_losses_are_float32_or_better(dtype: torch.dtype) -> None:
    logits = 5 * torch.randn(2, 9, 1024, generator=torch.Generator().manual_seed(0))
    logits, targets = logits.to(dtype), tokens(2, 9, 1024)
    found = token_losses(logits, targets)
    assert found.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    exact = logits.double()
    expected = exact.logsumexp(-1) - exact.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


def test_a_uniform_model_loses_the_logarithm_of_its_vocabulary() -> None:
    found = token_losses(torch.zeros(1, 3, 50_257), tokens(1, 3, 50_257))
    assert found.tolist() == [pytest.approx([10.82490511970208] * 3, rel=1e-6)]
