"""Claims and verdicts: one rule, its borders, and what it must not be fooled by."""

from __future__ import annotations

import math
import re
import subprocess
from pathlib import Path
from shutil import which

import numpy as np
import pytest
from made_up import DOCUMENTS, RISE, made_up
from scipy import stats

from posbench.catalog import ENCODING_CARDS, EXTENSION_CARDS, POLICY_CARDS, PROTOCOL_CARDS
from posbench.claims import DEGREES, ENCODING_CLAIMS, EXTENSION_CLAIMS, MEANINGS, TUTORIAL
from posbench.references import REFERENCES, own_bibtex, references_of
from posbench.report.answer import caveats
from posbench.report.lines import tables
from posbench.report.verdicts import claims, degree_of, over_seeds, rule, verdict
from posbench.results import Evaluation, Status

CARDS = (*ENCODING_CARDS, *POLICY_CARDS)
CLAIMS = (*ENCODING_CLAIMS, *EXTENSION_CLAIMS)
INF, NAN = math.inf, math.nan


# ---------------------------------------------------------------- the rule


@pytest.mark.parametrize(
    ("low", "high", "degree", "expected"),
    [
        (0.90, 1.05, "very strong", "confirmed"),  # the limit itself lies within
        (0.90, 1.06, "very strong", "inconclusive"),
        (1.05, 1.20, "very strong", "inconclusive"),
        (1.06, 1.20, "very strong", "refuted"),
        (0.90, 0.95, "strong", "confirmed"),  # better than said is no refutation of praise
        (1.20, 1.25, "strong", "confirmed"),
        (1.26, 1.30, "strong", "refuted"),
        (1.50, 2.00, "medium", "confirmed"),
        (1.99, 2.01, "medium", "inconclusive"),
        (2.01, 9.00, "medium", "refuted"),
        (2.00, 9.00, "weak", "confirmed"),
        (1.00, 1.99, "weak", "refuted"),
        (1.99, 9.00, "weak", "inconclusive"),
        (9.00, 11.0, "none", "inconclusive"),
        (INF, INF, "none", "confirmed"),  # not defined there
        (INF, INF, "weak", "confirmed"),
        (INF, INF, "medium", "refuted"),
        (1.50, INF, "strong", "refuted"),
        (1.00, INF, "strong", "inconclusive"),  # one seed broke, one held
        (NAN, NAN, "strong", "inconclusive"),
        (NAN, NAN, "none", "inconclusive"),
    ],
)
def test_the_verdict_at_its_borders(low: float, high: float, degree: str, expected: str) -> None:
    assert verdict(low, high, DEGREES[degree]) == expected


def test_praise_and_dispraise_leave_no_gap() -> None:
    """Whatever is measured exactly, medium or weak is right, and never both but at the border."""
    for ratio in (0.5, 1.0, 1.99, 2.01, 50.0, INF):
        said = {verdict(ratio, ratio, DEGREES[word]) for word in ("medium", "weak")}
        assert said == {"confirmed", "refuted"}
    words = ("very strong", "strong", "medium")
    ends = [DEGREES[word][1] for word in words]
    assert ends == sorted(ends)  # the higher the praise, the more it promises


@pytest.mark.parametrize(
    ("ratio", "word"),
    [(0.9, "very strong"), (1.05, "very strong"), (1.06, "strong"), (1.26, "medium"),
     (2.1, "weak"), (10.0, "weak"), (10.1, "none"), (INF, "none")],
)  # fmt: skip
def test_a_measured_ratio_has_one_word(ratio: float, word: str) -> None:
    assert degree_of(ratio) == word
    assert verdict(ratio, ratio, DEGREES[word]) == "confirmed"


def test_the_rule_is_written_with_the_numbers_it_uses() -> None:
    text = " ".join(rule())
    assert set(MEANINGS) == set(DEGREES)
    for words in MEANINGS.values():
        assert words in text
    assert "5 %" in MEANINGS["very strong"]
    assert DEGREES["very strong"][1] == 1.05
    assert (DEGREES["strong"][1], DEGREES["medium"][1], DEGREES["none"][0]) == (1.25, 2.0, 10.0)


def test_the_interval_over_seeds_is_students_on_logarithms() -> None:
    ratios = [1.1, 1.3, 1.25, 1.18]
    logs = np.log(ratios)
    wanted = stats.t.interval(0.95, len(logs) - 1, logs.mean(), stats.sem(logs))
    found = over_seeds(ratios)
    np.testing.assert_allclose([found.low, found.high], np.exp(wanted), rtol=1e-12)
    assert found.value == pytest.approx(stats.gmean(ratios), rel=1e-12)


# ---------------------------------------------------------------- the table


