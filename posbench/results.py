"""The results table: one tidy row per (run, extension, protocol, metric, length), and its files."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from posbench.files import write_bytes, write_json, write_text
from posbench.schema import record

SCHEMA_VERSION = 1
STUDY = "study"  # in the provenance: the command of the study that made it all
BASELINE = "baseline"  # in the provenance: the line that the report compares the others with


class Status(StrEnum):
    """What became of one cell. A cell is never blank and an infinity never dropped."""

    ok = "ok"
    unsupported = "unsupported"
    nonfinite = "nonfinite"
    oom = "oom"
    skipped = "skipped"
    not_enough_data = "not_enough_data"


@dataclass
class Row:
    """One measurement. Losses are nats per token; `value` is the metric, `ppl` its perplexity."""

    run_id: str
    encoding: str
    extension: str
    variant: str
    model: str
    seed: int
    train_length: int
    eval_length: int
    ratio: float
    protocol: str
    metric: str = "ppl"
    value: float | None = None
    nll: float | None = None
    ppl: float | None = None
    bpb: float | None = None
    ci_lo: float | None = None  # 95 % interval of `value`, documents resampled
    ci_hi: float | None = None
    n_targets: int = 0
    n_docs: int = 0
    n_nonfinite: int = 0
    min_context: int | None = None  # tokens a target can see: the fewest, and the mean
    mean_context: float | None = None
    targets_sha256: str = ""
    corpus_fingerprint: str = ""
    tokenizer_sha256: str = ""
    status: Status = Status.ok
    reason: str = ""
    seconds: float | None = None
    tokens_per_s: float | None = None
    peak_mem_mb: float | None = None


COLUMNS = tuple(item.name for item in dataclasses.fields(Row))


@dataclass
class PositionCurve:
    """Mean loss by position in the window, in buckets [lo, hi)."""

    run_id: str
    encoding: str
    extension: str
    seed: int
    train_length: int
    eval_length: int
    lo: list[int]
    hi: list[int]
    nll: list[float]
    sd: list[float]
    n: list[int]
    variant: str = ""


@dataclass
class DocumentLoss:
    """Summed loss of one document's targets: enough to bootstrap or pair again."""

    run_id: str
    extension: str
    protocol: str
    eval_length: int
    document: str
    sum_nll: float
    n: int
    variant: str = ""


@dataclass
class HeadAttention:
    """Where one head looks, on average over queries; see `diagnostics.attention`."""

    run_id: str
    encoding: str
    extension: str
    variant: str
    seed: int
    train_length: int
    eval_length: int
    layer: int
    head: int
    entropy: float  # over ln(i + 1), that of even weights on i + 1 keys
    mean_distance: float  # tokens
    mass_beyond: float  # weight on distances of the training length or more
    mass_on_first: float


@dataclass
class Evaluation:
    """Everything one `eval-extrapolate` measured.

    `provenance` holds the protocol, versions, device and command; `runs` one mapping per evaluated
    run: run_id, folder, encoding, model, seed, train_length, parameters, encoding_parameters,
    tokens, train_tokens_per_s, train_peak_mem_mb, validation_nll, checkpoint_sha256, corpus,
    tokenizer, unigram_ppl (perplexity of the corpus's token frequencies on the test split), and
    settings_id (a hash of all settings but the seed: only runs that share it are averaged). A run
    that was not measured as it was trained also has adaptations: what a search or tuning before
    the measurement did and spent, one mapping for each extension and variant.
    """

    rows: list[Row] = field(default_factory=list)
    curves: list[PositionCurve] = field(default_factory=list)
    documents: list[DocumentLoss] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)
    attention: list[HeadAttention] = field(default_factory=list)

    def merged(self, other: Evaluation) -> Evaluation:
        """Both evaluations as one; a run that both hold is listed once, with all adaptations."""
        runs = {run["run_id"]: run for run in self.runs}
        for run in other.runs:
            known = runs.setdefault(run["run_id"], run)
            if known is not run and "adaptations" in run:
                adaptations = [*known.get("adaptations", []), *run["adaptations"]]
                runs[run["run_id"]] = known | {"adaptations": adaptations}
        # A study's command made the study alone, and not what it is merged with.
        provenance = {k: v for k, v in (self.provenance | other.provenance).items() if k != STUDY}
        return Evaluation(
            rows=self.rows + other.rows,
            curves=self.curves + other.curves,
            documents=self.documents + other.documents,
            runs=list(runs.values()),
            attention=self.attention + other.attention,
            provenance=provenance | {"evaluations": [*_evaluations(self), *_evaluations(other)]},
        )


def _evaluations(evaluation: Evaluation) -> list[dict[str, Any]]:
    """What was asked for, and when, once for each evaluation merged into this one."""
    return list(evaluation.provenance.get("evaluations", []))


