"""Encodings against float64 values made by an independent implementation, and known mistakes.

golden_values.json is keyed `family/what/parameters`; `mutant/*` is what a known bug yields, and a
test here fails if the package yields it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from posbench.attention import Kernel, attend
from posbench.config.encodings import (
    ENCODINGS,
    AlibiConfig,
    Layout,
    LearnedConfig,
    RopeConfig,
    SineLayout,
    SinusoidalConfig,
)
from posbench.encodings import Encoding, Shape, build
from posbench.encodings.absolute import sinusoids
from posbench.encodings.bias import Alibi, alibi_slopes
from posbench.encodings.rotary import Rope, inverse_frequencies, rotate

GOLDEN: dict[str, Any] = json.loads(Path(__file__).with_name("golden_values.json").read_text())
EXACT = {"rtol": 1e-13, "atol": 1e-13}
LAYOUTS = list(Layout)


def golden(key: str) -> Tensor:
    return torch.tensor(GOLDEN[key], dtype=torch.float64)


def keys(prefix: str) -> list[str]:
    """Golden keys below `prefix`; never none, so that a renamed key cannot empty a test."""
    found = [key for key in GOLDEN if key.startswith(prefix)]
    assert found, prefix
    return found


def differs(value: Tensor, mutant: Tensor) -> bool:
    return not torch.allclose(value, mutant, rtol=1e-4, atol=1e-4)


def cos_sin(size: int, position: float, theta: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """cos and sin [1, pairs] at one position, float64."""
    angles = position * inverse_frequencies(size, theta).unsqueeze(0)
    return angles.cos(), angles.sin()


# ---------------------------------------------------------------- rope


@pytest.mark.parametrize("key", keys("rope/inv_freq/"))
def test_rope_inverse_frequencies(key: str) -> None:
    size, base = (int(part.split("=")[1]) for part in key.split("/")[2:])
    found = inverse_frequencies(size, float(base))
    torch.testing.assert_close(found, golden(key), **EXACT)
    assert found[0] == 1.0
    assert found[-1].item() == pytest.approx(base ** (-(size - 2) / size), rel=1e-14)


def angles_of(positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rope = Rope(RopeConfig(), Shape(layers=1, heads=1, head_size=64, width=64, train_length=128))
    return rope.to(torch.bfloat16).angles(positions, dtype)


def test_rope_cosines_and_sines() -> None:
    cos, sin = angles_of(golden("rope/positions").long(), torch.float64)
    # 16,383 radians are known to some 1e-12 in float64.
    torch.testing.assert_close(cos, golden("rope/cos/d=64/base=10000"), rtol=0, atol=1e-11)
    torch.testing.assert_close(sin, golden("rope/sin/d=64/base=10000"), rtol=0, atol=1e-11)


@pytest.mark.parametrize("position", GOLDEN["rope/bf16_damage/d=64"])
def test_rope_in_a_bfloat16_model_has_none_of_the_known_damage(position: str) -> None:
    """Frequencies, positions or angles rounded to 16 bits, or angles in float32."""
    damage = GOLDEN["rope/bf16_damage/d=64"][position]
    least = min(error for how, error in damage.items() if how != "ok_cast_after" and error > 0)
    angles = int(position) * golden("rope/inv_freq/d=64/base=10000")
    cos, sin = angles_of(torch.tensor([int(position)]), torch.float32)
    for found, exact in ((cos[0], angles.cos()), (sin[0], angles.sin())):
        assert (found.double() - exact).abs().max() < least / 5


@pytest.mark.parametrize("key", keys("rope/rotated/"))
def test_rope_rotates_each_layout_as_published(key: str) -> None:
    _, _, layout, _, position = key.split("/")
    turned = rotate(
        golden("rope/probe/d=8").unsqueeze(0),
        *cos_sin(8, float(position.removeprefix("pos="))),
        Layout(layout),
    )
    torch.testing.assert_close(turned[0], golden(key), **EXACT)


@pytest.mark.parametrize("position", [1, 5])
def test_rope_layouts_are_not_mixed_up(position: int) -> None:
    probe = golden("rope/probe/d=8").unsqueeze(0)
    interleaved = rotate(probe, *cos_sin(8, position), Layout.interleaved)[0]
    half = rotate(probe, *cos_sin(8, position), Layout.half)[0]
    assert differs(interleaved, golden(f"rope/rotated/half/d=8/pos={position}"))
    assert differs(half, golden(f"rope/rotated/interleaved/d=8/pos={position}"))


def test_rope_half_is_interleaved_under_a_permutation() -> None:
    permutation = torch.tensor(GOLDEN["rope/perm_half_to_interleaved/d=8"])
    torch.manual_seed(0)
    x = torch.randn(3, 8, dtype=torch.float64)
    angles = torch.outer(torch.tensor([1.0, 5.0, 77.0]).double(), inverse_frequencies(8, 1e4))
    cos, sin = angles.cos(), angles.sin()
    half = rotate(x, cos, sin, Layout.half)
    interleaved = rotate(x[:, permutation], cos, sin, Layout.interleaved)
    torch.testing.assert_close(half[:, permutation], interleaved, **EXACT)


@pytest.mark.parametrize("key", keys("rope/score/"))
@pytest.mark.parametrize("shift", [0, 1, 1000])
def test_rope_score_depends_on_the_distance_alone(key: str, shift: int) -> None:
    layout = Layout(key.split("/")[2])
    distance = int(key.rsplit("=", 1)[1])
    channel = torch.arange(64, dtype=torch.float64)
    query, key_vector = ((7 * channel + 3) % 11 - 5) / 5, ((4 * channel + 4) % 11 - 5) / 5
    turned_query = rotate(query.unsqueeze(0), *cos_sin(64, shift + distance), layout)
    turned_key = rotate(key_vector.unsqueeze(0), *cos_sin(64, shift), layout)
    torch.testing.assert_close((turned_query * turned_key).sum(), golden(key), rtol=0, atol=1e-11)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rope_keeps_the_norm_of_every_pair(layout: Layout) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 64, dtype=torch.float64)
    turned = rotate(x, *cos_sin(64, 12_345), layout)
    if layout is Layout.interleaved:
        before, after = x.view(32, 2), turned.view(32, 2)
    else:
        before, after = x.view(2, 32).T, turned.view(2, 32).T
    torch.testing.assert_close(after.norm(dim=1), before.norm(dim=1), **EXACT)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rope_leaves_the_channels_beyond_its_fraction_alone(layout: Layout) -> None:
    shape = Shape(layers=1, heads=3, head_size=16, width=48, train_length=17)
    rope = Rope(RopeConfig(fraction=0.5, layout=layout), shape)
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 17, 16), torch.randn(2, 3, 17, 16)  # as many heads as no other axis
    hooks = rope.hooks(torch.zeros(2, 17, 48), torch.arange(17), 0)
    assert hooks.rotate is not None
    turned_q, turned_k = hooks.rotate(q, k)
    assert torch.equal(turned_q[..., 8:], q[..., 8:])
    assert torch.equal(turned_k[..., 8:], k[..., 8:])
    # The rotated part is a rope of its own size, not the fast half of a larger one.
    alone = rotate(q[..., :8].double(), *_angles(8, 17), layout)
    torch.testing.assert_close(turned_q[..., :8].double(), alone, rtol=0, atol=1e-5)
    assert not torch.equal(turned_q[:, :, 1:, :8], q[:, :, 1:, :8])


def _angles(size: int, length: int) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(length, dtype=torch.float64), inverse_frequencies(size, 1e4))
    return angles.cos(), angles.sin()


# ---------------------------------------------------------------- sinusoidal


@pytest.mark.parametrize("key", keys("sinusoidal/"))
def test_sinusoidal_table(key: str) -> None:
    _, layout, width, _ = key.split("/")
    positions = torch.tensor([0, 1, 2, 50])
    found = sinusoids(positions, int(width.removeprefix("d=")), 10_000.0, SineLayout(layout))
    torch.testing.assert_close(found, golden(key), **EXACT)


def test_sinusoidal_cosines_share_the_frequency_of_their_sine() -> None:
    found = sinusoids(torch.tensor([50]), 8, 10_000.0, SineLayout.interleaved)[0]
    assert differs(found, golden("mutant/sinusoidal/cos_uses_own_index/d=8/pos=50"))
    table = sinusoids(torch.arange(40), 8, 10_000.0, SineLayout.interleaved)
    products = table @ table.T  # depends on the distance alone: constant along each diagonal
    for distance in (0, 1, 7):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), **EXACT)


@pytest.mark.parametrize("scale", [0.02, 1.0])
def test_sinusoidal_is_added_at_its_scale(scale: float) -> None:
    shape = Shape(layers=1, heads=2, head_size=4, width=8, train_length=4)
    encoding = build(SinusoidalConfig(scale=scale), shape)
    x = torch.full((2, 4, 8), 0.25, dtype=torch.float64)
    expected = 0.25 + scale * golden("sinusoidal/interleaved/d=8/pos=0,1,2,50")
    found = encoding.embed(x, torch.tensor([0, 1, 2, 50]))
    torch.testing.assert_close(found, expected.expand(2, -1, -1), **EXACT)


# ---------------------------------------------------------------- alibi


def published_slopes(heads: int) -> list[float]:
    """The rule of Press et al.'s code, recursive as they wrote it."""
    if heads & (heads - 1) == 0:
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**head for head in range(heads)]
    power = 2 ** math.floor(math.log2(heads))
    return published_slopes(power) + published_slopes(2 * power)[0::2][: heads - power]


