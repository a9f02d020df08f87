"""Lines against a baseline: which seeds are paired, what each number is, what each word says."""

from __future__ import annotations

import csv
import json
import math
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from sweeps import sweep

from posbench.cli import main
from posbench.errors import UserError
from posbench.report.comparison import comparison_grids
from posbench.report.pairs import Comparison, Quantity, compare, lines_of
from posbench.results import Evaluation, Status, write_results
from posbench.statistics import bootstrap_interval

N = 6
SHIFT = [-0.02, -0.1, -0.3]  # of alibi at 1x, 2x, 4x


def losses(seeds: int = N) -> dict[str, list[list[float]]]:
    """rope and alibi, whose seeds have much in common and differ by little."""
    generator = np.random.default_rng(4)
    common = generator.normal(0.0, 0.2, (seeds, 1))
    rope = np.array([2.0, 2.2, 2.9]) + common + generator.normal(0, 0.01, (seeds, 3))
    alibi = rope + SHIFT + generator.normal(0, 0.01, (seeds, 3))
    return {"rope": rope.tolist(), "alibi": alibi.tolist()}


def cell(
    evaluation: Evaluation, label: str, ratio: float, quantity: Quantity = Quantity.loss
) -> Comparison:
    (found,) = [
        each
        for each in compare(evaluation, "rope").cells
        if (each.label, each.ratio, each.quantity) == (label, ratio, quantity)
    ]
    return found


# ---------------------------------------------------------------- numbers


def test_differences_are_paired_by_seed() -> None:
    given = losses()
    found = cell(sweep(given), "alibi", 4.0)
    ours, theirs = (np.array(given[name])[:, 2] for name in ("alibi", "rope"))
    wanted = stats.ttest_rel(ours, theirs)
    assert found.seen is not None
    assert found.seeds == tuple(range(N))
    assert found.seen.mean == pytest.approx(np.mean(ours - theirs), rel=1e-12)
    assert found.seen.p == pytest.approx(wanted.pvalue, rel=1e-9)
    assert found.improvement == stats.mannwhitneyu(theirs, ours).statistic / N**2


def test_seeds_are_paired_by_number_not_by_place() -> None:
    given = losses()
    plain = cell(sweep(given), "alibi", 2.0)
    evaluation = sweep(given)
    evaluation.rows.reverse()
    assert cell(evaluation, "alibi", 2.0) == plain


def test_growth_is_the_difference_of_log_ratios_to_1x() -> None:
    given = losses()
    found = cell(sweep(given), "alibi", 4.0, Quantity.growth)
    ours, theirs = (np.array(given[name]) for name in ("alibi", "rope"))
    wanted = (ours[:, 2] - ours[:, 0]) - (theirs[:, 2] - theirs[:, 0])
    assert found.seen is not None
    assert found.seen.mean == pytest.approx(wanted.mean(), rel=1e-9)
    assert found.seen.sd == pytest.approx(np.std(wanted, ddof=1), rel=1e-9)
    assert not [
        each
        for each in compare(sweep(given), "rope").cells
        if (each.ratio, each.quantity) == (1.0, Quantity.growth)
    ]


def test_holm_is_over_every_test_that_is_made() -> None:
    found = compare(sweep(losses()), "rope")
    raw = np.array([each.seen.p for each in found.cells if each.seen])
    assert found.tests == len(raw) == 5  # three losses, two of growth
    order = np.argsort(raw)
    wanted = np.maximum.accumulate(raw[order] * np.arange(5, 0, -1)).clip(max=1)
    np.testing.assert_allclose([found.cells[place].p_holm for place in order], wanted)
    narrow = compare(sweep(losses()), "rope", ratios=[4.0])
    assert narrow.tests == 2


def test_documents_are_resampled_together_and_seeds_averaged() -> None:
    evaluation = sweep(losses(3))
    found = cell(evaluation, "alibi", 4.0)
    sums: dict[str, float] = dict.fromkeys((f"d{number:02}" for number in range(12)), 0.0)
    for each in evaluation.documents:
        if each.eval_length == 256:
            sign = 1 if each.run_id.startswith("alibi") else -1
            sums[each.document] += sign * each.sum_nll / 3
    wanted = bootstrap_interval(np.array(list(sums.values())), np.full(12, 64), 2000)
    assert found.documents == pytest.approx(wanted)
    assert found.n_documents == 12
    assert found.seen is not None
    assert found.documents != pytest.approx((found.seen.low, found.seen.high), abs=1e-4)


def test_a_protocol_that_weighs_windows_has_no_interval_over_documents() -> None:
    evaluation = sweep(losses(3))
    evaluation.documents = [
        replace(each, sum_nll=each.sum_nll + 5) for each in evaluation.documents
    ]
    found = cell(evaluation, "alibi", 4.0)
    assert found.documents is None
    assert "weighs windows" in found.no_documents


