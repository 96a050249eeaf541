"""The sections of the page of `fedlens demo`: figures, tables and the text between them.

Sentences that could differ on another machine or with another seed are computed from the numbers.
"""

from collections.abc import Callable, Mapping
from math import sqrt
from typing import Any

from fedlens.data.partition import label_counts, partition, partition_stats
from fedlens.demo.html_page import DemoPage
from fedlens.demo.results import DemoResults, by_round, compared, last, listed, mean, megabytes, standard_error, title
from fedlens.study.figures import curves_figure, mask_figure, partition_figure, xi_figure
from fedlens.training.run import Run

Rows = list[list[object]]


def partitions(page: DemoPage, results: DemoResults) -> None:
    labels, clients, seed = results.data.train.labels, results.clients, results.seed
    schemes = {
        "IID": partition(labels, clients, "iid", seed=seed),
        "2 classes per client": partition(labels, clients, "classes", classes_per_client=2, seed=seed),
        "1 class per client": partition(labels, clients, "classes", classes_per_client=1, seed=seed),
        "Dirichlet, α = 1": partition(labels, clients, "dirichlet", alpha=1.0, seed=seed),
    }
    page.section(
        "1. Data on many clients",
        f"{len(labels):,} training images are split over {clients} clients, every image on exactly one. With IID shards all clients have the "
        "same mixture of classes. With few classes per client their gradients point in different directions, and averaging can cost accuracy.",
    )
    counts = {name: label_counts(labels, shards) for name, shards in schemes.items()}
    page.figure(partition_figure(counts), "Samples of each class on each client.")
    rows: Rows = []
    for name, shards in schemes.items():
        s = partition_stats(labels, shards)
        rows.append([name, f"{s.size_min} to {s.size_max}", f"{s.classes_min} to {s.classes_max}", s.label_entropy, s.tv_distance])
    header = [
        "partition (n = 1)",
        "samples per client",
        "classes per client",
        "label entropy (nats)",
        "distance to the global label distribution",
    ]
    page.table(header, rows)


def baseline(page: DemoPage, results: DemoResults) -> None:
    summary, metrics, ridge = results.central.summary, results.central.metrics, results.ridge
    tuned = 100 * summary["test_accuracy"]
    page.section(
        "2. The centralised baseline",
        "A closed-form (ridge) head on the pretrained features needs no gradient step. Fine-tuning the whole network on all data in "
        "one place is the reference for the federations. Validation chooses the epoch; the test set is read once.",
        f"Here fine-tuning ends {compared(tuned, 100 * ridge['test_accuracy'])} the head alone on the test set. All following runs start "
        "with this head, at one point θ₀. Its sums add over clients, so that a federation computes the same head for any split, from "
        "one message per client.",
    )
    curve = {"fine-tuned": [(m["epoch"], 100 * m["val_accuracy"]) for m in metrics]}
    page.figure(
        curves_figure(curve, "epoch", "validation accuracy (%)", {"ridge head only": 100 * ridge["val_accuracy"]}),
        "Validation accuracy by epoch.",
    )
    tuned_row = [f"fine-tuned, {summary['epochs']} epochs", *accuracies(summary), f"{summary['seconds']:.0f}"]
    rows: Rows = [["ridge head only", *accuracies(ridge), ""], tuned_row]
    page.table(["n = 1", "validation accuracy (%)", "test accuracy (%)", "seconds"], rows)


