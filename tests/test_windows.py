"""LM-Infinite and StreamingLLM against caches simulated token by token, and ALiBi's slopes."""

from __future__ import annotations

import cmath
import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from posbench import configure
from posbench.attention import Kernel, attend, choose, score_rows
from posbench.catalog import EXTENSION_CARDS
from posbench.config import InspectSettings, ModelConfig
from posbench.config.encodings import (
    ENCODINGS,
    AlibiConfig,
    AlibiLearnedConfig,
    EncodingConfig,
    Layout,
    NoneConfig,
    RopeConfig,
    RopePartialConfig,
    RopePConfig,
)
from posbench.config.extensions import (
    EXTENSIONS,
    AlibiPiConfig,
    ExtensionConfig,
    LmInfiniteConfig,
    NoExtensionConfig,
    StreamingConfig,
    WindowConfig,
)
from posbench.encodings import Encoding, Shape, build
from posbench.errors import UnsupportedError, UserError
from posbench.model import build_model
from posbench.rules import check_extension

SIZE, HEADS, TRAIN, LENGTH = 8, 3, 16, 40
EXACT = {"rtol": 0, "atol": 1e-12}
WINDOWS = [name for name, kind in EXTENSIONS.items() if issubclass(kind, WindowConfig)]
ABLE = [name for name, kind in ENCODINGS.items() if kind().takes(StreamingConfig())]
every_window = pytest.mark.parametrize("name", WINDOWS)
every_able = pytest.mark.parametrize("encoding", ABLE)


def make(
    config: EncodingConfig, extension: ExtensionConfig | None = None, train_length: int = TRAIN
) -> Encoding:
    encoding = build(config, Shape(2, HEADS, SIZE, HEADS * SIZE, train_length))
    with torch.no_grad():
        encoding.initialise(lambda name: torch.Generator().manual_seed(len(name)))
    encoding.extend(extension or NoExtensionConfig())
    return encoding.double()


