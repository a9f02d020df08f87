"""Context extension against golden values, its limits at s = 1, and the mistakes others made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from posbench.config.encodings import ENCODINGS, Layout, NoneConfig, RopeConfig, RotaryConfig
from posbench.config.extensions import (
    EXTENSIONS,
    AbfConfig,
    DynamicNtkConfig,
    ExtensionConfig,
    Llama3Config,
    LongropeConfig,
    Need,
    NoExtensionConfig,
    NtkByPartsConfig,
    NtkConfig,
    PiConfig,
    Ramp,
    ScaledConfig,
    YarnConfig,
)
from posbench.encodings import Shape, build
from posbench.encodings.base import Encoding
from posbench.encodings.extension import (
    by_parts,
    dynamic_scale,
    extended,
    interpolated,
    longrope_factor,
    ntk_aware,
    pair_range,
    scale,
    yarn_factor,
)
from posbench.encodings.rotary import Rope, inverse_frequencies
from posbench.errors import UnsupportedError

GOLDEN: dict[str, Any] = json.loads(Path(__file__).with_name("golden_values.json").read_text())
EXACT = {"rtol": 1e-13, "atol": 1e-15}
STRETCHING = [name for name, kind in EXTENSIONS.items() if kind.needs is Need.frequencies]
ON_ROPE = [name for name, kind in EXTENSIONS.items() if RopeConfig().takes(kind())]
SCALING = [name for name in STRETCHING if issubclass(EXTENSIONS[name], ScaledConfig)]
ROTARY = [name for name, kind in ENCODINGS.items() if issubclass(kind, RotaryConfig)]
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


def config_of(name: str, pairs: int = 8, **settings: Any) -> ExtensionConfig:
    """The extension; longrope with factors for as many pairs."""
    if EXTENSIONS[name] is LongropeConfig:
        settings["factors"] = torch.linspace(1.5, 4.0, pairs).tolist()
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
    found = by_parts(plain, of["s"], of["base"], int(of["L"]), YarnConfig())
    torch.testing.assert_close(found, golden(key), **EXACT)


@pytest.mark.parametrize("key", keys("yarn/range/"))
def test_pair_range(key: str) -> None:
    """Unrounded ends as published; rounded ones as the frequencies themselves show them."""
    of, expected = numbers(key), GOLDEN[key]
    pairs = int(of["d"]) // 2
    low, high = pair_range(pairs, of["base"], int(of["L"]), 32.0, 1.0)
    assert low == pytest.approx(expected["low_raw"], rel=1e-12)
    assert high == pytest.approx(expected["high_raw"], rel=1e-12)
    plain = inverse_frequencies(2 * pairs, of["base"])
    change = by_parts(plain, 4.0, of["base"], int(of["L"]), YarnConfig()) / plain
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
    found = by_parts(plain, 4.0, 1e4, 262_144, YarnConfig())
    torch.testing.assert_close(found, plain / 4 * ramp + plain * (1 - ramp), **EXACT)


def test_yarn_without_rounding_the_range() -> None:
    key = "yarn/no_truncate/inv_freq/d=64/base=10000/L=2048/s=4"
    plain = inverse_frequencies(64, 1e4)
    found = by_parts(plain, 4.0, 1e4, 2048, YarnConfig(truncate=False))
    torch.testing.assert_close(found, golden(key), **EXACT)
    assert differs(by_parts(plain, 4.0, 1e4, 2048, YarnConfig()), golden(key))


@pytest.mark.parametrize(
    "key", [key for key in keys("mutant/yarn/") if isinstance(GOLDEN[key], list)]
)
def test_yarn_frequencies_are_not_a_known_mistake(key: str) -> None:
    found = by_parts(inverse_frequencies(64, 1e4), 4.0, 1e4, 2048, YarnConfig())
    assert differs(found, golden(key))


@pytest.mark.parametrize("key", keys("dynamic_ntk/base/"))
def test_dynamic_ntk_base_at_the_current_length(key: str) -> None:
    """Golden bases are of factor 4; n = 2L tells the current length from the longest one."""
    of = numbers(key)
    train_length, length = int(of["L"]), int(of["n"])
    plain = inverse_frequencies(64, 1e4)
    config = DynamicNtkConfig(factor=of["s"])
    found, factor = extended(plain, 1e4, train_length, length, config)
    torch.testing.assert_close(found, inverse_frequencies(64, GOLDEN[key]), **EXACT)
    assert factor == 1.0
    if length <= train_length:  # clamped: a shorter text is not stretched the other way
        assert torch.equal(found, plain)


def test_dynamic_ntk_is_not_a_known_mistake() -> None:
    """A constant of the longest length, whatever the text's."""
    (key,) = keys("mutant/dynamic_ntk/vllm_constant")
    found, _ = extended(inverse_frequencies(64, 1e4), 1e4, 2048, 4096, DynamicNtkConfig(factor=4))
    assert differs(found, inverse_frequencies(64, GOLDEN[key]))