@pytest.mark.parametrize("key", keys("alibi/slopes/"))
def test_alibi_slopes(key: str) -> None:
    heads = int(key.rsplit("=", 1)[1])
    torch.testing.assert_close(alibi_slopes(heads), golden(key), **EXACT)


@pytest.mark.parametrize("heads", range(1, 65))
def test_alibi_slopes_of_any_number_of_heads(heads: int) -> None:
    found = alibi_slopes(heads)
    assert found.dtype is torch.float64
    assert len(found) == heads
    assert len(set(found.tolist())) == heads
    assert found.min() > 0
    assert found.max() < 1
    expected = torch.tensor(published_slopes(heads), dtype=torch.float64)
    torch.testing.assert_close(found, expected, **EXACT)


def test_alibi_slopes_of_twelve_heads_do_not_fall_monotonically() -> None:
    halvings = [2.0**-n for n in range(1, 9)]
    rest = [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]
    expected = torch.tensor(halvings + rest, dtype=torch.float64)
    torch.testing.assert_close(alibi_slopes(12), expected, **EXACT)


@pytest.mark.parametrize("key", keys("mutant/alibi/naive_slopes/"))
def test_alibi_slopes_are_not_the_naive_formula(key: str) -> None:
    assert differs(alibi_slopes(int(key.rsplit("=", 1)[1])), golden(key))


