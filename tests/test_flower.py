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
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="needs fedlens[flower]: make test-flower")

import fedlens as fl
from fedlens.deploy.keys import make_site_key
from fedlens.deploy.launch import client_options, environment, free_port, init
from fedlens.errors import UserError
from fedlens.training.run import Run

ROOT = Path(__file__).parents[1]
HERE = ["data=fashion_mini", "device=cpu", "run.progress=false"]
SMALL = [
    *HERE,
    *("experiment=fedavg_iid", "federated.clients=3", "federated.participation=1", "federated.local_steps=1"),
    *("optim.batch_size=4", "federated.eval_every=100", "deploy.wait=300"),
]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every process that a test starts, as in its own."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def fedlens(*words: object) -> list[str]:
    return [sys.executable, "-m", "fedlens", *map(str, words)]


class Deployment:
    """A federation on loopback: processes by name, each with its log and a process group of its own."""

    def __init__(self, folder: Path, sites: int, overrides: Sequence[str]) -> None:
        self.folder, self.sites, self.port = folder, sites, free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        init(folder, sites=sites, address=f"127.0.0.1:{self.port}", overrides=overrides)

    def start(self, name: str, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, **options)
        return self.processes[name]

    def site(self, k: int, *words: object) -> None:
        self.start(f"site{k}", fedlens("federate", "client", self.folder / "sites" / str(k), *words))

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
            return [json.loads(line) for line in (self.folder / "run/metrics.jsonl").read_text().splitlines()]
        return []

    def run_log(self) -> str:
        path = self.folder / "run/log.txt"
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
        return fl.load_run(self.folder / "run")


@contextmanager
def deployment(folder: Path, sites: int, overrides: Sequence[str]) -> Iterator[Deployment]:
    found = Deployment(folder, sites, overrides)
    try:
        yield found
    finally:
        for process in found.processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for name, process in found.processes.items():
            with suppress(subprocess.TimeoutExpired):
                process.wait(15)
            if process.poll() is None:
                found.kill(name)
            if process.stdin is not None:
                process.stdin.close()


class Counted:
    """Bytes that pass between sites and server, counted by a relay on the transport."""

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
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pump(reader, there[1], True), self._pump(there[0], writer, False))


def distance(a: Run, b: Run) -> float:
    return max(float((a.state[n] - t).double().norm() / t.double().norm().clamp(min=1e-12)) for n, t in b.state.items())


# --- parity, and bytes on the wire ----------------------------------------------------------------------------------------

