"""`fedlens data prepare` and `inspect`."""

from collections.abc import Sequence
from pathlib import Path

from fedlens.cli.table import print_table
from fedlens.data.dataset import load_dataset
from fedlens.data.partition import label_counts, partition, partition_stats
from fedlens.errors import UserError, first_line
from fedlens.overrides import compose
from fedlens.report.charts import SHOWN_CLIENTS, partition_chart
from fedlens.report.vega import save


def prepare(name: str, root: str | None) -> int:
    """Download a data set, or check an existing one."""
    data = load_dataset(name, root, download=True)
    print(f"{data.name}: {len(data.train) + len(data.val):,} training and {len(data.test):,} test images, {data.num_classes} classes")
    return 0


def inspect(overrides: Sequence[str], out: str) -> int:
    """Show statistics and a figure of a partition."""
    config = compose(overrides)
    c = config.data
    data = load_dataset(c.name, c.root, val_fraction=c.val_fraction, seed=config.seed, download=c.download)
    labels = data.train.labels
    shards = partition(
        labels, config.federated.clients, c.partition, classes_per_client=c.classes_per_client, alpha=c.alpha, seed=config.seed
    )
    file = Path(out if Path(out).suffix else f"{out}.png")
    try:
        save(partition_chart({c.partition: label_counts(labels, shards)}, "partition"), file.with_suffix(""), [file.suffix[1:]])
    except (UserError, OSError, ValueError) as error:
        raise UserError(f"--out: {first_line(error)}") from None
    stats = partition_stats(labels, shards).as_dict().items()
    title = f"{data.name}: {len(data.train):,} train, {len(data.val):,} validation, {len(data.test):,} test"
    print_table(["", "value"], [[name, f"{v:.4g}" if isinstance(v, float) else f"{v:,}"] for name, v in stats], title)
    print(f"figure: {file}" + (f" (the first {SHOWN_CLIENTS} of {len(shards)} clients)" if len(shards) > SHOWN_CLIENTS else ""))
    return 0
