"""Fill pages from the code when the site is built, so that keys, rules, experiments and commands cannot be outdated; make MathML of formulas.

A page writes `<!-- fedlens: NAME -->` where a table belongs; GENERATED lists the names. Its line `> … make docs …`, for readers of the repository, is left out.
"""

import argparse
import html
import inspect
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from omegaconf import OmegaConf

import fedlens
from fedlens import cli, config
from fedlens.data import SOURCES
from fedlens.data.partition import SCHEMES
from fedlens.lens.mask_rules import STRATEGIES
from fedlens.lens.merging import RULES
from fedlens.lens.sensitivity import LABELS, SCORES
from fedlens.models import SHAPES
from fedlens.optim.schedules import SCHEDULES
from fedlens.optim.server import SERVER
from fedlens.overrides import choices
from fedlens.registry import options_of
from fedlens.study import analyses, search_space
from fedlens.study import plan as plans
from fedlens.training.algorithms import ALGORITHMS

CONF = Path(config.__file__).parent / "conf"
NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
MARKER = re.compile(r"^<!-- fedlens: (\w+) -->$", re.MULTILINE)
UNBUILT = re.compile(r"^> .*`make docs`.*\n+", re.MULTILINE)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
BRACES = re.compile(r"\{(?:[^{}]|\{[^{}]*\})*\}|(?<!\w)--\w+")  # YAML and options inside a meaning, which Markdown would change
FAR = 30  # spaces before a line that continues the meaning above it


def on_files(files: Files, config: Any) -> Files:
    """Add the notebooks themselves, for readers who want to run them."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    def fill(match: re.Match[str]) -> str:
        if match[1] not in GENERATED:
            raise PluginError(f"{page.file.src_path}: <!-- fedlens: {match[1]} --> is unknown; there are {', '.join(GENERATED)}")
        return GENERATED[match[1]]()

    return MARKER.sub(fill, UNBUILT.sub("", markdown))


def on_page_content(content: str, **_: Any) -> str:
    """Replace formulas in TeX by MathML, which browsers show without a script, a font or the network."""

    def mathml(match: re.Match[str]) -> str:
        tag, bracket, tex = match.groups()
        formula = convert(html.unescape(tex), display="block" if bracket == "[" else "inline")
        return f'<{tag} class="formula">{formula}</{tag}>'

    return FORMULA.sub(mathml, content)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def first_line(thing: object) -> str:
    """Of the docstring, up to the first empty line."""
    said = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    return (said[:1].upper() if said[:1].isascii() else said[:1]) + said[1:]  # θ is not Θ


def registry(entries: Mapping[str, object], what: str) -> Callable[[], str]:
    return lambda: table([what, ""], ([f"`{name}`", first_line(entry)] for name, entry in entries.items()))


# --- configuration


def shown(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def section_table(keys: Mapping[str, config.Key]) -> str:
    rows = ([f"`{path}`", f"`{shown(key.default)}`", key.meaning, key.expected, key.when] for path, key in keys.items())
    return table(["key", "default", "meaning", "range", "matters"], rows)


def configuration() -> str:
    sections: dict[str, dict[str, config.Key]] = {}
    for path, key in config.keys().items():
        sections.setdefault(path.rpartition(".")[0], {})[path] = key
    return "\n\n".join(f"{f'## `{name}`' if name else '## Top level'}\n\n{section_table(keys)}" for name, keys in sections.items())


# --- YAML files


def remark(file: Path) -> str:
    """The first comments of a YAML file."""
    lines = [line.lstrip("# ").strip() for line in file.read_text().splitlines() if line.startswith("#") and "@package" not in line]
    return " ".join(lines)


def group(name: str) -> Callable[[], str]:
    return lambda: table([f"`{name}=`", ""], ([f"`{choice}`", remark(CONF / name / f"{choice}.yaml")] for choice in choices(name)))


def questions(name: str) -> Callable[[], str]:
    """Of studies and searches: what they ask, and where."""

    def rows() -> Iterable[list[str]]:
        for choice in choices(name):
            plan = OmegaConf.load(CONF / name / f"{choice}.yaml")
            where = ", ".join(plan["where"]) if "where" in plan else f"all of {', '.join(plan.get('include', []))}"
            yield [f"`{choice}`", str(plan.get("question", "")), where]

    return lambda: table([name, "question", "`--on`"], rows())


# --- rules


def merge_rules() -> str:
    def options(name: str) -> str:
        return ", ".join(f"`{option}`" for option in options_of(RULES[name], ("sizes",)))

    return table(["rule", "", "options of `fl.merge`"], ([f"`{name}`", first_line(rule), options(name)] for name, rule in RULES.items()))


def labels_and_scores() -> str:
    rows = [[f"`mask.labels_from={name}`", text] for name, text in LABELS.items()]
    return table(["", ""], [*rows, *([f"`mask.score={name}`", text] for name, text in SCORES.items())])


def models() -> str:
    rows = [[f"`{n}`", f"patch {s.patch}, width {s.dim}, {s.depth} blocks, {s.heads} heads"] for n, s in SHAPES.items()]
    return table(["`fl.create_model`", ""], [*rows, ["`timm:NAME`", "any backbone of timm"], ["`hf:NAME`", "any of transformers"]])


def sources() -> str:
    rows = [[f"`{name}`", first_line(source)] for name, source in SOURCES.items()]
    return table(["`fl.load_dataset`", ""], [*rows, ["`hf:NAME[:CONFIG]`", "An image set of the Hugging Face hub or of a local path."]])


def yaml_keys(module: object) -> Callable[[], str]:
    """Return a module's docstring with its indented YAML as tables: key, example, meaning."""

    def filled() -> str:
        parts = (inspect.getdoc(module) or "").split("\n\n")
        return "\n\n".join(yaml_table(part) if part.startswith("    ") else part for part in parts)

    return filled


