"""What a report says and in which order, as plain values that Markdown and HTML both print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posbench.catalog import PROTOCOL_CARDS
from posbench.errors import UserError
from posbench.references import own_bibtex, references_of
from posbench.report import probes
from posbench.report.answer import RULE, answer, caveats
from posbench.report.comparison import comparison_grids
from posbench.report.diagnostics import diagnostic_grids, heads_of
from posbench.report.extended import extension_grids, headline_of
from posbench.report.gains import gains
from posbench.report.grid import Code, Drawing, Grid, Pairs, Part, Section, Text
from posbench.report.lines import HEADLINE, Table, tables
from posbench.report.missing import missing
from posbench.report.presets import comparisons, several_presets
from posbench.report.protocol import protocol_points
from posbench.report.tables import marked, notes, unigram_sentence
from posbench.report.tuned import TUNE, learning_rates
from posbench.report.verdicts import claims
from posbench.results import BASELINE, STUDY, Evaluation

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
    "have nothing to look back to. A triangle at the edge of a figure is a value beyond it: a "
    "perplexity above 1e4 or not finite, or a gain below -0.5 nats.",
    RULE,
)


@dataclass
class Content:
    """Everything a report shows but the lines of its figures."""

    title: str
    answer: list[str]
    missing: list[str]  # runs that should be there
    caveats: list[str]
    sections: list[Section]


def content_of(evaluation: Evaluation) -> Content:
    """The words of the report on `evaluation`."""
    shown = tables(evaluation)
    first = headline_of(shown[0]) if shown else None
    told = {first.protocol: first} if first else {}
    shown_without_noise = [told.get(table.protocol, headline_of(table)) for table in shown]
    sections = [
        Section("Where the numbers come from", [Pairs(_short_provenance(evaluation))]),
        *_measured(evaluation, first),
        *_grids(gains(evaluation), under=_gain_figure(evaluation)),
        *_grids(claims(evaluation, shown[0] if shown else None)),
        *_together("Differences from the baseline", _compared(evaluation)),
        *_grids(_cost(evaluation)),
        *_grids(_adaptations(evaluation)),
        *_together("Extensions on one checkpoint", extension_grids(shown[0] if shown else None)),
        *_together("Other protocols", _others(shown_without_noise)),
        *(Section(grid.title, [grid]) for grid in learning_rates(evaluation)),
        *_together("Tasks and probes", probes.probe_grids(evaluation)),
        *_diagnostics(evaluation),
        _points("How to read this", HOW_TO_READ if shown else probes.HOW_TO_READ),
        _points("The protocol", protocol_points(evaluation), _scored(evaluation, shown)),
        Section("BibTeX", [Code(_bibtex(evaluation))]),
        Section("Everything recorded", [Pairs(_provenance(evaluation), "Show all")]),
    ]
    return Content(
        title=_title(first) or probes.probe_title(evaluation) or NOTHING,
        answer=(probes.probe_answer(evaluation) if not shown else []) or answer(first),
        missing=missing(evaluation),
        caveats=caveats(evaluation, shown),
        sections=sections,
    )


# ---------------------------------------------------------------- sections


def _grids(grid: Grid | None, under: Sequence[Part] = ()) -> list[Section]:
    """A section of one table and what belongs to it; none if the table has no rows."""
    return [Section(grid.title, [grid, *under])] if grid and grid.rows else []


def _points(title: str, lines: Sequence[str], *under: Part) -> Section:
    return Section(title, [*([Text([*lines], points=True)] if lines else []), *under])


def _compared(evaluation: Evaluation) -> list[Grid]:
    """What `posbench compare` says, if a baseline was named; nothing if there is no such line."""
    baseline = evaluation.provenance.get(BASELINE)
    if not baseline:
        return []
    try:
        return comparison_grids(evaluation, str(baseline))
    except UserError:
        return []


def _together(title: str, grids: Sequence[Grid]) -> list[Section]:
    return [Section(title, [*grids])] if grids else []


def _measured(evaluation: Evaluation, first: Table | None) -> list[Section]:
    """The headline, and the two figures that belong to it."""
    if first is None:
        return []
    grid = _perplexities(first)
    unigram = unigram_sentence(evaluation)
    several = any(len(line.seeds) > 1 for line in first.lines)
    spread = _spread_words(several)
    return [
        Section(grid.title, [grid, *([Text([unigram])] if unigram else [])]),
        Section(
            "Perplexity against length",
            [
                Drawing(
                    "curves",
                    "Perplexity against length, one line for each encoding, 1x marked",
                    f"{first.protocol}, both axes logarithmic, 1x dashed. {spread}",
                )
            ],
        ),
        Section(
            "Loss against position",
            [
                Drawing(
                    "position",
                    "Loss against position in the longest window, with 1x, 2x and 4x marked",
                    "Mean loss by position in one window of the longest length; multiples of the "
                    "training length dashed." + (f" {_BAND}" if several else ""),
                )
            ],
        ),
    ]


_BAND = "A line is the mean over seeds, its band goes from the least to the greatest."


def _spread_words(several: bool) -> str:
    return _BAND if several else "Bars are 95 % intervals over documents, of one trained model."


def _gain_figure(evaluation: Evaluation) -> list[Part]:
    several = len({row.seed for row in evaluation.rows if row.metric == "gain"}) > 1
    caption = "Above zero, longer context lowered the loss of the same targets. "
    alternative = "Gain over 1x against length, one line for each encoding"
    return [Drawing("gain", alternative, caption + _spread_words(several))]


def _others(shown: list[Table]) -> list[Grid]:
    alone = [table for table in shown[1:] if not several_presets(shown, table)]
    return [*map(_perplexities, alone), *comparisons(shown)]


def _diagnostics(evaluation: Evaluation) -> list[Section]:
    parts: list[Part] = [*diagnostic_grids(evaluation)]
    if heads_of(evaluation):
        parts.append(
            Drawing(
                "attention",
                "Weight of each head at distances of a training length or more",
                "Share of the attention that each head gives to tokens a training length or more "
                "away, at the longest length measured, seeds averaged. Dark: none; light: all.",
            )
        )
    return [Section("Diagnostics", parts)] if parts else []


def _title(first: Table | None) -> str:
    if first is None:
        return ""
    encodings = list(dict.fromkeys(line.subject.encoding for line in first.lines))
    named = encodings if len(encodings) <= 8 else [f"{len(encodings)} encodings"]
    lengths = {line.subject.train_length for line in first.lines}
    ratios = ", ".join(f"{ratio:g}x" for ratio in first.ratios)
    unit = f"{lengths.pop()} tokens" if len(lengths) == 1 else "their training lengths"
    return f"Length extrapolation of {', '.join(named)} at {ratios} of {unit}"


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
    return Grid("What training cost", header, rows)


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
    own = {(row.protocol, row.eval_length) for row in rows if row.min_context is not None}
    # What is derived from such rows, as a cliff is, scored nothing of its own.
    rows = [
        row
        for row in rows
        if row.min_context is not None or (row.protocol, row.eval_length) not in own
    ]
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


def _bibtex(evaluation: Evaluation) -> str:
    ids = {row.protocol for row in evaluation.rows}
    # A name such as rope+window64 begins with the encoding.
    ids |= {name for row in evaluation.rows for name in (row.encoding, row.encoding.split("+")[0])}
    ids |= {row.extension for row in evaluation.rows} - {"none"}
    return "\n\n".join([own_bibtex(), *(each.bibtex() for each in references_of(ids))])


# ---------------------------------------------------------------- provenance

_RUNTIME = ("posbench", "torch", "device", "gpu", "dtype")
_FINGERPRINTS = (
    ("corpus_fingerprint", "corpus fingerprint"),
    ("tokenizer_sha256", "tokenizer SHA-256"),
    ("targets_sha256", "targets SHA-256"),
)


def _short_provenance(evaluation: Evaluation) -> list[tuple[str, str]]:
    """What was measured, on what and with what, in some ten lines."""
    record = evaluation.provenance
    runs = evaluation.runs
    done = [each for each in record.get("evaluations", []) if isinstance(each, dict)]
    typed = [record[STUDY]] if STUDY in record else done
    times = sorted({str(each["created"])[:16] for each in done if each.get("created")})
    pairs = [
        ("runs", _runs_in_words(evaluation)),
        ("corpus", _distinct(run.get("corpus") for run in runs)),
        ("tokenizer", _distinct(run.get("tokenizer") for run in runs)),
        ("protocol", _distinct(_protocol_id(run) for run in runs)),
        *((title, _shortened(values)) for title, values in _fingerprints(evaluation)),
        ("with", ", ".join(f"{key} {record[key]}" for key in _RUNTIME if record.get(key))),
        ("evaluated", " to ".join(times if len(times) < 2 else [times[0], times[-1]])),
        ("command", " ; ".join(dict.fromkeys(_command(each) for each in typed))),
    ]
    return [(name, value or MISSING) for name, value in pairs]


def _runs_in_words(evaluation: Evaluation) -> str:
    runs = evaluation.runs
    if not runs:
        return ""
    counts = {
        "encoding": len({run.get("encoding") for run in runs}),
        "seed": len({run.get("seed") for run in runs}),
    }
    told = ", ".join(f"{n} {name}{'' if n == 1 else 's'}" for name, n in counts.items())
    models = _distinct(run.get("model") for run in runs)
    lengths = _distinct(run.get("train_length") for run in runs)
    tokens = _distinct(quantity(run["tokens"]) for run in runs if run.get("tokens"))
    trained = f" on {tokens} tokens" if tokens else ""
    return f"{len(runs)} ({told}); model {models}, trained at length {lengths}{trained}"


def _protocol_id(run: dict[str, Any]) -> Any:
    protocol = run.get("protocol")
    return protocol.get("protocol") if isinstance(protocol, dict) else protocol


def _command(record: dict[str, Any]) -> str:
    """As it was typed, but for what a sweep adds to each of its jobs."""
    command = record.get("command", "")
    if not isinstance(command, list):
        return str(command)
    added = ("hydra.mode=", "hydra.sweeper.")
    return " ".join(str(word) for word in command if not str(word).startswith(added))


def _distinct(values: Any) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values if value not in (None, "")))


def _shortened(values: list[str]) -> str:
    return ", ".join(value[:16] for value in values)


def _fingerprints(evaluation: Evaluation) -> list[tuple[str, list[str]]]:
    """(title, distinct values); targets are those of the headline."""
    return [
        (
            title,
            sorted(
                {
                    getattr(row, name)
                    for row in evaluation.rows
                    if name != "targets_sha256" or row.protocol == HEADLINE
                }
                - {""}
            ),
        )
        for name, title in _FINGERPRINTS
    ]


def _provenance(evaluation: Evaluation) -> list[tuple[str, str]]:
    """Everything recorded about how the numbers came about, flat, one line each."""
    shown = {key: value for key, value in evaluation.provenance.items() if key != TUNE}
    pairs = list(_flat("", shown))
    for title, values in _fingerprints(evaluation):
        pairs.append((title, ", ".join(values) or MISSING))
    recorded = ("folder", "checkpoint_sha256", "corpus", "tokenizer", "protocol")
    records = [
        dict(pair for key in recorded for pair in _flat(key, run.get(key, MISSING)))
        for run in evaluation.runs
    ]
    shared = set.intersection(*(set(each.items()) for each in records)) if records[1:] else set()
    for key, said in records[0].items() if shared else ():
        if (key, said) in shared:
            pairs.append((f"every run: {key}", said))
    for run, record in zip(evaluation.runs, records, strict=True):
        own = [pair for pair in record.items() if pair not in shared]
        pairs += [(f"run {run['run_id']}: {key}", said) for key, said in own]
    return pairs


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