def judged(evaluation: Evaluation) -> dict[tuple[str, str], tuple[str, str, str]]:
    """(encoding, words) -> (number, verdict, what the verdict rests on)."""
    grid = claims(evaluation, tables(evaluation)[0])
    assert grid is not None
    found = {}
    for label, _, words, _, _, measured, said in grid.rows:
        number = measured[0] if isinstance(measured, tuple) else measured
        result, basis = (said[0], said[2]) if isinstance(said, tuple) else (said, "")
        found[label, words] = (number, result, basis)
    return found


def test_the_tutorials_claims_are_judged_by_what_was_measured() -> None:
    found = judged(made_up())
    said = {
        (claim.about, claim.degree): found[claim.about, claim.words]
        for claim in ENCODING_CLAIMS
        if claim.source == TUTORIAL
    }
    assert said["sinusoidal", "weak"][1:] == ("confirmed", "3 seeds")
    assert said["learned", "none"] == ("not defined", "confirmed", "3 seeds")
    assert said["rope", "medium"][1] == "confirmed"
    assert said["alibi", "very strong"][1] == "confirmed"
    ratio = float(said["rope", "medium"][0].removesuffix("x"))
    assert ratio == pytest.approx(math.exp(RISE["rope"]), rel=0.1)


def test_a_claim_that_does_not_hold_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RISE, "alibi", 0.4)
    monkeypatch.setitem(RISE, "rope", 1.2)
    monkeypatch.setitem(RISE, "sinusoidal", 0.1)
    found = judged(made_up())
    for key in (("alibi", "very strong"), ("rope", "medium to strong"), ("sinusoidal", "weak")):
        assert found[key][1] == "refuted", key


@pytest.mark.parametrize(
    ("seeds", "basis"), [((0,), "one checkpoint"), ((0, 1), "two checkpoints")]
)
def test_below_three_seeds_a_verdict_is_about_checkpoints(
    seeds: tuple[int, ...], basis: str
) -> None:
    found = judged(made_up(seeds=seeds, extensions=("none", "ntk", "yarn", "pi")))
    for key in (("alibi", "very strong"), ("rope + yarn", "better than PI")):
        assert found[key][1:] == ("confirmed", basis), key


def test_better_than_is_paired(monkeypatch: pytest.MonkeyPatch) -> None:
    """By seed with three of them, by document with one; the noise that both share cancels."""
    monkeypatch.setitem(RISE, "fope", RISE["rope"] - 0.06)
    for seeds in ((0,), (0, 1, 2)):
        evaluation = made_up(("rope", "fope"), seeds)
        key = ("fope", "more stable than RoPE on longer text")
        assert judged(evaluation)[key][1] == "confirmed"
        for row in evaluation.rows:  # the intervals of the two overlap by far
            row.ci_lo, row.ci_hi = (None, None) if row.value is None else (0.5, 50.0)
        assert judged(evaluation)[key][1] == "confirmed"