def yaml_table(text: str) -> str:
    rows: list[list[str]] = []
    path: list[tuple[int, str]] = []  # indentation and name of the keys around a line
    for line in textwrap.dedent(text).splitlines():
        indent, body = len(line) - len(line.lstrip()), line.strip()
        if indent > FAR:
            rows[-1][2] = f"{rows[-1][2].rstrip(';')}; {body}"
            continue
        code, _, meaning = (part.strip() for part in body.partition("  "))
        if code.startswith("- "):
            indent, code = indent + 2, code[2:]
        name, colon, example = code.partition(":")
        path = [(i, key) for i, key in path if i < indent]
        if code.startswith("{") and meaning:
            rows.append([path[-1][1], code, meaning])
        elif code.startswith("{"):
            rows[-1][1] = code
        elif colon:
            path.append((indent, ".".join([*(key for _, key in path[-1:]), name])))
            rows.append([path[-1][1], example.strip(), meaning])
    shown = [[f"`{key}`", f"`{example}`" if example else "", BRACES.sub(r"`\g<0>`", meaning)] for key, example, meaning in rows if meaning]
    if len({key for key, *_ in shown}) == 1:
        return table([f"entry of {shown[0][0]}", "meaning"], [row[1:] for row in shown])
    return table(["key", "example", "meaning"], shown)


# --- commands and the Python API


def commands() -> str:
    os.environ["COLUMNS"] = "110"  # argparse's width
    return "\n\n".join(_help(cli.parser(), 2))


def _help(parser: argparse.ArgumentParser, level: int) -> Iterable[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield f"{'#' * level} {sub.prog}"
                if any(isinstance(inner, argparse._SubParsersAction) for inner in sub._actions):
                    yield from _help(sub, level + 1)
                else:
                    yield f"```text\n{sub.format_help().strip()}\n```"


def python() -> str:
    return "\n\n".join(f"::: {home}.{name}" for name, home in fedlens._HOME.items())


GENERATED: dict[str, Callable[[], str]] = {
    "configuration": configuration,
    "experiments": group("experiment"),
    "data": group("data"),
    "sources": sources,
    "model": group("model"),
    "models": models,
    "studies": questions("study"),
    "searches": questions("search"),
    "mask_rules": registry(STRATEGIES, "`mask.strategy`"),
    "merge_rules": merge_rules,
    "algorithms": registry(ALGORITHMS, "`federated.algorithm`"),
    "server": registry(SERVER, "`server.optimizer`"),
    "schedules": registry(SCHEDULES, "`optim.schedule`"),
    "partitions": registry(SCHEMES, "`data.partition`"),
    "labels": labels_and_scores,
    "plans": yaml_keys(plans),
    "analyses": yaml_keys(analyses),
    "spaces": yaml_keys(search_space),
    "commands": commands,
    "python": python,
}
