"""The command line. Each command is one function; an error that the user can fix is one line on stderr and exit status 2."""

import argparse
import io
import logging
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedlens import __version__
from fedlens.errors import OneLine, UserError, check_utf8, first_line, system_errors

log = logging.getLogger("fedlens")


def run_command(args: argparse.Namespace) -> int:
    from fedlens.overrides import compose, from_file, to_yaml

    for option, value in (("--config", args.config), ("--print-config", args.print_config)):
        if args.multirun and value:
            raise UserError(f"{option} cannot be combined with -m: a sweep is composed from key=value alone.")
    if args.multirun:
        return multirun(args.overrides)
    config = from_file(Path(args.config), args.overrides) if args.config else compose(args.overrides)
    if args.config and not any(o.startswith("run.dir=") for o in args.overrides):
        config.run.dir = None  # a configuration from another run's folder makes a new run
    if args.print_config:
        print(to_yaml(config), end="")
        return 0
    from fedlens.training.run import execute

    print(execute(config).path)
    return 0


def multirun(overrides: Sequence[str]) -> int:
    """Run a sweep through Hydra itself, so that its launchers (joblib, submitit) work: hydra/launcher=joblib."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf import DictConfig

    from fedlens.overrides import DICTS, compose, normalise
    from fedlens.training.run import execute

    wanted = normalise(overrides)
    check_types(wanted)
    wanted = [f"++{text}" if text.startswith(DICTS) else text for text in wanted]  # Hydra adds options that the schema does not list
    folder = next((o.partition("=")[2] for o in wanted if o.startswith("hydra.sweep.dir=")), time.strftime("runs/sweep-%Y%m%d-%H%M%S"))
    failed = Path(folder).absolute() / "failed.txt"  # a file: a launcher's jobs are separate processes, maybe on other machines
    failed.unlink(missing_ok=True)

    @hydra.main(config_path="pkg://fedlens.conf", config_name="config", version_base="1.3")
    def job(_: DictConfig) -> None:
        try:
            print(execute(compose([text.removeprefix("++") for text in HydraConfig.get().overrides.task])).path)
        except UserError as error:
            with failed.open("a") as file:
                file.write(f"{error}\n")
            print(f"error: {error}", file=sys.stderr)

    sys.argv = ["fedlens run", "-m", *(o for o in wanted if not o.startswith("hydra.sweep.dir=")), f"hydra.sweep.dir={folder}"]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # otherwise Hydra prints errors in its own way and exits
    try:
        job()
    except HydraException as error:
        because = f" ({first_line(error.__cause__)})" if error.__cause__ else ""
        raise UserError(f"override: {first_line(error)}{because}") from None
    return 2 if failed.exists() else 0


def check_types(overrides: Sequence[str]) -> None:
    """Check the type of every value of a sweep before its folder exists; ranges are checked by each run."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from fedlens.config import Config
    from fedlens.errors import unknown
    from fedlens.overrides import GROUPS, choices

    schema = OmegaConf.structured(Config)
    for key, value in _values(overrides):
        if key in GROUPS and value not in choices(key):
            raise unknown(key, str(value), choices(key))
        try:
            if key not in GROUPS:
                OmegaConf.update(schema, key, value)
        except OmegaConfBaseException as error:
            raise UserError(f"override: {key}: {first_line(error)}") from None


def _values(overrides: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield each (key, value) of a sweep, but not Hydra's own keys, nor sweeps that only Hydra can list (glob, interval)."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import ValueType

    parser = OverridesParser.create()
    for override in parser.parse_overrides(list(overrides)):
        key = str(override.key_or_group)
        if key.startswith("hydra") or override.value_type is ValueType.GLOB_CHOICE_SWEEP:
            continue
        if override.is_choice_sweep() or override.is_range_sweep():
            yield from ((key, parser.parse_override(f"{key}={text}").value()) for text in override.sweep_string_iterator())
        elif not override.is_sweep_override():
            yield key, override.value()


def resume_command(args: argparse.Namespace) -> int:
    from fedlens.runs.session import describe_test
    from fedlens.training.run import load_run

    run = load_run(args.run)
    before = run.finished
    run.resume()
    print(f"{run.path} is finished: {describe_test(run.summary)}" if before else run.path)
    return 0


def check_command(args: argparse.Namespace) -> int:
    from fedlens.runs import digests
    from fedlens.runs.store import problems, runs_below
    from fedlens.study.results import STUDY_FILE, read_study

    found, counts = list[str](), {"intact": 0, "damaged": 0, "without digests, as version 0.2 wrote them": 0}
    for path in map(Path, args.paths):
        for run in runs_below(path):
            lines = [f"{run}: {line}" for line in problems(run)]
            found += lines
            counts[
                "damaged" if lines else "intact" if (run / digests.FILE).is_file() else "without digests, as version 0.2 wrote them"
            ] += 1
        for study in path.rglob(STUDY_FILE):
            try:
                read_study(study.parent)
            except UserError as error:
                found.append(str(error))
    if not sum(counts.values()):
        raise UserError(f"check: no run in {', '.join(args.paths)}.")
    print("\n".join([*found, f"{sum(counts.values())} runs: " + ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)]))
    return 2 if found else 0


