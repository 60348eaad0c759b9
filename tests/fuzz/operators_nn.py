"""Operators of neural networks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .operators import Env, at_least, exactly, operator


@operator(4)
def softmax(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    draw = env.random()
    x = at_least(x, 1)
    dim = draw.randrange(x.dim())
    return x.softmax(dim) if draw.random() < 0.6 else x.log_softmax(dim)


@operator(4)
def normalise(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    draw = env.random()
    x = at_least(x, 2)
    kind = draw.randrange(6)
    if kind == 0:
        last = (x.shape[-1],)
        return F.layer_norm(x, last, env.weight("w", last), env.weight("b", last) if draw.random() < 0.7 else None)
    if kind == 1:
        return F.layer_norm(x, (x.shape[-1],))
    if kind == 2:
        channels = (x.shape[1],)
        return F.batch_norm(x, None, None, env.weight("w", channels), env.weight("b", channels), training=True)
    if kind == 3:
        return F.batch_norm(x, x.new_zeros(x.shape[1]), x.new_ones(x.shape[1]), training=False)
    if kind == 4:
        return F.group_norm(x, 1, env.weight("w", (x.shape[1],)), env.weight("b", (x.shape[1],)))
    return F.normalize(x, dim=-1)


@operator(4)
def convolution(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    draw = env.random()
    dims = draw.choice((1, 2, 2, 3))
    x = exactly(x, dims + 2)
    channels = x.shape[1]
    bias = env.weight("b", (2,)) if draw.random() < 0.5 else None
    if draw.random() < 0.25:
        weight = env.weight("w", (channels, 2, *[2] * dims), 0.5)
        return (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1](x, weight, bias)
    weight = env.weight("w", (2, channels, *[3] * dims), 0.5)
    stride = draw.choice((1, 1, 2))
    return (F.conv1d, F.conv2d, F.conv3d)[dims - 1](x, weight, bias, stride=stride, padding=1)


@operator(3)
def pool(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    draw = env.random()
    kind = draw.randrange(5)
    if kind == 0:
        return F.max_pool2d(exactly(x, 4), 2, stride=1)
    if kind == 1:
        return F.avg_pool2d(exactly(x, 4), 2, stride=1)
    if kind == 2:
        return F.max_pool1d(exactly(x, 3), 2)
    if kind == 3:
        return F.adaptive_avg_pool2d(exactly(x, 4), (1, 2))
    return F.interpolate(exactly(x, 4), scale_factor=2, mode=draw.choice(("nearest", "bilinear")))


@operator(2)
def grid(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    draw = env.random()
    align = draw.random() < 0.5
    solid = draw.random() < 0.5
    x = exactly(x, 5 if solid else 4)
    dims = 3 if solid else 2
    theta = env.weight("theta", (x.shape[0], dims, dims + 1))
    points = F.affine_grid(theta, list(x.shape), align_corners=align)
    return F.grid_sample(x, points, align_corners=align) if draw.random() < 0.5 else points


@operator(4)
def attention(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    draw = env.random()
    x = exactly(x, 3)
    batch, length, width = x.shape
    heads = draw.choice((1, 2))
    w = env.weight("w", (3 * 4 * heads, width), 0.5)
    q, k, v = (part.view(batch, length, heads, 4).transpose(1, 2) for part in F.linear(x, w).split(4 * heads, 2))
    if draw.random() < 0.4:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=draw.random() < 0.5)
    else:
        scores = (q @ k.transpose(-1, -2)) * 0.5
        if draw.random() < 0.5:
            hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(hidden, float("-inf"))
        out = scores.softmax(-1) @ v
    return out.transpose(1, 2).reshape(batch, length, 4 * heads)


@operator(2)
def dropout(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    return x if env.threads > 1 else F.dropout(x, 0.4)


@operator(3)
def loss(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    x = exactly(x, 2)
    kind = env.random().randrange(6)
    classes = env.indices("t", (x.shape[0],), x.shape[1])
    if kind == 0:
        return F.cross_entropy(x, classes)
    if kind == 1:
        return F.mse_loss(x, env.constant("t", tuple(x.shape)))
    if kind == 2:
        return F.binary_cross_entropy_with_logits(x, env.constant("t", tuple(x.shape)).sigmoid())
    if kind == 3:
        return F.smooth_l1_loss(x, env.constant("t", tuple(x.shape)), reduction="none")
    if kind == 4:
        return F.cross_entropy(x, classes, reduction="none", label_smoothing=0.1)
    return F.cosine_similarity(x, env.constant("t", tuple(x.shape)))


@operator(2)
def gates(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    """A step or three of a recurrent cell."""
    draw = env.random()
    x = exactly(x, 2)
    w = env.weight("w", (4 * x.shape[1], x.shape[1]), 0.5)
    h, c = x, torch.zeros_like(x)
    for _ in range(draw.choice((1, 3))):
        i, f, g, o = F.linear(h, w).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    return h


@operator(1)
def prelu(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    draw = env.random()
    x = at_least(x, 2)
    return F.prelu(x, env.weight("p", (x.shape[1],))) if draw.random() < 0.6 else F.glu(torch.cat([x, x], -1))


@operator(1)
def bag(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    table = env.weight("table", (6, 3))
    return F.embedding_bag(env.indices("i", (4, 2), 6), table, mode=env.random().choice(("sum", "mean", "max")))


@operator(1)
def linear_algebra(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    if x.dtype not in (torch.float32, torch.float64):
        return x
    x = exactly(x, 2)[:4]
    square = x @ x.t() + 2 * torch.eye(x.shape[0], dtype=x.dtype, device=x.device)
    kind = env.random().randrange(4)
    if kind == 0:
        return torch.linalg.cholesky(square)
    if kind == 1:
        return torch.linalg.solve(square, x)
    if kind == 2:
        return torch.linalg.inv(square)
    return torch.linalg.slogdet(square).logabsdet