def test_other_documents_are_not_resampled_together() -> None:
    evaluation = sweep(losses(3))
    evaluation.documents.pop()
    assert cell(evaluation, "alibi", 4.0).no_documents == "not the same documents"
    assert cell(evaluation, "alibi", 1.0).documents is not None


def test_few_documents_give_no_interval() -> None:
    found = cell(sweep(losses(3), documents=9), "alibi", 4.0)
    assert found.documents is None
    assert "fewer than 10" in found.no_documents


# ---------------------------------------------------------------- what is missing says so


def test_seeds_that_only_one_has_are_left_out_by_name() -> None:
    given: dict[str, Any] = losses(4)
    given["alibi"] = given["alibi"][:3]
    found = cell(sweep(given), "alibi", 4.0)
    assert found.seeds == (0, 1, 2)
    assert found.left_out == ("seed 3 (alibi: not measured)",)
    given = losses(4)
    given["rope"][1] = [2.0, Status.oom, 2.0]
    found = cell(sweep(given), "alibi", 2.0)
    assert found.seeds == (0, 2, 3)
    assert found.left_out == ("seed 1 (rope: oom)",)


def test_no_seed_in_common() -> None:
    evaluation = sweep({"rope": losses()["rope"][:2]}).merged(
        sweep({"alibi": losses()["alibi"][:2]}, seeds=(7, 8))
    )
    found = cell(evaluation, "alibi", 4.0)
    assert (found.word, found.seen) == ("no seed in common", None)
    assert len(found.left_out) == 2


def test_words_stand_where_no_number_is() -> None:
    given: dict[str, Any] = losses(3)
    given["learned"] = [[2.0, Status.unsupported, Status.not_enough_data]] * 3
    given["xpos"] = [[2.0, math.inf, 2.0], [2.1, 2.0, 2.0], [2.0, 2.0, 2.1]]
    evaluation = sweep(given)
    assert cell(evaluation, "learned", 2.0).word == "n/a"
    assert cell(evaluation, "learned", 4.0).word == "not enough data"
    broken = cell(evaluation, "xpos", 2.0)
    assert (broken.word, broken.not_finite) == ("inf", (0,))
    assert broken.seen is not None
    assert broken.seen.mean == math.inf  # never the mean of the other two
    assert (broken.seen.p, broken.p_holm) == (None, None)
    assert broken.improvement is not None
    text = "\n".join(str(grid) for grid in comparison_grids(evaluation, "rope"))
    assert "xpos: not finite in 1 of 3 seeds (seed 0)" in text


def test_a_baseline_that_broke_breaks_the_comparison() -> None:
    given: dict[str, Any] = losses(3)
    given["rope"][2][1] = math.inf
    found = cell(sweep(given), "alibi", 2.0)
    assert found.word == "baseline inf"
    given["alibi"][2][1] = math.inf
    assert cell(sweep(given), "alibi", 2.0).word == "both inf"


@pytest.mark.parametrize(("seeds", "said"), [(1, "1 seed"), (2, "2 seeds")])
def test_below_three_seeds_there_is_no_seed_inference(seeds: int, said: str) -> None:
    evaluation = sweep(losses(seeds))
    found = cell(evaluation, "alibi", 4.0)
    assert found.seen is not None
    assert (found.seen.p, found.p_holm, found.improvement) == (None, None, None)
    assert found.documents is not None  # the other variance is known
    grid = comparison_grids(evaluation, "rope")[0]
    row = dict(zip(grid.header, grid.rows[0], strict=True))
    assert row["95 %, seeds"] == "no seed inference"
    assert row["p"] == row["Holm"] == row["d_z"] == ""
    assert f"alibi: no seed inference ({said}; 3 are needed)." in grid.notes


def test_the_caveat_of_few_seeds_and_the_test_of_many() -> None:
    few, many = (comparison_grids(sweep(losses(n)), "rope") for n in (5, 6))
    assert any("leans on the differences being normal" in note for note in few[-1].notes)
    assert not any("leans on" in note for note in many[-1].notes)
    assert "sign-flip" in many[0].header
    assert "sign-flip" not in few[0].header


def test_identical_lines_are_called_so_and_not_tested() -> None:
    given = losses(3) | {"same": losses(3)["rope"]}
    evaluation = sweep(given)
    assert cell(evaluation, "same", 1.0).p_holm is None
    assert compare(evaluation, "rope").tests == 5
    row = next(row for row in comparison_grids(evaluation, "rope")[0].rows if row[0] == "same")
    assert "identical" in row


