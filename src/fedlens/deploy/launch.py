"""`fedlens federate init | join | server | client`: the folder of a federation, its server, its sites. Flower's programs do the work.

FOLDER/app        the Flower app: two files that import fedlens' apps, and the configuration
FOLDER/server     certificates, the sites' public keys, SuperLink's state; stays on the server
FOLDER/sites/K    what site K needs: copy it there
FOLDER/run        the run: metrics, checkpoints, summary, model
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from urllib.parse import quote

from fedlens.deploy.programs import PINNED_APP, SITE_KEYS, TIED
from fedlens.deploy.protocol import check_site_overrides, from_setting, to_setting
from fedlens.errors import UserError, bad_value

APP = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "federation"
version = "1.0.0"
description = "A federation of fedlens"
license = "Apache-2.0"
dependencies = ["fedlens[flower]"]

[tool.flwr.app]
publisher = "local"

[tool.flwr.app.components]
serverapp = "federation.server_app:app"
clientapp = "federation.client_app:app"

# overrides: as for `fedlens run`. run-dir: the run's folder on the server, from which it resumes.
# keys: the sites' public keys, which decide each site's clients. Rare characters are escaped as in a URL: %27 is a quote, %25 a percent sign.
[tool.flwr.app.config]
overrides = {overrides}
run-dir = {run}
keys = ""
escaped = true
"""
MODULE = '"""The {role}."""\n\nfrom fedlens.deploy.flower import {name} as app\n\n__all__ = ["app"]\n'
OLD_MODULE = "fedlens.engine.flower"  # the package of the apps up to fedlens 0.2
CONNECTION = "federation"  # name of Flower's connection to SuperLink
START_TIMEOUT = 60.0  # seconds for SuperLink to start
STOP_TIMEOUT = 15.0  # seconds for a program to stop
PATIENCE = 180.0  # seconds that a rejected site keeps trying
RETRY = 5.0  # seconds between its tries
DATABASE = "state.db"  # SuperLink's state, in FOLDER/server
MESSAGES = ("objects", "object_children", "run_objects", "message", "message_ins", "message_res", "task_message")  # its tables of messages
INSTALL = "pip install 'fedlens[flower]', best in an environment of its own."


@contextmanager
def private_files() -> Iterator[None]:
    """Let only this user read the files that this process and its children make meanwhile."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@private_files()
def init(folder: Path, *, sites: int, address: str, overrides: Sequence[str], join: bool = False) -> int:
    """Create the folder of a federation. Nothing is started or overwritten. `join`: each site makes its own key, see `join`."""
    from fedlens.overrides import compose

    host, port = split_address(address)
    config = compose(overrides)
    if config.trainer != "federated":
        raise UserError(f"experiment must be a federated one, got {config.experiment!r}, which has no clients.")
    if sites < 1 or sites > config.federated.clients:
        raise bad_value("--sites", sites, f"1 to federated.clients ({config.federated.clients})")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"federate init: {folder} exists and is not an empty folder; choose another.")
    package, keys = folder / "app" / "federation", folder / "server"
    package.mkdir(parents=True)
    settings = {"overrides": to_setting(shlex.join(overrides)), "run": to_setting(str((folder / "run").resolve()))}
    (folder / "app" / "pyproject.toml").write_text(APP.format(**settings))
    (package / "__init__.py").write_text("")
    (package / "server_app.py").write_text(MODULE.format(role="server", name="server_app"))
    (package / "client_app.py").write_text(MODULE.format(role="site", name="client_app"))
    _keys().make_certificates(keys, list(dict.fromkeys([host, "localhost", "127.0.0.1"])))
    (keys / "address").write_text(f"{host}:{port}\n")
    (keys / "sites").mkdir()
    (keys / "sites" / "count").write_text(f"{sites}\n")
    for k in range(sites):
        site = folder / "sites" / str(k)
        site.mkdir(parents=True)
        if not join:
            _keys().make_site_key(site / "key", keys / "sites" / f"{k}.pub")
        shutil.copy(keys / "ca.crt", site / "ca.crt")
        (site / "site.json").write_text(json.dumps({"address": f"{host}:{port}", "number": k, "of": sites}) + "\n")
    print(f"{folder}: a federation of {sites} sites and {config.federated.clients} clients, server at {host}:{port}")
    print(f"the server:  fedlens federate server {folder}")
    for k in range(min(sites, 3)):
        print(f"site {k}:      fedlens federate {'join' if join else 'client'} {folder / 'sites' / str(k)}")
    if not join:
        print(f"Copy each folder of {folder / 'sites'} to its site, then delete it here: whoever has its key is that site.")
    return 0


def _keys() -> ModuleType:
    try:
        from fedlens.deploy import keys
    except ImportError:
        raise UserError(f"federate: Flower is not installed; {INSTALL}") from None
    return keys


def _require_flower() -> None:
    if find_spec("flwr") is None:
        raise UserError(f"federate: Flower is not installed; {INSTALL}")


@private_files()
def join(site: Path) -> int:
    """Make this site's key. The private part stays here."""
    public = site / f"{_read_site(site)[0]}.pub"
    if (site / "key").exists() or public.exists():
        raise UserError(f"federate join: {site} has a key already; remove key and {public.name} to make another.")
    _keys().make_site_key(site / "key", public)
    print(f"Send {public} to the server, which needs it in FOLDER/server/sites before it starts. The file key stays here.")
    return 0


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise bad_value("--address", address, "HOST:PORT, for example 127.0.0.1:9092")
    return host.strip("[]"), int(port)


def environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's programs, with their files in `home`. By default Flower neither installs packages nor sends telemetry."""
    home.mkdir(parents=True, exist_ok=True)
    return {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",  # seconds until the server starts a run; Flower's default is 1
        **os.environ,
        "FLWR_HOME": str(home.resolve()),
        TIED: "1",
        "FORWARDED_ALLOW_IPS": "",  # no proxy may name another client address: see programs.SitesOnly
        "PATH": str(Path(sys.executable).parent) + os.pathsep + os.environ.get("PATH", ""),  # Flower starts its programs by name
    }


# --- the server ------------------------------------------------------------------------------------------------------


def server(folder: Path, overrides: Sequence[str] = (), *, simulate: bool = False) -> int:
    """Start SuperLink and a run on it, or resume the run; return 0 once the run is finished. `simulate`: Flower simulates the sites on this machine."""
    from fedlens.overrides import compose

    keys = folder / "server"
    if not (keys / "address").is_file():
        raise UserError(f"federate server: {folder} is not a federation's folder; create one: fedlens federate init {folder}")
    host, port = split_address((keys / "address").read_text().strip())
    settings = app_config(folder / "app" / "pyproject.toml")
    _update_app(folder / "app" / "federation")
    overrides = [*shlex.split(settings["overrides"]), *overrides]
    config = compose(overrides)  # report errors before anything starts
    run = Path(config.run.dir or settings["run-dir"]).resolve()
    if (run / "summary.json").is_file():
        if not _is_healthy(keys / "ca.crt", port):
            erase_messages(keys / DATABASE)  # in case the server was killed at the very end
        return _report(run)
    _require_flower()
    public_keys = [_keys().read_public_key(file) for file in (keys / "sites").glob("*.pub")]
    env = environment(keys / "flwr")
    if simulate:
        host, port = "127.0.0.1", free_port()
    with superlink(keys, host, port, env, simulate=simulate):
        sites = len(public_keys)
        print(f"{sites} simulated sites" if simulate else f"server at {host}:{port}, {sites} sites may join", flush=True)
        print(f"SHA-256 of the app, which a site can pin in site.json: {app_digest(folder / 'app')}", flush=True)
        run_app(folder / "app", run, overrides, env, keys=None if simulate else keys / "sites", simulated_sites=sites)
    if (run / "summary.json").is_file():
        return _report(run)
    print(f"error: the run is not finished; its rounds are saved. Resume it: fedlens federate server {folder}", file=sys.stderr)
    return 1


