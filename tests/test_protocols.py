"""How each protocol cuts a text: pure layouts, without any model.

Values with a key `eval/...` are exact arithmetic of the loss 2 + 1 / (1 + c) with c tokens visible,
computed elsewhere; those under `mutant/` are what wrong evaluators give.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from oracles import (
    MEANS,
    OWN,
    PRESETS,
    TRAIN,
    expected_windows,
    make_config,
    make_split,
    toy,
)

from posbench.catalog import PROTOCOL_CARDS
from posbench.config import Protocol
from posbench.data import Split
from posbench.plan import Plan, plan
from posbench.protocols import (
    BY_WINDOWS,
    Layout,
    Window,
    blocks,
    last_positions,
    layout,
    one_label_less,
    rolling,
    second_halves,
    sliding,
    window_means,
    yarn_stride,
)
from posbench.targets import Text, documents_of

SPLIT = make_split()
LENGTHS = (6, TRAIN, 2 * TRAIN, 4 * TRAIN)


def make_plan(split: Split = SPLIT, protocols: Iterable[str] = MEANS, **settings: object) -> Plan:
    asked = {"ratios": [0.75, 1.0, 2.0, 4.0], "protocols": list(protocols), "stride": 3}
    return plan(split, TRAIN, make_config(**(asked | settings)), "cpu")


def pairs(windows: Iterable[Window]) -> list[tuple[int, int]]:
    """(target, tokens visible) of all that windows score, in their order."""
    return [
        (each.start + seen, seen)
        for each in windows
        for seen in range(each.length - each.scored + 1, each.length + 1)
    ]


def mean(windows: Iterable[Window]) -> float:
    """The weighted mean of the toy's losses."""
    made = list(windows)
    total = math.fsum(each.weight * each.scored for each in made)
    losses = [
        each.weight * toy(seen)
        for each in made
        for seen in range(each.length - each.scored + 1, each.length + 1)
    ]
    return math.fsum(losses) / total


# ---------------------------------------------------------------- exact values

# eval/sliding/N=*/L=*/stride=*: windows of L tokens read L - 1 and predict L - 1 of N - 1 targets
SLIDING = {
    (10, 4, 2): (2.314814814814815, 2.309027777777778, 4),
    (10, 4, 1): (2.287037037037037, 2.265873015873016, 7),
    (1000, 256, 64): (2.008478969867914, 2.0057037647525924, 13),
    (1000, 256, 255): (2.020432394612709, 2.020455072201094, 4),
    (1000, 256, 1): (2.0080386335964135, 2.003927980497238, 745),
}


@pytest.mark.parametrize(("tokens", "length", "stride"), SLIDING)
def test_sliding_has_the_exact_mean(tokens: int, length: int, stride: int) -> None:
    wanted, of_windows, count = SLIDING[tokens, length, stride]
    made = list(sliding(Text(0, tokens - 1), length - 1, stride))
    assert len(made) == count
    assert sorted(target for target, _ in pairs(made)) == list(range(1, tokens))
    assert mean(made) == pytest.approx(wanted, abs=1e-13)
    # The bug of YaRN's code is that preset's rule (MUT_mean_of_window_means).
    assert mean(window_means(made)) == pytest.approx(of_windows, abs=1e-13)
    assert abs(wanted - of_windows) > 1e-6


def test_sliding_windows_are_where_they_should_be() -> None:
    # eval/sliding/N=10/L=4/stride=2 and stride=1: [first token, end, first target]
    for stride, wanted in (
        (2, [[0, 4, 1], [2, 6, 4], [4, 8, 6], [6, 10, 8]]),
        (1, [[0, 4, 1], *([n, n + 4, n + 3] for n in range(1, 7))]),
    ):
        made = sliding(Text(0, 9), 3, stride)
        found = [[w.start, w.start + w.length + 1, w.start + w.length - w.scored + 1] for w in made]
        assert found == wanted


