"""Figures of `posbench inspect`: the panels an encoding has something to show in, on one sheet."""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure

from posbench.attention import score_rows
from posbench.errors import UserError
from posbench.files import write_bytes
from posbench.inspection import panels, rotary_panels
from posbench.inspection.checks import position_vectors, probe
from posbench.inspection.facts import MOST_POSITIONS, Subject

SUFFIXES = (".png", ".svg")
PANEL_INCHES = (6.0, 4.2)
DOTS_PER_INCH = 120


def check_target(plot: str) -> Path:
    """The file to draw into; UserError if its kind is unknown or its folder does not exist."""
    target = Path(plot)
    if target.is_dir():
        raise UserError(f"plot={plot} is a folder; name a .png or .svg file in it.")
    if target.suffix.lower() not in SUFFIXES:
        raise UserError(
            f"plot={plot} is neither a .png nor a .svg file. Try plot={target.with_suffix('.png')}."
        )
    if not target.parent.is_dir():
        raise UserError(f"plot={plot}: the folder {target.parent} does not exist.")
    return target


def write_figure(subject: Subject, target: Path) -> None:
    """Draw the subject into `target`, a PNG or SVG file; StorageError if it cannot be written."""
    picture = io.BytesIO()
    kind = target.suffix.lower().lstrip(".")
    # A fixed salt and no date: the same settings give the same file.
    metadata = {"Date": None} if kind == "svg" else {}
    with matplotlib.rc_context({"svg.hashsalt": "posbench", "axes.titlesize": 11}):
        draw(subject).savefig(picture, format=kind, dpi=DOTS_PER_INCH, metadata=metadata)
    write_bytes(target, picture.getvalue())


@torch.no_grad()
def draw(subject: Subject) -> Figure:
    """One sheet with every panel that has something to show for the subject."""
    drawers = _drawers(subject)
    columns = len(drawers) if len(drawers) <= 3 else 2
    rows = -(-len(drawers) // columns)
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * columns, height * rows + 0.4), layout="constrained")
    for index, drawer in enumerate(drawers):
        drawer(figure.add_subplot(rows, columns, index + 1))
    context, length = subject.settings.context, subject.length
    looked = "" if length == context else f", looked at {length} ({length / context:.3g}x)"
    shown = min(subject.defined, MOST_POSITIONS)
    part = "" if shown == length else f"; positions shown: {shown}"
    figure.suptitle(
        f"{subject.title}: trained at {context} tokens (1x){looked}{part}", weight="bold"
    )
    return figure


def _drawers(subject: Subject) -> list[panels.Drawer]:
    """What the subject's hooks, embedding and description give reason to draw."""
    positions = min(subject.defined, MOST_POSITIONS)
    view = panels.View(
        subject.title, subject.settings.context, positions, subject.encoding.parameter_count() > 0
    )
    hooks = subject.hooks(positions)
    trained = subject.trained.describe(view.train_length)
    here = subject.encoding.describe(subject.length)
    layers = {"inverse_frequencies": ""}
    if "global_inverse_frequencies" in trained:
        layers = {
            "inverse_frequencies": "local layers",
            "global_inverse_frequencies": "global layers",
        }
    drawers: list[panels.Drawer] = []
    for key, where in layers.items():
        if not len(trained.get(key, [])):
            continue
        drawers += rotary_panels.rotary(
            view,
            trained[key],
            here[key] if subject.extended else None,
            here["attention_factor"],
            # Scores of equal vectors follow from the angles alone only where norms are kept.
            subject.settings.model.head_size if subject.encoding.keeps_norm else None,
            where,
        )
    if hooks.distance_bias is not None:
        distances = torch.arange(positions, dtype=torch.float64)
        model = subject.settings.model
        nothing = torch.zeros(1, model.heads, positions, model.head_size, dtype=torch.float64)
        (last,) = score_rows(nothing, nothing, hooks, [positions - 1])
        drawers += panels.biased(view, hooks.distance_bias(distances), last[0].flip(-1))
    vectors = position_vectors(subject.encoding, positions, torch.float64)
    if vectors.any():
        drawers += panels.embedded(view, vectors)
    if not drawers and hooks.mask_mod is None and hooks.window is None:
        drawers += panels.unordered(view)
    if hooks.attend is None:
        q, k, hooks = probe(subject.encoding, positions, subject.settings.seed, dtype=torch.float64)
        rows = sorted({max(1, positions * part // 4) - 1 for part in (1, 2, 3, 4)})
        scores = [row[0, 0] for row in score_rows(q, k, hooks, rows)]
        drawers += panels.probed(view, scores)
    return drawers
