"""Biases and relative encodings against values made elsewhere, formulas written out, identities.

golden_values.json is keyed `family/what/parameters`; `mutant/*` is what a known bug yields, and a
test here fails if the package yields it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from posbench.attention import Kernel, attend, score_rows
from posbench.config import TrainSettings
from posbench.config.encodings import (
    ENCODINGS,
    AlibiConfig,
    DistanceScale,
    DpbConfig,
    EncodingConfig,
    FireConfig,
    SandwichConfig,
    ShawConfig,
    T5Config,
    TxlConfig,
)
from posbench.encodings import Encoding, Shape, build
from posbench.encodings.bias import alibi_slopes, sandwich
from posbench.encodings.learned_bias import kerple_log, kerple_power, t5_starts
from posbench.encodings.relative import fire_input
from posbench.encodings.seeds import seeded
from posbench.errors import UserError
from posbench.rules import check

GOLDEN: dict[str, Any] = json.loads(Path(__file__).with_name("golden_values.json").read_text())
EXACT = {"rtol": 1e-13, "atol": 1e-13}
FAR = torch.tensor([0, 1, 2, 10, 100, 512, 1023, 4095], dtype=torch.float64)
SHAPE = Shape(layers=2, heads=3, head_size=4, width=12, train_length=20)  # no two axes alike


def exact(values: Any) -> Tensor:
    """float64, and not by way of float32."""
    return torch.tensor(values, dtype=torch.float64)


def golden(key: str) -> Tensor:
    return exact(GOLDEN[key])


def keys(prefix: str) -> list[str]:
    """Golden keys below `prefix`; never none, so that a renamed key cannot empty a test."""
    found = [key for key in GOLDEN if key.startswith(prefix)]
    assert found, prefix
    return found


def differs(value: Tensor, mutant: Tensor) -> bool:
    return not torch.allclose(value, mutant, rtol=1e-4, atol=1e-4)


def make(config: EncodingConfig, shape: Shape = SHAPE) -> Encoding:
    """The encoding in float64 with the weights of seed 0."""
    encoding = build(config, shape)
    with torch.no_grad():
        encoding.initialise(lambda name: seeded(0, name))
    return encoding.double()


def bias_of(encoding: Encoding, distances: Tensor, layer: int = 0) -> Tensor:
    """Bias [H, ...] of a distance-only encoding."""
    x = torch.zeros(1, 1, encoding.shape.width, dtype=torch.float64)
    bias = encoding.hooks(x, torch.arange(1), layer).distance_bias
    assert bias is not None
    return bias(distances)


def set_all(encoding: Encoding, values: dict[str, Tensor]) -> None:
    """Overwrite each parameter whose name starts with a key, in every layer."""
    for prefix, value in values.items():
        named = [p for name, p in encoding.named_parameters() if name.startswith(f"{prefix}.")]
        assert named, prefix
        with torch.no_grad():
            for parameter in named:
                parameter.copy_(value)


# ---------------------------------------------------------------- t5


def t5_buckets(distances: Tensor, buckets: int, max_distance: int | None, length: int) -> Tensor:
    """The bucket of each distance, read off a table that holds its own row numbers."""
    config = T5Config(buckets=buckets, max_distance=max_distance, scale=1.0)
    t5 = make(config, SHAPE._replace(train_length=length))
    rows = dict(t5.named_parameters())["table.0"].shape[0]
    set_all(t5, {"table": torch.arange(rows, dtype=torch.float64).unsqueeze(1)})
    return bias_of(t5, distances.double())[0].long()


def published_bucket(distance: int, buckets: int, max_distance: int) -> int:
    """The rule of T5's code for a causal decoder, one number at a time."""
    half = buckets // 2
    if distance < half:
        return distance
    share = math.log(distance / half) / math.log(max_distance / half)
    return min(half + int(share * half), buckets - 1)


def test_t5_buckets_are_the_published_ones() -> None:
    distances = torch.arange(301)
    found = t5_buckets(distances, 32, 128, 128)
    assert found.tolist() == GOLDEN["t5/causal/nb=32/maxd=128/dist=0..300"]
    first = [found.tolist().index(bucket) for bucket in range(32)]
    assert first == GOLDEN["t5/causal/first_distance_of_bucket/nb=32/maxd=128"]
    assert list(t5_starts(32, 128)) == first
    assert found[[112, 113]].tolist() == [30, 31]  # the last bucket does not start at 128
    assert found[[128, 256, 300]].tolist() != GOLDEN["mutant/t5/no_min_clip/dist=128,256,300"]
    assert found[:41].tolist() != GOLDEN["mutant/t5/bidirectional_on_causal/dist=0..40"]
    assert found[:6].tolist() != GOLDEN["mutant/t5/sign_flipped/dist=0..5"]


