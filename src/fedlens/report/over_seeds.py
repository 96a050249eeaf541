"""Analyses over seeds: what each came to as a few numbers, and the mean and interval of those over seeds."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedlens.study.results import Analysis, StudyResult
from fedlens.study.statistics import Summary, summarise

PLAIN = ("alpha", "cosine", "sign_conflict", "iou", "chance")  # the others are fractions of images, said in percent
BESIDE = {"retrained": "trained without it", "reheaded": "head without it"}  # what may stand beside a client that was subtracted
HEADS = {  # kind -> number -> what it is called
    "sweep": {"start": "test at α = 0", "end": "test at α = 1", "alpha": "α by validation", "chosen": "test there"},
    "interpolate": {"start": "test of the first", "end": "test of the second", "alpha": "α by validation", "chosen": "test there"},
    "interference": {"cosine": "cosine", "sign_conflict": "sign conflict", "xi": "ξ(1, 1)"},
    "masks": {"iou": "intersection over union", "chance": "of random masks"},
    "forget": {
        "target_before": "its classes before",
        "target_after": "after",
        "others_before": "all others before",
        "others_after": "after",
        "target_without": f"{BESIDE['retrained']}: its classes",
        "others_without": "all others",
        "target_head": f"{BESIDE['reheaded']}: its classes",
        "others_head": "all others",
        "alpha": "α by validation",
    },
}
TITLES = {
    "sweep": "Along task vectors",
    "interpolate": "Between two models",
    "interference": "Interference of task vectors",
    "masks": "Overlap of masks",
    "forget": "Forgetting clients by negation",
}
UNITS = dict.fromkeys(TITLES, "Accuracies in percent.") | {
    "forget": "Accuracies in percent; of several clients their mean.",
    "interference": "ξ in percent of images.",
    "masks": "Random masks of the same sizes beside them.",
}


@dataclass(frozen=True)
class Measured:
    """The analyses of one kind and of the same cells, a number each seed."""

    kind: str
    label: str
    numbers: Mapping[str, Summary]  # those that all seeds have

    @property
    def n(self) -> int:
        return next(iter(self.numbers.values())).n

    def scale(self, number: str) -> float:
        return 1 if number in PLAIN else 100


def numbers_of(analysis: Analysis) -> dict[str, float]:
    """The few numbers of one analysis; of several clients their mean."""
    found = analysis.found
    if analysis.kind in ("sweep", "interpolate"):
        tested = {name: float(found[name]["test_accuracy"]) for name in ("start", "end", "chosen")}
        return {**tested, "alpha": float(found["chosen"]["alpha"])}
    if analysis.kind == "interference":
        numbers = {key: _mean([float(pair[key]) for pair in found["pairs"]]) for key in ("cosine", "sign_conflict")}
        if found.get("xi") and 1.0 in found["alphas"]:
            one = found["alphas"].index(1.0)
            numbers["xi"] = float(found["xi"][one][one])
        return numbers
    if analysis.kind == "masks":
        return {key: float(found[key]) for key in ("iou", "chance")}
    numbers = {}
    for when, name in (("before", "before"), ("after", "after"), ("retrained", "without"), ("reheaded", "head")):
        clients = [client[when] for client in found["clients"] if client.get(when)]
        for what, key in (("target", "test_target"), ("others", "test_control")):
            if len(clients) == len(found["clients"]):
                numbers[f"{what}_{name}"] = _mean([float(client[key]) for client in clients])
    return {**numbers, "alpha": _mean([float(client["after"]["alpha"]) for client in found["clients"]])}


def of_seeds(study: StudyResult, kind: str) -> list[list[Analysis]]:
    """Analyses of the same cells with the same options, one a seed."""
    found: dict[tuple[str, str], list[Analysis]] = {}
    for analysis in study.analyses:
        if analysis.kind == kind:
            found.setdefault((label_of(analysis), json.dumps(analysis.options, sort_keys=True)), []).append(analysis)
    return list(found.values())


def over_seeds(study: StudyResult) -> dict[str, list[Measured]]:
    """kind -> what was measured of which cells."""
    found: dict[str, list[Measured]] = {}
    for kind in dict.fromkeys(analysis.kind for analysis in study.analyses):
        for group in of_seeds(study, kind):
            seeds = [numbers_of(analysis) for analysis in group]
            shared = [key for key in HEADS[kind] if all(key in numbers for numbers in seeds)]
            numbers = {key: summarise([numbers[key] for numbers in seeds]) for key in shared}
            found.setdefault(kind, []).append(Measured(kind, label_of(group[0]), numbers))
    return found


def label_of(analysis: Analysis) -> str:
    """The cells; of clients which, of one cell's masks that it is its seeds."""
    if analysis.kind == "masks" and len(analysis.labels) == 1:
        return f"{analysis.labels[0]}, between seeds"
    if analysis.kind == "interference" and len(analysis.labels) == 1:
        return f"{analysis.labels[0]}: {' and '.join(map(str, analysis.found['names']))}"
    if analysis.kind == "forget":
        return f"{analysis.labels[0]}: {_clients(analysis)}"
    return " and ".join(analysis.labels)


def titled(analysis: Analysis) -> str:
    """Its title, with the clients that are forgotten: a study may forget others of the same cell."""
    return f"{analysis.title}: {_clients(analysis)}" if analysis.kind == "forget" else analysis.title


def _clients(analysis: Analysis) -> str:
    clients = [str(client["client"]) for client in analysis.found["clients"]]
    return f"client{'s' if len(clients) > 1 else ''} {', '.join(clients)}"


def shared_heads(rows: Sequence[Measured]) -> dict[str, str]:
    """The numbers that some row has, by their name, in their order."""
    return {key: head for key, head in HEADS[rows[0].kind].items() if any(key in row.numbers for row in rows)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
