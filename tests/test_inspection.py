"""`posbench inspect`: golden numbers, the JSON contract, claims that can fail, and figures."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from xml.etree import ElementTree

import matplotlib.image
import numpy as np
import pytest
import torch
from torch import Tensor

from posbench.config import Format, InspectConfig, InspectSettings, ModelConfig
from posbench.config.encodings import ENCODINGS, EncodingConfig, RotaryConfig
from posbench.config.extensions import EXTENSIONS
from posbench.config.policies import Positions, Temperature
from posbench.encodings import Encoding, Hooks, Shape
from posbench.errors import StorageError, UserError
from posbench.inspection import figures, inspect_encoding, run_inspect
from posbench.inspection.checks import Check, run_checks
from posbench.inspection.facts import MOST_POSITIONS

GOLDEN: dict[str, Any] = json.loads(Path(__file__).with_name("golden_values.json").read_text())
CONTRACT = [
    "encoding",
    "extension",
    "train_length",
    "eval_length",
    "parameters",
    "max_length",
    "inverse_frequencies",
    "attention_factor",
    "slopes",
    "bias",
]
CONTENT = ("fox", "cable", "grape_ap", "cope", "dape", "dape_v2", "stickbreak", "path")
ON_ROPE = [name for name, kind in EXTENSIONS.items() if ENCODINGS["rope"]().takes(kind())]
SUBJECTS = [
    *((name, "none") for name in ENCODINGS),
    *(("rope", name) for name in ON_ROPE[1:]),
    *(("alibi", name) for name in ("lm_infinite", "streaming", "alibi_pi")),
    ("none", "streaming"),
]
ROTARY = [name for name, kind in ENCODINGS.items() if issubclass(kind, RotaryConfig)]
NORM = "rotation_keeps_norm"
SCORE = "score_depends_on_distance_alone"
PRODUCT = "embedding_dot_product_depends_on_distance_alone"


def asked(
    encoding: str = "rope",
    extension: str = "none",
    *,
    context: int = 32,
    length: int | None = 64,
    heads: int = 4,
    head_size: int = 8,
    options: dict[str, Any] | None = None,
    stretch: dict[str, Any] | None = None,
    **others: Any,
) -> InspectSettings:
    chosen = ENCODINGS[encoding](**options or {})
    if extension == "longrope" and isinstance(chosen, RotaryConfig):
        stretch = {"factors": [1.5] * (chosen.rotated(head_size) // 2)}
    return InspectSettings(
        encoding=chosen,
        extension=EXTENSIONS[extension](**stretch or {}),
        model=ModelConfig(width=heads * head_size, heads=heads),
        context=context,
        eval_length=length,
        **others,
    )


def strict(text: str) -> Any:
    """What strict JSON says; fails on NaN, Infinity and anything after the value."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


# ---------------------------------------------------------------- golden values


def test_rope_frequencies_and_wavelengths() -> None:
    for theta in (10_000, 500_000):
        facts = inspect_encoding(asked(head_size=64, options={"theta": float(theta)}))
        golden = GOLDEN[f"rope/inv_freq/d=64/base={theta}"]
        assert facts["inverse_frequencies"] == pytest.approx(golden, rel=1e-13)
        turns = np.array(facts["wavelengths"]) * np.array(golden)
        assert turns == pytest.approx(2 * np.pi)
        assert facts["attention_factor"] == 1.0


@pytest.mark.parametrize("context", [128, 512])
def test_yarn_with_a_scale_from_the_length_or_given(context: int) -> None:
    golden = GOLDEN[f"yarn/inv_freq/d=64/base=10000/L={context}/s=4"]
    by_length = asked("rope", "yarn", head_size=64, context=context, length=4 * context)
    fixed = asked("rope", "yarn", head_size=64, context=context, stretch={"factor": 4.0})
    for settings in (by_length, fixed):
        facts = inspect_encoding(settings)
        assert facts["inverse_frequencies"] == pytest.approx(golden, rel=1e-13)
        assert facts["attention_factor"] == pytest.approx(GOLDEN["yarn/attention_factor/s=4"])


