"""What the reference says of keys, rules, experiments and commands comes from the code at build time, so that it cannot go stale.

A page writes `<!-- fedlens: NAME -->` where a table belongs; GENERATED says which there are. Its line `> … make docs …`, for readers of the repository, is left out.
"""

import argparse
import inspect
import io
import os
import re
import tokenize
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from omegaconf import OmegaConf

import fedlens
from fedlens import cli, config
from fedlens.data import SOURCES
from fedlens.data.partition import SCHEMES
from fedlens.lens.mask_rules import STRATEGIES
from fedlens.lens.merging import RULES, options_of
from fedlens.lens.sensitivity import LABELS, SCORES
from fedlens.models import SHAPES
from fedlens.optim.schedules import SCHEDULES
from fedlens.optim.server import SERVER
from fedlens.overrides import choices
from fedlens.study import analyses, search_space
from fedlens.study import plan as plans
from fedlens.training.algorithms import ALGORITHMS

CONF = Path(config.__file__).parent / "conf"
MARKER = re.compile(r"^<!-- fedlens: (\w+) -->$", re.MULTILINE)
UNBUILT = re.compile(r"^> .*`make docs`.*\n+", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    def fill(match: re.Match[str]) -> str:
        if match[1] not in GENERATED:
            raise PluginError(f"{page.file.src_path}: <!-- fedlens: {match[1]} --> is unknown; there are {', '.join(GENERATED)}")
        return GENERATED[match[1]]()

    return MARKER.sub(fill, UNBUILT.sub("", markdown))


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


def comments(section: type) -> dict[str, str]:
    """field -> the comment at the end of its line."""
    found, name = {}, ""
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(section)).readline):
        if token.type == tokenize.NAME and token.line.lstrip().startswith(f"{token.string}:"):
            name = token.string
        elif token.type == tokenize.COMMENT:
            found[name] = token.string.lstrip("# ")
    return found


def shown(value: object) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def section_table(section: type, prefix: str) -> str:
    said = comments(section)
    allowed = {path: text for path, _, text in config.CHECKS}
    rows = []
    for field in fields(section):
        default = field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc]
        if not is_dataclass(default):
            key = prefix + field.name
            range_ = allowed.get(key, "")
            meaning = said.get(field.name, "").removesuffix(range_).rstrip(" :")  # the last column has the list of what is allowed
            rows.append([f"`{key}`", f"`{shown(default)}`" if shown(default) else "null", meaning, range_.replace(" | ", ", ")])
    return table(["key", "default", "meaning", "allowed"], rows)


def configuration() -> str:
    parts = ["## Top level", section_table(config.Config, "")]
    for field in fields(config.Config):
        if field.default_factory is not MISSING and is_dataclass(field.default_factory):
            section: type = field.default_factory
            parts += [f"## `{field.name}`", section_table(section, f"{field.name}.")]
    return "\n\n".join(parts)


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
        return ", ".join(f"`{option}`" for option in options_of(name))

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


def indented(module: object) -> Callable[[], str]:
    """A module's docstring as it is laid out, as code."""
    return lambda: "```text\n" + (inspect.getdoc(module) or "").replace("```", "") + "\n```"


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
    "plans": indented(plans),
    "analyses": indented(analyses),
    "spaces": indented(search_space),
    "commands": commands,
    "python": python,
}
