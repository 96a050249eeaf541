"""Pretrain the tiny ViT without labels by DINO (Caron et al. 2021), on the Fashion-MNIST images outside the packaged mini set.

A student sees all crops of an image, a teacher (a moving average of the student) only the large ones. The student learns to predict the
teacher's prototype scores for another crop. Centring prevents collapse to one prototype, sharpening collapse to uniform scores. Only the
ridge probe reads labels, those of the mini set.

    python scripts/pretrain_tiny.py --shape p7 --out tiny_p7.safetensors --log tiny_p7.jsonl
    python scripts/pretrain_tiny.py --shape p7 --out /tmp/smoke.safetensors --steps 3 --batch 32     # a smoke test
"""

import argparse
import copy
import gzip
import hashlib
import json
import math
import time
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedlens.models.heads import choose_ridge, ridge_statistics
from fedlens.models.vit import ViT, ViTShape
from fedlens.seeding import torch_rng

SHAPES = {
    "p7": ViTShape(patch=7, dim=128, depth=6, heads=4, image_size=28),
    "p4": ViTShape(patch=4, dim=96, depth=6, heads=3, image_size=28),
}
SIDE = 28  # pixels
MEAN, STD = 0.2860, 0.3530  # of the training images, in [0, 1]
CLASSES = 10  # used by the probe only

# views
GLOBAL_CROPS, GLOBAL_AREA = 2, (0.4, 1.0)  # fraction of the image's area
LOCAL_CROPS, LOCAL_AREA = 6, (0.1, 0.4)
LOCAL_SIZE = {7: 14, 4: 16}  # patch -> pixels, close to the size of such a crop in the image
JITTER, JITTER_RATE = 0.4, 0.8  # brightness and contrast, 1 ± 0.4
BLUR, BLUR_RATE = 1.0, 0.3  # maximum widening of the interpolation kernel, in pixels
DRAWS = 9  # uniform numbers per view

# head
HIDDEN, BOTTLENECK, NAMES = 512, 128, 1024  # NAMES: prototypes; the paper has 65,536, for far more diverse data

# optimisation
STUDENT_TEMP = 0.1
TEACHER_TEMP, TEMP_WARMUP = 0.04, 0.15  # start, and fraction of all steps to reach --teacher-temp
LR_PER_256 = 5e-4  # the paper's rule: learning rate = this · batch / 256
LR_WARMUP, LR_END = 0.05, 1e-6  # LR_WARMUP: fraction of all steps
WEIGHT_DECAY = (0.04, 0.4)  # cosine from the first to the second
TEACHER_MOMENTUM = 0.99  # cosine to 1; the paper's 0.996 suits ten times more steps
CENTRE_MOMENTUM = 0.9
CLIP = 3.0  # norm of the gradient
LOG_STEPS, PROBE_EPOCHS = 50, 25


def read_idx_images(path: Path) -> np.ndarray:
    """Read MNIST's idx format: magic number 2051, count, rows, columns, then bytes."""
    raw = gzip.decompress(path.read_bytes())
    magic, count, rows, cols = np.frombuffer(raw, ">u4", 4)
    assert magic == 2051 and (rows, cols) == (SIDE, SIDE), f"{path}: expected a file of {SIDE}x{SIDE} images"
    return np.frombuffer(raw, np.uint8, offset=16).reshape(count, rows, cols)


def images_outside(images: np.ndarray, mini: dict[str, np.ndarray]) -> np.ndarray:
    """Return the images that are not in the mini set, so that the package trains and tests on unseen images only."""
    mini_digests = {hashlib.sha256(image.tobytes()).digest() for image in np.concatenate([mini["x_train"], mini["x_test"]])}
    outside = images[[hashlib.sha256(image.tobytes()).digest() not in mini_digests for image in images]]
    # 6,000 of the 60,000 images are in the mini set; duplicates of them are dropped too.
    assert 53_900 <= len(outside) <= 54_000, f"expected 54,000 images or a few less, got {len(outside)}"
    return outside


def resampling(start: Tensor, extent: Tensor, width: Tensor, size: int) -> Tensor:
    """Return matrices that sample `size` points of [start, start + extent] from SIDE pixels: [batch, views] -> [batch, views, size, SIDE].

    A triangular kernel of half-width 1 pixel interpolates, a wider one blurs; a negative extent mirrors. So crop, resize, flip and blur
    are one matrix per axis.
    """
    points = (torch.arange(size, device=start.device) + 0.5) / size
    pixels = torch.arange(SIDE, device=start.device) + 0.5
    distance = (start[..., None] + extent[..., None] * points)[..., None] - pixels
    weight = F.relu(1 - distance.abs() / width[..., None, None])
    return weight / weight.sum(-1, keepdim=True)


