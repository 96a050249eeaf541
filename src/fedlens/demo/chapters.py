"""The chapters of `fedlens demo`: figures, tables and the prose between them.

A sentence that could come out otherwise on another machine or seed is made from the numbers; none claims what the run did not show.
"""

from collections.abc import Mapping
from math import sqrt
from typing import Any

from fedlens.data.partition import label_counts, partition, partition_stats
from fedlens.demo.page import Page
from fedlens.demo.story import Story, by_round, last, listed, mean, megabytes, spoken, standard_error, standing
from fedlens.study.edit_figures import xi_figure
from fedlens.study.figures import curves_figure, mask_figure, partition_figure
from fedlens.training.run import Run

Rows = list[list[object]]


def partitions(page: Page, story: Story) -> None:
    labels, clients, seed = story.data.train.labels, story.clients, story.seed
    plans = {
        "IID": partition(labels, clients, "iid", seed=seed),
        "2 classes a client": partition(labels, clients, "classes", classes_per_client=2, seed=seed),
        "1 class a client": partition(labels, clients, "classes", classes_per_client=1, seed=seed),
        "Dirichlet, α = 1": partition(labels, clients, "dirichlet", alpha=1.0, seed=seed),
    }
    page.section(
        "1. Data that lives apart",
        f"{len(labels):,} training images are split over {clients} clients, every image on exactly one. With IID shards all clients see the "
        "same mixture; with few classes a client their gradients point in different directions, and averaging what they learn can cost accuracy.",
    )
    page.figure(
        partition_figure({name: label_counts(labels, shards) for name, shards in plans.items()}), "Samples of each class on each client."
    )
    rows: Rows = []
    for name, shards in plans.items():
        s = partition_stats(labels, shards)
        rows.append([name, f"{s.size_min} to {s.size_max}", f"{s.classes_min} to {s.classes_max}", s.label_entropy, s.tv_distance])
    page.table(
        ["partition (n = 1)", "samples a client", "classes a client", "label entropy (nats)", "distance to the global label law"], rows
    )


def baseline(page: Page, story: Story) -> None:
    summary, metrics, ridge = story.central.summary, story.central.metrics, story.ridge
    tuned = 100 * summary["test_accuracy"]
    page.section(
        "2. The centralised baseline",
        "A closed-form (ridge) head on the pretrained features needs no gradient step at all. Fine-tuning the whole network on all data in "
        "one place then gives what a federation is measured against. The epoch is chosen on validation; the test set is read once.",
        f"Here fine-tuning ends {standing(tuned, 100 * ridge['test_accuracy'])} the head alone on the test set. The head is kept for all that "
        "follows: the sums that it is made of add over clients, so that a federation computes the very same head, whatever the split, from "
        "one message a client. Every run below starts with it, at one point θ₀.",
    )
    curve = {"fine-tuned": [(m["epoch"], 100 * m["val_accuracy"]) for m in metrics]}
    page.figure(
        curves_figure(curve, "epoch", "validation accuracy (%)", {"ridge head only": 100 * ridge["val_accuracy"]}),
        "Validation accuracy by epoch.",
    )
    rows: Rows = [
        ["ridge head only", 100 * ridge["val_accuracy"], 100 * ridge["test_accuracy"], ""],
        [f"fine-tuned, {summary['epochs']} epochs", 100 * summary["val_accuracy"], tuned, f"{summary['seconds']:.0f}"],
    ]
    page.table(["n = 1", "validation accuracy (%)", "test accuracy (%)", "seconds"], rows)


