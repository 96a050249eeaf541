"""The sections of the page of `fedlens demo` as blocks: figures, tables and the text between them.

Sentences that could differ on another machine or with another seed are computed from the numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import sqrt
from os.path import relpath
from shlex import quote
from typing import Any, TypeAlias

from fedlens.data.partition import label_counts, partition, partition_stats
from fedlens.demo.results import DemoResults, Points, by_round, compared, last, listed, mean, standard_error, title
from fedlens.report.blocks import Block, Chart, Code, Entry, Heading, Table, Text, number, size, slug
from fedlens.report.charts import mask_chart, partition_chart, xi_chart
from fedlens.report.vega import Series, line_chart
from fedlens.training.run import Run

Values: TypeAlias = Mapping[str, float]
AXES = {
    "val_accuracy": "validation accuracy (%)",
    "val_loss": "validation loss",
    "cosine": "mean cosine between clients' Δ",
    "drift_ratio": "‖mean Δ‖ / mean ‖Δ‖",
    "sign_conflict": "sign conflict",
}
SCORES = {"validation (%)": "val_accuracy", "test (%)": "test_accuracy", "test loss": "test_loss"}


def _section(heading: str, *paragraphs: str) -> list[Block]:
    return [Heading(heading, slug(heading)), *map(Text, paragraphs)]


def _curves(heading: str, caption: str, series: Mapping[str, Points], x: str, y: str, levels: Values, rings: Values | None = None) -> Chart:
    """Return a chart of lines. `levels`: name -> horizontal line; `rings`: series -> x of the point with a ring."""
    lines = [Series(name, points, ring=(rings or {}).get(name)) for name, points in series.items()]
    return line_chart(slug(heading), heading, caption, lines, x, y, levels=levels)


def _rounds(heading: str, caption: str, runs: Mapping[str, Run], key: str, levels: Values) -> Chart:
    return _curves(heading, caption, by_round(runs, key, 100 if key == "val_accuracy" else 1), "round", AXES[key], levels)


def _table(caption: str, header: Sequence[str], rows: Sequence[Sequence[Entry | str | float]]) -> Table:
    """Return a table; numbers are shown with two decimals."""
    cells = [[Entry(f"{cell:.2f}", "", cell) if isinstance(cell, float) else cell for cell in row] for row in rows]
    return Table(slug(caption), caption, header, cells)


def _measured(caption: str, keys: Mapping[str, str], points: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return a table of runs, or of points on a line, each with its values of `keys` (title -> key); what one lacks is empty."""
    texts = {"bytes_up": size, "test_loss": "{:.3f}".format, "seconds": "{:.0f}".format, "rate": "{:g}".format, "alpha": "{:g}".format}

    def entry(point: Mapping[str, Any], key: str) -> Entry:
        value = None if key not in point else point[key] * (100 if key.endswith("accuracy") else 1)
        return Entry("") if value is None else Entry(texts.get(key, "{:.2f}".format)(value), "", value)

    return _table(caption, ["n = 1", *keys], [[name, *(entry(point, key) for key in keys.values())] for name, point in points.items()])


def partitions(results: DemoResults) -> list[Block]:
    labels, clients, seed = results.data.train.labels, results.clients, results.seed
    schemes = {
        "IID": partition(labels, clients, "iid", seed=seed),
        "2 classes per client": partition(labels, clients, "classes", classes_per_client=2, seed=seed),
        "1 class per client": partition(labels, clients, "classes", classes_per_client=1, seed=seed),
        "Dirichlet, α = 1": partition(labels, clients, "dirichlet", alpha=1.0, seed=seed),
    }
    text = _section(
        "1. Data on many clients",
        f"{len(labels):,} training images are split over {clients} clients, every image on exactly one. With IID shards all clients have the "
        "same mixture of classes. With few classes per client their gradients point in different directions, and averaging can cost accuracy.",
    )
    counts = {name: label_counts(labels, shards) for name, shards in schemes.items()}
    rows: list[list[Entry | str | float]] = []
    for name, shards in schemes.items():
        s = partition_stats(labels, shards)
        span, classes = f"{s.size_min} to {s.size_max}", f"{s.classes_min} to {s.classes_max}"
        rows.append([name, Entry(span, "", s.size_min), Entry(classes, "", s.classes_min), s.label_entropy, s.tv_distance])
    header = ["partition (n = 1)", "samples per client", "classes per client", "label entropy (nats)"]
    header += ["distance to the global label distribution"]
    return [*text, partition_chart(counts, "partitions"), _table("Four ways to divide the training images.", header, rows)]


