"""Trains two copies of a model side by side, one on eager and one compiled, and compares what they leave behind."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compiled_autograd as ca
from compiled_autograd.cache.graphs import CompiledGraph
from compiled_autograd.policies import ledger
from compiled_autograd.threads.gate import GATE

MakeLoss = Callable[[Any], Any]
ROOT = Path(__file__).resolve().parent.parent
WAIT = 60.0
"""Seconds after which a thread counts as hung."""


class GradientsDifferError(AssertionError):
    """A gradient is not eager's."""


def same_bits(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Equal in kind, layout, strides and every bit (a NaN equals a NaN)."""
    if one is None or other is None:
        return one is other
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return False
    if one.layout is not torch.strided:
        return torch.equal(one.to_dense(), other.to_dense())
    if one.stride() != other.stride():
        return False
    return torch.equal(_as_plain(one), _as_plain(other))


def _as_plain(value: torch.Tensor) -> torch.Tensor:
    value = value.detach().resolve_conj().resolve_neg()
    if value.is_complex():
        value = torch.view_as_real(value)
    return value.nan_to_num(nan=12345.0) if value.is_floating_point() else value


def close(one: torch.Tensor | None, other: torch.Tensor | None, largest: float = 0.0, low: bool = False) -> bool:
    """Equal in kind and strides, and within rounding.

    Args:
        largest: the largest value among all gradients of the backward. One that is zero but for rounding (a bias before
            batch norm, say) has no scale of its own: its terms had that of the others, and cancelled.
        low: it was computed in 16 bits, as under autocast, whatever its own dtype.
    """
    if one is None or other is None:
        return one is other
    if (one.dtype, one.shape, one.layout, one.stride()) != (other.dtype, other.shape, other.layout, other.stride()):
        return False
    low = low or one.dtype in (torch.bfloat16, torch.float16)
    tolerance = 2e-2 if low else 1e-4 if one.dtype in (torch.float32, torch.complex64) else 1e-9
    scale = float(other.abs().max()) if other.numel() else 1.0
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * max(scale, 1e-3, 0.1 * largest))


def assert_same(
    found: Iterable[Any], wanted: Iterable[Any], names: Sequence[str] = (), bitwise: bool = True, low: bool = False
) -> None:
    """Compare two sequences of gradients."""
    found, wanted = list(found), list(wanted)
    assert len(found) == len(wanted)
    dense = [each for each in wanted if each is not None and each.layout is torch.strided and each.numel()]
    largest = 0.0 if bitwise else max((float(each.abs().max()) for each in dense), default=0.0)
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if not (same_bits(one, other) if bitwise else close(one, other, largest, low)):
            name = names[index] if index < len(names) else f"#{index}"
            raise GradientsDifferError(f"gradient {name}: {_brief(one)}, but eager gives {_brief(other)}")


def assert_close(found: Iterable[Any], wanted: Iterable[Any]) -> None:
    """Compare two sequences of gradients that were computed in another order."""
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def _brief(value: torch.Tensor | None) -> str:
    if value is None:
        return "None"
    return f"{value.dtype} {tuple(value.shape)} {value.layout} {value.flatten()[:4] if value.numel() else ''}"


def assert_grads(model: nn.Module, reference: nn.Module, bitwise: bool = True, low: bool = False) -> None:
    """Every parameter's ``.grad`` is the reference's."""
    names = [name for name, _ in model.named_parameters()]
    found = [parameter.grad for parameter in model.parameters()]
    assert_same(found, [parameter.grad for parameter in reference.parameters()], names, bitwise, low)


@dataclass
class Result:
    """What one comparison left: the session, and after each step its counts."""

    session: ca.Session
    model: Any
    history: list[ca.Stats] = field(default_factory=list)

    @property
    def stats(self) -> ca.Stats:
        return self.session.stats()

    @property
    def graph(self) -> CompiledGraph:
        assert self.session.last is not None and self.session.last.graph is not None
        return self.session.last.graph


def trials_of_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have trials decide with two rows on each side."""
    for name, value in (("SAMPLES", 8), ("MOST_SAMPLES", 8), ("ROWS", (5,))):
        monkeypatch.setattr(ledger, name, value)


def total(stats: ca.Stats) -> int:
    """The sum of all counts of which each backward has one."""
    misses = stats.shape_misses + stats.structure_misses
    return stats.hits + stats.tuning + misses + sum(stats.bypasses.values())


def expect(
    stats: ca.Stats,
    *,
    hits: int = 0,
    shape_misses: int = 0,
    structure_misses: int = 0,
    bypasses: dict[str, int] | None = None,
    failures: int = 0,
    captures: int | None = None,
    compiles: int | None = None,
    tuning: int = 0,
) -> None:
    """The counts are exactly these, and they add up."""
    found = (stats.hits, stats.shape_misses, stats.structure_misses, stats.bypasses, stats.failures)
    assert (*found, stats.tuning) == (hits, shape_misses, structure_misses, bypasses or {}, failures, tuning)
    assert stats.backwards == hits + shape_misses + structure_misses + tuning + sum((bypasses or {}).values())
    if captures is not None:
        assert stats.captures == captures
    if compiles is not None:
        assert stats.compiles == compiles


def compare(
    make_model: Callable[[], Any],
    make_loss: MakeLoss,
    backend: Any = "eager",
    steps: int = 3,
    *,
    around: Callable[[], Any] | None = None,
    learning_rate: float = 0.01,
    keep_grads: bool = False,
    bitwise: bool | None = None,
    low: bool = False,
    counts: bool = True,
    **settings: Any,
) -> Result:
    """Train an eager and a compiled copy of a model, step by step, and compare every gradient.

    Args:
        make_model: makes a module (both copies have its weights).
        make_loss: runs the forward and gives the loss, or a list of losses; its random numbers are the same for both.
        backend: of the compiled copy.
        steps: optimiser steps.
        around: a context manager for forward and backward, such as autocast.
        keep_grads: accumulate ``.grad`` over the steps.
        bitwise: compare bit for bit; by default with ``backend="eager"``.
        low: the model computes in 16 bits, whatever the dtype of its parameters.
        counts: expect one structure miss, then hits (a second miss where ``.grad`` is kept), and no failure.
        settings: further ones of ``enable``.
    """
    reference = make_model()
    model = copy.deepcopy(reference)
    bitwise = backend == "eager" if bitwise is None else bitwise
    result = Result(ca.enable(backend=backend, **settings), model)
    for step in range(steps):
        _step(reference, make_loss, step, around, None)
        _step(model, make_loss, step, around, result.session)
        assert_grads(model, reference, bitwise, low)
        result.history.append(result.stats)
        for each in (model, reference):
            _descend(each, learning_rate, keep_grads)
        if not bitwise:
            _copy_weights(reference, model)
    if counts:
        _expect_training(result, steps, keep_grads)
    return result


def _step(model: Any, make_loss: MakeLoss, step: int, around: Any, session: ca.Session | None) -> None:
    torch.manual_seed(1000 + step)
    with around() if around is not None else torch.enable_grad():
        losses = make_loss(model)
        losses = losses if isinstance(losses, (list, tuple)) else [losses]
        for index, loss in enumerate(losses):
            keep = index + 1 < len(losses)
            if session is None:
                loss.backward(retain_graph=keep)
            else:
                with session:
                    loss.backward(retain_graph=keep)


def _descend(model: Any, learning_rate: float, keep_grads: bool) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is None:
                continue
            parameter.sub_(learning_rate * parameter.grad)
            if not keep_grads:
                parameter.grad = None


def _copy_weights(source: nn.Module, target: nn.Module) -> None:
    with torch.no_grad():
        for one, other in zip(target.parameters(), source.parameters(), strict=True):
            one.copy_(other)


def _expect_training(result: Result, steps: int, keep_grads: bool) -> None:
    stats = result.stats
    misses = 2 if keep_grads and steps > 1 else 1
    expect(stats, structure_misses=misses, hits=steps - misses, captures=misses)
    after = result.history[min(misses, steps) - 1]
    assert after.compiles == stats.compiles > 0, "a later step compiled again"


def both(make: Callable[[], tuple[Any, Sequence[Any]]], backend: Any = "eager", **grad_settings: Any) -> ca.Stats:
    """``autograd.grad`` of ``make()``'s (outputs, inputs), twice compiled and once on eager, compared bit for bit.

    ``make`` is called anew, with the same seed, for each.
    """
    session = ca.enable(backend=backend)

    def run() -> Sequence[torch.Tensor | None]:
        torch.manual_seed(0)
        outputs, inputs = make()
        return torch.autograd.grad(outputs, inputs, **grad_settings)

    wanted = run()
    for _ in range(2):
        with session:
            found = run()
        assert_same(found, wanted)
    return session.stats()


@contextmanager
def another_walks() -> Iterator[None]:
    """Another thread has the seam, until the end of the block."""
    has_it, may_go = threading.Event(), threading.Event()

    def walk() -> None:
        GATE.line.append(threading.get_ident())
        with GATE.lock:
            has_it.set()
            may_go.wait(WAIT)
            GATE.line.remove(threading.get_ident())

    thread = threading.Thread(target=walk, daemon=True)
    thread.start()
    try:
        assert has_it.wait(WAIT)
        yield
    finally:
        may_go.set()
        thread.join(WAIT)


def in_threads(*works: Callable[[], Any], timeout: float = WAIT) -> list[Any]:
    """Run each in a thread of its own, and give what they gave; an error in one is raised here, and so is a hang."""
    results: list[Any] = [None] * len(works)
    errors: list[BaseException] = []

    def run(index: int, work: Callable[[], Any]) -> None:
        try:
            results[index] = work()
        except BaseException as error:  # noqa: BLE001  raised again in the test's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]
    return results


@contextmanager
def switching_every(seconds: float) -> Iterator[None]:
    """Threads of Python take turns that often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def resident_pages() -> int:
    """Of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1])


