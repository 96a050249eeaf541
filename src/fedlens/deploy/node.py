"""A site's side of the conversation: what a SuperNode answers. Knows nothing of Flower; worker.py hands it parcels.

A site computes with the same code as the simulation: `Site` in training/clients.py, for the clients whose data is here. It takes from the
server how to train, and from its own machine where data, weights and device are: those keys in a server's configuration are not looked at.
"""

import hashlib
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from fedlens import __version__
from fedlens.config import Config
from fedlens.data.dataset import Dataset, as_known_to, default_root, load_dataset
from fedlens.data.folder import load_folder
from fedlens.data.partition import Index
from fedlens.deploy.wire import Expected, Parcel, Place, Refused, upper
from fedlens.errors import UserError, first_line
from fedlens.lens.mask import unpack_bits
from fedlens.lens.mask_rules import Mask, eligible, of_kinds, softened
from fedlens.lens.space import ParamSpace
from fedlens.overrides import normalise, to_config
from fedlens.runs.cache import content_digest
from fedlens.training.algorithms import ALGORITHMS
from fedlens.training.bench import Bench, set_up
from fedlens.training.clients import Site
from fedlens.training.federated import make_shards
from fedlens.training.head_and_mask import frozen, masked_space

OWN = ("device", "data.name", "data.root", "model.weights", "train.compile", "train.precision")  # a site's to say
SETUP = "setup"  # what a site keeps between messages: the frozen head and the mask
Memory = MutableMapping[str, bytes]
log = logging.getLogger("fedlens")


@dataclass
class Held:
    """A workbench that several messages may use, and how it looked before the first."""

    bench: Bench
    shards: list[Index]
    start: dict[str, Tensor]
    trains: dict[str, bool]
    backbone: str

    def fresh(self) -> Bench:
        self.bench.model.load_state_dict(self.start)
        for name, param in self.bench.model.named_parameters():
            param.requires_grad_(self.trains[name])
        return self.bench


_held: OrderedDict[tuple[str, bool], Held] = OrderedDict()


def local_config(text: str, overrides: Sequence[str]) -> Config:
    """The server's configuration, where the site's own keys are the site's. It can name neither files nor anything else of this machine."""
    if "${" in text:
        raise Refused("the configuration that was sent refers to something outside it")
    try:
        sent = OmegaConf.create(text)
        if not isinstance(sent, DictConfig):
            raise Refused("the configuration that was sent is not a mapping")
        for key, neutral in (
            ("device", "auto"),
            ("data.root", None),
            ("data.download", False),
            ("mask.path", None),
            ("mask.like", None),
            ("run", {}),
        ):
            OmegaConf.update(sent, key, neutral, merge=False)
        weights = OmegaConf.select(sent, "model.weights")
        if weights not in (None, "pretrained"):
            OmegaConf.update(sent, "model.weights", "given by the site")
        for key in ("data.name", "model.name"):
            _, _, named = str(OmegaConf.select(sent, key)).partition(":")
            if named and (named.startswith(("/", ".", "~")) or Path(named.split(":")[0]).exists()):
                raise Refused(f"{key}: what was sent is a path here; a site names its own files")
        for override in overrides:
            key = override.partition("=")[0]
            if key not in OWN:
                raise UserError(f"federate client: {key!r} given, allowed is one of {', '.join(OWN)}; the rest is the server's to say")
            (parsed,) = OverridesParser.create().parse_overrides(normalise([override]))  # as the server's values are read
            OmegaConf.update(sent, key, parsed.value())
    except (UserError, Refused):
        raise
    except Exception as error:  # yaml's and OmegaConf's errors share no public base
        raise Refused(f"the configuration that was sent cannot be read ({first_line(error)})") from None
    return to_config(sent)


def own_dataset(config: Config, facts: Mapping[str, Any]) -> Dataset:
    """All images of data.root/train, or of another source's training set, numbered and normalised as the server's are."""
    name = config.data.name
    if name == "folder":
        raw = load_folder(Path(config.data.root or default_root()).expanduser(), alone=True)
        found = Dataset(raw.train, raw.test, raw.test, len(raw.class_names), raw.class_names, name, raw.mean, raw.std)
    else:
        found = load_dataset(name, config.data.root, val_fraction=0.0)
    names, mean, std = ([*facts[key]] for key in ("classes", "mean", "std"))
    return as_known_to(found, [str(name) for name in names], [float(m) for m in mean], [float(s) for s in std])


def held(facts: Mapping[str, Any], place: Place) -> Held:
    """Data and model for this configuration; the last two are kept, for a process that serves many messages."""
    config = local_config(str(facts["config"]), place.overrides)
    seen = (config, facts.get("classes"), facts.get("mean"), facts.get("std")) if place.own else config
    key = (hashlib.sha256(f"{seen}".encode()).hexdigest(), place.own)
    if key not in _held:
        bench = set_up(config, own_dataset(config, facts) if place.own else None)
        shards: list[Index] = [] if place.own else make_shards(bench)
        start = {name: tensor.clone() for name, tensor in bench.model.state_dict().items()}
        trains = {name: param.requires_grad for name, param in bench.model.named_parameters()}
        _held[key] = Held(bench, shards, start, trains, backbone_digest(bench))
        while len(_held) > 2:
            _held.popitem(last=False)
    _held.move_to_end(key)
    return _held[key]


