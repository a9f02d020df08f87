"""Run folders: who may use one, what is refused and why, and how runs are found again."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny

from posbench.config import ModelConfig, TrainConfig, TrainSettings
from posbench.config.encodings import ENCODINGS
from posbench.discovery import find_folders
from posbench.errors import CheckpointError, PosbenchError, StorageError, UserError
from posbench.jobs.train import run_training, train
from posbench.runs import (
    FREE,
    Lock,
    Run,
    differences,
    fingerprint,
    flat,
    identity,
    load_run,
    open_run,
    update,
)
from posbench.saved import from_dict, to_dict


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    run_training(tiny.small(corpus, steps=4), folder, ["posbench", "train"])
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A finished run that a test may alter."""
    return shutil.copytree(finished, tmp_path / "run")


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and time of every file below a folder, but for the lock."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def alter(folder: Path, *keys: str, value: Any) -> None:
    """Change one value in a run's manifest."""
    manifest = json.loads((folder / "run.json").read_text())
    node = manifest
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    (folder / "run.json").write_text(json.dumps(manifest))


# ---------------------------------------------------------------- settings, to and fro


@pytest.mark.parametrize("name", ENCODINGS)
def test_settings_survive_the_manifest(corpus: Path, name: str) -> None:
    settings = tiny.small(corpus, name, micro_batch=2, seed=5, lr=1e-3)
    text = json.dumps(to_dict(settings))
    again = from_dict(TrainSettings, json.loads(text))
    assert again == settings
    assert type(again.encoding) is ENCODINGS[name]
    assert fingerprint(again) == fingerprint(settings)


def test_the_fingerprint_sees_every_setting_but_the_free_ones(corpus: Path) -> None:
    plain = tiny.small(corpus)
    changed = {
        "seed": 1, "context": 32, "width": 64, "layers": 2, "dropout": 0.1, "steps": 21,
        "window": 9, "positions": "pose", "drop_at": 0.5,
        "batch_size": 5, "micro_batch": 2, "lr": 1e-3, "warmup": 0.2, "clip": 2.0,
        "weight_decay": 0.2, "beta1": 0.8, "final_lr": 0.2, "dtype": "float32",
    }  # fmt: skip
    for key, value in changed.items():
        other = tiny.small(corpus, **{key: value})
        named = {k for k in identity(plain) if k.split(".")[-1] == key}
        assert len(differences(plain, other)) == 1
        assert set(differences(plain, other)) <= named
        assert fingerprint(other) != fingerprint(plain)
    free = {
        "device": "auto",
        "threads": 2,
        "checkpoint_every": 5,
        "log_every": 3,
        "overwrite": True,
    }
    assert fingerprint(tiny.small(corpus, **free)) == fingerprint(plain)
    assert set(flat(to_dict(plain))) == set(identity(plain)) | FREE  # no key is misspelt


def test_only_the_seed_separates_runs_that_may_be_averaged(corpus: Path) -> None:
    one, other = tiny.small(corpus, seed=1), tiny.small(corpus, seed=2)
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one, without_seed=True) == fingerprint(other, without_seed=True)
    far = tiny.small(corpus, seed=2, lr=0.1)
    assert fingerprint(one, without_seed=True) != fingerprint(far, without_seed=True)


# ---------------------------------------------------------------- manifests that are not ours


HOSTILE: list[tuple[tuple[str, ...], Any]] = [
    (("settings", "encoding"), {"_target_": "os.system", "name": "touch CANARY"}),
    (("settings", "encoding"), {"name": "rope", "_target_": "os.system"}),
    (("settings", "encoding"), "rope"),
    (("settings", "encoding", "name"), "os.system"),
    (("settings", "encoding", "name"), ["rope"]),
    (("settings", "encoding", "name"), None),
    (("settings", "encoding", "theta"), "1e4"),
    (("settings", "encoding", "theta"), {"a": 1}),
    (("settings", "encoding", "layout"), "spiral"),
    (("settings", "encoding", "layout"), ["half"]),
    (("settings", "model", "width"), 32.5),
    (("settings", "model", "width"), True),
    (("settings", "model", "hooks"), "x"),
    (("settings", "data", "name"), "hub"),
    (("settings", "data", "path"), 7),
    (("settings", "train", "micro_batch"), "2"),
    (("settings", "train", "lr"), 10**400),
    (("settings", "train", "validate_ratios"), 1.0),
    (("settings", "train", "validate_ratios"), ["${oc.env:HOME}"]),
    (("settings", "seed"), None),
    (("settings", "hydra"), {"callbacks": {"x": {"_target_": "pathlib.Path.write_text"}}}),
    (("settings",), []),
    (("settings",), None),
    (("format",), 99),
    (("format",), "1"),
    (("files",), "x"),
    (("run_id",), 3),
]


