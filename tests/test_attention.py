"""Every form of hooks, on every kernel, against attention written out element by element."""

from __future__ import annotations

import gc
import itertools
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from posbench import attention
from posbench.attention import Kernel, attend, choose, dense
from posbench.config import ModelConfig
from posbench.config.encodings import AlibiConfig, EncodingConfig, RopeConfig
from posbench.encodings.base import Hooks
from posbench.encodings.bias import alibi_slopes
from posbench.model import build_model

B, H, D = 2, 3, 16
LENGTHS = [77, 200]  # neither a power of two nor a multiple of a kernel's block
FLOAT32 = {"rtol": 1e-4, "atol": 2e-5}

Edit = Callable[[Tensor, int, int], Tensor]  # score [B, H] of one (i, j) -> score
Row = Callable[[Tensor], Tensor]  # scores [B, H, i + 1] of one row -> scores


class Case(NamedTuple):
    """One use of the hooks, and the same thing said for a single score."""

    hooks: Hooks
    edit: Edit = lambda score, i, j: score
    row: Row = lambda scores: scores
    keep: Callable[[int, int], Tensor] = lambda i, j: torch.ones(H, dtype=torch.bool)
    channels: int = D  # channels of q and k that a score adds up, after `rotate`


def widened(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Four channels more than the head has: the scale must not follow."""
    return torch.cat((q, q[..., :4]), -1), torch.cat((k, -k[..., :4]), -1)


HEADS = torch.arange(H, dtype=torch.float64)


def distance_bias(distances: Tensor) -> Tensor:
    slopes = (0.5**HEADS).to(distances.dtype).view(-1, *(1,) * distances.dim())
    return -slopes * distances + torch.cos(distances)


def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Neither a function of i - j nor of the key alone, nor the same for each row of the batch."""
    batch, head, row, key = (n.to(score.dtype) for n in (b, h, i, j))  # int / int is float32
    return score * (1 + 0.1 * head) + (head + 1) * (row - key) / (row + 1) - 0.01 * batch * key


def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i - j < 5 + 80 * h  # a window of its own for each head


def rescore(scores: Tensor, q: Tensor, k: Tensor, rows: Tensor) -> Tensor:
    """A bias that counts the gates between key and query, as contextual positions do."""
    causal = torch.arange(scores.shape[-1], device=scores.device) <= rows.unsqueeze(-1)
    gates = torch.sigmoid(scores).masked_fill(~causal, 0.0)
    return scores - 0.1 * gates.flip(-1).cumsum(-1).flip(-1)


def rescored_row(scores: Tensor) -> Tensor:
    counts = [torch.sigmoid(scores[..., j:]).sum(-1) for j in range(scores.shape[-1])]
    return scores - 0.1 * torch.stack(counts, -1)


def key_bias(length: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(B, H, length, generator=generator, dtype=torch.float64).to(dtype)


def temperature(length: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.log(2 + torch.arange(length, dtype=torch.float64)).to(dtype)


def edit_distance(score: Tensor, i: int, j: int) -> Tensor:
    return score - 0.5**HEADS * (i - j) + math.cos(i - j)


def edit_score(score: Tensor, i: int, j: int) -> Tensor:
    rows = torch.arange(B, dtype=torch.float64).unsqueeze(1)
    return score * (1 + 0.1 * HEADS) + (HEADS + 1) * (i - j) / (i + 1) - 0.01 * rows * j


def keep_near(i: int, j: int) -> Tensor:
    return torch.full(HEADS.shape, i - j < 29)


def keep_window(i: int, j: int) -> Tensor:
    return i - j < 5 + 80 * HEADS


def cases(length: int, dtype: torch.dtype = torch.float64) -> dict[str, Case]:
    bias, warmth = key_bias(length), temperature(length)
    key, query = bias.to(dtype), warmth.to(dtype)
    return {
        "nothing": Case(Hooks()),
        "rotate": Case(Hooks(rotate=widened), channels=D + 4),
        "temperature": Case(Hooks(temperature=1.7), lambda s, i, j: 1.7 * s),
        "temperature_per_query": Case(Hooks(temperature=query), lambda s, i, j: warmth[i] * s),
        "distance_bias": Case(Hooks(distance_bias=distance_bias), edit_distance),
        "warm_distance_bias": Case(
            Hooks(distance_bias=distance_bias, temperature=1.7),
            lambda s, i, j: edit_distance(1.7 * s, i, j),
        ),
        "key_bias": Case(Hooks(key_bias=key), lambda s, i, j: s + bias[:, :, j]),
        "score_mod": Case(Hooks(score_mod=score_mod), edit_score),
        "mask_mod": Case(Hooks(mask_mod=mask_mod), keep=keep_window),
        "window": Case(Hooks(window=29), keep=keep_near),
        "windowed_bias": Case(
            Hooks(distance_bias=distance_bias, window=29), edit_distance, keep=keep_near
        ),
        "windowed_mask": Case(
            Hooks(mask_mod=mask_mod, window=29),
            keep=lambda i, j: keep_near(i, j) & keep_window(i, j),
        ),
        "rescore": Case(Hooks(rescore=rescore), row=rescored_row),
        "together": Case(
            Hooks(widened, distance_bias, key, score_mod, mask_mod, temperature=query),
            lambda s, i, j: edit_score(edit_distance(warmth[i] * s, i, j) + bias[:, :, j], i, j),
            keep=keep_window,
            channels=D + 4,
        ),
    }


NAMES = list(cases(1))
BY_INDEX = [
    "distance_bias",
    "key_bias",
    "score_mod",
    "mask_mod",
    "together",
    "window",
    "windowed_bias",
    "windowed_mask",
]  # flex can do these


def inputs(length: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    q, k, v = torch.randn(3, B, H, length, D, generator=generator, dtype=torch.float64)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def written_out(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
    """Causal attention by its definition: one score at a time, one row at a time, float64."""
    if case.channels > D:
        q, k = widened(q, k)
    outputs = []
    for i in range(q.shape[2]):
        scores = []
        for j in range(i + 1):
            score = case.edit((q[:, :, i] * k[:, :, j]).sum(-1) / math.sqrt(D), i, j)
            scores.append(score.masked_fill(~case.keep(i, j), float("-inf")))
        weights = case.row(torch.stack(scores, -1)).softmax(-1)
        outputs.append((weights.unsqueeze(-1) * v[:, :, : i + 1]).sum(2))
    return torch.stack(outputs, 2)


def gradients(out: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Gradients of a sum that weighs every output differently."""
    weights = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape)
    return torch.autograd.grad((out * weights.to(out.dtype)).sum(), inputs)


def leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.clone().requires_grad_() for tensor in tensors)


# ---------------------------------------------------------------- the oracle


@pytest.mark.parametrize("name", NAMES)
def test_dense_is_attention_as_defined(name: str) -> None:
    case = cases(77)[name]
    plain = leaves(*inputs(77))
    expected = written_out(*plain, case)
    tested = leaves(*inputs(77))
    found = attend(*tested, case.hooks, Kernel.dense)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for ours, theirs in zip(gradients(found, tested), gradients(expected, plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_row_chunks_change_nothing(name: str, rows: int) -> None:
    case = cases(77)[name]
    q, k, v = inputs(77)
    scale = 1 / math.sqrt(D)
    whole = leaves(q, k, v)
    expected = dense(*whole, case.hooks, scale, rows=77)
    parts = leaves(q, k, v)
    found = dense(*parts, case.hooks, scale, rows=rows)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for ours, theirs in zip(gradients(found, parts), gradients(expected, whole), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_dense_holds_a_bounded_number_of_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def watched(scores: Tensor, *rest: Tensor) -> Tensor:
        sizes.append(scores.numel())
        return scores

    monkeypatch.setattr(attention, "SCORES_PER_CHUNK", 10 * B * H * 200)
    found = attend(*inputs(200), Hooks(rescore=watched))
    assert len(sizes) == 20
    assert max(sizes) <= 10 * B * H * 200
    expected = attend(*inputs(200), Hooks(), Kernel.sdpa)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


# ---------------------------------------------------------------- fast paths


@pytest.mark.parametrize("length", [1, 2, *LENGTHS])
@pytest.mark.parametrize("name", NAMES)
def test_the_chosen_kernel_is_the_oracle_forward_and_gradient(name: str, length: int) -> None:
    oracle = leaves(*inputs(length))
    expected = attend(*oracle, cases(length)[name].hooks, Kernel.dense)
    fast = leaves(*inputs(length, torch.float32))
    found = attend(*fast, cases(length, torch.float32)[name].hooks)
    torch.testing.assert_close(found.double(), expected, **FLOAT32)
    for ours, theirs in zip(gradients(found, fast), gradients(expected, oracle), strict=True):
        torch.testing.assert_close(ours.double(), theirs, **FLOAT32)


@pytest.mark.parametrize("length", LENGTHS)
def test_strided_passes_the_gradient_to_a_learned_table(length: int) -> None:
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(H, length, generator=generator, dtype=torch.float64)

    def run(dtype: torch.dtype, kernel: Kernel) -> tuple[Tensor, tuple[Tensor, ...]]:
        *qkv, learned = leaves(*inputs(length, dtype), table.to(dtype))
        hooks = Hooks(distance_bias=lambda distances: learned[:, distances.long()])
        assert choose(hooks, "cpu", D) is Kernel.strided
        out = attend(*qkv, hooks, kernel)
        return out, gradients(out, (*qkv, learned))

    expected, expected_gradients = run(torch.float64, Kernel.dense)
    found, found_gradients = run(torch.float32, Kernel.strided)
    torch.testing.assert_close(found.double(), expected, **FLOAT32)
    for ours, theirs in zip(found_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)
    assert (found_gradients[-1] != 0).all()  # every distance occurs, so every entry is trained


@pytest.mark.parametrize("kernel", [Kernel.strided, Kernel.dense])
def test_a_bias_is_never_asked_about_the_future(kernel: Kernel) -> None:
    """The logarithm of a negative distance would put NaN into a learned bias's gradient."""
    rate = torch.tensor([0.1, 1.0, 3.0], requires_grad=True)

    def logarithmic(distances: Tensor) -> Tensor:
        assert (distances >= 0).all()
        return -torch.log1p(rate.view(-1, *(1,) * distances.dim()) * distances)

    found = attend(*inputs(30, torch.float32), Hooks(distance_bias=logarithmic), kernel)
    (gradient,) = gradients(found, (rate,))
    assert gradient.isfinite().all()
    assert (gradient != 0).all()


@pytest.mark.parametrize("length", [77, 130, 300])
@pytest.mark.parametrize("name", BY_INDEX)
def test_flex_is_the_oracle(name: str, length: int) -> None:
    """Unfused on the CPU, where it has no backward: the score rules and the block mask."""
    expected = attend(*inputs(length), cases(length)[name].hooks, Kernel.dense)
    hooks = cases(length, torch.float32)[name].hooks
    found = attend(*inputs(length, torch.float32), hooks, Kernel.flex)
    torch.testing.assert_close(found.double(), expected, **FLOAT32)


def test_flex_visits_every_block_that_a_head_needs() -> None:
    """Blocks are 128 wide; only the fused kernel skips any, so the list itself is looked at."""
    length, width = 300, 128
    b, h = torch.arange(B).view(-1, 1, 1, 1), torch.arange(H).view(-1, 1, 1)
    i, j = torch.arange(length).view(-1, 1), torch.arange(length)
    for mod in (mask_mod, None):
        blocks = attention._block_mask(B, H, length, Hooks(mask_mod=mod), "cpu").to_dense().bool()
        listed = blocks.repeat_interleave(width, -1).repeat_interleave(width, -2)
        keep = (j <= i).expand(B, H, -1, -1) if mod is None else (j <= i) & mod(b, h, i, j)
        assert (listed[..., :length, :length] | ~keep).all()
        assert not listed.all()  # and some are skipped


def test_a_causal_mask_is_made_once_for_all_batches_and_heads() -> None:
    kept = attention._block_mask(B, H, 130, Hooks(), "cpu")
    assert attention._block_mask(B + 1, H + 1, 130, Hooks(), "cpu") is kept
    assert attention._block_mask(B, H, 131, Hooks(), "cpu") is not kept


def test_a_mask_with_a_rule_is_not_kept_alive() -> None:
    """Its rule may hold the tensors of a whole forward pass."""
    seen: list[weakref.ref[Tensor]] = []

    def hooks() -> Hooks:
        limit = torch.tensor(5)
        seen.append(weakref.ref(limit))
        return Hooks(mask_mod=lambda b, h, i, j: i - j < limit)

    attend(*inputs(20, torch.float32), hooks(), Kernel.flex)
    gc.collect()
    assert seen[0]() is None


def test_a_causal_mask_first_made_by_an_evaluation_serves_training() -> None:
    with torch.inference_mode():
        mask = attention._block_mask(B, H, 137, Hooks(), "cpu")
    assert not mask.kv_indices.is_inference()
    assert not mask.q_indices.is_inference()


@pytest.mark.parametrize("encoding", [RopeConfig(), AlibiConfig()], ids=["rope", "alibi"])
@torch.no_grad()  # the CPU has no backward for flex
def test_a_compiled_model_is_one_graph_with_its_attention_in_it(encoding: EncodingConfig) -> None:
    """With the numbers of the plain model, and no warning of torch's about what it traced."""
    model = build_model(ModelConfig(layers=1, width=64, heads=4), encoding, 32, 31, 0)
    model.use_kernel(Kernel.flex)
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(str(graph.graph))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    text = torch.randint(31, (2, 150))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            found = compiled(text)
    assert len(graphs) == 1
    assert graphs[0].count("ops.higher_order.flex_attention") == 1
    model.use_kernel(Kernel.dense)
    torch.testing.assert_close(found, model(text), rtol=0, atol=1e-5)


MANY = (77, 200, 130, 64, 128, 256, 257, 300, 384, 400)


@torch.inference_mode()
def test_many_lengths_and_batches_stay_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past a limit torch falls back to a flex_attention that holds all T x T scores."""
    torch._dynamo.reset()
    counters.clear()
    kernel = attention._compiled_flex("eager")
    monkeypatch.setattr(attention, "_flex_kernel", lambda device: kernel)
    hooks = Hooks(distance_bias=distance_bias)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for size, lengths in ((16, MANY), (24, MANY[:3])):
            for length, batch in itertools.product(lengths, (1, 2, 5)):
                q, k, v = torch.randn(3, batch, H, length, size)
                attend(q, k, v, hooks, Kernel.flex)
        expected = attend(q, k, v, hooks, Kernel.dense)
        torch.testing.assert_close(attend(q, k, v, hooks, Kernel.flex), expected, **FLOAT32)
    graphs = counters["stats"]["unique_graphs"]
    assert 8 < graphs < 20  # more than torch's limit, and far fewer than the 39 calls
    torch._dynamo.reset()


KERNELS = [
    ("nothing", Kernel.sdpa, Kernel.sdpa),
    ("rotate", Kernel.sdpa, Kernel.sdpa),
    ("temperature", Kernel.sdpa, Kernel.sdpa),
    ("temperature_per_query", Kernel.sdpa, Kernel.sdpa),
    ("distance_bias", Kernel.strided, Kernel.flex),
    ("warm_distance_bias", Kernel.strided, Kernel.flex),
    ("key_bias", Kernel.dense, Kernel.flex),
    ("score_mod", Kernel.dense, Kernel.flex),
    ("mask_mod", Kernel.dense, Kernel.flex),
    ("window", Kernel.strided, Kernel.flex),
    ("windowed_bias", Kernel.strided, Kernel.flex),
    ("windowed_mask", Kernel.dense, Kernel.flex),
    ("together", Kernel.dense, Kernel.flex),
    ("rescore", Kernel.dense, Kernel.dense),
]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Say whether this machine can compile for a GPU, which a CPU alone cannot try."""
    return lambda works: monkeypatch.setattr(attention, "can_compile", lambda: works)


def test_the_kernel_of_each_form(compiler: Callable[[bool], None]) -> None:
    compiler(True)
    of = cases(4)
    for name, cpu, cuda in KERNELS:
        found = choose(of[name].hooks, "cpu", D), choose(of[name].hooks, "cuda", D)
        assert found == (cpu, cuda), name
    assert {name for name, _, _ in KERNELS} == set(of)
    own = Hooks(attend=lambda q, k, v: v, score_mod=score_mod)
    assert choose(own, "cpu", D) is choose(own, "cuda", D) is Kernel.own
    both = Hooks(rescore=rescore, distance_bias=distance_bias)
    assert choose(both, "cpu", D) is choose(both, "cuda", D) is Kernel.dense


@pytest.mark.parametrize(("works", "head_size"), [(False, D), (True, 15), (True, 8)])
def test_cuda_does_without_flex_where_it_cannot_run(
    compiler: Callable[[bool], None], works: bool, head_size: int
) -> None:
    compiler(works)
    for name, cpu, cuda in KERNELS:
        expected = Kernel.dense if cuda is Kernel.flex else cuda
        assert choose(cases(4)[name].hooks, "cuda", head_size) is expected, name
        assert choose(cases(4)[name].hooks, "cpu", head_size) is cpu, name


def test_only_a_biased_layer_on_cuda_tries_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def watched() -> bool:
        tried.append(name)
        return True

    monkeypatch.setattr(attention, "can_compile", watched)
    for name in NAMES:
        choose(cases(4)[name].hooks, "cpu", D)
        choose(cases(4)[name].hooks, "cuda", D - 1)
    assert tried == []
    for name in NAMES:
        choose(cases(4)[name].hooks, "cuda", D)
    assert tried == [name for name, _, cuda in KERNELS if cuda is Kernel.flex]


def test_attend_hands_everything_to_a_scheme_of_its_own() -> None:
    q, k, v = inputs(9)
    seen: list[tuple[Tensor, Tensor, Tensor, int | None]] = []

    def own(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        seen.append((q, k, v, window))
        return v + 1

    assert torch.equal(attend(q, k, v, Hooks(rotate=widened, attend=own, window=3)), v + 1)
    for given, received in zip((q, k, v, 3), seen[0], strict=True):
        assert given is received  # unrotated and unscaled


# ---------------------------------------------------------------- memory, dtype, autocast


class Masks(TorchDispatchMode):
    """The mask that really arrives at a fused kernel, after whatever autocast did to it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if "scaled_dot_product" in str(func):
            self.seen.append(kwargs["attn_mask"])
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_strided_memory_grows_with_the_length_alone(dtype: torch.dtype, autocast: bool) -> None:
    length = 1500
    masks = Masks()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), masks:
        attend(*inputs(length, dtype), Hooks(distance_bias=distance_bias))
    (mask,) = masks.seen
    assert mask.shape == (1, H, length, length)
    assert mask.dtype is torch.float32
    assert mask.untyped_storage().nbytes() == H * (2 * length - 1) * 4
    assert masks.largest < H * length * length  # nothing else is square either


@pytest.mark.parametrize("autocast", [False, True])
def test_a_bfloat16_model_has_a_bias_of_its_own_for_each_of_2048_distances(autocast: bool) -> None:
    size = ModelConfig(layers=1, width=96, heads=12)  # slopes that are no powers of two
    model = build_model(size, AlibiConfig(), context=512, vocabulary=11, seed=0)
    if not autocast:
        model = model.to(torch.bfloat16)
    masks = Masks()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast), masks:
        model(torch.randint(11, (1, 2048)))
    (mask,) = masks.seen
    for head, slope in enumerate(alibi_slopes(12).tolist()):
        last = mask[0, head, -1]  # keys are flipped: distances 0, 1, 2, ...
        assert last.unique().numel() == 2048
        expected = -slope * torch.arange(2048, dtype=torch.float64)
        torch.testing.assert_close(last.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kernel", [Kernel.strided, Kernel.dense])
def test_autocast_does_not_round_a_bias(kernel: Kernel) -> None:
    """257 is 256 in bfloat16: a bias that tells even distances from odd ones shows it."""

    def parity(distances: Tensor) -> Tensor:
        return torch.where(distances % 2 == 0, 0.0, -30.0).expand(H, *distances.shape)

    q, k, v = inputs(600, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        found = attend(0 * q, k, v, Hooks(distance_bias=parity), kernel)
    even = [v[:, :, row % 2 : row + 1 : 2].double().mean(2) for row in (300, 599)]
    torch.testing.assert_close(
        found[:, :, [300, 599]].double(), torch.stack(even, 2), rtol=0, atol=2e-3
    )


@pytest.mark.parametrize("kernel", [Kernel.sdpa, Kernel.strided, Kernel.dense, Kernel.flex])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_every_dtype_runs_and_stays(kernel: Kernel, dtype: torch.dtype) -> None:
    hooks = Hooks() if kernel is Kernel.sdpa else Hooks(distance_bias=distance_bias)
    rounded = inputs(77, dtype)
    q, k, v = (tensor.double() for tensor in rounded)
    found = attend(*rounded, hooks, kernel)
    assert found.dtype is dtype
    atol = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-12}
    expected = attend(q, k, v, hooks, Kernel.dense)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=atol[dtype])


def test_queries_in_another_dtype_than_values_are_brought_to_theirs() -> None:
    """Normalised queries are float32 under autocast where values are bfloat16."""
    q, k, v = inputs(77)
    for hooks in (Hooks(), Hooks(distance_bias=distance_bias), Hooks(rescore=rescore)):
        found = attend(q.float(), k.float(), v.bfloat16(), hooks)
        assert found.dtype is torch.bfloat16
        expected = attend(q, k, v, hooks, Kernel.dense)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=3e-2)


# ---------------------------------------------------------------- what a bias means


@pytest.mark.parametrize("kernel", [Kernel.strided, Kernel.dense, Kernel.flex])
def test_alibi_prefers_the_near(kernel: Kernel) -> None:
    """Without content the weight rises strictly towards the diagonal, in every head."""
    length, heads = 40, 6
    model = build_model(ModelConfig(heads=heads, width=6 * 8), AlibiConfig(), 64, 11, 0)
    hooks = model.encoding.hooks(torch.zeros(1, length, 48), torch.arange(length), 0)
    empty = torch.zeros(1, heads, length, length)
    weights = attend(empty, empty, torch.eye(length).expand_as(empty), hooks, kernel)
    for i in range(length):
        assert (weights[0, :, i, :i] < weights[0, :, i, 1 : i + 1]).all()
        assert (weights[0, :, i, i + 1 :] == 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, heads, length), rtol=0, atol=1e-5)


def test_every_kernel_refuses_to_see_the_future() -> None:
    length = 130
    for name in NAMES:
        hooks = cases(length, torch.float32)[name].hooks
        for kernel in {
            Kernel.dense,
            choose(hooks, "cpu", D),
            *([Kernel.flex] * (name in BY_INDEX)),
        }:
            q, k, v = inputs(length, torch.float32)
            before = attend(q, k, v, hooks, kernel)
            for tensor in (q, k, v):
                tensor[:, :, 60:] = 5.0
            after = attend(q, k, v, hooks, kernel)
            assert torch.equal(before[:, :, :60], after[:, :, :60]), (name, kernel)
            assert not torch.allclose(before[:, :, 60:], after[:, :, 60:]), (name, kernel)


def test_softmax_scale_is_that_of_the_head_before_widening() -> None:
    q, k, v = inputs(30)
    wide = (torch.cat((t, torch.zeros_like(t)), -1) for t in (q, k))
    found = attend(q, k, v, Hooks(rotate=lambda a, b, w=tuple(wide): w))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
