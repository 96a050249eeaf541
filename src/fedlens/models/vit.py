"""A Vision Transformer with the parameter names of DINO's public checkpoint (Caron et al. 2021), and DINOv2's LayerScale.

Each parameter may have a leading client axis, independently of the others: the same code runs a single network, a cohort
(`torch.func.functional_call` with stacked parameters and images [clients, batch, channels, height, width]), or one with shared frozen ones.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens.errors import UserError
from fedlens.seeding import torch_rng

SHORT = 256  # tokens; up to this many, explicit attention in bf16 on CPU is faster than SDPA (224 px have 197)
HALF_RESIDUAL = True  # under autocast the residual stream has autocast's dtype, not float32: half the memory traffic


@dataclass(frozen=True)
class ViTShape:
    """The dimensions of a plain ViT."""

    patch: int
    dim: int
    depth: int
    heads: int
    image_size: int  # pixels; the size of the published positions
    layer_scale: bool = False


def per_client(param: Tensor, ndim: int, like: Tensor) -> Tensor:
    """Return a parameter of `ndim` own axes, shaped to broadcast over `like` [(clients,) …, *own axes]."""
    if param.ndim == ndim:
        return param
    return param.view(param.shape[0], *(1,) * (like.ndim - 1 - ndim), *param.shape[1:])


class AddBias(torch.autograd.Function):
    """The sum rows + bias per client, with the bias gradient as a matrix product.

    A plain sum is fused into the next layer's backward pass, which triples that kernel's time on a GPU; `baddbmm` materialises the bias.
    """

    @staticmethod
    def forward(ctx: object, rows: Tensor, bias: Tensor) -> Tensor:  # [clients, rows, out], [clients, out]
        return rows + bias.unsqueeze(1)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, Tensor]:
        ones = grad.new_ones(1, 1, 1).expand(len(grad), 16, grad.shape[1])  # 16 rows: the minimum for tensor cores
        return grad, torch.bmm(ones, grad)[:, 0]


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return x Wᵀ + b, [(clients,) …, in] -> [(clients,) …, out]; a client axis on W makes it one batched product."""
    if weight.ndim == 2:
        if bias.ndim == 1:
            return F.linear(x, weight, bias)
        out = F.linear(x, weight)
        return out + per_client(bias.to(out.dtype), 1, out)
    rows = torch.bmm(x.reshape(x.shape[0], -1, x.shape[-1]), weight.mT)  # [clients, rows, out]
    bias = bias.to(rows.dtype)
    if bias.ndim == 1:
        rows = rows + bias
    else:
        rows = AddBias.apply(rows, bias) if rows.is_cuda else rows + bias.unsqueeze(1)  # type: ignore[no-untyped-call]
    return rows.view(*x.shape[:-1], weight.shape[-2])


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        if self.weight.ndim == 1 and self.bias.ndim == 1:
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        plain = F.layer_norm(x, self.normalized_shape, eps=self.eps)
        return torch.addcmul(per_client(self.bias, 1, x), plain, per_client(self.weight, 1, x))