def test_pi_and_ntk() -> None:
    for scale in (4, 16):
        pi = inspect_encoding(asked("rope", "pi", head_size=64, length=32 * scale))
        golden = GOLDEN[f"pi/inv_freq/d=64/s={scale}"]
        assert pi["inverse_frequencies"] == pytest.approx(golden, rel=1e-13)
        ntk = inspect_encoding(asked("rope", "ntk", head_size=64, length=32 * scale))
        golden = GOLDEN[f"ntk/inv_freq/d=64/alpha={scale}"]
        assert ntk["inverse_frequencies"] == pytest.approx(golden, rel=1e-12)
        base = GOLDEN[f"ntk/base/d=64/base=10000/alpha={scale}"]
        assert ntk["inverse_frequencies"][1] == pytest.approx(base ** (-2 / 64), rel=1e-12)


@pytest.mark.parametrize(
    ("extension", "mutant"),
    [
        ("yarn", "mutant/yarn/ramp_inverted/s=4"),
        ("yarn", "mutant/yarn/freq_inter_(s*base)^/s=4"),
        ("yarn", "mutant/yarn/ntk_base_for_extrapolated/s=4"),
        ("yarn", "mutant/yarn/uses_extended_L_for_range/s=4"),
    ],
)
def test_known_mistakes_are_not_reproduced(extension: str, mutant: str) -> None:
    facts = inspect_encoding(asked("rope", extension, head_size=64, context=2048, length=8192))
    assert facts["inverse_frequencies"] != pytest.approx(GOLDEN[mutant], rel=1e-3)
    golden = GOLDEN["yarn/inv_freq/d=64/base=10000/L=2048/s=4"]
    assert facts["inverse_frequencies"] == pytest.approx(golden, rel=1e-13)


@pytest.mark.parametrize("heads", [3, 8, 9, 16])
def test_alibi_slopes_and_bias(heads: int) -> None:
    distances = [0, 1, 2, 10, 5000]
    settings = asked("alibi", heads=heads, inspect=InspectConfig(distances=distances))
    facts = inspect_encoding(settings)
    golden = GOLDEN[f"alibi/slopes/H={heads}"]
    assert facts["slopes"] == pytest.approx(golden, rel=1e-15)
    assert facts["bias"]["distances"] == distances
    by_hand = -np.outer(golden, distances)
    np.testing.assert_allclose(facts["bias"]["values"], by_hand, rtol=1e-15, atol=0)
    assert "-0.0," not in json.dumps(facts["bias"])
    naive = GOLDEN.get(f"mutant/alibi/naive_slopes/H={heads}")
    if naive is not None:
        assert facts["slopes"] != pytest.approx(naive, rel=1e-3)


def test_alibi_slopes_of_twelve_heads() -> None:
    # The slopes of 8 heads, then every other one of 16 (Press et al. 2022, their code).
    slopes = inspect_encoding(asked("alibi", heads=12))["slopes"]
    exponents = [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]
    assert slopes == pytest.approx([2.0**-e for e in exponents], rel=1e-15)
    assert slopes != pytest.approx(GOLDEN["mutant/alibi/naive_slopes/H=12"], rel=1e-3)


# ---------------------------------------------------------------- the JSON contract


