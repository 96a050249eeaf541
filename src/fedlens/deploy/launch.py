"""`fedlens federate init | server | client`: a federation's folder, its server, its sites. Flower's programs do the work.

FOLDER/app        the Flower app: two files that name fedlens' apps, and the configuration
FOLDER/server     certificates, the sites' public keys, SuperLink's state; stays on the server
FOLDER/sites/K    what site K needs: copy it there
FOLDER/run        the run: metrics, checkpoints, summary, model
"""

import json
import os
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from fedlens.deploy.node import OWN
from fedlens.deploy.programs import TIED
from fedlens.deploy.wire import from_setting, to_setting
from fedlens.errors import UserError, bad_value
from fedlens.overrides import compose

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

# overrides: what `fedlens run` would take. run-dir: where the server keeps the run; the last checkpoint there is where it goes on.
# keys: the sites' public keys; a site has the clients that its key stands for. Rare letters stand as in an address: %27 is a quote, %25 a percent sign.
[tool.flwr.app.config]
overrides = {overrides}
run-dir = {run}
keys = ""
escaped = true
"""
MODULE = '"""{what}"""\n\nfrom fedlens.deploy.{module} import {name} as app\n\n__all__ = ["app"]\n'
CONNECTION = "federation"
STARTS_WITHIN = 60.0  # seconds that SuperLink may take
PATIENCE = 180.0  # seconds that a site goes on trying where it is not let in


def init(folder: Path, *, sites: int, address: str, overrides: Sequence[str]) -> int:
    """The folder of a federation: nothing runs yet, nothing is overwritten."""
    try:
        from fedlens.deploy.keys import make_certificates, make_site_key
    except ImportError:
        raise UserError(
            "federate: Flower is not installed here; pip install 'fedlens[flower]', best in an environment of its own"
        ) from None
    host, port = split_address(address)
    config = compose(overrides)
    if not config.experiment.startswith("fed"):
        raise UserError(f"experiment: {config.experiment} has no clients; allowed is one of the federated ones")
    if sites < 1 or sites > config.federated.clients:
        raise bad_value("--sites", sites, f"1 to federated.clients, {config.federated.clients}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"federate init: {folder} exists and is not an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    package = folder / "app" / "federation"
    package.mkdir(parents=True)
    run = str((folder / "run").resolve())
    (folder / "app" / "pyproject.toml").write_text(APP.format(overrides=to_setting(shlex.join(overrides)), run=to_setting(run)))
    (package / "__init__.py").write_text("")
    (package / "server_app.py").write_text(MODULE.format(what="The server.", module="apps", name="server_app"))
    (package / "client_app.py").write_text(MODULE.format(what="A site.", module="client", name="client_app"))
    make_certificates(folder / "server", list(dict.fromkeys([host, "localhost", "127.0.0.1"])))
    (folder / "server" / "address").write_text(f"{host}:{port}\n")
    (folder / "server" / "sites").mkdir()
    (folder / "server" / "sites" / "count").write_text(f"{sites}\n")
    for k in range(sites):
        site = folder / "sites" / str(k)
        make_site_key(site / "key", folder / "server" / "sites" / f"{k}.pub")
        shutil.copy(folder / "server" / "ca.crt", site / "ca.crt")
        (site / "site.json").write_text(json.dumps({"address": f"{host}:{port}", "number": k, "of": sites}) + "\n")
    print(f"{folder}: a federation of {sites} sites and {config.federated.clients} clients, server at {host}:{port}")
    print(f"the server:  fedlens federate server {folder}")
    for k in range(min(sites, 3)):
        print(f"site {k}:      fedlens federate client {folder / 'sites' / str(k)}")
    return 0


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise bad_value("--address", address, "HOST:PORT, for example 127.0.0.1:9092")
    return host.strip("[]"), int(port)


def environment(home: Path) -> dict[str, str]:
    """Flower's settings in a folder of its own; it neither installs packages nor calls home unless the user has said so, and starts what is to be done at once."""
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1"}
    prompt = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}  # seconds between SuperExec's looks for messages; Flower's own is one
    home.mkdir(parents=True, exist_ok=True)
    programs = str(Path(sys.executable).parent)
    return {
        **quiet,
        **prompt,
        **os.environ,
        "FLWR_HOME": str(home.resolve()),
        TIED: "1",
        "FORWARDED_ALLOW_IPS": "",  # nobody says for another where a request comes from: see programs.SitesOnly
        "PATH": programs + os.pathsep + os.environ.get("PATH", ""),
    }