class LayerScale(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * per_client(self.gamma, 1, x)


class PatchEmbed(nn.Module):
    """The strided convolution of the paper, computed as patches times a matrix, which allows a client axis."""

    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        self.patch = shape.patch
        self.proj = nn.Conv2d(3, shape.dim, kernel_size=shape.patch, stride=shape.patch)

    def forward(self, images: Tensor) -> Tensor:  # [(clients,) batch, 3, H, W] -> [(clients,) batch, patches, dim]
        *lead, channels, height, width = images.shape
        if channels == 1:  # repeat grey images in all three channels
            images, channels = images.expand(*lead, 3, height, width), 3
        p = self.patch
        if channels != 3 or height % p or width % p:
            raise UserError(f"model: images must have 1 or 3 channels and sides divisible by {p}, got {channels}x{height}x{width}.")
        patches = images.reshape(*lead, channels, height // p, p, width // p, p)
        patches = patches.movedim((-4, -2), (-5, -4)).reshape(*lead, (height // p) * (width // p), channels * p * p)
        assert self.proj.bias is not None
        return linear(patches, self.proj.weight.flatten(-3), self.proj.bias)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return softmax(q kᵀ / √d) v, all [images, heads, tokens, d]."""
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and k.shape[-2] <= SHORT:  # three to six times as fast as SDPA
        return torch.softmax((q * q.shape[-1] ** -0.5) @ k.mT, dim=-1) @ v
    return F.scaled_dot_product_attention(q, k, v)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = Linear(dim, 3 * dim)
        self.proj = Linear(dim, dim)

    def forward(self, x: Tensor, cls_only: bool = False) -> Tensor:
        *lead, _, dim = x.shape
        weight, bias, head = self.qkv.weight, self.qkv.bias, dim // self.heads
        if cls_only:  # the query of the class token, keys and values of all tokens
            parts = zip((x[..., :1, :], x, x), torch.split(weight, dim, -2), torch.split(bias, dim, -1), strict=True)
            q, k, v = (linear(source, w, b) for source, w, b in parts)
        else:
            q, k, v = self.qkv(x).split(dim, dim=-1)
        # Clients and images share an axis in attention: [clients·batch, heads, tokens, head].
        q, k, v = (t.reshape(-1, t.shape[-2], self.heads, head).transpose(1, 2) for t in (q, k, v))
        mixed = attend(q, k, v).transpose(1, 2)
        out: Tensor = self.proj(mixed.reshape(*lead, mixed.shape[1], dim))
        return out


class Mlp(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1 = Linear(dim, 4 * dim)
        self.fc2 = Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


class Block(nn.Module):
    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        self.norm1 = LayerNorm(shape.dim, eps=1e-6)
        self.attn = Attention(shape.dim, shape.heads)
        self.ls1 = LayerScale(shape.dim) if shape.layer_scale else nn.Identity()
        self.norm2 = LayerNorm(shape.dim, eps=1e-6)
        self.mlp = Mlp(shape.dim)
        self.ls2 = LayerScale(shape.dim) if shape.layer_scale else nn.Identity()

    def forward(self, x: Tensor, cls_only: bool = False) -> Tensor:
        """Return the block's output; with `cls_only` its row for the class token, at a sixth of the cost."""
        x = (x[..., :1, :] if cls_only else x) + self.ls1(self.attn(self.norm1(x), cls_only))
        out: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return out


def resize_positions(pos: Tensor, rows: int, cols: int) -> Tensor:
    """Resample positions bicubically as DINO does, with 0.1 added to the grid so that rounding never loses a row."""
    side = int((pos.shape[-2] - 1) ** 0.5)
    if (rows, cols) == (side, side):
        return pos
    cls, grid = pos[..., :1, :], pos[..., 1:, :]
    lead, dim = grid.shape[:-2], grid.shape[-1]
    grid = grid.reshape(-1, side, side, dim).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, scale_factor=((rows + 0.1) / side, (cols + 0.1) / side), mode="bicubic")
    assert grid.shape[-2:] == (rows, cols)
    return torch.cat([cls, grid.permute(0, 2, 3, 1).reshape(*lead, rows * cols, dim)], dim=-2)


class ViT(nn.Module):
    """A plain ViT: normalised images [(clients,) batch, 3, H, W] -> logits [(clients,) batch, classes]."""

    client_axis = True  # parameters may have a leading client axis
    fitted_head = False  # True after loading a checkpoint that has a head

    def __init__(self, shape: ViTShape, num_classes: int, *, image_size: int | None = None, dropout: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        self.shape, self.dropout = shape, dropout
        self.image_size = image_size or shape.image_size
        self.patch_embed = PatchEmbed(shape)
        tokens = (self.image_size // shape.patch) ** 2
        self.cls_token = nn.Parameter(torch.zeros(1, 1, shape.dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens + 1, shape.dim))
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.depth)])
        self.norm = LayerNorm(shape.dim, eps=1e-6)
        self.head = Linear(shape.dim, num_classes)
        self.reset(seed)

    def reset(self, seed: int) -> None:
        """Initialise as DINO does, from a keyed generator."""
        rng = torch_rng(seed, "init")
        for name, param in self.named_parameters():
            if name == "patch_embed.proj.weight":
                bound = param[0].numel() ** -0.5
                nn.init.uniform_(param, -bound, bound, generator=rng)
            elif name in ("cls_token", "pos_embed") or param.ndim == 2:
                nn.init.trunc_normal_(param, std=0.02, generator=rng)
            elif ("norm" in name and name.endswith("weight")) or name.endswith("gamma"):
                nn.init.ones_(param)
            else:
                nn.init.zeros_(param)

    def features(self, images: Tensor) -> Tensor:
        """Return the class token after the last norm, [(clients,) batch, dim]."""
        x, p = self.patch_embed(images), self.shape.patch
        pos = resize_positions(self.pos_embed, images.shape[-2] // p, images.shape[-1] // p)
        cls = self.cls_token.expand(*x.shape[:-2], 1, x.shape[-1])
        x = torch.cat([cls, x], dim=-2) + pos
        if HALF_RESIDUAL and torch.is_autocast_enabled(x.device.type):  # else float32 positions promote the stream
            x = x.to(torch.get_autocast_dtype(x.device.type))
        for block in self.blocks[:-1]:
            x = block(x)
        x = self.blocks[-1](x, cls_only=True)  # the head reads nothing else
        out: Tensor = self.norm(x).squeeze(-2)
        return out

    def forward(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        """Return logits. `keep`: a keyed dropout mask for the features, divided by the keep rate; by default torch's own dropout."""
        z = self.features(images)
        z = F.dropout(z, self.dropout, self.training) if keep is None else z * keep
        out: Tensor = self.head(z)
        return out
