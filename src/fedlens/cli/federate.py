"""`fedlens federate init | join | server | client`: arguments. The work is in deploy/launch.py, imported only when a command runs."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any


def federate_command(args: argparse.Namespace) -> int:
    """Call the function of deploy/launch.py that has the command's name and takes its arguments."""
    from fedlens.deploy import launch

    call: Callable[..., int] = getattr(launch, args.part)
    return call(**{name: value for name, value in vars(args).items() if name not in ("command", "part", "call")})


def register(commands: Any, command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `federate` and its commands to the command line."""
    init = "fedlens federate init federation --sites 3 experiment={} federated.clients=3 federated.participation=1"
    parser = commands.add_parser(
        "federate",
        help="Run a real federation on Flower: create its folder, start its server and its sites.",
        epilog=f"example: {init.format('fedavg_iid_sparse')}",
    )
    parts = parser.add_subparsers(dest="part", metavar="COMMAND", required=True)
    about = "Create the folder: the app, certificates, a key per site."
    c = command(parts, "init", federate_command, about, init.format("fedavg_iid"))
    c.add_argument("folder", type=Path, help="a new folder")
    c.add_argument("overrides", nargs="*", metavar="key=value", help="configuration of the run, as for fedlens run")
    c.add_argument("--sites", type=int, default=3, help="number of sites, among which the clients are distributed (default: 3)")
    c.add_argument("--address", default="127.0.0.1:9092", help="address at which sites reach the server (default: 127.0.0.1:9092)")
    c.add_argument("--join", action="store_true", help="make no keys: each site makes its own with fedlens federate join")
    about = "Make a site's key at the site, and print what to send to the server."
    c = command(parts, "join", federate_command, about, "fedlens federate join site")
    c.add_argument("site", type=Path, help="a copy of FOLDER/sites/K on this machine")
    c = command(parts, "server", federate_command, "Start the server and its run, or resume the run.", "fedlens federate server federation")
    c.add_argument("folder", type=Path, help="the federation's folder")
    c.add_argument("overrides", nargs="*", metavar="key=value", help="applied after the folder's, for example deploy.deadline=120")
    c.add_argument("--simulate", action="store_true", help="let Flower simulate the sites on this machine, with the same apps")
    examples = "fedlens federate client federation/sites/0\n         fedlens federate client site --own-data data.name=folder data.root=/data/images"
    c = command(parts, "client", federate_command, "Start a site.", examples)
    c.add_argument("site", type=Path, help="FOLDER/sites/K, or a copy of it on this machine")
    own = "the site's own keys: device, data.name, data.root, model.weights, train.compile, train.precision"
    c.add_argument("overrides", nargs="*", metavar="key=value", help=own)
    c.add_argument("--own-data", action="store_true", help="all training data on this machine is this site's, as one client")
    c.add_argument("--address", help="address of the server, if it differs from the folder's")
    c.add_argument("--patience", type=float, default=180.0, help="seconds to keep trying while the server rejects the site (default: 180)")
    c.add_argument("--trusted-entities", metavar="FILE", help="Flower's list of public keys: run only apps that one of them has signed")
