"""Write docs/encodings.md from the catalogue, the code, and what a run measured.

    python scripts/encodings_table.py                            from docs/results/encodings
    python scripts/encodings_table.py ENCODINGS EXTENSIONS...    from new evaluations

Without arguments nothing is trained: an encoding that the kept results do not hold is
`not measured`. ENCODINGS and EXTENSIONS are folders of `posbench eval-extrapolate`, the first with
every encoding, the others with extensions; what the page needs of them is kept for the next time.
The same input gives the same bytes.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from posbench.catalog import ENCODING_CARDS, EXTENSION_CARDS, POLICY_CARDS, EncodingCard
from posbench.config import ENCODINGS, ModelConfig
from posbench.config.policies import PRESETS, Policies
from posbench.model import build_encoding
from posbench.report.lines import NOT_MEASURED, number

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "docs" / "results" / "encodings"
PAGE = ROOT / "docs" / "encodings.md"

CARDS = (*ENCODING_CARDS, *POLICY_CARDS)
RATIOS = (1.0, 2.0, 4.0)
COLUMNS = (
    "encoding", "extension", "variant", "model", "seed", "train_length", "eval_length", "ratio",
    "ppl", "ci_lo", "ci_hi", "n_targets", "n_docs", "status", "reason",
)  # fmt: skip
OUT = "outputs/encodings"
ROPE, ALIBI = f"{OUT}/train/*-rope", f"{OUT}/train/*-alibi"
SCORED = "'eval.protocols=[controlled]' eval.max_targets=8192"
COMMANDS = (
    f"posbench train -m experiment=encodings hydra.sweep.dir={OUT}/train",
    f"posbench eval-extrapolate runs={OUT}/train {SCORED} hydra.run.dir={OUT}/encodings",
    f"posbench eval-extrapolate -m 'runs=[{ROPE},{ALIBI}]' 'extension=glob(*,exclude=longrope)' "
    f"{SCORED} hydra.sweep.dir={OUT}/extensions",
    f"posbench eval-extrapolate 'runs={ROPE}' extension=longrope extension.search=20 {SCORED} "
    f"hydra.run.dir={OUT}/longrope",
    f"posbench eval-extrapolate -m 'runs={ROPE}' extension=none,pi,abf,yarn "
    f"extension.finetune_steps=50 {SCORED} hydra.sweep.dir={OUT}/tuned",
    f"python scripts/encodings_table.py {OUT}/encodings {OUT}/extensions {OUT}/longrope "
    f"{OUT}/tuned",
)

Row = dict[str, str]


# ---------------------------------------------------------------- what an evaluation leaves


def keep(encodings: Path, extensions: Sequence[Path]) -> None:
    """Copy what the page needs of evaluations into docs/results/encodings."""
    KEPT.mkdir(parents=True, exist_ok=True)
    _write_csv(KEPT / "encodings.csv", _rows(encodings))
    rows = [row for folder in extensions for row in _rows(folder)]
    _write_csv(KEPT / "extensions.csv", _that_apply(rows))
    facts = json.dumps(_facts(encodings), indent=1)
    (KEPT / "run.json").write_text(facts + "\n")


def _rows(folder: Path) -> list[Row]:
    """The perplexities of the headline protocol, to six digits."""
    with (folder / "results.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["protocol"] == "controlled"]
    for row in rows:
        for column in ("ppl", "ci_lo", "ci_hi"):
            row[column] = f"{float(row[column]):.6g}" if row[column] else ""
    return [{column: row[column] for column in COLUMNS} for row in rows if row["metric"] == "ppl"]


def _that_apply(rows: list[Row]) -> list[Row]:
    """Without the runs on which an extension means nothing, where it means something on another."""
    able = {_subject(row) for row in rows if row["status"] != "unsupported"}
    served = {(extension, variant) for _, extension, variant in able}
    return [row for row in rows if _subject(row) in able or _subject(row)[1:] not in served]


def _subject(row: Row) -> tuple[str, str, str]:
    return row["encoding"], row["extension"], row["variant"]


def _write_csv(path: Path, rows: list[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: (_subject(row), float(row["ratio"]))))


def _facts(folder: Path) -> dict[str, Any]:
    """With what the runs were made; nothing of the machine but its kind."""
    results = json.loads((folder / "results.json").read_text())
    run = results["runs"][0]
    made = json.loads((Path(run["folder"]) / "run.json").read_text())
    return {
        "posbench": made["posbench"],
        "python": made["python"],
        "torch": made["runtime"]["torch"],
        "device": made["runtime"]["device"],
        "model": run["model"],
        "model_parameters": run["parameters"] - run["encoding_parameters"],
        "train_length": run["train_length"],
        "train_tokens": run["tokens"],
        "corpus": run["corpus"],
        "tokenizer": run["tokenizer"],
        "unigram_ppl": round(run["unigram_ppl"], 2),
    }


# ---------------------------------------------------------------- the page


def page() -> str:
    """The text of docs/encodings.md."""
    facts = json.loads((KEPT / "run.json").read_text())
    measured: dict[str, dict[float, Row]] = {}
    for row in _read("encodings.csv"):
        cells, ratio = measured.setdefault(row["encoding"], {}), float(row["ratio"])
        if ratio in cells:
            raise SystemExit(f"encodings.csv measures {row['encoding']} twice at one length")
        cells[ratio] = row
    parts = [_opening(facts, measured)]
    for family in dict.fromkeys(card.family for card in CARDS):
        cards = [card for card in CARDS if card.family == family]
        parts.append(_family(family, cards, measured, facts["train_length"]))
    parts += [_extensions(), _papers()]
    return "\n\n".join(parts) + "\n"


def _read(name: str) -> list[Row]:
    with (KEPT / name).open(newline="") as file:
        return list(csv.DictReader(file))


def _opening(facts: dict[str, Any], measured: dict[str, dict[float, Row]]) -> str:
    rope = measured["rope"][1.0]
    targets = int(rope["n_targets"])
    low, high = (number(float(rope[edge])) for edge in ("ci_lo", "ci_hi"))
    commands = "\n".join(COMMANDS)
    length, device = facts["train_length"], facts["device"].upper()
    return f"""\
