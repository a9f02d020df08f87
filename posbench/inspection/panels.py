"""The panels of an inspection figure: each draws one thing about an encoding on given axes.

Colours are Okabe and Ito's, or maps that read without colour vision; the training length is
marked 1x in every panel with a length in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.ticker import MaxNLocator, ScalarFormatter
from torch import Tensor

from posbench.inspection.checks import difference

Drawer = Callable[[Axes], None]

BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#666666"
SEQUENCE = (BLUE, ORANGE, GREEN, RED, "#CC79A7", "#56B4E9", "#000000", "#B8A800")
DEEPEST = 12.0  # biases further below the highest are cut off: a weight under e^-12
MOST_DISTANCES = 512  # in panels that compare curves of scores
MOST_CELLS = 512  # rows or columns of a heat map of positions by positions


class View(NamedTuple):
    """What every panel needs to know."""

    title: str
    train_length: int
    positions: int
    has_parameters: bool


def mark_lengths(axes: Axes, view: View, horizontal: bool = False) -> None:
    """Mark the training length, if it lies within the positions shown."""
    if view.positions < view.train_length and not horizontal:
        return
    line, along = (axes.axhline, "y") if horizontal else (axes.axvline, "x")
    line(view.train_length, color="black", linestyle="--", linewidth=1)
    place = {"xy": (0.99, view.train_length) if along == "y" else (view.train_length, 0.99)}
    transform = axes.get_yaxis_transform() if along == "y" else axes.get_xaxis_transform()
    axes.annotate(
        "1x",
        place["xy"],
        xycoords=transform,
        textcoords="offset points",
        xytext=(0, 2) if along == "y" else (-3, 0),
        ha="right",
        va="bottom" if along == "y" else "top",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        fontsize=9,
    )


def distance_axis(axes: Axes, view: View) -> None:
    """A distance axis that is linear up to 1 and logarithmic beyond."""
    axes.set_xscale("symlog", linthresh=1)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlim(0, max(1, view.positions))
    axes.set_xlabel("distance i - j (tokens)")
    mark_lengths(axes, view)


def heat_map(
    axes: Axes, values: Tensor, limit: float, extent: tuple[float, float, float, float], label: str
) -> None:
    """Values [rows, columns] from -limit to limit as colours, rows downwards."""
    image = axes.imshow(
        values.numpy(), aspect="auto", cmap="PuOr", vmin=-limit, vmax=limit, extent=extent
    )
    color_bar(axes, image, label)


def color_bar(axes: Axes, image: ScalarMappable, label: str) -> None:
    assert axes.figure is not None
    axes.figure.colorbar(image, ax=axes, label=label)


# ---------------------------------------------------------------- bias by distance


def biased(
    view: View, bias: Tensor, last: Tensor, title: str = "Bias of each head by distance"
) -> list[Drawer]:
    """A bias [H, T] by distance, the attention it gives, and how far each head looks.

    `last` [H, T] are the scores of the last token by distance if every q.k is 0.
    """

    def by_distance(axes: Axes) -> None:
        _heads(axes, bias, "best")
        lowest, highest = float(bias.min()), float(bias.max())
        axes.set_ylim(max(lowest, highest - DEEPEST) - 0.3, highest + 0.5)
        mark_lengths(axes, view)
        axes.set(xlabel="distance i - j (tokens)", ylabel="bias added to the score")
        cut = f" (down to {highest - DEEPEST:g})" if lowest < highest - DEEPEST else ""
        axes.set_title(f"{title}{cut}")

    def share(axes: Axes) -> None:
        _heads(axes, last.softmax(dim=-1), "lower left")
        uniform = 1 / view.positions
        axes.axhline(uniform, color=GREY, linestyle=":", label="no bias: equal shares")
        axes.set_yscale("log")
        axes.set_ylim(bottom=uniform * 1e-4, top=2)
        distance_axis(axes, view)
        axes.set_ylabel("share of the attention")
        axes.set_title(f"Attention of token {view.positions} if every q.k is 0")
        axes.legend(loc="lower left", fontsize=8)

    def reach(axes: Axes) -> None:
        cumulative = last.softmax(dim=-1).cumsum(dim=-1)
        tokens = (cumulative < 0.9).sum(dim=-1) + 1
        axes.bar(range(len(tokens)), tokens.tolist(), color=BLUE)
        axes.set_yscale("log")
        axes.set_ylim(0.9, 1.5 * max(view.train_length, int(tokens.max())))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        mark_lengths(axes, view, horizontal=True)
        axes.set(xlabel="head", ylabel="nearest tokens that hold 90 %")
        axes.set_title("How far each head looks if every q.k is 0")

    return [by_distance, share, reach]


def _heads(axes: Axes, values: Tensor, place: Literal["best", "lower left"]) -> None:
    """One line per head; a legend for a few heads, a colour bar for many."""
    heads = len(values)
    if heads <= len(SEQUENCE):
        for head, line in enumerate(values):
            axes.plot(line, color=SEQUENCE[head], label=f"head {head}")
        axes.legend(loc=place, fontsize=8)
        return
    colors = colormaps["viridis"]
    for head, line in enumerate(values):
        axes.plot(line, color=colors(head / (heads - 1)))
    color_bar(axes, ScalarMappable(Normalize(0, heads - 1), colors), "head")


# ---------------------------------------------------------------- added to the embedding


def embedded(view: View, vectors: Tensor) -> list[Drawer]:
    """Position vectors [T, C]: themselves, their likeness, and it against distance."""
    before = " before training" if view.has_parameters else ""
    step = max(1, -(-view.positions // MOST_CELLS))
    sampled = vectors[::step]
    extent = (0, view.positions, view.positions, 0)

    def table(axes: Axes) -> None:
        most = float(vectors.abs().max())
        across = (0, view.positions, vectors.shape[1], 0)
        heat_map(axes, vectors.T, most, across, "value added to the embedding")
        mark_lengths(axes, view)
        axes.set(xlabel="position (tokens)", ylabel="channel")
        noise = ": random numbers" if view.has_parameters else ""
        axes.set_title(f"Position vectors{before}{noise}")

    def likeness(axes: Axes) -> None:
        unit = torch.nn.functional.normalize(sampled, dim=-1)
        heat_map(axes, unit @ unit.T, 1, extent, "cosine of the two vectors")
        mark_lengths(axes, view, horizontal=True)
        mark_lengths(axes, view)
        axes.set(xlabel="position j (tokens)", ylabel="position i (tokens)")
        axes.set_title(f"How alike two positions are{before}")

    def products(axes: Axes) -> None:
        rows = sorted({max(1, view.positions * part // 4) - 1 for part in (1, 2, 3, 4)})
        lines = [(vectors[i] @ vectors[: i + 1].T).flip(0) for i in rows]
        same = _rows(axes, view, lines)
        axes.set_ylabel("dot product of the two vectors")
        verdict = "depends on distance alone" if same else "depends on both positions"
        axes.set_title(f"Their dot product{before} {verdict}")

    return [table, likeness, products]


def _rows(axes: Axes, view: View, lines: list[Tensor]) -> bool:
    """One curve per query position, by distance [i + 1]; returns whether they are one curve.

    Curves that coincide are drawn wider the longer they are, so that none hides another.
    """
    longest = lines[-1]
    room = 1e-9 * float(longest[longest.isfinite()].abs().max())
    same = all(bool((difference(line, longest[: len(line)]) <= room).all()) for line in lines)
    widths = (5.5, 3.8, 2.2, 1.0) if same else (1.0,) * 4
    styles = zip(widths, ("#56B4E9", ORANGE, GREEN, "#000000"), strict=True)
    for line, (width, color) in zip(reversed(lines), styles, strict=False):
        label = f"query at {len(line) - 1}"
        axes.plot(line[:MOST_DISTANCES], color=color, linewidth=width, label=label)
    axes.legend(loc="best", fontsize=8)
    axes.set_xlabel("distance i - j (tokens)")
    mark_lengths(axes, view._replace(positions=min(view.positions, MOST_DISTANCES)))
    return same


# ---------------------------------------------------------------- no position at all, and any


def unordered(view: View) -> list[Drawer]:
    """What the causal mask alone gives: every visible token the same share."""

    def share(axes: Axes) -> None:
        visible = torch.arange(1, view.positions + 1, dtype=torch.float64)
        axes.plot(visible - 1, 1 / visible, color=BLUE)
        axes.set_yscale("log")
        mark_lengths(axes, view)
        axes.set(xlabel="position i of the query", ylabel="share of each visible token, 1/(i + 1)")
        axes.set_title("Only the number of visible tokens tells where a query stands")

    def mask(axes: Axes) -> None:
        size = min(view.positions, 24)
        shares = torch.ones(size, size).tril() / torch.arange(1, size + 1)[:, None]
        shown = shares.masked_fill(shares == 0, float("nan"))
        image = axes.imshow(shown.numpy(), cmap="cividis", norm="log")
        color_bar(axes, image, "share of the attention")
        axes.set(xlabel="position j of the key", ylabel="position i of the query")
        axes.set_title("Attention under the causal mask if every q.k is 0")

    return [share, mask]


def probed(view: View, scores: list[Tensor]) -> list[Drawer]:
    """Scores of one query and one key, repeated at every position, against their distance."""

    def curves(axes: Axes) -> None:
        lines = [score.flip(0) for score in scores]
        same = _rows(axes, view, lines)
        axes.set_ylabel("score of head 0")
        verdict = "depends on distance alone" if same else "depends on both positions"
        middle = float(lines[-1].mean())
        if same and torch.allclose(lines[-1], torch.full_like(lines[-1], middle)):
            verdict = "ignores position"
            axes.set_ylim(middle - 1, middle + 1)
        axes.set_title(f"Same token everywhere: its score {verdict}")

    return [curves]


def attended(view: View, shares: Tensor) -> list[Drawer]:
    """Attention [H, T] of the last token, by distance, to one key repeated at every position."""

    def curves(axes: Axes) -> None:
        _heads(axes, shares, "lower left")
        axes.set_yscale("log")
        axes.set_ylim(bottom=max(1e-9, float(shares[shares > 0].min()) / 2), top=2)
        distance_axis(axes, view)
        axes.set_ylabel("share of the attention")
        axes.set_title(f"Equal keys over a random text: attention of token {view.positions}")

    return [curves]


def in_sight(view: View, seen: Tensor) -> list[Drawer]:
    """Which keys each query sees, [T, T] of truth values."""

    def mask(axes: Axes) -> None:
        axes.imshow(seen.numpy(), cmap=ListedColormap(["white", BLUE]), interpolation="nearest")
        mark_lengths(axes, view)
        axes.set(xlabel="position j of the key", ylabel="position i of the query")
        axes.set_title("Keys that each query sees")

    return [mask]