def test_dynamic_ntk_scale() -> None:
    """Factor 2 by default: 3 at twice the training length, 7 at four times; 1 is n / L."""
    assert DynamicNtkConfig().factor == 2.0
    assert [dynamic_scale(2.0, 128, n) for n in (64, 128, 256, 512)] == [1.0, 1.0, 3.0, 7.0]
    plain = inverse_frequencies(64, 1e4)
    by_length = extended(plain, 1e4, 128, 512, DynamicNtkConfig(factor=1.0))[0]
    assert torch.equal(by_length, extended(plain, 1e4, 128, 512, NtkConfig())[0])


def test_ntk_by_parts_frequencies() -> None:
    """The paper's ramp is linear in turns, that of public code over pairs; both are offered."""
    plain, key = inverse_frequencies(64, 1e4), "ntk_by_parts/inv_freq/d=64/base=10000/L=2048/s=4"
    found, factor = extended(plain, 1e4, 2048, 8192, NtkByPartsConfig())
    torch.testing.assert_close(found, golden(key), **EXACT)
    assert factor == 1.0
    over_pairs = extended(plain, 1e4, 2048, 8192, NtkByPartsConfig(ramp=Ramp.pairs))[0]
    as_yarn = golden("yarn/inv_freq/d=64/base=10000/L=2048/s=4")
    torch.testing.assert_close(over_pairs, as_yarn, **EXACT)
    assert differs(found, as_yarn)
    in_turns, temperature = extended(plain, 1e4, 2048, 8192, YarnConfig(ramp=Ramp.turns))
    torch.testing.assert_close(in_turns, golden(key), **EXACT)
    assert temperature > 1


def test_ntk_by_parts_by_hand() -> None:
    """A pair of 16.5 turns lies halfway from 1 to 32: divided by s = 2 in half, so times 0.75."""
    inverse = torch.tensor([33.0, 16.5, 0.5], dtype=torch.float64) * 2 * torch.pi / 100
    found = extended(inverse, 1e4, 100, 200, NtkByPartsConfig())[0]
    expected = inverse * torch.tensor([1.0, 0.75, 0.5], dtype=torch.float64)
    torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("key", keys("llama3/inv_freq/"))
def test_llama3_frequencies(key: str) -> None:
    of = numbers(key)
    plain = inverse_frequencies(64, of["base"])
    length = int(of["L"] * of["s"])
    found, factor = extended(plain, of["base"], int(of["L"]), length, Llama3Config())
    torch.testing.assert_close(found, golden(key), **EXACT)
    assert factor == 1.0
    fixed = extended(plain, of["base"], int(of["L"]), 16, Llama3Config(factor=of["s"]))[0]
    assert torch.equal(fixed, found)
    parts = NtkByPartsConfig(beta_slow=1.0, beta_fast=4.0)
    assert torch.equal(extended(plain, of["base"], int(of["L"]), length, parts)[0], found)


