"""What a study measures on its finished runs, once each: the models stay where they are, the report needs only the numbers.

    analyses:
      - {kind: sweep, of: Nc=1}                                θ₀ + α·τ: α chosen on validation (arith.py)
      - {kind: interpolate, of: [centralised, IID]}            the line between two models
      - {kind: interference, of: [half A, half B]}             cosine, sign conflict, linearity, the map ξ(α₁, α₂)
      - {kind: interference, of: Nc=1, clients: [0, 1]}        the same of two clients of a run with federated.client_vectors
      - {kind: masks, of: [central, federated]}                how far two masks overlap, beside two random ones
      - {kind: masks, of: central}                             the same of each seed and the next (none of one seed): how far chance moves a mask
      - {kind: forget, of: Nc=1, clients: [0, 1, 2]}           subtract what each of them added
      - {kind: forget, of: [Nc=1, without 5], clients: [5]}    and beside it the run that was trained without that client

`of` names cells by their labels; `seeds: N` takes the first N seeds (1 unless said). What else is given goes to the function that measures.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlens.engine.sampling import survives, training_cohort
from fedlens.errors import UserError, bad_value, unknown
from fedlens.lens.editing import alphas
from fedlens.study.arith import interpolate_runs, sweep_run
from fedlens.study.forget import forget_client
from fedlens.study.interference import interference_of_clients, interference_of_runs, mask_overlap
from fedlens.study.plan import Plan, Planned
from fedlens.training.run import Run


def _sweep(runs: Sequence[Run], **options: Any) -> dict[str, Any]:
    return sweep_run(runs[0], **options)


def _interpolate(runs: Sequence[Run], **options: Any) -> dict[str, Any]:
    return interpolate_runs(runs[0], runs[1], **options)


def _interference(runs: Sequence[Run], clients: Sequence[int] | None = None, **options: Any) -> dict[str, Any]:
    return interference_of_runs(runs, **options) if clients is None else interference_of_clients(runs[0], clients, **options)


def _masks(runs: Sequence[Run], **options: Any) -> dict[str, Any]:
    return mask_overlap(runs[0], runs[1])


def _forget(runs: Sequence[Run], clients: Sequence[int], **options: Any) -> dict[str, Any]:
    return {"clients": [forget_client(runs[0], client, without=runs[1:], **options) for client in clients]}


@dataclass(frozen=True)
class Kind:
    measure: Callable[..., dict[str, Any]]
    options: tuple[str, ...]
    cells: tuple[int, int]  # how many it may be about: from, to
    title: str


KINDS = {
    "sweep": Kind(_sweep, ("grid",), (1, 1), "α sweep of {}"),
    "interpolate": Kind(_interpolate, ("grid",), (2, 2), "From {} to {}"),
    "interference": Kind(_interference, ("grid", "samples", "clients"), (1, 8), "Interference of {}"),
    "masks": Kind(_masks, (), (1, 2), "Overlap of the masks of {}"),
    "forget": Kind(_forget, ("clients", "keep", "grid"), (1, 9), "Forgetting clients of {}"),
}


@dataclass(frozen=True)
class Wanted:
    """One analysis of one seed."""

    kind: str
    labels: tuple[str, ...]
    seed: int
    runs: tuple[Planned, ...]
    options: Mapping[str, Any]

    @property
    def title(self) -> str:
        first, *rest = self.labels
        said = KINDS[self.kind].title.format(*self.labels) if self.kind == "interpolate" else KINDS[self.kind].title.format(first)
        if self.kind == "masks" and not rest:
            return f"{said}, between seeds"
        return said + (f" and {', '.join(rest)}" if rest and self.kind in ("interference", "masks") else "")

    @property
    def file(self) -> str:
        """Known by what it is of: another configuration or another option is another file."""
        key = json.dumps([self.kind, [run.name for run in self.runs], self.options], sort_keys=True)
        return f"analyses/{self.kind}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"

    def measure(self, runs: Path) -> dict[str, Any]:
        """Run folders are said by their names, so that the study may move."""
        device, root = self.runs[0].config.device, self.runs[0].config.data.root
        found = KINDS[self.kind].measure(
            [Run(runs / planned.name) for planned in self.runs], **self.options, device=None if device == "auto" else device, root=root
        )
        plain: dict[str, Any] = json.loads(json.dumps(found).replace(json.dumps(f"{runs}/")[1:-1], ""))
        return plain


def wanted(plan: Plan) -> list[Wanted]:
    """Every analysis of the plan, checked before anything runs."""
    found = []
    for asked in plan.analyses:
        given = asked.given
        kind = str(given.get("kind"))
        if kind not in KINDS:
            raise unknown("analyses: kind", kind, KINDS)
        allowed = KINDS[kind]
        options = {key: value for key, value in given.items() if key not in ("kind", "of", "seeds")}
        for option in options:
            if option not in allowed.options:
                raise unknown(f"analyses: {kind}", option, ["of", "seeds", *allowed.options])
        _check_numbers(kind, options)
        clients = options.get("clients")
        if (clients is None and kind == "forget") or (clients is not None and (not isinstance(clients, list) or not clients)):
            raise UserError(f"analyses: {kind} has no clients, allowed is a list of clients")
        seeds = given.get("seeds", 1)
        if not isinstance(seeds, int) or seeds < 1:
            raise bad_value("analyses: seeds", seeds, "a number of seeds >= 1")
        labels = tuple(str(name) for name in (given["of"] if isinstance(given.get("of"), list) else [given.get("of")]))
        fewest, most = allowed.cells
        fewest = 2 if kind == "interference" and "clients" not in options else fewest
        most = 1 if kind == "interference" and "clients" in options else most
        if not fewest <= len(labels) <= most:
            raise bad_value(f"analyses: {kind} of", ", ".join(labels), f"{fewest} cells" if fewest == most else f"{fewest} to {most} cells")
        cells = [_cell(plan, label, asked.tables) for label in labels]
        shared = [seed for seed in cells[0] if all(seed in cell for cell in cells)]
        unread = [label for label, cell in zip(labels, cells, strict=True) if not all(p.config.train.test for p in cell.values())]
        if unread and kind != "masks":
            raise UserError(f"analyses: {kind} of {unread[0]} would read the test set, which its train.test=false forbids")
        if kind == "masks" and len(cells) == 1:  # every pair of neighbours once
            alone, taken = cells[0], shared[:seeds] if len(shared) > 2 else shared[: len(shared) - 1]
            found += [Wanted(kind, labels, s, (alone[s], alone[shared[(shared.index(s) + 1) % len(shared)]]), options) for s in taken]
            continue
        for seed in shared[:seeds]:
            if clients is not None:
                _took_part(f"analyses: {kind} of {labels[0]}", cells[0][seed], clients)
            found.append(Wanted(kind, labels, seed, tuple(cell[seed] for cell in cells), options))
    return found


def _check_numbers(kind: str, options: Mapping[str, Any]) -> None:
    """What the functions that measure would refuse, after all runs."""
    where = f"analyses: {kind}"
    if "grid" in options:
        try:
            lowest = min(alphas(options["grid"]))
        except (UserError, TypeError):
            raise bad_value(f"{where}: grid", options["grid"], "start:stop:count, or a list of numbers") from None
        if kind == "forget" and lowest < 0:
            raise bad_value(f"{where}: grid", options["grid"], "numbers >= 0: forgetting subtracts")
    samples, keep = options.get("samples", 1), options.get("keep", 1)
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise bad_value(f"{where}: samples", samples, "a whole number >= 1")
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 <= keep <= 1:
        raise bad_value(f"{where}: keep", keep, "0 to 1")


def _took_part(where: str, planned: Planned, clients: Sequence[int]) -> None:
    """What a client added is known where the run keeps it and drew that client (before the round that validation prefers, which only the run can tell)."""
    fed = planned.config.federated
    if not fed.client_vectors:
        raise UserError(f"{where} needs what each client added: federated.client_vectors=true")
    drawn = {c for r in range(fed.rounds) for c in training_cohort(planned.config, r) if survives(planned.seed, r, c, fed.dropout_rate)}
    if absent := [client for client in clients if client not in drawn]:
        raise UserError(f"{where}: client {absent[0]} takes part in no round of seed {planned.seed}; allowed are {_few(sorted(drawn))}")


def _few(clients: Sequence[int]) -> str:
    return ", ".join(map(str, clients[:20])) + (", …" if len(clients) > 20 else "")


def _cell(plan: Plan, label: str, tables: Collection[str]) -> dict[int, Planned]:
    """seed -> run of the first cell of these tables that is called so."""
    runs = [planned for planned in plan.runs if planned.cell.table in tables]
    for name in ("label", "case"):
        chosen = next((p.cell for p in runs if getattr(p.cell, name) == label), None)
        if chosen is not None:
            return {p.seed: p for p in runs if p.cell == chosen}
    raise unknown("analyses: of", label, list(dict.fromkeys(p.cell.label for p in runs)))
