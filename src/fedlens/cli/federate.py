"""`fedlens federate init | server | client`: arguments. The work is in deploy/launch.py; nothing heavy is imported before a command runs."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _init(args: argparse.Namespace) -> int:
    from fedlens.deploy.launch import init

    return init(Path(args.folder), sites=args.sites, address=args.address, overrides=args.overrides)


def _server(args: argparse.Namespace) -> int:
    from fedlens.deploy.launch import server

    return server(Path(args.folder), args.overrides, simulate=args.simulate)


def _client(args: argparse.Namespace) -> int:
    from fedlens.deploy.launch import client

    return client(Path(args.site), own_data=args.own_data, address=args.address, patience=args.patience, overrides=args.overrides)


def register(commands: Any, command: Callable[..., argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "federate",
        help="A real federation on Flower: its folder, its server, its sites.",
        epilog="example: fedlens federate init federation --sites 3 experiment=fedavg_iid_sparse federated.clients=3 federated.participation=1",
    )
    parts = parser.add_subparsers(dest="part", metavar="COMMAND", required=True)
    c = command(
        parts,
        "init",
        _init,
        "Make the folder: the app, certificates, a key for every site.",
        "fedlens federate init federation --sites 3 experiment=fedavg_iid federated.clients=3 federated.participation=1",
    )
    c.add_argument("folder", help="a new folder")
    c.add_argument("overrides", nargs="*", metavar="key=value", help="of the run, as for fedlens run")
    c.add_argument("--sites", type=int, default=3, help="how many (default: 3); more clients than sites are shared out among them")
    c.add_argument("--address", default="127.0.0.1:9092", help="where sites reach the server (default: 127.0.0.1:9092)")
    c = command(
        parts,
        "server",
        _server,
        "Start the server and its run, or go on with it.",
        "fedlens federate server federation",
    )
    c.add_argument("folder", help="the federation's folder")
    c.add_argument("overrides", nargs="*", metavar="key=value", help="on top of the folder's, for example deploy.deadline=120")
    c.add_argument("--simulate", action="store_true", help="sites are simulated by Flower on this machine, with the same apps")
    c = command(
        parts,
        "client",
        _client,
        "Start a site.",
        "fedlens federate client federation/sites/0\n         fedlens federate client site --own-data data.name=folder data.root=/data/images",
    )
    c.add_argument("site", help="FOLDER/sites/K, or a copy of it on this machine")
    c.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="what is this machine's to say: device, data.name, data.root, model.weights, train.compile, train.precision",
    )
    c.add_argument("--own-data", action="store_true", help="the training data found here is this site's own, all of it")
    c.add_argument("--address", help="of the server, where it differs from the folder's")
    c.add_argument("--patience", type=float, default=180.0, help="seconds to go on trying where the site is not let in (default: 180)")
