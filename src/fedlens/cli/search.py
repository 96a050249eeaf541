"""`fedlens search NAME`: its arguments and output. The search is in study/search.py.

Heavy modules are imported when the command runs, because `fedlens --help` imports this one.
"""

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fedlens.cli.table import print_table
from fedlens.errors import bad_value

if TYPE_CHECKING:
    from fedlens.study.results import SearchResult

SHOWN = 10  # trials in the table


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `search` to the command line. `command` adds a parser with help and example."""
    about = "Search hyper-parameters on validation. Started again, it resumes the interrupted trial and skips the finished ones."
    example = "fedlens search fedavg_noniid\n         fedlens search sparse --on cifar100 --trials 40 data.root=data"
    c = command(commands, "search", search_command, about, example)
    c.add_argument("name", help="centralized, fedavg_iid, fedavg_noniid, sparse; or a YAML file")
    c.add_argument("overrides", nargs="*", metavar="key=value", help="for every trial; these keys are not searched")
    c.add_argument("--on", help="embedded or cifar100 (default: the space's first)")
    c.add_argument("--trials", type=int, help="total number of trials, including finished ones (default: the space's)")
    c.add_argument("--jobs", type=int, default=1, help="trials in parallel: one process per trial, one GPU per process if possible")
    c.add_argument("--out", help="the search's folder (default: searches/NAME-WHERE)")


def search_command(args: argparse.Namespace) -> int:
    from fedlens.study.results import SEARCH_FILE
    from fedlens.study.search import Search
    from fedlens.study.search_space import read_space

    if args.jobs < 1:
        raise bad_value("--jobs", args.jobs, ">= 1")
    space = read_space(args.name, place=args.on, trials=args.trials, overrides=args.overrides)
    folder = Path(args.out or f"searches/{space.name}-{space.place}")
    _print(Search(space, folder, jobs=args.jobs).run())
    print(f"written: {folder / SEARCH_FILE}")
    return 0


def _print(result: "SearchResult") -> None:
    """Print the best trials and the default as a table, then the best one as a command."""
    from fedlens.study.search_space import as_overrides

    complete = sorted((t for t in result.trials if t["state"] == "complete"), key=lambda t: (-t["value"], t["number"]))
    counts = {state: sum(t["state"] == state for t in result.trials) for state in ("complete", "pruned", "failed")}
    rows = []
    for trial in [*complete[:SHOWN], *(t for t in complete[SHOWN:] if t["number"] == 0)]:
        values = [text.partition("=")[2] for text in as_overrides(trial["params"])]
        rows.append(["0, the default" if trial["number"] == 0 else str(trial["number"]), f"{100 * trial['value']:.2f}", *values])
    title = f"{result.name}: {', '.join(f'{count} {state}' for state, count in counts.items() if count)}"
    print_table(["trial", "validation (%)", *result.keys], rows, title)
    best, default = complete[0], result.default["value"]
    if best["number"] == 0:
        print("no trial beats the default")
    else:
        print(f"best: trial {best['number']}, validation accuracy {100 * best['value']:.2f} %; the default has {100 * default:.2f} %")
    print("the test set was not read; the best of many trials is biased upwards, so check it with other seeds:")
    print(f"  fedlens run {shlex.join([*result.experiment, *as_overrides(best['params'])])} seed=1")
