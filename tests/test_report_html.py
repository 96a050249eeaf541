"""The HTML report: what it says of synthetic results, that it asks nobody for anything, and how it behaves in a real browser."""

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlens.report.html import html_report
from fedlens.report.markdown import shown
from fedlens.study.results import CellResult, Gathered, RunResult, StudyResult, TableResult, gather

HOSTILE = "</script><img src=x onerror=alert(1)>"
CHARTS = 5 + 1 + 1 + 1 + 1 + 1 + 2 + 1  # of the table, partitions, masks, sweep, interpolation, ξ, forgetting, search


# --- folders as a study leaves them


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def write_run(folder: Path, test: float, *, central: bool = False, sparse: bool = False) -> None:
    lines: list[dict[str, Any]] = []
    for i in range(1, 5):
        line: dict[str, Any] = {"step": i, "val_accuracy": test - 0.1 / i}
        drift = {"drift_ratio": 0.5, "cosine": 0.1 / i, "sign_conflict": 0.2}
        lines.append(line | ({"epoch": i} if central else {"round": i, "bytes_up": i * 10**6, "clients": 4, **drift}))
    write(folder / "summary.json", {"test_accuracy": test, "val_accuracy": test - 0.025} | ({} if central else {"bytes_up": 4 * 10**6}))
    if sparse:
        kinds = {"query": {"active": 5, "eligible": 10, "share": 0.5}, "key": {"active": 5, "eligible": 10, "share": 0.5}}
        mask = {
            "strategy": "random",
            "density": 0.5,
            "active": 10,
            "composition": kinds,
            "by_layer": [["embed", 0, 5], ["block 0", 10, 15]],
        }
        write(folder / "summary.json", json.loads((folder / "summary.json").read_text()) | {"mask": mask})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if not central:
        write(folder / "partition.json", {"label_counts": [[5, 0, 1], [0, 4, 1]], "tv_distance": 0.5})


def analyses() -> dict[str, Any]:
    def point(alpha: float) -> dict[str, float]:
        return {"alpha": alpha, "val_accuracy": 0.8 + alpha / 100, "test_accuracy": 0.7 + alpha / 100}

    line = {"points": [point(a) for a in (0.0, 0.5, 1.0, 1.5)], "start": point(0.0), "end": point(1.0), "chosen": point(1.5), "norm": 1.0}
    pair = {"a": "run-1-0", "b": "run-2-0", "cosine": 0.25, "sign_conflict": 0.1, "drift_ratio": 0.8}
    straight = {"run-1-0": [{"alpha": 1.0, "gap": 0.1, "agreement": 0.9}]}
    xi = {"alphas": [-1.0, 0.0, 1.0], "xi": [[0.1, 0.2, 0.3], [0.0, 0.0, 0.1], [0.1, 0.2, 0.4]], "notes": ["run-2-0 starts elsewhere"]}
    before = {"alpha": 0.0, "val_target": 0.9, "val_control": 0.8, "test_target": 0.91, "test_control": 0.81}
    after = {"alpha": 2.0, "val_target": 0.1, "val_control": 0.78, "test_target": 0.12, "test_control": 0.79}
    forgotten = {
        "client": 3,
        "classes": ["Boot", HOSTILE],
        "points": [before, after],
        "before": before,
        "after": after,
        "notes": ["a note"],
    }
    return {
        "sweep": line,
        "interpolate": line,
        "interference": {"names": ["run-1-0", "run-2-0"], "pairs": [pair], "linearity": straight, **xi},
        "masks": {"names": ["run-2-0", "run-2-1"], "iou": 0.5, "chance": 0.05},
        "forget": {"clients": [forgotten]},
    }