def drift(page: Page, story: Story) -> None:
    runs, ridge, count = story.dense, story.ridge, story.clients
    page.section(
        "3. FedAvg, and what client drift is",
        f"Each round the {count} clients take the global model, make 4 steps of SGD on their own images and send back what changed: a task "
        "vector Δ. The server adds the mean of the Δ to the model. Clients that hold the same mixture agree a little in every round, and the "
        "mean keeps what they agree on. When each holds one class or two, each pulls the model towards its own classes and away from "
        "all others. Together they pull in all directions: most of what they learn cancels in the mean, and what is left of a round is "
        "little. That is client drift: interference between task vectors.",
    )
    levels = {"centralised": 100 * story.central.summary["val_accuracy"], "ridge head only": 100 * ridge["val_accuracy"]}
    page.figure(
        curves_figure(by_round(runs, "val_accuracy", 100), "round", "validation accuracy (%)", levels),
        "FedAvg by round on three splits, against no rounds at all and all data in one place. The split is all that differs. The loss is the "
        "steadier witness: an accuracy moves in steps of one image.",
        curves_figure(by_round(runs, "val_loss"), "round", "validation loss", {"ridge head only": ridge["val_loss"]}),
    )
    order = sorted(runs, key=lambda split: last(runs[split], "val_loss"))
    page.text(
        f"After {story.rounds} rounds validation stands at "
        + listed([f"{100 * last(found, 'val_accuracy'):.1f} % ({split})" for split, found in runs.items()])
        + f"; the head alone has {100 * ridge['val_accuracy']:.1f} %. By validation loss the order is {', '.join(order)}, from best to worst. "
        + (
            "By that measure a round is worth less, the fewer classes a client holds."
            if order == list(runs)
            else "That is not the order of the splits from even to uneven: in so few rounds one seed does not settle it."
        )
    )
    page.figure(
        curves_figure(
            by_round(runs, "cosine"),
            "round",
            "mean cosine between clients' Δ",
            {"unrelated directions": 0.0, "all cancel": -1 / (count - 1)},
        ),
        "How far clients agree: the mean cosine between the updates of a round (left), and what is left of the updates when they are "
        f"averaged (right): 1 if all agree, 0 if they cancel, 1/√{count} if they are unrelated.",
        curves_figure(by_round(runs, "drift_ratio"), "round", "‖mean Δ‖ / mean ‖Δ‖", {"unrelated directions": 1 / sqrt(count)}),
    )
    left = {split: mean(found, "drift_ratio") for split, found in runs.items()}
    page.text(
        "Over all rounds the mean keeps "
        + listed([f"{100 * share:.0f} % ({split})" for split, share in left.items()])
        + f" of an update's length; of unrelated directions it would keep {100 / sqrt(count):.0f} %. A federation that draws only some of many clients shows less of this: those "
        "drawn do not make up all classes, so that their updates look unrelated rather than opposed, and each round pulls towards the classes that it drew."
    )
    rows: Rows = [["ridge head only", 100 * ridge["test_accuracy"], f"{ridge['test_loss']:.3f}", "", ""]]
    s = story.central.summary
    rows.append(["centralised", 100 * s["test_accuracy"], f"{s['test_loss']:.3f}", "", f"{s['seconds']:.0f}"])
    for name, found in runs.items():
        s = found.summary
        row = [f"FedAvg, {name}", 100 * s["test_accuracy"], f"{s['test_loss']:.3f}", megabytes(s["bytes_up"]), f"{s['seconds']:.0f}"]
        rows.append(row)
    page.table(["n = 1", "test accuracy (%)", "test loss", "sent by clients", "seconds"], rows)
    error = standard_error(100 * ridge["test_accuracy"], len(story.data.test))
    page.text(
        f"Mind the noise, here and below: one standard error of an accuracy on {len(story.data.test):,} test images is {error:.1f} points, and each "
        "row is one run with one seed. What lies closer together than that is not told apart."
    )


