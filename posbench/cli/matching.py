"""The nearest match for a typing error."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

_NEAR = 0.55  # share of letters in common below which a suggestion would only puzzle


def nearest(typed: str, known: Iterable[str]) -> str | None:
    """The known word closest to what was typed, or None if none is close."""
    best = max(known, key=lambda word: _likeness(typed, word), default=None)
    return best if best is not None and _likeness(typed, best) >= _NEAR else None


def _likeness(typed: str, word: str) -> float:
    """1 for equal words; the last part alone counts too, so that `lr` finds `train.lr`."""
    whole = SequenceMatcher(None, typed, word).ratio()
    ends = SequenceMatcher(None, _end(typed), _end(word)).ratio()
    return max(whole, 0.98 * ends)


def _end(word: str) -> str:
    return word.rsplit(".", 1)[-1]


def did_you_mean(typed: str, known: Iterable[str], form: str = "{}") -> str:
    """` Did you mean X?`, or nothing when no known word is near."""
    match = nearest(typed, known)
    return f" Did you mean {form.format(match)}?" if match else ""