def in_subprocess(code: str, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a fresh process, with the project importable, without the user's cache on disk, and without
    the extension, which would be built in the user's folder. As in tests, what is new is compiled at once."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name in list(environ):
        if name.startswith("COMPILED_AUTOGRAD_"):
            del environ[name]
    settings = {"CACHE_DIR": "false", "EXTENSION": "off", "ON_MISS": "compile", "COMPILE_BUDGET": "inf"}
    environ |= {f"COMPILED_AUTOGRAD_{name}": value for name, value in settings.items()} | environment
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environ, timeout=timeout, check=False
    )


@contextmanager
def exact_convolutions() -> Iterator[None]:
    """Convolutions of float32 on CUDA are computed so. (PyTorch's own tests forbid to set that by its attribute.)"""
    before = torch._C._get_cudnn_allow_tf32()
    torch._C._set_cudnn_allow_tf32(False)
    try:
        yield
    finally:
        torch._C._set_cudnn_allow_tf32(before)


def mlp(width: int = 8, depth: int = 2, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Linear layers with GELU in between."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, 3)).to(dtype)


class Squares(torch.autograd.Function):
    """A function of Python that saves its argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class SineAndCosine(torch.autograd.Function):
    """Two results; for the gradient of one that is not used the engine makes zeros."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Any, of_sine: torch.Tensor, of_cosine: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return of_sine * x.cos() - of_cosine * x.sin()


class Waits(torch.autograd.Function):
    """Stays in backward until it is told to leave."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, entered: threading.Event, leave: threading.Event) -> torch.Tensor:
        ctx.events = entered, leave
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        entered, leave = ctx.events
        entered.set()
        assert leave.wait(WAIT)
        return grad, None, None