def test_llama3_regions() -> None:
    regions = GOLDEN["llama3/regions/d=64/base=500000/L=8192/s=32"]
    plain = inverse_frequencies(64, 5e5)
    share = extended(plain, 5e5, 8192, 32 * 8192, Llama3Config())[0] / plain
    divided = (share - 1 / 32).abs() < 1e-15
    assert torch.equal((share == 1).nonzero().flatten(), torch.tensor(regions["unchanged"]))
    assert torch.equal(divided.nonzero().flatten(), torch.tensor(regions["divided"]))
    between = ((share < 1) & ~divided).nonzero().flatten()
    assert torch.equal(between, torch.tensor(regions["smooth"]))


def test_llama3_knows_our_training_length_not_8192() -> None:
    """At 128 tokens the published 8,192 would leave all pairs but the slowest alone."""
    plain = inverse_frequencies(64, 1e4)
    ours = extended(plain, 1e4, 128, 256, Llama3Config())[0]
    assert differs(ours, extended(plain, 1e4, 8192, 16_384, Llama3Config())[0])
    assert (ours[2 * torch.pi / plain > 128] == plain[2 * torch.pi / plain > 128] / 2).all()


@pytest.mark.parametrize("length", [16, 128, 512])
def test_abf_is_rope_of_another_base_at_every_length(length: int) -> None:
    found, factor = extended(inverse_frequencies(8, 1e4), 1e4, 128, length, AbfConfig())
    torch.testing.assert_close(found, golden("rope/inv_freq/d=8/base=500000"), **EXACT)
    assert factor == 1.0


@pytest.mark.parametrize("key", keys("longrope/attention_factor/"))
def test_longrope_factor(key: str) -> None:
    of = numbers(key)
    found = longrope_factor(of["s"], int(of["L"]), None)
    assert found == pytest.approx(GOLDEN[key], rel=1e-14)
    assert longrope_factor(of["s"], int(of["L"]), 1.05) == (1.05 if of["s"] > 1 else 1.0)


def test_longrope_divides_each_pair_by_its_own_factor() -> None:
    plain = inverse_frequencies(8, 1e4)
    config = LongropeConfig(factors=[1.0, 1.25, 2.0, 5.0])
    found, factor = extended(plain, 1e4, 4096, 4 * 4096, config)
    by_hand = torch.tensor([1.0, 0.08, 0.005, 0.0002], dtype=torch.float64)
    torch.testing.assert_close(found, by_hand, **EXACT)
    assert factor == pytest.approx(GOLDEN["longrope/attention_factor/L=4096/s=4"], rel=1e-14)
    assert torch.equal(extended(plain, 1e4, 4096, 4096, config)[0], plain)


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
        pairs = size // 2
        for theta in (1e4, 5e5):
            plain = inverse_frequencies(size, theta)
            for train_length in (32, 100, 512, 4096):
                for length in (2, train_length - 1, train_length):
                    free = config_of(name, pairs)
                    found, factor = extended(plain, theta, train_length, length, free)
                    assert torch.equal(found, plain)
                    assert factor == 1.0
                fixed = config_of(name, pairs, factor=1.0)
                found, factor = extended(plain, theta, train_length, 4 * train_length, fixed)
                assert torch.equal(found, plain)
                assert factor == 1.0


def test_an_explicit_yarn_factor_leaves_the_training_length_alone() -> None:
    plain = inverse_frequencies(16, 1e4)
    options = YarnConfig(attention_factor=1.2)
    assert extended(plain, 1e4, 64, 64, options)[1] == 1.0
    assert extended(plain, 1e4, 64, 65, options)[1] == 1.2


@pytest.mark.parametrize("name", STRETCHING)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_scores_stay_relative_under_every_extension(
    name: str, layout: Layout, fraction: float
) -> None:
    rope = make_rope(layout=layout, fraction=fraction)
    rope.extend(config_of(name, pairs=round(8 * fraction)))
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


@pytest.mark.parametrize("name", STRETCHING)
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


