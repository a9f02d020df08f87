"""The runs of one evaluation, verified, measured one after another, and put into one table."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.catalog import EXTENSION_CARDS
from posbench.config import Beyond, EvalSettings, EvalSplit, TrainSettings
from posbench.config.encodings import EncodingConfig
from posbench.config.fields import changed_settings
from posbench.config.policies import policies_of
from posbench.config.tasks import TaskConfig
from posbench.discovery import find_folders
from posbench.errors import CheckpointError, UnsupportedError, UserError
from posbench.plugins import LOADED, SOURCE, blame, changed_plugin
from posbench.results import Evaluation, Row, Status
from posbench.runs import TOKENIZER, PluginError, Run, fingerprint, load_run, scheme_of
from posbench.saved import to_dict

if TYPE_CHECKING:
    from posbench.data import Dataset
    from posbench.diagnostics import KeyTokens
    from posbench.encodings import Encoding
    from posbench.jobs.adapting import Heard
    from posbench.model import GPT
    from posbench.plan import Plan
    from posbench.runtime import Runtime
    from posbench.task_evaluation import TaskPlan


@dataclass
class Candidate:
    """A run to evaluate, or the reason why it cannot be."""

    folder: Path
    run: Run | None = None  # None: not even its manifest can be read
    damaged: str = ""  # no usable checkpoint
    foreign: str = ""  # its encoding's plugin was not given, or is another one by now
    refused: str = ""  # the extension, or what to do beyond a table, does not fit

    @property
    def usable(self) -> Run | None:
        """The run, if all is well with it."""
        return None if self.skipped or self.refused else self.run

    @property
    def skipped(self) -> str:
        """Why it is not even looked at."""
        return self.damaged or self.foreign


def find_candidates(settings: EvalSettings) -> list[Candidate]:
    """The runs that `settings` name, every byte of them verified.

    Raises CheckpointError if none has a usable checkpoint, UserError if the extension fits none,
    or all need a plugin that was not given.
    """
    candidates = [_candidate(folder, settings) for folder in find_folders(settings.runs)]
    _distinguish([each.run for each in candidates if each.run is not None])
    damaged = [each.damaged for each in candidates if each.damaged]
    if all(each.foreign for each in candidates):
        raise UserError(" ".join(dict.fromkeys(each.foreign for each in candidates)))
    for each in candidates:
        if each.skipped:
            warn(each.skipped)
    raise_damaged(damaged if len(damaged) == len(candidates) else [])
    if not any(each.usable for each in candidates):
        raise UserError(_fits_none(settings, candidates))
    return candidates


def warn(sentence: str) -> None:
    print(f"warning: {sentence}", file=sys.stderr, flush=True)


def raise_damaged(sentences: list[str]) -> None:
    """Raise CheckpointError with these sentences, if there are any."""
    if sentences:
        raise CheckpointError("no usable checkpoint: " + " ".join(sentences))


def _candidate(folder: Path, settings: EvalSettings) -> Candidate:
    from posbench.model import build_encoding

    candidate = Candidate(folder)
    try:
        run = candidate.run = load_run(folder, plugins_changed=settings.plugins_changed)
        run.checkpoint()
        run.tokenizer_json()
        trained = run.settings
        encoding = build_encoding(
            trained.model, trained.encoding, trained.context, policies_of(trained)
        )
        encoding.trained_to(1.0)
        _as_evaluated(encoding, settings)
        if is_task(run):
            _refuse_adapting(settings)
    except CheckpointError as error:
        candidate.damaged = str(error)
    except PluginError as error:
        candidate.run, candidate.foreign = error.run, _with_way_out(error)
    except UnsupportedError as error:
        candidate.refused = str(error)
    return candidate


def _refuse_adapting(settings: EvalSettings) -> None:
    """Raise UnsupportedError for what works on text alone."""
    extension = settings.extension
    for key in ("finetune_steps", "search"):
        if getattr(extension, key, 0):
            raise UnsupportedError(f"extension.{key} works on text, and the run is of a task")


def _as_evaluated(encoding: Encoding, settings: EvalSettings) -> Encoding:
    """A trained encoding as `settings` want it measured; raises UnsupportedError."""
    from posbench.encodings.policies import warmed
    from posbench.jobs.adapting import extend_provisionally

    extend_provisionally(encoding, settings.extension)
    encoding.go_beyond(settings.eval.beyond)
    temperature = settings.eval.temperature
    return encoding if temperature is None else warmed(encoding, temperature)


def _with_way_out(error: PluginError) -> str:
    if error.run.settings.encoding.name not in LOADED:
        return str(error)
    return f"{error} plugins_changed=true evaluates it with the new code, and says so in each row."


def _distinguish(runs: list[Run]) -> None:
    """Give equal run ids (the same experiment in two folders) a number."""
    seen: dict[str, int] = {}
    for run in runs:
        name = run.id
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1:
            run.manifest["run_id"] = f"{name}-{seen[name]}"


def _fits_none(settings: EvalSettings, candidates: list[Candidate]) -> str:
    extension, beyond = settings.extension, settings.eval.beyond
    names = sorted({scheme_of(each.run.settings) for each in candidates if each.run})
    beside = "" if extension.name == "none" else f", beside extension={extension.name}"
    if beyond is not Beyond.error:
        return (
            f"eval.beyond={beyond} applies to none of the runs (encoding {', '.join(names)}"
            f"{beside}). It applies to encoding=learned."
        )
    reasons = "; ".join(sorted({each.refused for each in candidates if each.refused}))
    card = next(card for card in EXTENSION_CARDS if card.id == extension.name)
    return (
        f"extension={extension.name} applies to none of the runs (encoding "
        f"{', '.join(names)}): {reasons}. It applies to encoding={card.applies_to}."
    )


def variant_of(settings: EvalSettings, encoding: EncodingConfig | None = None) -> str:
    """What a row says of a model that is not evaluated as it was trained."""
    extension, config = settings.extension, settings.eval
    parts = []
    if config.beyond is not Beyond.error:
        parts.append(f"beyond={config.beyond}")
    if config.temperature is not None:
        parts.append(f"temperature={config.temperature}")
    changed = changed_settings(extension)
    if not extension.finetune_steps:
        changed.pop("finetune_lr", None)  # of no steps
    told = [f"{key}={_short(value)}" for key, value in changed.items()]
    parts += sorted(told, key=lambda word: word.startswith("finetune"))  # what came last
    if encoding is not None and changed_plugin(encoding):
        parts.append(changed_plugin(encoding))
    return " ".join(parts)


def _training(settings: TrainSettings) -> dict[str, Any]:
    """What people tune, flat: the keys are the same for every run."""
    model, train, changed = settings.model, settings.train, changed_settings(settings.encoding)
    own = [
        f"{key}={_short(value)}" for key, value in changed.items() if key not in ("name", SOURCE)
    ]
    return {
        "encoding_settings": " ".join(own),
        "layers": model.layers,
        "width": model.width,
        "heads": model.heads,
        "steps": train.steps,
        "batch_size": train.batch_size,
        "lr": train.lr,
        "schedule": str(train.schedule),
    }


def _short(value: Any) -> str:
    """A setting's value in a word; a list by what tells it from others."""
    if isinstance(value, list):
        return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:8]
    return f"{value:g}" if isinstance(value, float) else str(value)


