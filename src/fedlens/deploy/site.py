"""The replies of a site, without Flower: worker.py passes payloads in and out.

A site runs the simulation's code, `Site` in training/clients.py, for the clients whose data is here. The server decides how to train. Data, weights and
device are the site's own choice: those keys of the server's configuration are ignored.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from torch import Tensor

from fedlens import __version__
from fedlens.config import Config
from fedlens.data.dataset import Dataset, as_known_to, default_root, load_dataset
from fedlens.data.folder import load_folder
from fedlens.data.partition import Index
from fedlens.deploy.protocol import Expected, Failure, Payload, Rejected, SiteOptions, State, check_site_overrides
from fedlens.errors import UserError, first_line
from fedlens.lens.mask import unpack_bits
from fedlens.lens.mask_rules import Mask, eligible, of_kinds, softened
from fedlens.lens.space import ParamSpace
from fedlens.overrides import normalise, parse_yaml, to_config
from fedlens.runs.cache import content_digest
from fedlens.training.algorithms import make_algorithm
from fedlens.training.bench import Bench, set_up
from fedlens.training.clients import Site
from fedlens.training.federated import make_shards
from fedlens.training.head_and_mask import frozen, masked_space

# values of the keys that a server must not decide for a site
IGNORED: dict[str, Any] = {"device": "auto", "data.root": None, "data.download": False, "mask.path": None, "mask.like": None, "run": {}}
SETUP = "setup"  # key of a site's state: frozen head and mask
log = logging.getLogger("fedlens")


class SetupMissing(Exception):
    """The site lacks the head and mask of this run; the server must send them again."""


# --- data and model --------------------------------------------------------------------------------------------------


@dataclass
class CachedBench:
    """A bench for several messages, and the state of its model before the first."""

    bench: Bench
    shards: list[Index]
    start: dict[str, Tensor]
    trainable: dict[str, bool]
    backbone: str

    def reset(self) -> Bench:
        """Return the bench with its initial model."""
        self.bench.model.load_state_dict(self.start)
        for name, param in self.bench.model.named_parameters():
            param.requires_grad_(self.trainable[name])
        return self.bench


@lru_cache(maxsize=2)
def _read_bench(config_yaml: str, overrides: tuple[str, ...], dataset: str | None) -> CachedBench:
    """Read data and model. `dataset`: the server's class names and normalisation as JSON, for a site with data of its own."""
    config = local_config(config_yaml, overrides)
    bench = set_up(config, own_dataset(config, *json.loads(dataset)) if dataset else None)
    shards = [] if dataset else make_shards(bench)
    start = {name: tensor.clone() for name, tensor in bench.model.state_dict().items()}
    trainable = {name: param.requires_grad for name, param in bench.model.named_parameters()}
    return CachedBench(bench, shards, start, trainable, backbone_digest(bench))


def clear_cache() -> None:
    """Let the next message read data and model again."""
    _read_bench.cache_clear()


def local_config(text: str, overrides: Sequence[str]) -> Config:
    """Return the server's configuration with the site's own keys. The server's part cannot refer to files or variables of this machine."""
    check_site_overrides(overrides)
    try:
        plain = parse_yaml(text)
        if not isinstance(plain, dict):
            raise Rejected("the server's configuration is not a mapping")
        received = OmegaConf.create(plain)
        for key, value in IGNORED.items():
            OmegaConf.update(received, key, value, merge=False)
        if OmegaConf.select(received, "model.weights") not in (None, "pretrained"):
            OmegaConf.update(received, "model.weights", "given by the site")
        for key in ("data.name", "model.name"):
            _, _, name = str(OmegaConf.select(received, key)).partition(":")
            if name and (name.startswith(("/", ".", "~")) or Path(name.split(":")[0]).exists()):
                raise Rejected(f"{key}: the server's value is a path on this machine; only the site may name its files")
        for override in overrides:
            (parsed,) = OverridesParser.create().parse_overrides(normalise([override]))  # the same grammar as for the server's values
            OmegaConf.update(received, override.partition("=")[0], parsed.value())
        return to_config(received)
    except (UserError, Rejected):
        raise
    except Exception as error:  # the errors of yaml and OmegaConf share no public base class
        raise Rejected(f"the server's configuration cannot be read ({first_line(error)})") from None


def own_dataset(config: Config, classes: list[str], mean: list[float], std: list[float]) -> Dataset:
    """Return all training images of this site, with the server's class numbers and normalisation."""
    if config.data.name == "folder":
        raw = load_folder(Path(config.data.root or default_root()).expanduser(), alone=True)
        data = Dataset(raw.train, raw.test, raw.test, len(raw.class_names), raw.class_names, config.data.name, raw.mean, raw.std)
    else:
        data = load_dataset(config.data.name, config.data.root, val_fraction=0.0)
    return as_known_to(data, [str(name) for name in classes], [float(m) for m in mean], [float(s) for s in std])


def backbone_digest(bench: Bench) -> str:
    """Return the digest of the pretrained weights without the head. Server and sites must agree on it."""
    return content_digest({name: tensor.cpu() for name, tensor in bench.model.state_dict().items() if not name.startswith("head.")})


