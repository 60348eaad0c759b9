"""Eight threads train models of different kinds at once: nobody hangs, and each one's gradients are eager's."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import compiled_autograd as ca
from compiled_autograd.threads.gate import GATE

from .helpers import assert_same, mlp, switching_every, total

WAIT = 60.0
"""Seconds for all threads together, after which they count as hung."""
STEPS = 9

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def _plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def _wide_sum(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Gradients of many branches, whose sum is rounded by the order in which they come."""
    return sum(model(x * scale).sin().mean() for scale in (0.5, 1.0, 2.0, 3.0))  # type: ignore[return-value]


def _backward_in_a_hook(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A hook that differentiates a tape of its own, and scales by what it finds."""

    def hook(grad: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            inner = grad.detach().requires_grad_()
            (inner.sin() * inner).sum().backward()
        assert inner.grad is not None
        return grad + 0.1 * inner.grad

    hidden = model(x)
    hidden.register_hook(hook)
    return hidden.square().mean()


def _reentrant(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Each layer's backward runs a backward of its own."""
    x = x.clone().requires_grad_()
    for layer in model.children():
        x = checkpoint(layer, x, use_reentrant=True)
    return x.square().mean()


def _not_reentrant(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(model, x, use_reentrant=False).square().mean()


class _Cubed(torch.autograd.Function):
    """A function whose backward calls ``autograd.grad``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            inner = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad((inner**3 * grad).sum(), inner)[0]


def _function(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return _Cubed.apply(model(x)).mean()


def _retained(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A hook of C++, for which the graph runs while the engine's own call is under way."""
    hidden = model(x)
    hidden.retain_grad()
    return (hidden * 2).tanh().sum()


def _dropped(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What is dropped is drawn from a generator of this thread's own, so that others do not disturb it."""
    generator = torch.Generator().manual_seed(int(x.abs().sum() * 1000))
    return (model(x) * torch.rand(3, generator=generator)).square().mean()


LOSSES: list[Loss] = [
    _plain,
    _wide_sum,
    _backward_in_a_hook,
    _reentrant,
    _not_reentrant,
    _function,
    _dropped,
    _retained,
]


def _train(loss: Loss, model: nn.Module, batches: list[torch.Tensor], session: ca.Session | None) -> list[Any]:
    """All gradients of all steps. Two steps of three let them accumulate."""
    gradients = []
    for step, batch in enumerate(batches):
        with session or ca.disable():
            loss(model, batch).backward()
        gradients.extend(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)
        if step % 3 == 0:
            model.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad
    return gradients


class _Together:
    """Runs work in threads that begin at one moment; an error in one is raised here, and so is a hang."""

    def __init__(self, count: int) -> None:
        self.begin = threading.Barrier(count)
        self.errors: list[BaseException] = []
        self.threads: list[threading.Thread] = []

    def start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                self.begin.wait(WAIT)
                work()
            except BaseException as error:  # noqa: BLE001  raised again in the test's thread
                self.errors.append(error)

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def finish(self) -> None:
        ends = time.monotonic() + WAIT
        for thread in self.threads:
            thread.join(max(0.0, ends - time.monotonic()))
        assert not any(thread.is_alive() for thread in self.threads), "a thread hangs"
        if self.errors:
            raise self.errors[0]


@pytest.fixture
def impatient() -> Any:
    """Threads take turns a hundred times as often as usual."""
    with switching_every(5e-5):
        yield


def _check_counts(session: ca.Session) -> None:
    stats = session.stats()
    assert stats.backwards == total(stats)
    assert stats.backwards >= STEPS and stats.failures == 0
    assert set(stats.bypasses) <= {"other_thread_in_backward", "inside_eager_backward"}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("enabled", ["all", "all outside of the engine", "every other", "some of the steps"])
def test_eight_threads_train_different_models(enabled: str) -> None:
    """Every second one has the engine's own threads switched off.

    A thread that is in the engine, as ``retain_grad`` asks for, has others bypass, which are in the engine then; so how
    many of them hit is a matter of luck. Without it, nobody bypasses.
    """
    losses = [*LOSSES[:-1], _plain] if enabled == "all outside of the engine" else LOSSES
    models = [mlp(width=8, depth=1 + index % 3) for index in range(len(losses))]
    batches = [[torch.randn(5, 8) for _ in range(STEPS)] for _ in losses]
    wanted = [
        _train(loss, copy.deepcopy(model), given, None)
        for loss, model, given in zip(losses, models, batches, strict=True)
    ]
    found: list[list[Any]] = [[] for _ in losses]
    sessions = [ca.enable(backend="eager") for _ in losses]

    def work(index: int) -> None:
        on = enabled != "every other" or index % 2 == 0
        session = sessions[index] if on else None
        with torch.autograd.set_multithreading_enabled(index % 2 == 0):
            if enabled == "some of the steps":
                found[index] = _train(losses[index], models[index], batches[index][:6], session)
                found[index] += _train(losses[index], models[index], batches[index][6:], None)
            else:
                found[index] = _train(losses[index], models[index], batches[index], session)

    together = _Together(len(losses))
    for index in range(len(losses)):
        together.start(lambda index=index: work(index))  # type: ignore[misc]
    together.finish()
    for one, other in zip(found, wanted, strict=True):
        assert_same(one, other)
    for index, session in enumerate(sessions):
        if enabled.startswith("all") or (enabled == "every other" and index % 2 == 0):
            _check_counts(session)
        if enabled == "all outside of the engine":
            assert session.stats().hits >= STEPS - 3 and not session.stats().bypasses
    assert GATE.idle()


@pytest.mark.usefixtures("impatient")
def test_eight_threads_share_one_structure() -> None:
    """Each with a batch of another size: variants of one graph are added and run at once."""
    model = mlp(width=8)
    batches = [[torch.randn(2 + index, 8)] * STEPS for index in range(8)]
    wanted = [_train(_plain, copy.deepcopy(model), given, None) for given in batches]
    found: list[list[Any]] = [[] for _ in batches]
    session = ca.enable(backend="eager")
    together = _Together(len(batches))

    def work(index: int) -> None:
        found[index] = _train(_plain, copy.deepcopy(model), batches[index], session)

    for index in range(len(batches)):
        together.start(lambda index=index: work(index))  # type: ignore[misc]
    together.finish()
    for one, other in zip(found, wanted, strict=True):
        assert_same(one, other)
    _check_counts(session)
    stats = session.stats()
    assert stats.structure_misses <= 2 and stats.hits > 0, "without and with .grad"
    assert not stats.bypasses, "nobody is in the eager engine"


@pytest.mark.usefixtures("impatient")
def test_threads_whose_backwards_fail_hold_nobody_up() -> None:
    """Half of the threads raise at each step, from a hook or a function; the others train on."""

    class StopError(Exception):
        pass

    def stop(grad: torch.Tensor) -> None:
        raise StopError

    def fails(model: nn.Module, x: torch.Tensor) -> None:
        hidden = model[0](x)  # type: ignore[index]
        hidden.register_hook(stop)
        if x.shape[0] % 2:
            hidden.retain_grad()
        loss = model[1:](hidden).sum()  # type: ignore[index]
        with pytest.raises(StopError):
            loss.backward()

    models = [mlp(width=8) for _ in range(8)]
    batches = [[torch.randn(2 + index, 8) for _ in range(STEPS)] for index in range(8)]
    wanted = [_train(_plain, copy.deepcopy(models[index]), batches[index], None) for index in range(0, 8, 2)]
    found: dict[int, list[Any]] = {}
    session = ca.enable(backend="eager")
    together = _Together(8)

    def work(index: int) -> None:
        if index % 2 == 0:
            found[index] = _train(_plain, models[index], batches[index], session)
            return
        for batch in batches[index]:
            with session if index > 3 else ca.disable():
                fails(models[index], batch)

    for index in range(8):
        together.start(lambda index=index: work(index))  # type: ignore[misc]
    together.finish()
    for index, grads in enumerate(wanted):
        assert_same(found[2 * index], grads)
    _check_counts(session)
    assert GATE.idle()