# ---------------------------------------------------------------- lines, blocks, baselines


def with_extension(evaluation: Evaluation, extension: str) -> Evaluation:
    return replace(
        evaluation,
        rows=[replace(row, extension=extension) for row in evaluation.rows],
        documents=[replace(each, extension=extension) for each in evaluation.documents],
    )


def test_an_extension_is_a_line_and_may_be_the_baseline() -> None:
    rope = sweep({"rope": losses(3)["rope"]})
    evaluation = rope.merged(with_extension(sweep({"rope": losses(3)["alibi"]}), "yarn"))
    assert lines_of(evaluation) == ["rope", "rope + yarn"]
    one = compare(evaluation, "rope").cells[0]
    other = compare(evaluation, "rope + yarn").cells[0]
    assert (one.label, other.label) == ("rope + yarn", "rope")
    assert one.seen is not None
    assert other.seen is not None
    assert one.seen.mean == pytest.approx(-other.seen.mean)


def changed(evaluation: Evaluation, **values: Any) -> Evaluation:
    """The same rows of other runs, with these values."""
    named = {run["run_id"]: f"{run['run_id']}-other" for run in evaluation.runs}
    return replace(
        evaluation,
        rows=[replace(row, run_id=named[row.run_id], **values) for row in evaluation.rows],
        runs=[run | {"run_id": named[run["run_id"]]} for run in evaluation.runs],
        documents=[],
    )


def test_training_lengths_are_blocks_with_a_baseline_each() -> None:
    evaluation = sweep(losses(3)).merged(changed(sweep(losses(3)), train_length=128))
    found = compare(evaluation, "rope")
    assert {(each.label, each.baseline) for each in found.cells} == {
        ("alibi L=64", "rope L=64"),
        ("alibi L=128", "rope L=128"),
    }
    exact = compare(evaluation, "rope L=64")
    assert {each.train_length for each in exact.cells} == {64}
    assert [note for note in exact.notes if "left out" in note and "128" in note]


def test_a_baseline_on_another_text_is_refused_by_name() -> None:
    alibi = changed(sweep({"alibi": losses(3)["alibi"]}), corpus_fingerprint="d" * 64)
    evaluation = sweep({"rope": losses(3)["rope"]}).merged(alibi)
    with pytest.raises(UserError, match=r"alibi and rope.*corpus_fingerprint is dddd.*cccc"):
        compare(evaluation, "rope")
    evaluation.provenance["mismatch"] = ["as asked"]
    assert compare(evaluation, "rope").tests == 5


def test_a_name_that_several_lines_have_is_refused() -> None:
    second = changed(sweep({"rope": losses(3)["alibi"]}))
    for run in second.runs:
        run |= {"settings_id": "another", "folder": f"elsewhere/{run['run_id']}"}
    evaluation = sweep(losses(3)).merged(second)
    with pytest.raises(UserError, match=r"rope is the name of 2 lines.*rope \[.*rope \["):
        compare(evaluation, "rope")
    label = next(name for name in lines_of(evaluation) if name.startswith("rope ["))
    assert compare(evaluation, label).tests == 10


def test_other_numbers_of_trained_tokens_are_told() -> None:
    evaluation = sweep(losses(3))
    for run in evaluation.runs:
        run["tokens"] = 2000 if run["encoding"] == "alibi" else 1000
    notes = compare(evaluation, "rope").notes
    assert notes == [
        "alibi was trained on 2,000 tokens, rope on 1,000: the difference is not that of the "
        "encodings alone."
    ]


def test_a_skipped_run_is_left_out_with_its_reason() -> None:
    evaluation = sweep(losses(3))
    skipped = replace(
        evaluation.rows[0], run_id="x", encoding="unknown", model="unknown", train_length=0,
        status=Status.skipped, reason="run.json cannot be read", targets_sha256="",
    )  # fmt: skip
    evaluation.rows.append(skipped)
    assert any("run.json cannot be read" in note for note in compare(evaluation, "rope").notes)


# ---------------------------------------------------------------- the command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_results(sweep(losses()), tmp_path / "eval")
    return tmp_path


def test_every_line_of_the_terminal_table_fits_80_columns(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["compare", "eval", "--baseline", "rope"]) == 0
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines()) <= 80
    for word in ("4x (256)", "95 %, seeds", "95 %, documents", "Holm over 5 tests", "P(better)"):
        assert word in text