def test_equal_is_not_better() -> None:
    evaluation = made_up(("rope", "fope"))
    rope = {
        (r.seed, r.protocol, r.metric, r.ratio): r
        for r in evaluation.rows[: len(evaluation.rows) // 2]
    }
    for row in evaluation.rows:
        same = rope[row.seed, row.protocol, row.metric, row.ratio]
        row.nll, row.ppl, row.value = same.nll, same.ppl, same.value
    found = judged(evaluation)["fope", "more stable than RoPE on longer text"]
    assert found[:2] == ("1.000x", "refuted")


def test_better_than_what_was_not_measured_is_open() -> None:
    found = judged(made_up(("fope",)))
    assert found["fope", "more stable than RoPE on longer text"][:2] == (
        "rope was not measured",
        "inconclusive",
    )
    alone = judged(made_up(("rope",), extensions=("none", "yarn")))
    assert alone["rope + yarn", "better than PI"][0] == "rope + pi was not measured"


def test_few_documents_and_one_seed_leave_a_claim_open() -> None:
    evaluation = made_up(("alibi",), (0,))
    for row in evaluation.rows:
        row.ci_lo = row.ci_hi = None
    assert judged(evaluation)["alibi", "very strong"][1:] == ("inconclusive", "no interval")
    pair = made_up(("rope", "fope"), (0,))
    pair.documents = [each for each in pair.documents if int(each.document[3:]) < 9]
    assert DOCUMENTS > 9
    assert judged(pair)["fope", "more stable than RoPE on longer text"][1] == "inconclusive"


def test_a_model_that_learned_nothing_confirms_nothing() -> None:
    evaluation = made_up(("alibi",))
    for run in evaluation.runs:
        run["unigram_ppl"] = 1.0
    assert judged(evaluation)["alibi", "very strong"][1] == "inconclusive"


def test_each_line_is_held_against_the_frequencies_of_its_own_text() -> None:
    """Bytes have a far lower perplexity than words; both models here have learned theirs."""
    evaluation = made_up(("rope", "alibi"))
    for run in evaluation.runs:
        if run["encoding"] == "rope":
            run["unigram_ppl"] = 1.0
    assert judged(evaluation)["alibi", "very strong"][1] == "confirmed"
    said = " ".join(caveats(evaluation, tables(evaluation)))
    assert "rope has learned little" in said
    assert "alibi has learned little" not in said


def test_lengths_near_1x_show_nothing() -> None:
    evaluation = made_up(("alibi",))
    evaluation.rows = [row for row in evaluation.rows if row.ratio == 1]
    assert judged(evaluation)["alibi", "very strong"][:2] == ("nothing from 2x on", "inconclusive")


def test_one_broken_seed_is_not_averaged_away() -> None:
    evaluation = made_up(("alibi",))
    for row in evaluation.rows:
        if (row.seed, row.ratio, row.metric) == (1, 4.0, "ppl"):
            row.status, row.ppl, row.nll, row.value = Status.nonfinite, INF, INF, INF
    assert judged(evaluation)["alibi", "very strong"][:2] == ("inf", "inconclusive")


# ---------------------------------------------------------------- what is on record


def test_each_claim_is_about_something_and_from_somewhere() -> None:
    encodings = {card.id for card in CARDS}
    extensions = {card.id for card in EXTENSION_CARDS}
    keys = {each.key for each in REFERENCES} | {TUTORIAL}
    assert {each.about for each in ENCODING_CLAIMS} <= encodings
    assert {each.about for each in EXTENSION_CLAIMS} <= extensions
    for claim in CLAIMS:
        assert claim.source in keys
        assert sum(map(bool, (claim.degree, claim.than, claim.unjudged))) == 1, claim
        assert not claim.degree or claim.degree in DEGREES
        assert not claim.than or claim.than in encodings | extensions


def test_claims_agree_with_the_cards() -> None:
    """A card that begins with a word of degree has a claim that is read as that word."""
    for card in CARDS:
        own = [each for each in ENCODING_CLAIMS if each.about == card.id]
        word = next((w for w in DEGREES if card.extrapolation_claim.startswith(w)), None)
        judged = [each for each in own if each.degree]
        if word and judged and card.id not in ("t5", "stickbreak"):
            assert word in {each.degree for each in judged}, card.id


def test_each_paper_of_a_card_has_its_entry() -> None:
    for card in (card for card in (*CARDS, *EXTENSION_CARDS) if card.paper):
        cited = set(re.findall(r"arXiv:([\d.]+\d)", card.paper))
        assert cited == {each.arxiv for each in references_of([card.id])} - {""}, card.id
        assert references_of([card.id]), card.id
        for each in references_of([card.id]):
            assert str(each.year) in card.paper, (card.id, each.key)
            name = each.author.split(",")[0].split(" and ")[0].strip("{}").removesuffix(" Team")
            assert name in card.paper, (card.id, each.key)
    for protocol in PROTOCOL_CARDS:
        cited = set(re.findall(r"arXiv:([\d.]+\d)", protocol.source))
        assert cited <= {each.arxiv for each in references_of([protocol.id])}


def test_keys_are_unique_and_entries_well_formed() -> None:
    keys = [each.key for each in REFERENCES]
    assert len(set(keys)) == len(keys)
    for entry in (own_bibtex(), *(each.bibtex() for each in REFERENCES)):
        assert re.match(r"@\w+\{[\w-]+,\n", entry)
        assert entry.count("{") == entry.count("}")


def test_latex_takes_the_table_and_the_entries(tmp_path: Path) -> None:
    if which("pdflatex") is None:
        pytest.skip("there is no pdflatex here")
    from posbench.report.latex import table_tex

    evaluation = made_up(seeds=(0,), extensions=("none", "ntk"))
    evaluation.rows[0].reason = r"50 % of {#1_$} ^ ~ \command & 漢字 <|>"
    evaluation.rows[0].status = Status.oom
    table = table_tex(evaluation, tables(evaluation)[0])
    assert "oom" in table
    document = "\n".join(
        [
            r"\documentclass{article}\usepackage[utf8]{inputenc}\usepackage{booktabs}",
            r"\begin{document}",
            table,
            r"\end{document}",
        ]
    )
    (tmp_path / "paper.tex").write_text(document)
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"],
        cwd=tmp_path, capture_output=True, text=True, errors="replace",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "paper.pdf").exists()