def program(name: str) -> str:
    found = shutil.which(name, path=str(Path(sys.executable).parent) + os.pathsep + os.environ.get("PATH", ""))
    if found is None:
        raise UserError(f"federate: {name} is not installed here; pip install 'fedlens[flower]'")
    return found


# --- the server ------------------------------------------------------------------------------------------------------


def server(folder: Path, overrides: Sequence[str] = (), *, simulate: bool = False) -> int:
    """SuperLink and a run on it; ends when the run does. The same command goes on with a run that was interrupted. 0: the run is finished.

    simulate: Flower's simulation runtime is the sites, all on this machine.
    """
    keys = folder / "server"
    if not (keys / "address").is_file():
        raise UserError(f"federate server: {folder} is no federation; make one: fedlens federate init {folder}")
    host, port = split_address((keys / "address").read_text().strip())
    given = app_config(folder / "app" / "pyproject.toml")
    texts = [*shlex.split(given["overrides"]), *overrides]
    config = compose(texts)  # what is wrong is told here, before anything starts
    run = Path(config.run.dir or given["run-dir"]).resolve()
    texts = [text for text in texts if not text.startswith("run.dir=")]
    summary = run / "summary.json"
    if summary.is_file():
        return _told(summary)
    env = environment(keys / "flwr")
    if simulate:
        host, port = "127.0.0.1", free_port()
    else:
        _let_in(keys, env)
    with superlink(keys, host, port, env, simulate=simulate):
        sites = len(_public(keys))
        print(f"{sites} simulated sites" if simulate else f"server at {host}:{port}, {sites} sites may join", flush=True)
        told = f"overrides={to_setting(shlex.join(texts))} run-dir={to_setting(str(run))}"
        told += "" if simulate else f" keys={to_setting(str((keys / 'sites').resolve()))}"
        command = [program("flwr"), "run", str(folder / "app"), CONNECTION, "--stream", "--run-config", told]
        if simulate:
            command += ["--federation-config", f"num-supernodes={sites} client-resources-num-cpus=1"]
        with _child(command, env) as flwr:
            flwr.wait()
    if summary.is_file():
        return _told(summary)
    print(
        f"error: the run has not ended; what is done is kept, the same command goes on: fedlens federate server {folder}", file=sys.stderr
    )
    return 1


def _told(summary: Path) -> int:
    found = json.loads(summary.read_text())
    accuracy = found["test_accuracy"]
    print(f"finished: {summary.parent}" + ("" if accuracy is None else f", test accuracy {100 * accuracy:.2f} %"))
    return 0