@pytest.mark.parametrize(("encoding", "extension"), SUBJECTS)
def test_the_object_has_the_promised_keys_first(
    encoding: str, extension: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_inspect(asked(encoding, extension, format=Format.json))
    printed = capsys.readouterr()
    facts = strict(printed.out)
    assert printed.err == ""
    assert list(facts)[: len(CONTRACT)] == CONTRACT
    assert (facts["encoding"], facts["extension"]) == (encoding, extension)
    assert (facts["train_length"], facts["eval_length"]) == (32, 64)
    applies = {key for key in CONTRACT[5:] if facts[key] is not None}
    expected: dict[str, set[str]] = {
        "none": set(),
        "sinusoidal": set(),
        "learned": {"max_length"},
        "xpos": {"inverse_frequencies", "attention_factor", "max_length"},
        "alibi": {"slopes", "bias"},
        "alibi_learned": {"slopes", "bias"},
        "fire": set(),
        "shaw": set(),
        "txl": set(),
    } | {key: set() for key in CONTENT}
    rotary = {"inverse_frequencies", "attention_factor"}
    assert applies == expected.get(encoding, rotary if encoding in ROTARY else {"bias"})
    trained = {
        "learned": 32 * 32,
        "pope": 4 * 4 * 8,
        "alibi_learned": 4,
        "t5": 32 * 4,
        "kerple_log": 2 * 4,
        "kerple_power": 2 * 4,
        "dpb": 3 * 32 + 32 * 32 + 32 * 4,
        "fire": 4 * (2 * 32 + 32 * 4 + 2),
        "shaw": 4 * 17 * 8,
        "txl": 4 * (32 * 32 + 2 * 32),
        "fox": 4 * (32 * 4 + 4),
        "cable": 4 * (32 * 4 + 4),
        "grape_ap": 4 * 32 * 4 * 8,
        "cope": 4 * 16 * 8,
        "dape": 4 * (8 * 32 + 32 + 32 * 4 + 8),
        "dape_v2": 4 * (3 * 8 * 32 + 32 + 3 * 32 * 4 + 8),
        "path": 4 * (2 * 32 * 32 + 3 * 32 + 32 * 4 + 4),
    }
    assert facts["parameters"] == trained.get(encoding, 0)


def test_layers_with_a_base_of_their_own_are_shown_beside_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = asked("rope_local_global", "pi", head_size=64, options={"global_theta": 500_000.0})
    facts = inspect_encoding(settings)
    for prefix, theta in (("", 10_000), ("global_", 500_000)):
        golden = [f / 2 for f in GOLDEN[f"rope/inv_freq/d=64/base={theta}"]]  # pi at twice 1x
        assert facts[f"{prefix}inverse_frequencies"] == pytest.approx(golden, rel=1e-13)
        turns = np.array(facts[f"{prefix}wavelengths"]) * np.array(golden)
        assert turns == pytest.approx(2 * np.pi)
    run_inspect(settings)
    said = capsys.readouterr().out
    for where in ("in local layers", "in global layers"):
        assert said.count(where) == 2  # a table, and how many pairs finish no turn
    panels = panels_of("rope_local_global", "yarn")
    assert len(panels) == 2 * 5 + 1
    assert sum(title.endswith("\nglobal layers") for title in panels) == 5
    plain = inspect_encoding(asked("rope"))
    assert plain["global_inverse_frequencies"] is plain["global_wavelengths"] is None


def test_the_length_looked_at_is_the_training_length_unless_given() -> None:
    assert inspect_encoding(asked(length=None))["eval_length"] == 32
    facts = inspect_encoding(asked("rope", "yarn", length=None))
    assert facts["inverse_frequencies"] == inspect_encoding(asked())["inverse_frequencies"]


def test_learned_beyond_its_table_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    settings = asked("learned", length=128)
    facts = inspect_encoding(settings)
    assert facts["max_length"] == 32
    assert facts["checks"][SCORE]["positions"] == 32
    run_inspect(settings)
    assert "32 tokens; undefined at the 128 looked at" in capsys.readouterr().out


def test_a_value_without_end_is_still_json(capsys: pytest.CaptureFixture[str]) -> None:
    run_inspect(asked("sinusoidal", options={"scale": 1e300}, format=Format.json))
    check = strict(capsys.readouterr().out)["checks"][SCORE]["float64"]
    assert check["value"] in ("nan", "inf")
    assert check["holds"] is False


@pytest.mark.parametrize(("encoding", "extension"), SUBJECTS)
def test_the_table_fits_a_terminal_and_states_each_check(
    encoding: str, extension: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = asked(encoding, extension, heads=12, head_size=8)
    checks = inspect_encoding(settings)["checks"]
    run_inspect(settings)
    printed = capsys.readouterr()
    assert printed.err == ""
    assert max(len(line) for line in printed.out.splitlines()) <= 80
    assert "trained at 32 tokens, looked at 64 (2x)" in printed.out
    said = " ".join(printed.out.split())
    assert said.count(" holds. ") == sum(
        check is not None and check["float64"]["holds"] for check in checks.values()
    )
    assert ("need more than 32 tokens for a turn" in said) == (encoding in ROTARY)
    assert ("weight halves every" in said) == (encoding in ("alibi", "alibi_learned"))


# ---------------------------------------------------------------- bad input


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    bad = {
        "an extension of nothing": asked("alibi", "yarn"),
        "too few channels": asked("rope", "ntk", head_size=2),
        "a negative distance": asked("alibi", inspect=InspectConfig(distances=[1, -1])),
        "an unknown kind of file": asked(plot=str(tmp_path / "figure.pdf")),
        "a folder": asked(plot=str(tmp_path)),
        "a missing folder": asked(plot=str(tmp_path / "missing" / "figure.png")),
    }
    for settings in bad.values():
        with pytest.raises(UserError):
            run_inspect(settings)
    assert list(tmp_path.iterdir()) == []


def test_a_figure_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any, **__: Any) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkstemp", full)
    with pytest.raises(StorageError, match="No space left"):
        run_inspect(asked("none", plot=str(tmp_path / "figure.png")))


# ---------------------------------------------------------------- claims, true and false


@pytest.mark.parametrize(("encoding", "extension"), SUBJECTS)
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_what_holds_of_each_encoding(encoding: str, extension: str, precision: str) -> None:
    checks = inspect_encoding(asked(encoding, extension, length=100))["checks"]
    holds = {name: check and check[precision]["holds"] for name, check in checks.items()}
    absolute = encoding in ("sinusoidal", "learned", "grape_ap", "fope")
    norm = False if encoding == "txl" else None
    # Groups and sinks begin at 0; logn.
    moved = extension in ("rerope", "leaky_rerope", "self_extend", "lm_infinite", "streaming")
    first_key = encoding == "dape_v2"  # convolved with zeros where others have a neighbour
    scored = encoding not in ("stickbreak", "path")  # these have no row of scores to ask for
    relative = not absolute and not first_key and not moved and encoding != "fire"
    assert holds == {
        NORM: encoding not in ("xpos", "pope", "fope") if encoding in ROTARY else norm,
        SCORE: relative if scored else None,
        PRODUCT: {"sinusoidal": True, "learned": False}.get(encoding),
    }
    if scored:
        claimed = not absolute and not moved and encoding not in ("none", "fire")
        assert checks[SCORE]["claimed"] == claimed
    assert not checks[NORM] or checks[NORM]["claimed"] == holds[NORM]


def test_hidden_pairs_are_a_change_only_where_distance_alone_does_not_hide_them() -> None:
    window = asked("rope", "streaming", stretch={"sinks": 0, "window": 20}, length=100)
    check = inspect_encoding(window)["checks"][SCORE]
    assert check["claimed"]
    assert check["float64"]["holds"]
    sinks = inspect_encoding(asked("rope", "streaming", length=100))["checks"][SCORE]
    assert not sinks["claimed"]
    assert sinks["float64"]["value"] == "inf"


@pytest.mark.parametrize("extension", ON_ROPE)
def test_half_rotated_heads_and_texts_longer_than_are_checked(extension: str) -> None:
    settings = asked(
        "rope", extension, options={"fraction": 0.5}, heads=2, length=MOST_POSITIONS + 1000
    )
    checks = inspect_encoding(settings)["checks"]
    assert checks[NORM]["positions"] == MOST_POSITIONS
    for name in (NORM, SCORE):
        assert (
            all(checks[name][p]["holds"] for p in ("float32", "float64"))
            == (checks[name]["claimed"])
        )


class Faulty(Encoding):
    """An encoding whose claim to be relative may be false."""

    relative = True


class Growing(Faulty):
    """Multiplies q and k by 1 + 0.001 position instead of turning them."""

    def hooks(self, x: Tensor, positions: Tensor, layer: int) -> Hooks:
        size = (1 + 0.001 * positions).to(x.dtype)[:, None]
        return Hooks(rotate=lambda q, k: (q * size, k * size))


class Shrinking(Faulty):
    """Turns nothing and shrinks everything alike."""

    def hooks(self, x: Tensor, positions: Tensor, layer: int) -> Hooks:
        return Hooks(rotate=lambda q, k: (0.999 * q, 0.999 * k))


class KeyPosition(Faulty):
    """Adds a bias that depends on the key's position alone."""

    def hooks(self, x: Tensor, positions: Tensor, layer: int) -> Hooks:
        bias = (1e-6 * positions).to(x.dtype).expand(1, self.shape.heads, -1)
        return Hooks(key_bias=bias)


class Coarse(Faulty):
    """Rotates by positions rounded to eight bits, as a cast to bfloat16 does."""

    def hooks(self, x: Tensor, positions: Tensor, layer: int) -> Hooks:
        angles = positions.to(torch.bfloat16).to(x.dtype)[:, None]
        return Hooks(rotate=partial(_both, angles.cos(), angles.sin()))


def _both(cos: Tensor, sin: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    return turned(q), turned(k)


class OneHead(Faulty):
    """Only the last head sees the query's position, through a score rule."""

    def hooks(self, x: Tensor, positions: Tensor, layer: int) -> Hooks:
        last = self.shape.heads - 1
        return Hooks(score_mod=lambda score, b, h, i, j: score + 1e-6 * (h == last) * i)


def checks_of(kind: type[Encoding], positions: int) -> dict[str, Check | None]:
    shape = Shape(layers=1, heads=4, head_size=8, width=32, train_length=32)
    return run_checks(kind(EncodingConfig(), shape), positions, 1.0, seed=0)


@pytest.mark.parametrize("kind", [Growing, Shrinking])
def test_a_rotation_that_changes_the_norm_is_caught(kind: type[Encoding]) -> None:
    check = checks_of(kind, 64)[NORM]
    assert check is not None
    assert not check.float32.holds
    assert not check.float64.holds
    size = 0.063 if kind is Growing else 0.001
    assert check.float64.value == pytest.approx(size, rel=1e-6)


@pytest.mark.parametrize("kind", [Growing, KeyPosition, Coarse, OneHead])
def test_a_score_that_depends_on_more_than_distance_is_caught(kind: type[Encoding]) -> None:
    check = checks_of(kind, 600)[SCORE]
    assert check is not None
    assert check.claimed
    assert not check.float64.holds


def test_a_rotation_by_coarse_positions_still_keeps_the_norm() -> None:
    check = checks_of(Coarse, 600)[NORM]
    assert check is not None
    assert check.float64.holds
    assert check.float32.holds


# ---------------------------------------------------------------- figures


@pytest.mark.parametrize(("encoding", "extension"), SUBJECTS)
def test_every_encoding_has_a_figure(
    encoding: str, extension: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "figure.png"
    run_inspect(asked(encoding, extension, plot=str(target), format=Format.json))
    printed = capsys.readouterr()
    assert strict(printed.out)["encoding"] == encoding
    assert str(target) in printed.err
    picture = matplotlib.image.imread(target)
    assert min(picture.shape[:2]) > 400
    ink = (picture[..., :3] < 0.95).any(axis=-1)
    # Each quarter of the sheet shows something beyond its frame.
    height, width = ink.shape
    for rows in (slice(0, height // 2), slice(height // 2, height)):
        for columns in (slice(0, width // 2), slice(width // 2, width)):
            assert ink[rows, columns].mean() > 0.01


def panels_of(encoding: str, extension: str = "none", **others: Any) -> dict[str, Any]:
    """The panels by title, the colour bars left out."""
    from posbench.inspection.facts import prepare

    sheet = figures.draw(prepare(asked(encoding, extension, **others)))
    return {axes.get_title(): axes for axes in sheet.axes if axes.get_title()}


def test_panels_follow_what_the_encoding_declares() -> None:
    rope, stretched = panels_of("rope"), panels_of("rope", "yarn")
    assert len(rope) == 4
    assert len(stretched) == 6
    # Four pairs turn in 6.3, 63, 628 and 6283 tokens; training saw 32.
    assert "3 of 4 pairs finish no turn in training" in rope
    same = "Same token everywhere: its score "
    assert same + "depends on distance alone" in rope
    assert same + "depends on distance alone" in panels_of("alibi")
    assert same + "ignores position" in panels_of("none")
    assert len(panels_of("none")) == 3
    sight = "Keys that each query sees"
    assert list(panels_of("none", "streaming")) == [sight, same + "depends on both positions"]
    (share,) = (
        panel for panel in panels_of("alibi", "streaming").values() if "share" in panel.get_ylabel()
    )
    shares = np.array(share.lines[0].get_ydata())
    assert ((shares > 0) == ((np.arange(64) < 28) | (np.arange(64) >= 60))).all()  # of 64, 4 + 28
    sinusoidal, learned = panels_of("sinusoidal"), panels_of("learned")
    assert same + "depends on both positions" in sinusoidal
    assert "Their dot product depends on distance alone" in sinusoidal
    assert "Position vectors before training: random numbers" in learned
    for panels in (rope, stretched, sinusoidal, learned):
        for axes in panels.values():
            assert axes.get_xlabel()
            assert axes.get_ylabel()


def test_only_a_scheme_without_position_is_drawn_as_one() -> None:
    claim = "Only the number of visible tokens tells where a query stands"
    found = {name for name in ENCODINGS if claim in panels_of(name)}
    assert found == {"none"}
    assert claim not in panels_of("none", window=16)


def added_to_scores(encoding: str) -> list[Any]:
    """The curves of what a content-dependent scheme adds to the last token's scores, by head."""
    (panel,) = (panel for title, panel in panels_of(encoding).items() if title.startswith("Added"))
    return [np.array(line.get_ydata()) for line in panel.lines[:4]]


@pytest.mark.parametrize("encoding", ["fox", "cable", "grape_ap"])
def test_gates_are_drawn_as_what_they_add_to_a_score(encoding: str) -> None:
    for added in added_to_scores(encoding):
        assert added[0] == 0
        assert (np.diff(added) < 0).all()  # every token on the way takes something


def test_untrained_gates_are_about_a_half_and_each_its_own() -> None:
    steps = np.diff(added_to_scores("fox")[0])
    assert steps.mean() == pytest.approx(-np.log(2), abs=0.1)
    assert len(np.unique(steps)) == len(steps)


@pytest.mark.parametrize(("name", "own"), [("path", True), ("stickbreak", False)])
def test_attention_of_its_own_is_drawn_as_shares(name: str, own: bool) -> None:
    panel = panels_of(name)["Equal keys over a random text: attention of token 64"]
    for line in panel.lines[:4]:
        shares = np.array(line.get_ydata())
        assert (shares[0] > 0) == own  # stick-breaking gives a token none of itself
        assert shares.sum() == pytest.approx(1, abs=1e-6)


def test_keys_that_a_window_hides_are_drawn_hidden() -> None:
    image = panels_of("rope", "streaming")["Keys that each query sees"].images[0].get_array()
    i, j = np.indices((64, 64))
    assert (np.array(image) == ((j <= i) & ((i - j < 28) | (j < 4)))).all()


def test_an_extension_that_leaves_frequencies_alone_is_drawn_without_a_stretch() -> None:
    for name in ("rerope", "self_extend", "streaming"):
        titles = panels_of("rope", name)
        assert not any(title.startswith(("Stretch", "A query and an equal")) for title in titles)
    assert "Stretch of each frequency" in panels_of("rope", "pi")


def test_policies_are_drawn() -> None:
    sight = panels_of("alibi", layers="every4th", window=10)["What each layer sees"]
    assert [bar.get_width() for bar in sight.patches] == [10, 10, 10, 64]
    drawn = panels_of("rope", positions=Positions.randomized)["Positions of 5 training texts"]
    for line in drawn.lines[:5]:
        positions = np.array(line.get_ydata())
        assert len(positions) == 32
        assert positions.max() < 128
        assert (np.diff(positions) > 0).all()
    moved = panels_of("rope", positions=Positions.pose)["Positions of 5 training texts"]
    assert all((np.diff(line.get_ydata()) > 1).sum() <= 1 for line in moved.lines[:5])
    title = "The encoding is dropped after 75% of the training"
    bars = panels_of("rope", drop_at=0.75)[title].patches
    assert [bar.get_width() for bar in bars] == [0.75, 0.25, 1]
    title = "Temperature: what scores are multiplied by"
    factors = panels_of("none", temperature=Temperature.logn)[title].lines[0].get_ydata()
    seen = np.arange(1, 65)
    assert np.array(factors) == pytest.approx(np.maximum(1, np.log(seen) / np.log(32)), rel=1e-12)
    assert title not in panels_of("none")


def test_an_svg_is_the_same_each_time_and_marks_the_training_length(tmp_path: Path) -> None:
    files = [tmp_path / "a.svg", tmp_path / "b.SVG"]
    for target in files:
        run_inspect(asked("alibi", plot=str(target)))
    first, second = (target.read_bytes() for target in files)
    assert first == second
    assert ElementTree.fromstring(first).tag.endswith("svg")
    assert b"<!-- 1x -->" in first