# --- replies ---------------------------------------------------------------------------------------------------------


def answer(operation: str, payload: Payload, options: SiteOptions, state: State) -> Payload:
    """Return the reply to one message. A failed request becomes a one-line `error`, for the server to handle."""
    try:
        if operation not in OPERATIONS:
            raise Rejected(f"unknown operation {operation!r}")
        dataset = json.dumps([payload[key] for key in ("classes", "mean", "std")]) if options.own_data else None
        cached = _read_bench(str(payload["config"]), options.overrides, dataset)
        if operation != "hello" and payload.metadata.get("backbone", cached.backbone) != cached.backbone:
            raise Rejected("the site's pretrained weights differ from the server's")
        bench = cached.reset()
        if options.own_data:
            shards: Mapping[int, Index] = {options.number: np.arange(len(bench.dataset.train), dtype=np.int64)}
        else:
            shards = {k: cached.shards[k] for k in range(options.number, len(cached.shards), options.sites)}
        return OPERATIONS[operation](payload, Site(bench, shards), state)
    except SetupMissing:
        return Payload({"lacks": SETUP})
    except (UserError, Rejected) as error:
        log.warning("%s: %s", operation, Failure.of(error))
        return Payload({"error": Failure.of(hide_paths(first_line(error), options))})


def mean_update(payload: Payload, options: SiteOptions, state: State) -> Payload:
    """Return this site's part of secure aggregation: the sample-weighted mean of its clients' updates, clamped to privacy.range."""
    reply = answer("update", payload, options, state)
    if not reply.tensors:
        return Payload({"error": str(reply.metadata.get("error", "the site lacks head and mask"))})
    tensors = reply.load()
    samples, losses = tensors["notes"][:, 1], tensors["notes"][:, 3]
    total = samples.sum()
    mean = (tensors["deltas"].double() * (samples / total).unsqueeze(1)).sum(0).float()
    if not bool(mean.isfinite().all()):
        return Payload({"error": "the update is not finite"})
    bound = local_config(str(payload["config"]), options.overrides).privacy.range
    metadata = {**reply.metadata, "samples": int(total), "loss": float((losses * samples).sum() / total), "clients": len(samples)}
    return Payload.pack(metadata, {"mean": mean.clamp(-bound, bound)})


def hide_paths(text: str, options: SiteOptions) -> str:
    """Return an error text without this site's paths and file names, which the server must not see."""
    own = [override.partition("=")[2] for override in options.overrides if override.startswith(("data.root=", "model.weights="))]
    own += [os.environ.get(name, "") for name in ("FEDLENS_DATA", "FEDLENS_WEIGHTS")]
    forms = {form for value in own if value for form in (value, str(Path(value)), str(Path(value).expanduser()))}
    patterns = [rf"(?<![\w.]){re.escape(form)}(?![\w.])" for form in forms] + [r"(?<![\w.])~?/\S"]
    starts = [match.start() for pattern in patterns if (match := re.search(pattern, text))]
    if not starts:
        return text
    # File names may contain spaces, quotes and colons: keep only what precedes the path and what follows the last colon.
    path = text[min(starts) :]
    reason = path.rpartition(": ")[2] if ": " in path else ""
    return text[: min(starts)] + "…" + (f": {hide_paths(reason, options)}" if reason else "")


def hello(payload: Payload, site: Site, state: State) -> Payload:
    return Payload(
        {
            "clients": site.holding,
            "samples": [len(site.shards[k]) for k in site.holding],
            "backbone": backbone_digest(site.bench),
            "classes": site.bench.dataset.class_names,
            "fedlens": __version__,
        }
    )


def ridge(payload: Payload, site: Site, state: State) -> Payload:
    """Return one sum over all requested clients: the server adds them anyway, and a sum is smaller and reveals less."""
    sums = list(site.ridge_sums(_requested_clients(payload, site)))
    A, b = (torch.stack(parts).sum(0) for parts in zip(*sums, strict=True))
    return Payload.pack({}, {"A": upper_triangle(A)[None], "b": b[None]})


def sensitivity(payload: Payload, site: Site, state: State) -> Payload:
    """Return each client's sums for the active coordinates, in the network with softened inactive weights."""
    bench, space = site.bench, whole_space(site.bench)
    tensors = payload.unpack({"active": _bitmap(space), **_head_shapes(bench)})
    _set_head(bench, tensors)
    active = space.views(unpack_bits(tensors["active"], space.size))
    names = [name for name, mask in active.items() if bool(mask.any())]
    among = space.flatten(eligible(bench.model, frozen(bench.model))) & ~of_kinds(space, bench.config.mask.without)
    with softened(bench.model, active, space.views(among), bench.config.mask.soft):
        rows = [
            torch.cat([sums[name].cpu()[active[name]] for name in names])
            for sums in site.sensitivities(names, active, _requested_clients(payload, site))
        ]
    return Payload.pack({}, {"sums": torch.stack(rows)})