def test_sliding_is_none_of_the_known_mistakes() -> None:
    """mutant/eval/*, N=1000, L=256, S=64."""
    made = list(sliding(Text(0, 999), 255, 64))
    mistakes = {
        "first_window_weighted_as_L_not_L-1": 2.0084905863684885,
        "strided_mean_of_means": 2.0057037647525924,
        "last_partial_window_dropped": 2.008635763483168,
        "overlap_tokens_scored_again": 2.02021216840308,
    }
    for value in mistakes.values():
        assert abs(mean(made) - value) > 1e-6
    # Each is what one would get: the values are of these mistakes and no others.
    dropped = [each for each in made if each.length == 255]
    assert mean(dropped) == pytest.approx(mistakes["last_partial_window_dropped"], abs=1e-12)
    again = [each._replace(scored=each.length) for each in made]
    assert mean(again) == pytest.approx(mistakes["overlap_tokens_scored_again"], abs=1e-12)


# eval/disjoint_carry/N=*/L=*, and its mutants; eval/disjoint/N=*/L=* loses a token per window
DISJOINT = {
    (10, 4): (2.340740740740741, 2.380555555555556, 2.380952380952381),
    (1000, 128): (2.0353480478136152, 2.0354868423816015, 2.035542778427329),
    (1000, 256): (2.0204312459468783, 2.0204636383184934, 2.0204810658124304),
    (1000, 512): (2.0115986197830598, 2.0116046369459273, 2.0116082884223827),
}


@pytest.mark.parametrize(("tokens", "length"), DISJOINT)
def test_blocks_have_the_exact_mean(tokens: int, length: int) -> None:
    wanted, of_windows, uncarried = DISJOINT[tokens, length]
    made = list(blocks(Text(0, tokens - 1), length))
    assert sorted(target for target, _ in pairs(made)) == list(range(1, tokens))
    assert mean(made) == pytest.approx(wanted, abs=1e-13)
    assert mean(window_means(made)) == pytest.approx(of_windows, abs=1e-13)
    assert abs(wanted - uncarried) > 1e-6  # a token lost per window (transformers #30975)


def test_rolling_windows_are_those_of_the_harness() -> None:
    # eval/lm_eval_windows/*: [first token read, one past the last, targets]; "prefix+0" is a prefix
    # before token 0, here the text's first token, so that its tokens count from -1.
    for count, length, wanted in (
        (10, 4, [[-1, 3, 4], [3, 7, 4], [5, 9, 2]]),
        (7577, 2048, [[-1, 2047, 2048], [2047, 4095, 2048], [4095, 6143, 2048],
                      [5528, 7576, 1433]]),
    ):  # fmt: skip
        made = rolling(Text(-1, count), length)
        assert [[w.start, w.start + w.length, w.scored] for w in made] == wanted


def test_a_label_less_is_the_rule_of_the_documentation() -> None:
    """Each window's mean, times its labels less one, over the sum of these."""
    made = list(one_label_less(sliding(Text(0, 999), 255, 128)))
    total = labels = 0.0
    before = 0
    for begin in range(0, 1000, 128):
        end = min(begin + 256, 1000)
        losses = [toy(t - begin) for t in range(max(before, begin + 1), end)]
        total += math.fsum(losses) / len(losses) * (end - before - 1)
        labels += end - before - 1
        before = end
        if end == 1000:
            break
    assert mean(made) == pytest.approx(total / labels, abs=1e-13)
    assert mean(made) != pytest.approx(mean(each._replace(weight=1.0) for each in made), abs=1e-7)


def test_second_halves_leave_no_target_with_little_before_it() -> None:
    made = list(second_halves(Text(0, 25), 8))
    assert pairs(made) == [(8 * n + j + 1, j + 1) for n in range(3) for j in (4, 5, 6)]


