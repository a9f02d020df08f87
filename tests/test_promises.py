"""check-encoding: what is broken is named with its reason, and nothing that is right is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from posbench import plugins
from posbench.cli import main
from posbench.cli.own import TEMPLATES
from posbench.config.encodings import ENCODINGS, EncodingConfig
from posbench.errors import Exit
from posbench.promises import PROMISES, Finding, Verdict, check, learning, logits, signs, tables
from posbench.promises.probe import CONTEXT, Measured, Subject
from posbench.promises.reference import reference

HEAD = '''
from __future__ import annotations
from dataclasses import dataclass
import torch
from torch import nn
from posbench.plugin import ByDistance, Encoding, EncodingConfig, Hooks, per_head, setting

@dataclass
class MineConfig(EncodingConfig):
    """Mine."""
    name: str = setting("mine", "id of the scheme")

'''


def encoding(body: str) -> str:
    """A plugin whose class has this body, indented by four."""
    return f"{HEAD}class Mine(Encoding):\n    config: MineConfig\n{body}"


def by_distance(bias: str, body: str = "") -> str:
    """A bias of distances d with slopes 1/2, 1/4, 1/8."""
    return encoding(f"""
    relative = True
{body}
    def hooks(self, x, positions, layer):
        slopes = 2.0 ** -torch.arange(1, self.shape.heads + 1, dtype=torch.float64)
        return Hooks(distance_bias=lambda d: ({bias}).to(d.dtype))
""")


def rotary(positions: str = "positions.double()", k: str = "angles", more: str = "") -> str:
    """RoPE in two halves, with these positions, this angle for keys, and this cast of tables."""
    return encoding(f"""
    relative = True

    def hooks(self, x, positions, layer):
        size = self.shape.head_size
        frequencies = 10000.0 ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = ({positions})[:, None] * frequencies.to(({positions}).dtype)

        def turn(x, angles):
            cos, sin = angles.cos(){more}, angles.sin(){more}
            a, b = x.chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

        return Hooks(rotate=lambda q, k: (turn(q, angles), turn(k, {k})))
""")


def trained(bias: str, start: str = "nn.init.zeros_(self.s)", made: str = "torch.empty") -> str:
    """A bias by distance with one trained value s per head."""
    return f"""{HEAD}
class Mine(ByDistance):
    config: MineConfig

    def __init__(self, config, shape):
        super().__init__(config, shape)
        self.s = nn.Parameter({made}(shape.heads))

    def initialise(self, generators):
        {start}

    def bias(self, d, layer):
        return {bias}
"""


LEAK = encoding("""
    def hooks(self, x, positions, layer):
        gate = x[..., 0]
        nearest = len(positions) - 1
        return Hooks(score_mod=lambda s, b, h, i, j: s + gate[b, (j + 1).clamp(max=nearest)])