@pytest.mark.parametrize("buckets", [2, 8, 20, 32, 64])
@pytest.mark.parametrize("max_distance", [33, 96, 512, 4096])
def test_t5_buckets_of_other_sizes(buckets: int, max_distance: int) -> None:
    distances = [*range(600), max_distance - 1, max_distance, 10**6]
    found = t5_buckets(torch.tensor(distances), buckets, max_distance, 128)
    expected = [published_bucket(distance, buckets, max_distance) for distance in distances]
    assert found.tolist() == expected


@pytest.mark.parametrize("length", [2, 3, 16, 17, 31, 33, 64, 100, 128, 512])
def test_t5_reads_no_bucket_beyond_training_that_training_did_not_fill(length: int) -> None:
    seen = set(t5_buckets(torch.arange(length), 32, None, length).tolist())
    beyond = set(t5_buckets(torch.arange(8 * length), 32, None, length).tolist())
    assert beyond == seen
    # The published constants do not have it at a short training length.
    if 16 < length < 113:
        seen = set(t5_buckets(torch.arange(length), 32, 128, length).tolist())
        assert set(t5_buckets(torch.arange(8 * length), 32, 128, length).tolist()) > seen


def test_t5_scales_its_table_by_the_root_of_the_head_size_unless_told() -> None:
    for config, factor in ((T5Config(), 2.0), (T5Config(scale=1.0), 1.0), (T5Config(scale=3), 3.0)):
        t5 = make(config)
        table = dict(t5.named_parameters())["table.0"]
        found = bias_of(t5, torch.tensor([3.0], dtype=torch.float64))[:, 0]
        torch.testing.assert_close(found, factor * table[3], **EXACT)


# ---------------------------------------------------------------- kerple


@pytest.mark.parametrize("key", keys("kerple_"))
def test_kerple(key: str) -> None:
    name, r1, r2 = key.split("/")
    first, second = (exact([float(part.split("=")[1])]) for part in (r1, r2))
    rule = (
        kerple_log(FAR, first, second) if name == "kerple_log" else kerple_power(FAR, second, first)
    )
    torch.testing.assert_close(rule[0], golden(key), **EXACT)


def test_kerple_per_head() -> None:
    p, a = exact([0.5, 2.0]), exact([3.0, 0.25])
    distances = exact([[0.0, 4.0]])
    log = [[[0.0, -0.5 * math.log(13)]], [[0.0, -2 * math.log(2)]]]
    torch.testing.assert_close(kerple_log(distances, p, a), exact(log), **EXACT)
    power = [[[0.0, -3.0 * 2]], [[0.0, -0.25 * 16]]]
    torch.testing.assert_close(kerple_power(distances, p, a), exact(power), **EXACT)


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power"])
@pytest.mark.parametrize("raw", [-30.0, 0.0, 30.0])
def test_kerple_falls_with_distance_whatever_training_does(name: str, raw: float) -> None:
    kerple = make(ENCODINGS[name]())
    set_all(kerple, {"p": torch.tensor(raw), "a": torch.tensor(raw)})
    bias = bias_of(kerple, FAR)
    assert (bias[:, 0] == 0).all()
    assert (bias.diff(dim=1) < 0).all()
    if name == "kerple_power":  # the exponent is at most 2
        ratio = (bias[:, 4] / bias[:, 3]).log10()  # from distance 10 to 100
        assert (ratio <= 2 + 1e-12).all()
        assert (ratio > 0).all()


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kerple_has_a_finite_gradient_at_distance_0(name: str, dtype: torch.dtype) -> None:
    kerple = make(ENCODINGS[name]()).to(dtype)
    bias_of(kerple, torch.zeros(1, dtype=dtype)).sum().backward()
    for parameter in kerple.parameters():
        assert parameter.grad is not None
        assert (parameter.grad == 0).all()  # and not 0 * log 0
    bias_of(kerple, torch.ones(1, dtype=dtype) * 2).sum().backward()
    assert all((parameter.grad != 0).all() for parameter in kerple.parameters())


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power"])
def test_kerple_starts_where_the_paper_starts(name: str) -> None:
    kerple = make(ENCODINGS[name](), SHAPE._replace(heads=2000))
    one = -bias_of(kerple, exact([1.0, 2.0, 1e9]))
    if name == "kerple_power":
        a, p = one[:, 0], (one[:, 1] / one[:, 0]).log2()
    else:  # p log(1 + a r): the ratio at far distances gives a by bisection, so read the weights
        weights = dict(kerple.named_parameters())
        p, a = (weights[f"{which}.0"].exp().log1p().detach() for which in "pa")
        torch.testing.assert_close(one[:, 0], p * (1 + a).log(), rtol=1e-9, atol=1e-12)
    for values, most in ((p, 2.0), (a, 1.0)):
        assert values.min() >= 0.01 - 1e-6
        assert values.max() <= most
        assert values.mean().item() == pytest.approx(most / 2, rel=0.05)  # uniform
        assert values.std().item() == pytest.approx(most / math.sqrt(12), rel=0.05)


