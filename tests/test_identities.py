"""Which encodings are one under which settings, and that by default no two are.

A scheme that contains another says so here, as a line of IDENTITIES: both on the same random model,
at the training length and at four times that. That a line can fail follows from the last tests:
without its settings and weights, what stands in it gives other logits.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import pytest
import torch
from test_contract import CONTEXT, SIZE, VOCABULARY, tokens
from torch import Tensor

from posbench.config import Beyond
from posbench.config.encodings import (
    ENCODINGS,
    AlibiConfig,
    AlibiLearnedConfig,
    CableConfig,
    CopeConfig,
    DapeBase,
    DapeConfig,
    DapeV2Config,
    DpbConfig,
    EncodingConfig,
    FireConfig,
    FopeConfig,
    FoxConfig,
    GrapeConfig,
    KerpleLogConfig,
    KerplePowerConfig,
    Layout,
    LearnedConfig,
    NoneConfig,
    PathConfig,
    RopeAbfConfig,
    RopeConfig,
    RopeLocalGlobalConfig,
    RopePartialConfig,
    RopePConfig,
    ShawConfig,
    SinusoidalConfig,
    T5Config,
    TxlConfig,
    XposConfig,
)
from posbench.config.extensions import (
    EXTENSIONS,
    AbfConfig,
    DynamicNtkConfig,
    ExtensionConfig,
    LeakyReropeConfig,
    Llama3Config,
    LongropeConfig,
    NoExtensionConfig,
    NtkByPartsConfig,
    NtkConfig,
    PiConfig,
    Ramp,
    ReropeConfig,
    SelfExtendConfig,
    YarnConfig,
)
from posbench.config.policies import PRESETS, Policies
from posbench.encodings import CLASSES
from posbench.encodings.seeds import seeded
from posbench.model import GPT, build_model

HEADS, HEAD_SIZE, PAIRS = SIZE.heads, SIZE.head_size, SIZE.head_size // 2
CLOSE, APART = 2e-5, 1e-3  # logits of size 5 in float32: rounding alone, and certainly more


class Case(NamedTuple):
    """An encoding, what replaces some of its weights, and how it is evaluated."""

    config: EncodingConfig
    weights: dict[str, Any] = {}  # noqa: RUF012  # never written to
    extension: ExtensionConfig = NoExtensionConfig()
    beyond: Beyond = Beyond.error
    policies: Policies = Policies()


def model_of(case: Case, layers: int = SIZE.layers) -> GPT:
    """The random model, its attention far from uniform, its encoding as if trained for a while."""
    size = dataclasses.replace(SIZE, layers=layers)
    model = build_model(size, case.config, CONTEXT, VOCABULARY, 0, case.policies)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("encoding."):
                noise = torch.randn(parameter.shape, generator=seeded(1, name))
                parameter.add_(noise, alpha=0.3)
            elif parameter.dim() > 1:
                parameter.mul_(8)
        for name, value in case.weights.items():
            own = [p for key, p in model.encoding.named_parameters() if key.split(".")[0] == name]
            assert own, f"{case.config.name} has no parameter {name}"
            for parameter in own:
                parameter.copy_(torch.as_tensor(value))
    model.encoding.extend(case.extension)
    model.encoding.go_beyond(case.beyond)
    return model.eval()


@torch.no_grad()
def logits(case: Case, length: int, layers: int = SIZE.layers) -> Tensor:
    found: Tensor = model_of(case, layers)(tokens(length))
    return found


def apart(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


# ---------------------------------------------------------------- what is one


def drawn(name: str, *shape: int) -> Tensor:
    return 0.3 * torch.randn(shape, generator=seeded(2, name))


def centred(taps: Tensor) -> Tensor:
    """A convolution over three keys that reads only the middle one, as one over one key does."""
    nothing = torch.zeros_like(taps)
    return torch.cat((nothing, taps, nothing), dim=-1)


def before_softplus(values: Tensor) -> Tensor:
    return values.expm1().log()


def waves(length: int) -> Tensor:
    """Vaswani et al. 2017, section 3.5, one value at a time: [length, C]."""
    rows = [
        [
            (math.sin if channel % 2 == 0 else math.cos)(
                place / 10_000 ** (channel // 2 * 2 / SIZE.width)
            )
            for channel in range(SIZE.width)
        ]
        for place in range(length)
    ]
    return torch.tensor(rows)


# ALiBi's slopes of three heads: 2^-4 and 2^-8, then the first of four heads, 2^-2.
SLOPES = torch.tensor([2.0**-4, 2.0**-8, 2.0**-2], dtype=torch.float64)
KEEP = torch.exp(-SLOPES)  # the share of the past that a token keeps under ALiBi
P, A = torch.tensor([0.5, 1.0, 1.7]), torch.tensor([0.1, 0.9, 0.4])  # KERPLE's
INTO, OUT = drawn("into", 2, 32, 2 * HEADS, 1, 1), drawn("out", 2, HEADS, 32, 1, 1)
FACTORS = [1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 5.0]  # LongRoPE's, one per pair
FULL_RANGE = 8 * CONTEXT  # T5 buckets of which half, one per distance, are all that is read

NONE, ROPE, ALIBI = Case(NoneConfig()), Case(RopeConfig()), Case(AlibiConfig())


def rope(extension: ExtensionConfig, config: EncodingConfig | None = None) -> Case:
    return Case(config or RopeConfig(), {}, extension)


class Identity(NamedTuple):
    one: Case
    other: Case
    times: tuple[int, ...] = (1, 4)  # training lengths at which they are the same


WITHIN = (1,)
IDENTITIES: dict[str, Identity] = {
    # what contains NoPE
    "sinusoidal, no amplitude": Identity(Case(SinusoidalConfig(scale=0.0)), NONE),
    "learned, zeros": Identity(Case(LearnedConfig(), {"table": 0.0}), NONE, WITHIN),
    "rope_partial, nothing turns": Identity(Case(RopePartialConfig(fraction=0.0)), NONE),
    "rope_p, nothing turns": Identity(Case(RopePConfig(share=0.0)), NONE),
    "alibi, all heads free": Identity(Case(AlibiConfig(free_heads=HEADS)), NONE),
    "alibi_learned, flat": Identity(Case(AlibiLearnedConfig(), {"halvings": 80.0}), NONE),
    "t5, zeros": Identity(Case(T5Config(), {"table": 0.0}), NONE),
    "kerple_log, p to 0": Identity(Case(KerpleLogConfig(), {"p": -80.0}), NONE),
    "kerple_power, a to 0": Identity(Case(KerplePowerConfig(), {"a": -80.0}), NONE),
    "dpb, zeros": Identity(Case(DpbConfig(), {"out": 0.0}), NONE),
    "fire, zeros": Identity(Case(FireConfig(), {"out": 0.0}), NONE),
    "shaw, zeros": Identity(Case(ShawConfig(), {"vectors": 0.0}), NONE),
    "txl, zeros": Identity(Case(TxlConfig(), {"u": 0.0, "v": 0.0, "w": 0.0}), NONE),
    "fox, forgets nothing": Identity(Case(FoxConfig(), {"weight": 0.0, "bias": 60.0}), NONE),
    "cope, no vectors": Identity(Case(CopeConfig(), {"vectors": 0.0}), NONE),
    "dape, silent on no bias": Identity(Case(DapeConfig(), {"out": 0.0, "kernels": -80.0}), NONE),
    "path, no reflection": Identity(Case(PathConfig(), {"beta": 0.0, "beta_bias": -60.0}), NONE),
    # what contains RoPE
    "rope_partial, whole": Identity(Case(RopePartialConfig(fraction=1.0)), ROPE),
    "rope_p, whole": Identity(Case(RopePConfig(share=1.0)), ROPE),
    "rope_abf, rope's base": Identity(Case(RopeAbfConfig(theta=10_000.0)), ROPE),
    "rope_local_global, one base": Identity(
        Case(RopeLocalGlobalConfig(global_theta=10_000.0, global_every=2)), ROPE
    ),
    "fope, no series, no frequency cut": Identity(Case(FopeConfig(gain=0.0, turns=0.0)), ROPE),
    "xpos, no decay": Identity(Case(XposConfig(scale_base=1e15)), ROPE),
    # what contains ALiBi
    "alibi_learned, untrained": Identity(
        Case(AlibiLearnedConfig(), {"halvings": -SLOPES.log2()}), ALIBI
    ),
    "t5, a straight line": Identity(
        Case(
            T5Config(buckets=FULL_RANGE, max_distance=FULL_RANGE, scale=1.0),
            {"table": -torch.outer(torch.arange(FULL_RANGE), SLOPES)},
        ),
        ALIBI,
    ),
    "kerple_power, p = 1": Identity(
        Case(KerplePowerConfig(), {"p": 0.0, "a": before_softplus(SLOPES)}), ALIBI
    ),
    "fox, a constant rate": Identity(
        Case(FoxConfig(), {"weight": 0.0, "bias": KEEP.logit()}), ALIBI
    ),
    "cable, a constant rate": Identity(
        Case(CableConfig(), {"weight": 0.0, "bias": -KEEP.logit()}), ALIBI
    ),
    "grape_ap, no content": Identity(  # ln 2 per token
        Case(GrapeConfig(), {"weight": 0.0}),
        Case(AlibiLearnedConfig(), {"halvings": -(SLOPES * math.log(2)).log2()}),
    ),
    "dape on alibi, silent": Identity(Case(DapeConfig(base=DapeBase.alibi), {"out": 0.0}), ALIBI),
    "dape_v2 on alibi, silent": Identity(
        Case(DapeV2Config(base=DapeBase.alibi), {"out": 0.0}), ALIBI
    ),
    # other pairs
    "fope, no series": Identity(  # two of eight pairs finish a turn in 48 tokens
        Case(FopeConfig(gain=0.0)), Case(RopePConfig(share=0.25))
    ),
    "learned, sinusoids": Identity(
        Case(LearnedConfig(), {"table": waves(CONTEXT)}), Case(SinusoidalConfig(scale=1.0)), WITHIN
    ),
    "dape, silent": Identity(
        Case(DapeConfig(), {"out": 0.0, "kernels": torch.stack((P, A)).log()}),
        Case(KerpleLogConfig(), {"p": before_softplus(P), "a": before_softplus(A)}),
    ),
    "dape_v2, one key": Identity(
        Case(DapeV2Config(), {"into": centred(INTO), "out": centred(OUT), "into_bias": 0.1}),
        Case(DapeConfig(), {"into": INTO, "out": OUT, "into_bias": 0.1}),
    ),
    "cable, gates turned": Identity(
        Case(CableConfig(), {"weight": drawn("w", 2, HEADS, SIZE.width), "bias": -1.0}),
        Case(FoxConfig(), {"weight": -drawn("w", 2, HEADS, SIZE.width), "bias": 1.0}),
    ),
    # extensions that do nothing
    "pi by 1": Identity(rope(PiConfig(factor=1.0)), ROPE),
    "ntk by 1": Identity(rope(NtkConfig(factor=1.0)), ROPE),
    "ntk_by_parts by 1": Identity(rope(NtkByPartsConfig(factor=1.0)), ROPE),
    "yarn by 1": Identity(rope(YarnConfig(factor=1.0)), ROPE),
    "llama3 by 1": Identity(rope(Llama3Config(factor=1.0)), ROPE),
    "longrope, factors of 1": Identity(
        rope(LongropeConfig(factor=1.0, factors=[1.0] * PAIRS)), ROPE
    ),
    "dynamic_ntk in the training length": Identity(rope(DynamicNtkConfig()), ROPE, WITHIN),
    "yarn in the training length": Identity(rope(YarnConfig()), ROPE, WITHIN),
    "rerope, all near": Identity(rope(ReropeConfig(window=CONTEXT)), ROPE, WITHIN),
    "self_extend, all near": Identity(rope(SelfExtendConfig(window=CONTEXT)), ROPE, WITHIN),
    "self_extend, groups of 1": Identity(rope(SelfExtendConfig(group=1)), ROPE),
    "leaky_rerope, steps of 1": Identity(rope(LeakyReropeConfig(step=1.0, logn=False)), ROPE),
    **{
        f"learned, beyond={beyond} within its table": Identity(
            Case(LearnedConfig(), {}, NoExtensionConfig(), beyond), Case(LearnedConfig()), WITHIN
        )
        for beyond in (Beyond.interpolate, Beyond.clamp, Beyond.wrap)
    },
    # extensions that are another
    "abf": Identity(rope(AbfConfig()), Case(RopeAbfConfig())),
    "ntk, a base": Identity(
        rope(NtkConfig(factor=3.0)),
        Case(RopeConfig(theta=10_000.0 * 3.0 ** (HEAD_SIZE / (HEAD_SIZE - 2)))),
    ),
    "dynamic_ntk, slowest": Identity(rope(DynamicNtkConfig(factor=1.0)), rope(NtkConfig())),
    "dynamic_ntk, at 4x": Identity(
        rope(DynamicNtkConfig(factor=3.0)), rope(NtkConfig(factor=10.0)), (4,)
    ),
    "yarn, no temperature": Identity(
        rope(YarnConfig(attention_factor=1.0)), rope(NtkByPartsConfig(ramp=Ramp.pairs))
    ),
    "llama3, ntk_by_parts": Identity(
        rope(Llama3Config()), rope(NtkByPartsConfig(beta_fast=4.0, beta_slow=1.0))
    ),
    "longrope, one factor": Identity(
        rope(LongropeConfig(factors=[3.0] * PAIRS, attention_factor=1.0)),
        rope(PiConfig(factor=3.0)),
        (4,),
    ),
    "leaky_rerope, endless steps": Identity(
        rope(LeakyReropeConfig(step=1e12)), rope(ReropeConfig())
    ),
}


@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize("name", IDENTITIES)
def test_identity(name: str, times: int) -> None:
    one, other, where = IDENTITIES[name]
    if "learned" in (one.config.name, other.config.name) and times not in where:
        return  # its table ends
    difference = apart(logits(one, times * CONTEXT), logits(other, times * CONTEXT))
    assert difference < CLOSE if times in where else difference > APART


@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize("name", ["rope", "rope_partial", "rope_p", "xpos"])
@torch.no_grad()
def test_layouts_are_one_under_a_permutation(name: str, times: int) -> None:
    """Pairs of neighbours, or half a head apart: the rows of W_q and W_k in another order."""
    text = tokens(times * CONTEXT)
    interleaved = model_of(Case(ENCODINGS[name](layout=Layout.interleaved)))  # type: ignore[call-arg]
    half = model_of(Case(ENCODINGS[name](layout=Layout.half)))  # type: ignore[call-arg]
    assert apart(half(text), interleaved(text)) > APART
    turned: int = half.encoding.size  # type: ignore[assignment]
    order = torch.arange(HEAD_SIZE)
    order[:turned] = torch.cat((torch.arange(0, turned, 2), torch.arange(1, turned, 2)))
    for block in half.blocks:
        rows = block.attention.qkv.weight.view(3, HEADS, HEAD_SIZE, -1)  # type: ignore[union-attr]
        rows[:2] = rows[:2, :, order]
    assert apart(half(text), interleaved(text)) < CLOSE


# ---------------------------------------------------------------- what is not


DEEP = 4  # layers, so that every fourth is one of them
IN_TRAINING_ONLY = ("drope", "pose", "randomized", "rope")  # what is RoPE until it is trained


def alike(found: dict[str, Tensor]) -> set[tuple[str, str]]:
    pairs = itertools.combinations(sorted(found), 2)
    return {(one, other) for one, other in pairs if apart(found[one], found[other]) < APART}


def test_no_two_encodings_are_one() -> None:
    found = {name: logits(Case(ENCODINGS[name]()), CONTEXT, DEEP) for name in CLASSES}
    assert alike(found) == set()


def test_no_two_extensions_are_one() -> None:
    """Each on RoPE, or on the first encoding that takes it, beside that encoding alone."""
    needed: dict[str, dict[str, Any]] = {"longrope": {"factors": FACTORS}}
    found: dict[str, Tensor] = {}
    for name, kind in EXTENSIONS.items():
        extension = kind(**needed.get(name, {}))
        bases = ["rope", *ENCODINGS]
        base = next(each for each in bases if ENCODINGS[each]().takes(extension))
        found[f"{base}, {name}"] = logits(Case(ENCODINGS[base](), {}, extension), 2 * CONTEXT)
        found[f"{base}, none"] = logits(Case(ENCODINGS[base]()), 2 * CONTEXT)
    assert alike(found) == set()


def test_presets_are_one_where_they_act_in_training_only() -> None:
    found = {"rope": logits(ROPE, 2 * CONTEXT, DEEP)}
    for name, preset in PRESETS.items():
        case = Case(ENCODINGS[preset.encoding](), policies=preset.at(CONTEXT))
        found[name] = logits(case, 2 * CONTEXT, DEEP)
    assert alike(found) == set(itertools.combinations(IN_TRAINING_ONLY, 2))
