"""What a run needs, without running it: parameters, floating-point operations, memory, disk.

Parameters are counted and floating-point operations are the field's own formula. Memory is an
estimate: tensors alive at once are counted on small copies of the model, of one and two layers and
a few short texts, and carried on to its true size; a third is added for what is not seen. Measured
on a CPU at width 256, most schemes came out within a third of it; those whose scores are made in
causal chunks take up to half less.
"""

from __future__ import annotations

import contextlib
import os
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from posbench.attention import SCORES_PER_CHUNK, Kernel, choose
from posbench.config import TrainSettings
from posbench.config.policies import policies_of
from posbench.encodings import Encoding
from posbench.encodings.seeds import seeded
from posbench.model import GPT, build_encoding, flops_per_token, token_losses

PROCESS_BYTES = 400 << 20  # Python and PyTorch, before any tensor
RECORD_BYTES = 400  # a logged step in metrics.jsonl and in TensorBoard's file
LONGEST_PROBE = 96  # tokens
UNSEEN = (
    1.3  # what kernels use inside, and what the allocator keeps, over the tensors that are seen
)


@dataclass(frozen=True)
class Growth:
    """Bytes of tensors alive at once, beside weights, for B texts of T tokens.

    per_token B T + per_pair B T^2 + shared_token T + shared_pair T^2: no term falls as B or T grow.
    """

    per_token: float
    per_pair: float
    shared_token: float
    shared_pair: float

    def bytes(self, sequences: int, length: int, most_pairs: float = float("inf")) -> int:
        """The sum; of the terms in pairs, no more than for `most_pairs` pairs."""
        pairs, shared = min(sequences * length**2, most_pairs), min(length**2, most_pairs)
        of_tokens = (self.per_token * sequences + self.shared_token) * length
        return round(of_tokens + self.per_pair * pairs + self.shared_pair * shared)

    def carried_on(self, two: Growth, layers: int) -> Growth:
        """This is a model of one layer: what one of `layers` has, if each adds as the second."""
        one, other = np.array(list(vars(self).values())), np.array(list(vars(two).values()))
        return Growth(*(one + (layers - 1) * np.maximum(other - one, 0)).tolist())


@dataclass(frozen=True)
class Anatomy:
    """A model's counts, and how its memory grows."""

    parameters: int
    encoding_parameters: int
    embedding_parameters: int  # token table, and the head where it is not tied to it
    layers: int
    width: int
    heads: int
    kernels: tuple[Kernel, ...]  # of each layer
    training_flops_per_token: int  # at the training length
    kept: Growth  # of what a forward pass leaves for the backward pass
    held: Growth  # of what a pass without gradients holds at its fullest

    @property
    def non_embedding_parameters(self) -> int:
        """All but the token table, the output head, and the encoding's own."""
        return self.parameters - self.embedding_parameters - self.encoding_parameters

    def forward_flops_per_token(self, train_length: int, length: int) -> int:
        """2 N + 4 layers C T: a third of training's, at another length."""
        at_training = self.training_flops_per_token // 3
        return at_training + 4 * self.layers * self.width * (length - train_length)

    def training_bytes(self, sequences: int, length: int) -> int:
        """Estimated peak of tensors in a step on `sequences` texts of `length` tokens at once.

        Weights, gradients and AdamW's two moments in float32, what the forward pass leaves, and
        as much again for one layer's backward pass as its forward pass holds.
        """
        work = self.kept.bytes(sequences, length) + self.held.bytes(sequences, length)
        return 16 * self.parameters + round(UNSEEN * work)

    def evaluation_bytes(self, sequences: int, length: int) -> int:
        """Estimated peak of tensors in a pass without gradients; scores are made in chunks then."""
        most = SCORES_PER_CHUNK / self.heads
        return 4 * self.parameters + round(UNSEEN * self.held.bytes(sequences, length, most))


