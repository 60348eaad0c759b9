"""Reports in a real browser: Chromium without a screen. Skipped where it or selenium is not installed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compiled_autograd as ca
from benchmarks.report import chromium_options
from shadow_cache.report import data, page

from .report_pages import CLASS_NAME, MARKUP, Net, report_of, trained

pytestmark = pytest.mark.slow
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason="selenium is not installed: pip install -e '.[browser]'"
    )
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("Chromium and its driver are not installed: apt-get install chromium chromium-driver")
    options = chromium_options()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def session_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ca.reset()
    return trained(Net(), 4).report(tmp_path_factory.mktemp("pages") / "session.html")


@pytest.fixture(scope="module")
def large_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page.write(report_of(1_000), tmp_path_factory.mktemp("pages") / "large.html")


def _open(browser: Any, path: Path) -> None:
    """Open a page, and wait until its script has run to the end; the driver may be back before."""
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get_log("browser")
    browser.get(path.as_uri())
    wait = WebDriverWait(browser, 30)
    try:
        wait.until(lambda page: page.execute_script("return document.documentElement.dataset.ready") == "yes")
    finally:
        assert browser.get_log("browser") == []


def _press(browser: Any, *keys: str) -> None:
    from selenium.webdriver import ActionChains

    for key in keys:
        ActionChains(browser).send_keys(key).perform()


def _active(browser: Any, of: str) -> str:
    return str(browser.execute_script(f"return document.activeElement.{of} || ''"))


def _count(browser: Any, selector: str) -> int:
    return int(browser.execute_script("return document.querySelectorAll(arguments[0]).length", selector))


def test_nothing_that_users_named_runs(browser: Any, tmp_path: Path) -> None:
    class Model(Net):
        pass

    Model.__name__ = Model.__qualname__ = CLASS_NAME
    _open(browser, trained(Model(MARKUP), 3).report(tmp_path / "planted.html"))
    browser.execute_script("for (let at = 0; at < graphOf(opened).nodes.length; at++) drawing.go(at)")
    browser.execute_script(
        "document.querySelectorAll('.event-bar').forEach((bar) => bar.dispatchEvent(new Event('click')))"
    )
    field = browser.find_element("id", "search")
    field.send_keys("<img")
    browser.execute_script("showSearch()")
    assert _count(browser, "#found [role=option]") > 0
    assert browser.execute_script("return typeof ran") == "undefined"
    assert _count(browser, "img, main script, [onerror]") == 0
    browser.execute_script("drawing.go(graphOf(opened).nodes.findIndex((node) => /<img/.test(node.parameter)))")
    assert "<img src=x" in browser.find_element("id", "details").text
    assert browser.get_log("browser") == []


def test_markup_that_were_not_escaped_would_be_refused(browser: Any, session_page: Path, tmp_path: Path) -> None:
    """The policy of the page is a second wall: a handler that is planted past the first does not run."""
    text = session_page.read_text().replace("<main", "<img src=x onerror=ran=1><script>ran=1</script><main")
    planted = tmp_path / "planted.html"
    planted.write_text(text)
    browser.get(planted.as_uri())
    assert _count(browser, "img") == 1 and browser.execute_script("return typeof ran") == "undefined"
    assert any("Content Security Policy" in each["message"] for each in browser.get_log("browser"))


def test_a_line_shows_what_it_came_from_and_became(browser: Any, session_page: Path) -> None:
    _open(browser, session_page)
    line = "stages.stages[1].lines.findIndex((each) => each.text.includes('tanh_backward'))"
    browser.execute_script(f"stages.line(1, {line}, true)")
    columns = browser.execute_script(
        "return stages.stages.map((stage, at) => [...stages.marks[at]].map((line) => stage.lines[line].text))"
    )
    assert len(columns[0]) == len(columns[1]) == 1 and columns[0][0].endswith("TanhBackward0")
    code = [text.split(" = ")[0].strip() for text in columns[2]]
    assert code[-1] == "tanh_backward" and all("saved" in name for name in code[:-1])  # and where it takes its inputs
    shown = browser.execute_script(
        "return [...document.querySelectorAll('.stage .row.linked')].map((row) => row.textContent)"
    )
    assert any("TanhBackward0" in text for text in shown) and _count(browser, ".stage .row.linked") >= 3
    assert _count(browser, "#canvas .box.linked") == 1
    _press(browser, "\ue00c")  # Escape
    assert _count(browser, ".stage .row.linked") == 0


def test_pointing_at_a_line_marks_without_choosing(browser: Any, session_page: Path) -> None:
    from selenium.webdriver import ActionChains

    _open(browser, session_page)
    browser.execute_script("stages.line(0, 8); document.documentElement.style.scrollBehavior = 'auto'")
    browser.execute_script("stages.keydown, stages.chosen = null, document.querySelector('#stages').scrollIntoView()")
    rows = browser.find_elements("css selector", ".stage:nth-child(2) .row")
    row = next(each for each in rows if "tanh_backward" in each.text or "mse_loss_backward" in each.text)
    ActionChains(browser).move_to_element(row).perform()
    assert _count(browser, ".stage:nth-child(1) .row.linked") >= 1
    assert _count(browser, ".stage:nth-child(3) .row.linked") >= 1
    assert browser.execute_script("return stages.chosen") is None


def test_everything_can_be_reached_by_keys(browser: Any, session_page: Path) -> None:
    _open(browser, session_page)
    reached = []
    for _ in range(60):
        _press(browser, "\ue004")  # Tab
        name = _active(browser, "id") or _active(browser, "ariaLabel") or _active(browser, "textContent")
        if reached and name == reached[0]:
            break
        reached.append(name)
        outlined = "return getComputedStyle(document.activeElement).outlineStyle + document.activeElement.tagName"
        assert browser.execute_script(outlined) != "noneDIV", name
    text = "\n".join(reached)
    for part in (
        "Skip to the report",
        "search",
        "theme",
        "keys",
        "Events",
        "which",
        "Tape graph, lines",
        "ATen, lines",
    ):
        assert part in text, f"{part} is not among {reached}"
    for part in (
        "Backend's code, lines",
        "Regions, in the order in which they run",
        "Place in the backward",
        "GraphRoot",
    ):
        assert part in text, f"{part} is not among {reached}"


def test_keys(browser: Any, session_page: Path) -> None:
    _open(browser, session_page)
    _press(browser, "?")
    assert browser.execute_script("return document.querySelector('dialog').open")
    _press(browser, "\ue00c")
    assert not browser.execute_script("return document.querySelector('dialog').open")
    _press(browser, "/")
    assert _active(browser, "id") == "search"
    _press(browser, *"tanh")
    _press(browser, "\ue015")  # sooner than the list would come by itself
    assert _count(browser, "#found [role=option]") >= 3
    _press(browser, "\ue007")  # the first that was found
    time.sleep(0.3)
    assert browser.execute_script("return document.querySelector('#found').hidden")
    assert "Tanh" in browser.find_element("id", "details").text
    _press(browser, "\ue00c")
    browser.execute_script("document.activeElement.blur()")
    _press(browser, "t")
    dark = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    _press(browser, "t")
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") != dark
    _press(browser, "2")
    assert _active(browser, "id") == "timeline"


def test_a_list_is_walked_by_arrows(browser: Any, session_page: Path) -> None:
    _open(browser, session_page)
    browser.execute_script("document.querySelector('.stage .list').focus()")
    _press(browser, "\ue015", "\ue015")
    chosen = browser.execute_script(
        "return document.getElementById(document.activeElement.getAttribute('aria-activedescendant')).textContent"
    )
    assert chosen == browser.execute_script("return stages.stages[0].lines[2].text")
    assert _count(browser, ".stage:first-child [aria-selected=true]") == 1
    _press(browser, "\ue014")
    assert _active(browser, "ariaLabel") == "ATen, lines"


def test_ten_thousand_nodes_are_folded_and_opened(browser: Any, large_page: Path) -> None:
    _open(browser, large_page)
    nodes = browser.execute_script("return graphOf(opened).nodes.length")
    assert nodes > 10_000 and 3 <= _count(browser, "#canvas .box") <= 50
    assert _count(browser, ".row") < 400  # of tens of thousands
    browser.execute_script("drawing.focus(drawing.boxes.findIndex((box) => box.group))")
    for _ in range(6):
        if _count(browser, "#canvas .box.leaf"):
            break
        browser.execute_script("drawing.focus(drawing.boxes.findIndex((box) => box.group))")
        _press(browser, "\ue007")
        assert 1 <= _count(browser, "#canvas .box") <= 50
    assert _count(browser, "#canvas .box.leaf") > 0
    path = len(browser.find_elements("css selector", "#path button"))
    assert path >= 1
    _press(browser, "\ue003")  # Backspace
    assert len(browser.find_elements("css selector", "#path button")) == path - 1
    browser.execute_script("drawing.go(5004)")
    assert "#5004" in browser.find_element("id", "details").text


def test_boxes_do_not_overlap(browser: Any, large_page: Path) -> None:
    _open(browser, large_page)
    overlaps = """
        const beside = (one, other) => Math.abs(one.x - other.x) >= (one.w + other.w) / 2;
        const near = (one, other) => !beside(one, other) && Math.abs(one.y - other.y) < one.h;
        return drawing.boxes.flatMap((one, at) => drawing.boxes.slice(at + 1).filter((other) => near(one, other)))
            .map((box) => box.text);
    """
    assert browser.execute_script(overlaps) == []
    browser.execute_script("drawing.go(5004)")
    assert browser.execute_script(overlaps) == []


def test_milliseconds_are_drawn_beside_eagers(browser: Any, tmp_path: Path) -> None:
    took = [data.Took(1, 1, 900.0, "structure_miss"), *(data.Took(at, 1, 0.8, "hit") for at in range(2, 20))]
    took += [data.Took(24, 5, 1.1, "bypass"), data.Took(500, 1, 0.8, "hit")]
    timeline = data.Timeline((), 500, hits_between=True, took=tuple(took), eager=1.0)
    report = data.Report("session", "a session", "now", (), timeline, (), (), verdict=data.Verdict("Yes.", "nothing."))
    _open(browser, page.write(report, tmp_path / "report.html"))
    assert _count(browser, "#times line.eager") == _count(browser, "#times path.structure_miss") == 1
    height = "return Number(document.querySelector(arguments[0]).getAttribute('height'))"
    hit, bypass = (browser.execute_script(height, f"#times rect.{name}") for name in ("hit", "bypass"))
    assert bypass / hit == pytest.approx(1.1 / 0.8)
    text = browser.find_element("id", "times").text
    assert "+475" in text and "eager, median 1.00 ms" in text and "hit, median 800 µs" in text
    assert browser.find_element("css selector", ".verdict").text == "Yes. \nNext: nothing.".replace(" \n", "\n")


@pytest.mark.parametrize("width", [1400, 700, 380])
def test_nothing_is_wider_than_the_window(browser: Any, session_page: Path, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        _open(browser, session_page)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("layers", [3, 9, 12, 30])
def test_a_chain_is_seen_whole(browser: Any, tmp_path: Path, layers: int) -> None:
    ca.reset()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(layers)))
    with ca.enable(backend="eager", cache_dir=False, tune=False) as session:
        model(torch.randn(2, 4)).sum().backward()
    _open(browser, session.report(tmp_path / "chain.html"))
    canvas = "const canvas = document.querySelector('#canvas'); return"
    assert browser.execute_script(f"{canvas} canvas.scrollHeight - canvas.clientHeight") == 0
    assert browser.execute_script(f"{canvas} canvas.scrollWidth - canvas.clientWidth") == 0


def test_what_failed_and_what_is_chosen_are_marked(browser: Any, tmp_path: Path) -> None:
    timeline = data.Timeline(
        (
            data.Event(8, 8, "bypass", "create_graph", None, 1.0, {}, 0, 0, 0.0, (data.Reason("create_graph", "why"),)),
            data.Event(9, 1, "hit", "a", None, 1.0, {}, 0, 0, 0.0, (data.Reason("failure: run", "b", failed=True),)),
        ),
        9,
        hits_between=True,
    )
    report = data.Report("session", "a session", "now", (), timeline, (), ())
    _open(browser, page.write(report, tmp_path / "report.html"))
    assert _count(browser, "circle.failed") == _count(browser, ".events .c-failed") == 1
    legend = browser.find_element("css selector", "#strip .legend").text
    assert "failure: a slower way" in legend and "number of hits" not in legend
    for bar in (0, 1):
        browser.execute_script(f"document.querySelectorAll('.event-bar')[{bar}].dispatchEvent(new Event('click'))")
        widths = browser.execute_script(
            "return ['.chosen-mark', '.is-chosen .cost'].map((each) => document.querySelector(each).getBBox().width)"
        )
        assert widths[0] == widths[1] + 4


def test_a_notebook_shows_columns_and_words(browser: Any, tmp_path: Path) -> None:
    """Under the rules of JupyterLab 4 for cells, and of nbconvert 7 for ``pre``."""
    rules = """
        :not(.jp-RenderedMarkdown).jp-RenderedHTMLCommon td { text-align: right; }
        .jp-OutputArea-output pre { word-break: break-all; font-family: inherit; }
    """
    view = ca.inspect(nn.Linear(4, 3)(torch.ones(2, 4)).sum())
    shown = view._repr_html_() + view.memory()._repr_html_()
    output = f'<div class="jp-RenderedHTMLCommon jp-OutputArea-output">{shown}</div>'
    (tmp_path / "cell.html").write_text(f"<!doctype html><meta charset=utf-8><style>{rules}</style><body>{output}")
    browser.get((tmp_path / "cell.html").as_uri())
    style = "const found = getComputedStyle(document.querySelector(arguments[0])); return found[arguments[1]]"
    assert browser.execute_script(style, "td", "textAlign") == "left"
    assert browser.execute_script(style, "pre", "wordBreak") == "normal"
    assert "monospace" in browser.execute_script(style, "pre", "fontFamily")
