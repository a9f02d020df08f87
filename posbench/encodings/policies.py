"""Policies around an encoding: its layers, their window, drawn positions, dropping, temperature."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from posbench.config import Beyond
from posbench.config.extensions import ExtensionConfig, NoExtensionConfig, WindowConfig
from posbench.config.policies import Policies, Positions, Temperature
from posbench.encodings.base import Encoding, Generators, Hooks, ScoreMod, precise
from posbench.encodings.regrouping import logn
from posbench.errors import UnsupportedError

DROPE = 0.412  # growth of the temperature with ln s, for models that never met a longer text


def draw_positions(policies: Policies, context: int, generator: torch.Generator) -> Tensor | None:
    """Positions [context] for one training step; None where they are 0, 1, 2, ...

    randomized: `context` different numbers below the bound, sorted (Ruoss et al. 2023). pose: the
    text in two parts at a random place, the second moved on by a random gap (Zhu et al. 2024).
    """
    below = policies.drawn_below(context)
    if below is None:
        return None
    if policies.positions is Positions.randomized:
        drawn = torch.randperm(below, generator=generator)[:context]
        return drawn.sort().values
    cut = int(torch.randint(1, context, (), generator=generator))
    gap = int(torch.randint(0, below - context + 1, (), generator=generator))
    positions = torch.arange(context)
    positions[cut:] += gap
    return positions


def visible_keys(length: int, most: int | None, device: torch.device) -> Tensor:
    """How many keys each query of a text sees, float64 [length]; no more than `most`."""
    counts = torch.arange(1, length + 1, device=device, dtype=torch.float64)
    return counts if most is None else counts.clamp(max=most)


def stretch(length: int, train_length: int) -> float:
    """How many training lengths a text is long, at least 1."""
    return max(1.0, length / train_length)


def ssmax_start(train_length: int) -> float:
    """s for which s ln n averages 1 over n = 1..L: 0.168 at 1024, where the paper starts."""
    return train_length / math.lgamma(train_length + 1)


def looked_up(bias: Tensor, positions: Tensor, inner: ScoreMod | None) -> ScoreMod:
    """A score rule that adds `bias` [H, N] at the distance of two `positions` [T], all below N."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        # A masked pair, too, must stay within the table.
        score = score + bias[h, (positions[i] - positions[j]).abs()]
        return score if inner is None else inner(score, b, h, i, j)

    return score_mod