EXPERIMENTS = {
    "dense": ["experiment=fedavg_iid", "federated.rounds=5"],
    "sparse": ["experiment=fedavg_iid_sparse", "federated.rounds=5", "mask.density=0.1"],
}


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Run, Run, Run, Counted]]:
    """The embedded default, dense and sparse: (sequential engine, Flower's simulation, SuperLink and three SuperNodes), and its bytes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    found = {}
    for name, options in EXPERIMENTS.items():
        base = tmp_path_factory.mktemp(name)
        here = fl.run([*HERE, *options, "federated.engine=sequential", f"run.dir={base / 'here'}"])
        with deployment(base / "federation", 3, [*HERE, *options, "federated.engine=sequential"]) as d:
            relay = Counted(d.port)
            for k in range(3):
                d.site(k, "--address", f"127.0.0.1:{relay.port}")
            d.server()
            apart = d.finished()
            d.server("--simulate", f"run.dir={base / 'simulated'}")
            d.finished()
        found[name] = (here, fl.load_run(base / "simulated"), apart, relay)
    return found


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_sequential_engine_flower_simulation_and_deployment_give_the_same_parameters(
    deployed: dict[str, tuple[Run, Run, Run, Counted]], name: str
) -> None:
    here, simulated, apart, _ = deployed[name]
    assert here.summary["rounds"] == simulated.summary["rounds"] == apart.summary["rounds"] == 5
    assert (here.task_vector()).norm() > 0.01
    for run in (simulated, apart):
        assert distance(run, here) <= 1e-5
        assert run.mask == here.mask
        assert run.summary["test_accuracy"] == here.summary["test_accuracy"]


def test_uploads_at_density_a_tenth_are_at_most_12_percent_of_dense(deployed: dict[str, tuple[Run, Run, Run, Counted]]) -> None:
    """Counted at the transport: TLS, HTTP, polling, head and all."""
    dense, sparse = deployed["dense"][3], deployed["sparse"][3]
    print(f"uploads on the wire: dense {dense.up:,} bytes, sparse {sparse.up:,}: {100 * sparse.up / dense.up:.2f} %")
    assert sparse.up <= 0.12 * dense.up
    for name in deployed:
        *_, run, relay = deployed[name]
        assert run.summary["bytes_up"] <= relay.up <= 1.05 * run.summary["bytes_up"] + 10**6  # what the metrics say is what travelled
        assert run.summary["bytes_down"] <= relay.down <= 1.05 * run.summary["bytes_down"] + 10**6


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_all_messages_of_a_site_are_answered_by_one_process(deployed: dict[str, tuple[Run, Run, Run, Counted]], name: str) -> None:
    *_, apart, _ = deployed[name]
    for k in range(3):
        log = (apart.path.parent / f"site{k}.log").read_text()
        asked = re.findall(r"Receiving: \w+\.(\w+) message", log)
        answered = re.findall(r"worker (\d+) answered (\w+) in", log)
        assert [operation for _, operation in answered] == asked and asked.count("update") == 5, log[-3000:]
        assert len({process for process, _ in answered}) == 1


def test_the_process_that_flower_starts_for_a_message_does_without_torch() -> None:
    script = "import sys, fedlens.deploy.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_federations_made_before_find_their_client_app() -> None:
    from fedlens.deploy import apps, client

    assert apps.client_app is client.client_app


# --- faults --------------------------------------------------------------------------------------------------------------


def test_a_site_killed_mid_round_and_a_server_killed_between_rounds(tmp_path: Path) -> None:
    """Both in one federation: the round goes on without the site, the run goes on after the server, and nothing is lost."""
    options = [*SMALL, "federated.rounds=5", "deploy.deadline=45", "deploy.min_fraction=0.5"]
    with deployment(tmp_path / "f", 3, options) as d:
        for k in range(3):
            d.site(k)
        d.server()
        d.until(lambda: len(d.metrics) >= 1, "a first round")
        asked = d.log("site1").count("train.update")
        d.until(lambda: d.log("site1").count("train.update") > asked, "a second round at site 1")
        d.kill("site1")
        d.until(lambda: any(line["clients"] == 2 for line in d.metrics), "the round without site 1")
        assert "nothing from site" in d.run_log()
        d.kill("server")
        before = d.metrics
        time.sleep(3)  # its children notice
        assert d.metrics[: len(before)] == before
        d.site(1)
        d.server()
        run = d.finished()
        clients = [line["clients"] for line in run.metrics]
        assert [line["round"] for line in run.metrics] == [1, 2, 3, 4, 5]
        assert clients[0] == clients[-1] == 3 and 2 in clients
        assert "resuming at round" in d.run_log()
        assert run.summary["dropped"] == sum(3 - c for c in clients)


def test_a_server_killed_between_rounds_ends_with_the_parameters_of_a_run_that_was_not(tmp_path: Path) -> None:
    options = [
        *SMALL,
        "experiment=fedavg_iid_sparse",
        "mask.strategy=random",
        "federated.rounds=3",
        "server.optimizer=adam",
        "server.lr=0.001",
    ]
    here = fl.run([*options, "federated.engine=sequential", f"run.dir={tmp_path / 'here'}"])
    with deployment(tmp_path / "f", 3, [*options, "federated.engine=sequential"]) as d:
        for k in range(3):
            d.site(k)
        d.server()
        d.until(lambda: len(d.metrics) >= 1, "a round")
        d.kill("server")
        d.server()
        run = d.finished()
        assert "resuming at round" in d.run_log()
    assert [line["round"] for line in run.metrics] == [1, 2, 3]
    assert run.mask == here.mask and distance(run, here) <= 1e-5  # to the bit: test_federation.py


EVIL = '''
"""A site that does as its node's configuration says."""
from fedlens.deploy import client
from fedlens.deploy.client import client_app as app
from fedlens.deploy.wire import Parcel
from safetensors.torch import load

