"""The page of an audit, in a real browser: what it shows, where it leads, and that nothing in it acts or leaves.

Outside CI the tests are skipped where there is no Chromium; in CI that is a failure.
"""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from audited import HOSTILE, KEYS, PREFIX, RUN, URL, made, reading
from synthetic_audit import data_of, rollouts

from s3capture.audit import SEVERITY, Kind, RunAudit, Severity
from s3capture.audit.page import PageData, collect, render
from s3capture.audit.page.bins import histogram, timeline
from s3capture.spill import Spill, Target

FAILING = frozenset(kind for kind in Kind if SEVERITY[kind] is Severity.FAIL)
CHROMIUM, DRIVER = shutil.which("chromium") or "", shutil.which("chromedriver") or ""
SECRET_TOKEN = 987_654_321
MANY = 10_000


# -- pages and browsers ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the run with one of everything."""
    tmp = tmp_path_factory.mktemp("small")
    store = made(tmp, bad=True)
    with reading(store) as reader:
        run = RunAudit(reader, KEYS, spill=Spill(tmp / "spill"), target=Target(None, "bucket", PREFIX, RUN))
        page = PageData()
        for one in run.rollouts():
            page.take(one)
    head = {"run": RUN, "url": URL, "made_at": 1.79e9, "version": "0", "selection": ""}
    data = page.dump(head=head, totals=run.totals, run=run.findings, failing=FAILING)
    text = render(title=f"Run {HOSTILE}", verdict="Something & more < all.", passed=False, data=data)
    path = tmp / "page.html"
    path.write_text(text, "utf-8")
    return path


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of ten thousand made-up rollouts."""
    data, totals = data_of(rollouts(MANY, 4), FAILING)
    path = tmp_path_factory.mktemp("large") / "page.html"
    fails = totals.failing(FAILING)
    path.write_text(render(title="Run large", verdict=f"{fails} findings fail.", passed=False, data=data), "utf-8")
    return path


class Browser:
    """One headless Chromium, as a person uses it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path, place: str = "", *, width: int = 1280, dark: bool = False) -> None:
        """Load a page afresh, at an address within it."""
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get("about:blank")
        self.logs()
        self.driver.get(f"{page.as_uri()}{place}")

    def js(self, script: str, *arguments: Any) -> Any:
        """What a script says."""
        return self.driver.execute_script(script, *arguments)

    def all(self, selector: str) -> list[Any]:
        """The elements that a selector finds."""
        return list(self.driver.find_elements("css selector", selector))

    def one(self, selector: str) -> Any:
        """The element that a selector finds."""
        return self.driver.find_element("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        """The texts of those elements, read at once."""
        found = self.js("return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText.trim())", selector)
        return list(found)

    def until(self, condition: str) -> None:
        """Wait until a script says yes: the browser fires its events when it comes to it."""
        from selenium.webdriver.support.ui import WebDriverWait  # noqa: PLC0415

        WebDriverWait(self.driver, 20).until(lambda _: self.js(f"return {condition}"))

    def at(self, name: str) -> None:
        """Wait until the part with this id has the focus, as it has once one has come to it."""
        self.until(f"document.activeElement.id === {name!r}")

    def choose(self, selector: str, value: str) -> None:
        """Choose in a select box."""
        from selenium.webdriver.support.ui import Select  # noqa: PLC0415

        Select(self.one(selector)).select_by_value(value)

    def logs(self) -> tuple[list[str], list[str]]:
        """What was written to the console, and the addresses that were asked for, since last time."""
        console = [row["message"] for row in self.driver.get_log("browser")]
        events = [json.loads(row["message"])["message"] for row in self.driver.get_log("performance")]
        asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return console, asked


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A Chromium of this module's own."""
    try:
        from selenium import webdriver  # noqa: PLC0415
        from selenium.webdriver.chrome.options import Options  # noqa: PLC0415
        from selenium.webdriver.chrome.service import Service  # noqa: PLC0415

        missing = "" if CHROMIUM and DRIVER else "no chromium or no chromedriver on the PATH"
    except ImportError:
        missing = "selenium is not installed"
    if missing and os.environ.get("CI") == "true":
        pytest.fail(f"the page must be tested in a browser: {missing}")
    if missing:
        pytest.skip(f"the page is not tested: {missing}")
    options = Options()
    options.binary_location = CHROMIUM
    profile = tmp_path_factory.mktemp("profile")
    for flag in (
        *("headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync"),
        *("disable-background-networking", "disable-component-update", f"user-data-dir={profile}"),
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


@contextmanager
def listening() -> Iterator[tuple[str, list[str]]]:
    """A server on loopback, and the paths that it was asked for."""
    asked: list[str] = []

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# -- nothing acts, nothing leaves -----------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["", "#rollout=conflict&call=1", "#rollout=marked", "#rollout=nobody"])
def test_a_page_asks_for_nothing_and_complains_of_nothing(browser: Browser, small: Path, place: str) -> None:
    """Nothing but the file is requested, and nothing is written to the console, wherever one is in the page."""
    browser.open(small, place)
    console, asked = browser.logs()
    assert console == []
    assert [url for url in asked if not url.startswith(small.as_uri()) and url != "about:blank"] == []
    assert browser.js("return performance.getEntriesByType('resource').length") == 0


def test_what_a_bucket_holds_is_text(browser: Browser, small: Path) -> None:
    """Ids and reasons that look like markup are shown as they are, in title, findings, table and tree."""
    browser.open(small, "#rollout=open")
    assert browser.js("return document.title").endswith(f"Run {HOSTILE}")
    assert HOSTILE in browser.one("main").text
    assert browser.js("return document.scripts.length") == 2
    browser.open(small)
    assert browser.one("h1").text == f"Run {HOSTILE}"
    browser.one("#search").send_keys("document.title='owned'")
    assert set(browser.texts("#table tbody td:first-child")) == {"open", "marked"}


def test_the_policy_lets_no_other_script_run_and_nothing_out(browser: Browser, small: Path) -> None:
    """A script or handler that got into the page would not run, and a request would not be sent."""
    browser.open(small)
    with listening() as (address, asked):
        said = browser.driver.execute_async_script(
            """
            const [address, done] = arguments;
            for (const make of [
              () => { const e = document.createElement('script'); e.textContent = 'window.owned = 1'; return e; },
              () => { const e = document.createElement('script'); e.src = address + '/s.js'; return e; },
              () => { const e = document.createElement('img'); e.src = address + '/i.png'; return e; },
              () => { const e = document.createElement('iframe'); e.src = address + '/f.html'; return e; },
            ]) document.body.append(make());
            document.body.setAttribute('onclick', 'window.owned = 2');
            document.body.click();
            fetch(address + '/x').then(() => done('sent'), () => done(String(window.owned)));
            """,
            address,
        )
        assert said == "undefined"
        assert asked == []


def test_the_data_can_end_no_element() -> None:
    """Whatever the data holds, the page has its own two scripts and not one bracket from the data."""
    text = render(title="t", verdict="v", passed=True, data=json.dumps({"id": "</script><!--<script>&amp;"}))
    data = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert json.loads(data[1]) == {"id": "</script><!--<script>&amp;"}
    assert not set("<>&") & set(data[1])
    assert text.count("<script") == text.count("</script>") == 2


def test_the_scripts_never_make_markup_of_text() -> None:
    """No script of the page uses what turns text into elements or code."""
    folder = Path(collect.__file__).parent
    for path in folder.glob("*.js"):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|https?://(?!www\.w3)", path.read_text()), path  # fmt: skip # noqa: E501


def test_no_token_array_is_in_the_page(tmp_path: Path) -> None:
    """Of payloads with thousands of tokens the page has counts, and of a conflict two single values."""
    import asyncio  # noqa: PLC0415

    from audited import Maker, conflicting  # noqa: PLC0415
    from captures import entry  # noqa: PLC0415

    from s3capture.store.memory import MemoryStore  # noqa: PLC0415

    store = MemoryStore()

    async def fill() -> None:
        make = Maker(store, tmp_path)
        ids = [SECRET_TOKEN] * 40
        await make.sink.put(entry("c1", "r", prompt_token_ids=ids))
        with conflicting():
            await make.sink.put(entry("c1", "r", prompt_token_ids=[*ids[:-1], 5]))
        await make.close()

    asyncio.run(fill())
    page = PageData()
    with reading(store) as reader:
        run = RunAudit(reader, KEYS)
        for one in run.rollouts():
            page.take(one)
    dumped = page.dump(head={}, totals=run.totals, run=(), failing=FAILING)
    assert dumped.count(str(SECRET_TOKEN)) == 1
    assert "40 values; [39] is 987654321" in dumped


# -- ten rollouts ---------------------------------------------------------------------------------------------


def test_the_page_opens_with_verdict_and_totals(browser: Browser, small: Path) -> None:
    """Title, verdict and totals come first, and each kind says in words whether it fails."""
    browser.open(small)
    assert "Something & more < all." in browser.one("#verdict").text
    assert browser.texts(".tile b")[:2] == ["23", "48"]
    verdicts = dict(zip(browser.texts(".kinds tbody td:nth-child(1)"), browser.texts(".kinds tbody td:nth-child(2)"), strict=True))  # fmt: skip # noqa: E501
    assert verdicts["✕conflict"] == "fails"
    assert verdicts["·undelivered"] == "note"
    titles = ["The run over time", "What is kept, and why, over time", "From begin to record", "Size of a call"]
    assert [title for title in browser.texts("h2") if title in titles] == titles


def test_charts_say_their_numbers_in_text(browser: Browser, small: Path) -> None:
    """A timeline opens as a table whose numbers are those of the lanes."""
    browser.open(small)
    browser.one("#evidence summary").click()
    browser.until("document.querySelector('#evidence details table') !== null")
    lanes = browser.texts("#evidence .lane")
    totals = dict(zip(lanes[::2], lanes[1::2], strict=True))
    head = browser.texts("#evidence details th")[1:]
    rows = browser.js(
        "return [...document.querySelectorAll('#evidence details tbody tr')]"
        ".map((row) => [...row.cells].slice(1).map((cell) => Number(cell.innerText)))"
    )
    assert {name: str(sum(column)) for name, column in zip(head, zip(*rows, strict=True), strict=True)} == totals


def test_the_table_is_searched_filtered_and_sorted(browser: Browser, small: Path) -> None:
    """Text, state and kind choose rows together; a header sorts, and says so."""
    browser.open(small)
    names = "#table tbody td:first-child"
    everything = browser.texts(names)
    assert len(everything) == 24
    browser.choose("#kind", "broken-chain")
    assert set(browser.texts(names)) == {"damaged", "broken-chain"}
    browser.one("#search").send_keys("misplaced")
    assert browser.texts(names) == []
    browser.driver.find_element("xpath", "//button[.='Clear']").click()
    browser.choose("#state", "retired")
    assert set(browser.texts(names)) == {"dropped-1", "kept-1", "retired-1", "sealed", "residue"}
    browser.choose("#state", "")
    browser.one("#table th:first-child button").click()
    assert browser.texts(names) == sorted(everything, key=str.lower)
    assert browser.one("#table th:first-child").get_attribute("aria-sort") == "ascending"
    browser.one("#table th:first-child button").click()
    assert browser.texts(names) == sorted(everything, key=str.lower, reverse=True)
    browser.one("#table th:nth-child(2) button").click()
    states = [text.split("\n")[0] for text in browser.texts("#table tbody td:nth-child(2)")]
    assert states == sorted(states)
    browser.one("#table th:nth-child(3) button").click()
    calls = list(map(int, browser.texts("#table tbody td:nth-child(3)")))
    assert calls == sorted(calls, reverse=True)
    assert len(set(calls)) > 2


def test_a_kind_leads_to_its_rollouts(browser: Browser, small: Path) -> None:
    """The kind in the totals filters the table."""
    browser.open(small)
    browser.driver.find_element("xpath", "//table[@class='kinds']//button[.='wrong-tokens']").click()
    assert browser.texts("#table tbody td:first-child") == ["wrong-tokens"]


def test_one_comes_from_run_to_rollout_to_call_and_back(browser: Browser, small: Path) -> None:
    """A row leads to the rollout with its tree, a node to the call, and the way back is there at each step."""
    browser.open(small)
    browser.choose("#kind", "conflict")
    browser.driver.find_element("link text", "conflict").click()
    browser.at("rollout-name")
    assert browser.js("return location.hash") == "#rollout=conflict"
    assert browser.texts("h2")[0] == "conflict"
    assert len(browser.all(".tree a")) == 3
    assert len(browser.all(".tree .edge")) == 2
    assert len(browser.all(".tree a.bad")) == 1
    browser.one(".tree a[data-call='0']").click()
    browser.at("call-name")
    assert browser.texts("#call-name") == ["Call #1"]
    assert browser.texts(".crumbs li") == [f"Run {RUN}", "Rollout conflict", "Call #1"]
    browser.driver.find_element("link text", f"Run {RUN}").click()
    browser.until("document.querySelector('#table') !== null")
    assert browser.texts("#table tbody td:first-child") == ["conflict"]
    browser.driver.back()
    browser.at("call-name")
    assert browser.texts("#call-name") == ["Call #1"]


def test_conflicting_fields_stand_side_by_side(browser: Browser, small: Path) -> None:
    """The call of a conflict shows field, stored and refused value in one row, and both digests."""
    browser.open(small, "#rollout=conflict&call=1")
    cells = (
        "return [...document.querySelectorAll('.sides tbody tr')].map((row) => [...row.cells].map((c) => c.innerText))"
    )
    rows = {path: (stored, refused) for path, stored, refused in browser.js(cells)}
    assert rows["generation_token_ids"] == ("2 values; [1] is 5", "2 values; [1] is 6")
    assert rows["model"] == ('""', '"other"')
    digests = [re.findall("[0-9a-f]{64}", text) for text in browser.texts(".sides thead th")]
    assert [len(found) for found in digests] == [0, 1, 1]
    assert digests[1] != digests[2]


def test_the_page_is_used_with_the_keyboard_alone(browser: Browser, small: Path) -> None:
    """A row is reached with the tabulator from the search box and opened with Enter, as is a node of the tree."""
    from selenium.webdriver.common.keys import Keys  # noqa: PLC0415

    browser.open(small)
    browser.one("#search").send_keys("broken-chain")
    for _ in range(40):
        browser.driver.switch_to.active_element.send_keys(Keys.TAB)
        if browser.js("return document.activeElement.matches('#table tbody a')"):
            break
    browser.driver.switch_to.active_element.send_keys(Keys.ENTER)
    browser.at("rollout-name")
    for _ in range(40):
        browser.driver.switch_to.active_element.send_keys(Keys.TAB)
        if browser.js("return document.activeElement.matches('.tree a')"):
            break
    browser.driver.switch_to.active_element.send_keys(Keys.ENTER)
    browser.at("call-name")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_the_screen_in_both_themes(browser: Browser, small: Path, width: int, dark: bool) -> None:
    """No part is wider than the screen, the theme is the system's, and its button turns it."""
    for place in ("", "#rollout=conflict&call=1"):
        browser.open(small, place, width=width, dark=dark)
        assert browser.js("return document.documentElement.scrollWidth") <= width
        light = "return getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)[0] > 128"
        assert browser.js(light) is not dark
        browser.one("#theme-button").click()
        assert browser.js(light) is dark


# -- ten thousand ---------------------------------------------------------------------------------------------


def test_ten_thousand_rollouts_are_searched_and_looked_into(browser: Browser, large: Path) -> None:
    """The table of a large run shows a page at a time, and search, filter, paging and tree work as in a small one."""
    browser.open(large)
    console, _ = browser.logs()
    assert console == []
    names = "#table tbody td:first-child"
    assert browser.texts(".tile b")[0] == "10,000"
    assert len(browser.texts(names)) == 50
    assert browser.texts("#matches") == ["1\N{EN DASH}50 of 10,000"]
    browser.driver.find_element("xpath", "//button[.='Last']").click()
    assert browser.texts("#matches") == ["9,951\N{EN DASH}10,000 of 10,000"]
    browser.choose("#kind", "conflict")
    assert 0 < len(browser.texts(names)) <= 50
    browser.driver.find_element("xpath", "//button[.='Clear']").click()
    browser.one("#search").send_keys("task-1249-7")
    assert browser.texts(names) == ["task-1249-7"]
    browser.driver.find_element("link text", "task-1249-7").click()
    browser.at("rollout-name")
    drawn, told = len(browser.all(".tree a")), browser.texts(".facts dd")
    assert drawn >= 1
    assert any("call" in text for text in told)
    assert browser.js("return performance.getEntriesByType('resource').length") == 0


# -- what the page is made of ---------------------------------------------------------------------------------


def test_what_a_cap_leaves_out_is_said_and_still_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts, calls and findings beyond the caps are in the totals and not in the lists, and the page says so."""
    monkeypatch.setattr(collect, "MOST_ROLLOUTS", 30)
    monkeypatch.setattr(collect, "MOST_CALLS", 100)
    monkeypatch.setattr(collect, "MOST_FINDINGS", 2)
    dumped, totals = data_of(rollouts(60, 10), FAILING)
    data = json.loads(dumped)
    assert totals.rollouts == data["totals"]["rollouts"] == 60
    assert len(data["rollouts"]) == 30
    assert sum(len(row.get("tree", {"id": []})["id"]) for row in data["rollouts"]) <= 200
    assert sum(len(row.get("findings", [])) for row in data["rollouts"]) <= 2
    assert [re.sub("[0-9,]+", "n", text).split(" ")[1] for text in data["left"]] == ["rollouts", "calls", "findings"]


def test_a_timeline_counts_everything_once_in_steps_of_the_clock() -> None:
    """Bins add up to the times, start at a multiple of the step, and are no more than a screen is wide."""
    for span in (0.0, 59.0, 5_000.0, 86_400.0 * 30, 86_400.0 * 4000):
        times = [1.79e9 + span * part / 100 for part in range(101)]
        made_of = timeline({"one": times, "none": []})
        assert sum(made_of["lanes"][0]["counts"]) == 101
        assert made_of["start"] % made_of["step"] == 0
        assert len(made_of["lanes"][0]["counts"]) == len(made_of["lanes"][1]["counts"]) <= 74
    assert timeline({"one": []})["lanes"] == [{"name": "one", "total": 0, "counts": []}]


def test_a_histogram_counts_everything_once() -> None:
    """Bins add up to the values, whatever their range; edges are 1, 2 and 5 times powers of ten."""
    from array import array  # noqa: PLC0415

    for values in ([0.0], [3.0] * 7, [0.001, 1e9], [10.0**n for n in range(-3, 9)]):
        made_of = histogram(array("d", values), 0.01)
        assert sum(made_of["counts"]) == made_of["n"] == len(values)
        assert len(made_of["counts"]) == len(made_of["edges"]) + 1
        assert {f"{edge:e}"[0] for edge in made_of["edges"]} <= {"1", "2", "5"}
        assert made_of["max"] == max(values)
