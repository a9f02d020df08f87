"""FoPE against its formula, pair by pair in plain Python; and that its fixed numbers are random."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from posbench import configure
from posbench.config import ModelConfig
from posbench.config.encodings import EncodingConfig, FopeConfig, Layout, RopeConfig, RopePConfig
from posbench.config.extensions import ExtensionConfig, NoExtensionConfig, YarnConfig
from posbench.encodings import Shape, build
from posbench.encodings.fourier import Fope, hashed, normal_numbers, xavier_std
from posbench.errors import UserError
from posbench.model import build_model

SIZE, HEADS, TRAIN = 16, 3, 64
PAIRS = 8
KEPT = 3  # of 1, 0.316, 0.1, 0.0316, ...: 2 pi / 64 is 0.098


def make(config: FopeConfig | None = None, heads: int = HEADS, train_length: int = TRAIN) -> Fope:
    shape = Shape(2, heads, SIZE, heads * SIZE, train_length)
    encoding = build(config or FopeConfig(), shape)
    assert isinstance(encoding, Fope)
    return encoding


def vectors(length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    q, k = torch.randn(2, 1, HEADS, length, SIZE, generator=generator, dtype=torch.float64)
    return q, k


def products(encoding: Fope, q: Tensor, k: Tensor, positions: Tensor, layer: int) -> Tensor:
    x = torch.zeros(1, len(positions), encoding.shape.width, dtype=torch.float64)
    rotate = encoding.hooks(x, positions, layer).rotate
    assert rotate is not None
    turned_q, turned_k = rotate(q, k)
    return turned_q @ turned_k.mT


def pair(x: Tensor, c: int, layout: Layout) -> complex:
    """Channels of pair c as a complex number."""
    values = x.tolist()
    if layout is Layout.interleaved:
        return complex(values[2 * c], values[2 * c + 1])
    return complex(values[c], values[c + PAIRS])


def factor_by_hand(
    frequencies: list[float], for_cos: list[list[float]], for_sin: list[list[float]], p: float
) -> list[complex]:
    """What each pair is multiplied by at position p; slow ones by 1 = e^(i 0 p)."""
    factors = []
    for m, own in enumerate(frequencies):
        cos, sin = math.cos(own * p), math.sin(own * p)
        for w, other in enumerate(frequencies):
            cos += for_cos[w][m] * math.cos(other * p)
            sin += for_sin[w][m] * math.sin(other * p)
        factors.append(complex(cos, sin))
    return factors + [1 + 0j] * (PAIRS - len(frequencies))


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("extension", [NoExtensionConfig(), YarnConfig()], ids=["plain", "yarn"])
def test_scores(layout: Layout, layer: int, extension: ExtensionConfig) -> None:
    """Score = sum over pairs of Re(q g(i) conj(k g(j))), g a Fourier series of its head."""
    encoding = make(FopeConfig(layout=layout, gain=1.0))
    encoding.extend(extension)
    q, k = vectors(5)
    positions = torch.tensor([0, 1, 5, 40, 300])
    found = products(encoding, q, k, positions, layer)
    frequencies, scale = [10_000 ** (-c / PAIRS) for c in range(KEPT)], 1.0
    if isinstance(extension, YarnConfig):
        # Five positions are within the training length: s = 1 changes nothing, so fix s.
        encoding.extend(YarnConfig(factor=4.0))
        found = products(encoding, q, k, positions, layer)
        described = encoding.describe(5)
        stretched = described["inverse_frequencies"].tolist()
        assert stretched[:KEPT] != pytest.approx(frequencies)
        assert stretched[KEPT:] == [0.0] * (PAIRS - KEPT)
        frequencies, scale = stretched[:KEPT], 0.1 * math.log(4) + 1
    for head in range(HEADS):
        for_cos, for_sin = (a[head].tolist() for a in encoding.coefficients(layer, None))
        g = [factor_by_hand(frequencies, for_cos, for_sin, float(p)) for p in positions]
        for i in range(5):
            for j in range(5):
                score = 0.0
                for c in range(PAIRS):
                    a, b = (pair(x[0, head, n], c, layout) for x, n in ((q, i), (k, j)))
                    score += (a * g[i][c] * (b * g[j][c]).conjugate()).real
                score *= scale**2
                assert found[0, head, i, j].item() == pytest.approx(score, abs=1e-11)


def test_by_hand() -> None:
    """One pair that turns: at p it is cos p (1 + a) and sin p (1 + b); a score is no distance's."""
    encoding = make(FopeConfig(turns=TRAIN / (2 * math.pi)), heads=1)
    assert encoding.kept == 1
    (a,), (b,) = encoding.coefficients(0, None).flatten(1).tolist()
    q = torch.zeros(1, 1, 3, SIZE, dtype=torch.float64)
    q[..., 0] = 1.0
    found = products(encoding, q, q, torch.tensor([0, 2, 4]), 0)[0, 0]
    points = [(math.cos(p) * (1 + a), math.sin(p) * (1 + b)) for p in (0, 2, 4)]
    for i, (x, y) in enumerate(points):
        for j, (u, v) in enumerate(points):
            assert found[i, j].item() == pytest.approx(x * u + y * v, abs=1e-12)
    assert abs(found[1, 0].item() - found[2, 1].item()) > 1e-3


# ---------------------------------------------------------------- which frequencies are kept


