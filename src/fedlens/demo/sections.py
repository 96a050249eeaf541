"""The page of `fedlens demo` as blocks: the thesis with its figure, then chapters of one question, one answer and one figure each.

Sentences that could differ on another machine or with another seed are computed from the numbers.
"""

from collections.abc import Callable
from itertools import pairwise
from math import sqrt
from os.path import relpath
from shlex import quote

from fedlens.data.partition import label_counts, partition
from fedlens.demo.results import CLASSES, DENSE, MASKED, MASKED_MERGED, MERGED, MIXED, DemoResults, Thesis, difference
from fedlens.report import charts
from fedlens.report.blocks import Block, Code, Details, Entry, Heading, Table, Text, number, size, slug, stat
from fedlens.report.vega import PERCENT, Series, Style, line_chart, slider_chart
from fedlens.runs.store import read_mask
from fedlens.study.statistics import Comparison, summarise

TUNED = (
    "The learning rates were tuned beforehand, on validation images of a seed that this page does not use (10) and with a rate that falls to zero, from values "
    "a factor of 3 apart. Here the rate is constant. A falling rate is another remedy and ended higher on seeds 0 to 2: see "
    "benchmarks/records/2026-11-19-demo.json. The test set chose nothing."
)


def lead(results: DemoResults) -> tuple[str, list[Block]]:
    """Return the page's first sentence and the rest of its first screen."""
    accuracies, seeds = results.accuracies, results.seeds
    thesis, heads = Thesis.of(accuracies), [100 * run.summary["test_accuracy"] for run in results.heads.values()]
    setting = (
        f"Ten clients share {len(results.data.train):,} images of clothes, of ten classes, and train one pretrained network in rounds of three clients. It starts "
        f"with a head fitted to three labelled images per class: {sum(heads) / len(heads):.0f} % on the test set. If every client has a mixture of the "
        "classes, averaging their changes works. If every client has a single class, a round pulls the network towards its three classes and away from the "
        "other seven. The average over clients does not cancel that, because the other clients are not in the round. The mean over rounds can."
    )
    above = sum(accuracies[MERGED][seed] > head for seed, head in zip(seeds, heads, strict=True))
    test = (
        f"It holds for {len(thesis.seeds)} of {len(seeds)} seeds. Test accuracy over the second half of the rounds: one class per client costs "
        f"{_interval(thesis.mean_cost)} points, and the mean of the rounds gives back {_interval(thesis.mean_back)} (mean of the seeds and its 95 % t interval). "
        f"It does not repair everything: the mean of the rounds is above the start for {above} of {len(seeds)} seeds. One standard error of an accuracy is "
        f"{standard_error(results):.1f} points on {len(results.data.test):,} images."
    )
    lines = [Series(name, results.curves[name][seed], panel=f"seed {seed}") for seed in seeds for name in (MIXED, MERGED, DENSE)]
    caption = "Test accuracy by round, one panel per seed. Mean of the rounds: the mean of the models of the dotted line, up to that round."
    heading = "What one class per client costs, and what the mean of the rounds gives back"
    hero = line_chart("hero", heading, caption, lines, "round", "test accuracy (%)", Style(bounds=PERCENT))
    return thesis.sentence, [hero, Text(setting), Text(test), Text(TUNED, soft=True)]


def _interval(d: Comparison) -> str:
    return f"{d.difference:.1f}" + ("" if d.low is None or d.high is None else f" [{d.low:.1f}, {d.high:.1f}]")


def standard_error(results: DemoResults) -> float:
    """Return the standard error of the dense federation's test accuracy, in percentage points."""
    accuracy = results.accuracies[DENSE][results.seeds[0]]
    return sqrt(accuracy * (100 - accuracy) / len(results.data.test))


