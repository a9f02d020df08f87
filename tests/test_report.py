"""What people read after an evaluation: every cell says something, and nothing it does not know."""

from __future__ import annotations

import html
import io
import itertools
import math
import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

from posbench.catalog import ENCODING_CARDS, EXTENSION_CARDS, POLICY_CARDS
from posbench.errors import UserError
from posbench.report import run_report, terminal_table, write_report
from posbench.report.answer import answer, caveats
from posbench.report.comparison import print_comparison
from posbench.report.drawing import spread_out
from posbench.report.lines import Table, labels_of, number, subjects_of, tables, word
from posbench.report.pairs import compare
from posbench.report.position import traces_of
from posbench.report.style import COLORS, color_of, dash_of, marker_of
from posbench.results import Evaluation, PositionCurve, Row, Status

CARDS = (*ENCODING_CARDS, *POLICY_CARDS)
ENCODINGS_AND_POLICIES = [card.id for card in CARDS]
FILES = (
    "results.csv", "results.json", "results.parquet", "report.md", "report.html", "table.tex",
    *(f"{name}.{kind}" for name in ("curves", "position", "gain") for kind in ("png", "svg")),
)  # fmt: skip
TABLE_REASON = "learned table has 128 rows; 256 positions requested"


def row(ratio: float = 1.0, ppl: float | None = None, **values: Any) -> Row:
    fixed: dict[str, Any] = {
        "run_id": f"{values.get('encoding', 'rope')}-{values.get('seed', 0)}",
        "encoding": "rope",
        "extension": "none",
        "variant": "",
        "model": "tiny",
        "seed": 0,
        "train_length": 128,
        "eval_length": round(128 * ratio),
        "ratio": ratio,
        "protocol": "controlled",
        "targets_sha256": "a" * 64,
    }
    if ppl is not None:
        fixed |= {"ppl": ppl, "value": ppl, "ci_lo": ppl * 0.9, "ci_hi": ppl * 1.1}
        fixed["nll"] = math.log(ppl) if math.isfinite(ppl) else ppl
        fixed |= {"n_targets": 1024, "n_docs": 12, "min_context": round(128 * ratio) - 63}
    return Row(**(fixed | values))


def line(encoding: str, ppls: list[float], seed: int = 0, **values: Any) -> list[Row]:
    return [
        row(ratio, ppl, encoding=encoding, seed=seed, protocol=protocol, **values)
        for protocol in ("nonoverlap", "controlled", "position")
        for ratio, ppl in zip((1.0, 2.0, 4.0), ppls, strict=True)
    ]


def failing(ratio: float, status: Status, reason: str, **values: Any) -> Row:
    return row(ratio, status=status, reason=reason, **values)


def curve(encoding: str, nll: list[float], seed: int = 0) -> PositionCurve:
    lo, hi = [0, 64, 128, 256], [64, 128, 256, 512]
    run_id = f"{encoding}-{seed}"
    return PositionCurve(run_id, encoding, "none", seed, 128, 512, lo, hi, nll, [0.1] * 4, [9] * 4)


def learned() -> list[Row]:
    beyond = [failing(r, Status.unsupported, TABLE_REASON, encoding="learned") for r in (2.0, 4.0)]
    return [row(1.0, 6.7, encoding="learned"), *beyond]


def quickstart() -> Evaluation:
    runs = [
        {
            "run_id": f"{name}-0",
            "encoding": name,
            "seed": 0,
            "unigram_ppl": 27.3,
            "parameters": 800_000,
        }
        for name in ("rope", "alibi", "learned")
    ]
    return Evaluation(
        rows=line("rope", [5.5, 6.0, 7.4]) + line("alibi", [6.4, 6.3, 6.3]) + learned(),
        curves=[curve("rope", [2.0, 1.7, 1.8, 2.0]), curve("alibi", [2.1, 1.8, 1.8, 1.8])],
        runs=runs,
        provenance={"command": "posbench eval-extrapolate", "protocol": {"bootstrap": 2000}},
    )


