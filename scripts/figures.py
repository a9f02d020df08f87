"""Draw docs/encodings/figures: what `posbench inspect` has to show of each scheme, made small.

    python scripts/figures.py [ID ...]

Every encoding, preset and extension, or those named; one PNG each. The same sheet, larger:

    posbench inspect encoding=rope context=64 eval_length=256 plot=rope.png
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import matplotlib
from matplotlib import colormaps
from matplotlib.colors import to_rgb
from PIL import Image

from posbench import configure
from posbench.catalog import ENCODING_CARDS, EXTENSION_CARDS, POLICY_CARDS
from posbench.inspection.facts import prepare
from posbench.inspection.figures import draw
from posbench.inspection.panels import GREY, SEQUENCE

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "encodings" / "figures"
LENGTHS = ("context=64", "eval_length=256")  # those of the run in docs/encodings.md
DOTS_PER_INCH = 70
SHADES = 20  # of the colours of heat maps

# What a figure needs beyond its id.
SETTINGS = {
    # Fewer channels: tables of 128 are fine noise at this size.
    "sinusoidal": ("model.width=32", "model.heads=2"),
    "learned": ("model.width=32", "model.heads=2"),
    "alibi_pi": ("encoding=alibi",),
    # Factors of the kind that a search finds: none for fast pairs, 4 for slow ones.
    "longrope": (
        "extension.factors=[1,1,1.05,1.1,1.2,1.4,1.7,2,2.4,2.8,3.2,3.5,3.8,4,4,4]",
    ),
}  # fmt: skip
SUBJECTS = {
    **{card.id: f"encoding={card.id}" for card in (*ENCODING_CARDS, *POLICY_CARDS)},
    **{card.id: f"extension={card.id}" for card in EXTENSION_CARDS if card.id != "none"},
}


def settings_of(name: str) -> tuple[str, ...]:
    """The words after `posbench inspect` that make the figure of an id."""
    return (SUBJECTS[name], *LENGTHS, *SETTINGS.get(name, ()))


def palette() -> Image.Image:
    """The colours of inspection's panels and their mixtures with white: a third of the bytes."""
    lines = [to_rgb(colour) for colour in (*SEQUENCE, GREY, "black")]
    colours = [(1.0, 1.0, 1.0), *((k / 8,) * 3 for k in range(1, 8))]
    for share in (1.0, 0.5):
        colours += [tuple(share * part + 1 - share for part in line) for line in lines]
    for name, count in (("PuOr", SHADES), ("cividis", SHADES // 2)):
        colours += [colormaps[name](k / (count - 1))[:3] for k in range(count)]
    image = Image.new("P", (1, 1))
    image.putpalette([round(255 * part) for colour in colours for part in colour])
    return image


def write(name: str) -> Path:
    """Draw one figure into its file."""
    with matplotlib.rc_context({"axes.titlesize": 11}):
        figure = draw(prepare(configure("inspect", *settings_of(name))))
        sheet = io.BytesIO()
        figure.savefig(sheet, format="png", dpi=DOTS_PER_INCH)
    picture = Image.open(sheet).convert("RGB")
    small = picture.quantize(palette=palette(), dither=Image.Dither.NONE)
    target = FOLDER / f"{name}.png"
    small.save(target, optimize=True)
    return target


def main(names: list[str]) -> None:
    unknown = [name for name in names if name not in SUBJECTS]
    if unknown:
        raise SystemExit(f"no encoding or extension is called {', '.join(unknown)}\n{__doc__}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in names or SUBJECTS:
        print(f"{write(name).name}: {(FOLDER / f'{name}.png').stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
