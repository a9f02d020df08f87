"""The numbers behind one encoding at one length, as the JSON object of `posbench inspect`."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posbench.config import InspectSettings
from posbench.config.policies import policies_of, scheme
from posbench.encodings import Encoding, Hooks
from posbench.encodings.seeds import seeded
from posbench.errors import UnsupportedError, UserError
from posbench.inspection.checks import run_checks
from posbench.model import build_encoding
from posbench.results import strict
from posbench.rules import check_extension
from posbench.saved import to_dict

MOST_POSITIONS = 4096  # positions that checks and figures look at, at most


@dataclass(frozen=True)
class Subject:
    """One encoding under inspection."""

    settings: InspectSettings
    encoding: Encoding  # with the extension
    trained: Encoding  # the same, without
    length: int  # tokens of the text looked at

    @property
    def defined(self) -> int:
        """Positions of that text the scheme is defined for."""
        return min(self.length, self.encoding.max_length or self.length)

    @property
    def extended(self) -> bool:
        return self.settings.extension.name != "none"

    @property
    def title(self) -> str:
        """The encoding and its extension in words."""
        settings = self.settings
        name = scheme(settings.encoding.name, policies_of(settings), settings.context)
        return f"{name} with {self.settings.extension.name}" if self.extended else name

    def hooks(self, length: int) -> Hooks:
        """What the first layer does with position in a text of `length` tokens, in float64."""
        x = torch.zeros(1, length, self.settings.model.width, dtype=torch.float64)
        return self.encoding.hooks(x, torch.arange(length), 0)


def prepare(settings: InspectSettings) -> Subject:
    """Build what `settings` name, with the weights a training run of that seed starts from."""
    check_extension(settings)
    for distance in settings.inspect.distances:
        if distance < 0:
            raise UserError(
                f"inspect.distances holds {distance}; a distance i - j must be at least 0."
            )
    length = settings.context if settings.eval_length is None else settings.eval_length
    subject = Subject(settings, _built(settings), _built(settings), length)
    try:
        subject.encoding.extend(settings.extension)
        subject.encoding.describe(1)
    except UnsupportedError as error:
        raise UserError(f"extension={settings.extension.name} cannot be used: {error}.") from error
    return subject


def _built(settings: InspectSettings) -> Encoding:
    encoding = build_encoding(
        settings.model, settings.encoding, settings.context, policies_of(settings)
    )
    with torch.no_grad():
        encoding.initialise(lambda name: seeded(settings.seed, f"encoding.{name}"))
    return encoding


def inspect_encoding(settings: InspectSettings) -> dict[str, Any]:
    """The encoding's numbers as strict JSON values; a key that does not apply is None."""
    return facts_of(prepare(settings))


@torch.no_grad()
def facts_of(subject: Subject) -> dict[str, Any]:
    """The JSON object of `posbench inspect` for a prepared subject."""
    settings = subject.settings
    described = subject.encoding.describe(subject.length)
    inverse = _listed(described.get("inverse_frequencies"))
    in_global = _listed(described.get("global_inverse_frequencies"))
    positions = min(subject.defined, MOST_POSITIONS)
    factor = subject.encoding.describe(positions).get("attention_factor", 1.0)
    checks = run_checks(subject.encoding, positions, factor, settings.seed)
    facts = {
        "encoding": settings.encoding.name,
        "extension": settings.extension.name,
        "train_length": settings.context,
        "eval_length": subject.length,
        "parameters": subject.encoding.parameter_count(),
        "max_length": subject.encoding.max_length,
        "inverse_frequencies": inverse,
        "attention_factor": described.get("attention_factor"),
        "slopes": _listed(described.get("slopes")),
        "bias": _bias(subject, positions),
        "wavelengths": _wavelengths(inverse),
        "global_inverse_frequencies": in_global,
        "global_wavelengths": _wavelengths(in_global),
        "checks": {
            name: None if check is None else dataclasses.asdict(check)
            for name, check in checks.items()
        },
        "settings": to_dict(settings),
    }
    plain: dict[str, Any] = strict(facts)
    return plain


def _listed(values: Tensor | None) -> list[float] | None:
    return None if values is None else values.tolist()


def _wavelengths(inverse: list[float] | None) -> list[float | None] | None:
    return None if inverse is None else [wavelength(frequency) for frequency in inverse]


def wavelength(frequency: float) -> float | None:
    """Tokens in one full turn of a pair that turns `frequency` radians per token."""
    return 2 * math.pi / frequency if frequency > 0 else None


def _bias(subject: Subject, positions: int) -> dict[str, Any] | None:
    distance_bias = subject.hooks(positions).distance_bias
    if distance_bias is None:
        return None
    distances = subject.settings.inspect.distances
    # Adding zero turns the bias -0.0 of distance 0 into 0.0.
    values = distance_bias(torch.tensor(distances, dtype=torch.float64)) + 0.0
    return {"distances": list(distances), "values": values.tolist()}
