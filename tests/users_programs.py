"""Trainings as users write them, on eager and then with the defaults of this project.

    python -m tests.users_programs hooks             one program, with each backend
    python -m tests.users_programs long FOLDER       the MLP, until the extension has been built in FOLDER, and on

Each program yields tensors at each step and logs each call of a hook. Both are compared with eager's: the tensors bit
for bit with ``backend="eager"``, and within rounding with the default backend. No count is compared: it may depend on
the clock, which decides here as it does for a user.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import compiled_autograd as ca

from .helpers import assert_same

STEPS = 40
Backward = Callable[[Tensor], None]
Program = Callable[[Backward, list[str]], Iterator[list[Tensor]]]
_SECONDS_TO_BUILD = 300.0


def _net(*sizes: int) -> nn.Sequential:
    """Linear layers of these sizes, with a GELU between them."""
    layers = [each for pair in pairwise(sizes) for each in (nn.Linear(*pair), nn.GELU())]
    return nn.Sequential(*layers[:-1])


def _left(*models: nn.Module) -> list[Tensor]:
    """Copies of all gradients, and of all parameters."""
    parameters = [parameter for model in models for parameter in model.parameters()]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [tensor.detach().clone() for tensor in (*gradients, *parameters)]


def mlp(
    backward: Backward, log: list[str], steps: Iterable[int] = range(STEPS), layers: int = 2
) -> Iterator[list[Tensor]]:
    """An MLP and AdamW, with the gradients clipped."""
    model = _net(16, *[32] * layers, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in steps:
        optimizer.zero_grad()
        x = torch.randn(24, 16)
        backward(F.mse_loss(model(x), x.sin().sum(1, keepdim=True)))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield _left(model)


def hooks(backward: Backward, log: list[str]) -> Iterator[list[Tensor]]:
    """Hooks of each kind: of tensors, leaves, nodes, modules, saved tensors and several gradients at once."""
    model = _net(8, 16, 16, 16, 1)
    first, last = model[0], model[-1]

    def note(name: str, *_: Any) -> None:
        log.append(name)

    def halve(name: str, grad: Tensor) -> Tensor:
        log.append(name)
        return grad / 2

    def post(name: str, parameter: Tensor) -> None:
        log.append(f"{name} {tuple(parameter.grad.shape)}")

    first.weight.register_hook(functools.partial(halve, "a leaf"))
    last.bias.register_post_accumulate_grad_hook(functools.partial(post, "after accumulation"))
    model[2].register_full_backward_hook(functools.partial(note, "a module"))
    model[4].register_full_backward_pre_hook(functools.partial(note, "before a module"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        handle = last.weight.register_hook(functools.partial(note, f"of step {step}"))
        hidden = model[:4](torch.randn(8, 8))
        hidden.register_hook(functools.partial(halve, "a tensor"))
        hidden.retain_grad()
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.clone(), lambda saved: saved):
            output = model[4:](hidden)
        output.grad_fn.register_hook(functools.partial(note, "a node"))
        output.grad_fn.register_prehook(functools.partial(note, "before a node"))
        together = [hidden, first.bias]
        several = torch.autograd.graph.register_multi_grad_hook(together, functools.partial(note, "several"))
        any_one = torch.autograd.graph.register_multi_grad_hook(together, functools.partial(note, "any"), mode="any")
        backward(output.square().mean())
        optimizer.step()
        yield [*_left(model), hidden.grad.clone()]
        for each in (handle, several, any_one):
            each.remove()


def accumulation(backward: Backward, log: list[str]) -> Iterator[list[Tensor]]:
    """Epochs of 22 rows in batches of 4, so that the last one has 2; a step of the optimizer for three batches."""
    model = _net(8, 16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for number, rows in enumerate((4, 4, 4, 4, 4, 2) * (STEPS // 6 + 1)):
        x = torch.randn(rows, 8)
        backward(F.mse_loss(model(x), x.sum(1, keepdim=True)) / 3)
        yield _left(model)
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


class _Scaled(torch.autograd.Function):
    """``x * scale``; None as the gradient of a scale that is closed at this step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, log: list[str], is_open: bool) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.log, ctx.is_open = log, is_open
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.log.append(f"backward {ctx.is_open}")
        x, scale = ctx.saved_tensors
        return grad * scale, (grad * x).sum(0) if ctx.is_open else None, None, None


def custom_function(backward: Backward, log: list[str]) -> Iterator[list[Tensor]]:
    """A custom function that gives None at every third step."""
    model, scale = _net(8, 16, 16, 1), nn.Parameter(torch.ones(16))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        hidden = _Scaled.apply(model[:2](torch.randn(8, 8)), scale, log, step % 3 != 2)
        backward(model[2:](hidden).square().mean())
        optimizer.step()
        yield [*_left(model), scale.detach().clone()]