@pytest.mark.parametrize(("keys", "value"), HOSTILE, ids=lambda each: str(each)[:40])
def test_a_hostile_manifest_is_refused_and_runs_nothing(
    run: Path, keys: tuple[str, ...], value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run)
    alter(run, *keys, value=value)
    with pytest.raises(CheckpointError, match=r"run\.json cannot be read"):
        load_run(run)
    assert not (run / "CANARY").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"null", b"\0\0\0", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000,
        b'{"format": 1}', b'{"format": ' + b"9" * 5000 + b"}", b"!!python/object:os.system [ls]",
    ],
)  # fmt: skip
def test_a_file_that_is_no_manifest_is_refused(run: Path, data: bytes) -> None:
    (run / "run.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"run\.json cannot be read"):
        load_run(run)


def test_deep_settings_are_refused(run: Path) -> None:
    value: Any = 1
    for _ in range(500):
        value = {"name": value}
    alter(run, "settings", "encoding", value=value)
    with pytest.raises(CheckpointError):
        load_run(run)


def test_no_manifest_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no posbench run"):
        load_run(tmp_path)


# ---------------------------------------------------------------- evaluating verifies all of it


def test_a_finished_run_gives_its_model(run: Path) -> None:
    loaded = load_run(run)
    assert tiny.digest(loaded.model().state_dict()) == tiny.digest(tiny.last(run).weights)
    assert not loaded.model().training


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("settings", "encoding"), {"name": "alibi"}),
        (("settings", "encoding"), {"name": "none"}),
        (("settings", "encoding", "theta"), 500_000.0),
        (("settings", "encoding", "layout"), "half"),
        (("settings", "context"), 32),
        (("settings", "seed"), 1),
        (("settings", "model", "norm"), "rmsnorm"),
        (("settings", "model", "heads"), 4),
        (("settings", "train", "lr"), 1.0),
        (("settings", "data", "validation"), 0.2),
    ],
    ids=str,
)
def test_settings_altered_after_training_are_refused(
    run: Path, keys: tuple[str, ...], value: Any
) -> None:
    """None of these changes a name or a shape of a weight: only the fingerprint can tell."""
    alter(run, *keys, value=value)
    with pytest.raises(CheckpointError, match="settings"):
        load_run(run).checkpoint()


@pytest.mark.parametrize("one", ENCODINGS)
def test_no_encoding_takes_the_weights_of_another(corpus: Path, tmp_path: Path, one: str) -> None:
    settings = tiny.small(corpus, one, steps=1, width=16, layers=4, validate_targets=1)
    folder = tmp_path / "run"
    run_training(settings, folder, [])
    for other in ENCODINGS:
        if other == one:
            continue
        alter(folder, "settings", "encoding", value=to_dict(ENCODINGS[other]()))
        with pytest.raises(CheckpointError):
            load_run(folder).checkpoint()
        with pytest.raises(CheckpointError):
            load_run(folder).model()


def test_a_checkpoint_of_another_run_is_refused(run: Path, corpus: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    run_training(tiny.small(corpus, steps=4, seed=1), other, [])
    name = "checkpoints/step-00000004"
    shutil.rmtree(run / name)
    shutil.copytree(other / name, run / name)
    with pytest.raises(CheckpointError, match="not the checkpoint this run ended with"):
        load_run(run).checkpoint()


@pytest.mark.parametrize("value", [None, {}, {"step": "x", "sha256": "y"}, [1], {"step": 4}])
def test_a_manifest_without_its_checkpoint_is_refused(run: Path, value: Any) -> None:
    alter(run, "checkpoint", value=value)
    with pytest.raises(CheckpointError, match="names no checkpoint"):
        load_run(run).checkpoint()


def test_evaluation_never_falls_back(run: Path) -> None:
    checkpoints = run / "checkpoints"
    (checkpoints / "step-00000004").rename(checkpoints / "step-00000003")
    with pytest.raises(CheckpointError, match="step-00000004"):
        load_run(run).checkpoint()
    assert (checkpoints / "step-00000003").is_dir()  # nor does it set anything aside


@pytest.mark.parametrize("status", ["running", "interrupted", "diverged", None, 5])
def test_an_unfinished_run_is_refused_with_the_way_on(run: Path, status: Any) -> None:
    alter(run, "status", value=status)
    with pytest.raises(CheckpointError) as caught:
        load_run(run).checkpoint()
    assert f"posbench train resume={run}" in str(caught.value)


def test_an_altered_tokenizer_is_refused(run: Path) -> None:
    path = run / "tokenizer.json"
    for text in (path.read_text() + " ", "", "{}"):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            load_run(run).tokenizer_json()
    path.unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load_run(run).tokenizer_json()


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"type": "pickle"}', '{"model": 5}', "[" * 90_000]
)
def test_a_forged_tokenizer_is_refused(run: Path, text: str) -> None:
    import hashlib

    (run / "tokenizer.json").write_text(text)
    alter(run, "files", "tokenizer.json", value=hashlib.sha256(text.encode()).hexdigest())
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_run(run).tokenizer_json()


