"""The typed configuration: its schema and its validation. Every key is declared here; overrides.py makes one from YAML and overrides."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fedlens.errors import UserError, bad_value
from fedlens.lens.mask import KINDS
from fedlens.lens.mask_rules import STRATEGIES
from fedlens.lens.merging import RULES
from fedlens.optim.schedules import SCHEDULES


@dataclass
class DataConfig:
    name: str = "fashion_mini"  # the set: a source of fedlens/data, or hf:NAME; data=NAME also sets what suits it
    root: str | None = None  # where the set lies; null: FEDLENS_DATA, or ~/.cache/fedlens/data
    download: bool = False  # true: fetch what is missing; false: say how to get it
    val_fraction: float = 0.1  # of the training images, stratified, for every choice that is made
    partition: str = "iid"  # how training images are split over clients: iid | classes | dirichlet
    classes_per_client: int | None = None  # Nc, of the partition `classes`
    alpha: float | None = None  # of the partition `dirichlet`: the smaller, the more unequal the clients
    crop: int = 0  # black border in pixels before a random crop
    flip: bool = True  # mirror half of the training images, left to right
    randaugment: int = 0  # random operations on a training image (RandAugment)
    randaugment_magnitude: float = 0.3  # their strength


@dataclass
class ModelConfig:
    name: str = "tiny"  # the backbone: a ViT of fedlens, timm:NAME or hf:NAME; model=NAME also sets what suits it
    weights: str | None = "pretrained"  # what it starts from: null (random) | pretrained | a path
    image_size: int = 28  # pixels a side that images are resized to
    dropout: float = 0.0  # on the features, before the head
    freeze_blocks: int = 0  # the embedding and so many blocks from below stay as they are
    freeze_backbone: bool = False  # only the head trains
    freeze_head: bool | None = None  # null: where head=ridge or a checkpoint has fitted it, unless nothing else trains


@dataclass
class OptimConfig:
    lr: float = 0.01  # the learning rate, before the schedule's factor
    momentum: float = 0.9  # of SGD; of a client it starts from zero in every round
    dampening: float = 0.0  # of momentum, as in torch's SGD
    nesterov: bool = False  # Nesterov's momentum
    weight_decay: float = 0.0  # L2, added to the gradient
    batch_size: int = 64  # B, images in a step
    clip_norm: float | None = None  # longer gradients are shortened to this norm; null: not
    schedule: str = "cosine"  # how the rate goes on over the run: constant | cosine | step | exponential | linear
    warmup: float = 0.0  # the first fraction of the run, over which the rate rises
    final: float = 0.0  # cosine, linear: the last factor
    decay: float = 0.1  # step: the factor at a milestone; exponential: over the whole run
    milestones: list[float] = field(default_factory=lambda: [0.5, 0.75])  # step: when, as fractions of the run


@dataclass
class TrainConfig:
    epochs: int = 5  # of centralised training
    label_smoothing: float = 0.0  # of the cross-entropy in training
    patience: int | None = None  # evaluations without a better validation accuracy before stopping; null: never
    precision: str = "auto"  # of forward and backward passes; auto is bf16 or fp16 on a CUDA GPU, else fp32: auto | fp32 | bf16 | fp16
    compile: bool = False  # torch.compile: a slower start, then faster steps on a GPU
    chunk: int | None = None  # images at once in a step of centralised training; null: as many as fit
    eval_batch_size: int = 256  # images at once in evaluation, for features and for scores
    test: bool = True  # false: the test set is not read, for searches


@dataclass
class FederatedConfig:
    clients: int = 100  # K, in all
    participation: float = 0.1  # C, the fraction that a round samples
    local_steps: int = 4  # J, of each client in a round
    rounds: int = 60  # R, of training
    algorithm: str = "fedavg"  # what a round does with clients' steps: fedavg | fedprox | scaffold | fednova
    engine: str = "auto"  # how a cohort trains; auto is cohort on a GPU, sequential on a CPU: auto | sequential | cohort
    chunk: int | None = None  # clients at once in the cohort engine; null: as many as fit
    mu: float = 0.01  # FedProx's pull towards the global model
    eval_every: int = 5  # rounds between two looks at validation
    target_accuracy: float | None = None  # stop when validation reaches it
    dropout_rate: float = 0.0  # of sampled clients that never answer
    straggler_rate: float = 0.0  # of clients that do fewer steps
    client_metrics: bool = False  # loss and update norm of every client in every round
    client_vectors: bool = False  # keep what each client has added to the model, so that it can be subtracted (fedlens arith forget)
    exclude: list[int] = field(default_factory=list)  # clients that never take part: retraining without them
    idle: list[int] = field(default_factory=list)  # clients that help with head and mask and never train: tasks apart under one head

    def trains(self, client: int) -> bool:
        return client not in self.exclude and client not in self.idle


@dataclass
class ServerConfig:
    optimizer: str = "sgd"  # what the server does with the merged update: sgd | momentum | adam | yogi | adagrad
    lr: float = 1.0  # α: the task-arithmetic coefficient
    alphas: list[float] = field(default_factory=list)  # if any: each round takes the one with the lowest validation loss, instead of lr
    alpha_samples: int = 1000  # validation images that this choice looks at
    momentum: float = 0.9  # of FedAvgM
    beta1: float = 0.9  # of FedAdam and FedYogi: memory of the mean update
    beta2: float = 0.99  # of FedAdam and FedYogi: memory of its square
    tau: float = 1e-3  # adaptivity of FedAdam, FedYogi, FedAdagrad
    merge: str = "mean"  # how updates become one: a rule of lens/merging.py
    trim: float = 0.1  # of trimmed_mean: the fraction of clients that is cut off on either side, entry by entry
    clip_norm: float | None = None  # of clipped_mean; null: the cohort's median norm
    ties_density: float = 0.2  # of ties: the fraction of each update that is kept
    drop: float = 0.5  # of dare: the probability that an entry is dropped
    top: float = 0.01  # of breadcrumbs: the fraction of each tensor that is cut off above, the largest entries
    bottom: float = 0.85  # of breadcrumbs: the fraction that is cut off below, the smallest
    fisher_samples: int = 64  # of fisher: images that a client scores its sensitivities on
    norm_bound: float | None = None  # updates that are longer are refused; null: none


@dataclass
class MaskConfig:
    """Which coordinates may move. All strategies: exactly round(density · eligible) of them."""

    strategy: str | None = None  # which weights may move; null: all of them (dense)
    density: float = 0.1  # the fraction that trains; on the command line `sparsity=0.9` is the same
    rounds: int = 4  # of calibration: scoring, rejecting, scoring again
    soft: float = 0.01  # what rejected weights are multiplied by while the next round scores
    scope: str = "central"  # where scores come from, the server's validation images or the clients' data, summed: central | federated
    labels_from: str = "model"  # where a score's label comes from, drawn by the model, the true one or all of them: model | data | exact
    score: str = "log_prob"  # what a sensitivity is the squared gradient of: log_prob | logit
    samples: int | None = None  # images to score on, in all or of each client; null: all
    path: str | None = None  # a saved mask to use instead, for example another run's mask.safetensors
    without: list[str] = field(default_factory=list)  # kinds of weight that are not chosen: query, key, value, mlp in, … (lens/mask.py)
    like: str | None = None  # of random_layerwise: the mask whose densities it takes; null: least_sensitive's


@dataclass
class PrivacyConfig:
    """Differential privacy of a client's part in what the server publishes (McMahan et al. 2018, with the cohorts known to all)."""

    clip: float | None = None  # every update is shortened to this norm; null: not
    noise: float = 0.0  # standard deviation of the noise on the sum of updates, as a multiple of `clip`
    delta: float = 1e-5  # the δ at which ε is told
    secure_aggregation: bool = False  # of a deployment: the server learns the mean of the updates and none of them (SecAgg+)
    range: float = 0.1  # of secure aggregation: entries of an update beyond ± this are cut off