def checkpoints(backward: Backward, log: list[str]) -> Iterator[list[Tensor]]:
    """Checkpointed blocks with dropout, whose masks are drawn again in the backward."""
    blocks = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2)) for _ in range(3)]
    model = nn.ModuleList(blocks)
    for number, block in enumerate(model):
        block.register_forward_hook(lambda *_, number=number: log.append(f"block {number}"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(8, 16)
        for block in model:
            x = x + checkpoint(block, x, use_reentrant=False)
        backward(x.square().mean())
        optimizer.step()
        yield _left(model)


class _Attention(nn.Module):
    """One head, with a residual: [batch, length, 16] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.scaled_dot_product_attention(*self.project(x).chunk(3, -1))


def lengths(backward: Backward, log: list[str]) -> Iterator[list[Tensor]]:
    """Sentences of 5 to 30 words, in batches of 2 to 5."""
    model = nn.Sequential(nn.Embedding(20, 16), _Attention(), nn.Linear(16, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        words = torch.randint(20, (2 + step % 4, 5 + step * 7 % 26))
        backward(F.cross_entropy(model(words).flatten(0, 1), words.flatten()))
        optimizer.step()
        yield _left(model)


def frozen(backward: Backward, log: list[str]) -> Iterator[list[Tensor]]:
    """The first layers are frozen for half of the training."""
    model = _net(8, 16, 16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        model[:3].requires_grad_(step >= STEPS // 2)
        optimizer.zero_grad()
        backward(model(torch.randn(8, 8)).square().mean())
        optimizer.step()
        yield _left(model)


def two_models(backward: Backward, log: list[str]) -> Iterator[list[Tensor]]:
    """A generator and a discriminator in turn."""
    makes, judges = _net(4, 16, 8), _net(8, 16, 1)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (makes, judges)]
    for _ in range(STEPS // 2):
        made, true = makes(torch.randn(8, 4)), torch.randn(8, 8)
        optimizers[1].zero_grad()
        backward(F.softplus(-judges(true)).mean() + F.softplus(judges(made.detach())).mean())
        optimizers[1].step()
        yield _left(judges)
        optimizers[0].zero_grad()
        backward(F.softplus(-judges(made)).mean())
        optimizers[0].step()
        yield _left(makes, judges)


def autocast(backward: Backward, log: list[str]) -> Iterator[list[Tensor]]:
    """A forward in bfloat16 by autocast; parameters and gradients are float32."""
    model = nn.Sequential(_net(16, 32, 32), nn.LayerNorm(32), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
    for _ in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(16, 16)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(x), 3 + x.sum(1, keepdim=True))
        backward(loss)
        optimizer.step()
        yield _left(model)


PROGRAMS: dict[str, Program] = {
    each.__name__: each
    for each in (mlp, hooks, accumulation, custom_function, checkpoints, lengths, frozen, two_models, autocast)
}
_LOW = ("autocast",)
"""Programs that compute in bfloat16."""


def trained(program: Program, around: Any) -> tuple[list[list[Tensor]], list[str]]:
    """The tensors of each step, and the log of the hooks. Each ``backward()`` is inside ``around``."""
    torch.manual_seed(0)
    log: list[str] = []

    def backward(loss: Tensor) -> None:
        log.append("backward()")
        with around:
            loss.backward()

    return list(program(backward, log)), log


def _compare(name: str, found: list[list[Tensor]], wanted: list[list[Tensor]], bitwise: bool) -> None:
    assert len(found) == len(wanted)
    for step, pair in enumerate(zip(found, wanted, strict=True)):
        if bitwise or name not in _LOW:
            names = [f"{number} of {name} in step {step}" for number in range(len(pair[0]))]
            assert_same(*pair, names, bitwise)
        else:  # rounding goes from step to step, and eager's gradients too are off by a hundredth of the largest
            largest = max(float(each.abs().max()) for each in pair[1])
            torch.testing.assert_close(*pair, rtol=0.0, atol=3e-2 * largest)


def main(name: str) -> None:
    """Compare one program with eager, with the default backend and with ``backend="eager"``. Each new backward is
    compiled at once: in so few steps the default would compile nothing."""
    wanted, calls = trained(PROGRAMS[name], nullcontext())
    settings: tuple[tuple[str, dict[str, Any]], ...] = (("the default", {}), ("eager", {"backend": "eager"}))
    for backend, chosen in settings:
        session = ca.enable(on_miss="compile", compile_budget=float("inf"), **chosen)
        found, log = trained(PROGRAMS[name], session)
        stats = session.stats()
        print(name, "backend", backend, stats)  # noqa: T201
        _compare(name, found, wanted, bitwise=backend == "eager")
        assert log == calls, (log, calls)
        assert stats.hits and not stats.failures, stats


def _until_built(home: Path) -> Iterator[int]:
    """Steps of a long training: 250, more while the extension is being built in ``home``, and 100. Where ``tune`` has
    decided for eager, nothing is built before some thousand steps more."""
    yield from range(250)
    until = time.monotonic() + _SECONDS_TO_BUILD
    while [*home.rglob("native")] and not [*home.rglob("native/*.so")] and time.monotonic() < until:
        time.sleep(0.1)
        yield 0
    yield from range(100)


def long(home: Path) -> None:
    """Compare a long training of the MLP with eager, and print the outcome of its first backward."""
    session, outcomes = ca.enable(on_miss="compile"), []

    def compiled(backward: Backward, log: list[str]) -> Iterator[list[Tensor]]:
        for left in mlp(backward, log, _until_built(home), layers=8):
            assert session.last is not None
            outcomes.append(session.last.outcome)
            yield left

    found, _ = trained(compiled, session)
    wanted, _ = trained(lambda backward, log: mlp(backward, log, range(len(found)), layers=8), nullcontext())
    _compare("long", found, wanted, bitwise=False)
    print(outcomes[0], session.stats())  # noqa: T201


if __name__ == "__main__":
    if sys.argv[1] == "long":
        long(Path(sys.argv[2]))
    else:
        main(sys.argv[1])
