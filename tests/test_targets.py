"""Which tokens are scored: inside one document, once each, and the same for everyone."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest
from oracles import ALL, DOCUMENTS, TRAIN, all_ends, disjoint_ends, make_config, make_split

from posbench.data import Split
from posbench.errors import UserError
from posbench.plan import MAX_TARGETS, Plan, ShortageError, plan
from posbench.targets import PROTOCOL, anchors, beginnings, digest, documents_of, spans, stretches

SPLIT = make_split()
LONGEST, SIZE = 4 * TRAIN, TRAIN // 2


def make_plan(split: Split = SPLIT, train_length: int = TRAIN, **settings: object) -> Plan:
    return plan(split, train_length, make_config(**settings), "cpu")


def changed(split: Split, place: int) -> Split:
    """The same split with another token at one place."""
    tokens = split.tokens.copy()
    tokens[place] += 1
    return dataclasses.replace(split, tokens=tokens)


# ---------------------------------------------------------------- where targets lie


def test_every_place_that_fits_is_found_when_all_are_wanted() -> None:
    assert anchors(SPLIT, LONGEST, SIZE, ALL).tolist() == all_ends(SPLIT, LONGEST, SIZE)
    found = [text.start + text.size for text in spans(SPLIT, LONGEST, SIZE, ALL)]
    assert found == disjoint_ends(SPLIT, LONGEST, SIZE)


@pytest.mark.parametrize(("length", "fits"), [(LONGEST, 0), (LONGEST + 1, 1)])
def test_a_document_needs_one_token_more_than_the_longest_window(length: int, fits: int) -> None:
    split = make_split([length])
    assert len(anchors(split, LONGEST, SIZE, ALL)) == fits
    assert len(spans(split, LONGEST, SIZE, ALL)) == fits
    assert len(stretches(split, LONGEST, SIZE, ALL)) == fits


MOST = [1, 7, 40, ALL]


@pytest.mark.parametrize("most", MOST)
def test_windows_of_anchors_lie_inside_one_document(most: int) -> None:
    ends = anchors(SPLIT, LONGEST, SIZE, most)
    owners = documents_of(SPLIT, ends)
    assert len(ends)
    assert (ends - LONGEST >= SPLIT.offsets[owners]).all()
    assert (ends < SPLIT.offsets[owners + 1]).all()
    assert (np.diff(ends) >= SIZE).all()  # no target is shared
    assert len(ends) * SIZE <= max(most, SIZE)  # one place at least


@pytest.mark.parametrize("most", MOST)
@pytest.mark.parametrize("kind", ["spans", "stretches"])
def test_texts_lie_inside_one_document_and_share_no_target(kind: str, most: int) -> None:
    if kind == "spans":
        texts = spans(SPLIT, LONGEST, SIZE, most)
    else:
        texts = stretches(SPLIT, LONGEST, SIZE, most)
    assert texts
    targets: list[int] = []
    for text in texts:
        read = np.arange(text.start, text.start + text.size + 1)
        assert len({*documents_of(SPLIT, read).tolist()}) == 1
        targets += read[1:].tolist()
    assert len(set(targets)) == len(targets)
    assert all(text.size >= LONGEST for text in texts)


@pytest.mark.parametrize("most", [40, 100])
def test_spans_are_windows_of_anchors(most: int) -> None:
    """So that one pass at the longest length reads them all."""
    ends = {text.start + LONGEST for text in spans(SPLIT, LONGEST, SIZE, most)}
    assert ends <= set(anchors(SPLIT, LONGEST, SIZE, most))


def test_stretches_share_the_targets_among_many_places() -> None:
    split = make_split([1000] * 60)
    texts = stretches(split, LONGEST, SIZE, 16 * 100)
    assert [text.size for text in texts] == [100 + 8] * 14  # a sixteenth each and a remainder
    assert [text.size for text in stretches(split, LONGEST, SIZE, 200)] == [2 * LONGEST + 8] * 2
    places = {text.start % 1000 for text in texts}
    assert len(places) > 8  # not the beginnings alone, which read unlike the rest
    assert texts[0].start + 108 in anchors(split, LONGEST, SIZE, SIZE)  # as `controlled` chooses
    (whole,) = stretches(make_split([50]), LONGEST, SIZE, ALL)  # a document that is shorter
    assert whole == (0, 49)


def test_beginnings_are_those_of_documents() -> None:
    split = make_split([100, 20, 33, 40])
    assert sorted(beginnings(split, LONGEST, ALL)) == [(0, 32), (120, 32), (153, 32)]
    assert len(beginnings(split, LONGEST, 70)) == 2


# ---------------------------------------------------------------- how they are chosen


def test_choice_is_by_hash_of_protocol_document_and_place() -> None:
    """Re-derived here: who changes this changes the protocol, and must call it v2."""
    ranked = []
    for index, length in enumerate(DOCUMENTS):
        for end in range(LONGEST, length, SIZE):
            rank = hashlib.sha256(f"{PROTOCOL}/anchor/{index}.txt/{end}".encode()).digest()
            ranked.append((rank, int(SPLIT.offsets[index]) + end))
    wanted = sorted(end for _, end in sorted(ranked)[:5])
    assert anchors(SPLIT, LONGEST, SIZE, 5 * SIZE).tolist() == wanted


def test_a_larger_choice_contains_the_smaller() -> None:
    smaller = set(anchors(SPLIT, LONGEST, SIZE, 20))
    larger = set(anchors(SPLIT, LONGEST, SIZE, 60))
    assert smaller < larger


def test_choice_is_spread_over_the_documents() -> None:
    split = make_split([LONGEST + 4 * SIZE] * 60)
    chosen = documents_of(split, anchors(split, LONGEST, SIZE, 60 * SIZE))
    # Of 240 places in 60 documents, 60 drawn evenly meet 41 documents on average.
    assert len(set(chosen.tolist())) > 30
    assert chosen.max() > 50


def without_short_documents() -> Split:
    kept = [index for index, length in enumerate(DOCUMENTS) if length > LONGEST]
    offsets = np.cumsum([0, *(DOCUMENTS[index] for index in kept)])
    tokens = np.concatenate([SPLIT.document(index) for index in kept])
    return Split(tokens, offsets, [SPLIT.names[index] for index in kept], "toy")


def test_neither_other_documents_nor_their_order_move_the_choice() -> None:
    """A name and a place decide, so documents too short to be scored can come and go."""
    split = without_short_documents()
    full, alone = anchors(SPLIT, LONGEST, SIZE, 40), anchors(split, LONGEST, SIZE, 40)
    np.testing.assert_array_equal(split.tokens[alone], SPLIT.tokens[full])
    assert digest(split, alone) == digest(SPLIT, full)
    every, kept = make_plan(max_targets=40), make_plan(split, max_targets=40)
    assert kept.digests == every.digests


@pytest.mark.parametrize("ratios", [[1.0], [4.0], [2.0, 1.0], [0.5, 1.0, 3.0]])
def test_the_lengths_asked_for_do_not_move_targets_up_to_four_times(ratios: list[float]) -> None:
    usual, asked = make_plan(max_targets=40), make_plan(max_targets=40, ratios=ratios)
    assert asked.places == usual.places


def test_a_longer_length_moves_them() -> None:
    longer = make_plan(ratios=[1.0, 8.0])
    assert longer.longest == 8 * TRAIN
    assert longer.places.anchors != make_plan().places.anchors


def test_a_length_that_no_document_has_leaves_the_others_alone() -> None:
    far = make_plan(ratios=[1.0, 2.0, 4.0, 64.0], max_targets=40)
    usual = make_plan(max_targets=40)
    assert far.places == usual.places
    assert far.reach == max(DOCUMENTS) - 1
    far.check_length(far.reach)
    with pytest.raises(ShortageError, match=r"data=toy has 513 tokens; the longest has 131"):
        far.check_length(64 * TRAIN)


# ---------------------------------------------------------------- digests

TARGETS = np.array([3, 4, 5, 25, 26, 60, 61])  # in the documents 0, 1 and 2


def test_digest_changes_with_a_target_its_token_and_its_document() -> None:
    known = digest(SPLIT, TARGETS)
    for other in (TARGETS[1:], TARGETS[:-1], TARGETS + 1, np.append(TARGETS, 62)):
        assert digest(SPLIT, other) != known
    for place in TARGETS:
        assert digest(changed(SPLIT, place), TARGETS) != known
    assert digest(changed(SPLIT, 30), TARGETS) == known  # not a target
    names = [f"other/{name}" for name in SPLIT.names]
    assert digest(dataclasses.replace(SPLIT, names=names), TARGETS) != known


def test_digest_does_not_depend_on_how_windows_cut_the_targets() -> None:
    assert digest(SPLIT, TARGETS[::-1]) == digest(SPLIT, TARGETS)
    made = make_plan(ratios=[0.75, 1.0, 2.0, 4.0], protocols=["nonoverlap", "sliding"])
    assert len(set(made.digests.values())) == 1
    assert len(made.digests) == 8


def test_digest_does_not_depend_on_how_tokens_are_stored() -> None:
    wide = dataclasses.replace(SPLIT, tokens=SPLIT.tokens.astype(np.uint32))
    assert digest(wide, TARGETS) == digest(SPLIT, TARGETS)


def test_digest_tells_a_run_from_one_that_a_document_ends() -> None:
    """Tokens side by side in two documents are not the same as side by side in one."""
    one, two = make_split([10]), make_split([5, 5])
    targets = np.array([3, 4, 5, 6])
    names = dataclasses.replace(two, names=[one.names[0]] * 2)
    assert digest(names, targets) != digest(one, targets)


# ---------------------------------------------------------------- the plan


def test_plan_at_its_defaults() -> None:
    split = make_split([5000] * 60)
    for device, most in MAX_TARGETS.items():
        made = plan(split, 128, make_config(max_targets=None, span_tokens=None), device)
        assert made.lengths == {1.0: 128, 2.0: 256, 4.0: 512}
        assert (made.longest, made.places.size, made.places.stride) == (512, 64, 32)
        found = len(all_ends(split, 512, 64)) * 64
        assert len(made.places.anchors) * 64 == min(most, found)
        assert sum(text.size for text in made.places.cut_spans) == min(
            most, 512 * len(made.places.spans)
        )
        assert sum(text.size for text in made.places.stretches) <= most
    assert plan(split, 1024, make_config(), "cpu").places.size == 256


def test_a_stride_beyond_the_shortest_window_is_refused() -> None:
    assert make_plan(stride=TRAIN).places.stride == TRAIN
    with pytest.raises(UserError, match=r"eval\.stride=9 .* 8 tokens.*The most is 8"):
        make_plan(stride=TRAIN + 1)


def test_targets_longer_than_the_shortest_window_are_refused() -> None:
    with pytest.raises(UserError, match=r"windows of 2 tokens.*4 targets.*eval\.anchor_targets=2"):
        make_plan(ratios=[0.25, 1.0])
    with pytest.raises(UserError, match=r"windows of 8 tokens.*9 targets.*eval\.anchor_targets=8"):
        make_plan(anchor_targets=9)
    assert make_plan(anchor_targets=8).places.size == 8
    assert make_plan(ratios=[0.25], anchor_targets=2).lengths == {0.25: 2}
    with pytest.raises(UserError, match=r"two of them round to one length"):
        make_plan(ratios=[1.0, 1.001])


def test_a_window_of_one_token_is_refused() -> None:
    with pytest.raises(UserError, match=r"eval\.ratios holds 0\.125: 1 tokens"):
        make_plan(ratios=[0.125, 1.0], anchor_targets=1)


@pytest.mark.parametrize("lengths", [[5, TRAIN, 4], []])
def test_too_short_documents_are_counted_out_loud(lengths: list[int]) -> None:
    made = make_plan(make_split(lengths))
    assert made.places.anchors == made.places.spans == made.places.stretches == []
    longest = max(lengths, default=0)
    with pytest.raises(ShortageError, match=rf"has {TRAIN + 1} tokens; the longest has {longest}"):
        made.check_length(TRAIN)