def test_alibi_slopes_do_not_start_at_one() -> None:
    assert differs(alibi_slopes(8), golden("mutant/alibi/off_by_one/H=8"))


@pytest.mark.parametrize("heads", [2, 4, 6, 12, 16])
def test_alibi_slopes_are_not_powers_of_one_half(heads: int) -> None:
    """1/2^h, head by head, as tutorials have it, is right for eight heads only."""
    tutorial = torch.tensor([2.0 ** -(h + 1) for h in range(heads)], dtype=torch.float64)
    assert differs(alibi_slopes(heads), tutorial)
    assert torch.equal(alibi_slopes(8), 2.0 ** -torch.arange(1, 9, dtype=torch.float64))


def alibi_bias(heads: int, distances: Tensor) -> Tensor:
    alibi = Alibi(AlibiConfig(), Shape(1, heads, 4, 4 * heads, 8))
    bias = alibi.hooks(torch.zeros(1, 1, 4 * heads), torch.arange(1), 0).distance_bias
    assert bias is not None
    return bias(distances)


def test_alibi_bias() -> None:
    distances = torch.arange(5).view(-1, 1) - torch.arange(5)
    bias = alibi_bias(2, distances.clamp(min=0).double())
    masked = bias.masked_fill(distances < 0, -1e30)
    torch.testing.assert_close(masked, golden("alibi/bias/H=2/L=5"), **EXACT)
    last = alibi_bias(2, (4 - torch.arange(5)).double()).unsqueeze(1)
    torch.testing.assert_close(last, golden("alibi/bias/H=2/Lq=1/Lk=5"), **EXACT)


