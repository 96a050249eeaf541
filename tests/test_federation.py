"""A federation whose sites are elsewhere, over a courier that is a dict: the protocol, what it refuses, what it survives. Flower itself: test_flower.py."""

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAST, SMALL_DATA
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from safetensors.torch import save, save_file
from torch import Tensor

import fedlens as fl
from fedlens.deploy import node, worker
from fedlens.deploy import wire as on_the_wire
from fedlens.deploy.federation import Federation, sound_sum
from fedlens.deploy.node import OPERATIONS, Place, _without_paths, answer, backbone_digest, forget, local_config, mean_update
from fedlens.deploy.programs import SitesOnly
from fedlens.deploy.wire import LIMIT, Failure, Parcel, Refused, from_upper, upper
from fedlens.engine.local_work import Update
from fedlens.errors import UserError
from fedlens.lens.mask import pack_bits, unpack_bits
from fedlens.overrides import compose, to_config, to_yaml
from fedlens.runs import store
from fedlens.runs.identity import identity
from fedlens.training.bench import set_up
from fedlens.training.privacy import gaussian
from fedlens.training.run import Run, execute

BASE = [
    *FAST,
    "experiment=fedavg_iid",
    "federated.clients=6",
    "federated.participation=0.67",
    "federated.local_steps=2",
    "federated.rounds=3",
    "federated.eval_every=1",
    "federated.engine=sequential",
    "optim.batch_size=8",
    "optim.lr=0.01",
    "deploy.wait=0",
]
SPARSE = ["experiment=fedavg_noniid_sparse", "data.classes_per_client=2", "mask.rounds=2", "mask.samples=6", "mask.scope=federated"]
SITES = 3
HERE = (f"data.root={SMALL_DATA}",)

Spoil = Callable[[str, int, Parcel], Parcel | str | None]  # operation, site, honest answer -> what arrives


@dataclass
class Wire:
    """Sites in this process, numbered from 70; parcels cross as text and bytes, in the wrong order."""

    spoil: Spoil = lambda operation, site, reply: reply
    places: list[Place] = field(default_factory=lambda: [Place(k, SITES, overrides=HERE) for k in range(SITES)])
    memories: dict[int, dict[str, bytes]] = field(default_factory=dict)
    asked: list[tuple[str, int, Parcel, int]] = field(default_factory=list)
    away: set[int] = field(default_factory=set)
    by_key: dict[int, int] | None = None  # site -> the K that its key stands for, of SITES

    def may_have(self, site: int, client: int) -> bool:
        return self.by_key is None or client % SITES == self.by_key[site]

    def sites(self) -> Collection[int]:
        return [70 + k for k in range(len(self.places)) if 70 + k not in self.away]

    def ask(self, operation: str, parcels: Mapping[int, Parcel], deadline: float) -> dict[int, Parcel | Failure]:
        found: dict[int, Parcel | Failure] = {}
        for site, parcel in sorted(parcels.items(), reverse=True):
            arrived = Parcel.read(parcel.told, parcel.tensors)
            reply = answer(operation, arrived, self.places[site - 70], self.memories.setdefault(site, {}))
            spoiled = self.spoil(operation, site, reply)
            self.asked.append((operation, site, arrived, reply.size))
            if spoiled is not None:
                found[site] = Failure.of(spoiled) if isinstance(spoiled, str) else Parcel.read(spoiled.told, spoiled.tensors)
        return found


def federate(path: Path, wire: Wire, *overrides: str) -> Run:
    return execute(compose([*BASE, f"run.dir={path}", "run.if_exists=resume", *overrides]), clients=lambda bench: Federation(bench, wire))


def same(a: Run, b: Run) -> bool:
    return all(torch.equal(a.state[name], tensor) for name, tensor in b.state.items())


def close(a: Run, b: Run) -> bool:
    """Sites add their clients' ridge sums up before the server does: in float64, but not in its order."""
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
def test_sites_apart_train_what_one_process_trains(tmp_path: Path, options: list[str]) -> None:
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
        asked = wires[name].asked
        assert run.summary["bytes_down"] == sum(parcel.size for _, _, parcel, _ in asked)
        assert run.summary["bytes_up"] == sum(size for *_, size in asked)
        up[name] = sum(size for operation, *_, size in asked if operation == "update")
    assert 0.095 < up["sparse"] / up["dense"] < 0.12
    updates = [parcel for operation, _, parcel, _ in wires["sparse"].asked if operation == "update"]
    bitmaps = [parcel for parcel in updates if b'"mask"' in parcel.tensors[:600]]
    assert len(bitmaps) == len({site for operation, site, *_ in wires["sparse"].asked if operation == "update"})  # indices once
    assert len(updates) > len(bitmaps)


def test_what_is_on_the_server_is_not_told_and_what_is_at_a_site_is_its_own(tmp_path: Path) -> None:
    wire = Wire()
    federate(tmp_path / "secret-place", wire)
    told = "".join(parcel.told for _, _, parcel, _ in wire.asked)
    assert "secret-place" not in told and str(SMALL_DATA) not in told
    config = compose(
        [*BASE, "data.root=/etc", "data.download=true", "model.weights=/etc/passwd", "mask.strategy=random", "mask.path=/etc/x"]
    )
    there = local_config(to_yaml(config), ["data.root=/mine", "device=cpu"])
    assert (there.data.root, there.data.download, there.mask.path, there.run.dir) == ("/mine", False, None, None)
    assert there.model.weights != "/etc/passwd"
    assert there.optim == config.optim and there.federated == config.federated
    with pytest.raises(UserError, match="the rest is the server's to say"):
        local_config(to_yaml(config), ["optim.lr=1"])


# --- what arrives ----------------------------------------------------------------------------------------------------


