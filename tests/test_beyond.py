"""What a learned table does past its end: refused, or a variant that has a name of its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from posbench.config import Beyond, EvalConfig, EvalSettings, ModelConfig
from posbench.config.encodings import ENCODINGS, LearnedConfig
from posbench.config.extensions import NtkConfig, PiConfig
from posbench.encodings import Shape, build
from posbench.encodings.absolute import stretched
from posbench.errors import UnsupportedError, UserError
from posbench.jobs.evaluate import evaluate
from posbench.jobs.train import run_training
from posbench.model import GPT, build_model
from posbench.report.lines import labels_of, subjects_of
from posbench.results import Evaluation, Row, Status, read_results

ROWS, VOCABULARY = 12, 31
VARIANTS = [Beyond.interpolate, Beyond.clamp, Beyond.wrap]
every_variant = pytest.mark.parametrize("beyond", VARIANTS)


def make(beyond: Beyond) -> GPT:
    model = build_model(ModelConfig(layers=1, width=16, heads=2), LearnedConfig(), ROWS, 31, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)
    model.encoding.go_beyond(beyond)
    return model.eval()


def tokens(length: int) -> Tensor:
    return torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))


# ---------------------------------------------------------------- the rows themselves


@pytest.mark.parametrize(
    ("beyond", "expected"),
    [
        (Beyond.interpolate, [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0]),  # ends on ends
        (Beyond.clamp, [0.0, 10.0, 20.0, 30.0, 30.0, 30.0, 30.0]),
        (Beyond.wrap, [0.0, 10.0, 20.0, 30.0, 0.0, 10.0, 20.0]),
    ],
)
def test_rows_by_hand(beyond: Beyond, expected: list[float]) -> None:
    """Four rows 0, 10, 20, 30 read by seven positions."""
    encoding = build(LearnedConfig(), Shape(1, 1, 1, 1, 4))
    with torch.no_grad():
        dict(encoding.named_parameters())["table"].copy_(torch.tensor([[0.0], [10], [20], [30]]))
    encoding.go_beyond(beyond)
    found = encoding.embed(torch.zeros(1, 7, 1), torch.arange(7))
    assert found.flatten().tolist() == expected


@pytest.mark.parametrize("length", [13, 48, 97])
def test_a_stretched_table_is_the_linear_interpolation_of_torch(length: int) -> None:
    table = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = torch.nn.functional.interpolate(
        table.T[None], size=length, mode="linear", align_corners=True
    )[0].T
    found = stretched(table, torch.arange(length), length)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert torch.equal(found[0], table[0])
    assert torch.equal(found[-1], table[-1])
    by_scale = stretched(table, torch.arange(length), length + length // ROWS)  # p / s instead
    assert not torch.allclose(by_scale, expected, atol=1e-3)


@every_variant
def test_a_stretched_table_survives_bfloat16(beyond: Beyond) -> None:
    """Positions above 256 are not bfloat16 numbers."""
    model = make(beyond)
    exact = model.encoding.embed(torch.zeros(1, 600, 16), torch.arange(600))
    cast = make(beyond).to(torch.bfloat16).encoding
    found = cast.embed(torch.zeros(1, 600, 16, dtype=torch.bfloat16), torch.arange(600))
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), exact, rtol=0.01, atol=0.01)


# ---------------------------------------------------------------- what the model promises


@every_variant
@torch.no_grad()
def test_texts_within_the_table_do_not_change_by_a_bit(beyond: Beyond) -> None:
    plain, variant = make(Beyond.error), make(beyond)
    for length in (2, 5, ROWS):
        assert torch.equal(variant(tokens(length)), plain(tokens(length)))


@every_variant
@torch.no_grad()
def test_causal_and_finite_beyond_the_table(beyond: Beyond) -> None:
    model = make(beyond)
    assert model.encoding.max_length is None
    text = tokens(4 * ROWS)
    before = model(text)
    assert before.isfinite().all()
    for changed in (ROWS - 1, ROWS + 3, 4 * ROWS - 1):
        other = text.clone()
        other[:, changed] = (other[:, changed] + 1) % VOCABULARY
        after = model(other)
        torch.testing.assert_close(before[:, :changed], after[:, :changed], rtol=0, atol=1e-6)
        assert (before[:, changed] - after[:, changed]).abs().max() > 1e-3


@every_variant
@torch.no_grad()
def test_the_first_logits_depend_on_the_length_only_where_it_is_said(beyond: Beyond) -> None:
    model = make(beyond)
    text = tokens(4 * ROWS)
    short, long = model(text[:, : 2 * ROWS]), model(text)[:, : 2 * ROWS]
    difference = (short - long).abs().max()
    if model.encoding.prefix_consistent:
        assert difference < 1e-5
    else:
        assert difference > 1e-2


@torch.no_grad()
def test_variants_differ_and_leave_no_trace() -> None:
    """One model under each in turn: the order of evaluations changes nothing."""
    model, text = make(Beyond.error), tokens(3 * ROWS)
    found = []
    for beyond in VARIANTS:
        model.encoding.go_beyond(beyond)
        found.append(model(text))
        assert torch.equal(found[-1], make(beyond)(text))
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert (found[first] - found[second]).abs().max() > 1e-2
    model.encoding.go_beyond(Beyond.error)
    with pytest.raises(UnsupportedError, match=f"{ROWS} rows; {3 * ROWS} positions"):
        model(text)


@pytest.mark.parametrize("name", [name for name in ENCODINGS if name != "learned"])
def test_an_encoding_without_a_table_refuses_a_variant(name: str) -> None:
    encoding = build(ENCODINGS[name](), Shape(1, 2, 8, 16, ROWS))
    encoding.go_beyond(Beyond.error)
    with pytest.raises(UnsupportedError, match=f"beyond=clamp .* {name} has none"):
        encoding.go_beyond(Beyond.clamp)


# ---------------------------------------------------------------- one run, every variant


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One learned and one rope run, trained once."""
    folder = tmp_path_factory.mktemp("beyond")
    corpus = tiny.write_corpus(folder / "corpus")
    for name in ("learned", "rope"):
        run_training(tiny.small(corpus, name), folder / name, [])
    return [folder / "learned", folder / "rope"]


