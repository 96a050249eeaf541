"""`fedlens run`, `resume`, `check`, `explain` and `demo`."""

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedlens.config import Config, keys, known_keys
from fedlens.errors import UserError, first_line, unknown
from fedlens.overrides import DICTS, GROUPS, choices, compose, from_file, normalise, to_yaml
from fedlens.registry import registry
from fedlens.runs import digests
from fedlens.runs.session import describe_test
from fedlens.runs.store import problems, runs_below
from fedlens.study.results import STUDY_FILE, read_study
from fedlens.training.run import execute, load_run


def run(overrides: Sequence[str], multirun: bool, config: str | None, print_config: bool) -> int:
    """Run one experiment, or a sweep."""
    for option, value in (("--config", config), ("--print-config", print_config)):
        if multirun and value:
            raise UserError(f"{option} cannot be combined with -m: a sweep is composed from key=value alone.")
    if multirun:
        return sweep(overrides)
    composed = from_file(Path(config), overrides) if config else compose(overrides)
    if config and not any(o.startswith("run.dir=") for o in overrides):
        composed.run.dir = None  # a configuration from another run's folder makes a new run
    if print_config:
        print(to_yaml(composed), end="")
        return 0
    print(execute(composed).path)
    return 0


def sweep(overrides: Sequence[str]) -> int:
    """Run a sweep through Hydra itself, so that its launchers (joblib, submitit) work: hydra/launcher=joblib."""
    wanted = normalise(overrides)
    check_types(wanted)
    wanted = [f"++{text}" if text.startswith(DICTS) else text for text in wanted]  # Hydra adds options that the schema does not list
    folder = next((o.partition("=")[2] for o in wanted if o.startswith("hydra.sweep.dir=")), time.strftime("runs/sweep-%Y%m%d-%H%M%S"))
    failed = Path(folder).absolute() / "failed.txt"  # a file: a launcher's jobs are separate processes, maybe on other machines
    failed.unlink(missing_ok=True)

    @hydra.main(config_path="pkg://fedlens.conf", config_name="config", version_base="1.3")
    def job(_: DictConfig) -> None:
        try:
            print(execute(compose([text.removeprefix("++") for text in HydraConfig.get().overrides.task])).path)
        except UserError as error:
            with failed.open("a") as file:
                file.write(f"{error}\n")
            print(f"error: {error}", file=sys.stderr)

    sys.argv = ["fedlens run", "-m", *(o for o in wanted if not o.startswith("hydra.sweep.dir=")), f"hydra.sweep.dir={folder}"]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # otherwise Hydra prints errors in its own way and exits
    try:
        job()
    except HydraException as error:
        because = f" ({first_line(error.__cause__)})" if error.__cause__ else ""
        raise UserError(f"override: {first_line(error)}{because}") from None
    return 2 if failed.exists() else 0


def check_types(overrides: Sequence[str]) -> None:
    """Check the type of every value of a sweep before its folder exists; ranges are checked by each run."""
    schema = OmegaConf.structured(Config)
    for key, value in _values(overrides):
        if key in GROUPS and value not in choices(key):
            raise unknown(key, str(value), choices(key))
        try:
            if key not in GROUPS:
                OmegaConf.update(schema, key, value)
        except OmegaConfBaseException as error:
            raise UserError(f"override: {key}: {first_line(error)}") from None


def _values(overrides: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield each (key, value) of a sweep, but not Hydra's own keys, nor sweeps that only Hydra can list (glob, interval)."""
    parser = OverridesParser.create()
    for override in parser.parse_overrides(list(overrides)):
        key = str(override.key_or_group)
        if key.startswith("hydra") or override.value_type is ValueType.GLOB_CHOICE_SWEEP:
            continue
        if override.is_choice_sweep() or override.is_range_sweep():
            yield from ((key, parser.parse_override(f"{key}={text}").value()) for text in override.sweep_string_iterator())
        elif not override.is_sweep_override():
            yield key, override.value()


def resume(run: str) -> int:
    """Continue an interrupted run."""
    loaded = load_run(run)
    before = loaded.finished
    loaded.resume()
    print(f"{loaded.path} is finished: {describe_test(loaded.summary)}" if before else loaded.path)
    return 0


def check(paths: Sequence[str]) -> int:
    """Verify every file of runs and studies."""
    damage, kinds = list[str](), list[str]()
    for path in map(Path, paths):
        for run in runs_below(path):
            lines = [f"{run}: {line}" for line in problems(run)]
            damage += lines
            undamaged = "intact" if (run / digests.FILE).is_file() else "without digests, as version 0.2 wrote them"
            kinds.append("damaged" if lines else undamaged)
        for study in path.rglob(STUDY_FILE):
            try:
                read_study(study.parent)
            except UserError as error:
                damage.append(str(error))
    if not kinds:
        raise UserError(f"check: no run in {', '.join(paths)}.")
    counts = ", ".join(f"{count} {kind}" for kind, count in Counter(kinds).items())
    print("\n".join([*damage, f"{len(kinds)} runs: {counts}"]))
    return 2 if damage else 0


def explain(key: str) -> int:
    """Explain a configuration key, or all keys of a section."""
    wanted = [path for path in keys() if path == key or path.startswith(f"{key}.")]
    if not wanted:
        raise unknown("key", key, known_keys())
    for path in wanted:
        known = keys()[path]
        print(f"{path}: {known.meaning}")
        facts = {
            "default": "null" if known.default is None else known.default,
            "range": known.expected,
            "matters": known.when,
            "since": known.since,
        }
        for name, fact in facts.items():
            if fact not in ("", None):
                print(f"  {name:8} {fact}")
        if isinstance(known.one_of, str) and len(wanted) == 1:
            for name in registry(known.one_of):
                options = ", ".join(f"{option}={default}" for option, default in registry(known.one_of).options(name).items())
                print(f"    {name:18} {registry(known.one_of).describe(name)}" + (f" [{options}]" if options else ""))
    return 0


def demo(out: str, seed: int) -> int:
    """Make the page of the demo."""
    from fedlens.demo.demo import demo as make_page  # the demo alone needs these modules

    print(f"open {make_page(Path(out), seed).resolve()}")
    return 0
