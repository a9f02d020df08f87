"""The same numbers as Hugging Face transformers: rotary frequencies, ALiBi slopes, T5 buckets.

Theirs are float32. Where posbench means something else by a word, the test says what.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from posbench.config.encodings import (
    AlibiConfig,
    EncodingConfig,
    Layout,
    RopeConfig,
    RopePartialConfig,
    RopePConfig,
    T5Config,
)
from posbench.config.extensions import (
    DynamicNtkConfig,
    ExtensionConfig,
    Llama3Config,
    LongropeConfig,
    NoExtensionConfig,
    PiConfig,
    YarnConfig,
)
from posbench.encodings import Encoding, Shape, build

pytest.importorskip("transformers", reason="pip install posbench[bench] compares with it")

from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.llama import modeling_llama as llama
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.t5.modeling_t5 import T5Config as HfT5Config

FLOAT32 = {"rtol": 3e-6, "atol": 0.0}  # 13 nats of a frequency, each off by one float32 rounding
GRID = list(itertools.product([16, 64, 128], [1e4, 5e5], [128, 2048]))  # head size, theta, L
GRID.append((64, 100.0, 2048))  # where YaRN's ramp would end beyond the last pair
every_size = pytest.mark.parametrize(("size", "theta", "train"), GRID)
every_factor = pytest.mark.parametrize("factor", [2.0, 4.0, 16.0])


def hf_config(size: int, theta: float, train: int, rope_type: str, **options: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=2 * size,
        num_attention_heads=2,
        head_dim=size,
        max_position_embeddings=train,
        rope_parameters={"rope_type": rope_type, "rope_theta": theta, **options},
    )


def theirs(config: LlamaConfig, length: int) -> tuple[Tensor, float]:
    """Inverse frequencies and attention factor of transformers for a text of `length`."""
    rope_type = config.rope_parameters["rope_type"]
    if rope_type == "default":
        found = llama.LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        found = ROPE_INIT_FUNCTIONS[rope_type](config, None, seq_len=length)
    return found


def ours(
    size: int, train: int, length: int, config: EncodingConfig, extension: ExtensionConfig
) -> tuple[Tensor, float]:
    found: tuple[Tensor, float] = made(config, size, train, extension).frequencies(length, None)  # type: ignore[operator]
    return found


def made(
    config: EncodingConfig, size: int, train: int, extension: ExtensionConfig | None = None
) -> Encoding:
    encoding = build(config, Shape(1, 2, size, 2 * size, train))
    encoding.extend(extension or NoExtensionConfig())
    return encoding


def assert_same(found: tuple[Tensor, float], expected: tuple[Tensor, float]) -> None:
    torch.testing.assert_close(found[0], expected[0].double(), **FLOAT32)
    assert found[1] == pytest.approx(expected[1], rel=1e-12)


def lengths(train: int) -> tuple[int, ...]:
    return train // 2, train, train + 1, 2 * train, 4 * train


# ---------------------------------------------------------------- the seven types of RoPE


@every_size
def test_default(size: int, theta: float, train: int) -> None:
    expected = theirs(hf_config(size, theta, train, "default"), train)
    assert_same(ours(size, train, train, RopeConfig(theta=theta), NoExtensionConfig()), expected)


@every_size
@every_factor
def test_linear_is_pi(size: int, theta: float, train: int, factor: float) -> None:
    config = hf_config(size, theta, train, "linear", factor=factor)
    for length in lengths(train):  # a fixed factor holds at every length, in both
        found = ours(size, train, length, RopeConfig(theta=theta), PiConfig(factor=factor))
        assert_same(found, theirs(config, length))


@every_size
@every_factor
def test_dynamic_is_dynamic_ntk(size: int, theta: float, train: int, factor: float) -> None:
    """Their factor is ours: s = factor n/L - (factor - 1), and not n/L as in "NTK by factor"."""
    config = hf_config(size, theta, train, "dynamic", factor=factor)
    for length in lengths(train):
        found = ours(size, train, length, RopeConfig(theta=theta), DynamicNtkConfig(factor=factor))
        assert_same(found, theirs(config, length))


YARN: list[dict[str, Any]] = [
    {},
    {"beta_fast": 16.0, "beta_slow": 2.0},
    {"truncate": False},
    {"attention_factor": 1.25},
]


@every_size
@every_factor
@pytest.mark.parametrize("options", YARN, ids=str)
def test_yarn(size: int, theta: float, train: int, factor: float, options: dict[str, Any]) -> None:
    config = hf_config(size, theta, train, "yarn", factor=factor, **options)
    extension = YarnConfig(factor=factor, **options)
    for length in lengths(train):
        found = ours(size, train, length, RopeConfig(theta=theta), extension)
        assert_same(found, theirs(config, length))


@every_factor
@pytest.mark.parametrize(("above", "below"), [(1.0, 1.0), (0.707, 1.0), (1.0, 0.5)])
def test_yarn_with_two_scales_is_a_given_attention_factor(
    factor: float, above: float, below: float
) -> None:
    """DeepSeek's `mscale` over `mscale_all_dim`: here one number, the quotient."""
    config = hf_config(64, 1e4, 128, "yarn", factor=factor, mscale=above, mscale_all_dim=below)
    quotient = (0.1 * above * math.log(factor) + 1) / (0.1 * below * math.log(factor) + 1)
    extension = YarnConfig(factor=factor, attention_factor=quotient)
    assert_same(ours(64, 128, 256, RopeConfig(), extension), theirs(config, 256))


