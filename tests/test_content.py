"""Encodings that read the content, against their papers' formulas written out pair by pair.

The references below are loops in float64 over queries, keys and the tokens between them; none of
them calls the package.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import test_contract as contract
import torch
from torch import Tensor

from posbench.attention import Kernel, attend, score_rows
from posbench.config import ModelConfig, TrainSettings
from posbench.config.encodings import (
    AlibiConfig,
    CableConfig,
    CopeConfig,
    DapeBase,
    DapeConfig,
    DapeV2Config,
    EncodingConfig,
    FoxConfig,
    GrapeConfig,
    PathConfig,
    StickbreakConfig,
)
from posbench.encodings import Encoding, Hooks, Shape, build
from posbench.encodings.bias import alibi_slopes
from posbench.encodings.path import path_attention, short_convolution
from posbench.encodings.rescoring import contextual_positions
from posbench.encodings.stick import log_weights, stick_breaking
from posbench.errors import UserError
from posbench.rules import check

B, T, C, H, D = 2, 11, 12, 3, 4
SHAPE = Shape(layers=2, heads=H, head_size=D, width=C, train_length=T)
LAYER = 1  # not the first: a scheme that forgets which layer it is in would show
CLOSE = {"rtol": 1e-10, "atol": 1e-10}

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def made(config: EncodingConfig, seed: int = 0) -> Encoding:
    """The encoding in float64, every parameter drawn at unit size."""
    encoding = build(config, SHAPE).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.normal_(0.0, 0.7, generator=generator)
    return encoding


def zeroed(encoding: Encoding, *names: str) -> Encoding:
    with torch.no_grad():
        for name in names:
            encoding.get_parameter(name).zero_()
    return encoding


def inputs(length: int = T, seed: int = 3) -> Inputs:
    """x [B, T, C] and q, k, v [B, H, T, D]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(B, length, C, generator=generator, dtype=torch.float64)
    q, k, v = (
        torch.randn(B, H, length, D, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    return x, q, k, v


@torch.no_grad()
def attended(encoding: Encoding, data: Inputs | None = None) -> Tensor:
    x, q, k, v = data or inputs()
    hooks = encoding.hooks(x, torch.arange(x.shape[1]), LAYER)
    return attend(q, k, v, hooks)


def sigmoid(z: Tensor) -> Tensor:
    return 1 / (1 + (-z).exp())


def softmax_attention(score: Callable[[int, int], Tensor], v: Tensor) -> Tensor:
    """Attention from a function of (i, j) to scores [B, H], one query at a time."""
    rows = []
    for i in range(v.shape[2]):
        scores = torch.stack([score(i, j) for j in range(i + 1)], dim=-1)
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        rows.append((weights.unsqueeze(-1) * v[:, :, : i + 1]).sum(2))
    return torch.stack(rows, dim=2)


def dot(q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
    return (q[:, :, i] * k[:, :, j]).sum(-1) / math.sqrt(q.shape[-1])


def plain() -> Tensor:
    _, q, k, v = inputs()
    return attend(q, k, v, Hooks())


# ---------------------------------------------------------------- FoX and CABLE


def forgetting(encoding: Encoding, sign: int, first: int = 1) -> Tensor:
    """Lin et al. 2025: q.k / sqrt(D) + sum of ln f_l over l = j + first .. i + first - 1."""
    x, q, k, v = inputs()
    weight, bias = encoding.get_parameter("weight")[LAYER], encoding.get_parameter("bias")[LAYER]
    f = sigmoid(sign * (torch.einsum("btc,hc->bht", x, weight) + bias.unsqueeze(-1)))

    def score(i: int, j: int) -> Tensor:
        between = [f[:, :, token].log() for token in range(j + first, i + first)]
        return dot(q, k, i, j) + sum(between, torch.zeros(B, H))

    return softmax_attention(score, v)


@torch.no_grad()
def test_fox_is_its_formula() -> None:
    encoding = made(FoxConfig())
    found = attended(encoding)
    torch.testing.assert_close(found, forgetting(encoding, 1), **CLOSE)
    shifted = forgetting(encoding, 1, first=0)  # the key's own gate instead of the query's
    assert (found - shifted).abs().max() > 1e-2
    assert (found - forgetting(encoding, -1)).abs().max() > 1e-2


@torch.no_grad()
def test_cable_is_fox_with_its_gates_turned() -> None:
    fox, cable = made(FoxConfig()), made(CableConfig())
    torch.testing.assert_close(attended(cable), forgetting(cable, -1), **CLOSE)
    assert (attended(cable) - attended(fox)).abs().max() > 1e-2
    for parameter in cable.parameters():
        parameter.neg_()
    torch.testing.assert_close(attended(cable), attended(fox), **CLOSE)


@torch.no_grad()
def test_fox_that_forgets_nothing_is_none_and_a_constant_rate_is_alibi() -> None:
    fox = zeroed(made(FoxConfig()), "weight")
    fox.get_parameter("bias").fill_(60.0)  # f = 1
    torch.testing.assert_close(attended(fox), plain(), **CLOSE)
    keep = torch.exp(-alibi_slopes(H))  # f = e^-m
    fox.get_parameter("bias").copy_(torch.log(keep / (1 - keep)).expand(2, H))
    alibi = attended(build(AlibiConfig(), SHAPE))
    torch.testing.assert_close(attended(fox), alibi, **CLOSE)


@torch.no_grad()
def test_fox_scores_by_hand() -> None:
    """Gates of zero keep half of the past with each token."""
    fox = zeroed(made(FoxConfig()), "weight", "bias")
    x, q, k, _ = inputs()
    hooks = fox.hooks(x, torch.arange(T), LAYER)
    found = score_rows(torch.zeros_like(q), k, hooks, [4])[0]
    expected = torch.tensor([-4.0, -3, -2, -1, 0], dtype=torch.float64) * math.log(2)
    torch.testing.assert_close(found, expected.expand(B, H, -1), **CLOSE)


@torch.no_grad()
def test_fox_keeps_neighbours_apart_in_a_long_text() -> None:
    """In 16,384 tokens the sum of gates passes 11,000, where bfloat16 counts in steps of 64."""
    length = 16_384
    fox = zeroed(build(FoxConfig(), SHAPE), "weight", "bias")
    x, q = torch.zeros(1, length, C), torch.zeros(1, H, length, D)
    hooks = fox.hooks(x, torch.arange(length), LAYER)
    found = score_rows(q, q, hooks, [length - 1])[0][0, 0].double()
    distances = torch.arange(length - 1, -1, -1, dtype=torch.float64)
    torch.testing.assert_close(found, -math.log(2) * distances, rtol=1e-6, atol=1e-6)
    rounded = torch.full((length,), math.log(2), dtype=torch.bfloat16).cumsum(0)
    assert (rounded[-1] - rounded[-2]).abs() < 0.1  # the last tokens became one


# ---------------------------------------------------------------- GRAPE-AP


@torch.no_grad()
def test_grape_is_its_formula() -> None:
    config = GrapeConfig(size=6)
    encoding = made(config)
    x, q, k, v = inputs()
    p = torch.einsum("btc,pc->btp", x, encoding.get_parameter("weight")[LAYER]).view(B, T, H, 6)
    normal = p / (p.square().mean(-1, keepdim=True) + torch.finfo(torch.float64).eps).sqrt()
    turned = torch.empty_like(p)
    for t, c in itertools.product(range(T), range(3)):  # channel c with c + 3, one radian a token
        first, second = normal[:, t, :, c], normal[:, t, :, c + 3]
        turned[:, t, :, c] = first * math.cos(t) + second * math.sin(t)
        turned[:, t, :, c + 3] = second * math.cos(t) - first * math.sin(t)
    slopes = alibi_slopes(H)

    def score(i: int, j: int) -> Tensor:
        alike = [(p[:, i] * turned[:, t]).sum(-1) / 6 for t in range(j + 1, i + 1)]
        edges = [slopes * sigmoid(each).log() for each in alike]
        return dot(q, k, i, j) + sum(edges, torch.zeros(B, H))

    torch.testing.assert_close(attended(encoding), softmax_attention(score, v), **CLOSE)


@torch.no_grad()
def test_grape_without_content_is_alibi_with_slopes_times_ln_2() -> None:
    _, q, k, v = inputs()
    slopes = math.log(2) * alibi_slopes(H).view(-1, 1, 1)
    alibi = Hooks(distance_bias=lambda distances: -slopes * distances)
    expected = attend(q, k, v, alibi, Kernel.dense)
    torch.testing.assert_close(attended(zeroed(made(GrapeConfig()), "weight")), expected, **CLOSE)


# ---------------------------------------------------------------- CoPE


@torch.no_grad()
@pytest.mark.parametrize("steps", [3, 16])
def test_cope_is_its_formula(steps: int) -> None:
    """With few vectors some positions are clamped, with many none is."""
    encoding = made(CopeConfig(steps=steps))
    _, q, k, v = inputs()
    e = encoding.get_parameter("vectors")[LAYER]
    clamped = 0

    def score(i: int, j: int) -> Tensor:
        nonlocal clamped
        p = sum((sigmoid(dot(q, k, i, t)) for t in range(j, i + 1)), torch.zeros(B, H))
        clamped += int((p > steps - 1).sum())
        p = p.clamp(max=steps - 1)
        low, high = p.floor().long(), p.ceil().long()
        share = (p - low).unsqueeze(-1)
        vector = share * e[high] + (1 - share) * e[low]
        return dot(q, k, i, j) + (q[:, :, i] * vector).sum(-1)

    torch.testing.assert_close(attended(encoding), softmax_attention(score, v), **CLOSE)
    assert (clamped > 0) == (steps == 3)


@torch.no_grad()
def test_cope_counts_half_steps_by_hand() -> None:
    rows = torch.tensor([0, 3])
    found = contextual_positions(torch.zeros(2, 5, dtype=torch.float64), rows)
    assert found.tolist() == [[0.5, 0, 0, 0, 0], [2.0, 1.5, 1.0, 0.5, 0]]


@torch.no_grad()
def test_cope_without_vectors_is_none() -> None:
    torch.testing.assert_close(attended(zeroed(made(CopeConfig()), "vectors")), plain(), **CLOSE)


# ---------------------------------------------------------------- DAPE


@torch.no_grad()
@pytest.mark.parametrize(
    "config",
    [
        DapeConfig(hidden=5),
        DapeV2Config(hidden=5),
        DapeConfig(base=DapeBase.alibi, hidden=5, kernel=5),
    ],
    ids=["v1", "v2", "wide"],
)
def test_dape_is_its_formula(config: DapeConfig) -> None:
    """score + bias + MLP([score; bias]), keys after the query being zeros for both layers."""
    encoding = made(config)
    _, q, k, v = inputs()
    into, out = (encoding.get_parameter(name)[LAYER].squeeze(2) for name in ("into", "out"))
    constant, reach = encoding.get_parameter("into_bias")[LAYER], config.kernel // 2

    def bias(r: int) -> Tensor:
        if config.base is DapeBase.alibi:
            return -alibi_slopes(H) * r
        p, a = encoding.get_parameter("kernels")[LAYER].exp()
        return -p * (1 + a * r).log()

    def pair(i: int, j: int) -> Tensor:
        return torch.cat((dot(q, k, i, j), bias(i - j).expand(B, H)), dim=-1)

    def inner(i: int, j: int) -> Tensor:
        total = constant.expand(B, -1)
        for step in range(-reach, reach + 1):
            if 0 <= j + step <= i:
                total = total + pair(i, j + step) @ into[:, :, step + reach].T
        return torch.where(total > 0, total, 0.01 * total)

    def score(i: int, j: int) -> Tensor:
        total = dot(q, k, i, j) + bias(i - j)
        for step in range(-reach, reach + 1):
            if 0 <= j + step <= i:
                total = total + inner(i, j + step) @ out[:, :, step + reach].T
        return total

    torch.testing.assert_close(attended(encoding), softmax_attention(score, v), **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("kernel", [1, 3])
def test_dape_with_a_silent_network_is_its_base(kernel: int) -> None:
    encoding = zeroed(made(DapeConfig(base=DapeBase.alibi, kernel=kernel)), "out")
    expected = attended(build(AlibiConfig(), SHAPE))
    torch.testing.assert_close(attended(encoding), expected, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("config", [DapeConfig(), DapeV2Config()], ids=["v1", "v2"])
def test_dape_in_chunks_of_rows_is_the_same(config: DapeConfig, monkeypatch: Any) -> None:
    encoding = made(config)
    whole = attended(encoding)
    monkeypatch.setattr("posbench.encodings.rescoring.INNER_PER_CHUNK", 3 * B * 32 * T)
    torch.testing.assert_close(attended(encoding), whole, **CLOSE)


@torch.no_grad()
def test_dape_starts_from_kernels_as_large_as_kerples() -> None:
    encoding = build(DapeConfig(), SHAPE._replace(layers=50))
    encoding.initialise(lambda name: torch.Generator().manual_seed(len(name)))
    p, a = encoding.get_parameter("kernels").exp().transpose(0, 1)
    assert 0.02 <= p.min() < 0.2
    assert 1.8 < p.max() <= 2
    assert 0.01 <= a.min() < 0.1
    assert 0.9 < a.max() <= 1


# ---------------------------------------------------------------- stick-breaking


@torch.no_grad()
@pytest.mark.parametrize("remainder", [False, True])
@pytest.mark.parametrize("length", [T, 131], ids=["one chunk", "two chunks"])
def test_stick_breaking_is_its_formula(remainder: bool, length: int) -> None:
    data = inputs(length)
    _, q, k, v = data
    found = attended(made(StickbreakConfig(remainder=remainder)), data)
    for i in {0, 1, 5, length - 1}:
        rest = torch.ones(B, H, dtype=torch.float64)
        total = torch.zeros(B, H, D, dtype=torch.float64)
        for j in reversed(range(i)):  # the nearest first
            share = sigmoid(dot(q, k, i, j))
            total += (rest * share).unsqueeze(-1) * v[:, :, j]
            rest = rest * (1 - share)
        if remainder:
            total += rest.unsqueeze(-1) * v[:, :, i]
        torch.testing.assert_close(found[:, :, i], total, **CLOSE)


@torch.no_grad()
def test_stick_breaking_by_hand() -> None:
    """Scores of zero: half, then half of what is left."""
    found = log_weights(torch.zeros(1, 5, dtype=torch.float64), torch.tensor([3])).exp()
    torch.testing.assert_close(found, torch.tensor([[0.125, 0.25, 0.5, 0, 0]]).double(), **CLOSE)


@torch.no_grad()
def test_stick_breaking_shares_out_one_stick() -> None:
    _, q, k, v = inputs(200)
    ones = torch.ones_like(v)
    given = stick_breaking(q, k, ones, None, remainder=False)
    assert given.max() <= 1 + 1e-12
    assert (given[:, :, :5] < 1).all()
    assert not given[:, :, 0].any()  # the first token has nothing to look at
    torch.testing.assert_close(stick_breaking(q, k, ones, None, remainder=True), ones, **CLOSE)
    extreme = stick_breaking(1e3 * q.float(), k.float(), v.float(), None, remainder=False)
    assert extreme.isfinite().all()


# ---------------------------------------------------------------- PaTH


def walked_scores(q: Tensor, k: Tensor, w: Tensor, beta: Tensor, i: int) -> Tensor:
    """Scores [B, H, i + 1] of query i by multiplying out every matrix between."""
    eye = torch.eye(q.shape[-1], dtype=torch.float64)
    product = eye.expand(*beta.shape[:2], -1, -1)
    scores = []
    for j in reversed(range(i + 1)):
        scores.append(torch.einsum("bhd,bhde,bhe->bh", q[:, :, i], product, k[:, :, j]))
        outer = w[:, :, j, :, None] * w[:, :, j, None, :]
        product = product @ (eye - beta[:, :, j, None, None] * outer)
    return torch.stack(scores[::-1], dim=-1) / math.sqrt(q.shape[-1])


@torch.no_grad()
@pytest.mark.parametrize("length", [T, 150], ids=["one chunk", "three chunks"])
def test_path_is_the_product_of_its_reflections(length: int) -> None:
    _, q, k, v = inputs(length)
    _, w, other, _ = inputs(length, seed=4)
    w, beta = w / w.norm(dim=-1, keepdim=True), 2 * sigmoid(other[..., 0])
    found = path_attention(q, k, v, None, w, beta)
    for i in {0, 1, 7, length - 1, length - 20}:
        if i < 0:
            continue
        weights = walked_scores(q, k, w, beta, i).softmax(-1).unsqueeze(-1)
        torch.testing.assert_close(found[:, :, i], (weights * v[:, :, : i + 1]).sum(2), **CLOSE)
    single = path_attention(q.float(), k.float(), v.float(), None, w.float(), beta.float())
    torch.testing.assert_close(single.double(), found, rtol=0, atol=1e-4)


@torch.no_grad()
def test_path_reflects_by_hand() -> None:
    """beta = 2 along the query: the sign turns with every token."""
    q = torch.zeros(1, 1, 70, 2, dtype=torch.float64)
    q[..., 0] = 3.0
    w = q / 3
    v = torch.randn(1, 1, 70, 2, generator=torch.Generator().manual_seed(0)).double()
    found = path_attention(q, q, v, None, w, torch.full((1, 1, 70), 2.0, dtype=torch.float64))
    distance = torch.arange(69, -1, -1)
    scores = 9 / math.sqrt(2) * (1 - 2 * (distance % 2)).double()
    expected = (scores.softmax(0).unsqueeze(-1) * v[0, 0]).sum(0)
    torch.testing.assert_close(found[0, 0, -1], expected, **CLOSE)


@torch.no_grad()
def test_path_without_reflections_is_none() -> None:
    _, q, k, v = inputs(150)
    _, w, _, _ = inputs(150, seed=4)
    found = path_attention(q, k, v, None, w, torch.zeros(B, H, 150, dtype=torch.float64))
    torch.testing.assert_close(found, attend(q, k, v, Hooks()), **CLOSE)


@torch.no_grad()
def test_path_directions_come_from_a_token_and_the_two_before() -> None:
    x, _, _, _ = inputs()
    taps = torch.randn(C, 3, generator=torch.Generator().manual_seed(0)).double()
    found = short_convolution(x, taps)
    for t in range(T):
        past = [taps[:, 2 - back] * x[:, t - back] for back in range(3) if t >= back]
        torch.testing.assert_close(found[:, t], sum(past, torch.zeros(B, C)).double(), **CLOSE)
    encoding = made(PathConfig(rank=5))
    w, beta = encoding.walk(x, LAYER)  # type: ignore[operator]
    torch.testing.assert_close(w.norm(dim=-1), torch.ones(B, H, T).double(), rtol=0, atol=1e-5)
    assert 0 < beta.min() < beta.max() < 2


# ---------------------------------------------------------------- leaks and rules


@pytest.mark.parametrize("name", ["cope", "dape_v2"])
def test_a_mask_that_was_forgotten_is_found_out(name: str, monkeypatch: Any) -> None:
    """The known leaks: a row is summed, or convolved, before its future keys are taken out."""
    contract.test_causal(name)

    def nothing(rows: Tensor, keys: int) -> Tensor:
        return torch.zeros(len(rows), keys, dtype=torch.bool)

    monkeypatch.setattr("posbench.encodings.rescoring.future", nothing)
    with pytest.raises(AssertionError):
        contract.test_causal(name)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DapeConfig(kernel=2), "encoding.kernel=2 must be odd"),
        (GrapeConfig(size=7), "encoding.size=7 must be even"),
        (CopeConfig(steps=1), "encoding.steps=1 is too small"),
        (PathConfig(rank=0), "encoding.rank=0 is too small"),
    ],
)
def test_settings_outside_their_meaning_are_refused(config: EncodingConfig, message: str) -> None:
    settings = TrainSettings(encoding=config, model=ModelConfig(layers=1, width=12, heads=3))
    with pytest.raises(UserError, match=message):
        check(settings)