# ---------------------------------------------------------------- a folder that exists


def test_a_finished_run_is_left_as_it_is(
    run: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(run)
    run_training(tiny.small(corpus, steps=4), run, ["again"])
    assert f"complete: {run}" in capsys.readouterr().out
    assert contents(run) == before


def test_other_settings_are_refused_with_each_difference(run: Path, corpus: Path) -> None:
    before = contents(run)
    other = tiny.small(corpus, "alibi", steps=9, seed=3)
    with pytest.raises(UserError) as caught:
        run_training(other, run, [])
    message = str(caught.value)
    for words in (
        "encoding.name=rope there, alibi here", "train.steps=4 there, 9 here",
        "seed=0 there, 3 here", "overwrite=true", "hydra.run.dir",
    ):  # fmt: skip
        assert words in message
    assert "batch_size" not in message
    assert contents(run) == before


def test_free_settings_may_differ(
    run: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free = tiny.small(corpus, steps=4, log_every=7, threads=2, checkpoint_every=1)
    run_training(free, run, [])
    assert "complete" in capsys.readouterr().out


def test_a_foreign_folder_is_refused_and_untouched(tmp_path: Path, corpus: Path) -> None:
    for name in ("notes.txt", "metrics.jsonl", "checkpoints"):
        folder = tmp_path / f"with-{name}"
        folder.mkdir()
        (folder / name).write_text("mine")
        for overwrite in (False, True):
            with pytest.raises(UserError, match=f"not empty.*{name}"):
                run_training(tiny.small(corpus, overwrite=overwrite), folder, [])
        assert (folder / name).read_text() == "mine"
        assert not (folder / "run.json").exists()


def test_overwriting_removes_only_what_a_run_wrote(run: Path, corpus: Path) -> None:
    (run / "notes.txt").write_text("mine")
    (run / "figures").mkdir()
    (run / "figures" / "a.png").write_bytes(b"x")
    settings = tiny.small(corpus, "alibi", steps=2, overwrite=True)
    run_training(settings, run, [])
    assert (run / "notes.txt").read_text() == "mine"
    assert (run / "figures" / "a.png").exists()
    loaded = load_run(run)
    assert loaded.finished
    assert loaded.settings.encoding.name == "alibi"
    assert [entry.name for entry in (run / "checkpoints").iterdir()] == ["step-00000002"]
    assert [step for step, _ in tiny.losses(run)] == [1, 2]


def test_overwriting_follows_no_link_out_of_the_folder(
    run: Path, corpus: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    shutil.move(run / "tb", outside)
    (run / "tb").symlink_to(outside)
    before = contents(outside)
    run_training(tiny.small(corpus, steps=2, overwrite=True), run, [])
    assert contents(outside) == before
    assert not (run / "tb").is_symlink()


def test_a_mistake_leaves_no_husk(tmp_path: Path, corpus: Path) -> None:
    """Each is found at another stage; afterwards the folder is as good as never made."""
    few = tmp_path / "few"
    tiny.write_corpus(few, 1)
    mistakes = {
        "no-data": tiny.small(tmp_path / "absent"),
        "few-documents": tiny.small(few),
        "context": tiny.small(corpus, context=5000),
        "device": tiny.small(corpus, device="cuda"),
    }
    for name, settings in mistakes.items():
        if name == "device":
            settings.device = type(tiny.small(corpus).device).cuda
        folder = tmp_path / "out" / name
        with pytest.raises(UserError):
            run_training(settings, folder, [])
        assert not folder.exists(), (name, list(folder.iterdir()))
        run_training(tiny.small(corpus, steps=1), folder, [])  # the same name can be used


def test_a_mistake_keeps_a_run_that_was_there(run: Path, corpus: Path) -> None:
    alter(run, "status", value="interrupted")
    before = contents(run)
    settings = tiny.small(corpus, steps=4)
    shutil.move(corpus, corpus.with_name("away"))
    try:
        with pytest.raises(UserError, match="does not exist"):
            run_training(settings, run, [])
    finally:
        shutil.move(corpus.with_name("away"), corpus)
    assert contents(run) == before


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(StorageError, match=f"cannot write {folder}"):
            run_training(tiny.small(corpus), folder, [])


def test_the_manifest_says_how_it_came_about(finished: Path, corpus: Path) -> None:
    manifest = load_run(finished).manifest
    assert manifest["status"] == "finished"
    assert manifest["command"] == ["posbench", "train"]
    assert manifest["started"] < manifest["finished"]
    assert manifest["step"] == manifest["checkpoint"]["step"] == 4
    assert manifest["runtime"]["threads"] == 1
    assert set(manifest["validation_nll"]) == {"1x"}
    for key in ("posbench", "python", "host", "peak_mem_mb", "tokens_per_s"):
        assert manifest[key]
    assert set(manifest["corpus"]) >= {"fingerprint", "documents", "train_tokens", "vocabulary"}


# ---------------------------------------------------------------- two at once


def test_a_second_start_is_told_who_holds_the_folder(tmp_path: Path, corpus: Path) -> None:
    lock = Lock(tmp_path / "run")
    with pytest.raises(UserError, match=rf"run is in use by process {os.getpid()} on .*since"):
        run_training(tiny.small(corpus), tmp_path / "run", [])
    lock.release()
    run_training(tiny.small(corpus, steps=1), tmp_path / "run", [])


def test_a_lock_dies_with_its_process(tmp_path: Path, corpus: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from posbench.runs import Lock\n"
        "lock = Lock(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    holder = tiny.start("-c", script, str(tmp_path / "run"))
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"in use by process {holder.pid}"):
        Lock(tmp_path / "run")
    holder.kill()
    holder.wait()
    Lock(tmp_path / "run").release()


def test_of_simultaneous_starts_one_wins(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from posbench.runs import Lock\n"
        "from posbench.errors import UserError\n"
        "sys.stdin.readline()\n"
        "try:\n"
        "    lock = Lock(Path(sys.argv[1])); print('won', flush=True); sys.stdin.readline()\n"
        "except UserError as error: print(error, flush=True)"
    )
    import subprocess
    import sys

    starts = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "run")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(6)
    ]  # fmt: skip
    for start in starts:
        assert start.stdin is not None
        start.stdin.write("go\n")
        start.stdin.flush()
    said = []
    for start in starts:
        assert start.stdout is not None
        said.append(start.stdout.readline())
    for start in starts:
        start.communicate("end\n")
    assert sorted(line == "won\n" for line in said) == [False] * 5 + [True]
    assert all("is in use by" in line for line in said if line != "won\n")


def test_a_folder_holds_one_run(tmp_path: Path, corpus: Path) -> None:
    settings = tiny.small(corpus)
    one, is_new = open_run(tmp_path, settings, [])
    again, is_new_again = open_run(tmp_path, settings, [])
    assert (is_new, is_new_again) == (True, False)
    assert one.id == again.id


def test_half_written_files_of_a_killed_start_are_no_obstacle(tmp_path: Path, corpus: Path) -> None:
    for name in ("run.json", "tokenizer.json", "metrics.jsonl"):
        (tmp_path / f".{name}.x7y8z9.tmp").write_text("{")
    run_training(tiny.small(corpus, steps=1), tmp_path, [])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        ".lock", "checkpoints", "metrics.jsonl", "run.json", "tb", "tokenizer.json",
    ]  # fmt: skip