def baseline(results: DemoResults) -> list[Block]:
    summary, metrics, ridge = results.central.summary, results.central.metrics, results.ridge
    tuned = 100 * summary["test_accuracy"]
    text = _section(
        "2. The centralised baseline",
        "A closed-form (ridge) head on the pretrained features needs no gradient step. Fine-tuning the whole network on all data in "
        "one place is the reference for the federations. Validation chooses the epoch; the test set is read once.",
        f"Here fine-tuning ends {compared(tuned, 100 * ridge['test_accuracy'])} the head alone on the test set. All following runs start "
        "with this head, at one point θ₀. Its sums add over clients, so that a federation computes the same head for any split, from "
        "one message per client.",
    )
    curve = {"fine-tuned": [(m["epoch"], 100 * m["val_accuracy"]) for m in metrics]}
    level = {"ridge head only": 100 * ridge["val_accuracy"]}
    chart = _curves("Validation accuracy by epoch", "Fine-tuning in one place.", curve, "epoch", "validation accuracy (%)", level)
    measured = {"ridge head only": ridge, f"fine-tuned, {summary['epochs']} epochs": summary}
    keys = {"validation accuracy (%)": "val_accuracy", "test accuracy (%)": "test_accuracy", "seconds": "seconds"}
    return [*text, chart, _measured("All data in one place.", keys, measured)]


def drift(results: DemoResults) -> list[Block]:
    runs, ridge, count = results.dense, results.ridge, results.clients
    text = _section(
        "3. FedAvg, and what client drift is",
        f"In each round the {count} clients take the global model, make 4 steps of SGD on their own images and send back the change: a task "
        "vector Δ. The server adds the mean of the Δ to the model. Clients with the same mixture of classes agree a little in every round, "
        "and the mean keeps what they agree on. Clients with one or two classes pull the model towards their own classes and away from all "
        "others. Most of these updates cancel in the mean, and little of a round remains. That is client drift: interference between task vectors.",
    )
    levels = {"centralised": 100 * results.central.summary["val_accuracy"], "ridge head only": 100 * ridge["val_accuracy"]}
    splits = "FedAvg by round on three splits, compared with no rounds and with all data in one place. Only the split differs."
    noise = "The loss is less noisy than the accuracy, which moves in steps of one image."
    charts = [
        _rounds("Validation accuracy on three splits", splits, runs, "val_accuracy", levels),
        _rounds("Validation loss on three splits", noise, runs, "val_loss", {"ridge head only": ridge["val_loss"]}),
    ]
    order = sorted(runs, key=lambda split: last(runs[split], "val_loss"))
    remark = (
        f"After {results.rounds} rounds the validation accuracy is "
        + listed([f"{100 * last(run, 'val_accuracy'):.1f} % ({split})" for split, run in runs.items()])
        + f"; the head alone has {100 * ridge['val_accuracy']:.1f} %. By validation loss the order is {', '.join(order)}, from best to worst. "
        + (
            "By that measure, the fewer classes a client holds, the less a round gains."
            if order == list(runs)
            else "That is not the order of the splits from even to uneven: one seed and so few rounds do not settle it."
        )
    )
    return [*text, *charts, Text(remark), *_agreement(runs, count), *_dense_table(results)]