def explain_command(args: argparse.Namespace) -> int:
    from fedlens.config import keys, known_keys
    from fedlens.errors import unknown
    from fedlens.registry import registry

    wanted = [path for path in keys() if path == args.key or path.startswith(f"{args.key}.")]
    if not wanted:
        raise unknown("key", args.key, known_keys())
    for path in wanted:
        key = keys()[path]
        print(f"{path}: {key.meaning}")
        facts = {"default": "null" if key.default is None else key.default, "range": key.expected, "matters": key.when, "since": key.since}
        for name, fact in facts.items():
            if fact not in ("", None):
                print(f"  {name:8} {fact}")
        if isinstance(key.one_of, str) and len(wanted) == 1:
            for name in registry(key.one_of):
                options = ", ".join(f"{option}={default}" for option, default in registry(key.one_of).options(name).items())
                print(f"    {name:18} {registry(key.one_of).describe(name)}" + (f" [{options}]" if options else ""))
    return 0


def demo_command(args: argparse.Namespace) -> int:
    from fedlens.demo.demo import demo

    page = demo(Path(args.out), args.seed)
    print(f"open {page.resolve()}")
    return 0


def study_command(args: argparse.Namespace) -> int:
    from fedlens.report.content import report
    from fedlens.report.markdown import markdown
    from fedlens.report.write import write_report
    from fedlens.study.estimate import estimate
    from fedlens.study.plan import read_plan
    from fedlens.study.results import Gathered
    from fedlens.study.runner import Study

    plan = read_plan(args.name, place=args.on, seeds=args.seeds, overrides=args.overrides)
    folder = Path(args.out or f"studies/{plan.name}-{plan.place}")
    study = Study(plan, folder, jobs=args.jobs, retry=args.retry, tables=args.tables, replace=args.replace)
    if args.plan:
        untuned = {cell: search.spec.key for search in study.searches if search.next for cell in search.spec.cells}
        for planned in (p for p in study.plan.runs if p.cell.table in study.tables):
            name = f"({untuned[planned.cell]} to be tuned)" if planned.cell in untuned else planned.name
            print(f"{name}  seed {planned.seed}  {planned.cell.table}: {planned.cell.label}")
        print(estimate(study, args.jobs))
        return 0
    results = Gathered([study.run()])
    print(markdown(report(results), details=False))
    if args.report:
        print(f"written: {write_report(results, study.folder / 'report')}")
    return 2 if study.failures else 0


def report_command(args: argparse.Namespace) -> int:
    from fedlens.report.write import write_report
    from fedlens.study.results import gather

    print(f"written: {write_report(gather(args.paths), Path(args.out), args.title, args.figures, args.paper)}")
    return 0


def keep_command(args: argparse.Namespace) -> int:
    from fedlens.study.archive import archive

    for report in archive([Path(path) for path in args.paths], Path(args.out)):
        print(report.text())
    return 0


def doctor_command(args: argparse.Namespace) -> int:
    from fedlens.cli.doctor import examine
    from fedlens.cli.table import print_table

    print_table(["", "found", "how to get it"], examine(args.root), justify="left")
    return 0


def data_prepare_command(args: argparse.Namespace) -> int:
    from fedlens.data.dataset import load_dataset

    data = load_dataset(args.name, args.root, download=True)
    print(f"{data.name}: {len(data.train) + len(data.val):,} training and {len(data.test):,} test images, {data.num_classes} classes")
    return 0


def data_inspect_command(args: argparse.Namespace) -> int:
    from fedlens.cli.table import print_table
    from fedlens.data.dataset import load_dataset
    from fedlens.data.partition import label_counts, partition, partition_stats
    from fedlens.overrides import compose
    from fedlens.report.charts import SHOWN_CLIENTS, partition_chart
    from fedlens.report.vega import save

    config = compose(args.overrides)
    c = config.data
    data = load_dataset(c.name, c.root, val_fraction=c.val_fraction, seed=config.seed, download=c.download)
    labels = data.train.labels
    shards = partition(
        labels, config.federated.clients, c.partition, classes_per_client=c.classes_per_client, alpha=c.alpha, seed=config.seed
    )
    out = Path(args.out if Path(args.out).suffix else f"{args.out}.png")
    try:
        save(partition_chart({c.partition: label_counts(labels, shards)}, "partition"), out.with_suffix(""), [out.suffix[1:]])
    except (UserError, OSError, ValueError) as error:
        raise UserError(f"--out: {first_line(error)}") from None
    stats = partition_stats(labels, shards).as_dict().items()
    title = f"{data.name}: {len(data.train):,} train, {len(data.val):,} validation, {len(data.test):,} test"
    print_table(["", "value"], [[name, f"{v:.4g}" if isinstance(v, float) else f"{v:,}"] for name, v in stats], title)
    print(f"figure: {out}" + (f" (the first {SHOWN_CLIENTS} of {len(shards)} clients)" if len(shards) > SHOWN_CLIENTS else ""))
    return 0