def masks(page: Page, story: Story) -> None:
    runs, dense, ridge = story.sparse, story.dense[story.studied].summary, story.ridge
    found = {rule: run.mask for rule, run in runs.items()}
    drawn = {spoken(rule): mask for rule, mask in found.items() if mask is not None}
    first = next(iter(drawn.values()))
    page.section(
        "4. Moving a tenth of the weights",
        f"A mask names, before training, the weights that may move: here {first.active:,} of {first.eligible_count:,}, a density of "
        f"{first.density:.2g}. All others keep their bits to the end, and only what moves travels. Which tenth? The sensitivity of a weight "
        "is how much the output changes when it does (the diagonal of the Fisher information), measured on 150 validation images. "
        "Least sensitive is the rule of TaLoS: it scores, drops what is too sensitive, scores what is left again, four times. Most "
        "sensitive is its opposite; lowest and highest magnitude look at the size of a weight, and random at nothing. Qk only, a control, "
        "picks at random among the queries and keys of attention.",
    )
    page.figure(
        mask_figure(drawn), "Where the masks lie: density layer by layer, and what kinds of weight each is made of (numbers: percent)."
    )
    tables = {name: mask.composition() for name, mask in drawn.items()}
    most = {name: max(table, key=lambda kind, table=table: table[kind]["share"]) for name, table in tables.items()}  # type: ignore[misc]
    followed, attention = spoken(story.followed), [tables[spoken(story.followed)][kind] for kind in ("query", "key")]
    slow, fast = min(story.rates.values()), max(story.rates.values())
    page.text(
        "What each is made of most: "
        + listed([f"{name} of {kind} ({100 * tables[name][kind]['share']:.0f} %)" for name, kind in most.items()])
        + ". Queries and keys decide where attention looks, not what it says: they are "
        f"{100 * sum(row['eligible'] for row in attention) / first.eligible_count:.0f} % of all weights that may move and "
        f"{100 * sum(row['share'] for row in attention):.0f} % of the {followed} mask.",
        f"Weights differ in the step that they take: the rate that suits {listed([spoken(r) for r, x in story.rates.items() if x == fast])} is "
        f"{fast / slow:.0f} times that of {listed([spoken(r) for r, x in story.rates.items() if x == slow])}. Each rule has its own here: the "
        "best by validation loss of rates a factor of three apart, found beforehand on this split with seed 0, in as many rounds, and where no rate "
        "gains on the head, the largest that ends near it. A rule that is handed another's rate looks worse than it is.",
    )
    ratio = dense["bytes_up"] / next(iter(runs.values())).summary["bytes_up"]
    page.figure(
        curves_figure(by_round(runs, "val_loss"), "round", "validation loss", {"ridge head only": ridge["val_loss"]}),
        f"Validation loss by round, {story.studied}.",
    )
    rows: Rows = [
        ["ridge head only", "", *accuracies(ridge), f"{ridge['test_loss']:.3f}", "", ""],
        ["dense", f"{story.dense_rate:g}", *accuracies(dense), f"{dense['test_loss']:.3f}", megabytes(dense["bytes_up"]), "1.00"],
    ]
    for rule, run in runs.items():
        s = run.summary
        share = f"{s['bytes_up'] / dense['bytes_up']:.2f}"
        rows.append([spoken(rule), f"{story.rates[rule]:g}", *accuracies(s), f"{s['test_loss']:.3f}", megabytes(s["bytes_up"]), share])
    page.table(
        ["n = 1", "rate", "validation (%)", "test (%)", "test loss", "sent by clients", "of dense"],
        rows,
    )
    calmest = min(runs, key=lambda rule: runs[rule].summary["test_loss"])
    highest = max(runs, key=lambda rule: runs[rule].summary["test_accuracy"])
    better = [rule for rule, run in runs.items() if run.summary["test_loss"] < dense["test_loss"]]
    page.text(
        f"Clients send {ratio:.3g} times less than in dense training; the server sends each of them the mask once, one bit a weight. "
        f"On the test set {spoken(calmest)} has the lowest loss of the rules and {spoken(highest)} the highest accuracy; "
        + (f"{listed([spoken(r) for r in better])} " if better else "no rule ")
        + f"{'have' if len(better) > 1 else 'has'} a lower loss than dense training.",
    )


def accuracies(found: Mapping[str, float]) -> tuple[float, float]:
    return 100 * found["val_accuracy"], 100 * found["test_accuracy"]