# ---------------------------------------------------------------- finding runs


def pretend(folder: Path, started: str = "2026-01-01T00:00:00") -> Path:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"started": started}))
    return folder


def test_a_run_is_found_by_its_folder(tmp_path: Path) -> None:
    run = pretend(tmp_path / "run")
    pretend(run / "checkpoints" / "inside")  # whatever lies in a run is not another run
    assert find_folders(str(run)) == find_folders(run) == [run]


def test_a_sweep_gives_its_jobs_in_their_order(tmp_path: Path) -> None:
    jobs = [pretend(tmp_path / "sweep" / f"{n}-rope") for n in (10, 2, 0, 1, 11)]
    wanted = sorted(jobs, key=lambda job: int(job.name.split("-")[0]))
    assert find_folders(tmp_path / "sweep") == wanted
    assert [job.name for job in wanted] == ["0-rope", "1-rope", "2-rope", "10-rope", "11-rope"]


def test_lists_globs_and_nested_folders_are_united_once(tmp_path: Path) -> None:
    a = pretend(tmp_path / "x" / "deep" / "0-a")
    b = pretend(tmp_path / "x" / "deep" / "1-b")
    c = pretend(tmp_path / "y" / "rope-c")
    assert find_folders(tmp_path) == [a, b, c]
    assert find_folders([c, tmp_path / "x", a]) == [c, a, b]
    assert find_folders(str(tmp_path / "*" / "rope*")) == [c]
    assert find_folders([str(tmp_path / "x" / "*" / "?-*")]) == [a, b]


