"""The protocol in the words of a report: only what was used, and what holds for all of it."""

from __future__ import annotations

from posbench.catalog import PROTOCOL_CARDS
from posbench.results import Evaluation

GENERAL = (
    "Text: documents, split into train, validation and test by a hash of their names; those of the "
    "test split, unless the top of this page says otherwise. Windows lie inside one document; "
    "nothing is packed or padded, and no special token is added. Only documents that hold the "
    "longest length are used, so every length scores the same text.",
    "Targets are chosen by a hash of document and place, not by seed, encoding or batch size. "
    "Equal SHA-256 of targets means equal tokens.",
    "Perplexity is exp(sum of losses / number of targets), with float32 logits, sums in float64 "
    "and the model in evaluation mode. A loss that is not finite is counted, never dropped.",
    "An interval is the 2.5th to 97.5th percentile over resamples of whole documents with a fixed "
    "generator; fewer than ten documents give none.",
)


def protocol_points(evaluation: Evaluation) -> list[str]:
    """One point for each protocol that was used, and what holds for all that score text."""
    used = dict.fromkeys(row.protocol for row in evaluation.rows)
    cards = {card.id: card for card in PROTOCOL_CARDS}
    own = [
        f"{card.id} ({card.source}). {card.scores} {card.differs}"
        for name in used
        if (card := cards.get(name))
    ]
    of_text = any(row.metric == "ppl" for row in evaluation.rows)
    return [*own, *(GENERAL if of_text else ())]