@pytest.mark.parametrize(
    ("train_length", "turns", "kept"),
    [
        (64, 1.0, 3),
        (63, 1.0, 3),
        (62, 1.0, 2),
        (20, 1.0, 2),
        (64, 0.0, 8),
        (64, 0.01, 7),
        (7, 1, 1),
    ],
)
def test_frequencies_that_finish_no_turn_are_cut(
    train_length: int, turns: float, kept: int
) -> None:
    encoding = make(FopeConfig(turns=turns), train_length=train_length)
    plain = [10_000 ** (-c / PAIRS) for c in range(PAIRS)]
    expected = [f if f * train_length >= 2 * math.pi * turns else 0.0 for f in plain]
    assert sum(f > 0 for f in expected) == kept
    assert encoding.describe(1)["inverse_frequencies"].tolist() == pytest.approx(expected)
    assert encoding.coefficients(0, None).shape == (2, HEADS, kept, kept)


def test_the_length_evaluated_cuts_nothing() -> None:
    encoding = make()
    assert torch.equal(
        encoding.describe(16)["inverse_frequencies"], encoding.describe(512)["inverse_frequencies"]
    )


def test_a_text_without_one_turn_is_refused() -> None:
    with pytest.raises(UserError, match=r"encoding\.turns=1\.0 leaves no frequency at context=6"):
        configure("train", "encoding=fope", "context=6")
    configure("train", "encoding=fope", "context=7")
    configure("train", "encoding=fope", "context=6", "encoding.turns=0.5")


# ---------------------------------------------------------------- identities


def logits(config: EncodingConfig) -> Tensor:
    model = build_model(ModelConfig(layers=2, width=48, heads=3), config, TRAIN, 31, 0).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and not name.startswith("encoding."):
                parameter.mul_(8)
        found: Tensor = model(torch.arange(100).view(1, 100) * 7 % 31)
    return found


def test_without_coefficients_it_is_rope_with_or_without_its_slow_pairs() -> None:
    assert torch.equal(logits(FopeConfig(gain=0.0, turns=0.0)), logits(RopeConfig()))
    assert torch.equal(logits(FopeConfig(gain=0.0)), logits(RopePConfig(share=KEPT / PAIRS)))
    plain = make(FopeConfig(gain=0.0))
    assert plain.relative
    assert plain.keeps_norm


def test_each_setting_changes_the_logits() -> None:
    plain = logits(FopeConfig())
    for other in (
        RopePConfig(share=KEPT / PAIRS),
        FopeConfig(turns=0.0),
        FopeConfig(gain=0.6),
        FopeConfig(seed=1),
        FopeConfig(theta=500.0),
        FopeConfig(layout=Layout.half),
    ):
        assert (logits(other) - plain).abs().max() > 1e-3, other


# ---------------------------------------------------------------- the fixed coefficients


def test_coefficients_differ_by_layer_head_and_seed_and_never_by_call() -> None:
    encoding = make(FopeConfig(turns=0.0))
    first = encoding.coefficients(1, None)
    torch.rand(5)
    other = encoding.coefficients(0, None)
    assert torch.equal(encoding.coefficients(1, None), first)
    tables = [*first.flatten(0, 1), *other.flatten(0, 1)]
    tables += make(FopeConfig(turns=0.0, seed=1)).coefficients(1, None).flatten(0, 1)
    assert len(tables) == 3 * 2 * HEADS
    numbers = torch.cat([table.flatten() for table in tables])
    assert len(numbers.unique()) == len(numbers)


def test_their_size_is_xaviers() -> None:
    """As torch draws it for a tensor [H, M, M]; 64 * 48 * 48 numbers tell a std to 0.2 %."""
    drawn = torch.empty(64, 48, 48, dtype=torch.float64)
    nn.init.xavier_normal_(drawn, gain=0.3, generator=torch.Generator().manual_seed(0))
    assert xavier_std(0.3, 64, 48) == pytest.approx(drawn.std().item(), rel=0.01)
    found = make(FopeConfig(turns=0.0), heads=512).coefficients(0, None)
    assert found.std().item() == pytest.approx(0.3 * math.sqrt(2 / (64 + 512 * 8)), rel=0.02)
    assert abs(found.mean().item()) < 4 * found.std().item() / math.sqrt(found.numel())


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
@pytest.mark.parametrize("layer", [0, 11])
def test_normal_numbers_are_normal_and_independent(seed: int, layer: int) -> None:
    """Within four standard errors, and the largest deviation of the distribution within 1.9/sqrt n.

    The latter is exceeded once in 700 by truly random numbers (Kolmogorov).
    """
    numbers = normal_numbers((20_000,), seed, layer)
    count = len(numbers)
    ordered = torch.special.ndtr(numbers.sort().values)
    expected = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    assert (ordered - expected).abs().max() < 1.9 / math.sqrt(count)
    assert numbers.abs().max() < 5.5  # one normal number in 26 million is larger
    for lag in (1, 2, 3, 8, 16, 64, 256, 1024):
        assert abs((numbers[lag:] * numbers[:-lag]).mean()) < 4 / math.sqrt(count - lag)
    for other in (normal_numbers((count,), seed, layer + 1), normal_numbers((count,), 7, layer)):
        assert abs((numbers * other).mean()) < 4 / math.sqrt(count)


def test_the_hash_is_one_to_one_and_the_same_for_numbers_and_tensors() -> None:
    places = torch.cat((torch.arange(5000), 2**32 - 1 - torch.arange(5000)))
    found = hashed(places)
    assert found.tolist() == [hashed(int(place)) for place in places]
    assert found.min() >= 0
    assert found.max() < 2**32
    assert len(found.unique()) == len(places)
    # Any one bit that changes in the input changes about half of those in the output.
    changed = torch.stack([hashed(places) ^ hashed(places ^ (1 << bit)) for bit in range(32)])
    share = torch.stack([(changed >> bit & 1).double().mean() for bit in range(32)])
    assert (share - 0.5).abs().max() < 0.02
