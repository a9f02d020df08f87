"""Figures of `posbench inspect`: the panels an encoding has something to show in, on one sheet."""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor

from posbench.attention import attend, score_rows
from posbench.config import ModelConfig
from posbench.encodings import Hooks
from posbench.encodings.policies import Governed
from posbench.encodings.seeds import seeded
from posbench.errors import UserError
from posbench.files import write_bytes
from posbench.inspection import panels, policy_panels, rotary_panels
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
    encoding, model = subject.encoding, subject.settings.model
    positions = min(subject.defined, MOST_POSITIONS)
    view = panels.View(
        subject.title, subject.settings.context, positions, encoding.parameter_count() > 0
    )
    hooks = subject.hooks(positions)
    trained = subject.trained.describe(view.train_length)
    here = encoding.describe(subject.length)
    layers = {"inverse_frequencies": ""}
    if "global_inverse_frequencies" in trained:
        layers = {
            "inverse_frequencies": "local layers",
            "global_inverse_frequencies": "global layers",
        }
    drawers: list[panels.Drawer] = []
    if isinstance(encoding, Governed):
        drawers += policy_panels.governing(view, encoding, hooks.temperature)
    for key, where in layers.items():
        if not len(trained.get(key, [])):
            continue
        stretched = not torch.equal(trained[key], here[key])
        # Scores of equal vectors follow from the angles alone only where norms are kept, and
        # where an extension has not given keys other distances.
        by_angle = encoding.keeps_norm and (stretched or not subject.extended)
        drawers += rotary_panels.rotary(
            view,
            trained[key],
            here[key] if stretched else None,
            here["attention_factor"],
            model.head_size if by_angle else None,
            where,
        )
    if hooks.mask_mod is not None:
        j = torch.arange(min(positions, panels.MOST_CELLS))
        i, first = j.unsqueeze(-1), torch.zeros_like(j[0])
        seen = hooks.mask_mod(first, first, i, j) & (j <= i)
        drawers += panels.in_sight(view, seen)
    if hooks.distance_bias is not None:
        distances = torch.arange(positions, dtype=torch.float64)
        added = added_scores(hooks, positions, model)
        drawers += panels.biased(view, hooks.distance_bias(distances), added)
    elif hooks.rotate is None and hooks.attend is None:
        added = added_scores(random_text_hooks(subject, positions), positions, model)
        if added.isfinite().all() and (added != added[:, :1]).any():
            drawers += panels.biased(view, added, added, "Added to scores of the last token")
    vectors = position_vectors(encoding, positions, torch.float64)
    if vectors.any():
        drawers += panels.embedded(view, vectors)
    if not drawers and all(hook is None for hook in hooks[:-1]):
        drawers += panels.unordered(view)
    seed = subject.settings.seed
    if hooks.attend is not None:
        few = min(positions, panels.MOST_DISTANCES)
        q, k, _ = probe(encoding, few, seed, dtype=torch.float64)
        each = torch.eye(few, dtype=torch.float64).expand(1, model.heads, -1, -1)
        shares = attend(q, k, each, random_text_hooks(subject, few))[0, :, -1].flip(-1)
        drawers += panels.attended(view._replace(positions=few), shares)
    else:
        q, k, hooks = probe(encoding, positions, seed, dtype=torch.float64)
        rows = sorted({max(1, positions * part // 4) - 1 for part in (1, 2, 3, 4)})
        scores = [row[0, 0] for row in score_rows(q, k, hooks, rows)]
        drawers += panels.probed(view, scores)
    return drawers


def added_scores(hooks: Hooks, positions: int, model: ModelConfig) -> Tensor:
    """Scores [H, T] of the last token by distance if every q.k is 0."""
    nothing = torch.zeros(1, model.heads, positions, model.head_size, dtype=torch.float64)
    (last,) = score_rows(nothing, nothing, hooks, [positions - 1])
    return last[0].flip(-1)


def random_text_hooks(subject: Subject, positions: int) -> Hooks:
    """Hooks of a first layer that reads different tokens, for what depends on content."""
    width = subject.settings.model.width
    generator = seeded(subject.settings.seed, "inspect.text")
    x = torch.randn(1, positions, width, generator=generator, dtype=torch.float64)
    return subject.encoding.hooks(x, torch.arange(positions), 0)