<!-- Written by scripts/encodings_table.py from the catalogue and docs/results/encodings. -->

# All encodings

One line for each: what it computes, what it costs, what its paper claims, and what a tiny run
measured. The pages [absolute](encodings/absolute.md), [rotary](encodings/rotary.md),
[bias](encodings/bias.md), [relative](encodings/relative.md), [content](encodings/content.md),
[policies](encodings/policies.md) and [extensions](encodings/extensions.md) explain them.

## How it was made

```
{commands}
```

posbench {facts["posbench"]}, Python {facts["python"]}, torch {facts["torch"]}, {device}, float32, \
one thread a run. Model `{facts["model"]}` ({facts["model_parameters"]:,} parameters beside the \
encoding's), training length {length}, {facts["train_tokens"]:,} tokens of corpus \
`{facts["corpus"]}` as `{facts["tokenizer"]}`, seed 0, the same batches for all. The corpus is the \
standard library of that Python; another version gives other numbers. Training takes twenty \
minutes of CPU time, ten on two free cores, the evaluations less. `scripts/encodings_table.py` \
without arguments writes this page again from the \
[kept results](results/encodings/encodings.csv), without training.

## How to read it

- Formulas: query i, key j <= i, r their distance; q, k of one head; D channels of a head, C of the
  model, H heads h = 1..H, N layers, L training length, x_p the embedding of the token at p. They
  give the score before the softmax, with defaults; names in them are settings.
- *claimed* is what its paper says, or a common tutorial where the paper says nothing, about texts
  longer than those of training. It is not what was measured here.
- *1x, 2x, 4x* are perplexities of the [protocol](protocol.md)'s `controlled` metric: the same
  {targets:,} target tokens of {rope["n_docs"]} test documents, seen through windows of {length},
  {2 * length} and {4 * length} tokens. *4x / 1x* is the ratio of the last to the first. Token
  frequencies alone would score {facts["unigram_ppl"]}.
- **One seed of one tiny model, trained for minutes.** It shows which schemes break at once beyond
  the training length and which hold, and that the code does what it says. It cannot rank schemes
  that lie close together: the 95 % interval over documents of `rope` at 1x is {low} to {high},
  another seed moves the numbers too, and schemes with much to learn want longer training.
- A cell with a word has no number: `unsupported` is not defined there, `{NOT_MEASURED}` was not in
  the run."""


def _family(
    family: str, cards: list[EncodingCard], measured: dict[str, dict[float, Row]], length: int
) -> str:
    what = _table(
        ("id", "formula", "form", "parameters", "count", "longest text", "cost"),
        [
            (
                _link(card),
                f"`{card.formula}`",
                f"`{card.form}`",
                f"`{card.parameters}`",
                f"{_count(card.id, length):,}",
                card.max_length,
                card.cost,
            )
            for card in cards
        ],
    )
    found = _table(
        ("id", "claimed", "1x", "2x", "4x", "4x / 1x"),
        [
            (_link(c), c.extrapolation_claim or "nothing", *_cells(measured.get(c.id, {})))
            for c in cards
        ],
    )
    return f"## {_title(family)}\n\n{what}\n\n{found}"


def _title(family: str) -> str:
    return {"policy": "Policies around RoPE", "bias": "Bias by distance"}.get(
        family, family.capitalize()
    )


def page_of(family: str) -> str:
    """The page that explains a family, relative to docs/."""
    return f"encodings/{ {'policy': 'policies'}.get(family, family) }.md"


def _link(card: EncodingCard) -> str:
    return f"[`{card.id}`]({page_of(card.family)}#{card.id})"


def _count(name: str, train_length: int) -> int:
    """Parameters of the encoding's own in the model of the run."""
    preset = PRESETS.get(name)
    config = ENCODINGS[preset.encoding if preset else name]()
    policies = preset.at(train_length) if preset else Policies()
    return build_encoding(ModelConfig(), config, train_length, policies).parameter_count()


def _cells(rows: dict[float, Row]) -> tuple[str, ...]:
    """The cells 1x, 2x, 4x and their ratio; a word where there is no number."""
    cells = [_cell(rows.get(ratio)) for ratio in RATIOS]
    first, last = (rows.get(ratio, {}).get("ppl") for ratio in (RATIOS[0], RATIOS[-1]))
    return (*cells, f"{float(last) / float(first):.2f}" if first and last else "")


def _cell(row: Row | None) -> str:
    if row is None:
        return NOT_MEASURED
    return number(float(row["ppl"])) if row["status"] == "ok" else row["status"]


def _extensions() -> str:
    rows = _read("extensions.csv")
    known = {card.id for card in EXTENSION_CARDS}
    subjects: dict[tuple[str, str, str], dict[float, Row]] = {}
    for row in rows:
        if row["extension"] not in known:
            raise SystemExit(f"extensions.csv holds {row['extension']}, which is no extension")
        subjects.setdefault(_subject(row), {})[float(row["ratio"])] = row
    what = _table(
        ("id", "formula", "applies to", "depends on the length"),
        [
            (f"[`{c.id}`](encodings/extensions.md#{c.id})", f"`{c.formula}`", c.applies_to,
             c.length_dependent)
            for c in EXTENSION_CARDS
        ],
    )  # fmt: skip
    found = []
    for card in EXTENSION_CARDS:
        mine = [(key, rows) for key, rows in subjects.items() if key[1] == card.id]
        for (encoding, _, variant), cells in sorted(
            mine, key=lambda each: (each[0][2], each[0][0])
        ):
            found.append((f"`{card.id}`", f"`{encoding}`", variant or "as trained", *_cells(cells)))
        if not mine:
            found.append((f"`{card.id}`", "", "", *_cells({})))
    table = _table(("id", "run", "variant", "1x", "2x", "4x", "4x / 1x"), found)
    return f"""\
## Extensions

Rules that stretch a trained model at evaluation, on the runs of `rope` and `alibi` above. s is the
length over L, at least 1; f and f' are frequencies before and after, n the tokens of the text,
turns how often a pair turns within L.

{what}

`finetune_steps=N` trained a copy on for N steps at 4x and keeps that scale at every length;
`search=N` looked for factors in N trials on the validation split. The
[protocol](protocol.md#tuned-at-the-longer-length) says how.

{table}"""


def _papers() -> str:
    """Every paper that a card cites, once, with the ids that cite it."""
    cited: dict[str, tuple[str, list[str]]] = {}
    for card in (*CARDS, *EXTENSION_CARDS):
        for citation in filter(None, card.paper.split("; ")):
            found = re.search(r"arXiv:(\d+\.\d+)", citation)
            key = found[1] if found else citation
            text = citation
            if found:
                text = citation[: found.start()] + f"[arXiv:{key}](https://arxiv.org/abs/{key})"
            cited.setdefault(key, (text, []))[1].append(card.id)
    lines = [
        f"- {text}: {', '.join(f'`{each}`' for each in dict.fromkeys(ids))}"
        for text, ids in sorted(cited.values(), key=lambda each: each[0].casefold())
    ]
    return "## Papers\n\n" + "\n".join(lines)


def _table(head: tuple[str, ...], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(words: list[str]) -> None:
    if len(words) == 1 or any(word.startswith("-") for word in words):
        raise SystemExit(__doc__)
    if words:
        keep(Path(words[0]), [Path(word) for word in words[1:]])
    PAGE.write_text(page())
    print(f"written: {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
