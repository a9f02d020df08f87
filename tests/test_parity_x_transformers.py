"""The same logits as x-transformers, whole models of equal weights: 16 of its position options.

Not among them: its per-row forget gates, which are no published scheme; posbench has GRAPE-AP.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from test_contract import CONTEXT, SIZE, VOCABULARY, tokens
from test_identities import Case, apart, drawn, model_of
from torch import Tensor

from posbench.config.encodings import (
    AlibiConfig,
    CopeConfig,
    DistanceScale,
    DpbConfig,
    FoxConfig,
    LearnedConfig,
    NoneConfig,
    PopeConfig,
    RopeConfig,
    RopePartialConfig,
    SineLayout,
    SinusoidalConfig,
    T5Config,
    XposConfig,
)
from posbench.config.extensions import NtkConfig, PiConfig
from posbench.model import GPT

pytest.importorskip("x_transformers", reason="pip install posbench[bench] compares with it")

from x_transformers import Decoder, TransformerWrapper

LENGTHS = (CONTEXT, 150)  # the longer reaches T5's last bucket and three times the training length
WIDTH, DEPTH = SIZE.width, SIZE.layers


class Theirs(NamedTuple):
    """Our case, their options, and where the encoding's own weights go in their model."""

    case: Case
    decoder: dict[str, Any] = {}  # noqa: RUF012
    wrapper: dict[str, Any] = {"use_abs_pos_emb": False}  # noqa: RUF012
    weights: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda own: {}


def attention(layer: int) -> str:
    return f"attn_layers.layers.{2 * layer}.1"


def t5(own: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"attn_layers.rel_pos.relative_attention_bias.weight": own["table.0"]}


def cope(own: dict[str, Tensor]) -> dict[str, Tensor]:
    rows = enumerate(own["vectors"])
    return {f"{attention(n)}.attend.cope.pos_emb": vectors for n, vectors in rows}