CHOICES = "{choices}"  # in an epilog: choices_text()


class _HelpWithChoices(argparse.RawDescriptionHelpFormatter):
    """Fills in the names that can be chosen when help is shown: the registries import torch."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return super()._fill_text(text.replace(CHOICES, choices_text()) if CHOICES in text else text, width, indent)


def choices_text() -> str:
    """Return the names that `fedlens run` takes, from the registries and the YAML files."""
    from fedlens.config import choices, keys

    named = {f"{group}=": choices(group) for group in ("experiment", "data", "model")}
    named |= {f"{path}=": key.names for path, key in keys().items() if key.from_registry}
    lines = [textwrap.fill(", ".join(names), 100, initial_indent=f"{key:22}", subsequent_indent=" " * 22) for key, names in named.items()]
    return "\n".join(["names to choose from:", *lines, "all keys: fedlens run --print-config; one key: fedlens explain KEY"])


Commands = Any  # argparse's private type of a set of subcommands


def command(where: Commands, name: str, call: Callable[[argparse.Namespace], int], text: str, example: str) -> argparse.ArgumentParser:
    """Add a subcommand with its one-line help and an example."""
    raw = argparse.RawDescriptionHelpFormatter
    new: argparse.ArgumentParser = where.add_parser(name, help=text, description=text, epilog=f"example: {example}", formatter_class=raw)
    new.set_defaults(call=call)
    return new


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    from fedlens.cli.arith import register as register_arith
    from fedlens.cli.federate import register as register_federate
    from fedlens.cli.search import register as register_search

    top = argparse.ArgumentParser(
        prog="fedlens",
        description="Federated fine-tuning of pretrained models under the lens of task arithmetic.",
        epilog="example: fedlens demo",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"fedlens {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    c = command(commands, "demo", demo_command, "Show the method on one HTML page, from runs on embedded data.", "fedlens demo --out demo")
    c.add_argument("--out", default="demo", help="folder of the page and its runs (default: demo)")
    c.add_argument("--seed", type=int, default=0)
    _register_runs(commands)
    _register_data(commands)
    _register_studies(commands)
    register_arith(commands, command)
    register_search(commands, command)
    register_federate(commands, command)
    c = command(commands, "doctor", doctor_command, "Show what is installed, and how to get the rest.", "fedlens doctor")
    c.add_argument("--root", help="data folder to look in")
    return top


def _register_runs(commands: Commands) -> None:
    example = "fedlens run experiment=centralized model=dino_vits16 data=cifar100 optim.lr=1e-4 seed=3\n         fedlens run -m seed=0,1,2"
    c = command(commands, "run", run_command, "Run one experiment, or with -m a sweep.", example)
    c.formatter_class, c.epilog = _HelpWithChoices, f"{c.epilog}\n\n{CHOICES}"
    c.add_argument("overrides", nargs="*", metavar="key=value", help="configuration, as Hydra overrides; other keys have their defaults")
    c.add_argument("-m", "--multirun", action="store_true", help="sweep over comma-separated values")
    c.add_argument("--config", help="start from a saved config.yaml, for example another run's")
    c.add_argument("--print-config", action="store_true", help="print the composed configuration and stop")
    text = "Continue an interrupted run; on a CPU it ends with the same bits."
    c = command(commands, "resume", resume_command, text, "fedlens resume runs/centralized-…")
    c.add_argument("run", help="run folder")
    text = "Verify every file of runs and studies; exit status 2 if one is damaged."
    c = command(commands, "check", check_command, text, "fedlens check runs/centralized-… studies/quick-embedded")
    c.add_argument("paths", nargs="+", metavar="PATH", help="run folders, study folders, or folders of them")
    text = "Explain a configuration key: meaning, range, default, where it matters."
    c = command(commands, "explain", explain_command, text, "fedlens explain server.merge")
    c.add_argument("key", metavar="KEY", help="a key such as optim.lr, or a section such as server")


def _register_data(commands: Commands) -> None:
    data = commands.add_parser("data", help="Download and inspect data sets.", epilog="example: fedlens data inspect data=cifar100")
    parts = data.add_subparsers(dest="part", metavar="COMMAND", required=True)
    text = "Download a data set, or check an existing one."
    c = command(parts, "prepare", data_prepare_command, text, "fedlens data prepare cifar100 --root data")
    c.add_argument("name", help="cifar100, cifar10, fashion_mnist, folder, hf:NAME")
    c.add_argument("--root", help="folder of the data (default: FEDLENS_DATA or ~/.cache/fedlens/data)")
    example = "fedlens data inspect data=cifar100 data.partition=classes data.classes_per_client=5 federated.clients=100"
    c = command(parts, "inspect", data_inspect_command, "Show statistics and a figure of a partition.", example)
    c.add_argument("overrides", nargs="*", metavar="key=value")
    c.add_argument("--out", default="partition.png", help="figure: .png, .pdf or .svg (default: partition.png)")


def _register_studies(commands: Commands) -> None:
    text = "Run a plan of many runs: finished runs are skipped, interrupted ones resumed."
    example = "fedlens study quick\n         fedlens study heterogeneity --on cifar100 --seeds 3 data.root=data"
    c = command(commands, "study", study_command, text, example)
    named = "handin, quick, curves, baselines, heterogeneity, sparsity, calibration, strategies, merging, places, layerscale, momentum, six_models, arithmetic, forgetting"
    c.add_argument("name", help=f"{named}, rates, full; or a YAML file")
    c.add_argument("overrides", nargs="*", metavar="key=value", help="for every run")
    c.add_argument("--on", help="embedded or cifar100 (default: the plan's first)")
    c.add_argument("--seeds", type=int, help="number of seeds (default: the plan's)")
    c.add_argument("--jobs", type=int, default=1, help="runs at a time, in separate processes; one per GPU if there are several")
    c.add_argument("--out", help="study folder (default: studies/NAME-WHERE)")
    c.add_argument("--table", dest="tables", action="append", default=[], metavar="TABLE", help="run this table only; may be repeated")
    c.add_argument("--retry", action="store_true", help="retry runs that failed")
    text = "continue although the folder has finished runs that are not in the plan; they stay, outside its tables"
    c.add_argument("--replace", action="store_true", help=text)
    c.add_argument("--plan", action="store_true", help="list the runs, their time and disk space, and stop")
    c.add_argument("--no-report", dest="report", action="store_false", help="print tables only")
    text = "Report any runs and studies as one HTML page, LaTeX tables, Markdown and CSV."
    c = command(commands, "report", report_command, text, "fedlens report studies/quick-embedded --out report")
    c.add_argument("paths", nargs="+", metavar="PATH", help="run folders, study folders, search folders, or folders of them")
    c.add_argument("--out", default="report", help="report folder (default: report)")
    c.add_argument("--title", help="title of the report")
    c.add_argument("--figures", action="store_true", help="write every figure as PDF and PNG too, which takes longer")
    text = "write a paper to complete, with its figures and, if TeX is installed, its PDF; DOCUMENTCLASS replaces the default layout"
    c.add_argument("--paper", nargs="?", const="", metavar="DOCUMENTCLASS", help=text)
    text = "Copy what a report needs of studies and searches, without weights: to publish, commit, or move."
    c = command(commands, "keep", keep_command, text, "fedlens keep studies/strategies-cifar100 --out results")
    c.add_argument("paths", nargs="+", metavar="PATH", help="study folders, search folders, or folders of them")
    c.add_argument("--out", default="results", help="each goes to a folder of its name in this one (default: results)")


def _prepare_streams() -> None:
    """Make all three standard streams usable: the shell may have closed them, and a path may not be UTF-8."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - until the process ends; the next file would get its number
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _drop_unwritable_output() -> None:
    """Send what standard output cannot take to /dev/null: Python would fail on it again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    _prepare_streams()
    top = parser()
    args, rest = top.parse_known_args(argv)
    if rest and (not hasattr(args, "overrides") or any(word.startswith("-") for word in rest)):
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    elif rest:
        args.overrides += rest  # key=value after an option
    if not log.handlers:
        console = logging.StreamHandler()
        console.setFormatter(OneLine("%(message)s"))
        log.addHandler(console)
        log.setLevel(logging.INFO)
        log.propagate = False
    try:
        with system_errors():
            for word in sys.argv[1:] if argv is None else argv:
                check_utf8(word, "argument")
            status: int = args.call(args)
            sys.stdout.flush()
            return status
    except UserError as error:
        with suppress(OSError):
            print(f"error: {error}", file=sys.stderr)
        _drop_unwritable_output()
        return 2
    except BrokenPipeError:  # the reader of a pipe has closed it
        _drop_unwritable_output()
        return 141
    except KeyboardInterrupt:
        again = args.command in ("study", "search")
        how = "the same command continues with what is missing" if again else "continue an interrupted run with: fedlens resume RUN"
        print(f"stopped; {how}", file=sys.stderr)
        return 130
