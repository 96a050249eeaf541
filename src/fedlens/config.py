"""The typed configuration. Each key is declared once: default, meaning, range, and the version that added it.

`--help`, the reference page, `fedlens explain` and all checks are derived from these lines; overrides.py composes a configuration from
YAML and overrides. Importing this module does not import torch: the names of rules are looked up in their registries when a value is checked.
"""

import copy
import math
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from omegaconf import OmegaConf

from fedlens.errors import UserError, bad_value, unknown
from fedlens.registry import registry

CONF = Path(__file__).parent / "conf"
MOST = 1_000_000  # bound of counts that memory grows with
BOUNDS = {"gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le}


def choices(group: str) -> list[str]:
    """Return the names of the YAML files of a configuration group."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@cache
def trainer_of(experiment: str) -> str:
    """Return the trainer that an experiment's YAML file names."""
    return str(OmegaConf.select(OmegaConf.load(CONF / "experiment" / f"{experiment}.yaml"), "trainer"))


# --- one line per key ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    """The declaration of one configuration key."""

    meaning: str
    default: Any = None
    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    one_of: tuple[str, ...] | str = ()  # names, or the kind of a registry; of a list: its items
    pattern: str = ""
    since: str = ""  # the version that added it; such a key counts in a run's identity only if it differs from the default
    shown_only: bool = False  # never counts in a run's identity: it changes what is recorded, not what is computed
    when: str = ""  # condition under which it has an effect
    kind: Any = None  # type of the value, without None
    nullable: bool = False
    is_list: bool = False

    @property
    def names(self) -> list[str]:
        """The names that the key can take, if they are a list."""
        return list(registry(self.one_of)) if isinstance(self.one_of, str) else list(self.one_of)

    @property
    def from_registry(self) -> bool:
        """True if users can add names."""
        return isinstance(self.one_of, str)

    @property
    def expected(self) -> str:
        """The range in words: `in (0, 1]`, `>= 1 or null`."""
        low, high = self.gt if self.ge is None else self.ge, self.lt if self.le is None else self.le
        if self.one_of:
            text = f"{'a list of any' if self.is_list else 'one'} of {', '.join(self.names)}"
        elif self.pattern:
            text = self.pattern.replace("|", ", ").replace(r":\d+", ":N")
        elif low is None:
            text = "a mapping" if isinstance(self.default, dict) else ""
        else:
            text = f"{'>' if self.ge is None else '>='} {low:g}"
            if high is not None:
                text = f"in {'(' if self.ge is None else '['}{low:g}, {high:g}{')' if self.le is None else ']'}"
            text = f"a list of values {text}" if self.is_list else text
        return f"{text} or null" if self.nullable and text else text

    def holds(self, value: Any) -> bool:
        """Return True if the value is in the key's range."""
        if value is None:
            return self.nullable
        if isinstance(self.default, list | dict) and not isinstance(value, type(self.default)):  # from an interpolation
            return False
        if self.is_list:
            return all(not isinstance(item, list | dict) and self._holds(item) for item in value)
        return self._holds(value)

    def _holds(self, value: Any) -> bool:
        if self.one_of:
            return value == self.default or value in self.names
        if self.pattern:
            return re.fullmatch(self.pattern, str(value)) is not None
        if isinstance(value, bool) or not isinstance(value, int | float):
            return True
        bounds = {name: getattr(self, name) for name in BOUNDS}
        return math.isfinite(value) and all(BOUNDS[name](value, bound) for name, bound in bounds.items() if bound is not None)


def key(default: Any, meaning: str, **facts: Any) -> Any:
    """Declare a configuration key; the facts are those of Key."""
    metadata = {"key": Key(meaning, default, **facts)}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class DataConfig:
    name: str = key("fashion_mini", "data set: a source of fedlens/data, or hf:NAME; data=NAME also sets what suits it")
    root: str | None = key(None, "folder of the data set; null: FEDLENS_DATA, or ~/.cache/fedlens/data")
    download: bool = key(False, "download what is missing; false: explain how to get it")
    val_fraction: float = key(0.1, "share of the training set, stratified, held out for validation", ge=0, lt=1)
    partition: str = key("iid", "how training samples are split over clients", one_of="partition", when="trainer=federated")
    classes_per_client: int | None = key(None, "Nc, classes per client", ge=1, when="data.partition=classes")
    alpha: float | None = key(None, "concentration: the smaller, the more unequal the clients", gt=0, when="data.partition=dirichlet…")
    resize: str = key("once", "clipping: once after resizing, or like Pillow after each pass", one_of=("once", "pillow"), since="0.3")
    crop: int = key(0, "black border in pixels before a random crop", ge=0, le=4096)
    flip: bool = key(True, "mirror half of the training images, left to right")
    randaugment: int = key(0, "random operations per training image (RandAugment)", ge=0, le=100)
    randaugment_magnitude: float = key(0.3, "strength of those operations", ge=0, le=1, when="data.randaugment > 0")


@dataclass
class ModelConfig:
    name: str = key("tiny", "backbone: a ViT of fedlens, timm:NAME or hf:NAME; model=NAME also sets what suits it")
    weights: str | None = key("pretrained", "initial weights: null (random), pretrained, or the path of a checkpoint")
    image_size: int = key(28, "height and width in pixels that images are resized to", ge=1, le=4096)
    dropout: float = key(0.0, "dropout rate on the features, before the head", ge=0, lt=1)
    freeze_blocks: int = key(0, "blocks from below, and the embedding, that do not train", ge=0)
    freeze_backbone: bool = key(False, "train the head only")
    freeze_head: bool | None = key(None, "freeze the head; null: freeze it if ridge or a checkpoint fitted it and the backbone trains")


@dataclass
class OptimConfig:
    lr: float = key(0.01, "learning rate before the schedule's factor; the default depends on model and experiment (conf/rates.yaml)", gt=0)
    momentum: float = key(0.9, "momentum of SGD; a client starts each round with zero velocity", ge=0, lt=1)
    dampening: float = key(0.0, "dampening of momentum, as in torch.optim.SGD", ge=0, le=1)
    nesterov: bool = key(False, "Nesterov momentum")
    weight_decay: float = key(0.0, "L2 penalty, added to the gradient", ge=0)
    batch_size: int = key(64, "B, samples per step", ge=1, le=MOST)
    clip_norm: float | None = key(None, "gradients longer than this are scaled down to it; null: never", gt=0)
    schedule: str = key("cosine", "learning-rate schedule over the steps or rounds of a run", one_of="schedule")
    warmup: float = key(0.0, "share of the run over which the rate rises from zero", ge=0, lt=1)
    final: float = key(0.0, "last factor of the rate", ge=0, le=1, when="optim.schedule=cosine or linear")
    decay: float = key(0.1, "factor per milestone, or over the whole run", gt=0, le=1, when="optim.schedule=step or exponential")
    milestones: list[float] = key([0.5, 0.75], "when the rate falls, as shares of the run", gt=0, lt=1, when="optim.schedule=step")


@dataclass
class TrainConfig:
    epochs: int = key(5, "passes over the training set; 0: the head alone", ge=0, when="trainer=centralized")
    label_smoothing: float = key(0.0, "label smoothing of the training loss", ge=0, lt=1)
    patience: int | None = key(None, "stop after this many evaluations without a better validation accuracy; null: never", ge=1)
    precision: str = key("auto", "number type of forward and backward passes", one_of=("auto", "fp32", "bf16", "fp16"))
    compile: bool = key(False, "torch.compile: a slower start, then faster steps on a GPU")
    chunk: int | None = key(None, "samples at once within a step; null: as many as fit", ge=1, since="0.2", when="trainer=centralized")
    eval_batch_size: int = key(256, "samples at once in evaluation and for features", ge=1, le=MOST)
    select: str = key(
        "best", "final model: the best of those trained, or of these and the start", one_of=("best", "best_or_start"), since="0.3"
    )
    test: bool = key(True, "evaluate the chosen model on the test set; searches set it to false")
    test_every: int = key(
        0, "epochs between tests for plots; no choice reads them; 0: never", ge=0, since="0.3", shown_only=True, when="trainer=centralized"
    )
    metrics: list[str] = key([], "further metrics of validation and test, beside loss and accuracy", one_of="metric", since="0.3")


@dataclass
class FederatedConfig:
    clients: int = key(100, "K, clients in all", ge=1, le=MOST)
    participation: float = key(0.1, "C, share of the clients that a round samples", gt=0, le=1)
    local_steps: int = key(4, "J, local steps per client and round", ge=1, le=MOST)
    rounds: int = key(60, "R, rounds", ge=1)
    algorithm: str = key("fedavg", "what a round does with the clients' steps", one_of="algorithm")
    algorithm_options: dict[str, Any] = key({}, "options of the algorithm, checked against its fields", since="0.3")
    engine: str = key(
        "auto", "how a cohort trains; auto: cohort on GPU, else threaded", one_of=("auto", "sequential", "threaded", "cohort")
    )
    chunk: int | None = key(None, "clients at once in the cohort engine; null: as many as fit", ge=1)
    eval_every: int = key(5, "rounds between evaluations", ge=1)
    test_every: int = key(0, "rounds between tests for plots; no choice reads them; 0: never", ge=0, since="0.3", shown_only=True)
    target_accuracy: float | None = key(None, "stop when validation accuracy reaches it; null: never", gt=0, le=1)
    dropout_rate: float = key(0.0, "share of sampled clients that never answer", ge=0, lt=1)
    straggler_rate: float = key(0.0, "share of clients that do fewer steps", ge=0, le=1)
    client_metrics: bool = key(False, "record loss and update norm of every client in every round")
    client_vectors: bool = key(False, "keep what each client has added to the model, so that it can be subtracted (fedlens arith forget)")
    exclude: list[int] = key([], "clients that never take part, to retrain without them", ge=0)
    idle: list[int] = key([], "clients that help with head and mask but never train", ge=0, since="0.2")

    def trains(self, client: int) -> bool:
        """Return True if the client trains when it is sampled."""
        return client not in self.exclude and client not in self.idle


@dataclass
class ServerConfig:
    optimizer: str = key("sgd", "what the server does with the merged update", one_of="server optimizer")
    lr: float = key(1.0, "α, the server's learning rate: the coefficient of task arithmetic", ge=0)
    alphas: list[float] = key([], "if any: each round takes the α with the lowest validation loss, instead of server.lr", ge=0, since="0.2")
    alpha_samples: int = key(1000, "validation samples for that choice", ge=1, since="0.2", when="server.alphas is set")
    momentum: float = key(0.9, "momentum over rounds", ge=0, lt=1, when="server.optimizer=momentum (FedAvgM)")
    beta1: float = key(0.9, "decay of the mean update", ge=0, lt=1, when="server.optimizer=adam or yogi")
    beta2: float = key(0.99, "decay of the mean squared update", ge=0, lt=1, when="server.optimizer=adam or yogi")
    tau: float = key(1e-3, "adaptivity", gt=0, when="server.optimizer=adam, yogi or adagrad")
    merge: str = key("mean", "rule that merges the updates of a round", one_of="merge rule")
    merge_options: dict[str, Any] = key({}, "options of the merge rule, checked against its signature", since="0.3")
    fisher_samples: int = key(64, "samples per client for the sensitivities of Fisher merging", ge=1, when="server.merge=fisher")
    norm_bound: float | None = key(None, "reject updates longer than this; null: accept all", gt=0, since="0.2")


@dataclass
class MaskConfig:
    """Which coordinates may move. All strategies: exactly round(density · eligible) of them."""

    strategy: str | None = key(None, "mask rule that selects the weights that train; null: all of them", one_of="mask rule")
    density: float = key(0.1, "share of the eligible weights that trains; sparsity=0.9 on the command line means density 0.1", gt=0, le=1)
    rounds: int = key(4, "calibration rounds: score, reject, score again", ge=1)
    soft: float = key(0.01, "factor on rejected weights while the next round scores", ge=0, le=1)
    scope: str = key("central", "scores from the server's validation set, or summed over clients", one_of=("central", "federated"))
    labels_from: str = key("model", "label of a score: drawn from the model, the true one, or all", one_of=("model", "data", "exact"))
    score: str = key("log_prob", "function whose squared gradient is the sensitivity", one_of=("log_prob", "logit"))
    samples: int | None = key(None, "samples to score on, in all or per client; null: all", ge=1)
    path: str | None = key(None, "saved mask to use instead, for example another run's mask.safetensors")
    without: list[str] = key([], "kinds of weight that are not selected", one_of="kind of weight", since="0.2")
    like: str | None = key(None, "mask whose densities per tensor count; null: least_sensitive's", when="mask.strategy=random_layerwise")


@dataclass
class PrivacyConfig:
    """Differential privacy of a client's part in what the server publishes (McMahan et al. 2018, with cohorts that clients know)."""

    clip: float | None = key(None, "updates longer than this are scaled down to it; null: never", gt=0, since="0.2")
    noise: float = key(0.0, "standard deviation of the noise on the sum of updates, as a multiple of privacy.clip", ge=0, since="0.2")
    delta: float = key(1e-5, "δ at which ε is reported", gt=0, lt=1, when="privacy.noise > 0")
    secure_aggregation: bool = key(False, "the server learns only the mean of the updates (SecAgg+)", since="0.2", when="fedlens federate")
    range: float = key(0.1, "entries of an update beyond ± this are cut off", gt=0, when="privacy.secure_aggregation=true")


@dataclass
class DeployConfig:
    """Clients on other machines (deploy/). These keys decide which answers count, not what is computed from them."""

    wait: float = key(300.0, "seconds to wait for all clients at the start", ge=0)
    deadline: float = key(600.0, "seconds to wait for an answer", gt=0)
    min_fraction: float = key(0.5, "share of clients that must answer, otherwise the round is retried, then the run stops", gt=0, le=1)
    max_samples: int = key(1_000_000, "samples that a client may claim: its update is weighted by them", ge=1)
    norm_ratio: float | None = key(10.0, "reject updates longer than this multiple of recent rounds' median norm; null: accept all", ge=1)


@dataclass
class RunConfig:
    dir: str | None = key(None, "run folder; null: runs/EXPERIMENT-TIME-HASH in the working directory")
    if_exists: str = key("error", "what to do if run.dir holds this run already", one_of=("error", "resume"))
    keep_last: int = key(2, "latest checkpoints to keep", ge=1)
    keep_best: int = key(1, "checkpoints with the best validation accuracy to keep", ge=1)
    checkpoint_minutes: float = key(5.0, "minutes between checkpoints, beside those at evaluations; 0: after every step or round", ge=0)
    trackers: list[str] = key([], "trackers beside metrics.jsonl", one_of=("tensorboard", "wandb", "mlflow"))
    progress: bool = key(True, "show a progress bar on a terminal")


@dataclass
class Config:
    experiment: str = key("centralized", "recipe: a file of conf/experiment", one_of=tuple(choices("experiment")))
    trainer: str = key("centralized", "training loop; the experiment sets it", one_of=("centralized", "federated"), since="0.3")
    seed: int = key(0, "seed of all randomness", ge=0)
    device: str = key("auto", "device; auto takes a GPU where there is one", pattern=r"auto|cpu|mps|cuda|cuda:\d+")
    head: str = key("linear", "initial classifier: random (linear) or fitted in closed form (ridge)", one_of=("linear", "ridge"))
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    federated: FederatedConfig = field(default_factory=FederatedConfig, metadata={"when": "trainer=federated"})
    server: ServerConfig = field(default_factory=ServerConfig, metadata={"when": "trainer=federated"})
    mask: MaskConfig = field(default_factory=MaskConfig, metadata={"when": "mask.strategy is set"})
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig, metadata={"when": "trainer=federated"})
    deploy: DeployConfig = field(default_factory=DeployConfig, metadata={"when": "fedlens federate"})
    run: RunConfig = field(default_factory=RunConfig)