def _agreement(runs: Mapping[str, Run], count: int) -> list[Block]:
    levels = {"unrelated directions": 0.0, "all cancel": -1 / (count - 1)}
    ratio = f"The length of the mean of a round's updates relative to their own: 1 if all agree, 0 if they cancel, 1/√{count} if they are unrelated."
    charts = [
        _rounds("Agreement of clients: cosine", "The mean cosine between the updates of a round.", runs, "cosine", levels),
        _rounds("Agreement of clients: length", ratio, runs, "drift_ratio", {"unrelated directions": 1 / sqrt(count)}),
    ]
    remaining = {split: mean(run, "drift_ratio") for split, run in runs.items()}
    remark = (
        "Over all rounds the mean keeps "
        + listed([f"{100 * share:.0f} % ({split})" for split, share in remaining.items()])
        + f" of an update's length; for unrelated directions it would be {100 / sqrt(count):.0f} %. A federation that samples few of many "
        "clients shows less of this. Its cohort does not hold all classes, so that the updates look unrelated rather than opposed, and each "
        "round pulls towards the classes of its cohort."
    )
    return [*charts, Text(remark)]


def _dense_table(results: DemoResults) -> list[Block]:
    ridge = results.ridge
    measured = {"ridge head only": ridge, "centralised": results.central.summary}
    measured |= {f"FedAvg, {name}": run.summary for name, run in results.dense.items()}
    keys = {"test accuracy (%)": "test_accuracy", "test loss": "test_loss", "sent by clients": "bytes_up", "seconds": "seconds"}
    error = standard_error(100 * ridge["test_accuracy"], len(results.data.test))
    remark = (
        f"One standard error of an accuracy on {len(results.data.test):,} test images is {error:.1f} points, and each row, here and below, is "
        "one run with one seed. Smaller differences are not significant."
    )
    return [_measured("Dense training.", keys, measured), Text(remark)]


def masks(results: DemoResults) -> list[Block]:
    drawn = {title(rule): run.mask for rule, run in results.sparse.items() if run.mask is not None}
    first = next(iter(drawn.values()))
    text = _section(
        "4. Moving a tenth of the weights",
        f"A mask names, before training, the weights that may move: here {first.active:,} of {first.eligible_count:,}, a density of "
        f"{first.density:.2g}. All others keep their bits, and only the moving ones are sent. Which tenth? The sensitivity of a weight "
        "is how much the output changes with it (the diagonal of the Fisher information), measured on 150 validation images. "
        "Least sensitive is the rule of TaLoS: in each of four rounds it scores the weights and drops the most sensitive. Most "
        "sensitive is its opposite. Lowest and highest magnitude use the size of a weight, and random uses nothing. Qk only, a control, "
        "picks at random among the queries and keys of attention.",
    )
    remark = _mask_text(results, {name: mask.composition() for name, mask in drawn.items()}, first.eligible_count)
    level, caption = {"ridge head only": results.ridge["val_loss"]}, f"{results.studied[0].upper()}{results.studied[1:]}."
    chart = _rounds("Validation loss under masks", caption, results.sparse, "val_loss", level)
    return [*text, mask_chart(drawn, "masks"), *remark, chart, *_sparse_table(results)]


