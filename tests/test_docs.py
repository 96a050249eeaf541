"""The documentation builds without a warning and without the network, and what it tells people to type is right."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import chromium
from processes import completed
from small import shrink

from fedlens.cli import main, parser
from fedlens.data import SOURCES
from fedlens.overrides import choices, compose, normalise
from fedlens.registry import HOMES, registry
from fedlens.study.analyses import planned_analyses
from fedlens.study.plan import read_plan

for package in ("mkdocs", "latex2mathml"):
    pytest.importorskip(package, reason="needs fedlens[docs]")

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
EXECUTED = ["README", "lens", "talos", "own-model", "own-rule"]  # pages whose Python runs as it stands
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ELSEWHERE = re.compile(r"^\s*(https?:)?//", re.IGNORECASE)


def fences(page: Path, language: str) -> list[str]:
    return [text for found, text in FENCE.findall(page.read_text()) if found == language]


# --- the site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    nothing = {f"{name}_proxy": "http://127.0.0.1:9" for name in ("http", "https", "all")}  # whoever asks the network gets nothing
    environment = {**os.environ, **nothing, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return out


class Requests(HTMLParser):
    """What a browser fetches by itself when it shows a page. Links that a reader may follow are not among it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.classes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.classes |= set(given.get("class", "").split())
        self.found += [given[name] for name in ("src", "poster", "data", "srcset") if name in given and tag != "a"]
        self.found += in_style(given.get("style", ""))
        if tag == "link" and given.get("rel") not in ("canonical", "next", "prev", "alternate"):
            self.found.append(given.get("href", ""))
        if tag in ("use", "image"):
            self.found += [given[name] for name in ("href", "xlink:href") if name in given]


def in_style(text: str) -> list[str]:
    return re.findall(r"(?:url\(|@import)\s*[\"']?([^\"')\s;]+)", text)


def requests(file: Path) -> list[str]:
    if file.suffix == ".css":
        return in_style(file.read_text())
    page = Requests()
    page.feed(file.read_text())
    assert "mermaid" not in page.classes  # the theme would load a library from elsewhere to draw it
    return page.found


def test_every_page_of_the_navigation_is_built(site: Path) -> None:
    assert {page.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for page in PAGES} <= {
        page.relative_to(site).as_posix() for page in site.rglob("*.html")
    }


def test_no_page_asks_another_host_for_anything(site: Path) -> None:
    files = [file for file in site.rglob("*") if file.suffix in (".html", ".css", ".svg")]
    asked = {(file.name, request) for file in files for request in requests(file)}
    assert len(asked) > 20  # the parser sees scripts, styles and images at all
    assert not [(name, request) for name, request in asked if ELSEWHERE.match(request)]
    assert "api.github.com" not in (site / "index.html").read_text()


def test_the_reference_names_what_the_code_has(site: Path) -> None:
    from fedlens.config import known_keys
    from fedlens.lens.mask_rules import STRATEGIES
    from fedlens.lens.merging import RULES

    keys = (site / "reference/configuration.html").read_text()
    assert not [key for key in known_keys() if "." in key and f"<code>{key}</code>" not in keys]
    rules = (site / "reference/registries.html").read_text()
    named = [*STRATEGIES, *RULES, *choices("experiment"), *choices("study"), *choices("data"), *choices("model")]
    assert not [name for name in named if f"<code>{name}</code>" not in rules]
    assert "calibrate_mask" in (site / "reference/python.html").read_text()


