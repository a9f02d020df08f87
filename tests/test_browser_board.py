"""TensorBoard itself, in a browser, on the evaluation of a real sweep: the curves are there."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browser import Page, finding, open_page
from test_board import points

from posbench.board.layout import over_seeds

pytestmark = pytest.mark.slow

MODELS = ("learned-seed0", "learned-seed1", "rope-seed0", "rope-seed1")
SUB_RUNS = {*MODELS, "mean/learned", "mean/rope", "results"}
LENGTHS = (16, 32, 64)

# The element's nearest ancestor of a kind, through the walls of web components.
_WITHIN = """
((node, name) => {
    while (node && node.localName !== name) node = node.parentNode || node.host;
    return node;
})
"""


class Server:
    """A TensorBoard of our own on loopback."""

    def __init__(self, logdir: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        words = ["--logdir", str(logdir), "--host", "127.0.0.1", "--port", str(port)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tensorboard.main", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def ask(self, path: str, body: object = None, **query: str) -> Any:
        """What an address of TensorBoard's own interface answers."""
        url = f"{self.address}/data/{path}?{urllib.parse.urlencode(query)}"
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def wait(self, runs: set[str], seconds: float = 60) -> None:
        """Wait until all runs are read."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, "TensorBoard ended"
            try:
                if set(self.ask("runs")) == runs:
                    return
            except OSError:  # not listening yet
                pass
            time.sleep(0.1)
        pytest.fail(f"TensorBoard did not read {runs} within {seconds} s")

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(30)


@pytest.fixture(scope="module")
def server(swept: Path) -> Iterator[Server]:
    server = Server(swept / "eval" / "tb")
    try:
        server.wait(SUB_RUNS)
        yield server
    finally:
        server.end()


# ---------------------------------------------------------------- what TensorBoard serves


def test_tensorboard_serves_every_point_at_its_length(server: Server, swept: Path) -> None:
    for run in MODELS:
        for tag in ("by_length/ppl_controlled", "by_length/nll_controlled"):
            served = server.ask("plugin/scalars/scalars", run=run, tag=tag)
            assert [(step, value) for _, step, value in served] == points(
                swept / "eval" / "tb" / run, tag
            )
            lengths = LENGTHS if run.startswith("rope") else LENGTHS[:1]
            assert tuple(step for _, step, _ in served) == lengths


def test_tensorboard_serves_the_layout_and_both_kinds_of_bands(server: Server) -> None:
    categories = server.ask("plugin/custom_scalars/layout")["category"]
    bands = {
        tuple(series[key] for key in ("value", "lower", "upper"))
        for category in categories
        for chart in category["chart"]
        for series in chart.get("margin", {}).get("series", [])
    }
    seeds = over_seeds("by_length", "ppl_controlled")
    assert {("by_length/ppl_controlled", "by_length/ci_lo", "by_length/ci_hi"), seeds} <= bands
    for tag in seeds:
        served = server.ask("plugin/custom_scalars/scalars", run="mean/rope", tag=f"^{tag}$")
        assert [step for _, step, _ in served["tag_to_events"][tag]] == list(LENGTHS)


def test_tensorboard_lists_every_model_once_with_its_settings(server: Server) -> None:
    statuses = ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"]
    wanted = {"allowedStatuses": statuses, "colParams": [], "startIndex": 0, "sliceSize": 99}
    groups = server.ask("plugin/hparams/session_groups", wanted)["sessionGroups"]
    assert {group["name"]: group["hparams"]["encoding"] for group in groups} == {
        run: run.split("-")[0] for run in MODELS
    }
    drawn = {
        group["name"]: [value["name"]["tag"] for value in group["metricValues"]] for group in groups
    }
    ends = ["hparam/effective_length"]
    assert sorted(drawn["rope-seed1"]) == ends + [f"hparam/ppl_{ratio}x" for ratio in (1, 2, 4)]
    assert sorted(drawn["learned-seed1"]) == [*ends, "hparam/ppl_1x"]


# ---------------------------------------------------------------- what a person sees


@contextmanager
def shown(server: Server, tab: str) -> Iterator[Page]:
    """A tab of TensorBoard, once it names every sub-run."""
    with open_page(f"{server.address}/#{tab}", 1400, 1000) as page:
        for run in SUB_RUNS - {"results"}:
            page.wait_for_text(run)
        yield page
        assert page.errors == []


def lines(card: str, title: str, kind: str = "line") -> str:
    """A script: the paths of this kind that are drawn in the card with this title or tag."""
    return finding(
        f"path.{kind}",
        f"filter((path) => [{_WITHIN}(path, {json.dumps(card)})].some((card) => card &&"
        f" [card.tag, card.title].includes({json.dumps(title)})))"
        ".map((path) => path.getAttribute('d') || '')",
    )


def places(path: str) -> list[float]:
    """Where the points of a path lie on the x axis, in pixels."""
    return [float(x) for x in re.findall(r"[ML](-?[\d.]+),", path)]


def test_the_scalars_page_draws_the_curves_by_length(server: Server) -> None:
    drawn = lines("tf-scalar-card", "by_length/ppl_controlled")
    with shown(server, "scalars") as page:
        page.wait(f"{drawn}.filter((path) => path.split('L').length === 3).length >= 2")
        curves = [each for path in page.run(drawn) if len(each := places(path)) == 3]
    # The step is the length: 16, 32 and 64 lie 1 to 2 apart, wherever the axis begins.
    for first, second, third in curves:
        assert (third - second) / (second - first) == pytest.approx(2, rel=1e-3)


def test_the_custom_scalars_page_draws_bands_over_seeds_and_intervals(server: Server) -> None:
    card = "tf-custom-scalar-margin-chart-card"
    with shown(server, "custom_scalars") as page:
        page.wait_for_text("Perplexity by length (step = tokens)")
        for title in ("each model, with the 95 % interval over documents",
                      "mean over seeds, least to greatest"):  # fmt: skip
            areas = lines(card, title, "area")
            page.wait(f"{areas}.some((path) => path.split('L').length >= 6)")  # there and back


def test_the_hparams_page_has_a_row_for_each_model(server: Server) -> None:
    with open_page(f"{server.address}/#hparams", 1400, 1000) as page:
        for words in (*MODELS, "encoding", "seed", "ppl_4x", "effective_length"):
            page.wait_for_text(words)
        assert "mean/rope" not in page.find("tf-hparams-main", "map((each) => each.innerText)")
        assert page.errors == []


def test_the_statuses_and_the_table_are_on_the_text_page(server: Server) -> None:
    with open_page(f"{server.address}/#text", 1400, 1000) as page:
        page.wait_for_text("n/a (table 16)")
        page.wait_for_text("Perplexity, controlled (headline)")
        assert page.errors == []