honest, place_of, evil = client.ask, client.place_of, {}

def remember(context):
    evil["now"] = str(context.node_config.get("evil", ""))
    return place_of(context)

def ask(operation, asked, place, memory):
    reply = honest(operation, asked, place, memory)
    if operation != "update" or not evil["now"]:
        return reply
    found = load(reply.tensors)
    if evil["now"] == "nan":
        found["deltas"][0, 7] = float("nan")
    elif evil["now"] == "shape":
        found["deltas"] = found["deltas"][:, 1:].contiguous()
    elif evil["now"] == "huge":
        found["deltas"] *= 1e9
    elif evil["now"] == "garbage":
        return Parcel({}, b"\\x80\\x04garbage" * 1000)
    return Parcel.of({}, found)

client.place_of, client.ask = remember, ask
__all__ = ["app"]
'''


def test_bad_updates_are_refused_and_the_rest_trains(tmp_path: Path) -> None:
    kinds = ["", "", "nan", "shape", "huge", "garbage"]
    options = [*SMALL, "federated.clients=6", "federated.rounds=2", "server.norm_bound=100", "deploy.min_fraction=0.3"]
    with deployment(tmp_path / "f", 6, options) as d:
        (d.folder / "app/federation/client_app.py").write_text(EVIL)
        for k, kind in enumerate(kinds):
            command = client_options(d.folder / "sites" / str(k), own_data=False, address=None, overrides=[])
            command[command.index("--node-config") + 1] += f' evil="{kind}"' if kind else ""
            own = [sys.executable, "-m", "fedlens.deploy.programs", "supernode", *command]
            d.start(f"site{k}", own, env=environment(d.folder / "sites" / str(k) / "flwr"), stdin=subprocess.PIPE)
        d.server()
        run = d.finished()
        assert all(re.search(r"worker \d+ answered update", d.log(f"site{k}")) for k in range(6))
    assert [line["clients"] for line in run.metrics] == [2, 2]
    assert run.summary["nonfinite"] == 2 and run.summary["refused"] == 6 and run.summary["dropped"] == 0
    log = (run.path / "log.txt").read_text()
    for line in (
        "client 2 is not finite",
        r"deltas is float32 \[1, ",
        "client 4 has norm .* server.norm_bound is 100; refused",
        "not safetensors",
    ):
        assert len(re.findall(line, log)) == 2, (line, log)
    assert all(bool(t.isfinite().all()) for t in run.state.values()) and float(run.task_vector().norm()) < 10
    honest = fl.run([*options, "federated.engine=sequential", f"run.dir={tmp_path / 'all'}"])
    assert run.summary["ridge"]["lambda"] == honest.summary["ridge"]["lambda"]
    assert run.summary["test_accuracy"] == pytest.approx(honest.summary["test_accuracy"], abs=0.05)


# --- outsiders -----------------------------------------------------------------------------------------------------------


def test_outsiders_are_not_let_in(tmp_path: Path) -> None:
    """Sites with another key, no key, another authority, no TLS; one that claims the clients of others; and then those that belong."""
    with deployment(tmp_path / "f", 3, [*SMALL, "federated.rounds=1"]) as d:
        d.server()
        d.until(lambda: "sites may join" in d.log("server"), "the server")
        good = client_options(d.folder / "sites/0", own_data=False, address=None, overrides=[])
        make_site_key(tmp_path / "stranger", tmp_path / "stranger.pub")
        other = tmp_path / "elsewhere"
        init(other, sites=1, address="127.0.0.1:1", overrides=SMALL)
        key = good.index("--auth-supernode-private-key")
        tries = {
            "wrong key": ([*good[: key + 1], str(tmp_path / "stranger"), *good[key + 2 :]], "2004|Failed to activate"),
            "no key": ([*good[:key], *good[key + 2 :]], "2001|[Aa]uthent|Failed to"),
            "wrong authority": (_with(good, "--root-certificates", other / "server/ca.crt"), "CERTIFICATE_VERIFY_FAILED|certificate"),
            "plain text": (
                [*_without(_without(good, "--root-certificates"), "--auth-supernode-private-key"), "--insecure"],
                "failed|unavailable|disconnected|Failed",
            ),
        }
        for name, (command, _) in tries.items():
            own = ["flower-supernode", *_with(command, "--port", free_port()), "--max-retries", "2"]
            d.start(name, own, env=environment(tmp_path / f"home-{name.replace(' ', '-')}"))
        for name, (_, why) in tries.items():
            d.until(lambda name=name: d.processes[name].poll() is not None, f"{name}: its end")  # type: ignore[misc]
            assert d.processes[name].returncode != 0, name
            assert re.search(why, d.log(name)), (name, d.log(name)[-1500:])
        d.until(lambda: "0 of 3 clients are there, at 0 sites" in d.run_log(), "the server's count")
        _door_is_closed(d)
        greedy = _with(good, "--node-config", "partition-id=0 num-partitions=1")  # with the key of site 0
        d.start("greedy", ["flower-supernode", *greedy], env=environment(tmp_path / "home-greedy"))
        d.until(lambda: "claims client 2, which is not one of those that its key stands for" in d.run_log(), "the greedy site's claim")
        for k in (1, 2):
            d.site(k)
        run = d.finished()
        assert run.metrics[0]["clients"] == 3


def _without(command: Sequence[str], option: str) -> list[str]:
    at = list(command).index(option)
    return [*command[:at], *command[at + 2 :]]


def _with(command: Sequence[str], option: str, value: object) -> list[str]:
    return [*_without(command, option), option, str(value)]


def _door_is_closed(d: Deployment) -> None:
    """Plain HTTP gets nothing; over TLS what starts runs is there for this machine (here: a loopback address)."""
    with pytest.raises((urllib.error.URLError, OSError)):
        urllib.request.urlopen(f"http://127.0.0.1:{d.port}/health", timeout=5)
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE"):
        urllib.request.urlopen(f"https://127.0.0.1:{d.port}/health", timeout=5)
    with socket.socket() as probe:
        assert probe.connect_ex((_address(), d.port)) != 0 or _address().startswith("127.")  # a local trial listens on loopback alone


def _address() -> str:
    """This machine's address on a network, if it has one; nothing is sent."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.255.255.255", 9))
        return str(probe.getsockname()[0])
    return "127.0.0.1"


@pytest.mark.skipif(_address().startswith("127."), reason="this machine has no address but loopback")
def test_from_another_address_only_what_sites_need_is_answered(tmp_path: Path) -> None:
    from fedlens.deploy.launch import superlink

    folder = tmp_path / "f"
    init(folder, sites=1, address=f"{_address()}:{free_port()}", overrides=SMALL)
    keys = folder / "server"
    port = int((keys / "address").read_text().split(":")[1])
    context = ssl.create_default_context(cafile=str(keys / "ca.crt"))
    with superlink(keys, _address(), port, environment(keys / "flwr")):
        for host, path, status in (
            ("127.0.0.1", "/v1/control/list-runs", (400, 415, 422, 500, 200)),
            (_address(), "/v1/control/list-runs", (403,)),
            (_address(), "/v1/control/start-run", (403,)),
            (_address(), "/health", (200,)),
            (_address(), "/v1/fleet/activate-node", (400, 401, 412, 415, 422, 500)),
        ):
            request = urllib.request.Request(f"https://{host}:{port}{path}", data=None if path == "/health" else b"", method=None)
            try:
                found = urllib.request.urlopen(request, timeout=10, context=context).status
            except urllib.error.HTTPError as error:
                found = error.code
            assert found in status, (host, path, found)


# --- privacy -------------------------------------------------------------------------------------------------------------


def test_epsilon_is_that_of_the_gaussian_mechanism() -> None:
    """Against Balle and Wang's exact formula for one Gaussian mechanism; k of them are one with the noise divided by sqrt(k)."""
    from math import erf, exp, sqrt

    from fedlens.training.privacy import epsilon

    def delta(eps: float, noise: float) -> float:
        def phi(x: float) -> float:
            return (1 + erf(x / sqrt(2))) / 2

        return phi(1 / (2 * noise) - eps * noise) - exp(eps) * phi(-1 / (2 * noise) - eps * noise)

    for noise, rounds in ((1.0, 1), (2.0, 10), (5.0, 100)):
        found = epsilon(noise, rounds, 1e-5)
        low, high = 0.0, 100.0
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if delta(middle, noise / sqrt(rounds)) > 1e-5 else (low, middle)
        assert low <= found <= 1.25 * low + 0.2  # never less than the truth; Rényi accounting is a little above it
    assert epsilon(1.0, 0, 1e-5) == 0.0


def test_noise_is_of_its_size_secret_and_the_same_after_a_resume(tmp_path: Path) -> None:
    options = [*SMALL, "privacy.clip=0.01", "privacy.noise=2", "federated.rounds=3", "federated.eval_every=1", "run.keep_last=9"]
    first, second = (fl.run([*options, f"run.dir={tmp_path / name}"]) for name in "ab")
    plain = fl.run([*SMALL, "privacy.clip=0.01", "federated.rounds=3", f"run.dir={tmp_path / 'plain'}"])
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


def test_a_round_that_is_done_again_with_other_answers_has_another_noise() -> None:
    """Under the same noise two models of one round would tell the difference of their sums, bare."""
    from fedlens.overrides import compose
    from fedlens.training.privacy import Privacy

    private = Privacy(compose([*SMALL, "privacy.clip=1", "privacy.noise=2"]), 7)
    first, other = torch.zeros(10_000), torch.zeros(10_000).index_fill(0, torch.tensor([3]), 1e-3)
    assert torch.equal(private.noised(first, 4, 4, 5), private.noised(first.clone(), 4, 4, 5))  # a resumed run: the same bits
    apart = 4 * (private.noised(first, 4, 4, 5) - private.noised(other, 4, 4, 5))
    assert float(apart.std()) == pytest.approx(2 * 2**0.5, rel=0.05)  # two draws of standard deviation 2
    fewer = private.noised(first, 2, 4, 5)  # two of four were refused or silent: the noise is as large as if they had not been
    assert float(fewer.std()) == pytest.approx(2 / 4, rel=0.05)


@pytest.mark.parametrize("stage", ["setup", "share_keys", "collect_masked_vectors", "unmask"])
def test_a_site_that_dies_in_any_stage_of_secure_aggregation_is_the_one_that_is_left_out(stage: str) -> None:
    sites = SecretSites(4, dies=(104, stage))
    found, failed = sites.mean()
    assert failed == {104}
    if found is None:  # then the others try again
        sites.ids.remove(104)
        found, failed = sites.mean()
        assert failed == set()
    assert found is not None and found.clients == (4 if stage == "unmask" else 3)


@pytest.mark.parametrize("said", [{}, {"loss": float("nan")}, {"loss": "low"}, {"loss": 1e308}, {"loss": 1.0, "clients": 10**6}], ids=str)
def test_what_a_site_says_beside_its_masked_update_neither_stops_nor_repeats_a_sum(said: dict[str, Any]) -> None:
    found, failed = SecretSites(4, said={104: said}).mean()
    assert found is not None and failed == set() and found.clients == 4 and float(found.loss) == 1.0
    assert found.delta.tolist() == pytest.approx([sum(range(101, 105)) / 4e4] * 5, abs=1e-5)


class SecretSites:
    """Sites in this process that do Flower's part of the protocol; site k's update is k / 10,000 everywhere."""

    def __init__(
        self,
        count: int,
        dies: tuple[int, str] = (0, ""),
        said: dict[int, dict[str, Any]] | None = None,
        spoil: Callable[[str, Any, Any], None] = lambda stage, record, content: None,
    ) -> None:
        self.ids, self.dies, self.said = list(range(101, 101 + count)), dies, said or {}
        self.spoil = spoil  # what the last site does to its answers: stage, the protocol's record, all records
        self.contexts: dict[int, Any] = {}
        self.replies: dict[str, Any] = {}
        self.unreadable = ""  # the site whose replies cannot be received

    def mean(self) -> tuple[Any, set[int]]:
        from flwr.app import Context, RecordDict
        from flwr.supercore.task_identity import TaskIdentity

        from fedlens.deploy.secure import Counted, secure_mean
        from fedlens.deploy.wire import Parcel

        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        made = [Context(run_id=1, node_id=k, node_config={}, state=RecordDict(), run_config={}, series_id=1) for k in (1, *self.ids)]
        self.contexts = {context.node_id: context for context in made}
        grid = Counted(self)  # type: ignore[arg-type]
        parcels = {k: Parcel({"clients": [k]}, b"x") for k in self.ids}
        samples = dict.fromkeys(self.ids, 10)
        found = secure_mean(grid, self.contexts[1], parcels, 0, size=5, bound=0.1, samples=samples, fraction=0.5, deadline=1.0)
        return found, grid.failed

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

        found = []
        for message in messages:
            site, stage = message.metadata.dst_node_id, message.content.config_records[RECORD_KEY_CONFIGS][Key.STAGE]
            if site == self.dies[0] and Stage.all().index(stage) >= Stage.all().index(self.dies[1]):
                continue

            def train(asked: Any, context: Any, site: int = site) -> Any:
                update = ndarrays_to_parameters([np.full(5, site / 10_000, np.float32)])
                answered = FitRes(Status(Code.OK, ""), update, 10, self.said.get(site, {"loss": 1.0, "clients": 1}))
                return Message(recorddict_compat.fitres_to_recorddict(answered, keep_input=False), reply_to=asked)

            with suppress(KeyError, ValueError):  # to the others it has dropped out
                reply = secaggplus_mod(copy.deepcopy(message), self.contexts[site], train)
                if site == max(self.contexts):
                    self.spoil(stage, reply.content.config_records[RECORD_KEY_CONFIGS], reply.content)
                found.append(reply)
        return found


def as_npy(*shape: int) -> bytes:
    import numpy as np

    part = io.BytesIO()
    np.save(part, np.zeros(shape, np.int64))
    return part.getvalue()


def _header(text: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def _said_samples(content: Any, value: Any) -> None:
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
    "other samples": ("collect_masked_vectors", lambda record, content: _said_samples(content, 11)),
    "infinite samples": ("collect_masked_vectors", lambda record, content: _said_samples(content, float("inf"))),
    "a list of samples": ("collect_masked_vectors", lambda record, content: _said_samples(content, [1, 2])),
    "a share without end": ("unmask", lambda record, content: record.update({"shares": [part + bytes(5000) for part in record["shares"]]})),
    "no result": ("collect_masked_vectors", lambda record, content: [content.pop(k) for k in list(content) if content[k] is not record]),
    "keys of strangers": ("unmask", lambda record, content: record.update({"nids": [999] * len(record["nids"])})),
}


def test_a_reply_that_cannot_be_received_leaves_out_its_site_alone() -> None:
    sites = SecretSites(4)
    sites.unreadable = "104"
    assert sites.mean()[1] == {104}


def test_a_sum_with_a_part_that_is_no_update_is_seen_to_be_none() -> None:
    """Who sent it is what nobody can know."""
    import numpy as np

    from fedlens.deploy.federation import sound_sum

    def other(stage: str, record: Any, content: Any) -> None:
        if stage == "collect_masked_vectors":
            part = io.BytesIO()
            np.save(part, np.full(5, 123_456_789, np.int64))
            record["masked_params"] = [record["masked_params"][0], part.getvalue()]

    found, failed = SecretSites(4, spoil=other).mean()
    assert found is not None and failed == set()
    with pytest.raises(UserError, match="a site sent nonsense, and nobody can tell which"):
        sound_sum(found, 5, 0.1, [10] * 4, 0)


@pytest.mark.parametrize("kind", BROKEN)
def test_who_breaks_the_form_of_secure_aggregation_is_the_one_that_is_left_out(kind: str) -> None:
    stage, broken = BROKEN[kind]
    sites = SecretSites(4, spoil=lambda at, record, content: broken(record, content) if at == stage else None)
    found, failed = sites.mean()
    assert failed == {104}
    if found is None:  # then the others try again
        sites.ids.remove(104)
        sites.spoil = lambda at, record, content: None
        found, failed = sites.mean()
        assert failed == set()
    assert found is not None and found.delta.shape == (5,) and found.clients == (4 if stage == "unmask" else 3)


def test_sites_are_known_by_the_keys_that_are_left(tmp_path: Path) -> None:
    """A key that is taken away leaves the others their clients; another file in the folder is no key; without any nobody could be known."""
    from types import SimpleNamespace as Some

    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    from fedlens.deploy.apps import GridCourier

    keys = [ec.generate_private_key(ec.SECP384R1()).public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) for _ in range(3)]
    for k, key in enumerate(keys):
        (tmp_path / f"{k}.pub").write_bytes(key)
    grid = Some(get_nodes=lambda: [Some(node_id=100 + k, public_key=key) for k, key in enumerate(keys)])

    def clients() -> list[list[int]]:
        courier = GridCourier(grid, None, tmp_path)  # type: ignore[arg-type]
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
def test_any_folder_can_be_named(tmp_path: Path, name: str) -> None:
    import shlex
    import tomllib
    from types import SimpleNamespace as Some

    from flwr.common.config import parse_config_args

    from fedlens.deploy.client import place_of
    from fedlens.deploy.launch import app_config
    from fedlens.deploy.node import local_config
    from fedlens.overrides import compose, to_yaml

    folder = tmp_path / name
    init(folder, sites=1, address="127.0.0.1:9092", overrides=["experiment=fedavg_iid", "federated.clients=3", f"data.root={folder}"])
    given = app_config(folder / "app" / "pyproject.toml")
    assert Path(given["run-dir"]) == folder / "run" and shlex.split(given["overrides"])[-1] == f"data.root={folder}"
    options = client_options(folder / "sites" / "0", own_data=True, address=None, overrides=[f"data.root={folder}"])
    place = place_of(Some(node_config=parse_config_args([options[options.index("--node-config") + 1]])))  # type: ignore[arg-type]
    assert place.overrides == (f"data.root={folder}",) and place.own
    assert local_config(to_yaml(compose(["experiment=fedavg_iid"])), place.overrides).data.root == str(folder)
    file = folder / "app" / "pyproject.toml"
    file.write_text(file.read_text().replace("escaped = true\n", ""))  # of an older version: as it stands
    assert app_config(file)["run-dir"] == tomllib.loads(file.read_text())["tool"]["flwr"]["app"]["config"]["run-dir"]


def test_a_site_sends_replies_in_its_own_name_and_nothing_else() -> None:
    from types import SimpleNamespace as Some

    from fedlens.deploy.programs import replies_only

    push = replies_only(lambda request, state: "taken")
    for source, answers, taken in ((7, "m1", True), (1, "m1", False), (8, "m1", False), (7, "", False)):
        message = Some(metadata=Some(src_node_id=source, reply_to_message_id=answers))
        request = Some(node=Some(node_id=7), messages_list=[message])
        if taken:
            assert push(request=request, state=None) == "taken"
        else:
            with pytest.raises(PermissionError, match="node 7 sent a message that is no reply of its own"):
                push(request=request, state=None)


def test_a_reply_that_cannot_be_received_takes_no_other_with_it() -> None:
    from flwr.app import Context, Message, RecordDict

    from fedlens.deploy.apps import GridCourier, to_record
    from fedlens.deploy.wire import Parcel

    class Grid:
        """As SuperLink does it: what is fetched counts as delivered, whatever becomes of it."""

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
                reply = Message(to_record(Parcel({"site": asked.metadata.dst_node_id})), reply_to=asked)
                reply.metadata.__dict__["_reply_to_message_id"] = name
                replies.append(reply)
            return replies

    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={}, series_id=1)
    found = GridCourier(Grid(), context).ask("hello", {k: Parcel({}) for k in (1, 2, 3)}, 5.0)  # type: ignore[arg-type]
    assert [found[k].facts["site"] for k in (1, 3)] == [1, 3] and "cannot be received" in str(found[2])  # type: ignore[union-attr]


def test_under_secure_aggregation_the_mean_comes_and_nothing_else(tmp_path: Path) -> None:
    """Flower's SecAgg+ on the active coordinates: the parameters of the open run but for the rounding of the protocol's integers."""
    options = [*SMALL, "experiment=fedavg_iid_sparse", "mask.strategy=random", "federated.clients=5", "federated.rounds=2", "optim.lr=0.05"]
    here = fl.run([*options, "federated.engine=sequential", f"run.dir={tmp_path / 'here'}"])
    with deployment(tmp_path / "o'brien, müller #3 50%20", 3, [*options, "privacy.secure_aggregation=true", "privacy.range=0.05"]) as d:
        d.server("--simulate")
        run = d.finished()
        for k in range(3):
            d.site(k)
        d.server(f"run.dir={tmp_path / 'apart'}")
        d.finished()
        apart = fl.load_run(tmp_path / "apart")
        assert [len(re.findall(r"worker \d+ answered mean", d.log(f"site{k}"))) for k in range(3)] == [2, 2, 2]
    moved = here.task_vector()
    for found in (run, apart):
        assert float((found.task_vector() - moved).norm()) < 1e-3 * float(moved.norm()) > 0
        assert [line["clients"] for line in found.metrics] == [5, 5]
    assert not {"cosine", "sign_conflict", "client_norm", "drift_ratio"} & set(run.metrics[0])
    assert run.metrics[1]["train_loss"] == pytest.approx(here.metrics[1]["train_loss"], rel=1e-3)
    vectors = 2 * 3 * 8 * run.summary["trainable_parameters"]  # eight bytes a number, one vector a site and round
    assert vectors < run.summary["bytes_up"] < 1.3 * vectors + 10**6


# --- the page ------------------------------------------------------------------------------------------------------------


def test_the_how_to_page_word_for_word(tmp_path: Path) -> None:
    """Every command of its first three chapters, sites in the background as in terminals of their own, then its Python."""
    page = (ROOT / "docs/howto/deploy.md").read_text()
    part = page[page.index("## 1. In one process") : page.index("## When something fails")]
    fences = re.findall(r"^```(\w+)\n(.*?)^```", part, re.MULTILINE | re.DOTALL)
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 9092)) == 0:
            pytest.skip("port 9092 is taken here")
    env = {**os.environ, "PATH": str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"], "PYTHONPATH": ""}
    sites: list[subprocess.Popen[bytes]] = []
    try:
        for line in (line for language, text in fences if language == "bash" for line in text.splitlines()):
            words = shlex.split(line)
            if words[1:3] == ["federate", "client"]:
                with (tmp_path / f"site{len(sites)}.log").open("wb") as log:
                    sites.append(subprocess.Popen(words, cwd=tmp_path, env=env, stdout=log, stderr=log, start_new_session=True))
            else:
                done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600, check=False)
                assert done.returncode == 0, (line, done.stdout[-2000:], done.stderr[-2000:])
        assert len(sites) == 3
        python = "\n".join(text for language, text in fences if language == "python")
        said = subprocess.run([sys.executable, "-c", python], cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout
    finally:
        for site in sites:
            with suppress(ProcessLookupError):
                os.killpg(site.pid, signal.SIGKILL)
            site.wait()
    rows = [line.split() for line in said.splitlines()]
    assert [row[0] for row in rows] == ["simulated", "federation/simulated", "federation/run"]
    assert len({row[1] for row in rows}) == 1 and all(abs(float(row[3].strip("tensor()"))) < 1e-5 for row in rows)


assert torch.get_num_threads() == 1
