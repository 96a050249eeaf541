"""Server and sites over a transport in memory: the protocol, its checks, and failures. test_flower.py tests Flower itself."""

import asyncio
import json
import logging
import math
import os
import re
import shutil
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import BOMB, FAST, MERGE_BOMB, SMALL_DATA, accept, few_images
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from safetensors.torch import save, save_file
from torch import Tensor

import fedlens as fl
from fedlens.deploy import protocol, worker
from fedlens.deploy import site as site_module
from fedlens.deploy.launch import erase_messages
from fedlens.deploy.programs import SitesOnly
from fedlens.deploy.protocol import MAX_METADATA, Failure, Payload, Rejected, SiteOptions
from fedlens.deploy.server import RemoteClients, checked_mean
from fedlens.deploy.site import (
    OPERATIONS,
    answer,
    backbone_digest,
    clear_cache,
    from_upper_triangle,
    hide_paths,
    local_config,
    mean_update,
    upper_triangle,
)
from fedlens.engine.local_work import Update
from fedlens.errors import UserError
from fedlens.lens.mask import pack_bits, unpack_bits
from fedlens.overrides import compose, to_config, to_yaml
from fedlens.runs import folder as folders
from fedlens.runs.identity import identity
from fedlens.training.bench import set_up
from fedlens.training.privacy import gaussian
from fedlens.training.run import Run, execute

IMAGES = few_images()
HERE = (f"data.root={IMAGES}",)
BASE = [
    *FAST,
    *HERE,
    "experiment=fedavg_iid",
    "federated.clients=6",
    "federated.participation=0.67",
    "federated.local_steps=2",
    "federated.rounds=3",
    "federated.eval_every=1",
    "federated.engine=threaded",
    "optim.batch_size=8",
    "optim.lr=0.01",
    "deploy.wait=0",
]
SPARSE = ["experiment=fedavg_noniid_sparse", "data.classes_per_client=2", "mask.rounds=2", "mask.samples=6", "mask.scope=federated"]
SITES = 3


def places(*overrides: str) -> list[SiteOptions]:
    return [SiteOptions(k, SITES, overrides=overrides) for k in range(SITES)]


Spoil = Callable[[str, int, Payload], Payload | str | None]  # operation, site, honest answer -> what arrives


@dataclass
class Wire:
    """A transport to sites in this process, numbered from 70. Payloads travel as text and bytes, in reverse order."""

    spoil: Spoil = lambda operation, site, reply: reply
    places: list[SiteOptions] = field(default_factory=lambda: places(*HERE))
    memories: dict[int, dict[str, bytes]] = field(default_factory=dict)
    requests: list[tuple[str, int, Payload, int]] = field(default_factory=list)
    away: set[int] = field(default_factory=set)
    by_key: dict[int, int] | None = None  # site -> the K that its key stands for, of SITES

    def may_have(self, site: int, client: int) -> bool:
        return self.by_key is None or client % SITES == self.by_key[site]

    def sites(self) -> Collection[int]:
        return [70 + k for k in range(len(self.places)) if 70 + k not in self.away]

    def send(self, operation: str, payloads: Mapping[int, Payload], deadline: float) -> dict[int, Payload | Failure]:
        replies: dict[int, Payload | Failure] = {}
        for site, payload in sorted(payloads.items(), reverse=True):
            arrived = Payload.parse(payload.metadata_json, payload.tensors)
            reply = answer(operation, arrived, self.places[site - 70], self.memories.setdefault(site, {}))
            spoiled = self.spoil(operation, site, reply)
            self.requests.append((operation, site, arrived, reply.size))
            if spoiled is not None:
                replies[site] = Failure.of(spoiled) if isinstance(spoiled, str) else Payload.parse(spoiled.metadata_json, spoiled.tensors)
        return replies


def federate(path: Path, wire: Wire, *overrides: str) -> Run:
    return execute(
        compose([*BASE, f"run.dir={path}", "run.if_exists=resume", *overrides]), clients=lambda bench: RemoteClients(bench, wire)
    )


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Return the run of these options in which site 71 never answers one operation: what honest sites alone would have learned."""

    @cache
    def run(operation: str, *options: str) -> Run:
        wire = Wire(lambda current, site, reply: None if current == operation and site == 71 else reply)
        if root := [option for option in options if option.startswith("data.root=")]:
            wire.places = places(*root)
        return federate(tmp_path_factory.mktemp("silent") / "r", wire, *options)

    return run


def same(a: Run, b: Run) -> bool:
    return all(torch.equal(a.state[name], tensor) for name, tensor in b.state.items())


def close(a: Run, b: Run) -> bool:
    """Return whether two runs agree up to the order of additions: sites add their clients' ridge sums before the server does."""
    return all(float((a.state[name] - tensor).norm()) <= 1e-6 * float(tensor.norm()) for name, tensor in b.state.items())


@pytest.mark.parametrize(
    "options",
    [
        [],
        SPARSE,
        [*SPARSE, "mask.scope=central", "mask.without=[query]"],
        [*SPARSE, "mask.without=[key,norm]", "mask.strategy=most_sensitive"],
        ["federated.algorithm=scaffold", "optim.momentum=0", "server.optimizer=momentum"],
        ["federated.algorithm=fednova", "federated.straggler_rate=0.5", "federated.dropout_rate=0.3"],
        ["federated.algorithm=fedprox", "server.merge=fisher", "server.fisher_samples=4"],
        [*SPARSE, "server.merge=ties", "federated.exclude=[1]"],
        ["head=linear", "model.freeze_head=false", "optim.clip_norm=1"],
    ],
    ids=lambda options: " ".join(options)[:60] or "dense",
)
def test_a_federation_gives_the_parameters_of_one_process(tmp_path: Path, options: list[str]) -> None:
    here = fl.run([*BASE, *options, f"run.dir={tmp_path / 'here'}"])
    apart = federate(tmp_path / "apart", Wire(), *options)
    assert close(here, apart) and here.mask == apart.mask
    keys = ("val_accuracy", "test_accuracy", "best_round", "dropped", "nonfinite", "refused")
    assert {k: here.summary[k] for k in keys} == {k: apart.summary[k] for k in keys}
    drop = {"seconds", "round_seconds", "bytes_up", "bytes_down"}
    for mine, theirs in zip(here.metrics, apart.metrics, strict=True):
        assert {k: v for k, v in theirs.items() if k not in drop} == pytest.approx(
            {k: v for k, v in mine.items() if k not in drop}, rel=1e-4
        )
    assert apart.summary["engine"] == "flower"


def test_every_byte_is_counted_and_only_active_coordinates_travel(tmp_path: Path) -> None:
    wires = {"dense": Wire(), "sparse": Wire()}
    dense = federate(tmp_path / "dense", wires["dense"])
    sparse = federate(tmp_path / "sparse", wires["sparse"], *SPARSE, "mask.scope=central")
    up = {}
    for name, run in (("dense", dense), ("sparse", sparse)):
        requests = wires[name].requests
        assert run.summary["bytes_down"] == sum(payload.size for _, _, payload, _ in requests)
        assert run.summary["bytes_up"] == sum(size for *_, size in requests)
        up[name] = sum(size for operation, *_, size in requests if operation == "update")
    assert 0.095 < up["sparse"] / up["dense"] < 0.12
    updates = [payload for operation, _, payload, _ in wires["sparse"].requests if operation == "update"]
    bitmaps = [payload for payload in updates if b'"mask"' in payload.tensors[:600]]
    assert len(bitmaps) == len({site for operation, site, *_ in wires["sparse"].requests if operation == "update"})  # indices once
    assert len(updates) > len(bitmaps)


def test_paths_of_the_server_stay_there_and_a_site_sets_its_own(tmp_path: Path) -> None:
    wire = Wire()
    federate(tmp_path / "secret-place", wire)
    sent = "".join(payload.metadata_json for _, _, payload, _ in wire.requests)
    assert "secret-place" not in sent and str(IMAGES) not in sent
    config = compose(
        [*BASE, "data.root=/etc", "data.download=true", "model.weights=/etc/passwd", "mask.strategy=random", "mask.path=/etc/x"]
    )
    there = local_config(to_yaml(config), ["data.root=/mine", "device=cpu"])
    assert (there.data.root, there.data.download, there.mask.path, there.run.dir) == ("/mine", False, None, None)
    assert there.model.weights != "/etc/passwd"
    assert there.optim == config.optim and there.federated == config.federated
    with pytest.raises(UserError, match="the server sets all other keys"):
        local_config(to_yaml(config), ["optim.lr=1"])


# --- what arrives ----------------------------------------------------------------------------------------------------


