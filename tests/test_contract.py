"""Every promise of the Encoding contract, for every encoding in the table.

A new scheme is tested by being listed in posbench.encodings.CLASSES; nothing here names one but
VARIANTS, which adds settings that change what a scheme does.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import hashlib
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from posbench.attention import Kernel, attend, score_rows
from posbench.catalog import ENCODING_CARDS, POLICY_CARDS, EncodingCard
from posbench.config import ModelConfig
from posbench.config.encodings import (
    ENCODINGS,
    AlibiConfig,
    AlibiLearnedConfig,
    DapeBase,
    DapeConfig,
    DistanceScale,
    DpbConfig,
    EncodingConfig,
    FireConfig,
    FopeConfig,
    FoxConfig,
    KerpleLogConfig,
    KerplePowerConfig,
    Layout,
    NoneConfig,
    PopeConfig,
    RopeConfig,
    RopePartialConfig,
    RopePConfig,
    SineLayout,
    SinusoidalConfig,
    StickbreakConfig,
    T5Config,
    XposConfig,
)
from posbench.config.extensions import (
    EXTENSIONS,
    AbfConfig,
    AlibiPiConfig,
    DynamicNtkConfig,
    ExtensionConfig,
    LeakyReropeConfig,
    Llama3Config,
    LmInfiniteConfig,
    LongropeConfig,
    NoExtensionConfig,
    NtkByPartsConfig,
    NtkConfig,
    PiConfig,
    ReropeConfig,
    SelfExtendConfig,
    StreamingConfig,
    YarnConfig,
)
from posbench.config.policies import PRESETS, Policies, Temperature
from posbench.encodings import CLASSES, Encoding, Hooks
from posbench.errors import UnsupportedError
from posbench.model import GPT, build_encoding, build_model, token_losses

CONTEXT = 48  # training length; no power of two
VOCABULARY = 61
SIZE = ModelConfig(layers=2, width=48, heads=3)  # as many heads as nothing else is long
FAR = 65_536


class Case(NamedTuple):
    """An encoding with its settings, as it trains or as an extension evaluates it."""

    config: EncodingConfig
    extension: ExtensionConfig = NoExtensionConfig()
    policies: Policies = Policies()


VARIANTS = {
    "sinusoidal_concat": Case(SinusoidalConfig(layout=SineLayout.concat, scale=1.0)),
    "alibi_free": Case(AlibiConfig(free_heads=1)),
    "alibi_learned_per_layer": Case(AlibiLearnedConfig(share_layers=False)),
    "t5_per_layer": Case(T5Config(buckets=16, max_distance=40, scale=1.0, share_layers=False)),
    "kerple_log_per_layer": Case(KerpleLogConfig(share_layers=False)),
    "kerple_power_per_layer": Case(KerplePowerConfig(share_layers=False)),
    "dpb_linear": Case(DpbConfig(distance=DistanceScale.linear, share_layers=False)),
    "fire_shared": Case(FireConfig(threshold=20.0, share_layers=True)),
    "rope_half": Case(RopeConfig(layout=Layout.half)),
    "rope_pi": Case(RopeConfig(), PiConfig()),
    "rope_ntk": Case(RopeConfig(), NtkConfig()),
    "rope_dynamic_ntk": Case(RopeConfig(), DynamicNtkConfig()),
    "rope_ntk_by_parts": Case(RopeConfig(), NtkByPartsConfig()),
    "rope_yarn": Case(RopeConfig(), YarnConfig()),
    "rope_yarn_fixed": Case(RopeConfig(layout=Layout.half), YarnConfig(factor=4.0)),
    "rope_llama3": Case(RopeConfig(), Llama3Config()),
    "rope_abf_at_evaluation": Case(RopeConfig(), AbfConfig()),
    "rope_longrope": Case(RopeConfig(), LongropeConfig(factors=[1, 1, 1.5, 2, 3, 4, 5, 5])),
    "rope_rerope": Case(RopeConfig(), ReropeConfig()),
    "rope_leaky_rerope": Case(RopeConfig(layout=Layout.half), LeakyReropeConfig(logn=False)),
    "rope_self_extend": Case(RopePartialConfig(), SelfExtendConfig(group=7)),  # 1000 is no multiple
    "rope_lm_infinite": Case(RopeConfig(), LmInfiniteConfig(window=20)),
    "rope_streaming": Case(RopePartialConfig(layout=Layout.half), StreamingConfig(window=20)),
    "rope_p_no_sinks": Case(RopePConfig(), StreamingConfig(sinks=0, window=20)),
    "none_lm_infinite": Case(NoneConfig(), LmInfiniteConfig(window=20)),
    "none_streaming": Case(NoneConfig(), StreamingConfig(window=20)),
    "alibi_lm_infinite": Case(AlibiConfig(), LmInfiniteConfig(window=20)),
    "alibi_streaming": Case(AlibiConfig(), StreamingConfig(window=20)),
    "alibi_no_sinks": Case(AlibiConfig(), StreamingConfig(sinks=0, window=20)),
    "rnope_streaming": Case(RopeConfig(), StreamingConfig(window=20), Policies(layers="every2nd")),
    "none_logn_streaming": Case(
        NoneConfig(), StreamingConfig(window=20), Policies(temperature=Temperature.logn)
    ),
    "t5_streaming": Case(T5Config(), StreamingConfig(window=20)),
    "dpb_lm_infinite": Case(DpbConfig(), LmInfiniteConfig(window=20)),
    "alibi_pi": Case(AlibiConfig(), AlibiPiConfig()),
    "alibi_learned_pi": Case(AlibiLearnedConfig(share_layers=False), AlibiPiConfig(factor=4.0)),
    "rope_global": Case(RopeConfig(global_theta=1e6, global_every=2)),
    "rope_p_global_yarn": Case(RopePConfig(global_theta=3e5, global_every=2), YarnConfig()),
    "rope_global_rerope": Case(RopeConfig(global_theta=1e6, global_every=2), ReropeConfig()),
    "fope_half_yarn": Case(FopeConfig(layout=Layout.half, seed=3), YarnConfig()),
    "fope_without_series": Case(FopeConfig(gain=0.0)),
    "rope_p_yarn": Case(RopePConfig(), YarnConfig()),
    "xpos_half_pi": Case(XposConfig(layout=Layout.half), PiConfig(factor=4.0)),
    "pope_yarn": Case(PopeConfig(), YarnConfig()),
    "fox_remembering": Case(FoxConfig(gate_bias=3.0)),
    "dape_alibi": Case(DapeConfig(base=DapeBase.alibi)),
    "stickbreak_remainder": Case(StickbreakConfig(remainder=True)),
    "alibi_window": Case(AlibiConfig(), policies=Policies(window=13)),
    "fire_window": Case(FireConfig(), policies=Policies(window=13)),
    "path_window": Case(ENCODINGS["path"](), policies=Policies(window=13)),
    "stickbreak_window": Case(StickbreakConfig(), policies=Policies(window=13)),
    "alibi_logn": Case(AlibiConfig(), policies=Policies(temperature=Temperature.logn)),
    "rope_yarn_temperature": Case(RopeConfig(), PiConfig(), Policies(temperature=Temperature.yarn)),
    "stickbreak_ssmax": Case(StickbreakConfig(), policies=Policies(temperature=Temperature.ssmax)),
}


def preset_case(name: str) -> Case:
    """A preset in a model of two layers, where each second one stands for each fourth."""
    policies = PRESETS[name].at(CONTEXT)
    if policies.layers != "all":
        policies = dataclasses.replace(policies, layers="every2nd")
    return Case(ENCODINGS[PRESETS[name].encoding](), policies=policies)


PRESET_CASES = {name: preset_case(name) for name in PRESETS}
CASES = {name: Case(ENCODINGS[name]()) for name in CLASSES} | PRESET_CASES | VARIANTS
TRAINABLE = [name for name, case in CASES.items() if isinstance(case.extension, NoExtensionConfig)]

# Their networks bend at zero: float32 puts a unit near it on the other side than float64 does.
BENT = {"dape", "dape_v2", "fire"}

every = pytest.mark.parametrize("name", CASES)
every_trainable = pytest.mark.parametrize("name", TRAINABLE)


def make(name: str, seed: int = 0, **size: Any) -> GPT:
    """The case's model; weights large enough that attention does something, none of them zero."""
    case = CASES[name]
    model = build_model(
        dataclasses.replace(SIZE, **size), case.config, CONTEXT, VOCABULARY, seed, case.policies
    )
    model.encoding.extend(case.extension)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.std() < 0.05:  # not those of unit size already
                parameter.mul_(8)
            if not parameter.any():  # a scheme that starts at zero would do nothing, leak included
                parameter.normal_(0.0, 0.5, generator=torch.Generator().manual_seed(seed))
    return model.eval()