def drift(page: DemoPage, results: DemoResults) -> None:
    runs, ridge, count = results.dense, results.ridge, results.clients
    page.section(
        "3. FedAvg, and what client drift is",
        f"In each round the {count} clients take the global model, make 4 steps of SGD on their own images and send back the change: a task "
        "vector Δ. The server adds the mean of the Δ to the model. Clients with the same mixture of classes agree a little in every round, "
        "and the mean keeps what they agree on. Clients with one or two classes pull the model towards their own classes and away from all "
        "others. Most of these updates cancel in the mean, and little of a round remains. That is client drift: interference between task vectors.",
    )
    levels = {"centralised": 100 * results.central.summary["val_accuracy"], "ridge head only": 100 * ridge["val_accuracy"]}
    page.figure(
        curves_figure(by_round(runs, "val_accuracy", 100), "round", "validation accuracy (%)", levels),
        "FedAvg by round on three splits, compared with no rounds and with all data in one place. Only the split differs. The loss is less "
        "noisy than the accuracy, which moves in steps of one image.",
        curves_figure(by_round(runs, "val_loss"), "round", "validation loss", {"ridge head only": ridge["val_loss"]}),
    )
    order = sorted(runs, key=lambda split: last(runs[split], "val_loss"))
    page.text(
        f"After {results.rounds} rounds the validation accuracy is "
        + listed([f"{100 * last(run, 'val_accuracy'):.1f} % ({split})" for split, run in runs.items()])
        + f"; the head alone has {100 * ridge['val_accuracy']:.1f} %. By validation loss the order is {', '.join(order)}, from best to worst. "
        + (
            "By that measure, the fewer classes a client holds, the less a round gains."
            if order == list(runs)
            else "That is not the order of the splits from even to uneven: one seed and so few rounds do not settle it."
        )
    )
    _agreement(page, runs, count)
    _dense_table(page, results)


def _agreement(page: DemoPage, runs: Mapping[str, Run], count: int) -> None:
    levels = {"unrelated directions": 0.0, "all cancel": -1 / (count - 1)}
    page.figure(
        curves_figure(by_round(runs, "cosine"), "round", "mean cosine between clients' Δ", levels),
        "Agreement of clients: the mean cosine between the updates of a round (left), and the length of their mean relative to their own "
        f"(right): 1 if all agree, 0 if they cancel, 1/√{count} if they are unrelated.",
        curves_figure(by_round(runs, "drift_ratio"), "round", "‖mean Δ‖ / mean ‖Δ‖", {"unrelated directions": 1 / sqrt(count)}),
    )
    remaining = {split: mean(run, "drift_ratio") for split, run in runs.items()}
    page.text(
        "Over all rounds the mean keeps "
        + listed([f"{100 * share:.0f} % ({split})" for split, share in remaining.items()])
        + f" of an update's length; for unrelated directions it would be {100 / sqrt(count):.0f} %. A federation that samples few of many "
        "clients shows less of this. Its cohort does not hold all classes, so that the updates look unrelated rather than opposed, and each "
        "round pulls towards the classes of its cohort."
    )


def _dense_table(page: DemoPage, results: DemoResults) -> None:
    ridge, s = results.ridge, results.central.summary
    rows: Rows = [["ridge head only", 100 * ridge["test_accuracy"], f"{ridge['test_loss']:.3f}", "", ""]]
    rows.append(["centralised", 100 * s["test_accuracy"], f"{s['test_loss']:.3f}", "", f"{s['seconds']:.0f}"])
    for name, run in results.dense.items():
        s = run.summary
        row = [f"FedAvg, {name}", 100 * s["test_accuracy"], f"{s['test_loss']:.3f}", megabytes(s["bytes_up"]), f"{s['seconds']:.0f}"]
        rows.append(row)
    page.table(["n = 1", "test accuracy (%)", "test loss", "sent by clients", "seconds"], rows)
    error = standard_error(100 * ridge["test_accuracy"], len(results.data.test))
    page.text(
        f"One standard error of an accuracy on {len(results.data.test):,} test images is {error:.1f} points, and each row, here and below, is "
        "one run with one seed. Smaller differences are not significant."
    )


def masks(page: DemoPage, results: DemoResults) -> None:
    drawn = {title(rule): run.mask for rule, run in results.sparse.items() if run.mask is not None}
    first = next(iter(drawn.values()))
    page.section(
        "4. Moving a tenth of the weights",
        f"A mask names, before training, the weights that may move: here {first.active:,} of {first.eligible_count:,}, a density of "
        f"{first.density:.2g}. All others keep their bits, and only the moving ones are sent. Which tenth? The sensitivity of a weight "
        "is how much the output changes with it (the diagonal of the Fisher information), measured on 150 validation images. "
        "Least sensitive is the rule of TaLoS: in each of four rounds it scores the weights and drops the most sensitive. Most "
        "sensitive is its opposite. Lowest and highest magnitude use the size of a weight, and random uses nothing. Qk only, a control, "
        "picks at random among the queries and keys of attention.",
    )
    page.figure(mask_figure(drawn), "The masks: density by layer, and composition by kind of weight (numbers: percent).")
    _mask_text(page, results, {name: mask.composition() for name, mask in drawn.items()}, first.eligible_count)
    ridge = results.ridge
    page.figure(
        curves_figure(by_round(results.sparse, "val_loss"), "round", "validation loss", {"ridge head only": ridge["val_loss"]}),
        f"Validation loss by round, {results.studied}.",
    )
    _sparse_table(page, results)