def test_a_window_of_256_or_less_is_halved() -> None:
    assert [last_positions(n) for n in (2, 128, 256, 257, 512)] == [1, 64, 128, 256, 256]
    assert [yarn_stride(n) for n in (2, 128, 256, 257, 512)] == [1, 64, 128, 256, 256]
    made = make_plan(protocols=["last256", "yarn_sliding"])
    assert "last 4 positions, half of the context" in note(made, "last256", TRAIN)
    assert "unweighted" in note(made, "yarn_sliding", TRAIN)
    assert "half of the window instead of 256" in note(made, "yarn_sliding", TRAIN)
    long = layout(Protocol.last256, made.places, 512)
    assert long.note == ""


def note(made: Plan, protocol: str, length: int) -> str:
    return made.layouts[Protocol(protocol), length].note


# ---------------------------------------------------------------- every protocol


@pytest.mark.parametrize("protocol", MEANS)
@pytest.mark.parametrize("length", LENGTHS)
def test_targets_contexts_and_windows_are_as_defined(protocol: str, length: int) -> None:
    made = make_plan(protocols=[protocol]).layouts[Protocol(protocol), length]
    windows = expected_windows(SPLIT, protocol, length, 4 * TRAIN, TRAIN // 2, 3)
    wanted = Counter((target, seen) for window in windows for target, seen, _ in window)
    found = Counter(zip(made.targets().tolist(), made.visible().tolist(), strict=True))
    assert found == wanted
    assert set(found.values()) == {1}
    assert len(set(made.targets().tolist())) == len(made.targets())  # each target once
    assert len(made.weights()) == len(made.targets())


@pytest.mark.parametrize("protocol", MEANS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("most", [40, 300])
def test_no_window_leaves_its_document_and_targets_are_capped(
    protocol: str, length: int, most: int
) -> None:
    made = make_plan(protocols=[protocol], max_targets=most, span_tokens=None)
    found = made.layouts[Protocol(protocol), length]
    for windows in found.windows:
        read = windows.starts[:, None] + np.arange(windows.length + 1)
        owners = documents_of(SPLIT, read)
        assert (owners == owners[:, :1]).all()
        assert windows.length <= length
    # One place is read whatever it holds; `position` and `tail` read all spans of the anchors.
    if protocol not in ("position", "tail"):
        assert len(found.targets()) <= max(most, max(SPLIT.lengths))


@pytest.mark.parametrize("remainder", [0, 1, 2])
@pytest.mark.parametrize("protocol", ["nonoverlap", "sliding", "alibi_paper", "lm_eval_rolling"])
def test_no_target_is_dropped_at_the_end(protocol: str, remainder: int) -> None:
    """Texts of k L + r targets, r among 0, 1 and S - 1."""
    size = 5 * TRAIN + remainder
    split = make_split([size + 1])
    for length in LENGTHS[:-1]:
        places = replace(
            make_plan(split).places, cut_spans=[Text(0, size)], stretches=[Text(0, size)]
        )
        found = layout(Protocol(protocol), places, length).targets()
        assert sorted(found.tolist()) == list(range(1, size + 1))


def test_protocols_have_a_card_each() -> None:
    assert [card.id for card in PROTOCOL_CARDS] == [each.value for each in Protocol]
    kinds = {card.id: card.kind for card in PROTOCOL_CARDS}
    assert [name for name in kinds if kinds[name] == "own"] == list(OWN)
    assert [name for name in kinds if kinds[name] == "preset"] == list(PRESETS)
    assert [each.value for each in BY_WINDOWS] == list(MEANS)
    assert all(card.scores.endswith(".") for card in PROTOCOL_CARDS)
    assert all(card.differs.endswith((".", ".)")) for card in PROTOCOL_CARDS)


def test_a_chunk_without_a_second_half_scores_nothing() -> None:
    made = make_plan(protocols=["llama_cpp"], ratios=[0.25, 1.0], anchor_targets=1, stride=1)
    assert made.layouts[Protocol.llama_cpp, 2] == Layout(())
    assert made.layouts[Protocol.llama_cpp, TRAIN].windows