def clients(results: DemoResults) -> list[Block]:
    labels, seed, count = results.data.train.labels, results.seeds[0], results.first(DENSE).config["federated"]["clients"]
    schemes = {"mixed data": partition(labels, count, "iid", seed=seed)}
    schemes["one class per client"] = partition(labels, count, "classes", classes_per_client=1, seed=seed)
    chart = charts.partition_chart({name: label_counts(labels, shards) for name, shards in schemes.items()}, "partitions")
    text = (
        f"Either all {count} clients have the same mixture of the classes, or each has one class. Every image is on exactly one client and stays there: "
        "clients send only their changes of the network."
    )
    return [*_opening("What do the clients have?", text), chart]


def drift(results: DemoResults) -> list[Block]:
    kept, agree = ({c.label: s.mean for c in results.table.cells if (s := c.over_rounds(key))} for key in ("drift_ratio", "cosine"))
    falls = {name: max(a - b for points in results.curves[name].values() for (_, a), (_, b) in pairwise(points)) for name in (MIXED, DENSE)}
    text = (
        f"Clients with mixed data agree in part: the mean cosine between the updates of a round is {agree[MIXED]:+.2f}, and their average keeps "
        f"{100 * kept[MIXED]:.0f} % of an update's length. With one class per client the cosine is {agree[DENSE]:+.2f} and {100 * kept[DENSE]:.0f} % remain. What "
        "remains belongs to the classes of the round, at the cost of the others. Between two evaluations the test accuracy falls by up to "
        f"{falls[DENSE]:.0f} points, with mixed data by up to {falls[MIXED]:.0f}. That is client drift."
    )
    geometry = charts.drift(results.table, "geometry")
    rows = [
        [Entry(c.label), *(stat(c.over_rounds(key), 1) for key in ("cosine", "drift_ratio", "sign_conflict"))] for c in results.table.cells
    ]
    caption = (
        "Agreement of the clients' updates: mean over the rounds, then mean ± standard deviation over seeds, below it the 95 % t interval."
    )
    numbers = Table("agreement", caption, ["", "cosine", "‖mean Δ‖ / mean ‖Δ‖", "sign conflict"], rows)
    return [
        *_opening("Why does averaging over clients fail?", text),
        *([geometry] if geometry else []),
        Details("All numbers of the agreement", [numbers]),
    ]


def masks(results: DemoResults) -> list[Block]:
    run = results.first(MASKED)
    facts, saving = run.mask or {}, results.first(DENSE).summary["bytes_up"] / run.summary["bytes_up"]
    latest, merged = (difference(results.accuracies, of, to) for of, to in ((MASKED, DENSE), (MASKED_MERGED, MERGED)))
    text = (
        f"A mask names the weights that may move, here {facts['active']:,} of {facts['eligible']:,}: those that change the output the least (TaLoS). Clients send "
        f"{saving:.3g} times fewer bytes. Compared with moving all weights, the model of a round is {_compared(latest)}, the mean of the rounds "
        f"{_compared(merged)}."
    )
    mask = read_mask(run.path)
    chart = [charts.mask_chart({"least sensitive tenth": mask}, "places")] if mask else []
    return [*_opening("Is a tenth of the weights enough?", text), *chart, Details("All numbers of the comparison", [_scores(results)])]


def _compared(difference: Comparison) -> str:
    """Return a difference in points with its interval, and whether it is beyond noise."""
    d = difference
    if d.low is None or d.high is None:
        return f"{d.difference:+.1f} points away (one seed)"
    verdict = "better" if d.low > 0 else "worse" if d.high < 0 else "not significantly different"
    return f"{verdict} ({_interval(d)} points, n = {d.n})"


def _scores(results: DemoResults) -> Table:
    rows = []
    for name, by_seed in results.accuracies.items():
        run = results.first({MERGED: DENSE, MASKED_MERGED: MASKED}.get(name, name))
        sent, rate = run.summary["bytes_up"], run.config["optim"]["lr"]
        rows.append([Entry(name), stat(summarise(by_seed), 1), number("{:g}", rate), Entry(size(sent), "", sent)])
    caption = (
        "Test accuracy, averaged over the second half of the rounds: mean ± standard deviation over seeds, below it the 95 % t interval."
    )
    return Table("compared", caption, ["", "test accuracy (%)", "learning rate (tuned)", "sent by clients"], rows)