def seeds() -> Evaluation:
    rows = [r for s in (0, 1, 2) for r in line("rope", [4.0 + s, 8.0 + s, 16.0 + s], seed=s)]
    return Evaluation(rows=rows, curves=[curve("rope", [2.0 + s, 1, 1, 1], s) for s in (0, 1, 2)])


def every_status() -> Evaluation:
    rows = [row(1.0, 6.0, encoding="fire"), row(2.0, 2e5, encoding="fire")]
    broken = {"ppl": math.inf, "nll": math.inf, "n_nonfinite": 3}
    rows.append(failing(4.0, Status.nonfinite, "3 losses", encoding="fire", **broken))
    rows.append(failing(1.0, Status.oom, "needs 90 GB", encoding="cope"))
    rows.append(failing(2.0, Status.not_enough_data, "2 documents", encoding="cope"))
    rows.append(failing(4.0, Status.skipped, "not asked for", encoding="cope"))
    rows.append(failing(2.0, Status.unsupported, "no kernel", encoding="fox"))
    return Evaluation(rows=rows)


EVALUATIONS = {
    "quickstart": quickstart(),
    "seeds": seeds(),
    "statuses": every_status(),
    "one run": Evaluation(rows=line("rope", [5.5, 6.0, 7.4])),
    "half": Evaluation(rows=[row(0.5, 6.0), row(1.0, 5.5), row(2.0, 6.1)]),
    "1x only": Evaluation(rows=[row(1.0, 5.5)]),
    "nothing ok": Evaluation(rows=[failing(r, Status.oom, "too large") for r in (1.0, 2.0)]),
    "all infinite": Evaluation(
        rows=[failing(r, Status.nonfinite, "all", ppl=math.inf, nll=math.inf) for r in (1.0, 2.0)],
        curves=[curve("rope", [math.nan, math.inf, math.nan, math.inf])],
    ),
    "two lengths": Evaluation(
        rows=line("rope", [5.0, 6.0, 7.0])
        + [row(r, 5.0, train_length=256, eval_length=int(256 * r), run_id="b") for r in (1.0, 2.0)],
        curves=[curve("rope", [2.0, 1.0, 1.0, 1.0])],
    ),
    "empty": Evaluation(),
}


def shown(evaluation: Evaluation) -> Table:
    return tables(evaluation)[0]


# ---------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        (row(1.0, 5.504), "5.50"),
        (row(1.0, 123.45), "123.5"),
        (row(1.0, 9999.4), "9999"),
        (row(1.0, 10_001.0), ">1e4"),
        (row(1.0, math.inf, nll=800.0), ">1e4"),  # exp overflowed; the loss itself is finite
        (failing(1.0, Status.nonfinite, "", ppl=math.inf), "inf"),
        (failing(1.0, Status.nonfinite, ""), "inf"),
        (failing(1.0, Status.nonfinite, "", ppl=math.nan), "nan"),
        (failing(2.0, Status.unsupported, TABLE_REASON), "n/a (table 128)"),
        (
            failing(2.0, Status.unsupported, "table has 4096 rows; 8192 requested"),
            "n/a (table 4096)",
        ),
        (failing(2.0, Status.unsupported, "no kernel for 3 rows"), "n/a"),
        (failing(2.0, Status.oom, ""), "oom"),
        (failing(2.0, Status.skipped, ""), "skipped"),
        (failing(2.0, Status.not_enough_data, ""), "not enough data"),
    ],
)
def test_each_cell_has_its_word(cell: Row, expected: str) -> None:
    assert word(cell) == expected


@pytest.mark.parametrize("name", EVALUATIONS)
def test_no_cell_is_blank(name: str) -> None:
    for table in tables(EVALUATIONS[name]):
        for each in table.lines:
            assert all(each.cell(ratio).text.strip() for ratio in table.ratios)


def test_every_word_that_explains_nothing_has_its_reason_below() -> None:
    text = terminal_table(every_status())
    for reason in ("3 losses", "needs 90 GB", "2 documents", "not asked for", "no kernel"):
        mark = re.search(rf"\((\d)\) {reason}", text)
        assert mark, reason
        assert text.count(f"({mark[1]})") >= 2
    assert "not measured" in text  # fox has no row at 1x and 4x