@dataclass
class DeployConfig:
    """Clients on other machines (deploy). Nothing here changes what is computed."""

    wait: float = 300.0  # seconds for all clients to show up at the start
    deadline: float = 600.0  # seconds for an answer
    min_fraction: float = 0.5  # of the clients asked: with fewer answers a round is tried again, then the run stops and can go on later
    max_samples: int = 1_000_000  # that a client may claim: its update counts by them


@dataclass
class RunConfig:
    dir: str | None = None  # the run's folder; null: runs/EXPERIMENT-TIME-HASH under the working directory
    if_exists: str = "error"  # where run.dir holds this run already: error | resume
    keep_last: int = 2  # checkpoints that stay: the latest so many
    keep_best: int = 1  # and so many with the best validation accuracy
    checkpoint_minutes: float = 5.0  # between checkpoints, beside those at evaluations; 0: after every step or round, before the next
    trackers: list[str] = field(default_factory=list)  # beside metrics.jsonl, which is always written: tensorboard, wandb, mlflow
    progress: bool = True  # a bar on a terminal


@dataclass
class Config:
    experiment: str = "centralized"  # the recipe that is run: a file of conf/experiment
    seed: int = 0  # of everything that is random
    device: str = "auto"  # auto takes a GPU where there is one: auto | cpu | cuda | cuda:N | mps
    head: str = "linear"  # the classifier's start, random or fitted in closed form: linear | ridge
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    federated: FederatedConfig = field(default_factory=FederatedConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    mask: MaskConfig = field(default_factory=MaskConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    deploy: DeployConfig = field(default_factory=DeployConfig)
    run: RunConfig = field(default_factory=RunConfig)


SCORED = ("least_sensitive", "most_sensitive", "random_layerwise")  # strategies that look at images

Check = tuple[str, Callable[[Any], bool], str]


def choices(group: str) -> list[str]:
    """The YAML files of a config group."""
    return sorted(p.stem for p in (Path(__file__).parent / "conf" / group).glob("*.yaml"))


def _one_of(*names: str) -> tuple[Callable[[Any], bool], str]:
    return (lambda v: v in names), " | ".join(names)


CHECKS: list[Check] = [
    ("experiment", *_one_of(*choices("experiment"))),
    ("seed", lambda v: v >= 0, ">= 0"),
    ("device", lambda v: v in ("auto", "cpu", "cuda", "mps") or v.startswith("cuda:"), "auto | cpu | cuda | cuda:N | mps"),
    ("head", *_one_of("linear", "ridge")),
    ("data.val_fraction", lambda v: 0 <= v < 1, "0 <= val_fraction < 1"),
    ("data.partition", *_one_of("iid", "classes", "dirichlet")),
    ("data.classes_per_client", lambda v: v is None or v >= 1, ">= 1"),
    ("data.alpha", lambda v: v is None or v > 0, "> 0"),
    ("data.crop", lambda v: v >= 0, ">= 0"),
    ("data.randaugment", lambda v: v >= 0, ">= 0"),
    ("data.randaugment_magnitude", lambda v: 0 <= v <= 1, "0 to 1"),
    ("model.image_size", lambda v: v >= 1, ">= 1"),
    ("model.dropout", lambda v: 0 <= v < 1, "0 <= dropout < 1"),
    ("model.freeze_blocks", lambda v: v >= 0, ">= 0"),
    ("optim.lr", lambda v: 0 < v < float("inf"), "> 0"),
    ("optim.momentum", lambda v: 0 <= v < 1, "0 <= momentum < 1"),
    ("optim.dampening", lambda v: 0 <= v <= 1, "0 to 1"),
    ("optim.weight_decay", lambda v: 0 <= v < float("inf"), ">= 0"),
    ("optim.batch_size", lambda v: v >= 1, ">= 1"),
    ("optim.clip_norm", lambda v: v is None or v > 0, "> 0 or null"),
    ("optim.schedule", *_one_of(*SCHEDULES)),
    ("optim.warmup", lambda v: 0 <= v < 1, "0 <= warmup < 1, a fraction of the run"),
    ("optim.final", lambda v: 0 <= v <= 1, "0 to 1"),
    ("optim.decay", lambda v: 0 < v <= 1, "0 < decay <= 1"),
    ("optim.milestones", lambda v: all(0 < m < 1 for m in v), "fractions of the run, each between 0 and 1"),
    ("train.epochs", lambda v: v >= 0, ">= 0; 0: the head alone"),
    ("train.label_smoothing", lambda v: 0 <= v < 1, "0 <= label_smoothing < 1"),
    ("train.chunk", lambda v: v is None or v >= 1, ">= 1 or null"),
    ("train.patience", lambda v: v is None or v >= 1, ">= 1 or null"),
    ("train.precision", *_one_of("auto", "fp32", "bf16", "fp16")),
    ("train.eval_batch_size", lambda v: v >= 1, ">= 1"),
    ("federated.clients", lambda v: v >= 1, ">= 1"),
    ("federated.participation", lambda v: 0 < v <= 1, "0 < participation <= 1"),
    ("federated.local_steps", lambda v: v >= 1, ">= 1"),
    ("federated.rounds", lambda v: v >= 1, ">= 1"),
    ("federated.algorithm", *_one_of("fedavg", "fedprox", "scaffold", "fednova")),
    ("federated.engine", *_one_of("auto", "sequential", "cohort")),
    ("federated.chunk", lambda v: v is None or v >= 1, ">= 1 or null"),
    ("federated.mu", lambda v: 0 <= v < float("inf"), ">= 0"),
    ("federated.eval_every", lambda v: v >= 1, ">= 1"),
    ("federated.target_accuracy", lambda v: v is None or 0 < v <= 1, "0 < target_accuracy <= 1 or null"),
    ("federated.dropout_rate", lambda v: 0 <= v < 1, "0 <= dropout_rate < 1"),
    ("federated.exclude", lambda v: all(k >= 0 for k in v) and len(set(v)) == len(v), "clients by number, each once"),
    ("federated.idle", lambda v: all(k >= 0 for k in v) and len(set(v)) == len(v), "clients by number, each once"),
    ("federated.straggler_rate", lambda v: 0 <= v <= 1, "0 to 1"),
    ("server.optimizer", *_one_of("sgd", "momentum", "adam", "yogi", "adagrad")),
    ("server.lr", lambda v: 0 <= v < float("inf"), ">= 0"),
    ("server.alphas", lambda v: all(0 <= a < float("inf") for a in v), "numbers >= 0"),
    ("server.alpha_samples", lambda v: v >= 1, ">= 1"),
    ("server.momentum", lambda v: 0 <= v < 1, "0 <= momentum < 1"),
    ("server.beta1", lambda v: 0 <= v < 1, "0 <= beta1 < 1"),
    ("server.beta2", lambda v: 0 <= v < 1, "0 <= beta2 < 1"),
    ("server.tau", lambda v: v > 0, "> 0"),
    ("server.merge", lambda v: v in RULES, " | ".join(RULES)),
    ("server.trim", lambda v: 0 <= v < 0.5, "0 <= trim < 0.5"),
    ("server.clip_norm", lambda v: v is None or v > 0, "> 0 or null"),
    ("server.ties_density", lambda v: 0 < v <= 1, "0 < ties_density <= 1"),
    ("server.drop", lambda v: 0 <= v < 1, "0 <= drop < 1"),
    ("server.top", lambda v: 0 <= v < 1, "0 <= top < 1"),
    ("server.bottom", lambda v: 0 <= v < 1, "0 <= bottom < 1"),
    ("server.fisher_samples", lambda v: v >= 1, ">= 1"),
    ("server.norm_bound", lambda v: v is None or v > 0, "> 0 or null"),
    ("privacy.clip", lambda v: v is None or 0 < v < float("inf"), "> 0 or null"),
    ("privacy.noise", lambda v: 0 <= v < float("inf"), ">= 0"),
    ("privacy.delta", lambda v: 0 < v < 1, "0 < delta < 1"),
    ("privacy.range", lambda v: 0 < v < float("inf"), "> 0"),
    ("deploy.wait", lambda v: v >= 0, ">= 0"),
    ("deploy.deadline", lambda v: v > 0, "> 0"),
    ("deploy.max_samples", lambda v: v >= 1, ">= 1"),
    ("deploy.min_fraction", lambda v: 0 < v <= 1, "0 < min_fraction <= 1"),
    ("mask.strategy", lambda v: v is None or v in STRATEGIES, " | ".join(STRATEGIES)),
    ("mask.density", lambda v: 0 < v <= 1, "0 < density <= 1 (sparsity is 1 - density)"),
    ("mask.rounds", lambda v: v >= 1, ">= 1"),
    ("mask.soft", lambda v: 0 <= v <= 1, "0 to 1"),
    ("mask.scope", *_one_of("central", "federated")),
    ("mask.labels_from", *_one_of("model", "data", "exact")),
    ("mask.score", *_one_of("log_prob", "logit")),
    ("mask.samples", lambda v: v is None or v >= 1, ">= 1 or null"),
    ("mask.without", lambda v: set(v) < set(KINDS), f"any but all of {', '.join(KINDS)}"),
    ("run.if_exists", *_one_of("error", "resume")),
    ("run.keep_last", lambda v: v >= 1, ">= 1"),
    ("run.keep_best", lambda v: v >= 1, ">= 1"),
    ("run.checkpoint_minutes", lambda v: v >= 0, ">= 0"),
    ("run.trackers", lambda v: set(v) <= {"tensorboard", "wandb", "mlflow"}, "any of tensorboard, wandb, mlflow"),
]


RULES_OF_ONE_S_OWN = ("mask.strategy", "server.merge", "optim.schedule")  # registries that a user's file may add to


def validate(config: Config, *, to_train: bool = True) -> Config:
    """Ranges of single keys, then what must hold between keys. `to_train` False: what a run was made with may be a rule that is not known here."""
    for path, holds, allowed in CHECKS:
        if not to_train and path in RULES_OF_ONE_S_OWN:
            continue
        value: Any = config
        for part in path.split("."):
            value = getattr(value, part)
        if not holds(value):
            raise bad_value(path, value, allowed)
    if config.optim.nesterov and (config.optim.momentum == 0 or config.optim.dampening != 0):
        raise UserError("optim.nesterov: true given, allowed only with optim.momentum > 0 and optim.dampening = 0")
    if config.train.patience is not None and config.data.val_fraction == 0:
        raise UserError("train.patience: early stopping needs a validation set, but data.val_fraction is 0")
    if config.head == "ridge" and config.data.val_fraction == 0:
        raise UserError("head: ridge chooses its lambda on a validation set, but data.val_fraction is 0")
    if config.mask.strategy and not config.mask.path:
        if config.mask.scope == "central" and config.data.val_fraction == 0 and config.mask.strategy in SCORED:
            raise UserError("mask.scope: central scores on a validation set, but data.val_fraction is 0")
        if config.mask.scope == "federated" and not config.experiment.startswith("fed"):
            raise UserError(f"mask.scope: federated given, allowed is central for {config.experiment}, which has no clients")
    if config.mask.path and not config.mask.strategy:
        raise UserError("mask.path: a mask is given but mask.strategy is null (dense); name the strategy that it came from")
    if config.federated.client_vectors and (config.server.optimizer, config.server.merge) != ("sgd", "mean"):
        raise UserError("federated.client_vectors: what a client added is defined for server.optimizer=sgd and server.merge=mean only")
    for key in ("exclude", "idle"):
        if gone := [k for k in getattr(config.federated, key) if k >= config.federated.clients]:
            raise bad_value(f"federated.{key}", gone[0], f"below federated.clients, {config.federated.clients}")
    if not any(map(config.federated.trains, range(config.federated.clients))):
        raise UserError(
            f"federated.exclude, federated.idle: all {config.federated.clients} clients given, allowed is to leave one that trains"
        )
    if config.federated.target_accuracy is not None and config.data.val_fraction == 0:
        raise UserError("federated.target_accuracy: it is reached on a validation set, but data.val_fraction is 0")
    if config.server.alphas and config.server.optimizer != "sgd":
        raise UserError(f"server.alphas: α is chosen for server.optimizer=sgd only, {config.server.optimizer!r} given")
    if config.server.alphas and config.data.val_fraction == 0:
        raise UserError("server.alphas: α is chosen on a validation set, but data.val_fraction is 0")
    if config.server.merge == "breadcrumbs" and config.server.top + config.server.bottom >= 1:
        raise bad_value("server.bottom", config.server.bottom, f"below 1 - server.top, {1 - config.server.top:g}")
    if config.privacy.noise and config.privacy.clip is None:
        raise UserError("privacy.noise: noise hides an update only if its length is bounded; set privacy.clip as well")
    if config.privacy.noise and (config.server.merge != "mean" or config.federated.algorithm not in ("fedavg", "fedprox")):
        raise UserError("privacy.noise: its accounting holds for server.merge=mean and federated.algorithm=fedavg or fedprox only")
    if to_train and config.privacy.clip is not None and config.federated.algorithm == "scaffold":
        raise UserError(
            "privacy.clip: it bounds updates, but scaffold's control variates are made of them as they come; allowed with the others"
        )
    if config.privacy.noise and config.federated.client_vectors:
        raise UserError("federated.client_vectors: keeping each client's part would undo what privacy.noise is for")
    if config.privacy.secure_aggregation:
        if config.server.merge != "mean" or config.federated.algorithm not in ("fedavg", "fedprox"):
            raise UserError("privacy.secure_aggregation: only a mean is learned; allowed with server.merge=mean and fedavg or fedprox")
        for key in ("privacy.clip", "server.norm_bound", "federated.client_vectors", "federated.client_metrics"):
            section, name = key.split(".")
            if getattr(getattr(config, section), name):
                raise UserError(f"{key}: looks at single updates, which privacy.secure_aggregation hides from the server")
    if config.model.freeze_head and config.model.freeze_backbone:
        raise UserError("model.freeze_head: with model.freeze_backbone nothing is left to train")
    return config


@cache
def known_keys() -> tuple[str, ...]:
    """Every dotted key of the schema, sections included."""
    return tuple(_keys_of(OmegaConf.to_container(OmegaConf.structured(Config))))


def _keys_of(section: Any, prefix: str = "") -> Iterator[str]:
    for name, value in section.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _keys_of(value, f"{prefix}{name}.")
