"""How a line looks: one colour and marker for each encoding, one dash for each extension.

They come from tables, so an encoding looks the same in every figure of every report, whatever else
is shown.
"""

from __future__ import annotations

import zlib

# Chosen so that each has contrast on white and on near-black, and any two differ under every common
# colour blindness. No more than ten such exist; encodings that share one differ in their marker,
# and every line carries its name as well.
_GREY, _AMBER, _PURPLE, _BLUE, _RED, _VIOLET, _GREEN, _INDIGO, _MAUVE, _WINE = COLORS = (
    "#8e9393", "#c88804", "#8c519a", "#368bfa", "#b83c33",
    "#7800ff", "#00b469", "#3c4bd2", "#c387d2", "#963c5a",
)  # fmt: skip

# Within a family, and among the encodings that are usually compared, colours differ.
_LOOKS = {
    "none": (_GREY, "o"),
    "sinusoidal": (_AMBER, "o"),
    "learned": (_PURPLE, "o"),
    "rope": (_BLUE, "o"),
    "alibi": (_RED, "o"),
    "t5": (_VIOLET, "o"),
    "kerple_log": (_GREEN, "o"),
    "fire": (_INDIGO, "o"),
    "fox": (_MAUVE, "o"),
    "cope": (_WINE, "o"),
    "rope_partial": (_AMBER, "s"),
    "rope_p": (_GREEN, "s"),
    "rope_abf": (_VIOLET, "s"),
    "rope_local_global": (_GREY, "s"),
    "fope": (_RED, "s"),
    "xpos": (_PURPLE, "s"),
    "pope": (_MAUVE, "s"),
    "alibi_learned": (_AMBER, "D"),
    "kerple_power": (_WINE, "D"),
    "sandwich": (_INDIGO, "D"),
    "dpb": (_MAUVE, "D"),
    "shaw": (_GREEN, "D"),
    "txl": (_RED, "D"),
    "cable": (_BLUE, "P"),
    "grape_ap": (_AMBER, "P"),
    "dape": (_GREEN, "P"),
    "dape_v2": (_VIOLET, "P"),
    "stickbreak": (_RED, "P"),
    "path": (_GREY, "P"),
    "rnope": (_GREEN, "X"),
    "swan": (_AMBER, "X"),
    "swa": (_GREY, "X"),
    "drope": (_RED, "X"),
    "randomized": (_VIOLET, "X"),
    "pose": (_PURPLE, "X"),
    "ssmax": (_MAUVE, "X"),
}
_OTHER_MARKER = "h"

Dash = str | tuple[int, tuple[float, ...]]
_DASHES: dict[str, Dash] = {
    "none": "-",
    "pi": (0, (1.2, 1.6)),
    "ntk": (0, (6, 2, 1.2, 2)),
    "dynamic_ntk": (0, (6, 2, 1.2, 2, 1.2, 2)),
    "ntk_by_parts": (0, (3, 1.5)),
    "yarn": (0, (5, 2)),
    "llama3": (0, (9, 2)),
    "abf": (0, (1.2, 3)),
    "longrope": (0, (9, 2, 3, 2)),
    "rerope": (0, (3, 1.5, 1.2, 1.5)),
    "leaky_rerope": (0, (3, 1.5, 1.2, 1.5, 1.2, 1.5)),
    "self_extend": (0, (9, 2, 1.2, 2)),
    "lm_infinite": (0, (2, 4)),
    "streaming": (0, (5, 5)),
    "alibi_pi": (0, (1.2, 1.6)),
}
_OTHER_DASH: Dash = (0, (9, 2, 1.2, 2, 1.2, 2))


def color_of(encoding: str) -> str:
    """The colour of an encoding, as a hexadecimal number."""
    return _look(encoding)[0]


def marker_of(encoding: str) -> str:
    """The marker of an encoding, as matplotlib names it."""
    return _look(encoding)[1]


def _look(encoding: str) -> tuple[str, str]:
    # One that is not in the table, such as a plugin: by its name, the same in every process.
    other = COLORS[zlib.crc32(encoding.encode()) % len(COLORS)], _OTHER_MARKER
    return _LOOKS.get(encoding, other)


def dash_of(extension: str) -> Dash:
    """The line style of an extension, as matplotlib takes it."""
    return _DASHES.get(extension or "none", _OTHER_DASH)