def arithmetic(results: DemoResults) -> list[Block]:
    tested, alpha = results.tested, max(results.along, key=lambda a: results.along[a]["all"])
    verdict = (
        "Validation chooses α = 1."
        if alpha == 1
        else f"Validation chooses α = {alpha:g}: the mean of the rounds {'stopped short' if alpha > 1 else 'went too far'}. On the test set that point has "
        f"{tested[alpha]:.1f} %, α = 1 has {tested[1.0]:.1f} %."
    )
    text = (
        "What was learned is a vector, τ = θ − θ₀. The mean of the rounds is the mean of such vectors, and a vector can be scaled. Move the slider: α = 0 is the "
        f"start, α = 1 the mean of the rounds, α > 1 goes further the same way, α < 0 the opposite way. {verdict}"
    )
    caption = f"Validation accuracy by class at θ₀ + ατ, one class per client, seed {results.seeds[0]} (n = 1)."
    return [
        *_opening("How far does a task vector carry?", text),
        slider_chart("along", "Along the task vector", caption, results.along, ("α", 1.0), "validation accuracy (%)"),
        Details("All numbers of the line", [_points("line", caption, results.along)]),
    ]


def forgetting(results: DemoResults) -> list[Block]:
    gone, points = results.forgotten, results.without
    others = {alpha: sum(v for name, v in at.items() if name not in ("all", gone)) / (len(at) - 2) for alpha, at in points.items()}
    before = points[0.0][gone]
    after = min((alpha for alpha in points if others[alpha] >= 0.9 * others[0.0]), key=lambda alpha: points[alpha][gone])
    verdict = (
        f"At α = {after:g} the accuracy on its class, {gone}, is {points[after][gone]:.0f} % (before: {before:.0f} %), that on the others {others[after]:.0f} % "
        f"(before: {others[0.0]:.0f} %)."
        if points[after][gone] < before
        else f"Here it does not work: no α of the slider lowers the accuracy on its class, {gone}, while the others keep nine tenths of theirs."
    )
    text = f"The server adds changes, so it can subtract them: θ − ατₖ removes what client k has added. {verdict} One seed; α is read from the same images."
    caption = f"Validation accuracy by class after subtracting the client of {gone} α times; a tenth of the weights moved, seed {results.seeds[0]} (n = 1)."
    return [
        *_opening("Can a client be forgotten?", text),
        slider_chart("without", "Without one client", caption, points, ("α", after), "validation accuracy (%)"),
        Details("All numbers of the subtraction", [_points("subtraction", caption, points)]),
    ]


def _points(key: str, caption: str, points: CLASSES) -> Table:
    names = list(next(iter(points.values())))
    return Table(
        key, caption, ["α", *names], [[f"{alpha:g}", *(number("{:.0f}", at[name]) for name in names)] for alpha, at in points.items()]
    )


def commands(results: DemoResults) -> list[Block]:
    masked = quote(relpath(results.first(MASKED).path))
    remark = f"The runs of this page are in {relpath(results.first(MASKED).path.parent)}; the last two commands read them again."
    lines = (
        "fedlens run experiment=fedavg_noniid data.classes_per_client=2 seed=1\n"
        "fedlens resume runs/…  # resume an interrupted run, bit for bit\n"
        "fedlens run -m seed=0,1,2  # a sweep\n"
        "fedlens run experiment=fedavg_noniid_sparse sparsity=0.9  # head, mask, then training that moves a tenth\n"
        "fedlens run experiment=fedavg_noniid_sparse mask.strategy=random optim.lr=0.1\n"
        f"fedlens arith sweep {masked}\n"
        f"fedlens arith forget {masked} --client {results.client}"
    )
    return [*_opening("Run it yourself", remark), Code(lines)]


def _opening(question: str, answer: str) -> list[Block]:
    return [Heading(question, slug(question)), Text(answer)]


CHAPTERS: tuple[Callable[[DemoResults], list[Block]], ...] = (clients, drift, masks, arithmetic, forgetting, commands)