def write_study(folder: Path) -> Path:
    """Three cells of three seeds; one run is missing, one has failed."""
    tests = {"central": [0.90, 0.91, 0.92], HOSTILE: [0.80, 0.84, 0.87], "sparse": [0.82, 0.84, None]}
    cells = []
    for i, (label, values) in enumerate(tests.items()):
        cells.append({"label": label, "case": label, "values": {}, "runs": {str(s): f"run-{i}-{s}" for s in range(3)}})
        for seed, value in enumerate(values):
            if value is not None:
                write_run(folder / "runs" / f"run-{i}-{seed}", value, central=i == 0, sparse=i == 2)
    listed = []
    for kind, content in analyses().items():
        write(folder / "analyses" / f"{kind}.json", content)
        listed.append({"kind": kind, "title": f"The {kind}", "labels": ["sparse"], "seed": 0, "file": f"analyses/{kind}.json"})
    table = {"name": "main", "question": "", "target": 0.8, "cells": cells}
    failures = {"run-2-2": f"no file /home/someone/data/train.bin ({folder}/runs/run-2-2/x), {HOSTILE}"}
    study = {"name": "study", "place": "here", "question": f"Why? {HOSTILE}", "tables": [table], "analyses": listed, "failures": failures}
    write(folder / "study.json", study)
    return folder


def write_search(folder: Path) -> Path:
    values = [(0.001, "ties", 0.5), (0.1, "mean", 0.8), (1.0, "mean", None)]
    trials = [
        {"number": i, "params": {"optim.lr": lr, "server.merge": merge}, "value": v, "state": "complete" if v else "failed"}
        for i, (lr, merge, v) in enumerate(values)
    ]
    shared = {
        "name": "lr",
        "question": "Which?",
        "experiment": ["experiment=fedavg_iid"],
        "keys": ["optim.lr", "server.merge"],
        "trials": trials,
    }
    write(folder / "search.json", {**shared, "default": {"params": {"optim.lr": 0.03, "server.merge": "mean"}, "value": 0.7}, "best": 1})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report")
    write_study(root / "study")
    write_search(root / "search")
    return root


@pytest.fixture(scope="module")
def text(folder: Path) -> str:
    return html_report(gather([folder]))


def rows_of(text: str, caption: str) -> list[list[str]]:
    """The cells of the table whose caption holds this."""
    part = text[text.index(caption) :]
    body = part[part.index("<tbody>") : part.index("</tbody>")]
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", body)]


# --- what it says


def test_results_have_mean_spread_interval_and_n_and_say_which_seeds_are_missing(text: str) -> None:
    central, plain, sparse = rows_of(text, "main: results")
    assert central[1:3] == ["3 of 3", "91.00 ± 1.00<small>[88.52, 93.48], n = 3</small>"]
    assert central[4:] == ["–"] * 4  # a centralised run sends nothing
    assert sparse[1] == "2 of 3<small>seed 2 missing</small>"
    assert plain[4] == "4.00<small>n = 3</small>"  # all alike: no spread, and no interval
    assert plain[5:] == ["2.5 ± 0.7<small>[-3.9, 8.9], n = 2</small>", "2.50 ± 0.71<small>[-3.85, 8.85], n = 2</small>", "2 of 3"]
    assert "Target: a validation accuracy of 80.00 %, as planned" in text


def test_every_difference_comes_with_its_n_and_both_p_values(text: str) -> None:
    plain, sparse = rows_of(text, "Paired differences of test accuracy to “central”")
    assert plain[1:4] == ["-7.33", "[-13.58, -1.08]", "3"]
    assert sparse[3] == "2"
    for row in (plain, sparse):
        assert 0 < float(row[4]) <= float(row[5]) <= 1


def test_cells_that_share_no_seed_are_named_and_not_compared(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 0.5)
    write_run(tmp_path / "b", 0.6)
    cells = [CellResult(name, name, {}, gathered_runs(tmp_path / name, seed), 1) for seed, name in enumerate("ab")]
    text = html_report(Gathered([StudyResult("s", "here", "", [TableResult("t", "", cells)])]))
    assert rows_of(text, "Paired differences") == [["b", "–", "–", "0<small>shares no seed</small>", "–", "–"]]


def gathered_runs(path: Path, seed: int) -> dict[int, RunResult]:
    return {seed: RunResult(path, seed)}


