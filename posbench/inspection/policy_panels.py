"""The panels of policies: what each layer sees, and what differs in training or by query."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter
from torch import Tensor

from posbench.config.policies import Positions, Temperature
from posbench.encodings.policies import Governed, draw_positions
from posbench.encodings.seeds import seeded
from posbench.inspection.panels import BLUE, GREY, ORANGE, SEQUENCE, Drawer, View, mark_lengths

TEXTS = 5  # whose drawn positions are shown


def governing(view: View, encoding: Governed, temperature: float | Tensor) -> list[Drawer]:
    """One panel for each policy that is not its default; `temperature` is the first layer's."""
    policies = encoding.policies
    drawers: list[Drawer] = []
    if policies.window is not None or policies.layers != "all":
        drawers.append(lambda axes: _sight(axes, view, encoding))
    if policies.positions is not Positions.plain:
        drawers.append(lambda axes: _training_positions(axes, view, encoding))
    if policies.drop_at is not None:
        drawers.append(lambda axes: _drop(axes, encoding))
    if policies.temperature is not Temperature.none and isinstance(temperature, Tensor):
        drawers.append(lambda axes: _temperature(axes, view, temperature))
    return drawers


def _sight(axes: Axes, view: View, encoding: Governed) -> None:
    window = encoding.policies.window or view.positions
    for layer in range(encoding.shape.layers):
        uses = encoding.uses(layer)
        seen = min(window, view.positions) if uses else view.positions
        axes.barh(layer + 1, seen, color=BLUE if uses else ORANGE)
    axes.invert_yaxis()
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(0, view.positions)
    mark_lengths(axes, view)
    axes.set(xlabel="distances i - j that the last token sees", ylabel="layer")
    axes.set_title("What each layer sees")
    kinds = [Patch(color=BLUE, label=f"with {encoding.config.name}")]
    if encoding.skipped_every is not None:
        kinds.append(Patch(color=ORANGE, label="without position"))
    axes.legend(handles=kinds, loc="lower right", framealpha=0.9)


def _training_positions(axes: Axes, view: View, encoding: Governed) -> None:
    context = encoding.shape.train_length
    for text in range(TEXTS):
        drawn = draw_positions(encoding.policies, context, seeded(text, "inspect.positions"))
        assert drawn is not None
        axes.plot(drawn, ".-", color=SEQUENCE[text], linewidth=0.8, markersize=3)
    axes.plot(range(context), color="black", linestyle="--", label="evaluation: 0, 1, 2, ...")
    mark_lengths(axes, view, horizontal=True)
    axes.set(xlabel="token of the text", ylabel="its position")
    axes.set_title(f"Positions of {TEXTS} training texts")
    axes.legend(loc="upper left")


def _drop(axes: Axes, encoding: Governed) -> None:
    share = encoding.policies.drop_at
    assert share is not None
    axes.barh("training", share, color=BLUE, label=f"with {encoding.config.name}")
    axes.barh("training", 1 - share, left=share, color=ORANGE, label="without position")
    axes.barh("evaluation", 1, color=ORANGE)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("share of the steps")
    axes.set_title(f"The encoding is dropped after {share:.0%} of the training")
    axes.legend(loc="center", framealpha=0.9)


def _temperature(axes: Axes, view: View, temperature: Tensor) -> None:
    lines = temperature.detach().view(-1, temperature.shape[-1])
    same = bool((lines == lines[0]).all())
    for head, line in enumerate(lines[:1] if same else lines[: len(SEQUENCE)]):
        label = "every head" if same else f"head {head}"
        axes.plot(line, color=SEQUENCE[head], label=label)
    axes.axhline(1, color=GREY, linestyle=":", linewidth=1)
    mark_lengths(axes, view)
    axes.set(xlabel="position i of the query", ylabel="factor on its scores")
    axes.set_title("Temperature: what scores are multiplied by")
    axes.legend(loc="lower right")
