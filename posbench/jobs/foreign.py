"""Models that others trained, measured one after another by the evaluator of posbench's own runs.

Such a model was trained on none of the documents here, so which split is read is a matter of
comparison: the test split, as for runs, or all of them (`eval.split=all`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from posbench.catalog import EXTENSION_CARDS
from posbench.config import EvalSettings, PysourceConfig
from posbench.data import Dataset, Split, prepare_foreign
from posbench.encodings import Encoding
from posbench.errors import CheckpointError, UnsupportedError, UserError
from posbench.evaluation import Subject, evaluate_model
from posbench.foreign import ForeignCheckpoint, load_foreign, open_foreign
from posbench.jobs.measuring import Measurement, raise_damaged, variant_of, warn
from posbench.plan import Plan, plan, planned_tokens, skipped_rows
from posbench.progress import Progress
from posbench.results import Evaluation, Row, Status
from posbench.runtime import Runtime
from posbench.saved import to_dict
from posbench.statistics import unigram_perplexity

SEED = 0  # of no meaning here: nobody knows the seeds of others


@dataclass
class _Stranger:
    """One model to evaluate, or the reason why it cannot be."""

    model: str  # as typed
    checkpoint: ForeignCheckpoint | None = None
    dataset: Dataset | None = None
    counts_bytes: bool = False
    damaged: str = ""
    refused: str = ""  # the extension, or what to do beyond a table, does not fit


def measure_foreign(settings: EvalSettings, runtime: Runtime) -> tuple[Evaluation, list[str]]:
    """All rows, and one sentence for each model without usable weights.

    Raises CheckpointError if none has any, UserError if the extension fits none.
    """
    strangers = [_stranger(model, settings) for model in models_of(settings)]
    _raise_if_all_damaged(strangers)
    for each in strangers:
        if each.damaged:
            warn(each.damaged)
    if all(each.damaged or each.refused for each in strangers):
        raise UserError(_fits_none(settings, strangers))
    plans = {
        each.model: _plan(each, settings, runtime)
        for each in strangers
        if not each.damaged and not each.refused
    }
    total = sum(planned_tokens(each, settings.eval) for each in plans.values())
    evaluation, done = Evaluation(), 0
    with Progress("evaluate", total, unit="tokens") as progress:

        def heard(tokens: int) -> None:
            nonlocal done
            done += tokens
            progress.update(min(done, total), each.model)

        for each in strangers:
            heard(0)
            found = _one(each, plans.get(each.model), settings, runtime, heard)
            evaluation = evaluation.merged(found)
        _raise_if_all_damaged(strangers)
        progress.update(total)
    return evaluation, [each.damaged for each in strangers if each.damaged]


def models_of(settings: EvalSettings) -> list[str]:
    """What `model=` names, as a list."""
    return list(settings.models) if isinstance(settings.models, list) else [settings.models]


def asked_models(settings: EvalSettings) -> dict[str, Any]:
    """What decides the numbers of an evaluation beside its protocol: models, length and text."""
    return {
        "models": [_identity(model, settings) for model in models_of(settings)],
        "context": settings.context,
        "data": to_dict(settings.data or PysourceConfig()),
    }


def _identity(model: str, settings: EvalSettings) -> str:
    try:
        checkpoint = open_foreign(model, settings.context)
    except CheckpointError:
        return f"{model} (unreadable)"
    return f"hf:{checkpoint.folder.resolve()} ({checkpoint.id})"


def _raise_if_all_damaged(strangers: list[_Stranger]) -> None:
    damaged = [each.damaged for each in strangers if each.damaged]
    raise_damaged(damaged if len(damaged) == len(strangers) else [])


def _stranger(model: str, settings: EvalSettings) -> _Stranger:
    stranger = _Stranger(model)
    try:
        checkpoint = stranger.checkpoint = open_foreign(model, settings.context)
        tokenizer = checkpoint.tokenizer()
        _as_evaluated(checkpoint.encoding(), settings)
    except CheckpointError as error:
        stranger.damaged = str(error)
        return stranger
    except UnsupportedError as error:
        stranger.refused = str(error)
    data = settings.data or PysourceConfig()
    stranger.dataset, stranger.counts_bytes = prepare_foreign(data, tokenizer)
    return stranger


def _as_evaluated(encoding: Encoding, settings: EvalSettings) -> None:
    """Have a model's encoding do what `settings` ask of it; raises UnsupportedError."""
    encoding.extend(settings.extension)
    encoding.go_beyond(settings.eval.beyond)


