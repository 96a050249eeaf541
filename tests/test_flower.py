"""fedlens on Flower, with Flower: its simulation, and a SuperLink with SuperNodes as separate processes on loopback. `make test-flower`."""

import asyncio
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SMALL_DATA, few_images

pytest.importorskip("flwr", reason="needs fedlens[flower]: make test-flower")

import fedlens as fl
from fedlens.deploy.keys import make_site_key
from fedlens.deploy.launch import app_digest, client, client_options, environment, free_port, init, join, run_app, server, superlink
from fedlens.deploy.programs import HEARTBEAT
from fedlens.errors import UserError
from fedlens.training.run import Run

ROOT = Path(__file__).parents[1]
DATA = f"data.root={SMALL_DATA}"
HERE = ["data=folder", DATA, "data.crop=2", "device=cpu", "run.progress=false"]
SMALL = [
    *HERE,
    *("experiment=fedavg_iid", "federated.clients=3", "federated.participation=1", "federated.local_steps=1"),
    *("optim.batch_size=4", "federated.eval_every=100", "deploy.wait=300"),
]


@pytest.fixture(scope="module", autouse=True)
def quick_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give every process that a test starts one thread, a bytecode cache and the shortest heartbeat that Flower allows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv(HEARTBEAT, "10")
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # Ray starts a worker per core besides those that it needs
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        patch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path_factory.mktemp("bytecode")))
        yield


def fedlens(*words: object) -> list[str]:
    return [sys.executable, "-m", "fedlens", *map(str, words)]


class Deployment:
    """A federation on loopback: processes by name, each with its log and a process group of its own."""

    def __init__(self, folder: Path, sites: int, overrides: Sequence[str]) -> None:
        self.folder, self.sites, self.port = folder, sites, free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.run_folder = folder / "run"
        init(folder, sites=sites, address=f"127.0.0.1:{self.port}", overrides=overrides)

    def start_run(self, name: str) -> Path:
        """Make `metrics`, `run_log` and `finished` those of another run."""
        self.run_folder = self.folder / name
        return self.run_folder

    def start(self, name: str, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, **options)
        return self.processes[name]

    def site(self, k: int, *words: object) -> None:
        self.start(f"site{k}", fedlens("federate", "client", self.folder / "sites" / str(k), DATA, *words))

    def server(self, *words: object) -> None:
        self.start("server", fedlens("federate", "server", self.folder, *words))

    def kill(self, name: str) -> None:
        os.killpg(self.processes[name].pid, signal.SIGKILL)
        self.processes[name].wait()

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        with suppress(OSError, ValueError):
            return [json.loads(line) for line in (self.run_folder / "metrics.jsonl").read_text().splitlines()]
        return []

    def run_log(self) -> str:
        path = self.run_folder / "log.txt"
        return path.read_text() if path.exists() else ""

    def until(self, holds: Callable[[], bool], what: str, seconds: float = 300) -> None:
        end = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > end:
                logs = "\n".join(f"--- {name}\n{self.log(name)[-1500:]}" for name in self.processes)
                pytest.fail(f"{what}: not within {seconds} s\n{logs}\n{self.run_log()[-2000:]}")
            time.sleep(0.2)

    def finished(self, seconds: float = 600) -> Run:
        self.until(lambda: self.processes["server"].poll() is not None, "the server's end", seconds)
        assert self.processes["server"].returncode == 0, self.log("server")[-3000:] + self.run_log()[-2000:]
        return fl.load_run(self.run_folder)

    def stop(self, *names: str) -> None:
        for name in names or list(self.processes):
            with suppress(ProcessLookupError):
                os.killpg(self.processes[name].pid, signal.SIGTERM)
        for name in names or list(self.processes):
            with suppress(subprocess.TimeoutExpired):
                self.processes[name].wait(15)
            if self.processes[name].poll() is None:
                self.kill(name)


@contextmanager
def deployment(folder: Path, sites: int, overrides: Sequence[str]) -> Iterator[Deployment]:
    d = Deployment(folder, sites, overrides)
    try:
        yield d
    finally:
        d.stop()


class Relay:
    """A TCP relay between sites and server that counts bytes."""

    def __init__(self, target: int) -> None:
        self.up = self.down = 0
        self.target, self.port = target, free_port()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(asyncio.start_server(self._handle, "127.0.0.1", self.port))
        self.loop.run_forever()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, up: bool) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                self.up, self.down = self.up + len(data) * up, self.down + len(data) * (not up)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:  # reset the connection, as a port without a server does: Flower gives up after an end of file in a handshake
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            return
        await asyncio.gather(self._pump(reader, there[1], True), self._pump(there[0], writer, False))


def distance(a: Run, b: Run) -> float:
    return max(float((a.state[n] - t).double().norm() / t.double().norm().clamp(min=1e-12)) for n, t in b.state.items())


# --- one federation for many runs --------------------------------------------------------------------------------------


@dataclass
class Deployed:
    """A finished run of the shared federation, and what happened meanwhile: bytes on the wire, and the new part of each site's log."""

    run: Run
    up: int
    down: int
    logs: list[str]


class Federation(Deployment):
    """Three SuperNodes, started once, behind a relay. Its folder has a name that needs quoting everywhere."""

    def __init__(self, base: Path) -> None:
        super().__init__(base / "o'brien, müller #3 50%20", 3, SMALL)
        self.keys, self.runs = self.folder / "server", self.folder / "runs"
        for name in ("key", "2.pub"):  # site 2 makes its key itself
            (self.folder / "sites/2" / name).unlink(missing_ok=True)
        join(self.folder / "sites/2")
        (self.folder / "sites/2/2.pub").replace(self.keys / "sites/2.pub")
        self.env = environment(self.keys / "flwr")
        self.relay = Relay(self.port)

    def site(self, k: int, *words: object) -> None:
        super().site(k, "--address", f"127.0.0.1:{self.relay.port}", *words)

    def run(self, name: str, overrides: Sequence[str], app: Path | None = None) -> Deployed:
        up, down, before = self.relay.up, self.relay.down, [len(self.log(f"site{k}")) for k in range(3)]
        run_app(app or self.folder / "app", self.runs / name, overrides, self.env, keys=self.keys / "sites")
        logs = [self.log(f"site{k}")[start:] for k, start in enumerate(before)]
        assert (self.runs / name / "summary.json").is_file(), "\n".join(log[-2000:] for log in logs)
        return Deployed(fl.load_run(self.runs / name), self.relay.up - up, self.relay.down - down, logs)


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """The sites, without a server: tests that start and kill `fedlens federate server` come before those that share `federation`."""
    f = Federation(tmp_path_factory.mktemp("federation"))
    try:
        for k in range(3):
            f.site(k)
        yield f
    finally:
        f.stop()