def _mask_text(results: DemoResults, tables: Mapping[str, Mapping[str, Any]], eligible: int) -> list[Block]:
    largest = {name: max(table, key=lambda kind, table=table: table[kind]["share"]) for name, table in tables.items()}  # type: ignore[misc]
    followed, attention = title(results.followed), [tables[title(results.followed)][kind] for kind in ("query", "key")]
    slow, fast = min(results.rates.values()), max(results.rates.values())
    parts = (
        "Largest part of each mask: "
        + listed([f"{name} {kind} ({100 * tables[name][kind]['share']:.0f} %)" for name, kind in largest.items()])
        + ". Queries and keys decide where attention looks. They are "
        f"{100 * sum(row['eligible'] for row in attention) / eligible:.0f} % of all weights that may move and "
        f"{100 * sum(row['share'] for row in attention):.0f} % of the {followed} mask."
    )
    rates = (
        f"The best learning rate depends on the mask: that of {listed([title(r) for r, x in results.rates.items() if x == fast])} is "
        f"{fast / slow:.0f} times that of {listed([title(r) for r, x in results.rates.items() if x == slow])}. Each rule has its own rate here: the "
        "best by validation loss of rates a factor of three apart, chosen beforehand on this split with seed 0 and the same number of rounds. Where no "
        "rate gains on the head, it is the largest that ends near it. With another rule's rate, a rule looks worse than it is."
    )
    return [Text(parts), Text(rates)]


def _sparse_table(results: DemoResults) -> list[Block]:
    runs, dense = results.sparse, results.dense[results.studied].summary
    measured = {"ridge head only": results.ridge, "dense": dense | {"rate": results.dense_rate, "share": 1.0}}
    for rule, run in runs.items():
        measured[title(rule)] = run.summary | {"rate": results.rates[rule], "share": run.summary["bytes_up"] / dense["bytes_up"]}
    keys = {"rate": "rate", **SCORES, "sent by clients": "bytes_up", "of dense": "share"}
    ratio = dense["bytes_up"] / next(iter(runs.values())).summary["bytes_up"]
    lowest = min(runs, key=lambda rule: runs[rule].summary["test_loss"])
    highest = max(runs, key=lambda rule: runs[rule].summary["test_accuracy"])
    better = [title(rule) for rule, run in runs.items() if run.summary["test_loss"] < dense["test_loss"]]
    remark = (
        f"Clients send {ratio:.3g} times less than in dense training; the server sends each of them the mask once, one bit per weight. "
        f"On the test set {title(lowest)} has the lowest loss of the rules and {title(highest)} the highest accuracy; "
        f"{listed(better) if better else 'no rule'} {'have' if len(better) > 1 else 'has'} a lower loss than dense training."
    )
    return [_measured("Training under masks.", keys, measured), Text(remark)]


def arithmetic(results: DemoResults) -> list[Block]:
    text = _section(
        "5. Task arithmetic: what was learned, as a vector",
        "τ = θ − θ₀ is what a run learned, and a vector can be scaled: θ₀ + ατ is the head alone at α = 0 and the trained model at α = 1. "
        "α > 1 goes further in the same direction, α < 0 away from what was learned. The server of FedAvg does the same in "
        "every round: its learning rate is an α. Choosing α needs no training, only the validation set.",
    )
    sweeps = {title(name): sweep for name, sweep in results.sweeps.items()}
    curves = {name: [(p["alpha"], 100 * p["val_accuracy"]) for p in sweep["points"]] for name, sweep in sweeps.items()}
    losses = {name: [(p["alpha"], p["val_loss"]) for p in sweep["points"]] for name, sweep in sweeps.items()}
    chosen = {name: sweep["chosen"]["alpha"] for name, sweep in sweeps.items()}
    remark = f"θ₀ + ατ on validation, τ of dense and of {title(results.followed)} training, {results.studied}."
    rings, zero = f"{remark} Rings: the α with the best accuracy.", "α = 0: ridge head only"
    charts = [
        _curves("Accuracy along α", rings, curves, "α", "validation accuracy (%)", {zero: 100 * results.ridge["val_accuracy"]}, chosen),
        _curves("Loss along α", remark, losses, "α", "validation loss", {zero: results.ridge["val_loss"]}),
    ]
    points, sentences = {"ridge head only": results.ridge}, []
    for name, sweep in sweeps.items():
        best, end = sweep["chosen"], sweep["end"]
        points |= {f"{name}, as trained": end, f"{name}, chosen on validation": best}
        alpha = best["alpha"]
        verdict = "stopped short" if alpha > 1 else "went too far" if alpha < 1 else "ended where they should"
        test = compared(100 * best["test_accuracy"], 100 * end["test_accuracy"])
        sentences.append(
            f"For {name} training validation chooses α = {alpha:g}, as if the rounds {verdict}"
            + ("." if alpha == 1 else f"; on the test set that point is {test} α = 1.")
        )
    table = _measured("The trained models, and the points that validation chooses.", {"α": "alpha", **SCORES}, points)
    dense, sparse = results.sweeps["dense"], results.sweeps[results.followed]
    bias = "The validation accuracy of a point chosen on validation is biased upwards; the test columns are not."
    lengths = (
        f"The dense τ has length {dense['norm']:.3g} and moves {100 * dense['density']:.0f} % of the weights; that of {title(results.followed)} "
        f"has length {sparse['norm']:.3g} and moves {100 * sparse['density']:.0f} %. The network is flat in some directions and steep in others: "
        "the length of a vector does not determine its effect."
    )
    return [*text, *charts, table, Text(" ".join([*sentences, bias])), Text(lengths)]