def _mask_text(page: DemoPage, results: DemoResults, tables: Mapping[str, Mapping[str, Any]], eligible: int) -> None:
    largest = {name: max(table, key=lambda kind, table=table: table[kind]["share"]) for name, table in tables.items()}  # type: ignore[misc]
    followed, attention = title(results.followed), [tables[title(results.followed)][kind] for kind in ("query", "key")]
    slow, fast = min(results.rates.values()), max(results.rates.values())
    page.text(
        "Largest part of each mask: "
        + listed([f"{name} {kind} ({100 * tables[name][kind]['share']:.0f} %)" for name, kind in largest.items()])
        + ". Queries and keys decide where attention looks. They are "
        f"{100 * sum(row['eligible'] for row in attention) / eligible:.0f} % of all weights that may move and "
        f"{100 * sum(row['share'] for row in attention):.0f} % of the {followed} mask.",
        f"The best learning rate depends on the mask: that of {listed([title(r) for r, x in results.rates.items() if x == fast])} is "
        f"{fast / slow:.0f} times that of {listed([title(r) for r, x in results.rates.items() if x == slow])}. Each rule has its own rate here: the "
        "best by validation loss of rates a factor of three apart, chosen beforehand on this split with seed 0 and the same number of rounds. Where no "
        "rate gains on the head, it is the largest that ends near it. With another rule's rate, a rule looks worse than it is.",
    )


def _sparse_table(page: DemoPage, results: DemoResults) -> None:
    runs, dense, ridge = results.sparse, results.dense[results.studied].summary, results.ridge
    rows: Rows = [["ridge head only", "", *accuracies(ridge), f"{ridge['test_loss']:.3f}", "", ""]]
    for name, rate, s in (("dense", results.dense_rate, dense), *((title(r), results.rates[r], run.summary) for r, run in runs.items())):
        share = f"{s['bytes_up'] / dense['bytes_up']:.2f}"
        rows.append([name, f"{rate:g}", *accuracies(s), f"{s['test_loss']:.3f}", megabytes(s["bytes_up"]), share])
    page.table(["n = 1", "rate", "validation (%)", "test (%)", "test loss", "sent by clients", "of dense"], rows)
    ratio = dense["bytes_up"] / next(iter(runs.values())).summary["bytes_up"]
    lowest = min(runs, key=lambda rule: runs[rule].summary["test_loss"])
    highest = max(runs, key=lambda rule: runs[rule].summary["test_accuracy"])
    better = [title(rule) for rule, run in runs.items() if run.summary["test_loss"] < dense["test_loss"]]
    page.text(
        f"Clients send {ratio:.3g} times less than in dense training; the server sends each of them the mask once, one bit per weight. "
        f"On the test set {title(lowest)} has the lowest loss of the rules and {title(highest)} the highest accuracy; "
        f"{listed(better) if better else 'no rule'} {'have' if len(better) > 1 else 'has'} a lower loss than dense training.",
    )


def accuracies(point: Mapping[str, float]) -> tuple[float, float]:
    return 100 * point["val_accuracy"], 100 * point["test_accuracy"]