def app_config(path: Path) -> dict[str, str]:
    """What a federation's app was given when it was made, as plain texts."""
    import tomllib

    try:
        found = tomllib.loads(path.read_text())["tool"]["flwr"]["app"]["config"]
        plain = from_setting if found.get("escaped") else str  # a folder of an older version has its values as they are
        return {"overrides": plain(found["overrides"]), "run-dir": plain(found["run-dir"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"federate server: {path} cannot be read ({error})") from None


def _public(keys: Path) -> list[Path]:
    return sorted((keys / "sites").glob("*.pub"))


def _let_in(keys: Path, env: Mapping[str, str]) -> None:
    """Tell SuperLink the sites' keys, once, before sites can reach it: one that is not known yet would give up."""
    done = keys / "registered"
    if done.is_file():
        return
    with superlink(keys, "127.0.0.1", free_port(), env):
        for public in _public(keys):
            _register(public, env)
    done.touch()


def _register(public: Path, env: Mapping[str, str]) -> None:
    command = [program("flwr"), "supernode", "register", str(public), CONNECTION, "--format", "json"]
    done = subprocess.run(command, env=dict(env), capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if done.returncode and "already" not in said.lower():
        raise UserError(f"federate server: the key {public} was not taken: {' '.join(said.split())[:300]}")


@contextmanager
def superlink(keys: Path, host: str, port: int, env: Mapping[str, str], *, simulate: bool = False) -> Iterator[None]:
    """Flower's server, with TLS, keys of sites and a state on disk, until the block ends."""
    local = host in ("localhost", "127.0.0.1", "::1")
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise UserError(f"federate server: port {port} is taken; is another server running?")
    command = [
        sys.executable,
        "-m",
        "fedlens.deploy.programs",
        "superlink",
        "--host",
        "127.0.0.1" if local else "0.0.0.0",
        "--port",
        str(port),
    ]
    command += [
        "--ssl-ca-certfile",
        str(keys / "ca.crt"),
        "--ssl-certfile",
        str(keys / "server.pem"),
        "--ssl-keyfile",
        str(keys / "server.key"),
    ]
    command += (
        ["--simulation"]
        if simulate
        else ["--enable-supernode-auth", "--database", f"sqlite:///{quote(str((keys / 'state.db').resolve()))}"]
    )
    command += ["--disable-runtime-dependency-installation"]
    with (keys / "superlink.log").open("ab") as log, _child(command, env, stdout=log, stderr=log, stdin=subprocess.PIPE) as link:
        until = time.monotonic() + STARTS_WITHIN
        while not _healthy(keys / "ca.crt", port):
            if link.poll() is not None or time.monotonic() > until:
                raise UserError(f"federate server: SuperLink did not start; see {keys / 'superlink.log'}")
            time.sleep(0.2)
        (Path(env["FLWR_HOME"]) / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "127.0.0.1:{port}"\n'
            f"root-certificates = {json.dumps(str((keys / 'ca.crt').resolve()), ensure_ascii=False)}\n",
            encoding="utf-8",
        )
        yield


def _healthy(authority: Path, port: int) -> bool:
    try:
        context = ssl.create_default_context(cafile=str(authority))
        with urllib.request.urlopen(f"https://127.0.0.1:{port}/health", timeout=2, context=context) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


@contextmanager
def _child(command: Sequence[str], env: Mapping[str, str], **pipes: object) -> "Iterator[subprocess.Popen[bytes]]":
    """A process that does not outlive the block."""
    process = subprocess.Popen(command, env=dict(env), start_new_session=True, **pipes)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        for sign, patience in ((signal.SIGTERM, 15.0), (signal.SIGKILL, None)):
            try:
                if process.poll() is None:
                    os.killpg(process.pid, sign)
                process.wait(patience)
                break
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        if process.stdin is not None:
            process.stdin.close()


# --- a site ----------------------------------------------------------------------------------------------------------


def client_options(site: Path, *, own_data: bool, address: str | None, overrides: Sequence[str]) -> list[str]:
    """SuperNode's options: this site's key, certificate and place."""
    try:
        known = json.loads((site / "site.json").read_text())
        number, of, where = int(known["number"]), int(known["of"]), address or str(known["address"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"federate client: {site} is no site's folder; it is FOLDER/sites/K of a federation") from None
    for text in overrides:
        if text.partition("=")[0] not in OWN:
            raise UserError(f"federate client: {text!r} given, allowed is key=value with {', '.join(OWN)}; the rest is the server's to say")
    split_address(where)
    config = [f"partition-id={number}", f"num-partitions={of}"]
    config += ["own-data=true"] if own_data else []
    config += [f"overrides={to_setting(shlex.join(overrides))}"] if overrides else []
    return [
        *("--superlink", where),
        *("--root-certificates", str(site / "ca.crt")),
        *("--auth-supernode-private-key", str(site / "key")),
        *("--port", str(free_port())),
        *("--node-config", " ".join(config)),
    ]


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def client(
    site: Path, *, own_data: bool = False, address: str | None = None, patience: float = PATIENCE, overrides: Sequence[str] = ()
) -> int:
    """The site's SuperNode, until it is stopped. One that the server does not let in is started again while there is patience: a server takes a minute
    to notice that a site has died, and until then its successor is one too many."""
    options = client_options(site, own_data=own_data, address=address, overrides=overrides)
    env, stopped = environment(site / "flwr"), False
    program("flower-supernode")

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    until = time.monotonic() + patience
    try:
        while True:
            began = time.monotonic()
            with _child([sys.executable, "-m", "fedlens.deploy.programs", "supernode", *options], env, stdin=subprocess.PIPE) as node:
                status = node.wait()
            if status == 0:
                return 0
            if time.monotonic() - began > STARTS_WITHIN:
                until = time.monotonic() + patience  # it was in
            if time.monotonic() > until:
                raise UserError(
                    "federate client: the server does not let this site in: it does not know its key, or another process with this key is connected"
                )
            print(f"not let in yet; trying again for {until - time.monotonic():.0f} s", file=sys.stderr, flush=True)
            time.sleep(5.0)
    except KeyboardInterrupt:
        if stopped:
            return 0
        raise