# ---------------------------------------------------------------- sandwich


def test_sandwich() -> None:
    values = GOLDEN["sandwich/D=128/H=4"]
    distances = exact(values["distances"])
    found = bias_of(make(SandwichConfig(), Shape(1, 4, 32, 128, 64)), distances)
    expected = exact(values["bias"])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-11)
    for mutant in keys("mutant/sandwich/"):
        assert all(differs(row, golden(mutant)) for row in found)


@pytest.mark.parametrize("heads", [1, 3, 12])
def test_sandwich_is_the_product_of_two_embeddings(heads: int) -> None:
    """cos a cos b + sin a sin b, from the angles of each position by itself."""
    angles = [[place * 500.0 ** (-2 * k / 10) for k in range(1, 6)] for place in (70, 57)]
    product = sum(
        math.cos(a) * math.cos(b) + math.sin(a) * math.sin(b) for a, b in zip(*angles, strict=True)
    )
    found = sandwich(exact([13.0]), heads, 10, 500.0)[:, 0]
    expected = [(product - 5) / (8 * head / heads) for head in range(1, heads + 1)]
    torch.testing.assert_close(found, exact(expected), **EXACT)


@pytest.mark.parametrize("dimension", [2, 64, 128])
def test_sandwich_is_bounded(dimension: int) -> None:
    heads = 6
    bias = sandwich(torch.arange(20_000).double(), heads, dimension, 10_000.0)
    bound = dimension / (8 * torch.arange(1, heads + 1).double() / heads)
    assert (bias <= 0).all()
    assert (bias >= -bound.unsqueeze(1)).all()


# ---------------------------------------------------------------- dpb


@pytest.mark.parametrize("scale", DistanceScale)
def test_dpb_is_the_network_written_out(scale: DistanceScale) -> None:
    dpb = make(DpbConfig(width=5, distance=scale))
    weights = {name.split(".")[0]: p.tolist() for name, p in dpb.named_parameters()}

    def silu(value: float) -> float:
        return value / (1 + math.exp(-value))

    for distance in (0, 1, 7, 80):
        entry = math.log(1 + distance) if scale is DistanceScale.log else distance / 20
        first = [
            silu(w[0] * entry + b)
            for w, b in zip(weights["into"], weights["into_bias"], strict=True)
        ]
        second = [
            silu(sum(w * x for w, x in zip(row, first, strict=True)) + b)
            for row, b in zip(weights["inner"], weights["inner_bias"], strict=True)
        ]
        expected = [sum(w * x for w, x in zip(r, second, strict=True)) for r in weights["out"]]
        found = bias_of(dpb, exact([float(distance)]))[:, 0]
        torch.testing.assert_close(found, exact(expected), **EXACT)


# ---------------------------------------------------------------- fire


def fire_scores(fire: Encoding, positions: Tensor, layer: int = 0) -> Tensor:
    """FIRE's bias [H, T, T] alone; keys after the query hold what a mask removes."""
    length = len(positions)
    hooks = fire.hooks(torch.zeros(1, length, 12, dtype=torch.float64), positions, layer)
    assert hooks.score_mod is not None
    h = torch.arange(fire.shape.heads).view(1, -1, 1, 1)
    i, j = torch.arange(length).view(-1, 1), torch.arange(length)
    return hooks.score_mod(torch.zeros(1, dtype=torch.float64), torch.zeros(1, 1, 1, 1), h, i, j)[0]


def places(text: str) -> tuple[Tensor, Tensor]:
    """(i, j) of `.../i=10/j=0` or `.../i=10,j=0`."""
    i, j = (part.split("=")[1] for part in text.replace(",j", "/j").split("/")[-2:])
    return exact(float(i)), exact(float(j))


C, THRESHOLD = exact(0.1), exact(512.0)


@pytest.mark.parametrize("key", keys("fire/input/"))
def test_fire_input(key: str) -> None:
    found = fire_input(*places(key), C, THRESHOLD)
    torch.testing.assert_close(found, golden(key), **EXACT)
    assert 0 <= found < 1