# ---------------------------------------------------------------- lines


def test_seeds_are_averaged_and_their_ratios_paired() -> None:
    (found,) = shown(seeds()).lines
    cell = found.cell(4.0)
    assert cell.mean == pytest.approx((16 + 17 + 18) / 3)
    assert cell.ratio == pytest.approx((16 / 4 + 17 / 5 + 18 / 6) / 3)
    assert (cell.low, cell.high, cell.spread) == (16.0, 18.0, "±1.0")
    assert found.seeds == [0, 1, 2]


def test_one_seed_shows_its_interval() -> None:
    found = shown(quickstart()).lines[0]
    assert found.cell(1.0).spread == f"[{number(5.5 * 0.9)}, {number(5.5 * 1.1)}]"


@pytest.mark.parametrize("of_the_rest", [math.inf, math.nan, 4.0, None])
def test_one_broken_seed_is_not_averaged_away(of_the_rest: float | None) -> None:
    broken = failing(2.0, Status.nonfinite, "1 loss", seed=1, ppl=of_the_rest)
    rows = [row(2.0, 5.0, seed=0), broken]
    cell = shown(Evaluation(rows=rows)).lines[0].cell(2.0)
    assert cell.text in ("inf", "nan")
    assert (cell.mean, cell.ratio) == (math.inf, None)


def test_a_missing_seed_is_counted() -> None:
    rows = [row(2.0, 5.0, seed=0), failing(2.0, Status.oom, "large", seed=1)]
    cell = shown(Evaluation(rows=rows)).lines[0].cell(2.0)
    assert (cell.text, cell.reasons) == ("5.00 (1 of 2 seeds)", ("large",))


def test_extensions_and_variants_of_one_run_are_lines_of_their_own() -> None:
    rows = [row(2.0, 5.0), row(2.0, 4.0, extension="yarn"), row(2.0, 6.0, variant="beyond=clamp")]
    labels = [each.label for each in shown(Evaluation(rows=rows)).lines]
    assert labels == ["rope", "rope + yarn", "rope (beyond=clamp)"]


def test_two_runs_of_one_seed_are_not_taken_for_two_seeds() -> None:
    rows = [row(1.0, 4.0, run_id="a"), row(1.0, 6.0, run_id="b")]
    runs = [{"run_id": "a", "folder": "x/0-rope"}, {"run_id": "b", "folder": "x/1-rope"}]
    lines = shown(Evaluation(rows=rows, runs=runs)).lines
    assert [(each.label, each.cell(1.0).mean) for each in lines] == [
        ("rope [0-rope]", 4.0),
        ("rope [1-rope]", 6.0),
    ]


def test_seeds_of_different_settings_are_not_averaged() -> None:
    rows = [row(1.0, 4.0, run_id="a", seed=0), row(1.0, 6.0, run_id="b", seed=1)]
    runs = [{"run_id": r, "settings_id": r * 8, "folder": f"s/{r}"} for r in "ab"]
    lines = shown(Evaluation(rows=rows, runs=runs)).lines
    assert [each.label for each in lines] == ["rope [a]", "rope [b]"]


def test_labels_name_model_and_length_only_where_they_differ() -> None:
    rows = [row(1.0, 4.0), row(1.0, 3.0, model="small", run_id="s")]
    evaluation = Evaluation(rows=rows)
    labels = labels_of(subjects_of(evaluation).values(), evaluation)
    assert list(labels.values()) == ["rope tiny", "rope small"]


# ---------------------------------------------------------------- terminal


def test_the_headline_comes_first_whatever_the_order_of_rows() -> None:
    titles = re.findall(r"^Perplexity, .*$", terminal_table(quickstart()), re.MULTILINE)
    assert [title.split()[1] for title in titles] == ["controlled", "nonoverlap", "position"]
    assert titles[0].endswith("(headline)")
    assert not any("headline" in title for title in titles[1:])


