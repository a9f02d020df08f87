"""rope_partial, rope_p, rope_abf, xpos and pope against their papers' formulas, score by score.

Each reference adds up a score pair by pair or channel by channel in plain Python, from the formula
in the paper; it shares no code with the package.
"""

from __future__ import annotations

import cmath
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from posbench import configure
from posbench.config import ModelConfig
from posbench.config.encodings import (
    EncodingConfig,
    Layout,
    NoneConfig,
    PhaseInit,
    PopeConfig,
    RopeAbfConfig,
    RopeConfig,
    RopePartialConfig,
    RopePConfig,
    XposConfig,
)
from posbench.config.extensions import YarnConfig
from posbench.encodings import Encoding, Shape, build
from posbench.encodings.rotary import Pope, Xpos, kept_pairs, polar, xpos_zeta
from posbench.encodings.seeds import seeded
from posbench.errors import UnsupportedError, UserError
from posbench.model import build_model

GOLDEN: dict[str, Any] = json.loads(Path(__file__).with_name("golden_values.json").read_text())
EXACT = {"rtol": 1e-13, "atol": 1e-13}
SIZE, HEADS, TRAIN = 16, 3, 64
LAYOUTS = list(Layout)


def make(config: EncodingConfig, size: int = SIZE, train_length: int = TRAIN) -> Encoding:
    encoding = build(config, Shape(2, HEADS, size, HEADS * size, train_length))
    with torch.no_grad():
        encoding.initialise(lambda name: seeded(0, name))
    return encoding.double()


def vectors(length: int, size: int = SIZE) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    shape = (1, HEADS, length, size)
    q, k = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return q, k