def vectors(length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, k, v = torch.randn(3, 1, HEADS, length, SIZE, generator=generator, dtype=torch.float64)
    return q, k, v


@torch.no_grad()
def attended(encoding: Encoding, length: int = LENGTH, kernel: Kernel | None = None) -> Tensor:
    q, k, v = vectors(length)
    x = torch.zeros(1, length, HEADS * SIZE, dtype=torch.float64)
    return attend(q, k, v, encoding.hooks(x, torch.arange(length), 0), kernel)


# ---------------------------------------------------------------- references


def streaming_caches(sinks: int, window: int) -> Iterator[list[int]]:
    """The tokens in the cache once each token is in it, in the order of their places."""
    cache: list[int] = []
    token = 0
    while True:
        if len(cache) == sinks + window:
            del cache[sinks]  # the oldest that is no sink
        cache.append(token)
        yield list(cache)
        token += 1


def streaming(sinks: int, window: int) -> Iterator[dict[int, int]]:
    """What each token sees: key -> distance, both as places in the cache."""
    for cache in streaming_caches(sinks, window):
        yield {key: len(cache) - 1 - place for place, key in enumerate(cache)}


def lm_infinite(sinks: int, window: int) -> Iterator[dict[int, int]]:
    i = 0
    while True:
        yield {j: min(i - j, window) for j in range(i + 1) if j < sinks or i - j < window}
        i += 1


def plain_score(plain: Encoding, q: Tensor, k: Tensor, distance: int) -> Tensor:
    """Scores [H] of q, k [H, D] `distance` apart, in a text that begins with the key."""
    queries, keys = torch.zeros(2, 1, HEADS, distance + 1, SIZE, dtype=torch.float64)
    queries[0, :, -1], keys[0, :, 0] = q, k
    x = torch.zeros(1, distance + 1, HEADS * SIZE, dtype=torch.float64)
    hooks = plain.hooks(x, torch.arange(distance + 1), 0)
    return score_rows(queries, keys, hooks, [distance])[0][0, :, 0]


def rope_score(layout: Layout, q: Tensor, k: Tensor, distance: int) -> Tensor:
    """The same for RoPE, from complex numbers (Su et al. 2021)."""
    found = torch.zeros(HEADS, dtype=torch.float64)
    for h in range(HEADS):
        for c in range(SIZE // 2):
            one, two = (2 * c, 2 * c + 1) if layout is Layout.interleaved else (c, c + SIZE // 2)
            a, b = (complex(x[h, one].item(), x[h, two].item()) for x in (q, k))
            turn = cmath.exp(1j * 10_000 ** (-2 * c / SIZE) * distance)
            found[h] += (a * turn * b.conjugate()).real / math.sqrt(SIZE)
    return found


ROWS = (0, 3, 4, 11, 12, 13, 15, 16, 17, 18, 19, 20, 21, LENGTH - 1)
REFERENCES = {
    "lm_infinite": (LmInfiniteConfig(), lm_infinite(4, TRAIN)),  # the defaults
    "lm_infinite_2_5": (LmInfiniteConfig(sinks=2, window=5), lm_infinite(2, 5)),
    "lm_infinite_0": (LmInfiniteConfig(sinks=0, window=7), lm_infinite(0, 7)),
    "streaming": (StreamingConfig(), streaming(4, TRAIN - 4)),
    "streaming_7_3": (StreamingConfig(sinks=7, window=3), streaming(7, 3)),
    "streaming_1": (StreamingConfig(sinks=1, window=9), streaming(1, 9)),
    "streaming_0": (StreamingConfig(sinks=0), streaming(0, TRAIN)),
}
SEEN = {
    name: [seen for seen, _ in zip(rule, range(LENGTH), strict=False)]
    for name, (_, rule) in REFERENCES.items()
}
every_reference = pytest.mark.parametrize("name", REFERENCES)


@every_reference
@every_able
def test_attention_is_the_papers_key_by_key(name: str, encoding: str) -> None:
    found = attended(make(ENCODINGS[encoding](), REFERENCES[name][0]))
    plain = make(ENCODINGS[encoding]())
    q, k, v = vectors()
    for i in ROWS:
        seen = SEEN[name][i]
        row = torch.stack(
            [plain_score(plain, q[0, :, i], k[0, :, j], distance) for j, distance in seen.items()]
        ).detach()
        weights = row.softmax(dim=0)
        expected = sum(weights[n, :, None] * v[0, :, j] for n, j in enumerate(seen))
        torch.testing.assert_close(found[0, :, i], expected, rtol=0, atol=1e-11)


@every_reference
@pytest.mark.parametrize("layout", list(Layout))
def test_scores_of_rope_are_those_of_the_distance(name: str, layout: Layout) -> None:
    encoding = make(RopeConfig(layout=layout), REFERENCES[name][0])
    q, k, _ = vectors()
    x = torch.zeros(1, LENGTH, HEADS * SIZE, dtype=torch.float64)
    found = score_rows(q, k, encoding.hooks(x, torch.arange(LENGTH), 0), list(ROWS))
    for i, scores in zip(ROWS, found, strict=True):
        seen = SEEN[name][i]
        for j in range(i + 1):
            if j in seen:
                expected = rope_score(layout, q[0, :, i], k[0, :, j], seen[j])
                torch.testing.assert_close(scores[0, :, j], expected, rtol=0, atol=1e-11)
            else:
                assert (scores[0, :, j] == -math.inf).all()


def test_what_is_seen_by_hand() -> None:
    """Token 20 beside 2 sinks and a window of 3; StreamingLLM's figure 4 with 4 sinks."""
    streamed = list(zip(streaming(2, 3), range(21), strict=False))[20][0]
    assert streamed == {0: 4, 1: 3, 18: 2, 19: 1, 20: 0}
    limited = list(zip(lm_infinite(2, 3), range(21), strict=False))[20][0]
    assert limited == {0: 3, 1: 3, 18: 2, 19: 1, 20: 0}
    cache = list(zip(streaming_caches(4, 4), range(9), strict=False))[8][0]
    assert cache == [0, 1, 2, 3, 5, 6, 7, 8]


@pytest.mark.parametrize("sinks", [0, 1, 4])
@pytest.mark.parametrize(
    "config", [NoneConfig(), AlibiConfig(), RopeConfig(), RopePartialConfig()], ids=lambda c: c.name
)
@torch.no_grad()
def test_streaming_is_decoding_with_a_rolling_cache(
    config: EncodingConfig, sinks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers: what a token reads of its predecessors was itself computed within the cache."""
    size, window = ModelConfig(layers=2, width=24, heads=3), 6
    model, plain = (build_model(size, config, TRAIN, 31, 0).double().eval() for _ in range(2))
    for parameters in (model.parameters(), plain.parameters()):
        for parameter in parameters:
            if parameter.dim() > 1:
                parameter.mul_(8)
    model.encoding.extend(StreamingConfig(sinks=sinks, window=window))
    text = torch.randint(31, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    expected = model(text)

    caches: list[list[tuple[Tensor, Tensor]]] = [[], []]  # of each layer: keys not yet turned
    layers: list[int] = []

    def cached(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
        layer = len(layers) % 2
        layers.append(layer)
        cache = caches[layer]
        if len(cache) == sinks + window:
            del cache[sinks]
        cache.append((k, v))
        keys, values = (torch.cat(each, dim=2) for each in zip(*cache, strict=True))
        places = torch.arange(len(cache))
        x = torch.zeros(2, len(cache), 24, dtype=torch.float64)
        queries = torch.zeros_like(keys)
        queries[:, :, -1:] = q
        return attend(queries, keys, values, plain.encoding.hooks(x, places, layer))[:, :, -1:]

    monkeypatch.setattr("posbench.model.attend", cached)
    decoded = torch.cat([plain(text[:, t : t + 1]) for t in range(LENGTH)], dim=1)
    assert len(layers) == 2 * LENGTH
    torch.testing.assert_close(expected, decoded, rtol=0, atol=1e-10)


# ---------------------------------------------------------------- limits


@every_window
@every_able
def test_a_text_within_the_window_is_the_plain_encoding(name: str, encoding: str) -> None:
    config, extension = ENCODINGS[encoding](), EXTENSIONS[name](window=20, sinks=3)
    for length in (20, 24):  # of 20 tokens all see all; of 24, the last does not see token 3
        same = attended(make(config), length)
        found = attended(make(config, extension), length)
        torch.testing.assert_close(found[:, :, :20], same[:, :, :20], **EXACT)
        assert ((found[:, :, 23:] - same[:, :, 23:]).abs() > 1e-5).any() == (length == 24)


@every_window
def test_no_sinks_are_plain_attention_to_a_window(name: str) -> None:
    q, k, v = vectors()
    distances = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    keep = (distances >= 0) & (distances < 9)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
    found = attended(make(NoneConfig(), EXTENSIONS[name](sinks=0, window=9)))
    torch.testing.assert_close(found, expected, **EXACT)


def test_without_positions_both_see_the_same() -> None:
    sizes = {"sinks": 3, "window": 9}
    one, two = (attended(make(NoneConfig(), EXTENSIONS[name](**sizes))) for name in WINDOWS)
    assert torch.equal(one, two)
    one, two = (attended(make(RopeConfig(), EXTENSIONS[name](**sizes))) for name in WINDOWS)
    assert (one - two).abs().max() > 1e-3


@pytest.mark.parametrize("still", [RopeConfig(fraction=0.0), RopePConfig(share=0.0)], ids=str)
def test_a_rotation_that_turns_nothing_keeps_the_mask(still: EncodingConfig) -> None:
    extension = StreamingConfig(sinks=3, window=9)
    expected = attended(make(NoneConfig(), extension))
    torch.testing.assert_close(attended(make(still, extension)), expected, **EXACT)


def test_defaults_come_from_the_training_length() -> None:
    assert LmInfiniteConfig().sizes_for(128) == (4, 128, 128)
    assert LmInfiniteConfig().sizes_for(2048) == (32, 2048, 2048)  # the paper: 10 to 100
    assert StreamingConfig().sizes_for(128) == (4, 124, 127)  # no distance that training had not
    assert StreamingConfig(sinks=0).sizes_for(128) == (0, 128, 128)


@every_window
def test_no_second_matrix_of_scores_is_made(name: str) -> None:
    """What a rotation needs beyond its own scores are those of the sinks."""
    seen: list[tuple[int, ...]] = []

    class Recorded(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if func in (torch.Tensor.matmul, torch.Tensor.__matmul__, torch.matmul):
                seen.append(tuple(result.shape))
            return result

    encoding = make(RopeConfig(), EXTENSIONS[name](sinks=3, window=9))
    with Recorded():
        attended(encoding)
    assert seen.count((1, HEADS, LENGTH, LENGTH)) == 1
    assert (1, HEADS, LENGTH, 3) in seen


@every_window
@pytest.mark.parametrize("encoding", ["none", "rope", "alibi", "kerple_log"])
def test_kernels_and_chunks_agree(
    name: str, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for sinks in (0, 3):
        made = make(ENCODINGS[encoding](), EXTENSIONS[name](sinks=sinks, window=9))
        expected = attended(made)
        x = torch.zeros(1, LENGTH, HEADS * SIZE, dtype=torch.float64)
        kernel = choose(made.hooks(x, torch.arange(LENGTH), 0), "cpu", SIZE)
        assert kernel is (Kernel.dense if sinks else Kernel.strided)
        with monkeypatch.context() as patch:
            patch.setattr("posbench.attention.SCORES_PER_CHUNK", 7 * HEADS * LENGTH)
            torch.testing.assert_close(attended(made, kernel=Kernel.dense), expected, **EXACT)
        if sinks == 0 or encoding != "rope":
            torch.testing.assert_close(attended(made, kernel=Kernel.flex), expected, **EXACT)


# ---------------------------------------------------------------- slopes of ALiBi


@pytest.mark.parametrize("config", [AlibiConfig(), AlibiLearnedConfig()], ids=lambda c: c.name)
@torch.no_grad()
def test_alibi_pi_divides_each_slope(config: EncodingConfig) -> None:
    slopes = torch.tensor([2.0**-4, 2.0**-8, 2.0**-2], dtype=torch.float64)  # of three heads
    x = torch.zeros(1, 40, HEADS * SIZE, dtype=torch.float64)
    for extension, length, s in (
        (AlibiPiConfig(), 8, 1.0),
        (AlibiPiConfig(), 16, 1.0),
        (AlibiPiConfig(), 40, 2.5),
        (AlibiPiConfig(factor=4.0), 40, 4.0),
        (AlibiPiConfig(factor=4.0), 8, 4.0),
        (AlibiPiConfig(factor=1.0), 40, 1.0),
    ):
        encoding = make(config, extension)
        hooks = encoding.hooks(x[:, :length], torch.arange(length), 0)
        assert hooks.distance_bias is not None
        distances = torch.arange(length, dtype=torch.float64)
        expected = -(slopes / s)[:, None] * distances
        torch.testing.assert_close(hooks.distance_bias(distances), expected, rtol=1e-15, atol=0)
        assert torch.equal(encoding.describe(length)["slopes"], slopes / s)


def test_a_factor_of_one_and_a_text_within_training_are_plain_alibi() -> None:
    for config in (AlibiConfig(), AlibiLearnedConfig()):
        plain = make(config)
        assert torch.equal(attended(make(config, AlibiPiConfig(factor=1.0))), attended(plain))
        within, expected = (attended(each, 16) for each in (make(config, AlibiPiConfig()), plain))
        assert torch.equal(within, expected)
        longer = attended(make(config, AlibiPiConfig()))
        assert (longer - attended(plain)).abs().max() > 1e-3


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", [*WINDOWS, "alibi_pi"])
def test_cards_and_refusals_name_the_same_encodings(name: str) -> None:
    able = [each for each, kind in ENCODINGS.items() if kind().takes(EXTENSIONS[name]())]
    (card,) = (card for card in EXTENSION_CARDS if card.id == name)
    assert card.applies_to == ", ".join(able)
    for encoding in set(ENCODINGS) - set(able):
        with pytest.raises(UnsupportedError, match=rf"^{name} .*; {encoding} (is|has) none"):
            make(ENCODINGS[encoding](), EXTENSIONS[name]())
        settings = InspectSettings(encoding=ENCODINGS[encoding](), extension=EXTENSIONS[name]())
        with pytest.raises(UserError, match=f"extension={name} .*; .*{encoding} .* to encoding="):
            check_extension(settings)


def test_who_takes_a_window() -> None:
    assert set(ABLE) == {
        *("none", "rope", "rope_partial", "rope_p", "rope_abf", "rope_local_global", "alibi"),
        *("alibi_learned", "t5", "kerple_log", "kerple_power", "sandwich", "dpb"),
    }


@every_window
def test_a_window_that_no_text_outgrows_is_refused(name: str) -> None:
    for encoding in ("none", "rope", "alibi"):
        config = ENCODINGS[encoding]()
        with pytest.raises(UnsupportedError, match=r"hides nothing .*extension\.window=29"):
            make(config, EXTENSIONS[name](sinks=3, window=2 * TRAIN - 3))
        extension = EXTENSIONS[name](sinks=3, window=2 * TRAIN - 4)
        changed = attended(make(config, extension), 2 * TRAIN)
        assert (changed - attended(make(config), 2 * TRAIN)).abs().max() > 1e-6
    with pytest.raises(UserError, match=r"extension\.window=0 is too small; the least is 1"):
        configure("inspect", f"extension={name}", "extension.window=0")


def test_sinks_that_leave_no_window_are_refused() -> None:
    with pytest.raises(
        UnsupportedError, match=r"no room .*extension\.sinks=16 .*extension\.window"
    ):
        make(RopeConfig(), StreamingConfig(sinks=TRAIN))
    make(RopeConfig(), StreamingConfig(sinks=TRAIN, window=4))
    make(RopeConfig(), StreamingConfig(sinks=TRAIN - 1))


def test_slopes_that_are_all_zero_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"alibi has none but 0 \(encoding\.free_heads=3\)"):
        make(AlibiConfig(free_heads=HEADS), AlibiPiConfig())
    make(AlibiConfig(free_heads=HEADS - 1), AlibiPiConfig())


def test_a_refused_extension_leaves_the_one_before() -> None:
    for config in (NoneConfig(), AlibiConfig(), RopeConfig()):
        encoding = make(config, StreamingConfig())
        expected = attended(encoding)
        with pytest.raises(UnsupportedError):
            encoding.extend(dataclasses.replace(StreamingConfig(), window=1000))
        assert torch.equal(attended(encoding), expected)