def write_results(evaluation: Evaluation, folder: Path) -> None:
    """Write results.csv, .json and .parquet, position.csv, per_doc.csv and attention.csv."""
    rows = [dataclasses.asdict(row) for row in evaluation.rows]
    write_text(folder / "results.csv", _csv(COLUMNS, [[row[c] for c in COLUMNS] for row in rows]))
    heads = ("run_id", "encoding", "extension", "variant", "seed", "train_length", "eval_length")
    curves = [
        [*(getattr(curve, head) for head in heads), *bucket]
        for curve in evaluation.curves
        for bucket in zip(curve.lo, curve.hi, curve.nll, curve.sd, curve.n, strict=True)
    ]
    buckets = ("bucket_lo", "bucket_hi", "nll", "sd", "n")
    write_text(folder / "position.csv", _csv(heads + buckets, curves))
    documents = [list(dataclasses.astuple(each)) for each in evaluation.documents]
    write_text(folder / "per_doc.csv", _csv(_fields(DocumentLoss), documents))
    heads_seen = [list(dataclasses.astuple(each)) for each in evaluation.attention]
    write_text(folder / "attention.csv", _csv(_fields(HeadAttention), heads_seen))
    write_json(
        folder / "results.json",
        {
            "schema_version": SCHEMA_VERSION,
            "provenance": strict(evaluation.provenance),
            "runs": strict(evaluation.runs),
            "rows": strict(rows),
            "curves": strict([dataclasses.asdict(curve) for curve in evaluation.curves]),
            "documents": strict([dataclasses.asdict(each) for each in evaluation.documents]),
            "attention": strict([dataclasses.asdict(each) for each in evaluation.attention]),
        },
    )
    write_bytes(folder / "results.parquet", _parquet(evaluation.rows))


def _parquet(rows: list[Row]) -> bytes:
    """The rows of results.csv, each column with its type whatever it holds."""
    import pyarrow
    from pyarrow import parquet

    kinds = {"int": pyarrow.int64(), "float": pyarrow.float64()}
    schema = pyarrow.schema(
        [
            # Annotations are text here, such as `float | None`.
            (item.name, kinds.get(str(item.type).split(" | ")[0], pyarrow.string()))
            for item in dataclasses.fields(Row)
        ]
    )
    columns = {
        name: [getattr(row, name) for row in rows] if name != "status"
        else [row.status.value for row in rows]
        for name in COLUMNS
    }  # fmt: skip
    file = io.BytesIO()
    parquet.write_table(pyarrow.table(columns, schema=schema), file)
    return file.getvalue()


