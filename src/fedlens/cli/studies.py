"""`fedlens study`, `search`, `report` and `keep`."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from fedlens.report.answers import best_trial
from fedlens.report.content import report as contents
from fedlens.report.markdown import markdown
from fedlens.report.write import write_report
from fedlens.study.archive import archive
from fedlens.study.estimate import estimate
from fedlens.study.plan import read_plan
from fedlens.study.results import SEARCH_FILE, Gathered, gather
from fedlens.study.runner import Study
from fedlens.study.search import Search
from fedlens.study.search_space import as_overrides, read_space


def study(
    name: str,
    overrides: Sequence[str],
    on: str | None,
    seeds: int | None,
    jobs: int,
    out: str | None,
    tables: Sequence[str],
    retry: bool,
    replace: bool,
    plan: bool,
    html: bool,
) -> int:
    """Run a study, or with `plan` list its runs."""
    read = read_plan(name, place=on, seeds=seeds, overrides=overrides)
    folder = Path(out or f"studies/{read.name}-{read.place}")
    planned = Study(read, folder, jobs=jobs, retry=retry, tables=tables, replace=replace)
    if plan:
        print(planned.listing())
        print(estimate(planned, jobs))
        return 0
    results = Gathered([planned.run()])
    print(markdown(contents(results), details=False))
    if html:
        print(f"written: {write_report(results, folder / 'report')}")
    return 2 if planned.failures else 0


def search(name: str, overrides: Sequence[str], on: str | None, trials: int | None, jobs: int, out: str | None) -> int:
    """Search hyper-parameters; print the report, and the best trial as a command."""
    space = read_space(name, place=on, trials=trials, overrides=overrides)
    folder = Path(out or f"searches/{space.name}-{space.place}")
    result = Search(space, folder, jobs=jobs).run()
    best = best_trial(result) or result.default
    print(markdown(contents(Gathered([], [result]))))
    print("the best of many trials is biased upwards, so check it with other seeds:")
    print(f"  fedlens run {shlex.join([*result.experiment, *as_overrides(best['params'])])} seed=1")
    print(f"written: {folder / SEARCH_FILE}")
    return 0


def report(paths: Sequence[str], out: str, title: str | None, figures: bool, paper: str | None) -> int:
    """Report runs, studies and searches."""
    print(f"written: {write_report(gather(paths), Path(out), title, figures, paper)}")
    return 0


def keep(paths: Sequence[str], out: str) -> int:
    """Archive studies and searches."""
    print("\n".join(archive([Path(path) for path in paths], Path(out))))
    return 0
