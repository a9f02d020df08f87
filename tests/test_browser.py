"""report.html in a real browser: it opens without a complaint, and a person can see what it shows.

Skipped where there is no Chromium (see `browser.find_browser`).
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Page, open_page
from made_up import FIVE, made_up

from posbench.report import write_report

pytestmark = pytest.mark.slow

HEADLINE = "document.querySelector('.scroll table')"
FIRST_COLUMN = f"[...{HEADLINE}.tBodies[0].rows].map(row => row.cells[0].textContent)"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with all its sections: five encodings, three seeds, three lengths, extensions."""
    folder = tmp_path_factory.mktemp("report")
    write_report(made_up(extensions=("none", "ntk", "yarn"), attention=True), folder)
    return folder / "report.html"


@pytest.fixture(scope="module")
def tab(report: Path) -> Iterator[Page]:
    with open_page(report.as_uri()) as each:
        yield each


@pytest.fixture
def opened(tab: Page, report: Path) -> Page:
    """The report as it looks when it has just been opened on a desktop."""
    look(tab, 1100)
    tab.console.clear()
    load(tab, report)
    return tab


def load(tab: Page, report: Path) -> None:
    tab.call("Page.navigate", url="about:blank")
    tab.call("Page.navigate", url=report.as_uri())
    tab.wait("location.protocol === 'file:' && document.readyState === 'complete'")