@pytest.mark.parametrize("name", EVALUATIONS)
def test_eighty_columns_are_enough(name: str) -> None:
    text = terminal_table(EVALUATIONS[name], width=80)
    assert max(len(each) for each in text.splitlines()) <= 80
    assert "\x1b" not in text
    assert "…" not in text


def test_a_wide_terminal_has_one_line_for_each_encoding() -> None:
    text = terminal_table(quickstart(), width=140)
    assert re.search(r"rope +5\.50  \[4\.95, 6\.05\] +6\.00  1\.09x  \[5\.40, 6\.60\]", text)
    assert re.search(r"learned +6\.70  \[\S+ \S+\] +n/a \(table 128\) +n/a \(table 128\)", text)


def test_the_unigram_perplexity_stands_beside_the_table() -> None:
    assert "27.30" in terminal_table(quickstart())


# ---------------------------------------------------------------- the answer


def test_the_answer_follows_its_rule() -> None:
    trend, lowest = answer(shown(quickstart()))
    assert "held within 5 % of its value at 1x for alibi (0.98x)" in trend
    assert "rose for rope (1.35x)" in trend
    assert "learned [n/a (table 128)]" in trend
    assert "at 4x alibi (6.30, not separated from rope)" in lowest


@pytest.mark.parametrize(
    ("at_4x", "verb"), [(5.24, "held"), (5.26, "rose"), (4.76, "held"), (4.74, "fell")]
)
def test_held_means_within_five_per_cent(at_4x: float, verb: str) -> None:
    sentence = answer(shown(Evaluation(rows=[row(1.0, 5.0), row(4.0, at_4x)])))[0]
    assert verb in sentence


def test_the_answer_ranks_nothing_that_is_not_finite() -> None:
    rows = [row(1.0, 5.0), failing(4.0, Status.nonfinite, "all", ppl=math.inf)]
    rows += [row(1.0, 6.0, encoding="alibi"), row(4.0, 6.0, encoding="alibi")]
    trend, lowest = answer(shown(Evaluation(rows=rows)))
    assert "was not finite for rope" in trend
    assert "at 4x alibi" in lowest


def test_what_is_missing_is_said() -> None:
    evaluation = quickstart()
    said = " ".join(caveats(evaluation, tables(evaluation)))
    assert f"learned: unsupported at 256 and 512 tokens (controlled): {TABLE_REASON}" in said
    assert "no inference about seeds" in said
    three = seeds()
    assert "no inference" not in " ".join(caveats(three, tables(three)))


def test_a_number_without_interval_says_why() -> None:
    few = "no interval: 4 documents, fewer than 10"
    evaluation = Evaluation(rows=[row(1.0, 5.0, reason=few, ci_lo=None, ci_hi=None)])
    assert f"rope: {few} (controlled)." in caveats(evaluation, tables(evaluation))


def test_a_model_no_better_than_token_frequencies_is_named() -> None:
    evaluation = Evaluation(rows=line("rope", [30.0, 30.0, 30.0]), runs=quickstart().runs)
    assert "rope has learned little" in " ".join(caveats(evaluation, tables(evaluation)))


def test_different_targets_are_not_silently_compared() -> None:
    rows = [row(1.0, 5.0), row(1.0, 5.0, encoding="alibi", targets_sha256="b" * 64)]
    evaluation = Evaluation(rows=rows)
    assert "2 different sets of target tokens" in " ".join(caveats(evaluation, tables(evaluation)))


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("name", EVALUATIONS)
def test_every_evaluation_gets_its_report(name: str, tmp_path: Path) -> None:
    write_report(EVALUATIONS[name], tmp_path)
    for file in FILES:
        assert (tmp_path / file).stat().st_size > 0, file
    page = (tmp_path / "report.html").read_text()
    assert not re.search(r"<(td|b)[^>]*>\s*(None|Undefined)\s*</(td|b)>", page)
    assert not re.search(r"<b[^>]*>\s*</b>", page)