# --- all keys as a table ---------------------------------------------------------------------------------------------


@cache
def keys() -> dict[str, Key]:
    """Return every dotted key with what is known about it, sections excluded."""
    return dict(_keys_of(Config))


def _keys_of(section: Any, prefix: str = "", when: str = "") -> Iterator[tuple[str, Key]]:
    types = get_type_hints(section)
    for each in fields(section):
        if key := each.metadata.get("key"):
            kind, *none = get_args(types[each.name]) if "None" in str(types[each.name]) else (types[each.name],)
            is_list = str(kind).startswith("list")
            yield prefix + each.name, replace(key, kind=kind, nullable=bool(none), is_list=is_list, when=key.when or when)
        else:
            yield from _keys_of(types[each.name], f"{each.name}.", each.metadata.get("when", ""))


@cache
def known_keys() -> tuple[str, ...]:
    """Return every dotted key, sections included."""
    return (*keys(), *(each.name for each in fields(Config) if "key" not in each.metadata))


def value_of(config: Config, path: str) -> Any:
    """Return the value of a dotted key."""
    return operator.attrgetter(path)(config)


# --- checks ----------------------------------------------------------------------------------------------------------

# At their defaults, these keys need no validation set.
VALIDATED = ("train.patience", "train.select", "head", "federated.target_accuracy", "server.alphas")