def answer(operation: str, asked: Parcel, place: Place, memory: Memory) -> Parcel:
    """The reply to one message. What cannot be done is told as a fact, in one line: the server decides what follows."""
    try:
        if operation not in OPERATIONS:
            raise Refused(f"{operation!r} is not something that a site does")
        known = held(asked.facts, place)
        if operation != "hello" and asked.facts.get("backbone", known.backbone) != known.backbone:
            raise Refused("its pretrained weights are others than the server's")
        bench = known.fresh()
        if place.own:
            shards: Mapping[int, Index] = {place.number: np.arange(len(bench.dataset.train), dtype=np.int64)}
        else:
            shards = {k: known.shards[k] for k in range(place.number, len(known.shards), place.of)}
        return OPERATIONS[operation](asked, Site(bench, shards), memory)
    except (UserError, Refused) as error:
        log.warning("%s: %s", operation, first_line(error))
        return Parcel({"error": _without_paths(first_line(error), place)})
    except KeyError as error:
        return Parcel({"error": f"the message lacks {error}"})


def mean_update(asked: Parcel, place: Place, memory: Memory) -> Parcel:
    """For secure aggregation: the training of this site's clients as one mean by samples, its entries cut off at privacy.range."""
    reply = answer("update", asked, place, memory)
    if not reply.tensors:
        return Parcel({"error": str(reply.facts.get("error", "head and mask are lacking"))})
    found = reply.tensors_as_they_are()
    samples, losses = found["notes"][:, 1], found["notes"][:, 3]
    total = samples.sum()
    mean = (found["deltas"].double() * (samples / total).unsqueeze(1)).sum(0).float()
    bound = local_config(str(asked.facts["config"]), place.overrides).privacy.range
    if not bool(mean.isfinite().all()):
        return Parcel({"error": "the update is not finite"})
    mean = mean.clamp(-bound, bound)
    told = {"samples": int(total), "loss": float((losses * samples).sum() / total), "clients": len(samples)}
    return Parcel.of(told, {"mean": mean})


def _without_paths(text: str, place: Place) -> str:
    """What is called how at a site is not the server's affair."""
    own = [override.partition("=")[2] for override in place.overrides if override.startswith(("data.root=", "model.weights="))]
    forms = {form for value in own if value for form in (value, str(Path(value)), str(Path(value).expanduser()))}
    patterns = [rf"(?<![\w.]){re.escape(form)}(?![\w.])" for form in forms] + [r"(?<![\w.])~?/\S"]
    starts = [found.start() for pattern in patterns if (found := re.search(pattern, text))]
    if not starts:
        return text
    # a name may have spaces, quotes and colons: what is told is before the path and after the last colon
    reason = text[min(starts) :].rpartition(": ")[2] if ": " in text[min(starts) :] else ""
    return text[: min(starts)] + "…" + (f": {_without_paths(reason, place)}" if reason else "")


def forget() -> None:
    """Data and model are read again by the next message."""
    _held.clear()


def backbone_digest(bench: Bench) -> str:
    """Server and sites must start from the same pretrained point; the head comes from the server."""
    return content_digest({name: tensor.cpu() for name, tensor in bench.model.state_dict().items() if not name.startswith("head.")})


def hello(asked: Parcel, site: Site, memory: Memory) -> Parcel:
    return Parcel(
        {
            "clients": site.holding,
            "samples": [len(site.shards[k]) for k in site.holding],
            "backbone": backbone_digest(site.bench),
            "classes": site.bench.dataset.class_names,
            "fedlens": __version__,
        }
    )


def _wanted(asked: Parcel, site: Site) -> list[int]:
    clients = [int(k) for k in asked.facts["clients"]]
    if not clients or sorted(set(clients)) != clients or not set(clients) <= set(site.holding):
        raise Refused(f"clients {clients} were asked for, here are {site.holding}")
    return clients


def ridge(asked: Parcel, site: Site, memory: Memory) -> Parcel:
    """The sums of all these clients together: they are added anyway, and so there is less to send and less to learn from it."""
    sums = list(site.ridge_sums(_wanted(asked, site)))
    A, b = (torch.stack(parts).sum(0) for parts in zip(*sums, strict=True))
    return Parcel.of({}, {"A": upper(A)[None], "b": b[None]})


def _take_head(tensors: dict[str, Tensor], bench: Bench) -> None:
    head = bench.model.head
    with torch.no_grad():
        for name, param in head.named_parameters():  # type: ignore[union-attr]
            param.copy_(tensors[f"head.{name}"])


def head_shapes(bench: Bench) -> Expected:
    return {f"head.{name}": (torch.float32, tuple(param.shape)) for name, param in bench.model.head.named_parameters()}  # type: ignore[union-attr]


