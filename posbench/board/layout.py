"""The Custom Scalars tab: which curves share a chart, and which tags are the edges of a band."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from posbench.board.events import EventFile

BAND = ("mean", "least", "greatest")  # over seeds


@dataclass(frozen=True)
class Chart:
    """A chart of every run that has its tags; with three of them, (value, lower, upper): a band."""

    title: str
    tags: tuple[str, ...]

    @property
    def is_band(self) -> bool:
        return len(self.tags) == 3


Layout = dict[str, list[Chart]]  # category -> its charts


def over_seeds(group: str, quantity: str) -> tuple[str, ...]:
    """The tags of the mean over seeds, the least and the greatest of them."""
    return tuple(f"{group}_over_seeds/{quantity}_{part}" for part in BAND)


_INTERVAL = "each model, with the 95 % interval over documents"
_SEEDS = "mean over seeds, least to greatest"

EVALUATION: Layout = {
    "Perplexity by length (step = tokens)": [
        Chart(_INTERVAL, ("by_length/ppl_controlled", "by_length/ci_lo", "by_length/ci_hi")),
        Chart(_SEEDS, over_seeds("by_length", "ppl_controlled")),
    ],
    "Loss by length, nats (step = tokens)": [
        Chart("each model", ("by_length/nll_controlled",)),
        Chart(_SEEDS, over_seeds("by_length", "nll_controlled")),
    ],
    "Gain over 1x, nats; above zero, longer context helped (step = tokens)": [
        Chart(
            _INTERVAL, ("by_length/gain_nats", "by_length/gain_ci_lo", "by_length/gain_ci_hi")
        ),
        Chart(_SEEDS, over_seeds("by_length", "gain_nats")),
    ],
    "Exact match by length (step = length)": [
        Chart(
            "each model, with the 95 % interval over examples",
            (
                "by_length/exact_match",
                "by_length/exact_match_ci_lo",
                "by_length/exact_match_ci_hi",
            ),
        ),
        Chart(_SEEDS, over_seeds("by_length", "exact_match")),
    ],
    "Loss by position, nats (step = position)": [
        Chart("each model", ("by_position/nll",)),
        Chart(_SEEDS, over_seeds("by_position", "nll")),
    ],
}  # fmt: skip

TRAINING: Layout = {
    "Training (step = optimizer step)": [
        Chart("loss", ("train/loss",)),
        Chart("validation loss by ratio", ("val_by_ratio/nll_.*",)),
    ]
}


def drawn(layout: Layout, tags: Iterable[str]) -> Layout:
    """The charts for which there is a curve, and the categories that have one."""
    there = set(tags)
    kept = {
        title: [chart for chart in charts if there.issuperset(chart.tags)]
        for title, charts in layout.items()
    }
    return {title: charts for title, charts in kept.items() if charts}


def write_layout(events: EventFile, layout: Layout, at: float | None = None) -> None:
    """Write the layout; TensorBoard merges those of all runs it shows, and drops equal charts."""
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata

    categories = [
        layout_pb2.Category(title=title, chart=[_chart(chart) for chart in charts])
        for title, charts in layout.items()
    ]
    content = layout_pb2.Layout(category=categories).SerializeToString()
    events.content(metadata.CONFIG_SUMMARY_TAG, metadata.create_summary_metadata(), content, at)


def _chart(chart: Chart) -> object:
    from tensorboard.plugins.custom_scalar import layout_pb2

    if chart.is_band:
        value, lower, upper = chart.tags
        series = layout_pb2.MarginChartContent.Series(value=value, lower=lower, upper=upper)
        margin = layout_pb2.MarginChartContent(series=[series])
        return layout_pb2.Chart(title=chart.title, margin=margin)
    # The tag of a line is a pattern.
    multiline = layout_pb2.MultilineChartContent(tag=[f"^{tag}$" for tag in chart.tags])
    return layout_pb2.Chart(title=chart.title, multiline=multiline)
