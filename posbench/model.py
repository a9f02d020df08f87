"""A pre-norm decoder-only transformer that knows its encoding only through the contract.

Shapes: B batch, T tokens, C width, H heads, D head size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posbench.attention import Kernel, attend, choose, weights
from posbench.config import Mlp, ModelConfig, Norm
from posbench.config.encodings import EncodingConfig
from posbench.config.policies import Policies
from posbench.encodings import Encoding, Hooks, Shape, build
from posbench.encodings.policies import governed
from posbench.encodings.seeds import seeded
from posbench.errors import UnsupportedError

Look = Callable[[int, Tensor, Tensor], None]

INIT_STD = 0.02
IGNORED = -100  # a target that costs nothing; torch's own number for it


def _norm(kind: Norm, width: int) -> nn.Module:
    return nn.LayerNorm(width, bias=False) if kind is Norm.layernorm else nn.RMSNorm(width)


class Attention(nn.Module):
    """Multi-head causal self-attention; the encoding's hooks say what position does."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.q_norm = _norm(config.norm, config.head_size) if config.qk_norm else nn.Identity()
        self.k_norm = _norm(config.norm, config.head_size) if config.qk_norm else nn.Identity()
        self.kernel: Kernel | None = None  # None: the fastest exact one; tests set the oracle's

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, H, T, D], before the encoding acts on them."""
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        return self.q_norm(q), self.k_norm(k), v

    def forward(self, x: Tensor, encoding: Encoding, positions: Tensor, layer: int) -> Tensor:
        B, T, C = x.shape
        hooks = encoding.hooks(x, positions, layer)
        mixed = attend(*self.project(x), hooks, self.kernel)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(B, T, C))
        return out


class GeluMlp(nn.Module):
    """Feed-forward layer with exact GELU, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(width, 4 * width, bias=False)
        self.out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(F.gelu(self.into(x)))
        return out


class SwigluMlp(nn.Module):
    """Gated feed-forward layer (Shazeer 2020), narrower inside for as many parameters as GELU's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 8 * width // 3
        self.into = nn.Linear(width, 2 * inner, bias=False)
        self.out = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.into(x).chunk(2, dim=-1)
        out: Tensor = self.out(value * F.silu(gate))
        return out


class Block(nn.Module):
    """Attention, then feed-forward, each on the normalised stream and added to it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm1 = _norm(config.norm, config.width)
        self.attention = Attention(config)
        self.norm2 = _norm(config.norm, config.width)
        self.mlp = GeluMlp(config.width) if config.mlp is Mlp.gelu else SwigluMlp(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, encoding: Encoding, positions: Tensor, layer: int) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), encoding, positions, layer))
        out: Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return out


class LanguageModel(nn.Module):
    """Token ids [B, T] to next-token logits [B, T, V], in two steps.

    The head is most of the memory, and may be applied to some positions at a time. What is
    evaluated has an encoding, which says how far it goes; those that can show their attention
    override `watched`.
    """

    encoding: Encoding
    vocabulary: int

    def features(
        self, tokens: Tensor, positions: Tensor | None = None, last: int | None = None
    ) -> Tensor:
        """What the logits are made from [B, T, C]; with `last`, that of the last tokens alone.

        `positions` [T] are 0..T-1 unless given.
        """
        raise NotImplementedError

    def logits(self, features: Tensor) -> Tensor:
        """Logits [B, T, V]; a model without a head gives them as its features."""
        return features

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, last: int | None = None
    ) -> Tensor:
        """Logits [B, T, V], or [B, last, V] of the last tokens alone."""
        return self.logits(self.features(tokens, positions, last))

    def watched(self, look: Look) -> contextlib.AbstractContextManager[None]:
        """Inside, `look(layer, rows [R], shares [B, H, R, S])` sees where each layer attends.

        Shares are the softmax weights of query rows R over all keys. Raises UnsupportedError for a
        model that forms none.
        """
        raise NotImplementedError