def whole_space(bench: Bench) -> ParamSpace:
    """Every parameter of the model: what bitmaps number."""
    return ParamSpace({name: param.shape for name, param in bench.model.named_parameters()})


def _bitmap(space: ParamSpace) -> tuple[torch.dtype, tuple[int, ...]]:
    return torch.uint8, (-(-space.size // 8),)


def setup_shapes(bench: Bench) -> Expected:
    """The frozen head, and the mask where there is one."""
    mask = {} if bench.config.mask.strategy is None else {"mask": _bitmap(whole_space(bench))}
    return {**head_shapes(bench), **mask}


def sensitivity(asked: Parcel, site: Site, memory: Memory) -> Parcel:
    """The sums of each client for the coordinates still in question, in the network whose rejected weights are softened."""
    bench, space = site.bench, whole_space(site.bench)
    tensors = asked.unpack({"active": _bitmap(space), **head_shapes(bench)})
    _take_head(tensors, bench)
    active = space.views(unpack_bits(tensors["active"], space.size))
    names = [name for name, mask in active.items() if bool(mask.any())]
    among = space.flatten(eligible(bench.model, frozen(bench.model))) & ~of_kinds(space, bench.config.mask.without)
    with softened(bench.model, active, space.views(among), bench.config.mask.soft):
        rows = [
            torch.cat([found[name].cpu()[active[name]] for name in names])
            for found in site.sensitivities(names, active, _wanted(asked, site))
        ]
    return Parcel.of({}, {"sums": torch.stack(rows)})


def _set_up(asked: Parcel, site: Site, memory: Memory, tensors: dict[str, Tensor]) -> ParamSpace | None:
    """Head and mask: sent once and kept, known by their digest. None: they are not here, the server has to send them again."""
    bench, space = site.bench, whole_space(site.bench)
    names = setup_shapes(bench)
    wanted = str(asked.facts[SETUP])
    if set(names) <= set(tensors):
        kept = Parcel.of({}, {name: tensors[name] for name in names}).tensors
        memory[SETUP] = kept
    else:
        kept = memory.get(SETUP, b"")
    if hashlib.sha256(kept).hexdigest() != wanted:
        return None
    found = Parcel({}, kept).unpack(names)
    _take_head(found, bench)
    mask = None
    if "mask" in found:
        mask = Mask(space.views(unpack_bits(found["mask"], space.size)), eligible(bench.model, frozen(bench.model)))
    inside = masked_space(bench, mask)
    site.begin(inside, mask)
    return inside


def _theta(asked: Parcel, site: Site, memory: Memory, rows: int = 0) -> tuple[ParamSpace | None, dict[str, Tensor]]:
    """θ and, for SCAFFOLD, each client's offset; with the setup where the server thinks that it is lacking here."""
    bench, size = site.bench, int(asked.facts["size"])
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {"theta": (torch.float32, (size,))}
    if rows:
        expected["offsets"] = (torch.float32, (rows, size))
    if asked.facts.get("sent"):
        expected |= setup_shapes(bench)
    tensors = asked.unpack(expected)
    inside = _set_up(asked, site, memory, tensors)
    if inside is not None and inside.size != size:
        raise Refused(f"θ has {size:,} numbers, here {inside.size:,} train")
    return inside, {name: tensor.to(bench.device) for name, tensor in tensors.items()}


LACKING = Parcel({"lacks": SETUP})


def update(asked: Parcel, site: Site, memory: Memory) -> Parcel:
    """The local training of these clients: what the engine of a simulation does for them."""
    clients, cfg = _wanted(asked, site), site.bench.config
    space, tensors = _theta(asked, site, memory, len(clients) if asked.facts.get("offsets") else 0)
    if space is None:
        return LACKING
    rule = ALGORITHMS[cfg.federated.algorithm](cfg).rule(float(asked.facts["lr"]))
    offsets = tensors.get("offsets")
    own = None if offsets is None else dict(zip(clients, offsets, strict=True)).__getitem__
    rows, notes = [], []
    for u in site.updates(int(asked.facts["round"]), clients, clients, tensors["theta"], rule, own):
        rows.append(u.delta.detach().cpu().clone())
        notes.append([float(u.client), float(u.samples), float(u.steps), float(u.loss)])
    return Parcel.of({}, {"deltas": torch.stack(rows), "notes": torch.tensor(notes, dtype=torch.float64)})


def fisher(asked: Parcel, site: Site, memory: Memory) -> Parcel:
    clients = _wanted(asked, site)
    space, tensors = _theta(asked, site, memory)
    if space is None:
        return LACKING
    return Parcel.of({}, {"fishers": site.fishers(clients, tensors["theta"])})


OPERATIONS: dict[str, Callable[[Parcel, Site, Memory], Parcel]] = {
    operation.__name__: operation for operation in (hello, ridge, sensitivity, update, fisher)
}

__all__ = ["OPERATIONS", "Place", "answer", "backbone_digest", "forget", "local_config", "mean_update", "setup_shapes", "whole_space"]