@pytest.mark.parametrize("name", STRETCHING)
def test_every_extension_changes_something_beyond_the_training_length(name: str) -> None:
    rope = make_rope()
    plain, _ = rope.frequencies(256, None)
    rope.extend(config_of(name))
    found, _ = rope.frequencies(256, None)
    assert differs(found, plain)
    rope.extend(NoExtensionConfig())
    assert torch.equal(rope.frequencies(256, None)[0], plain)


# ---------------------------------------------------------------- what the result depends on


@pytest.mark.parametrize("name", ON_ROPE)
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


@pytest.mark.parametrize("name", STRETCHING)
def test_frequencies_depend_on_the_length_where_the_settings_say_so(name: str) -> None:
    """What the evaluator asks before it reads several lengths off one pass."""
    configs = [config_of(name)]
    if name in SCALING:
        configs.append(config_of(name, factor=4.0))
    for config in configs:
        rope = make_rope()
        rope.extend(config)
        short, long = rope.frequencies(100, None), rope.frequencies(256, None)
        varies = not torch.equal(short[0], long[0]) or short[1] != long[1]
        assert varies == config.by_length
        assert rope.prefix_consistent == (not varies)
    assert config_of(name).by_length == (name != "abf")


# ---------------------------------------------------------------- other rotary encodings


@pytest.mark.parametrize("encoding", ROTARY)
@pytest.mark.parametrize("name", STRETCHING)
def test_every_rotary_encoding_is_stretched_by_every_extension(encoding: str, name: str) -> None:
    scheme = build(ENCODINGS[encoding](), Shape(2, 3, 16, 48, 64))
    plain = scheme.describe(256)["inverse_frequencies"]
    settings = {"theta": 2e6} if name == "abf" else {}  # what none of them is trained with
    scheme.extend(config_of(name, pairs=len(plain), **settings))
    found = scheme.describe(256)["inverse_frequencies"]
    turning = plain > 0
    assert differs(found, plain)
    assert (found <= plain).all()
    assert (found[turning] > 0).all()
    assert (found[~turning] == 0).all()  # what does not turn in p-RoPE does not begin to


@pytest.mark.parametrize("encoding", [name for name in ENCODINGS if name not in ROTARY])
def test_an_encoding_without_frequencies_refuses(encoding: str) -> None:
    scheme = build(ENCODINGS[encoding](), Shape(2, 3, 16, 48, 64))
    with pytest.raises(UnsupportedError, match=f"pi changes rotary frequencies; {encoding} has"):
        scheme.extend(PiConfig())


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", STRETCHING)
def test_an_extension_is_refused_where_nothing_is_rotated(name: str) -> None:
    unrotated: list[Encoding] = [
        build(RopeConfig(fraction=0.0), Shape(1, 2, 8, 16, 32)),
        Encoding(NoneConfig(), Shape(1, 2, 8, 16, 32)),
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


@pytest.mark.parametrize(
    "config",
    [
        AbfConfig(theta=1e4),
        LongropeConfig(factors=[1.0] * 8),
        Llama3Config(low_freq_factor=0.0, high_freq_factor=1e-9),
        NtkByPartsConfig(beta_slow=1e-9, beta_fast=2e-9),
    ],
    ids=lambda config: config.name,
)
def test_an_option_that_changes_nothing_is_refused(config: ExtensionConfig) -> None:
    rope = make_rope()
    with pytest.raises(UnsupportedError, match="changes no frequency") as error:
        rope.extend(config)
    assert "trained at 64 tokens" in str(error.value)
    assert "extension." in str(error.value)


@pytest.mark.parametrize("name", SCALING)
def test_a_factor_of_one_is_no_mistake(name: str) -> None:
    rope = make_rope()
    rope.extend(config_of(name, factor=1.0))
    assert torch.equal(rope.frequencies(256, None)[0], make_rope().frequencies(256, None)[0])


def test_longrope_is_refused_with_a_wrong_number_of_factors() -> None:
    with pytest.raises(UnsupportedError, match=r"each of 8 pairs per head; .* has 3"):
        make_rope().extend(LongropeConfig(factors=[1.0, 2.0, 3.0]))
