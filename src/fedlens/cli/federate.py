"""`fedlens federate init | join | server | client`: arguments. The work is in deploy/launch.py, imported only when a command runs."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _init(args: argparse.Namespace) -> int:
    from fedlens.deploy.launch import init

    return init(Path(args.folder), sites=args.sites, address=args.address, overrides=args.overrides, join=args.join)


def _join(args: argparse.Namespace) -> int:
    from fedlens.deploy.launch import join

    return join(Path(args.site))


def _server(args: argparse.Namespace) -> int:
    from fedlens.deploy.launch import server

    return server(Path(args.folder), args.overrides, simulate=args.simulate)


def _client(args: argparse.Namespace) -> int:
    from fedlens.deploy.launch import client

    given = {"own_data": args.own_data, "address": args.address, "patience": args.patience, "trusted_entities": args.trusted_entities}
    return client(Path(args.site), **given, overrides=args.overrides)


def register(commands: Any, command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `federate` and its commands to the command line."""
    init = "fedlens federate init federation --sites 3 experiment={} federated.clients=3 federated.participation=1"
    parser = commands.add_parser(
        "federate",
        help="Run a real federation on Flower: create its folder, start its server and its sites.",
        epilog=f"example: {init.format('fedavg_iid_sparse')}",
    )
    parts = parser.add_subparsers(dest="part", metavar="COMMAND", required=True)
    c = command(parts, "init", _init, "Create the folder: the app, certificates, a key per site.", init.format("fedavg_iid"))
    c.add_argument("folder", help="a new folder")
    c.add_argument("overrides", nargs="*", metavar="key=value", help="configuration of the run, as for fedlens run")
    c.add_argument("--sites", type=int, default=3, help="number of sites, among which the clients are distributed (default: 3)")
    c.add_argument("--address", default="127.0.0.1:9092", help="address at which sites reach the server (default: 127.0.0.1:9092)")
    c.add_argument("--join", action="store_true", help="make no keys: each site makes its own with fedlens federate join")
    c = command(parts, "join", _join, "Make a site's key at the site, and print what to send to the server.", "fedlens federate join site")
    c.add_argument("site", help="a copy of FOLDER/sites/K on this machine")
    c = command(parts, "server", _server, "Start the server and its run, or resume the run.", "fedlens federate server federation")
    c.add_argument("folder", help="the federation's folder")
    c.add_argument("overrides", nargs="*", metavar="key=value", help="applied after the folder's, for example deploy.deadline=120")
    c.add_argument("--simulate", action="store_true", help="let Flower simulate the sites on this machine, with the same apps")
    examples = "fedlens federate client federation/sites/0\n         fedlens federate client site --own-data data.name=folder data.root=/data/images"
    c = command(parts, "client", _client, "Start a site.", examples)
    c.add_argument("site", help="FOLDER/sites/K, or a copy of it on this machine")
    c.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="the site's own keys: device, data.name, data.root, model.weights, train.compile, train.precision",
    )
    c.add_argument("--own-data", action="store_true", help="all training data on this machine is this site's, as one client")
    c.add_argument("--address", help="address of the server, if it differs from the folder's")
    c.add_argument("--patience", type=float, default=180.0, help="seconds to keep trying while the server rejects the site (default: 180)")
    c.add_argument("--trusted-entities", metavar="FILE", help="Flower's list of public keys: run only apps that one of them has signed")