def arithmetic(page: DemoPage, results: DemoResults) -> None:
    page.section(
        "5. Task arithmetic: what was learned, as a vector",
        "τ = θ − θ₀ is what a run learned, and a vector can be scaled: θ₀ + ατ is the head alone at α = 0 and the trained model at α = 1. "
        "α > 1 goes further in the same direction, α < 0 away from what was learned. The server of FedAvg does the same in "
        "every round: its learning rate is an α. Choosing α needs no training, only the validation set.",
    )
    sweeps = {title(name): sweep for name, sweep in results.sweeps.items()}
    curves = {name: [(p["alpha"], 100 * p["val_accuracy"]) for p in sweep["points"]] for name, sweep in sweeps.items()}
    losses = {name: [(p["alpha"], p["val_loss"]) for p in sweep["points"]] for name, sweep in sweeps.items()}
    chosen = {name: sweep["chosen"]["alpha"] for name, sweep in sweeps.items()}
    page.figure(
        curves_figure(curves, "α", "validation accuracy (%)", {"α = 0: ridge head only": 100 * results.ridge["val_accuracy"]}, chosen),
        f"θ₀ + ατ on validation, τ of dense and of {title(results.followed)} training, {results.studied}. Rings: the α with the best accuracy.",
        curves_figure(losses, "α", "validation loss", {"α = 0: ridge head only": results.ridge["val_loss"]}),
    )
    rows: Rows = [["ridge head only", "0", *accuracies(results.ridge), f"{results.ridge['test_loss']:.3f}"]]
    sentences = []
    for name, sweep in sweeps.items():
        best, end = sweep["chosen"], sweep["end"]
        for label, point in ((f"{name}, as trained", end), (f"{name}, chosen on validation", best)):
            rows.append([label, f"{point['alpha']:g}", *accuracies(point), f"{point['test_loss']:.3f}"])
        alpha = best["alpha"]
        verdict = "stopped short" if alpha > 1 else "went too far" if alpha < 1 else "ended where they should"
        test = compared(100 * best["test_accuracy"], 100 * end["test_accuracy"])
        sentences.append(
            f"For {name} training validation chooses α = {alpha:g}, as if the rounds {verdict}"
            + ("." if alpha == 1 else f"; on the test set that point is {test} α = 1.")
        )
    page.table(["n = 1", "α", "validation (%)", "test (%)", "test loss"], rows)
    dense, sparse = results.sweeps["dense"], results.sweeps[results.followed]
    page.text(
        " ".join(sentences) + " The validation accuracy of a point chosen on validation is biased upwards; the test columns are not.",
        f"The dense τ has length {dense['norm']:.3g} and moves {100 * dense['density']:.0f} % of the weights; that of {title(results.followed)} "
        f"has length {sparse['norm']:.3g} and moves {100 * sparse['density']:.0f} %. The network is flat in some directions and steep in others: "
        "the length of a vector does not determine its effect.",
    )


def interference(page: DemoPage, results: DemoResults) -> None:
    pair, rule, count = results.pair, results.followed, results.clients
    unrelated = (1 - 1 / sqrt(count)) / 2  # expected for independent normal updates
    conflict = {name: mean(run, "sign_conflict") for name, run in pair.items()}
    cosine = {name: mean(run, "cosine") for name, run in pair.items()}
    page.section(
        "6. Interference",
        "Two updates interfere where one increases a weight and the other decreases it. The sign conflict is the share of all movement "
        f"against the majority, weight by weight: 0 if all agree, about {unrelated:.2f} for {count} unrelated updates. "
        "Moving only the least sensitive weights was proposed to keep tasks from interfering. Does it help for clients?",
    )
    page.figure(
        curves_figure(by_round(pair, "sign_conflict"), "round", "sign conflict", {"unrelated updates": unrelated}),
        f"Within a round: sign conflict (left) and mean cosine (right) of the clients' updates, {results.studied}.",
        curves_figure(by_round(pair, "cosine"), "round", "mean cosine between clients' Δ", {"unrelated updates": 0.0}),
    )
    fewer, rounds = rounds_with_fewer_conflicts(pair[rule], pair["dense"])
    page.text(
        f"Averaged over the rounds the sign conflict is {conflict['dense']:.3f} dense and {conflict[rule]:.3f} {title(rule)}, the cosine "
        f"{cosine['dense']:+.3f} and {cosine[rule]:+.3f}. Under the mask clients conflict less in {fewer} of {rounds} rounds. Certainly it "
        "changes which weights they can disagree about.",
        "What counts in the end is whether predictions interfere. Take two federations with one class per client, from the same θ₀: one with "
        f"{listed(results.groups[0])}, the other with {listed(results.groups[1])}. Add their task vectors: θ₀ + α₁τ₁ + α₂τ₂. "
        "The disentanglement error ξ is how often adding the other's vector changes the predictions of a federation's own model on its own "
        "classes: 0 % if the two do not interfere.",
    )
    _disentanglement(page, results)