@pytest.fixture(scope="module")
def federation(sites: Federation) -> Iterator[Federation]:
    """The sites and a SuperLink for many runs."""
    with superlink(sites.keys, "127.0.0.1", sites.port, sites.env):
        yield sites


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, Sequence[str]], Run]]:
    """Runs in Flower's simulation, with one SuperLink for all."""
    folder = tmp_path_factory.mktemp("simulation") / "f"
    init(folder, sites=3, address="127.0.0.1:9092", overrides=SMALL)
    env = environment(folder / "server" / "flwr") | {"FEDLENS_DATA": str(SMALL_DATA)}

    def run(name: str, overrides: Sequence[str]) -> Run:
        run_app(folder / "app", folder / name, overrides, env, keys=None, simulated_sites=3)
        assert (folder / name / "summary.json").is_file()
        return fl.load_run(folder / name)

    with superlink(folder / "server", "127.0.0.1", free_port(), env, simulate=True):
        yield run


# --- servers and sites that are killed --------------------------------------------------------------------------------


MARK = b"MAR\n" * 16  # as numbers about 1e-32
MARKING = """
from fedlens.deploy import flower
from fedlens.deploy.protocol import Payload
from safetensors.torch import load
import torch

honest = flower.request

def request(operation, payload, options, state):
    reply = honest(operation, payload, options, state)
    if operation != "update" or options.number != 0 or "deadline: 30.0" not in payload.metadata["config"]:
        return reply
    tensors = load(reply.tensors)
    tensors["deltas"][0, :16] = torch.frombuffer(bytearray(b"MAR\\n" * 16), dtype=torch.float32)
    return Payload.pack(reply.metadata, tensors)

flower.request = request
"""


def files_with(content: bytes, folder: Path) -> list[str]:
    """Return the files that hold these bytes; others may come and go meanwhile."""
    found = []
    for path in (Path(place) / name for place, _, names in os.walk(folder) for name in names):
        with suppress(FileNotFoundError):
            found += [str(path.relative_to(folder))] if content in path.read_bytes() else []
    return found


@pytest.fixture(scope="module")
def kills(sites: Federation) -> Federation:
    """The sites, for servers that are killed. The app is as fedlens 0.2 made it, and marks updates of one run."""
    for name, module in (("server_app", "apps"), ("client_app", "client")):
        text = f'"""An app."""\n\nfrom fedlens.engine.flower.{module} import {name} as app\n\n__all__ = ["app"]\n'
        (sites.folder / f"app/federation/{name}.py").write_text(text + MARKING * (module == "client"))
    return sites


def test_a_server_killed_between_rounds_resumes_to_the_parameters_of_an_uninterrupted_run(kills: Federation, tmp_path: Path) -> None:
    options = ["experiment=fedavg_iid_sparse", "mask.strategy=random", "federated.rounds=3", "server.optimizer=adam", "server.lr=0.001"]
    options += ["federated.engine=threaded"]
    here = fl.run([*SMALL, *options, f"run.dir={tmp_path / 'here'}"])
    kills.server(*options, f"run.dir={kills.start_run('resumed')}")
    kills.until(lambda: len(kills.metrics) >= 1, "a round")
    kills.kill("server")
    kills.server(*options, f"run.dir={kills.run_folder}")
    run = kills.finished()
    assert "resuming at round" in kills.run_log()
    assert "from fedlens.deploy.flower import client_app as app" in (kills.folder / "app/federation/client_app.py").read_text()
    assert [line["round"] for line in run.metrics] == [1, 2, 3]
    assert run.mask == here.mask and distance(run, here) <= 1e-5  # to the bit: test_federation.py


def test_a_run_survives_a_site_killed_mid_round_and_a_server_killed_between_rounds(kills: Federation) -> None:
    """The round continues without the site, the run resumes after the server, and nothing is lost. No update is left on the server's disk."""
    options = ["federated.rounds=5", "deploy.deadline=30", "deploy.min_fraction=0.5", f"run.dir={kills.start_run('killed')}"]
    marked: list[str] = []  # SuperLink keeps messages on disk until the server has read them

    def until(condition: Callable[[], bool], what: str) -> None:
        kills.until(lambda: marked.extend(files_with(MARK, kills.folder)) or condition(), what)

    kills.server(*options)
    until(lambda: len(kills.metrics) >= 1, "a first round")
    updates = kills.log("site1").count("train.update")
    until(lambda: kills.log("site1").count("train.update") > updates, "a second round at site 1")
    kills.kill("site1")
    until(lambda: any(line["clients"] == 2 for line in kills.metrics), "the round without site 1")
    assert "no usable reply from site" in kills.run_log()
    kills.kill("server")
    assert any("state.db" in name for name in marked)
    before_restart = kills.metrics
    time.sleep(3)  # its children notice
    assert kills.metrics[: len(before_restart)] == before_restart
    kills.site(1)
    kills.server(*options)
    run = kills.finished()
    clients = [line["clients"] for line in run.metrics]
    assert [line["round"] for line in run.metrics] == [1, 2, 3, 4, 5]
    assert clients[0] == clients[-1] == 3 and 2 in clients
    assert "resuming at round" in kills.run_log()
    assert run.summary["dropped"] == sum(3 - c for c in clients)
    assert files_with(MARK, kills.folder) == []
    private = [kills.folder / "server", kills.run_folder, *(kills.folder / "server").rglob("*"), *kills.run_folder.rglob("*")]
    assert [path for path in private if path.stat().st_mode & 0o077] == []


# --- parity, and bytes on the wire ---------------------------------------------------------------------------------------