def crops(images: Tensor, draws: Tensor, area: tuple[float, float], size: int) -> Tensor:
    """Return normalised views [views·batch, 1, size, size] of uint8 [batch, SIDE, SIDE], by uniform draws [batch, views, DRAWS]."""
    share, ratio, y, x, flip, jitter, bright, contrast, blur = draws.unbind(-1)  # each [batch, views]
    share = area[0] + (area[1] - area[0]) * share
    ratio = torch.exp((2 * ratio - 1) * math.log(4 / 3))  # height / width
    height, width = SIDE * (share * ratio).sqrt().clamp(max=1), SIDE * (share / ratio).sqrt().clamp(max=1)
    top, left = y * (SIDE - height), x * (SIDE - width)
    left, across = torch.where(flip < 0.5, left, left + width), torch.where(flip < 0.5, width, -width)
    soft = BLUR * (blur / BLUR_RATE) * (blur < BLUR_RATE)  # one draw decides whether to blur, and how much
    rows = resampling(top, height, soft + (height / size).clamp(min=1), size)
    cols = resampling(left, across, soft + (width / size).clamp(min=1), size)
    view = rows @ (images[:, None].float() / 255) @ cols.mT  # [batch, views, size, size]

    strength = JITTER * (jitter < JITTER_RATE)
    bright, contrast = (1 + strength * (2 * draw - 1) for draw in (bright, contrast))
    view = (view * bright[..., None, None]).clamp(0, 1)
    grey = view.mean((-2, -1), keepdim=True)
    view = (grey + (view - grey) * contrast[..., None, None]).clamp(0, 1)
    return ((view - MEAN) / STD).transpose(0, 1).reshape(-1, 1, size, size)


class Dino(nn.Module):
    """Backbone and projection head: images [batch, 1, H, W] -> features [batch, dim] and prototype scores [batch, NAMES]."""

    def __init__(self, shape: ViTShape, seed: int) -> None:
        super().__init__()
        self.backbone = ViT(shape, CLASSES, seed=seed)
        self.backbone.head = nn.Identity()  # DINO trains no classifier
        self.mlp = nn.Sequential(
            nn.Linear(shape.dim, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, BOTTLENECK)
        )
        self.names = nn.Parameter(torch.empty(NAMES, BOTTLENECK))
        rng = torch_rng(seed, "dino-head")
        for param in (*self.mlp.parameters(), self.names):
            nn.init.trunc_normal_(param, std=0.02, generator=rng) if param.ndim == 2 else nn.init.zeros_(param)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        z = self.backbone.features(images)
        low = self.mlp(z)
        with torch.autocast(images.device.type, enabled=False):  # at temperature 0.04, bf16 cosines are too coarse
            # Weight normalisation with gain 1, as in the paper for small models.
            scores = F.linear(F.normalize(low.float(), dim=-1), F.normalize(self.names, dim=-1))
        return z.float(), scores


