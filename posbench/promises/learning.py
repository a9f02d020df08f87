"""Running, training, saving, compiling."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from posbench.attention import Kernel
from posbench.model import GPT, token_losses
from posbench.promises.probe import (
    VOCABULARY,
    Measured,
    Subject,
    largest,
    number,
    tokens,
    twin,
)

STEPS = 50
GAIN = 0.1  # nats that 50 steps on one batch must gain; a model gains 1 and more
NEAR = 0.03  # on logits of a fresh model: what bfloat16 loses by itself


@torch.no_grad()
def runs(subject: Subject) -> Measured:
    """It builds, fills its parameters, and runs in every dtype, a single token included."""
    model = subject.fresh()
    own = model.encoding.named_parameters()
    empty = [name for name, value in own if not bool(value.isfinite().all())]
    if empty:
        where = "fill it in `initialise`, from generators(name)"
        return Measured(False, f"parameter {empty[0]} holds no numbers", "finite values", where)
    encoding, positions = model.encoding, torch.arange(5)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = torch.zeros(1, 5, encoding.shape.width, dtype=dtype)
        made = twin(encoding).to(dtype).embed(x, positions)
        if made.dtype is not dtype or made.shape != x.shape:
            found = f"embed makes {_word(made.dtype)} {tuple(made.shape)} of {_word(dtype)}"
            return Measured(False, found, "as it came", "end with .to(x.dtype)")
    for length in (1, 2, subject.lengths[0]):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            logits = twin(model).to(dtype)(tokens(length))
            if logits.shape != (2, length, VOCABULARY):
                return Measured(False, f"logits of shape {tuple(logits.shape)}", "[B, T, V]")
    count = model.encoding.parameter_count()
    return Measured(True, f"{count:,} parameters of its own", "runs at 1, 2 and 1x tokens")


def state(subject: Subject) -> Measured:
    """Everything it knows is a parameter: no buffers, no tensors beside them."""
    encoding = subject.fresh().encoding
    with torch.no_grad():
        encoding.hooks(
            encoding.embed(torch.zeros(1, 4, encoding.shape.width), torch.arange(4)),
            torch.arange(4),
            0,
        )
    kept = [name for name, _ in encoding.named_buffers()]
    for prefix, module in encoding.named_modules():
        plain = [name for name, value in vars(module).items() if isinstance(value, Tensor)]
        kept += [f"{prefix}.{name}".lstrip(".") for name in plain]
    if not kept:
        return Measured(True, "none", "none")
    where = "compute it from the positions each time, in `embed` or `hooks`"
    return Measured(False, f"it keeps the tensor {kept[0]}", "none", where)


def fast_path(subject: Subject) -> Measured:
    """The fast path in float32 is the dense path in float64, forward and backward."""
    worst = (0.0, "logits")
    for length in (77, 4 * subject.context):
        size = min(length, subject.limit or length)
        text = tokens(size + 1)
        fast, oracle = subject.model(), subject.exact()
        oracle.use_kernel(Kernel.dense)
        logits = []
        for model in (fast, oracle):
            logits.append(model(text[:, :-1]))
            token_losses(logits[-1], text[:, 1:]).mean().backward()  # type: ignore[no-untyped-call]
        scale = max(1.0, largest(logits[1]))
        worst = max(worst, (largest(logits[0].double() - logits[1]) / scale, "logits"))
        expected = dict(oracle.named_parameters())
        for name, parameter in fast.named_parameters():
            exact = expected[name].grad
            if parameter.grad is None or exact is None or not bool(exact.any()):
                continue
            error = float((parameter.grad.double() - exact).norm() / exact.norm())
            worst = max(worst, (error, f"gradient of {name}"))
    found = f"{worst[1]} off by {number(worst[0])}"
    return Measured(worst[0] <= 1e-3, found, "at most 0.001, relative")


@torch.no_grad()
def dtypes(subject: Subject) -> Measured:
    """The model's dtype comes out, and bfloat16 loses no more than bfloat16 does."""
    model = subject.fresh()
    worst = 0.0
    for length in subject.lengths:
        text = tokens(length)
        expected = model(text)
        cast = twin(model).to(torch.bfloat16)(text)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = model(text)
        for logits, dtype in ((cast, torch.bfloat16), (mixed, torch.float32)):
            if logits.dtype is not dtype:
                return Measured(False, f"logits are {_word(logits.dtype)}", _word(dtype))
            worst = max(worst, largest(logits.float() - expected))
    found = f"bfloat16 logits differ from float32 by {number(worst)}"
    return Measured(worst <= NEAR, found, f"at most {NEAR:g}")


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def trains(subject: Subject) -> Measured:
    """One step moves every value of every parameter of the encoding."""
    model = subject.model().train()
    parameters = dict(model.encoding.named_parameters())
    if not parameters:
        return Measured(True, "no parameters", "")
    before = {name: value.detach().clone() for name, value in parameters.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    text = tokens(subject.lengths[0] + 1, rows=4)
    token_losses(model(text[:, :-1]), text[:, 1:]).mean().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    for name, value in parameters.items():
        share = float((value.detach() != before[name]).float().mean())
        if share <= 0.99:
            found = f"a step moves {share:.0%} of {name}"
            where = "nothing in the loss depends on the rest: unused, detached, or past 1x"
            return Measured(False, found, "all of it", where)
    return Measured(True, f"a step moves all of {', '.join(parameters)}", "all of it")


@torch.no_grad()
def round_trip(subject: Subject) -> Measured:
    """A model of another seed with these weights loaded gives these logits."""
    model, other = subject.model(0), subject.model(1)
    saved = model.state_dict()
    other.load_state_dict(saved, strict=True)
    text = tokens(subject.lengths[0])
    difference = largest(model(text) - other(text))
    if difference:
        where = "something random is kept outside the parameters"
        return Measured(False, f"logits differ by {number(difference)}", "0, bit for bit", where)
    if subject.limit is None:
        longer = Subject(subject.config, subject.size, 4 * subject.context).fresh()
        try:
            longer.load_state_dict(saved, strict=True)
        except RuntimeError as error:
            found = str(error).splitlines()[-1].strip()
            where = "a table as long as the training length needs a max_length"
            return Measured(False, found, "same shapes at any length", where)
    return Measured(True, "logits are bit-equal", "0, bit for bit")


@torch.no_grad()
def compiles(subject: Subject) -> Measured:
    """torch.compile makes one graph of the model, with the same logits."""
    model = subject.model()
    text = tokens(subject.lengths[0])
    torch._dynamo.reset()
    try:
        logits = torch.compile(model, backend="eager", fullgraph=True)(text)
    except Exception as error:  # whatever dynamo and the plugin raise between them
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[0] if lines else type(error).__name__
        return Measured(True, f"not one graph: {reason}", "slower on CUDA", slow=True)
    difference = largest(logits - model(text))
    return Measured(
        difference <= 1e-5, f"one graph, logits differ by {number(difference)}", "at most 1e-05"
    )


def learns(subject: Subject) -> Measured:
    """Fifty steps on one batch lower its loss."""
    model = subject.fresh().train()
    losses = list(_losses(model, subject.lengths[0]))
    found = f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in {STEPS} steps"
    return Measured(losses[0] - losses[-1] >= GAIN, found, f"at least {GAIN:g} less")


def _losses(model: GPT, length: int) -> Iterator[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = tokens(length + 1, rows=4)
    for _ in range(STEPS):
        loss = token_losses(model(text[:, :-1]), text[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield loss.item()