def is_task(run: Run) -> bool:
    """Whether a run was trained on a task, not on text."""
    return isinstance(run.settings.data, TaskConfig)


def longest_example(run: Run) -> int:
    """The longest length that a run on a task was trained at."""
    assert isinstance(run.settings.data, TaskConfig)
    return run.settings.data.longest(run.settings.context)


def _check_fingerprint(run: Run, here: str, what: str) -> None:
    known = run.corpus_fingerprint
    if here != known:
        raise UserError(
            f"data={run.settings.data.name} here is not the {what} that {run.folder} was trained "
            f"beside: fingerprint {here[:12]} here, {known[:12]} there. Evaluate where it was "
            "trained, or train again."
        )


class Measurement:
    """One evaluation over several runs; datasets and plans are made once for those that share."""

    def __init__(self, settings: EvalSettings, runtime: Runtime) -> None:
        self.settings, self.runtime = settings, runtime
        self._datasets: dict[str, Dataset] = {}
        self._plans: dict[tuple[str, int], Plan] = {}
        self._alone = True  # whether one run is all there is to evaluate
        self._task_plans: dict[tuple[str, int], TaskPlan] = {}
        self._judged: dict[tuple[str, int], KeyTokens] = {}

    def evaluate(self, candidates: list[Candidate]) -> Evaluation:
        """Rows of all candidates, in their order. All text is looked at before the first is run."""
        from posbench.progress import Progress

        planned = {
            each.folder: self._planned_tokens(each.run)
            for each in candidates
            if each.run is not None and not each.skipped
        }
        self._alone = sum(each.usable is not None for each in candidates) == 1
        total = sum(planned[each.folder] for each in candidates if each.usable)
        evaluation = Evaluation()
        done = 0
        with Progress("evaluate", total, unit="tokens") as progress:

            def heard(tokens: int, doing: str = "") -> None:
                nonlocal done
                done += tokens
                progress.update(min(done, total), f"{candidate.folder.name} {doing}".rstrip())

            for candidate in candidates:
                heard(0)
                evaluation = evaluation.merged(self._unspoilt(candidate, heard))
            progress.update(total)
        return evaluation

    def _unspoilt(self, candidate: Candidate, heard: Heard) -> Evaluation:
        """The rows of one candidate; a plugin that fails spoils no rows but its own."""
        try:
            return self._one(candidate, heard)
        except Exception as error:
            candidate.foreign = blame(error)
            if not candidate.foreign or self._alone:
                raise
            warn(candidate.foreign)
            return self._one(candidate, heard)

    def _planned_tokens(self, run: Run) -> int:
        from posbench.jobs.adapting import adapting_tokens
        from posbench.plan import planned_tokens

        if is_task(run):
            return self._task_plan(run).tokens
        measuring = planned_tokens(self._plan(run), self.settings.eval)
        return measuring + adapting_tokens(run, self.settings)

    def _one(self, candidate: Candidate, heard: Heard) -> Evaluation:
        from posbench.evaluation import Subject, evaluate_model
        from posbench.jobs.adapting import NotAdaptedError, adapt
        from posbench.plan import skipped_rows

        run, config = candidate.run, self.settings.eval
        if run is not None and is_task(run):
            return self._one_task(candidate, run, heard)
        row = self._unreadable_row(candidate.folder) if run is None else self._row(run)
        if run is None or candidate.skipped:
            row.status, row.reason = Status.skipped, candidate.skipped
            return Evaluation(rows=skipped_rows(row, config))
        record = self._record(run)
        if candidate.refused:
            row.status, row.reason = Status.unsupported, candidate.refused
            return Evaluation(rows=skipped_rows(row, config), runs=[record])
        dataset, plan = self._dataset(run), self._plan(run)
        model = self._model(run)
        done: dict[str, Any] = {}
        try:
            if plan.places.anchors:
                adapt(model, run, dataset, self.settings, self.runtime, heard, done)
        except NotAdaptedError as failure:
            row.status, row.reason = failure.status, str(failure)
            if row.status is Status.nonfinite:
                row.value = row.ppl = row.nll = math.inf
            return Evaluation(rows=skipped_rows(row, config), runs=[record])
        finally:
            if done:
                name = {"extension": row.extension, "variant": row.variant}
                record["adaptations"] = [name | done]
        split = dataset.split(config.split)
        subject = Subject(model, row, split, dataset.tokenizer.byte_lengths)
        judged = self._key_tokens(run, plan, heard)
        measured = evaluate_model(subject, plan, config, self.runtime, heard, judged)
        measured.runs = [record]
        return measured

    def _one_task(self, candidate: Candidate, run: Run, heard: Heard) -> Evaluation:
        from posbench.task_evaluation import evaluate_task, problem_lengths, task_rows

        config = self.settings.eval
        row = replace(self._row(run), train_length=longest_example(run))
        if candidate.skipped or candidate.refused:
            row.status = Status.skipped if candidate.skipped else Status.unsupported
            row.reason = candidate.skipped or candidate.refused
            lengths = problem_lengths(config.ratios, row.train_length)
            runs = [] if candidate.skipped else [self._record(run)]
            return Evaluation(rows=task_rows(row, lengths), runs=runs)
        plan = self._task_plan(run)
        measured = evaluate_task(self._model(run), row, plan, config, self.runtime, heard)
        measured.runs = [self._record(run)]
        return measured

    def _model(self, run: Run) -> GPT:
        model = run.model()
        model.encoding = _as_evaluated(model.encoding, self.settings)
        return model.to(self.runtime.device)

    def _key_tokens(self, run: Run, plan: Plan, heard: Heard) -> KeyTokens | None:
        """What eval.reference says are the key tokens of `longppl_self`; None: each run its own.

        Raises UserError for a reference that read other text than `run`, and so cannot judge it.
        """
        from posbench.config import Protocol
        from posbench.evaluation import Subject, judge_key_tokens

        config = self.settings.eval
        if config.reference is None or Protocol.longppl_self not in config.protocols:
            return None
        key = (self._key(run), run.settings.context)
        if key not in self._judged:
            judge = load_run(Path(config.reference).expanduser())
            judge.checkpoint()
            if self._key(judge) != self._key(run):
                raise UserError(
                    f"eval.reference={config.reference} was trained on other text, or with another "
                    f"tokenizer, than {run.folder}: it cannot judge that run's tokens."
                )
            dataset = self._dataset(judge)
            model = judge.model().to(self.runtime.device)
            split = dataset.split(config.split)
            subject = Subject(model, self._row(judge), split, dataset.tokenizer.byte_lengths)
            self._judged[key] = judge_key_tokens(subject, plan, config, self.runtime, heard)
        return self._judged[key]

    def _unreadable_row(self, folder: Path) -> Row:
        return Row(
            run_id=folder.name,
            encoding="unknown",
            extension=self.settings.extension.name,
            variant=variant_of(self.settings),
            model="unknown",
            seed=0,
            train_length=0,
            eval_length=0,
            ratio=0.0,
            protocol="",
        )

    def _row(self, run: Run) -> Row:
        settings = run.settings
        return Row(
            run_id=run.id,
            encoding=scheme_of(settings),
            extension=self.settings.extension.name,
            variant=variant_of(self.settings, settings.encoding),
            model=settings.model.name,
            seed=settings.seed,
            train_length=settings.context,
            eval_length=0,
            ratio=0.0,
            protocol="",
            corpus_fingerprint=run.corpus_fingerprint,
            tokenizer_sha256=str(run.manifest["files"].get(TOKENIZER, "")),
        )

    @staticmethod
    def _key(run: Run) -> str:
        """What decides the documents of each split, and their tokens."""
        return f"{to_dict(run.settings.data)}/{run.manifest['files'][TOKENIZER]}"

    def _dataset(self, run: Run) -> Dataset:
        """The run's own documents under its own tokenizer; other text is refused."""
        from posbench.data import prepare_with

        data = run.settings.data
        key = self._key(run)
        if key not in self._datasets:
            self._datasets[key] = prepare_with(data, run.tokenizer_json())
        dataset = self._datasets[key]
        _check_fingerprint(run, dataset.fingerprint, "text")
        return dataset

    def _plan(self, run: Run) -> Plan:
        from posbench.plan import plan

        dataset = self._dataset(run)
        key = (self._key(run), run.settings.context)
        if key not in self._plans:
            config = self.settings.eval
            split = dataset.split(config.split)
            self._plans[key] = plan(split, run.settings.context, config, self.runtime.device.type)
        return self._plans[key]

    def _task_plan(self, run: Run) -> TaskPlan:
        """The test examples of the run's own task; another task is refused."""
        from posbench.task_evaluation import plan_task
        from posbench.tasks import TaskDataset

        key = (self._key(run), run.settings.context)
        if key not in self._task_plans:
            assert isinstance(run.settings.data, TaskConfig)
            if self.settings.eval.split is not EvalSplit.test:
                raise UserError(
                    f"eval.split={self.settings.eval.split} is for text; {run.folder} was trained "
                    "on a task, which is always measured on its test examples."
                )
            dataset = TaskDataset(run.settings.data)
            self._task_plans[key] = plan_task(dataset, run.settings.context, self.settings.eval)
        plan = self._task_plans[key]
        _check_fingerprint(run, plan.dataset.fingerprint, "task")
        return plan

    def _measured_on(self, run: Run) -> dict[str, Any]:
        """What a result says of the text, or the task, that a run was measured on."""
        from posbench.statistics import unigram_perplexity

        if is_task(run):
            plan = self._task_plan(run)
            return {
                "corpus": plan.dataset.corpus,
                "tokenizer": "of the task",
                "protocol": plan.record(),
                "task": plan.dataset.corpus,
            }
        dataset = self._dataset(run)
        return {
            "corpus": dataset.corpus,
            "tokenizer": run.settings.tokenizer.name,
            "unigram_ppl": unigram_perplexity(
                dataset.train.tokens,
                dataset.split(self.settings.eval.split).tokens,
                dataset.tokenizer.vocabulary,
            ),
            "protocol": self.protocol(self._plan(run)),
        }

    def _record(self, run: Run) -> dict[str, Any]:
        manifest, settings = run.manifest, run.settings
        cost = manifest.get("cost", {})
        return {
            "run_id": run.id,
            "folder": str(run.folder),
            "encoding": scheme_of(settings),
            "model": settings.model.name,
            "seed": settings.seed,
            "train_length": settings.context,
            "parameters": cost.get("parameters"),
            "encoding_parameters": cost.get("encoding_parameters"),
            "tokens": cost.get("tokens"),
            "train_tokens_per_s": manifest.get("tokens_per_s"),
            "train_peak_mem_mb": manifest.get("peak_mem_mb"),
            "validation_nll": manifest.get("validation_nll", {}).get("1x"),
            "checkpoint_sha256": manifest["checkpoint"]["sha256"],
            "settings_id": fingerprint(settings, without_seed=True),
            "training": _training(settings),
            **self._measured_on(run),
        }

    def protocol(self, plan: Plan) -> dict[str, Any]:
        """What a result says of the text that was scored, and how it was cut."""
        from posbench.targets import PROTOCOL

        places = plan.places
        return {
            "protocol": PROTOCOL,
            "split": str(self.settings.eval.split),
            "anchor_targets": places.size,
            "longest_context": plan.longest,
            "controlled_targets": len(places.anchors) * places.size,
            "span_tokens": sum(span.size for span in places.cut_spans),
            "position_tokens": sum(span.size for span in places.spans),
            "preset_tokens": sum(text.size for text in places.stretches),
            "stride": places.stride,
            "documents_kept": plan.kept_documents,
            "tokens_kept": plan.kept_tokens,
            "nonoverlap_partial_tokens": {
                str(length): plan.longest % length for length in plan.lengths.values()
            },
            "bos": "none",
        }
