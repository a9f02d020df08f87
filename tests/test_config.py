"""YAML groups, dataclasses, name tables and help say the same things."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posbench import catalog, config, configure
from posbench.cli import main
from posbench.cli.space import APPS, all_keys, configs_folder, options
from posbench.config.policies import PRESETS
from posbench.errors import UserError
from posbench.saved import from_dict, to_dict

NEEDED: dict[str, dict[str, Any]] = {"text": {"path": "x.txt"}, "longrope": {"factors": [1.0, 2.0]}}
CHOICES = [(group, name) for group, table in config.GROUPS.items() for name in table]


@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_an_option_composes_to_its_dataclass_and_its_defaults(group: str, name: str) -> None:
    command = "eval-extrapolate" if group == "extension" else "train"
    needed = NEEDED.get(name, {})
    words = [f"{group}.{key}={value}".replace(" ", "") for key, value in needed.items()]
    node = getattr(configure(command, f"{group}={name}", *words), group)
    expected = config.GROUPS[group][name](**needed)
    assert node == expected
    assert type(node) is type(expected)


@pytest.mark.parametrize("command", APPS)
def test_a_bare_command_composes_to_the_dataclass(command: str) -> None:
    assert configure(command) == APPS[command].settings()


@pytest.mark.parametrize("group", config.GROUPS)
def test_yaml_options_are_the_name_table(group: str) -> None:
    presets = list(PRESETS) if group == "encoding" else []
    assert list(options(group)) == [*config.GROUPS[group], *presets]


def test_catalog_classes_and_settings_name_the_same_encodings() -> None:
    from posbench.encodings import CLASSES

    assert [card.id for card in catalog.ENCODING_CARDS] == list(config.ENCODINGS)
    assert list(CLASSES) == list(config.ENCODINGS)
    assert [card.id for card in catalog.EXTENSION_CARDS] == list(config.EXTENSIONS)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("tiny", (4, 128, 4)), ("small", (6, 384, 6)), ("base", (12, 768, 12)),
     ("medium", (24, 1024, 16))],
)  # fmt: skip
def test_model_sizes(name: str, shape: tuple[int, int, int]) -> None:
    model = configure("train", f"model={name}").model
    assert (model.name, (model.layers, model.width, model.heads)) == (name, shape)
    assert list(options("model")) == ["tiny", "small", "base", "medium"]


@pytest.mark.parametrize("name", options("experiment"))
def test_every_experiment_composes_and_describes_itself(name: str) -> None:
    assert isinstance(configure("train", f"experiment={name}"), config.TrainSettings)
    assert len(options("experiment")[name].text) > 20


def test_the_command_line_wins_over_an_experiment_and_that_over_the_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "experiment/mine", "# @package _global_\n# Mine\ncontext: 64\nseed: 7\n")
    words = ["train", "--config-dir", str(tmp_path), "experiment=mine", "seed=3", "--cfg", "job"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "context: 64" in shown
    assert "seed: 3" in shown


def test_a_user_option_builds_on_a_schema(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "# RoPE as long models use it\ndefaults: [/encoding_rope]\ntheta: 500000\n"
    write(tmp_path, "encoding/rope-500k", text)
    own = ["train", "--config-dir", str(tmp_path)]
    assert main([*own, "encoding=rope-500k", "--cfg", "job", "-p", "encoding"]) == 0
    assert "theta: 500000" in capsys.readouterr().out
    assert main([*own, "--help"]) == 0
    help_text = capsys.readouterr().out
    assert "RoPE as long models use it" in help_text
    assert main([*own, "encoding=rope-500"]) == 2
    assert "Did you mean encoding=rope-500k?" in capsys.readouterr().err


def test_a_user_option_that_would_run_code_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        tmp_path,
        "experiment/evil",
        "# @package _global_\nhydra: {callbacks: {a: {_target_: os.abort}}}",
    )
    assert main(["train", "--config-dir", str(tmp_path), "experiment=evil"]) == 2
    assert "names code to run" in capsys.readouterr().err


def write(folder: Path, name: str, text: str) -> None:
    path = folder / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("command", APPS)
def test_help_names_every_key_option_and_meaning(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    app = APPS[command]
    assert main([command, "--help"]) == 0
    words = capsys.readouterr().out.split()
    text = " ".join(words)
    shown = {word.partition("=")[0] for word in words}
    assert set(all_keys(app)) <= shown
    for group in app.groups:
        for option in options(group).values():
            assert option.name in words
            assert option.text
            assert option.text in text
    for example in app.examples:
        assert example in text


def test_every_setting_has_a_meaning() -> None:
    from posbench.cli.space import keys

    silent = [key.path for app in APPS.values() for key in keys(app) if len(key.help) < 5]
    assert silent == []


@pytest.mark.parametrize("name", config.ENCODINGS)
def test_settings_survive_their_json_form(name: str) -> None:
    settings = configure("train", f"encoding={name}", "train.validate_ratios=[1,2]", "device=cpu")
    saved = json.loads(json.dumps(to_dict(settings)))
    assert from_dict(config.TrainSettings, saved) == settings


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.heads=3"], "model.heads=2"),
        (["model.width=132", "model.heads=44"], "odd number"),
        (["train.lr=0"], "train.lr=0"),
        (["train.steps=-1"], "the least is 1"),
        (["train.micro_batch=99"], "train.batch_size=16"),
        (["train.lr=nan"], "finite"),
        (["encoding.name=alibi"], "encoding=OPTION"),
        (["train.validate_ratios=[]"], "[1,2,4]"),
    ],
)
def test_combinations_that_cannot_work(overrides: list[str], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        configure("train", *overrides)
    assert expected in str(caught.value)


def test_configure_explains_like_the_command_line() -> None:
    with pytest.raises(UserError, match=r"Did you mean train\.steps"):
        configure("train", "train.stepz=3")
    with pytest.raises(UserError, match="takes no settings"):
        configure("list")


@pytest.mark.parametrize("text", ["a b", "a,b", "a=b", "it's", "x'", "back\\slash'", "end\\", "[a"])
def test_a_path_arrives_as_it_was_typed(text: str) -> None:
    typed = f"/data/{text}"
    settings: Any = configure("train", "data=text", f"data.path={typed}")
    assert settings.data.path == typed


def test_a_list_of_runs_stays_a_list() -> None:
    assert configure("eval-extrapolate", "runs=[a,b]").runs == ["a", "b"]
    assert configure("eval-extrapolate", "runs=out/*rope*").runs == "out/*rope*"
    assert configure("eval-extrapolate", "runs=out/20261130").runs == "out/20261130"


def test_configs_are_where_the_package_looks() -> None:
    assert {f"{command}.yaml" for command in APPS} <= {p.name for p in configs_folder().iterdir()}