def test_the_page_needs_no_other_file_and_no_network(tmp_path: Path) -> None:
    write_report(quickstart(), tmp_path)
    page = (tmp_path / "report.html").read_text()
    for target in re.findall(r"(?:src|href)\s*=\s*[\"']([^\"']*)", page):
        assert target.startswith("#"), target
    for target in re.findall(r"url\(([^)]*)\)", page):
        assert target.strip("'\"").startswith("#"), target
    assert "@import" not in page
    assert "http" not in page
    assert "prefers-color-scheme: dark" in page


def test_pictures_in_the_page_are_well_formed_and_take_its_colours(tmp_path: Path) -> None:
    write_report(quickstart(), tmp_path)
    svgs = re.findall(r"<svg.*?</svg>", (tmp_path / "report.html").read_text(), re.DOTALL)
    assert len(svgs) == 2
    ids: list[str] = []
    for svg in svgs:
        root = ElementTree.fromstring(svg.replace("xlink:", ""))
        own = [each.attrib["id"] for each in root.iter() if "id" in each.attrib]
        used = re.findall(r"url\(#([^)]+)\)", svg) + re.findall(r'href="#([^"]+)"', svg)
        assert set(used) <= set(own)
        assert "currentColor" in svg
        assert color_of("rope") in svg
        ids += own
    assert len(ids) == len(set(ids))