def test_files_and_json_say_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "eval", "--baseline", "rope", "--out", "out", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((folder / "out" / "compare.json").read_text())
    with (folder / "out" / "compare.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(printed["comparisons"]) == 5
    found = cell(sweep(losses()), "alibi", 4.0)
    (row,) = [each for each in rows if (each["ratio"], each["quantity"]) == ("4.0", "loss")]
    assert found.seen is not None
    assert float(row["difference"]) == found.seen.mean
    assert float(row["sd"]) == found.seen.sd
    assert float(row["ppl_ratio"]) == pytest.approx(math.exp(found.seen.mean))
    assert float(row["p_holm"]) == found.p_holm
    page = (folder / "out" / "compare.md").read_text()
    for block in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        assert len({line.count("|") for line in block.splitlines()}) == 1
    assert f"{found.seen.mean:+.4f}" in page


def test_infinities_are_words_in_strict_json(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = losses(3)
    given["alibi"][0][2] = math.inf
    write_results(sweep(given), folder / "broken")
    assert main(["compare", "broken", "--baseline", "rope", "--json"]) == 0

    def refuse(word: str) -> None:
        raise AssertionError(word)

    printed = json.loads(capsys.readouterr().out, parse_constant=refuse)
    (row,) = [r for r in printed["comparisons"] if (r["ratio"], r["quantity"]) == (4, "loss")]
    assert (row["status"], row["difference"], row["p"]) == ("nonfinite", "inf", None)


MISTAKES = [
    ("compare", ["posbench compare PATH --baseline NAME"]),
    ("compare eval", ["--baseline NAME", "rope, alibi"]),
    ("compare eval --baseline roe", ["--baseline roe", "Did you mean rope?", "rope, alibi"]),
    ("compare eval --baseline zzz", ["--baseline zzz", "rope, alibi"]),
    ("compare eval --baseline", ["--baseline", "expected one argument"]),
    ("compare eval --baseline rope --ratios 3", ["--ratios 3", "1,2,4"]),
    ("compare eval --baseline rope --ratios 1,x", ["1,x", "1,2,4"]),
    ("compare eval --baseline rope --ratios 0", ["greater than 0"]),
    ("compare eval --baseline rope --protocol contrlled", ["Did you mean controlled?"]),
    ("compare eval --baseline rope --bseline x", ["--bseline", "Did you mean --baseline?"]),
    ("compare nowhere --baseline rope", ["nowhere", "no such folder"]),
    ("compare alone --baseline rope", ["nothing to compare with rope", "only line"]),
    ("compare empty --baseline rope", ["controlled", "no rows"]),
    ("compare unlike --baseline rope", ["targets_sha256", "aaaa", "bbbb", "--allow-mismatch"]),
    ("power --sd 0 --diff 1", ["--sd", "greater than 0"]),
    ("power --sd 1", ["--diff"]),
    ("power --sd 1 --diff x", ["--diff", "x"]),
    ("power --sd 1 --diff 1 --power 1", ["--power", "less than 1"]),
    ("power --sd 1 --diff 1 --power 0.04", ["--power 0.04", "--alpha 0.05"]),
    ("power --sd 1 --diff 1 --bata 2", ["--bata"]),
]


@pytest.mark.parametrize(("line", "words"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_is_one_line_and_exit_2(
    line: str, words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_results(sweep({"rope": losses()["rope"]}), folder / "alone")
    write_results(Evaluation(), folder / "empty")
    mixed = sweep({"rope": losses()["rope"]}).merged(
        sweep({"alibi": losses()["alibi"]}, targets_sha256="b" * 64)
    )
    write_results(mixed, folder / "unlike")
    assert main(shlex.split(line)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    for word in words:
        assert word in said.err


def test_a_mismatch_on_demand_is_written_on_the_output(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = sweep({"alibi": losses()["alibi"]}, targets_sha256="b" * 64)
    write_results(sweep({"rope": losses()["rope"]}).merged(other), folder / "unlike")
    words = ["compare", "unlike", "--baseline", "rope", "--allow-mismatch", "--out", "out"]
    assert main(words) == 0
    for text in (capsys.readouterr().out, (folder / "out" / "compare.md").read_text()):
        flat = " ".join(text.split())
        assert "--allow-mismatch" in flat
        assert "targets_sha256=aaaaaaaaaaaa" in flat
    assert json.loads((folder / "out" / "compare.json").read_text())["warnings"]


def test_power_says_how_many_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["power", "--sd", "1", "--diff", "0.5"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("34 seeds are needed")
    assert re.search(r"^ *3 +2\.484 +3\.264 ", said, re.MULTILINE)
    assert "posbench compare" in said


def test_neither_command_imports_torch(folder: Path) -> None:
    code = (
        "from posbench.cli import main; import sys\n"
        "assert main(['compare', 'eval', '--baseline', 'rope']) == 0\n"
        "assert main(['power', '--sd', '1', '--diff', '1']) == 0\n"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    assert (done.returncode, done.stderr.strip()) == (0, "False")