def validate(config: Config, *, to_train: bool = True) -> Config:
    """Check the range of every key, then what must hold between keys; return the configuration.

    `to_train` False: the configuration is only read, and may name rules that this process does not know.
    """
    for path, known in keys().items():
        value = value_of(config, path)
        if (known.from_registry and not to_train) or known.holds(value):
            continue
        if known.one_of and isinstance(value, str | list):
            names = value if isinstance(value, list) else [value]
            raise unknown(path, next(str(name) for name in names if name not in known.names), known.names)
        raise bad_value(path, value, known.expected)
    for check in (_check_validation, _check_training, _check_mask, _check_clients, _check_server, _check_privacy):
        check(config, to_train)
    return config


def _refuse(condition: object, message: str) -> None:
    if condition:
        raise UserError(message)


def _check_validation(config: Config, to_train: bool) -> None:
    for path in VALIDATED:
        default = keys()[path].default
        read = config.data.val_fraction == 0 and value_of(config, path) != default
        _refuse(read, f"No validation set: set data.val_fraction > 0 or choose {path}={'null' if default is None else default}.")


def _check_training(config: Config, to_train: bool) -> None:
    o, model = config.optim, config.model
    expected = trainer_of(config.experiment)
    _refuse(config.trainer != expected, f"trainer must be {expected} for experiment={config.experiment}, got {config.trainer!r}.")
    _refuse(o.nesterov and (o.momentum == 0 or o.dampening), "optim.nesterov needs optim.momentum > 0 and optim.dampening = 0.")
    _refuse(model.freeze_head and model.freeze_backbone, "model.freeze_head must be false with model.freeze_backbone: nothing would train.")