@pytest.mark.parametrize("key", keys("fire/bias/"))
def test_fire_bias(key: str) -> None:
    """Published with a bias of the output, which is added here: it shifts every score alike."""
    fire = make(FireConfig(width=2, threshold=512.0), Shape(1, 2, 6, 12, 64))
    weights = {"into": [1, -2], "into_bias": [0, 1], "out": [[0.5, 0.25], [-1, 2]]}  # w2.T
    set_all(fire, {name: exact(value) for name, value in weights.items()})
    set_all(fire, {"c": C})
    found = fire_scores(fire, torch.stack(places(key)).long())[:, 0, 1]
    offset = exact([0.1, -0.1])
    torch.testing.assert_close(found + offset, golden(key), **EXACT)


def test_fire_depends_on_more_than_the_distance() -> None:
    values = GOLDEN["fire/not_translation_invariant"]
    for place, expected in values.items():
        if place != "note":
            found = fire_input(*places(f"x/{place}"), C, THRESHOLD)
            assert found.item() == pytest.approx(expected, rel=1e-13)
    assert values["i=511,j=501"] != values["i=1024,j=1014"]


@pytest.mark.parametrize("config", [FireConfig(), FireConfig(threshold=3.0, c=2.0, width=4)])
def test_fire_is_the_formula_written_out(config: FireConfig) -> None:
    fire = make(config)
    set_all(fire, {"c": exact(-config.c), "reach": exact(-1.5)})  # |c|, |L|
    weights = {n.split(".")[0]: p.tolist() for n, p in fire.named_parameters() if n.endswith(".1")}
    positions = torch.tensor([0, 1, 2, 5, 9, 14, 40])  # gaps: positions count, not indices
    found = fire_scores(fire, positions, layer=1)
    least = 1.5 * (config.threshold or 5.0)  # a quarter of the training length of 20
    for row, i in enumerate(positions.tolist()):
        for column, j in enumerate(positions.tolist()[: row + 1]):
            entry = math.log(1 + config.c * (i - j)) / (
                math.log(1 + config.c * max(i, least)) + 1e-6
            )
            hidden = [
                max(0.0, w * entry + b)
                for w, b in zip(weights["into"], weights["into_bias"], strict=True)
            ]
            for head, out in enumerate(weights["out"]):
                expected = sum(w * x for w, x in zip(out, hidden, strict=True))
                assert found[head, row, column].item() == pytest.approx(expected, rel=1e-9)


@torch.no_grad()
def test_fire_says_the_same_score_by_score_as_on_a_grid() -> None:
    """FlexAttention calls the rule with single indices; the dense path with whole axes of them."""
    q, k, v = random_heads(9)
    hooks = make(FireConfig(width=4)).hooks(torch.zeros(2, 9, 12).double(), torch.arange(9), 0)
    flex = attend(q.float(), k.float(), v.float(), hooks, Kernel.flex)
    torch.testing.assert_close(flex.double(), attend(q, k, v, hooks), rtol=1e-5, atol=1e-5)


def test_fire_starts_with_no_unit_dead() -> None:
    fire = make(FireConfig(width=500))
    weights = {n.split(".")[0]: p for n, p in fire.named_parameters() if n.endswith(".0")}
    into, bias = weights["into"], weights["into_bias"]
    bends = -bias / into
    assert (bends >= 0).all()
    assert (bends < 1).all()
    assert bends.mean().item() == pytest.approx(0.5, abs=0.05)


# ---------------------------------------------------------------- shaw, transformer-xl


def random_heads(length: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    size = (2, SHAPE.heads, length, SHAPE.head_size)
    q, k, v = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(3))
    return q, k, v