def anatomy(
    settings: TrainSettings,
    vocabulary: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Anatomy:
    """The model of `settings`, looked at without making it.

    `device` is the type it would run on, `dtype` that of its matrix products in training.
    """
    encoding = _encoding(settings)
    with torch.device("meta"):
        model = GPT(settings.model, encoding, vocabulary)
    kernels = _kernels(settings, encoding, device)
    embeddings = model.embedding.weight.numel() * (1 if settings.model.tied else 2)
    return Anatomy(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        encoding_parameters=encoding.parameter_count(),
        embedding_parameters=embeddings,
        layers=settings.model.layers,
        width=settings.model.width,
        heads=settings.model.heads,
        kernels=kernels,
        training_flops_per_token=flops_per_token(model, settings.context),
        kept=_kept_growth(settings, vocabulary, kernels, dtype),
        held=_held_growth(settings, vocabulary, kernels),
    )


def _encoding(settings: TrainSettings) -> Encoding:
    encoding = build_encoding(
        settings.model, settings.encoding, settings.context, policies_of(settings)
    )
    with torch.no_grad():
        encoding.initialise(lambda name: seeded(settings.seed, name))
    return encoding


def _kernels(settings: TrainSettings, encoding: Encoding, device: str) -> tuple[Kernel, ...]:
    x, positions = torch.zeros(1, 2, settings.model.width), torch.arange(2)
    with torch.no_grad():
        hooks = [encoding.hooks(x, positions, n) for n in range(settings.model.layers)]
    return tuple(choose(each, device, settings.model.head_size) for each in hooks)


# ---------------------------------------------------------------- memory, counted on small copies


class _Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, `now` is how many bytes of new tensors are alive, and `peak` the most so far."""

    def __init__(self, model: GPT) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now: int = 0
        self.peak: int = 0
        self._known = {weight.untyped_storage()._cdata for weight in model.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _kept_growth(
    settings: TrainSettings, vocabulary: int, kernels: tuple[Kernel, ...], dtype: torch.dtype
) -> Growth:
    """Of what a forward pass leaves for the backward pass."""

    def kept(model: GPT, tokens: Tensor) -> int:
        half = dtype is not torch.float32
        with _Alive(model) as alive:
            with torch.autocast("cpu", dtype=dtype) if half else contextlib.nullcontext():
                logits = model(tokens)
            loss = token_losses(logits, tokens).mean()
        del logits
        assert loss.requires_grad  # it holds all that is alive now
        return int(alive.now)

    one, two = (
        _fitted(_small_model(settings, vocabulary, kernels, n).train(), settings.context, kept)
        for n in (1, 2)
    )
    return one.carried_on(two, settings.model.layers)


def _held_growth(settings: TrainSettings, vocabulary: int, kernels: tuple[Kernel, ...]) -> Growth:
    """Of what a pass without gradients holds at its fullest, one layer at a time."""

    def held(model: GPT, tokens: Tensor) -> int:
        with torch.inference_mode(), _Alive(model) as alive:
            model(tokens, last=1)
        return int(alive.peak)

    model = _small_model(settings, vocabulary, kernels, 1).eval()
    return _fitted(model, settings.context, held)


def _small_model(
    settings: TrainSettings, vocabulary: int, kernels: tuple[Kernel, ...], layers: int
) -> GPT:
    """The model with so few layers, all of them with the encoding."""
    small = replace(settings, model=replace(settings.model, layers=layers))
    model = GPT(small.model, _encoding(small), vocabulary)
    if Kernel.flex in kernels:  # needs a GPU; it keeps as little as the plain fused kernel
        model.use_kernel(Kernel.sdpa)
    return model


def _fitted(model: GPT, context: int, count: Callable[[GPT, Tensor], int]) -> Growth:
    """How `count` of bytes grows with texts and tokens, each coefficient at least zero."""
    from scipy.optimize import nnls

    rows, counts = [], []
    for sequences, length in _probes(context):
        tokens = torch.zeros(sequences, length, dtype=torch.long)
        rows.append([sequences * length, sequences * length**2, length, length**2, 1])
        counts.append(count(model, tokens))
    scale = np.max(rows, axis=0)
    fitted, _ = nnls(np.array(rows) / scale, np.array(counts, dtype=float))
    return Growth(*(fitted / scale)[:4].tolist())  # what does not grow is small


def _probes(context: int) -> Iterator[tuple[int, int]]:
    """Texts, tokens: within the training length, which a scheme may end at."""
    longest = min(LONGEST_PROBE, context)
    for length in sorted({max(2, longest // 3), max(2, 2 * longest // 3), longest}):
        yield from ((1, length), (3, length))


# ---------------------------------------------------------------- disk, and what is free


def run_bytes(model: Anatomy, settings: TrainSettings) -> int:
    """Bytes of a run's folder at its fullest: checkpoints (one more while saving), records.

    A checkpoint holds weights and AdamW's two moments in float32.
    """
    train = settings.train
    kept = 1 if train.checkpoint_every is None else train.keep_checkpoints
    records = RECORD_BYTES * (train.steps // train.log_every + 12)
    return 12 * model.parameters * (kept + 1) + records


def free_memory(device: torch.device) -> int:
    """Bytes a new process could have: of the GPU, or of this machine within a container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_free_ram(), _container_room())


def _free_ram() -> int:
    try:
        text = Path("/proc/meminfo").read_text()
        found = re.search(r"MemAvailable:\s+(\d+) kB", text)
        if found:
            return int(found[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _container_room(folder: Path = Path("/sys/fs/cgroup")) -> int:
    """What is left of a container's limit, with the file cache that the kernel gives back."""
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        cache = re.search(r"^inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.M)
    except (OSError, ValueError):  # no such file, or "max"
        return 1 << 62
    return max(0, limit - used + (int(cache[1]) if cache else 0))