def _check_mask(config: Config, to_train: bool) -> None:
    c = config.mask
    if c.without and to_train:
        _refuse(set(c.without) >= set(registry("kind of weight")), "mask.without must leave at least one kind of weight.")
    _refuse(c.path and not c.strategy, "mask.path needs mask.strategy: name the strategy that the mask was made with.")
    over_clients = c.strategy and not c.path and c.scope == "federated"
    _refuse(over_clients and config.trainer != "federated", f"mask.scope must be central: {config.experiment} has no clients.")


def _check_clients(config: Config, to_train: bool) -> None:
    fed = config.federated
    for name in ("exclude", "idle"):
        listed = getattr(fed, name)
        _refuse(len(set(listed)) < len(listed), f"federated.{name} must name each client once, got {listed}.")
        if beyond := [k for k in listed if k >= fed.clients]:
            raise bad_value(f"federated.{name}", beyond[0], f"below federated.clients, {fed.clients}")
    _refuse(
        not any(map(fed.trains, range(fed.clients))),
        f"federated.exclude, federated.idle: at least one of {fed.clients} clients must train.",
    )
    plain = (config.server.optimizer, config.server.merge) == ("sgd", "mean")
    _refuse(fed.client_vectors and not plain, "federated.client_vectors needs server.optimizer=sgd and server.merge=mean.")
    if to_train and fed.algorithm_options:
        registry("algorithm").check(fed.algorithm, fed.algorithm_options)