""")

# A mean that LayerNorm makes 0: a model with RMSNorm would see the next token in it.
LEAK_OF_THE_MEAN = LEAK.replace("x[..., 0]", "x.mean(dim=-1)")

ALIBI = "per_head(slopes, d) * d"
ROUNDED = {
    "bfloat16 distances": by_distance("-per_head(slopes, d) * d.to(torch.bfloat16)"),
    "bfloat16 biases": by_distance(f"(-{ALIBI}).to(torch.bfloat16)"),
    "bfloat16 positions": rotary("positions.to(torch.bfloat16)"),
    "bfloat16 tables": rotary(more=".to(torch.bfloat16)"),
    "positions like x": rotary("positions.to(x.dtype)"),
    "float16 positions": rotary("positions.half()"),
}
RIGHT = {
    "rotary": rotary(),
    "rotary in float32": rotary("positions.float()"),
    "alibi": by_distance(f"-{ALIBI}"),
    "window": by_distance("torch.where(per_head(slopes, d) * d > 9, -torch.inf, 0.0)"),
    "free to turn": trained("per_head(self.s, d) * torch.log1p(d)", "nn.init.ones_(self.s)"),
    "softplus": trained("-per_head(nn.functional.softplus(self.s), d) * torch.log1p(d)"),
}


@contextmanager
def plugin(folder: Path, text: str) -> Iterator[EncodingConfig]:
    """The settings of the encoding that a file with this text holds."""
    path = folder / "mine.py"
    path.write_text(text)
    with plugins.loaded([path]):
        yield ENCODINGS["mine"]()


def broken(folder: Path, text: str) -> dict[str, Finding]:
    """What fails, by name, when everything is checked."""
    with plugin(folder, text) as config:
        return {each.promise.name: each for each in check(config) if each.verdict is Verdict.fails}


# ---------------------------------------------------------------- the whole of it


def test_the_template_keeps_every_promise(tmp_path: Path) -> None:
    with plugin(tmp_path, (TEMPLATES / "mine.py").read_text()) as config:
        findings = list(check(config))
    assert [each.promise for each in findings] == list(PROMISES)
    assert {each.verdict for each in findings} == {Verdict.holds}


@pytest.mark.parametrize("name", ["learned", "t5", "xpos"])
def test_posbenchs_own_keep_every_promise(name: str) -> None:
    assert {each.verdict for each in check(ENCODINGS[name]())} == {Verdict.holds}


@pytest.mark.parametrize("text", [LEAK, LEAK_OF_THE_MEAN], ids=["channel", "mean"])
def test_a_leak_is_called_a_leak(text: str, tmp_path: Path) -> None:
    found = broken(tmp_path, text)
    assert set(found) == {"causal"}
    assert "moves logits before it by" in found["causal"].found
    assert "perplexity" in found["causal"].promise.why


@pytest.mark.parametrize("how", ROUNDED)
def test_rounded_positions_are_called_rounded(how: str, tmp_path: Path) -> None:
    found = broken(tmp_path, ROUNDED[how])
    assert set(found) == {"exact positions"}
    measured = found["exact positions"].found
    first = {"bfloat16 tables": "first at 1", "float16 positions": "65,520"}
    assert first.get(how, "256 and 257 look the same") in measured
    assert ".double()" in found["exact positions"].where


def test_a_query_and_a_key_that_turn_apart_are_called_so(tmp_path: Path) -> None:
    text = rotary(k="-angles")
    found = broken(tmp_path, text)
    assert set(found) == {"relative"}
    assert "opposite directions" in found["relative"].where
    found = broken(tmp_path, text.replace("relative = True", ""))
    assert set(found) == {"sign"}
    assert "opposite directions" in found["sign"].where


@pytest.mark.parametrize(
    "text",
    [
        by_distance(ALIBI),
        trained("per_head(nn.functional.softplus(self.s), d) * torch.log1p(d)"),
        encoding("""
    relative = True
    def hooks(self, x, positions, layer):
        return Hooks(score_mod=lambda s, b, h, i, j: s + 0.1 * (h + 1) * (i - j))
"""),
    ],
    ids=["alibi", "trained", "score_mod"],
)
def test_a_bias_that_favours_the_farthest_token_is_mis_signed(text: str, tmp_path: Path) -> None:
    found = broken(tmp_path, text)
    assert set(found) == {"sign"}
    assert "the sign of the bias is turned" in found["sign"].where
    assert "rises all the way" in found["sign"].found


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_not_blamed(name: str, tmp_path: Path) -> None:
    assert broken(tmp_path, RIGHT[name]) == {}


# ---------------------------------------------------------------- promise by promise

TABLE = """
    def __init__(self, config, shape):
        super().__init__(config, shape)
        self.table = nn.Parameter(torch.empty(shape.train_length, shape.width))

    def initialise(self, generators):
        nn.init.normal_(self.table, std=0.02, generator=generators("table"))

    def embed(self, x, positions):
        return x + self.table[positions.clamp(max=47)].to(x.dtype)