class Governed(Encoding):
    """An encoding under policies, itself an encoding: no model knows the difference."""

    def __init__(self, inner: Encoding, policies: Policies) -> None:
        super().__init__(inner.config, inner.shape)
        self.inner = inner
        self.policies = policies
        self.skipped_every = policies.skipped_every
        self.dropped = False
        self.ssmax: nn.Parameter | None = None
        if policies.temperature is Temperature.ssmax:
            self.ssmax = nn.Parameter(torch.empty(inner.shape.layers, inner.shape.heads))

    # ------------------------------------------------------------ what the encoding says of itself

    @property
    def relative(self) -> bool:  # type: ignore[override]
        if not self.inner.extension.relative:
            return False
        return self.dropped or self.inner.relative or type(self.inner) is Encoding

    @property
    def keeps_norm(self) -> bool:  # type: ignore[override]
        return self.inner.keeps_norm

    @property
    def max_length(self) -> int | None:
        return None if self.dropped else self.inner.max_length

    @property
    def limit(self) -> str:
        return self.inner.limit

    @property
    def prefix_consistent(self) -> bool:
        by_length = self.policies.temperature in (Temperature.yarn, Temperature.drope)
        return not by_length and (self.dropped or self.inner.prefix_consistent)

    def extend(self, extension: ExtensionConfig) -> None:
        window = self.policies.window
        if isinstance(extension, WindowConfig) and window is not None:
            raise UnsupportedError(
                f"{extension.name} gives a window to a model that has none; this one was trained "
                f"with window={window}"
            )
        if self.dropped and not isinstance(extension, NoExtensionConfig | WindowConfig):
            raise UnsupportedError(
                f"{extension.name} has nothing to act on: {self.config.name} was dropped at "
                f"drop_at={self.policies.drop_at:g} of the training"
            )
        self.inner.extend(extension)

    def go_beyond(self, beyond: Beyond) -> None:
        self.inner.go_beyond(beyond)

    def initialise(self, generators: Generators) -> None:
        self.inner.initialise(generators)
        if self.ssmax is not None:
            nn.init.constant_(self.ssmax, ssmax_start(self.shape.train_length))

    def describe(self, length: int) -> dict[str, Any]:
        return self.inner.describe(length)

    # ------------------------------------------------------------ what the policies do

    def trained_to(self, share: float) -> None:
        self.inner.trained_to(share)
        self.dropped = self.policies.drop_at is not None and share >= self.policies.drop_at

    def uses(self, layer: int) -> bool:
        """Whether layer number `layer` is one of those with the encoding, and the window."""
        return self.skipped_every is None or (layer + 1) % self.skipped_every != 0

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x if self.dropped else self.inner.embed(x, positions)

    def hooks(self, x: Tensor, positions: Tensor, layer: int) -> Hooks:
        hooks = self.inner.sight(positions)
        if self.uses(layer):
            if not self.dropped:
                hooks = self._at_drawn(self.inner.hooks(x, positions, layer), x, positions)
            window = self.policies.window
            if window is not None and window < len(positions):
                hooks = hooks._replace(window=window)
        warmth = self._temperature(len(positions), layer, self._most_keys(hooks), x.device)
        return hooks if warmth is None else hooks._replace(temperature=hooks.temperature * warmth)

    def _most_keys(self, hooks: Hooks) -> int | None:
        """The most keys that a query sees; None: all before it."""
        if isinstance(self.inner.extension, WindowConfig):
            sinks, window, _ = self.inner.extension.sizes_for(self.shape.train_length)
            return sinks + window
        return hooks.window

    def _at_drawn(self, hooks: Hooks, x: Tensor, positions: Tensor) -> Hooks:
        """Biases by distance read where the positions of training are drawn, with gaps."""
        below = self.policies.drawn_below(self.shape.train_length)
        if below is None or hooks.distance_bias is None or not self.training:
            return hooks
        distances = torch.arange(below, device=x.device, dtype=precise(x.dtype))
        with torch.autocast(x.device.type, enabled=False):
            bias = hooks.distance_bias(distances)
        rule = looked_up(bias, positions, hooks.score_mod)
        return hooks._replace(distance_bias=None, score_mod=rule)

    def _temperature(
        self, length: int, layer: int, most_keys: int | None, device: torch.device
    ) -> Tensor | None:
        """What multiplies the scores of each query, [T] or [H, T]; None: nothing."""
        trained = self.shape.train_length
        s = stretch(length, trained)
        keys = visible_keys(length, most_keys, device)
        match self.policies.temperature:
            case Temperature.logn:
                return logn(keys, trained)
            case Temperature.yarn:  # Peng et al. 2023, eq. 22, on scores: a square
                return torch.full_like(keys, (0.1 * math.log(s) + 1) ** 2)
            case Temperature.drope:  # Gelberg et al. 2025, arXiv:2512.12167
                return torch.full_like(keys, 1 + DROPE * math.log(s))
            case Temperature.ssmax:  # Nakanishi 2025, eq. 11
                assert self.ssmax is not None
                return self.ssmax[layer].double().unsqueeze(-1) * keys.log()
        return None


def governed(encoding: Encoding, policies: Policies) -> Encoding:
    """`encoding` under `policies`; the very same where they ask for nothing."""
    return encoding if policies == Policies() else Governed(encoding, policies)


def warmed(encoding: Encoding, temperature: Temperature) -> Encoding:
    """A trained encoding with another temperature, which has no weights of its own."""
    if isinstance(encoding, Governed):
        if encoding.ssmax is not None:
            raise UnsupportedError("its scores have a trained temperature (ssmax) already")
        encoding.policies = replace(encoding.policies, temperature=temperature)
        return encoding
    return Governed(encoding, Policies(temperature=temperature))


def in_order(encoding: Encoding) -> None:
    """Training texts have plain positions from now on: they are as long as those measured."""
    if isinstance(encoding, Governed):
        encoding.policies = replace(encoding.policies, positions=Positions.plain)