def spoiled(kind: str, reply: Payload, size: int = 0) -> Payload | str:
    tensors: dict[str, Tensor] = reply.unpack({}) if not reply.tensors else fl_load(reply.tensors)
    if kind == "nan":
        return Payload.pack(reply.metadata, {**tensors, "deltas": torch.full_like(tensors["deltas"], float("nan"))})
    if kind == "shape":
        return Payload.pack(reply.metadata, {**tensors, "deltas": tensors["deltas"][:, :-1].contiguous()})
    if kind == "type":
        return Payload.pack(reply.metadata, {**tensors, "deltas": tensors["deltas"].double()})
    if kind == "names":
        return Payload.pack(reply.metadata, {**tensors, "more": torch.zeros(1)})
    if kind == "huge":
        return Payload.pack(reply.metadata, {**tensors, "deltas": tensors["deltas"] * 1e6})
    if kind == "garbage":
        return Payload(reply.metadata, b"\x80\x04\x95garbage" * 50)
    if kind == "truncated":
        return Payload(reply.metadata, reply.tensors[: len(reply.tensors) // 2])
    if kind == "flood":
        return Payload(reply.metadata, reply.tensors + b"\0" * 10**6)
    if kind == "300 MB":
        return Payload(reply.metadata, bytes(300 * 10**6))
    if kind == "escapes":
        return Payload({"error": "\x1b[2J\x07\x9b31m\u202egood\rerror: forged\x7f"})
    if kind == "another request":
        return Payload({**reply.metadata, "answers": "0" * 64}, reply.tensors)
    if kind == "no request":
        return Payload({}, reply.tensors)
    if kind == "nothing":
        return Payload(reply.metadata, b"")
    if kind == "error":
        return Payload({"error": "no disk\nand more"})
    if kind == "forger":
        return Payload.pack(reply.metadata, {**tensors, "x\n2026-01-01 | ERROR | forged": torch.zeros(1)})
    if kind.startswith("steps"):  # of two; FedNova would make up for the one that it seems to have missed
        wrong = {"steps nan": float("nan"), "steps inf": float("inf"), "steps half": 1.5, "steps one": 1.0}[kind]
        return Payload.pack(reply.metadata, {**tensors, "notes": tensors["notes"].index_fill(1, torch.tensor([2]), wrong)})
    if kind == "liar":
        return Payload.pack(reply.metadata, {**tensors, "notes": tensors["notes"] * torch.tensor([1.0, 1e9, 1.0, 1.0])})
    return "Flower says that it is gone"


def fl_load(blob: bytes) -> dict[str, Tensor]:
    from safetensors.torch import load

    return load(blob)


KINDS = ["nan", "shape", "type", "names", "forger", "huge", "garbage", "truncated", "flood", "nothing", "error", "liar", "gone"]
KINDS += ["300 MB", "escapes", "another request", "no request", "steps nan", "steps inf", "steps half", "steps one"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_update_does_not_touch_the_model(
    tmp_path: Path, kind: str, silent: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    """Site 71 (clients 1 and 4) misbehaves in every round; the rest is what honest sites alone would have learned."""
    options = ["federated.participation=1", "server.norm_bound=10", "federated.rounds=2"]

    def bad(operation: str, site: int, reply: Payload) -> Payload | str | None:
        return spoiled(kind, reply) if operation == "update" and site == 71 else reply

    expected = silent("update", *options)
    caplog.set_level(logging.WARNING, "fedlens")
    run = federate(tmp_path / "run", Wire(bad), *options)
    assert same(run, expected)
    counts = {key: run.summary[key] for key in ("nonfinite", "refused", "dropped")}
    assert sum(counts.values()) == 4, counts
    assert counts["nonfinite" if kind == "nan" else "dropped" if kind in ("gone", "error", "escapes") else "refused"] == 4, counts
    assert [line["clients"] for line in run.metrics] == [4, 4]
    assert all(record.getMessage().isprintable() for record in caplog.records) and len(caplog.records) >= 2


@pytest.mark.parametrize("source", ["the round before", "another run"])
def test_an_old_update_of_a_site_is_not_accepted_again(tmp_path: Path, source: str, caplog: pytest.LogCaptureFixture) -> None:
    """Run, round and θ are bound to it: site 71 sends a sound update of its own at the wrong time."""
    options, old = ["federated.participation=1", "federated.rounds=2"], list[Payload]()

    def replays(operation: str, site: int, reply: Payload) -> Payload | str | None:
        if operation != "update" or site != 71:
            return reply
        old.append(reply)
        return old[0]

    if source == "another run":
        federate(tmp_path / "other", Wire(replays), *options, "federated.rounds=1")
    rounds: list[int] = []

    def silent(operation: str, site: int, reply: Payload) -> Payload | str | None:
        rounds.append(site) if operation == "update" and site == 71 else None
        return None if operation == "update" and site == 71 and (source == "another run" or len(rounds) == 2) else reply

    honest = federate(tmp_path / "silent", Wire(silent), *options)
    caplog.set_level(logging.WARNING, "fedlens")
    caplog.clear()
    run = federate(tmp_path / "run", Wire(replays), *options)
    assert same(run, honest) and run.summary["refused"] == (4 if source == "another run" else 2)
    assert "from site 71 (clients 1, 4): it answers another request: the run, the round or θ differs" in caplog.text


HOSTILE_CONFIGS = [
    "head: ${oc.env:FEDLENS_SECRET}",
    'head: "\\x24{oc.env:FEDLENS_SECRET}"',
    'head: "\\u0024\\u007boc.env:FEDLENS_SECRET}"',
    "seed: ${oc.decode:${oc.env:FEDLENS_SECRET}}",
    "{a: &a $, head: [*a, '{oc.env:FEDLENS_SECRET}']}",
    "data: {name: folder, root: '${oc.env:FEDLENS_SECRET}'}",
    "data: {name: folder, root: /etc}",
    "{data: {name: folder}, model: {weights: /etc/passwd}}",
    "{data: {name: ../../etc/passwd}}",
    "{data: {name: 'hf:/etc'}}",
    "{model: {name: 'timm:$FEDLENS_SECRET'}}",
    "{mask: {strategy: random, path: /etc/passwd}}",
    "experiment: ../../../../etc/passwd",
    "!!python/object/apply:os.getenv [FEDLENS_SECRET]",
    "run: {dir: /tmp/x, trackers: [wandb]}",
    "trainer: [1]",
    "data: 5",
    "seed: 0x" + "f" * 1900,
    BOMB,
]
HOSTILE_FIELDS: list[dict[str, Any]] = [
    {"classes": {"a": 1}, "mean": "x", "std": None},
    {"classes": ["${oc.env:FEDLENS_SECRET}"] * 10},
    {"clients": "$FEDLENS_SECRET"},
    {"clients": [10**30]},
    {"clients": {"0": 0}},
    {"backbone": ["x"]},
    {"size": "FEDLENS_SECRET", "clients": [0], "setup": "", "round": 0, "lr": 1, "run": ""},
    {"size": -1, "clients": [0], "setup": "", "round": 0, "lr": 1, "run": "", "sent": True},
]


@pytest.mark.parametrize("own_data", [False, True], ids=["shared data", "own data"])
def test_a_hostile_server_learns_neither_variables_nor_paths_nor_exceptions_of_a_site(
    tmp_path: Path, own_data: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every operation with every odd configuration or field, through the site's worker. An unexpected exception stays in the site's log."""
    monkeypatch.setenv("FEDLENS_SECRET", "hunter2")
    monkeypatch.setenv("FEDLENS_DATA", "patients-of-dr-who")  # a relative path, which does not exist
    monkeypatch.chdir(tmp_path)
    good = {"config": to_yaml(compose(BASE)), "classes": [str(k) for k in range(10)], "mean": [0.5] * 3, "std": [0.2] * 3, "clients": [0]}
    requests = [good | {"config": config} for config in HOSTILE_CONFIGS] + [good | fields for fields in HOSTILE_FIELDS]
    home = tmp_path / "jane"
    places = [SiteOptions(0, SITES, own_data, overrides=overrides) for overrides in (HERE, (f"data.root={home}",), ())]
    leaks, silent = [], 0
    for options in places:
        for operation in ("hello", "ridge", "update"):
            for metadata in requests:
                try:
                    sent = answer(operation, Payload(metadata, b"\x80garbage"), options, {}).metadata_json
                except Exception:  # what the site's Flower process then sends: test_flower.py
                    silent += 1
                    continue
                leaks += [sent for secret in ("hunter2", "patients", "jane", str(tmp_path), str(IMAGES), "Traceback") if secret in sent]
    assert leaks == [] and "patients-of-dr-who" in caplog.text and silent > 0


LENGTHS = {"1e15": lambda norm: 1e15 / norm, "100 times": lambda norm: 100.0, "infinite": lambda norm: math.inf}


@pytest.mark.parametrize("kind", LENGTHS)
def test_an_update_of_unusual_length_is_rejected_by_default_and_the_run_ends_with_the_model_of_the_others(
    tmp_path: Path, kind: str, silent: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    """Every round, the first one included; the log names the site."""

    def bad(operation: str, site: int, reply: Payload) -> Payload | str | None:
        if operation != "update" or site != 71:
            return reply
        tensors = fl_load(reply.tensors)
        return Payload.pack(reply.metadata, {**tensors, "deltas": tensors["deltas"] * LENGTHS[kind](float(tensors["deltas"][0].norm()))})

    more = f"data.root={SMALL_DATA}"  # clients of more images, whose updates have similar lengths
    expected = silent("update", "federated.participation=1", more)
    caplog.set_level(logging.WARNING, "fedlens")
    run = federate(tmp_path / "run", Wire(bad, places(more)), "federated.participation=1", more)
    assert (
        same(run, expected) and run.summary["refused"] + run.summary["nonfinite"] == 6 and [r["clients"] for r in run.metrics] == [4, 4, 4]
    )
    if kind != "infinite":
        assert len(re.findall(r"client [14] \(site 71\) has norm .*, expected at most .* \(deploy\.norm_ratio", caplog.text)) == 6


def test_a_cohort_of_one_hostile_site_does_not_stop_a_run(tmp_path: Path) -> None:
    """Later rounds are compared with earlier ones, also after a restart: their median norms are in the checkpoint."""
    options, seen = ["federated.participation=0.1", "federated.rounds=6", "deploy.min_fraction=0.1"], list[int]()

    def bad(operation: str, site: int, reply: Payload) -> Payload | str | None:
        if operation != "update":
            return reply
        seen.append(site)
        if len(seen) in (2, 4):
            return Payload.pack(
                reply.metadata,
                {**fl_load(reply.tensors), "deltas": torch.full_like(fl_load(reply.tensors)["deltas"], (1e15, math.nan)[len(seen) // 4])},
            )
        if len(seen) == 3:
            raise KeyboardInterrupt
        return reply

    with pytest.raises(KeyboardInterrupt):
        federate(tmp_path / "r", Wire(bad), *options)
    run = federate(tmp_path / "r", Wire(bad), *options)
    assert [line["clients"] for line in run.metrics] == [1, 0, 0, 1, 1, 1] and run.summary["refused"] == 2
    state = json.loads(next((run.path / "checkpoints").glob("step-*6/state.json")).read_text())
    assert len(state["traffic"]["norms"]) == 5 and max(state["traffic"]["norms"]) > 1e15 > 1e3 > sorted(state["traffic"]["norms"])[3]


def test_the_bound_on_lengths_can_be_changed_and_does_not_name_another_run(tmp_path: Path) -> None:
    def long(operation: str, site: int, reply: Payload) -> Payload | str | None:
        if operation != "update" or site != 71:
            return reply
        tensors = fl_load(reply.tensors)
        return Payload.pack(reply.metadata, {**tensors, "deltas": tensors["deltas"] * 30})

    run = federate(tmp_path / "r", Wire(long), "federated.participation=1", "deploy.norm_ratio=null", "federated.rounds=1")
    assert run.summary["refused"] == 0
    assert identity(compose([*BASE, "deploy.norm_ratio=null"])) == identity(compose(BASE))


@pytest.mark.parametrize("kind", ["labels of any size", "features of any size", "more samples", "no features", "a class that takes away"])
def test_a_site_weighs_in_the_head_no_more_than_its_samples(tmp_path: Path, kind: str, silent: Callable[..., Run]) -> None:
    def bad(operation: str, site: int, reply: Payload) -> Payload | str | None:
        if operation != "ridge" or site != 71:
            return reply
        tensors = fl_load(reply.tensors)
        if kind == "labels of any size":
            tensors["b"] = tensors["b"] * torch.where(torch.arange(tensors["b"].shape[-2]) < tensors["b"].shape[-2] - 1, 1e9, 1.0)[:, None]
        elif kind == "features of any size":  # a true Gram matrix, of as many samples
            size = tensors["b"].shape[-2]
            scale = torch.where(torch.arange(size) < size - 1, 1e9, 1.0).double()
            tensors["A"] = upper_triangle(from_upper_triangle(tensors["A"][0], size) * scale[:, None] * scale)[None]
            tensors["b"] = tensors["b"] * scale[:, None]
        elif kind == "more samples":
            tensors = {name: 1000 * tensor for name, tensor in tensors.items()}
        elif kind == "no features":
            tensors["A"] = torch.zeros_like(tensors["A"])
        else:
            tensors["b"][..., -1, 0] -= 1000
            tensors["b"][..., -1, 1] += 1000
        return Payload.pack({}, tensors)

    assert same(federate(tmp_path / "run", Wire(bad), "federated.rounds=1"), silent("ridge", "federated.rounds=1"))


@pytest.mark.parametrize("operation", ["ridge", "sensitivity"])
@pytest.mark.parametrize("kind", ["nan", "garbage", "negative"])
def test_bad_sums_are_left_out(tmp_path: Path, operation: str, kind: str, silent: Callable[..., Run]) -> None:
    options = [*SPARSE, "federated.rounds=1"]

    def bad(current: str, site: int, reply: Payload) -> Payload | str | None:
        if current != operation or site != 71:
            return reply
        if kind == "garbage":
            return Payload({}, b"garbage")
        tensors = fl_load(reply.tensors)
        return Payload.pack(
            {}, {name: torch.full_like(tensor, float("nan") if kind == "nan" else -1.0) for name, tensor in tensors.items()}
        )

    expected = silent(operation, *options)
    run = federate(tmp_path / "run", Wire(bad), *options)
    assert same(run, expected) and run.mask == expected.mask


def test_a_head_without_any_sound_sums_is_an_error(tmp_path: Path) -> None:
    def bad(operation: str, site: int, reply: Payload) -> Payload | str | None:
        if operation != "ridge":
            return reply
        return Payload.pack({}, {name: -tensor for name, tensor in fl_load(reply.tensors).items()})

    with pytest.raises(UserError, match="no client sent valid sums for the ridge head"):
        federate(tmp_path / "r", Wire(bad))


def test_invalid_sensitivities_have_no_weight_in_fisher_merging(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def bad(operation: str, site: int, reply: Payload) -> Payload | str | None:
        if operation != "fisher" or site != 71:
            return reply
        return Payload.pack({}, {"fishers": -fl_load(reply.tensors)["fishers"]})

    caplog.set_level(logging.WARNING, "fedlens")
    run = federate(
        tmp_path / "r", Wire(bad), "server.merge=fisher", "server.fisher_samples=4", "federated.participation=1", "federated.rounds=1"
    )
    assert run.finished and "client 1 has no weight" in caplog.text and "client 4 has no weight" in caplog.text


def test_the_backbone_digest_depends_on_the_weights_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a GPU nor another torch version changes it."""
    bench = set_up(compose([*BASE, *HERE]))
    here = backbone_digest(bench)
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another")
    assert backbone_digest(bench) == here
    with torch.no_grad():
        next(p for name, p in bench.model.named_parameters() if not name.startswith("head.")).view(-1)[0] += 1e-6
    assert backbone_digest(bench) != here


# --- who comes and goes ----------------------------------------------------------------------------------------------


def test_a_site_that_dies_misses_a_round_and_rejoins(tmp_path: Path) -> None:
    """After the restart it lacks head and mask and gets them again."""
    wire = Wire()
    rounds = 0

    def dies(operation: str, site: int, reply: Payload) -> Payload | str | None:
        nonlocal rounds
        rounds += operation == "update" and site == 72
        if operation == "update" and site == 72 and rounds == 2:
            wire.memories[72] = {}
            return None
        return reply

    wire.spoil = dies
    run = federate(tmp_path / "r", wire, *SPARSE, "federated.participation=1", "federated.rounds=4")
    assert [line["clients"] for line in run.metrics] == [6, 4, 6, 6]
    assert run.summary["dropped"] == 2
    sent = [bool(p.metadata["sent"]) for operation, site, p, _ in wire.requests if operation == "update" and site == 72]
    assert sent == [True, False, True, False]  # after a failure the server sends them without a request
    wire.memories.clear()
    wire.requests.clear()
    again = federate(tmp_path / "again", wire, *SPARSE, "federated.rounds=1")
    assert again.finished


def test_a_site_without_head_and_mask_gets_them_within_the_round(tmp_path: Path) -> None:
    wire = Wire()

    def forgets(operation: str, site: int, reply: Payload) -> Payload | str | None:
        if operation == "update":
            wire.memories[site] = {}
        return reply

    whole = federate(tmp_path / "whole", Wire(), *SPARSE)
    wire.spoil = forgets
    assert same(federate(tmp_path / "r", wire, *SPARSE), whole)


def test_the_reply_of_a_site_that_has_left_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers and leaves before the server repeats the request to the others."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    wire, options = Wire(), ["federated.participation=1", "federated.rounds=1", "deploy.min_fraction=0.6"]

    def late(operation: str, site: int, reply: Payload) -> Payload | str | None:
        first = operation == "update" and sum(o == "update" for o, *_ in wire.requests) < 3
        if first and site == 70:
            wire.away = {70}
        return "late" if first and site != 70 else reply

    wire.spoil = late
    run = federate(tmp_path / "r", wire, *options)
    assert run.metrics[0]["clients"] == 6 and same(run, federate(tmp_path / "whole", Wire(), *options))


def test_the_server_notices_sites_that_leave_and_return(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wire = Wire()

    def moves(operation: str, site: int, reply: Payload) -> Payload | str | None:
        if operation == "update":
            wire.away = {70} if not wire.away else set()
        return reply

    wire.spoil = moves
    caplog.set_level(logging.WARNING, "fedlens")
    run = federate(tmp_path / "r", wire, "federated.participation=1", "federated.rounds=4")
    assert {line["clients"] for line in run.metrics} == {4, 6}
    assert "site 70 is gone, and with it clients 0, 3" in caplog.text


def test_a_site_that_is_still_busy_at_the_start_is_greeted_until_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites first finish their work for a server that was killed. A site that was rejected is not greeted again."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    wire = Wire()

    def busy(operation: str, site: int, reply: Payload) -> Payload | str | None:
        greeted = [s for o, s, *_ in wire.requests if o == "hello"]
        return reply if operation != "hello" or (site == 71 and greeted.count(71) >= 3) or site == 70 else "no" if site == 72 else None

    wire.spoil = busy
    run = federate(tmp_path / "r", wire, "federated.participation=1", "federated.rounds=1", "deploy.wait=2")
    greeted = [site for operation, site, *_ in wire.requests if operation == "hello"]
    assert run.metrics[0]["clients"] == 4
    assert greeted.count(70) == 1 and greeted.count(71) == 4 and greeted.count(72) == 1


def test_a_site_that_was_silent_at_the_start_does_not_delay_the_first_round(tmp_path: Path) -> None:
    wire = Wire(spoil=lambda operation, site, reply: None if operation == "hello" and site == 72 else reply)
    run = federate(tmp_path / "r", wire, "federated.participation=1", "federated.rounds=2")
    assert [line["clients"] for line in run.metrics] == [4, 4]
    assert [site for operation, site, *_ in wire.requests if operation == "hello"].count(72) == 1


def test_with_a_checkpoint_per_round_it_is_written_before_the_next_model_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated round could receive different updates; under the same noise the difference would reveal them."""
    writing = folders.save_file

    def slow(tensors: Any, path: Path) -> None:
        time.sleep(2 if path.name == "tensors.safetensors" else 0)
        writing(tensors, path)

    monkeypatch.setattr(folders, "save_file", slow)
    wire, seen = Wire(), []

    def looks(operation: str, site: int, reply: Payload) -> Payload | str | None:
        if operation == "update" and site == 72:  # the first site to receive the request
            seen.append(len(list((tmp_path / "r" / "checkpoints").glob("step-*"))))
        return reply

    wire.spoil = looks
    options = ["federated.participation=1", "federated.eval_every=1", "run.keep_last=9", "run.checkpoint_minutes=0"]
    federate(tmp_path / "r", wire, *options)
    assert seen == [0, 1, 2]


def test_a_silent_site_delays_only_one_round(tmp_path: Path) -> None:
    wire = Wire()
    wire.away = {72}

    def comes(operation: str, site: int, reply: Payload) -> Payload | str | None:
        wire.away = set()
        return None if operation == "hello" and site == 72 else reply

    wire.spoil = comes
    run = federate(tmp_path / "r", wire, "federated.participation=1", "federated.rounds=4")
    assert [line["clients"] for line in run.metrics] == [4, 4, 4, 4]
    assert [site for operation, site, *_ in wire.requests if operation == "hello"].count(72) == 1


def test_too_few_answers_stop_the_run_and_it_resumes_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    wire, options = Wire(), ["federated.participation=1", "deploy.min_fraction=0.9"]
    whole = federate(tmp_path / "whole", Wire(), *options)

    def fails(operation: str, site: int, reply: Payload) -> Payload | str | None:
        late = operation == "update" and sum(o == "update" for o, *_ in wire.requests) >= 4
        return "the line is dead" if late and site == 71 else reply

    wire.spoil = fails
    with pytest.raises(UserError, match=r"round 2: 4 of 6 clients answered, fewer than deploy.min_fraction=0.9"):
        federate(tmp_path / "r", wire, *options)
    assert sum(o == "update" for o, *_ in wire.requests) == 3 + 3 + 1 + 1  # repeated only to the missing sites
    wire.spoil = lambda operation, site, reply: reply
    resumed = federate(tmp_path / "r", wire, *options)
    assert same(resumed, whole) and [line["round"] for line in resumed.metrics] == [1, 2, 3]


def test_too_few_clients_at_the_start_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"deploy.wait: 0 of 6 clients came within 0 s"):
        federate(tmp_path / "r", Wire(places=[]))
    half = Wire(places=[SiteOptions(0, SITES, overrides=HERE)])
    with pytest.raises(UserError, match=r"2 of 6 clients"):
        federate(tmp_path / "half", half)
    run = federate(tmp_path / "few", half, "deploy.min_fraction=0.3", "federated.participation=1", "federated.rounds=1")
    assert run.finished


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"clients": "all"}, "does not report its clients"),
        ({"samples": [0, 5]}, "does not report its clients"),
        ({"samples": [5]}, "does not report its clients"),
        ({"clients": [True, 1]}, "does not report its clients"),
        ({"backbone": "0" * 64}, "its pretrained weights differ"),
        ({"classes": ["a", "b"]}, "its classes, or their order, differ"),
        ({"error": "no data here"}, "no data here"),
        ({"samples": [10**12, 5]}, "deploy.max_samples is 1,000,000"),
        ({"clients": [3, 3]}, "names 2 clients, one of them twice"),
        ({"clients": [*range(9, 30_009)], "samples": [1] * 30_000}, "names 30,000 clients"),
    ],
)
def test_a_site_with_an_invalid_hello_is_left_out(
    tmp_path: Path, facts: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "fedlens")

    def lies(operation: str, site: int, reply: Payload) -> Payload | str | None:
        return Payload({**reply.metadata, **facts}) if operation == "hello" and site == 70 else reply

    run = federate(tmp_path / "r", Wire(lies), "federated.rounds=1", "federated.participation=1")
    assert run.metrics[0]["clients"] == 4
    warnings = [record.getMessage() for record in caplog.records if "site 70 is left out" in record.getMessage()]
    assert len(warnings) == 1 and why in warnings[0]  # not greeted again in every round


def test_a_site_of_another_version_joins_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "fedlens")

    def old(operation: str, site: int, reply: Payload) -> Payload | str | None:
        return Payload({**reply.metadata, "fedlens": "0.0.1"}) if operation == "hello" and site == 71 else reply

    run = federate(tmp_path / "r", Wire(old), "federated.rounds=1", "federated.participation=1")
    assert run.metrics[0]["clients"] == 6
    assert [f"site 71 runs fedlens 0.0.1, the server {fl.__version__}" in r.getMessage() for r in caplog.records] == [True]


def test_a_site_that_comes_back_with_other_weights_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It restarts between two rounds, without another hello."""
    other = {name: tensor * 1.1 for name, tensor in set_up(compose(BASE)).model.state_dict().items() if not name.startswith("head.")}
    save_file(other, tmp_path / "other.safetensors")
    wire = Wire()

    def restarts(operation: str, site: int, reply: Payload) -> Payload | str | None:
        if operation == "update" and site == 72:
            wire.places[2] = SiteOptions(2, SITES, overrides=(*HERE, f"model.weights={tmp_path / 'other.safetensors'}"))
        return reply

    wire.spoil = restarts
    caplog.set_level(logging.WARNING, "fedlens")
    run = federate(tmp_path / "r", wire, "federated.participation=1")
    assert [line["clients"] for line in run.metrics] == [6, 4, 4]
    assert "pretrained weights differ from the server's" in caplog.text


def test_a_site_with_other_data_than_it_reported_is_greeted_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    roots = [tmp_path / str(k) for k in range(SITES)]
    for root in roots:
        shutil.copytree(SMALL_DATA / "train", root / "train")
    wire = Wire(places=[SiteOptions(k, SITES, own_data=True, overrides=(f"data.root={root}",)) for k, root in enumerate(roots)])
    seen: list[int] = []

    def gets_more(operation: str, site: int, reply: Payload) -> Payload | str | None:
        if operation == "update" and site == 72 and not seen:
            seen.append(site)
            image = next((roots[2] / "train" / "0").glob("*.png"))
            shutil.copy(image, image.with_name("more.png"))
            clear_cache()
        return reply

    wire.spoil = gets_more
    caplog.set_level(logging.WARNING, "fedlens")
    run = federate(tmp_path / "r", wire, "federated.clients=3", "federated.participation=1", "federated.rounds=4")
    assert [line["clients"] for line in run.metrics] == [3, 2, 3, 3]
    assert run.summary["refused"] == 1 and "has other data than it reported" in caplog.text


def test_no_site_takes_the_clients_of_another(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "fedlens")
    twice = Wire(places=[SiteOptions(k % SITES, SITES, overrides=HERE) for k in range(SITES + 1)])
    run = federate(tmp_path / "r", twice, "federated.rounds=1", "federated.participation=1")
    assert run.metrics[0]["clients"] == 6 and "site 73 claims client 3 too; it stays with site 70" in caplog.text
    assert not [site for operation, site, *_ in twice.requests if site == 73 and operation != "hello"]


def test_a_site_has_the_clients_that_its_key_stands_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is started as the only site, which would have all clients; its key makes it the first of three."""
    caplog.set_level(logging.WARNING, "fedlens")
    places = [SiteOptions(0, 1, overrides=HERE), *(SiteOptions(k, SITES, overrides=HERE) for k in range(SITES))]
    wire = Wire(places=places, by_key={70: 0, 71: 0, 72: 1, 73: 2})
    run = federate(tmp_path / "r", wire, "federated.rounds=1", "federated.participation=1")
    assert "site 70 claims client 1, which its key does not stand for; rejected" in caplog.text
    clients = {site: payload.metadata["clients"] for operation, site, payload, _ in wire.requests if operation == "update"}
    assert clients == {70: [0, 3], 72: [1, 4], 73: [2, 5]} and run.metrics[0]["clients"] == 6


def test_after_a_restart_clients_stay_with_the_sites_that_had_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A site cannot claim another site's clients while that site is connected."""
    options = ["federated.participation=1", "federated.rounds=2", "federated.target_accuracy=0.01"]  # stops after a round
    run = federate(tmp_path / "r", Wire(), *options)
    state = json.loads(next((run.path / "checkpoints").glob("step-*1/state.json")).read_text())
    assert state["traffic"]["registry"]["4"]["site"] == 71 and state["traffic"]["registry"]["4"]["samples"] > 0
    (run.path / "summary.json").unlink()
    (run.path / "config.yaml").write_text((run.path / "config.yaml").read_text().replace("target_accuracy: 0.01", "target_accuracy: null"))
    accept(run.path)
    thief = Wire(places=[SiteOptions(k, SITES, overrides=HERE) for k in (2, 1, 0)])  # 70 says that it is site 2, 72 that it is site 0
    caplog.set_level(logging.WARNING, "fedlens")
    again = federate(tmp_path / "r", thief, *options[:2], "deploy.min_fraction=0.3")
    assert "site 70 claims client 2 too; it stays with site 72" in caplog.text
    assert [line["clients"] for line in again.metrics] == [6, 2]


def test_sites_with_data_of_their_own(tmp_path: Path) -> None:
    """Each has the training images of some classes only; classes are matched by name."""
    root, held = tmp_path / "sites", {0: "123", 1: "7", 2: "0589"}
    for k, classes in held.items():
        for name in classes:
            shutil.copytree(SMALL_DATA / "train" / name, root / str(k) / "train" / name)
    wire = Wire(places=[SiteOptions(k, SITES, own_data=True, overrides=(f"data.root={root / str(k)}",)) for k in held])
    run = federate(tmp_path / "r", wire, "federated.clients=3", "federated.participation=1", "data.val_fraction=0.3")
    assert [line["clients"] for line in run.metrics] == [3, 3, 3]
    registry = json.loads(next((run.path / "checkpoints").glob("step-*3/state.json")).read_text())["traffic"]["registry"]
    assert {int(k): v["samples"] for k, v in registry.items()} == {k: len(list((root / str(k)).rglob("*.png"))) for k in held}
    # classes 4 and 6 are nowhere; those that are somewhere are known to the head, each under its own number
    bench = set_up(compose([*BASE, "data.val_fraction=0.3"]))
    bench.model.load_state_dict(run.start)
    accuracy = bench.evaluate(bench.val)[1]
    known = [i for i, label in enumerate(bench.val.labels.tolist()) if label not in (4, 6)]
    assert accuracy > 0.7 * len(known) / len(bench.val)
    strange = Wire(places=[SiteOptions(0, 1, own_data=True, overrides=(f"data.root={tmp_path / 'strange'}",))])
    shutil.copytree(SMALL_DATA / "train" / "1", tmp_path / "strange" / "train" / "one")
    with pytest.raises(UserError, match=r"deploy\.wait: 0 of 3"):
        federate(tmp_path / "s", strange, "federated.clients=3")


# --- a site's answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["/data/run #3", "0123", "yes", "&x", "/data/a: b", "{$HOME}", "[a]", "@x", "2026-01-01", "C:\\x"])
def test_a_site_reads_its_own_values_as_a_run_does(value: str) -> None:
    sent = to_yaml(compose(["experiment=fedavg_iid"]))
    here = compose(["experiment=fedavg_iid", f"data.root={value}"]).data.root
    assert local_config(sent, [f"data.root={value}"]).data.root == here == value


@pytest.mark.parametrize(
    ("root", "text"),
    [
        ("/x/a", "/x/a/Jane Doe 1970-01-01.png: not a readable image"),
        ("/x/a", "data.root: /x/a/scan (Jane Doe).png: not a readable image"),
        ("hiv_positive", "hiv_positive/train/0/HIV: Jane.png: not a readable image"),
    ],
)
def test_errors_of_a_site_hide_its_file_names(root: str, text: str) -> None:
    shown = hide_paths(text, SiteOptions(0, 1, True, (f"data.root={root}",)))
    assert shown.endswith("…: not a readable image") and not any(word in shown for word in ("Jane", "Doe", "x/a", "hiv", "HIV"))


def test_a_slow_site_keeps_its_data_for_the_next_hello(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[float] = []
    monkeypatch.setattr(site_module, "clear_cache", lambda: forgotten.append(worker.SLOW_HELLO))
    monkeypatch.setattr(worker, "perform", lambda *_: Payload({}))
    monkeypatch.setattr(worker, "_slow_hello_at", -worker.HELLO_RETRY)
    for slow in (20.0, -1.0, -1.0, 20.0, 20.0):  # seconds that count as slow: none of these greetings takes so long, or each does
        monkeypatch.setattr(worker, "SLOW_HELLO", slow)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            worker.send(ours, {"operation": "hello", "metadata": {}, "options": asdict(SiteOptions(0, 1))}, b"", {})
            assert worker._serve_one(theirs)
    assert forgotten == [20.0, -1.0, 20.0]  # not after the two that were slow


def test_a_finished_run_with_a_configuration_that_is_now_invalid_can_be_read(tmp_path: Path) -> None:
    sent = compose([*BASE, "federated.algorithm=scaffold", "optim.momentum=0"])
    sent.privacy.clip = 1.0
    (tmp_path / "config.yaml").write_text(to_yaml(sent))
    assert fl.load_run(tmp_path).config.privacy.clip == 1.0
    with pytest.raises(UserError, match=r"privacy\.clip does not work with scaffold"):
        fl.load_run(tmp_path).resume()


def test_a_mean_beyond_the_range_ends_the_run_without_another_request(tmp_path: Path) -> None:
    """A second sum of the round, over other sites, would differ from the first by their updates."""
    calls: list[Mapping[int, int]] = []

    class Secret(Wire):
        def secure_mean(
            self, payloads: Mapping[int, Payload], *_: Any, size: int, samples: Mapping[int, int], **__: Any
        ) -> tuple[Update, set[int]]:
            calls.append(samples)
            return Update(-1, sum(samples.values()), 1, torch.full((size,), 0.2), torch.tensor(1.0), len(payloads)), set()

    with pytest.raises(UserError, match=r"round 1: the mean exceeds privacy\.range"):
        federate(tmp_path / "r", Secret(), "privacy.secure_aggregation=true", "federated.participation=1")
    assert len(calls) == 1 and sum(calls[0].values()) == len(set_up(compose(BASE)).train)


def test_the_range_allows_for_the_rounding_of_a_large_site() -> None:
    def checked(largest: float, samples: list[int]) -> Update:
        return checked_mean(Update(-1, 2, 1, torch.full((5,), largest), torch.tensor(1.0)), 5, 0.1, samples, 0)

    assert checked(0.100119, [5000, 1, 1]) and checked(0.10009, [10, 10, 10])
    with pytest.raises(UserError, match="a site sent an invalid update"):
        checked(0.100119, [10, 10, 10])


def test_an_update_that_is_not_finite_is_not_clamped_to_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {
        "deltas": torch.tensor([[float("inf"), -float("inf"), 0.01]]),
        "notes": torch.tensor([[0.0, 4.0, 2.0, 1.0]], dtype=torch.float64),
    }
    monkeypatch.setattr(site_module, "answer", lambda *_: Payload.pack({}, parts))
    request = Payload({"config": to_yaml(compose(["experiment=fedavg_iid", "privacy.secure_aggregation=true"]))})
    assert mean_update(request, SiteOptions(0, 1), {}).metadata == {"error": "the update is not finite"}


@pytest.mark.parametrize(
    ("operation", "facts", "why"),
    [
        ("format_disk", {}, "unknown operation"),
        ("ridge", {"clients": [1]}, "the request names clients [1], this site has [0, 3]"),
        ("ridge", {"clients": []}, "the request names clients"),
        ("ridge", {"clients": [3, 0]}, "the request names clients"),
        ("ridge", {}, "lacks 'clients'"),
        ("update", {"clients": [0], "size": 3, "setup": "", "lr": 0.1, "round": 0}, "not safetensors"),
        ("hello", {"config": "seed: [1"}, "cannot be read"),
        ("hello", {"config": "- 1"}, "not a mapping"),
        ("hello", {"config": "optim: {lr: -1}"}, "optim.lr"),
        ("hello", {"config": None}, ""),
        ("hello", {"config": "head: ${oc.env:HOME}"}, "contains an interpolation"),
        ("hello", {"config": 'head: "\\x24{oc.env:HOME}"'}, "contains an interpolation"),
        ("hello", {"config": 'head: "\\u0024\\x7boc.env:HOME}"'}, "contains an interpolation"),
        ("hello", {"config": BOMB}, "more than 20,000 values"),
        ("hello", {"config": MERGE_BOMB}, "more than 20,000 values"),
        ("hello", {"config": "a: &a [*a]"}, "more than 20,000 values"),
        ("hello", {"config": "[" * 1000}, "more than 30 levels"),
        ("hello", {"config": f"seed: 0x{'f' * 1500}"}, "cannot be read"),
        ("hello", {"config": "'seed: 1'"}, "not a mapping"),
        ("hello", {"config": "{model: {name: 'hf:/etc'}}"}, "is a path on this machine"),
        ("hello", {"config": "{data: {name: 'hf:../x'}}"}, "is a path on this machine"),
    ],
)
def test_a_site_answers_an_invalid_request_with_one_line(operation: str, facts: dict[str, Any], why: str) -> None:
    request = Payload({"config": to_yaml(compose(BASE)), **facts})
    reply = answer(operation, request, SiteOptions(0, SITES, overrides=HERE), {})
    assert why in str(reply.metadata["error"]) and "\n" not in str(reply.metadata["error"]) and not reply.tensors


def test_a_site_reports_an_error_without_its_path(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = tmp_path / "patients of Dr Who"
    shutil.copytree(SMALL_DATA / "train", mine / "train")
    broken = next((mine / "train" / "0").glob("*.png"))
    broken.write_bytes(broken.read_bytes()[:60])
    caplog.set_level(logging.WARNING, "fedlens")
    request = Payload({"config": to_yaml(compose(BASE)), "classes": [str(k) for k in range(10)], "mean": [0.5] * 3, "std": [0.2] * 3})
    for root, logged in ((mine, broken.name), (tmp_path / "nowhere", "nowhere")):
        reply = str(answer("hello", request, SiteOptions(0, SITES, own_data=True, overrides=(f"data.root={root}",)), {}).metadata["error"])
        assert reply and str(tmp_path) not in reply and broken.name not in reply and "nowhere" not in reply
        assert logged in caplog.text  # the site's own log


def test_operations_are_those_that_are_documented() -> None:
    assert set(OPERATIONS) == {"hello", "ridge", "sensitivity", "update", "fisher"}
    assert tuple(OPERATIONS) == protocol.OPERATIONS


# --- the wire --------------------------------------------------------------------------------------------------------

EXPECTED = {"x": (torch.float32, (2, 3)), "n": (torch.int64, (1,))}
GOOD = {"x": torch.ones(2, 3), "n": torch.tensor([4])}


def test_a_payload_survives_the_round_trip() -> None:
    sent = Payload.pack({"a": [1, "ü"]}, GOOD)
    got = Payload.parse(sent.metadata_json, sent.tensors)
    tensors = got.unpack(EXPECTED)
    assert (
        got.metadata == {"a": [1, "ü"]}
        and torch.equal(tensors["x"], GOOD["x"])
        and got.size == len(sent.metadata_json.encode()) + len(sent.tensors)
    )


@pytest.mark.parametrize(
    ("blob", "why"),
    [
        (save({"x": torch.ones(2, 3)}), "holds x, expected n, x"),
        (save({**GOOD, "y": torch.ones(1)}), "holds n, x, y"),
        (save({**GOOD, "x": torch.ones(3, 2)}), r"x is float32 \[3, 2\], expected float32 \[2, 3\]"),
        (save({**GOOD, "x": torch.ones(2, 3).half()}), "x is float16"),
        (save(GOOD)[:-1], "not safetensors"),
        (b"", "not safetensors"),
        (b"\xff" * 8 + b"{}", "not safetensors"),
        (save({**GOOD, "x": torch.ones(2000, 3)}), "bytes of tensors, at most"),
    ],
)
def test_unexpected_tensors_are_rejected(blob: bytes, why: str) -> None:
    with pytest.raises(Rejected, match=why):
        Payload({}, blob).unpack(EXPECTED)


@pytest.mark.parametrize("text", ["{", "[1]", "null", None, b"{}", "[" * 10_000, "x" * (MAX_METADATA + 1)], ids=lambda text: str(text)[:10])
def test_invalid_metadata_is_rejected(text: object) -> None:
    with pytest.raises(Rejected):
        Payload.parse(text, b"")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_rejected_without_a_crash(blob: bytes) -> None:
    with pytest.raises(Rejected):
        Payload({}, blob).unpack(EXPECTED)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 6))
def test_bitmaps_and_triangles_survive_the_round_trip(bits: list[bool], size: int) -> None:
    where = torch.tensor(bits)
    assert torch.equal(unpack_bits(pack_bits(where), len(bits)), where)
    square = torch.randn(size, size, dtype=torch.float64)
    square = square + square.T
    assert torch.equal(from_upper_triangle(upper_triangle(square), size), square)


# --- bounds and privacy, in the loop that simulation and deployment share -----------------------------------------------


def test_the_norm_bound_holds_in_a_simulation_too(tmp_path: Path) -> None:
    free = fl.run([*BASE, f"run.dir={tmp_path / 'free'}", "federated.client_metrics=true", "federated.rounds=1"])
    norms = sorted(c["norm"] for c in free.metrics[0]["client_metrics"])
    bound = (norms[-1] + norms[-2]) / 2
    run = fl.run([*BASE, f"run.dir={tmp_path / 'bound'}", f"server.norm_bound={bound}", "federated.rounds=1"])
    assert run.summary["refused"] == 1 and run.metrics[0]["clients"] == len(norms) - 1


def test_clipping_bounds_every_update(tmp_path: Path) -> None:
    run = fl.run([*BASE, f"run.dir={tmp_path / 'r'}", "privacy.clip=1e-3", "federated.rounds=2"])
    assert all(line["client_norm"] == pytest.approx(1e-3, rel=1e-4) for line in run.metrics)
    assert "epsilon" not in run.summary


def test_noise_is_normal_and_its_key_has_256_bits() -> None:
    """torch's generator uses only 32 bits of its seed."""
    assert torch.equal(*(torch.randn(3, generator=torch.Generator().manual_seed(s)) for s in (5, 5 + 2**32)))  # why it is not used
    draws = gaussian(3_000_001, "a")
    assert draws.dtype == torch.float32 and len(draws) == 3_000_001 and bool(draws.isfinite().all())
    assert abs(float(draws.mean())) < 0.003 and float(draws.std()) == pytest.approx(1, abs=0.002)
    for bound, share in ((1.0, 0.6827), (2.0, 0.9545), (3.0, 0.9973)):
        assert float((draws.abs() < bound).float().mean()) == pytest.approx(share, abs=0.002)
    assert float((draws[1:] * draws[:-1]).mean()) == pytest.approx(0, abs=0.003)
    assert float((draws[: 2**20] * draws[2**20 : 2**21]).mean()) == pytest.approx(0, abs=0.005)  # another block
    assert torch.equal(gaussian(1000, "a"), gaussian(1000, "a")) and not torch.equal(gaussian(1000, "a"), gaussian(1000, "b"))
    assert len(gaussian(1, "a")) == 1 and len(gaussian(0, "a")) == 0


def test_secure_aggregation_needs_a_deployment(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"privacy\.secure_aggregation needs a deployment"):
        fl.run([*BASE, "privacy.secure_aggregation=true", f"run.dir={tmp_path / 'r'}"])
    assert not (tmp_path / "r").exists()


def test_unused_new_keys_do_not_change_the_identity_of_a_run() -> None:
    plain = identity(compose(BASE))
    assert identity(compose([*BASE, "deploy.deadline=5", "privacy.delta=1e-6"])) == plain
    assert identity(compose([*BASE, "privacy.clip=1"])) != plain != identity(compose([*BASE, "server.norm_bound=1"]))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["privacy.noise=1"], "privacy.noise needs privacy.clip"),
        (["privacy.noise=1", "privacy.clip=1", "server.merge=median"], "server.merge=mean"),
        (["privacy.noise=1", "privacy.clip=1", "federated.algorithm=scaffold"], "fedavg or fedprox"),
        (["privacy.noise=1", "privacy.clip=1", "federated.client_vectors=true"], "would undo"),
        (["privacy.clip=1", "federated.algorithm=scaffold", "optim.momentum=0"], "privacy.clip does not work with scaffold"),
        (["privacy.noise=-1"], "privacy.noise"),
        (["privacy.secure_aggregation=true", "server.merge=ties"], "only a mean is revealed"),
        (["privacy.secure_aggregation=true", "federated.algorithm=scaffold"], "only a mean is revealed"),
        (["privacy.secure_aggregation=true", "server.norm_bound=1"], "server.norm_bound looks at single updates"),
        (["privacy.secure_aggregation=true", "federated.client_metrics=true"], "federated.client_metrics looks at single updates"),
        (["privacy.delta=1"], "privacy.delta"),
        (["deploy.min_fraction=0"], "min_fraction"),
        (["server.norm_bound=0"], "norm_bound"),
    ],
)
def test_contradicting_settings_are_errors(options: list[str], why: str) -> None:
    with pytest.raises(UserError, match=why):
        compose([*BASE, *options])


# --- the server's folder ---------------------------------------------------------------------------------------------


def test_messages_are_erased_from_the_state_of_a_server_that_was_killed(tmp_path: Path) -> None:
    """Those that it has deleted and those that it has not; the sites' keys stay."""
    script = """
import os, sqlite3, sys
state = sqlite3.connect(sys.argv[1], isolation_level=None)
state.execute("PRAGMA journal_mode = WAL")
state.execute("CREATE TABLE objects (content BLOB)")
state.execute("CREATE TABLE node (key TEXT)")
state.execute("INSERT INTO node VALUES ('key of site 0')")
state.executemany("INSERT INTO objects VALUES (?)", [(b"UPDATE " * 5000,)] * 9)
state.execute("PRAGMA wal_checkpoint(PASSIVE)")
state.execute("DELETE FROM objects WHERE rowid > 4")
os._exit(1)
"""
    state = tmp_path / "state.db"
    subprocess.run([sys.executable, "-c", script, str(state)], check=False)

    def holding() -> set[str]:
        return {path.name for path in tmp_path.iterdir() if b"UPDATE UPDATE" in path.read_bytes()}

    assert holding() == {"state.db", "state.db-wal"}
    erase_messages(state)
    assert holding() == set() and sqlite3.connect(state).execute("SELECT key FROM node").fetchall() == [("key of site 0",)]
    erase_messages(tmp_path / "none.db")
    assert not (tmp_path / "none.db").exists()


# --- a site's worker -------------------------------------------------------------------------------------------------

Message = tuple[str, Payload]


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> list[Message]:
    """Return the requests to site 0 in a run with every operation."""
    wire = Wire()
    options = [*SPARSE, "server.merge=fisher", "server.fisher_samples=4", "federated.rounds=2", "federated.participation=1"]
    federate(tmp_path_factory.mktemp("requests"), wire, *options)
    requests = [(operation, payload) for operation, site, payload, _ in wire.requests if site == 70]
    assert {operation for operation, _ in requests} == set(OPERATIONS)
    return requests


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Iterator[worker.WorkerSupervisor]:
    """Run a worker in a process of its own, as a SuperNode does."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with worker.supervised_worker() as supervisor:
        yield supervisor


def first(requests: list[Message], wanted: str) -> Payload:
    return next(payload for operation, payload in requests if operation == wanted)


def as_bytes(reply: Payload) -> tuple[str, bytes]:
    return reply.metadata_json, reply.tensors


@pytest.fixture
def site(tmp_path: Path) -> SiteOptions:
    """Return the options of site 0, with a copy of the data that a test may delete."""
    shutil.copytree(SMALL_DATA, tmp_path / "data")
    return SiteOptions(0, SITES, overrides=(f"data.root={tmp_path / 'data'}",))


def test_a_worker_gives_the_same_bytes_as_the_process_itself_and_keeps_its_data(
    requests: list[Message], supervisor: worker.WorkerSupervisor, site: SiteOptions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine: dict[str, bytes] = {}
    here = []
    for operation, payload in requests:
        here.append((as_bytes(answer(operation, payload, site, mine)), dict(mine)))
    mean = mean_update(first(requests, "update"), site, mine)
    process, theirs = supervisor.process.pid, dict[str, bytes]()
    for at, (operation, payload) in enumerate(requests):
        assert (as_bytes(worker.request(operation, payload, site, theirs)), theirs) == here[at], operation
        if operation == "hello":
            shutil.rmtree(tmp_path / "data")  # whoever reads it again has nothing to read
    assert set(theirs) == {"setup"}
    assert as_bytes(worker.request(worker.MEAN, first(requests, "update"), site, theirs)) == as_bytes(mean)
    assert supervisor.process.pid == process and supervisor.process.poll() is None and not caplog.records
    assert (
        "data.root" in worker.request("hello", first(requests, "hello"), site, theirs).metadata["error"]
    )  # a run that begins sees what is there


def test_the_mean_of_a_sites_clients_is_weighted_by_samples_and_clamped(requests: list[Message], site: SiteOptions) -> None:
    request, memory = first(requests, "update"), dict[str, bytes]()
    each = answer("update", request, site, memory).load()
    weights = each["notes"][:, 1] / each["notes"][:, 1].sum()
    whole = (each["deltas"].double() * weights[:, None]).sum(0)
    bound = float(whole.abs().median())
    narrow = to_yaml(to_config(OmegaConf.merge(OmegaConf.create(str(request.metadata["config"])), {"privacy": {"range": bound}})))
    for config, wanted in ((request.metadata["config"], whole), (narrow, whole.clamp(-bound, bound))):
        reply = mean_update(Payload({**request.metadata, "config": config}, request.tensors), site, memory)
        assert torch.allclose(reply.load()["mean"].double(), wanted, rtol=1e-6, atol=1e-12)
        assert (reply.metadata["samples"], reply.metadata["clients"]) == (int(each["notes"][:, 1].sum()), len(weights))
    without = Payload({**request.metadata, "sent": False}, Payload.pack({}, {"theta": fl_load(request.tensors)["theta"]}).tensors)
    assert mean_update(without, site, {}) == Payload({"error": "the site lacks head and mask"})
    endless = fl_load(request.tensors) | {"theta": torch.full_like(fl_load(request.tensors)["theta"], float("inf"))}
    assert mean_update(Payload.pack(request.metadata, endless), site, memory) == Payload({"error": "the update is not finite"})


def test_incomplete_messages_neither_stop_nor_block_a_worker(
    requests: list[Message], supervisor: worker.WorkerSupervisor, caplog: pytest.LogCaptureFixture
) -> None:
    request, options = first(requests, "hello"), SiteOptions(0, SITES, overrides=HERE)
    expected, process = as_bytes(answer("hello", request, options, {})), supervisor.process.pid
    for spoil in (
        b"",
        b"\0\0",
        worker.LENGTH.pack(10**15) + b"{",
        worker.LENGTH.pack(4) + b"junk" + bytes(8),
        worker.LENGTH.pack(2) + b"[]" + bytes(8),
    ):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(os.environ[worker.SOCKET])
            connection.sendall(spoil)
    with socket.socket(socket.AF_UNIX) as connection:  # a whole message, and no reader for its reply
        connection.connect(os.environ[worker.SOCKET])
        worker.send(connection, {"operation": "hello", "metadata": request.metadata, "options": asdict(options)}, b"", {})
    assert as_bytes(worker.request("hello", request, options, {})) == expected
    assert supervisor.process.pid == process and supervisor.process.poll() is None and not caplog.records


def test_a_killed_worker_is_replaced_and_waiting_requests_are_answered(
    requests: list[Message], supervisor: worker.WorkerSupervisor, caplog: pytest.LogCaptureFixture
) -> None:
    request, options, memory = first(requests, "update"), SiteOptions(0, SITES, overrides=HERE), dict[str, bytes]()
    expected, process = as_bytes(worker.request("update", request, options, memory)), supervisor.process.pid
    again = Payload({**request.metadata, "sent": False}, Payload.pack({}, {"theta": fl_load(request.tensors)["theta"]}).tensors)
    os.kill(process, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(worker.request, "update", again, options, memory)  # head and mask are in the state
        os.kill(process, signal.SIGKILL)
        assert as_bytes(waiting.result(120)) == expected
    assert supervisor.process.pid != process
    assert [record.getMessage() for record in caplog.records] == [f"the site's worker {process} ended (-9); starting another"]


def test_an_unexpected_exception_is_reported_and_the_worker_replaced(requests: list[Message], supervisor: worker.WorkerSupervisor) -> None:
    request, options, memory = first(requests, "update"), SiteOptions(0, SITES, overrides=HERE), dict[str, bytes]()
    process = supervisor.process.pid
    with pytest.raises(RuntimeError, match=r"^ValueError: could not convert string to float: 'fast'$"):
        worker.request("update", Payload({**request.metadata, "lr": "fast"}, request.tensors), options, memory)
    assert set(memory) == {"setup"}
    assert as_bytes(worker.request("update", request, options, memory)) == as_bytes(answer("update", request, options, {}))
    assert supervisor.process.pid != process


def test_without_a_worker_the_process_does_the_work_itself(
    requests: list[Message], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    request, options = first(requests, "hello"), SiteOptions(0, SITES, overrides=HERE)

    def take_and_leave() -> None:
        connection, _ = listener.accept()
        with connection:
            worker.receive(connection)

    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool, tempfile.TemporaryDirectory() as folder:
        listener.bind(f"{folder}/site")
        listener.listen()
        monkeypatch.setenv(worker.SOCKET, f"{folder}/site")
        gone = pool.submit(take_and_leave)
        assert as_bytes(worker.request("hello", request, options, {})) == as_bytes(answer("hello", request, options, {}))
        gone.result(60)
    assert as_bytes(worker.request("hello", request, options, {})) == as_bytes(answer("hello", request, options, {}))  # no worker at all
    assert [f"process {os.getpid()} answers hello" in record.getMessage() for record in caplog.records] == [True, True]


def test_a_worker_that_cannot_start_blocks_no_request(requests: list[Message], monkeypatch: pytest.MonkeyPatch) -> None:
    request, options = first(requests, "hello"), SiteOptions(0, SITES, overrides=HERE)
    monkeypatch.setattr(worker, "RESTART_PAUSE", 0.05)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with worker.supervised_worker():
        assert as_bytes(worker.request("hello", request, options, {})) == as_bytes(answer("hello", request, options, {}))


def test_the_state_of_a_site_travels_to_the_worker_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def perform(operation: str, request: Payload, options: SiteOptions, memory: dict[str, bytes]) -> Payload:
        seen.append((operation, request, options, dict(memory)))
        memory |= {"new": b"1" * 3 * worker.CHUNK, "changed": b""}
        del memory["old"]
        if operation == "fails":
            raise ZeroDivisionError
        return Payload({"ä": [1.5, None]}, b"\0")

    monkeypatch.setattr(worker, "perform", perform)
    options = SiteOptions(1, 3, True, ("data.root=/my data",))
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool, tempfile.TemporaryDirectory() as folder:
        listener.bind(f"{folder}/site")
        listener.listen()
        monkeypatch.setenv(worker.SOCKET, f"{folder}/site")
        served = pool.submit(worker.serve, listener)
        for operation in ("works", "fails"):
            memory = {"old": b"1", "changed": b"2", "same": b"3"}
            with pytest.raises(RuntimeError, match="ZeroDivisionError") if operation == "fails" else nullcontext():
                assert worker.request(operation, Payload({"n": 1}, b"t"), options, memory) == Payload({"ä": [1.5, None]}, b"\0")
            assert memory == {"changed": b"", "same": b"3", "new": b"1" * 3 * worker.CHUNK}
            assert seen.pop() == (operation, Payload({"n": 1}, b"t"), options, {"old": b"1", "changed": b"2", "same": b"3"})
        served.result(60)  # it answers no further requests


def test_a_worker_ends_with_its_parent_and_leaves_nothing_behind() -> None:
    script = "import os, time; from fedlens.deploy import worker\nwith worker.supervised_worker(): print(os.environ[worker.SOCKET], flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        where = Path(parent.stdout.readline().strip())
        assert stat.S_IMODE(where.parent.stat().st_mode) == 0o700 and where.is_socket()
        parent.kill()
        assert parent.stdout.read() == ""
    until = time.monotonic() + 60
    while where.parent.exists():
        assert time.monotonic() < until


def test_the_process_of_a_supernode_does_not_import_torch() -> None:
    script = "import sys, fedlens.deploy.programs, fedlens.deploy.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_fork_server_runs_each_command_in_a_process_of_its_own_and_ends_with_its_parent() -> None:
    """The output ends when all of them have ended. Random numbers differ: Flower's rounding for secure aggregation draws some."""
    script = """
import os, sys, numpy
from fedlens.deploy.programs import fork_server

def main():
    line = f"{sys.argv[0]} {os.getpid()} {numpy.random.random()} {os.environ['FEDLENS_SITE']}\\n"
    os.write(1, line.encode())
    assert sys.argv != ["b"]

start = fork_server(main)
os.environ["FEDLENS_SITE"] = "socket"
for word in "abc":
    start([word])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    words, processes, numbers, sockets = zip(*(line.split() for line in sorted(done.stdout.splitlines())), strict=True)
    assert words == ("a", "b", "c") and len(set(processes)) == len(set(numbers)) == 3 and set(sockets) == {"socket"}
    assert done.stderr.count("AssertionError") == 1


# --- the server's door -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("client", "path", "status"),
    [
        (("127.0.0.1", 5), "/v1/control/start-run", 200),
        (("::1", 5), "/v1/runtime/pull", 200),
        (("10.0.0.9", 5), "/v1/fleet/activate-node", 200),
        (("10.0.0.9", 5), "/health", 200),
        (("10.0.0.9", 5), "/v1/control/start-run", 403),
        (("10.0.0.9", 5), "/v1/runtime/pull", 403),
        (("10.0.0.9", 5), "/v1/fleet/../control/start-run", 403),
        (("10.0.0.9", 5), "//v1/fleet/x", 403),
        (("", 5), "/v1/control/start-run", 403),
        (None, "/v1/control/start-run", 403),
    ],
)
def test_other_machines_reach_only_the_paths_of_sites(client: Any, path: str, status: int) -> None:
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(SitesOnly(app)({"type": "http", "path": path, "client": client}, None, send))  # type: ignore[arg-type]
    assert sent[0]["status"] == status


# --- the folder ------------------------------------------------------------------------------------------------------


def test_the_folder_of_a_federation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x509 = pytest.importorskip("cryptography.x509")
    from fedlens.cli import main

    folder = tmp_path / "fed"
    options = ["experiment=fedavg_iid", "federated.clients=4"]
    assert main(["federate", "init", str(folder), "--sites", "2", "--address", "fed.example.org:9000", *options]) == 0
    assert "fedlens federate server" in capsys.readouterr().out
    assert json.loads((folder / "sites/1/site.json").read_text()) == {"address": "fed.example.org:9000", "number": 1, "of": 2}
    assert [path for path in (folder, *folder.rglob("*")) if path.stat().st_mode & 0o077] == []
    secret = [folder / "server/server.key", folder / "sites/0/key", folder / "sites/1/key"]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in secret)
    assert len({path.read_bytes() for path in secret}) == 3
    assert not list(folder.rglob("ca.key"))
    own = x509.load_pem_x509_certificate((folder / "server/server.pem").read_bytes())
    root = x509.load_pem_x509_certificate((folder / "server/ca.crt").read_bytes())
    own.verify_directly_issued_by(root)
    names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fed.example.org", "localhost"]
    assert sorted(p.name for p in (folder / "app").rglob("*") if p.is_file()) == [
        "__init__.py",
        "client_app.py",
        "pyproject.toml",
        "server_app.py",
    ]
    assert main(["federate", "init", str(folder), *options]) == 2


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["init", "x", "experiment=centralized"], "has no clients"),
        (["init", "x", "--sites", "9", "experiment=fedavg_iid", "federated.clients=3"], "--sites"),
        (["init", "x", "--address", "nowhere"], "HOST:PORT"),
        (["init", "x", "federated.nothing=1"], "federated.nothing"),
        (["server", "x"], "not a federation's folder"),
        (["client", "x"], "not a site's folder"),
        (["join", "x"], "not a site's folder"),
    ],
)
def test_errors_of_commands_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    from fedlens.cli import main

    monkeypatch.chdir(tmp_path)
    assert main(["federate", *words]) == 2
    error = capsys.readouterr().err
    assert why in error and error.count("\n") == 1 and not list(tmp_path.iterdir())


def test_the_app_of_a_folder_of_version_0_2_is_updated(tmp_path: Path) -> None:
    from fedlens.deploy import launch

    for name, module in (("server_app", "apps"), ("client_app", "client")):
        (tmp_path / f"{name}.py").write_text(f"from fedlens.engine.flower.{module} import {name} as app\n")
    launch._update_app(tmp_path)
    for name in ("server_app", "client_app"):
        assert (tmp_path / f"{name}.py").read_text() == f"from fedlens.deploy.flower import {name} as app\n"
    (tmp_path / "client_app.py").write_text("from fedlens.engine.flower.wire import Parcel\n")
    with pytest.raises(
        UserError, match=r"client_app\.py imports fedlens\.engine\.flower, which is now fedlens\.deploy; change its imports"
    ):
        launch._update_app(tmp_path)


def test_the_supernode_options_of_a_site(tmp_path: Path) -> None:
    from fedlens.deploy import launch

    (tmp_path / "site.json").write_text(json.dumps({"address": "h:1", "number": 1, "of": 3}))
    command = launch.client_options(tmp_path, own_data=True, address="g:2", overrides=["data.root=/my data"])
    assert command[command.index("--superlink") + 1] == "g:2"
    assert "--insecure" not in command and command[command.index("--auth-supernode-private-key") + 1] == str(tmp_path / "key")
    config = command[command.index("--node-config") + 1]
    assert config == 'partition-id=1 num-partitions=3 own-data=true overrides="%27data.root=/my data%27"'
    with pytest.raises(UserError, match="the server sets all other keys"):
        launch.client_options(tmp_path, own_data=False, address=None, overrides=["optim.lr=1"])
