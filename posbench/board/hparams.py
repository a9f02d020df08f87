"""The HParams tab: what tells the evaluated models apart, and four numbers of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from posbench.board.events import EventFile, drawable
from posbench.report.lines import HEADLINE
from posbench.results import Row, Status

TEXTS = (
    "encoding", "encoding_settings", "extension", "variant", "model", "corpus", "tokenizer",
    "schedule",
)  # fmt: skip
NUMBERS = (
    "seed", "train_length", "layers", "width", "heads", "parameters", "encoding_parameters",
    "tokens", "steps", "batch_size", "lr",
)  # fmt: skip
ABSENT = "-"
_RATIOS = (1.0, 2.0, 4.0)

Settings = dict[str, str | float]


def settings_of(row: Row, run: Mapping[str, Any]) -> Settings:
    """What decided the model of `row`: every text, and every number that its run recorded."""
    known = {**run, **run.get("training", {})}
    known |= {name: getattr(row, name) for name in ("encoding", "extension", "variant", "model")}
    known |= {"seed": row.seed, "train_length": row.train_length}
    texts = {name: str(known.get(name) or ABSENT) for name in TEXTS}
    numbers = {name: known[name] for name in NUMBERS if isinstance(known.get(name), int | float)}
    return texts | numbers


def metrics_of(rows: Iterable[Row]) -> dict[str, float]:
    """Perplexity, or exact match, at 1x, 2x and 4x, and the effective length: tag -> value."""
    metrics = {}
    for row in rows:
        if row.status is not Status.ok or row.value is None or not drawable(row.value):
            continue
        is_headline = row.protocol == HEADLINE
        if row.metric == "effective_length" and is_headline:
            metrics["hparam/effective_length"] = row.value
        elif (row.metric == "exact_match" or (row.metric == "ppl" and is_headline)) and (
            row.ratio in _RATIOS
        ):
            metrics[f"hparam/{row.metric}_{row.ratio:g}x"] = row.value
    return metrics


def write_session(
    events: EventFile, settings: Settings, metrics: Mapping[str, float], at: float
) -> None:
    """Write one model as a row of the table, into its own sub-run; its metrics are scalars."""
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    start = plugin_data_pb2.SessionStartInfo(start_time_secs=at)
    for name, value in settings.items():
        kind = "string_value" if isinstance(value, str) else "number_value"
        setattr(start.hparams[name], kind, value)
    status = api_pb2.STATUS_SUCCESS if metrics else api_pb2.STATUS_FAILURE
    end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=at)
    for tag, part in (
        (metadata.SESSION_START_INFO_TAG, {"session_start_info": start}),
        (metadata.SESSION_END_INFO_TAG, {"session_end_info": end}),
    ):
        _write(events, tag, part, at)
    events.scalars(0, metrics, at)


def write_experiment(
    events: EventFile, models: Sequence[Settings], rows: Iterable[Row], at: float
) -> None:
    """Write which columns the table has: all settings, first those in which the models differ.

    No domains: another evaluation in the same table may have other values, and would be hidden.
    """
    from tensorboard.plugins.hparams import api_pb2, metadata

    kinds = dict.fromkeys(TEXTS, api_pb2.DATA_TYPE_STRING)
    kinds |= dict.fromkeys(NUMBERS, api_pb2.DATA_TYPE_FLOAT64)
    seen = {row.metric for row in rows}
    names = [f"{metric}_{ratio:g}x" for metric in ("ppl", "exact_match") if metric in seen
             for ratio in _RATIOS]  # fmt: skip
    names += ["effective_length"] if "ppl" in seen else []
    experiment = api_pb2.Experiment(
        time_created_secs=at,
        hparam_infos=[
            api_pb2.HParamInfo(
                name=name, type=kind, differs=len({each.get(name) for each in models}) > 1
            )
            for name, kind in kinds.items()
        ],
        metric_infos=[
            api_pb2.MetricInfo(name=api_pb2.MetricName(tag=f"hparam/{name}"), display_name=name)
            for name in names
        ],
    )
    _write(events, metadata.EXPERIMENT_TAG, {"experiment": experiment}, at)


def _write(events: EventFile, tag: str, part: Mapping[str, Any], at: float) -> None:
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    told = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(**part))
    events.metadata(tag, told, at)