"""
WAVES = "torch.arange(x.shape[-1]).mul(p[:, None]).sin()"  # of positions p
OF_LENGTH = f"""
    def embed(self, x, positions):
        p = positions.double() / len(positions)
        return x + {WAVES}.to(x.dtype)
"""

SINGLE: list[tuple[str, Callable[[Subject], Measured], str, str]] = [
    (
        "not filled",
        learning.runs,
        trained("-per_head(self.s, d) * d", "pass"),
        "parameter s holds no numbers",
    ),
    (
        "wrong dtype out of embed",
        learning.runs,
        encoding("    def embed(self, x, positions):\n        return x.double()\n"),
        "embed makes float64",
    ),
    (
        "misspelt",
        logits.effect,
        encoding("    def hook(self, x, positions, layer):\n        return Hooks()\n"),
        "differ from encoding=none by 0",
    ),
    (
        "drawn from the global generator",
        logits.same_seed,
        trained("-per_head(self.s, d) * d", "pass", "torch.rand"),
        "encoding.s is drawn anew",
    ),
    (
        "a tensor beside the parameters",
        learning.state,
        by_distance(
            f"-{ALIBI}",
            "    def __init__(self, config, shape):\n        super().__init__(config, shape)\n"
            "        self.kept = torch.ones(3)\n",
        ),
        "keeps the tensor kept",
    ),
    (
        "a buffer",
        learning.state,
        by_distance(
            f"-{ALIBI}",
            "    def __init__(self, config, shape):\n        super().__init__(config, shape)\n"
            "        self.register_buffer('cos', torch.ones(3))\n",
        ),
        "keeps the tensor cos",
    ),
    (
        "remembers the longest text",
        logits.order_of_lengths,
        encoding(f"""
    def embed(self, x, positions):
        self.longest = max(getattr(self, "longest", 0), len(positions))
        p = positions.double() / self.longest
        return x + {WAVES}.to(x.dtype)
"""),
        "logits differ by",
    ),
    (
        "averages over the batch",
        logits.rows_independent,
        encoding("    def embed(self, x, positions):\n        return x + x.mean(0)\n"),
        "logits differ by",
    ),
    (
        "called relative",
        logits.shifts,
        encoding(f"""
    relative = True
    def embed(self, x, positions):
        p = positions.double()
        return x + {WAVES}.to(x.dtype)
"""),
        "positions + 101 move the logits",
    ),
    ("reads the length", logits.prefixes, encoding(OF_LENGTH), "48 tokens alone or before 48"),
    ("ends early", logits.finite, encoding(TABLE.replace(".clamp(max=47)", "")), "out of bounds"),
    (
        "accepts what it refuses",
        logits.finite,
        encoding("    max_length = 48\n" + TABLE),
        "49 tokens are accepted",
    ),
    (
        "no number beyond 100",
        logits.finite,
        by_distance("-per_head(slopes, d) * (100 - d).sqrt()"),
        "not finite at 192",
    ),
    (
        "a part never trains",
        learning.trains,
        trained("-per_head(self.s.detach().exp(), d) * d"),
        "moves 0% of s",
    ),
    (
        "the other formula",
        reference,
        by_distance(
            f"-{ALIBI}",
            "    def reference(self, q, k, i, j, head, layer):\n"
            "        product = sum(a * b for a, b in zip(q, k)) / len(q) ** 0.5\n"
            "        return product - 0.5 ** (head + 1) * (i - j + 1)\n",
        ),
        "by the formula at i=",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("promise", "text", "words"),
    [each[1:] for each in SINGLE],
    ids=[each[0] for each in SINGLE],
)
def test_a_broken_promise_is_measured(
    promise: Callable[[Subject], Measured], text: str, words: str, tmp_path: Path
) -> None:
    with plugin(tmp_path, text) as config:
        measured = promise(Subject(config))
    assert not measured.holds
    assert words in measured.found


def test_what_says_that_it_reads_the_length_may(tmp_path: Path) -> None:
    with plugin(tmp_path, encoding("    prefix_consistent = False\n" + OF_LENGTH)) as config:
        assert logits.prefixes(Subject(config)).holds


def test_a_table_of_all_pairs_does_not_fill_the_memory(tmp_path: Path) -> None:
    text = encoding("""
    relative = True
    def hooks(self, x, positions, layer):
        far = (positions[:, None] - positions).to(x.dtype)
        return Hooks(score_mod=lambda s, b, h, i, j: s - 0.1 * far[i, j].to(s.dtype))