def measured(
    runs: list[Path], beyond: Beyond, folder: Path | None = None, **changes: Any
) -> Evaluation:
    config = EvalConfig(beyond=beyond, max_targets=256, bootstrap=100)
    settings = EvalSettings(eval=config, threads=1, **changes)
    return evaluate([str(run) for run in runs], settings, folder)


def cells(evaluation: Evaluation) -> dict[tuple[str, str, int], Row]:
    rows = [row for row in evaluation.rows if row.metric == "ppl"]
    return {(row.encoding, row.protocol, row.eval_length): row for row in rows}


def test_one_trained_run_is_evaluated_under_each_variant(runs: list[Path], tmp_path: Path) -> None:
    plain = cells(measured(runs, Beyond.error))
    lengths = (tiny.CONTEXT, 2 * tiny.CONTEXT, 4 * tiny.CONTEXT)
    assert {key[2] for key in plain} == set(lengths)
    longest: dict[Beyond, float | None] = {}
    merged = Evaluation()
    for beyond in VARIANTS:
        evaluation = measured(runs, beyond, tmp_path / beyond)
        merged = merged.merged(evaluation)
        for (encoding, protocol, length), row in cells(evaluation).items():
            assert row.variant == f"beyond={beyond}"
            before = plain[encoding, protocol, length]
            assert before.variant == ""
            if encoding == "rope":
                assert (row.status, row.ppl) == (Status.unsupported, None)
                assert "rope has none" in row.reason
                assert before.status is Status.ok
            else:
                assert row.status is Status.ok
                assert (before.status is Status.ok) == (length == tiny.CONTEXT)
                if before.ppl is not None and protocol != "nonoverlap":
                    assert row.ppl == before.ppl  # within the table: the very same number
        longest[beyond] = cells(evaluation)["learned", "controlled", lengths[-1]].ppl
    assert len(set(longest.values())) == 3

    labels = labels_of(subjects_of(merged).values(), merged).values()
    assert {f"learned (beyond={beyond})" for beyond in VARIANTS} <= set(labels)
    assert {curve.variant for curve in merged.curves} == {f"beyond={b}" for b in VARIANTS}
    assert {each.variant for each in merged.documents} == {f"beyond={b}" for b in VARIANTS}
    for beyond in VARIANTS:
        again = read_results(tmp_path / beyond)
        assert {row.variant for row in again.rows} == {f"beyond={beyond}"}
        assert {curve.variant for curve in again.curves} == {f"beyond={beyond}"}


def test_a_variant_that_applies_to_no_run_is_an_error(runs: list[Path]) -> None:
    with pytest.raises(UserError, match=r"eval.beyond=wrap applies to none .*encoding rope"):
        measured(runs[1:], Beyond.wrap)
    with pytest.raises(UserError, match=r"beside extension=pi"):
        measured(runs, Beyond.wrap, extension=PiConfig())


def test_results_written_before_variants_had_curves_are_read(
    runs: list[Path], tmp_path: Path
) -> None:
    import json

    measured(runs[1:], Beyond.error, tmp_path, extension=NtkConfig())
    file = tmp_path / "results.json"
    saved = json.loads(file.read_text())
    for each in saved["curves"] + saved["documents"]:
        del each["variant"]
    file.write_text(json.dumps(saved))
    again = read_results(tmp_path)
    assert again.curves
    assert {each.variant for each in again.curves + again.documents} == {""}
    assert dataclasses.asdict(again.curves[0])["extension"] == "ntk"