def assert_scores(encoding: Encoding, score: Callable[[Tensor, Tensor, int, int], Any]) -> None:
    """Scores of layer 1 are `score(q_i [D], k_j [D], head, i - j)`, and attention uses them."""
    length = 9
    q, k, v = random_heads(length)
    positions = torch.tensor([0, 1, 2, 3, 5, 6, 7, 20, 21])
    hooks = encoding.hooks(torch.zeros(2, length, 12, dtype=torch.float64), positions, 1)
    rows = score_rows(q, k, hooks, list(range(length)))
    expected = torch.full((2, SHAPE.heads, length, length), -math.inf, dtype=torch.float64)
    for b in range(2):
        for h in range(SHAPE.heads):
            for i in range(length):
                for j in range(i + 1):
                    distance = int(positions[i] - positions[j])
                    expected[b, h, i, j] = score(q[b, h, i], k[b, h, j], h, distance)
    for i, row in enumerate(rows):
        torch.testing.assert_close(row, expected[:, :, i, : i + 1], rtol=1e-11, atol=1e-11)
    found = attend(q, k, v, hooks)
    torch.testing.assert_close(found, expected.softmax(-1) @ v, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("clip", [1, 3, 16])
def test_shaw_is_the_formula_written_out(clip: int) -> None:
    shaw = make(ShawConfig(clip=clip))
    vectors = dict(shaw.named_parameters())["vectors.1"].detach()
    assert len(vectors) == clip + 1
    assert_scores(shaw, lambda q, k, h, r: q @ (k + vectors[min(r, clip)]) / math.sqrt(4))


def test_shaw_numbers_its_vectors_by_clipped_distance() -> None:
    """The published index counts from the farthest key on: K less the clipped distance."""
    shaw = make(ShawConfig(clip=2), Shape(1, 1, 4, 4, 20))
    set_all(shaw, {"vectors": torch.arange(3.0).view(-1, 1).expand(3, 4)})
    q, k = torch.full((1, 1, 6, 4), 0.5).double(), torch.zeros(1, 1, 6, 4).double()
    hooks = shaw.hooks(torch.zeros(1, 6, 4).double(), torch.arange(6), 0)
    published = golden("shaw/index/L=6/K=2")
    for i, row in enumerate(score_rows(q, k, hooks, list(range(6)))):
        torch.testing.assert_close(row[0, 0], 2 - published[i, : i + 1], **EXACT)


def test_shaw_keeps_no_vector_that_training_cannot_reach() -> None:
    shaw = make(ShawConfig(clip=16), SHAPE._replace(train_length=6))
    assert dict(shaw.named_parameters())["vectors.0"].shape == (6, 4)


def test_txl_is_the_formula_written_out() -> None:
    txl = make(TxlConfig(base=50.0))
    u, v, w = (20 * dict(txl.named_parameters())[f"{name}.1"].detach() for name in "uvw")
    set_all(txl, {"u": u, "v": v, "w": w})

    def score(q: Tensor, k: Tensor, h: int, r: int) -> Tensor:
        angles = [r * 50.0 ** (-2 * pair / 12) for pair in range(6)]
        wave = exact([*map(math.sin, angles), *map(math.cos, angles)])
        return ((q + u[h]) @ k + (q + v[h]) @ (w[h] @ wave)) / math.sqrt(4)

    assert_scores(txl, score)


# ---------------------------------------------------------------- settings of heads and layers


def test_alibi_with_free_heads_is_alibi_of_fewer_heads_and_no_bias() -> None:
    distances = torch.arange(5).double()
    bias = bias_of(make(AlibiConfig(free_heads=2), Shape(1, 6, 4, 24, 8)), distances)
    torch.testing.assert_close(bias[:4], -torch.outer(alibi_slopes(4), distances), **EXACT)
    assert (bias[4:] == 0).all()


@pytest.mark.parametrize("name", ["alibi_learned", "t5", "kerple_log", "kerple_power", "dpb"])
def test_layers_share_parameters_or_have_their_own(name: str) -> None:
    distances = torch.arange(9).double()
    for shared in (True, False):
        encoding = make(ENCODINGS[name](share_layers=shared))
        first = next(iter(encoding.parameters()))
        with torch.no_grad():
            first.add_(1.0)
        same = torch.equal(bias_of(encoding, distances, 0), bias_of(encoding, distances, 1))
        assert same is shared


# ---------------------------------------------------------------- settings outside their meaning


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (AlibiConfig(free_heads=5), ["encoding.free_heads=5", "model.heads=4"]),
        (T5Config(buckets=7), ["encoding.buckets=7", "even", "encoding.buckets=8"]),
        (T5Config(max_distance=16), ["encoding.max_distance=16", "encoding.buckets=32", "16"]),
        (T5Config(scale=0.0), ["encoding.scale=0.0"]),
        (SandwichConfig(dimension=5), ["encoding.dimension=5", "encoding.dimension=6"]),
        (ShawConfig(clip=0), ["encoding.clip=0"]),
        (FireConfig(c=0.0), ["encoding.c=0.0"]),
        (FireConfig(threshold=0.5), ["encoding.threshold=0.5"]),
        (DpbConfig(width=0), ["encoding.width=0"]),
    ],
)
def test_settings_outside_their_meaning_are_refused(
    config: EncodingConfig, words: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        check(TrainSettings(encoding=config))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "config", [AlibiConfig(free_heads=4), T5Config(max_distance=17), SandwichConfig(dimension=2)]
)
def test_settings_at_their_limits_are_taken(config: EncodingConfig) -> None:
    check(TrainSettings(encoding=config))