def _check_server(config: Config, to_train: bool) -> None:
    c = config.server
    _refuse(c.alphas and c.optimizer != "sgd", f"server.alphas needs server.optimizer=sgd, got {c.optimizer!r}.")
    if to_train and c.merge_options:
        registry("merge rule").check(c.merge, c.merge_options)


def _check_privacy(config: Config, to_train: bool) -> None:
    p, fed, server = config.privacy, config.federated, config.server
    _refuse(p.noise and p.clip is None, "privacy.noise needs privacy.clip: noise hides an update only if its length is bounded.")
    _refuse(p.noise and fed.client_vectors, "federated.client_vectors must be false with privacy.noise: it would undo the noise.")
    if not (p.noise or p.secure_aggregation or p.clip is not None) or not to_train:
        return
    algorithms = registry("algorithm")
    exact = [name for name, each in algorithms.items() if vars(each).get("plain_mean")]  # a subclass must declare it itself
    inexact = server.merge != "mean" or fed.algorithm not in exact
    needed = f"server.merge=mean and federated.algorithm={' or '.join(exact)}"
    _refuse(p.noise and inexact, f"privacy.noise needs {needed}: its accounting assumes them.")
    _refuse(p.secure_aggregation and inexact, f"privacy.secure_aggregation needs {needed}: only a mean is revealed.")
    raw = p.clip is not None and algorithms[fed.algorithm].uses_raw_updates
    _refuse(raw, f"privacy.clip does not work with {fed.algorithm}, which uses unclipped updates.")
    for path in ("privacy.clip", "server.norm_bound", "federated.client_vectors", "federated.client_metrics"):
        single = p.secure_aggregation and value_of(config, path)
        _refuse(single, f"{path} looks at single updates, which privacy.secure_aggregation hides from the server.")


