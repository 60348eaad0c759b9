"""Self-check of the own loop: the extension, as built here, runs small tapes as the engine does. Both run each tape,
once in a process, before the first tape of a user."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...backends.signal_handlers import raise_what_a_handler_raised
from ...native.interface import Module
from ...torch_api.attributes import grad, set_grad
from ..execution import on_eager
from ..session import thread

NOT_NOW = "as things are it cannot be checked"
_Tape = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Outputs, and the tensors whose gradients are compared."""
_Log = list[Any]


def why_wrong(module: Module) -> str:
    """Return the difference that it found, or an empty text. :data:`NOT_NOW` at its beginning postpones the check.

    Hooks and modes of the calling thread do not meet the tapes of the check.
    """
    if torch.is_anomaly_enabled():  # of the process: it would print where the third backward fails
        return NOT_NOW
    try:
        return module.apart(lambda: _why_wrong(module))
    except OSError as error:
        raise_what_a_handler_raised(error)
        return f"{NOT_NOW}: {error}"


def _why_wrong(module: Module) -> str:
    for name, make in _TAPES.items():
        try:
            wanted = _run(make, None)
        except Exception as error:  # noqa: BLE001  of the engine's own: whoever asks has a backward to give back
            raise_what_a_handler_raised(error)
            return f"{NOT_NOW}: {error}"
        try:
            found = _run(make, module)
        except Exception as error:  # noqa: BLE001  whatever it is, the engine has raised nothing
            raise_what_a_handler_raised(error)
            return f"it has raised where the engine does not ({name}): {error}"
        if isinstance(found, str):
            return f"{NOT_NOW}: {found}"
        if not _same(found, wanted):
            return f"it has run a tape otherwise than the engine ({name})"
    return ""


def _run(make: Callable[[_Log], _Tape], module: Module | None) -> list[Any] | str:
    """Two backwards of a tape, of which the second frees it: what hooks saw, gradients, and how a third one fails. The
    reason where it is refused."""
    log: _Log = []
    outputs, leaves = make(log)
    wanted = tuple(outputs), tuple(torch.full_like(each, 0.5 + index) for index, each in enumerate(outputs))
    for keep in (True, False):
        roots, grads = wanted
        if module is not None:
            made = module.in_own_loop(roots, grads, keep, 0)
            if isinstance(made, str):
                return made
            roots, grads = (made[0],), (made[1],)
        on_eager(thread.here, roots, grads, keep, False, (), True, True)
        log += [None if (given := grad(each)) is None else given.clone() for each in leaves]
    try:
        on_eager(thread.here, *wanted, False, False, (), True, True)
    except RuntimeError as error:
        log.append(str(error))
    return log


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, Tensor):
        if found.layout != wanted.layout or (wanted.layout is torch.strided and found.stride() != wanted.stride()):
            return False
        return torch.equal(found.to_dense(), wanted.to_dense())
    if isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(map(_same, found, wanted))
    return bool(found == wanted)


def _leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cpu").requires_grad_()


def _shared(log: _Log) -> _Tape:
    """Leaves and values that are used several times, one of them an output; a gradient that is there."""
    x, y = _leaf(0.1, 0.7, -0.3), _leaf(1.5, -0.2, 0.9)
    set_grad(y, torch.ones_like(y))
    z = (x * y).sin() + x
    w = z * z.exp() - y + z.flip(0)
    return [w.cumsum(0), z, x], [x, y]


def _written(log: _Log) -> _Tape:
    """Writes into views."""
    x, y = _leaf(0.1, 0.7, -0.3, 0.4), _leaf(1.5, -0.2)
    z = x * 2
    z[:2].mul_(y)
    z.view(2, 2)[1] = y.exp()
    return [z.cos(), *z.chunk(2)[:1]], [x, y]


def _sparse(log: _Log) -> _Tape:
    """Sparse gradients, with dense ones and without."""
    table, other = ((torch.arange(8, dtype=torch.float32, device="cpu") / 7).view(4, 2) for _ in range(2))
    for each in (table, other):
        each.requires_grad_()
    rows = torch.tensor([1, 3, 1], device="cpu")
    both = torch.embedding(table, rows, -1, False, True) * torch.embedding(other, rows, -1, False, True)
    return [both.exp(), other.sin()], [table, other]


def _hooked(log: _Log) -> _Tape:
    """Hooks of each kind, which say in which order they are called, and change what they are given."""
    x, y = _leaf(0.1, 0.7, -0.3), _leaf(1.5, -0.2, 0.9)
    z = x.exp() * y
    w = z.sin() + z.cos() * x

    def told(*what: Any) -> None:
        log.append((torch._C._current_graph_task_id() != -1, torch.is_grad_enabled(), *what))

    def halved(name: str, gradient: Tensor) -> Tensor:
        told(name, gradient.clone())
        return gradient * 0.5

    def raised(given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        told(given)
        return (given[0] + 1, *given[1:])

    for name, each in {"x": x, "y": y, "z": z, "w": w}.items():
        each.register_hook(functools.partial(halved, name))
    for leaf in (x, y):
        leaf.register_post_accumulate_grad_hook(lambda leaf: told("leaf", grad(leaf)))
    z.retain_grad()
    node: Any = w.grad_fn
    node.register_prehook(raised)
    node.register_hook(lambda given, taken: told(given, taken))
    return [w.sum()], [x, y, z]


_TAPES: dict[str, Callable[[_Log], _Tape]] = {
    "shared values": _shared,
    "writes into views": _written,
    "sparse gradients": _sparse,
    "hooks": _hooked,
}