def dino_loss(
    student: Dino, teacher: Dino, images: Tensor, draws: Tensor, centre: Tensor, teacher_temp: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cross-entropy over pairs of different views, the teacher's mean scores for the centre, and signs of collapse."""
    large = crops(images, draws[:, :GLOBAL_CROPS], GLOBAL_AREA, SIDE)
    small = crops(images, draws[:, GLOBAL_CROPS:], LOCAL_AREA, LOCAL_SIZE[student.backbone.shape.patch])
    with torch.autocast(images.device.type, torch.bfloat16, enabled=images.device.type == "cuda"):
        with torch.no_grad():
            z, scores = teacher(large)
        answers = torch.cat([student(large)[1], student(small)[1]])
    target = F.softmax((scores - centre) / teacher_temp, dim=-1).view(GLOBAL_CROPS, len(images), NAMES)
    log_p = F.log_softmax(answers / STUDENT_TEMP, dim=-1).view(GLOBAL_CROPS + LOCAL_CROPS, len(images), NAMES)
    # Large views come first in both, in the same order: each teacher view is compared with the sum of all other student views.
    others = log_p.sum(0) - log_p[:GLOBAL_CROPS]
    loss = -(target * others).sum(-1).mean() / (GLOBAL_CROPS + LOCAL_CROPS - 1)

    usage = target.mean((0, 1))
    entropy = torch.special.entr(target).sum(-1).mean()  # per image; log NAMES if the teacher is uniform
    usage_entropy = torch.special.entr(usage).sum()  # of the mean target; near `entropy` if all images get the same one
    spread = F.normalize(z, dim=-1).std(0).mul(z.shape[1] ** 0.5).mean()  # 1: features fill the sphere, 0: one point
    return loss, scores.mean(0, keepdim=True), torch.stack([loss.detach(), entropy, usage_entropy, spread])


def cosine(start: float, end: float, progress: float) -> float:
    """Return the value of a half cosine from start to end."""
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def probe(backbone: ViT, mini: dict[str, np.ndarray], device: torch.device) -> dict[str, float]:
    """Return the accuracy of a ridge head on features of clean images; λ is chosen on a tenth of the training images."""

    def features(images: np.ndarray) -> Tensor:
        pixels = (torch.from_numpy(images).float() / 255 - MEAN) / STD
        return torch.cat([backbone.features(part[:, None].to(device)).cpu() for part in pixels.split(1000)])

    z, z_test = features(mini["x_train"]), features(mini["x_test"])
    y, y_test = torch.from_numpy(mini["y_train"]).long(), torch.from_numpy(mini["y_test"]).long()
    order = torch.randperm(len(y), generator=torch_rng(0, "probe"))  # the same split for all probes
    by_class = [order[y[order] == label] for label in range(CLASSES)]
    val = torch.cat([rows[: len(rows) // 10] for rows in by_class])
    train = torch.cat([rows[len(rows) // 10 :] for rows in by_class])
    choice = choose_ridge(*ridge_statistics(z[train], y[train], CLASSES), z[val], y[val])
    correct = F.linear(z_test.double(), choice.weight, choice.bias).argmax(1) == y_test
    return {"test_accuracy": correct.double().mean().item(), "val_accuracy": choice.val_accuracy, "lambda": choice.lam}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="p7")
    parser.add_argument("--out", type=Path, required=True, help="the teacher's backbone, safetensors in fp16")
    parser.add_argument("--log", type=Path, help="JSON lines; default: beside --out")
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"), help="folder of train-images-idx3-ubyte.gz")
    parser.add_argument("--mini", type=Path, default=Path(str(files("fedlens") / "data/assets/fashion_mnist_mini.npz")))
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--steps", type=int, help="total steps instead of --epochs; the schedules are compressed to fit")
    parser.add_argument("--batch", type=int, default=1024)
    # The paper's large runs end at 0.07, which here made the targets almost uniform within a hundred steps.
    parser.add_argument("--teacher-temp", type=float, default=0.04, help="final temperature of the teacher")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true", help="do not use torch.compile on a GPU")
    args = parser.parse_args()
    args.log = args.log or args.out.with_suffix(".jsonl")
    return args


def schedules(args: argparse.Namespace, step: int, steps: int) -> dict[str, float]:
    """Return the learning rate, weight decay, teacher momentum and teacher temperature of a step."""
    progress = step / steps
    warm = min((step + 1) / (LR_WARMUP * steps), 1.0)
    return {
        "lr": warm * cosine(LR_PER_256 * args.batch / 256, LR_END, max(progress - LR_WARMUP, 0.0) / (1 - LR_WARMUP)),
        "teacher_temp": TEACHER_TEMP + (args.teacher_temp - TEACHER_TEMP) * min(progress / TEMP_WARMUP, 1.0),
        "momentum": cosine(TEACHER_MOMENTUM, 1.0, progress),
        "weight_decay": cosine(*WEIGHT_DECAY, progress),
    }


def train(args: argparse.Namespace, student: Dino, data: Tensor, steps: int, log: Callable[..., None], probed: Callable[..., dict]) -> ViT:
    """Train the student and return the teacher's backbone."""
    device = data.device
    teacher = copy.deepcopy(student).requires_grad_(False).eval()
    centre = torch.zeros(1, NAMES, device=device)
    matrices = [param for param in student.parameters() if param.ndim > 1]
    vectors = [param for param in student.parameters() if param.ndim == 1]  # biases and norms have no weight decay
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], fused=device.type == "cuda")
    loss_fn = torch.compile(dino_loss, dynamic=False) if device.type == "cuda" and not args.no_compile else dino_loss
    steps_per_epoch, order = len(data) // args.batch, torch.empty(0, dtype=torch.long)
    for step in range(steps):
        epoch, position = divmod(step, steps_per_epoch)
        if position == 0:
            order = torch.randperm(len(data), generator=torch_rng(args.seed, "dino-order", epoch)).to(device)
        images = data[order[position * args.batch : (position + 1) * args.batch]]
        # Drawn on the CPU, so that every device sees the same views; pinned, so that the copy does not wait for the GPU.
        size, rng = (args.batch, GLOBAL_CROPS + LOCAL_CROPS, DRAWS), torch_rng(args.seed, "dino-views", step)
        draws = torch.rand(size, generator=rng, pin_memory=device.type == "cuda").to(device, non_blocking=True)
        now = schedules(args, step, steps)
        for group in optimizer.param_groups:
            group["lr"] = now["lr"]
        optimizer.param_groups[0]["weight_decay"] = now.pop("weight_decay")

        # The temperature is a tensor: torch.compile would recompile for each new number.
        loss, scores, watched = loss_fn(student, teacher, images, draws, centre, torch.full((), now["teacher_temp"], device=device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if step < steps / args.epochs:  # prototypes are frozen in the first epoch, as in the paper
            student.names.grad = None
        nn.utils.clip_grad_norm_(student.parameters(), CLIP)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), 1 - now["momentum"])
            centre.lerp_(scores, 1 - CENTRE_MOMENTUM)

        done = step + 1
        if done % LOG_STEPS == 0 or done in (1, steps):
            names = ("loss", "teacher_entropy", "usage_entropy", "feature_spread")
            values = {name: round(value, 4) for name, value in zip(names, watched.tolist(), strict=True)}
            assert math.isfinite(values["loss"]), f"the loss is {values['loss']} after {done} steps"
            log(event="step", step=done, epoch=round(done / steps_per_epoch, 2), **values, **now)
        if done % (PROBE_EPOCHS * steps_per_epoch) == 0:
            log(event="probe", epoch=epoch + 1, **probed(teacher.backbone))
    return teacher.backbone


def main() -> None:
    args = parse()
    device, started = torch.device(args.device), time.monotonic()
    torch.set_float32_matmul_precision("high")
    shape = SHAPES[args.shape]
    with np.load(args.mini) as arrays:
        mini = {name: arrays[name] for name in ("x_train", "y_train", "x_test", "y_test")}
    data = torch.from_numpy(images_outside(read_idx_images(args.data / "train-images-idx3-ubyte.gz"), mini)).to(device)
    for path in (args.out, args.log):
        path.parent.mkdir(parents=True, exist_ok=True)
    args.log.write_text("")

    def log(**line: object) -> None:
        text = json.dumps({**line, "seconds": round(time.monotonic() - started, 1)})
        with args.log.open("a") as file:
            file.write(text + "\n")
        print(text, flush=True)

    student = Dino(shape, args.seed).to(device)
    steps = args.steps or args.epochs * (len(data) // args.batch)
    constants = {name: value for name, value in globals().items() if name.isupper() and isinstance(value, int | float | tuple)}
    config = {name: value for name, value in vars(args).items() if not isinstance(value, Path)}  # logs are published without local paths
    parameters = sum(param.numel() for param in student.backbone.parameters())
    config |= {"total_steps": steps, "images": len(data), "parameters": parameters, "local_size": LOCAL_SIZE[shape.patch]}
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    log(event="config", **config, **constants, where=where, torch=torch.__version__)
    probed = partial(probe, mini=mini, device=device)
    random = [probed(ViT(shape, CLASSES, seed=seed).to(device).eval())["test_accuracy"] for seed in range(3)]
    random_accuracy = sum(random) / len(random)
    log(event="random", probes=random, test_accuracy=random_accuracy)
    backbone = train(args, student, data, steps, log, probed)

    # A single metadata entry, because the order of several is not fixed and the file must have one hash.
    recipe = {"script": "scripts/pretrain_tiny.py", "shape": args.shape, "steps": steps, "batch": args.batch, "seed": args.seed}
    tensors = {name: value.half().cpu().contiguous() for name, value in backbone.state_dict().items()}
    save_file(tensors, args.out, metadata={"recipe": json.dumps(recipe)})
    backbone.load_state_dict({name: value.float() for name, value in load_file(args.out).items()}, strict=True)  # rounded to fp16
    result = probed(backbone)
    digest = hashlib.sha256(args.out.read_bytes()).hexdigest()
    gain = result["test_accuracy"] - random_accuracy
    log(event="summary", **result, random_accuracy=random_accuracy, gain=gain, bytes=args.out.stat().st_size, sha256=digest)


if __name__ == "__main__":
    main()
