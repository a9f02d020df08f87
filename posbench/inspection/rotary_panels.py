"""The panels of a rotation: wavelengths, angles, decay, and what an extension changes in them."""

from __future__ import annotations

import math

import torch
from matplotlib.axes import Axes
from torch import Tensor

from posbench.inspection.panels import (
    BLUE,
    GREY,
    ORANGE,
    RED,
    Drawer,
    View,
    distance_axis,
    heat_map,
    mark_lengths,
)


def rotary(
    view: View,
    trained: Tensor,
    extended: Tensor | None,
    factor: float,
    head_size: int | None,
    layers: str = "",
) -> list[Drawer]:
    """Wavelengths, angles and decay of a rotation; with an extension, what it changes.

    No `head_size`, no decay. `layers` says which, where not all turn alike.
    """

    def wavelengths(axes: Axes) -> None:
        _wavelengths(axes, view, trained, extended)

    def angles(axes: Axes) -> None:
        _angles(axes, view, trained, "as trained" if extended is not None else "")

    def decay(axes: Axes) -> None:
        assert head_size is not None
        _decay(axes, view, trained, extended, factor, head_size)

    last: list[Drawer] = [] if head_size is None else [decay]
    if extended is None:
        return [_titled(each, layers) for each in (wavelengths, angles, *last)]
    changed = extended

    def angles_after(axes: Axes) -> None:
        _angles(axes, view, changed, view.title)

    def stretch(axes: Axes) -> None:
        _stretch(axes, view, trained, changed, factor)

    return [_titled(each, layers) for each in (wavelengths, stretch, angles, angles_after, *last)]


def _titled(drawer: Drawer, layers: str) -> Drawer:
    def draw(axes: Axes) -> None:
        drawer(axes)
        axes.set_title(f"{axes.get_title()}\n{layers}".rstrip())

    return draw


def _wavelengths(axes: Axes, view: View, trained: Tensor, extended: Tensor | None) -> None:
    pairs = torch.arange(len(trained))
    lengths = _wavelengths_of(trained)
    short = lengths <= view.train_length
    axes.plot(pairs[short], lengths[short], "o", color=BLUE, label="finishes a turn within 1x")
    axes.plot(
        pairs[~short], lengths[~short], "^", color=RED, label="does not finish a turn within 1x"
    )
    if extended is not None:
        axes.plot(
            pairs, _wavelengths_of(extended), "-", color=GREY, linewidth=1.5, label=view.title
        )
    axes.set_yscale("log")
    mark_lengths(axes, view, horizontal=True)
    axes.set(xlabel="pair of channels", ylabel="tokens for one turn")
    axes.set_title(f"{int((~short).sum())} of {len(trained)} pairs finish no turn in training")
    axes.legend(loc="upper left")


def _wavelengths_of(inverse: Tensor) -> Tensor:
    """Tokens per turn; NaN, which is not drawn, for a pair that hardly turns or not at all."""
    lengths = 2 * math.pi / inverse
    return torch.where(lengths < 1e15, lengths, math.nan)


def _angles(axes: Axes, view: View, inverse: Tensor, when: str) -> None:
    cosines = torch.outer(inverse, torch.arange(view.positions, dtype=torch.float64)).cos()
    cosines = cosines.repeat_interleave(16, dim=0)  # so that resampling blurs no pair with the next
    extent = (0, view.positions, len(inverse) - 0.5, -0.5)
    heat_map(axes, cosines, 1, extent, "cosine of the angle")
    mark_lengths(axes, view)
    axes.set(xlabel="position (tokens)", ylabel="pair of channels")
    axes.set_title("Rotation angle of each pair by position" + (f", {when}" if when else ""))


def _decay(
    axes: Axes, view: View, trained: Tensor, extended: Tensor | None, factor: float, head_size: int
) -> None:
    distances = torch.arange(view.positions, dtype=torch.float64)

    def mean_score(inverse: Tensor, scale: float) -> Tensor:
        turned = 2 * scale**2 * torch.outer(distances, inverse).cos().sum(dim=1)
        return (turned + head_size - 2 * len(inverse)) / head_size

    axes.axhline(0, color=GREY, linewidth=0.8)
    if extended is None:
        axes.plot(distances, mean_score(trained, factor), color=BLUE, linewidth=1)
    else:
        axes.plot(distances, mean_score(trained, 1.0), color=BLUE, linewidth=1, label="as trained")
        label = view.title if factor == 1 else f"{view.title} (scores times {factor**2:.3g})"
        axes.plot(distances, mean_score(extended, factor), color=RED, linewidth=1, label=label)
        axes.legend(loc="lower left")
    distance_axis(axes, view)
    axes.set_ylabel("mean score, q = k of length 1")
    axes.set_title("A query and an equal key: mean score by distance")


def _stretch(axes: Axes, view: View, trained: Tensor, extended: Tensor, factor: float) -> None:
    ratio = torch.where(extended > 0, trained / extended, torch.ones_like(trained))
    most = float(ratio.max())
    kept, full = ratio < 1 + 1e-9, ratio > most * (1 - 1e-9)
    between = ~kept & ~full
    pairs = torch.arange(len(ratio))
    axes.plot(pairs, ratio, "-", color=GREY, linewidth=1)
    groups = (
        (kept, "o", BLUE, "left alone"),
        (between, "D", ORANGE, "stretched in part"),
        (full & ~kept, "^", RED, f"stretched {most:.3g} times"),
    )
    for chosen, marker, color, label in groups:
        if chosen.any():
            count = int(chosen.sum())
            axes.plot(pairs[chosen], ratio[chosen], marker, color=color, label=f"{label}: {count}")
    axes.set_ylim(bottom=min(0.9, 1 - 0.08 * (most - 1)))
    axes.set(xlabel="pair of channels", ylabel="stretch: trained / extended frequency")
    suffix = "" if factor == 1 else f"; scores times {factor**2:.4g}"
    axes.set_title(f"Stretch of each frequency{suffix}")
    axes.legend(loc="best")
