"""The results files: columns scripts rely on, and numbers that survive the round trip."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest

from posbench.results import (
    DocumentLoss,
    Evaluation,
    PositionCurve,
    Row,
    Status,
    read_results,
    write_results,
)

# Written out by hand: scripts of other people read these names in this order.
CONTRACT = (
    "run_id,encoding,extension,variant,model,seed,train_length,eval_length,ratio,protocol,metric,"
    "value,nll,ppl,bpb,ci_lo,ci_hi,n_targets,n_docs,n_nonfinite,min_context,mean_context,"
    "targets_sha256,corpus_fingerprint,tokenizer_sha256,status,reason,seconds,tokens_per_s,"
    "peak_mem_mb"
)


def row(**values: Any) -> Row:
    fixed: dict[str, Any] = {"run_id": "r", "encoding": "rope", "extension": "none", "variant": ""}
    fixed |= {"model": "tiny", "seed": 0, "protocol": "controlled"}
    fixed |= {"train_length": 128, "eval_length": 128, "ratio": 1.0}
    return Row(**(fixed | values))


def evaluation() -> Evaluation:
    broken = row(nll=math.inf, ppl=math.inf, value=math.nan, status=Status.nonfinite, seed=1)
    broken.run_id = "r1"
    return Evaluation(
        rows=[row(nll=1.5, ppl=math.exp(1.5), value=math.exp(1.5)), broken],
        curves=[
            PositionCurve(
                run_id="r",
                encoding="rope",
                extension="none",
                seed=0,
                train_length=128,
                eval_length=256,
                lo=[0, 128],
                hi=[128, 256],
                nll=[1.5, math.inf],
                sd=[0.1, math.nan],
                n=[10, 10],
            )
        ],
        documents=[DocumentLoss("r", "none", "controlled", 128, "nan", math.inf, 3)],
        runs=[{"run_id": "r", "validation_nll": math.inf, "folder": "inf", "seed": 0}],
        provenance={"device": "cpu", "protocol": {"worst": -math.inf}},
    )


def test_columns_are_the_contract(tmp_path: Path) -> None:
    write_results(evaluation(), tmp_path)
    assert (tmp_path / "results.csv").read_text().splitlines()[0] == CONTRACT


def test_csv_tells_an_infinity_from_a_missing_value(tmp_path: Path) -> None:
    write_results(evaluation(), tmp_path)
    with (tmp_path / "results.csv").open() as file:
        good, broken = csv.DictReader(file)
    assert (broken["ppl"], broken["value"], broken["status"]) == ("inf", "nan", "nonfinite")
    assert float(good["ppl"]) == math.exp(1.5)
    assert good["bpb"] == ""


def test_json_is_strict_even_with_infinities(tmp_path: Path) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"bare {word}")

    write_results(evaluation(), tmp_path)
    saved = json.loads((tmp_path / "results.json").read_text(), parse_constant=refuse)
    assert saved["schema_version"] == 1
    assert saved["provenance"]["protocol"]["worst"] == "-inf"


def test_everything_comes_back(tmp_path: Path) -> None:
    before = evaluation()
    write_results(before, tmp_path)
    after = read_results(tmp_path)
    # repr, because nan is not equal to itself.
    for part in ("rows", "curves", "documents", "runs"):
        assert repr(getattr(after, part)) == repr(getattr(before, part)), part
    assert after.rows[1].status is Status.nonfinite
    assert after.documents[0].document == "nan"  # a name stays a name


def test_writing_what_was_read_changes_nothing(tmp_path: Path) -> None:
    write_results(evaluation(), tmp_path / "a")
    write_results(read_results(tmp_path / "a"), tmp_path / "b")
    for name in ("results.csv", "results.json", "position.csv", "per_doc.csv"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("content", ['{"schema_version": 2}', "[]", "{}", "not json"])
def test_a_foreign_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(ValueError, match=r"schema|Expecting"):
        read_results(tmp_path)


def test_merging_lists_a_shared_run_once() -> None:
    one, two = evaluation(), evaluation()
    two.runs.append({"run_id": "other"})
    merged = one.merged(two)
    assert [run["run_id"] for run in merged.runs] == ["r", "other"]
    assert len(merged.rows) == len(one.rows) + len(two.rows)
