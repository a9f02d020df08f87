"""What a logit may depend on: causality, batch, shifts and length; numbers that stay finite."""

from __future__ import annotations

import torch

from posbench.config import Norm
from posbench.config.encodings import NoneConfig
from posbench.encodings import Encoding
from posbench.errors import UnsupportedError
from posbench.model import GPT, build_model
from posbench.promises.probe import (
    ROUNDING,
    VOCABULARY,
    Measured,
    Subject,
    changed,
    largest,
    number,
    raised,
    tokens,
    twin,
)
from posbench.promises.signs import turned_apart

SHIFT = 101
BOUND = f"at most {ROUNDING:g}"
RELATIVE = 1e-4  # on logits: angles in float32 are allowed, a wrong sign moves them by 0.1 and more


@torch.no_grad()
def causal(subject: Subject) -> Measured:
    """Changing a token changes no logit before it, at 1x and 4x."""
    for norm in Norm:  # after LayerNorm the mean of a token is 0, and tells nothing
        model = subject.exact(norm)
        for length in subject.lengths:
            place, leak = worst_leak(model, length)
            if not leak <= ROUNDING:
                moved = f"changing token {place} moves logits before it by {number(leak)}"
                return Measured(False, f"{moved} (T={length}, {norm})", BOUND)
    return Measured(True, f"no logit moves, T={_listed(subject.lengths)}", BOUND)


def worst_leak(model: GPT, length: int) -> tuple[int, float]:
    """Which changed token moves logits before it the most, and by how much."""
    text = tokens(length)
    before = model(text)
    leaks = []
    for place in sorted({1, length // 2, length - 1}):
        after = model(changed(text, place))
        leaks.append((largest(before[:, :place] - after[:, :place]), place))
    leak, place = max(leaks, key=lambda each: (each[0] != each[0], each[0]))
    return place, leak


@torch.no_grad()
def rows_independent(subject: Subject) -> Measured:
    """A text's logits are the same alone and in a batch."""
    text = tokens(subject.lengths[0], rows=3)
    difference = 0.0
    for norm in Norm:
        model = subject.exact(norm)
        together, alone = model(text), torch.cat([model(row[None]) for row in text])
        difference = max(difference, largest(together - alone))
    return Measured(difference <= ROUNDING, f"logits differ by {number(difference)}", BOUND)


@torch.no_grad()
def effect(subject: Subject) -> Measured:
    """The logits are not those of a model without an encoding."""
    text, difference = tokens(subject.lengths[0]), 0.0
    for norm in Norm:
        model = subject.exact(norm)
        plain = twin(model)
        plain.encoding = Encoding(subject.config, model.encoding.shape)
        difference = max(difference, largest(model(text) - plain(text)))
    return Measured(
        difference > ROUNDING,
        f"logits differ from encoding=none by {number(difference)}",
        "more than 0",
    )


@torch.no_grad()
def shifts(subject: Subject) -> Measured:
    """Logits are equal under a shift of all positions if the class says `relative = True`."""
    model, limit = subject.exact(), subject.limit
    length = subject.context if limit is None else min(subject.context, limit // 2)
    shift = SHIFT if limit is None else limit - length
    positions, text = torch.arange(length), tokens(length)
    difference = largest(model(text, positions) - model(text, positions + shift))
    found = f"positions + {shift} move the logits by {number(difference)}"
    if model.encoding.relative:
        where = (
            "the scores depend on i + j: are q and k turned in opposite directions?"
            if turned_apart(subject)
            else "positions enter one by one, not as i - j; if that is meant, relative = False"
        )
        return Measured(difference <= RELATIVE, found, f"at most {RELATIVE:g}", where)
    if difference <= RELATIVE:
        return Measured(True, f"{found}; it could say relative = True", "not relative")
    return Measured(True, found, "not relative")


@torch.no_grad()
def prefixes(subject: Subject) -> Measured:
    """The first T logits do not depend on what follows, unless the class says so."""
    model = subject.exact()
    short = subject.context if subject.limit is None else subject.limit // 2
    text = tokens(2 * short)
    difference = largest(model(text)[:, :short] - model(text[:, :short]))
    found = f"{short} tokens alone or before {short} more: {number(difference)}"
    if not model.encoding.prefix_consistent:
        return Measured(True, found, "not prefix_consistent")
    where = "it reads the length of the text; if that is meant, prefix_consistent = False"
    return Measured(difference <= ROUNDING, found, BOUND, where)


@torch.no_grad()
def finite(subject: Subject) -> Measured:
    """Finite logits to 4x the training length, or to a stated maximum and a refusal beyond."""
    model, limit = subject.fresh(), subject.limit
    for length in subject.lengths:
        try:
            bad = int((~model(tokens(length)).isfinite()).sum())
        except UnsupportedError as refusal:
            found = f"refuses {length} tokens, though max_length is {limit}: {refusal}"
            return Measured(False, found, f"max_length below {length}")
        except Exception as error:
            where = "give the class a `max_length`, and call self.check_length(len(positions))"
            return Measured(False, f"{length} tokens: {raised(error, subject)}", "no error", where)
        if bad:
            return Measured(False, f"{bad} logits are not finite at {length} tokens", "0")
    if limit is None or limit >= 4 * subject.context:
        return Measured(True, f"finite at {_listed(subject.lengths)} tokens", "all finite")
    try:
        model(tokens(limit + 1))
    except UnsupportedError:
        return Measured(True, f"finite to {limit} tokens, refused beyond", "max_length holds")
    found = f"max_length is {limit}, and {limit + 1} tokens are accepted"
    return Measured(False, found, "UnsupportedError", "call self.check_length(len(positions))")


@torch.no_grad()
def order_of_lengths(subject: Subject) -> Measured:
    """Short before long gives the very logits that long before short gives."""
    sizes = [1, *subject.lengths]
    upwards, downwards = subject.model(), subject.model()
    first = {size: upwards(tokens(size)) for size in sizes}
    second = {size: downwards(tokens(size)) for size in reversed(sizes)}
    difference = max(largest(first[size] - second[size]) for size in sizes)
    return Measured(difference == 0, f"logits differ by {number(difference)}", "0, bit for bit")


@torch.no_grad()
def same_seed(subject: Subject) -> Measured:
    """One seed gives the same weights whatever was drawn before, and touches no others."""
    first = subject.fresh().state_dict()
    torch.rand(17)
    second = subject.fresh().state_dict()
    for name, value in first.items():
        if not torch.equal(value, second[name]):
            where = "draw them in `initialise`, from generators(name)"
            return Measured(False, f"{name} is drawn anew each time", "equal", where)
    plain = build_model(subject.size, NoneConfig(), subject.context, VOCABULARY, 0).state_dict()
    for name, value in plain.items():
        if name not in first or not torch.equal(value, first[name]):
            return Measured(False, f"{name} is not what it is under encoding=none", "equal")
    return Measured(True, f"{len(first)} tensors, bit-equal", "equal")


def _listed(lengths: list[int]) -> str:
    return " and ".join(str(length) for length in lengths)
