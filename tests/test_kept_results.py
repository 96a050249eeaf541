"""The published results under results/: every version must know their runs by name and read the same numbers from them."""

import csv
import hashlib
import json
import re
from pathlib import Path

from fedlens.config import Config
from fedlens.overrides import from_file
from fedlens.report.markdown import csv_rows
from fedlens.runs.identity import identity
from fedlens.runs.store import read_environment
from fedlens.study.results import gather

RESULTS = Path(__file__).parents[1] / "results"
RUNS = 668
ROWS = 413  # of results.csv, which leaves out the short runs of tuning
DIGEST = "8daf732e406a10052c63a47850edde727da6a4eb63741a074649f8266c101f1b"


def test_every_published_run_is_named_by_the_hash_of_its_configuration() -> None:
    folders = sorted(file.parent for file in RESULTS.glob("*/runs/*/config.yaml"))
    read: dict[str, Config] = {}  # most runs differ from another only in seed and learning rate: read one of them, which is slow
    names = {}
    for folder in folders:
        file = folder / "config.yaml"
        common, seed, lr = split(file.read_text())
        if common not in read:
            read[common] = from_file(file)
        config = read[common]
        config.seed, config.optim.lr = seed, lr
        names[folder.name] = f"{config.experiment}-{identity(config, read_environment(folder).get('weights'))}"
    assert len(folders) == RUNS
    assert not {name: now for name, now in names.items() if name != now}


def split(text: str) -> tuple[str, int, float]:
    """Return a config.yaml without its folder, seed and learning rate; the seed; the learning rate."""
    (seed,), (lr,) = re.findall(r"^seed: (\d+)$", text, re.MULTILINE), re.findall(r"^optim:\n  lr: (\S+)$", text, re.MULTILINE)
    return re.sub(r"^seed: .*|(?<=^optim:\n)  lr: .*|^  dir: .*", "", text, flags=re.MULTILINE), int(seed), float(lr)


def test_the_numbers_of_the_published_results_are_the_same_as_ever() -> None:
    header, *rows = csv.reader(csv_rows(gather([RESULTS])).splitlines())
    table = sorted([(column, plain(value)) for column, value in zip(header, row, strict=True) if value] for row in rows)
    assert len(rows) == ROWS
    assert hashlib.sha256(json.dumps(table).encode()).hexdigest() == DIGEST


def plain(text: str) -> str | float:
    """Return a number rounded to 10 digits, or text as it is."""
    try:
        return float(f"{float(text):.10g}")
    except ValueError:
        return text
