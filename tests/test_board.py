"""TensorBoard files, read back the way TensorBoard reads them."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from posbench.board import (
    EventFile,
    TrainBoard,
    clear,
    folder_name,
    run_name,
    sub_runs,
    train_points,
    write_evaluation_board,
)
from posbench.board.names import distinct
from posbench.results import Evaluation, PositionCurve, Row, Status

Points = list[tuple[int, float]]


def read(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()


def points(folder: Path, tag: str) -> Points:
    return [(event.step, event.value) for event in read(folder).Scalars(tag)]


def rows(
    encoding: str, ppls: list[float | None], extension: str = "none", seed: int = 0
) -> list[Row]:
    return [
        Row(
            run_id=f"{encoding}-{seed}",
            encoding=encoding,
            extension=extension,
            variant="",
            model="tiny",
            seed=seed,
            train_length=128,
            eval_length=int(128 * ratio),
            ratio=ratio,
            protocol=protocol,
            ppl=ppl,
            value=ppl,
            nll=math.log(ppl) if ppl else None,
            ci_lo=ppl - 1 if ppl else None,
            ci_hi=ppl + 1 if ppl else None,
            status=Status.ok if ppl else Status.unsupported,
            reason="" if ppl else "learned table has 128 rows; more positions requested",
        )
        for protocol in ("controlled", "nonoverlap")
        for ratio, ppl in zip((1.0, 2.0, 4.0), ppls, strict=True)
    ]


def evaluation() -> Evaluation:
    curve = PositionCurve(
        "rope-0",
        "rope",
        "none",
        0,
        128,
        512,
        [0, 128, 256],
        [128, 256, 512],
        [2, 3, 4],
        [0, 0, 0],
        [9, 9, 9],
    )
    measured = (
        rows("rope", [4.0, 6.0, 8.0])
        + rows("rope", [4.0, 5.0, 5.0], "yarn")
        + rows("learned", [4.0, None, None])
    )
    return Evaluation(rows=measured, curves=[curve])


def texts(folder: Path, tag: str) -> str:
    (text,) = read(folder).Tensors(tag)
    return str(text.tensor_proto.string_val[0].decode())


def logged(step: int, loss: float, **more: object) -> dict[str, object]:
    """A line of metrics.jsonl."""
    return {"step": step, "loss": loss, "lr": 0.25, "grad_norm": 1.0, "tokens_per_s": 9.0, **more}


# ---------------------------------------------------------------- training


def test_training_points_stand_at_their_steps(tmp_path: Path) -> None:
    with TrainBoard(tmp_path, "rope-seed0") as board:
        board.write(logged(10, 2.5))
        board.write(logged(20, 1.5))
    assert points(tmp_path / "rope-seed0", "train/loss") == [(10, 2.5), (20, 1.5)]
    assert points(tmp_path / "rope-seed0", "train/lr") == [(10, 0.25), (20, 0.25)]


def test_validation_stands_by_ratio_with_the_loss_beside_every_perplexity() -> None:
    record = {"step": 5, "val_nll": {"1x": 1.0, "4x": 2.0}, "val_exact_match": {"1x": 0.5}}
    assert train_points(record) == pytest.approx(
        {
            "val/nll_1x": 1.0,
            "val/ppl_1x": math.e,
            "val/exact_match_1x": 0.5,
            "val_by_ratio/nll_1x": 1.0,
            "val_by_ratio/ppl_1x": math.e,
            "val_by_ratio/exact_match_1x": 0.5,
            "val_by_ratio/nll_4x": 2.0,
            "val_by_ratio/ppl_4x": math.e**2,
        }
    )


def test_a_point_is_on_disk_before_the_board_closes(tmp_path: Path) -> None:
    with TrainBoard(tmp_path, "run") as board:
        board.write(logged(1, 2.5))
        assert points(tmp_path / "run", "train/loss") == [(1, 2.5)]


def test_a_point_stands_at_the_time_of_its_record(tmp_path: Path) -> None:
    with TrainBoard(tmp_path, "run") as board:
        board.write(logged(1, 2.5, time=1234.5))
    (event,) = read(tmp_path / "run").Scalars("train/loss")
    assert event.wall_time == 1234.5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e39])
def test_a_value_that_is_not_finite_is_no_point(tmp_path: Path, bad: float) -> None:
    """1e39 is finite, but not as the 32-bit float that a point is."""
    with EventFile(tmp_path) as events:
        events.scalars(1, {"bad": bad, "good": 1e38})
    assert read(tmp_path).Tags()["scalars"] == ["good"]


def test_a_resumed_run_has_each_point_once_in_its_files(tmp_path: Path) -> None:
    """Whatever reads them: no file holds a point that another one takes back."""
    records = [logged(step, float(step)) for step in (1, 2, 3, 4)]
    with TrainBoard(tmp_path, "run") as board:
        for record in records:
            board.write(record)
    with TrainBoard(tmp_path, "run", records[:2]) as board:  # its checkpoint was that of step 2
        for step in (3, 4, 5):
            board.write(logged(step, 10.0 * step))
    expected = [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0), (5, 50.0)]
    assert points(tmp_path / "run", "train/loss") == expected
    assert sum(file.stat().st_size > 0 for file in tmp_path.rglob("*tfevents*")) == 1


def test_a_board_that_is_watched_while_it_is_written_again_shows_no_point_twice(
    tmp_path: Path,
) -> None:
    with TrainBoard(tmp_path, "run") as board:
        for step in (1, 2, 3):
            board.write(logged(step, 1.0))
    watcher = read(tmp_path / "run")
    assert len(watcher.Scalars("train/loss")) == 3
    with TrainBoard(tmp_path, "run", [logged(1, 1.0)]) as board:
        board.write(logged(2, 7.0))
    watcher.Reload()
    assert [(e.step, e.value) for e in watcher.Scalars("train/loss")] == [(1, 1.0), (2, 7.0)]


def test_clearing_takes_away_our_own_files_alone(tmp_path: Path) -> None:
    with EventFile(tmp_path / "ours"), EventFile(tmp_path / "shared"), EventFile(tmp_path / "a/b"):
        pass
    foreign = tmp_path / "shared" / "events.out.tfevents.1.host"
    foreign.write_bytes(b"of another program")
    (tmp_path / "notes.posbench").write_text("no event file")
    clear(tmp_path)
    assert {path.name for path in tmp_path.rglob("*")} == {"shared", foreign.name, "notes.posbench"}


def test_a_folder_that_cannot_be_made_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING), TrainBoard(tmp_path / "file" / "tb", "run") as board:
        board.write(logged(1, 1.0))
        board.write(logged(2, 1.0))
    assert len(caplog.records) == 1
    assert str(tmp_path / "file") in caplog.text


def test_a_full_disk_is_one_warning(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.WARNING), TrainBoard(tmp_path, "run") as board:
        assert board._events is not None
        full = Path("/dev/full").open("wb")  # noqa: SIM115  # the board closes it
        board._events._file = full
        board._events._records._writer = full
        board.write(logged(1, 1.0))
        board.write(logged(2, 1.0))
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("rope", "rope"),
        ("rope + yarn", "rope+yarn"),
        ("rope + ntk (factor=4) tiny L=64", "rope+ntk-factor-4-tiny-L-64"),
        ("rope [../sweep/0-rope]", "rope-..-sweep-0-rope"),
        ("../../etc", "etc"),
        ("naïve", "naïve"),
        ("((", "unnamed"),
    ],
)
def test_a_label_becomes_the_name_of_one_folder(label: str, name: str) -> None:
    assert folder_name(label) == name


def test_long_names_are_cut_and_still_differ(tmp_path: Path) -> None:
    names = {folder_name("ä" * 300 + end) for end in "ab"}
    assert len(names) == 2
    for name in names:
        (tmp_path / f"{name}-seed{2**63}").mkdir()


def test_equal_names_get_numbers() -> None:
    assert distinct(["a", "b", "a", "a-2", "a"]) == ["a", "b", "a-2", "a-2-2", "a-3"]
    assert run_name("rope + yarn", 1) == "rope+yarn-seed1"


# ---------------------------------------------------------------- an evaluation


def test_steps_of_an_evaluation_are_lengths(tmp_path: Path) -> None:
    write_evaluation_board(evaluation(), tmp_path)
    rope = tmp_path / "rope-seed0"
    assert points(rope, "by_length/ppl_controlled") == [(128, 4.0), (256, 6.0), (512, 8.0)]
    assert points(rope, "by_length/ppl_nonoverlap") == [(128, 4.0), (256, 6.0), (512, 8.0)]
    assert points(rope, "by_length/ratio_vs_1x") == [(128, 1.0), (256, 1.5), (512, 2.0)]
    assert points(rope, "by_percent/ratio_vs_1x") == [(100, 1.0), (200, 1.5), (400, 2.0)]
    assert points(rope, "by_length/ci_lo") == [(128, 3.0), (256, 5.0), (512, 7.0)]
    assert points(rope, "by_position/nll") == [(64, 2.0), (192, 3.0), (384, 4.0)]
    nll = points(rope, "by_length/nll_controlled")
    assert [value for _, value in nll] == pytest.approx([math.log(x) for x in (4, 6, 8)], rel=1e-6)


def test_each_run_and_extension_has_a_readable_sub_run(tmp_path: Path) -> None:
    write_evaluation_board(evaluation(), tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"rope-seed0", "rope+yarn-seed0", "learned-seed0", "results"}


def test_writing_again_doubles_nothing_and_leaves_nothing_stale(tmp_path: Path) -> None:
    write_evaluation_board(evaluation(), tmp_path)
    write_evaluation_board(evaluation(), tmp_path)
    assert len(points(tmp_path / "rope-seed0", "by_length/ppl_controlled")) == 3
    write_evaluation_board(Evaluation(rows=rows("alibi", [4.0, 4.0, 4.0])), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"alibi-seed0", "results"}


def test_two_runs_of_one_name_do_not_share_a_sub_run(tmp_path: Path) -> None:
    first, second = rows("rope", [4.0, 6.0, 8.0]), rows("rope", [5.0, 7.0, 9.0])
    for row in second:
        row.run_id = "rope-1"
    runs = [{"run_id": f"rope-{i}", "folder": f"sweep{i}/0-rope"} for i in (0, 1)]
    write_evaluation_board(Evaluation(rows=first + second, runs=runs), tmp_path)
    curves = [
        points(path, "by_length/ppl_controlled") for path in tmp_path.glob("rope*") if path.is_dir()
    ]
    assert sorted(curves) == [
        [(128, 4.0), (256, 6.0), (512, 8.0)],
        [(128, 5.0), (256, 7.0), (512, 9.0)],
    ]


def test_a_cell_without_a_number_is_a_word_and_no_point(tmp_path: Path) -> None:
    write_evaluation_board(evaluation(), tmp_path)
    learned = tmp_path / "learned-seed0"
    assert points(learned, "by_length/ppl_controlled") == [(128, 4.0)]
    status = texts(learned, "by_length/status")
    assert "| controlled | 256 | ppl_controlled | n/a (table 128) | unsupported |" in status
    assert "by_length/status" not in read(tmp_path / "rope-seed0").Tags()["tensors"]


def test_the_table_is_there_as_text(tmp_path: Path) -> None:
    write_evaluation_board(evaluation(), tmp_path)
    assert "4x (512)" in texts(tmp_path / "results", "by_length/results")
    assert "**controlled**: The same target tokens" in texts(
        tmp_path / "results", "by_length/protocol"
    )


def test_a_perplexity_too_large_to_draw_is_a_word_and_its_loss_is_drawn(tmp_path: Path) -> None:
    """exp overflows long before the loss does: the row is ok, and its perplexity infinite."""
    measured = rows("rope", [4.0, 1e50, math.inf])
    for row in measured:
        row.nll = 100.0 * row.ratio
    write_evaluation_board(Evaluation(rows=measured), tmp_path)
    folder = tmp_path / "rope-seed0"
    assert points(folder, "by_length/ppl_controlled") == [(128, 4.0)]
    assert points(folder, "by_length/nll_controlled") == [(128, 100.0), (256, 200.0), (512, 400.0)]
    status = texts(folder, "by_length/status")
    assert "| controlled | 256 | ppl_controlled | >1e4 | ok |" in status
    assert "| controlled | 512 | ppl_controlled | >1e4 | ok |" in status


def test_a_reason_cannot_break_the_table_of_statuses() -> None:
    measured = rows("learned", [4.0, None, 4.0])
    measured[1].reason = "a | b\nc"
    (model,) = sub_runs(Evaluation(rows=measured))
    assert "| unsupported | a \\| b c |" in model.texts["by_length/status"]


def test_a_run_measured_twice_has_one_point_at_each_length() -> None:
    twice = rows("rope", [4.0, 6.0, 8.0]) + rows("rope", [4.0, 6.0, 9.0])
    (model,) = sub_runs(Evaluation(rows=twice))
    assert [model.points[step]["by_length/ppl_controlled"] for step in (128, 256, 512)] == [4, 6, 9]


# ---------------------------------------------------------------- bands over seeds


def test_the_mean_over_seeds_stands_in_a_sub_run_of_its_own(tmp_path: Path) -> None:
    measured = rows("rope", [4.0, 6.0, 8.0]) + rows("rope", [6.0, 7.0, 12.0], seed=1)
    measured += rows("alibi", [4.0, 4.0, 4.0])
    write_evaluation_board(Evaluation(rows=measured), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "rope-seed0", "rope-seed1", "alibi-seed0", "mean", "results",
    }  # fmt: skip
    assert [path.name for path in (tmp_path / "mean").iterdir()] == ["rope"]
    band = [
        points(tmp_path / "mean" / "rope", f"by_length_over_seeds/ppl_controlled_{part}")
        for part in ("mean", "least", "greatest")
    ]
    assert band == [
        [(128, 5.0), (256, 6.5), (512, 10.0)],
        [(128, 4.0), (256, 6.0), (512, 8.0)],
        [(128, 6.0), (256, 7.0), (512, 12.0)],
    ]
    nll = points(tmp_path / "mean" / "rope", "by_length_over_seeds/nll_controlled_mean")
    assert nll[0][1] == pytest.approx((math.log(4) + math.log(6)) / 2, rel=1e-6)


def test_a_length_at_which_a_seed_broke_has_no_mean() -> None:
    measured = rows("rope", [4.0, 6.0, 8.0]) + rows("rope", [6.0, 7.0, math.inf], seed=1)
    *_, mean = sub_runs(Evaluation(rows=measured))
    assert mean.name == "mean/rope"
    assert mean.points[256]["by_length_over_seeds/ppl_controlled_mean"] == 6.5
    assert not mean.has("by_length_over_seeds/ppl_controlled_mean", 512)
    assert "512: 1 of 2 seeds have a number" in mean.texts["by_length_over_seeds/status"]


def test_a_seed_that_was_not_measured_does_not_hide_the_others() -> None:
    measured = rows("rope", [4.0, 6.0, 8.0]) + rows("rope", [6.0, 7.0, 12.0], seed=1)
    measured += rows("rope", [None, None, None], seed=2)
    *_, mean = sub_runs(Evaluation(rows=measured))
    assert mean.points[256]["by_length_over_seeds/ppl_controlled_mean"] == 6.5
    assert mean.texts["by_length_over_seeds/status"] == "- rope-seed2 was not measured"


# ---------------------------------------------------------------- Custom Scalars and HParams


def layout(folder: Path) -> dict[str, list[tuple[str, ...]]]:
    """The tags of each chart by category: (value, lower, upper) of a band, patterns of lines."""
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata

    (event,) = read(folder).Tensors(metadata.CONFIG_SUMMARY_TAG)
    found = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    return {
        category.title.split(" (")[0]: [
            tuple(chart.multiline.tag)
            + tuple(
                tag for each in chart.margin.series for tag in (each.value, each.lower, each.upper)
            )
            for chart in category.chart
        ]
        for category in found.category
    }


def test_the_layout_has_a_band_for_intervals_and_one_for_seeds(tmp_path: Path) -> None:
    several = rows("rope", [4.0, 6.0, 8.0]) + rows("rope", [6.0, 7.0, 12.0], seed=1)
    write_evaluation_board(Evaluation(rows=several), tmp_path)
    charts = layout(tmp_path / "results")["Perplexity by length"]
    assert charts == [
        ("by_length/ppl_controlled", "by_length/ci_lo", "by_length/ci_hi"),
        (
            "by_length_over_seeds/ppl_controlled_mean",
            "by_length_over_seeds/ppl_controlled_least",
            "by_length_over_seeds/ppl_controlled_greatest",
        ),
    ]
    tags = {
        tag
        for folder in ("rope-seed0", "mean/rope")
        for tag in read(tmp_path / folder).Tags()["scalars"]
    }
    assert {tag for chart in charts for tag in chart} <= tags


def test_the_layout_has_no_chart_without_a_curve(tmp_path: Path) -> None:
    write_evaluation_board(Evaluation(rows=rows("rope", [4.0, 6.0, 8.0])), tmp_path)
    found = layout(tmp_path / "results")
    assert list(found) == ["Perplexity by length", "Loss by length, nats"]
    assert found["Loss by length, nats"] == [("^by_length/nll_controlled$",)]


def hparams(folder: Path, tag: str) -> object:
    from tensorboard.plugins.hparams import plugin_data_pb2

    content = read(folder).summary_metadata[f"_hparams_/{tag}"].plugin_data.content
    return getattr(plugin_data_pb2.HParamsPluginData.FromString(content), tag)


def test_hparams_stand_in_the_run_itself_with_the_same_keys_for_each(tmp_path: Path) -> None:
    from posbench.board.hparams import NUMBERS, TEXTS

    training = dict.fromkeys(("layers", "width", "heads", "steps", "batch_size"), 2)
    training |= {"lr": 0.5, "schedule": "cosine", "encoding_settings": "theta=500"}
    record = {"corpus": "text", "tokenizer": "bytes", "parameters": 10, "encoding_parameters": 0}
    runs = [
        {"run_id": f"{name}-0", "tokens": 99, "training": training} | record
        for name in ("rope", "learned")
    ]
    measured = evaluation()
    measured.runs = runs
    measured.rows.append(replace(measured.rows[0], metric="effective_length", value=256.0))
    write_evaluation_board(measured, tmp_path)
    for name in ("rope-seed0", "rope+yarn-seed0", "learned-seed0"):
        start = hparams(tmp_path / name, "session_start_info")
        assert set(start.hparams) == {*TEXTS, *NUMBERS}  # type: ignore[attr-defined]
    start = hparams(tmp_path / "rope+yarn-seed0", "session_start_info")
    values = start.hparams  # type: ignore[attr-defined]
    assert values["extension"].string_value == "yarn"
    assert values["variant"].string_value == "-"
    assert values["encoding_settings"].string_value == "theta=500"
    assert (values["train_length"].number_value, values["lr"].number_value) == (128, 0.5)
    drawn = {
        tag: points(tmp_path / "rope-seed0", tag)
        for tag in read(tmp_path / "rope-seed0").Tags()["scalars"]
        if tag.startswith("hparam/")
    }
    assert drawn == {
        "hparam/ppl_1x": [(0, 4.0)],
        "hparam/ppl_2x": [(0, 6.0)],
        "hparam/ppl_4x": [(0, 8.0)],
        "hparam/effective_length": [(0, 256.0)],
    }
    assert "hparam/ppl_2x" not in read(tmp_path / "learned-seed0").Tags()["scalars"]


def test_the_columns_that_differ_come_first_and_none_is_limited(tmp_path: Path) -> None:
    """With a list of values TensorBoard would hide the rows of another evaluation beside this."""
    write_evaluation_board(evaluation(), tmp_path)
    experiment = hparams(tmp_path / "results", "experiment")
    infos = experiment.hparam_infos  # type: ignore[attr-defined]
    assert {info.name for info in infos if info.differs} == {"encoding", "extension"}
    assert not any(info.WhichOneof("domain") for info in infos)
    names = [info.name.tag for info in experiment.metric_infos]  # type: ignore[attr-defined]
    ppls = [f"hparam/ppl_{ratio}x" for ratio in (1, 2, 4)]
    assert names == [*ppls, "hparam/effective_length"]


def test_an_evaluation_board_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        write_evaluation_board(evaluation(), tmp_path / "file")
    assert len(caplog.records) == 1


def test_the_board_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from posbench.board import TrainBoard\n"
        "from posbench.board import write_evaluation_board; from test_board import evaluation\n"
        f"with TrainBoard(Path({str(tmp_path)!r}), 'run') as board:\n"
        "    board.write({'step': 1, 'loss': 1.0})\n"
        f"write_evaluation_board(evaluation(), Path({str(tmp_path)!r}) / 'eval')\n"
        "assert not {'torch', 'tensorflow'} & set(sys.modules)"
    )
    tests = str(Path(__file__).parent)
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({tests!r})\n{code}"], check=True
    )
