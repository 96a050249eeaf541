"""Every command, its arguments and an example. Importing this module imports nothing heavy, so that --help is quick."""

import argparse
import re
import textwrap
from pathlib import Path
from typing import Any

from fedlens import __version__

CHOICES = "{choices}"  # in an epilog: choices_text()
INPUT = "run folders (their τ) or task-vector files"
NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$", re.IGNORECASE)  # argparse takes -1e-3 for an option before Python 3.14
ALPHAS = "start:stop:count or a,b,c; write it with =, as in --alphas=-1:2:13"
Commands = Any  # argparse's private type of a set of subcommands


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


def command(where: Commands, name: str, call: str, about: str, example: str) -> argparse.ArgumentParser:
    """Add a command with its one-line help and an example. `call`: the module in this package, or its full name, and the function."""
    raw = argparse.RawDescriptionHelpFormatter
    new: argparse.ArgumentParser = where.add_parser(name, help=about, description=about, epilog=f"example: {example}", formatter_class=raw)
    new.set_defaults(call=call if call.startswith("fedlens.") else f"fedlens.cli.{call}")
    return new


def group(where: Commands, name: str, about: str, example: str) -> Commands:
    """Add a command that consists of commands."""
    new = where.add_parser(name, help=about, description=about, epilog=f"example: {example}")
    return new.add_subparsers(dest="part", metavar="COMMAND", required=True)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = argparse.ArgumentParser(
        prog="fedlens",
        description="Federated fine-tuning of pretrained models under the lens of task arithmetic.",
        epilog="example: fedlens demo",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"fedlens {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    c = command(commands, "demo", "runs:demo", "Show the method on one HTML page, from runs on embedded data.", "fedlens demo --out demo")
    c.add_argument("--out", default="demo", help="folder of the page and its runs (default: demo)")
    c.add_argument("--seed", type=int, default=0)
    _add_runs(commands)
    _add_data(commands)
    _add_studies(commands)
    _add_arith(commands)
    _add_federate(commands)
    c = command(commands, "doctor", "doctor:doctor", "Show what is installed, and how to get the rest.", "fedlens doctor")
    c.add_argument("--root", help="data folder to look in")
    return top


def _add_runs(commands: Commands) -> None:
    example = "fedlens run experiment=centralized model=dino_vits16 data=cifar100 optim.lr=1e-4 seed=3\n         fedlens run -m seed=0,1,2"
    c = command(commands, "run", "runs:run", "Run one experiment, or with -m a sweep.", example)
    c.formatter_class, c.epilog = _HelpWithChoices, f"{c.epilog}\n\n{CHOICES}"
    c.add_argument("overrides", nargs="*", metavar="key=value", help="configuration, as Hydra overrides; other keys have their defaults")
    c.add_argument("-m", "--multirun", action="store_true", help="sweep over comma-separated values")
    c.add_argument("--config", help="start from a saved config.yaml, for example another run's")
    c.add_argument("--print-config", action="store_true", help="print the composed configuration and stop")
    text = "Continue an interrupted run; on a CPU it ends with the same bits."
    c = command(commands, "resume", "runs:resume", text, "fedlens resume runs/centralized-…")
    c.add_argument("run", help="run folder")
    text = "Verify every file of runs and studies; exit status 2 if one is damaged."
    c = command(commands, "check", "runs:check", text, "fedlens check runs/centralized-… studies/quick-embedded")
    c.add_argument("paths", nargs="+", metavar="PATH", help="run folders, study folders, or folders of them")
    text = "Explain a configuration key: meaning, range, default, where it matters."
    c = command(commands, "explain", "runs:explain", text, "fedlens explain server.merge")
    c.add_argument("key", metavar="KEY", help="a key such as optim.lr, or a section such as server")


def _add_data(commands: Commands) -> None:
    parts = group(commands, "data", "Download and inspect data sets.", "fedlens data inspect data=cifar100")
    text = "Download a data set, or check an existing one."
    c = command(parts, "prepare", "data:prepare", text, "fedlens data prepare cifar100 --root data")
    c.add_argument("name", help="cifar100, cifar10, fashion_mnist, folder, hf:NAME")
    c.add_argument("--root", help="folder of the data (default: FEDLENS_DATA or ~/.cache/fedlens/data)")
    example = "fedlens data inspect data=cifar100 data.partition=classes data.classes_per_client=5 federated.clients=100"
    c = command(parts, "inspect", "data:inspect", "Show statistics and a figure of a partition.", example)
    c.add_argument("overrides", nargs="*", metavar="key=value")
    c.add_argument("--out", default="partition.png", help="figure: .png, .pdf or .svg (default: partition.png)")


def _add_studies(commands: Commands) -> None:
    text = "Run a plan of many runs: finished runs are skipped, interrupted ones resumed."
    example = "fedlens study quick\n         fedlens study heterogeneity --on cifar100 --seeds 3 data.root=data"
    c = command(commands, "study", "studies:study", text, example)
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
    c.add_argument("--no-report", dest="html", action="store_false", help="print tables only")
    text = "Search hyper-parameters on validation. Started again, it resumes the interrupted trial and skips the finished ones."
    example = "fedlens search fedavg_noniid\n         fedlens search sparse --on cifar100 --trials 40 data.root=data"
    c = command(commands, "search", "studies:search", text, example)
    c.add_argument("name", help="centralized, fedavg_iid, fedavg_noniid, sparse; or a YAML file")
    c.add_argument("overrides", nargs="*", metavar="key=value", help="for every trial; these keys are not searched")
    c.add_argument("--on", help="embedded or cifar100 (default: the space's first)")
    c.add_argument("--trials", type=int, help="total number of trials, including finished ones (default: the space's)")
    c.add_argument("--jobs", type=int, default=1, help="trials in parallel: one process per trial, one GPU per process if possible")
    c.add_argument("--out", help="the search's folder (default: searches/NAME-WHERE)")
    text = "Report any runs and studies as one HTML page, LaTeX tables, Markdown and CSV."
    c = command(commands, "report", "studies:report", text, "fedlens report studies/quick-embedded --out report")
    c.add_argument("paths", nargs="+", metavar="PATH", help="run folders, study folders, search folders, or folders of them")
    c.add_argument("--out", default="report", help="report folder (default: report)")
    c.add_argument("--title", help="title of the report")
    c.add_argument("--figures", action="store_true", help="write every figure as PDF and PNG too, which takes longer")
    text = "write a paper to complete, with its figures and, if TeX is installed, its PDF; DOCUMENTCLASS replaces the default layout"
    c.add_argument("--paper", nargs="?", const="", metavar="DOCUMENTCLASS", help=text)
    text = "Copy what a report needs of studies and searches, without weights: to publish, commit, or move."
    c = command(commands, "keep", "studies:keep", text, "fedlens keep studies/strategies-cifar100 --out results")
    c.add_argument("paths", nargs="+", metavar="PATH", help="study folders, search folders, or folders of them")
    c.add_argument("--out", default="results", help="each goes to a folder of its name in this one (default: results)")


def _add_arith(commands: Commands) -> None:
    text = "Task arithmetic on finished runs: combine task vectors, move along them, forget clients."
    parts = group(commands, "arith", text, "fedlens arith sweep runs/centralized-…")
    _add_algebra(parts)
    _add_measurements(parts)


def _add_algebra(parts: Commands) -> None:
    merge = "fedlens arith merge RUN_A RUN_B --rule ties --option density=0.2 --out tau.safetensors"
    for name, about, example in (
        ("add", "The sum of task vectors.", "fedlens arith add RUN_A RUN_B --out tau.safetensors"),
        ("negate", "−τ.", "fedlens arith negate RUN --out tau.safetensors"),
        ("scale", "τ times a number.", "fedlens arith scale RUN 0.5 --out tau.safetensors"),
        ("merge", "Merge task vectors into one.", merge),
    ):
        c = command(parts, name, f"arith:{name}", about, example)
        c.add_argument("inputs", nargs="+" if name in ("add", "merge") else 1, metavar="RUN|FILE", help=INPUT)
        if name == "scale":
            c.add_argument("factor")
            c._negative_number_matcher = NEGATIVE
        c.add_argument("--out", required=True, help="file of the new task vector")
    rules = "mean, median, trimmed_mean, clipped_mean, sum, ties, dare, fisher (runs only), breadcrumbs"
    c.add_argument("--rule", default="mean", help=rules)
    c.add_argument("--weights", help="one number per input, as in 1,2 (default: equal)")
    c.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the rule, as in density=0.2")
    _add_device(c)


def _add_measurements(parts: Commands) -> None:
    about = "θ₀ + α·τ: validation chooses α; test accuracy at that α, 0 and 1."
    c = command(parts, "sweep", "arith:sweep", about, "fedlens arith sweep runs/fedavg_iid-… --alphas=-1:2:13 --out sweep")
    c.add_argument("run", metavar="RUN", help="the run with θ₀, model and data")
    c.add_argument("tau", nargs="?", metavar="TAU", help="another run folder or task-vector file (default: RUN's own τ)")
    c.add_argument("--alphas", help=f"{ALPHAS} (default: from -1 to 2; for a sparse τ to 1/density, at most 10)")
    _add_out(c)

    about = "W_a + α(W_b − W_a) between two finished runs of the same data and model."
    c = command(parts, "interpolate", "arith:interpolate", about, "fedlens arith interpolate runs/centralized-… runs/fedavg_iid-…")
    c.add_argument("runs", nargs=2, metavar="RUN")
    c.add_argument("--alphas", default="0:1:11", help=f"{ALPHAS} (default: 0:1:11)")
    _add_out(c)

    about = "Subtract a client's contribution (needs federated.client_vectors=true) or any τ, so that its classes are forgotten."
    c = command(parts, "forget", "arith:forget", about, "fedlens arith forget runs/fedavg_noniid-… --client 3 --keep 0.95")
    c.add_argument("run", metavar="RUN")
    c.add_argument("--client", help="number of the client; the target is the classes that it holds")
    c.add_argument("--tau", metavar="RUN|FILE", help="the task vector to subtract instead of a client's")
    c.add_argument("--classes", help="with --tau: the target classes, as in 3,7 or by name")
    c.add_argument("--keep", default="0.95", help="fraction of the other classes' accuracy that must remain (default: 0.95)")
    c.add_argument("--alphas", help=f"{ALPHAS}, each >= 0 (default: rising up to 40, until the target is 0 or the control is lost)")
    _add_out(c)

    about = "Cosines, sign conflict, drift ratio and linearity of task vectors; for two also the map ξ(α₁, α₂)."
    c = command(parts, "interference", "arith:interference", about, "fedlens arith interference runs/fedavg_noniid-… --clients 0,3")
    c.add_argument("runs", nargs="+", metavar="RUN", help="two or more runs, or one with --clients")
    c.add_argument("--clients", help="clients of one run, as in 0,3 (needs federated.client_vectors=true)")
    c.add_argument("--alphas", default="-1.5:1.5:7", help=f"α along both axes of the map: {ALPHAS} (default: -1.5:1.5:7)")
    c.add_argument("--samples", default="500", help="validation images per task (default: 500)")
    _add_out(c)


def _add_device(c: argparse.ArgumentParser) -> None:
    c.add_argument("--device", help="auto, cpu, cuda, … (default: the run's)")
    c.add_argument("--root", help="folder of the data (default: the run's)")


def _add_out(c: argparse.ArgumentParser) -> None:
    c.add_argument("--out", help="folder for the figure and the numbers (default: RUN/arith)")
    _add_device(c)


def _add_federate(commands: Commands) -> None:
    init = "fedlens federate init federation --sites 3 experiment={} federated.clients=3 federated.participation=1"
    about = "Run a real federation on Flower: create its folder, start its server and its sites."
    parts = group(commands, "federate", about, init.format("fedavg_iid_sparse"))
    about = "Create the folder: the app, certificates, a key per site."
    c = command(parts, "init", "fedlens.deploy.launch:init", about, init.format("fedavg_iid"))
    c.add_argument("folder", type=Path, help="a new folder")
    c.add_argument("overrides", nargs="*", metavar="key=value", help="configuration of the run, as for fedlens run")
    c.add_argument("--sites", type=int, default=3, help="number of sites, among which the clients are distributed (default: 3)")
    c.add_argument("--address", default="127.0.0.1:9092", help="address at which sites reach the server (default: 127.0.0.1:9092)")
    c.add_argument("--join", action="store_true", help="make no keys: each site makes its own with fedlens federate join")
    about = "Make a site's key at the site, and print what to send to the server."
    c = command(parts, "join", "fedlens.deploy.launch:join", about, "fedlens federate join site")
    c.add_argument("site", type=Path, help="a copy of FOLDER/sites/K on this machine")
    c = command(
        parts,
        "server",
        "fedlens.deploy.launch:server",
        "Start the server and its run, or resume the run.",
        "fedlens federate server federation",
    )
    c.add_argument("folder", type=Path, help="the federation's folder")
    c.add_argument("overrides", nargs="*", metavar="key=value", help="applied after the folder's, for example deploy.deadline=120")
    c.add_argument("--simulate", action="store_true", help="let Flower simulate the sites on this machine, with the same apps")
    examples = "fedlens federate client federation/sites/0\n         fedlens federate client site --own-data data.name=folder data.root=/data/images"
    c = command(parts, "client", "fedlens.deploy.launch:client", "Start a site.", examples)
    c.add_argument("site", type=Path, help="FOLDER/sites/K, or a copy of it on this machine")
    own = "the site's own keys: device, data.name, data.root, model.weights, train.compile, train.precision"
    c.add_argument("overrides", nargs="*", metavar="key=value", help=own)
    c.add_argument("--own-data", action="store_true", help="all training data on this machine is this site's, as one client")
    c.add_argument("--address", help="address of the server, if it differs from the folder's")
    c.add_argument("--patience", type=float, default=180.0, help="seconds to keep trying while the server rejects the site (default: 180)")
    c.add_argument("--trusted-entities", metavar="FILE", help="Flower's list of public keys: run only apps that one of them has signed")