def interference(results: DemoResults) -> list[Block]:
    pair, rule, count = results.pair, results.followed, results.clients
    unrelated = (1 - 1 / sqrt(count)) / 2  # expected for independent normal updates
    conflict = {name: mean(run, "sign_conflict") for name, run in pair.items()}
    cosine = {name: mean(run, "cosine") for name, run in pair.items()}
    text = _section(
        "6. Interference",
        "Two updates interfere where one increases a weight and the other decreases it. The sign conflict is the share of all movement "
        f"against the majority, weight by weight: 0 if all agree, about {unrelated:.2f} for {count} unrelated updates. "
        "Moving only the least sensitive weights was proposed to keep tasks from interfering. Does it help for clients?",
    )
    remark = f"Within a round, {results.studied}."
    charts = [
        _rounds("Sign conflict of the clients' updates", remark, pair, "sign_conflict", {"unrelated updates": unrelated}),
        _rounds("Mean cosine of the clients' updates", remark, pair, "cosine", {"unrelated updates": 0.0}),
    ]
    fewer, rounds = rounds_with_fewer_conflicts(pair[rule], pair["dense"])
    words = (
        f"Averaged over the rounds the sign conflict is {conflict['dense']:.3f} dense and {conflict[rule]:.3f} {title(rule)}, the cosine "
        f"{cosine['dense']:+.3f} and {cosine[rule]:+.3f}. Under the mask clients conflict less in {fewer} of {rounds} rounds. Certainly it "
        "changes which weights they can disagree about."
    )
    halves = (
        "What counts in the end is whether predictions interfere. Take two federations with one class per client, from the same θ₀: one with "
        f"{listed(results.groups[0])}, the other with {listed(results.groups[1])}. Add their task vectors: θ₀ + α₁τ₁ + α₂τ₂. "
        "The disentanglement error ξ is how often adding the other's vector changes the predictions of a federation's own model on its own "
        "classes: 0 % if the two do not interfere."
    )
    return [*text, *charts, Text(words), Text(halves), *_disentanglement(results)]


