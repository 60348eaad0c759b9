"""Operators that give views, write into parts of tensors, join and index."""

from __future__ import annotations

from typing import Any

import torch

from .operators import Env, at_least, exactly, fit, operator


@operator(9, complex_too=True)
def view(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    draw = env.random()
    x = at_least(x, 1)
    dim = draw.randrange(x.dim())
    kind = draw.randrange(16)
    if kind == 0:
        return x.transpose(0, -1)
    if kind == 1:
        return x.permute(*reversed(range(x.dim())))
    if kind == 2:
        return x.reshape(-1)
    if kind == 3:
        return x.unsqueeze(dim)
    if kind == 4:
        return x.narrow(dim, x.shape[dim] // 2, x.shape[dim] - x.shape[dim] // 2)
    if kind == 5:
        return x[..., ::2]
    if kind == 6:
        return x.select(dim, -1)
    if kind == 7:
        return x.unsqueeze(0).expand(3, *x.shape)
    if kind == 8:
        return x.transpose(0, -1).contiguous()
    if kind == 9:
        return torch.flip(x, [dim])
    if kind == 10:
        return x.roll(1, dim)
    if kind == 11:
        return at_least(x, 2).diagonal(0, -2, -1)
    if kind == 12:
        return x.unfold(dim, 2, 1).sum(-1)
    if kind == 13:
        return x.expand(2, *x.shape).movedim(0, -1)
    if kind == 14:
        return at_least(x, 4).contiguous(memory_format=torch.channels_last) if x.dim() <= 4 else x.contiguous()
    return x.squeeze()


@operator(2, complex_too=True)
def strided(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Overlapping windows; the strides are those of a contiguous tensor."""
    x = x.reshape(-1)
    return x.contiguous().as_strided((x.shape[0] - 1, 2), (1, 1))


@operator(2, complex_too=True)
def detached(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    return x * fit(y, x).detach()


@operator(6, complex_too=True)
def join(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    draw = env.random()
    x = at_least(x, 1)
    dim = draw.randrange(x.dim())
    kind = draw.randrange(7)
    if kind == 0:
        return torch.cat([x, fit(y, x).expand_as(x)], dim)
    if kind == 1:
        return torch.stack([x, x.flip(0), fit(y, x).expand_as(x)], dim)
    if kind == 2:
        return torch.cat([x, x * 2], dim)
    if kind == 3:
        first, *rest = x.split(2, dim)
        return first.sin() if draw.random() < 0.5 else first.sum(dim) + sum(each.sum(dim) for each in rest)
    if kind == 4:
        return sum(each.tanh() for each in x.unbind(dim))
    if kind == 5:
        pieces = x.chunk(3, dim)
        return pieces[-1] * 2
    return torch.cat([each * (index + 1) for index, each in enumerate(x.chunk(2, dim))], dim)


@operator(8, complex_too=True)
def write(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    """A write into a part of something new."""
    draw = env.random()
    x = at_least(x, 1)
    made = (x * 1, x.sin(), x.clone(), x + fit(y, x))[draw.randrange(4)]
    part = made
    for _ in range(draw.choice((0, 1, 1, 2))):
        dim = draw.randrange(part.dim()) if part.dim() else 0
        if not part.dim():
            break
        part = (
            part.narrow(dim, 0, max(1, part.shape[dim] // 2)),
            part.select(dim, 0),
            part[..., ::2],
            part.transpose(0, -1),
            part[1:],
            part.unsqueeze(dim),
            part.narrow(dim, part.shape[dim] // 2, 1),
        )[draw.randrange(7)]
    value = fit(y, part)
    kind = draw.randrange(9)
    if kind == 0:
        part.mul_(0.5)
    elif kind == 1:
        part.copy_(value)
    elif kind == 2:
        part.add_(value, alpha=2)
    elif kind == 3:
        part.zero_()
    elif kind == 4:
        part.mul_(value)
    elif kind == 5:
        part.copy_(env.weight("b", tuple(part.shape[-1:])))
    elif kind == 6:
        part.sin_()
    elif kind == 7:
        part.copy_(value * 2)
        made.mul_(0.5)
    else:
        part.fill_(env.weight("s", ()))
    return made


@operator(2, complex_too=True)
def write_and_go_on(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    """What was computed of a part before and after the write is used too."""
    x = at_least(x, 1)
    made = x * 2
    part = made[: max(1, x.shape[0] // 2)]
    before = part.sum()
    part.mul_(3)
    return made + before + part.sum()


@operator(6, complex_too=True)
def index(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    draw = env.random()
    x = at_least(x, 1)
    dim = draw.randrange(x.dim())
    count = x.shape[dim]
    few = env.indices("i", (4,), count)
    kind = draw.randrange(9)
    if kind == 0:
        return x.index_select(dim, few)
    if kind == 1:
        return x[few % x.shape[0]]
    if kind == 2:
        return x.gather(dim, env.indices("g", tuple(x.shape), count))
    if kind == 3:
        return x.index_add(dim, few, x.index_select(dim, few))
    if kind == 4:
        return x.scatter_add(dim, env.indices("g", tuple(x.shape), count), fit(y, x).expand_as(x).contiguous())
    if kind == 5:
        return x.index_copy(dim, torch.arange(min(2, count), device=x.device), x.narrow(dim, 0, min(2, count)) * 3)
    if kind == 6:
        return at_least(x, 2)[..., env.indices("j", (3,), x.shape[-1])] * 2
    if kind == 7:
        made = x * 1
        made[env.indices("k", (2,), x.shape[0])] = 0.5
        return made
    made = x.clone()
    made.index_put_((env.indices("k", (3,), x.shape[0]),), env.weight("v", tuple(x.shape[1:])), accumulate=True)
    return made


@operator(3)
def masked(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    kind = env.random().randrange(4)
    mask = x.detach() > 0
    if kind == 0:
        return x.masked_fill(mask, 0.0)
    if kind == 1:
        return torch.where(mask, x * 2, fit(y, x))
    if kind == 2:
        return x.masked_fill(mask, env.weight("s", ()))
    return x.tril() if x.dim() >= 2 else x * mask


@operator(2, complex_too=True)
def in_place(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    made = x * 1.5
    kind = env.random().randrange(4)
    if kind == 0:
        return made.add_(fit(y, made))
    if kind == 1:
        return made.tanh_()
    return made.mul_(x) if kind == 2 else made.tanh_().mul_(fit(y, x)).add_(x)


@operator(2)
def embedding(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    x = at_least(x, 1)
    table = env.weight("table", (7, x.shape[-1]))
    found = torch.nn.functional.embedding(env.indices("i", tuple(x.shape[:-1]), 7), table, padding_idx=0)
    return x + found


@operator(2, complex_too=True)
def pad(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    if env.random().random() < 0.5:
        return torch.nn.functional.pad(at_least(x, 1), (1, 2), value=0.5)
    return torch.nn.functional.pad(exactly(x, 3), (1, 1), mode="reflect")


@operator(2, complex_too=True)
def repeat(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    x = at_least(x, 1)
    return x.repeat(2, *[1] * (x.dim() - 1)) if env.random().random() < 0.5 else x.repeat_interleave(2, 0)