def spoiled(kind: str, reply: Parcel, size: int = 0) -> Parcel | str:
    tensors: dict[str, Tensor] = reply.unpack({}) if not reply.tensors else fl_load(reply.tensors)
    if kind == "nan":
        return Parcel.of({}, {**tensors, "deltas": torch.full_like(tensors["deltas"], float("nan"))})
    if kind == "shape":
        return Parcel.of({}, {**tensors, "deltas": tensors["deltas"][:, :-1].contiguous()})
    if kind == "type":
        return Parcel.of({}, {**tensors, "deltas": tensors["deltas"].double()})
    if kind == "names":
        return Parcel.of({}, {**tensors, "more": torch.zeros(1)})
    if kind == "huge":
        return Parcel.of({}, {**tensors, "deltas": tensors["deltas"] * 1e6})
    if kind == "garbage":
        return Parcel({}, b"\x80\x04\x95garbage" * 50)
    if kind == "truncated":
        return Parcel({}, reply.tensors[: len(reply.tensors) // 2])
    if kind == "flood":
        return Parcel({}, reply.tensors + b"\0" * 10**6)
    if kind == "nothing":
        return Parcel({}, b"")
    if kind == "error":
        return Parcel({"error": "no disk\nand more"})
    if kind == "forger":
        return Parcel.of({}, {**tensors, "x\n2026-01-01 | ERROR | forged": torch.zeros(1)})
    if kind.startswith("steps"):  # of two; FedNova would make up for the one that it seems to have missed
        wrong = {"steps nan": float("nan"), "steps inf": float("inf"), "steps half": 1.5, "steps one": 1.0}[kind]
        return Parcel.of({}, {**tensors, "notes": tensors["notes"].index_fill(1, torch.tensor([2]), wrong)})
    if kind == "liar":
        return Parcel.of({}, {**tensors, "notes": tensors["notes"] * torch.tensor([1.0, 1e9, 1.0, 1.0])})
    return "Flower says that it is gone"


def fl_load(blob: bytes) -> dict[str, Tensor]:
    from safetensors.torch import load

    return load(blob)


KINDS = ["nan", "shape", "type", "names", "forger", "huge", "garbage", "truncated", "flood", "nothing", "error", "liar", "gone"]
KINDS += ["steps nan", "steps inf", "steps half", "steps one"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_update_does_not_touch_the_model(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Site 71 (clients 1 and 4) misbehaves in every round; the rest is what honest sites alone would have learned."""
    options = ["federated.participation=1", "server.norm_bound=10", "federated.rounds=2"]

    def bad(operation: str, site: int, reply: Parcel) -> Parcel | str | None:
        return spoiled(kind, reply) if operation == "update" and site == 71 else reply

    silent = federate(tmp_path / "silent", Wire(lambda o, s, r: None if o == "update" and s == 71 else r), *options)
    caplog.set_level(logging.WARNING, "fedlens")
    found = federate(tmp_path / "found", Wire(bad), *options)
    assert same(found, silent)
    counts = {key: found.summary[key] for key in ("nonfinite", "refused", "dropped")}
    assert sum(counts.values()) == 4, counts
    assert counts["nonfinite" if kind == "nan" else "dropped" if kind in ("gone", "error") else "refused"] == 4, counts
    assert [line["clients"] for line in found.metrics] == [4, 4]
    assert all("\n" not in record.getMessage() for record in caplog.records) and len(caplog.records) >= 2


@pytest.mark.parametrize("kind", ["labels of any size", "features of any size", "more samples", "no features", "a class that takes away"])
def test_a_site_weighs_in_the_head_no_more_than_its_samples(tmp_path: Path, kind: str) -> None:
    def bad(operation: str, site: int, reply: Parcel) -> Parcel | str | None:
        if operation != "ridge" or site != 71:
            return reply
        tensors = fl_load(reply.tensors)
        if kind == "labels of any size":
            tensors["b"] = tensors["b"] * torch.where(torch.arange(tensors["b"].shape[-2]) < tensors["b"].shape[-2] - 1, 1e9, 1.0)[:, None]
        elif kind == "features of any size":  # a true Gram matrix, of as many samples
            size = tensors["b"].shape[-2]
            scale = torch.where(torch.arange(size) < size - 1, 1e9, 1.0).double()
            tensors["A"] = upper(from_upper(tensors["A"][0], size) * scale[:, None] * scale)[None]
            tensors["b"] = tensors["b"] * scale[:, None]
        elif kind == "more samples":
            tensors = {name: 1000 * tensor for name, tensor in tensors.items()}
        elif kind == "no features":
            tensors["A"] = torch.zeros_like(tensors["A"])
        else:
            tensors["b"][..., -1, 0] -= 1000
            tensors["b"][..., -1, 1] += 1000
        return Parcel.of({}, tensors)

    silent = federate(tmp_path / "silent", Wire(lambda o, s, r: None if o == "ridge" and s == 71 else r), "federated.rounds=1")
    assert same(federate(tmp_path / "found", Wire(bad), "federated.rounds=1"), silent)


@pytest.mark.parametrize("operation", ["ridge", "sensitivity"])
@pytest.mark.parametrize("kind", ["nan", "garbage", "negative"])
def test_bad_sums_are_left_out(tmp_path: Path, operation: str, kind: str) -> None:
    options = [*SPARSE, "federated.rounds=1"]

    def bad(asked: str, site: int, reply: Parcel) -> Parcel | str | None:
        if asked != operation or site != 71:
            return reply
        if kind == "garbage":
            return Parcel({}, b"garbage")
        tensors = fl_load(reply.tensors)
        return Parcel.of({}, {name: torch.full_like(tensor, float("nan") if kind == "nan" else -1.0) for name, tensor in tensors.items()})

    silent = federate(tmp_path / "silent", Wire(lambda o, s, r: None if o == operation and s == 71 else r), *options)
    found = federate(tmp_path / "found", Wire(bad), *options)
    assert same(found, silent) and found.mask == silent.mask


def test_head_without_any_sound_sums_is_told_in_one_line(tmp_path: Path) -> None:
    def bad(operation: str, site: int, reply: Parcel) -> Parcel | str | None:
        if operation != "ridge":
            return reply
        return Parcel.of({}, {name: -tensor for name, tensor in fl_load(reply.tensors).items()})

    with pytest.raises(UserError, match="no client's sums for the ridge head are sound"):
        federate(tmp_path / "r", Wire(bad))


def test_bad_sensitivities_count_for_nothing_in_fisher_merging(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def bad(operation: str, site: int, reply: Parcel) -> Parcel | str | None:
        if operation != "fisher" or site != 71:
            return reply
        return Parcel.of({}, {"fishers": -fl_load(reply.tensors)["fishers"]})

    caplog.set_level(logging.WARNING, "fedlens")
    run = federate(
        tmp_path / "r", Wire(bad), "server.merge=fisher", "server.fisher_samples=4", "federated.participation=1", "federated.rounds=1"
    )
    assert run.finished and "client 1 counts for nothing" in caplog.text and "client 4 counts for nothing" in caplog.text


def test_the_same_weights_are_the_same_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site with a GPU, or with another torch, is no stranger; one with other weights is."""
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


def test_a_site_that_dies_is_missed_and_welcome_again(tmp_path: Path) -> None:
    """It misses a round; started anew it has forgotten head and mask, says so, and gets them again."""
    wire = Wire()
    rounds = 0

    def dies(operation: str, site: int, reply: Parcel) -> Parcel | str | None:
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
    sent = [bool(p.facts["sent"]) for operation, site, p, _ in wire.asked if operation == "update" and site == 72]
    assert sent == [True, False, True, False]  # after a failure the server sends them of its own accord
    wire.memories.clear()
    wire.asked.clear()
    again = federate(tmp_path / "again", wire, *SPARSE, "federated.rounds=1")
    assert again.finished


def test_a_site_that_forgot_is_told_again_within_the_round(tmp_path: Path) -> None:
    wire = Wire()

    def forgets(operation: str, site: int, reply: Parcel) -> Parcel | str | None:
        if operation == "update":
            wire.memories[site] = {}
        return reply

    whole = federate(tmp_path / "whole", Wire(), *SPARSE)
    wire.spoil = forgets
    assert same(federate(tmp_path / "r", wire, *SPARSE), whole)


def test_a_site_that_has_gone_by_the_time_its_answer_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers, too few others do, and before they are asked again it is gone: its answer counts."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    wire, options = Wire(), ["federated.participation=1", "federated.rounds=1", "deploy.min_fraction=0.6"]

    def late(operation: str, site: int, reply: Parcel) -> Parcel | str | None:
        first = operation == "update" and sum(o == "update" for o, *_ in wire.asked) < 3
        if first and site == 70:
            wire.away = {70}
        return "late" if first and site != 70 else reply

    wire.spoil = late
    run = federate(tmp_path / "r", wire, *options)
    assert run.metrics[0]["clients"] == 6 and same(run, federate(tmp_path / "whole", Wire(), *options))


def test_sites_that_leave_and_come_are_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wire = Wire()

    def moves(operation: str, site: int, reply: Parcel) -> Parcel | str | None:
        if operation == "update":
            wire.away = {70} if not wire.away else set()
        return reply

    wire.spoil = moves
    caplog.set_level(logging.WARNING, "fedlens")
    run = federate(tmp_path / "r", wire, "federated.participation=1", "federated.rounds=4")
    assert {line["clients"] for line in run.metrics} == {4, 6}
    assert "site 70 is gone, and with it clients 0, 3" in caplog.text


def test_a_site_that_is_still_busy_at_the_start_is_greeted_until_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a server was killed its sites end what they were doing for it first; one that does not fit is not asked over and over."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    wire = Wire()

    def busy(operation: str, site: int, reply: Parcel) -> Parcel | str | None:
        greeted = [s for o, s, *_ in wire.asked if o == "hello"]
        return reply if operation != "hello" or (site == 71 and greeted.count(71) >= 3) or site == 70 else "no" if site == 72 else None

    wire.spoil = busy
    run = federate(tmp_path / "r", wire, "federated.participation=1", "federated.rounds=1", "deploy.wait=2")
    greeted = [site for operation, site, *_ in wire.asked if operation == "hello"]
    assert run.metrics[0]["clients"] == 4
    assert greeted.count(70) == 1 and greeted.count(71) == 4 and greeted.count(72) == 1


def test_who_was_silent_at_the_start_is_not_waited_for_again_at_once(tmp_path: Path) -> None:
    wire = Wire(spoil=lambda operation, site, reply: None if operation == "hello" and site == 72 else reply)
    run = federate(tmp_path / "r", wire, "federated.participation=1", "federated.rounds=2")
    assert [line["clients"] for line in run.metrics] == [4, 4]
    assert [site for operation, site, *_ in wire.asked if operation == "hello"].count(72) == 1


def test_where_every_round_is_kept_it_is_on_disk_before_the_next_model_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Done again with other answers, a round would be another model under the same noise (privacy.noise), and the difference of the two bare updates."""
    writing = store.save_file

    def slow(tensors: Any, path: Path) -> None:
        time.sleep(2 if path.name == "tensors.safetensors" else 0)
        writing(tensors, path)

    monkeypatch.setattr(store, "save_file", slow)
    wire, seen = Wire(), []

    def looks(operation: str, site: int, reply: Parcel) -> Parcel | str | None:
        if operation == "update" and site == 72:  # the first that is asked
            seen.append(len(list((tmp_path / "r" / "checkpoints").glob("step-*"))))
        return reply

    wire.spoil = looks
    options = ["federated.participation=1", "federated.eval_every=1", "run.keep_last=9", "run.checkpoint_minutes=0"]
    federate(tmp_path / "r", wire, *options)
    assert seen == [0, 1, 2]


def test_a_site_that_says_nothing_between_rounds_holds_up_one_of_them(tmp_path: Path) -> None:
    wire = Wire()
    wire.away = {72}

    def comes(operation: str, site: int, reply: Parcel) -> Parcel | str | None:
        wire.away = set()
        return None if operation == "hello" and site == 72 else reply

    wire.spoil = comes
    run = federate(tmp_path / "r", wire, "federated.participation=1", "federated.rounds=4")
    assert [line["clients"] for line in run.metrics] == [4, 4, 4, 4]
    assert [site for operation, site, *_ in wire.asked if operation == "hello"].count(72) == 1


def test_too_few_answers_stop_the_run_which_then_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    wire, options = Wire(), ["federated.participation=1", "deploy.min_fraction=0.9"]
    whole = federate(tmp_path / "whole", Wire(), *options)

    def fails(operation: str, site: int, reply: Parcel) -> Parcel | str | None:
        late = operation == "update" and sum(o == "update" for o, *_ in wire.asked) >= 4
        return "the line is dead" if late and site == 71 else reply

    wire.spoil = fails
    with pytest.raises(UserError, match=r"round 2: 4 of 6 clients have answered, deploy.min_fraction=0.9 asks for more"):
        federate(tmp_path / "r", wire, *options)
    assert sum(o == "update" for o, *_ in wire.asked) == 3 + 3 + 1 + 1  # asked again: only those who were missing
    wire.spoil = lambda operation, site, reply: reply
    resumed = federate(tmp_path / "r", wire, *options)
    assert same(resumed, whole) and [line["round"] for line in resumed.metrics] == [1, 2, 3]


def test_nobody_comes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"deploy.wait: 0 of 6 clients after 0 s"):
        federate(tmp_path / "r", Wire(places=[]))
    half = Wire(places=[Place(0, SITES, overrides=HERE)])
    with pytest.raises(UserError, match=r"2 of 6 clients"):
        federate(tmp_path / "half", half)
    run = federate(tmp_path / "few", half, "deploy.min_fraction=0.3", "federated.participation=1", "federated.rounds=1")
    assert run.finished


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"clients": "all"}, "does not say which clients"),
        ({"samples": [0, 5]}, "does not say which clients"),
        ({"samples": [5]}, "does not say which clients"),
        ({"clients": [True, 1]}, "does not say which clients"),
        ({"backbone": "0" * 64}, "pretrained weights are others"),
        ({"classes": ["a", "b"]}, "classes are others"),
        ({"error": "no data here"}, "no data here"),
        ({"samples": [10**12, 5]}, "deploy.max_samples is 1,000,000"),
        ({"clients": [3, 3]}, "names 2 clients, one of them twice"),
        ({"clients": [*range(9, 30_009)], "samples": [1] * 30_000}, "names 30,000 clients"),
    ],
)
def test_a_site_that_does_not_fit_is_left_out(tmp_path: Path, facts: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "fedlens")

    def lies(operation: str, site: int, reply: Parcel) -> Parcel | str | None:
        return Parcel({**reply.facts, **facts}) if operation == "hello" and site == 70 else reply

    run = federate(tmp_path / "r", Wire(lies), "federated.rounds=1", "federated.participation=1")
    assert run.metrics[0]["clients"] == 4
    told = [record.getMessage() for record in caplog.records if "site 70 is left out" in record.getMessage()]
    assert len(told) == 1 and why in told[0]  # not asked again at every turn


def test_a_site_of_another_version_is_told_and_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "fedlens")

    def old(operation: str, site: int, reply: Parcel) -> Parcel | str | None:
        return Parcel({**reply.facts, "fedlens": "0.0.1"}) if operation == "hello" and site == 71 else reply

    run = federate(tmp_path / "r", Wire(old), "federated.rounds=1", "federated.participation=1")
    assert run.metrics[0]["clients"] == 6
    assert [f"site 71 runs fedlens 0.0.1, the server {fl.__version__}" in r.getMessage() for r in caplog.records] == [True]


def test_a_site_that_comes_back_with_other_weights_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Started anew between two rounds, so that nobody has greeted it since."""
    other = {name: tensor * 1.1 for name, tensor in set_up(compose(BASE)).model.state_dict().items() if not name.startswith("head.")}
    save_file(other, tmp_path / "other.safetensors")
    wire = Wire()

    def restarts(operation: str, site: int, reply: Parcel) -> Parcel | str | None:
        if operation == "update" and site == 72:
            wire.places[2] = Place(2, SITES, overrides=(*HERE, f"model.weights={tmp_path / 'other.safetensors'}"))
        return reply

    wire.spoil = restarts
    caplog.set_level(logging.WARNING, "fedlens")
    run = federate(tmp_path / "r", wire, "federated.participation=1")
    assert [line["clients"] for line in run.metrics] == [6, 4, 4]
    assert "its pretrained weights are others than the server's" in caplog.text


def test_a_site_with_other_data_than_it_said_is_greeted_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    roots = [tmp_path / str(k) for k in range(SITES)]
    for root in roots:
        shutil.copytree(SMALL_DATA / "train", root / "train")
    wire = Wire(places=[Place(k, SITES, own=True, overrides=(f"data.root={root}",)) for k, root in enumerate(roots)])
    seen: list[int] = []

    def gets_more(operation: str, site: int, reply: Parcel) -> Parcel | str | None:
        if operation == "update" and site == 72 and not seen:
            seen.append(site)
            image = next((roots[2] / "train" / "0").glob("*.png"))
            shutil.copy(image, image.with_name("more.png"))
            forget()  # as a site's new process would have
        return reply

    wire.spoil = gets_more
    caplog.set_level(logging.WARNING, "fedlens")
    run = federate(tmp_path / "r", wire, "federated.clients=3", "federated.participation=1", "federated.rounds=4")
    assert [line["clients"] for line in run.metrics] == [3, 2, 3, 3]
    assert run.summary["refused"] == 1 and "has other data than it said" in caplog.text


def test_no_site_takes_the_clients_of_another(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "fedlens")
    twice = Wire(places=[Place(k % SITES, SITES, overrides=HERE) for k in range(SITES + 1)])
    run = federate(tmp_path / "r", twice, "federated.rounds=1", "federated.participation=1")
    assert run.metrics[0]["clients"] == 6 and "client 3 is claimed by site 73 too; it stays with site 70" in caplog.text
    assert not [site for operation, site, *_ in twice.asked if site == 73 and operation != "hello"]


def test_a_site_has_the_clients_that_its_key_stands_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Started as the only site of a federation it would have them all; its key says that it is the first of three."""
    caplog.set_level(logging.WARNING, "fedlens")
    places = [Place(0, 1, overrides=HERE), *(Place(k, SITES, overrides=HERE) for k in range(SITES))]
    wire = Wire(places=places, by_key={70: 0, 71: 0, 72: 1, 73: 2})
    run = federate(tmp_path / "r", wire, "federated.rounds=1", "federated.participation=1")
    assert "site 70 claims client 1, which is not one of those that its key stands for; refused" in caplog.text
    asked = {site: parcel.facts["clients"] for operation, site, parcel, _ in wire.asked if operation == "update"}
    assert asked == {70: [0, 3], 72: [1, 4], 73: [2, 5]} and run.metrics[0]["clients"] == 6


def test_after_a_restart_clients_stay_with_the_sites_that_had_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A site that claims what was another's finds it taken, though it comes first; once the other is gone for good it gets it."""
    options = ["federated.participation=1", "federated.rounds=2", "federated.target_accuracy=0.01"]  # stops after a round
    run = federate(tmp_path / "r", Wire(), *options)
    state = json.loads(next((run.path / "checkpoints").glob("step-*1/state.json")).read_text())
    assert state["registry"]["4"]["site"] == 71 and state["registry"]["4"]["samples"] > 0
    (run.path / "summary.json").unlink()
    (run.path / "config.yaml").write_text((run.path / "config.yaml").read_text().replace("target_accuracy: 0.01", "target_accuracy: null"))
    thief = Wire(places=[Place(k, SITES, overrides=HERE) for k in (2, 1, 0)])  # 70 says that it is site 2, 72 that it is site 0
    caplog.set_level(logging.WARNING, "fedlens")
    again = federate(tmp_path / "r", thief, *options[:2], "deploy.min_fraction=0.3")
    assert "client 2 is claimed by site 70 too; it stays with site 72" in caplog.text
    assert [line["clients"] for line in again.metrics] == [6, 2]


def test_sites_with_data_of_their_own(tmp_path: Path) -> None:
    """Each has the training images of some classes and nothing else: classes go by their names, not by where they come in a listing."""
    root, kept = tmp_path / "sites", {0: "123", 1: "7", 2: "0589"}
    for k, classes in kept.items():
        for name in classes:
            shutil.copytree(SMALL_DATA / "train" / name, root / str(k) / "train" / name)
    wire = Wire(places=[Place(k, SITES, own=True, overrides=(f"data.root={root / str(k)}",)) for k in kept])
    run = federate(tmp_path / "r", wire, "federated.clients=3", "federated.participation=1", "data.val_fraction=0.3")
    assert [line["clients"] for line in run.metrics] == [3, 3, 3]
    registry = json.loads(next((run.path / "checkpoints").glob("step-*3/state.json")).read_text())["registry"]
    assert {int(k): v["samples"] for k, v in registry.items()} == {k: len(list((root / str(k)).rglob("*.png"))) for k in kept}
    # classes 4 and 6 are nowhere; those that are somewhere are known to the head, each under its own number
    bench = set_up(compose([*BASE, "data.val_fraction=0.3"]))
    bench.model.load_state_dict(run.start)
    accuracy = bench.evaluate(bench.val)[1]
    known = [i for i, label in enumerate(bench.val.labels.tolist()) if label not in (4, 6)]
    assert accuracy > 0.7 * len(known) / len(bench.val)
    strange = Wire(places=[Place(0, 1, own=True, overrides=(f"data.root={tmp_path / 'strange'}",))])
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
def test_what_goes_wrong_at_a_site_is_told_without_names_of_its_files(root: str, text: str) -> None:
    told = _without_paths(text, Place(0, 1, True, (f"data.root={root}",)))
    assert told.endswith("…: not a readable image") and not any(word in told for word in ("Jane", "Doe", "x/a", "hiv", "HIV"))


def test_a_site_that_reads_slowly_keeps_what_it_has_read_for_the_next_greeting(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[float] = []
    monkeypatch.setattr(node, "forget", lambda: forgotten.append(worker.SLOW))
    monkeypatch.setattr(worker, "do", lambda *_: Parcel({}))
    monkeypatch.setattr(worker, "_late", -worker.STALE)
    for slow in (20.0, -1.0, -1.0, 20.0, 20.0):  # seconds that count as slow: none of these greetings takes so long, or each does
        monkeypatch.setattr(worker, "SLOW", slow)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            worker.send(ours, {"operation": "hello", "facts": {}, "place": asdict(Place(0, 1))}, b"", {})
            assert worker._served(theirs)
    assert forgotten == [20.0, -1.0, 20.0]  # not after the two that were slow


def test_a_finished_run_of_what_is_no_longer_allowed_can_be_read(tmp_path: Path) -> None:
    sent = compose([*BASE, "federated.algorithm=scaffold", "optim.momentum=0"])
    sent.privacy.clip = 1.0
    (tmp_path / "config.yaml").write_text(to_yaml(sent))
    assert fl.load_run(tmp_path).config.privacy.clip == 1.0
    with pytest.raises(UserError, match="scaffold's control variates"):
        fl.load_run(tmp_path).resume()


def test_a_sum_beyond_the_range_ends_the_run_and_is_not_asked_for_again(tmp_path: Path) -> None:
    """A second sum of the round, of other sites, would differ from the first by their updates."""
    asked: list[Mapping[int, int]] = []

    class Secret(Wire):
        def secure_mean(
            self, parcels: Mapping[int, Parcel], *_: Any, size: int, samples: Mapping[int, int], **__: Any
        ) -> tuple[Update, set[int]]:
            asked.append(samples)
            return Update(-1, sum(samples.values()), 1, torch.full((size,), 0.2), torch.tensor(1.0), len(parcels)), set()

    with pytest.raises(UserError, match=r"round 1: the sum is not one of updates within privacy\.range"):
        federate(tmp_path / "r", Secret(), "privacy.secure_aggregation=true", "federated.participation=1")
    assert len(asked) == 1 and sum(asked[0].values()) == len(set_up(compose(BASE)).train)


def test_rounding_of_a_large_site_that_dropped_out_is_no_nonsense() -> None:
    def checked(largest: float, samples: list[int]) -> Update:
        return sound_sum(Update(-1, 2, 1, torch.full((5,), largest), torch.tensor(1.0)), 5, 0.1, samples, 0)

    assert checked(0.100119, [5000, 1, 1]) and checked(0.10009, [10, 10, 10])
    with pytest.raises(UserError, match="a site sent nonsense"):
        checked(0.100119, [10, 10, 10])


def test_an_update_that_is_not_finite_is_not_cut_to_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {
        "deltas": torch.tensor([[float("inf"), -float("inf"), 0.01]]),
        "notes": torch.tensor([[0.0, 4.0, 2.0, 1.0]], dtype=torch.float64),
    }
    monkeypatch.setattr(node, "answer", lambda *_: Parcel.of({}, parts))
    asked = Parcel({"config": to_yaml(compose(["experiment=fedavg_iid", "privacy.secure_aggregation=true"]))})
    assert mean_update(asked, Place(0, 1), {}).facts == {"error": "the update is not finite"}


@pytest.mark.parametrize(
    ("operation", "facts", "why"),
    [
        ("format_disk", {}, "not something that a site does"),
        ("ridge", {"clients": [1]}, "clients [1] were asked for, here are [0, 3]"),
        ("ridge", {"clients": []}, "were asked for"),
        ("ridge", {"clients": [3, 0]}, "were asked for"),
        ("ridge", {}, "lacks 'clients'"),
        ("update", {"clients": [0], "size": 3, "setup": "", "lr": 0.1, "round": 0}, "not safetensors"),
        ("hello", {"config": "seed: [1"}, "cannot be read"),
        ("hello", {"config": "- 1"}, "not a mapping"),
        ("hello", {"config": "optim: {lr: -1}"}, "optim.lr"),
        ("hello", {"config": None}, ""),
        ("hello", {"config": "head: ${oc.env:HOME}"}, "refers to something outside it"),
        ("hello", {"config": "{model: {name: 'hf:/etc'}}"}, "is a path here"),
        ("hello", {"config": "{data: {name: 'hf:../x'}}"}, "is a path here"),
    ],
)
def test_a_site_answers_nonsense_in_one_line(operation: str, facts: dict[str, Any], why: str) -> None:
    asked = Parcel({"config": to_yaml(compose(BASE)), **facts})
    reply = answer(operation, asked, Place(0, SITES, overrides=HERE), {})
    assert why in str(reply.facts["error"]) and "\n" not in str(reply.facts["error"]) and not reply.tensors


def test_a_site_says_what_is_wrong_there_and_not_where(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = tmp_path / "patients of Dr Who"
    shutil.copytree(SMALL_DATA / "train", mine / "train")
    broken = next((mine / "train" / "0").glob("*.png"))
    broken.write_bytes(broken.read_bytes()[:60])
    caplog.set_level(logging.WARNING, "fedlens")
    asked = Parcel({"config": to_yaml(compose(BASE)), "classes": [str(k) for k in range(10)], "mean": [0.5] * 3, "std": [0.2] * 3})
    for root, told in ((mine, broken.name), (tmp_path / "nowhere", "nowhere")):
        reply = str(answer("hello", asked, Place(0, SITES, own=True, overrides=(f"data.root={root}",)), {}).facts["error"])
        assert reply and str(tmp_path) not in reply and broken.name not in reply and "nowhere" not in reply
        assert told in caplog.text  # at the site itself


def test_operations_are_those_that_are_documented() -> None:
    assert set(OPERATIONS) == {"hello", "ridge", "sensitivity", "update", "fisher"}
    assert tuple(OPERATIONS) == on_the_wire.OPERATIONS


# --- the wire --------------------------------------------------------------------------------------------------------

EXPECTED = {"x": (torch.float32, (2, 3)), "n": (torch.int64, (1,))}
GOOD = {"x": torch.ones(2, 3), "n": torch.tensor([4])}


def test_a_parcel_is_what_it_was() -> None:
    sent = Parcel.of({"a": [1, "ü"]}, GOOD)
    got = Parcel.read(sent.told, sent.tensors)
    found = got.unpack(EXPECTED)
    assert got.facts == {"a": [1, "ü"]} and torch.equal(found["x"], GOOD["x"]) and got.size == len(sent.told.encode()) + len(sent.tensors)


@pytest.mark.parametrize(
    ("blob", "why"),
    [
        (save({"x": torch.ones(2, 3)}), "holds x where n, x"),
        (save({**GOOD, "y": torch.ones(1)}), "holds n, x, y"),
        (save({**GOOD, "x": torch.ones(3, 2)}), r"x is float32 \[3, 2\], asked for was float32 \[2, 3\]"),
        (save({**GOOD, "x": torch.ones(2, 3).half()}), "x is float16"),
        (save(GOOD)[:-1], "not safetensors"),
        (b"", "not safetensors"),
        (b"\xff" * 8 + b"{}", "not safetensors"),
        (save({**GOOD, "x": torch.ones(2000, 3)}), "bytes where"),
    ],
)
def test_other_tensors_are_refused(blob: bytes, why: str) -> None:
    with pytest.raises(Refused, match=why):
        Parcel({}, blob).unpack(EXPECTED)


@pytest.mark.parametrize("told", ["{", "[1]", "null", None, b"{}", "[" * 10_000, "x" * (LIMIT + 1)], ids=lambda told: str(told)[:10])
def test_other_facts_are_refused(told: object) -> None:
    with pytest.raises(Refused):
        Parcel.read(told, b"")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused_and_never_crash(blob: bytes) -> None:
    with pytest.raises(Refused):
        Parcel({}, blob).unpack(EXPECTED)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 6))
def test_bits_and_triangles_come_back(bits: list[bool], size: int) -> None:
    where = torch.tensor(bits)
    assert torch.equal(unpack_bits(pack_bits(where), len(bits)), where)
    square = torch.randn(size, size, dtype=torch.float64)
    square = square + square.T
    assert torch.equal(from_upper(upper(square), size), square)


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


def test_noise_is_normal_and_has_a_key_that_cannot_be_searched_through() -> None:
    """torch's generator starts from 32 bits: 63 or 256 that are given to it make no difference."""
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


def test_secure_aggregation_needs_somebody_to_hide_from(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"privacy\.secure_aggregation: true given"):
        fl.run([*BASE, "privacy.secure_aggregation=true", f"run.dir={tmp_path / 'r'}"])
    assert not (tmp_path / "r").exists()


def test_new_keys_at_rest_leave_a_run_its_name() -> None:
    plain = identity(compose(BASE))
    assert identity(compose([*BASE, "deploy.deadline=5", "privacy.delta=1e-6"])) == plain
    assert identity(compose([*BASE, "privacy.clip=1"])) != plain != identity(compose([*BASE, "server.norm_bound=1"]))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["privacy.noise=1"], "set privacy.clip as well"),
        (["privacy.noise=1", "privacy.clip=1", "server.merge=median"], "server.merge=mean"),
        (["privacy.noise=1", "privacy.clip=1", "federated.algorithm=scaffold"], "fedavg or fedprox"),
        (["privacy.noise=1", "privacy.clip=1", "federated.client_vectors=true"], "would undo"),
        (["privacy.clip=1", "federated.algorithm=scaffold", "optim.momentum=0"], "scaffold's control variates"),
        (["privacy.noise=-1"], "privacy.noise"),
        (["privacy.secure_aggregation=true", "server.merge=ties"], "only a mean is learned"),
        (["privacy.secure_aggregation=true", "federated.algorithm=scaffold"], "only a mean is learned"),
        (["privacy.secure_aggregation=true", "server.norm_bound=1"], "server.norm_bound: looks at single updates"),
        (["privacy.secure_aggregation=true", "federated.client_metrics=true"], "federated.client_metrics: looks at single updates"),
        (["privacy.delta=1"], "privacy.delta"),
        (["deploy.min_fraction=0"], "min_fraction"),
        (["server.norm_bound=0"], "norm_bound"),
    ],
)
def test_settings_that_make_no_sense(options: list[str], why: str) -> None:
    with pytest.raises(UserError, match=why):
        compose([*BASE, *options])


# --- a site's worker -------------------------------------------------------------------------------------------------

Message = tuple[str, Parcel]


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> list[Message]:
    """What a server asks of site 0 in a run that has every operation."""
    wire = Wire()
    options = [*SPARSE, "server.merge=fisher", "server.fisher_samples=4", "federated.rounds=2", "federated.participation=1"]
    federate(tmp_path_factory.mktemp("talk"), wire, *options)
    found = [(operation, parcel) for operation, site, parcel, _ in wire.asked if site == 70]
    assert {operation for operation, _ in found} == set(OPERATIONS)
    return found


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Iterator[worker.Keeper]:
    """A worker as a SuperNode has it, in a process of its own."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with worker.kept() as found:
        yield found


def first(talk: list[Message], wanted: str) -> Parcel:
    return next(parcel for operation, parcel in talk if operation == wanted)


def as_bytes(reply: Parcel) -> tuple[str, bytes]:
    return reply.told, reply.tensors


@pytest.fixture
def site(tmp_path: Path) -> Place:
    """Site 0, with data that can be taken from it."""
    shutil.copytree(SMALL_DATA, tmp_path / "data")
    return Place(0, SITES, overrides=(f"data.root={tmp_path / 'data'}",))


def test_a_worker_answers_to_the_byte_what_the_process_itself_would_and_keeps_what_it_has_read(
    talk: list[Message], keeper: worker.Keeper, site: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine: dict[str, bytes] = {}
    here = []
    for operation, parcel in talk:
        here.append((as_bytes(answer(operation, parcel, site, mine)), dict(mine)))
    mean = mean_update(first(talk, "update"), site, mine)
    process, theirs = keeper.process.pid, dict[str, bytes]()
    for at, (operation, parcel) in enumerate(talk):
        assert (as_bytes(worker.ask(operation, parcel, site, theirs)), theirs) == here[at], operation
        if operation == "hello":
            shutil.rmtree(tmp_path / "data")  # whoever reads it again has nothing to read
    assert set(theirs) == {"setup"}
    assert as_bytes(worker.ask(worker.MEAN, first(talk, "update"), site, theirs)) == as_bytes(mean)
    assert keeper.process.pid == process and keeper.process.poll() is None and not caplog.records
    assert "data.root" in worker.ask("hello", first(talk, "hello"), site, theirs).facts["error"]  # a run that begins sees what is there


def test_the_mean_of_a_sites_clients_is_by_samples_and_cut_off(talk: list[Message], site: Place) -> None:
    asked, memory = first(talk, "update"), dict[str, bytes]()
    each = answer("update", asked, site, memory).tensors_as_they_are()
    weights = each["notes"][:, 1] / each["notes"][:, 1].sum()
    whole = (each["deltas"].double() * weights[:, None]).sum(0)
    bound = float(whole.abs().median())
    narrow = to_yaml(to_config(OmegaConf.merge(OmegaConf.create(str(asked.facts["config"])), {"privacy": {"range": bound}})))
    for config, wanted in ((asked.facts["config"], whole), (narrow, whole.clamp(-bound, bound))):
        reply = mean_update(Parcel({**asked.facts, "config": config}, asked.tensors), site, memory)
        assert torch.allclose(reply.tensors_as_they_are()["mean"].double(), wanted, rtol=1e-6, atol=1e-12)
        assert (reply.facts["samples"], reply.facts["clients"]) == (int(each["notes"][:, 1].sum()), len(weights))
    without = Parcel({**asked.facts, "sent": False}, Parcel.of({}, {"theta": fl_load(asked.tensors)["theta"]}).tensors)
    assert mean_update(without, site, {}) == Parcel({"error": "head and mask are lacking"})
    endless = fl_load(asked.tensors) | {"theta": torch.full_like(fl_load(asked.tensors)["theta"], float("inf"))}
    assert mean_update(Parcel.of(asked.facts, endless), site, memory) == Parcel({"error": "the update is not finite"})


def test_who_hangs_up_half_way_neither_stops_nor_holds_up_a_worker(
    talk: list[Message], keeper: worker.Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    asked, place = first(talk, "hello"), Place(0, SITES, overrides=HERE)
    expected, process = as_bytes(answer("hello", asked, place, {})), keeper.process.pid
    for spoil in (
        b"",
        b"\0\0",
        worker.LENGTH.pack(10**15) + b"{",
        worker.LENGTH.pack(4) + b"junk" + bytes(8),
        worker.LENGTH.pack(2) + b"[]" + bytes(8),
    ):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(os.environ[worker.SITE])
            connection.sendall(spoil)
    with socket.socket(socket.AF_UNIX) as connection:  # a whole message, and nobody there for its answer
        connection.connect(os.environ[worker.SITE])
        worker.send(connection, {"operation": "hello", "facts": asked.facts, "place": asdict(place)}, b"", {})
    assert as_bytes(worker.ask("hello", asked, place, {})) == expected
    assert keeper.process.pid == process and keeper.process.poll() is None and not caplog.records


def test_a_worker_that_is_killed_is_replaced_and_who_waits_for_it_gets_an_answer(
    talk: list[Message], keeper: worker.Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    asked, place, memory = first(talk, "update"), Place(0, SITES, overrides=HERE), dict[str, bytes]()
    expected, process = as_bytes(worker.ask("update", asked, place, memory)), keeper.process.pid
    again = Parcel({**asked.facts, "sent": False}, Parcel.of({}, {"theta": fl_load(asked.tensors)["theta"]}).tensors)
    os.kill(process, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(worker.ask, "update", again, place, memory)  # head and mask are remembered by who asks
        os.kill(process, signal.SIGKILL)
        assert as_bytes(waiting.result(120)) == expected
    assert keeper.process.pid != process
    assert [record.getMessage() for record in caplog.records] == [f"the site's worker {process} has ended (-9); another is started"]


def test_what_nobody_expected_is_told_and_the_worker_replaced(talk: list[Message], keeper: worker.Keeper) -> None:
    asked, place, memory = first(talk, "update"), Place(0, SITES, overrides=HERE), dict[str, bytes]()
    process = keeper.process.pid
    with pytest.raises(RuntimeError, match=r"^ValueError: could not convert string to float: 'fast'$"):
        worker.ask("update", Parcel({**asked.facts, "lr": "fast"}, asked.tensors), place, memory)
    assert set(memory) == {"setup"}
    assert as_bytes(worker.ask("update", asked, place, memory)) == as_bytes(answer("update", asked, place, {}))
    assert keeper.process.pid != process


def test_a_worker_that_ends_on_the_way_leaves_the_message_to_who_asked(
    talk: list[Message], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked, place = first(talk, "hello"), Place(0, SITES, overrides=HERE)

    def take_and_leave() -> None:
        connection, _ = listener.accept()
        with connection:
            worker.receive(connection)

    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool, tempfile.TemporaryDirectory() as folder:
        listener.bind(f"{folder}/site")
        listener.listen()
        monkeypatch.setenv(worker.SITE, f"{folder}/site")
        gone = pool.submit(take_and_leave)
        assert as_bytes(worker.ask("hello", asked, place, {})) == as_bytes(answer("hello", asked, place, {}))
        gone.result(60)
    assert as_bytes(worker.ask("hello", asked, place, {})) == as_bytes(answer("hello", asked, place, {}))  # nobody there at all
    assert [f"process {os.getpid()} answers hello" in record.getMessage() for record in caplog.records] == [True, True]


def test_a_worker_that_cannot_start_holds_nobody_up(talk: list[Message], monkeypatch: pytest.MonkeyPatch) -> None:
    asked, place = first(talk, "hello"), Place(0, SITES, overrides=HERE)
    monkeypatch.setattr(worker, "PAUSE", 0.05)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with worker.kept():
        assert as_bytes(worker.ask("hello", asked, place, {})) == as_bytes(answer("hello", asked, place, {}))


def test_what_is_remembered_goes_to_the_worker_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def do(operation: str, asked: Parcel, place: Place, memory: dict[str, bytes]) -> Parcel:
        seen.append((operation, asked, place, dict(memory)))
        memory |= {"new": b"1" * 3 * worker.PART, "changed": b""}
        del memory["old"]
        if operation == "fails":
            raise ZeroDivisionError
        return Parcel({"ä": [1.5, None]}, b"\0")

    monkeypatch.setattr(worker, "do", do)
    place = Place(1, 3, True, ("data.root=/my data",))
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool, tempfile.TemporaryDirectory() as folder:
        listener.bind(f"{folder}/site")
        listener.listen()
        monkeypatch.setenv(worker.SITE, f"{folder}/site")
        served = pool.submit(worker.serve, listener)
        for operation in ("works", "fails"):
            memory = {"old": b"1", "changed": b"2", "same": b"3"}
            with pytest.raises(RuntimeError, match="ZeroDivisionError") if operation == "fails" else nullcontext():
                assert worker.ask(operation, Parcel({"n": 1}, b"t"), place, memory) == Parcel({"ä": [1.5, None]}, b"\0")
            assert memory == {"changed": b"", "same": b"3", "new": b"1" * 3 * worker.PART}
            assert seen.pop() == (operation, Parcel({"n": 1}, b"t"), place, {"old": b"1", "changed": b"2", "same": b"3"})
        served.result(60)  # nothing more is asked of it


def test_a_worker_ends_with_its_parent_and_leaves_nothing_behind() -> None:
    script = "import os, time; from fedlens.deploy import worker\nwith worker.kept(): print(os.environ[worker.SITE], flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        where = Path(parent.stdout.readline().strip())
        assert stat.S_IMODE(where.parent.stat().st_mode) == 0o700 and where.is_socket()
        parent.kill()
        assert parent.stdout.read() == ""
    until = time.monotonic() + 60
    while where.parent.exists():
        assert time.monotonic() < until


def test_the_process_beside_flowers_supernode_does_without_torch() -> None:
    script = "import sys, fedlens.deploy.programs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


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
def test_only_sites_come_in_from_outside(client: Any, path: str, status: int) -> None:
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
        (["server", "x"], "no federation"),
        (["client", "x"], "no site's folder"),
    ],
)
def test_commands_refuse_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    from fedlens.cli import main

    monkeypatch.chdir(tmp_path)
    assert main(["federate", *words]) == 2
    error = capsys.readouterr().err
    assert why in error and error.count("\n") == 1 and not list(tmp_path.iterdir())


def test_a_sites_options(tmp_path: Path) -> None:
    from fedlens.deploy import launch

    (tmp_path / "site.json").write_text(json.dumps({"address": "h:1", "number": 1, "of": 3}))
    command = launch.client_options(tmp_path, own_data=True, address="g:2", overrides=["data.root=/my data"])
    assert command[command.index("--superlink") + 1] == "g:2"
    assert "--insecure" not in command and command[command.index("--auth-supernode-private-key") + 1] == str(tmp_path / "key")
    config = command[command.index("--node-config") + 1]
    assert config == 'partition-id=1 num-partitions=3 own-data=true overrides="%27data.root=/my data%27"'
    with pytest.raises(UserError, match="the rest is the server's to say"):
        launch.client_options(tmp_path, own_data=False, address=None, overrides=["optim.lr=1"])