def run_app(app: Path, run: Path, overrides: Sequence[str], env: Mapping[str, str], *, keys: Path | None, simulated_sites: int = 0) -> None:
    """Run a Flower app on the SuperLink of this environment and wait for its end. `keys`: the sites' public keys; None in a simulation."""
    overrides = [text for text in overrides if not text.startswith("run.dir=")]
    settings = {"overrides": shlex.join(overrides), "run-dir": str(run)} | ({"keys": str(keys.resolve())} if keys else {})
    config = " ".join(f"{key}={to_setting(value)}" for key, value in settings.items())
    command = [sys.executable, "-m", "flwr.cli.app", "run", str(app), CONNECTION, "--stream", "--run-config", config]
    if keys is None:
        command += ["--federation-config", f"num-supernodes={simulated_sites} client-resources-num-cpus=1"]
    with _child(command, env) as flwr:
        flwr.wait()


def app_digest(app: Path) -> str:
    """Return the SHA-256 of the bundle that Flower makes of an app and sends to the sites."""
    from flwr.cli.build import build_fab_from_disk

    return hashlib.sha256(build_fab_from_disk(app)).hexdigest()


def _report(run: Path) -> int:
    accuracy = json.loads((run / "summary.json").read_text())["test_accuracy"]
    print(f"finished: {run}" + ("" if accuracy is None else f", test accuracy {100 * accuracy:.2f} %"))
    return 0