@pytest.mark.parametrize("heads", [3, 12, 20])
def test_alibi_slopes_are_not_rounded_on_the_way_to_a_bias(heads: int) -> None:
    distances = torch.arange(2048)
    exact = torch.outer(-torch.tensor(published_slopes(heads)).double(), distances.double())
    found = alibi_bias(heads, distances.float()).double()
    torch.testing.assert_close(found, exact, rtol=2e-7, atol=0)


@pytest.mark.parametrize("shape", [(7,), (5, 7), (1, 1)])
def test_alibi_bias_has_a_leading_axis_of_heads(shape: tuple[int, ...]) -> None:
    distances = torch.arange(math.prod(shape)).view(shape).float()
    bias = alibi_bias(3, distances)
    assert bias.shape == (3, *shape)
    assert bias.dtype is torch.float32
    assert (bias <= 0).all()


def test_alibi_key_only_form_gives_the_same_attention() -> None:
    """slope * j and -slope * (i - j) differ by a constant of the row, which softmax ignores."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 6, 20, 8, dtype=torch.float64) for _ in range(3))
    alibi = Alibi(AlibiConfig(), Shape(1, 6, 8, 48, 20))
    relative = alibi.hooks(torch.zeros(2, 20, 48), torch.arange(20), 0)
    key_only = (alibi_slopes(6).unsqueeze(1) * torch.arange(20)).expand(2, 6, 20)
    found = attend(q, k, v, relative._replace(distance_bias=None, key_bias=key_only), Kernel.dense)
    expected = attend(q, k, v, relative, Kernel.dense)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


# ---------------------------------------------------------------- learned, and the table


def test_learned_adds_one_row_per_position() -> None:
    learned = build(LearnedConfig(), Shape(1, 2, 4, 8, 6))
    learned.initialise(lambda name: torch.Generator().manual_seed(1))
    table = dict(learned.named_parameters())["table"]
    assert table.shape == (6, 8)
    assert table.std().item() == pytest.approx(0.02, rel=0.5)
    found = learned.embed(torch.zeros(2, 3, 8), torch.tensor([5, 0, 2]))
    assert torch.equal(found, table[[5, 0, 2]].expand(2, -1, -1))


@pytest.mark.parametrize("name", sorted(ENCODINGS))
def test_describe_tells_the_numbers_behind_the_scheme(name: str) -> None:
    """What `inspect` prints is what the layers use."""
    encoding = build(ENCODINGS[name](), Shape(1, 6, 8, 48, 16))
    encoding.initialise(lambda _: torch.Generator().manual_seed(0))
    described = encoding.describe(16)
    x, positions = torch.zeros(1, 16, 48, dtype=torch.float64), torch.arange(16)
    if "table" in described:
        torch.testing.assert_close(encoding.embed(x, positions)[0], described["table"].double())
    if "inverse_frequencies" in described:
        plain = inverse_frequencies(8, 10_000.0)
        own = {
            "rope_partial": inverse_frequencies(4, 10_000.0),
            "rope_p": plain * torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64),
            "rope_abf": inverse_frequencies(8, 500_000.0),
            "fope": plain * torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64),
            "pope": inverse_frequencies(16, 10_000.0),
        }
        assert torch.equal(described["inverse_frequencies"], own.get(name, plain))
    if "global_inverse_frequencies" in described:
        expected = inverse_frequencies(8, 1_000_000.0)
        assert torch.equal(described["global_inverse_frequencies"], expected)
    if "slopes" in described:
        bias = encoding.hooks(x, positions, 0).distance_bias
        assert bias is not None
        assert torch.equal(-bias(torch.ones(1, dtype=torch.float64))[:, 0], described["slopes"])
    silent = type(encoding).describe is Encoding.describe
    assert bool(described) != silent
    assert not (silent and encoding.parameter_count())