# --- keys that moved -------------------------------------------------------------------------------------------------

# key of version 0.2 -> key that names its rule, the rule, the option's name now, its default
MOVED: dict[str, tuple[str, str, str, Any]] = {
    "server.trim": ("server.merge", "trimmed_mean", "trim", 0.1),
    "server.clip_norm": ("server.merge", "clipped_mean", "clip_norm", None),
    "server.ties_density": ("server.merge", "ties", "density", 0.2),
    "server.drop": ("server.merge", "dare", "drop", 0.5),
    "server.top": ("server.merge", "breadcrumbs", "top", 0.01),
    "server.bottom": ("server.merge", "breadcrumbs", "bottom", 0.85),
    "federated.mu": ("federated.algorithm", "fedprox", "mu", 0.01),
}


def _moved(plain: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, str, str, str, Any]]:
    """Yield the section of each moved key that the configuration has, its old name, and the entries of MOVED without the section."""
    for path, (rule_key, rule, option, default) in MOVED.items():
        section, _, name = path.partition(".")
        if plain.get(section) and isinstance(plain[section], dict):
            yield plain[section], name, rule_key.removeprefix(f"{section}."), rule, option, default


def upgraded(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved configuration of version 0.2 with today's keys: options of rules that it does not use are dropped."""
    new = copy.deepcopy(dict(plain))
    for values, name, chooser, rule, option, default in _moved(new):
        value = values.pop(name, default)
        if value != default and values.get(chooser, rule) == rule:
            values[f"{chooser}_options"] = {**(values.get(f"{chooser}_options") or {}), option: value}
    if "trainer" not in new and new.get("experiment") in choices("experiment"):
        new["trainer"] = trainer_of(str(new["experiment"]))
    return new


def as_in_version_2(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reverse of `upgraded`: moved keys under their names in version 0.2, which is how a run's identity has them."""
    old = copy.deepcopy(dict(plain))
    for values, name, chooser, rule, option, default in _moved(old):
        options = values[f"{chooser}_options"] = values.get(f"{chooser}_options") or {}
        values[name] = options.pop(option, default) if values.get(chooser) == rule else default
    return old
