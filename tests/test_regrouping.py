"""ReRoPE, Leaky ReRoPE and Self-Extend against their distances, pair by pair."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from posbench import configure
from posbench.attention import Kernel, attend, choose, score_rows
from posbench.config.encodings import ENCODINGS, EncodingConfig, Layout, RopeConfig, RopePConfig
from posbench.config.extensions import (
    EXTENSIONS,
    ExtensionConfig,
    LeakyReropeConfig,
    NoExtensionConfig,
    RegroupingConfig,
    ReropeConfig,
    SelfExtendConfig,
)
from posbench.encodings import Encoding, Shape, build
from posbench.encodings.regrouping import far_positions
from posbench.errors import UnsupportedError, UserError

SIZE, HEADS, TRAIN, LENGTH = 8, 3, 24, 60
NAMES = [name for name, kind in EXTENSIONS.items() if issubclass(kind, RegroupingConfig)]
PLAIN: dict[str, dict[str, Any]] = {
    "rerope": {"logn": False},
    "leaky_rerope": {"logn": False},
    "self_extend": {"logn": False},
}


def make(extension: ExtensionConfig, config: EncodingConfig | None = None) -> Encoding:
    encoding = build(config or RopeConfig(), Shape(2, HEADS, SIZE, HEADS * SIZE, TRAIN))
    encoding.extend(extension)
    return encoding


def vectors(length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, k, v = torch.randn(3, 1, HEADS, length, SIZE, generator=generator, dtype=torch.float64)
    return q, k, v


def attended(encoding: Encoding, positions: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    q, k, v = (x.to(dtype) for x in vectors(len(positions)))
    x = torch.zeros(1, len(positions), HEADS * SIZE, dtype=dtype)
    return attend(q, k, v, encoding.hooks(x, positions, 0))


def scores(encoding: Encoding, positions: Tensor) -> Tensor:
    """The last row of scores of head 1, [T]."""
    q, k, _ = vectors(len(positions))
    x = torch.zeros(1, len(positions), HEADS * SIZE, dtype=torch.float64)
    (row,) = score_rows(q, k, encoding.hooks(x, positions, 0), [len(positions) - 1])
    return row[0, 1]


def rerope(i: int, j: int) -> float:
    return min(i - j, 12)


def leaky(i: int, j: int) -> float:
    return i - j if i - j < 12 else 12 + (i - j - 12) / 8


def self_extend(i: int, j: int) -> float:
    return i - j if i - j < 12 else i // 8 - j // 8 + 12 - 12 // 8


Distance = Callable[[int, int], float]
CASES: list[tuple[ExtensionConfig, Distance]] = [
    (ReropeConfig(), rerope),  # the window is half the training length, 12
    (LeakyReropeConfig(), leaky),
    (SelfExtendConfig(), self_extend),
]
cases = pytest.mark.parametrize(("extension", "distance"), CASES, ids=NAMES)


@cases
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("start", [0, 5])
def test_scores_by_the_papers_distance(
    extension: ExtensionConfig, distance: Distance, layout: Layout, start: int
) -> None:
    positions = torch.arange(LENGTH) + start
    found = scores(make(extension, RopeConfig(layout=layout)), positions)
    q, k, _ = vectors()
    i = LENGTH - 1 + start
    warmth = 1.0
    if isinstance(extension, RegroupingConfig) and extension.logn:
        warmth = max(1.0, math.log(i + 1) / math.log(TRAIN))
    for j in range(start, LENGTH + start):
        score = 0.0
        for c in range(SIZE // 2):
            a, b = (
                complex(x[2 * c], x[2 * c + 1])
                if layout is Layout.interleaved
                else complex(x[c], x[c + SIZE // 2])
                for x in (q[0, 1, -1].tolist(), k[0, 1, j - start].tolist())
            )
            turn = cmath.exp(1j * 10_000 ** (-2 * c / SIZE) * distance(i, j))
            score += (a * turn * b.conjugate()).real
        expected = warmth * score / math.sqrt(SIZE)
        assert found[j - start].item() == pytest.approx(expected, abs=1e-11)


def test_far_distances_by_hand() -> None:
    """Query 100 and key 3 with a window of 16: 16; 16 + 81/8; and 12 - 0 + 16 - 2."""
    positions = torch.tensor([100, 3])
    expected = [(ReropeConfig(), 16.0), (LeakyReropeConfig(), 26.125), (SelfExtendConfig(), 26.0)]
    for extension, distance in expected:
        for_q, for_k = far_positions(positions, 16, extension)
        assert (for_q[0] - for_k[1]).item() == pytest.approx(distance)


@pytest.mark.parametrize("name", NAMES)
def test_no_distance_is_longer_than_training_saw_at_four_times_the_length(name: str) -> None:
    """The defaults, a window of L/2 and groups or steps of 8, are made for 4x."""
    positions = torch.arange(4 * TRAIN)
    extension = EXTENSIONS[name]()
    assert isinstance(extension, RegroupingConfig)
    for_q, for_k = far_positions(positions, extension.window_for(TRAIN), extension)
    distances = for_q[:, None] - for_k
    far = positions[:, None] - positions >= extension.window_for(TRAIN)
    assert distances[far].max() < TRAIN
    assert distances[far].min() > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_text_within_the_window_is_plain_rope(name: str) -> None:
    encoding = make(EXTENSIONS[name](window=24, **PLAIN[name]))
    positions = torch.arange(24)
    expected = attended(make(NoExtensionConfig()), positions)
    torch.testing.assert_close(attended(encoding, positions), expected, rtol=0, atol=1e-12)
    longer = torch.arange(26)
    expected = attended(make(NoExtensionConfig()), longer)
    assert (attended(encoding, longer) - expected).abs().max() > 1e-4


@pytest.mark.parametrize(
    "extension", [SelfExtendConfig(group=1), LeakyReropeConfig(step=1.0, logn=False)], ids=str
)
def test_groups_of_one_token_are_plain_rope(extension: ExtensionConfig) -> None:
    positions = torch.arange(LENGTH)
    expected = attended(make(NoExtensionConfig()), positions)
    torch.testing.assert_close(attended(make(extension), positions), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_logn_changes_nothing_within_the_training_length(name: str) -> None:
    with_logn, without = (make(EXTENSIONS[name](logn=logn)) for logn in (True, False))
    short, long = torch.arange(TRAIN), torch.arange(LENGTH)
    expected = attended(without, short)
    torch.testing.assert_close(attended(with_logn, short), expected, rtol=0, atol=1e-12)
    assert (attended(with_logn, long) - attended(without, long)).abs().max() > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_chunks_of_rows_and_float32_give_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding = make(EXTENSIONS[name]())
    positions = torch.arange(LENGTH)
    expected = attended(encoding, positions)
    single = attended(encoding, positions, torch.float32)
    torch.testing.assert_close(single.double(), expected, rtol=0, atol=1e-5)
    monkeypatch.setattr("posbench.attention.SCORES_PER_CHUNK", 7 * HEADS * LENGTH)
    torch.testing.assert_close(attended(encoding, positions), expected, rtol=0, atol=1e-12)
    x = torch.zeros(1, LENGTH, HEADS * SIZE)
    assert choose(encoding.hooks(x, positions, 0), "cuda", 32) is Kernel.dense


def test_the_channels_that_do_not_turn_stay() -> None:
    """Under partial rotary only the rotated half, and under p-RoPE only pairs that turn, move."""
    positions = torch.arange(LENGTH)
    for still in (RopeConfig(fraction=0.5), RopePConfig(share=0.5)):
        whole = scores(make(ReropeConfig(logn=False), RopeConfig()), positions)
        part = scores(make(ReropeConfig(logn=False), still), positions)
        plain = scores(make(NoExtensionConfig(), still), positions)
        torch.testing.assert_close(part[-12:], plain[-12:], rtol=0, atol=1e-12)
        assert (part[:-13] - plain[:-13]).abs().max() > 1e-3
        assert (part - whole).abs().max() > 1e-3


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "encoding", [name for name, kind in ENCODINGS.items() if not kind().takes(ReropeConfig())]
)
def test_refused_where_a_rotation_alone_does_not_decide(name: str, encoding: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"^{name} "):
        make(EXTENSIONS[name](), ENCODINGS[encoding]())
    with pytest.raises(UserError, match=f"extension={name} .*applies to encoding=rope, rope_p"):
        configure("inspect", f"encoding={encoding}", f"extension={name}")


@pytest.mark.parametrize("name", NAMES)
def test_a_window_that_no_text_outgrows_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"changes nothing .*extension\.window=48"):
        make(EXTENSIONS[name](window=2 * TRAIN))
    make(EXTENSIONS[name](window=2 * TRAIN - 1))