def test_analyses_and_searches_are_told(text: str) -> None:
    assert rows_of(text, "α chosen on validation")[0][1:6] == ["1.5", "81.50", "70.00", "71.00", "71.50"]
    assert rows_of(text, "Geometry of pairs")[0][1:] == ["0.250", "0.100", "0.800"]
    assert rows_of(text, "How far two masks overlap")[0] == ["The masks, seed 0", "0.500", "0.050"]
    assert "sparse (seed 0) starts elsewhere" in text  # runs are called by their cells
    assert rows_of(text, "test accuracy on the classes that a client holds")[0][2:] == ["2", "91.00", "12.00", "81.00", "79.00", "1"]
    assert "Best is trial 1 with a validation accuracy of 80.00 %" in text
    assert "+10.00 points (n = 1 run each)" in text
    assert [row[-1] for row in rows_of(text, "Trials:")] == ["50.00", "80.00", "–", "70.00"]


def test_a_search_whose_best_is_the_default_says_so(tmp_path: Path) -> None:
    trials = [{"number": 0, "params": {"lr": 0.1}, "value": 0.8, "state": "complete"}, {"number": 1, "params": {"lr": 1.0}, "value": None}]
    trials[1] |= {"state": "failed", "why": "diverged"}
    content = {"name": "s", "question": "", "experiment": [], "keys": ["lr"], "trials": trials, "best": 0}
    write(tmp_path / "search.json", {**content, "default": {"params": {"lr": 0.1}, "value": 0.8}})
    text = html_report(gather([tmp_path]))
    assert "lr = 0.1. That is the default." in text
    first, second = rows_of(text, "Trials:")
    assert first[0] == "trial 0<small>best, default</small>"
    assert second[1] == "failed<small>diverged</small>"


def test_what_has_no_data_is_left_out(tmp_path: Path, text: str) -> None:
    sections = ("Partitions", "Masks", "Task vectors scaled", "Between two models", "Interference", "Forgetting", "Failures", "Search ")
    headings = re.findall(r"<h[23] [^>]*>(.*?)</h[23]>", text)
    assert all(any(h.startswith(s) for h in headings) for s in sections)
    write_run(tmp_path / "only", 0.9, central=True)
    (tmp_path / "only" / "config.yaml").write_text("experiment: centralized\nseed: 0\n")
    small = html_report(gather([tmp_path]))
    assert re.findall(r"<h[23] [^>]*>(.*?)</h[23]>", small) == ["Study runs", "runs"]
    assert re.findall(r"<h4>(.*?)</h4>", small) == ["Test accuracy: runs", "Validation accuracy by epoch, centralised: runs"]
    assert "Paired differences" not in small


# --- what it must not do


