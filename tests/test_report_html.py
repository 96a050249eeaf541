"""The HTML page: what it shows of synthetic results, that it makes no request, and how it behaves in a real browser."""

import base64
import gzip
import json
import re
import shutil
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, chromium
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlens.report.blocks import Answer, Chart, Code, Details, Entry, Heading, Items, Report, Table, Text, clean
from fedlens.report.content import report
from fedlens.report.html import page as html_page
from fedlens.study.results import CellResult, Gathered, RunResult, StudyResult, TableResult, gather

HOSTILE = "</script><img src=x onerror=alert(1)>"

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
    settings = {"optim": {"lr": 0.1}, "data": {"name": "toy", "partition": "iid"}, "model": {"name": "tiny"}, "federated": {"clients": 2}}
    write(folder / "config.yaml", {"experiment": "centralized" if central else "fedavg_iid", "seed": 0, **settings})
    if not central:
        write(folder / "partition.json", {"clients": 2, "label_counts": [[5, 0, 1], [0, 4, 1]], "tv_distance": 0.5})


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
def contents(folder: Path) -> Report:
    return report(gather([folder]))


@pytest.fixture(scope="module")
def text(contents: Report) -> str:
    return html_page(contents)


def rows_of(text: str, caption: str) -> list[list[str]]:
    """The cells of the table whose caption holds this."""
    part = text[text.index(caption) :]
    body = part[part.index("<tbody>") : part.index("</tbody>")]
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", body)]


def charts_of(text: str) -> dict[str, Any]:
    """The specifications in a page, by key."""
    packed = re.findall(r'id="report-data">(.*?)</script>', text)[0]
    charts: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed)))["charts"]
    return charts


def drawn_keys(contents: Report) -> list[str]:
    return [block.key for block in contents.walk() if isinstance(block, Chart)]


# --- what it says


def test_results_have_mean_spread_interval_and_n_and_missing_seeds_are_named(text: str) -> None:
    central, plain, sparse = rows_of(text, "main: test accuracy in percent")
    assert central[1:3] == ["3", "91.00 ± 1.00<small>[88.52, 93.48], n = 3</small>"]
    assert central[4:] == ["–"] * 4  # a centralised run sends nothing
    assert sparse[1] == "2 of 3"
    assert "Seeds not finished: sparse: 2 of 3." in text
    assert plain[4:] == ["4 MB<small>n = 3</small>", "2.5 ± 0.7<small>n = 2</small>", "2.5 MB ± 707 kB<small>n = 2</small>", "2 of 3"]
    assert "Target: 80.00 % validation accuracy" in text


def test_every_difference_has_its_interval_n_and_both_p_values(text: str) -> None:
    plain, sparse = rows_of(text, "main: test accuracy minus that of “central”")
    assert plain[1:4] == ["-7.33", "[-13.58, -1.08]", "3"]
    assert sparse[3] == "2"
    for row in (plain, sparse):
        assert 0 < float(row[4]) <= float(row[5]) <= 1


def test_cells_that_share_no_seed_are_named_and_not_compared(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 0.5)
    write_run(tmp_path / "b", 0.6)
    cells = [CellResult(name, name, {}, {seed: RunResult(tmp_path / name, seed)}, 1) for seed, name in enumerate("ab")]
    text = html_page(report(Gathered([StudyResult("s", "here", "", [TableResult("t", "", cells)])])))
    assert "No seed shared: b." in text
    assert rows_of(text, "No seed shared") == []


def test_analyses_and_searches_are_shown(text: str) -> None:
    assert rows_of(text, "Along task vectors: one analysis per row")[0][2:7] == ["70.00", "71.00", "1.5", "71.50", "81.50"]
    assert rows_of(text, "Interference of task vectors: one analysis per row")[0][2:4] == ["0.25", "0.1"]
    assert rows_of(text, "Overlap of masks: one analysis per row")[0][2:] == ["0.5", "0.05"]
    forgotten = rows_of(text, "Forgetting clients by negation: one analysis per row")[0]
    assert sorted(forgotten[1:]) == sorted(["0", "91.00", "12.00", "81.00", "79.00", "2"])
    assert "80.00 %" in text[text.index("Search") :]