@every_size
@every_factor
@pytest.mark.parametrize("attention_factor", [None, 1.3])
def test_longrope(
    size: int, theta: float, train: int, factor: float, attention_factor: float | None
) -> None:
    """At `factor` training lengths, where a scale of n/L, ours, is their constant `factor`.

    Within the training length theirs keeps the attention factor of the longest text, though the
    frequencies are those of training; here s = 1 is the model as it was trained.
    """
    long = [1 + 0.2 * pair for pair in range(size // 2)]
    options = {"long_factor": long, "short_factor": [1.0] * (size // 2), "factor": factor}
    config = hf_config(size, theta, train, "longrope", attention_factor=attention_factor, **options)
    extension = LongropeConfig(factors=long, attention_factor=attention_factor)
    rope, length = RopeConfig(theta=theta), round(factor * train)
    assert_same(ours(size, train, length, rope, extension), theirs(config, length))
    frequencies, _ = theirs(config, train)
    assert_same(ours(size, train, train, rope, extension), (frequencies, 1.0))


@every_size
@every_factor
@pytest.mark.parametrize("edges", [(1.0, 4.0), (0.5, 8.0)])
def test_llama3(
    size: int, theta: float, train: int, factor: float, edges: tuple[float, float]
) -> None:
    low, high = edges
    options = {"low_freq_factor": low, "high_freq_factor": high}
    config = hf_config(size, theta, train, "llama3", factor=factor, **options)
    for length in lengths(train):
        extension = Llama3Config(factor=factor, **options)
        found = ours(size, train, length, RopeConfig(theta=theta), extension)
        assert_same(found, theirs(config, length))


@every_size
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 1.0])
def test_proportional_is_rope_p(size: int, theta: float, train: int, share: float) -> None:
    """Their `partial_rotary_factor` is the share of pairs that turn; a `factor` is PI's."""
    rope = RopePConfig(theta=theta, share=share)
    config = hf_config(size, theta, train, "proportional", partial_rotary_factor=share)
    assert_same(ours(size, train, train, rope, NoExtensionConfig()), theirs(config, train))
    options = {"partial_rotary_factor": share, "factor": 4.0}
    config = hf_config(size, theta, train, "proportional", **options)
    assert_same(ours(size, train, train, rope, PiConfig(factor=4.0)), theirs(config, train))


def test_proportional_counts_pairs_in_binary() -> None:
    """0.29 of 100 pairs are 29 here; theirs turns 28, since 0.29 * 200 is 57.99999999999999."""
    found, _ = ours(200, 128, 128, RopePConfig(share=0.29), NoExtensionConfig())
    config = hf_config(200, 1e4, 128, "proportional", partial_rotary_factor=0.29)
    expected, _ = theirs(config, 128)
    assert (int((found > 0).sum()), int((expected > 0).sum())) == (29, 28)
    torch.testing.assert_close(found[:28], expected[:28].double(), **FLOAT32)


@every_size
@pytest.mark.parametrize("fraction", [0.25, 0.5])
def test_partial_rotary_is_rope_partial(
    size: int, theta: float, train: int, fraction: float
) -> None:
    """Frequencies over the rotated channels alone, under an extension too."""
    config = hf_config(size, theta, train, "dynamic", factor=2.0, partial_rotary_factor=fraction)
    rope = RopePartialConfig(theta=theta, fraction=fraction)
    for length in lengths(train):
        found = ours(size, train, length, rope, DynamicNtkConfig(factor=2.0))
        assert_same(found, theirs(config, length))


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("rope_type", ["default", "yarn"])
def test_queries_and_keys_are_turned_alike(layout: Layout, rope_type: str) -> None:
    """Llama pairs channels half a head apart, Cohere neighbours; YaRN's factor is in both."""
    options = {"factor": 4.0} if rope_type == "yarn" else {}
    config = hf_config(64, 1e4, 128, rope_type, **options)
    extension = YarnConfig(factor=4.0) if rope_type == "yarn" else NoExtensionConfig()
    length = 512
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 2, length, 64)
    positions = torch.arange(length)
    cos, sin = llama.LlamaRotaryEmbedding(config)(q, positions.unsqueeze(0))
    apply = llama.apply_rotary_pos_emb
    if layout is Layout.interleaved:
        cos, sin = (table[..., :32].repeat_interleave(2, dim=-1) for table in (cos, sin))
        apply = cohere.apply_rotary_pos_emb
    expected = apply(q, k, cos, sin)
    encoding = made(RopeConfig(layout=layout), 64, 128, extension)
    rotate = encoding.hooks(torch.zeros(3, length, 128), positions, 0).rotate
    assert rotate is not None
    for found, wanted in zip(rotate(q, k), expected, strict=True):
        # Their angles are float32: 512 radians are known to 3e-5.
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-4)


