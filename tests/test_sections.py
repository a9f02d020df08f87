"""The report's parts in their order: extensions, diagnostics, what is missing, files of its own."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from made_up import FIVE, L, made_up
from pyarrow import parquet

from posbench.catalog import ENCODING_CARDS, POLICY_CARDS
from posbench.cli import main
from posbench.config import TrainSettings
from posbench.errors import Exit, UserError
from posbench.jobs.absent import absent
from posbench.jobs.measuring import Candidate
from posbench.report import curves, drawing, run_report, terminal_table, write_report
from posbench.report.content import content_of
from posbench.report.diagnostics import diagnostic_grids, heads_of
from posbench.report.extended import extension_grids, headline_of
from posbench.report.figures import picture
from posbench.report.grid import Grid
from posbench.report.latex import latex, table_tex
from posbench.report.lines import tables
from posbench.report.pages import markdown
from posbench.results import COLUMNS, STUDY, Evaluation, Row, Status, read_results, write_results
from posbench.runs import Run
from posbench.sweeps import Entry, State, Sweep

EVERYTHING = [card.id for card in (*ENCODING_CARDS, *POLICY_CARDS)]
ENDS = ("effective_length", "cliff_position")
EXTENDED = ("none", "ntk", "yarn")


def titles(evaluation: Evaluation) -> list[str]:
    return [section.title for section in content_of(evaluation).sections]


def grids(evaluation: Evaluation) -> dict[str, Grid]:
    parts = [part for section in content_of(evaluation).sections for part in section.parts]
    return {part.title: part for part in parts if isinstance(part, Grid)}


# ---------------------------------------------------------------- order


def test_sections_come_in_the_order_in_which_they_are_read() -> None:
    assert titles(made_up(extensions=EXTENDED, attention=True)) == [
        "Where the numbers come from",
        "Perplexity, controlled (headline)",
        "Perplexity against length",
        "Loss against position",
        "Gain over 1x, nats per token (controlled)",
        "Claims and measurements",
        "What training cost",
        "Extensions on one checkpoint",
        "Other protocols",
        "Diagnostics",
        "How to read this",
        "The protocol",
        "BibTeX",
        "Everything recorded",
    ]


def test_markdown_and_page_say_the_same(tmp_path: Path) -> None:
    evaluation = made_up(extensions=EXTENDED)
    write_report(evaluation, tmp_path)
    page, text = ((tmp_path / f"report.{kind}").read_text() for kind in ("html", "md"))
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings == re.findall(r"^## (.*)$", text, re.MULTILINE) == titles(evaluation)
    for name in re.findall(r"!\[[^]]*\]\((\S+)\)", text):
        assert (tmp_path / name).is_file()


def test_many_evaluations_are_one_span_of_time_and_a_study_one_command() -> None:
    evaluation = made_up(("rope", "alibi"))
    times = ("2026-01-02T08:00:00", "2026-01-01T09:30:00", "2026-01-01T10:00:00")
    commands = [{"created": time, "command": ["posbench", time]} for time in times]
    evaluation.provenance["evaluations"] = commands
    text = markdown(content_of(evaluation))
    assert "| evaluated | 2026-01-01T09:30 to 2026-01-02T08:00 |" in text
    assert f"| command | posbench {times[0]} ; posbench {times[1]} ; " in text
    evaluation.provenance[STUDY] = {"command": ["posbench", "study", "mine"]}
    assert "| command | posbench study mine |" in markdown(content_of(evaluation))
    assert "posbench study mine" not in markdown(content_of(evaluation.merged(made_up(("none",)))))


def test_what_all_runs_share_is_said_once() -> None:
    evaluation = made_up(("rope", "alibi"))
    for number, run in enumerate(evaluation.runs):
        run |= {"checkpoint_sha256": f"{number:064x}", "protocol": {"stride": 32}}
    text = markdown(content_of(evaluation))
    assert text.count("protocol.stride") == text.count("| every run: protocol.stride | 32 |") == 1
    for run in evaluation.runs:
        assert f"| run {run['run_id']}: checkpoint_sha256 | {run['checkpoint_sha256']} |" in text
    evaluation.runs[0]["protocol"] = {"stride": 64}
    text = markdown(content_of(evaluation))
    assert f"| run {evaluation.runs[0]['run_id']}: protocol.stride | 64 |" in text
    assert text.count(": protocol.stride | 32 |") == len(evaluation.runs) - 1


def test_what_is_derived_scored_nothing_of_its_own() -> None:
    evaluation = made_up(("rope",), (0,))
    scored = [row[:2] for row in grids(evaluation)["What was scored"].rows]
    derived = dataclasses.replace(evaluation.rows[0], metric="cliff_position", min_context=None)
    evaluation.rows.append(derived)
    assert [row[:2] for row in grids(evaluation)["What was scored"].rows] == scored
    assert len(scored) == len({tuple(row) for row in scored})


def test_a_report_cites_what_it_shows_and_itself() -> None:
    text = markdown(content_of(made_up(("rope", "alibi"), extensions=EXTENDED)))
    for key in ("posbench", "su2021", "press2022", "bloc97", "peng2023"):
        assert f"{{{key}," in text
    assert "vaswani2017" not in text
    assert "haviv2022" not in text  # the extension `none` is not the encoding of that name


# ---------------------------------------------------------------- extensions


def test_extensions_of_one_model_stand_beside_each_other() -> None:
    (grid,) = extension_grids(tables(made_up(extensions=EXTENDED))[0])
    assert [row[0] for row in grid.rows] == ["none", "ntk", "yarn"]
    assert "rope" in grid.title
    assert "Not for none, sinusoidal, learned, alibi: ntk, yarn." in grid.notes


def test_what_does_not_apply_is_no_line_of_the_headline() -> None:
    evaluation = made_up(extensions=EXTENDED)
    assert [line.label for line in headline_of(tables(evaluation)[0]).lines] == [*FIVE]
    said = " ".join(content_of(evaluation).caveats)
    assert "yarn" not in said
    assert "learned: unsupported" in said  # of the model itself, it is still said
    assert not any("alibi + ntk" in row for row in grids(evaluation)["What training cost"].rows)
    gain = grids(evaluation)["Gain over 1x, nats per token (controlled)"]
    assert [row[0] for row in gain.rows if "+" in row[0]] == ["rope + ntk", "rope + yarn"]


def test_one_model_under_extensions_is_the_headline() -> None:
    evaluation = made_up(("rope",), extensions=EXTENDED)
    assert len(headline_of(tables(evaluation)[0]).lines) == 3
    alone = made_up(FIVE, extensions=("yarn",))
    assert [line.label for line in headline_of(tables(alone)[0]).lines] == [
        f"{name} + yarn" for name in FIVE
    ]


# ---------------------------------------------------------------- diagnostics


def test_each_diagnostic_has_its_table() -> None:
    evaluation = made_up(("rope", "alibi"), attention=True)
    base = vars(next(row for row in evaluation.rows if row.ratio == 4 and row.encoding == "rope"))
    kind = type(evaluation.rows[0])
    for protocol, metric, value in (
        ("shift", "max_abs_delta_nll", 2.5e-6),
        ("context_ablation", "loss_change", 0.0312),
        ("longppl_self", "key_ppl", 3.25),
        ("longppl_self", "key_fraction", 0.0125),
        ("attention", "mass_beyond", 0.5),
    ):
        values = {"protocol": protocol, "metric": metric, "value": value, "ppl": None, "nll": None}
        for seed in (0, 1):
            evaluation.rows.append(
                kind(**(base | values | {"seed": seed, "run_id": f"rope-s{seed}"}))
            )
    found = {grid.title: grid.rows for grid in diagnostic_grids(evaluation)}
    assert [rows[0][1][0] for rows in found.values()] == [
        "2.50e-06", "+0.031", "3.25", "0.0125", "0.500",
    ]  # fmt: skip
    assert all(rows[0][1][2].startswith("±") for rows in found.values())


def test_heads_are_averaged_over_seeds() -> None:
    evaluation = made_up(("rope",), attention=True)
    (picture_,) = heads_of(evaluation)
    own = [h.mass_beyond for h in evaluation.attention if (h.layer, h.head) == (2, 1)]
    assert len(own) == 3
    assert picture_.weights[2][1] == pytest.approx(sum(own) / 3)
    assert (len(picture_.weights), len(picture_.weights[0])) == (4, 4)


# ---------------------------------------------------------------- what is missing


def stopped(folder: Path, seed: int, status: str, step: int | None) -> Candidate:
    """A run that was begun and has no checkpoint to evaluate."""
    folder.mkdir(parents=True)
    if step is not None:
        (folder / "metrics.jsonl").write_text(json.dumps({"step": step, "loss": 2.0}) + "\n")
    (folder / "run.json").write_text("{}")
    settings = TrainSettings(seed=seed)
    manifest: dict[str, Any] = {"run_id": f"alibi-s{seed}", "status": status}
    if status == "diverged":
        manifest["reason"] = "loss is nan"
    return Candidate(folder, Run(folder, manifest, settings), damaged=f"{folder} is not finished")


def test_what_a_sweep_lacks_is_recorded(tmp_path: Path) -> None:
    candidates = [
        stopped(tmp_path / "3-alibi", 2, "running", 120),
        stopped(tmp_path / "4-alibi-seed3", 3, "diverged", 7),
        stopped(tmp_path / "5-alibi", 4, "interrupted", None),
        Candidate(tmp_path / "6-alibi", damaged="run.json cannot be read"),
    ]
    sweep = Sweep(tmp_path, "train", [])
    sweep.jobs = [
        Entry("3-alibi", "c", "alibi", State.timed_out, reason="after 60 s"),
        Entry("5-alibi", "e", "alibi", State.stopped),
        Entry("7-alibi", "g", "alibi"),
        Entry("8-alibi", "h", "alibi", State.failed, reason="no such corpus"),
    ]
    sweep.save()
    found = absent(candidates)
    steps = TrainSettings().train.steps
    assert [(each["name"], each["why"]) for each in found] == [
        ("3-alibi-seed2", f"unfinished at step 120 of {steps}; timed out: after 60 s"),
        ("4-alibi-seed3", f"unfinished at step 7 of {steps}; diverged: loss is nan"),
        ("5-alibi-seed4", f"unfinished at step 0 of {steps}"),
        ("6-alibi", "run.json cannot be read"),
        ("7-alibi", "not started"),
        ("8-alibi", "failed: no such corpus"),
    ]
    assert len(absent(candidates[:1])) == 1  # one run of a sweep was asked for, not the sweep
    (tmp_path / "sweep.json").write_text("torn")
    assert len(absent(candidates)) == 4


def half_finished() -> Evaluation:
    """The third seed of alibi stopped half-way."""
    evaluation = made_up()
    settings_id = next(r["settings_id"] for r in evaluation.runs if r["encoding"] == "alibi")
    evaluation.runs = [run for run in evaluation.runs if run["run_id"] != "alibi-s2"]
    for row in evaluation.rows:
        if row.run_id == "alibi-s2":
            row.status, row.value, row.ppl, row.nll = Status.skipped, None, None, None
            row.reason = "x/3-alibi is not finished (running)"
    record = {
        "folder": "x/3-alibi", "name": "3-alibi-seed2", "why": "unfinished at step 120 of 500",
        "run_id": "alibi-s2", "settings_id": settings_id,
    }  # fmt: skip
    evaluation.provenance["evaluations"][0]["missing"] = [record]
    return evaluation


def test_a_half_finished_sweep_has_its_report(tmp_path: Path) -> None:
    evaluation = half_finished()
    write_report(evaluation, tmp_path)
    for name in ("report.md", "report.html"):
        text = (tmp_path / name).read_text()
        assert "Missing: 1 run" in text
        assert "3-alibi-seed2 (unfinished at step 120 of 500)" in text
        assert "alibi: skipped" not in text  # it is said once
    whole = next(row for row in evaluation.rows if row.encoding == "alibi" and row.ratio == 4)
    ends = {"metric": "effective_length", "value": 512.0, "ppl": None, "nll": None}
    evaluation.rows += [Row(**(vars(whole) | ends | {"metric": name})) for name in ENDS]
    assert "…" not in terminal_table(evaluation, 80)
    (line,) = [each for each in tables(evaluation)[0].lines if "alibi" in each.label]
    assert line.cell(4.0).text.endswith("(2 of 3 seeds)")


def test_a_run_that_a_later_evaluation_has_is_not_missing() -> None:
    both = half_finished().merged(made_up(("alibi",), (2,)))
    assert content_of(half_finished()).missing
    assert not content_of(both).missing


# ---------------------------------------------------------------- files


def test_parquet_holds_what_the_csv_holds(tmp_path: Path) -> None:
    evaluation = half_finished()
    write_results(evaluation, tmp_path)
    table = parquet.read_table(tmp_path / "results.parquet")
    assert tuple(table.column_names) == COLUMNS
    kinds = {name: str(table.schema.field(name).type) for name in COLUMNS}
    assert (kinds["seed"], kinds["ppl"], kinds["status"]) == ("int64", "double", "string")
    assert kinds["peak_mem_mb"] == "double"  # although every value is missing
    assert [tuple(row.values()) for row in table.to_pylist()] == [
        tuple(vars(row).values()) for row in evaluation.rows
    ]


def test_the_latex_table_keeps_its_words() -> None:
    evaluation = half_finished()
    text = table_tex(evaluation, headline_of(tables(evaluation)[0]))
    assert r"learned & 5.56 $\pm$0.024 & n/a (table 128) & n/a (table 128) \\" in text
    assert "(2 of 3 seeds)" in text
    assert r"\toprule" in text
    caption = re.search(r"\\caption\{(.*)\}", text)
    assert caption
    for fact in ("posbench-v1", "pysource", "cdcdcdcdcdcd", "abababababab", "torch 2.13.0"):
        assert fact in caption[1]
    assert "Mean and standard deviation over seeds." in caption[1]
    assert table_tex(Evaluation(), None).startswith("%")


@pytest.mark.parametrize(
    ("seeds", "said"),
    [((0,), "ratio to 1x"), ((0, 1), "Mean and standard deviation over seeds; of one, a")],
)
def test_the_latex_table_says_what_its_spreads_are(seeds: tuple[int, ...], said: str) -> None:
    evaluation, more = made_up(["rope"], (0,)), made_up(["alibi"], seeds)
    evaluation.rows += more.rows
    evaluation.runs += more.runs
    text = table_tex(evaluation, headline_of(tables(evaluation)[0]))
    assert said in text
    assert "95 % interval" in text.replace("\\%", "%")


def test_latex_takes_any_text() -> None:
    assert latex("a_b & 5 % <x>") == r"a\_b \& 5 \% \textless{}x\textgreater{}"
    assert latex("\\ {~^}\n#$") == (
        r"\textbackslash{} \{\textasciitilde{}\textasciicircum{}\} \#\$"
    )


def test_an_attention_picture_only_where_attention_was_looked_at(tmp_path: Path) -> None:
    write_report(made_up(("rope",)), tmp_path)
    assert not (tmp_path / "attention.svg").exists()
    write_report(made_up(("rope",), attention=True), tmp_path)
    assert (tmp_path / "attention.png").exists()
    for file in tmp_path.glob("*.svg"):
        assert ElementTree.parse(file).getroot().tag == "{http://www.w3.org/2000/svg}svg"


# ---------------------------------------------------------------- figures


def drawn(evaluation: Evaluation) -> str:
    figure = curves.length_figure(tables(evaluation)[0])
    return picture("curves", lambda canvas: drawing.draw_curves(canvas, figure)).svg


def label_places(svg: str) -> list[tuple[str, float, float]]:
    """(text, x, y) of the names at the ends of lines."""
    bold = r'<text style="font-weight: 700[^>]* x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]+)<'
    found = re.findall(bold, svg)
    return [(text, float(x), float(y)) for x, y, text in found]


@pytest.mark.parametrize(
    ("encodings", "extensions"), [(FIVE, ("none",)), (EVERYTHING, EXTENDED)], ids=["five", "all"]
)
def test_every_line_has_its_name_and_no_two_overlap(
    encodings: Sequence[str], extensions: Sequence[str]
) -> None:
    labels = label_places(drawn(made_up(encodings, (0,), extensions)))
    names = [label.split(":")[0] for label, _, _ in labels]
    extended = [f"rope + {name}" for name in extensions if name != "none"]
    assert sorted(names) == sorted([*encodings, *extended])
    for (_, x, y), (_, other_x, other_y) in itertools.combinations(labels, 2):
        assert abs(x - other_x) > 20 or abs(y - other_y) > 9  # of 9.5 point letters


def test_many_encodings_get_a_panel_for_each_family() -> None:
    figure = curves.length_figure(
        tables(made_up([card.id for card in ENCODING_CARDS], (0,), EXTENDED))[0]
    )
    assert figure is not None
    assert len(figure.curves) > drawing.MOST_LINES
    families = {curve.family for curve in figure.curves}
    assert families == {card.family for card in ENCODING_CARDS} | {curves.EXTENDED}


def test_gain_starts_at_nothing_and_deep_losses_do_not_press_it_flat() -> None:
    figure = curves.gain_figure(made_up())
    assert figure is not None
    assert figure.ratios == [1.0, 2.0, 4.0]
    for curve in figure.curves:
        assert (curve.x[0], curve.y[0]) == (L, 0.0)
    svg = picture("gain", lambda canvas: drawing.draw_gain(canvas, figure)).svg
    assert re.search(r"sinusoidal [-\u2212]1\.6", svg)  # off the axis, its number stands beside it
    assert not re.search(r">[-\u2212]1\.", svg)  # and no tick reaches down there


# ---------------------------------------------------------------- the command


def test_report_without_a_path_takes_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POSBENCH_OUTPUTS", str(tmp_path))
    assert main(["report"]) == Exit.USER
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 1
    assert "nothing to report" in said.err
    for name, year in (("b", 2027), ("a", 2026)):
        evaluation = made_up(("rope",), (0,))
        evaluation.provenance["evaluations"][0]["created"] = f"{year}-01-01"
        write_results(evaluation, tmp_path / "eval-extrapolate" / name)
    assert main(["report"]) == Exit.OK
    assert (tmp_path / "eval-extrapolate" / "b" / "report.html").exists()
    assert str(tmp_path / "eval-extrapolate" / "b") in capsys.readouterr().out


def test_report_of_a_sweep_takes_the_evaluation_that_measured_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSBENCH_OUTPUTS", str(tmp_path))
    run = tmp_path / "train" / "sweep" / "0-rope"
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"checkpoint": {"sha256": "mine"}}))
    for name in ("mine", "other"):
        evaluation = made_up(("rope",), (0,))
        evaluation.runs[0]["checkpoint_sha256"] = name
        write_results(evaluation, tmp_path / "eval-extrapolate" / name)
    run_report([tmp_path / "train" / "sweep"])
    assert (tmp_path / "eval-extrapolate" / "mine" / "report.md").exists()
    assert not (tmp_path / "eval-extrapolate" / "other" / "report.md").exists()


@pytest.mark.parametrize("content", ["", "no such folder", "a folder without one"])
def test_a_report_of_nothing_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    folder = tmp_path / "out"
    if content == "":
        write_results(Evaluation(), folder)
    elif content == "a folder without one":
        folder.mkdir()
    assert main(["report", str(folder)]) == Exit.USER
    assert len(capsys.readouterr().err.splitlines()) == 1
    with pytest.raises(
        UserError, match=r"nothing to report|no such folder|neither results.json nor a run"
    ):
        run_report([folder])


def test_a_report_reads_back_what_it_wrote(tmp_path: Path) -> None:
    write_results(half_finished(), tmp_path)
    assert content_of(read_results(tmp_path)) == content_of(half_finished())
