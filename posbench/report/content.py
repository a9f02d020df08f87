"""What a report says, as plain values that the Markdown and the HTML template both print."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posbench.catalog import PROTOCOL_CARDS
from posbench.report import probes
from posbench.report.answer import RULE, answer, caveats
from posbench.report.gains import gains
from posbench.report.grid import Grid
from posbench.report.lines import HEADLINE, Table, tables
from posbench.report.presets import comparisons, several_presets
from posbench.report.tables import marked, notes, unigram_sentence
from posbench.report.tuned import TUNE, learning_rates
from posbench.results import Evaluation

MISSING = "not recorded"
NOTHING = "Length extrapolation: nothing measured"

HOW_TO_READ = (
    "Perplexity is exp(mean loss in nats per token); lower is better. 1x is the training length.",
    "The number with an x is the perplexity relative to the same line's own at 1x; over several "
    "seeds it is the mean of each seed's own. Compare lines of different base perplexity by it.",
    "An interval in brackets is a 95 % bootstrap over documents of one trained model: it says how "
    "much the choice of text matters, not how much another seed would change. With several seeds "
    "the number after ± is their standard deviation, and figures show least to greatest.",
    "n/a: the encoding or extension is not defined at that length. inf: a loss was not finite. "
    ">1e4: the perplexity is above ten thousand; results.csv has the exact loss.",
    "Look first at controlled. nonoverlap is there to compare with published tables; where the "
    "two disagree about longer text, controlled is the one that holds the targets fixed.",
    "Loss against position leaves out the highest losses, those of the first few tokens, which "
    "have nothing to look back to. A triangle at the upper edge of a curve is a perplexity above "
    "1e4 or not finite.",
    RULE,
)


@dataclass
class Content:
    """Everything a report shows but its pictures."""

    title: str
    answer: list[str]
    caveats: list[str]
    unigram: str
    headline: Grid | None
    gains: Grid | None
    others: list[Grid]
    cost: Grid
    adaptations: Grid
    scored: Grid
    how_to_read: tuple[str, ...]
    provenance: list[tuple[str, str]]


def content_of(evaluation: Evaluation) -> Content:
    """The words of the report on `evaluation`."""
    shown = tables(evaluation)
    first = shown[0] if shown else None
    alone = [table for table in shown[1:] if not several_presets(shown, table)]
    return Content(
        title=_title(shown) or probes.probe_title(evaluation) or NOTHING,
        answer=(probes.probe_answer(evaluation) if not shown else []) or answer(first),
        caveats=caveats(evaluation, shown),
        unigram=unigram_sentence(evaluation),
        headline=_perplexities(first) if first else None,
        gains=gains(evaluation),
        others=[
            *map(_perplexities, alone),
            *comparisons(shown),
            *probes.probe_grids(evaluation),
            *learning_rates(evaluation),
        ],
        cost=_cost(evaluation),
        adaptations=_adaptations(evaluation),
        scored=_scored(evaluation, shown),
        how_to_read=HOW_TO_READ if shown else probes.HOW_TO_READ,
        provenance=_provenance(evaluation),
    )


def _title(shown: list[Table]) -> str:
    if not shown:
        return ""
    encodings = list(dict.fromkeys(line.subject.encoding for line in shown[0].lines))
    lengths = {line.subject.train_length for line in shown[0].lines}
    ratios = ", ".join(f"{ratio:g}x" for ratio in shown[0].ratios)
    unit = f"{lengths.pop()} tokens" if len(lengths) == 1 else "their training lengths"
    return f"Length extrapolation of {', '.join(encodings)} at {ratios} of {unit}"


def _perplexities(table: Table) -> Grid:
    """Cells are (perplexity or word, ratio to 1x, interval or deviation)."""
    numbers = table.numbered_reasons()
    rows: list[list[Any]] = []
    for line in table.lines:
        cells: list[Any] = [line.label, ", ".join(str(seed) for seed in line.seeds)]
        for ratio in table.ratios:
            cell = line.cell(ratio)
            beside = "" if ratio == 1 else cell.ratio_text
            cells.append((marked(cell, numbers), beside, cell.spread))
        rows.append(cells)
    role = " (headline)" if table.protocol == HEADLINE else ""
    return Grid(
        f"Perplexity, {table.protocol}{role}",
        ["encoding", "seed", *(table.heading(ratio) for ratio in table.ratios)],
        rows,
        _about(table.protocol),
        notes(table),
    )


def _about(protocol: str) -> str:
    cards = {card.id: f"{card.scores} {card.differs}" for card in PROTOCOL_CARDS}
    return cards.get(protocol, "")


_COSTS = {
    "parameters": "parameters",
    "encoding_parameters": "of the encoding",
    "tokens": "tokens trained",
    "train_tokens_per_s": "tokens/s",
    "train_peak_mem_mb": "peak memory, MB",
    "validation_nll": "validation loss, nats",
    "unigram_ppl": "unigram perplexity",
}


def _cost(evaluation: Evaluation) -> Grid:
    rows: list[list[Any]] = [
        [
            str(run.get("encoding", MISSING)),
            str(run.get("model", MISSING)),
            str(run.get("seed", MISSING)),
            *(quantity(run.get(key)) for key in _COSTS),
            str(run["run_id"]),
        ]
        for run in evaluation.runs
    ]
    header = ["encoding", "model", "seed", *_COSTS.values(), "run"]
    about = "" if rows else "No training run was recorded."
    return Grid("What training cost", header if rows else [], rows, about)


def _adaptations(evaluation: Evaluation) -> Grid:
    """What a search of factors and tuning did before the measurement, and what they spent."""
    rows: list[list[Any]] = []
    for run in evaluation.runs:
        for each in run.get("adaptations", []):
            line = [run["encoding"], str(run["seed"]), each["extension"], each["variant"]]
            if search := each.get("search"):
                starts = ", ".join(f"{quantity(v)} ({k})" for k, v in search["start_nll"].items())
                outcome = f"validation loss {quantity(search['nll'])} nats, from {starts}"
                rows.append([*line, f"{search['trials']} trials", *_spent(search), outcome])
            if tuning := each.get("tuning"):
                outcome = f"learning rate {quantity(tuning['lr'])}"
                rows.append([*line, f"{tuning['steps']} steps", *_spent(tuning), outcome])
    header = ["encoding", "seed", "extension", "variant", "what", "length", "tokens", "seconds", ""]
    about = (
        "These lines were not measured as they were trained. A search reads the validation split, "
        "tuning trains a copy on the training split; neither sees a test document."
    )
    return Grid("What search and tuning spent", header, rows, about, found_factors(evaluation))


def _spent(record: dict[str, Any]) -> list[str]:
    return [quantity(record[key]) for key in ("length", "tokens", "seconds")]


def found_factors(evaluation: Evaluation) -> list[str]:
    """The factors that each search found, as they are typed to have the same numbers again."""
    return [
        f"{run['run_id']} ({each['variant']}): extension.factors="
        f"[{','.join(repr(factor) for factor in each['search']['factors'])}]"
        for run in evaluation.runs
        for each in run.get("adaptations", [])
        if "search" in each
    ]


def quantity(value: Any) -> str:
    """A number with thousands separated and no false digits; `not recorded` for None."""
    if value is None:
        return MISSING
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:.4g}"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)


def _scored(evaluation: Evaluation, shown: list[Table]) -> Grid:
    """How many targets each protocol scored at each length, and what they could see."""
    seen: dict[tuple[Any, ...], None] = {}
    rows = [row for row in evaluation.rows if row.metric != "token_accuracy" and row.n_targets]
    order = [*(table.protocol for table in shown), *(row.protocol for row in rows)]
    for row in sorted(rows, key=lambda row: (order.index(row.protocol), row.eval_length)):
        cells = (
            row.protocol,
            quantity(row.eval_length),
            quantity(row.n_targets),
            quantity(row.n_docs),
            quantity(row.min_context),
            quantity(row.mean_context),
            row.targets_sha256[:12] or MISSING,
        )
        seen[cells] = None
    header = ["protocol", "length", "targets", "documents", "least context", "mean context"]
    return Grid(
        "What was scored",
        [*header, "targets SHA-256"],
        [list(cells) for cells in seen],
        "Context counts the tokens a target can see, itself not included. A task's length counts "
        "what the task is made of, such as symbols, and its documents are examples.",
    )


def _provenance(evaluation: Evaluation) -> list[tuple[str, str]]:
    """Everything recorded about how the numbers came about, flat, one line each."""
    shown = {key: value for key, value in evaluation.provenance.items() if key != TUNE}
    pairs = list(_flat("", shown))
    for name, title in (
        ("corpus_fingerprint", "corpus fingerprint"),
        ("tokenizer_sha256", "tokenizer SHA-256"),
        ("targets_sha256", "targets SHA-256"),
    ):
        rows = [row for row in evaluation.rows if name != "targets_sha256" or _is_headline(row)]
        values = sorted({getattr(row, name) for row in rows} - {""})
        pairs.append((title, ", ".join(values) or MISSING))
    for run in evaluation.runs:
        for key in ("folder", "checkpoint_sha256", "corpus", "tokenizer", "protocol"):
            pairs += _flat(f"run {run['run_id']}: {key}", run.get(key, MISSING))
    return pairs


def _is_headline(row: Any) -> bool:
    return bool(row.protocol == HEADLINE)


def _flat(name: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        joined = {f"{name}.{key}" if name else str(key): each for key, each in value.items()}
        return [pair for key, each in joined.items() for pair in _flat(key, each)]
    if isinstance(value, list) and any(isinstance(each, dict) for each in value):
        numbered = {f"{name} {number}": each for number, each in enumerate(value, 1)}
        return [pair for key, each in numbered.items() for pair in _flat(key, each)]
    if isinstance(value, list | tuple):
        return [(name, ", ".join(str(each) for each in value) or "none")]
    return [(name, MISSING if value is None or value == "" else str(value))]
