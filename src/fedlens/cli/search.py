"""`fedlens search NAME`: its arguments and what it prints. The work is in search.py.

Nothing heavy is imported before the command runs: `fedlens --help` reads this module.
"""

import argparse
import shlex
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from fedlens.errors import bad_value

if TYPE_CHECKING:
    from fedlens.study.results import SearchResult

SHOWN = 10  # trials in the table


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `search` to the command line. `command` is the command line's own way to add one with help and example."""
    about = "Search hyper-parameters on validation: what is finished is kept, what was interrupted goes on."
    example = "fedlens search fedavg_noniid\n         fedlens search sparse --on cifar100 --trials 40 data.root=data"
    c = command(commands, "search", search_command, about, example)
    c.add_argument("name", help="centralized, fedavg_iid, fedavg_noniid, sparse; or a YAML file")
    c.add_argument("overrides", nargs="*", metavar="key=value", help="for every trial; such a key is not searched")
    c.add_argument("--on", help="embedded or cifar100 (default: the space's first)")
    c.add_argument("--trials", type=int, help="how many in all, those that are finished included (default: the space's)")
    c.add_argument("--jobs", type=int, default=1, help="trials at a time, in processes of their own; one a GPU where there are several")
    c.add_argument("--out", help="the search's folder (default: searches/NAME-WHERE)")


def search_command(args: argparse.Namespace) -> int:
    from fedlens.study.results import SEARCH_FILE
    from fedlens.study.search import Search, search_folder
    from fedlens.study.search_space import read_space

    if args.jobs < 1:
        raise bad_value("--jobs", args.jobs, ">= 1")
    space = read_space(args.name, place=args.on, trials=args.trials, overrides=args.overrides)
    folder = search_folder(space, args.out)
    _print(Search(space, folder, jobs=args.jobs).run())
    print(f"written: {folder / SEARCH_FILE}")
    return 0


def _print(found: "SearchResult") -> None:
    """The best trials and the default as a table, then the best one as a command."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from fedlens.study.search_space import as_overrides

    complete = sorted((t for t in found.trials if t["state"] == "complete"), key=lambda t: (-t["value"], t["number"]))
    counts = {state: sum(t["state"] == state for t in found.trials) for state in ("complete", "pruned", "failed")}
    title = f"{found.name}: {', '.join(f'{count} {state}' for state, count in counts.items() if count)}"
    table = Table("trial", "validation (%)", *map(escape, found.keys), title=escape(title))
    for trial in [*complete[:SHOWN], *(t for t in complete[SHOWN:] if t["number"] == 0)]:
        values = (text.partition("=")[2] for text in as_overrides(trial["params"]))
        table.add_row(
            "0, the default" if trial["number"] == 0 else str(trial["number"]), f"{100 * trial['value']:.2f}", *map(escape, values)
        )
    for column in table.columns[1:]:
        column.justify = "right"
    Console(width=None if sys.stdout.isatty() else 250).print(table)
    best, default = complete[0], found.default["value"]
    if best["number"] == 0:
        print("no trial beats the default")
    else:
        print(f"best: trial {best['number']}, validation accuracy {100 * best['value']:.2f} %; the default has {100 * default:.2f} %")
    print("the test set was not read, and the best of many trials is a little flattered; with other seeds:")
    print(f"  fedlens run {shlex.join([*found.experiment, *as_overrides(best['params'])])} seed=1")
