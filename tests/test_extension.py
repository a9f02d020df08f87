"""Context extension against golden values, its limits at s = 1, and the mistakes others made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from posbench.config import (
    EXTENSIONS,
    ExtensionConfig,
    Layout,
    NoExtensionConfig,
    NtkConfig,
    PiConfig,
    RopeConfig,
    YarnConfig,
)
from posbench.encodings import Shape, build
from posbench.encodings.base import Encoding
from posbench.encodings.extension import (
    extended,
    interpolated,
    ntk_aware,
    scale,
    yarn,
    yarn_factor,
    yarn_range,
)
from posbench.encodings.rotary import Rope, inverse_frequencies
from posbench.errors import UnsupportedError

GOLDEN: dict[str, Any] = json.loads(Path(__file__).with_name("golden_values.json").read_text())
EXACT = {"rtol": 1e-13, "atol": 1e-15}
SCALING = [name for name in EXTENSIONS if name != "none"]
LAYOUTS = list(Layout)


def golden(key: str) -> Tensor:
    return torch.tensor(GOLDEN[key], dtype=torch.float64)


def keys(prefix: str) -> list[str]:
    """Golden keys below `prefix`; never none, so that a renamed key cannot empty a test."""
    found = [key for key in GOLDEN if key.startswith(prefix)]
    assert found, prefix
    return found


def numbers(key: str) -> dict[str, float]:
    """The name=value parts of a golden key."""
    pairs = [part.split("=") for part in key.split("/") if "=" in part]
    return {name: float(value) for name, value in pairs}


def differs(value: Tensor, mutant: Tensor) -> bool:
    return not torch.allclose(value, mutant, rtol=1e-3, atol=1e-9)


def make_rope(train_length: int = 64, head_size: int = 16, **settings: Any) -> Rope:
    shape = Shape(2, 3, head_size, 3 * head_size, train_length)
    return Rope(RopeConfig(**settings), shape)


def config_of(name: str, **settings: Any) -> ExtensionConfig:
    return EXTENSIONS[name](**settings)


# ---------------------------------------------------------------- formulas


@pytest.mark.parametrize("key", keys("pi/inv_freq/"))
def test_pi_divides_every_frequency(key: str) -> None:
    found = interpolated(inverse_frequencies(64, 1e4), numbers(key)["s"])
    torch.testing.assert_close(found, golden(key), **EXACT)


@pytest.mark.parametrize("key", keys("ntk/inv_freq/"))
def test_ntk_frequencies(key: str) -> None:
    found = ntk_aware(inverse_frequencies(64, 1e4), numbers(key)["alpha"])
    torch.testing.assert_close(found, golden(key), **EXACT)


@pytest.mark.parametrize("key", keys("ntk/base/"))
def test_ntk_is_plain_rope_with_a_larger_base(key: str) -> None:
    found = ntk_aware(inverse_frequencies(64, 1e4), numbers(key)["alpha"])
    torch.testing.assert_close(found, inverse_frequencies(64, GOLDEN[key]), **EXACT)


@pytest.mark.parametrize("size", [4, 8, 32, 64, 128])
@pytest.mark.parametrize("s", [2.0, 3.0, 4.0, 16.0])
def test_ntk_keeps_the_first_pair_and_divides_the_last_by_s(size: int, s: float) -> None:
    plain = inverse_frequencies(size, 1e4)
    found = ntk_aware(plain, s)
    assert found[0] == plain[0]
    assert (found[-1] / plain[-1]).item() == pytest.approx(1 / s, rel=1e-15)
    assert (found[1:] < plain[1:]).all()


@pytest.mark.parametrize("key", keys("mutant/ntk/"))
def test_ntk_base_is_not_a_known_mistake(key: str) -> None:
    found = ntk_aware(inverse_frequencies(64, 1e4), 4.0)
    assert differs(found, inverse_frequencies(64, GOLDEN[key]))


@pytest.mark.parametrize("key", keys("yarn/inv_freq/"))
def test_yarn_frequencies(key: str) -> None:
    of = numbers(key)
    plain = inverse_frequencies(int(of["d"]), of["base"])
    found = yarn(plain, of["s"], of["base"], int(of["L"]), YarnConfig())
    torch.testing.assert_close(found, golden(key), **EXACT)


@pytest.mark.parametrize("key", keys("yarn/range/"))
def test_yarn_range(key: str) -> None:
    """Unrounded ends as published; rounded ones as the frequencies themselves show them."""
    of, expected = numbers(key), GOLDEN[key]
    pairs = int(of["d"]) // 2
    low, high = yarn_range(pairs, of["base"], int(of["L"]), 32.0, 1.0)
    assert low == pytest.approx(expected["low_raw"], rel=1e-12)
    assert high == pytest.approx(expected["high_raw"], rel=1e-12)
    plain = inverse_frequencies(2 * pairs, of["base"])
    change = yarn(plain, 4.0, of["base"], int(of["L"]), YarnConfig()) / plain
    pair = torch.arange(pairs)
    assert torch.equal(change == 1, pair <= expected["low"])
    torch.testing.assert_close(
        change[expected["high"] :],
        torch.tensor(0.25).double().expand(max(0, pairs - expected["high"])),
        **EXACT,
    )
    assert (change[expected["low"] + 1 : expected["high"]] > 0.25).all()


def test_yarn_range_may_end_beyond_the_last_pair() -> None:
    """The authors clamp to the last channel; at 262,144 tokens the ramp runs from 24 to 37."""
    plain = inverse_frequencies(64, 1e4)
    ramp = ((torch.arange(32, dtype=torch.float64) - 24) / 13).clamp(min=0)
    found = yarn(plain, 4.0, 1e4, 262_144, YarnConfig())
    torch.testing.assert_close(found, plain / 4 * ramp + plain * (1 - ramp), **EXACT)


def test_yarn_without_rounding_the_range() -> None:
    key = "yarn/no_truncate/inv_freq/d=64/base=10000/L=2048/s=4"
    plain = inverse_frequencies(64, 1e4)
    found = yarn(plain, 4.0, 1e4, 2048, YarnConfig(truncate=False))
    torch.testing.assert_close(found, golden(key), **EXACT)
    assert differs(yarn(plain, 4.0, 1e4, 2048, YarnConfig()), golden(key))


@pytest.mark.parametrize(
    "key", [key for key in keys("mutant/yarn/") if isinstance(GOLDEN[key], list)]
)
def test_yarn_frequencies_are_not_a_known_mistake(key: str) -> None:
    found = yarn(inverse_frequencies(64, 1e4), 4.0, 1e4, 2048, YarnConfig())
    assert differs(found, golden(key))


@pytest.mark.parametrize("key", keys("yarn/attention_factor/"))
def test_yarn_factor(key: str) -> None:
    s = numbers(key)["s"]
    assert yarn_factor(s, YarnConfig()) == pytest.approx(GOLDEN[key], rel=1e-14)
    assert yarn_factor(s, YarnConfig(attention_factor=1.05)) == 1.05  # replaces, never multiplies


def test_yarn_factor_is_not_a_known_mistake() -> None:
    for key in ("mutant/yarn/mscale_squared/s=16", "mutant/yarn/mscale_log10/s=16"):
        assert yarn_factor(16.0, YarnConfig()) != pytest.approx(GOLDEN[key], rel=1e-3)
    unguarded = GOLDEN["mutant/yarn/mscale_s<1_unguarded/s=0.5"]
    assert yarn_factor(0.5, YarnConfig()) == 1.0 != unguarded


# ---------------------------------------------------------------- what a layer does with them


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("s", [4, 16])
def test_yarn_multiplies_scores_by_the_squared_factor_once(layout: Layout, s: int) -> None:
    """q and k grow by m each, so scores by m^2, and the softmax scale does not change as well."""
    length = 64 * s
    rope, plain = make_rope(layout=layout), make_rope(layout=layout)
    rope.extend(YarnConfig())
    torch.manual_seed(0)
    q, k = (torch.randn(1, 3, length, 16, dtype=torch.float64) for _ in range(2))
    x, positions = torch.zeros(1, length, 48, dtype=torch.float64), torch.arange(length)
    hooks = rope.hooks(x, positions, 0)
    assert hooks.temperature == 1.0
    assert hooks.rotate is not None
    turned_q, turned_k = hooks.rotate(q, k)
    m = 0.1 * torch.tensor(float(s)).double().log() + 1
    torch.testing.assert_close(turned_q.norm(dim=-1), m * q.norm(dim=-1), **EXACT)
    torch.testing.assert_close(turned_k.norm(dim=-1), m * k.norm(dim=-1), **EXACT)
    same_place = (turned_q * turned_k).sum(-1) / (q * k).sum(-1)  # distance 0: no angle between
    multiplier = golden(f"yarn/score_multiplier/s={s}")
    torch.testing.assert_close(same_place, multiplier.expand_as(same_place), rtol=1e-9, atol=0)
    rotate = plain.hooks(x, positions, 0).rotate
    assert rotate is not None
    torch.testing.assert_close(rotate(q, k)[0].norm(dim=-1), q.norm(dim=-1), **EXACT)


@pytest.mark.parametrize("name", SCALING)
def test_every_extension_is_plain_rope_at_s_one(name: str) -> None:
    """Bit for bit, in the training length with a free factor, and with a factor of 1 anywhere."""
    for size in (4, 8, 32, 64, 128):
        for theta in (1e4, 5e5):
            plain = inverse_frequencies(size, theta)
            for train_length in (32, 100, 512, 4096):
                for length in (2, train_length - 1, train_length):
                    found, factor = extended(plain, theta, train_length, length, config_of(name))
                    assert torch.equal(found, plain)
                    assert factor == 1.0
                fixed = config_of(name, factor=1.0)
                found, factor = extended(plain, theta, train_length, 4 * train_length, fixed)
                assert torch.equal(found, plain)
                assert factor == 1.0


def test_an_explicit_yarn_factor_leaves_the_training_length_alone() -> None:
    plain = inverse_frequencies(16, 1e4)
    options = YarnConfig(attention_factor=1.2)
    assert extended(plain, 1e4, 64, 64, options)[1] == 1.0
    assert extended(plain, 1e4, 64, 65, options)[1] == 1.2


@pytest.mark.parametrize("name", SCALING)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_scores_stay_relative_under_every_extension(
    name: str, layout: Layout, fraction: float
) -> None:
    rope = make_rope(layout=layout, fraction=fraction)
    rope.extend(config_of(name))
    torch.manual_seed(0)
    q, k = (torch.randn(1, 3, 256, 16, dtype=torch.float64) for _ in range(2))
    x = torch.zeros(1, 256, 48, dtype=torch.float64)
    scores = []
    for shift in (0, 1000):
        rotate = rope.hooks(x, torch.arange(256) + shift, 0).rotate
        assert rotate is not None
        turned_q, turned_k = rotate(q, k)
        scores.append(turned_q @ turned_k.mT)
    torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", SCALING)
def test_partial_rotary_uses_the_rotated_size(name: str) -> None:
    """A half-rotated head of 32 channels is stretched as a whole head of 16."""
    half, whole = make_rope(head_size=32, fraction=0.5), make_rope(head_size=16)
    for rope in (half, whole):
        rope.extend(config_of(name))
    found, factor = half.frequencies(256, None)
    expected, expected_factor = whole.frequencies(256, None)
    assert torch.equal(found, expected)
    assert factor == expected_factor
    assert differs(found, make_rope(head_size=32).frequencies(256, None)[0][:8])


@pytest.mark.parametrize("name", SCALING)
def test_every_extension_changes_something_beyond_the_training_length(name: str) -> None:
    rope = make_rope()
    plain, _ = rope.frequencies(256, None)
    rope.extend(config_of(name))
    found, _ = rope.frequencies(256, None)
    assert differs(found, plain)
    rope.extend(NoExtensionConfig())
    assert torch.equal(rope.frequencies(256, None)[0], plain)


# ---------------------------------------------------------------- what the result depends on


@pytest.mark.parametrize("name", sorted(EXTENSIONS))
def test_the_order_of_lengths_does_not_matter(name: str) -> None:
    def tables(lengths: list[int]) -> dict[int, tuple[Tensor, Tensor]]:
        rope = make_rope()
        rope.extend(config_of(name))
        return {n: rope.angles(torch.arange(n), torch.float32) for n in lengths}

    upwards, downwards = tables([64, 128, 256]), tables([256, 128, 64])
    for length in (64, 128, 256):
        for up, down in zip(upwards[length], downwards[length], strict=True):
            assert torch.equal(up, down)


def test_a_bfloat16_call_does_not_spoil_a_later_float32_call() -> None:
    def turned(rope: Rope, dtype: torch.dtype) -> Tensor:
        rotate = rope.hooks(torch.zeros(1, 300, 48, dtype=dtype), torch.arange(300), 0).rotate
        assert rotate is not None
        ones = torch.ones(1, 3, 300, 16, dtype=dtype)
        return rotate(ones, ones)[0]

    used, fresh = make_rope(), make_rope()
    turned(used, torch.bfloat16)
    assert torch.equal(turned(used, torch.float32), turned(fresh, torch.float32))


@pytest.mark.parametrize("name", SCALING)
def test_a_fixed_factor_is_the_same_at_every_length(name: str) -> None:
    rope = make_rope()
    rope.extend(config_of(name, factor=4.0))
    short, long = rope.frequencies(8, None), rope.frequencies(1024, None)
    assert torch.equal(short[0], long[0])
    assert short[1] == long[1]
    free = make_rope()
    free.extend(config_of(name))
    at_four = free.frequencies(256, None)  # four training lengths
    assert torch.equal(at_four[0], short[0])
    assert at_four[1] == short[1]


def test_scale_is_the_length_in_training_lengths_and_at_least_one() -> None:
    assert scale(None, 128, 1) == 1.0
    assert scale(None, 128, 128) == 1.0
    assert scale(None, 128, 192) == 1.5
    assert scale(None, 128, 512) == 4.0
    assert scale(8.0, 128, 128) == 8.0


def test_yarn_range_comes_from_the_training_length() -> None:
    """At one scale, twice the training length moves the ramp; twice the length alone does not."""
    plain = inverse_frequencies(64, 1e4)
    fixed = YarnConfig(factor=4.0)
    short = extended(plain, 1e4, 512, 512, fixed)[0]
    assert torch.equal(extended(plain, 1e4, 512, 2048, fixed)[0], short)
    assert differs(extended(plain, 1e4, 2048, 2048, fixed)[0], short)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", SCALING)
def test_an_extension_is_refused_where_nothing_is_rotated(name: str) -> None:
    unrotated: list[Encoding] = [
        build(RopeConfig(fraction=0.0), Shape(1, 2, 8, 16, 32)),
        Encoding(RopeConfig(name="none"), Shape(1, 2, 8, 16, 32)),
    ]
    for encoding in unrotated:
        with pytest.raises(UnsupportedError, match=f"{name} changes rotary frequencies"):
            encoding.extend(config_of(name))
        encoding.extend(NoExtensionConfig())


def test_ntk_is_refused_at_once_where_its_exponent_is_undefined() -> None:
    rope = make_rope(head_size=2)
    with pytest.raises(UnsupportedError, match="at least 4 rotated channels"):
        rope.extend(NtkConfig())
    assert rope.frequencies(256, None)[1] == 1.0  # as it was before the refusal
    rope.extend(PiConfig())


def test_yarn_is_refused_where_all_frequencies_are_one() -> None:
    with pytest.raises(UnsupportedError, match=r"encoding\.theta"):
        make_rope(theta=1.0).extend(YarnConfig())


def test_an_unknown_extension_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no rotary rule"):
        make_rope().extend(ExtensionConfig(name="tomorrow"))