def _disentanglement(results: DemoResults) -> list[Block]:
    rule, maps = results.followed, {name: results.maps[name] for name in results.pair}
    charts = [
        replace(xi_chart(m["xi"], m["alphas"], ("τ₁", "τ₂"), slug(f"xi {name}")), title=f"ξ(α₁, α₂): {title(name)}")
        for name, m in maps.items()
    ]
    average = {name: average_xi(each) for name, each in maps.items()}
    sums = {name: [100 * value for value in values.values()] for name, values in results.sums.items()}
    rows: list[list[Entry | str | float]] = [
        ["cosine of τ₁ and τ₂", *(number("{:+.3f}", each["pairs"][0]["cosine"]) for each in maps.values())],
        ["sign conflict of τ₁ and τ₂", *(number("{:.3f}", each["pairs"][0]["sign_conflict"]) for each in maps.values())],
        ["mean ξ over the map, both α ≠ 0 (%)", *(average[name] for name in maps)],
        ["ξ(1, 1) (%)", *(100 * each["xi"][at][at] for each in maps.values() for at in [each["alphas"].index(1.0)])],
    ]
    rows += [[f"validation accuracy, {point} (%)", *(sums[name][i] for name in maps)] for i, point in enumerate(results.sums[rule])]
    table = _table("Two federations without a common class.", ["n = 1", *(title(name) for name in maps)], rows)
    samples = sum(maps[rule]["samples"])
    alone, both = [sums["dense"][1], sums["dense"][2]], [sums["dense"][3], sums[rule][3]]
    balanced = all(at[3] > (at[1] + at[2]) / 2 for at in sums.values())
    over = f"Over the map ξ is {average['dense']:.0f} % on average for dense training and {average[rule]:.0f} % for {title(rule)}: " + (
        f"too small a difference for one seed and {samples} images."
        if abs(average["dense"] - average[rule]) < 3
        else f"the {'masked' if average[rule] < average['dense'] else 'dense'} vectors disentangle better here (one seed, {samples} images)."
    )
    sum_of_two = (
        f"On all {results.data.num_classes} classes a half alone has {alone[0]:.0f} % and {alone[1]:.0f} % (dense)"
        + (", less than θ₀: learning its classes cost it the other's. " if max(alone) < sums["dense"][0] else ". ")
        + f"The sum of the two has {both[0]:.0f} % dense and {both[1]:.0f} % {title(rule)}"
        + (": more than the mean of the halves, because their pulls balance in part. " if balanced else ". ")
        + "Averaging the clients of a round is that same sum, in small steps."
    )
    return [*charts, table, Text(over), Text(sum_of_two)]


def rounds_with_fewer_conflicts(ours: Run, theirs: Run) -> tuple[int, int]:
    """Return the number of rounds in which our clients' signs conflict less, and the number of common rounds."""
    one, other = ({m["round"]: m["sign_conflict"] for m in run.metrics if "sign_conflict" in m} for run in (ours, theirs))
    common = one.keys() & other.keys()
    return sum(one[r] < other[r] for r in common), len(common)


def average_xi(result: Mapping[str, Any]) -> float:
    """Return the mean of ξ in percent over the points where both α ≠ 0."""
    nonzero = [i for i, alpha in enumerate(result["alphas"]) if alpha != 0]
    return float(sum(100 * result["xi"][i][j] for i in nonzero for j in nonzero)) / len(nonzero) ** 2


def commands(results: DemoResults) -> list[Block]:
    sweep, one, two = (quote(relpath(path)) for path in (results.pair["dense"].path, *results.maps[results.followed]["names"]))
    remark = f"The runs of this page are in {relpath(results.central.path.parent)}; the last two commands read them again."
    lines = (
        "fedlens run experiment=fedavg_noniid data.classes_per_client=2 seed=1\n"
        "fedlens resume runs/…  # resume an interrupted run, bit for bit\n"
        "fedlens run -m seed=0,1,2  # a sweep\n"
        "fedlens run experiment=fedavg_noniid_sparse sparsity=0.9  # head, mask, then training that moves a tenth\n"
        "fedlens run experiment=fedavg_noniid_sparse mask.strategy=random optim.lr=0.1\n"
        f"fedlens arith sweep {sweep}\n"
        f"fedlens arith interference {one} {two}"
    )
    return [*_section("Run it yourself", remark), Code(lines)]


SECTIONS: tuple[Callable[[DemoResults], list[Block]], ...] = (partitions, baseline, drift, masks, arithmetic, interference, commands)