# ---------------------------------------------------------------- ALiBi


def distances(length: int) -> Tensor:
    return torch.arange(length).view(-1, 1) - torch.arange(length)


@pytest.mark.parametrize("heads", range(1, 34))
def test_alibi_is_blooms_and_mpts(heads: int) -> None:
    """Slopes in their order. Theirs add slope * j, or slope * (j - T + 1), to every query.

    Counted from the query's own place, which the softmax ignores, both are -slope * (i - j).
    """
    length = 40
    encoding = build(AlibiConfig(), Shape(1, heads, 8, 8 * heads, length))
    rule = encoding.hooks(torch.zeros(1, 1, 8 * heads), torch.arange(1), 0).distance_bias
    assert rule is not None
    found = rule(distances(length).float())
    bloom = build_alibi_tensor(torch.ones(1, length, dtype=torch.long), heads, torch.float32)
    mpt = build_mpt_alibi_tensor(heads, length)
    for by_key in (bloom.view(heads, length), mpt.view(heads, length)):
        expected = by_key[:, None, :] - by_key[:, :, None]
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)


# ---------------------------------------------------------------- T5


USUAL = [(32, 128), (32, 256), (32, 512), (32, 1024), (64, 128), (64, 256), (16, 64), (8, 20)]
BOUNDARIES = [(46, 164), (48, 81), (58, 282), (72, 100), (100, 338), (106, 341)]


def bucket_of(distance: int, buckets: int, max_distance: int) -> tuple[int, float]:
    """T5's causal bucket in exact integers, and in float64 before it is rounded down.

    For h = buckets / 2 and r >= h, the largest k < h with (r/h)^h >= (max/h)^k, plus h.
    """
    half = buckets // 2
    if distance < half:
        return distance, float(distance)
    steps = range(half)
    reached = [k for k in steps if distance**half >= max_distance**k * half ** (half - k)]
    real = half + half * math.log(distance / half) / math.log(max_distance / half)
    return half + reached[-1], real


@pytest.mark.parametrize(("buckets", "max_distance"), USUAL + BOUNDARIES)
def test_t5_buckets(buckets: int, max_distance: int) -> None:
    """Every distance to 1000. A float32 logarithm may fall to the wrong side of a boundary."""
    config = T5Config(buckets=buckets, max_distance=max_distance, scale=1.0)
    t5 = build(config, Shape(1, 1, 8, 8, 128))
    with torch.no_grad():
        for table in t5.parameters():
            table.copy_(torch.arange(buckets).unsqueeze(1))  # the bias is the bucket's number
    rule = t5.hooks(torch.zeros(1, 1, 8), torch.arange(1), 0).distance_bias
    assert rule is not None
    places = torch.arange(1001)
    found = rule(places.double())[0].long().tolist()
    exact = [bucket_of(place, buckets, max_distance) for place in range(1001)]
    assert found == [bucket for bucket, _ in exact]
    expected = T5Attention._relative_position_bucket(-places, False, buckets, max_distance)
    differing = [place for place in range(1001) if expected[place] != found[place]]
    assert all(abs(exact[place][1] - round(exact[place][1])) < 1e-5 for place in differing)
    assert len(differing) <= 2
    if (buckets, max_distance) == (32, 128):  # what T5 itself uses has no doubtful boundary
        assert differing == []


def test_t5_bias_by_heads() -> None:
    heads, length = 6, 300
    config = HfT5Config(num_heads=heads, d_kv=8, d_model=48, is_decoder=True)
    attention = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    t5 = build(T5Config(scale=1.0, max_distance=128), Shape(1, heads, 8, 48, 128))
    with torch.no_grad():
        for table in t5.parameters():
            table.copy_(torch.randn(32, heads, generator=torch.Generator().manual_seed(0)))
            attention.relative_attention_bias.weight.copy_(table)
        expected = attention.compute_bias(length, length)[0]
        rule = t5.hooks(torch.zeros(1, 1, 48), torch.arange(1), 0).distance_bias
        assert rule is not None
        found = rule(distances(length).clamp(min=0).float())
    causal = distances(length) >= 0
    assert torch.equal(found[:, causal], expected[:, causal])