""")
    with plugin(tmp_path, text) as config:
        model = Subject(config).model()
        assert tables.reach(model.encoding, tables.FAR) == tables.NEARER
        found = tables.exact(Subject(config))
    assert not found.holds  # and it is rounded, for it follows the dtype of x
    assert found.found.startswith("bfloat16 inputs")


def test_a_graph_break_is_slow_and_not_wrong(tmp_path: Path) -> None:
    text = encoding("""
    def hooks(self, x, positions, layer):
        return Hooks(temperature=2.0 if float(x.sum()) > 0 else 3.0)
""")
    with plugin(tmp_path, text) as config:
        found = learning.compiles(Subject(config))
    assert found.holds
    assert found.slow


def test_widened_code_rounds_nothing() -> None:
    """The reference of `exact positions` is float64 whatever the code asks for."""
    with tables.widened():
        made = [
            torch.arange(300).to(torch.bfloat16),
            torch.arange(300).half(),
            torch.arange(300, dtype=torch.float32),
            torch.ones(300).float() * 257,
        ]
    assert all(each.dtype is torch.float64 for each in made)
    assert float(made[0][257]) == 257
    assert torch.get_default_dtype() is torch.float32


def test_turned_apart_means_a_score_of_the_sum(tmp_path: Path) -> None:
    for k, expected in (("angles", False), ("-angles", True), ("2 * angles", False)):
        with plugin(tmp_path, rotary(k=k)) as config:
            assert signs.turned_apart(Subject(config)) is expected


# ---------------------------------------------------------------- the command


def test_the_command_says_what_holds_what_fails_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new-encoding", "mine"]) == Exit.OK
    capsys.readouterr()
    assert main(["check-encoding", "mine.py"]) == Exit.OK
    said = capsys.readouterr().out
    assert all(promise.name in said for promise in PROMISES)
    assert f"{len(PROMISES)} of {len(PROMISES)} promises hold, 0 fail." in said

    Path("mine.py").write_text(LEAK)
    Path("mine.yaml").unlink()  # its slope is not a setting of this one
    assert main(["check-encoding", "mine.py", "mine"]) == Exit.FAILED
    said = capsys.readouterr()
    assert "causal: FAILS" in said.out
    assert "a model that sees the next token has a perplexity that means nothing" in said.out
    assert said.err.splitlines()[-1] == "posbench: mine.py: not every promise holds (mine)."


def test_nothing_is_asked_of_what_does_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = encoding("    def hooks(self, x, positions, layer):\n        return Hooks(rotat=1)\n")
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert main(["check-encoding", str(path)]) == Exit.FAILED
    said = capsys.readouterr().out
    line = text.splitlines().index("        return Hooks(rotat=1)") + 1
    assert f"(mine.py, line {line})" in said
    assert f"0 of {len(PROMISES)} promises hold, 1 fail, {len(PROMISES) - 1} not checked." in said


def test_lengths_that_do_not_work_are_left_out_of_the_rest(tmp_path: Path) -> None:
    found = broken(tmp_path, encoding(TABLE.replace(".clamp(max=47)", "")))
    assert set(found) == {"finite to 4x"}
    assert str(4 * CONTEXT) in found["finite to 4x"].found
    assert "max_length" in found["finite to 4x"].where
