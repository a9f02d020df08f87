"""From the command line to the table: a sweep, its evaluation, and every way that can fail."""

from __future__ import annotations

import csv
import json
import math
import shutil
from pathlib import Path

import pytest

from posbench import diagnostics
from posbench.cli import main
from posbench.errors import Exit

QUICKSTART = ("none", "sinusoidal", "learned", "rope", "alibi")  # what it compares
SMALL = [
    "model.layers=1", "model.width=32", "model.heads=2", "context=32", "train.batch_size=4",
    "device=cpu",
]  # fmt: skip
QUICK_EVAL = ["eval.max_targets=1024", "eval.span_tokens=8192", "eval.bootstrap=100", "device=cpu"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(80):
        lines = [f"def function_{number}_{i}(x): return x + {i * number}" for i in range(12)]
        (folder / f"{number:02}.py").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def sweep(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's sweep, made small: a real process for each job."""
    folder = tmp_path_factory.mktemp("sweep") / "train"
    data = ["data=text", f"data.path={text}", "data.test=0.3", "train.steps=3"]
    words = ["train", "-m", "experiment=quickstart", f"hydra.sweep.dir={folder}"]
    assert main([*words, *data, *SMALL]) == Exit.OK
    return folder


def evaluate(runs: object, out: Path, *words: str) -> int:
    target = [f"runs={runs}", f"hydra.run.dir={out}"]
    return main(["eval-extrapolate", *target, *QUICK_EVAL, *words])


def rows_of(folder: Path) -> list[dict[str, str]]:
    """The rows that are measured themselves: none derived from others."""
    with (folder / "results.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["metric"] == "ppl"]


def copy(sweep: Path, job: str, to: Path) -> Path:
    return Path(shutil.copytree(sweep / job, to / job))


def alter(run: Path, **values: object) -> None:
    manifest = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(manifest | values))


def settings_with(run: Path, **values: object) -> dict[str, object]:
    settings: dict[str, object] = json.loads((run / "run.json").read_text())["settings"]
    return settings | values


def test_quickstart_gives_a_row_for_each_encoding_protocol_and_length(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(sweep, tmp_path / "out") == Exit.OK
    rows = rows_of(tmp_path / "out")
    cells = {(row["encoding"], row["protocol"], row["eval_length"]): row for row in rows}
    lengths, protocols = ("32", "64", "128"), ("controlled", "nonoverlap", "position")
    assert len(rows) == len(cells)
    assert set(cells) == {(e, p, n) for e in QUICKSTART for p in protocols for n in lengths}
    for (encoding, _, length), row in cells.items():
        beyond = encoding == "learned" and length != "32"
        assert row["status"] == ("unsupported" if beyond else "ok")
        assert bool(row["value"]) != beyond
        assert bool(row["reason"]) == beyond
    controlled = [row for row in rows if row["protocol"] == "controlled" and row["value"]]
    assert len({row["targets_sha256"] for row in controlled}) == 1
    out = capsys.readouterr().out
    assert "n/a (table 32)" in out
    assert "report.html" in out
    assert "tensorboard --logdir" in out
    for name in ("results.json", "report.md", "report.html", "curves.png"):
        assert (tmp_path / "out" / name).stat().st_size > 0


def test_run_records_which_text_it_was_trained_on(sweep: Path) -> None:
    corpus = json.loads((sweep / "3-rope" / "run.json").read_text())["corpus"]
    assert (corpus["documents"], corpus["dropped_duplicates"]) == (80, 0)
    assert 0 < corpus["usable_train_documents"] < 80  # the rest is held out
    assert corpus["usable_train_tokens"] == corpus["train_tokens"]  # all are long enough


def test_evaluating_again_gives_the_same_numbers(sweep: Path, tmp_path: Path) -> None:
    numbers = []
    for name, words in (("a", []), ("b", ["eval.ratios=[4,1,2]", "eval.batch_tokens=128"])):
        assert evaluate(sweep / "3-rope", tmp_path / name, *words) == Exit.OK
        rows = rows_of(tmp_path / name)
        numbers.append({(row["protocol"], row["eval_length"]): float(row["nll"]) for row in rows})
    assert numbers[0] == pytest.approx(numbers[1], abs=1e-5)


def test_extensions_of_one_run_make_one_table(sweep: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    words = ["extension=none,pi,ntk,yarn", f"runs={sweep / '3-rope'}", f"hydra.sweep.dir={out}"]
    assert main(["eval-extrapolate", "-m", *words, *QUICK_EVAL]) == Exit.OK
    rows = [row for row in rows_of(out) if row["protocol"] == "controlled"]
    by_length = {
        length: {row["extension"]: row["nll"] for row in rows if row["eval_length"] == length}
        for length in ("32", "64")
    }
    assert len(set(by_length["32"].values())) == 1  # at s = 1 each of them is plain RoPE
    assert len(set(by_length["64"].values())) == 4
    saved = json.loads((out / "results.json").read_text())
    asked = [each["asked"]["extension.name"] for each in saved["provenance"]["evaluations"]]
    assert asked == ["none", "pi", "ntk", "yarn"]


def test_extension_that_fits_some_runs_is_unsupported_in_the_others(
    sweep: Path, tmp_path: Path
) -> None:
    assert evaluate(sweep, tmp_path / "out", "extension=yarn") == Exit.OK
    status = {row["encoding"]: row["status"] for row in rows_of(tmp_path / "out")}
    assert status.pop("rope") == "ok"
    assert set(status.values()) == {"unsupported"}


def test_extension_that_fits_no_run_is_refused(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(sweep / "4-alibi", tmp_path / "out", "extension=yarn") == Exit.USER
    assert "applies to encoding=rope" in capsys.readouterr().err
    assert not (tmp_path / "out" / "results.csv").exists()


@pytest.mark.parametrize(
    "damage", ["flip", "truncate", "missing", "settings", "corpus", "no corpus", "tokenizer"]
)
def test_damaged_run_is_named_and_never_scored(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    good, bad = copy(sweep, "3-rope", tmp_path), copy(sweep, "4-alibi", tmp_path)
    weights = next(bad.glob("checkpoints/*/weights.safetensors"))
    data = bytearray(weights.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        weights.write_bytes(data)
    elif damage == "truncate":
        weights.write_bytes(data[:1000])
    elif damage == "missing":
        weights.unlink()
    elif damage == "settings":
        alter(bad, settings=settings_with(bad, encoding={"name": "none"}))
    elif damage == "corpus":
        alter(bad, corpus={"fingerprint": "0" * 64})
    elif damage == "no corpus":
        alter(bad, corpus=None)
    else:
        (bad / "tokenizer.json").write_text('{"type":  "bytes"}')
    assert evaluate(bad, tmp_path / "alone") == Exit.CHECKPOINT
    assert str(bad) in capsys.readouterr().err
    assert evaluate(f"[{good},{bad}]", tmp_path / "both") == Exit.CHECKPOINT
    rows = rows_of(tmp_path / "both")
    assert {row["status"] for row in rows if row["encoding"] == "rope"} == {"ok"}
    others = [row for row in rows if row["encoding"] != "rope"]
    assert len(others) == 9
    assert {row["run_id"] for row in others} != {""}
    for row in others:
        assert (row["status"], row["value"]) == ("skipped", "")
        assert str(bad) in row["reason"]


def test_manifest_that_cannot_be_read_is_a_row_too(sweep: Path, tmp_path: Path) -> None:
    good, bad = copy(sweep, "3-rope", tmp_path), copy(sweep, "4-alibi", tmp_path)
    (bad / "run.json").write_text((bad / "run.json").read_text()[:100])
    assert evaluate(f"[{good},{bad}]", tmp_path / "out") == Exit.CHECKPOINT
    rows = rows_of(tmp_path / "out")
    assert {row["status"] for row in rows if row["run_id"] == "4-alibi"} == {"skipped"}
    assert {row["status"] for row in rows if row["encoding"] == "rope"} == {"ok"}


def test_runs_with_other_splits_are_scored_on_their_own_documents(
    text: Path, tmp_path: Path
) -> None:
    for name, share in (("a", "0.3"), ("b", "0.5")):
        data = ["data=text", f"data.path={text}", f"data.test={share}", "train.steps=2"]
        assert main(["train", *data, *SMALL, f"hydra.run.dir={tmp_path / name}"]) == Exit.OK
        assert evaluate(tmp_path / name, tmp_path / f"alone-{name}") == Exit.OK
    together = f"[{tmp_path / 'a'},{tmp_path / 'b'}]"
    assert evaluate(together, tmp_path / "both") == Exit.OK
    alone = [row for name in "ab" for row in rows_of(tmp_path / f"alone-{name}")]
    keys = ("run_id", "protocol", "eval_length", "nll", "targets_sha256", "n_docs")
    assert [[row[key] for key in keys] for row in rows_of(tmp_path / "both")] == [
        [row[key] for key in keys] for row in alone
    ]


def test_folder_with_an_evaluation_is_complete_or_refused(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert evaluate(sweep / "3-rope", out) == Exit.OK
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("[!.]*")}
    capsys.readouterr()
    assert evaluate(sweep / "3-rope", out) == Exit.OK
    said = capsys.readouterr()
    assert "complete" in said.out
    assert evaluate(sweep / "3-rope", out, "eval.ratios=[1,2]") == Exit.USER
    assert "eval.ratios" in capsys.readouterr().err
    assert evaluate(sweep / "4-alibi", out) == Exit.USER
    assert {path.name: path.stat().st_mtime_ns for path in out.glob("[!.]*")} == before
    (out / "curves.png").unlink()  # as if killed before the last file
    assert evaluate(sweep / "3-rope", out) == Exit.OK
    assert (out / "curves.png").exists()


def test_folder_with_other_content_is_refused_and_left_as_it_was(
    sweep: Path, tmp_path: Path
) -> None:
    (tmp_path / "report.md").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine too")
    assert evaluate(sweep / "3-rope", tmp_path) == Exit.USER
    assert main(["train", f"hydra.run.dir={tmp_path}", *SMALL]) == Exit.USER
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "report.md"]
    assert (tmp_path / "report.md").read_text() == "mine"


def test_unfinished_run_is_named_with_the_way_on(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy(sweep, "0-none", tmp_path)
    alter(run, status="interrupted")
    assert evaluate(run, tmp_path / "out") == Exit.CHECKPOINT
    assert f"posbench train resume={run}" in capsys.readouterr().err


def test_text_that_changed_since_training_is_refused(
    sweep: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = text / "extra.py"
    extra.write_text("x = 1\n")
    try:
        assert evaluate(sweep / "3-rope", tmp_path / "out") == Exit.USER
    finally:
        extra.unlink()
    assert "fingerprint" in capsys.readouterr().err


def test_lengths_that_no_document_reaches_are_said_so(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(sweep / "3-rope", tmp_path / "out", "eval.ratios=[1,64]") == Exit.OK
    for row in rows_of(tmp_path / "out"):
        if row["ratio"] == "1.0":
            assert row["status"] == "ok"
            continue
        assert row["status"] == "not_enough_data"
        assert "2049 tokens" in row["reason"]
    assert "not enough data" in capsys.readouterr().out


def test_text_too_short_for_the_context_names_tokens_found_and_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("forty characters, give or take a few ...")
    data = ["data=text", f"data.path={tmp_path / 'short.txt'}", f"hydra.run.dir={tmp_path / 'run'}"]
    assert main(["train", *data, *SMALL, "context=64"]) == Exit.USER
    message = capsys.readouterr().err
    assert "65 tokens" in message
    assert "40 at the most" in message
    assert not (tmp_path / "run").exists()


def test_no_run_says_where_it_looked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSBENCH_OUTPUTS", str(tmp_path / "nothing"))
    assert main(["eval-extrapolate"]) == Exit.USER
    message = capsys.readouterr().err
    assert str(tmp_path / "nothing") in message
    assert "posbench train" in message


def test_training_run_is_never_written_into(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy(sweep, "3-rope", tmp_path)
    before = sorted(path.name for path in run.iterdir())
    assert evaluate(run, run) == Exit.USER
    assert sorted(path.name for path in run.iterdir()) == before
    assert "training run" in capsys.readouterr().err


def test_output_that_cannot_be_written_is_a_storage_error(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert evaluate(sweep / "3-rope", tmp_path / "file" / "out") == Exit.STORAGE
    assert main(["train", f"hydra.run.dir={tmp_path / 'file' / 'run'}", *SMALL]) == Exit.STORAGE
    assert capsys.readouterr().err.count("cannot write") == 2


def test_sample_writes_what_the_model_says(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sample", str(sweep / "2-learned"), "prompt=def ", "tokens=60", "seed=3"]
    texts = []
    for _ in range(2):
        assert main(words) == Exit.OK
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]  # 60 tokens: longer than the learned table
    assert texts[0].startswith("def ")
    assert len(texts[0].encode()) >= 60


def test_sample_without_a_prompt_starts_like_a_test_document(
    sweep: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sample", str(sweep / "3-rope"), "tokens=5"]) == Exit.OK
    said = capsys.readouterr().out
    starts = [path.read_text().splitlines()[0][:40] for path in text.glob("*.py")]
    assert any(said.startswith(start) for start in starts)


def test_one_run_judges_the_key_tokens_of_all(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any fall of the loss makes a key token here: three steps teach nothing about far context."""
    monkeypatch.setattr(diagnostics, "ALPHA", 0.0)
    monkeypatch.setattr(diagnostics, "KNOWN", math.inf)

    def judged(name: str, *words: str) -> tuple[set[str], set[str]]:
        asked = ["eval.protocols=[longppl_self]", *words]
        assert (
            evaluate([str(sweep / "0-none"), str(sweep / "4-alibi")], tmp_path / name, *asked) == 0
        )
        with (tmp_path / name / "results.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["protocol"] == "longppl_self"]
        assert {row["status"] for row in rows} == {"ok"}
        shares = {row["value"] for row in rows if row["metric"] == "key_fraction"}
        scored = {row["targets_sha256"] for row in rows if row["metric"] == "key_ppl"}
        return shares, scored

    each_its_own = judged("own")
    by_rope = judged("rope", f"eval.reference={sweep / '3-rope'}")
    assert [len(found) for found in each_its_own] == [2, 2]
    assert [len(found) for found in by_rope] == [1, 1]


def test_a_judge_that_read_other_text_is_refused(
    sweep: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = tmp_path / "judge"
    data = ["data=text", f"data.path={text}", "data.test=0.4", "train.steps=1"]
    assert main(["train", *data, *SMALL, f"hydra.run.dir={judge}"]) == Exit.OK
    words = ["eval.protocols=[longppl_self]", f"eval.reference={judge}"]
    assert evaluate(sweep / "3-rope", tmp_path / "out", *words) == Exit.USER
    assert f"eval.reference={judge} was trained on other text" in capsys.readouterr().err


def test_the_validation_split_is_scored_when_asked_for_and_never_the_training_split(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, words = sweep / "3-rope", ["eval.protocols=[controlled]"]
    assert evaluate(run, tmp_path / "test", *words) == 0
    assert evaluate(run, tmp_path / "validation", *words, "eval.split=validation") == 0
    assert "eval.split=validation" in (tmp_path / "validation" / "report.md").read_text()
    names = [_documents(tmp_path / split) for split in ("test", "validation")]
    assert names[0]
    assert names[1]
    assert not names[0] & names[1]
    capsys.readouterr()
    assert evaluate(run, tmp_path / "train", *words, "eval.split=train") == Exit.USER
    assert (
        "eval.split=train would score text that the model was trained on" in capsys.readouterr().err
    )
    assert not (tmp_path / "train").exists()


def _documents(folder: Path) -> set[str]:
    with (folder / "per_doc.csv").open() as file:
        return {row["document"] for row in csv.DictReader(file)}