def turned(encoding: Encoding, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    x = torch.zeros(1, len(positions), encoding.shape.width, dtype=q.dtype)
    rotate = encoding.hooks(x, positions, 1).rotate
    return (q, k) if rotate is None else rotate(q, k)


def products(encoding: Encoding, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
    """q.k [1, H, T, T] after the encoding, before the softmax scale."""
    turned_q, turned_k = turned(encoding, q, k, positions)
    return turned_q @ turned_k.mT


def pair(x: Tensor, c: int, pairs: int, layout: Layout) -> complex:
    """Channels of pair c as a complex number."""
    values = x.tolist()
    if layout is Layout.interleaved:
        return complex(values[2 * c], values[2 * c + 1])
    return complex(values[c], values[c + pairs])


def logits(config: EncodingConfig) -> Tensor:
    model = build_model(ModelConfig(layers=4, width=48, heads=3), config, TRAIN, 31, 0).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and not name.startswith("encoding."):
                parameter.mul_(8)
        tokens = torch.arange(100).view(1, 100) * 7 % 31
        found: Tensor = model(tokens)
    return found


def same(config: EncodingConfig, other: EncodingConfig) -> bool:
    return torch.allclose(logits(config), logits(other), rtol=0, atol=1e-9)


# ---------------------------------------------------------------- rope_partial, rope_p, rope_abf


@pytest.mark.parametrize("layout", LAYOUTS)
def test_partial_rotary_scores(layout: Layout) -> None:
    """The first 8 of 16 channels turn on a grid of their own, 1, 0.1, 0.01, 0.001."""
    encoding = make(RopePartialConfig(layout=layout))
    q, k = vectors(5)
    positions = torch.tensor([0, 1, 5, 40, 300])
    found = products(encoding, q, k, positions)
    for i in range(5):
        for j in range(5):
            score = float(q[0, 1, i, 8:] @ k[0, 1, j, 8:])
            for c, frequency in enumerate((1.0, 0.1, 0.01, 0.001)):
                turn = cmath.exp(1j * frequency * float(positions[i] - positions[j]))
                a, b = (pair(x[0, 1, n, :8], c, 4, layout) for x, n in ((q, i), (k, j)))
                score += (a * turn * b.conjugate()).real
            assert found[0, 1, i, j].item() == pytest.approx(score, abs=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_p_rope_scores(layout: Layout) -> None:
    """Six of eight pairs keep RoPE's frequencies 10000^(-c/8); the last two do not turn."""
    encoding = make(RopePConfig(layout=layout))
    q, k = vectors(5)
    positions = torch.tensor([0, 1, 5, 40, 300])
    found = products(encoding, q, k, positions)
    for i in range(5):
        for j in range(5):
            score = 0.0
            for c in range(8):
                frequency = 10_000 ** (-c / 8) if c < 6 else 0.0
                turn = cmath.exp(1j * frequency * float(positions[i] - positions[j]))
                a, b = (pair(x[0, 2, n], c, 8, layout) for x, n in ((q, i), (k, j)))
                score += (a * turn * b.conjugate()).real
            assert found[0, 2, i, j].item() == pytest.approx(score, abs=1e-12)


@pytest.mark.parametrize(
    ("pairs", "share", "kept"),
    [(8, 0.75, 6), (8, 0.0, 0), (8, 1.0, 8), (16, 0.3, 4), (100, 0.29, 29), (10, 0.7, 7)],
)
def test_p_rope_keeps_a_whole_number_of_pairs(pairs: int, share: float, kept: int) -> None:
    assert kept_pairs(pairs, share) == kept


def test_p_rope_lies_between_nope_and_rope_and_is_not_partial_rotary() -> None:
    assert torch.equal(logits(RopePConfig(share=0.0)), logits(NoneConfig()))
    assert torch.equal(logits(RopePConfig(share=1.0)), logits(RopeConfig()))
    assert not same(RopePConfig(share=0.5), RopePartialConfig(fraction=0.5))
    assert not same(RopePConfig(share=0.5), RopeConfig())


def test_partial_rotary_lies_between_nope_and_rope() -> None:
    assert torch.equal(logits(RopePartialConfig(fraction=0.0)), logits(NoneConfig()))
    assert torch.equal(logits(RopePartialConfig(fraction=1.0)), logits(RopeConfig()))
    assert torch.equal(logits(RopePartialConfig()), logits(RopeConfig(fraction=0.5)))
    assert not same(RopePartialConfig(), RopeConfig())


def test_abf_is_a_base() -> None:
    found = make(RopeAbfConfig(), size=8).describe(1)["inverse_frequencies"]
    expected = torch.tensor(GOLDEN["rope/inv_freq/d=8/base=500000"], dtype=torch.float64)
    torch.testing.assert_close(found, expected, **EXACT)
    assert torch.equal(logits(RopeAbfConfig()), logits(RopeConfig(theta=500_000.0)))


def test_nothing_turns_at_share_zero_so_nothing_is_stretched() -> None:
    with pytest.raises(UnsupportedError, match="yarn changes rotary frequencies; rope_p has none"):
        make(RopePConfig(share=0.0)).extend(YarnConfig())


# ---------------------------------------------------------------- xpos


@pytest.mark.parametrize("size", [8, 64])
def test_xpos_zeta(size: int) -> None:
    expected = torch.tensor(GOLDEN[f"xpos/zeta/d={size}"], dtype=torch.float64)
    torch.testing.assert_close(xpos_zeta(size, 0.4), expected, **EXACT)


@pytest.mark.parametrize("position", [0, 1, 128, 512, 1024, 8192])
def test_xpos_scales(position: int) -> None:
    """Golden values count from 0, a text from its middle: between -p and p the middle is 0."""
    encoding = make(XposConfig(scale_base=512.0), size=64)
    assert isinstance(encoding, Xpos)
    scales = encoding.scales(torch.tensor([-position, position]))
    expected = torch.tensor(GOLDEN[f"xpos/q_scale/d=64/B=512/pos={position}"], dtype=torch.float64)
    torch.testing.assert_close(scales[1], expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(scales[0], 1 / expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("position", [2048, 8192, 32_768])
def test_xpos_keys_grow_as_published(position: int) -> None:
    encoding = make(XposConfig(scale_base=512.0), size=64)
    assert isinstance(encoding, Xpos)
    scales = encoding.scales(torch.tensor([0, position]))[:, 0]
    published = GOLDEN["xpos/growth_at_zeta0"]
    growth = next(value for key, value in published.items() if key.endswith(f"_{position}"))
    assert (scales[0] / scales[1]).item() == pytest.approx(growth, rel=1e-12)


def test_xpos_counts_queries_and_keys_from_one_centre() -> None:
    """A query scaled as if it were the whole text would see itself in a text of 1,024 too small."""
    encoding = make(XposConfig(scale_base=512.0), size=8)
    pairs = torch.eye(4, dtype=torch.float64).repeat_interleave(2, dim=1)  # one pair each
    ones = pairs[:, None, None].expand(4, HEADS, 1024, 8)
    turned_q, turned_k = turned(encoding, ones, ones, torch.arange(1024))
    ratios = (turned_q * turned_k).sum(-1) / 2
    torch.testing.assert_close(ratios, torch.ones_like(ratios), rtol=1e-12, atol=0)
    mistake = GOLDEN["mutant/xpos/different_centres_q=1_token_k=1024/rel=0 score ratio"]
    assert (ratios[:, 0, -1] - torch.tensor(mistake)).min() > 0.1


@pytest.mark.parametrize("distance", [0, 1, 64, 512])
@pytest.mark.parametrize("offset", [0, 333])
def test_xpos_scores(distance: int, offset: int) -> None:
    encoding = make(XposConfig(scale_base=512.0), size=64)
    channel = torch.arange(64, dtype=torch.float64)
    query, key = ((7 * channel + 3) % 11 - 5) / 5, ((4 * channel + 4) % 11 - 5) / 5
    q, k = torch.zeros(2, 1, HEADS, 2, 64, dtype=torch.float64)
    q[..., 1, :], k[..., 0, :] = query, key
    found = products(encoding, q, k, torch.tensor([offset, offset + distance]))[0, 0, 1, 0]
    golden = GOLDEN[f"xpos/score/interleaved/d=64/rel={distance}"]
    assert found.item() == pytest.approx(golden, abs=1e-11)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_xpos_scores_by_the_formula(layout: Layout) -> None:
    """Pair c of a score falls by zeta_c^((i-j)/B), B half the training length; for j > i it grows.

    Other centres for q and k, or one sign for both, would leave a factor at distance 0.
    """
    encoding = make(XposConfig(layout=layout))
    q, k = vectors(6)
    positions = torch.tensor([3, 4, 9, 20, 33, 90])
    found = products(encoding, q, k, positions)
    for i in range(6):
        for j in range(6):
            score = 0.0
            distance = float(positions[i] - positions[j])
            for c in range(8):
                zeta = (2 * c / 16 + 0.4) / 1.4
                turn = cmath.exp(1j * 10_000 ** (-c / 8) * distance)
                a, b = (pair(x[0, 0, n], c, 8, layout) for x, n in ((q, i), (k, j)))
                score += zeta ** (distance / 32) * (a * turn * b.conjugate()).real
            assert found[0, 0, i, j].item() == pytest.approx(score, rel=1e-11, abs=1e-11)


def test_xpos_by_hand() -> None:
    """One pair of two channels: zeta = 0.4/1.4 = 2/7; over B tokens a score falls to 2/7 of it."""
    encoding = make(XposConfig(theta=1.0, scale_base=10.0), size=2)
    ones = torch.ones(1, HEADS, 2, 2, dtype=torch.float64)
    found = products(encoding, ones, ones, torch.tensor([0, 10]))[0, 0]
    plain = 2 * math.cos(10.0)  # one pair of frequency 1
    assert found[0, 0].item() == pytest.approx(2.0)
    assert found[1, 0].item() == pytest.approx(2 / 7 * plain)


def test_xpos_without_decay_is_rope() -> None:
    assert same(XposConfig(scale_base=1e15), RopeConfig())
    assert not same(XposConfig(), RopeConfig())


@pytest.mark.parametrize("times", [4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 1_000_000])
def test_xpos_scales_stay_small_far_beyond_training(
    times: int, dtype: torch.dtype, offset: int
) -> None:
    """Counted from the middle of the text, wherever the text begins."""
    encoding = make(XposConfig()).to(dtype)
    length = times * TRAIN
    q, k = (x.to(dtype) for x in vectors(length))
    turned_q, turned_k = turned(encoding, q, k, torch.arange(length) + offset)
    assert (turned_q.float() @ turned_k.float().mT).isfinite().all()


def test_xpos_is_finite_up_to_its_stated_length_whatever_the_base() -> None:
    """Products of pairs that causality hides grow most; at the limit they still are numbers."""
    for config in (XposConfig(), XposConfig(scale_base=8.0), XposConfig(gamma=0.1)):
        encoding = make(config)
        limit = encoding.max_length
        assert limit is not None
        q, k = torch.full((2, 1, HEADS, 2, SIZE), 100.0)
        ends = products(encoding, q, k, torch.tensor([0, limit - 1]))
        assert ends.isfinite().all()
        assert ends.abs().max() > 1e28  # the limit is no tighter than it need be
        with pytest.raises(UnsupportedError, match=f"{limit} tokens; {limit + 1} positions"):
            turned(encoding, *vectors(1), torch.arange(limit + 1))
    assert make(XposConfig()).max_length == math.floor(30 / math.log10(3.5) * TRAIN / 2)


def test_xpos_that_cannot_hold_its_training_length_is_refused() -> None:
    with pytest.raises(UserError, match=r"encoding\.scale_base=2\.0 is too small for context=128"):
        configure("train", "encoding=xpos", "encoding.scale_base=2")


# ---------------------------------------------------------------- pope


@pytest.mark.parametrize("head", range(HEADS))
def test_pope_scores(head: int) -> None:
    """softplus(q) softplus(k) cos((j - i) theta^(-c/D) + delta), for D channels; delta within."""
    encoding = make(PopeConfig(phase_init=PhaseInit.uniform))
    assert isinstance(encoding, Pope)
    with torch.no_grad():
        encoding.phases[1, :, 0], encoding.phases[1, :, 1] = 0.5, -7.0  # outside of [-2 pi, 0]
    phases = encoding.phases[1, head].tolist()
    q, k = vectors(5)
    positions = torch.tensor([2, 3, 7, 40, 300])
    turned_q, turned_k = turned(encoding, q, k, positions)
    assert turned_q.shape == turned_k.shape == (1, HEADS, 5, 2 * SIZE)
    found = turned_q @ turned_k.mT
    for i in range(5):
        for j in range(5):
            score = 0.0
            for c in range(SIZE):
                delta = min(max(phases[c], -2 * math.pi), 0.0)
                angle = float(positions[j] - positions[i]) * 10_000 ** (-c / SIZE) + delta
                sizes = [math.log1p(math.exp(x[0, head, n, c])) for x, n in ((q, i), (k, j))]
                score += sizes[0] * sizes[1] * math.cos(angle)
            assert found[0, head, i, j].item() == pytest.approx(score, abs=1e-12)


def test_pope_by_hand() -> None:
    """softplus(0) = ln 2, so two zero vectors in one place score D (ln 2)^2 at phase 0."""
    encoding = make(PopeConfig())
    zeros = torch.zeros(1, HEADS, 2, SIZE, dtype=torch.float64)
    found = products(encoding, zeros, zeros, torch.tensor([0, 5]))[0, 0]
    frequencies = 10_000 ** (-torch.arange(SIZE, dtype=torch.float64) / SIZE)
    assert found[0, 0].item() == pytest.approx(SIZE * math.log(2) ** 2)
    assert found[1, 0].item() == pytest.approx(
        math.log(2) ** 2 * (5 * frequencies).cos().sum().item()
    )


def test_pope_has_a_frequency_per_channel() -> None:
    frequencies = make(PopeConfig()).describe(1)["inverse_frequencies"]
    assert frequencies.tolist() == pytest.approx([10_000 ** (-c / SIZE) for c in range(SIZE)])


def test_pope_phases_begin_as_asked_and_learn_at_zero() -> None:
    """A clamp that stops the gradient at its own end would leave a phase of 0 for good."""
    (zero,) = make(PopeConfig()).parameters()
    (spread,) = make(PopeConfig(phase_init=PhaseInit.uniform)).parameters()
    assert not zero.any()
    assert -2 * math.pi <= spread.min() < -6
    assert -0.3 < spread.max() <= 0
    encoding = make(PopeConfig())
    q, k = vectors(4)
    products(encoding, q, k, torch.arange(4)).square().sum().backward()
    (phases,) = encoding.parameters()
    assert phases.grad is not None
    assert (phases.grad[1] != 0).all()
    assert not phases.grad[0].any()  # a phase per layer; this was layer 1


def test_pope_keeps_the_softmax_scale_of_the_head_before_widening(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from posbench import attention

    seen: list[float] = []
    monkeypatch.setitem(
        attention._KERNELS, attention.Kernel.sdpa, lambda q, k, v, hooks, scale: seen.append(scale)
    )
    encoding = make(PopeConfig())
    q, k = vectors(4)
    hooks = encoding.hooks(torch.zeros(1, 4, HEADS * SIZE), torch.arange(4), 0)
    attention.attend(q, k, k, hooks)
    assert seen == [1 / math.sqrt(SIZE)]


def test_polar_is_magnitude_and_angle() -> None:
    x = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    angles = torch.tensor([[0.3, 2.0]], dtype=torch.float64)
    points = polar(x, angles.cos(), angles.sin())
    torch.testing.assert_close(torch.hypot(points[:, :2], points[:, 2:]), x.exp().log1p(), **EXACT)
    torch.testing.assert_close(torch.atan2(points[:, 2:], points[:, :2]), angles, **EXACT)


# ---------------------------------------------------------------- all of them


@pytest.mark.parametrize("name", ["rope_p", "xpos"])
def test_an_odd_head_is_refused_where_channels_turn_in_pairs(name: str) -> None:
    with pytest.raises(UserError, match=f"encoding={name} rotates pairs of channels"):
        configure("train", f"encoding={name}", "model.width=12", "model.heads=4")
    configure("train", "encoding=pope", "model.width=12", "model.heads=4")  # a pair per channel