def test_the_page_escapes_what_it_is_given(tmp_path: Path) -> None:
    evaluation = Evaluation(rows=[failing(1.0, Status.oom, "<script>alert(1)</script>")])
    write_report(evaluation, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<script") == 1  # our own, which sorts tables
    assert "&lt;script&gt;alert" in page


ODD = "a$\\frac$*b*_c_ <img src=x> `q` [x](y) $"


def test_odd_names_are_shown_as_they_are(tmp_path: Path) -> None:
    """Neither mathematics in a figure, nor markup in Markdown, nor a command in LaTeX."""
    rows = [*line("rope", [5.0, 6.0, 7.0]), *line("alibi", [5.0, 5.0, 5.0])]
    for each in rows:
        each.encoding = {"rope": ODD, "alibi": "[z]"}[each.encoding]
    write_report(Evaluation(rows=rows), tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert html.escape(ODD, quote=False) in page
    assert "<img" not in page
    wanted = r"a$\\frac$\*b\*\_c\_ \<img src=x> \`q\` [x\](y) $"
    text = (tmp_path / "report.md").read_text()
    assert text.count(wanted) == text.count("frac") > 2
    table = (tmp_path / "table.tex").read_text()
    assert r"a\$\textbackslash{}frac\$*b*\_c\_ \textless{}img" in table
    assert "    {}[z] &" in table  # a bracket after a line's end would be its argument


def test_words_of_a_comparison_are_never_cut() -> None:
    others = line("an encoding of a longer name", [5.0, 6.0, 7.0])
    for each in others:
        each.status, each.value, each.ppl, each.nll = Status.not_enough_data, None, None, None
    found = compare(Evaluation(rows=[*line("rope", [5.0, 6.0, 7.0]), *others]), "rope")
    for width in (80, 60, 40):
        text = io.StringIO()
        print_comparison(found, [], Console(file=text, width=width))
        assert "…" not in text.getvalue()
        assert all(part in text.getvalue() for part in ("not", "enoug", "longe"))


def test_markdown_rows_are_as_wide_as_their_heading(tmp_path: Path) -> None:
    evaluation = Evaluation(rows=[failing(1.0, Status.oom, "a | b\nc")], provenance={"x": "1|2"})
    write_report(evaluation, tmp_path)
    blocks = re.findall(r"(?:^\|.*\n)+", (tmp_path / "report.md").read_text(), re.MULTILINE)
    assert blocks
    for block in blocks:
        widths = {len(re.findall(r"(?<!\\)\|", each)) for each in block.splitlines()}
        assert len(widths) == 1, block


def test_the_report_is_the_same_each_time_it_is_written(tmp_path: Path) -> None:
    write_report(quickstart(), tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in FILES}
    for name in FILES:
        if name != "results.json":
            (tmp_path / name).unlink()
    run_report([tmp_path])
    assert {name: (tmp_path / name).read_bytes() for name in FILES} == before


def test_a_folder_without_results_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"results\.json"):
        run_report([tmp_path])


@pytest.mark.parametrize("content", ["{}", "[1]", '{"schema_version": 1}', "\ufffd{"])
def test_a_foreign_results_file_is_a_user_error_and_stays(tmp_path: Path, content: str) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    write_report(quickstart(), good)
    (good / "report.md").unlink()
    shutil.copytree(good, bad)
    (bad / "results.json").write_text(content)
    with pytest.raises(UserError, match="bad"):
        run_report([good, bad])
    assert (bad / "results.json").read_text() == content
    assert not (good / "report.md").exists()  # nothing is written if one path is wrong


# ---------------------------------------------------------------- pictures


def test_traces_average_seeds_and_keep_their_range() -> None:
    (trace,) = traces_of(seeds())
    assert trace.centres == [32, 96, 192, 384]
    assert (trace.nll[0], trace.low[0], trace.high[0]) == (3.0, 2.0, 4.0)


def test_an_encoding_keeps_its_colour() -> None:
    looks = {name: (color_of(name), marker_of(name)) for name in ENCODINGS_AND_POLICIES}
    assert len(set(looks.values())) == len(looks)
    for family in {card.family for card in CARDS}:
        names = [card.id for card in CARDS if card.family == family]
        assert len({color_of(name) for name in names}) == len(names), family
    assert color_of("mine") == "#c88804"  # in every process, not only in this one
    dashes = [str(dash_of(card.id)) for card in EXTENSION_CARDS if card.id != "alibi_pi"]
    assert len(set(dashes)) == len(dashes)


@pytest.mark.parametrize("places", [[], [0.5], [0.1, 0.9], [0.5, 0.5, 0.5], [0.1, 0.12, 0.8, 0.81]])
def test_labels_do_not_overlap_and_move_no_further_than_needed(places: list[float]) -> None:
    moved = spread_out(places, 0.1, 0.0, 1.0)
    assert all(b - a >= 0.1 - 1e-9 for a, b in itertools.pairwise(moved))
    assert sum(moved) == pytest.approx(sum(places))


@pytest.mark.parametrize("places", [[1.0] * 5, [0.0, 0.0, 0.98, 0.99], [0.0, 0.5, 1.0]])
def test_labels_stay_beside_their_axes(places: list[float]) -> None:
    moved = spread_out(places, 0.1, 0.0, 1.0)
    assert min(moved) >= -1e-9
    assert max(moved) <= 1 + 1e-9
    assert all(b - a >= 0.1 - 1e-9 for a, b in itertools.pairwise(moved))


def _seen(color: str, vision: list[list[float]]) -> np.ndarray:
    """A colour in CIE Lab as someone with this vision sees it."""
    code = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(code <= 0.04045, code / 12.92, ((code + 0.055) / 1.055) ** 2.4)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = to_xyz @ np.clip(vision @ linear, 0, 1) / np.array([0.9505, 1.0, 1.089])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


# Machado, Oliveira and Fernandes 2009, severity 1.
VISIONS: dict[str, list[list[float]]] = {
    "normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


@pytest.mark.parametrize("vision", VISIONS)
def test_colours_differ_for_the_colour_blind(vision: str) -> None:
    names = ("none", "sinusoidal", "learned", "rope", "alibi")
    for colors, least in (([color_of(name) for name in names], 25), (COLORS, 19)):
        seen = [_seen(color, VISIONS[vision]) for color in colors]
        for one, other in itertools.combinations(seen, 2):
            assert np.linalg.norm(one - other) > least  # 2.3 is just noticeable, side by side


@pytest.mark.parametrize("paper", ["#ffffff", "#15181c"])
def test_colours_can_be_read_on_light_and_on_dark(paper: str) -> None:
    def luminance(color: str) -> float:
        code = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        linear = np.where(code <= 0.04045, code / 12.92, ((code + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    for color in COLORS:
        low, high = sorted((luminance(color), luminance(paper)))
        assert (high + 0.05) / (low + 0.05) > 2.5, color
