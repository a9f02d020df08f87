"""Settings that combine with any encoding: where it acts, what a layer sees, when it is dropped.

They stand beside `encoding` on the command line, not under it: `encoding=alibi window=64`. Some
combinations have a name of their own, a preset, which `encoding=` takes too (configs/encoding/).
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from enum import StrEnum

from posbench.config.fields import setting


class Positions(StrEnum):
    """Which positions a training text has; at evaluation they are always 0, 1, 2, ..."""

    plain = "plain"
    randomized = "randomized"
    pose = "pose"


class Temperature(StrEnum):
    """What multiplies the scores before the softmax, query by query."""

    none = "none"
    logn = "logn"
    yarn = "yarn"
    drope = "drope"
    ssmax = "ssmax"


@dataclass
class Policies:
    """What combines with any encoding."""

    layers: str = setting(
        "all", "layers that use the encoding: all, or everyNth for all but each Nth (every4th)"
    )
    window: int | None = setting(
        None, "tokens that those layers look back on, own one included; null: all", low=1
    )
    positions: Positions = setting(
        Positions.plain,
        "positions in training: plain, randomized (sorted draws), pose (two parts and a gap)",
    )
    max_position: int | None = setting(
        None, "randomized and pose draw below this; null: four training lengths", low=2
    )
    drop_at: float | None = setting(
        None, "share of the training after which the encoding is dropped (DroPE)", 0.0, 1.0
    )
    temperature: Temperature = setting(
        Temperature.none, "of the scores: none, logn, yarn, drope (formulas) or ssmax (trained)"
    )

    @property
    def skipped_every(self) -> int | None:
        """N where each Nth layer goes without the encoding; None where all use it."""
        found = re.fullmatch(r"every(\d+)(st|nd|rd|th)", self.layers)
        return int(found[1]) if found else None

    def drawn_below(self, context: int) -> int | None:
        """Bound of the positions drawn in training; None where they are plain."""
        if self.positions is Positions.plain:
            return None
        return 4 * context if self.max_position is None else self.max_position


def policies_of(settings: Policies) -> Policies:
    """The policies alone, of settings that hold more."""
    values = {item.name: getattr(settings, item.name) for item in dataclasses.fields(Policies)}
    return Policies(**values)


@dataclass(frozen=True)
class Preset:
    """An encoding with policies that has a name: what configs/encoding/<id>.yaml sets."""

    encoding: str
    policies: Policies
    window_share: float | None = None  # of the training length; stands for `window`

    def at(self, context: int) -> Policies:
        """Its policies at a training length."""
        window = None if self.window_share is None else part_of(self.window_share, context)
        return dataclasses.replace(self.policies, window=window)


def part_of(share: float, context: int) -> int:
    """A share of the training length in whole tokens, at least one."""
    return max(1, round(share * context))


PRESETS: dict[str, Preset] = {
    "rnope": Preset("rope", Policies(layers="every4th")),
    "swan": Preset("rope", Policies(layers="every4th"), window_share=0.5),
    "swa": Preset("rope", Policies(), window_share=1.0),
    "drope": Preset("rope", Policies(drop_at=0.85)),
    "randomized": Preset("rope", Policies(positions=Positions.randomized)),
    "pose": Preset("rope", Policies(positions=Positions.pose)),
    "ssmax": Preset("rope", Policies(temperature=Temperature.ssmax)),
}


def scheme(encoding: str, policies: Policies, context: int) -> str:
    """What results call an encoding under `policies`: its id, a preset's, or all of it in a word.

    Two models that differ in their policies never share a name.
    """
    if policies == Policies():
        return encoding
    for name, preset in PRESETS.items():
        if preset.encoding == encoding and preset.at(context) == policies:
            return name
    parts = [encoding]
    if policies.layers != "all":
        parts.append(policies.layers)
    if policies.window is not None:
        parts.append(f"window{policies.window}")
    below = policies.drawn_below(context)
    if below is not None:
        parts.append(f"{policies.positions}{below}")
    if policies.drop_at is not None:
        parts.append(f"drop{policies.drop_at:g}")
    if policies.temperature is not Temperature.none:
        parts.append(str(policies.temperature))
    return "+".join(parts)