def read_results(folder: Path) -> Evaluation:
    """The evaluation saved in `folder`/results.json.

    Raises ValueError if it is not one of ours, or says what no evaluation would have written; the
    message names the row, counted from 1.
    """
    import json

    saved = json.loads((folder / "results.json").read_text())
    version = saved.get("schema_version") if isinstance(saved, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(f"{folder}/results.json has schema {version}, not {SCHEMA_VERSION}")
    for key in ("rows", "curves", "documents", "runs", "provenance"):
        if key not in saved:
            raise ValueError(f"{key} is missing")
    rows: list[Row] = []
    cells: dict[tuple[Any, ...], tuple[str, Row]] = {}
    for where, each in _records(saved, "rows", "row"):
        row = record(Row, each, where, complete=True)
        _check_row(row, where)
        before, first = cells.setdefault(cell_of(row), (where, row))
        if repr(first.value) != repr(row.value):  # repr: nan is not nan
            raise ValueError(f"{where} is the cell of {before}, with another value")
        rows.append(row)
    curves = [record(PositionCurve, each, at) for at, each in _records(saved, "curves", "curve")]
    for number, curve in enumerate(curves, 1):
        if len({len(each) for each in (curve.lo, curve.hi, curve.nll, curve.sd, curve.n)}) > 1:
            raise ValueError(f"curve {number}: its columns are not equally long")
    documents = []
    for where, each in _records(saved, "documents", "document"):
        documents.append(record(DocumentLoss, each, where))
        if documents[-1].n < 1:
            raise ValueError(f"{where}: n={documents[-1].n} is less than 1")
    attention = []
    known = {(row.run_id, row.extension, row.variant) for row in rows}
    heads = _records(saved | {"attention": saved.get("attention", [])}, "attention", "head")
    for where, each in heads:
        head = record(HeadAttention, each, where)
        if (head.run_id, head.extension, head.variant) not in known:
            raise ValueError(f"{where}: run_id={head.run_id!r} has no row")
        attention.append(head)
    runs = []
    for where, run in _records(saved, "runs", "run"):
        _check_run(run, where)
        runs.append(run)
    _check_provenance(saved["provenance"])
    return Evaluation(rows, curves, documents, runs, saved["provenance"], attention)


def _records(saved: dict[str, Any], key: str, one: str) -> list[tuple[str, Any]]:
    """The records of one kind, their infinities numbers again, each with its name and number."""
    if not isinstance(saved[key], list):
        raise ValueError(f"{key} is not a list")
    return [
        (f"{one} {number}", _numbers(each) if isinstance(each, dict) else each)
        for number, each in enumerate(saved[key], 1)
    ]


def cell_of(row: Row) -> tuple[Any, ...]:
    """What tells one row of an evaluation from every other."""
    return (
        row.run_id, row.extension, row.variant, row.protocol, row.metric, row.ratio,
        row.eval_length,
    )  # fmt: skip


_RUN_TEXTS = ("folder", "encoding", "model", "checkpoint_sha256", "settings_id", "corpus", "task")
_RUN_NUMBERS = (
    "seed", "train_length", "parameters", "encoding_parameters", "tokens", "train_tokens_per_s",
    "train_peak_mem_mb", "validation_nll", "unigram_ppl",
)  # fmt: skip


def _check_run(run: Any, where: str) -> None:
    """Raise ValueError for the record of a run that reports could not read."""
    if not isinstance(run, dict) or not isinstance(run.get("run_id"), str):
        raise ValueError(f"{where} has no run_id")
    for names, kinds, said in ((_RUN_TEXTS, str, "text"), (_RUN_NUMBERS, (int, float), "number")):
        for name in names:
            if not isinstance(run.get(name), (kinds, type(None))):
                raise ValueError(f"{where}: {name}={run[name]!r} is not a {said}")


def _check_provenance(saved: Any) -> None:
    done = saved.get("evaluations", []) if isinstance(saved, dict) else None
    if not isinstance(done, list) or not all(isinstance(each, dict) for each in done):
        raise ValueError("provenance is not a mapping that lists evaluations")
    if not isinstance(saved.get(STUDY, {}), dict):
        raise ValueError(f"provenance: {STUDY}={saved[STUDY]!r} is not a mapping")


def _check_row(row: Row, where: str) -> None:
    """Raise ValueError for a row whose numbers contradict each other or its status."""
    if row.status is Status.ok and row.value is None:
        raise ValueError(f"{where}: status=ok without a value")
    if row.status not in (Status.ok, Status.nonfinite):
        for name in ("value", "nll", "ppl"):
            if getattr(row, name) is not None:
                raise ValueError(f"{where}: status={row.status} with {name}={getattr(row, name)}")
    if row.status is not Status.skipped:  # that of a damaged run knows no length
        _check_length(row, where)
    broken = row.metric == "ppl" and row.status is Status.nonfinite
    if broken and row.ppl is not None and math.isfinite(row.ppl):
        raise ValueError(f"{where}: status=nonfinite with ppl={row.ppl}")
    if row.metric == "ppl" and row.status is Status.ok:
        if row.nll is None or not math.isfinite(row.nll):
            raise ValueError(f"{where}: status=ok with nll={row.nll}")
        if row.value != row.ppl:
            raise ValueError(f"{where}: value={row.value} is not ppl={row.ppl}")
    if row.nll is not None and row.ppl is not None and not _is_exp(row.ppl, row.nll):
        raise ValueError(f"{where}: ppl={row.ppl} is not exp(nll={row.nll})")
    if row.ci_lo is not None and row.ci_hi is not None and row.ci_lo > row.ci_hi:
        raise ValueError(f"{where}: ci_lo={row.ci_lo} is above ci_hi={row.ci_hi}")


def _check_length(row: Row, where: str) -> None:
    for name in ("train_length", "eval_length", "ratio"):
        value = getattr(row, name)
        if not 0 < value < math.inf:
            raise ValueError(f"{where}: {name}={value} is not above 0")
    if abs(row.eval_length - row.ratio * row.train_length) > 1:
        raise ValueError(
            f"{where}: eval_length={row.eval_length} is not ratio={row.ratio:g} times "
            f"train_length={row.train_length}"
        )


def _is_exp(ppl: float, nll: float) -> bool:
    try:
        wanted = math.exp(nll)
    except OverflowError:
        wanted = math.inf
    return math.isclose(ppl, wanted, rel_tol=1e-9) or (math.isnan(ppl) and math.isnan(nll))


def _fields(kind: type[Any]) -> tuple[str, ...]:
    return tuple(item.name for item in dataclasses.fields(kind))


def _csv(header: tuple[str, ...], rows: list[list[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([["" if value is None else value for value in row] for row in rows])
    return text.getvalue()


_NAMES = ("run_id", "document", "encoding", "extension", "variant", "model", "reason", "folder")


def strict(value: Any) -> Any:
    """JSON has no infinities: they are written as the words "inf", "-inf" and "nan"."""
    if isinstance(value, dict):
        return {key: strict(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [strict(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _numbers(saved: dict[str, Any]) -> dict[str, Any]:
    """Undo `strict` for one record; a document that is called "nan" keeps its name."""
    return {key: value if key in _NAMES else _number(value) for key, value in saved.items()}


def _number(value: Any) -> Any:
    if isinstance(value, dict):
        return _numbers(value)
    if isinstance(value, list):
        return [_number(each) for each in value]
    return float(value) if value in ("inf", "-inf", "nan") else value