class Rows(HTMLParser):
    """The tables of a page, as the text of their cells."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")
            self.inside = True

    def handle_endtag(self, tag: str) -> None:
        if tag == "td":
            self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data


def test_the_reference_says_what_every_key_means(site: Path) -> None:
    from fedlens.config import keys

    page = Rows()
    page.feed((site / "reference/configuration.html").read_text())
    meanings = {row[0]: row[2] for row in page.rows if len(row) == 5}
    assert set(meanings) == set(keys())
    assert not [key for key, meaning in meanings.items() if not re.search(r"\w", meaning)]


def test_every_key_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    from fedlens.config import keys

    for section in {path.partition(".")[0] for path in keys()}:
        assert main(["explain", section]) == 0
    printed = capsys.readouterr().out
    for path, key in keys().items():
        assert f"{path}: {key.meaning}\n" in printed
    assert main(["explain", "server.merge"]) == 0
    assert "trimmed_mean" in capsys.readouterr().out
    assert main(["explain", "optim.lrr"]) == 2 and "Did you mean 'optim.lr'" in capsys.readouterr().err


def test_the_help_of_run_names_what_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    from fedlens.lens.mask_rules import STRATEGIES
    from fedlens.lens.merging import RULES
    from fedlens.training.algorithms import ALGORITHMS

    with pytest.raises(SystemExit, match="0"):
        parser().parse_args(["run", "--help"])
    words = set(re.findall(r"\w+", capsys.readouterr().out))
    assert {*choices("experiment"), *choices("data"), *choices("model"), *STRATEGIES, *RULES, *ALGORITHMS} <= words


def test_a_page_that_is_filled_when_it_is_built_says_so_in_the_repository() -> None:
    for page in PAGES:
        if "<!-- fedlens: " in page.read_text():
            assert "make docs" in page.read_text(), page


def test_figures_are_small_and_shown(site: Path) -> None:
    figures = list((ROOT / "docs" / "figures").iterdir())
    assert all(figure.stat().st_size < 60 * 1024 for figure in figures)
    light = {figure.stem for figure in figures if not figure.stem.endswith("-dark")}
    assert {figure.stem for figure in figures} == light | {f"{name}-dark" for name in light}
    text = "".join(page.read_text() for page in PAGES)
    assert not [figure.name for figure in figures if not re.search(rf"figures/{re.escape(figure.name)}(#only-\w+)?\)", text)]


def test_formulas_are_mathml_and_need_no_script(site: Path) -> None:
    for page in PAGES:
        text = (site / page.relative_to(ROOT / "docs")).with_suffix(".html").read_text()
        formulas = re.findall(r"\$\$.+?\$\$|\$[^$\n]+\$", re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL), re.DOTALL)
        assert text.count("<math ") == len(formulas), page
        assert "arithmatex" not in text, page
    assert (site / "concepts" / "talos.html").read_text().count('display="block"') >= 5


def test_a_table_has_every_key_of_a_plan(site: Path) -> None:
    from fedlens.study.plan import PLAN, TABLE, TUNE
    from fedlens.study.search_space import SPACE

    page = Rows()
    page.feed((site / "howto" / "study.html").read_text())
    rows = {row[0]: " ".join(row[1:]) for row in page.rows if len(row) == 3}
    assert PLAN.keys() - {"tables"} | {f"tables.{key}" for key in TABLE} <= set(rows)
    assert not [key for key in ("case", "place", "set") if f"{key}:" not in rows["tables.special"]]
    assert not [key for key in TUNE if f"{key}:" not in rows["tables.tune"]]
    assert SPACE.keys() - {"space"} <= set(rows)
    assert not [meaning for meaning in rows.values() if not re.search(r"\w", meaning)]


@pytest.mark.processes
def test_search_works_on_a_page_that_is_opened_from_a_disk(site: Path) -> None:
    with chromium() as browser:
        browser.open(site / "index.html")
        browser.js("document.querySelector('.md-search__input').focus()")
        browser.keys("LayerScale")
        browser.until("document.querySelector('.md-search-result__item a')")
        assert "LayerScale" in browser.js("document.querySelector('.md-search-result__item').textContent")
        assert not [url for url in browser.requests() if not url.startswith("file:")]


# --- what the pages tell people to type


def commands() -> Iterator[tuple[str, str]]:
    """(page, line) of every fedlens command in a fence, torchrun's included."""
    for page in PAGES:
        for text in fences(page, "bash"):
            for line in text.replace("\\\n", " ").splitlines():
                if line.startswith("fedlens ") or "-m fedlens " in line:
                    yield page.stem, line[line.index("fedlens ") :]


@pytest.mark.parametrize(("page", "line"), list(commands()), ids=lambda value: value.replace("/", "_") if isinstance(value, str) else None)
def test_a_command_in_the_documentation_is_one_that_fedlens_takes(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    if words[-1] == "--help":
        with pytest.raises(SystemExit, match="0"):
            parser().parse_args(words)
        return
    args, rest = parser().parse_known_args(words)
    assert not [word for word in rest if word.startswith("-")]
    overrides = [*getattr(args, "overrides", []), *rest]
    if args.command in ("run", "data") and not getattr(args, "multirun", False):
        compose(overrides)
    else:
        normalise(overrides)
    if args.command in ("study", "search") and not args.name.endswith(".yaml"):
        assert args.name in choices(args.command)
    if getattr(args, "part", "") == "prepare":
        assert args.name in SOURCES or args.name.startswith("hf:")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_in_the_documentation_compiles(page: Path) -> None:
    for text in fences(page, "python"):
        compile("\n".join(line for line in text.splitlines() if not line.startswith("%")), str(page), "exec")


@pytest.mark.parametrize("name", EXECUTED)
def test_python_in_the_documentation_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shrink(monkeypatch)
    (page,) = (page for page in [ROOT / "README.md", *PAGES] if page.stem == name)
    namespace: dict[str, object] = {"__name__": name}
    with registries_restored():
        for text in fences(page, "python"):
            exec(compile(text, str(page), "exec"), namespace)


@contextmanager
def registries_restored() -> Iterator[None]:
    """Remove what a page registers."""
    before = {kind: set(registry(kind)) for kind in HOMES}
    try:
        yield
    finally:
        for kind, names in before.items():
            for name in set(registry(kind)) - names:
                del registry(kind)[name]


def test_the_plan_in_the_documentation_is_a_plan(tmp_path: Path) -> None:
    (text,) = fences(ROOT / "docs" / "howto" / "study.md", "yaml")
    (tmp_path / "my-plan.yaml").write_text(text)
    plan = read_plan(str(tmp_path / "my-plan.yaml"), seeds=2)
    assert len(plan.runs) == 8
    assert len(planned_analyses(plan)) == 1


def test_the_plan_for_a_rule_of_one_s_own_knows_the_rule(tmp_path: Path) -> None:
    page = ROOT / "docs" / "howto" / "own-rule.md"
    (text,) = fences(page, "yaml")
    (tmp_path / "rules.yaml").write_text(text)
    with registries_restored():
        exec(compile(fences(page, "python")[0], str(page), "exec"), {"__name__": "mine"})
        plan = read_plan(str(tmp_path / "rules.yaml"))
    assert (len(plan.runs), len(plan.tuning)) == (9, 3)


def test_the_version_to_cite_is_the_version_of_the_code() -> None:
    from fedlens import __version__

    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"version = {{{__version__}}}" in (ROOT / "README.md").read_text()


def test_links_of_the_readme_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", page.read_text())]
        assert targets and not [target for target in targets if not (ROOT / target).exists()]


def test_the_tables_and_the_figure_of_the_results_are_those_of_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = completed(["--check"], ROOT / "scripts" / "results_pages.py")
    assert done.returncode == 0, done.stdout + done.stderr