def test_the_same_results_give_the_same_bytes_wherever_they_lie(folder: Path, text: str, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    write_study(copy / "study")  # a failure's message names the folder
    assert html_report(gather([copy])) == text
    assert str(folder) not in text
    assert "/home/" not in text


def test_hostile_text_stays_text_and_no_address_is_in_the_file(text: str) -> None:
    assert "<img" not in text
    assert text.count("</script>") == text.count("<script") == 2
    assert not re.search(r"https?://|@import|\bsrc=(?!x)|url\((?!#)", text)
    assert "default-src 'none'" in text
    assert "innerHTML" not in text


@given(st.text(st.characters(exclude_categories=("Cs", "Cc", "Zs", "Zl", "Zp"), exclude_characters="/\\"), min_size=1, max_size=20))
def test_any_label_reads_back_as_it_was(label: str) -> None:
    class Reader(HTMLParser):
        found = ""

        def handle_data(self, data: str) -> None:
            self.found += data

    reader = Reader()
    study = StudyResult("s", "here", "", [TableResult("t", "", [CellResult(label, "", {}, {}, 1)])])
    page = html_report(Gathered([study]))
    reader.feed(page[page.index("<tbody>") : page.index("</tbody>")])
    assert reader.found.startswith(shown(label))


# --- in Chromium


class Browser:
    """Headless Chromium, driven by the WebDriver protocol."""

    def __init__(self, driver: "subprocess.Popen[str]", profile: Path) -> None:
        assert driver.stdout is not None
        started = next(line for line in driver.stdout if "successfully on port" in line)
        port = re.findall(r"port (\d+)", started)[0]
        self.base = f"http://127.0.0.1:{port}/session"
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        quiet = "--no-first-run --disable-quic --disable-background-networking --disable-component-update --disable-sync"
        flags = [*f"--headless --no-sandbox --disable-gpu --window-size=1100,900 {quiet}".split(), f"--user-data-dir={profile}"]
        options = {"binary": shutil.which("chromium"), "args": flags}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        self.base += "/" + self("", capabilities={"alwaysMatch": wanted})["sessionId"]

    def __call__(self, path: str, method: str = "POST", **body: Any) -> Any:
        content = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(self.base + path, content, {"Content-Type": "application/json"}, method=method)
        with self.opener.open(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def open(self, page: Path) -> None:
        self.log("performance")
        self("/url", url=page.as_uri())

    def js(self, script: str) -> Any:
        return self("/execute/sync", script=f"return {script}", args=[])

    def click(self, selector: str) -> None:
        """With the mouse, where a reader would."""
        element = self("/element", using="css selector", value=selector)
        self(f"/element/{next(iter(element.values()))}/click")

    def keys(self, text: str) -> None:
        """To what has the focus."""
        actions = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        self("/actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self("/goog/cdp/execute", cmd=command, params=parameters)

    def log(self, kind: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self("/se/log", type=kind)
        return found


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("needs chromium and chromedriver")
    with subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        try:
            started = Browser(driver, tmp_path_factory.mktemp("profile"))
            yield started
            started("", method="DELETE")
        finally:
            driver.terminate()


@pytest.fixture
def page(browser: Browser, text: str, tmp_path: Path) -> Browser:
    (tmp_path / "index.html").write_text(text, encoding="utf-8")
    browser.open(tmp_path / "index.html")
    return browser


ARROW_RIGHT, ARROW_DOWN, ENTER = "\ue014", "\ue015", "\ue007"


def test_all_charts_are_drawn_without_complaint_and_no_request_leaves_the_file(page: Browser) -> None:
    assert page.log("browser") == []
    assert page.js("[...document.querySelectorAll('figure.chart > .plot > svg')].filter(s => s.childElementCount > 4).length") == CHARTS
    assert page.js("document.querySelectorAll('img').length") == 0
    assert not page.js("[...document.querySelectorAll('svg *')].some(e => /NaN|undefined|Infinity/.test(e.outerHTML))")
    events = [json.loads(entry["message"])["message"] for entry in page.log("performance")]
    here = page.js("location.href")
    sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
    asked = [
        request["request"]["url"] for request in sent if request["documentURL"] == here
    ]  # a starting browser asks for pages of its own
    assert [url for url in asked if not url.startswith("data:")] == [here]


def test_a_head_sorts_its_table_by_click_and_by_key_with_missing_values_last(page: Browser) -> None:
    column = "[...document.querySelector('table').tBodies[0].rows].map(r => r.cells[0].textContent)"
    order = "[...document.querySelector('table').tHead.rows[0].cells].map(c => c.ariaSort)"
    page.click("table thead th:nth-child(3) button")
    assert page.js(column) == ["sparse", HOSTILE, "central"]
    assert page.js(order)[2] == "ascending"
    page.keys(ENTER)  # the button has the focus
    assert page.js(column) == ["central", HOSTILE, "sparse"]
    assert page.js(order)[2] == "descending"
    page.click("table thead th:nth-child(5) button")
    assert page.js(column)[-1] == "central"
    assert page.js(order) == ["none", "none", "none", "none", "ascending", "none", "none", "none"]


def test_a_legend_hides_and_shows_its_series(page: Browser) -> None:
    drawn = "document.querySelectorAll('#chart-2 .plot .line').length"
    assert page.js(drawn) == 2
    page.click("#chart-2 .legend button")
    assert page.js(drawn) == 1
    assert page.js("document.querySelector('#chart-2 .legend button').ariaPressed") == "false"
    page.keys(ENTER)
    assert page.js(drawn) == 2


def test_values_are_reached_by_mouse_and_by_keyboard(page: Browser) -> None:
    said = "document.querySelector('#chart-2 .tip').textContent"
    page.js("document.querySelector('#chart-2 svg').focus()")
    page.keys(ARROW_RIGHT)
    first = page.js(said)
    page.keys(ARROW_RIGHT)
    assert re.fullmatch(rf"{re.escape(HOSTILE)}\nround \d: \d\d\.\d\d %, 95 % CI \[.*\], n = 3", first)
    assert page.js(said) != first
    page.keys(ARROW_DOWN)
    assert page.js(said).startswith("sparse\n")
    page.click("#chart-1 .plot .mark")
    assert page.js("document.querySelector('#chart-1 .tip').textContent").startswith("central\n91.00 %, 95 % CI [88.52 %, 93.48 %], n = 3")


def test_another_view_can_be_chosen(page: Browser) -> None:
    title = "[...document.querySelectorAll('#chart-5 svg text.strong')].map(t => t.textContent)"
    assert "drift ratio" in page.js(title)
    page.click("#chart-5 option:nth-child(3)")
    assert "sign conflict" in page.js(title)
    page.click("#chart-5 input[type=checkbox]")
    assert page.js("document.querySelectorAll('#chart-5 .band').length") == 0


def test_dark_mode_narrow_screens_and_print_are_served(page: Browser) -> None:
    def colours() -> tuple[str, str]:
        return page.js("getComputedStyle(document.body).backgroundColor"), page.js("getComputedStyle(document.querySelector('.mark')).fill")

    light = colours()
    page.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    dark = colours()
    page.devtools("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    printed = colours()
    page.devtools("Emulation.setEmulatedMedia", media="", features=[])
    assert light[0] == printed[0] == "rgb(255, 255, 255)"
    assert light[1] == printed[1] != dark[1]
    assert sum(map(int, re.findall(r"\d+", dark[0]))) < 100
    page.devtools("Emulation.setDeviceMetricsOverride", width=340, height=800, deviceScaleFactor=1, mobile=False)
    assert page.js("document.documentElement.scrollWidth") <= 340
    page.devtools("Emulation.clearDeviceMetricsOverride")


def test_of_two_hundred_cells_eight_are_drawn_and_all_can_be_chosen(browser: Browser, tmp_path: Path) -> None:
    for i in range(200):
        write_run(tmp_path / str(i), 0.5 + i / 1000)
    cells = [CellResult(f"cell {i}", "", {}, gathered_runs(tmp_path / str(i), 0), 1) for i in range(200)]
    (tmp_path / "many.html").write_text(
        html_report(Gathered([StudyResult("s", "here", "", [TableResult("t", "", cells)])])), encoding="utf-8"
    )
    browser.open(tmp_path / "many.html")
    drawn = "[...document.querySelectorAll('#chart-2 .plot .line')].length"
    assert browser.js(drawn) == 8
    assert browser.js("document.querySelectorAll('#chart-2 .legend button').length") == 200
    browser.click("#chart-2 .legend summary")
    browser.click("#chart-2 .more button:nth-child(192)")
    assert browser.js(drawn) == 9
    assert browser.log("browser") == []


def test_without_scripts_the_tables_read_and_empty_frames_are_hidden(browser: Browser, text: str, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(text, encoding="utf-8")
    browser.devtools("Emulation.setScriptExecutionDisabled", value=True)
    browser.open(tmp_path / "index.html")
    shown = browser("/elements", using="css selector", value="table, figure")
    visible = [browser(f"/element/{next(iter(e.values()))}/displayed", method="GET") for e in shown]
    browser.devtools("Emulation.setScriptExecutionDisabled", value=False)
    assert visible.count(True) == text.count("<table")
    assert visible.count(False) == CHARTS