def fox(own: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for n in range(DEPTH):
        gates = f"{attention(n)}.data_dependent_alibi.to_forget_gates.0"
        found[f"{gates}.weight"], found[f"{gates}.bias"] = own["weight"][n], own["bias"][n]
    return found


def pope(own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their phases are shared by all layers; the case gives each layer of ours the same."""
    return {"attn_layers.polar_pos_emb.learned_bias": own["phases"][0].unsqueeze(1)}


def dpb(own: dict[str, Tensor], unit: float = 1.0) -> dict[str, Tensor]:
    """Their output layer has constants, one number per head, which the softmax ignores.

    A distance of ours is in training lengths, theirs in tokens: `unit` tokens.
    """
    return {
        "attn_layers.rel_pos.mlp.0.0.weight": own["into.0"] / unit,
        "attn_layers.rel_pos.mlp.0.0.bias": own["into_bias.0"],
        "attn_layers.rel_pos.mlp.1.0.weight": own["inner.0"],
        "attn_layers.rel_pos.mlp.1.0.bias": own["inner_bias.0"],
        "attn_layers.rel_pos.mlp.2.weight": own["out.0"],
        "attn_layers.rel_pos.mlp.2.bias": torch.ones(SIZE.heads),
    }


WHOLE = {"rotary_pos_emb": True, "rotary_emb_dim": SIZE.head_size}  # their default is half a head
PHASES = drawn("phases", SIZE.heads, SIZE.head_size) - 0.2  # some beyond 0, where both stop them
CASES = {
    "none": Theirs(Case(NoneConfig())),
    "learned": Theirs(
        Case(LearnedConfig()),
        wrapper={},
        # They divide by sqrt(width).
        weights=lambda own: {"pos_emb.emb.weight": own["table"] * math.sqrt(WIDTH)},
    ),
    "sinusoidal": Theirs(
        Case(SinusoidalConfig(layout=SineLayout.concat, scale=0.7)),
        wrapper={"scaled_sinu_pos_emb": True},
        weights=lambda own: {"pos_emb.scale": torch.tensor([0.7])},
    ),
    "rope": Theirs(Case(RopeConfig()), WHOLE),
    "rope_partial": Theirs(Case(RopePartialConfig()), {"rotary_pos_emb": True}),
    "rope, pi": Theirs(
        Case(RopeConfig(), {}, PiConfig(factor=4.0)), WHOLE | {"rotary_interpolation_factor": 4.0}
    ),
    "rope, ntk": Theirs(
        Case(RopeConfig(), {}, NtkConfig(factor=4.0)), WHOLE | {"rotary_base_rescale_factor": 4.0}
    ),
    # Their positions are counted from T // 2, ours from (T - 1) / 2: the same for q and k.
    "xpos": Theirs(
        Case(XposConfig(scale_base=30.0)),
        WHOLE | {"rotary_xpos": True, "rotary_xpos_scale_base": 30},
    ),
    "pope": Theirs(Case(PopeConfig(), {"phases": PHASES}), {"polar_pos_emb": True}, weights=pope),
    "alibi": Theirs(Case(AlibiConfig()), {"alibi_pos_bias": True}),
    "alibi, a free head": Theirs(
        Case(AlibiConfig(free_heads=1)), {"alibi_pos_bias": True, "alibi_num_heads": 2}
    ),
    # Both multiply the table by sqrt(head size), since q.k is divided by it.
    "t5": Theirs(Case(T5Config(max_distance=128)), {"rel_pos_bias": True}, weights=t5),
    "dpb, log": Theirs(
        Case(DpbConfig(width=WIDTH // 4)),
        {"dynamic_pos_bias": True, "dynamic_pos_bias_log_distance": True},
        weights=dpb,
    ),
    "dpb, linear": Theirs(
        Case(DpbConfig(width=WIDTH // 4, distance=DistanceScale.linear)),
        {"dynamic_pos_bias": True},
        weights=lambda own: dpb(own, CONTEXT),
    ),
    "cope": Theirs(Case(CopeConfig()), {"attn_use_cope": True}, weights=cope),
    "fox": Theirs(Case(FoxConfig()), {"attn_data_dependent_alibi": True}, weights=fox),
}


def common_weights(model: GPT) -> dict[str, Tensor]:
    """Our weights, but for the encoding's, by their names; they keep a norm's gain minus one."""
    state = model.state_dict()
    found = {
        "token_emb.emb.weight": state["embedding.weight"],
        "attn_layers.final_norm.gamma": state["norm.weight"] - 1,
    }
    for n in range(DEPTH):
        block, feed = f"blocks.{n}", f"attn_layers.layers.{2 * n + 1}"
        projections = state[f"{block}.attention.qkv.weight"].chunk(3)
        for name, weight in zip(("to_q", "to_k", "to_v"), projections, strict=True):
            found[f"{attention(n)}.{name}.weight"] = weight
        found[f"{attention(n)}.to_out.weight"] = state[f"{block}.attention.out.weight"]
        found[f"attn_layers.layers.{2 * n}.0.0.gamma"] = state[f"{block}.norm1.weight"] - 1
        found[f"{feed}.0.0.gamma"] = state[f"{block}.norm2.weight"] - 1
        found[f"{feed}.1.ff.0.0.weight"] = state[f"{block}.mlp.into.weight"]
        found[f"{feed}.1.ff.2.weight"] = state[f"{block}.mlp.out.weight"]
    return found


def their_model(model: GPT, case: Theirs) -> TransformerWrapper:
    """x-transformers' model with the weights of ours; no parameter of theirs stays as it was."""
    decoder = Decoder(
        dim=WIDTH,
        depth=DEPTH,
        heads=SIZE.heads,
        attn_dim_head=SIZE.head_size,
        ff_no_bias=True,
        verbose=False,
        **case.decoder,
    )
    theirs = TransformerWrapper(
        num_tokens=VOCABULARY,
        max_seq_len=CONTEXT,
        tie_embedding=True,
        tie_embedding_scale=1.0,
        attn_layers=decoder,
        **case.wrapper,
    )
    weights = common_weights(model) | case.weights(model.encoding.state_dict())
    assert set(weights) == {name for name, _ in theirs.named_parameters()}
    theirs.load_state_dict(weights, strict=False)  # frequencies and slopes are buffers of theirs
    return theirs.eval()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_logits(name: str, length: int) -> None:
    case = CASES[name]
    model = model_of(case.case)
    if model.encoding.max_length is not None:
        length = min(length, model.encoding.max_length)
    text = tokens(length)
    assert apart(model(text), their_model(model, case)(text)) < 1e-4