def test_a_folder_with_glob_characters_is_found_by_its_name(tmp_path: Path) -> None:
    run = pretend(tmp_path / "run[1]")
    assert find_folders(str(run)) == [run]


def test_without_a_name_the_newest_run_or_sweep_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSBENCH_OUTPUTS", str(tmp_path))
    train = tmp_path / "train"
    # Names, and times of files, say the opposite of `started`.
    newest = pretend(train / "a-run", "2026-03-01T00:00:00")
    sweep = [pretend(train / "z-sweep" / f"{n}-x", f"2026-02-0{n + 1}T00:00:00") for n in (0, 1)]
    assert find_folders(None) == [newest]
    shutil.rmtree(newest)
    assert find_folders(None) == sweep
    (train / "empty").mkdir()
    (train / "broken").mkdir()
    (train / "broken" / "run.json").write_text("{")
    (train / "stray.txt").write_text("x")
    assert find_folders(None) == sweep


def test_nothing_found_says_where_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSBENCH_OUTPUTS", str(tmp_path / "outputs"))
    with pytest.raises(UserError, match=f"below {tmp_path}/outputs/train.*posbench train"):
        find_folders(None)
    (tmp_path / "outputs" / "train" / "empty").mkdir(parents=True)
    with pytest.raises(UserError, match=f"below {tmp_path}/outputs/train"):
        find_folders(None)
    with pytest.raises(UserError, match=rf"absent: no such folder \(looked in {Path.cwd()}\)"):
        find_folders("absent")
    with pytest.raises(UserError, match=r"no posbench run there \(no run\.json"):
        find_folders(tmp_path)
    with pytest.raises(UserError, match="names no run"):
        find_folders([])


# ---------------------------------------------------------------- the Python way


def test_train_returns_the_finished_run(tmp_path: Path, corpus: Path) -> None:
    done = train(tiny.small(corpus, steps=2), tmp_path / "run")
    assert isinstance(done, Run)
    assert done.finished
    assert done.checkpoint().step == 2


def test_paths_mean_the_same_from_any_folder(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny.small(corpus, steps=2)
    monkeypatch.chdir(corpus.parent)
    relative = tiny.small(Path(corpus.name), steps=2)
    run_training(relative, tmp_path / "run", [])
    monkeypatch.chdir(tmp_path)
    assert differences(load_run(tmp_path / "run").settings, settings) == {}
    monkeypatch.setenv("HOME", str(corpus.parent))
    run_training(tiny.small(Path("~") / corpus.name, steps=2), tmp_path / "run", [])  # complete


def test_updating_the_manifest_is_atomic(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (run / "run.json").read_bytes()
    loaded = load_run(run)

    def refuse(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(PosbenchError, match=r"run\.json: No space left"):
        update(loaded, status="running")
    assert (run / "run.json").read_bytes() == before


def test_defaults_written_in_a_manifest_are_those_of_its_time(corpus: Path) -> None:
    """Every setting is recorded, defaults too: a later default never changes an old run."""
    saved = to_dict(TrainSettings())
    assert set(saved["train"]) == set(vars(TrainConfig()))
    assert set(saved["model"]) == set(vars(ModelConfig()))
