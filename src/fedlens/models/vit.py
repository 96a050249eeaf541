"""A Vision Transformer with the parameter names of DINO's public checkpoint (Caron et al. 2021), and DINOv2's LayerScale.

Every layer accepts its parameters with or without a leading client axis, each parameter on its own account. So one model
code serves a single network, a whole cohort of clients (`torch.func.functional_call` with stacked parameters and images
[clients, batch, channels, height, width]), and a cohort that shares what it does not train.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens.errors import UserError
from fedlens.seeding import torch_rng

SHORT = 256  # tokens, whose square is written out on a CPU: 224 px have 197
HALF_RESIDUAL = True  # under autocast the residual stream has autocast's type, not float32: half the memory traffic


@dataclass(frozen=True)
class ViTShape:
    """What distinguishes one plain ViT from another."""

    patch: int
    dim: int
    depth: int
    heads: int
    image_size: int  # the size the published positions were made for
    layer_scale: bool = False


def per_client(param: Tensor, ndim: int, like: Tensor) -> Tensor:
    """A parameter of `ndim` own axes, shaped to broadcast over `like` [(clients,) …, *own axes]."""
    if param.ndim == ndim:
        return param
    clients, own = param.shape[0], param.shape[1:]
    return param.view(clients, *(1,) * (like.ndim - 1 - ndim), *own)


class AddBias(torch.autograd.Function):
    """rows + bias for every client, whose bias gradient is a matrix product.

    As a sum it would be fused into the backward pass of what follows, GELU for one, and that kernel then took three times as
    long on a GPU. (`baddbmm` writes the bias out first: a seventh of a round.)
    """

    @staticmethod
    def forward(ctx: object, rows: Tensor, bias: Tensor) -> Tensor:  # [clients, rows, out], [clients, out]
        return rows + bias.unsqueeze(1)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, Tensor]:
        ones = grad.new_ones(1, 1, 1).expand(len(grad), 16, grad.shape[1])  # 16: the least that tensor cores multiply
        return grad, torch.bmm(ones, grad)[:, 0]


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x Wᵀ + b, [(clients,) …, in] -> [(clients,) …, out]; with a client axis on W, one batched product over the clients."""
    if weight.ndim == 2:
        if bias.ndim == 1:
            return F.linear(x, weight, bias)
        out = F.linear(x, weight)
        return out + per_client(bias.to(out.dtype), 1, out)
    rows = torch.bmm(x.reshape(x.shape[0], -1, x.shape[-1]), weight.mT)  # [clients, rows, out]
    if bias.ndim == 1:
        rows = rows + bias.to(rows.dtype)
    elif rows.is_cuda:
        rows = AddBias.apply(rows, bias.to(rows.dtype))  # type: ignore[no-untyped-call]
    else:
        rows = rows + bias.to(rows.dtype).unsqueeze(1)
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
    """The strided convolution of the paper, as patches times a matrix: that takes a client axis."""

    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        self.patch = shape.patch
        self.proj = nn.Conv2d(3, shape.dim, kernel_size=shape.patch, stride=shape.patch)

    def forward(self, images: Tensor) -> Tensor:  # [(clients,) batch, 3, H, W] -> [(clients,) batch, patches, dim]
        *lead, channels, height, width = images.shape
        if channels == 1:  # grey images are shown to all three channels
            images, channels = images.expand(*lead, 3, height, width), 3
        p = self.patch
        if channels != 3 or height % p or width % p:
            raise UserError(f"model: images of shape {channels}x{height}x{width} given, allowed is 1 or 3 channels, sides divisible by {p}")
        patches = images.reshape(*lead, channels, height // p, p, width // p, p)
        patches = patches.movedim((-4, -2), (-5, -4)).reshape(*lead, (height // p) * (width // p), channels * p * p)
        assert self.proj.bias is not None
        return linear(patches, self.proj.weight.flatten(-3), self.proj.bias)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / √d) v, [images, heads, tokens, d]."""
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and k.shape[-2] <= SHORT:  # torch's own takes three to six times as long here
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
        if cls_only:  # the class token asks, all tokens answer
            parts = zip((x[..., :1, :], x, x), torch.split(weight, dim, -2), torch.split(bias, dim, -1), strict=True)
            q, k, v = (linear(of, w, b) for of, w, b in parts)
        else:
            q, k, v = self.qkv(x).split(dim, dim=-1)
        # below, clients and images stand side by side: [clients·batch, heads, tokens, head]
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
        """`cls_only`: the class token's row of the result and nothing else, at a sixth of the cost."""
        x = (x[..., :1, :] if cls_only else x) + self.ls1(self.attn(self.norm1(x), cls_only))
        x = x + self.ls2(self.mlp(self.norm2(x)))
        return x


def resize_positions(pos: Tensor, rows: int, cols: int) -> Tensor:
    """Bicubic, as DINO does it: a scale factor with 0.1 added to the grid, so that rounding never loses a row."""
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
    """images [(clients,) batch, 3, H, W], normalised -> logits [(clients,) batch, classes]."""

    client_axis = True  # any of the parameters may have one
    fitted_head = False  # whether a checkpoint has brought one

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
        """DINO's initialisation, drawn from a generator of our own."""
        rng = torch_rng(seed, "init")
        for name, param in self.named_parameters():
            if name == "patch_embed.proj.weight":
                bound = (param[0].numel()) ** -0.5
                nn.init.uniform_(param, -bound, bound, generator=rng)
            elif name in ("cls_token", "pos_embed") or param.ndim == 2:
                nn.init.trunc_normal_(param, std=0.02, generator=rng)
            elif ("norm" in name and name.endswith("weight")) or name.endswith("gamma"):
                nn.init.ones_(param)
            else:
                nn.init.zeros_(param)

    def features(self, images: Tensor) -> Tensor:
        """The class token after the last norm: [(clients,) batch, dim]."""
        x = self.patch_embed(images)
        p = self.shape.patch
        pos = resize_positions(self.pos_embed, images.shape[-2] // p, images.shape[-1] // p)
        cls = self.cls_token.expand(*x.shape[:-2], 1, x.shape[-1])
        x = torch.cat([cls, x], dim=-2) + pos
        if HALF_RESIDUAL and torch.is_autocast_enabled(x.device.type):  # positions are float32 and would carry the whole stream with them
            x = x.to(torch.get_autocast_dtype(x.device.type))
        for block in self.blocks[:-1]:
            x = block(x)
        x = self.blocks[-1](x, cls_only=True)  # nothing else of the last block is ever read
        out: Tensor = self.norm(x).squeeze(-2)
        return out

    def forward(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        """`keep`: a keyed dropout mask for the features, already divided by the keep rate; without it torch's own dropout."""
        z = self.features(images)
        z = F.dropout(z, self.dropout, self.training) if keep is None else z * keep
        out: Tensor = self.head(z)
        return out