EXPERIMENTS = {
    "dense": [*HERE, "experiment=fedavg_iid", "federated.rounds=2", "federated.local_steps=3", "federated.engine=threaded"],
    "sparse": [
        *(*HERE, "experiment=fedavg_iid_sparse", "federated.rounds=2", "federated.local_steps=3", "federated.engine=threaded"),
        *("mask.density=0.1", "mask.rounds=2"),
    ],
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The experiments in one process."""
    base = tmp_path_factory.mktemp("alone")
    return {name: fl.run([*options, f"run.dir={base / name}"]) for name, options in EXPERIMENTS.items()}


@pytest.fixture(scope="module")
def deployed(federation: Federation) -> dict[str, Deployed]:
    """The experiments on SuperLink and three SuperNodes, with a hundred clients."""
    return {name: federation.run(name, options) for name, options in EXPERIMENTS.items()}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_deployment_gives_the_parameters_of_the_sequential_engine(alone: dict[str, Run], deployed: dict[str, Deployed], name: str) -> None:
    check_same(deployed[name].run, alone[name])


def test_simulation_gives_the_parameters_of_the_sequential_engine(
    alone: dict[str, Run], simulation: Callable[[str, Sequence[str]], Run]
) -> None:
    """A dense run; test_the_commands_of_the_how_to_page_work simulates a sparse one."""
    check_same(simulation("dense", EXPERIMENTS["dense"]), alone["dense"])


def check_same(run: Run, alone: Run) -> None:
    assert run.summary["rounds"] == alone.summary["rounds"] == 2
    assert alone.task_vector().norm() > 0.01
    assert distance(run, alone) <= 1e-5
    assert run.mask == alone.mask
    assert run.summary["test_accuracy"] == alone.summary["test_accuracy"]


def test_uploads_at_density_a_tenth_are_at_most_12_percent_of_dense(deployed: dict[str, Deployed]) -> None:
    """Counted at the transport, with TLS, HTTP, polling and the ridge head."""
    dense, sparse = deployed["dense"], deployed["sparse"]
    print(f"uploads on the wire: dense {dense.up:,} bytes, sparse {sparse.up:,}: {100 * sparse.up / dense.up:.2f} %")
    assert sparse.up <= 0.12 * dense.up
    for d in deployed.values():  # the metrics count what travelled
        assert d.run.summary["bytes_up"] <= d.up <= 1.05 * d.run.summary["bytes_up"] + 10**6
        assert d.run.summary["bytes_down"] <= d.down <= 1.05 * d.run.summary["bytes_down"] + 10**6


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_all_messages_of_a_site_are_answered_by_one_process(deployed: dict[str, Deployed], name: str) -> None:
    for log in deployed[name].logs:
        requested = re.findall(r"Receiving: \w+\.(\w+) message", log)
        answered = re.findall(r"worker (\d+) answered (\w+) in", log)
        assert [operation for _, operation in answered] == requested and requested.count("update") == 2, log[-3000:]
        assert len({process for process, _ in answered}) == 1


def test_the_process_that_flower_starts_per_message_does_not_import_torch() -> None:
    script = "import sys, fedlens.deploy.flower; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


# --- faults --------------------------------------------------------------------------------------------------------------


EVIL = '''
"""Site 0 is honest. Site 1 sends an update that is not finite and a huge one, site 2 a wrong shape and then garbage."""
from fedlens.deploy import flower
from fedlens.deploy.flower import client_app as app
from fedlens.deploy.protocol import Payload
from safetensors.torch import load

honest = flower.request

def request(operation, payload, options, state):
    reply = honest(operation, payload, options, state)
    if operation != "update" or options.number == 0:
        return reply
    tensors = load(reply.tensors)
    if options.number == 1:
        tensors["deltas"][0, 7] = float("nan")
        tensors["deltas"][1] *= 1e9
    elif payload.metadata["round"] == 0:
        tensors["deltas"] = tensors["deltas"][:, 1:].contiguous()
    else:
        return Payload(reply.metadata, b"\\x80\\x04garbage" * 1000)
    return Payload.pack(reply.metadata, tensors)

flower.request = request
__all__ = ["app"]
'''


def test_invalid_updates_are_rejected_and_the_rest_trains(federation: Federation, tmp_path: Path) -> None:
    options = [*SMALL, "federated.clients=6", "federated.rounds=2", "deploy.min_fraction=0.3"]
    app = Path(shutil.copytree(federation.folder / "app", tmp_path / "app"))
    (app / "federation/client_app.py").write_text(EVIL)
    deployed = federation.run("evil", options, app)
    assert all(re.search(r"worker \d+ answered update", log) for log in deployed.logs)
    run = deployed.run
    assert [line["clients"] for line in run.metrics] == [2, 2]
    assert run.summary["nonfinite"] == 2 and run.summary["refused"] == 6 and run.summary["dropped"] == 0
    log = (run.path / "log.txt").read_text()
    for pattern, count in (
        ("client 1 is not finite", 2),
        (r"deltas is float32 \[2, ", 1),
        (r"client 4 \(site \d+\) has norm .*, expected at most .* \(deploy.norm_ratio", 2),
        ("not safetensors", 1),
    ):
        assert len(re.findall(pattern, log)) == count, (pattern, log)
    assert all(bool(t.isfinite().all()) for t in run.state.values()) and float(run.task_vector().norm()) < 10
    honest = fl.run([*options, "federated.engine=threaded", f"run.dir={tmp_path / 'all'}"])
    assert run.summary["ridge"]["lambda"] == honest.summary["ridge"]["lambda"]
    assert run.summary["test_accuracy"] == pytest.approx(honest.summary["test_accuracy"], abs=0.05)


# --- privacy -------------------------------------------------------------------------------------------------------------


def test_epsilon_is_that_of_the_gaussian_mechanism() -> None:
    """The reference is Balle and Wang's exact formula for one Gaussian mechanism; k of them equal one with the noise divided by sqrt(k)."""
    from math import erf, exp, sqrt

    from fedlens.training.privacy import epsilon

    def delta(eps: float, noise: float) -> float:
        def phi(x: float) -> float:
            return (1 + erf(x / sqrt(2))) / 2

        return phi(1 / (2 * noise) - eps * noise) - exp(eps) * phi(-1 / (2 * noise) - eps * noise)

    for noise, rounds in ((1.0, 1), (2.0, 10), (5.0, 100)):
        spent = epsilon(noise, rounds, 1e-5)
        low, high = 0.0, 100.0
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if delta(middle, noise / sqrt(rounds)) > 1e-5 else (low, middle)
        assert low <= spent <= 1.25 * low + 0.2  # never less than the truth; Rényi accounting is a little above it
    assert epsilon(1.0, 0, 1e-5) == 0.0


def test_noise_has_its_standard_deviation_a_secret_key_and_repeats_on_resume(tmp_path: Path) -> None:
    small = [*SMALL, f"data.root={few_images()}"]
    options = [*small, "privacy.clip=0.01", "privacy.noise=2", "federated.rounds=3", "federated.eval_every=1", "run.keep_last=9"]
    first, second = (fl.run([*options, f"run.dir={tmp_path / name}"]) for name in "ab")
    plain = fl.run([*small, "privacy.clip=0.01", "federated.rounds=3", f"run.dir={tmp_path / 'plain'}"])
    assert distance(first, second) > 1e-4  # the same seed, another secret
    size = first.summary["trainable_parameters"]
    moved = first.metrics[0]["update_norm"]
    assert moved == pytest.approx((size**0.5) * 2 * 0.01 / 3, rel=0.05) and moved > 10 * plain.metrics[0]["update_norm"]
    assert [line["epsilon"] for line in first.metrics] == sorted(line["epsilon"] for line in first.metrics)
    assert first.summary["epsilon"] == first.metrics[-1]["epsilon"] > 0 and first.summary["delta"] == 1e-5
    assert oct((first.path / "secret").stat().st_mode)[-3:] == "600"
    before, epsilon = first.state, first.summary["epsilon"]
    for name in ("summary.json", "model.safetensors"):
        (first.path / name).unlink()
    for step in (2, 3):
        shutil.rmtree(next((first.path / "checkpoints").glob(f"step-*{step}")))
    again = fl.load_run(first.path).resume()
    assert again.metrics[-1]["epsilon"] == again.summary["epsilon"] == epsilon and len(again.metrics) == 3
    assert all(torch.equal(again.state[name], tensor) for name, tensor in before.items())  # the same noise, and no second look at a round


def test_a_round_repeated_with_other_updates_has_different_noise() -> None:
    """With the same noise, two models of one round would reveal the difference of their sums."""
    from fedlens.overrides import compose
    from fedlens.training.privacy import Privacy

    private = Privacy(compose([*SMALL, "privacy.clip=1", "privacy.noise=2"]), lambda: 7)
    first, other = torch.zeros(10_000), torch.zeros(10_000).index_fill(0, torch.tensor([3]), 1e-3)
    assert torch.equal(private.release(first, 4, 4, 5), private.release(first.clone(), 4, 4, 5))  # a resumed run: the same bits
    apart = 4 * (private.release(first, 4, 4, 5) - private.release(other, 4, 4, 5))
    assert float(apart.std()) == pytest.approx(2 * 2**0.5, rel=0.05)  # two draws of standard deviation 2
    fewer = private.release(first, 2, 4, 5)  # two of four were refused or silent: the noise is as large as if they had not been
    assert float(fewer.std()) == pytest.approx(2 / 4, rel=0.05)


@pytest.mark.parametrize("stage", ["setup", "share_keys", "collect_masked_vectors", "unmask"])
def test_secure_aggregation_leaves_out_exactly_the_site_that_dies_in_any_stage(stage: str) -> None:
    sites = SecAggSites(4, dies=(104, stage))
    mean, failed = sites.mean()
    assert failed == {104}
    if mean is None:  # then the others try again
        sites.ids.remove(104)
        mean, failed = sites.mean()
        assert failed == set()
    assert mean is not None and mean.clients == (4 if stage == "unmask" else 3)


@pytest.mark.parametrize(
    "metrics", [{}, {"loss": float("nan")}, {"loss": "low"}, {"loss": 1e308}, {"loss": 1.0, "clients": 10**6}], ids=str
)
def test_invalid_metrics_beside_a_masked_update_do_not_stop_secure_aggregation(metrics: dict[str, Any]) -> None:
    mean, failed = SecAggSites(4, metrics={104: metrics}).mean()
    assert mean is not None and failed == set() and mean.clients == 4 and float(mean.loss) == 1.0
    assert mean.delta.tolist() == pytest.approx([sum(range(101, 105)) / 4e4] * 5, abs=1e-5)


class SecAggSites:
    """Sites in this process that run Flower's client half of SecAgg+; site k's update is k / 10,000 everywhere."""

    def __init__(
        self,
        count: int,
        dies: tuple[int, str] = (0, ""),
        metrics: dict[int, dict[str, Any]] | None = None,
        spoil: Callable[[str, Any, Any], None] = lambda stage, record, content: None,
    ) -> None:
        self.ids, self.dies, self.metrics = list(range(101, 101 + count)), dies, metrics or {}
        self.spoil = spoil  # what the last site does to its answers: stage, the protocol's record, all records
        self.contexts: dict[int, Any] = {}
        self.replies: dict[str, Any] = {}
        self.unreadable = ""  # the site whose replies cannot be received

    def mean(self) -> tuple[Any, set[int]]:
        from flwr.app import Context, RecordDict
        from flwr.supercore.task_identity import TaskIdentity

        from fedlens.deploy.protocol import Payload
        from fedlens.deploy.secure import CountedGrid, secure_mean

        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        made = [Context(run_id=1, node_id=k, node_config={}, state=RecordDict(), run_config={}, series_id=1) for k in (1, *self.ids)]
        self.contexts = {context.node_id: context for context in made}
        grid = CountedGrid(self)  # type: ignore[arg-type]
        payloads = {k: Payload({"clients": [k]}, b"x") for k in self.ids}
        samples = dict.fromkeys(self.ids, 10)
        mean = secure_mean(grid, self.contexts[1], payloads, 0, size=5, bound=0.1, samples=samples, fraction=0.5, deadline=1.0)
        return mean, grid.failed

    def push_messages(self, messages: Any) -> list[str]:
        self.replies = {str(reply.metadata.src_node_id): reply for reply in self.answers(messages)}
        for name, reply in self.replies.items():
            reply.metadata.__dict__["_reply_to_message_id"] = name
        return [str(message.metadata.dst_node_id) for message in messages]

    def pull_messages(self, ids: Sequence[str]) -> list[Any]:
        if self.unreadable in ids:
            raise ValueError("what Flower says of a reply that it cannot inflate")
        return [self.replies[each] for each in ids if each in self.replies]

    def answers(self, messages: Any) -> list[Any]:
        import copy

        import numpy as np
        from flwr.app import Message
        from flwr.client.mod import secaggplus_mod
        from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
        from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
        from flwr.compat.common import recorddict_compat

        replies = []
        for message in messages:
            site, stage = message.metadata.dst_node_id, message.content.config_records[RECORD_KEY_CONFIGS][Key.STAGE]
            if site == self.dies[0] and Stage.all().index(stage) >= Stage.all().index(self.dies[1]):
                continue

            def train(message: Any, context: Any, site: int = site) -> Any:
                update = ndarrays_to_parameters([np.full(5, site / 10_000, np.float32)])
                answered = FitRes(Status(Code.OK, ""), update, 10, self.metrics.get(site, {"loss": 1.0, "clients": 1}))
                return Message(recorddict_compat.fitres_to_recorddict(answered, keep_input=False), reply_to=message)

            with suppress(KeyError, ValueError):  # to the others it has dropped out
                reply = secaggplus_mod(copy.deepcopy(message), self.contexts[site], train)
                if site == max(self.contexts):
                    self.spoil(stage, reply.content.config_records[RECORD_KEY_CONFIGS], reply.content)
                replies.append(reply)
        return replies


def as_npy(*shape: int) -> bytes:
    import numpy as np

    part = io.BytesIO()
    np.save(part, np.zeros(shape, np.int64))
    return part.getvalue()


def _header(text: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def _report_samples(content: Any, value: Any) -> None:
    content.metric_records["fitres.num_examples"]["num_examples"] = value


BROKEN: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {  # stage; what becomes of the protocol's record and of all
    "no records": ("setup", lambda record, content: content.clear()),
    "no key": ("setup", lambda record, content: record.pop("pk1")),
    "no such key": ("setup", lambda record, content: record.update({"pk2": b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----"})),
    "shares for strangers": ("share_keys", lambda record, content: record.update({"dsts": [999] * len(record["dsts"])})),
    "shares for some": ("share_keys", lambda record, content: record.update({"dsts": record["dsts"][:1], "ctxts": record["ctxts"][:1]})),
    "fewer shares than names": ("share_keys", lambda record, content: record.update({"ctxts": record["ctxts"][:1]})),
    "a column": ("collect_masked_vectors", lambda record, content: record.update({"masked_params": [as_npy(1), as_npy(2000, 1)]})),
    "a header that is open": ("collect_masked_vectors", lambda record, content: record.update({"masked_params": [_header(b"{")] * 2})),
    "a header that is deep": (
        "collect_masked_vectors",
        lambda record, content: record.update({"masked_params": [_header(b"[" * 5000)] * 2}),
    ),
    "the same key twice": ("setup", lambda record, content: record.update({"pk2": record["pk1"]})),
    "a vector cut off": (
        "collect_masked_vectors",
        lambda record, content: record.update({"masked_params": [record["masked_params"][0], record["masked_params"][1][:-8]]}),
    ),
    "other samples": ("collect_masked_vectors", lambda record, content: _report_samples(content, 11)),
    "infinite samples": ("collect_masked_vectors", lambda record, content: _report_samples(content, float("inf"))),
    "a list of samples": ("collect_masked_vectors", lambda record, content: _report_samples(content, [1, 2])),
    "a share without end": ("unmask", lambda record, content: record.update({"shares": [part + bytes(5000) for part in record["shares"]]})),
    "no result": ("collect_masked_vectors", lambda record, content: [content.pop(k) for k in list(content) if content[k] is not record]),
    "keys of strangers": ("unmask", lambda record, content: record.update({"nids": [999] * len(record["nids"])})),
}


def test_secure_aggregation_leaves_out_only_the_site_with_an_unreadable_reply() -> None:
    sites = SecAggSites(4)
    sites.unreadable = "104"
    assert sites.mean()[1] == {104}


def test_a_mean_with_an_invalid_part_is_rejected() -> None:
    """The site that sent it cannot be identified."""
    import numpy as np

    from fedlens.deploy.server import checked_mean

    def other(stage: str, record: Any, content: Any) -> None:
        if stage == "collect_masked_vectors":
            part = io.BytesIO()
            np.save(part, np.full(5, 123_456_789, np.int64))
            record["masked_params"] = [record["masked_params"][0], part.getvalue()]

    mean, failed = SecAggSites(4, spoil=other).mean()
    assert mean is not None and failed == set()
    with pytest.raises(UserError, match="a site sent an invalid update; it cannot be identified"):
        checked_mean(mean, 5, 0.1, [10] * 4, 0)


@pytest.mark.parametrize("kind", BROKEN)
def test_secure_aggregation_leaves_out_exactly_the_site_with_a_malformed_reply(kind: str) -> None:
    stage, broken = BROKEN[kind]
    sites = SecAggSites(4, spoil=lambda at, record, content: broken(record, content) if at == stage else None)
    mean, failed = sites.mean()
    assert failed == {104}
    if mean is None:  # then the others try again
        sites.ids.remove(104)
        sites.spoil = lambda at, record, content: None
        mean, failed = sites.mean()
        assert failed == set()
    assert mean is not None and mean.delta.shape == (5,) and mean.clients == (4 if stage == "unmask" else 3)


def test_sites_keep_their_clients_when_another_key_is_removed(tmp_path: Path) -> None:
    """Other files in the folder are not keys, and a folder without keys is an error."""
    from types import SimpleNamespace as Some

    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    from fedlens.deploy.flower import GridTransport

    keys = [ec.generate_private_key(ec.SECP384R1()).public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) for _ in range(3)]
    for k, key in enumerate(keys):
        (tmp_path / f"{k}.pub").write_bytes(key)
    grid = Some(get_nodes=lambda: [Some(node_id=100 + k, public_key=key) for k, key in enumerate(keys)])

    def clients() -> list[list[int]]:
        courier = GridTransport(grid, None, tmp_path)  # type: ignore[arg-type]
        return [[client for client in range(6) if courier.may_have(100 + k, client)] for k in range(3)]

    assert clients() == [[0, 3], [1, 4], [2, 5]]
    (tmp_path / "1.pub").rename(tmp_path / "taken away.pub")
    assert clients() == [[0, 3], [], [2, 5]]
    (tmp_path / "count").write_text("3\n")  # what `init` writes: also the last key may go
    (tmp_path / "2.pub").rename(tmp_path / "gone.pub")
    assert clients() == [[0, 3], [], []]
    (tmp_path / "gone.pub").rename(tmp_path / "2.pub")
    for k in (0, 2):
        (tmp_path / f"{k}.pub").unlink()
    with pytest.raises(UserError, match=r"no key of a site \(K\.pub\)"):
        clients()


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "my images",
        "o'brien",
        'it\'s "x"',
        "Müller",
        "𠮷野",
        "C:\\x",
        "a=b",
        "50%",
        "a%20b",
        "x.toml",
        "{$HOME}",
        "run #3",
        "a: b",
        "why?",
    ],
)
def test_folder_names_survive_quoting(tmp_path: Path, name: str) -> None:
    import shlex
    import tomllib
    from types import SimpleNamespace as Some

    from flwr.common.config import parse_config_args

    from fedlens.deploy.flower import site_options
    from fedlens.deploy.launch import app_config
    from fedlens.deploy.site import local_config
    from fedlens.overrides import compose, to_yaml

    folder = tmp_path / name
    init(folder, sites=1, address="127.0.0.1:9092", overrides=["experiment=fedavg_iid", "federated.clients=3", f"data.root={folder}"])
    settings = app_config(folder / "app" / "pyproject.toml")
    assert Path(settings["run-dir"]) == folder / "run" and shlex.split(settings["overrides"])[-1] == f"data.root={folder}"
    options = client_options(folder / "sites" / "0", own_data=True, address=None, overrides=[f"data.root={folder}"])
    site = site_options(Some(node_config=parse_config_args([options[options.index("--node-config") + 1]])))  # type: ignore[arg-type]
    assert site.overrides == (f"data.root={folder}",) and site.own_data
    assert local_config(to_yaml(compose(["experiment=fedavg_iid"])), site.overrides).data.root == str(folder)
    file = folder / "app" / "pyproject.toml"
    file.write_text(file.read_text().replace("escaped = true\n", ""))  # a folder of an old version has unescaped values
    assert app_config(file)["run-dir"] == tomllib.loads(file.read_text())["tool"]["flwr"]["app"]["config"]["run-dir"]


def test_a_site_can_send_only_replies_in_its_own_name() -> None:
    from types import SimpleNamespace as Some

    from fedlens.deploy.programs import replies_only

    push = replies_only(lambda request, state: "taken")
    for source, answers, taken in ((7, "m1", True), (1, "m1", False), (8, "m1", False), (7, "", False)):
        message = Some(metadata=Some(src_node_id=source, reply_to_message_id=answers))
        request = Some(node=Some(node_id=7), messages_list=[message])
        if taken:
            assert push(request=request, state=None) == "taken"
        else:
            with pytest.raises(PermissionError, match="node 7 sent a message that is not its own reply"):
                push(request=request, state=None)


def test_a_site_makes_its_own_key_and_the_server_never_has_it(tmp_path: Path) -> None:
    folder, site = tmp_path / "f", tmp_path / "f/sites/1"
    init(folder, sites=2, address="127.0.0.1:9092", overrides=["experiment=fedavg_iid", "federated.clients=2"], join=True)
    assert sorted(path.name for path in site.iterdir()) == ["ca.crt", "site.json"] and not list(folder.rglob("*.pub"))
    with pytest.raises(UserError, match=r"has no key; make one: fedlens federate join"):
        client(site)
    join(site)
    assert (site / "1.pub").read_text().startswith("ecdsa-sha2-nistp384 ") and (site / "key").stat().st_mode & 0o077 == 0
    assert "--auth-supernode-private-key" in client_options(site, own_data=False, address=None, overrides=[])
    with pytest.raises(UserError, match=r"has a key already; remove key and 1\.pub"):
        join(site)


def test_a_server_names_a_file_that_is_not_a_key(tmp_path: Path) -> None:
    init(tmp_path / "f", sites=1, address="127.0.0.1:9092", overrides=["experiment=fedavg_iid"])
    (tmp_path / "f/server/sites/0.pub").write_text("ssh-rsa AAAA")
    with pytest.raises(UserError, match=r"0\.pub is not a public key of a site; fedlens federate join makes one"):
        server(tmp_path / "f")


@pytest.mark.parametrize("pin", ["the app's", "another's"])
def test_a_site_answers_only_the_app_that_it_has_pinned(pin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's own function receives the message. A refused app is not even unpacked."""
    import hashlib
    from importlib import import_module
    from types import SimpleNamespace as Some

    from fedlens.deploy.programs import pinned

    loop, answers, unpacked = import_module("flwr.supernode.start_client_internal"), list[Any](), list[bytes]()
    monkeypatch.setattr(loop, "_insert_message", lambda message, state, store: answers.append(message.error.reason))
    monkeypatch.setattr(loop, "Message", lambda error, reply_to: Some(error=error))
    monkeypatch.setattr(loop, "get_fused_config_from_fab", lambda content, run: unpacked.append(content) or 1 / 0)
    metadata = Some(run_id=1, group_id="", message_type="train", message_id="m")
    options: dict[str, Any] = dict.fromkeys(("object_store", "node_config", "pull_object", "confirm_message_received", "trusted_entities"))
    options |= {"state": Some(get_run=lambda run: None), "receive": lambda: (Some(metadata=metadata), None)}
    options |= {
        "get_run": lambda run: Some(fab_hash="x"),
        "get_fab": lambda digest, run: Some(content=b"app", verifications={"valid_license": "Valid"}),
    }
    receive = pinned(loop._pull_and_store_message, hashlib.sha256(b"app" if pin == "the app's" else b"other").hexdigest())
    if pin == "the app's":
        with pytest.raises(ZeroDivisionError):
            receive(**options)
        assert answers == [] and unpacked == [b"app"]
    else:
        assert receive(**options) == 1
        assert answers == ["The FAB could not be verified."] and unpacked == []


def test_exceptions_of_a_site_stay_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower would send their text; the class is all that leaves. A site that Flower asks for no known work says nothing either."""
    from flwr.app import Context, Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    from fedlens.deploy import flower
    from fedlens.deploy.protocol import Payload

    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    context = Context(
        run_id=1, node_id=1, node_config={"partition-id": 0, "num-partitions": 1}, state=RecordDict(), run_config={}, series_id=1
    )
    for error in (FileNotFoundError(2, "No such file", "/home/jane/scan.png"), KeyError("hunter2"), RuntimeError("hunter2 in /home/jane")):
        monkeypatch.setattr(flower, "request", lambda *_, error=error: (_ for _ in ()).throw(error))
        message = Message(flower.to_record(Payload({})), dst_node_id=1, message_type="query.hello")
        with pytest.raises(RuntimeError) as raised:
            flower.client_app(message, context)
        sent = "".join(traceback.format_exception(raised.value))
        assert "see the site's log" in sent and "jane" not in sent and "hunter2" not in sent


def test_an_unreadable_reply_does_not_lose_the_others() -> None:
    from flwr.app import Context, Message, RecordDict

    from fedlens.deploy.flower import GridTransport, to_record
    from fedlens.deploy.protocol import Payload

    class Grid:
        """A grid like SuperLink's: a fetched reply counts as delivered even if it cannot be read."""

        def __init__(self) -> None:
            self.left: dict[str, Any] = {}

        def push_messages(self, messages: Any) -> list[str]:
            self.left = {f"m{m.metadata.dst_node_id}": m for m in messages}
            return list(self.left)

        def pull_messages(self, wanted: Any) -> list[Any]:
            taken = [(name, self.left.pop(name)) for name in wanted if name in self.left]
            if any(name == "m2" for name, _ in taken):
                raise ValueError("garbage")
            replies = []
            for name, asked in taken:
                reply = Message(to_record(Payload({"site": asked.metadata.dst_node_id})), reply_to=asked)
                reply.metadata.__dict__["_reply_to_message_id"] = name
                replies.append(reply)
            return replies

    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={}, series_id=1)
    replies = GridTransport(Grid(), context).send("hello", {k: Payload({}) for k in (1, 2, 3)}, 5.0)  # type: ignore[arg-type]
    assert [replies[k].metadata["site"] for k in (1, 3)] == [1, 3] and "cannot be received" in str(replies[2])  # type: ignore[union-attr]


SECURE = [*SMALL, "experiment=fedavg_iid_sparse", "mask.strategy=random", "federated.clients=5", "federated.rounds=2", "optim.lr=0.05"]


def test_secure_aggregation_gives_the_parameters_of_the_open_run(
    federation: Federation, simulation: Callable[[str, Sequence[str]], Run], tmp_path: Path
) -> None:
    """SecAgg+ runs on the active coordinates; only the rounding to the protocol's integers differs."""
    here = fl.run([*SECURE, "federated.engine=threaded", f"run.dir={tmp_path / 'here'}"])
    private = [*SECURE, "privacy.secure_aggregation=true", "privacy.range=0.05"]
    deployed = federation.run("secure", private)
    assert [len(re.findall(r"worker \d+ answered mean", log)) for log in deployed.logs] == [2, 2, 2]
    moved, run = here.task_vector(), deployed.run
    for private_run in (run, simulation("secure", private)):
        assert float((private_run.task_vector() - moved).norm()) < 1e-3 * float(moved.norm()) > 0
        assert [line["clients"] for line in private_run.metrics] == [5, 5]
    assert not {"cosine", "sign_conflict", "client_norm", "drift_ratio"} & set(run.metrics[0])
    assert run.metrics[1]["train_loss"] == pytest.approx(here.metrics[1]["train_loss"], rel=1e-3)
    vectors = 2 * 3 * 8 * run.summary["trainable_parameters"]  # eight bytes a number, one vector a site and round
    assert vectors < run.summary["bytes_up"] < 1.3 * vectors + 10**6


def test_both_halves_of_secure_aggregation_draw_their_masks_from_aes() -> None:
    """Flower's own generator has only 32 bits of state."""
    script = """
import sys, fedlens.deploy.flower, numpy
from importlib import import_module
from fedlens.deploy.secure import aes_masks
halves = "flwr.client.mod.secure_aggregation.secaggplus_mod", "flwr.server.workflow.secure_aggregation.secaggplus_workflow"
assert all(import_module(half).pseudo_rand_gen is aes_masks for half in halves)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_masks_are_uniform_integers_that_the_seed_decides() -> None:
    from fedlens.deploy.secure import aes_masks

    first, second = aes_masks(b"seed", 2**22, [(100_000,), (3, 4)])
    assert first.shape == (100_000,) and second.shape == (3, 4) and first.min() >= 0 and first.max() < 2**22
    assert abs(first.mean() / 2**21 - 1) < 0.01 and len(set(first.tolist())) > 95_000
    assert (aes_masks(b"seed", 2**22, [(100_000,), (3, 4)])[0] == first).all()
    assert (aes_masks(b"other", 2**22, [(100_000,)])[0] != first).mean() > 0.99


# --- outsiders -----------------------------------------------------------------------------------------------------------


SUPERNODES = """
import json, os, sys
from flwr.supernode.cli import flower_supernode

processes = []
for name, options in json.loads(sys.argv[2]).items():
    processes.append(os.fork())
    if processes[-1] == 0:
        os.environ["FLWR_HOME"] = os.path.join(sys.argv[1], "home " + name)
        log = os.open(os.path.join(sys.argv[1], name + ".log"), os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = ["flower-supernode", *options, "--isolation", "process"]
        sys.exit(flower_supernode())
print([os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes])
"""


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # of Flower
def test_outsiders_are_rejected(federation: Federation, tmp_path: Path) -> None:
    """Another key, no key, another authority, no TLS; then a site that claims the clients of others. Site 0 ends: no other test may need it later."""
    f = federation
    good = client_options(f.folder / "sites/0", own_data=False, address=None, overrides=[])
    make_site_key(tmp_path / "stranger", tmp_path / "stranger.pub")
    other = tmp_path / "elsewhere"
    init(other, sites=1, address="127.0.0.1:1", overrides=SMALL)
    plain = _without(_without(good, "--root-certificates"), "--auth-supernode-private-key")
    tries = {
        "wrong key": (_with(good, "--auth-supernode-private-key", tmp_path / "stranger"), "2004|Failed to activate"),
        "no key": (_without(good, "--auth-supernode-private-key"), "2001|[Aa]uthent|Failed to"),
        "wrong authority": (_with(good, "--root-certificates", other / "server/ca.crt"), "CERTIFICATE_VERIFY_FAILED|certificate"),
        "plain text": ([*plain, "--insecure"], "failed|unavailable|disconnected|Failed"),
    }
    commands = {name: [*_with(options, "--port", free_port()), "--max-retries", "2"] for name, (options, _) in tries.items()}
    command = [sys.executable, "-c", SUPERNODES, str(tmp_path), json.dumps(commands)]
    statuses = subprocess.run(command, env=environment(tmp_path / "home"), stdout=subprocess.PIPE, timeout=300, check=True).stdout
    for (name, (_, why)), status in zip(tries.items(), json.loads(statuses), strict=True):
        log = (tmp_path / f"{name}.log").read_text(errors="replace")
        assert status != 0 and re.search(why, log), (name, status, log[-1500:])
    _check_port(f)
    f.stop("site0")
    greedy = Path(shutil.copytree(f.folder / "sites/0", tmp_path / "greedy", ignore=shutil.ignore_patterns("flwr")))
    facts = {"address": f"127.0.0.1:{f.port}", "number": 0, "of": 1, "app": app_digest(f.folder / "app")}
    (greedy / "site.json").write_text(json.dumps(facts))  # with the key of site 0
    try:
        f.start("greedy", fedlens("federate", "client", greedy, DATA))
        f.until(lambda: "SuperNode ID" in f.log("greedy"), "the greedy site")
        run = f.run("outsiders", [*SMALL, "federated.rounds=1"]).run
    finally:
        f.stop("greedy")
    log = (run.path / "log.txt").read_text()
    assert "claims client 2, which its key does not stand for" in log
    assert "3 of 3 clients are there, at 3 sites" in log and run.metrics[0]["clients"] == 3  # none of the others


def _without(command: Sequence[str], option: str) -> list[str]:
    at = list(command).index(option)
    return [*command[:at], *command[at + 2 :]]


def _with(command: Sequence[str], option: str, value: object) -> list[str]:
    return [*_without(command, option), option, str(value)]


def _check_port(d: Deployment) -> None:
    """Check that the port answers neither plain HTTP nor clients without the certificate, and listens on loopback alone."""
    with pytest.raises((urllib.error.URLError, OSError)):
        urllib.request.urlopen(f"http://127.0.0.1:{d.port}/health", timeout=5)
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE"):
        urllib.request.urlopen(f"https://127.0.0.1:{d.port}/health", timeout=5)
    with socket.socket() as probe:
        assert probe.connect_ex((_address(), d.port)) != 0 or _address().startswith("127.")  # a local trial listens on loopback alone


def _address() -> str:
    """Return this machine's network address, if it has one, without sending anything."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.255.255.255", 9))
        return str(probe.getsockname()[0])
    return "127.0.0.1"


@pytest.mark.skipif(_address().startswith("127."), reason="this machine has no address but loopback")
def test_other_machines_reach_only_the_paths_of_sites(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    init(folder, sites=1, address=f"{_address()}:{free_port()}", overrides=SMALL)
    keys = folder / "server"
    port = int((keys / "address").read_text().split(":")[1])
    context = ssl.create_default_context(cafile=str(keys / "ca.crt"))
    with superlink(keys, _address(), port, environment(keys / "flwr")):
        for host, path, expected in (
            ("127.0.0.1", "/v1/control/list-runs", (400, 415, 422, 500, 200)),
            (_address(), "/v1/control/list-runs", (403,)),
            (_address(), "/v1/control/start-run", (403,)),
            (_address(), "/health", (200,)),
            (_address(), "/v1/fleet/activate-node", (400, 401, 412, 415, 422, 500)),
        ):
            request = urllib.request.Request(f"https://{host}:{port}{path}", data=None if path == "/health" else b"", method=None)
            try:
                status = urllib.request.urlopen(request, timeout=10, context=context).status
            except urllib.error.HTTPError as error:
                status = error.code
            assert status in expected, (host, path, status)


# --- the page ------------------------------------------------------------------------------------------------------------


def test_the_commands_of_the_how_to_page_work(tmp_path: Path) -> None:
    """Run every command of the first three sections, with the sites in the background, then the Python code."""
    page = (ROOT / "docs/howto/deploy.md").read_text()
    part = page[page.index("## 1. In one process") : page.index("## Recover from failures")]
    fences = re.findall(r"^```(\w+)\n(.*?)^```", part, re.MULTILINE | re.DOTALL)
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 9092)) == 0:
            pytest.skip("port 9092 is taken here")
    env = {**os.environ, "PATH": str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"], "PYTHONPATH": str(ROOT / "src")}
    lines = [line for language, text in fences if language == "bash" for line in text.splitlines()]
    started: list[tuple[str, subprocess.Popen[bytes], Path]] = []

    def start(line: str) -> int:
        log = tmp_path / f"{len(started)}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(shlex.split(line), cwd=tmp_path, env=env, stdout=file, stderr=file, start_new_session=True)
        started.append((line, process, log))
        return len(started) - 1

    def wait(number: int) -> None:
        line, process, log = started[number]
        assert process.wait(600) == 0, (line, log.read_text()[-4000:])

    try:
        alone = start(lines[0])  # it waits for none of the others, and they do not wait for it
        sites = []
        for line in lines[1:]:
            number = start(line)
            if shlex.split(line)[1:3] == ["federate", "client"]:
                sites.append(number)
            else:
                wait(number)
        wait(alone)
        assert len(sites) == 3
        python = "\n".join(text for language, text in fences if language == "python")
        output = subprocess.run([sys.executable, "-c", python], cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout
    finally:
        for _, process, _ in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    rows = [line.split() for line in output.splitlines()]
    assert [row[0] for row in rows] == ["simulated", "federation/simulated", "federation/run"]
    assert len({row[1] for row in rows}) == 1 and all(abs(float(row[3].strip("tensor()"))) < 1e-5 for row in rows)


assert torch.get_num_threads() == 1