def test_a_section_without_data_is_left_out(tmp_path: Path, text: str) -> None:
    sections = (
        "Where the weights",
        "Labels per client",
        "Along task vectors",
        "Between two models",
        "Interference",
        "Forgetting",
        "Overlap",
    )
    headings = re.findall(r"<h[23] [^>]*>(.*?)</h[23]>", text)
    assert all(any(h.startswith(s) for h in headings) for s in sections)
    write_run(tmp_path / "only", 0.9, central=True)
    contents = report(gather([tmp_path]))
    assert [block.text for block in contents.walk() if isinstance(block, Heading)] == ["runs (here)"]
    assert {block.title for block in contents.walk() if isinstance(block, Chart)} == {"Test accuracy", "Validation accuracy"}


# --- the frame


def test_each_block_has_its_place_and_the_contents_link_to_the_headings() -> None:
    table = Table("t", "A caption", ["cell", "value"], [["a", Entry("1", "below", 1.0, "best")], ["b", Entry("0", "", 0.0, "differs")]])
    rest = [Heading("One", "one"), Answer("Why?", "Because.", ["one seed"]), Heading("Two", "two", 3), Items(["x", "y"]), table]
    folded = Details("More", [Code("run \\\n  --fast <now>"), Text("Inside", soft=True)])
    text = html_page(Report("A title", [Text("First"), Answer("Why?", "Because.", ["one seed"], "one")], [*rest, folded]))
    assert re.findall(r'<a href="#([\w-]+)">(.*?)</a>', text[text.index("<nav") : text.index("</nav>")]) == [
        ("top", "Overview"),
        ("part-one", "One"),
        ("part-two", "Two"),
    ]
    assert '<a href="#part-one">Why?</a>' in text[: text.index("<h2")]  # an answer of the first screen leads to its part
    assert "<ul><li>one seed</li></ul>" in text[text.index("<h2") :]
    assert "<details><summary>1 caution</summary><ul><li>one seed</li></ul></details>" in text[: text.index("<h2")], (
        "short on the first screen"
    )
    assert '<td class="number best" data-v="1">1<small>below</small></td>' in text
    assert '<td class="number differs" data-v="0">0 †</td>' in text
    assert "<details><summary>More</summary><pre" in text
    assert "run \\<br>  --fast &lt;now&gt;</pre>" in text
    assert "vegaEmbed=" not in text  # without charts, no library


def test_a_table_in_parts_is_not_sortable() -> None:
    parted = Table("t", "c", ["", "value"], [["part one", ""], ["a", number := Entry("1", "", 1.0)], ["part two", ""], ["b", number]])
    text = html_page(Report("r", [], [parted]))
    assert "sortable" not in text[text.index("<main") : text.index("</main>")]


def test_only_the_scripts_of_the_page_may_run_and_none_may_evaluate_text(text: str) -> None:
    policy = re.findall(r'Content-Security-Policy" content="(.*?)"', text)[0]
    assert "default-src 'none'" in policy
    assert "unsafe-eval" not in policy and "unsafe-inline" not in policy.split("style-src")[0]
    assert policy.count("'sha256-") == len(re.findall(r"<script>", text)) == 2


def test_numbers_that_are_not_finite_are_absent_in_charts_and_sorted_last_in_tables() -> None:
    chart = Chart("c", "t", "", {"mark": "point", "data": {"values": [{"x": float("nan"), "y": 1.0}]}})
    text = html_page(Report("r", [chart], [Table("t", "c", ["a", "b"], [["x", Entry("nan", "", float("nan"))]])]))
    assert charts_of(text)["c"]["data"]["values"] == [{"x": None, "y": 1.0}]
    assert ">nan</td>" in text and "data-v" not in text[text.index("<main") : text.index("</main>")]


def test_texts_in_charts_keep_their_lines() -> None:
    text = html_page(Report("r", [Chart("c", "t", "", {"mark": "text", "data": {"values": [{"t": "80.1\n± /home/me/x"}]}})], []))
    assert charts_of(text)["c"]["data"]["values"] == [{"t": "80.1\n± …/x"}]