def lengths(model: GPT) -> list[int]:
    """1x and 4x the training length, or what the encoding states as its maximum."""
    limit = model.encoding.max_length
    return sorted({min(n, limit or n) for n in (CONTEXT, 4 * CONTEXT)})


def tokens(length: int, rows: int = 2) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(5))


def without_encoding(model: GPT) -> str:
    """SHA-256 over names and bytes of every weight that is not the encoding's."""
    digest = hashlib.sha256()
    for key, value in sorted(model.state_dict().items()):
        if not key.startswith("encoding."):
            digest.update(key.encode() + value.numpy().tobytes())
    return digest.hexdigest()


# ---------------------------------------------------------------- the tables agree


def test_every_encoding_has_a_class_a_config_and_a_card() -> None:
    assert set(CLASSES) == set(ENCODINGS) == {card.id for card in ENCODING_CARDS}
    for name, config in ENCODINGS.items():
        assert config().name == name


def test_every_preset_has_a_card() -> None:
    assert [card.id for card in POLICY_CARDS] == list(PRESETS)


def test_every_extension_of_the_table_is_tested_here() -> None:
    assert {case.extension.name for case in CASES.values()} == set(EXTENSIONS)


# ---------------------------------------------------------------- what a logit depends on


@every
@torch.no_grad()
def test_causal(name: str) -> None:
    model = make(name)
    for length in lengths(model):
        text = tokens(length)
        before = model(text)
        for changed in (1, length // 2, length - 1):
            other = text.clone()
            other[:, changed] = (other[:, changed] + 1) % VOCABULARY
            after = model(other)
            torch.testing.assert_close(before[:, :changed], after[:, :changed], rtol=0, atol=1e-6)
            assert (before[:, changed] - after[:, changed]).abs().max() > 1e-3
            following = slice(min(changed + 1, length - 1), None)  # a forgetful one loses sight
            assert (before[:, following] - after[:, following]).abs().max() > 1e-6


@every
@torch.no_grad()
def test_order_of_the_past_matters(name: str) -> None:
    """What tells positions apart at all: swapping two earlier tokens changes later logits."""
    model = make(name)
    text = tokens(CONTEXT)
    text[:, 3], text[:, 20] = 1, 2
    swapped = text.clone()
    swapped[:, 3], swapped[:, 20] = 2, 1
    assert (model(text)[:, 21:] - model(swapped)[:, 21:]).abs().max() > 1e-4


@every
@torch.no_grad()
def test_shift_of_all_positions(name: str) -> None:
    """Same logits where the scheme is relative or has no positions; other ones where not."""
    model = make(name)
    limit = model.encoding.max_length
    length = CONTEXT if limit is None else limit // 2
    shift = 1000 if limit is None else limit - length
    positions = torch.arange(length)
    text = tokens(length)
    position_free = CASES[name] == Case(NoneConfig())
    single = (model(text, positions) - model(text, positions + shift)).abs().max().item()
    model = model.double()
    double = (model(text, positions) - model(text, positions + shift)).abs().max().item()
    if model.encoding.relative or position_free:
        assert double <= 1e-9
        assert single <= 1e-4
    else:
        assert double > 1e-3


@every
@torch.no_grad()
def test_the_first_logits_do_not_depend_on_the_length(name: str) -> None:
    """Equal at T and 2T where the scheme says so, and not where it says no."""
    model = make(name)
    limit = model.encoding.max_length
    short = CONTEXT if limit is None else limit // 2
    text = tokens(2 * short)
    difference = (model(text)[:, :short] - model(text[:, :short])).abs().max()
    if model.encoding.prefix_consistent:
        assert difference <= 2e-5
    else:
        assert difference > 1e-3


# ---------------------------------------------------------------- fast paths and numbers


@every
@pytest.mark.parametrize("length", [77, 200])
def test_fast_path_is_the_dense_oracle_forward_and_gradient(name: str, length: int) -> None:
    fast = make(name)
    if fast.encoding.max_length is not None:
        length = min(length, fast.encoding.max_length)
    oracle = copy.deepcopy(fast).double()
    oracle.use_kernel(Kernel.dense)
    text = tokens(length + 1)
    results = []
    for model in (fast, oracle):
        logits = model(text[:, :-1])
        token_losses(logits, text[:, 1:]).mean().backward()
        results.append(logits)
    torch.testing.assert_close(results[0].double(), results[1], rtol=1e-3, atol=1e-3)
    expected = dict(oracle.named_parameters())
    for key, parameter in fast.named_parameters():
        assert parameter.grad is not None, key
        exact = expected[key].grad
        assert exact is not None
        error = (parameter.grad.double() - exact).norm() / exact.norm()
        assert exact.norm() > 0, key
        assert error < (3e-3 if CASES[name].config.name in BENT else 1e-4), (key, error)


class Observed(NamedTuple):
    """What an encoding feeds into a model at some positions, in float64."""

    embedded: Tensor  # [T, C], what is added to the token embeddings
    turned: Tensor  # [T, D], a query of ones after `rotate`
    bias: Tensor  # [H, T], scores of the last query with every key, for q = k = 0


@torch.no_grad()
def observe(encoding: Encoding, positions: Tensor, dtype: torch.dtype) -> Observed:
    """The tables behind the hooks, from cos and sin themselves: q and k are float32 or float64."""
    x = torch.zeros(1, len(positions), SIZE.width, dtype=dtype)
    hooks = encoding.hooks(x, positions, 0)
    exact = torch.float64 if dtype is torch.float64 else torch.float32
    ones = torch.ones(1, SIZE.heads, len(positions), SIZE.head_size, dtype=exact)
    turned, bias = ones, torch.zeros(SIZE.heads, len(positions), dtype=exact)
    if hooks.rotate is not None:
        turned, _ = hooks.rotate(ones, ones)
    if hooks.distance_bias is not None or hooks.score_mod is not None:
        nothing = torch.zeros(1, SIZE.heads, len(positions), SIZE.head_size, dtype=exact)
        only_bias = Hooks(distance_bias=hooks.distance_bias, score_mod=hooks.score_mod)
        with torch.autocast("cpu", enabled=False):  # as `attend` calls them
            bias = score_rows(nothing, nothing, only_bias, [len(positions) - 1])[0][0]
    assert turned.dtype is exact
    assert bias.dtype is exact
    embedded = encoding.embed(x, positions)[0]
    return Observed(embedded.double(), turned[0, 0].double(), bias.double())


@every
@pytest.mark.parametrize("how", ["float32", "bfloat16", "float16", "autocast"])
def test_tables_are_exact_whatever_the_dtype(name: str, how: str) -> None:
    """cos, sin and slopes in a cast model and under autocast, up to position 65,536."""
    model = make(name)
    limit = model.encoding.max_length
    positions = torch.arange(FAR + 1 if limit is None else limit)
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(how, torch.float32)
    cast = copy.deepcopy(model).to(dtype)
    # What is trained is rounded by the cast; what is computed from it must not be.
    reference = observe(copy.deepcopy(cast).double().encoding, positions, torch.float64)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        found = observe(cast.encoding, positions, dtype)
    # Relative to the vector: xpos makes it long far from the middle of the text.
    size = reference.turned.norm(dim=-1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(found.turned / size, reference.turned / size, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.bias, reference.bias, rtol=1e-6, atol=1e-6)
    # An embedding is of the model's own dtype; one rounding of it is all that may be lost.
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(found.embedded, reference.embedded, rtol=rounding, atol=rounding)


def moves(tables: Observed) -> Tensor:
    """Whether each row differs from the one before it, [T - 1]."""
    rows = torch.cat((tables.embedded, tables.turned, tables.bias.T), dim=1)
    return (rows[1:] != rows[:-1]).any(dim=1)


@every
@pytest.mark.parametrize("autocast", [False, True])
def test_neighbouring_positions_differ_in_a_bfloat16_model(name: str, autocast: bool) -> None:
    """Integers above 256 are not bfloat16 numbers: tables of rounded positions repeat rows.

    They may repeat only where exact tables do: within a bucket of distances, say.
    """
    model = make(name)
    if not autocast:
        model = model.to(torch.bfloat16)
    dtype = torch.float32 if autocast else torch.bfloat16
    limit = model.encoding.max_length
    positions = torch.arange(FAR + 1 if limit is None else limit)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = observe(model.encoding, positions, dtype)
    exact = observe(copy.deepcopy(model).double().encoding, positions, torch.float64)
    assert torch.equal(moves(found), moves(exact))


@every
@torch.no_grad()
def test_bfloat16_and_autocast_stay_near_float32(name: str) -> None:
    """Nothing blows up at any length: the model itself loses what bfloat16 loses, no more."""
    case = CASES[name]
    model = build_model(SIZE, case.config, CONTEXT, VOCABULARY, 0, case.policies).eval()
    model.encoding.extend(case.extension)
    for length in lengths(model):
        text = tokens(length)
        expected = model(text)
        cast = copy.deepcopy(model).to(torch.bfloat16)(text)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = model(text)
        assert cast.dtype is torch.bfloat16
        assert mixed.dtype is torch.float32  # the head of an evaluation leaves autocast
        assert (cast.float() - expected).abs().max() < 0.03
        assert (mixed.float() - expected).abs().max() < 0.03


@every
def test_no_buffers(name: str) -> None:
    """A table kept as a buffer is what casts, meta devices and longer texts spoil."""
    assert list(make(name).buffers()) == []


@every
@torch.no_grad()
def test_built_on_the_meta_device_and_loaded(name: str) -> None:
    model, case = make(name), CASES[name]
    with torch.device("meta"):
        encoding = build_encoding(SIZE, case.config, CONTEXT, case.policies)
        empty = GPT(SIZE, encoding, VOCABULARY)
    assert all(parameter.is_meta for parameter in empty.parameters())
    loaded = empty.to_empty(device="cpu")
    loaded.load_state_dict(model.state_dict(), strict=True)
    loaded.encoding.extend(CASES[name].extension)
    loaded.eval()
    for length in lengths(model):
        assert torch.equal(loaded(tokens(length)), model(tokens(length)))


@every_trainable
@torch.no_grad()
def test_compiles_into_one_graph(name: str) -> None:
    """A graph break would cost more than the encodings differ by; here traced, not optimised."""
    model = make(name)
    text = tokens(CONTEXT)
    for autocast in (False, True):
        torch._dynamo.reset()
        traced = torch.compile(model, backend="eager", fullgraph=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert torch.equal(traced(text), model(text))


# ---------------------------------------------------------------- length


@every
@torch.no_grad()
def test_finite_up_to_the_stated_maximum_and_refused_beyond(name: str) -> None:
    model = make(name)
    limit = model.encoding.max_length
    for length in lengths(model):
        logits = model(tokens(length))
        assert logits.shape == (2, length, VOCABULARY)
        assert logits.isfinite().all()
    if limit is None:
        return
    assert model(tokens(limit)).shape[1] == limit  # exactly at the maximum is fine
    with pytest.raises(UnsupportedError) as error:
        model(tokens(limit + 1))
    assert str(limit) in str(error.value)
    assert str(limit + 1) in str(error.value)


@every
@torch.no_grad()
def test_the_order_of_lengths_changes_nothing(name: str) -> None:
    upwards, downwards = make(name), make(name)
    sizes = lengths(upwards)
    first = {length: upwards(tokens(length)) for length in sizes}
    second = {length: downwards(tokens(length)) for length in reversed(sizes)}
    for length in sizes:
        assert torch.equal(first[length], second[length])


# ---------------------------------------------------------------- parameters


@every_trainable
def test_a_training_step_moves_every_parameter_of_the_encoding(name: str) -> None:
    model = make(name).train()
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    text = tokens(CONTEXT + 1, rows=4)
    token_losses(model(text[:, :-1]), text[:, 1:]).mean().backward()
    optimizer.step()
    moved = {key: value != before[key] for key, value in model.named_parameters()}
    for key, changed in moved.items():
        assert changed.any(), key
        if key.startswith("encoding."):
            assert changed.float().mean() > 0.99, key  # each row of a table, not just some


@every
def test_state_dict_round_trip(name: str) -> None:
    model, other = make(name, seed=0), make(name, seed=1)
    saved = model.state_dict()
    own = [key for key in saved if key.startswith("encoding.")]
    assert own == [f"encoding.{key}" for key, _ in model.encoding.named_parameters()]
    other.load_state_dict(saved, strict=True)
    with torch.no_grad():
        assert torch.equal(other(tokens(CONTEXT)), model(tokens(CONTEXT)))
    if model.encoding.max_length is None:  # a checkpoint knows no length
        case = CASES[name]
        longer = build_model(SIZE, case.config, 4 * CONTEXT, VOCABULARY, 0, case.policies)
        longer.load_state_dict(saved, strict=True)


OPERATIONS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def value_of(formula: str, names: dict[str, int]) -> int:
    """An integer expression of `names`; anything else raises."""

    def visit(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name):
                return names[name]
            case ast.BinOp(left=left, op=op, right=right):
                return OPERATIONS[type(op)](visit(left), visit(right))
        raise ValueError(f"{formula}: no formula of integers")

    return visit(ast.parse(formula, mode="eval").body)


def of_card(card: EncodingCard, context: int) -> tuple[EncodingConfig, Policies]:
    """What a card's id stands for, at its defaults."""
    preset = PRESETS.get(card.id)
    if preset is None:
        return ENCODINGS[card.id](), Policies()
    return ENCODINGS[preset.encoding](), preset.at(context)


@pytest.mark.parametrize("card", [*ENCODING_CARDS, *POLICY_CARDS], ids=lambda card: card.id)
@pytest.mark.parametrize("context", [48, 100])
def test_parameter_count_is_the_documented_formula(card: EncodingCard, context: int) -> None:
    for size in (SIZE, ModelConfig(layers=3, width=80, heads=5)):
        config, policies = of_card(card, context)
        model = build_model(size, config, context, VOCABULARY, 0, policies)
        names = {"L": context, "C": size.width, "H": size.heads, "D": size.head_size}
        names["N"] = size.layers
        names |= {key: v for key, v in vars(config).items() if isinstance(v, int)}
        expected = value_of(card.parameters, names)
        assert model.encoding.parameter_count() == expected
        plain = build_model(size, ENCODINGS["none"](), context, VOCABULARY, 0)
        total, others = (sum(p.numel() for p in m.parameters()) for m in (model, plain))
        assert total - others == expected


def test_the_formula_reader_reads_formulas_only() -> None:
    assert value_of("L*C + 2*(H - 1)", {"L": 5, "C": 7, "H": 3}) == 39
    with pytest.raises(ValueError, match="no formula"):
        value_of("abs(L)", {"L": 1})


# ---------------------------------------------------------------- fairness and determinism


@pytest.mark.parametrize("size", [{}, {"qk_norm": True, "tied": False}], ids=["plain", "other"])
def test_weights_that_are_not_the_encodings_are_equal_across_encodings(size: Any) -> None:
    def hashes(seed: int) -> set[str]:
        return {without_encoding(make(name, seed, **size)) for name in CASES}

    assert len(hashes(0)) == 1
    assert hashes(0).isdisjoint(hashes(1))


@every
def test_a_seed_fixes_every_weight_whatever_was_drawn_before(name: str) -> None:
    first = make(name).state_dict()
    torch.rand(17)
    second = make(name).state_dict()
    other = make(name, seed=1).state_dict()
    for key, value in first.items():
        assert torch.equal(value, second[key])
        if value.dim() > 1 and value.unique().numel() > 1:  # not a constant
            assert not torch.equal(value, other[key]), key


@every_trainable
@torch.no_grad()
def test_dropout_is_off_in_evaluation_and_at_its_default(name: str) -> None:
    plain, dropping = make(name), make(name, dropout=0.5)
    text = tokens(CONTEXT)
    assert torch.equal(dropping(text), plain(text))
    assert torch.equal(plain.train()(text), plain.eval()(text))
    dropping.train()
    assert not torch.allclose(dropping(text), dropping(text))


@every
@torch.no_grad()
def test_queries_are_normalised_before_they_are_rotated(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a gain that tells channels apart, normalising after the rotation would differ."""
    seen: list[tuple[Tensor, Tensor, Hooks]] = []

    def spy(q: Tensor, k: Tensor, v: Tensor, hooks: Hooks, kernel: Kernel | None) -> Tensor:
        seen.append((q, k, hooks))
        return attend(q, k, v, hooks, kernel)

    monkeypatch.setattr("posbench.model.attend", spy)
    model = make(name, qk_norm=True)
    gain = torch.linspace(0.5, 1.5, SIZE.head_size)
    for key, parameter in model.named_parameters():
        if key.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.copy_(gain)
    logits = model(tokens(CONTEXT))
    assert len(seen) == SIZE.layers
    for q, k, _ in seen:
        for given in (q / gain, k / gain):  # LayerNorm's result, not yet turned
            torch.testing.assert_close(
                given.mean(-1), torch.zeros(2, 3, CONTEXT), rtol=0, atol=1e-4
            )
            torch.testing.assert_close(
                given.std(-1, correction=0), torch.ones(2, 3, CONTEXT), rtol=0, atol=2e-2
            )
    assert logits.isfinite().all()
    if model.encoding.relative:
        moved = model(tokens(CONTEXT), torch.arange(CONTEXT) + 1000)
        torch.testing.assert_close(moved, logits, rtol=0, atol=1e-3)