def app_config(path: Path) -> dict[str, str]:
    """Return the settings of a federation's app as plain texts."""
    try:
        settings = tomllib.loads(path.read_text())["tool"]["flwr"]["app"]["config"]
        plain = from_setting if settings.get("escaped") else str  # folders of old versions hold unescaped values
        return {"overrides": plain(settings["overrides"]), "run-dir": plain(settings["run-dir"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"federate server: {path} cannot be read ({error})") from None


def _update_app(package: Path) -> None:
    """Let the app of a folder from fedlens 0.2 import the apps from where they are now."""
    for file in sorted(package.glob("*.py")):
        if OLD_MODULE not in (text := file.read_text()):
            continue
        text = re.sub(rf"\b{re.escape(OLD_MODULE)}\.(apps|client)\b", "fedlens.deploy.flower", text)
        if OLD_MODULE in text:
            raise UserError(f"federate server: {file} imports {OLD_MODULE}, which is now fedlens.deploy; change its imports.")
        file.write_text(text)


@contextmanager
def superlink(keys: Path, host: str, port: int, env: Mapping[str, str], *, simulate: bool = False) -> Iterator[None]:
    """Run Flower's server until the block ends, with TLS, authenticated sites and its state on disk."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise UserError(f"federate server: port {port} is taken; is another server running?")
    command = [sys.executable, "-m", "fedlens.deploy.programs", "superlink", "--disable-runtime-dependency-installation"]
    command += ["--host", "127.0.0.1" if host in ("localhost", "127.0.0.1", "::1") else "0.0.0.0", "--port", str(port)]
    for option, name in (("--ssl-ca-certfile", "ca.crt"), ("--ssl-certfile", "server.pem"), ("--ssl-keyfile", "server.key")):
        command += [option, str(keys / name)]
    database = f"sqlite:///{quote(str((keys / DATABASE).resolve()))}"
    if simulate:
        command += ["--simulation"]
    else:
        command += ["--enable-supernode-auth", "--database", database]
        env = {**env, SITE_KEYS: str(keys / "sites")}
    for path in (keys, *keys.rglob("*")):  # folders of old versions were open to other users
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & 0o700)
    try:
        with (
            private_files(),
            (keys / "superlink.log").open("ab") as log,
            _child(command, env, stdout=log, stderr=log, stdin=subprocess.PIPE) as process,
        ):
            end = time.monotonic() + START_TIMEOUT
            while not _is_healthy(keys / "ca.crt", port):
                if process.poll() is not None or time.monotonic() > end:
                    raise UserError(f"federate server: SuperLink did not start; see {keys / 'superlink.log'}.")
                time.sleep(0.1)
            (Path(env["FLWR_HOME"]) / "config.toml").write_text(
                f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "127.0.0.1:{port}"\n'
                f"root-certificates = {json.dumps(str((keys / 'ca.crt').resolve()), ensure_ascii=False)}\n",
                encoding="utf-8",
            )
            yield
    finally:
        erase_messages(keys / DATABASE)


def erase_messages(database: Path) -> None:
    """Overwrite all messages in SuperLink's state, also those that it has deleted: they hold whole updates of clients, before any noise."""
    if not database.is_file():
        return
    try:
        with closing(sqlite3.connect(database, isolation_level=None, timeout=START_TIMEOUT)) as state:
            state.execute("PRAGMA secure_delete = ON")
            tables = {name for (name,) in state.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            for table in tables.intersection(MESSAGES):
                state.execute(f"DELETE FROM {table}")
            state.executescript("VACUUM; PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error as error:
        print(f"warning: {database} may still hold clients' updates ({error}); delete it when no server runs.", file=sys.stderr)


def _is_healthy(authority: Path, port: int) -> bool:
    try:
        context = ssl.create_default_context(cafile=str(authority))
        with urllib.request.urlopen(f"https://127.0.0.1:{port}/health", timeout=2, context=context) as reply:
            return bool(reply.status == 200)
    except (OSError, ValueError):
        return False


@contextmanager
def _child(command: Sequence[str], env: Mapping[str, str], **pipes: object) -> "Iterator[subprocess.Popen[bytes]]":
    """Run a process in a group of its own, and end the group with the block."""
    process = subprocess.Popen(command, env=dict(env), start_new_session=True, **pipes)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.stdin is not None:
            process.stdin.close()


def free_port() -> int:
    """Return a port that no process listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


# --- a site ----------------------------------------------------------------------------------------------------------


def _read_site(site: Path) -> tuple[int, int, str, str]:
    """Return a site's number, the number of sites, the server's address, and the SHA-256 of the only app that the site runs, or ""."""
    try:
        known = json.loads((site / "site.json").read_text())
        return int(known["number"]), int(known["of"]), str(known["address"]), str(known.get("app", ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"federate: {site} is not a site's folder; use FOLDER/sites/K of a federation.") from None


def client_options(site: Path, *, own_data: bool, address: str | None, overrides: Sequence[str]) -> list[str]:
    """Return SuperNode's options: this site's key, certificate and number."""
    number, sites, known_address, _ = _read_site(site)
    superlink_address = address or known_address
    check_site_overrides(overrides)
    split_address(superlink_address)
    config = [f"partition-id={number}", f"num-partitions={sites}"]
    config += ["own-data=true"] if own_data else []
    config += [f"overrides={to_setting(shlex.join(overrides))}"] if overrides else []
    return [
        *("--superlink", superlink_address),
        *("--root-certificates", str(site / "ca.crt")),
        *("--auth-supernode-private-key", str(site / "key")),
        *("--port", str(free_port())),
        *("--node-config", " ".join(config)),
    ]


@private_files()
def client(
    site: Path,
    *,
    own_data: bool = False,
    address: str | None = None,
    patience: float = PATIENCE,
    trusted_entities: str | None = None,
    overrides: Sequence[str] = (),
) -> int:
    """Run the site's SuperNode until it is stopped. A rejected one is restarted for `patience` seconds: a restarted site is rejected until the server
    has noticed the death of its predecessor, which takes a minute."""
    options = client_options(site, own_data=own_data, address=address, overrides=overrides)
    if not (site / "key").is_file():
        raise UserError(f"federate client: {site} has no key; make one: fedlens federate join {site}")
    options += ["--trusted-entities", trusted_entities] if trusted_entities else []
    env = environment(site / "flwr") | {PINNED_APP: _read_site(site)[3]}
    _require_flower()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # unwinds, so that the SuperNode ends too
    end = time.monotonic() + patience
    while True:
        began = time.monotonic()
        with _child([sys.executable, "-m", "fedlens.deploy.programs", "supernode", *options], env, stdin=subprocess.PIPE) as node:
            status = node.wait()
        if status == 0:
            return 0
        if time.monotonic() - began > START_TIMEOUT:
            end = time.monotonic() + patience  # it had been accepted
        if time.monotonic() > end:
            raise UserError(
                "federate client: the server rejects this site: its key is unknown, or another process with this key is connected."
            )
        print(f"rejected by the server, or disconnected; trying again for {end - time.monotonic():.0f} s", file=sys.stderr, flush=True)
        time.sleep(RETRY)
