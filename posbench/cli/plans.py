"""What a command would do, checked job by job before anything starts; torch only for plugins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from posbench.config import EvalSettings, TrainSettings
from posbench.config.tasks import TaskConfig
from posbench.corpus import Corpus, check_size, load_corpus, split_documents
from posbench.errors import CheckpointError, UserError
from posbench.jobs.evaluate import asked, earlier
from posbench.jobs.train import located
from posbench.plugins import LOADED
from posbench.runs import MANIFEST, digest, earlier_run, fingerprint, is_locked
from posbench.saved import to_dict

Settings = TrainSettings | EvalSettings


@dataclass(frozen=True)
class Plan:
    """One job of a command: its settings, and the overrides that set it apart."""

    number: int
    label: str
    settings: Settings
    key: str  # of its settings: the same key, the same job
    folder: Path = Path("no folder yet")

    @property
    def overwrite(self) -> bool:
        return isinstance(self.settings, TrainSettings) and self.settings.overwrite

    def refused(self, error: UserError | str) -> UserError:
        """The error of this job as that of the whole command."""
        if not self.label:
            return UserError(str(error))
        return UserError(f"job {self.number} ({self.label}): {error} No job was started.")


def key_of(settings: Settings) -> str:
    """SHA-256 of what a job's results depend on, its folder and its machine left out."""
    if isinstance(settings, TrainSettings):
        return fingerprint(located(settings))
    return digest(asked(settings) | {"plugins_changed": settings.plugins_changed})


def distinct(plans: Sequence[Plan]) -> list[Plan]:
    """The same plans, no two with one key; those that only run differently get a number.

    What only runs differently is what a result does not depend on, such as the threads. Raises
    UserError for a job that is another one again.
    """
    seen: dict[str, Plan] = {}
    count: Counter[str] = Counter()
    found = []
    for plan in plans:
        whole = digest(to_dict(plan.settings))
        if whole in seen:
            raise plan.refused(
                f"the same settings as job {seen[whole].number}. Leave one of them out."
            )
        seen[whole] = plan
        count[plan.key] += 1
        number = count[plan.key]
        found.append(plan if number == 1 else replace(plan, key=f"{plan.key}-{number}"))
    return found


def check_plans(plans: Iterable[Plan]) -> None:
    """Raise UserError for a job whose text, plugin or folder will not do."""
    plans = list(plans)
    for plan in plans:
        try:
            standing(plan)
        except CheckpointError:
            pass  # a damaged run is the failure of one job, which will say so
        except UserError as error:
            raise plan.refused(error) from error
    check_inputs(plans)


def check_inputs(plans: Sequence[Plan]) -> None:
    """Raise UserError for a job whose text or plugin will not do."""
    _check_text(plans)
    _check_plugins(plans)


def standing(plan: Plan) -> str:
    """What the job would do in its folder: begin, go on, or nothing; raises UserError."""
    settings, folder = plan.settings, plan.folder
    if not folder.is_dir():
        if folder.exists():
            raise UserError(f"{folder} is a file; choose another folder.")
        return "new"
    if is_locked(folder):
        raise UserError(f"{folder} is in use by another process. Wait for it, or choose another.")
    if isinstance(settings, EvalSettings):
        if (folder / MANIFEST).exists():
            raise UserError(f"{folder} holds a training run, which is never changed.")
        return "finished" if earlier(folder, settings) else "new"
    if settings.overwrite and (folder / MANIFEST).exists():
        return "starts anew"
    run = earlier_run(folder, located(settings))
    if run is None:
        return "new"
    return "finished" if run.finished else "goes on"


def _check_text(plans: Sequence[Plan]) -> None:
    """Raise UserError unless every training run finds text that fills its context.

    A run that has begun had it then. Tokens are not counted here, for that takes the tokenizer.
    """
    corpora: dict[str, Corpus] = {}  # by the settings they come from, each read once
    for plan in plans:
        settings = plan.settings
        if not isinstance(settings, TrainSettings) or isinstance(settings.data, TaskConfig):
            continue
        if (plan.folder / MANIFEST).exists() and not settings.overwrite:
            continue
        key = repr(settings.data)
        try:
            if key not in corpora:
                corpora[key] = load_corpus(settings.data)
            check_size(corpora[key], settings.context)
            split_documents(corpora[key], settings.data)
        except UserError as error:
            raise plan.refused(error) from error


def _check_plugins(plans: Sequence[Plan]) -> None:
    """Raise UserError if a run's plugin breaks a promise that is quick to check."""
    for plan in plans:
        settings = plan.settings
        if isinstance(settings, TrainSettings) and settings.encoding.name in LOADED:
            from posbench.promises import refuse_broken

            try:
                refuse_broken(settings.encoding, settings.model, settings.context)
            except UserError as error:
                raise plan.refused(error) from error