def _disentanglement(page: DemoPage, results: DemoResults) -> None:
    rule, maps = results.followed, {name: results.maps[name] for name in results.pair}
    figures = [xi_figure(each["xi"], each["alphas"], ("τ₁", "τ₂")) for each in maps.values()]
    page.figure(figures[0], f"ξ(α₁, α₂) in percent: dense (left) and {title(rule)} (right).", *figures[1:])
    average = {name: average_xi(each) for name, each in maps.items()}
    sums = {name: [100 * value for value in values.values()] for name, values in results.sums.items()}
    rows: Rows = [
        ["cosine of τ₁ and τ₂", *(f"{each['pairs'][0]['cosine']:+.3f}" for each in maps.values())],
        ["sign conflict of τ₁ and τ₂", *(f"{each['pairs'][0]['sign_conflict']:.3f}" for each in maps.values())],
        ["mean ξ over the map, both α ≠ 0 (%)", *(average[name] for name in maps)],
        ["ξ(1, 1) (%)", *(100 * each["xi"][at][at] for each in maps.values() for at in [each["alphas"].index(1.0)])],
        *([f"validation accuracy, {point} (%)", *(sums[name][i] for name in maps)] for i, point in enumerate(results.sums[rule])),
    ]
    page.table(["n = 1", *(title(name) for name in maps)], rows)
    samples = sum(maps[rule]["samples"])
    alone, both = [sums["dense"][1], sums["dense"][2]], [sums["dense"][3], sums[rule][3]]
    balanced = all(at[3] > (at[1] + at[2]) / 2 for at in sums.values())
    page.text(
        f"Over the map ξ is {average['dense']:.0f} % on average for dense training and {average[rule]:.0f} % for {title(rule)}: "
        + (
            f"too small a difference for one seed and {samples} images."
            if abs(average["dense"] - average[rule]) < 3
            else f"the {'masked' if average[rule] < average['dense'] else 'dense'} vectors disentangle better here (one seed, {samples} images)."
        ),
        f"On all {results.data.num_classes} classes a half alone has {alone[0]:.0f} % and {alone[1]:.0f} % (dense)"
        + (", less than θ₀: learning its classes cost it the other's. " if max(alone) < sums["dense"][0] else ". ")
        + f"The sum of the two has {both[0]:.0f} % dense and {both[1]:.0f} % {title(rule)}"
        + (": more than the mean of the halves, because their pulls balance in part. " if balanced else ". ")
        + "Averaging the clients of a round is that same sum, in small steps.",
    )


def rounds_with_fewer_conflicts(ours: Run, theirs: Run) -> tuple[int, int]:
    """Return the number of rounds in which our clients' signs conflict less, and the number of common rounds."""
    one, other = ({m["round"]: m["sign_conflict"] for m in run.metrics if "sign_conflict" in m} for run in (ours, theirs))
    common = one.keys() & other.keys()
    return sum(one[r] < other[r] for r in common), len(common)


def average_xi(result: Mapping[str, Any]) -> float:
    """Return the mean of ξ in percent over the points where both α ≠ 0."""
    nonzero = [i for i, alpha in enumerate(result["alphas"]) if alpha != 0]
    return float(sum(100 * result["xi"][i][j] for i in nonzero for j in nonzero)) / len(nonzero) ** 2


def commands(page: DemoPage, results: DemoResults) -> None:
    sweep, (one, two) = results.pair["dense"].path, results.maps[results.followed]["names"]
    page.section("Run it yourself", f"The runs of this page are in {results.central.path.parent}; the last two commands read them again.")
    page.code(
        "fedlens run experiment=fedavg_noniid data.classes_per_client=2 seed=1\n"
        "fedlens resume runs/…                                     # resume an interrupted run, bit for bit\n"
        "fedlens run -m seed=0,1,2                                 # a sweep\n"
        "fedlens run experiment=fedavg_noniid_sparse sparsity=0.9  # head, mask, then training that moves a tenth\n"
        "fedlens run experiment=fedavg_noniid_sparse mask.strategy=random optim.lr=0.1\n"
        f"fedlens arith sweep {sweep}\n"
        f"fedlens arith interference {one} {two}"
    )


SECTIONS: tuple[Callable[[DemoPage, DemoResults], None], ...] = (partitions, baseline, drift, masks, arithmetic, interference, commands)