# --- what it must not do


def test_the_same_results_give_the_same_bytes_wherever_they_lie(folder: Path, text: str, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    write_study(copy / "study")  # a failure's message names the folder
    assert html_page(report(gather([copy]))) == text
    for content in (text, json.dumps(charts_of(text))):
        assert str(folder) not in content
        assert "/home/" not in content


def test_hostile_text_stays_text_and_the_page_has_no_address(text: str) -> None:
    own = re.sub(r"<script>.*?</script>", "", text, flags=re.S)
    assert "<img" not in own
    assert text.count("</script>") == text.count("<script") == 3
    assert not re.search(r"https?://|@import|\bsrc=(?!x)|url\((?!#)", own + json.dumps(charts_of(text)))
    assert HOSTILE in json.dumps(charts_of(text))  # drawn as text


def test_the_page_sets_text_as_text_and_its_script_names_no_address_but_that_of_svg() -> None:
    script = (Path(__file__).parents[1] / "src/fedlens/report/assets/page.js").read_text()
    assert "innerHTML" not in script and "insertAdjacent" not in script
    assert set(re.findall(r"https?://[^\"'`]+", script)) == {"http://www.w3.org/2000/svg"}


@given(st.text(max_size=30))
@settings(max_examples=50)
def test_any_text_reads_back_as_it_was_except_for_control_characters_and_paths(label: str) -> None:
    class Reader(HTMLParser):
        found = ""

        def handle_data(self, data: str) -> None:
            self.found += data

    reader, text = Reader(), html_page(Report("r", [], [Table("t", "c", ["a"], [[label]])]))
    reader.feed(text[text.index("<tbody>") : text.index("</tbody>")])
    assert reader.found == clean(label)
    assert unescape(reader.found).isprintable() or "�" in reader.found or not reader.found.isascii()


# --- in Chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


def opened(browser: Browser, text: str, folder: Path) -> Browser:
    (folder / "index.html").write_text(text, encoding="utf-8")
    browser.emulate()
    browser.log("browser")
    browser.open(folder / "index.html")
    return browser


@pytest.fixture
def page(browser: Browser, text: str, tmp_path: Path) -> Browser:
    return opened(browser, text, tmp_path)


ARROW_RIGHT, ARROW_DOWN, ENTER, ESCAPE = "\ue014", "\ue015", "\ue007", "\ue00c"
LINES = "#figure-study-main-val-accuracy-round"  # accuracy by round of the two federated cells


def test_every_chart_is_drawn_without_complaint_and_no_request_leaves_the_page(page: Browser, contents: Report) -> None:
    page.js("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    page.draw()
    assert page.log("browser") == []
    assert page.js(
        "[...document.querySelectorAll('.canvas > svg')].filter(s => s.querySelectorAll('path, rect, text').length > 4).length"
    ) == len(drawn_keys(contents))
    assert page.js("document.querySelectorAll('img').length") == 0
    assert not page.js("[...document.querySelectorAll('svg *')].some(e => /NaN|undefined|Infinity/.test(e.outerHTML))")
    assert page.requests() == [page.js("location.href")]


def test_a_chart_is_drawn_when_it_comes_near_the_screen_and_in_details_when_they_open(page: Browser) -> None:
    drawn = "!!document.querySelector('#figure-study-main-bytes .canvas svg')"
    page.until("document.querySelector('.lead .canvas svg')")
    assert not page.js(drawn)
    page.js("document.querySelector('#figure-study-main-bytes').closest('details').open = true")
    page.js("document.querySelector('#figure-study-main-bytes').scrollIntoView()")
    page.until(drawn)


def test_a_head_sorts_its_table_by_click_and_by_key_with_missing_values_last(page: Browser) -> None:
    column = "[...document.querySelector('table').tBodies[0].rows].map(r => r.cells[0].textContent)"
    order = "[...document.querySelector('table').tHead.rows[0].cells].map(c => c.ariaSort)"
    page.click("table thead th:nth-child(3) button")
    assert page.js(column) == ["sparse", HOSTILE, "central"]
    assert page.js(order)[2] == "ascending"
    page.keys(ENTER)  # the button has the focus
    assert page.js(column) == ["central", HOSTILE, "sparse"]
    assert page.js(order)[2] == "descending"
    for turn in ("ascending", "descending"):
        page.click("table thead th:nth-child(5) button")
        assert page.js(column)[-1] == "central"
        assert page.js(order) == ["none", "none", "none", "none", turn, "none", "none", "none"]


def test_a_legend_hides_and_shows_its_series_and_the_others_keep_their_colours(page: Browser) -> None:
    page.draw()
    colours = f"[...new Set([...document.querySelectorAll('{LINES} .mark-line path[stroke]')].map(p => p.getAttribute('stroke')))]"
    before = page.js(colours)
    assert len(before) > 1
    page.click(f"{LINES} .legend button")
    page.until(f"{colours}.length === {len(before) - 1}")
    assert page.js(colours) == before[1:]
    assert page.js(f"document.querySelector('{LINES} .legend button').ariaPressed") == "false"
    page.keys(ENTER)
    page.until(f"{colours}.length === {len(before)}")
    assert sorted(page.js(colours)) == sorted(before)


def test_values_are_read_by_mouse_and_by_keyboard(page: Browser) -> None:
    page.draw()
    said = f"document.querySelector('{LINES} .tip').textContent"
    page.js(f"document.querySelector('{LINES} .plot').focus()")
    page.keys(ARROW_RIGHT)
    first = page.js(said)
    assert first.split("\n")[0].endswith(HOSTILE)
    read = [first]
    while not read[-1].split("\n")[0].endswith("sparse"):
        page.keys(ARROW_RIGHT)
        read.append(page.js(said))
    values = [each for each in read if re.search(r"round: \d\n.*accuracy \(%\): [\d.]+\n95 % interval: .*\nn: 3", each)]
    assert len(set(values)) == 4
    assert "undefined" not in "".join(read)
    page.js(f"document.querySelector('{LINES} .plot').blur()")
    page.js(f"document.querySelector('{LINES} .plot').focus()")
    page.keys(ARROW_RIGHT + ARROW_DOWN)
    assert page.js(said).split("\n")[0] != first.split("\n")[0]
    page.keys(ESCAPE)
    assert page.js(said) == ""
    assert page.js(f"document.querySelector('{LINES} .tip').role") == "status"  # a live region
    centre = "(r => [r.x + r.width / 2, r.y + r.height / 2])"
    point = f"document.querySelector('{LINES} .mark-symbol path').getBoundingClientRect()"
    x, y = page.js(f"(document.querySelector('{LINES}').scrollIntoView(), {centre}({point}))")
    moves = [{"type": "pointerMove", "duration": 0, "x": round(x) + near, "y": round(y)} for near in (20, 10)]
    page("/actions", actions=[{"type": "pointer", "id": "mouse", "actions": moves}])
    assert "round: " in page.js(said)


def test_dark_mode_switches_page_and_figures_and_print_is_light(page: Browser) -> None:
    line = f"document.querySelector('{LINES} .mark-line path')?.getAttribute('stroke')"

    def colours(before: str = "") -> list[str]:
        page.until(f"{line} && {line} !== '{before}'")  # drawn again
        axis = f"getComputedStyle(document.querySelector('{LINES} .mark-text text')).fill"
        seen: list[str] = page.js(f"[getComputedStyle(document.body).backgroundColor, {axis}, {line}]")
        return seen

    def brightness(colour: str) -> int:
        return sum(map(int, re.findall(r"\d+", colour)))

    page.js(f"document.querySelector('{LINES}').scrollIntoView()")
    light = colours()
    page.emulate(dark=True)
    dark = colours(before=light[2])
    page.emulate(dark=True, media="print")
    printed = colours(before=dark[2])
    assert light[0] == "rgb(255, 255, 255)"
    assert brightness(dark[0]) < 100 < brightness(dark[1])
    assert all(a != b for a, b in zip(light, dark, strict=True))
    assert printed == light


def test_print_shows_all_charts_that_are_not_folded_away(page: Browser) -> None:
    page.devtools("Page.printToPDF", printBackground=True)
    undrawn = "[...document.querySelectorAll('figure.chart .plot')].filter(p => !p.closest('details:not([open])') && !p.querySelector('svg.marks')).length"
    assert page.js(undrawn) == 0


@pytest.mark.parametrize("width", [390, 320])
def test_a_narrow_screen_scrolls_downwards_only_and_has_a_menu(page: Browser, width: int) -> None:
    page.emulate(width=width)
    page.js("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    page.draw()
    assert page.js("document.documentElement.scrollWidth") <= width
    assert page.js("[...document.querySelectorAll('.canvas > svg')].every(s => s.getBoundingClientRect().right <= innerWidth)")
    shown = "document.querySelector('nav ul').offsetHeight > 0"
    assert not page.js(shown)
    page.click("nav button")
    assert page.js(shown)
    page.click("nav > ul > li:last-child > a")
    assert not page.js(shown)


def test_the_contents_stay_in_view_and_mark_the_part_that_is_read(page: Browser) -> None:
    page.draw()
    current = "document.querySelector('nav a[aria-current=true]').textContent"
    assert page.js(current) == "Overview"
    page.js("document.getElementById('part-study-sweep').scrollIntoView()")
    page.until(f"{current} === 'Along task vectors'")
    assert page.js("document.querySelector('nav').getBoundingClientRect().top") == 0


def test_the_first_screen_has_the_answers_and_the_main_figure(page: Browser) -> None:
    page.draw()
    assert page.js("document.querySelector('.lead .answer').getBoundingClientRect().bottom < innerHeight")
    assert page.js("document.querySelector('.lead .canvas svg').getBoundingClientRect().bottom < innerHeight")


def test_of_two_hundred_cells_eight_are_drawn_and_all_can_be_chosen(browser: Browser, tmp_path: Path) -> None:
    for i in range(200):
        write_run(tmp_path / str(i), 0.5 + i / 1000)
    cells = [CellResult(f"cell {i}", "", {}, {0: RunResult(tmp_path / str(i), 0)}, 1) for i in range(200)]
    page = opened(browser, html_page(report(Gathered([StudyResult("s", "here", "", [TableResult("t", "", cells)])]))), tmp_path)
    page.draw()
    figure = page.js("[...document.querySelectorAll('figure.chart')].find(f => f.querySelectorAll('.legend button').length === 200).id")
    drawn = f"new Set([...document.querySelectorAll('#{figure} .mark-symbol path')].map(p => p.__data__.datum.s)).size"
    assert page.js(drawn) == 8
    page.click(f"#{figure} .legend summary")
    page.click(f"#{figure} .more button:nth-child(192)")
    page.until(f"{drawn} === 9")
    assert page.log("browser") == []


def test_without_scripts_the_tables_read_and_empty_frames_are_hidden(browser: Browser, text: str, contents: Report, tmp_path: Path) -> None:
    text = text.replace("<details>", "<details open>")
    browser.devtools("Emulation.setScriptExecutionDisabled", value=True)
    try:
        opened(browser, text, tmp_path)
        shown = browser("/elements", using="css selector", value="table, figure")
        visible = [browser(f"/element/{next(iter(e.values()))}/displayed", method="GET") for e in shown]
    finally:
        browser.devtools("Emulation.setScriptExecutionDisabled", value=False)
    assert visible.count(True) == text[: text.index("</main>")].count("<table")
    assert visible.count(False) == len(drawn_keys(contents))


def test_the_page_of_the_kept_results_is_small_and_opens_without_complaint(browser: Browser, tmp_path: Path) -> None:
    text = html_page(report(gather([Path(__file__).parents[1] / "results"])))
    assert len(text.encode()) < 2.5e6
    page = opened(browser, text, tmp_path)
    page.js("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    page.draw()
    assert page.log("browser") == []
    assert page.js("document.documentElement.scrollWidth") <= 1280
