"""`posbench eval-extrapolate`: trained runs in, one results table and its report out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench.catalog import EXTENSION_CARDS
from posbench.config import Beyond, EvalSettings, ExtensionConfig
from posbench.discovery import find_folders
from posbench.errors import CheckpointError, UnsupportedError, UserError
from posbench.files import storage
from posbench.results import Evaluation, Row, Status, read_results
from posbench.rules import check
from posbench.runs import MANIFEST, Run, fingerprint, load_run, now
from posbench.saved import to_dict
from posbench.version import __version__

if TYPE_CHECKING:
    from posbench.data import Dataset
    from posbench.evaluation import Plan
    from posbench.model import GPT
    from posbench.runtime import Runtime


def evaluate(
    runs: Any = None, settings: EvalSettings | None = None, folder: Path | str | None = None
) -> Evaluation:
    """Evaluate `runs` (folders, a glob, a list; None: the newest) and return all measurements.

    With a `folder`, results and report are also written there. Raises CheckpointError, after the
    good runs were evaluated and written, if a run has no usable checkpoint.
    """
    settings = settings or EvalSettings()
    if runs is not None:
        settings.runs = runs
    evaluation, damaged = _measure(settings, ["posbench.evaluate"])
    if folder is not None:
        _write(evaluation, Path(folder))
    _raise_damaged(damaged)
    return evaluation


def run_evaluation(settings: EvalSettings, folder: Path, command: list[str]) -> None:
    """Evaluate, write everything into `folder`, and print the table."""
    from posbench.report import print_tables

    check(settings)
    _check_output(folder)
    evaluation, damaged = _measure(settings, command)
    _write(evaluation, folder)
    print_tables(evaluation)
    announce(folder)
    _raise_damaged(damaged)


def merge_evaluations(folders: list[Path], folder: Path) -> None:
    """One table and report in `folder` over the evaluations in `folders`, printed."""
    from posbench.report import print_tables

    merged = Evaluation()
    for each in folders:
        merged = merged.merged(read_results(each))
    _write(merged, folder)
    print_tables(merged)
    announce(folder)


def announce(folder: Path) -> None:
    """Say where the results are and how to look at them."""
    print(f"report       {folder / 'report.html'}")
    print(f"table        {folder / 'results.csv'}")
    print(f"TensorBoard  tensorboard --logdir {folder / 'tb'}", flush=True)


def _check_output(folder: Path) -> None:
    if (folder / MANIFEST).exists():
        raise UserError(f"{folder} holds a training run, which is never changed; choose another.")
    with storage(folder):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink()


def _write(evaluation: Evaluation, folder: Path) -> None:
    from posbench.board import write_evaluation_board
    from posbench.report import write_report

    write_report(evaluation, folder)
    write_evaluation_board(evaluation, folder / "tb")


def _raise_damaged(damaged: list[str]) -> None:
    if damaged:
        raise CheckpointError("no usable checkpoint: " + " ".join(damaged))


# ---------------------------------------------------------------- measuring


@dataclass
class _Candidate:
    """A run to evaluate: with its model, or with the reason why there is none."""

    run: Run
    model: GPT | None = None
    refused: str = ""  # the extension, or what to do beyond a table, does not fit
    damaged: str = ""


def _measure(settings: EvalSettings, command: list[str]) -> tuple[Evaluation, list[str]]:
    """All rows, and one sentence for each run without a usable checkpoint."""
    from posbench.runtime import resolve

    check(settings)
    runtime = resolve(settings.device, settings.dtype, threads=settings.threads, training=False)
    candidates = _load(settings)
    _check_applies(settings, candidates)
    session = _Session(settings, runtime)
    evaluation = session.evaluate(candidates)
    evaluation.provenance |= {
        "command": command,
        "created": now(),
        "posbench": __version__,
        "settings": to_dict(settings.eval),
        "extension": to_dict(settings.extension),
        **runtime.record(),
    }
    return evaluation, [each.damaged for each in candidates if each.damaged]


def _load(settings: EvalSettings) -> list[_Candidate]:
    candidates = []
    broken = []
    for folder in find_folders(settings.runs):
        try:
            run = load_run(folder)
        except CheckpointError as error:
            broken.append(str(error))
            _warn(str(error))
            continue
        candidate = _Candidate(run)
        candidates.append(candidate)
        try:
            candidate.model = run.model()
            candidate.model.encoding.extend(settings.extension)
            candidate.model.encoding.go_beyond(settings.eval.beyond)
        except CheckpointError as error:
            candidate.damaged = str(error)
            _warn(str(error))
        except UnsupportedError as error:
            candidate.refused = str(error)
    _distinguish(candidates)
    if all(candidate.damaged for candidate in candidates):
        _raise_damaged(broken + [candidate.damaged for candidate in candidates])
    return candidates


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


def _distinguish(candidates: list[_Candidate]) -> None:
    """Give equal run ids (the same experiment in two folders) a number."""
    seen: dict[str, int] = {}
    for candidate in candidates:
        name = candidate.run.id
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1:
            candidate.run.manifest["run_id"] = f"{name}-{seen[name]}"


def _check_applies(settings: EvalSettings, candidates: list[_Candidate]) -> None:
    """Raise UserError if the extension, or eval.beyond, applies to none of the runs."""
    able = [each for each in candidates if each.model is not None and not each.refused]
    if able or all(each.model is None for each in candidates):
        return
    names = sorted({each.run.settings.encoding.name for each in candidates})
    extension, beyond = settings.extension, settings.eval.beyond
    if beyond is not Beyond.error:
        raise UserError(
            f"eval.beyond={beyond} applies to none of the runs (encoding {', '.join(names)}"
            f"{_beside(extension)}). It applies to encoding=learned."
        )
    reasons = "; ".join(sorted({each.refused for each in candidates if each.refused}))
    card = next(card for card in EXTENSION_CARDS if card.id == extension.name)
    raise UserError(
        f"extension={extension.name} applies to none of the runs (encoding "
        f"{', '.join(names)}): {reasons}. It applies to encoding={card.applies_to}."
    )


def _beside(extension: ExtensionConfig) -> str:
    return "" if extension.name == "none" else f", beside extension={extension.name}"


def _variant(beyond: Beyond) -> str:
    """What a row says of a model that is not evaluated as it was trained."""
    return "" if beyond is Beyond.error else f"beyond={beyond}"


class _Session:
    """One evaluation over several runs; datasets and plans are made once for those that share."""

    def __init__(self, settings: EvalSettings, runtime: Runtime) -> None:
        self.settings, self.runtime = settings, runtime
        self._datasets: dict[str, Dataset] = {}
        self._plans: dict[tuple[str, int], Plan] = {}

    def evaluate(self, candidates: list[_Candidate]) -> Evaluation:
        """Rows of all candidates, in their order."""
        from posbench.evaluation import planned_tokens
        from posbench.progress import Progress

        config = self.settings.eval
        usable = [each for each in candidates if each.model is not None and not each.refused]
        plans = [self._plan(each.run) for each in usable]
        total = sum(planned_tokens(plan, config) for plan in plans)
        evaluation = Evaluation()
        done = 0
        with Progress("evaluate", total, unit="tokens") as progress:

            def scored(tokens: int) -> None:
                nonlocal done
                done += tokens
                progress.update(min(done, total))

            for candidate in candidates:
                progress.update(min(done, total), candidate.run.id)
                evaluation = evaluation.merged(self._one(candidate, scored))
            progress.update(total)
        return evaluation

    def _one(self, candidate: _Candidate, scored: Callable[[int], None]) -> Evaluation:
        from posbench.evaluation import Subject, evaluate_model, skipped_rows

        run, config = candidate.run, self.settings.eval
        row = self._row(run)
        lengths = {ratio: round(ratio * run.settings.context) for ratio in config.ratios}
        if candidate.model is None:
            row.status, row.reason = Status.skipped, candidate.damaged
            return Evaluation(rows=skipped_rows(row, lengths, config.protocols))
        record = self._record(run)
        if candidate.refused:
            row.status, row.reason = Status.unsupported, candidate.refused
            return Evaluation(rows=skipped_rows(row, lengths, config.protocols), runs=[record])
        dataset, plan = self._dataset(run), self._plan(run)
        model = candidate.model.to(self.runtime.device)
        subject = Subject(model, row, dataset.test, dataset.tokenizer.byte_lengths)
        measured = evaluate_model(subject, plan, config, self.runtime, scored)
        model.cpu()
        measured.runs = [record]
        measured.provenance = self._protocol(plan)
        return measured

    def _row(self, run: Run) -> Row:
        settings = run.settings
        return Row(
            run_id=run.id,
            encoding=settings.encoding.name,
            extension=self.settings.extension.name,
            variant=_variant(self.settings.eval.beyond),
            model=settings.model.name,
            seed=settings.seed,
            train_length=settings.context,
            eval_length=0,
            ratio=0.0,
            protocol="",
            corpus_fingerprint=str(run.manifest.get("corpus", {}).get("fingerprint", "")),
            tokenizer_sha256=str(run.manifest["files"].get("tokenizer.json", "")),
        )

    def _dataset(self, run: Run) -> Dataset:
        """The run's own documents under its own tokenizer; other text is refused."""
        from posbench.data import prepare_with

        data = run.settings.data
        key = f"{to_dict(data)}/{run.manifest['files'].get('tokenizer.json')}"
        if key not in self._datasets:
            self._datasets[key] = prepare_with(data, run.tokenizer_json())
        dataset = self._datasets[key]
        known = run.manifest["corpus"]["fingerprint"]
        if dataset.fingerprint != known:
            raise UserError(
                f"data={data.name} here is not the text that {run.folder} was trained beside: "
                f"fingerprint {dataset.fingerprint[:12]} here, {known[:12]} there. Evaluate where "
                "it was trained, or train again."
            )
        return dataset

    def _plan(self, run: Run) -> Plan:
        from posbench.evaluation import plan

        dataset = self._dataset(run)
        key = (f"{dataset.fingerprint}/{dataset.tokenizer.sha256}", run.settings.context)
        if key not in self._plans:
            self._plans[key] = plan(
                dataset.test, run.settings.context, self.settings.eval, self.runtime.device.type
            )
        return self._plans[key]

    def _record(self, run: Run) -> dict[str, Any]:
        from posbench.statistics import unigram_perplexity

        manifest, settings = run.manifest, run.settings
        dataset = self._dataset(run)
        cost = manifest.get("cost", {})
        return {
            "run_id": run.id,
            "folder": str(run.folder),
            "encoding": settings.encoding.name,
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
            "corpus": dataset.corpus,
            "tokenizer": settings.tokenizer.name,
            "unigram_ppl": unigram_perplexity(
                dataset.train.tokens, dataset.test.tokens, dataset.tokenizer.vocabulary
            ),
            "settings_id": fingerprint(settings, without_seed=True),
        }

    def _protocol(self, plan: Plan) -> dict[str, Any]:
        from posbench.targets import PROTOCOL

        return {
            "protocol": PROTOCOL,
            "anchor_targets": plan.anchors.size,
            "longest_context": plan.longest,
            "controlled_targets": len(plan.anchors) * plan.anchors.size,
            "span_tokens": len(plan.spans) * plan.longest,
            "test_documents_kept": plan.kept_documents,
            "test_tokens_kept": plan.kept_tokens,
            "bos": "none",
        }