def update(payload: Payload, site: Site, state: State) -> Payload:
    """Return the clients' local training, as the engine of a simulation does it."""
    clients, round_, cfg = _requested_clients(payload, site), int(payload["round"]), site.bench.config
    tensors = _receive_model(payload, site, state, len(clients) if payload.metadata.get("offsets") else 0)
    rule = make_algorithm(cfg).local_rule(float(payload["lr"]))
    offsets = dict(zip(clients, tensors["offsets"], strict=True)).__getitem__ if "offsets" in tensors else None
    rows, notes = [], []
    for u in site.updates(round_, clients, clients, tensors["theta"], rule, offsets):
        rows.append(u.delta.detach().cpu().clone())
        notes.append([float(u.client), float(u.samples), float(u.steps), float(u.loss)])
    answers = {"answers": content_digest(str(payload["run"]), round_, tensors["theta"])}
    return Payload.pack(answers, {"deltas": torch.stack(rows), "notes": torch.tensor(notes, dtype=torch.float64)})


def fisher(payload: Payload, site: Site, state: State) -> Payload:
    """Return each client's sensitivities at θ."""
    clients = _requested_clients(payload, site)
    tensors = _receive_model(payload, site, state)
    return Payload.pack({}, {"fishers": site.fishers(clients, tensors["theta"])})


OPERATIONS: dict[str, Callable[[Payload, Site, State], Payload]] = {f.__name__: f for f in (hello, ridge, sensitivity, update, fisher)}


# --- reading a request -----------------------------------------------------------------------------------------------


def _requested_clients(payload: Payload, site: Site) -> list[int]:
    clients = [int(k) for k in payload["clients"]]
    if not clients or sorted(set(clients)) != clients or not set(clients) <= set(site.holding):
        raise Rejected(f"the request names clients {clients}, this site has {site.holding}")
    return clients


def _receive_model(payload: Payload, site: Site, state: State, offsets: int = 0) -> dict[str, Tensor]:
    """Return θ and one offset per client (SCAFFOLD), with the bench's head and mask set. A payload with `sent` carries head and mask as well."""
    bench, size = site.bench, int(payload["size"])
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {"theta": (torch.float32, (size,))}
    if offsets:
        expected["offsets"] = (torch.float32, (offsets, size))
    if payload.metadata.get("sent"):
        expected |= setup_shapes(bench)
    tensors = payload.unpack(expected)
    space = _begin(payload, site, state, tensors)
    if space.size != size:
        raise Rejected(f"θ has {size:,} entries, this site trains {space.size:,}")
    return {name: tensor.to(bench.device) for name, tensor in tensors.items()}


def _begin(payload: Payload, site: Site, state: State, tensors: Mapping[str, Tensor]) -> ParamSpace:
    """Set head and mask: sent once, remembered in the site's state, and identified by their digest."""
    bench, whole = site.bench, whole_space(site.bench)
    shapes = setup_shapes(bench)
    if set(shapes) <= set(tensors):
        state[SETUP] = Payload.pack({}, {name: tensors[name] for name in shapes}).tensors
    stored = state.get(SETUP, b"")
    if hashlib.sha256(stored).hexdigest() != str(payload[SETUP]):
        raise SetupMissing
    setup = Payload({}, stored).unpack(shapes)
    _set_head(bench, setup)
    mask = None
    if "mask" in setup:
        mask = Mask(whole.views(unpack_bits(setup["mask"], whole.size)), eligible(bench.model, frozen(bench.model)))
    space = masked_space(bench, mask)
    site.begin(space, mask)
    return space


def _set_head(bench: Bench, tensors: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, param in bench.model.head.named_parameters():  # type: ignore[union-attr]
            param.copy_(tensors[f"head.{name}"])


def _head_shapes(bench: Bench) -> Expected:
    return {f"head.{name}": (torch.float32, tuple(param.shape)) for name, param in bench.model.head.named_parameters()}  # type: ignore[union-attr]


def _bitmap(space: ParamSpace) -> tuple[torch.dtype, tuple[int, ...]]:
    return torch.uint8, (-(-space.size // 8),)


# --- shared with the server ------------------------------------------------------------------------------------------


def setup_shapes(bench: Bench) -> Expected:
    """Return the tensors of the setup: the frozen head, and the mask if the run has one."""
    mask = {} if bench.config.mask.strategy is None else {"mask": _bitmap(whole_space(bench))}
    return {**_head_shapes(bench), **mask}


def whole_space(bench: Bench) -> ParamSpace:
    """Return the space of all parameters, which bitmaps index."""
    return ParamSpace({name: param.shape for name, param in bench.model.named_parameters()})


def upper_triangle(symmetric: Tensor) -> Tensor:
    """Return the upper triangle [d·(d+1)/2] of a symmetric matrix [d, d]."""
    row, column = torch.triu_indices(len(symmetric), len(symmetric))
    return symmetric.cpu()[row, column]


def from_upper_triangle(values: Tensor, size: int) -> Tensor:
    """Return the symmetric matrix [size, size] with this upper triangle."""
    row, column = torch.triu_indices(size, size)
    matrix = torch.zeros(size, size, dtype=values.dtype)
    matrix[row, column] = values
    matrix[column, row] = values
    return matrix
