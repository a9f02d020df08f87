"""TensorBoard files, read back the way TensorBoard reads them."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from posbench.board import TrainBoard, write_evaluation_board
from posbench.results import Evaluation, PositionCurve, Row, Status

Points = list[tuple[int, float]]


def read(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()


def points(folder: Path, tag: str) -> Points:
    return [(event.step, event.value) for event in read(folder).Scalars(tag)]


def rows(encoding: str, ppls: list[float | None], extension: str = "none") -> list[Row]:
    return [
        Row(
            run_id=f"{encoding}-0",
            encoding=encoding,
            extension=extension,
            variant="",
            model="tiny",
            seed=0,
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


def test_training_points_stand_at_their_steps(tmp_path: Path) -> None:
    with TrainBoard(tmp_path) as board:
        board.scalars(10, {"train/loss": 2.5, "train/lr": 0.25})
        board.scalars(20, {"train/loss": 1.5})
    assert points(tmp_path, "train/loss") == [(10, 2.5), (20, 1.5)]
    assert points(tmp_path, "train/lr") == [(10, 0.25)]


def test_a_point_is_on_disk_before_the_board_closes(tmp_path: Path) -> None:
    with TrainBoard(tmp_path) as board:
        board.scalars(1, {"train/loss": 2.5})
        assert points(tmp_path, "train/loss") == [(1, 2.5)]


def test_a_value_that_is_not_finite_is_no_point(tmp_path: Path) -> None:
    with TrainBoard(tmp_path) as board:
        board.scalars(1, {"a": math.nan, "b": math.inf, "c": 1.0})
    assert read(tmp_path).Tags()["scalars"] == ["c"]


def test_a_resumed_run_forgets_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    with TrainBoard(tmp_path) as board:
        for step in (1, 2, 3, 4):
            board.scalars(step, {"train/loss": float(step)})
    with TrainBoard(tmp_path, purge_step=3) as board:
        for step in (3, 4, 5):
            board.scalars(step, {"train/loss": 10.0 * step})
    expected = [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0), (5, 50.0)]
    assert points(tmp_path, "train/loss") == expected


def test_a_folder_that_cannot_be_made_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING), TrainBoard(tmp_path / "file" / "tb") as board:
        board.scalars(1, {"train/loss": 1.0})
        board.scalars(2, {"train/loss": 1.0})
    assert len(caplog.records) == 1
    assert str(tmp_path / "file") in caplog.text


def test_a_full_disk_is_one_warning(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.WARNING), TrainBoard(tmp_path) as board:
        assert board._events is not None
        full = Path("/dev/full").open("wb")  # noqa: SIM115  # the board closes it
        board._events._file = full
        board._events._records._writer = full
        board.scalars(1, {"train/loss": 1.0})
        board.scalars(2, {"train/loss": 1.0})
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text


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
    (text,) = read(learned).Tensors("by_length/status")
    assert "n/a (table 128)" in text.tensor_proto.string_val[0].decode()


def test_the_table_is_there_as_text(tmp_path: Path) -> None:
    write_evaluation_board(evaluation(), tmp_path)
    (text,) = read(tmp_path / "results").Tensors("results")
    assert "4x (512)" in text.tensor_proto.string_val[0].decode()


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
        f"with TrainBoard(Path({str(tmp_path)!r})) as board: board.scalars(1, {{'a': 1.0}})\n"
        "assert not {'torch', 'tensorflow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