def _fits_none(settings: EvalSettings, strangers: list[_Stranger]) -> str:
    reasons = "; ".join(dict.fromkeys(each.refused for each in strangers if each.refused))
    extension = settings.extension
    if extension.name == "none":
        return f"eval.beyond={settings.eval.beyond} applies to none of the models: {reasons}."
    card = next(card for card in EXTENSION_CARDS if card.id == extension.name)
    return (
        f"extension={extension.name} applies to none of the models: {reasons}. It applies to "
        f"encoding={card.applies_to}."
    )


def _split(stranger: _Stranger, settings: EvalSettings) -> Split:
    assert stranger.dataset is not None
    return stranger.dataset.split(settings.eval.split)


def _plan(stranger: _Stranger, settings: EvalSettings, runtime: Runtime) -> Plan:
    assert stranger.checkpoint is not None
    context, device = stranger.checkpoint.context, runtime.device.type
    return plan(_split(stranger, settings), context, settings.eval, device)


def _one(
    stranger: _Stranger,
    planned: Plan | None,
    settings: EvalSettings,
    runtime: Runtime,
    heard: Callable[[int], None],
) -> Evaluation:
    """The rows of one model, which is in memory no longer than that takes."""
    row, dataset = _row(stranger, settings), stranger.dataset
    if stranger.checkpoint is None or dataset is None:
        row.status, row.reason = Status.skipped, stranger.damaged
        return Evaluation(rows=skipped_rows(row, settings.eval))
    if planned is None:
        row.status, row.reason = Status.unsupported, stranger.refused
        return Evaluation(rows=skipped_rows(row, settings.eval))
    try:
        model = load_foreign(stranger.checkpoint, dataset.tokenizer.vocabulary)
        split = _split(stranger, settings)
        _check_ids(stranger, split, model.rows)
    except CheckpointError as error:
        stranger.damaged = str(error)
        row.status, row.reason = Status.skipped, stranger.damaged
        return Evaluation(rows=skipped_rows(row, settings.eval))
    if model.unused:
        warn(f"{stranger.model}: transformers has no place for {model.unused}; left out.")
    _as_evaluated(model.encoding, settings)
    byte_lengths = dataset.tokenizer.byte_lengths if stranger.counts_bytes else None
    subject = Subject(model.to(runtime.device), row, split, byte_lengths)
    evaluation = evaluate_model(subject, planned, settings.eval, runtime, heard)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    record = _record(stranger, stranger.checkpoint, dataset, split)
    record |= {"parameters": parameters, "unused_weights": model.unused}
    record["protocol"] = Measurement(settings, runtime).protocol(planned)
    evaluation.runs = [record]
    return evaluation


def _check_ids(stranger: _Stranger, split: Split, rows: int) -> None:
    """Raise CheckpointError for text under a tokenizer that the model was not made for."""
    highest = int(split.tokens.max())
    if highest >= rows:
        raise CheckpointError(
            f"{stranger.model}: its tokenizer.json gives id {highest}, and the model embeds {rows} "
            "tokens: they do not belong together."
        )


def _row(stranger: _Stranger, settings: EvalSettings) -> Row:
    checkpoint, dataset = stranger.checkpoint, stranger.dataset
    row = Row(
        run_id=stranger.model,
        encoding="unknown",
        extension=settings.extension.name,
        variant=variant_of(settings),
        model="unknown",
        seed=SEED,
        train_length=0,
        eval_length=0,
        ratio=0.0,
        protocol="",
    )
    if checkpoint is not None:
        row.run_id, row.model = checkpoint.id, f"hf:{checkpoint.name}"
        row.encoding, row.train_length = checkpoint.encoding_config().name, checkpoint.context
        own = checkpoint.rope_type
        if own != "default":  # its own config stretches it, not posbench
            row.variant = f"{row.variant} rope_type={own}".strip()
    if dataset is not None:
        row.corpus_fingerprint = dataset.fingerprint
        row.tokenizer_sha256 = dataset.tokenizer.sha256
    return row


def _record(
    stranger: _Stranger, checkpoint: ForeignCheckpoint, dataset: Dataset, split: Split
) -> dict[str, Any]:
    """What a result says of the model, as far as anybody here can know."""
    return {
        "run_id": checkpoint.id,
        "folder": str(checkpoint.folder),
        "encoding": checkpoint.encoding_config().name,
        "model": f"hf:{checkpoint.name}",
        "seed": SEED,
        "train_length": checkpoint.context,
        "train_length_from": checkpoint.context_from,
        "checkpoint_sha256": checkpoint.sha256,
        "config_sha256": checkpoint.config_sha256,
        "settings_id": checkpoint.id,
        "config": checkpoint.config.to_diff_dict(),
        "corpus": dataset.corpus,
        "tokenizer": "of the checkpoint",
        "counts_bytes": stranger.counts_bytes,
        "unigram_ppl": unigram_perplexity(
            dataset.train.tokens, split.tokens, dataset.tokenizer.vocabulary
        ),
    }