def arithmetic(page: Page, story: Story) -> None:
    page.section(
        "5. Task arithmetic: what was learned, as a vector",
        "τ = θ − θ₀ is what a run learned, and a vector can be scaled: θ₀ + ατ is the head alone at α = 0 and the trained model at α = 1. "
        "Beyond 1 it goes on in the same direction, below 0 it goes back, away from what was learned. The server of FedAvg does the same in "
        "every round: its learning rate is an α. Choosing α costs no training, only a look at the validation set.",
    )
    sweeps = {spoken(name): found for name, found in story.sweeps.items()}
    curves = {name: [(p["alpha"], 100 * p["val_accuracy"]) for p in found["points"]] for name, found in sweeps.items()}
    losses = {name: [(p["alpha"], p["val_loss"]) for p in found["points"]] for name, found in sweeps.items()}
    chosen = {name: found["chosen"]["alpha"] for name, found in sweeps.items()}
    page.figure(
        curves_figure(curves, "α", "validation accuracy (%)", {"α = 0: ridge head only": 100 * story.ridge["val_accuracy"]}, chosen),
        f"θ₀ + ατ on validation, τ of dense and of {spoken(story.followed)} training, {story.studied}. Rings: the α that accuracy chooses.",
        curves_figure(losses, "α", "validation loss", {"α = 0: ridge head only": story.ridge["val_loss"]}),
    )
    rows: Rows = [["ridge head only", "0", *accuracies(story.ridge), f"{story.ridge['test_loss']:.3f}"]]
    said = []
    for name, found in sweeps.items():
        best, end = found["chosen"], found["end"]
        for label, point in ((f"{name}, as trained", end), (f"{name}, chosen on validation", best)):
            rows.append([label, f"{point['alpha']:g}", *accuracies(point), f"{point['test_loss']:.3f}"])
        alpha = best["alpha"]
        verdict = "stopped short" if alpha > 1 else "went too far" if alpha < 1 else "ended where they should"
        test = standing(100 * best["test_accuracy"], 100 * end["test_accuracy"])
        said.append(
            f"For {name} training validation chooses α = {alpha:g}, as if to say that the rounds {verdict}"
            + ("." if alpha == 1 else f"; on the test set that point is {test} α = 1.")
        )
    page.table(["n = 1", "α", "validation (%)", "test (%)", "test loss"], rows)
    dense, sparse = story.sweeps["dense"], story.sweeps[story.followed]
    page.text(
        " ".join(said) + " A point chosen on validation tends to look better there than it is; the test columns are the honest ones.",
        f"The dense τ has length {dense['norm']:.3g} and moves {100 * dense['density']:.0f} % of the weights; that of {spoken(story.followed)} "
        f"has length {sparse['norm']:.3g} with {100 * sparse['density']:.0f} %. The network is flat in some directions and steep in others: "
        "how long a vector is does not say how much it does.",
    )