class GPT(LanguageModel):
    """A decoder of pre-normalised blocks with one positional encoding."""

    def __init__(self, config: ModelConfig, encoding: Encoding, vocabulary: int) -> None:
        super().__init__()
        self.config = config
        self.vocabulary = vocabulary
        self.embedding = nn.Embedding(vocabulary, config.width)
        self.encoding = encoding
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = _norm(config.norm, config.width)
        self.head = None if config.tied else nn.Linear(config.width, vocabulary, bias=False)

    def features(
        self, tokens: Tensor, positions: Tensor | None = None, last: int | None = None
    ) -> Tensor:
        """The normalised stream after the last block."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.encoding.embed(self.embedding(tokens), positions))
        for layer, block in enumerate(self.blocks):
            x = block(x, self.encoding, positions, layer)
        normalised: Tensor = self.norm(x if last is None else x[:, -last:])
        return normalised

    def logits(self, features: Tensor) -> Tensor:
        """In evaluation with the weights' precision, whatever the autocast around them."""
        weight = self.embedding.weight if self.head is None else self.head.weight
        if self.training:
            return F.linear(features, weight)
        with torch.autocast(features.device.type, enabled=False):
            return F.linear(features.to(weight.dtype), weight)

    def use_kernel(self, kernel: Kernel | None) -> None:
        """Compute every attention layer with `kernel`; None returns to the fastest exact one."""
        for block in self.blocks:
            assert isinstance(block, Block)
            block.attention.kernel = kernel

    @contextlib.contextmanager
    def watched(self, look: Look) -> Iterator[None]:
        """See LanguageModel. UnsupportedError for an encoding whose kernel forms no scores."""
        if any(each.attend for each in self._hooks()):
            raise UnsupportedError(
                f"{self.encoding.config.name} has a kernel of its own, which forms no attention "
                "scores"
            )

        def seen(module: nn.Module, given: tuple[Tensor, Encoding, Tensor, int]) -> None:
            assert isinstance(module, Attention)
            x, encoding, positions, layer = given
            q, k, _ = module.project(x)
            for rows, shares in weights(q, k, encoding.hooks(x, positions, layer)):
                look(layer, rows, shares)

        blocks = [block for block in self.blocks if isinstance(block, Block)]
        handles = [block.attention.register_forward_pre_hook(seen) for block in blocks]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def kernels(self, device: str) -> list[Kernel]:
        """The kernel of each layer on a device type, for the record."""
        return [choose(each, device, self.config.head_size) for each in self._hooks()]

    def _hooks(self) -> list[Hooks]:
        """What each layer does with position, from a text of two tokens."""
        x = self.embedding.weight.new_zeros(1, 2, self.config.width)
        positions = torch.arange(2, device=x.device)
        with torch.no_grad():
            return [self.encoding.hooks(x, positions, layer) for layer in range(self.config.layers)]


def build_model(
    config: ModelConfig,
    encoding: EncodingConfig,
    context: int,
    vocabulary: int,
    seed: int,
    policies: Policies | None = None,
) -> GPT:
    """The model with its initial weights, float32 on the CPU.

    Every parameter is drawn from a generator seeded by (seed, its name): weights that are not the
    encoding's are bit-equal across encodings, so comparisons with one seed are paired.
    """
    built = build_encoding(config, encoding, context, policies or Policies())
    model = GPT(config, built, vocabulary)
    initialise(model, seed)
    return model


def build_encoding(
    config: ModelConfig, encoding: EncodingConfig, context: int, policies: Policies
) -> Encoding:
    """The encoding of a model of this size under `policies`, with no weights yet."""
    return governed(build(encoding, shape_of(config, context, policies)), policies)


def shape_of(config: ModelConfig, context: int, policies: Policies | None = None) -> Shape:
    """What an encoding may know of a model of this size trained at `context` tokens."""
    below = None if policies is None else policies.drawn_below(context)
    return Shape(config.layers, config.heads, config.head_size, config.width, context, below)


def initialise(model: GPT, seed: int) -> None:
    """GPT-2's initialisation: normal weights, smaller into the residual stream by its depth."""
    residual = INIT_STD / math.sqrt(2 * model.config.layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("encoding."):
                continue
            if parameter.dim() < 2:
                parameter.fill_(1.0)
                continue
            std = residual if name.endswith(".out.weight") else INIT_STD
            parameter.normal_(0.0, std, generator=seeded(seed, name))
        model.encoding.initialise(lambda name: seeded(seed, f"encoding.{name}"))


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood in nats of each target [B, T], from float32 logits; 0 if IGNORED."""
    exact = logits.double() if logits.dtype is torch.float64 else logits.float()
    flat = F.cross_entropy(
        exact.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED
    )
    return flat.view_as(targets)


def decay_groups(model: GPT) -> tuple[list[str], list[str]]:
    """Names of the parameters that weight decay shrinks, and of those that it leaves alone.

    Decayed: matrices that multiply activations. Not decayed: norms, the token table and whatever
    belongs to the encoding, where a pull towards zero would change what is compared.
    """
    decayed: list[str] = []
    kept: list[str] = []
    for name, parameter in model.named_parameters():
        is_table = name.startswith(("embedding.", "encoding."))
        (kept if is_table or parameter.dim() < 2 else decayed).append(name)
    return decayed, kept


def flops_per_token(model: GPT, length: int) -> int:
    """Training FLOPs per token, 6 N + 12 layers C T (PaLM, app. B), full square attention."""
    config = model.config
    own = sum(p.numel() for n, p in model.named_parameters() if not n.startswith("encoding."))
    matrices = own if config.tied else own - model.embedding.weight.numel()
    return 6 * matrices + 12 * config.layers * config.width * length
