"""Layers with a base of their own: which they are, and that each does what its own RoPE does."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from posbench import configure
from posbench.attention import attend
from posbench.cli import main
from posbench.config import ModelConfig
from posbench.config.encodings import (
    ENCODINGS,
    EncodingConfig,
    LayeredConfig,
    RopeConfig,
    RopeLocalGlobalConfig,
    RopePConfig,
)
from posbench.config.extensions import EXTENSIONS, AbfConfig, ExtensionConfig, YarnConfig
from posbench.encodings import Encoding, Shape, build
from posbench.errors import UnsupportedError, UserError
from posbench.model import build_model

LAYERED = [name for name, kind in ENCODINGS.items() if issubclass(kind, LayeredConfig)]
TAKEN = [name for name, kind in EXTENSIONS.items() if RopeConfig().takes(kind())]
SIZE, HEADS, TRAIN, LENGTH = 16, 3, 24, 60
LOCAL, GLOBAL = 0, 2  # layer numbers in a pattern of three


def make(config: EncodingConfig, extension: str = "none") -> Encoding:
    encoding = build(config, Shape(6, HEADS, SIZE, HEADS * SIZE, TRAIN))
    encoding.extend(extension_of(extension, config))
    return encoding


def extension_of(name: str, config: EncodingConfig) -> ExtensionConfig:
    assert isinstance(config, LayeredConfig)
    factors = {"factors": [1.0 + c for c in range(config.rotated(SIZE) // 2)]}
    return EXTENSIONS[name](**factors if name == "longrope" else {})


def attended(encoding: Encoding, layer: int) -> Tensor:
    q, k, v = torch.randn(
        3, 1, HEADS, LENGTH, SIZE, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    x = torch.zeros(1, LENGTH, HEADS * SIZE, dtype=torch.float64)
    return attend(q, k, v, encoding.hooks(x, torch.arange(LENGTH), layer))


@pytest.mark.parametrize("extension", TAKEN)
@pytest.mark.parametrize("name", LAYERED)
def test_each_layer_is_the_rope_of_its_base_stretched_by_itself(name: str, extension: str) -> None:
    local = ENCODINGS[name](theta=1e4, global_theta=None, global_every=None)
    layered = dataclasses.replace(local, global_theta=3e5, global_every=3)
    alone = dataclasses.replace(local, theta=3e5)
    encoding = make(layered, extension)
    of_local, of_global = (attended(make(each, extension), 0) for each in (local, alone))
    for layer in range(6):
        expected = of_global if layer in (2, 5) else of_local
        assert torch.equal(attended(encoding, layer), expected), layer
    alike = (of_local - of_global).abs().max() < 1e-9
    assert alike == (extension == "abf")  # one base for all, whatever each was trained with


def logits(config: EncodingConfig, layers: int = 4) -> Tensor:
    size = ModelConfig(layers=layers, width=48, heads=3)
    model = build_model(size, config, TRAIN, 31, 0).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
        found: Tensor = model(torch.arange(40).view(1, 40) * 7 % 31)
    return found


def test_one_base_for_all_layers_is_rope() -> None:
    alike = RopeConfig(global_theta=1e4, global_every=2)
    assert torch.equal(logits(alike), logits(RopeConfig()))
    every_other = logits(RopeConfig(global_theta=1e6, global_every=2))
    last = logits(RopeConfig(global_theta=1e6, global_every=4))
    for other in (RopeConfig(), RopeConfig(theta=1e6)):
        assert (every_other - logits(other)).abs().max() > 1e-3
    assert (every_other - last).abs().max() > 1e-3
    assert torch.equal(logits(RopeLocalGlobalConfig()), last)


def test_nothing_is_stretched_where_one_of_the_two_cannot_be() -> None:
    encoding = make(RopeConfig(global_theta=5e5, global_every=3))
    before = [attended(encoding, layer) for layer in (LOCAL, GLOBAL)]
    # Base 500,000 is what the global layers have: no other frequencies there.
    with pytest.raises(UnsupportedError, match=r"in layers with encoding\.global_theta, abf chang"):
        encoding.extend(AbfConfig())
    with pytest.raises(UnsupportedError, match="abf changes no frequency"):
        encoding.extend(AbfConfig(theta=1e4))  # what the others have
    for layer, expected in zip((LOCAL, GLOBAL), before, strict=True):
        assert torch.equal(attended(encoding, layer), expected)
    encoding.extend(YarnConfig())
    for layer, expected in zip((LOCAL, GLOBAL), before, strict=True):
        assert not torch.equal(attended(encoding, layer), expected)


def test_p_rope_cuts_the_slow_pairs_of_both() -> None:
    described = make(RopePConfig(global_theta=1e6, global_every=3)).describe(1)
    for key in ("inverse_frequencies", "global_inverse_frequencies"):
        assert (described[key] > 0).tolist() == [True] * 6 + [False] * 2


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            ["encoding.global_theta=1e6", "encoding.global_every=3"],
            "encoding.global_every=3 does not divide model.layers=4. It may be 2, 4.",
        ),
        (
            ["encoding=rope_local_global", "model=small"],
            "encoding.global_every=4 does not divide model.layers=6. It may be 2, 3, 6.",
        ),
        (
            ["encoding=rope_local_global", "layers=every2nd"],
            "encoding.global_every=4 has no effect with layers=every2nd: those layers go without",
        ),
        (
            ["encoding=rope_local_global", "model.layers=1"],
            "model.layers=1. No number does; change model.layers.",
        ),
        (["encoding.global_every=2"], "encoding.global_every=2 has no effect without"),
        (
            ["encoding=rope_p", "encoding.global_theta=1e6"],
            "needs encoding.global_every, which divides model.layers=4. It may be 2, 4.",
        ),
        (
            ["encoding.global_theta=1e4", "encoding.global_every=2"],
            "encoding.global_theta=10000.0 has no effect: it is what encoding.theta is.",
        ),
        (
            ["encoding.global_theta=1e6", "encoding.global_every=1"],
            "encoding.global_every=1 is too",
        ),
    ],
)
def test_a_pattern_that_does_not_fit_is_refused(
    typed: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError) as error:
        configure("train", *typed)
    assert said in str(error.value)
    assert main(["inspect", *typed]) == 2
    assert said in capsys.readouterr().err


def test_a_pattern_that_fits_is_taken() -> None:
    configure("train", "encoding=rope_local_global")
    configure("train", "encoding=rope_local_global", "model=small", "encoding.global_every=6")
    # Of layers 2 and 4, which have the other base, only 4 goes without the encoding.
    configure("train", "encoding=rope_local_global", "encoding.global_every=2", "layers=every4th")
    configure(
        "train", "encoding=rope_partial", "encoding.global_theta=3", "encoding.global_every=2"
    )