def interference(page: Page, story: Story) -> None:
    pair, rule, count = story.pair, story.followed, story.clients
    unrelated = (1 - 1 / sqrt(count)) / 2  # of independent normal updates
    conflict = {name: mean(found, "sign_conflict") for name, found in pair.items()}
    cosine = {name: mean(found, "cosine") for name, found in pair.items()}
    page.section(
        "6. Interference",
        "Two updates interfere where one wants a weight up and the other down. The sign conflict is the share of all movement that pulls "
        f"against the majority, weight by weight: 0 if all pull together, about {unrelated:.2f} for {count} updates that have nothing to do with "
        "one another. Moving only the least sensitive weights was proposed to keep tasks from interfering. Does it do so for clients?",
    )
    page.figure(
        curves_figure(by_round(pair, "sign_conflict"), "round", "sign conflict", {"unrelated updates": unrelated}),
        f"Within a round: sign conflict (left) and mean cosine (right) of the clients' updates, {story.studied}.",
        curves_figure(by_round(pair, "cosine"), "round", "mean cosine between clients' Δ", {"unrelated updates": 0.0}),
    )
    calmer = fewer_conflicts(pair[rule], pair["dense"])
    page.text(
        f"Averaged over the rounds the sign conflict is {conflict['dense']:.3f} dense and {conflict[rule]:.3f} {spoken(rule)}, the cosine "
        f"{cosine['dense']:+.3f} and {cosine[rule]:+.3f}. Under the mask clients conflict less in {calmer[0]} of {calmer[1]} rounds. What it "
        "changes for certain is which weights they can disagree about.",
        "What counts in the end is whether predictions interfere. Take two federations of one class a client, from the same θ₀: one knows only "
        f"{listed(story.groups[0])}, the other only {listed(story.groups[1])}. Add their task vectors: θ₀ + α₁τ₁ + α₂τ₂. "
        "The disentanglement error ξ is how often adding the other's vector changes what a federation's own model says about its own "
        "classes: 0 % if the two live side by side.",
    )
    maps = {name: story.maps[name] for name in pair}
    figures = [xi_figure(found["xi"], found["alphas"], ("τ₁", "τ₂")) for found in maps.values()]
    page.figure(figures[0], f"ξ(α₁, α₂) in percent: dense (left) and {spoken(rule)} (right).", *figures[1:])
    average = {name: average_xi(found) for name, found in maps.items()}
    sums = {name: [100 * value for value in values.values()] for name, values in story.sums.items()}
    rows: Rows = [
        ["cosine of τ₁ and τ₂", *(f"{found['pairs'][0]['cosine']:+.3f}" for found in maps.values())],
        ["sign conflict of τ₁ and τ₂", *(f"{found['pairs'][0]['sign_conflict']:.3f}" for found in maps.values())],
        ["mean ξ over the map, both α ≠ 0 (%)", *(average[name] for name in maps)],
        ["ξ(1, 1) (%)", *(100 * found["xi"][at][at] for found in maps.values() for at in [found["alphas"].index(1.0)])],
        *([f"validation accuracy, {point} (%)", *(sums[name][i] for name in maps)] for i, point in enumerate(story.sums[rule])),
    ]
    page.table(["n = 1", *(spoken(name) for name in maps)], rows)
    samples = sum(maps[rule]["samples"])
    alone, both = [sums["dense"][1], sums["dense"][2]], [sums["dense"][3], sums[rule][3]]
    balanced = all(at[3] > (at[1] + at[2]) / 2 for at in sums.values())
    page.text(
        f"Over the map ξ is {average['dense']:.0f} % on average for dense training and {average[rule]:.0f} % for {spoken(rule)}: "
        + (
            f"no difference to speak of, with one seed and {samples} images."
            if abs(average["dense"] - average[rule]) < 3
            else f"the {'masked' if average[rule] < average['dense'] else 'dense'} vectors disentangle better here (one seed, {samples} images)."
        ),
        f"On all {story.data.num_classes} classes a half alone has {alone[0]:.0f} % and {alone[1]:.0f} % (dense)"
        + (", less than θ₀: what it learned cost it the other's classes. " if max(alone) < sums["dense"][0] else ". ")
        + f"Added up, the two have {both[0]:.0f} % dense and {both[1]:.0f} % {spoken(rule)}"
        + (": more than their halves have on average, for the pulls balance in part. " if balanced else ". ")
        + "Averaging the clients of a round is that same sum, a small step at a time.",
    )


def fewer_conflicts(ours: Run, theirs: Run) -> tuple[int, int]:
    """In how many rounds our clients' signs conflict less, and of how many."""
    one, other = ({m["round"]: m["sign_conflict"] for m in found.metrics if "sign_conflict" in m} for found in (ours, theirs))
    shared = one.keys() & other.keys()
    return sum(one[r] < other[r] for r in shared), len(shared)


def average_xi(found: Mapping[str, Any]) -> float:
    """In percent, over the points where both vectors are there."""
    kept = [i for i, alpha in enumerate(found["alphas"]) if alpha != 0]
    return float(sum(100 * found["xi"][i][j] for i in kept for j in kept)) / len(kept) ** 2


def yourself(page: Page, story: Story) -> None:
    sweep, (one, two) = story.pair["dense"].path, story.maps[story.followed]["names"]
    page.section("Run it yourself", f"The runs of this page are in {story.central.path.parent}; the last two commands read them again.")
    page.code(
        "fedlens run experiment=fedavg_noniid data.classes_per_client=2 seed=1\n"
        "fedlens resume runs/…                                     # after an interruption, to the same bits\n"
        "fedlens run -m seed=0,1,2                                 # a sweep\n"
        "fedlens run experiment=fedavg_noniid_sparse sparsity=0.9  # head, mask, then training that moves a tenth\n"
        "fedlens run experiment=fedavg_noniid_sparse mask.strategy=random optim.lr=0.1\n"
        f"fedlens arith sweep {sweep}\n"
        f"fedlens arith interference {one} {two}"
    )
