"""Which tokens are scored: inside one document, once each, and the same for everyone."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest
from oracles import ALL, DOCUMENTS, TRAIN, all_ends, make_config, make_split

from posbench.data import Split
from posbench.errors import UserError
from posbench.evaluation import MAX_TARGETS, Plan, plan
from posbench.targets import PROTOCOL, Targets, anchors, prefixes, spans

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
    assert anchors(SPLIT, LONGEST, SIZE, ALL).ends.tolist() == all_ends(SPLIT, LONGEST, SIZE)
    assert spans(SPLIT, LONGEST, ALL).ends.tolist() == all_ends(SPLIT, LONGEST, LONGEST)


@pytest.mark.parametrize(("length", "fits"), [(LONGEST, 0), (LONGEST + 1, 1)])
def test_a_document_needs_one_token_more_than_the_longest_window(length: int, fits: int) -> None:
    split = make_split([length])
    assert len(anchors(split, LONGEST, SIZE, ALL)) == fits
    assert len(spans(split, LONGEST, ALL)) == fits


@pytest.mark.parametrize("most", [1, 7, 40, ALL])
@pytest.mark.parametrize("kind", ["anchors", "spans"])
def test_windows_lie_inside_the_document_they_name(kind: str, most: int) -> None:
    chosen = choose(kind, most)
    assert len(chosen)
    first, end = SPLIT.offsets[chosen.documents], SPLIT.offsets[chosen.documents + 1]
    assert (chosen.ends - LONGEST >= first).all()
    assert (chosen.ends < end).all()


@pytest.mark.parametrize("most", [1, 7, 40, ALL])
@pytest.mark.parametrize("kind", ["anchors", "spans"])
def test_no_target_is_shared_and_no_more_are_chosen_than_asked_for(kind: str, most: int) -> None:
    chosen = choose(kind, most)
    targets = chosen.indices().ravel()
    assert len(set(targets.tolist())) == targets.size == len(chosen) * chosen.size
    assert targets.size <= max(most, chosen.size)  # one place at least
    assert (np.diff(chosen.ends) >= chosen.size).all()


def choose(kind: str, most: int) -> Targets:
    return anchors(SPLIT, LONGEST, SIZE, most) if kind == "anchors" else spans(SPLIT, LONGEST, most)


def test_indices_are_the_targets_up_to_and_with_each_end() -> None:
    places = Targets(np.array([9, 20]), np.array([0, 1]), 3, "")
    assert places.indices().tolist() == [[7, 8, 9], [18, 19, 20]]


def test_prefixes_are_the_first_targets_of_each_place() -> None:
    whole = spans(SPLIT, LONGEST, ALL)
    first = prefixes(SPLIT, whole, TRAIN)
    np.testing.assert_array_equal(first.indices(), whole.indices()[:, :TRAIN])
    assert first.sha256 != whole.sha256
    assert prefixes(SPLIT, whole, LONGEST).sha256 == whole.sha256


# ---------------------------------------------------------------- how they are chosen


def test_choice_is_by_hash_of_protocol_document_and_place() -> None:
    """Re-derived here: who changes this changes the protocol, and must call it v2."""
    ranked = []
    for index, length in enumerate(DOCUMENTS):
        for end in range(LONGEST, length, SIZE):
            rank = hashlib.sha256(f"{PROTOCOL}/anchor/{index}.txt/{end}".encode()).digest()
            ranked.append((rank, int(SPLIT.offsets[index]) + end))
    wanted = sorted(end for _, end in sorted(ranked)[:5])
    assert anchors(SPLIT, LONGEST, SIZE, 5 * SIZE).ends.tolist() == wanted


def test_a_larger_choice_contains_the_smaller() -> None:
    smaller = set(anchors(SPLIT, LONGEST, SIZE, 20).ends.tolist())
    larger = set(anchors(SPLIT, LONGEST, SIZE, 60).ends.tolist())
    assert smaller < larger


def test_choice_is_spread_over_the_documents() -> None:
    split = make_split([LONGEST + 4 * SIZE] * 60)
    chosen = anchors(split, LONGEST, SIZE, 60 * SIZE)
    # Of 240 places in 60 documents, 60 drawn evenly meet 41 documents on average.
    assert len(set(chosen.documents.tolist())) > 30
    assert chosen.documents.max() > 50


def test_neither_other_documents_nor_their_order_move_the_choice() -> None:
    """A name and a place decide, so documents too short to be scored can come and go."""
    full = anchors(SPLIT, LONGEST, SIZE, 40)
    kept = [index for index, length in enumerate(DOCUMENTS) if length > LONGEST]
    offsets = np.cumsum([0, *(DOCUMENTS[index] for index in kept)])
    tokens = np.concatenate([SPLIT.document(index) for index in kept])
    split = Split(tokens, offsets, [SPLIT.names[index] for index in kept], "toy")
    alone = anchors(split, LONGEST, SIZE, 40)
    np.testing.assert_array_equal(split.tokens[alone.ends], SPLIT.tokens[full.ends])
    assert alone.sha256 == full.sha256


@pytest.mark.parametrize("ratios", [[1.0], [4.0], [2.0, 1.0], [0.5, 1.0, 3.0]])
def test_the_lengths_asked_for_do_not_move_targets_up_to_four_times(ratios: list[float]) -> None:
    usual, asked = make_plan(max_targets=40), make_plan(max_targets=40, ratios=ratios)
    assert asked.anchors.sha256 == usual.anchors.sha256
    assert asked.spans.sha256 == usual.spans.sha256
    np.testing.assert_array_equal(asked.anchors.ends, usual.anchors.ends)


def test_a_longer_length_moves_them() -> None:
    longer = make_plan(ratios=[1.0, 8.0])
    assert longer.longest == 8 * TRAIN
    assert longer.anchors.sha256 != make_plan().anchors.sha256


def test_digest_changes_with_a_target_a_name_and_the_size() -> None:
    chosen = anchors(SPLIT, LONGEST, SIZE, 40)
    for place in (chosen.ends[0], chosen.ends[-1] - SIZE + 1):
        assert anchors(changed(SPLIT, place), LONGEST, SIZE, 40).sha256 != chosen.sha256
    names = [f"other/{name}" for name in SPLIT.names]
    renamed = anchors(dataclasses.replace(SPLIT, names=names), LONGEST, SIZE, ALL)
    assert renamed.sha256 != anchors(SPLIT, LONGEST, SIZE, ALL).sha256
    assert anchors(SPLIT, LONGEST, 2, 40).sha256 != chosen.sha256


def test_digest_does_not_depend_on_how_tokens_are_stored() -> None:
    wide = dataclasses.replace(SPLIT, tokens=SPLIT.tokens.astype(np.uint32))
    assert anchors(wide, LONGEST, SIZE, 40).sha256 == anchors(SPLIT, LONGEST, SIZE, 40).sha256


# ---------------------------------------------------------------- the plan


def test_plan_at_its_defaults() -> None:
    split = make_split([5000] * 60)
    for device, most in MAX_TARGETS.items():
        made = plan(split, 128, make_config(max_targets=None, span_tokens=None), device)
        assert made.lengths == {1.0: 128, 2.0: 256, 4.0: 512}
        assert (made.longest, made.anchors.size, made.spans.size) == (512, 64, 512)
        found = len(all_ends(split, 512, 64)) * 64
        assert len(made.anchors) * 64 == min(most, found)
        assert made.shortage == ""
    assert plan(split, 1024, make_config(), "cpu").anchors.size == 256


def test_targets_longer_than_the_shortest_window_are_refused() -> None:
    with pytest.raises(UserError, match=r"windows of 2 tokens.*4 targets.*eval\.anchor_targets=2"):
        make_plan(ratios=[0.25, 1.0])
    with pytest.raises(UserError, match=r"windows of 8 tokens.*9 targets.*eval\.anchor_targets=8"):
        make_plan(anchor_targets=9)
    assert make_plan(anchor_targets=8).anchors.size == 8
    assert make_plan(ratios=[0.25], anchor_targets=2).lengths == {0.25: 2}
    with pytest.raises(UserError, match=r"two of them round to one length"):
        make_plan(ratios=[1.0, 1.001])


def test_a_window_of_one_token_is_refused() -> None:
    with pytest.raises(UserError, match=r"eval\.ratios holds 0\.125: 1 tokens"):
        make_plan(ratios=[0.125, 1.0], anchor_targets=1)


@pytest.mark.parametrize("lengths", [[5, LONGEST, 20], []])
def test_too_short_documents_are_counted_out_loud(lengths: list[int]) -> None:
    made = make_plan(make_split(lengths))
    assert len(made.anchors) == len(made.spans) == 0
    longest = max(lengths, default=0)
    assert f"data=toy has {LONGEST + 1} tokens" in made.shortage
    assert f"the longest has {longest}" in made.shortage