def look(tab: Page, width: int, *, dark: bool = False) -> None:
    """Be a screen of this width, in a light or a dark room."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    tab.call("Emulation.setDeviceMetricsOverride", **size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    tab.call("Emulation.setEmulatedMedia", media="", features=[scheme])


def boxes(tab: Page, selector: str) -> list[dict[str, Any]]:
    """Left, right, width and height of each element on the page."""
    found: list[dict[str, Any]] = tab.run(
        f"[...document.querySelectorAll({selector!r})].map(e => e.getBoundingClientRect())"
        ".map(({left, right, top, bottom, width, height}) => "
        "({left, right, top, bottom, width, height}))"
    )
    return found


def test_the_console_has_nothing_to_complain_about(opened: Page) -> None:
    assert opened.errors == []
    assert "Length extrapolation" in opened.run("document.title")
    # A complaint would have been heard.
    opened.run("console.error('heard')")
    opened.run("setTimeout(() => { throw new Error('heard as well') })")
    opened.run("new Promise(done => setTimeout(done, 50))")
    assert len(opened.errors) == 2


def test_nothing_is_asked_of_the_network(opened: Page) -> None:
    asked = opened.run("performance.getEntriesByType('resource').map(entry => entry.name)")
    assert asked == []


@pytest.mark.parametrize(("width", "dark"), [(1100, False), (1100, True), (390, False)])
def test_tables_and_figures_can_be_seen(opened: Page, width: int, dark: bool) -> None:
    look(opened, width, dark=dark)
    for selector, least in (("table thead", 5), ("table tbody tr", 30), ("figure svg", 4)):
        found = boxes(opened, selector)
        shown = [box for box in found if box["width"] > 0 and box["height"] > 0]
        assert len(shown) >= least, selector
    for box in boxes(opened, "figure svg"):
        assert box["width"] > 200
        assert box["height"] > 80
    # Lines and letters are drawn, not only the frame around them.
    for figure in ("svg path", "svg text"):
        assert sum(box["width"] > 0 for box in boxes(opened, figure)) > 30


def test_the_page_is_no_wider_than_a_phone(opened: Page) -> None:
    """What is wider scrolls in a box of its own."""
    look(opened, 390)
    assert opened.run("document.documentElement.scrollWidth") <= 390
    assert opened.run(
        "[...document.querySelectorAll('.scroll')].some(e => e.scrollWidth > e.clientWidth)"
    )


@pytest.mark.parametrize("width", [1100, 390])
def test_names_of_lines_do_not_overlap_and_stay_on_the_picture(opened: Page, width: int) -> None:
    """With the letters of this browser, which are not those that the figure was laid out with."""
    look(opened, width)
    figures = opened.run("document.querySelectorAll('figure svg').length")
    for number in range(figures - 1):  # the last one shows heads
        labels = opened.run(
            f"[...document.querySelectorAll('figure svg')[{number}].querySelectorAll('text')]"
            ".filter(e => e.getAttribute('style').includes('font-weight: 700'))"
            ".map(e => [e.textContent, e.getBoundingClientRect()])"
            ".map(([text, {left, right, top, bottom}]) => [text, left, right, top, bottom])"
        )
        assert {text.split(":")[0].split(" ")[0] for text, *_ in labels} >= {*FIVE} - {"learned"}
        picture = boxes(opened, "figure svg")[number]
        for _, _, right, _, _ in labels:
            assert right <= picture["right"] + 1
        ordered = sorted(labels, key=lambda label: label[3])
        for one, below in itertools.pairwise(ordered):
            middle = (below[3] + below[4]) / 2
            assert one[4] < middle, (one[0], below[0])  # at most their margins touch


def test_a_dark_room_gets_a_dark_page(opened: Page) -> None:
    def lightness() -> tuple[int, int]:
        color = "getComputedStyle(document.body)"
        return tuple(
            sum(map(int, opened.run(f"{color}.{name}.match(/\\d+/g).slice(0, 3)")))
            for name in ("backgroundColor", "color")
        )  # type: ignore[return-value]

    paper, ink = lightness()
    assert paper > 700 > ink
    look(opened, 1100, dark=True)
    paper, ink = lightness()
    assert paper < 120 < ink
    axis = "getComputedStyle(document.querySelector('figure svg text')).fill.match(/\\d+/g)"
    assert sum(map(int, opened.run(axis)[:3])) > 500  # figures follow


def click(tab: Page, column: int) -> list[str]:
    tab.run(f"{HEADLINE}.tHead.rows[0].cells[{column}].querySelector('button').click()")
    order: list[str] = tab.run(FIRST_COLUMN)
    return order


def test_a_click_sorts_a_table_and_words_stay_last(opened: Page) -> None:
    as_written = opened.run(FIRST_COLUMN)
    assert as_written == [*FIVE]
    rising = click(opened, 4)  # 4x: alibi holds, sinusoidal is worst, learned has no number
    assert rising == ["alibi", "none", "rope", "sinusoidal", "learned"]
    assert opened.run(f"{HEADLINE}.querySelector('[aria-sort]').textContent").startswith("4x")
    assert click(opened, 4) == ["sinusoidal", "rope", "none", "alibi", "learned"]
    assert click(opened, 4) == as_written
    assert click(opened, 0) == sorted(FIVE)


def test_without_scripts_everything_is_there(tab: Page, report: Path) -> None:
    tab.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        look(tab, 1100)
        load(tab, report)
        root = tab.call("DOM.getDocument")["root"]["nodeId"]
        found = tab.call("DOM.querySelectorAll", nodeId=root, selector="thead button")
        assert found["nodeIds"] == []
        for selector in (".scroll tbody tr", "figure svg", "h2"):
            nodes = tab.call("DOM.querySelectorAll", nodeId=root, selector=selector)["nodeIds"]
            assert nodes
            model = tab.call("DOM.getBoxModel", nodeId=nodes[0])["model"]
            assert min(model["width"], model["height"]) > 0
    finally:
        tab.call("Emulation.setScriptExecutionDisabled", value=False)


def test_it_prints(opened: Page) -> None:
    printed = base64.b64decode(opened.call("Page.printToPDF")["data"])
    assert printed.startswith(b"%PDF")
    opened.call("Emulation.setEmulatedMedia", media="print", features=[])
    paper = opened.run("getComputedStyle(document.body).backgroundColor")
    assert paper == "rgb(255, 255, 255)"
    overflow = "getComputedStyle(document.querySelector('.scroll')).overflowX"
    assert opened.run(overflow) == "visible"
